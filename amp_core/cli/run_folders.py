"""Run folders: which one a run gets, what may be in it, and what it says about the run that it holds."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amp_core.cli.command import program
from amp_core.config.errors import ConfigError
from amp_core.config.files import (
    holds_checkpoint,
    is_own_link,
    kind_of,
    open_file,
    read_bytes,
    read_json,
    read_yaml,
    why_no_folder,
)
from amp_core.config.redact import holds_secret
from amp_core.config.rules import differences
from amp_core.config.schema import Config

CONSTANT = ".jobs/constant"
"""In a sweep's folder: the overrides that all its jobs have."""


def choose_run_dir(cfg: Config) -> str | None:
    """The run folder of a single run; None: it needs none. Creates nothing. ConfigError: it cannot be."""
    is_free = cfg.dry_run and (cfg.run_dir is None or cfg.task != "train")
    if is_free or cfg.data.check or cfg.task in ("evaluate", "export"):
        return None
    if cfg.resume == "last" and cfg.task == "train":
        return last_unfinished(cfg)
    run_dir = cfg.run_dir if cfg.run_dir is not None else fresh_run_dir(cfg.recipe["name"])
    if problem := check_place("run_dir", run_dir):
        raise ConfigError(problem)
    return run_dir


def check_run_dir(run_dir: str, cfg: Config, *, in_sweep: bool = False) -> bool:
    """Whether a folder holds a finished run of these settings. ConfigError: a run with them may not write there."""
    folder, values = Path(run_dir), cfg.to_dict()
    if problems := list(_check_names(folder)):
        raise ConfigError([f"run_dir={run_dir}: {problem}" for problem in problems])
    # One of several machines has the lock; a returning machine finds it taken by its own run.
    if is_locked(folder) and cfg.layout.nodes in (None, (1, 1)):
        raise ConfigError(f"run_dir={run_dir}: another process is writing there; wait for it, or choose another folder")
    if (stored := stored_config(folder)) is None:
        return False
    is_finished = status_of(folder) == "finished" and not differences(stored, values, but=_FREE)
    if (is_finished and (in_sweep or cfg.resume != "never")) or cfg.task == "predict" or not holds_checkpoint(folder):
        return is_finished
    if cfg.resume == "never":
        raise ConfigError(f"resume=never: {run_dir} holds a run already; choose another run_dir, or resume=auto")
    changed = differences(stored, values)
    if changed and not cfg.allow_changes:
        raise ConfigError(
            [f"{change} (run_dir={run_dir} was begun with the first)" for change in changed]
            + [f"allow_changes=false: use allow_changes=true to go on with the new settings{_resuming(folder)}"]
        )
    return False


_FREE = {"log", "layout", "device", "save_every", "eval_every", "log_every", "perf", "run_dir", "resume"}
_FREE |= {"eval.at_start"}
"""Settings with which a finished run would be the same."""


