"""The configuration and the jobs of a sweep, composed by Hydra.

Hydra stops at the first problem, raises many kinds of exceptions, and creates folders before the task runs. So
`overrides.py` checks each override first, and this module the whole: `compose` either returns plain values or raises
one `ConfigError`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra import main as hydra_main
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Glob, IntervalSweep
from omegaconf import OmegaConf

from amp_core.cli.command import program
from amp_core.cli.lease import num_cores
from amp_core.cli.overrides import (
    FREE,
    PATHS,
    at_end,
    check_overrides,
    groups,
    is_whole_range,
    num_values,
    parse_override,
    quoted_value,
    typed_keys,
)
from amp_core.cli.run_folders import check_length, content_of, source_of, stored_config
from amp_core.cli.words import HYDRA
from amp_core.config.errors import ConfigError, suggest
from amp_core.config.files import kind_of
from amp_core.config.options import CONFIG_DIR, choices, conf_dir, config_dirs, read_option
from amp_core.config.parse import fill_in
from amp_core.config.redact import items_of, secrets_in
from amp_core.config.rules import HERE, differences, flatten
from amp_core.config.schema import Config
from amp_core.run.terminal import say

PLUGINS = ("hydra._internal.core_plugins.", "hydra_plugins.")
"""What Hydra may make: its own and installed launchers and sweepers."""
MOST_JOBS = 10_000
"""Of a sweep: each one is checked before the first begins."""
LENGTHS = {"steps", "epochs", "samples"}


@contextlib.contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as problem:  # Hydra and OmegaConf raise dozens of kinds; each is a bad command line
        raise ConfigError(one_line(problem)) from problem


def use_config_dir(folder: str) -> None:
    """Look for options, experiments and recipes in a user's folder, too. ConfigError: it holds none."""
    own = Path(folder).expanduser().absolute()
    known = [*groups(), "experiment", "hydra"]
    if not os.path.isdir(own):
        raise ConfigError(f"--config-dir={folder[:200]}: there is no such folder; expected one with {', '.join(known)}")
    if not any(file for group in known for file in (own / group).glob("**/*.yaml")):
        raise ConfigError(f"--config-dir={folder}: holds no option of a group; expected files such as recipe/mine.yaml")
    os.environ[CONFIG_DIR] = str(own)


def check_config_dirs() -> None:
    """Raise ConfigError if a name is in two folders, or is no file, which Hydra would skip."""
    first: dict[str, Path] = {}
    for folder in config_dirs() if config_dirs()[1:] else ():
        for file in (*folder.glob("*/*.yaml"), *folder.glob("recipe/*.py")):
            if not file.is_file():
                raise ConfigError(f"{file}: is {kind_of(file)}, expected a file")
            other = first.setdefault(f"{file.parent.name}/{file.name}", file)
            if other != file:
                raise ConfigError(f"{file}: has the name of {other}; rename yours")


def search_path() -> list[str]:
    """Hydra's arguments for the user's own folders."""
    own = [quoted_value(f"file://{folder}") for folder in config_dirs()[1:]]
    return [f"hydra.searchpath=[{','.join(own)}]"] if own else []


