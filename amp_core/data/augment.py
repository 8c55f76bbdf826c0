"""Augmentation of torchvision's v2 transforms, MixUp and CutMix: functions of (seed, epoch, sample).

The transforms draw from torch's global generator, which is seeded here for each sample. A sample is mixed with one that
is drawn from the whole data set, not from its batch: so it is the same for any batch size, number of ranks and workers,
and after a resume. The loader reads two images for it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_core.data.base import Dataset, Key, mixed, uniforms, unpack
from amp_core.vision import import_torchvision

_STREAMS = {"policy": 0x5D1F, "erasing": 0xE7A5, "mix": 0x31C7}
"""Added to the seed, so that what is drawn for one is drawn for no other."""


def _seed(seed: int, stream: str, key: Key) -> None:
    bits = mixed(seed + _STREAMS[stream], [key[0]], [key[1]])
    torch.default_generator.manual_seed(int(bits[0] >> np.uint64(1)))


@functools.cache
def _transforms() -> Any:
    import_torchvision()
    return importlib.import_module("torchvision.transforms.v2")


@functools.cache
def _policy(name: str) -> Any:
    v2 = _transforms()
    return {
        "randaugment": lambda: v2.RandAugment(),
        "trivialaugment": lambda: v2.TrivialAugmentWide(),
        "colorjitter": lambda: v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
    }[name]()


def changed(pixels: NDArray[np.uint8], name: str, seed: int, key: Key) -> NDArray[np.uint8]:
    """An image [H, W, 3] by the policy of `data.augment`. Leaves global generators to `Seeded`."""
    _seed(seed, "policy", key)
    image = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)
    return _policy(name)(image).permute(1, 2, 0).contiguous().numpy()


class Erased:
    """A data set of images and labels with a rectangle of some images set to 0, the mean (arXiv:1708.04896)."""

    def __init__(self, dataset: Dataset, probability: float, seed: int) -> None:
        self._dataset, self._erase, self._seed = dataset, _transforms().RandomErasing(probability), seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        images, labels = self._dataset.__getitems__(keys)
        for row, key in enumerate(keys):
            _seed(self._seed, "erasing", key)
            images[row] = self._erase(images[row])
        return images, labels


class Mixed:
    """Each image mixed with another one, and labels as probabilities, float32 [B, num_classes].

    MixUp (arXiv:1710.09412): x = m * a + (1 - m) * b with m from Beta(alpha, alpha). CutMix (arXiv:1905.04899): a
    rectangle of b, of the share 1 - m of the area before it is cut at the border, replaces that of a; m is then the
    share that is left. With both, each image has one of them, with probability 1/2.
    """

    def __init__(
        self, dataset: Dataset, num_classes: int, mixup: float | None, cutmix: float | None, seed: int
    ) -> None:
        self._dataset, self._num_classes, self._seed = dataset, num_classes, seed + _STREAMS["mix"]
        self._mixup, self._cutmix = mixup, cutmix

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        indices, passes = unpack(keys)
        u = uniforms(self._seed, indices, passes, 4)
        others = (u[:, 0] * len(self)).astype(np.int64)
        images, labels = self._dataset.__getitems__([*keys, *zip(others.tolist(), passes.tolist(), strict=True)])
        images, partners = images[: len(keys)], images[len(keys) :]
        shares = np.ones(len(keys))
        for row, bits in enumerate(mixed(self._seed, indices, passes).tolist()):
            is_cut = self._mixup is None or (self._cutmix is not None and u[row, 1] < 0.5)
            alpha = self._cutmix if is_cut else self._mixup
            assert alpha is not None, "check_data was not asked"
            share = np.random.Generator(np.random.PCG64(bits)).beta(alpha, alpha)
            if is_cut:
                top, bottom, left, right = box(share, u[row, 2:], *images.shape[-2:])
                images[row, :, top:bottom, left:right] = partners[row, :, top:bottom, left:right]
                share = 1 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])
            else:
                images[row] = share * images[row] + (1 - share) * partners[row]
            shares[row] = share
        weights = torch.from_numpy(shares).float()[:, None]
        first, second = (
            torch.nn.functional.one_hot(part, self._num_classes).float() for part in labels.split(len(keys))
        )
        return images, weights * first + (1 - weights) * second


def box(share: float, centre: NDArray[np.float64], height: int, width: int) -> tuple[int, int, int, int]:
    """(top, bottom, left, right) of 1 - `share` of the area around a point of [0, 1)^2, cut at the border."""
    half = np.sqrt(1 - share) / 2
    y, x = centre[0] * height, centre[1] * width
    rows = [int(np.clip(round(y + sign * half * height), 0, height)) for sign in (-1, 1)]
    columns = [int(np.clip(round(x + sign * half * width), 0, width)) for sign in (-1, 1)]
    return rows[0], rows[1], columns[0], columns[1]
