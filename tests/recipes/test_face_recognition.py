"""The data of identities, the backbones, verification, and the recipe around Partial FC."""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from record_files import write_faces, write_records
from running import differing, lines, state, summary
from shared import data_config
from torch import nn

import train
from amp_core.config.checks import check_data
from amp_core.config.errors import ConfigError, RunError
from amp_core.data import build_data
from amp_core.data.identities import draw_glyphs
from amp_core.data.records import Records
from amp_core.heads.verification import choose_pairs, verify
from amp_core.lowp.islands import island_names
from amp_core.models import build_model
from recipes.face_recognition import MODELS

pytestmark = pytest.mark.usefixtures("own_folder")

ROOT = Path(__file__).resolve().parents[2]
MAGIC = struct.pack("<I", 0xCED7230A)


@pytest.mark.slow
def test_no_two_identities_of_the_glyphs_look_alike():
    images, labels = draw_glyphs(32)
    assert images.dtype == np.uint8 and images.shape[1:] == (1, 32, 32)
    assert images.any((1, 2, 3)).all()
    names, counts = np.unique(labels, return_counts=True)
    assert np.array_equal(names, np.arange(len(names))) and len(names) > 1500
    assert set(counts) <= set(range(8, 13))
    owners: dict[bytes, set[int]] = {}
    for image, label in zip(images, labels, strict=True):
        owners.setdefault(image.tobytes(), set()).add(int(label))
    shared = Counter(pair for found in owners.values() for pair in [tuple(sorted(found))] if len(pair) > 1)
    assert max(shared.values()) < 4


@pytest.mark.slow
def test_glyphs_that_are_compared_were_not_trained_on():
    data = build_data(data_config("glyphs"), seed=0)
    assert data.facts == {"num_classes": data.train.num_classes, "image_shape": (1, 32, 32)}
    assert data.train.labels.max() + 1 == data.train.num_classes
    seen = {image.tobytes() for image in data.train.images}
    probes = [image.tobytes() in seen for image in data.eval.images]
    assert np.mean(probes) < 0.01  # look-alikes in single faces
    assert len(data.eval) == pytest.approx(len(data.train) / 4, rel=0.02)
    images, labels = data.train.__getitems__([(5, 0), (17, 3)])
    assert images.shape == (2, 1, 32, 32) and images.dtype == torch.float32 and labels.dtype == torch.int64
    assert torch.equal(images[1], data.train.__getitems__([(17, 3)])[0][0])
    again = build_data(data_config("glyphs"), seed=1)
    assert np.array_equal(again.train.images, data.train.images) and not torch.equal(
        again.train.__getitems__([(5, 0)])[0], images[:1]
    )
    assert build_data(data_config("glyphs", image_size=40), seed=0, channels=3).facts["image_shape"] == (3, 40, 40)


def image_file(seed, size=(20, 20), format="PNG"):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format)
    return pixels, buffer.getvalue()


@pytest.mark.parametrize(
    "payload",
    [b"", b"x", b"1234", MAGIC, b"ab" + MAGIC, b"abcd" + MAGIC, MAGIC * 3 + b"e", b"abcd" + MAGIC + b"efghi" + MAGIC],
)
@pytest.mark.parametrize("labels", [7.0, (3.0, 4.0, 5.0)])
def test_records_read_what_they_write(tmp_path, payload, labels):
    write_records(tmp_path, [(0, 1.0, b"before"), (9, labels, payload), (4, 2.0, b"after")])
    records = Records(tmp_path)
    assert records.keys.tolist() == [0, 4, 9]
    found, data = pickle.loads(pickle.dumps(records)).read(9)
    assert found.tolist() == (list(labels) if isinstance(labels, tuple) else [labels]) and data == payload
    assert records.read(4)[1] == b"after" and (tmp_path / "train.rec").stat().st_size % 4 == 0


def test_a_record_is_the_bytes_that_mxnet_writes(tmp_path):
    write_records(tmp_path, [(1, 2.0, b"jpeg"), (2, (1.0, 2.0), b"ab" + MAGIC + b"cd" + MAGIC + b"end")])
    header = struct.pack("<IfQQ", 0, 2.0, 1, 0)
    first = MAGIC + struct.pack("<I", 28) + header + b"jpeg"
    several = struct.pack("<IfQQ", 2, 0.0, 2, 0) + struct.pack("<ff", 1.0, 2.0) + b"ab" + MAGIC + b"cd"
    # The first one inside is at byte 34 of the data and stays; the second is at 40, a multiple of 4, and is a cut.
    second = MAGIC + struct.pack("<I", 1 << 29 | 40) + several + MAGIC + struct.pack("<I", 3 << 29 | 3) + b"end\0"
    assert (tmp_path / "train.rec").read_bytes() == first + second
    assert (tmp_path / "train.idx").read_text() == "1\t0\n2\t36\n"


