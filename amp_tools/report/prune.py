"""Remove runs, or checkpoints of runs, that are no longer needed.

Every deletion is planned first and shown; `carry_out` then takes the lock of the run folder, so that no run is writing
there and none can begin, looks again, and removes only names that a run makes. What lies beside them stays, and so does
the folder then. Links are removed as links, never followed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amp_core.checkpoints.folders import CorruptFile, inspect, is_sound, ranking, step_folders
from amp_core.cli.run_folders import OVERWRITTEN
from amp_core.config.errors import CheckpointError
from amp_core.run import locks
from amp_tools.report.folders import MARKS, Run, age, is_ours, read_run

OWN = (*OVERWRITTEN, "tensorboard", "wandb")
"""Names in a run folder that are a run's."""
LOST = ("failed", "diverged", "stopped", "preempted", "unknown")
DAY = 86400.0


@dataclass
class Plan:
    """What would be removed of one run."""

    run: Run
    paths: list[Path] = field(default_factory=list)
    bytes: int = 0
    keeps: str = ""
    """What stays, and why, in words."""
    sound: list[Path] = field(default_factory=list)
    """Checkpoints without which nothing may be removed."""


def plan_runs(run: Run, days: float) -> Plan | None:
    """The whole of a run that ended without a result and was not touched for this many days."""
    if run.status not in LOST or not _may_go(run, days):
        return None
    if any(text.startswith("summary.json: ") and text != "summary.json: is missing" for text in run.problems):
        return None  # it exists and cannot be read
    paths = [run.path / name for name in OWN if os.path.lexists(run.path / name)]
    others = sorted(set(os.listdir(run.path)) - set(OWN))
    keeps = f"stays: {', '.join(others[:4])}" + (" ..." if len(others) > 4 else "") if others else ""
    return Plan(run, paths, sum(map(size_of, paths)), keeps)


def _may_go(run: Run, days: float) -> bool:
    # A lock held on another machine is not seen on every file system: what was written to within a day may be running.
    days = max(days, 1.0) if run.summary.get("status") == "running" else days
    return run.status != "running" and is_ours(run) and age(run) >= days * DAY


def plan_checkpoints(run: Run, days: float) -> Plan | None:
    """Plan to remove the checkpoints before the newest sound one, except the best sound one; both are verified.

    What is newer than the newest sound one is damaged, or cannot be read now, or is of a newer version: it stays.
    """
    if not _may_go(run, days):
        return None
    folder = run.path / "checkpoints"
    if folder.is_symlink() or not folder.is_dir():
        return None
    steps = {step: path for step, path in step_folders(folder).items() if path.is_dir() and not path.is_symlink()}
    newest = next((step for step in sorted(steps, reverse=True) if len(steps) > 1 and _is_sound(steps[step])), None)
    if newest is None:
        return None
    metrics: dict[int, dict[str, Any]] = {}
    old = [step for step in sorted(steps) if step < newest]
    for step in [*old, newest]:
        with contextlib.suppress(CorruptFile):
            try:
                metrics[step] = inspect(steps[step])["metrics"]
            except CheckpointError:  # of a newer version
                old.remove(step)
    wanted = (run.best, "min" if run.config.get("recipe.best_is") == "min" else "max") if run.best else None
    best = next((step for step in ranking(metrics, wanted) if _is_sound(steps[step])), newest)
    kept = [steps[step] for step in sorted({newest, best})]
    paths = [steps[step] for step in old if steps[step] not in kept]
    if not paths:
        return None
    names = [path.name for path in kept] + [f"{steps[step].name} (damaged)" for step in sorted(steps) if step > newest]
    return Plan(run, paths, sum(map(size_of, paths)), f"stays: {', '.join(names)}", kept)


def _is_sound(step: Path) -> bool:
    with contextlib.suppress(CheckpointError):
        return is_sound(step)
    return False


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links count as nothing."""
    with contextlib.suppress(OSError):
        about = os.lstat(path)
        if stat.S_ISREG(about.st_mode):
            return about.st_size
        if stat.S_ISDIR(about.st_mode):
            with os.scandir(path) as entries:
                return sum(size_of(Path(entry.path)) for entry in entries)
    return 0


def carry_out(plan: Plan, *, whole: bool) -> str | None:
    """Remove what was planned. Returns why it was not, in words, or None.

    `whole`, of `plan_runs`: the folder goes, too, if nothing else is in it.
    """
    folder = plan.run.path
    try:
        with _locked(folder):
            present = read_run(folder)
            if not is_ours(present) or present.changed != plan.run.changed:
                return "has changed since it was looked at"
            if damaged := [str(path) for path in plan.sound if not _is_sound(path)]:
                return f"{', '.join(damaged)}: is damaged now"
            # .hydra goes last: after a removal that was interrupted it is still known what the folder was.
            order = sorted(plan.paths, key=lambda path: (path.name == ".hydra", path.name == "summary.json", path.name))
            for path in order:
                if path.parent not in (folder, folder / "checkpoints") or path.parent.is_symlink():
                    return f"{path}: is not of this run"
                if path.name != ".lock":
                    _remove(path)
            if whole:
                (folder / ".lock").unlink()
                with contextlib.suppress(OSError):  # somebody else's files are in it
                    folder.rmdir()
    except OSError as problem:
        return f"{problem.filename or folder}: {problem.strerror or problem}"
    return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a run folder. OSError: a run holds it, or it is a link, none any more, or cannot be locked."""
    if folder.is_symlink() or not any(os.path.lexists(folder / mark) for mark in MARKS):
        raise OSError(0, "is no run folder any more")
    try:
        lock = locks.acquire(folder)
    except BlockingIOError as problem:
        raise OSError(0, "a run is writing there") from problem
    with lock:
        yield


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # does not follow links, at no depth
    else:
        path.unlink(missing_ok=True)


def as_dict(plan: Plan) -> dict[str, Any]:
    """As plain data."""
    about = {"folder": str(plan.run.path), "status": plan.run.status, "bytes": plan.bytes, "keeps": plan.keeps}
    return about | {"remove": [str(path) for path in plan.paths]}
