"""Identities: images of many classes for training, and images of other classes to evaluate embeddings.

Labels of both parts start at 0 and are unrelated.
"""

from __future__ import annotations

import functools
import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_core.config.checks import class_names, dejavu_files, images_below
from amp_core.config.errors import ConfigError, RunError
from amp_core.config.files import read_bytes
from amp_core.config.schema import DataConfig
from amp_core.data.base import Data, Key, Paths, uniforms, unpack
from amp_core.data.images import ArrayImages, Batch, open_image, shift_rotate_scale
from amp_core.data.records import Records

_MOST_PROBES = 20
"""Evaluation images per identity: 190 pairs."""
_LARGEST_IMAGE = 1 << 30
"""Bytes of a file."""

# --- glyphs -----------------------------------------------------------------------------------------------------------

_LEAST_FACES = 8
_SAME_FACES = 4


def draw_glyphs(size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """(images [N, 1, size, size], identities [N]): letters of all scripts in 8 or more DejaVu faces.

    A letter is an identity, its forms (sans, serif and mono, bold, oblique) are the images. Letters that look the same
    in 4 or more faces, like Latin A and Greek Alpha, are merged.
    """
    from fontTools.ttLib import TTFont
    from PIL import Image, ImageDraw, ImageFont

    faces = []
    for file in dejavu_files():
        with TTFont(file, lazy=True) as font:
            faces.append((file, set(font.getBestCmap() or ())))
    counts = Counter(code for _, codes in faces for code in codes)
    letters = sorted(code for code, number in counts.items() if number >= _LEAST_FACES and chr(code).isalpha())
    drawn: dict[int, list[NDArray[np.uint8]]] = {code: [] for code in letters}
    alike: Counter[tuple[int, int]] = Counter()
    for file, codes in faces:
        font = ImageFont.truetype(file, size=round(0.625 * size), layout_engine=ImageFont.Layout.BASIC)
        first: dict[bytes, int] = {}
        for code in letters:
            if code not in codes:
                continue
            image = Image.new("L", (size, size))
            ImageDraw.Draw(image).text((size / 2, 0.72 * size), chr(code), fill=255, font=font, anchor="ms")
            pixels = np.asarray(image)
            if not pixels.any():  # some letters in the cmap are empty
                continue
            drawn[code].append(pixels)
            alike[first.setdefault(pixels.tobytes(), code), code] += 1
    twins = {later for (code, later), number in alike.items() if code != later and number >= _SAME_FACES}
    kept = [drawn[code] for code in letters if code not in twins and len(drawn[code]) >= _LEAST_FACES]
    labels = np.repeat(np.arange(len(kept)), [len(images) for images in kept])
    return np.stack([image for images in kept for image in images])[:, None], labels


def _glyphs(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    images, labels = draw_glyphs(cfg.image_size or 32)
    held_out = labels % 5 == 4
    pixels = images[~held_out] / 255

    def part(chosen: NDArray[np.bool_], augment: bool) -> ArrayImages:
        names, numbers = np.unique(labels[chosen], return_inverse=True)
        return ArrayImages(
            images[chosen],
            numbers,
            num_classes=len(names),
            mean=[pixels.mean()],
            std=[pixels.std()],
            augment=shift_rotate_scale if augment else None,
            seed=seed,
            channels=channels,
        )

    return _data(part(~held_out, cfg.augment), part(held_out, False))


# --- image files ------------------------------------------------------------------------------------------------------


class Faces:
    """Aligned faces in image files. Pixels from -1 to 1; training images are flipped with probability 1/2.

    Args:
        read: returns the file name and the bytes of an image number.
        numbers: image numbers, passed to `read`.
        labels: labels of the images, [N].
        size: height and width of what is given out.
        augment: as in training.
        seed: of the augmentation.

    Raises:
        RunError: in a batch: an image cannot be read.
    """

    def __init__(
        self,
        read: Callable[[int], tuple[str, bytes]],
        numbers: NDArray[np.int64],
        labels: NDArray[np.int64],
        *,
        size: int,
        augment: bool,
        seed: int,
    ) -> None:
        self._read, self._numbers, self.labels = read, numbers, labels.astype(np.int64)
        self.num_classes, self.image_shape = int(labels.max()) + 1, (3, size, size)
        self._size, self._augment, self._seed = size, augment, seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        indices, passes = unpack(keys)
        pixels = np.empty((len(keys), self._size, self._size, 3), dtype=np.uint8)
        for row, index in enumerate(indices):
            pixels[row] = self._decode(*self._read(int(self._numbers[index])))
        if self._augment:
            mirrored = uniforms(self._seed, indices, passes, 1)[:, 0] < 0.5
            pixels[mirrored] = pixels[mirrored, :, ::-1]
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float()
        return images.div_(127.5).sub_(1.0), torch.from_numpy(self.labels[indices])

    def _decode(self, name: str, data: bytes) -> NDArray[np.uint8]:
        from PIL import Image

        with open_image(io.BytesIO(data), name) as file:
            image = file.convert("RGB")
        if image.size != (self._size, self._size):
            image = image.resize((self._size, self._size), Image.Resampling.BILINEAR)
        return np.asarray(image)


class _Folder:
    """The images of a folder with one folder per identity."""

    def __init__(self, root: Path) -> None:
        paths, labels = [], []
        for number, name in enumerate(class_names(root)):
            found = sorted(images_below(root / name))
            paths += found
            labels += [number] * len(found)
        self._paths = Paths(paths)
        self.numbers, self.labels = np.arange(len(paths)), np.array(labels, dtype=np.int64)

    def __call__(self, number: int) -> tuple[str, bytes]:
        path = self._paths[number]
        try:
            return path, read_bytes(path, _LARGEST_IMAGE)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RunError(f"cannot read the image {path}: {reason}. Replace or remove it") from error


class _RecordImages:
    """The images of `train.rec`."""

    def __init__(self, root: Path) -> None:
        self._records = Records(root)
        self.numbers, self.labels = self._records.identities()

    def __call__(self, number: int) -> tuple[str, bytes]:
        return f"{self._records.path}, record {number}", self._records.read(number)[1]


def _files(make: Callable[[Path], Any], cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.path and cfg.image_size, "check_data was not asked"
    images = make(Path(cfg.path).expanduser())
    train = np.ones(len(images.labels), dtype=bool)
    if cfg.eval_path is not None:
        others = make(Path(cfg.eval_path).expanduser())
        probes = np.ones(len(others.labels), dtype=bool)
    else:
        others, names = images, np.unique(images.labels)
        # Every tenth identity, at most a thousand: the evaluation compares pairs.
        held_out = names[max(10, -(-len(names) // 1000)) - 1 :: max(10, -(-len(names) // 1000))]
        probes = np.isin(images.labels, held_out if len(held_out) > 1 else names[-2:])
        train = ~probes
    probes &= _place_in_identity(others.labels) < _MOST_PROBES
    options = {"size": cfg.image_size, "seed": seed}

    def part(source: Any, chosen: NDArray[np.bool_], augment: bool) -> Faces:
        names, labels = np.unique(source.labels[chosen], return_inverse=True)
        if len(names) < 2:
            raise ConfigError(
                f"data.path={cfg.path}: {len(names)} identities are left to "
                f"{'train' if augment else 'evaluate'} on; expected at least 2 of each kind"
            )
        return Faces(source, source.numbers[chosen], labels, augment=augment and cfg.augment, **options)

    return _data(part(images, train, True), part(others, probes, False))


def _place_in_identity(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of earlier images of the same identity, for each image."""
    order = np.argsort(labels, kind="stable")
    _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    places = np.empty(len(labels), dtype=np.int64)
    places[order] = np.arange(len(labels)) - np.repeat(first, counts)
    return places


# --- made up ----------------------------------------------------------------------------------------------------------

_PROBES_PER_IDENTITY = 4
_MOST_SYNTHETIC_PROBES = 4096


class SyntheticIdentities:
    """Synthetic and learnable: a pattern per identity, generated on demand, plus noise from a pool.

    Needs no memory per identity, so there may be millions.

    Args:
        num_samples: its length.
        num_classes: number of identities; None: one for each 4 samples.
        first: number of the first identity; parts of one data set do not overlap.
        image_shape: (C, H, W).
        augment: different noise in each epoch.
        seed: of the augmentation.
    """

    _POOL = 61

    def __init__(
        self,
        num_samples: int,
        *,
        num_classes: int | None,
        first: int,
        image_shape: tuple[int, int, int],
        augment: bool,
        seed: int,
    ) -> None:
        self.num_classes = num_classes or -(-num_samples // _PROBES_PER_IDENTITY)
        self.image_shape = image_shape
        self._num_samples, self._first, self._augment, self._seed = num_samples, first, augment, seed
        rng = np.random.default_rng(0)
        self._noise = torch.from_numpy(rng.standard_normal((self._POOL, *image_shape), dtype=np.float32))

    def __len__(self) -> int:
        return self._num_samples

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        indices, passes = unpack(keys)
        labels = indices % self.num_classes
        seed, passes = (self._seed, passes) if self._augment else (0, np.zeros_like(passes))
        u = uniforms(seed, indices + (self._first << 32), passes, 1)
        noise = self._noise[torch.from_numpy((self._POOL * u[:, 0]).astype(np.int64))]
        return self._patterns(labels + self._first).add(noise, alpha=0.5), torch.from_numpy(labels)

    def _patterns(self, identities: NDArray[np.int64]) -> Tensor:
        """The product of a slow vertical and horizontal wave per channel: float32 [B, C, H, W], mean square about 1."""
        channels, height, width = self.image_shape
        u = uniforms(0, identities, np.zeros_like(identities), 4 * channels).reshape(-1, channels, 4, 1)
        down = np.sin(2 * math.pi * ((0.5 + 2 * u[:, :, 0]) * np.arange(height) / height + u[:, :, 1]))
        across = np.sin(2 * math.pi * ((0.5 + 2 * u[:, :, 2]) * np.arange(width) / width + u[:, :, 3]))
        return torch.from_numpy(2 * down[..., :, None] * across[..., None, :]).float()


def _synthetic(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.num_samples and cfg.num_classes and cfg.image_size, "check_data was not asked"
    make = functools.partial(
        SyntheticIdentities, image_shape=(channels or 3, cfg.image_size, cfg.image_size), seed=seed
    )
    num_probes = min(max(4 * _PROBES_PER_IDENTITY, cfg.num_samples // 4), _MOST_SYNTHETIC_PROBES)
    return _data(
        make(cfg.num_samples, num_classes=cfg.num_classes, first=0, augment=cfg.augment),
        make(num_probes, num_classes=None, first=cfg.num_classes, augment=False),
    )


# --- builders ---------------------------------------------------------------------------------------------------------


def _data(train: Any, probes: Any) -> Data:
    return Data(train, probes, {"num_classes": train.num_classes, "image_shape": train.image_shape})


BUILDERS: dict[str, Callable[[DataConfig, int, int | None], Data]] = {
    "glyphs": _glyphs,
    "identity_folder": functools.partial(_files, _Folder),
    "records": functools.partial(_files, _RecordImages),
    "synthetic_identities": _synthetic,
}