def faces(num_identities, images_each=5, format="PNG"):
    return [[image_file(100 * i + j, format=format)[1] for j in range(images_each)] for i in range(num_identities)]


@pytest.mark.parametrize("layout", ["insightface", "no identities", "no header", "label arrays"])
def test_identities_are_found_in_every_layout(tmp_path, layout):
    files = faces(4, 3)
    flat = [(i, image) for i, images in enumerate(files) for image in images]
    if layout == "insightface":
        write_faces(tmp_path, files)
    else:
        label = (lambda i: (float(i), 0.0)) if layout == "label arrays" else float
        images = [(key, label(i), file) for key, (i, file) in enumerate(flat, 1)]
        write_records(tmp_path, images if layout == "no header" else [(0, (13.0, 13.0), b""), *images])
    records = Records(tmp_path)
    keys, labels = records.identities()
    assert keys.tolist() == list(range(1, 13)) and labels.tolist() == [i for i, _ in flat]
    assert [records.read(key)[1] for key in keys] == [image for _, image in flat]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 3e38])
@pytest.mark.parametrize("where", ["image", "several labels", "header", "identity"])
def test_labels_that_are_no_numbers_of_identities_are_named(tmp_path, value, where):
    """In each place where labels stand: images with one or several, record 0, the record of an identity."""
    records = {1: (1, 0.0, b"a"), 2: (2, (1.0, 5.0), b"b")}
    if where in ("header", "identity"):
        records |= {0: (0, (3.0, 5.0), b""), 3: (3, (1.0, 2.0), b""), 4: (4, (2.0, 3.0), b"")}
    key = {"image": 1, "several labels": 2, "header": 0, "identity": 4}[where]
    good = records[key]
    records[key] = (key, value if where == "image" else (value, 5.0), good[2])
    write_records(tmp_path, [records[number] for number in sorted(records)])
    expected = f"record {key} has the label {value:g}: expected"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Records(tmp_path).identities()
    records[key] = good
    write_records(tmp_path, [records[number] for number in sorted(records)])
    assert Records(tmp_path).identities()[1].tolist() == [0, 1]


def test_a_damaged_file_is_named(tmp_path):
    write_faces(tmp_path, faces(2))
    whole = (tmp_path / "train.rec").read_bytes()
    records = Records(tmp_path)
    with pytest.raises(RunError, match="no record 99"):
        records.read(99)
    (tmp_path / "train.rec").write_bytes(whole.replace(MAGIC, bytes(4)))
    with pytest.raises(RunError, match="record 3 cannot be read: it does not begin"):
        records.read(3)
    (tmp_path / "train.rec").write_bytes(whole[:-300])
    with pytest.raises(RunError, match="record 10 cannot be read: the file ends within it"):
        records.read(10)
    (tmp_path / "train.rec").write_bytes(whole[:300])
    with pytest.raises(ConfigError, match=r"train\.idx does not belong to train\.rec"):
        Records(tmp_path)
    (tmp_path / "train.idx").write_text("rubbish")
    with pytest.raises(ConfigError, match=r"train\.idx cannot be read"):
        Records(tmp_path)


def test_a_folder_and_records_of_the_same_images_are_the_same_data(tmp_path):
    files = faces(12)
    write_faces(tmp_path / "records", files)
    for i, images in enumerate(files):
        folder = tmp_path / "folder" / f"person {i:02d}"
        folder.mkdir(parents=True)
        for j, image in enumerate(images):
            (folder / f"{j}.png").write_bytes(image)
    pairs = (("identity_folder", "folder"), ("records", "records"))
    both = [build_data(data_config(name, path=str(tmp_path / kind), image_size=20), seed=1) for name, kind in pairs]
    for part in ("train", "eval"):
        one, other = (getattr(data, part) for data in both)
        keys = [(i, 2) for i in range(len(one))]
        for a, b in zip(one.__getitems__(keys), pickle.loads(pickle.dumps(other)).__getitems__(keys), strict=True):
            assert torch.equal(a, b)
    # Of 12 identities every tenth would be one: two are held out.
    assert both[0].facts == {"num_classes": 10, "image_shape": (3, 20, 20)}
    assert len(both[0].train) == 50 and len(both[0].eval) == 10
    pixels = image_file(0)[0].transpose(2, 0, 1) / 127.5 - 1
    views = [both[0].train.__getitems__([(0, number)])[0][0].numpy() for number in range(8)]
    mirrored = [bool(np.allclose(view, pixels[..., ::-1], atol=1e-6)) for view in views]
    straight = [bool(np.allclose(view, pixels, atol=1e-6)) for view in views]
    assert [a != b for a, b in zip(mirrored, straight, strict=True)] == [True] * 8 and 0 < sum(mirrored) < 8
    root = str(tmp_path / "records")
    one = build_data(data_config("records", path=root, eval_path=root), seed=1)
    assert one.facts["num_classes"] == 12 and len(one.eval) == 60 and one.facts["image_shape"] == (3, 112, 112)


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    write_faces(tmp_path, [[b"no image"] * 2 for _ in range(4)])
    data = build_data(data_config("records", path=str(tmp_path)), seed=0)
    with pytest.raises(RunError, match=r"train\.rec, record 1"):
        data.train.__getitems__([(0, 0)])


