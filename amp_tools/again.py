"""The settings to recompute a step of a finished run."""

from __future__ import annotations

from pathlib import Path

from amp_core.checkpoints.checkpoint import Checkpoint
from amp_core.cli.run_folders import overrides_of, stored_config
from amp_core.config.errors import ConfigError
from amp_core.config.files import read_json


def overrides_before(run_dir: str, step: int) -> list[str]:
    """The settings that take up a run before one of its steps, in one process. ConfigError: it is no run's folder."""
    overrides, config = overrides_of(run_dir), stored_config(run_dir)
    if config is None:
        raise ConfigError(f"{run_dir}: its .hydra/config.yaml is missing or damaged")
    before = Checkpoint(Path(run_dir, "checkpoints"), writer=False).newest_before(step)
    try:
        summary = read_json(Path(run_dir, "summary.json"))
        # One rank takes the samples of all.
        accumulation = int(config["accumulation"]) * int(summary["world_size"])
    except (OSError, KeyError, TypeError, ValueError, OverflowError) as problem:
        raise ConfigError(f"{run_dir}: summary.json or .hydra/config.yaml is missing or damaged") from problem
    return [*overrides, f"resume={before[1] if before else 'never'}", f"accumulation={accumulation}"]
