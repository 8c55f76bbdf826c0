"""The command line, checked and composed by Hydra.

Hydra stops at the first problem, raises many kinds of exceptions, and creates folders before the task runs. So every
override is looked at here first, by itself, and then the whole; `compose` either returns plain values or raises one
`ConfigError` that names all problems. With launch glue, the only place that imports hydra.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, OverrideType, QuotedString
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from amp_core.cli.lease import num_cores
from amp_core.config.errors import ConfigError
from amp_core.config.files import kind_of, open_file, read_bytes, read_json, read_yaml
from amp_core.config.redact import refuse_secret, secrets_in
from amp_core.config.rules import differences, node_range
from amp_core.config.schema import Config, choices, conf_dir, suggest

# What Hydra's folders would do is done by run_dir.
OWNED = {
    "hydra.run.dir": "use run_dir=",
    "hydra.sweep.subdir": "each job gets a folder named after its overrides",
    "hydra.output_subdir": "the run folder always holds .hydra",
    "hydra.job.chdir": "use run_dir=",
}


WORDS = {
    **dict.fromkeys(("learning_rate", "base_lr", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("precision", "mixed_precision", "dtype", "use_amp", "opt_level"), "amp=<mode>"),
    **{mode: f"amp={mode}" for mode in ("fp32", "tf32", "bf16", "fp16")},
    **dict.fromkeys(("gpus", "num_gpus", "nproc", "devices", "world_size", "num_processes"), "layout.nproc_per_node"),
    **dict.fromkeys(("nodes", "num_nodes"), "layout.nnodes"),
    **dict.fromkeys(("max_steps", "num_steps", "iterations", "max_iters"), "steps"),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum"), "accumulation"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clip_val", "clip_grad"), "clip=norm clip.max_norm"),
    **dict.fromkeys(("output_dir", "out_dir", "save_dir", "log_dir"), "run_dir"),
    **dict.fromkeys(("every", "save_steps", "checkpoint_every"), "save_every"),
    **dict.fromkeys(("compile", "torch_compile", "cuda_graph"), "perf=<option>"),
}
"""What other projects call our keys."""
FREE = ("model", "optimizer", "schedule")
"""Groups whose `options` are arguments of what they build; `name` takes more than there are files."""


def groups() -> list[str]:
    """The config groups of settings."""
    folders = (folder.name for folder in conf_dir().iterdir() if folder.is_dir())
    return sorted(name for name in folders if name[0] not in "._" and name not in ("hydra", "experiment"))


def known_keys() -> list[str]:
    """Every key that may be set, with dots, except those below `options` and `recipe`."""

    def walk(kind: type[Any], prefix: str) -> Iterator[str]:
        for name, hint in get_type_hints(kind).items():
            inner = [k for k in (hint, *get_args(hint)) if dataclasses.is_dataclass(k)]
            yield f"{prefix}{name}"
            if inner:
                yield from walk(inner[0], f"{prefix}{name}.")  # type: ignore[arg-type]

    return list(walk(Config, ""))


def check_overrides(overrides: list[str], *, multirun: bool) -> tuple[list[str], list[str]]:
    """(sound overrides in the form Hydra takes, problems) of the command line, each override on its own."""
    parser = OverridesParser.create()
    sound, problems = [], []
    keys, group_names = known_keys(), [*groups(), "experiment"]
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
            override = parser.parse_override(text)
        except Exception:  # the parser raises several kinds
            how = ", without spaces" if " =" in text or "= " in text else ", lists in quotes: 'key=[a,b]'"
            problems.append(f"{text!r}: cannot be read; expected key=value{how}")
            continue
        problem = _check_override(override, keys, group_names, multirun)
        if problem:
            problems.append(problem)
        else:
            # Options of a constructor are free keys: setting one adds it.
            free = "options." in override.key_or_group and override.type is OverrideType.CHANGE
            sound.append(f"++{text}" if free else text)
    return sound, problems


def _check_override(override: Override, keys: list[str], group_names: list[str], multirun: bool) -> str | None:
    key, text = override.key_or_group, override.input_line or ""
    value = override.value()
    if "_target_" in text:
        return f"{key}: _target_ is refused: names are looked up in tables, and a config never runs code"
    if key in OWNED and not override.is_delete():
        return f"{key}: is set by this project; {OWNED[key]}"
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        # The rest of Hydra can name any class or file: handlers of its logging, callbacks, variables of jobs.
        if not key.startswith(("hydra/launcher", "hydra.launcher.", "hydra/sweeper", "hydra.sweeper.")) and (
            key not in ("hydra.sweep.dir", "hydra.verbose")
        ):
            return f"{key}: is not used here; expected hydra.sweep.dir, hydra/launcher, hydra/sweeper or their keys"
        if key in ("hydra/launcher", "hydra/sweeper") and not override.is_sweep_override():
            return _check_plugin(key, str(value))
        if key == "hydra.sweep.dir" and (problem := check_place(key, str(value if value is not None else ""))):
            return problem
        return None
    if override.package is not None:
        return f"{text}: packages (@) are not used here; expected {key}=<value>"
    if override.is_delete():
        return f"{text}: nothing may be deleted; use {key}=null where a setting can be off"
    if override.is_sweep_override():
        if not multirun:
            return f"{text}: several values are a sweep; add -m, or put a list in brackets: '{key}=[...]'"
        if override.is_choice_sweep() and key in group_names:
            options = [str(v) for v in override.value().list]  # type: ignore[union-attr]
            bad = [option for option in options if option not in choices(key)]
            return f"{key}={bad[0]}: there is no such option. {suggest(bad[0], choices(key))}" if bad else None
    elif key in group_names:
        option = value.text if isinstance(value, QuotedString) else value
        if key == "experiment" and option is None:
            return None
        if not isinstance(option, str) or option not in choices(key):
            more = f" {key}.name= takes further names, see --help {key}." if key in FREE else ""
            return f"{key}={option}: there is no such option. {suggest(str(option), choices(key))}{more}"
        return None
    elif isinstance(value, dict) and key in {k.split(".")[0] for k in keys if "." in k}:
        return None  # a whole group of keys as a dictionary: checked after composition
    if key in keys or "options." in key or key.startswith(("recipe.", "debug.inject.")):
        return None
    return f"{key}: there is no such key. {_hint(key, keys, group_names)}All keys: python train.py --cfg job"


def _hint(key: str, keys: list[str], group_names: list[str]) -> str:
    head, _, tail = key.rpartition(".")
    same_end = [known for known in keys if known.rpartition(".")[2] == tail and known != key]
    if not same_end and tail in WORDS:
        same_end = [WORDS[tail]]
    near = difflib.get_close_matches(key, keys + group_names, n=1, cutoff=0.4)
    if not same_end and head in FREE and difflib.SequenceMatcher(None, key, near[0] if near else "").ratio() < 0.85:
        return f"An argument of its own goes into {head}.options: {head}.options.{tail}=... "
    close = same_end or near
    return f"Did you mean {' or '.join(close[:3])}? " if close else ""


def _check_plugin(key: str, option: str) -> str | None:
    """Whether Hydra has a launcher or a sweeper of this name."""
    Plugins.instance()  # they enter themselves into the store
    valid = sorted({name.removesuffix(".yaml") for name in ConfigStore.instance().list(key)} | _files(key))
    if option in valid:
        return None
    if option in ("joblib", "submitit_local", "submitit_slurm"):
        return f"{key}={option}: is not installed: pip install -c constraints.txt hydra-{option.split('_')[0]}-launcher"
    return f"{key}={option}: there is no such option. {suggest(option, [v for v in valid if v != 'optuna_types'])}"


def _files(group: str) -> set[str]:
    return {path.stem for path in (conf_dir() / group).glob("*.yaml")}


def compose(overrides: list[str]) -> dict[str, Any]:
    """The composed configuration as plain values. Types and ranges are not checked yet.

    Args:
        overrides: sound ones, from `check_overrides`.

    Raises:
        ConfigError: with the first problem that Hydra finds.
    """
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return _plain(hydra_compose("config", overrides))
    except ConfigError:
        raise
    except Exception as problem:  # Hydra and OmegaConf raise dozens of kinds; each is a bad command line
        raise ConfigError(one_line(problem)) from problem


def _plain(cfg: Any) -> dict[str, Any]:
    OmegaConf.resolve(cfg)
    values = OmegaConf.to_container(cfg, throw_on_missing=True)
    assert isinstance(values, dict)
    if found := _find_target(values):
        raise ConfigError(f"{found}: _target_ is refused: a config never runs code")
    if secret := list(secrets_in(values)):
        raise ConfigError(f"{', '.join(secret)}: holds a key or a password, and settings are recorded; leave it out")
    return {str(key): value for key, value in values.items() if key != "hydra"}


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
    kept = [line for line in lines if not line.startswith(("reference_type", "object_type", "To append to your"))]
    return f"{'; '.join(kept[:3]) or type(problem).__name__}; see python train.py --help"


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
    parser = OverridesParser.create()
    parsed = parser.parse_overrides(overrides)
    fixed = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = hydra_compose("config", fixed, return_hydra_config=True)
            config = OmegaConf.to_container(composed.hydra)
            sweep_dir = str(composed.hydra.sweep.dir)
    except Exception as problem:  # Hydra and OmegaConf raise dozens of kinds; each is a bad command line
        if unknown := re.search(r"Could not override '(hydra\.(launcher|sweeper))\.(\w+)", str(problem)):
            with initialize_config_dir(str(conf_dir()), version_base="1.3"):
                rest = [text for text in fixed if not text.startswith(f"{unknown[1]}.")]
                valid = hydra_compose("config", rest, return_hydra_config=True).hydra[unknown[2]]
            known = [str(key) for key in valid if str(key) != "_target_"]
            text = f"{unknown[1]}.{unknown[3]}: there is no such key. {suggest(unknown[3], known)}"
            raise ConfigError(text) from problem
        raise ConfigError(one_line(problem)) from problem
    assert isinstance(config, dict)
    chosen = config["runtime"]["choices"]
    sweeper, launcher = chosen["hydra/sweeper"], chosen["hydra/launcher"]
    named, problems = check_overrides(
        [f"{key}={value}" for key, value in (config["sweeper"].get("params") or {}).items()], multirun=True
    )
    if problems:
        raise ConfigError(problems)
    own = [o for o in (*parser.parse_overrides(named), *parsed) if not o.key_or_group.startswith("hydra")]
    if sweeper == "basic":
        if drawn := [o.input_line for o in own if isinstance(o.value(), IntervalSweep)]:
            raise ConfigError(f"{', '.join(map(str, drawn))}: an interval is for a search: hydra/sweeper=optuna")
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
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


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
    if cfg.run_dir is None:
        return fresh_run_dir(cfg.recipe["name"])
    if problem := check_place("run_dir", cfg.run_dir):
        raise ConfigError(problem)
    check_run_dir(cfg.run_dir, values, cfg)
    return cfg.run_dir


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


def check_place(key: str, path: str) -> str | None:
    """What is wrong with a folder to write to, whatever it holds."""
    if not path.strip():
        return f"{key}='': expected a folder"
    if path.startswith("~"):
        return f"{key}={path}: a shell does not replace ~ behind =; write $HOME, or the whole path"
    if Path(path).resolve() in (Path("/"), Path.home().resolve()):
        return f"{key}={path}: is not a folder for runs; expected one below it"
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
