"""The recipes by name: one file, one lesson.

The module of a recipe has `Knobs`, the dataclass of the keys that belong to it alone; `run(cfg, env)`; `DATA`, the kind
of data sets it takes, or `own` if it brings its data itself; and `MODELS`, the family of networks. Where its keys have
rules, `check(knobs, cfg)` lists the problems; `LAYOUTS` names the layouts that it runs in, if not the usual ones.

A recipe of your own is `recipe/mine.py` beside `recipe/mine.yaml` in the folder of `--config-dir`, or a module that an
installed package names in its entry points, group `amp_recipes`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from amp_core.config.errors import ConfigError
from amp_core.config.schema import config_dirs

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

if sys.argv[0] == "-m" and (_asked := sys.orig_argv[sys.orig_argv.index("-m") + 1]) in RECIPES.values():
    sys.exit(f"error: {_asked} is not a program; use python train.py recipe={_asked.rpartition('.')[2]}")


def names() -> list[str]:
    """All recipes: ours, those of installed packages, those of --config-dir.

    Raises:
        ConfigError: two of them have one name.
    """
    return sorted({**RECIPES, **_own()})


def find(name: str) -> Any:
    """The module of a recipe."""
    place = RECIPES.get(name) or _own()[name]
    if isinstance(place, str):
        return importlib.import_module(place)
    module = sys.modules.get(f"own_recipe_{name}")
    if module is None:
        spec = importlib.util.spec_from_file_location(f"own_recipe_{name}", place)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[spec.name]
            raise
    return module


def runner(name: str) -> Callable[[Any, Any], dict[str, float]]:
    """The `run` of a recipe, with the doctor to watch it."""

    def run(cfg: Any, env: Any) -> dict[str, float]:
        from amp_core.doctor.monitors import monitors

        env.monitors = monitors
        return find(name).run(cfg, env)

    return run


@functools.cache
def _installed() -> list[tuple[str, str]]:
    return [(entry.name, entry.module) for entry in entry_points(group="amp_recipes")]


def _own() -> dict[str, str | Path]:
    """The modules, or files, of recipes that are not ours."""
    found: dict[str, str | Path] = {}
    places: list[tuple[str, str | Path]] = list(_installed())
    places += [(file.stem, file) for folder in config_dirs()[1:] for file in sorted((folder / "recipe").glob("*.py"))]
    for name, place in places:
        if other := RECIPES.get(name) or found.get(name):
            raise ConfigError(f"recipe={name}: there are two of this name, {other} and {place}; rename one")
        found[name] = place
    return found
