"""Data sets by name."""

from __future__ import annotations

from amp_core.config.checks import check_data
from amp_core.config.errors import ConfigError
from amp_core.config.schema import DataConfig
from amp_core.data.base import Data, Dataset, Key
from amp_core.data.identities import BUILDERS as IDENTITIES
from amp_core.data.images import BUILDERS as IMAGES
from amp_core.data.loading import eval_loader, to_device, train_loader
from amp_core.data.masks import BUILDERS as MASKS
from amp_core.data.text import BUILDERS as TEXT

__all__ = ["Data", "Dataset", "Key", "build_data", "eval_loader", "to_device", "train_loader"]

BUILDERS = IMAGES | TEXT | MASKS | IDENTITIES


def build_data(cfg: DataConfig, *, seed: int, channels: int | None = None) -> Data:
    """The data set of a configuration.

    Args:
        cfg: the `data` group.
        seed: of the augmentation. What is in the data set and how it is split does not depend on it.
        channels: colour channels that the model takes; gray images are repeated. None: as they are.

    Raises:
        ConfigError: settings or files that do not fit.
    """
    problems = check_data(cfg)
    if problems:
        raise ConfigError(problems)
    data = BUILDERS[cfg.name](cfg, seed, channels)
    shape = data.facts.get("image_shape")
    if shape is not None and channels not in (None, shape[0]):
        raise ConfigError(
            f"data={cfg.name}: has images with {shape[0]} channels, the model takes {channels}; use another model.name"
        )
    return data
