"""Training images that are prepared on the device, and the share of the time spent waiting for data."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from running import refused_before_the_start, same_but, state, summary
from tiers import rows
from torch import Tensor

import amp_core.data.images as images_module
import train
from amp_core.config.checks import check_data
from amp_core.config.errors import RunError
from amp_core.config.options import read_option
from amp_core.config.schema import DataConfig
from amp_core.data import build_data
from amp_core.data.base import uniforms
from amp_core.data.images import ArrayImages, ImageFiles, crop_flip, shift_rotate_scale
from amp_core.data.loading import to_device
from amp_core.run.meters import Clock
from amp_core.vision import import_torchvision


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


def jpegs(folder: Path, num: int = 3) -> list[str]:
    """Smooth pictures of several shapes."""
    paths = []
    for number in range(num):
        y, x = np.mgrid[0 : 60 + 7 * number, 0 : 90 - 9 * number]
        waves = [127 + 120 * np.sin(x / (7 + c) + y / (11 + number)) for c in range(3)]
        file = folder / f"{number}.jpg"
        Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8)).save(file, quality=95)
        paths.append(str(file))
    return paths


def file_parts(tmp_path: Path) -> tuple[ImageFiles, ImageFiles, list[tuple[int, int]]]:
    shared: dict[str, Any] = {"num_classes": 3, "size": 32, "augment": True, "seed": 5}
    paths = jpegs(tmp_path)
    parts = (ImageFiles(paths, np.arange(3), **shared, on_device=on) for on in (False, True))
    return *parts, [(index, number) for index in range(3) for number in range(8)]  # type: ignore[return-value]


def test_parts_cut_on_the_device_are_nearly_those_of_the_loader(tmp_path: Path) -> None:
    """The same parts, mirrored alike; pixels may be rounded elsewhere."""
    by_loader, on_device, keys = file_parts(tmp_path)
    files, labels = on_device.__getitems__(keys)
    decoded = [torch.from_numpy(np.asarray(Image.open(io.BytesIO(each[0]))).copy()).permute(2, 0, 1) for each in files]
    images, (expected, same) = on_device.cut(decoded, files), by_loader.__getitems__(keys)
    assert torch.equal(labels, same)
    pixels = (images - expected).abs() * 0.225 * 255
    assert pixels.mean() < 1 and pixels.amax() < 12, (pixels.mean(), pixels.amax())
    assert (images.flip(-1) - expected).abs().mean() > 10 * (images - expected).abs().mean()  # it would be seen


def test_files_are_decoded_into_memory_that_no_stream_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision does not wait for the present stream: it is one that was waited for, and training waits for it."""
    _, on_device, keys = file_parts(tmp_path)
    files, labels = on_device.__getitems__(keys)
    told: list[str] = []

    @contextlib.contextmanager
    def stream(side: Any) -> Iterator[None]:
        told.append("begin")
        yield
        told.append("end")

    def decode_jpeg(contents: list[Tensor], **_: Any) -> list[Tensor]:
        told.append("decode")
        return [torch.zeros(3, 100, 100, dtype=torch.uint8)] * len(contents)

    torchvision = SimpleNamespace(io=SimpleNamespace(decode_jpeg=decode_jpeg, ImageReadMode=SimpleNamespace(RGB=1)))
    monkeypatch.setattr(images_module, "import_torchvision", lambda: torchvision)
    side = SimpleNamespace(synchronize=lambda: told.append("side is idle"))
    training = SimpleNamespace(wait_stream=lambda other: told.append("training waits" if other is side else "?"))
    monkeypatch.setattr(images_module, "_decoding_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, user: told.append("kept for training"))
    on_cuda: Any = SimpleNamespace(device=torch.device("cuda", 0))
    images, same = on_device.finish((files, on_cuda))
    assert same is on_cuda and images.shape == (len(labels), 3, 32, 32)
    assert told == ["side is idle", "begin", "decode", "end", "training waits", "kept for training"]


def test_files_are_decoded_by_torchvision(tmp_path: Path) -> None:
    by_loader, on_device, keys = file_parts(tmp_path)
    try:
        content = bytearray(Path(jpegs(tmp_path)[0]).read_bytes())
        import_torchvision().io.decode_jpeg(torch.frombuffer(content, dtype=torch.uint8))
    except (RuntimeError, AttributeError):  # a torchvision built for another torch
        with pytest.raises(RunError, match=r"torchvision cannot decode on cpu.*data.prepare_on=loader"):
            on_device.finish(on_device.__getitems__(keys))
        return
    images, _ = on_device.finish(on_device.__getitems__(keys))
    assert (images - by_loader.__getitems__(keys)[0]).abs().mean() * 0.225 * 255 < 1


def test_what_is_no_jpeg_is_named(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    (tmp_path / "a.jpg").write_bytes(buffer.getvalue())
    files = ImageFiles(
        [str(tmp_path / "a.jpg")], np.zeros(1), num_classes=1, size=8, augment=True, seed=0, on_device=True
    )
    with pytest.raises(RunError, match=r"a\.jpg is a PNG file: .*use data.prepare_on=loader"):
        files.__getitems__([(0, 0)])


def test_where_the_device_cannot_prepare_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("synthetic", "text", "glyphs"):
        cfg = dataclasses.replace(DataConfig(**read_option("data", name)), prepare_on="device")
        assert any("prepare_on=device" in problem for problem in check_data(cfg)), name
    folder = tmp_path / "images"
    for part in ("train", "val"):
        (folder / part / "a").mkdir(parents=True)
        (folder / part / "b").mkdir()
        jpegs(folder / part / "a")
        jpegs(folder / part / "b")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    images = ["data=image_folder", f"data.path={folder}", "data.prepare_on=device", "model=resnet18"]
    refused_before_the_start(images, "data.prepare_on=device", capsys)
    refused_before_the_start(["recipe=contrastive", "data.prepare_on=device"], "data.prepare_on=device", capsys)


def test_evaluation_data_are_left_to_the_loader() -> None:
    cfg = dataclasses.replace(DataConfig(**read_option("data", "mnist_subset")), prepare_on="device")
    data = build_data(cfg, seed=0)
    assert data.finish is not None and data.eval.__getitems__([(0, 0)])[0].is_floating_point()


NOISY = """
import random

import numpy as np
import torch
from torch import nn

from amp_core import Amp
from amp_core.config.schema import RecipeConfig as Knobs
from amp_core.data import Data
from amp_core.models import Family
from amp_core.run.recipe import Loop, build_model, build_optimizer, build_schedule

DATA = "own"
MODELS = Family(what="a line", builders={"own": lambda: nn.Linear(3, 1)}, example={})

def noise():
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])

class Drawn:
    def __len__(self):
        return 10

    def __getitems__(self, keys):
        return torch.stack([noise() for _ in keys])

def run(cfg, env):
    data = Data(Drawn(), Drawn(), facts={}, finish=lambda batch: batch + noise())
    amp, model = Amp(cfg.amp, env.device), build_model("own", MODELS, options={})
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))

    def train_step(window):
        loss = sum((model(micro.batch + noise()).square().mean() for micro in window), torch.zeros(()))
        amp.backward(loss)
        report = amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)
        return report, loss.detach()

    loop = Loop(env, data, amp=amp, model=model, optimizer=optimizer, schedule=schedule, evaluate=lambda net: {"loss": 0.0})
    for window in loop.windows():
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    return loop.eval
"""
"""Draws from every global generator, as Mixup and packages of augmentations do: in the data set, after it, in the step."""
NOISY_YAML = """# @package _global_
defaults:
  - override /model: own
  - override /data: own
recipe: {name: noisy, length: 4 steps, best: loss, best_is: min}
"""


def test_a_run_that_draws_from_global_generators_resumes_bit_exactly(own_folder: Path) -> None:
    folder = own_folder / "mine" / "recipe"
    folder.mkdir(parents=True)
    (folder / "noisy.py").write_text(NOISY)
    (folder / "noisy.yaml").write_text(NOISY_YAML)
    common = ["--config-dir", str(folder.parent), "recipe=noisy", "device=cpu", "batch_size=4", "accumulation=2"]
    common += ["log.progress=false", "schedule.horizon=4"]

    def trained(name: str, steps: int, num_workers: int) -> Any:
        assert train.main([*common, f"run_dir={name}", f"steps={steps}", f"data.num_workers={num_workers}"]) == 0
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
    for _ in clock.waiting(loader()):
        now += 9.0
    now += 12.0  # an evaluation
    clock.pause(12.0)
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
