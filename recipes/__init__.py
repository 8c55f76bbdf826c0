"""The recipes by name: one file, one lesson.

The module of a recipe has `Knobs`, the dataclass of the keys that belong to it alone; `run(cfg, env)`; `DATA`, the kind
of data sets it takes, or `own` if it brings its data itself; and `MODELS`, the family of networks. Where its keys have
rules, `check(knobs, cfg)` lists the problems; `LAYOUTS` names the layouts that it runs in, if not the usual ones.

A recipe of your own is `recipe/mine.py` beside `recipe/mine.yaml` in the folder of `--config-dir`, or in a package that
an installed project names in its entry points, group `amp_recipes`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from amp_core.cli.command import program
from amp_core.config.errors import ConfigError, suggest
from amp_core.config.options import load_own, own_files

RECIPES = {
    "classification": "recipes.classification",
    "contrastive": "recipes.contrastive",
    "custom_function": "recipes.custom_function",
    "diffusion": "recipes.diffusion",
    "distillation": "recipes.distillation",
    "experts": "recipes.experts",
    "face_recognition": "recipes.face_recognition",
    "finetuning": "recipes.finetuning",
    "gan": "recipes.gan",
    "language_model": "recipes.language_model",
    "model_parallel": "recipes.model_parallel",
    "policy_gradient": "recipes.policy_gradient",
    "segmentation": "recipes.segmentation",
    "speech": "recipes.speech",
    "supervised": "recipes.supervised",
}

if sys.argv[0] == "-m" and (_asked := sys.orig_argv[sys.orig_argv.index("-m") + 1]) in RECIPES.values():
    print(f"error: {_asked} is not a program; use {program()} recipe={_asked.rpartition('.')[2]}", file=sys.stderr)
    sys.exit(2)


def find(name: str) -> Any:
    """The module of a recipe.

    Raises:
        ConfigError: there is none, or the file of somebody's own is no recipe.
    """
    if name in RECIPES:
        return importlib.import_module(RECIPES[name])
    if name not in (own := _own()):
        raise ConfigError(f"recipe.name={name}: there is no such recipe. {suggest(name, sorted({**RECIPES, **own}))}")
    return load_own("recipe", name, ("Knobs", "DATA", "MODELS", "run"))


def run(cfg: Any, env: Any) -> dict[str, float]:
    """Run a configuration by its recipe, watched by the doctor."""
    if cfg.data.check:
        from amp_core.run.check import check

        return check(env)
    from amp_core.doctor.watch import doctor

    env.doctor = doctor
    if cfg.task != "train":
        from amp_core.run.predict import with_data

        cfg = with_data(cfg)
    return find(cfg.recipe["name"]).run(cfg, env)


def _own() -> dict[str, Path]:
    """The files of recipes that are not ours.

    Raises:
        ConfigError: one has the name of one of ours.
    """
    found = own_files("recipe")
    if twice := sorted(RECIPES.keys() & found.keys()):
        raise ConfigError(f"{found[twice[0]]}: has the name of our recipe {twice[0]}; rename yours")
    return found