def test_bad_settings_are_named_before_the_start(tmp_path):
    (tmp_path / "one").mkdir()
    problems = check_data(data_config("records", path=str(tmp_path), eval_path="/nowhere"), "identities")
    assert len(problems) == 2 and "no train.rec and no train.idx" in problems[0]
    assert "data.eval_path=/nowhere" in problems[1]
    assert "has 1 folders" in check_data(data_config("identity_folder", path=str(tmp_path)))[0]


def test_synthetic_identities_cost_nothing_each():
    cfg = data_config("synthetic_identities", num_classes=3_000_000, num_samples=6_000_000, image_size=8)
    data = build_data(cfg, seed=0)
    assert data.facts == {"num_classes": 3_000_000, "image_shape": (3, 8, 8)}
    keys = [(2_999_999, 0), (5_999_999, 0), (5, 0)]
    images, labels = data.train.__getitems__(keys)
    assert labels.tolist() == [2_999_999, 2_999_999, 5]
    assert torch.equal(images[1], data.train.__getitems__(keys[1:])[0][0])
    close = F.cosine_similarity(images.flatten(1)[[0, 0]], images.flatten(1)[[1, 2]])
    assert close[0] > 0.5 > close[1]
    assert len(data.eval) == 4096 and len(pickle.dumps(data.train)) < 200_000


@pytest.mark.parametrize(
    "name, millions", [("iresnet18", 24.03), ("iresnet34", 34.14), ("iresnet50", 43.59), ("iresnet100", 65.16)]
)
def test_backbones_are_those_of_insightface(name, millions):
    with torch.device("meta"):
        net = build_model(name, MODELS, options={}, **MODELS.example)
        features = net.eval()(torch.empty(2, 3, 112, 112))
    assert features.shape == (2, 512)
    assert sum(p.numel() for p in net.parameters()) / 1e6 == pytest.approx(millions, abs=0.006)
    names = set(net.state_dict())
    assert {"conv1.weight", "layer1.0.downsample.1.weight", "layer4.1.prelu.weight", "bn2.bias", "fc.weight"} <= names
    assert {"features.running_var", "layer3.1.bn3.running_mean", "layer2.0.conv2.weight"} <= names
    assert not net.features.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["glyphnet", "iresnet18"])
def test_only_the_last_layer_is_an_island_and_features_are_float32(name, dtype):
    net = build_model(name, MODELS, options={}, image_shape=(1, 32, 32), embedding=8)
    seen = {}
    for path, module in net.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm1d):
            module.register_forward_hook(lambda m, inputs, output, path=path: seen.update({path: output.dtype}))
    with torch.autocast("cpu", dtype=dtype):
        features = net(torch.randn(2, 1, 32, 32))
    assert features.dtype == torch.float32 and features.shape == (2, 8)
    assert {path for path, found in seen.items() if found == torch.float32} == set(island_names(net))
    assert {found for path, found in seen.items() if path not in island_names(net)} == {dtype}


def test_pairs_are_all_that_there_are_and_right():
    labels = np.array([3, 1, 3, 3, 1, 7])
    same, different = choose_pairs(labels)
    assert {tuple(sorted(p)) for p in same.tolist()} == {(0, 2), (0, 3), (2, 3), (1, 4)}
    assert len(different) == 15 - 4 and (labels[different[:, 0]] != labels[different[:, 1]]).all()
    assert all(np.array_equal(a, b) for a, b in zip(choose_pairs(labels), (same, different), strict=True))
    labels = np.arange(300).repeat(40)
    same, different = choose_pairs(labels)
    assert len(same) == 20_000 and len(different) == 200_000
    assert (labels[same[:, 0]] == labels[same[:, 1]]).all() and len(np.unique(np.sort(same, 1), axis=0)) == 20_000
    with pytest.raises(ValueError, match="two identities"):
        choose_pairs(np.arange(5))


