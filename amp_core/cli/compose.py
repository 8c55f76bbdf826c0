"""The command line, checked and composed by Hydra.

Hydra stops at the first problem, raises many kinds of exceptions, and creates folders before the task runs. So every
override is looked at here first, by itself, and then the whole; `compose` either returns plain values or raises one
`ConfigError` that names all problems. With launch glue, the only place that imports hydra.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import difflib
import fcntl
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from amp_core.cli.command import program
from amp_core.cli.lease import num_cores
from amp_core.config.errors import ConfigError
from amp_core.config.files import kind_of, open_file, read_bytes, read_json, read_yaml
from amp_core.config.redact import holds_secret, refuse_secret, secrets_in
from amp_core.config.rules import differences, flatten, node_range
from amp_core.config.schema import CONFIG_DIR, Config, choices, conf_dir, config_dirs, read_option, suggest

HYDRA = {
    "hydra.run.dir": "a sweep has a folder of its own; use hydra.sweep.dir=multirun/mine",
    "hydra.sweep.subdir": "each job gets a folder named after its overrides; leave it out",
    "hydra.output_subdir": "the run folder always holds .hydra; leave it out",
    "hydra.job.chdir": "paths count from the folder where you start, and run_dir= says where to write; leave it out",
    "hydra.job.name": "the run folder names the run; use run_dir=runs/mine",
    "hydra.job.env_set": "set variables in the shell, before the command; leave it out",
    "hydra.callbacks": "a callback names a class, and a config never runs code; leave it out",
    "hydra.searchpath": "your own YAML files are found with the flag --config-dir <folder>; leave it out",
    "hydra.verbose": "Hydra's own log is off, and train.log holds all of the run's; leave it out",
    **dict.fromkeys(("hydra/job_logging", "hydra/hydra_logging"), "what is logged says log; use log=none to be quiet"),
    "hydra/callbacks": "a callback names a class, and a config never runs code; leave it out",
}
"""What people set of Hydra, why it is not used here, and what to type instead."""
IN_SWEEPS = ("hydra/launcher", "hydra.launcher.", "hydra/sweeper", "hydra.sweeper.", "hydra.sweep.dir")
PLUGINS = ("hydra._internal.core_plugins.", "hydra_plugins.")
"""What Hydra may make: its own and installed launchers and sweepers."""

MEANT = {
    "amp": {
        **dict.fromkeys(("16", "16-mixed", "float16", "half", "true", "O1"), "fp16"),
        **dict.fromkeys(("bf16-mixed", "bfloat16"), "bf16"),
        **dict.fromkeys(("32", "32-true", "float32", "no", "false"), "fp32"),
        "bf16-true": "bf16_pure",
        "O2": "o2",
    },
    "perf": {"true": "compile", "false": "default"},
    "device": {"gpu": "cuda"},
}
"""Values of other projects, and ours."""
WORDS = {
    **dict.fromkeys(("learning_rate", "base_lr", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("precision", "mixed_precision", "dtype", "use_amp", "opt_level"), "amp"),
    **dict.fromkeys(("gpus", "num_gpus", "nproc", "devices", "world_size", "num_processes"), "layout.nproc_per_node"),
    **dict.fromkeys(("nodes", "num_nodes"), "layout.nnodes"),
    **dict.fromkeys(("max_steps", "num_steps", "iterations", "max_iters"), "steps"),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum"), "accumulation"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clip_val", "clip_grad"), "clip.max_norm"),
    **dict.fromkeys(("output_dir", "out_dir", "save_dir", "log_dir"), "run_dir"),
    **dict.fromkeys(("every", "save_steps", "checkpoint_every"), "save_every"),
    **dict.fromkeys(("accelerator", "trainer", "strategy", "parallel"), "layout device"),
    "ckpt_path": "resume",
    **dict.fromkeys(("pretrained", "init_from", "initial_checkpoint", "checkpoint_path", "finetune"), "model.weights"),
    "logger": "log",
    "hparams_search": "experiment",
    "lr_scheduler": "schedule",
    "compile": "perf",
    "torch_compile": "perf",
    "wd": "optimizer.weight_decay",
    "batch": "batch_size",
    "tags": "log.wandb_tags",
    "fast_dev_run": "dry_run",
}
"""What other projects call our keys and groups."""
FREE = ("model", "optimizer", "schedule")
"""Groups whose `options` are arguments of what they build; `name` takes more than there are files."""
PATHS = ("data.path", "data.eval_path", "model.weights", "run_dir", "resume", "recipe.teacher")
PATHS += ("hydra.sweep.dir", "hydra.run.dir")
"""Keys that hold a path."""
PATH = re.compile(rf"\+*({'|'.join(map(re.escape, PATHS))})=(['\"]?)(.*)\2$", re.DOTALL)
RECORDED = "holds a key or a password, and settings are recorded; leave it out"
Problems = Callable[[list[str]], list[str]]


def groups() -> list[str]:
    """The config groups of settings."""
    folders = (folder.name for folder in conf_dir().iterdir() if folder.is_dir())
    return sorted(name for name in folders if name[0] not in "._" and name not in ("hydra", "experiment"))


@functools.cache
def typed_keys() -> dict[str, Any]:
    """Every key that may be set, with dots, except those below `options` and `recipe`; and its type."""

    def walk(kind: type[Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, hint in get_type_hints(kind).items():
            inner = [k for k in (hint, *get_args(hint)) if dataclasses.is_dataclass(k)]
            yield f"{prefix}{name}", hint
            if inner:
                yield from walk(inner[0], f"{prefix}{name}.")  # type: ignore[arg-type]

    return dict(walk(Config, ""))


@functools.lru_cache(4096)
def _parse(text: str) -> Override:
    """An override as Hydra reads it. The parser raises several kinds."""
    return OverridesParser.create().parse_override(text)


def use_config_dir(folder: str) -> None:
    """Look for options, experiments and recipes in a folder of the user's, too.

    Raises:
        ConfigError: there is no such folder, or it holds nothing of the kind.
    """
    own = Path(folder).expanduser().absolute()
    known = [*groups(), "experiment", "hydra"]
    if not os.path.isdir(own):
        raise ConfigError(f"--config-dir={folder[:200]}: there is no such folder; expected one with {', '.join(known)}")
    if not any(file for group in known for file in (own / group).glob("**/*.yaml")):
        raise ConfigError(f"--config-dir={folder}: holds no option of a group; expected files such as recipe/mine.yaml")
    os.environ[CONFIG_DIR] = str(own)


def check_config_dirs() -> None:
    """Hold the names of all folders against each other.

    Raises:
        ConfigError: two options, experiments or recipes have one name.
    """
    first: dict[str, Path] = {}
    for folder in config_dirs() if config_dirs()[1:] else ():
        for file in (*folder.glob("*/*.yaml"), *folder.glob("recipe/*.py")):
            other = first.setdefault(f"{file.parent.name}/{file.name}", file)
            if other != file:
                raise ConfigError(f"{file}: has the name of {other}; rename yours")


def check_overrides(
    overrides: Sequence[str], *, multirun: bool, problems_of: Problems | None = None
) -> tuple[list[str], list[str]]:
    """(sound overrides in the form Hydra takes, problems) of the command line, each override on its own.

    Args:
        overrides: as they were typed.
        multirun: whether they are those of a sweep.
        problems_of: what is wrong with sound overrides. With it, what an unknown key should have been is tried before
            it is told.
    """
    sound: list[str] = []
    problems: list[str] = []
    unknown: list[Override] = []
    for text in overrides:
        try:
            text.encode()
        except UnicodeEncodeError:
            problems.append(f"{text!a}: is not valid UTF-8; expected key=value")
            continue
        if problem := refuse_secret(text):
            problems.append(problem)
            continue
        try:
            override = _parse(text)
        except Exception:  # the parser raises several kinds
            override = None
        if (path := PATH.match(text)) and (override is None or path[3].startswith("~")):
            # Hydra reads neither umlauts nor ~ without quotes, and a shell leaves a ~ behind = as it is.
            override = _parse(quoted(path[1], os.path.expanduser(path[3])))
        if override is None:
            how = ", without spaces" if " =" in text or "= " in text else ", lists in quotes: 'key=[a,b]'"
            problems.append(f"{text!r}: cannot be read; expected key=value{how}")
            continue
        try:
            sound += _sound_form(override, multirun)
        except KeyError:
            unknown.append(override)
        except ConfigError as refused:
            problems += refused.problems
    return sound, problems + [_say_unknown(override, sound, problems_of) for override in unknown]


def _sound_form(override: Override, multirun: bool) -> list[str]:
    """An override as Hydra takes it; nothing when it asks for what is so anyway.

    Raises:
        ConfigError: it cannot be; what to type instead.
        KeyError: there is no such key.
    """
    key, text, value = override.key_or_group, override.input_line or "", override.value()
    typed = text.partition("=")[2]
    if "_target_" in text:
        raise ConfigError(f"{key}: _target_ is refused: names are looked up in tables, and a config never runs code")
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return _hydra_form(override, typed, multirun)
    if override.package is not None:
        raise ConfigError(f"{text}: packages (@) are not used here: each group has one place; use {key}={typed}")
    if override.is_delete():
        raise ConfigError(f"{text}: nothing is deleted here; {_off(key)}")
    if override.is_sweep_override():
        if not multirun:
            how = f"add -m, or put a list in brackets: '{key}=[...]'"
            raise ConfigError(f"{text}: several values are a sweep; {how}")
        if key in (*groups(), "experiment") and override.is_choice_sweep():
            options = value.filter(choices(key)) if isinstance(value, Glob) else [str(v) for v in value.list]  # type: ignore[union-attr]
            for option in options or [typed]:
                _check_option(key, option)
                if key == "experiment" and "params" in _option(key, option, tuple(config_dirs())).get("hydra", {}).get(
                    "sweeper", {}
                ):
                    raise ConfigError(f"{text}: {option} is a sweep of its own; start one after the other")
            return [f"{key}={','.join(options)}"]
        if isinstance(value, Glob):
            raise ConfigError(f"{text}: glob chooses among the options of a group; write the values: {key}=a,b")
    elif key in (*groups(), "experiment"):
        option = value.text if isinstance(value, QuotedString) else value
        if key == "experiment" and option is None:
            return []
        _check_option(key, option)
        return [f"{key}={option}"]
    if re.search(r"options(\.|$)", key):  # of a constructor: free keys, and setting one adds it
        return [f"++{key}={typed}"]
    if key in typed_keys() or key.startswith(("recipe.", "debug.inject.")):
        return [f"{key}={typed}"]
    raise KeyError(key)


def _check_option(group: str, option: Any) -> None:
    if not isinstance(option, str) or option not in choices(group):
        more = f" {group}.name= takes further names, see --help {group}." if group in FREE else ""
        raise ConfigError(f"{group}={option}: there is no such option. {suggest(str(option), choices(group))}{more}")


@functools.lru_cache(256)
def _option(group: str, option: str, folders: tuple[Path, ...]) -> dict[str, Any]:
    return read_option(group, option)


def _off(key: str) -> str:
    """How to do without a key or a group."""
    if key in groups():
        for option in ("none", "off", "constant", "default", "fp32", "single"):
            if option in choices(key):
                return f"use {key}={option}"
    elif type(None) in get_args(typed_keys().get(key)):
        return f"use {key}=null"
    return "leave it out"


def _hydra_form(override: Override, typed: str, multirun: bool) -> list[str]:
    key, value = override.key_or_group, override.value()
    if key == "hydra.run.dir" and not multirun and not override.is_delete():
        return _sound_form(_parse(f"run_dir={typed}"), multirun)
    if (key, str(value)) in (("hydra.job.chdir", "False"), ("hydra.mode", "MULTIRUN" if multirun else "RUN")):
        return []
    for name, reason in HYDRA.items():
        if key == name or key.startswith(f"{name}."):
            raise ConfigError(f"{key}: {reason}")
    if not key.startswith(IN_SWEEPS) or override.is_delete() or override.package is not None:
        raise ConfigError(
            f"{key}: is not used here; leave it out. A sweep takes hydra.sweep.dir, hydra/launcher, hydra/sweeper and "
            f"the keys of these"
        )
    if not multirun:
        raise ConfigError(f"{override.input_line}: has an effect only in a sweep; add -m, or leave it out")
    if key.startswith("hydra.sweeper.params.") or (key == "hydra.sweeper.params" and isinstance(value, dict)):
        # The same as values on the command line.
        given = value if isinstance(value, dict) else {key.removeprefix("hydra.sweeper.params."): typed}
        return [form for name, values in given.items() for form in _sound_form(_parse(f"{name}={values}"), multirun)]
    if override.is_sweep_override():
        raise ConfigError(f"{override.input_line}: holds for the whole sweep; expected one value")
    if key in ("hydra/launcher", "hydra/sweeper") and (problem := _check_plugin(key, str(value))):
        raise ConfigError(problem)
    if key == "hydra.sweep.dir" and (problem := check_place(key, "" if value is None else str(value))):
        raise ConfigError(problem)
    return [f"{key}={typed}"]


def _say_unknown(override: Override, sound: list[str], problems_of: Problems | None) -> str:
    key, typed = override.key_or_group, (override.input_line or "").partition("=")[2]
    before = problems_of(sound) if problems_of else []
    for candidates in _candidates(key, typed):
        found = [fixed for text in candidates if (fixed := _tried(text, sound, before, problems_of))]
        if found:
            shown = (" ".join(texts) for texts in found[:3])
            meant = " or ".join(shown)
            return f"{key}: there is no such key. Did you mean {meant}? All keys: {program()} --cfg job"
    return f"{key}: there is no such key. All keys: {program()} --cfg job"


def _candidates(key: str, typed: str) -> Iterator[list[str]]:
    """What an unknown key may have been meant for, the likeliest first: overrides that are alternatives."""
    head, _, tail = key.rpartition(".")
    known = [*typed_keys(), "experiment"]
    yield [f"{other}={typed}" for other in known if other.rpartition(".")[2] == tail]
    for target in WORDS.get(tail, "").split():
        meant = MEANT.get(target, {}).get(typed, typed)
        valid = [option for option in choices(target) if meant.lower() in option]
        yield [f"{target}={option}" for option in ([meant] if meant in valid or not valid else valid[:1])]
    if tail in choices("amp"):
        yield [f"amp={tail}"]
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.75)
    yield from ([f"{other}={typed}"] for other in near)
    if head in FREE:
        yield [f"{head}.options.{tail}={typed}"]


def _tried(text: str, sound: list[str], before: list[str], problems_of: Problems | None) -> list[str] | None:
    """The override with what it needs besides, when a run takes it."""
    texts = [text]
    for _ in range(4):
        if problems_of is None:
            return texts
        form, problems = check_overrides(texts, multirun=True)
        if not problems:
            job = [_at_end(_parse(part), 0) for part in (*sound, *form)]
            problems = [problem for problem in problems_of(job) if problem not in before]
        if not problems:
            return texts
        more = [more for problem in problems for more in re.findall(r"\buse ([\w.]+=\w+)", problem)]
        if not more or more[0] in texts:
            return None
        texts = [more[0], *(text for text in texts if text.partition("=")[0] != more[0].partition("=")[0])]
    return None


def _check_plugin(key: str, option: str) -> str | None:
    """Whether Hydra has a launcher or a sweeper of this name."""
    Plugins.instance()  # they enter themselves into the store
    valid = sorted({name.removesuffix(".yaml") for name in ConfigStore.instance().list(key)} | set(choices(key)))
    if option in valid:
        return None
    if option in ("joblib", "submitit_local", "submitit_slurm"):
        return f"{key}={option}: is not installed: pip install -c constraints.txt hydra-{option.split('_')[0]}-launcher"
    return f"{key}={option}: there is no such option. {suggest(option, [v for v in valid if v != 'optuna_types'])}"


def search_path() -> list[str]:
    """How Hydra is told of the user's own folders."""
    own = [_quoted(f"file://{folder}") for folder in config_dirs()[1:]]
    return [f"hydra.searchpath=[{','.join(own)}]"] if own else []


