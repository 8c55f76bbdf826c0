"""Run folders as they are found: finished, running, half-written, damaged. Reading one never fails and never hangs.

    for folder in find_runs([Path("multirun")], notes):
        run = read_run(folder)          # .status, .config by full keys, .summary, .problems
        curves = read_curves(run)       # what metrics.jsonl says, thinned out

`problems` lists what is wrong with a folder, in words. Only regular files are opened, at most so many bytes of
each are read, and links to folders are not followed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amp_core.cli.run_folders import is_locked
from amp_core.config import files
from amp_core.config.rules import flatten

MARKS = ("summary.json", "metrics.jsonl", "environment.json", ".hydra", ".lock", "train.log")
"""A folder with one of these is one of a run, if only a begun one."""
INSIDE = {"checkpoints", "doctor", "samples", "tensorboard", "wandb"}
"""Folders of a run that hold no runs; neither do hidden ones, such as .jobs of a sweep."""
LARGE_FILE = 64 << 20
"""Bytes; of a longer one, pieces from all over it are read."""
LONG_LINE = 4 << 20
DEEPEST = 64
LARGEST_FP16 = 65504.0

Points = list[tuple[int, float]]
"""(step, value), steps rising."""


@dataclass
class Run:
    """What a run folder says about its run."""

    path: Path
    status: str
    """finished, running, stopped (says running, and no process writes), preempted, diverged, failed, or unknown."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings by their full keys; empty when they cannot be read."""
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What is missing or damaged."""
    changed: float = 0.0
    """When it was last written to, in seconds since 1970."""

    @property
    def recipe(self) -> str:
        return str(self.config.get("recipe.name", ""))

    @property
    def amp(self) -> str:
        return str(self.config.get("amp.name") or self.summary.get("amp") or "")

    @property
    def best(self) -> str | None:
        """The name of the metric that the recipe calls best."""
        name = self.config.get("recipe.best")
        return name if isinstance(name, str) else None

    @property
    def evaluation(self) -> dict[str, float]:
        """The finite results."""
        found = self.summary.get("eval")
        pairs = {str(key): number(value) for key, value in found.items()} if isinstance(found, dict) else {}
        return {key: value for key, value in pairs.items() if value is not None}

    def result(self, metric: str | None = None) -> float | None:
        """A metric of the summary; without a name, the one that the recipe calls best."""
        name = metric or self.best
        return self.evaluation.get(name) if name else None

    def count(self, key: str) -> float | None:
        """A finite number of the summary, such as `step` or `samples_per_second`."""
        return number(self.summary.get(key))

    @property
    def error(self) -> str:
        text = self.summary.get("error")
        return text if isinstance(text, str) else ""


def number(value: Any) -> float | None:
    """A finite number, else None."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is not int:
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def plain(value: Any) -> Any:
    """What JSON can hold: text for what it does not know, such as the infinite numbers of some settings."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    is_known = (
        value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    )
    return value if is_known else str(value)


# --- finding ----------------------------------------------------------------------------------------------------------


def find_runs(folders: Iterable[Path], notes: list[str]) -> list[Path]:
    """The run folders among and below these, each once, in order of their names.

    Args:
        folders: those that are links are followed; links below them are not.
        notes: filled with what was passed over.
    """
    seen: set[tuple[int, int]] = set()
    found: list[Path] = []
    for folder in folders:
        found += _find(folder, notes, seen)
    return sorted(found, key=lambda path: _natural(str(path)))


def _find(folder: Path, notes: list[str], seen: set[tuple[int, int]]) -> Iterator[Path]:
    waiting = [(folder, 0, False)]
    while waiting:
        here, depth, of_sweep = waiting.pop()
        try:
            about = os.stat(here)
            if (about.st_dev, about.st_ino) in seen:
                continue
            seen.add((about.st_dev, about.st_ino))
            with os.scandir(here) as entries:
                inside = {entry.name: (entry.is_dir(follow_symlinks=False), entry.is_symlink()) for entry in entries}
        except NotADirectoryError:
            notes.append(f"{here}: a file, expected a folder")
            continue
        except OSError as problem:
            notes.append(f"{here}: cannot be read: {problem.strerror}")
            continue
        is_run = any(mark in inside for mark in MARKS) and ".jobs" not in inside  # a sweep is locked, too
        if is_run:
            yield here
        elif of_sweep and not any(is_folder for is_folder, _ in inside.values()):
            notes.append(f"{here}: a job of a sweep that holds no run: it never began, or was removed")
        for name, (is_folder, is_link) in inside.items():
            if is_folder and name not in INSIDE and not name.startswith(".") and depth < DEEPEST:
                waiting.append((here / name, depth + 1, "multirun.yaml" in inside))
            elif is_link and not is_run and (here / name).is_dir():
                notes.append(f"{here / name}: a link to a folder, not followed")


def _natural(text: str) -> list[tuple[int, str]]:
    """Sorts seed=2 before seed=10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", text)]


