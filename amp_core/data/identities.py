"""Identities: images of many classes for training, and images of other classes to evaluate embeddings.

Labels of both parts start at 0 and are unrelated.
"""

from __future__ import annotations

import functools
import io
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_core.config.errors import ConfigError
from amp_core.config.schema import DataConfig
from amp_core.config.sources import class_names, dejavu_files
from amp_core.data.base import Chosen, Data, Paths, uniforms
from amp_core.data.images import ImageFiles, Synthetic, class_files, data_of, noise_pool, split_images
from amp_core.data.prepare import ALIGNED
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


def build_glyphs(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    images, labels = draw_glyphs(cfg.image_size or 32)
    return split_images(images, labels, labels % 5 == 4, bool(cfg.augment), seed=seed, channels=channels)


# --- image files ------------------------------------------------------------------------------------------------------


class _RecordImages:
    """The images of `train.rec` with these keys."""

    def __init__(self, records: Records, keys: NDArray[np.int64]) -> None:
        self._records, self._keys = records, keys

    def name_of(self, index: int) -> str:
        return f"record {self._keys[index]}"

    def opened(self, index: int) -> tuple[Any, str]:
        content = self._records.read(int(self._keys[index]))[1]
        return io.BytesIO(content), f"{self._records.path}, {self.name_of(index)}"


def build_files(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    """Aligned faces. Pixels from -1 to 1; training images are flipped with probability 1/2."""
    assert cfg.path and cfg.image_size, "check_data was not asked"
    size, chosen = cfg.image_size, Chosen(cfg)

    def images_of(path: str, prefix: str) -> ImageFiles:
        root = Path(path).expanduser()
        if cfg.name == "records":
            records = Records(root)
            keys, labels = records.identities()
            files: Any = _RecordImages(records, keys)
        else:
            paths, labels = class_files(root, class_names(root), chosen.skipped)
            files = Paths(paths, root)
        return chosen.of(ImageFiles(files, labels, 0, size, False, seed, prepared=ALIGNED, prefix=prefix))

    images = images_of(cfg.path, "")
    train = np.ones(len(images), dtype=bool)
    if cfg.eval_path is not None:
        others = images_of(cfg.eval_path, "eval_path:")
        probes = np.ones(len(others), dtype=bool)
    else:
        others, names = images, np.unique(images.labels)
        # Every tenth identity, at most a thousand: the evaluation compares pairs.
        held_out = names[max(10, -(-len(names) // 1000)) - 1 :: max(10, -(-len(names) // 1000))]
        probes = np.isin(images.labels, held_out if len(held_out) > 1 else names[-2:])
        train = ~probes
    order = np.argsort(others.labels, kind="stable")
    ranked = others.labels[order]
    probes[order] &= np.arange(len(order)) - np.searchsorted(ranked, ranked) < _MOST_PROBES  # the first ones of each

    def part(images: ImageFiles, which: NDArray[np.bool_], augment: bool) -> ImageFiles:
        names, labels = np.unique(images.labels[which], return_inverse=True)
        if len(names) < 2:
            raise ConfigError(
                f"data.path={cfg.path}: {len(names)} identities are left to "
                f"{'train' if which is train else 'evaluate'} on; expected at least 2 of each kind"
            )
        return replace(images.taken(which), labels=labels, num_classes=len(names), augment=augment)

    return chosen.finish(data_of(part(images, train, bool(cfg.augment)), part(others, probes, False)))


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


def build_synthetic(cfg: DataConfig, seed: int, channels: int | None) -> Data:
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