@functools.lru_cache(64)
def _read(chosen: tuple[str, ...]) -> tuple[Any, Any]:
    """The configuration with these options of groups before any key is set, and its node `hydra`.

    The jobs of a sweep share a few.
    """
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
    parsed = [_parse(text) for text in overrides]
    is_choice = {*groups(), "experiment", "hydra/launcher", "hydra/sweeper"}.__contains__
    chosen = (o.input_line or "" for o in parsed if is_choice(o.key_or_group))
    before, hydra = _read((*search_path(), *chosen))
    cfg = copy.deepcopy(before)
    if with_hydra:
        cfg["hydra"] = hydra
    for override in parsed:
        key = override.key_or_group
        if is_choice(key) or (key.startswith("hydra.") and not with_hydra):
            continue
        if key.startswith(("hydra.launcher.", "hydra.sweeper.")):
            head, _, tail = key.rpartition(".")
            known = [str(name) for name in OmegaConf.select(cfg, head) or () if name != "_target_"]
            if tail not in known:
                raise ConfigError(f"{key}: there is no such key. {suggest(key, [f'{head}.{name}' for name in known])}")
        OmegaConf.update(cfg, key, override.value(), merge=True, force_add=True)
    return cfg, cfg.hydra if with_hydra else hydra


def compose(overrides: Sequence[str], *, to_show: bool = False) -> dict[str, Any]:
    """The composed configuration as plain values. Types and ranges are not checked yet.

    Args:
        overrides: sound ones, from `check_overrides`.
        to_show: not to run, so an experiment that is a sweep is as good as any.

    Raises:
        ConfigError: with the first problem that Hydra finds.
    """
    try:
        cfg, hydra = _compose(overrides)
        chosen, typed = hydra.runtime.choices, set(_typed(overrides))
        swept = [str(key) for key in hydra.sweeper.get("params") or () if key not in typed]
        if swept and not to_show:
            name = chosen.get("experiment")
            raise ConfigError(f"experiment={name}: gives {', '.join(swept)} several values, which is a sweep; add -m")
        return _plain(cfg, chosen, typed)
    except ConfigError:
        raise
    except Exception as problem:  # Hydra and OmegaConf raise dozens of kinds; each is a bad command line
        raise ConfigError(one_line(problem)) from problem