def content_of(folder: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """A JSON file of a folder, such as environment.json or summary.json; empty when it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(Path(folder, name))
    return {}


def _resuming(folder: Path) -> str:
    """The command that resumes a run unchanged, for messages."""
    began = content_of(folder, "environment.json")
    try:
        typed = [*([f"--config-dir={began['config_dir']}"] if began.get("config_dir") else []), *overrides_of(folder)]
    except ConfigError:
        return ""
    place = str(began.get("folder") or os.getcwd())
    there = "" if place == os.getcwd() else f"cd {shlex.quote(place)} && "
    typed.append(f"run_dir={folder.absolute() if there else folder}")
    return f", or resume with those: {there}{program()} {shlex.join(typed)}"


def check_length(key: str, path: Any) -> str | None:
    """What is wrong with the length of a path, for the file system and what a run writes below it."""
    if not isinstance(path, str) or "\0" in path:
        return None
    if any(len(os.fsencode(part)) > 255 for part in Path(path).parts) or len(os.fsencode(os.path.abspath(path))) > 3800:
        return f"{key}={path[:40]}...: a name is longer than 255 bytes, or the path than 3800; choose a shorter one"
    return None


def check_place(key: str, path: str) -> str | None:
    """What is wrong with a folder to write to, whatever it holds."""
    if not path.strip():
        return f"{key}='': expected a folder"
    if holds_secret(path) or holds_secret(os.path.abspath(path)):
        return f"{key}: the name of the folder holds a key or a password; choose another one"
    if problem := check_length(key, path):
        return problem
    folder = Path(path).resolve()
    if folder in (Path("/"), Path.home().resolve()):
        return f"{key}={path}: is not a folder for runs; expected one below it"
    return f"{key}={path}: {reason}" if (reason := why_no_folder(folder)) else None


OVERWRITTEN = (".hydra", ".lock", "checkpoints", "doctor", "environment.json", "metrics.jsonl", "samples")
OVERWRITTEN += ("predictions", "predictions.jsonl", "summary.json", "train.log", "wandb_id")
"""Names in a run folder that a run makes, and changes when they are there; so do TensorBoard and wandb with theirs."""
_FOLDERS = (".hydra", "checkpoints", "doctor", "predictions", "samples")


def _check_names(folder: Path) -> Iterator[str]:
    """What must not be changed in a folder: files of somebody else, and what links lead to."""
    links = [name for name in (*OVERWRITTEN, "tensorboard", "wandb") if (folder / name).is_symlink()]
    if foreign := [name for name in links if name != "checkpoints" or not is_own_link(folder / name)]:
        where = ", ".join(f"{name} is a link to {os.readlink(folder / name)}" for name in foreign)
        yield f"{where}: the run would change what is there; remove the link{'s' * (len(foreign) > 1)}"
        return
    for name in (*OVERWRITTEN, *(f".hydra/{part}.yaml" for part in ("config", "overrides"))):
        found, expected = kind_of(folder / name), "a folder" if name in _FOLDERS else "a file"
        if found not in ("", "a link", expected):
            yield f"{name} is {found}, expected {expected}; remove it, or choose another folder"
    stored = stored_config(folder)
    if holds_checkpoint(folder) or (stored is not None and {"recipe", "amp"} <= stored.keys()):
        return
    if others := sorted(path.name for path in folder.glob("*") if not _is_left(path)):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        yield f"holds no run, but {', '.join(others[:3])}{more}; choose a new folder, such as {folder / 'run'}"


def _is_left(path: Path) -> bool:
    """What a run leaves that ended before its start, and foreign files: notes, a scheduler's output, weights."""
    if path.name not in OVERWRITTEN:
        return path.name.startswith(".") or not path.is_dir()
    if path.is_dir():
        return not any(path.glob("[!.]*"))
    if path.name == "summary.json":
        return status_of(path.parent) == "failed"
    with contextlib.suppress(OSError, ValueError):
        return path.name == ".lock" and re.fullmatch(rb"(process [0-9]+ on .*)?", read_bytes(path)) is not None
    return False


def status_of(run_dir: str | os.PathLike[str]) -> str:
    """`status` of summary.json; "unknown" when it cannot be read."""
    return str(content_of(run_dir, "summary.json").get("status", "unknown"))


def fresh_run_dir(recipe: str) -> str:
    """outputs/<recipe>/<date_time>, with milliseconds, for runs that are started together."""
    return f"outputs/{recipe}/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S-%f}"[:-3]


def sweep_subdir(sweep_dir: str | os.PathLike[str], overrides: list[str]) -> str:
    """The folder name of a job: what is varied, in safe characters, at most 120, and a hash of all its overrides.

    A folder with this hash is the job's, also when what varied was another at an earlier start of the sweep.
    """
    digest = hashlib.sha256(",".join(overrides).encode()).hexdigest()[:8]
    with contextlib.suppress(OSError):
        if found := [name for name in os.listdir(sweep_dir) if name == digest or name.endswith(f"-{digest}")]:
            return min(found)
    safe = re.sub(r"[^A-Za-z0-9=,._+-]", "_", ",".join(varied(sweep_dir, overrides))).lstrip(".")[:120]
    return f"{safe}-{digest}" if safe else digest


def varied(sweep_dir: str | os.PathLike[str], overrides: list[str]) -> list[str]:
    """The overrides of a job that not all jobs of the sweep have; all of them where nothing is varied."""
    constant = content_of(sweep_dir, CONSTANT).get("overrides")
    return [text for text in overrides if not isinstance(constant, list) or text not in constant] or overrides


def overrides_of(run_dir: str | os.PathLike[str]) -> list[str]:
    """The settings that a run was started with, as they were typed. ConfigError: the folder holds no run."""
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


def source_of(values: dict[str, Any]) -> Path | None:
    """The folder of the run that an evaluation or a prediction is made of; None: it holds no settings to take."""
    place = values["run_dir"] if values["resume"] in ("auto", "last", "never") else values["resume"]
    if values["task"] == "train" or not isinstance(place, str) or not place.strip():
        return None
    inside = Path(place).absolute()
    for folder in (inside, *inside.parents[:3]):  # a run, its checkpoints, one of them, or its file
        if folder == inside or folder / "checkpoints" in (inside, *inside.parents):
            stored = stored_config(folder)
            if stored is not None and isinstance(stored.get("recipe"), dict) and holds_checkpoint(folder):
                return folder
    return None


def last_unfinished(cfg: Config) -> str:
    """The newest unfinished run folder of the same configuration. ConfigError: there is none."""
    base, values = Path("outputs", cfg.recipe["name"]), cfg.to_dict()
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
