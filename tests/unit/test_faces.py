"""insightface's .bin files and the numbers of its verification.py, against the protocol written as plain loops."""

from __future__ import annotations

import io
import math
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from shared import script
from torch import nn

import train
from amp_core import Amp
from amp_core.config.errors import ConfigError
from amp_tools.faces import embed, read_bin, verify_pairs

PAIRS = 200


def vectors_of(seed, noise):
    rng = np.random.default_rng(seed)
    same = rng.random(PAIRS) < 0.5
    first = rng.standard_normal((PAIRS, 4))
    second = np.where(same[:, None], first + noise * rng.standard_normal((PAIRS, 4)), rng.standard_normal((PAIRS, 4)))
    vectors = np.stack([first, second], axis=1).reshape(2 * PAIRS, 4)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), same


def by_loops(vectors, same, far):
    distances = [sum((a - b) ** 2 for a, b in zip(*pair, strict=True)) for pair in vectors.reshape(PAIRS, 2, 4)]
    accuracies, tars = [], []
    for fold in range(10):
        held_out = range(fold * PAIRS // 10, (fold + 1) * PAIRS // 10)
        rest = [i for i in range(PAIRS) if i not in held_out]

        def rate(pairs, threshold, kind):
            chosen = [i for i in pairs if same[i] == kind]
            return sum(distances[i] < threshold for i in chosen) / len(chosen)

        def correct(pairs, threshold):
            return sum((distances[i] < threshold) == same[i] for i in pairs) / len(pairs)

        best, at = -1.0, 0.0
        for threshold in np.arange(0, 4, 0.01):
            if correct(rest, threshold) > best:  # the first of equals, as argmax
                best, at = correct(rest, threshold), threshold
        accuracies.append(correct(held_out, at))
        threshold = 0.0
        below, rate_below = 0.0, rate(rest, 0.0, False)
        for step in np.arange(0, 4, 0.001):
            found = rate(rest, step, False)
            if found > far:
                threshold = below + (far - rate_below) / (found - rate_below) * (step - below)
                break
            below, rate_below = step, found
        tars.append(rate(held_out, threshold, True))
    return sum(accuracies) / 10, sum(tars) / 10


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed, noise, far", [(0, 0.3, 0.1), (1, 0.6, 0.03)])
def test_accuracy_and_true_accepts_are_those_of_the_protocol(seed, noise, far):
    vectors, same = vectors_of(seed, noise)
    found, (accuracy, tar) = verify_pairs(vectors, same, far), by_loops(vectors, same, far)
    assert math.isclose(found["accuracy"], accuracy, rel_tol=1e-12) and 0.6 < accuracy < 1
    assert math.isclose(found["tar"], tar, rel_tol=1e-12) and 0 < tar < 1


def test_the_flip_test_adds_the_features_of_the_mirror_image():
    class Images:
        def __len__(self):
            return 3

        def __getitems__(self, keys):
            return torch.arange(3 * 8.0).reshape(3, 1, 2, 4)[[i for i, _ in keys]], None

    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 5))
    images = Images().__getitems__([(i, 0) for i in range(3)])[0]
    whole = (net(images) + net(images.flip(3))).detach().double().numpy()
    found = embed(net, Amp.named("fp32"), Images(), batch_size=2)
    # Each entry is a sum of 16 products in fp32, in another order for another batch.
    assert np.abs(found - whole / np.linalg.norm(whole, axis=1, keepdims=True)).max() < 16 * 2**-23
    assert np.abs(found - embed(net, Amp.named("fp32"), Images(), batch_size=3)).max() < 16 * 2**-23


def write_bin(path, num=24, protocol=4, as_numpy=False):
    rng = np.random.default_rng(0)
    files = []
    for number in range(num):
        pixels = np.full((16, 16, 3), 10 * (number // 4), dtype=np.uint8) + rng.integers(0, 9, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(file := io.BytesIO(), "JPEG")
        files.append(file.getvalue())
    same = [bool(number % 2) for number in range(num // 2)]
    content = ([np.frombuffer(file, np.uint8) for file in files], np.array(same)) if as_numpy else (files, same)
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return files, same


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("as_numpy", [False, True])
def test_a_bin_file_is_read_without_the_power_to_run_code(tmp_path, protocol, as_numpy):
    files, same = write_bin(tmp_path / "lfw.bin", protocol=protocol, as_numpy=as_numpy)
    found, is_same = read_bin(tmp_path / "lfw.bin")
    assert found == files and is_same.tolist() == same


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("content, says", [
    (([Bomb()] * 20, [True] * 10), "posix.mkdir, which could run code"),
    (([b""] * 20, [1] * 10), "of ['int']"),
    (([b""] * 19, [True] * 10), "19 images for 10 pairs"),
    (([np.zeros(1, object)] * 20, [True] * 10), "an array of O8"),
    ([], "expected (list of image files"),
])  # fmt: skip
def test_what_is_no_bin_file_is_refused_and_runs_nothing(content, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lfw.bin").write_bytes(pickle.dumps(content))
    with pytest.raises(ConfigError) as refused:
        read_bin(tmp_path / "lfw.bin")
    assert says in str(refused.value) and not (tmp_path / "exploded").exists()
    if "code" in says:  # the usual way runs it
        pickle.loads(pickle.dumps(content))
        assert (tmp_path / "exploded").exists()


def test_a_run_is_verified_on_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = ["recipe=face_recognition", "data=synthetic_identities", "data.num_samples=32", "data.num_classes=8"]
    settings += ["data.image_size=16", "batch_size=8", "recipe.embedding=16", "device=cpu", "steps=1", "run_dir=a"]
    assert train.main([*settings, "log.progress=false"]) == 0
    write_bin(tmp_path / "lfw.bin", num=80)
    capsys.readouterr()
    main = script("scripts/verify_faces.py").main
    assert main(["a", "lfw.bin"]) == 0
    assert capsys.readouterr().out.startswith("lfw: accuracy 0.")
    (tmp_path / "bad.bin").write_bytes(b"x")
    assert main(["a", "bad.bin"]) == 2 and main(["nowhere", "lfw.bin"]) == 3
    capsys.readouterr()
    (tmp_path / "other").mkdir()
    images, same = pickle.loads((tmp_path / "lfw.bin").read_bytes())
    (tmp_path / "other/lfw.bin").write_bytes(pickle.dumps((images, same)))
    assert main(["a", "lfw.bin", "other/lfw.bin"]) == 0
    found = [line.partition(": ") for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _, _ in found] == ["lfw", "other/lfw"] and found[0][2] == found[1][2]
    (tmp_path / "cut.bin").write_bytes(pickle.dumps(([images[0][:50], *images[1:]], same)))
    assert main(["a", "cut.bin"]) == 2 and "cannot read the image cut, image 0" in capsys.readouterr().err
    assert main(["a", "gone.bin"]) == 2 and capsys.readouterr().err.startswith(
        "error: gone.bin: cannot be read: No such"
    )