def _typed(overrides: Sequence[str]) -> Iterator[str]:
    """The keys that are set, those in dictionaries, too."""
    for override in map(_parse, overrides):
        value: Any = override.value()
        yield from flatten({override.key_or_group: value} if not isinstance(value, Glob) else {})


def _plain(cfg: Any, chosen: Mapping[str, str], typed: set[str]) -> dict[str, Any]:
    OmegaConf.resolve(cfg)
    values: Any = OmegaConf.to_container(cfg, throw_on_missing=True)
    if found := _find_target(values):
        raise ConfigError(f"{found}: _target_ is refused: a config never runs code")
    if secret := list(secrets_in(values)):
        raise ConfigError(f"{', '.join(secret)}: {RECORDED}")
    flat = flatten(values)
    if problems := [p for key in PATHS if (p := check_length(key, flat.get(key)))]:
        raise ConfigError(problems)
    for group in FREE:
        _drop_options_of_another(group, _option(group, chosen[group], tuple(config_dirs())), values, typed)
    if "data.num_workers" not in typed and isinstance(flat.get("data.num_workers"), int):
        values["data"]["num_workers"] = min(flat["data.num_workers"], num_cores())
    return values


def _drop_options_of_another(group: str, file: dict[str, Any], values: dict[str, Any], typed: set[str]) -> None:
    """`schedule.name=StepLR` alone leaves the options of warmup_cosine, which somebody did not type, in its file."""
    node = values[group]
    if isinstance(node, dict) and isinstance(node.get("options"), dict) and node.get("name") != file["name"]:
        for key, value in file["options"].items():
            if f"{group}.options.{key}" not in typed and node["options"].get(key) == value:
                del node["options"][key]


