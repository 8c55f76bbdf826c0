"""The length of a run: steps, epochs or samples, converted to steps."""

from __future__ import annotations

import math
import re

from amp_core.config.errors import ConfigError
from amp_core.config.schema import Config

MOST_STEPS = 10**8
"""The most steps of a run: its schedule is a table with a row for each step."""


def is_length(value: object) -> bool:
    number = r"[0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?"
    found = re.fullmatch(rf"([0-9]+)\s+steps?|({number})\s+(?:epoch|sample)s?", str(value).strip())
    return found is not None and 0 < float(found[1] or found[2]) < math.inf


def num_steps(
    cfg: Config, *, num_samples: int, samples_per_step: int, steps_done: int = 0, samples_done: int = 0
) -> int:
    """The step at which the run ends, from steps, epochs, samples or the recipe's own length.

    Earlier steps, `steps_done` of `samples_done`, may have had another number of samples than `samples_per_step`.
    ConfigError: there are more than `MOST_STEPS`.
    """
    number, unit = str(cfg.recipe["length"]).split()
    given = f"recipe.length={number} {unit}"
    for key in ("steps", "epochs", "samples"):
        if getattr(cfg, key) is not None:
            number, unit = getattr(cfg, key), key
            given = f"{key}={number:g}"
    if unit.startswith("step"):
        found = float(number)
    else:
        samples = float(number) if unit.startswith("sample") else float(number) * num_samples
        found = (samples - samples_done) / samples_per_step
    if steps_done + found > MOST_STEPS:
        raise ConfigError(f"{given}: are {steps_done + found:.4g} steps; expected at most {MOST_STEPS:,}")
    return math.ceil(found) if unit.startswith("step") else steps_done + math.ceil(found)