# --- reading ----------------------------------------------------------------------------------------------------------


def read_run(folder: Path) -> Run:
    """What the small files of a run folder say. Never raises."""
    run = Run(folder, "unknown")
    run.summary = read_json(folder / "summary.json", run.problems)
    run.environment = read_json(folder / "environment.json", run.problems)
    try:
        run.config = _settings(files.read_text(folder / ".hydra" / "config.yaml", files.YAML_FILE))
    except FileNotFoundError:
        run.problems.append(".hydra/config.yaml: is missing")
    except (OSError, ValueError) as problem:
        run.problems.append(f".hydra/config.yaml: {_short(problem)}")
    status = run.summary.get("status")
    run.status = status if isinstance(status, str) and status else "unknown"
    if run.status in ("running", "unknown") and files.kind_of(folder / ".lock") == "a file" and is_locked(folder):
        run.status = "running"
    elif run.status == "running":
        run.status = "stopped"
    if run.status in ("running", "stopped", "unknown") and (step := _last_step(folder / "metrics.jsonl")) is not None:
        run.summary["step"] = max(step, run.count("step") or 0)  # the summary knows it at the end
    if run.status == "finished" and run.best and run.result() is None:
        run.problems.append(f"summary.json: eval.{run.best} is missing or no finite number")
    for name in ("summary.json", "metrics.jsonl", ".hydra/config.yaml"):
        with contextlib.suppress(OSError):
            run.changed = max(run.changed, os.stat(folder / name).st_mtime)
    return run


def is_ours(run: Run) -> bool:
    """Whether the settings are those of a run of this project."""
    return {"recipe.name", "amp.name"} <= run.config.keys()


def age(run: Run) -> float:
    """Seconds since the last write; infinite if unknown."""
    return time.time() - run.changed if run.changed else math.inf


def _last_step(path: Path) -> float | None:
    """The step of the last whole line."""
    try:
        with os.fdopen(files.open_file(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            lines = file.read(1 << 16).split(b"\n")
    except OSError:
        return None
    for line in reversed(lines[-20:]):
        entry = _object(line)
        if entry is not None and (step := number(entry.get("step"))) is not None:
            return step
    return None


def _short(problem: BaseException) -> str:
    """The first line of what was raised."""
    text = str(getattr(problem, "strerror", None) or problem)
    return (text.strip().splitlines() or [type(problem).__name__])[0][:200]


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in a JSON file; empty, with a line in `problems`, when it cannot be read."""
    try:
        return files.read_json(path)
    except FileNotFoundError:
        problems.append(f"{path.name}: is missing")
    except (OSError, ValueError) as problem:
        problems.append(f"{path.name}: {_short(problem)}")
    return {}


def _settings(text: str) -> dict[str, Any]:
    """The settings by full key.

    Runs of a sweep share most of their lines, and a YAML parser takes 20 ms for all of them. So each group of lines,
    from one top-level key to the next, is parsed once for all runs.
    """
    text = text.replace("\r\n", "\n")
    blocks = re.split(r"^(?=[A-Za-z_])", text, flags=re.MULTILINE)
    names = [block.partition(":")[0] for block in blocks if block]
    is_plain = not blocks[0].strip() and len(set(names)) == len(names)
    values: dict[str, Any] = {}
    for block in blocks[1:] if is_plain else [text]:
        if found := _RUN_DIR.fullmatch(block):
            values["run_dir"] = found[1]
        else:
            values |= _parsed(block)
    return values


_RUN_DIR = re.compile(r"run_dir: ([\w.]?/?[\w.,=+-]+/[\w./,=+-]*\w)\n*")
"""A line that no two runs share; with a slash in it, a plain value is text in YAML."""


@functools.lru_cache(4096)
def _parsed(text: str) -> dict[str, Any]:
    values = files.parse_own_yaml(text)
    if not isinstance(values, dict):
        raise ValueError("expected keys with values")
    return flatten(values)


# --- curves -----------------------------------------------------------------------------------------------------------


@dataclass
class Curves:
    """The lines of metrics.jsonl, by split and name of the number."""

    train: dict[str, Points] = field(default_factory=dict)
    eval: dict[str, Points] = field(default_factory=dict)
    damaged: int = 0
    """Lines that this program did not write, or only half."""
    thinned: bool = False
    """Not every line of training was read."""


def read_curves(run: Run, keys: Iterable[str], most: int = 2000) -> Curves:
    """At most `most` lines of training, evenly spread, and as many of evaluation; of them, these keys. Never raises.

    A number that is not finite is left out. What is wrong is added to `run.problems`.
    """
    curves, keys = Curves(), set(keys)
    lines = _lines_of(run.path / "metrics.jsonl", run.problems, curves)
    split = {"eval": [line for line in lines if b'"eval"' in line]}
    split["train"] = [line for line in lines if b'"eval"' not in line]
    curves.thinned |= len(split["train"]) > most
    for name, found in split.items():
        target: dict[str, dict[int, float]] = {}
        for line in _spread(found, most):
            entry = _object(line)
            step = number(entry.get("step")) if entry else None
            if entry is None or step is None or entry.get("split") != name:
                curves.damaged += bool(line.strip())
                continue
            for key in keys & entry.keys():
                finite = number(entry.get(key))
                if finite is not None:
                    target.setdefault(key, {})[int(step)] = finite
        setattr(curves, name, {key: sorted(points.items()) for key, points in target.items()})
    if curves.damaged:
        run.problems.append(f"metrics.jsonl: {curves.damaged} damaged lines")
    return curves


def _lines_of(path: Path, problems: list[str], curves: Curves) -> list[bytes]:
    try:
        descriptor = files.open_file(path)
    except FileNotFoundError:
        problems.append(f"{path.name}: is missing")
        return []
    except OSError as problem:
        problems.append(f"{path.name}: {_short(problem)}")
        return []
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        try:
            if size <= LARGE_FILE:
                lines = file.read(LARGE_FILE).split(b"\n")
            else:
                lines, piece = [], LARGE_FILE // 256
                for i in range(256):
                    file.seek(i * (size - piece) // 255)
                    lines += file.read(piece).split(b"\n")[1 if i else 0 : -1]
                curves.thinned = True
                problems.append(f"{path.name}: {size >> 20:,} MiB; only pieces of it were read")
        except OSError as problem:
            problems.append(f"{path.name}: {_short(problem)}")
            return []
    if lines and lines[-1] and not lines[-1].endswith(b"}"):
        lines.pop()  # it is being written, or was when the run was killed
    return lines


def _object(line: bytes) -> Mapping[str, Any] | None:
    if not 2 < len(line) < LONG_LINE:
        return None
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError):  # invalid UTF-8 is a ValueError, too
        return None
    return entry if isinstance(entry, dict) else None


def _spread(items: list[Any], most: int) -> list[Any]:
    """At most this many, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / max(most - 1, 1))] for i in range(most)]