@functools.lru_cache(64)
def _read(chosen: tuple[str, ...]) -> tuple[Any, Any]:
    """The configuration with these options before any key is set, and its node `hydra`; a sweep's jobs share a few."""
    present = GlobalHydra.instance()
    around, present.hydra = present.hydra, None  # that of a sweep, within a job of it
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            cfg = hydra_compose("config", list(chosen), return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = around
    OmegaConf.set_struct(cfg, False)
    return cfg, cfg.pop("hydra")


def _compose(overrides: Sequence[str], *, with_hydra: bool = False) -> tuple[Any, Any]:
    """Hydra's own composition of sound overrides, nothing resolved, and its node `hydra`: apart, or in its place."""
    parsed = [parse_override(text) for text in overrides]
    is_choice = {*groups(), "experiment", "hydra/launcher", "hydra/sweeper"}.__contains__
    chosen = (o.input_line or "" for o in parsed if is_choice(o.key_or_group))
    before, hydra = _read((*search_path(), *chosen))
    cfg = copy.deepcopy(before)
    if with_hydra:
        cfg["hydra"] = hydra
    lengths = {o.key_or_group for o in parsed if o.key_or_group in LENGTHS and o.value() is not None}
    for key in LENGTHS - lengths if lengths else ():
        cfg[key] = None  # of an experiment: the command line says how long, in a unit of its own
    for override in parsed:
        key = override.key_or_group
        if is_choice(key) or (key.startswith("hydra.") and not with_hydra):
            continue
        if key.startswith(("hydra.launcher.", "hydra.sweeper.")):
            head, _, tail = key.rpartition(".")
            known = [str(name) for name in OmegaConf.select(cfg, head) or () if name != "_target_"]
            if tail not in known:
                part = head.replace(".", "/")
                other = {"hydra/launcher": "joblib", "hydra/sweeper": "optuna"}.get(part)
                if other and hydra.runtime.choices[part] == "basic":
                    raise ConfigError(f"{key}: {part}=basic has no such key; add {part}={other}, or leave it out")
                hint = suggest(tail, known).replace("mean ", f"mean {head}.")
                raise ConfigError(f"{key}: there is no such key. {hint}")
        OmegaConf.update(cfg, key, override.value(), merge=True, force_add=True)
    return cfg, cfg.hydra if with_hydra else hydra


def compose(overrides: Sequence[str], *, to_show: bool = False) -> dict[str, Any]:
    """The composed configuration of sound overrides as plain values. Types and ranges are not checked yet.

    With `to_show` an experiment that is a sweep is as good as any, and keys that files leave to their defaults are
    there. ConfigError: the first problem that Hydra finds.
    """
    values = _composed(overrides, to_show)
    if (folder := source_of(values)) is not None:
        values = _of_run(folder, values, overrides)
        _check_values(values)
    return fill_in(Config, values) if to_show else values


@_as_config_error()
def _composed(overrides: Sequence[str], to_show: bool = False) -> dict[str, Any]:
    cfg, hydra = _compose(overrides)
    _check_hydra(hydra)
    chosen, typed = hydra.runtime.choices, set(_typed(overrides))
    swept = [str(key) for key in hydra.sweeper.get("params") or () if key not in typed]
    if swept and not to_show:
        name = chosen.get("experiment")
        raise ConfigError(f"experiment={name}: gives {', '.join(swept)} several values, which is a sweep; add -m")
    OmegaConf.resolve(cfg)
    values: Any = OmegaConf.to_container(cfg, throw_on_missing=True)
    if "experiment" in values:
        raise ConfigError(f"experiment={chosen['experiment']}: the file has to begin with the line # @package _global_")
    flat = _check_values(values)
    # schedule.name=StepLR alone leaves the options of warmup_cosine, which were not typed, in its file.
    for group in FREE:
        node, file = values[group], read_option(group, chosen[group])
        if isinstance(node, dict) and isinstance(node.get("options"), dict) and node.get("name") != file["name"]:
            for key, value in file["options"].items():
                if f"{group}.options.{key}" not in typed and node["options"].get(key) == value:
                    del node["options"][key]
    library, colon, _ = read_option("model", chosen["model"]).get("name", "").partition(":")
    if colon and (name := flatten(values).get("model.name")) and not str(name).startswith(f"{library}:"):
        values["model"]["name"] = f"{library}:{name}"  # model=timm model.name=resnet18 is timm's, not torchvision's
    if "data.num_workers" not in typed and isinstance(flat.get("data.num_workers"), int):
        values["data"]["num_workers"] = min(flat["data.num_workers"], num_cores())
    return values


_LOGS_NOTHING = {"version": 1, "root": None, "disable_existing_loggers": False}
_OF_HYDRA = {
    "hydra_logging": _LOGS_NOTHING, "job_logging": _LOGS_NOTHING, "callbacks": {}, "output_subdir": None,
    "verbose": False, "run.dir": ".", "sweep.subdir": ".", "job.chdir": False, "job.env_set": {}, "job.env_copy": [],
}  # fmt: skip
"""What a file may not change of Hydra: a class that its logging or a callback names is called, and opens files."""


def _check_hydra(hydra: Any) -> None:
    """Raise ConfigError if a file has changed parts of Hydra that are not used here."""
    values: Any = OmegaConf.to_container(hydra, resolve=False)
    for key, ours in _OF_HYDRA.items():
        node, _, leaf = key.rpartition(".")
        if (values[node] if node else values).get(leaf) != ours:
            reasons = {name.replace("/", "."): said for name, said in HYDRA.items()}
            raise ConfigError(f"hydra.{key}: {reasons.get(f'hydra.{key}', 'leave it out')}")


def _of_run(folder: Path, values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of a run, except those that overrides name and those of `HERE`."""
    stored, typed = stored_config(folder) or {}, set(_typed(overrides))
    name = str(stored["recipe"].get("name"))
    if name != values["recipe"]["name"]:
        if "recipe" in typed:  # settings of another recipe fit only by accident
            return values
        if name not in choices("recipe"):
            where = content_of(folder, "environment.json").get("config_dir") or "<folder>"
            raise ConfigError(f"{folder}: is a run of recipe={name}, which is not known here; add --config-dir {where}")
        return compose([f"recipe={name}", *overrides])
    if experiment := [text for text in overrides if parse_override(text).key_or_group == "experiment"]:
        others = flatten(_composed([text for text in overrides if text not in experiment]))
        typed |= {key for key, value in flatten(values).items() if key not in others or others[key] != value}
    if typed & LENGTHS:
        typed |= LENGTHS

    def taken(key: str, new: Any, old: Any) -> Any:
        both = isinstance(new, dict) and isinstance(old, dict)
        another = both and new.get("name") != old.get("name") and typed & {key, f"{key}.name"}
        if key in HERE or another or (key in typed and not both):
            return new
        if not both:
            return old
        dot = f"{key}." if key else ""
        # Our groups have the keys of today; what is in `options` is free.
        names = [*new] if "." not in key else [*old, *(k for k in new if f"{dot}{k}" in typed and k not in old)]
        return {name: taken(f"{dot}{name}", new.get(name), old.get(name, new.get(name))) for name in names}

    found = taken("", values, stored)
    began = str(content_of(folder, "environment.json").get("folder") or "")
    for group, key in (path.split(".") for path in PATHS if path.count(".") == 1 and not path.startswith("hydra")):
        prefix, path = re.fullmatch(r"(hf:)?(.*)", str(found[group].get(key) or ""), re.DOTALL).groups()  # type: ignore[union-attr]
        there = os.path.join(began, os.path.expanduser(path))
        if path and f"{group}.{key}" not in typed and there != os.path.abspath(path) and os.path.exists(there):
            found[group][key] = (prefix or "") + there
    return found


def note_on_run(values: dict[str, Any]) -> list[str]:
    """What to say of an evaluation or a prediction whose settings are those of a run: which run, and what differs."""
    if (folder := source_of(values)) is None:
        return []
    changed = differences(stored_config(folder) or {}, values, but=HERE)
    return [f"settings: those of {folder}" + (f", but {'; '.join(changed)}" if changed else "")]


def _typed(overrides: Sequence[str]) -> Iterator[str]:
    """The keys that are set, those in dictionaries, too."""
    for override in map(parse_override, overrides):
        value: Any = override.value()
        yield from flatten({override.key_or_group: value} if not isinstance(value, Glob) else {})


def _check_values(values: dict[str, Any]) -> dict[str, Any]:
    """The values under their full keys. Raises ConfigError for classes, secrets, and paths no file system takes."""
    if found := [path for path, key, _ in items_of(values) if key in ("_target_", "_partial_", "_recursive_")]:
        raise ConfigError(f"{found[0]}: _target_ is refused: a config never runs code")
    if secret := ", ".join(secrets_in(values)):
        how = "expected it in the environment (WANDB_API_KEY) or in ~/.netrc"
        raise ConfigError(f"{secret}: holds a key or a password, and settings are recorded; {how}")
    flat = flatten(values)
    if problems := [p for key in PATHS if (p := check_length(key, flat.get(key)))]:
        raise ConfigError(problems)
    return flat


def one_line(problem: BaseException) -> str:
    """An error of Hydra or OmegaConf as what to type instead, or in their words without internals."""
    text = str(problem)
    if isinstance(problem, RecursionError):
        return "the settings are nested too deeply; expected a few levels"
    if "HydraConfig was not set" in text:
        return "${hydra:...} has no value in a configuration; write the path itself"
    if twice := re.search(r"Multiple values for (\w+)\..*: (\S+)'", text):
        return f"{twice[1]}: has an option already; write `- override /{twice[1]}: {twice[2]}` in the defaults list"
    if unknown := re.search(r"Could not override '(?:experiment/)?([^@']+)", text):
        name = unknown[1]
        known = f"there is no such group. {suggest(name, groups())}"
        how = f"write `- override /{name}: ...`" if name in groups() else known
        return f"{text.partition(':')[0]}: override {name}: {how}"
    if missing := re.search(r"Could not find '(\w+)/([^']+)'", text):
        return f"{missing[1]}={missing[2]}: there is no such option. {suggest(missing[2], choices(missing[1]))}"
    key = re.search(r"full_key: (\S+)", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("full_key", "reference_type", "object_type", "To append"))]
    said = "; ".join(kept[:3]) or type(problem).__name__
    return f"{f'{key[1]}: ' if key else ''}{said}; see {program()} --help"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a sweep will do, as far as it is known before the start."""

    overrides: list[str]
    """In the form that Hydra takes."""
    dir: str
    sweeper: str
    """The option of hydra/sweeper."""
    jobs: list[list[str]]
    """The overrides of every job; for sweepers that choose their jobs, the first and the last values of their space."""
    num_parallel: int | None
    """Jobs at a time on this machine; 0: all that a search proposes at once; None: a scheduler decides."""
    is_dry: bool = False
    """Whether all jobs are dry runs."""


@_as_config_error()
def sweep_of(overrides: list[str]) -> Sweep:
    """What a sweep of sound overrides will do. ConfigError: what is swept cannot be read, or holds problems."""
    parsed = [parse_override(text) for text in overrides]
    _, hydra = _compose([o.input_line or "" for o in parsed if not o.is_sweep_override()], with_hydra=True)
    _check_hydra(hydra)
    config: dict[str, Any] = {
        part: OmegaConf.to_container(hydra[part], resolve=True) for part in ("launcher", "sweeper")
    }
    sweep_dir = str(hydra.sweep.dir)
    for part, settings in config.items():
        # Hydra makes these, so an interpolation or a file of the user's must not have brought another class.
        if not settings.pop("_target_").startswith(PLUGINS):
            raise ConfigError(f"hydra.{part}: _target_ is refused: a config never runs code")
    _check_values({"hydra": config})
    chosen = hydra.runtime.choices
    sweeper, launcher = chosen["hydra/sweeper"], chosen["hydra/launcher"]
    params = config["sweeper"].get("params") or {}
    if not isinstance(params, dict):
        raise ConfigError(f"hydra.sweeper.params={params}: expected keys with values, as in {{seed: '1,2,3'}}")
    for key, value in params.items():
        if isinstance(value, list) and key in typed_keys() and "list" not in str(typed_keys()[key]):
            raise ConfigError(f"hydra.sweeper.params.{key}: a list is one value; write several as text: '1,2'")
    named, problems = check_overrides([f"{key}={value}" for key, value in params.items()], multirun=True)
    if problems:
        raise ConfigError(problems)
    own = [o for o in (*map(parse_override, named), *parsed) if not o.key_or_group.startswith("hydra")]
    # A search draws from whole ranges; those of fractions are written out.
    counts = [num_values(o) for o in own if sweeper == "basic" or not is_whole_range(o)]
    num_jobs = math.prod(counts) if sweeper == "basic" else max(counts, default=0)
    if num_jobs > MOST_JOBS:
        swept = ", ".join(o.input_line or "" for o in own if o.is_sweep_override())
        raise ConfigError(f"{swept}: are {num_jobs:.4g} jobs; expected at most {MOST_JOBS:,}")
    if sweeper == "basic":
        if drawn := [o.input_line for o in own if isinstance(o.value(), IntervalSweep)]:
            raise ConfigError(f"{', '.join(map(str, drawn))}: an interval is for a search; use hydra/sweeper=optuna")
        jobs = [list(job) for batch in BasicSweeper.split_arguments(own, max_batch_size=None) for job in batch]
    else:
        last = {o.get_key_element(): o for o in own}.values()  # the command line wins
        jobs = [[at_end(o, end) for o in last] for end in (0, -1)]
    num_parallel = parallel_jobs(launcher, config["launcher"])
    if sweeper == "basic" and launcher != "basic" and num_parallel is not None:
        num_parallel = min(num_parallel or len(jobs), len(jobs))
    return Sweep(overrides, sweep_dir, sweeper, jobs, num_parallel)


def parallel_jobs(launcher: str, settings: Mapping[str, Any]) -> int | None:
    """How many jobs a launcher runs at a time on this machine; 0: all; None: a scheduler decides."""
    if launcher == "joblib":
        if not (num_jobs := int(settings["n_jobs"])):
            raise ConfigError("hydra.launcher.n_jobs=0: expected a number above 0, or -1 for all cores")
        return num_jobs if num_jobs > 0 else max(1, num_cores() + 1 + num_jobs)
    return {"basic": 1, "submitit_local": 0}.get(launcher)


def hand_over(arguments: list[str], task: Callable[[Any], Any]) -> None:
    """Hydra's own program, which calls `task` for each job of a sweep; flags stand before `--`."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand exceptions on instead of printing them
    # The first one is the program whose arguments are completed.
    sys.argv = [sys.argv[0] if program().endswith(".py") else program(), *arguments, *search_path()]
    hydra_main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(task)()


def show(arguments: list[str], flags: argparse.Namespace, task: Callable[[Any], Any]) -> None:
    """Answer flags that ask for the configuration, or what Hydra answers by itself."""
    sound, problems = check_overrides(flags.overrides if flags.cfg or flags.info else [], multirun=False)
    if problems:
        raise ConfigError(problems)
    if flags.cfg == "job":
        values: Any = OmegaConf.create(compose(sound, to_show=True))
        if flags.package not in (None, "_global_", "") and (values := OmegaConf.select(values, flags.package)) is None:
            raise ConfigError(f"--package={flags.package}: there is no such key. {suggest(flags.package, groups())}")
        say(OmegaConf.to_yaml(values).rstrip() if OmegaConf.is_config(values) else str(values))
        return
    asked = [argument for argument in arguments if argument not in flags.overrides and argument != "--"]
    try:  # it finds no flags behind overrides
        hand_over([*asked, "--", *(flags.overrides if flags.shell_completion else sound)], task)
    except Exception as problem:
        raise ConfigError(f"{' '.join(arguments)}: {one_line(problem)}") from problem
