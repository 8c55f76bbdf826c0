"""Identities: images of many classes for training, and images of other classes to evaluate embeddings.

Labels of both parts start at 0 and are unrelated.
"""

from __future__ import annotations

import functools
import io
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_core.config.errors import ConfigError
from amp_core.config.schema import DataConfig
from amp_core.config.sources import Skipped, class_names, dejavu_files
from amp_core.data.base import Chosen, Data, Key, Paths, uniforms, unpack
from amp_core.data.decode import read_image
from amp_core.data.images import Batch, Synthetic, class_files, data_of, noise_pool, split_images
from amp_core.data.prepare import to_floats
from amp_core.data.records import Records

_MOST_PROBES = 20
"""Evaluation images per identity: 190 pairs."""

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
    return split_images(images, labels, labels % 5 == 4, bool(cfg.augment), seed=seed, channels=channels)


# --- image files ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Faces:
    """Aligned faces in image files. Pixels from -1 to 1; training images are flipped with probability 1/2.

    Args:
        read: returns the name of an image number, and its file: a path or the bytes.
        numbers: image numbers, passed to `read`, [N].
        labels: [N], from 0.
        size: height and width of what is given out.
        prefix: of their names.

    Raises:
        RunError: in a batch: an image cannot be read.
    """

    read: Callable[[int], tuple[str, str | bytes]]
    numbers: NDArray[np.int64]
    labels: NDArray[np.int64]
    size: int
    augment: bool
    seed: int
    prefix: str = ""

    def __post_init__(self) -> None:
        self.num_classes, self.image_shape = int(self.labels.max()) + 1, (3, self.size, self.size)

    def __len__(self) -> int:
        return len(self.labels)

    def name_of(self, index: int) -> str:
        """The name of a sample for `data.exclude`."""
        return self.prefix + cast(Any, self.read).name_of(int(self.numbers[index]))

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        indices, passes = unpack(keys)
        mirrored = self.augment & (uniforms(self.seed, indices, passes, 1)[:, 0] < 0.5)
        images = to_floats(map(self._decode, self.numbers[indices].tolist(), mirrored), self.size, 127.5)
        return images.sub_(1.0), torch.from_numpy(self.labels[indices])

    def _decode(self, number: int, mirrored: bool) -> NDArray[np.uint8]:
        from PIL import Image

        name, file = self.read(number)
        image = read_image(file if isinstance(file, str) else io.BytesIO(file), name)
        if image.size != (self.size, self.size):
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        return np.asarray(image)[:, ::-1] if mirrored else np.asarray(image)


class _Folder:
    """The images of a folder with one folder per identity."""

    def __init__(self, root: Path, skipped: Skipped) -> None:
        paths, self.labels = class_files(root, class_names(root), skipped)
        self._root, self._paths, self.numbers = root, Paths(paths), np.arange(len(paths))

    def __call__(self, number: int) -> tuple[str, str]:
        return self._paths[number], self._paths[number]

    def name_of(self, number: int) -> str:
        return os.path.relpath(self._paths[number], self._root)


class _RecordImages:
    """The images of `train.rec`."""

    def __init__(self, root: Path, skipped: Skipped) -> None:
        self._records = Records(root)
        self.numbers, self.labels = self._records.identities()

    def __call__(self, number: int) -> tuple[str, bytes]:
        return f"{self._records.path}, record {number}", self._records.read(number)[1]

    def name_of(self, number: int) -> str:
        return f"record {number}"


def _files(make: Callable[[Path, Skipped], Any], cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.path and cfg.image_size, "check_data was not asked"
    size, chosen = cfg.image_size, Chosen(cfg)

    def source(path: str, prefix: str) -> Any:
        found = make(Path(path).expanduser(), chosen.skipped)
        kept = chosen.keep(len(found.numbers), lambda index: prefix + found.name_of(int(found.numbers[index])))
        found.prefix, found.numbers, found.labels = prefix, found.numbers[kept], found.labels[kept]
        return found

    images = source(cfg.path, "")
    train = np.ones(len(images.labels), dtype=bool)
    if cfg.eval_path is not None:
        others = source(cfg.eval_path, "eval_path:")
        probes = np.ones(len(others.labels), dtype=bool)
    else:
        others, names = images, np.unique(images.labels)
        # Every tenth identity, at most a thousand: the evaluation compares pairs.
        held_out = names[max(10, -(-len(names) // 1000)) - 1 :: max(10, -(-len(names) // 1000))]
        probes = np.isin(images.labels, held_out if len(held_out) > 1 else names[-2:])
        train = ~probes
    order = np.argsort(others.labels, kind="stable")
    ranked = others.labels[order]
    probes[order] &= np.arange(len(order)) - np.searchsorted(ranked, ranked) < _MOST_PROBES  # the first ones of each

    def part(source: Any, which: NDArray[np.bool_], augment: bool) -> Faces:
        names, labels = np.unique(source.labels[which], return_inverse=True)
        if len(names) < 2:
            raise ConfigError(
                f"data.path={cfg.path}: {len(names)} identities are left to "
                f"{'train' if augment else 'evaluate'} on; expected at least 2 of each kind"
            )
        return Faces(source, source.numbers[which], labels, size, augment and bool(cfg.augment), seed, source.prefix)

    return chosen.finish(data_of(part(images, train, True), part(others, probes, False)))


# --- made up ----------------------------------------------------------------------------------------------------------

_PROBES_PER_IDENTITY = 4
_MOST_SYNTHETIC_PROBES = 4096


def _patterns(
    image_shape: tuple[int, int, int], first: int, labels: NDArray[np.int64], _: NDArray[np.float64]
) -> Tensor:
    """The product of a slow vertical and horizontal wave per channel: float32 [B, C, H, W], mean square about 1."""
    channels, height, width = image_shape
    u = uniforms(0, labels + first, np.zeros_like(labels), 4 * channels).reshape(-1, channels, 4, 1)
    down = np.sin(2 * math.pi * ((0.5 + 2 * u[:, :, 0]) * np.arange(height) / height + u[:, :, 1]))
    across = np.sin(2 * math.pi * ((0.5 + 2 * u[:, :, 2]) * np.arange(width) / width + u[:, :, 3]))
    return torch.from_numpy(2 * down[..., :, None] * across[..., None, :]).float()


def _synthetic(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    """Needs no memory per identity, so there may be millions."""
    assert cfg.num_samples and cfg.num_classes and cfg.image_size, "check_data was not asked"
    shape = (channels or 3, cfg.image_size, cfg.image_size)
    pool = noise_pool(np.random.default_rng(0), shape) / 2

    def part(num_samples: int, num_classes: int, first: int, augment: bool) -> Synthetic:
        patterns = functools.partial(_patterns, shape, first)  # of identities from `first` on
        return Synthetic(num_samples, num_classes, patterns, pool, augment, seed, stream=first << 32)

    num_probes = min(max(4 * _PROBES_PER_IDENTITY, cfg.num_samples // 4), _MOST_SYNTHETIC_PROBES)
    return data_of(
        part(cfg.num_samples, cfg.num_classes, 0, bool(cfg.augment)),
        part(num_probes, -(-num_probes // _PROBES_PER_IDENTITY), cfg.num_classes, False),
    )


# --- builders ---------------------------------------------------------------------------------------------------------

BUILDERS: dict[str, Callable[[DataConfig, int, int | None], Data]] = {
    "glyphs": _glyphs,
    "identity_folder": functools.partial(_files, _Folder),
    "records": functools.partial(_files, _RecordImages),
    "synthetic_identities": _synthetic,
}
