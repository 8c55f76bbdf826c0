"""Policies, erasing, MixUp and CutMix: functions of (seed, epoch, sample), and the mixtures against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import train
from amp_core.config.options import read_option
from amp_core.config.schema import DataConfig
from amp_core.data import build_data
from amp_core.data.augment import Mixed, box
from amp_core.data.loading import Batches, Sampler

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"augment": name} for name in ("randaugment", "trivialaugment", "colorjitter")},
    "erasing": {"erasing": 0.9},
    "mixup": {"mixup": 0.8},
    "cutmix": {"cutmix": 1.0},
    "all": {"augment": "trivialaugment", "mixup": 0.2, "cutmix": 1.0, "erasing": 0.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for part, n in itertools.product(("train", "val"), range(12)):
        (root / part / str(n % 3)).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(n).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / part / str(n % 3) / f"{n:02d}.png")
    return root


def config(folder: Path, **settings: Any) -> DataConfig:
    values = {"path": str(folder), "image_size": 16, "num_workers": 0, **settings}
    return replace(DataConfig(**read_option("data", "image_folder")), **values)


def samples(cfg: DataConfig, size: int, workers: int, start: int = 0, stop: int = 30) -> list[tuple[Tensor, Tensor]]:
    """The samples of the endless sequence, one by one; two epochs and a half."""
    dataset = build_data(cfg, seed=5).train
    keys = iter(Sampler(len(dataset), seed=5, batch_size=size, start_sample=start))
    with Batches(dataset, itertools.islice(keys, (stop - start) // size), num_workers=workers) as batches:
        return [each for images, labels in batches for each in zip(images, labels, strict=True)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_sample_is_the_same_in_any_batch_worker_and_after_a_resume(name: str, folder: Path) -> None:
    cfg = config(folder, **SETTINGS[name])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    once = samples(cfg, 5, 0)
    assert torch.equal(torch.get_rng_state(), before)  # the generators of training steps
    others = [samples(cfg, 3, 2), samples(cfg, 10, 1)]
    for other in (*others, once[:12] + samples(cfg, 6, 0, start=12)):
        assert all(torch.equal(a, b) and torch.equal(x, y) for (a, x), (b, y) in zip(once, other, strict=True))
    plain = samples(config(folder), 5, 0)
    assert sum(not torch.equal(a, b) for (a, _), (b, _) in zip(once, plain, strict=True)) > 15
    orders = [list(Sampler(12, seed=5, batch_size=1).keys(n, 1)[0]) for n in range(24)]
    again = next(n for n in range(12, 24) if orders[n][0] == orders[0][0])
    assert not torch.equal(once[0][0], once[again][0])  # another epoch


def on_rank(rank: int, cfg: DataConfig) -> list[tuple[Tensor, Tensor]]:
    """Batches of 3 of this rank."""
    dataset = build_data(cfg, seed=5).train
    keys = iter(Sampler(len(dataset), seed=5, batch_size=3, rank=rank, world_size=2))
    with Batches(dataset, itertools.islice(keys, 5), num_workers=0) as batches:
        return [(images, labels) for images, labels in batches]


def test_a_sample_is_the_same_on_two_ranks(folder: Path, on_ranks: Any) -> None:
    cfg = config(folder, **SETTINGS["all"])
    once = samples(cfg, 3, 0)
    for rank, batches in enumerate(on_ranks(on_rank, cfg)):
        for piece, (images, labels) in enumerate(batches):
            first = 3 * (2 * piece + rank)
            assert torch.equal(images, torch.stack([image for image, _ in once[first : first + 3]]))
            assert torch.equal(labels, torch.stack([label for _, label in once[first : first + 3]]))


class Constant:
    """Image i is i everywhere, of class i."""

    def __len__(self) -> int:
        return 64

    def __getitems__(self, keys: Any) -> tuple[Tensor, Tensor]:
        labels = torch.tensor([index for index, _ in keys])
        return labels.float()[:, None, None, None].repeat(1, 3, 10, 14), labels


@pytest.mark.parametrize("mixup, cutmix", [(0.8, None), (None, 1.0), (0.8, 1.0)])
def test_labels_are_the_shares_of_the_images(mixup: float | None, cutmix: float | None) -> None:
    dataset = Mixed(Constant(), 64, mixup, cutmix, seed=1)
    images, targets = dataset.__getitems__([(index, 0) for index in range(64)])
    means = (targets.double() * torch.arange(64.0)).sum(1)
    # A pixel is off by one rounding of a product and of a sum below 64, a target by one of each below 1.
    error = (images.double().mean((1, 2, 3)) - means).abs().max()
    assert error <= 4 * 64 * torch.finfo(torch.float32).eps
    assert (targets.sum(1) - 1).abs().max() <= torch.finfo(torch.float32).eps and (targets >= 0).all()
    whole = (images == images.round()).all(dim=(1)).all(1).all(1)  # no pixel is mixed
    count = int(whole.sum())
    assert count == 64 if mixup is None else count < 5 if cutmix is None else 16 < count < 48
    logits = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    exact = -(targets.double() * torch.log_softmax(logits.double(), 1)).sum(1).mean()
    assert abs(F.cross_entropy(logits, targets).double() - exact) < 64 * torch.finfo(torch.float32).eps * exact


def test_the_box_of_cutmix_has_its_share_and_stays_inside() -> None:
    assert box(0.75, np.array([0.5, 0.5]), 100, 200) == (25, 75, 50, 150)
    assert box(0.0, np.array([0.0, 0.999]), 10, 10) == (0, 5, 5, 10)
    assert box(1.0, np.array([0.3, 0.3]), 10, 10)[0::2] == box(1.0, np.array([0.3, 0.3]), 10, 10)[1::2]


LINES = {
    "data.augment=randaugment": "is for image files, image_folder, imagenet, shards, hf, parquet; use data.augment=true",
    "data.augment=autoaugment": "expected true or false or one of randaugment, trivialaugment, colorjitter",
    "recipe=contrastive data.mixup=0.8": "labels are probabilities, which recipe=contrastive does not take",
    "recipe=language_model data.cutmix=1": "data=torch_sources holds no images with classes; leave it out",
    "data.prepare_on=device data.erasing=0.25": "data.erasing is computed by the loader",
    "data.erasing=1.5": "data.erasing=1.5: expected at most 1",
    "data.mixup=0": "data.mixup=0: expected a finite number above 0",
}


@pytest.mark.parametrize("line", LINES)
def test_augmentation_that_cannot_be_is_one_sentence(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(line.split()) == 2
    assert LINES[line] in capsys.readouterr().err


def test_a_run_with_all_of_it_learns(folder: Path, tmp_path: Path) -> None:
    options = [f"data.{key}={value}" for key, value in SETTINGS["all"].items()]
    where = ["data=image_folder", f"data.path={folder}", "data.image_size=16", "data.num_workers=0", "device=cpu"]
    assert train.main([*where, *options, "amp=fp16", "steps=2", "batch_size=4", f"run_dir={tmp_path}/run"]) == 0
