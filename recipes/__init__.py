"""The recipes by name: one file, one lesson.

A recipe's module has `Knobs`, the dataclass of its own settings; `run(cfg, env)`; `DATA`, the kind of data sets it
takes, or `own` if it has its own data; and `MODELS`, the family of networks. Optional: `check(knobs, cfg)` lists
problems of its settings; `LAYOUTS` names the supported layouts, if not the usual ones.
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
    """The `run` of a recipe, watched by the doctor."""

    def run(cfg: Any, env: Any) -> dict[str, float]:
        from amp_core.doctor.monitors import monitors

        env.monitors = monitors
        return find(name).run(cfg, env)

    return run