def _find_target(values: Any, path: str = "") -> str | None:
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        here = f"{path}.{key}" if path else str(key)
        if str(key) in ("_target_", "_partial_", "_recursive_"):
            return here
        if inner := _find_target(value, here):
            return inner
    return None


def one_line(problem: BaseException) -> str:
    """What Hydra or OmegaConf said, without what is only about their insides."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    kept = [
        line
        for line in lines
        if not line.startswith(("full_key", "reference_type", "object_type", "To append to your"))
    ]
    return f"{'; '.join(kept[:3]) or type(problem).__name__}; see {program()} --help"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a sweep will do, as far as it can be told before it begins."""

    dir: str
    sweeper: str
    """The option of hydra/sweeper."""
    launcher: str
    jobs: list[list[str]]
    """The overrides of every job; for sweepers that choose their jobs, the first and the last values of their space."""
    num_parallel: int | None
    """Jobs at a time on this machine; None: a scheduler's business."""


def sweep_of(overrides: list[str]) -> Sweep:
    """What a sweep will do.

    Args:
        overrides: sound ones, from `check_overrides`.

    Raises:
        ConfigError: what is swept cannot be read, or holds problems.
    """
    parsed = [_parse(text) for text in overrides]
    try:
        _, hydra = _compose([o.input_line or "" for o in parsed if not o.is_sweep_override()], with_hydra=True)
        config: dict[str, Any] = {
            part: OmegaConf.to_container(hydra[part], resolve=True) for part in ("launcher", "sweeper")
        }
        sweep_dir = str(hydra.sweep.dir)
    except ConfigError:
        raise
    except Exception as problem:  # Hydra and OmegaConf raise dozens of kinds; each is a bad command line
        raise ConfigError(one_line(problem)) from problem
    for part, settings in config.items():
        # Hydra makes these, so an interpolation or a file of the user's must not have brought another class.
        if not settings.pop("_target_").startswith(PLUGINS) or _find_target(settings) or hydra.callbacks:
            raise ConfigError(f"hydra.{part}: _target_ is refused: a config never runs code")
    if secret := list(secrets_in(config, "hydra")):
        raise ConfigError(f"{', '.join(secret)}: {RECORDED}")
    chosen = hydra.runtime.choices
    sweeper, launcher = chosen["hydra/sweeper"], chosen["hydra/launcher"]
    params = config["sweeper"].get("params") or {}
    if not isinstance(params, dict):
        raise ConfigError(f"hydra.sweeper.params={params}: expected keys with values, as in {{seed: '1,2,3'}}")
    named, problems = check_overrides([f"{key}={value}" for key, value in params.items()], multirun=True)
    if problems:
        raise ConfigError(problems)
    own = [o for o in (*map(_parse, named), *parsed) if not o.key_or_group.startswith("hydra")]
    if sweeper == "basic":
        if drawn := [o.input_line for o in own if isinstance(o.value(), IntervalSweep)]:
            raise ConfigError(f"{', '.join(map(str, drawn))}: an interval is for a search; use hydra/sweeper=optuna")
        jobs = [list(job) for batch in BasicSweeper.split_arguments(own, max_batch_size=None) for job in batch]
    else:
        last = {o.get_key_element(): o for o in own}.values()  # the command line wins
        jobs = [[_at_end(o, end) for o in last] for end in (0, -1)]
    num_parallel = parallel_jobs(launcher, config["launcher"])
    if sweeper == "basic" and launcher != "basic" and num_parallel is not None:
        num_parallel = min(num_parallel or len(jobs), len(jobs))
    return Sweep(sweep_dir, sweeper, launcher, jobs, num_parallel)


