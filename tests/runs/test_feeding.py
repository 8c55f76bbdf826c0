"""Training images that are prepared on the device, and the share of the time spent waiting for data."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import refused_before_the_start, same_but, state, summary
from test_recipes import run
from tiers import rows

import train
from amp_core.config.checks import check_data
from amp_core.config.options import read_option
from amp_core.config.schema import DataConfig
from amp_core.data import build_data
from amp_core.data.base import uniforms
from amp_core.data.images import ArrayImages, crop_flip, shift_rotate_scale
from amp_core.data.loading import to_device
from amp_core.run.meters import Clock
from recipes import classification


def stored(augment: Any, **options: Any) -> tuple[ArrayImages, ArrayImages]:
    """The same images, prepared by the loader and on the device."""
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    shared = {"num_classes": 5, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.25], "augment": augment, "seed": 3}
    parts = (ArrayImages(pixels, np.arange(20) % 5, on_device=on, **shared, **options) for on in (False, True))
    return tuple(parts)  # type: ignore[return-value]


@pytest.mark.parametrize("augment", [crop_flip, shift_rotate_scale, None], ids=["crop", "affine", "none"])
@pytest.mark.parametrize("options", [{}, {"size": 40}], ids=["as stored", "resized"])
def test_images_are_the_same_bits_wherever_they_are_prepared(augment: Any, options: dict[str, int]) -> None:
    by_loader, on_device = stored(augment, **options)
    keys = [(3, 0), (3, 1), (19, 7), (0, 2)]
    raw = on_device.__getitems__(keys)
    assert raw[0].dtype is torch.uint8  # a quarter of the bytes to copy
    for channels_last in (False, True):
        (found,) = to_device([raw], "cpu", finish=on_device.finish, channels_last=channels_last)
        assert all(map(torch.equal, found, by_loader.__getitems__(keys)))
        assert found[0].is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_crops_and_flips_move_bits_of_any_dtype() -> None:
    drawn = crop_flip.draw(uniforms(0, np.arange(6), np.zeros(6), 4))
    pixels = torch.randint(256, (6, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(crop_flip.apply(pixels, drawn).float(), crop_flip.apply(pixels.float(), drawn))
    assert not torch.equal(crop_flip.apply(pixels, drawn), pixels)


@pytest.mark.parametrize("num_workers", rows([0, 2], 0))
def test_a_run_is_the_same_bits_wherever_images_are_prepared(tmp_path: Path, num_workers: int) -> None:
    common = ["device=cpu", "amp=bf16", "data=mnist_subset", "model=mlp", "batch_size=8", "accumulation=2", "steps=3"]
    common += ["log.progress=false", "perf.channels_last=true", f"data.num_workers={num_workers}"]
    for where in ("loader", "device"):
        assert train.main([*common, f"data.prepare_on={where}", f"run_dir={tmp_path / where}"]) == 0
    assert not same_but(state(tmp_path / "loader"), state(tmp_path / "device"))
    assert summary(tmp_path / "loader")["eval"] == summary(tmp_path / "device")["eval"]


def test_where_the_device_cannot_prepare_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("synthetic", "text", "glyphs", "image_folder"):
        cfg = dataclasses.replace(DataConfig(**read_option("data", name)), prepare_on="device")
        assert any("prepare_on=device" in problem for problem in check_data(cfg)), name
    monkeypatch.chdir(tmp_path)
    refused_before_the_start(["recipe=contrastive", "data.prepare_on=device"], "data.prepare_on=device", capsys)


def test_evaluation_data_are_left_to_the_loader() -> None:
    cfg = dataclasses.replace(DataConfig(**read_option("data", "mnist_subset")), prepare_on="device")
    data = build_data(cfg, seed=0)
    assert data.finish is not None and data.eval.__getitems__([(0, 0)])[0].is_floating_point()


def noise() -> float:
    """Of every global generator, as Mixup and packages of augmentations draw."""
    return random.random() + np.random.rand() + torch.rand(()).item()


class Noisy:
    """A data set that draws."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, keys: Any) -> Any:
        images, *rest = self.data.__getitems__(keys)
        return (images + noise(), *rest)


def test_a_run_that_draws_from_global_generators_resumes_bit_exactly(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the data set, after it, and in the step."""
    build, loss = classification.build_data, classification.F.cross_entropy

    def build_noisy(*args: Any, **kwargs: Any) -> Any:
        data = build(*args, **kwargs)
        return dataclasses.replace(data, train=Noisy(data.train), finish=lambda batch: (batch[0] + noise(), *batch[1:]))

    monkeypatch.setattr(classification, "build_data", build_noisy)
    monkeypatch.setattr(classification.F, "cross_entropy", lambda *args, **named: loss(*args, **named) * noise())

    def trained(name: str, steps: int, num_workers: int) -> Any:
        run("classification", name, f"steps={steps}", "schedule.horizon=4", f"data.num_workers={num_workers}")
        return state(name)

    whole = trained("whole", 4, 0)
    for num_workers in (0, 2):
        trained(f"parts{num_workers}", 2, num_workers)
        assert not same_but(trained(f"parts{num_workers}", 4, num_workers), whole)


def test_the_clock_tells_waiting_from_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("amp_core.run.meters.time.monotonic", lambda: now)

    def loader() -> Any:
        nonlocal now
        for number in range(4):
            now += 3.0
            yield number

    clock = Clock()
    for _ in clock.timed(loader()):
        now += 9.0
    now += 12.0  # an evaluation
    clock.exclude(12.0)
    assert clock.lap(96) == (2.0, 0.25)
    now += 8.0
    assert clock.lap(96) == (0.0, 0.0)
    assert clock.overall(0)[1] == 12 / 56


def test_channels_last_without_convolutions_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    for model, is_said in (("mlp", True), ("cnn", False)):
        caplog.clear()
        assert train.main(["device=cpu", "dry_run=true", "perf.channels_last=true", f"model={model}"]) == 0
        assert ("perf.channels_last=true has no effect" in caplog.text) == is_said


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_crops_the_same_bits() -> None:
    by_loader, on_device = stored(crop_flip)
    keys = [(n, 1) for n in range(20)]
    source = [on_device.__getitems__(keys) for _ in range(3)]
    for images, _ in to_device(source, "cuda", ahead=2, finish=on_device.finish, channels_last=True):
        assert torch.allclose(images.cpu(), by_loader.__getitems__(keys)[0], rtol=1e-6, atol=1e-6)
    pixels, drawn = torch.randint(256, (6, 3, 16, 16), dtype=torch.uint8), crop_flip.draw(np.random.rand(6, 4))
    assert torch.equal(crop_flip.apply(pixels.cuda(), drawn.cuda()).cpu(), crop_flip.apply(pixels, drawn))
