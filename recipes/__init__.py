"""The recipes by name: one file, one lesson.

The module of a recipe has `Knobs`, the dataclass of the keys that belong to it alone; `run(cfg, env)`; `DATA`, the kind
of data sets it takes, or `own` if it brings its data itself; and `MODELS`, the family of networks. Where its keys have
rules, `check(knobs, cfg)` lists the problems; `LAYOUTS` names the layouts that it runs in, if not the usual ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

RECIPES = {
    "classification": "recipes.classification",
    "contrastive": "recipes.contrastive",
    "custom_function": "recipes.custom_function",
    "distillation": "recipes.distillation",
    "face_recognition": "recipes.face_recognition",
    "gan": "recipes.gan",
    "language_model": "recipes.language_model",
    "model_parallel": "recipes.model_parallel",
    "segmentation": "recipes.segmentation",
}


def find(name: str) -> Any:
    """The module of a recipe."""
    return importlib.import_module(RECIPES[name])


def runner(name: str) -> Callable[[Any, Any], dict[str, float]]:
    """The `run` of a recipe, with the doctor to watch it."""

    def run(cfg: Any, env: Any) -> dict[str, float]:
        from amp_core.doctor.monitors import monitors

        env.monitors = monitors
        return find(name).run(cfg, env)

    return run