def parallel_jobs(launcher: str, settings: Mapping[str, Any]) -> int | None:
    """How many jobs a launcher runs at a time on this machine; 0: all; None: a scheduler decides."""
    if launcher == "joblib":
        num_jobs = int(settings["n_jobs"])
        return num_jobs if num_jobs > 0 else max(1, num_cores() + 1 + num_jobs)
    return {"basic": 1, "submitit_local": 0}.get(launcher)


def _at_end(override: Override, end: int) -> str:
    """One end of the values of a search space, as an override: 0 the first, -1 the last."""
    if not override.is_sweep_override():
        return f"{override.get_key_element()}={override.get_value_element_as_str()}"
    value = override.value()
    if isinstance(value, IntervalSweep):
        ends = (value.start, value.end)
        return f"{override.get_key_element()}={ends[end]}"
    return f"{override.get_key_element()}={list(override.sweep_string_iterator())[end]}"


def quoted(key: str, value: str) -> str:
    """An override whose value is this text, whatever is in it."""
    return f"{key}={_quoted(value)}"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


# --- run folders ------------------------------------------------------------------------------------------------------


def choose_run_dir(values: dict[str, Any], cfg: Config) -> str | None:
    """The run folder of a single run; None for what writes nothing. Creates nothing.

    Raises:
        ConfigError: the folder is in use, or holds a run that these settings cannot continue.
    """
    if cfg.dry_run or cfg.task == "evaluate":
        return None
    if cfg.resume == "last":
        return last_unfinished(values)
    run_dir = cfg.run_dir if cfg.run_dir is not None else fresh_run_dir(cfg.recipe["name"])
    if problem := check_place("run_dir", run_dir):
        raise ConfigError(problem)
    if cfg.run_dir is not None:
        check_run_dir(run_dir, values, cfg)
    return run_dir


