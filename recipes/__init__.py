"""The recipes by name: one file, one lesson."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

RECIPES = {
    "classification": "recipes.classification",
}


def find(name: str) -> tuple[type[Any], Callable[..., Any]]:
    """The dataclass of a recipe's own knobs, and its `run(cfg, env)`."""
    module = importlib.import_module(RECIPES[name])
    return module.Knobs, module.run
