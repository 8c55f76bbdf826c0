"""How image files become inputs of a network: crop, resizing, statistics; of torchvision, or of a network of timm."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_core.config.errors import ConfigError, suggest
from amp_core.data.decode import THIN
from amp_core.vision import import_torchvision


@dataclass(frozen=True)
class Preparation:
    """For evaluation the shorter side is resized, then a square is cut from the centre. For training: `random_crop`."""

    share: float = 224 / 256
    """The side of the square by the shorter side."""
    mode: Literal["bilinear", "bicubic"] = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    rounded: Callable[[float], int] = round
    """torchvision's numbers are rounded, timm's cut off."""
    is_whole: bool = False
    """The whole image is resized, in training too: what it shows is aligned."""

    def shorter(self, size: int) -> int:
        """The shorter side for a square of `size`."""
        return self.rounded(size / self.share)

    def centre(self, image: Any, size: int) -> NDArray[np.uint8]:
        """The square of an image of Pillow, [size, size, 3]."""
        if self.is_whole:
            return np.asarray(image.resize((size, size), self.filter))
        (width, height), shorter, mode = image.size, self.shorter(size), self.filter
        scale = shorter / min(width, height)
        sides = [shorter if side == min(width, height) else int(side * scale) for side in (width, height)]
        left, top = (round((side - size) / 2) for side in sides)
        if max(width, height) > THIN * min(width, height):
            x, y = width / sides[0], height / sides[1]
            return np.asarray(
                image.resize((size, size), mode, (left * x, top * y, (left + size) * x, (top + size) * y))
            )
        return np.asarray(image.resize(sides, mode).crop((left, top, left + size, top + size)))

    @property
    def filter(self) -> Any:
        """Pillow's."""
        from PIL import Image

        return Image.Resampling[self.mode.upper()]

    def about(self, size: int) -> dict[str, Any]:
        """For the metadata of an exported network."""
        crop = {} if self.is_whole else {"resize_shorter_side": self.shorter(size), "crop": "center"}
        return described(size, size, self.mean, self.std) | crop | {"interpolation": self.mode}


IMAGENET, ALIGNED = Preparation(), Preparation(mean=(0.5,) * 3, std=(0.5,) * 3, is_whole=True)


def described(height: int, width: int, mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
    """What metadata say of pixels of 0 to 255: divided by 255, then normalised."""
    return {"size": [height, width], "divide_by": 255, "mean": [*mean], "std": [*std]}


def preparation_of(like: str | None) -> Preparation:
    """That of `data.like`, `timm:<name>`. ConfigError: there is none."""
    if like is None:
        return IMAGENET
    import_torchvision()
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as missing:
        raise ConfigError(f"data.like={like}: needs the package timm: pip install 'amp-recipes[timm]'") from missing
    name = like.removeprefix("timm:")
    try:
        cfg = timm.get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError as problem:
        raise ConfigError(f"data.like={like}: {problem} {suggest(name, timm.list_pretrained())}") from problem
    if cfg.crop_mode != "center" or cfg.interpolation not in ("bilinear", "bicubic"):
        how = f"crop_mode {cfg.crop_mode}, interpolation {cfg.interpolation}"
        raise ConfigError(f"data.like={like}: is prepared by {how}; expected center, and bilinear or bicubic")
    return Preparation(cfg.crop_pct, cfg.interpolation, (*cfg.mean,), (*cfg.std,), math.floor)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Pixels from 0 to 1, in place, per channel."""
    return images.sub_(_per_channel(images.device, *mean)).div_(_per_channel(images.device, *std))


@functools.cache
def _per_channel(device: torch.device, *values: float) -> Tensor:
    """fp32 [C, 1, 1]. Copied to a device once, since such a copy syncs."""
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


def to_floats(images: Iterable[NDArray[np.uint8]], size: int) -> Tensor:
    """Images uint8 [size, size, 3] each to float32 [B, 3, size, size] from 0 to 1."""
    pixels = np.array([*images], dtype=np.uint8).reshape(-1, size, size, 3)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float().div_(255)


_CROP_TRIALS = 10
NUM_CROP_UNIFORMS = 1 + 4 * _CROP_TRIALS


def random_crop(width: int, height: int, u: NDArray[np.float64]) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of 8 to 100 % of the area with a ratio of 3/4 to 4/3, as torchvision's
    RandomResizedCrop draws it, from `NUM_CROP_UNIFORMS` numbers (the first one is not used)."""
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