def check_run_dir(run_dir: str, values: dict[str, Any], cfg: Config) -> None:
    """Whether a run with these settings may write to a folder that may already hold one.

    Raises:
        ConfigError: it may not.
    """
    folder = Path(run_dir)
    if problems := list(_check_names(folder)):
        raise ConfigError([f"run_dir={run_dir}: {problem}" for problem in problems])
    nodes = node_range(cfg.layout.nnodes)
    # Of several machines one has the lock; a machine that comes back finds it taken by its own run.
    if is_locked(folder) and (nodes is None or nodes[1] == 1):
        raise ConfigError(f"run_dir={run_dir}: another process is writing there; wait for it, or choose another folder")
    stored = stored_config(folder)
    if stored is None or not any(folder.glob("checkpoints/step_*")):
        return
    if cfg.resume == "never":
        raise ConfigError(f"resume=never: {run_dir} holds a run already; choose another run_dir, or resume=auto")
    changed = differences(stored, values)
    if changed and not cfg.allow_changes:
        raise ConfigError(
            [f"{change} (run_dir={run_dir} was begun with the first)" for change in changed]
            + ["allow_changes=false: expected the settings of the run; use allow_changes=true to go on with these"]
        )


def check_length(key: str, path: Any) -> str | None:
    """What is wrong with the length of a path, for the file system and what a run writes below it."""
    if not isinstance(path, str) or "\0" in path:
        return None
    if any(len(os.fsencode(part)) > 255 for part in Path(path).parts):
        return f"{key}={path[:40]}...: a name in it is longer than 255 bytes; choose a shorter one"
    if len(os.fsencode(os.path.abspath(path))) > 3800:
        return f"{key}={path[:40]}...: the path is longer than 3800 bytes; choose a shorter one"
    return None