@pytest.mark.slow
def test_metrics_are_what_their_definitions_say():
    labels = torch.arange(60).repeat_interleave(5)
    centres = torch.randn(60, 16)
    embeddings = centres[labels] + 0.7 * torch.randn(300, 16)
    metrics = verify(embeddings, labels, scale=16.0)
    unit = F.normalize(embeddings)
    cosine = unit @ unit.T
    same = labels[:, None] == labels
    upper = torch.ones_like(same).triu(1)
    accepted, refused = cosine[same & upper].numpy(), cosine[~same & upper].numpy()
    for name, rate in (("tar_at_far_1e-2", 1e-2), ("tar_at_far_1e-3", 1e-3)):
        threshold = np.sort(refused)[-int(rate * len(refused)) - 1]
        assert (refused > threshold).mean() <= rate
        assert metrics[name] == pytest.approx((accepted > threshold).mean(), abs=2e-3)
    best = max(((accepted > t).mean() + (refused <= t).mean()) / 2 for t in np.linspace(-1, 1, 2001))
    assert metrics["accuracy"] == pytest.approx(best, abs=0.02)
    logits = torch.empty(300, 60)
    for image in range(300):
        for identity in range(60):
            mine = (labels == identity) & (torch.arange(300) != image)
            logits[image, identity] = F.normalize(unit[mine].sum(0), dim=0) @ unit[image]
    assert metrics["loss"] == pytest.approx(F.cross_entropy(16 * logits, labels).item(), rel=1e-5)
    assert metrics["rank1"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())


def test_perfect_random_and_broken_embeddings():
    labels = torch.arange(50).repeat_interleave(4)
    perfect = verify(torch.eye(50)[labels], labels, scale=64.0)
    assert perfect["accuracy"] == perfect["tar_at_far_1e-3"] == perfect["rank1"] == 1.0
    random = verify(torch.randn(200, 50), labels, scale=64.0)
    assert random["accuracy"] == pytest.approx(0.5, abs=0.06) and random["tar_at_far_1e-2"] < 0.05
    broken = verify(torch.full((200, 50), torch.nan), labels, scale=64.0)
    assert all(np.isfinite(value) for value in broken.values()) and broken["accuracy"] <= 0.5


COMMON = ["recipe=face_recognition", "device=cpu", "log.progress=false", "save_every=1000", "eval_every=1000"]
SMALL = [*COMMON, "data=synthetic_identities", "data.num_samples=160", "data.num_classes=40", "data.image_size=8"]
SMALL += ["batch_size=8", "recipe.embedding=16", "optimizer=sgd_face", "log_every=1"]


def run(*overrides, code=0, settings=SMALL):
    assert train.main([*settings, *overrides]) == code


def test_the_scale_starts_at_the_batch_and_grows_to_its_cap_as_in_insightface():
    settings = ["amp=fp16_capped", "amp.init_scale=${batch_size}", "amp.growth_interval=1"]
    run("run_dir=a", "steps=10", *settings)
    # A line has the scale after its step: doubled by each, from 8 to 128 times 8, and no further.
    assert [line["loss_scale"] for line in lines("a")[:10]] == [min(8 * 2**step, 8 * 128) for step in range(1, 11)]
    assert summary("a")["skipped"] == 0


def test_clip_only_leaves_the_head_as_without_clipping_and_the_backbone_as_with_it(capsys):
    sgd, clip = ["optimizer=sgd", "steps=1", "amp=bf16"], ["clip=norm", "clip.max_norm=1e-3"]
    run("run_dir=free", *sgd)
    run("run_dir=both", *sgd, *clip)
    run("run_dir=one", *sgd, *clip, "recipe.clip_only=backbone")
    free, both, one = map(state, ("free", "both", "one"))
    assert not differing(one["model"], both["model"]) and differing(one["model"], free["model"])
    assert not differing(one["head"], free["head"]) and differing(both["head"], free["head"])
    run("run_dir=x", *sgd, "recipe.clip_only=backbone", code=2)
    assert "recipe.clip_only=backbone: has no effect with clip=none" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sampled_run_on_two_ranks_skips_together_and_goes_on_on_one():
    settings = ["run_dir=a", "recipe.sample_rate=0.5", "accumulation=2", "schedule.horizon=6", "amp=fp16"]
    settings += ["amp.dynamic=false", "amp.init_scale=256"]
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, *settings, "steps=3", "layout=ddp"]
    command += ["layout.nproc_per_node=2", "debug.inject={where: batch, step: 3, rank: 1}"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    saved = state("a")
    assert summary("a")["skipped"] == 1 and saved["schedule"]["num_taken"] == saved["head_schedule"]["num_taken"] == 2
    assert saved["head"]["weight"].shape == saved["head_optimizer"]["rows"]["momentum_buffer"].shape == (40, 16)
    assert saved["head"]["weight"].isfinite().all()
    run(*settings, "steps=6")
    assert state("a")["progress"]["samples"] == 6 * 32
    assert state("a")["head_schedule"]["num_taken"] == 5
    assert not torch.equal(saved["head"]["weight"], state("a")["head"]["weight"])