@dataclass
class Headroom:
    """How many powers of two the largest number of a step is below fp16's 65504; below 0 it overflows there."""

    points: dict[str, Points] = field(default_factory=dict)
    """By kind: activations, activation_gradients (these with the run's loss scale)."""
    tightest: dict[str, tuple[float, str, int]] = field(default_factory=dict)
    """By kind: the least of all, the layer and the step."""


def read_headroom(run: Run, most: int = 40) -> Headroom:
    """From doctor/statistics.jsonl, at most `most` of its steps; empty without it. Never raises."""
    found = Headroom()
    path = run.path / "doctor" / "statistics.jsonl"
    if not path.is_file():
        return found
    for line in _spread([line for line in _lines_of(path, run.problems, Curves()) if line], most):
        entry = _object(line)
        step, layers = (number(entry.get("step")), entry.get("layers")) if entry else (None, None)
        if step is None or not isinstance(layers, dict):
            continue
        for kind in ("activations", "activation_gradients"):
            bits = [(room, str(name)) for name, kinds in layers.items() if (room := _headroom(kinds, kind)) is not None]
            if bits:
                least, layer = min(bits)
                found.points.setdefault(kind, []).append((int(step), least))
                found.tightest[kind] = min(found.tightest.get(kind, (math.inf, "", 0)), (least, layer, int(step)))
    for points in found.points.values():
        points.sort()
    return found


def _headroom(kinds: Any, kind: str) -> float | None:
    about = kinds.get(kind) if isinstance(kinds, dict) else None
    if not isinstance(about, dict) or "amax" not in about:
        return None
    largest = number(about["amax"])
    if largest is None:
        return -1.0  # not finite: it did overflow
    return math.log2(LARGEST_FP16 / largest) if largest > 0 else None


def read_reports(run: Run, most: int = 3) -> list[dict[str, Any]]:
    """The doctor's reports of a run, first ones first. Never raises."""
    try:
        names = sorted(name for name in os.listdir(run.path / "doctor") if re.fullmatch(r"step_\d+\.json", name))
    except OSError:
        return []
    found = [read_json(run.path / "doctor" / name, run.problems) for name in names[:most]]
    return [report for report in found if report]