def check_place(key: str, path: str) -> str | None:
    """What is wrong with a folder to write to, whatever it holds."""
    if not path.strip():
        return f"{key}='': expected a folder"
    if holds_secret(path) or holds_secret(os.path.abspath(path)):
        return f"{key}: the name of the folder holds a key or a password; choose another one"
    if problem := check_length(key, path):
        return problem
    existing = Path(path).resolve()
    if existing in (Path("/"), Path.home().resolve()):
        return f"{key}={path}: is not a folder for runs; expected one below it"
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        return f"{key}={path}: {existing} is a file; expected a folder"
    if not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        return f"{key}={path}: {existing} is read-only; choose a folder that can be written"
    return None


OVERWRITTEN = (".hydra", ".lock", "checkpoints", "doctor", "environment.json", "metrics.jsonl", "samples")
OVERWRITTEN += ("summary.json", "train.log", "wandb_id")
"""Names in a run folder that a run makes, and changes when they are there."""
_FOLDERS = (".hydra", "checkpoints", "doctor", "samples")


def _check_names(folder: Path) -> Iterator[str]:
    """What must not be changed in a folder: files of somebody else, and what links lead to."""
    for name in OVERWRITTEN:
        if (folder / name).is_symlink() and name != "checkpoints":
            yield f"{name} is a link to {os.readlink(folder / name)}, and would be changed there; remove the link"
    for name in (*OVERWRITTEN, *(f".hydra/{part}.yaml" for part in ("config", "overrides"))):
        found, expected = kind_of(folder / name), "a folder" if name in _FOLDERS else "a file"
        if found not in ("", "a link", expected):
            yield f"{name} is {found}, expected {expected}; remove it, or choose another folder"
    stored = stored_config(folder)
    if any(folder.glob("checkpoints/step_*")) or (stored is not None and {"recipe", "amp"} <= stored.keys()):
        return
    foreign = [name for name in OVERWRITTEN if os.path.lexists(folder / name) and not _is_left(folder / name)]
    if foreign:
        yield f"holds no run, and files that a run would change: {', '.join(foreign)}; choose another folder"


