"""Data sets by name."""

from __future__ import annotations

import importlib

from amp_core.config.checks import DECODED, KINDS, check_data
from amp_core.config.errors import ConfigError
from amp_core.config.schema import DataConfig
from amp_core.data.base import Data, Dataset, Key
from amp_core.data.loading import Batches, EvalLoader, to_device

__all__ = ["Batches", "Data", "Dataset", "EvalLoader", "Key", "build_data", "to_device"]


def build_data(cfg: DataConfig, *, seed: int, channels: int | None = None) -> Data:
    """The data set of a configuration.

    Args:
        cfg: the `data` group.
        seed: seed of the augmentation. The samples and the split do not depend on it.
        channels: colour channels that the model takes; gray images are repeated. None: unchanged.

    Raises:
        ConfigError: settings or files that do not fit.
    """
    # Image files have a number of classes only in a prediction (`run.predict.with_data`).
    is_given = cfg.num_classes is not None and cfg.name in (*DECODED, "mask_folder")
    if problems := [] if is_given else check_data(cfg):
        raise ConfigError(problems)
    builders = importlib.import_module(f"amp_core.data.{KINDS[cfg.name]}").BUILDERS
    data: Data = builders[cfg.name](cfg, seed, channels)
    shape = data.facts.get("image_shape")
    if shape is not None and channels not in (None, shape[0]):
        raise ConfigError(
            f"data={cfg.name}: has images with {shape[0]} channels, the model takes {channels}; use another model.name"
        )
    return data
