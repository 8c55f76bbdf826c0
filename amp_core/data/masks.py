"""Images with binary masks: digits on photographs, your own folders.

A mask is uint8: 0, 1, or VOID for pixels that losses and metrics ignore, such as padding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_core.config.errors import BadSample, ConfigError
from amp_core.config.schema import DataConfig
from amp_core.config.sources import images_below, masked_images, photographs
from amp_core.data.base import Chosen, Data, Key, uniforms, unpack
from amp_core.data.decode import read_image, read_integers
from amp_core.data.images import NUM_UNIFORMS, every_fifth, read_mnist_subset, shift_rotate_scale
from amp_core.data.prepare import NUM_CROP_UNIFORMS, normalise, random_crop, to_floats

VOID = 255
"""Ignored pixels of a mask."""

Batch = tuple[Tensor, Tensor]
"""(images float32 [B, C, H, W], masks uint8 [B, K, H, W])"""
Numbers, Pixels = NDArray[np.float64], NDArray[np.uint8]


PIXELS: dict[str, Any] = {"divide_by": 255, "mean": [0.5], "std": [0.25]}
"""How they become numbers from -2 to 2; also for the metadata of an exported network."""


# --- digits on photographs --------------------------------------------------------------------------------------------

_MOST_DIGITS = 3


@dataclass(eq=False)
class DigitScenes:
    """One to three handwritten digits on a crop of a photograph; the mask is the ink.

    A digit is light on dark ground and dark on light ground, in any colour, half to fully opaque, rotated, scaled and
    shifted; it is ink where its opacity is 1/2 or more. Crops get gammas of 0.2 to 1.5, so that about half of them are
    light: with few light ones, networks of some seeds miss all dark digits.

    The photographs are those of scikit-learn (3-clause BSD licence), both under CC BY 2.0: china.jpg by danielbuechele
    and flower.jpg by vultilion, on flickr.

    Args:
        first: number of its first sample; parts of one data set do not overlap.
        photos: uint8 [H, W, 3] each, larger than `size`.
        digits: uint8 [N, 1, 28, 28].
        augment: different scenes in each epoch.
    """

    num_samples: int
    first: int
    photos: Sequence[Pixels]
    digits: Pixels
    size: int
    augment: bool
    seed: int
    preprocessing: ClassVar[dict[str, Any]] = PIXELS

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        indices, passes = unpack(keys)
        # The seed of a run changes the augmentation, not the data set.
        seed, passes = (self.seed, passes) if self.augment else (0, np.zeros_like(passes))
        u = uniforms(seed, indices + self.first, passes, 5 + _MOST_DIGITS * (8 + NUM_UNIFORMS))
        ink = self._ink(u[:, 5:].reshape(-1, 8 + NUM_UNIFORMS)).reshape(len(keys), _MOST_DIGITS, 28, 28)
        scenes = np.empty((len(keys), self.size, self.size, 3), dtype=np.float32)
        masks = np.zeros((len(keys), 1, self.size, self.size), dtype=np.uint8)
        for row in range(len(keys)):
            self._draw(u[row], ink[row], scenes[row], masks[row, 0])
        images = torch.from_numpy(scenes).permute(0, 3, 1, 2).contiguous()
        return normalise(images, PIXELS["mean"], PIXELS["std"]), torch.from_numpy(masks)

    def _ink(self, u: Numbers) -> NDArray[np.float32]:
        digits = self.digits[(len(self.digits) * u[:, 0]).astype(np.int64)]
        return shift_rotate_scale(torch.from_numpy(digits).float().div_(255), u[:, 8:]).numpy()

    def _draw(self, u: Numbers, ink: NDArray[np.float32], scene: NDArray[np.float32], mask: Pixels) -> None:
        photo = self.photos[int(len(self.photos) * u[0])]
        top, left = (int(v * (side - self.size + 1)) for v, side in zip(u[1:3], photo.shape, strict=False))
        piece = photo[top : top + self.size, left : left + self.size]
        exposed = (np.arange(256) / 255) ** (0.2 * 7.5 ** u[4])
        scene[:] = exposed.astype(np.float32)[piece[:, ::-1] if u[3] < 0.5 else piece]
        for number, (digit, v) in enumerate(zip(ink, u[5:].reshape(_MOST_DIGITS, -1), strict=True)):
            if number and v[1] < 0.5:
                continue
            y, x = (int(w * (self.size - 28 + 1)) for w in v[2:4])
            place = (slice(y, y + 28), slice(x, x + 28))
            under = scene[place]
            colour = (0.35 * v[4:7] + (0.65 if under.mean() < 0.5 else 0)).astype(np.float32)
            opacity = np.float32(0.5 + 0.5 * v[7]) * digit[:, :, None]
            under += opacity * (colour - under)
            mask[place] |= digit >= 0.5


_TRAIN_COLUMNS, _EVAL_COLUMNS = slice(0, 448), slice(480, 640)


def build_digit_scenes(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.image_size and cfg.num_samples, "check_data was not asked"
    num, size = cfg.num_samples, cfg.image_size
    photos = [np.asarray(read_image(str(file), str(file))) for file in photographs()]
    digits, labels = read_mnist_subset()
    held_out = every_fifth(labels)
    train, others = ([photo[:, columns] for photo in photos] for columns in (_TRAIN_COLUMNS, _EVAL_COLUMNS))
    return Data(
        DigitScenes(num, 0, train, digits[~held_out], size, bool(cfg.augment), seed),
        DigitScenes(max(1, num // 4), num, others, digits[held_out], size, False, seed),
        {"image_shape": (3, size, size), "num_masks": 1},
    )


# --- files ------------------------------------------------------------------------------------------------------------


_MEANING = np.full(256, 2, dtype=np.uint8)
_MEANING[[0, 1, 255, 128]] = 0, 1, 1, VOID


def read_mask_file(path: str) -> Pixels:
    """A mask file as [1, H, W] of 0, 1 and VOID."""
    values = read_integers(path, path)
    stored = values.astype(np.uint8)
    meaning = _MEANING[stored]
    meaning[stored != values] = 2  # more than 8 bits
    if (meaning == 2).any():
        strange = values[meaning == 2][0]
        raise BadSample(
            f"the mask {path} has a pixel of {strange}; expected 0, 255 (or 1) for the mask, and 128 for pixels that "
            f"do not count"
        )
    return meaning[None]


@dataclass(eq=False)
class MaskFiles:
    """Image files and mask files. Training: random resized crop (8 to 100 % of the area) and horizontal flip.

    Evaluation: the whole image at its own ratio, centred in a square whose rest is void.

    A mask file has one value per pixel: 0, 1 or 255 for 1, and 128 for void.

    Args:
        pairs: (image, mask) paths.
        root: folder below which files are named.
        read_mask: what `pairs` names as the mask, to [num_masks, H, W] of 0, 1 and VOID.
    """

    pairs: Any
    size: int
    augment: bool
    seed: int
    root: str = ""
    read_mask: Callable[[str], Pixels] = read_mask_file
    num_masks: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.pairs, np.ndarray):  # in one array, as `Paths`
            self.pairs = np.array([[*map(os.fsencode, pair)] for pair in self.pairs]).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.pairs)

    def name_of(self, index: int) -> str:
        """The name of a sample for `data.exclude`: its image."""
        return os.path.relpath(os.fsdecode(bytes(self.pairs[index, 0])), self.root)

    def taken(self, rows: Any) -> MaskFiles:
        """Some of the samples."""
        return replace(self, pairs=self.pairs[rows])

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Of evaluation, for the metadata of an exported network."""
        return PIXELS | {"size": [self.size] * 2, "resize_longer_side": self.size, "interpolation": "bilinear"}

    def of_files(self, paths: Sequence[str]) -> MaskFiles:
        """Images without masks, prepared as these are. For evaluation."""
        return replace(self, pairs=[(path, "") for path in paths], augment=False)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        indices, passes = unpack(keys)
        u = uniforms(self.seed, indices, passes, NUM_CROP_UNIFORMS)
        pixels = np.zeros((len(keys), self.size, self.size, 3), dtype=np.uint8)
        masks = np.full((len(keys), self.num_masks, self.size, self.size), VOID, dtype=np.uint8)
        for row, index in enumerate(indices):
            image, mask = (os.fsdecode(bytes(path)) for path in self.pairs[index])
            self._read(image, mask, u[row], pixels[row], masks[row])
        images = to_floats(pixels, self.size)
        return normalise(images, PIXELS["mean"], PIXELS["std"]), torch.from_numpy(masks)

    def _read(self, image_path: str, mask_path: str, u: Numbers, pixels: Pixels, masks: Pixels) -> None:
        from PIL import Image

        image = read_image(image_path, image_path)
        shape = (self.num_masks, image.height, image.width)
        mask = self.read_mask(mask_path) if mask_path else np.zeros(shape, dtype=np.uint8)
        if mask.shape != shape:
            raise BadSample(
                f"the mask {mask_path} has {mask.shape[2]}x{mask.shape[1]} pixels, its image {image.width}x"
                f"{image.height}; expected the same"
            )
        width, height, box = self.size, self.size, (0, 0, *image.size)
        if self.augment:
            box = random_crop(image.width, image.height, u)
        else:
            scale = self.size / max(image.size)
            width, height = (max(1, round(side * scale)) for side in image.size)
        left, top = (self.size - width) // 2, (self.size - height) // 2
        flip = -1 if self.augment and u[0] < 0.5 else 1
        place = (slice(top, top + height), slice(left, left + width))
        small = image.crop(box).resize((width, height), Image.Resampling.BILINEAR)
        pixels[place] = np.asarray(small)[:, ::flip]
        for part, output in zip(mask, masks, strict=True):
            small = Image.fromarray(part).crop(box).resize((width, height), Image.Resampling.NEAREST)
            output[place] = np.asarray(small)[:, ::flip]


def build_mask_folder(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.path and cfg.image_size, "check_data was not asked"
    root, size, chosen = Path(cfg.path).expanduser(), cfg.image_size, Chosen(cfg)
    facts = {"image_shape": (3, size, size), "num_masks": 1}
    if cfg.num_classes is not None:  # to predict
        files = MaskFiles([(path, "") for path in images_below(root)], size, False, seed)
        return Data(files, files, facts)

    def part(name: str, augment: bool) -> MaskFiles:
        pairs = masked_images(root / name, chosen.skipped)[0]
        files = chosen.of(MaskFiles(pairs, size=size, augment=augment, seed=seed, root=str(root)))
        if not len(files):
            raise ConfigError(f"data.path={cfg.path}: {name}: no images are left by data.exclude={cfg.exclude}")
        return files

    return chosen.finish(Data(part("train", bool(cfg.augment)), part("val", False), facts))