def _is_left(path: Path) -> bool:
    """What a run leaves that ended before it began."""
    if path.is_dir():
        return all(entry.name.startswith(".") for entry in path.iterdir())
    if path.name == "summary.json":
        return status_of(path.parent) == "failed"
    with contextlib.suppress(OSError, ValueError):
        return path.name == ".lock" and re.fullmatch(rb"(process [0-9]+ on .*)?", read_bytes(path)) is not None
    return False


def is_finished(run_dir: str, values: dict[str, Any]) -> bool:
    """Whether the folder holds the finished run of just these settings."""
    stored = stored_config(run_dir)
    free = {"log", "layout", "device", "save_every", "eval_every", "log_every", "perf", "run_dir", "resume"}
    return stored is not None and status_of(run_dir) == "finished" and not differences(stored, values, but=free)


def status_of(run_dir: str | os.PathLike[str]) -> str:
    """`status` of summary.json; "unknown" when it cannot be read."""
    try:
        return str(read_json(Path(run_dir, "summary.json"))["status"])
    except (OSError, ValueError, KeyError):
        return "unknown"


def fresh_run_dir(recipe: str) -> str:
    """outputs/<recipe>/<date_time>, with a number behind when that is taken."""
    # Milliseconds, for runs that are started together.
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")[:-3]
    path = Path("outputs", recipe, stamp)
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{stamp}_{number}")
    return str(path)


def sweep_subdir(overrides: list[str]) -> str:
    """A folder name for a job: its overrides in safe characters, at most 120 of them, and a hash of the whole."""
    text = ",".join(overrides)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    safe = re.sub(r"[^A-Za-z0-9=,._+-]", "_", text).lstrip(".")[:120]
    return f"{safe}-{digest}" if safe else digest


def overrides_of(run_dir: str | os.PathLike[str]) -> list[str]:
    """The settings that a run was started with, as they were typed.

    Raises:
        ConfigError: the folder holds no run.
    """
    path = Path(run_dir, ".hydra", "overrides.yaml")
    try:
        typed = [str(text) for text in read_yaml(path)]
    except FileNotFoundError as problem:
        raise ConfigError(f"{run_dir}: holds no run (no .hydra/overrides.yaml)") from problem
    except (OSError, ValueError, TypeError) as problem:
        raise ConfigError(f"{path}: cannot be read: {getattr(problem, 'strerror', None) or problem}") from problem
    return [text for text in typed if not text.startswith(("run_dir=", "resume=", "hydra."))]


def stored_config(run_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The configuration of a run folder, or None when it holds no run."""
    try:
        values = read_yaml(Path(run_dir, ".hydra", "config.yaml"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def last_unfinished(values: dict[str, Any]) -> str:
    """The newest unfinished run folder of the same configuration.

    Raises:
        ConfigError: there is none.
    """
    base = Path("outputs", str(values["recipe"]["name"]))
    finished = others = 0
    for folder in sorted(base.iterdir() if base.is_dir() else [], key=lambda p: p.stat().st_mtime, reverse=True):
        stored = stored_config(folder)
        if stored is None:
            continue
        if status_of(folder) == "finished":
            finished += 1
        elif is_locked(folder) or differences(stored, values):
            others += 1
        else:
            return str(folder)
    raise ConfigError(
        f"resume=last: no unfinished run with these settings in {base} ({finished} finished, {others} running or with "
        f"other settings); begin one with resume=auto, or name its folder with run_dir="
    )


def is_locked(folder: Path) -> bool:
    """Whether a living process writes to this run folder."""
    try:
        with os.fdopen(open_file(folder / ".lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
