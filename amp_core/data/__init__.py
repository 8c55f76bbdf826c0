"""Data sets by name."""

from __future__ import annotations

import importlib
from dataclasses import replace

from amp_core.config.errors import ConfigError
from amp_core.config.kinds import DECODED, OWN_PARTS, TEXTS, kind_of
from amp_core.config.schema import DataConfig
from amp_core.data.base import Data, Dataset, Key
from amp_core.data.loading import Batches, EvalLoader, to_device

__all__ = ["Batches", "Data", "Dataset", "EvalLoader", "Key", "build_data", "to_device"]


BUILDERS = {
    "mnist_subset": "images.build_mnist_subset", "synthetic": "images.build_synthetic",
    "image_folder": "images.build_image_folder", "imagenet": "images.build_image_folder",
    "cifar10": "images.build_cifar10", "shards": "stored.build_stored", "parquet": "stored.build_stored",
    "hf": "stored.build_hf", "torch_sources": "text.build_sources", "torch_headers": "text.build_sources",
    "text": "text.build_text", "tokens": "text.build_tokens", "chat": "text.build_chat",
    "digit_scenes": "masks.build_digit_scenes", "mask_folder": "masks.build_mask_folder", "coco": "coco.build_coco",
    "glyphs": "identities.build_glyphs", "identity_folder": "identities.build_files",
    "records": "identities.build_files", "synthetic_identities": "identities.build_synthetic",
    "telephone": "speech.build_telephone", "recordings": "speech.build_recordings", "table": "table.build_table",
}  # fmt: skip
"""Module and function of each data set, imported when it is built: `(DataConfig, seed, channels)` to `Data`."""


def build_data(cfg: DataConfig, *, seed: int, channels: int | None = None) -> Data:
    """The data set of a configuration. ConfigError: settings or files that do not fit.

    `seed` is of the augmentation: samples and split do not depend on it. Gray images get the model's `channels`.
    """
    from amp_core.config.checks import check_data  # train.py has made these checks before it imports the recipe

    # Image files have a number of classes, and text no samples, only without their data (`run.predict.with_data`).
    if cfg.num_samples == 0 and cfg.name in TEXTS:
        from amp_core.data.text import absent

        return absent(cfg)
    is_given = cfg.num_classes is not None and cfg.name in (*DECODED, "mask_folder")
    if problems := [] if is_given else check_data(cfg):
        raise ConfigError(problems)
    if cfg.name in BUILDERS:
        module, function = BUILDERS[cfg.name].split(".")
        data: Data = getattr(importlib.import_module(f"amp_core.data.{module}"), function)(cfg, seed, channels)
    else:
        data = _own(cfg, seed, channels)
    shape = data.facts.get("image_shape")
    if shape is not None and channels not in (None, shape[0]):
        raise ConfigError(
            f"data={cfg.name}: has images with {shape[0]} channels, the model takes {channels}; use another model.name"
        )
    if cfg.sampler == "balanced":
        from amp_core.data.balanced import Balanced

        data = replace(data, train=Balanced(data.train, seed))
    if cfg.erasing or cfg.mixup or cfg.cutmix:
        from amp_core.data.augment import Erased, Mixed  # other runs need none of it

        train = data.train if cfg.erasing is None else Erased(data.train, cfg.erasing, seed)
        if cfg.mixup or cfg.cutmix:
            train = Mixed(train, data.facts["num_classes"], cfg.mixup, cfg.cutmix, seed)
        data = replace(data, train=train)
    return data


def _own(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    from amp_core.config.options import load_own  # other runs need none of it
    from amp_core.data.own import check_own

    module = load_own("data", cfg.name, OWN_PARTS)
    data = module.build(cfg, seed, channels)
    check_own(data, module.__file__, kind_of(cfg.name), seed)
    return data
