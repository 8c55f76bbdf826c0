"""The folders of YAML files, and the options of their groups."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from amp_core.config.errors import ConfigError, suggest
from amp_core.config.files import parse_yaml


def conf_dir() -> Path:
    """The folder of YAML files: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"conf/config.yaml was found neither in {package.parent} nor in {package}; reinstall")


CONFIG_DIR = "AMP_RECIPES_CONFIG_DIR"
"""Environment variable that hands `--config-dir` on to the processes of a run."""


def config_dirs() -> list[Path]:
    """The folders of YAML files: ours, those of installed packages, that of --config-dir."""
    own = os.environ.get(CONFIG_DIR)
    return [conf_dir(), *_installed_dirs(), *([Path(own)] if own else [])]


@functools.cache
def _installed_dirs() -> list[Path]:
    """The packages of YAML files and recipes that others have installed: entry points of the group `amp_recipes`."""
    specs = [find_spec(entry.value) for entry in entry_points(group="amp_recipes")]
    return [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]


def option_file(group: str, option: str) -> Path:
    """The YAML file of one option of a group; its folder is the user's where ours has none."""
    files = [folder / group / f"{option}.yaml" for folder in config_dirs()]
    return next((file for file in files if file.is_file()), files[0])


def choices(group: str) -> list[str]:
    """The options of a config group, sorted."""
    return sorted(path.stem for folder in config_dirs() for path in (folder / group).glob("*.yaml"))


def read_option(group: str, option: str) -> dict[str, Any]:
    """The values of an option of a group as plain data, without Hydra. ConfigError: there is no such option."""
    if option not in choices(group):
        raise ConfigError(f"{group}={option}: there is no such option. {suggest(option, choices(group))}")
    values = copy.deepcopy(_parsed(option_file(group, option).read_text()))
    for base in values.pop("defaults", ()):  # options of the same group that it begins with
        if base != "_self_" and base in choices(group):
            values = read_option(group, base) | values
    return values


_parsed = functools.lru_cache(256)(parse_yaml)  # the jobs of a sweep read the same few options


def own_files(group: str) -> dict[str, Path]:
    """The Python files beside the options of a group in folders that are not ours, by name."""
    return {file.stem: file for folder in config_dirs()[1:] for file in (folder / group).glob("[!_]*.py")}


def load_own(group: str, name: str, needs: Sequence[str]) -> Any:
    """The module of such a file. ConfigError: it cannot be imported, or lacks what it needs."""
    file = own_files(group)[name]
    known = sys.modules.get(f"own_{group}_{name}")
    if known is not None and known.__file__ == str(file):
        return known
    spec = importlib.util.spec_from_file_location(f"own_{group}_{name}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if missing := [part for part in needs if not hasattr(module, part)]:
            raise AttributeError(f"it has no {', no '.join(missing)}")
    except Exception as problem:  # foreign code may raise anything
        del sys.modules[spec.name]
        what = "recipe" if group == "recipe" else "data set"
        raise ConfigError(f"{file}: is no {what}: {type(problem).__name__}: {problem}") from problem
    return module
