"""Our own code, broken on purpose: a part of this campaign must notice each break, or the part proves nothing."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from amp_core.checkpoints import checkpoint, folders, parts, plain_state, reading, sharded, shards
from amp_core.config import files, redact
from amp_core.config.errors import CheckpointError
from amp_core.layouts import ddp as layout
from amp_core.run import environment, evaluation, folder, log, meters, resume, stop
from amp_core.step import amp as precision
from amp_core.step import buffers, schedule
from campaign import Noticed, Plan, Result, harness
from campaign.files import damaged, damaged_shards, pickles
from campaign.foreign import foreign
from campaign.harness import Child, kill_all
from campaign.leaks import leaks
from campaign.runs import kills, ranks, signals
from campaign.saves import saves
from campaign.shimmed import LIBRARY, errors
from campaign.stuck import stuck


@dataclass(frozen=True)
class Break:
    """A mistake that somebody could make in this project."""

    what: str
    apply: Callable[[], None]
    part: Callable[[Plan], Result]
    count: int = 6
    case: int | None = None
    is_slow: bool = False
    """It takes long until it is noticed: left out of the short form."""


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


# --- saving -----------------------------------------------------------------------------------------------------------


def _write_without_fsync(path: Path, *data: bytes | bytearray | memoryview) -> None:
    os = folders.os
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for rest in map(memoryview, data):
            while rest:
                rest = rest[os.write(descriptor, rest[: files._CHUNK]) :]
    finally:
        os.close(descriptor)


def _rename_first(target: Path, files: Mapping[str, plain_state.Data]) -> None:
    """The name is there before the contents are on the disk."""
    os = folders.os
    temporary = folders._temporary_folder(target)
    folders.make_folder(target.parent)
    os.mkdir(temporary)
    for name, data in files.items():
        _write_without_fsync(temporary / name, *data)
    os.rename(temporary, target)
    for name in files:
        descriptor = os.open(target / name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    folders.sync_folder(target)
    folders.sync_folder(target.parent)


def _unsafe_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """The manifest is there before the shards are on the disk."""

    def write(*args: Any) -> Any:
        write_file, folders.write_file = folders.write_file, _write_without_fsync
        try:
            return original(*args)
        finally:
            folders.write_file = write_file

    return write


def _read_without_digest(original: Callable[..., Any]) -> Callable[..., Any]:
    """The header of a shard is trusted."""

    def stream(*args: Any) -> None:
        try:
            original(*args)
        except folders.CorruptFile as damaged:
            if "SHA-256" not in str(damaged):
                raise

    return stream


def _in_place(target: Path, files: Mapping[str, plain_state.Data]) -> None:
    folders.make_folder(target)
    for name, data in files.items():
        folders.write_file(target / name, *data)


def _prune_before(original: Callable[..., Any]) -> Callable[..., Any]:
    """What is older goes before the new one is there."""

    def write(target: Path, files: Mapping[str, plain_state.Data]) -> None:
        for path in list(folders.step_folders(target.parent).values())[:-1]:
            folders.remove(path)
        original(target, files)

    return write


# --- reading ----------------------------------------------------------------------------------------------------------


def _verify_nothing(folder: Path) -> tuple[dict[str, Any], bytes]:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    return manifest, (folder / "state.pt").read_bytes()


def _no_digest_of_the_state(folder: Path) -> tuple[dict[str, Any], bytes]:
    return reading.inspect(folder), reading.read_file(folder / "state.pt")


def _unpickle_everything(data: bytes, path: Path) -> dict[str, Any]:
    import io

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _fresh_when_damaged(original: Callable[..., Any]) -> Callable[..., Any]:
    """No sound checkpoint: begin from the start, as if there had been none."""

    def find(path: Path, *args: Any) -> Any:
        try:
            return original(path, *args)
        except CheckpointError:
            return None

    return find


# --- going on ---------------------------------------------------------------------------------------------------------


def _without(part: str) -> None:
    """One part of the checkpoint is not put back."""
    original = parts.load_part
    setattr(parts, "load_part", functools.partial(_load_but, original, part))  # noqa: B010


def _load_but(original: Callable[..., None], kind: str, part: Any, state: Any, exact: bool) -> None:
    if type(part).__name__ != kind:
        original(part, state, exact)


def _samples_from_the_start(original: Callable[..., Any]) -> Callable[..., Any]:
    def put(self: Any, progress: dict[str, Any]) -> None:
        original(self, progress | {"samples": 0})

    return put


def _keep_all_lines(path: Path, last_step: int) -> dict[str, int]:
    return {}


def _seed_of_the_start(original: Callable[..., Any]) -> Callable[..., Any]:
    """Randomness goes on from a generator's state that nobody saved."""
    seeded = False

    def seed_step(self: Any, step: int) -> None:
        nonlocal seeded
        if not seeded:
            seeded = True
            original(self, 1)

    return seed_step


def _deaf(self: stop.Stop, number: int, frame: object) -> None:
    """The signal is noted and forgotten."""


def _each_for_itself(self: stop.Stop) -> int:
    return self.code


def _late(original: Callable[..., int]) -> Callable[..., int]:
    """The stop is acted upon some steps later."""
    waited = 0

    def poll(self: stop.Stop) -> int:
        nonlocal waited
        agreed = original(self)
        waited += bool(self.code)
        return agreed if waited > 6 else 0

    return poll


def _everything_as_it_is() -> None:
    setattr(redact, "known_secrets", list)  # noqa: B010


def _without_options(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: original(*args)


def _no_lock(run_dir: Path) -> Any:
    return open(run_dir / ".lock", "a+")


def _without_errors(original: Callable[..., None]) -> Callable[..., None]:
    def write(path: Path, *data: Any) -> None:
        with contextlib.suppress(OSError):
            original(path, *data)

    return write


def _tidy(folder: Path) -> None:
    for path in folder.iterdir():
        if not re.fullmatch(r"step_\d{8}", path.name):
            folders.remove(path)


def _wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> Callable[[], None]:
    return lambda: _set(owner, name, wrapper(getattr(owner, name)))


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: _set(owner, name, value)


BREAKS = [
    Break("files are not brought to disk", _replace(folders, "write_file", _write_without_fsync), saves, case=1),
    Break("folders are not brought to disk", _replace(folders, "sync_folder", _nothing), saves, case=1),
    Break("renamed before it is on disk", _replace(folders, "write_step", _rename_first), saves, case=1),
    Break("written in place", _replace(folders, "write_step", _in_place), saves, case=1),
    Break("the old ones go first", _wrap(folders, "write_step", _prune_before), saves, case=4),
    Break("pruned in place", _replace(folders, "set_aside", lambda folder: folder), saves, case=4),
    Break("leftovers stay", _replace(checkpoint, "remove_leftovers", _nothing), saves, case=5),
    Break("shards are not brought to disk", _wrap(sharded, "_write_shards", _unsafe_shards), saves, case=6),
    Break(
        "no copy for the background",
        _replace(plain_state.Copies, "copy", lambda self, tensor: tensor.detach()),
        saves,
        case=7,
    ),
    Break("no digest of a shard is checked", _wrap(shards, "stream", _read_without_digest), damaged_shards, 20),
    Break("no digest is checked", _replace(reading, "_verify", _verify_nothing), damaged, 40),
    Break("the state's digest is not checked", _replace(reading, "_verify", _no_digest_of_the_state), damaged, 40),
    Break("none sound: begin afresh", _wrap(reading, "find", _fresh_when_damaged), damaged, 20),
    Break("unpickled with code execution", _replace(reading, "unpickle", _unpickle_everything), pickles, 1),
    Break("the loss scale is not put back", lambda: _without("Amp"), kills),
    Break("the optimizer is not put back", lambda: _without("AdamW"), kills),
    Break("the schedule is not put back", lambda: _without("Schedule"), kills),
    Break("the average is not put back", lambda: _without("Ema"), kills),
    Break("samples begin again", _wrap(resume, "set_progress", _samples_from_the_start), kills),
    Break(
        "randomness is not a function of the step",
        _wrap(environment.Environment, "seed_step", _seed_of_the_start),
        kills,
    ),
    Break("the sums between log lines are not put back", _replace(meters.Metrics, "load_states", _nothing), signals, 8),
    Break("lines after the checkpoint stay", _replace(log, "cut_lines", _keep_all_lines), kills),
    Break("signals are ignored", _replace(stop.Stop, "on_signal", _deaf), signals, 1),
    Break("each rank stops by itself", _replace(stop.Stop, "poll", _each_for_itself), signals, 8, is_slow=True),
    Break("a signal is acted upon late", _wrap(stop.Stop, "poll", _late), signals, 4),
    Break(
        "evaluations go on to their end",
        _replace(evaluation, "checked", lambda check: contextlib.nullcontext()),
        signals,
        1,
    ),
    Break("no agreement on skips", _replace(precision, "several_ranks", lambda: False), ranks, 8),
    Break("no guard of the statistics", _replace(buffers.BufferGuard, "settle", _nothing), ranks, 4),
    Break(
        "the schedule moves in skipped steps",
        _wrap(schedule.Schedule, "advance", lambda f: _advance_always(f)),
        ranks,
        4,
    ),
    Break("sums in another order after a resume", _wrap(layout, "wrap_ddp", _without_options), signals, 8),
    Break("the environment is recorded", _wrap(folder, "describe", lambda f: _with_environment(f)), leaks, 1),
    Break("failures are recorded as they are", _everything_as_it_is, leaks, 2, case=1),
    Break("a write that fails is ignored", _wrap(folders, "write_file", _without_errors), errors, 30, is_slow=True),
    Break("what is no checkpoint is tidied away", _replace(checkpoint, "remove_leftovers", _tidy), foreign, 8),
    Break("no lock of the run folder", _replace(folder, "lock_folder", _no_lock), stuck, 1),
]


def _with_environment(original: Callable[..., Any]) -> Callable[..., Any]:
    def describe(env: Any) -> dict[str, Any]:
        return original(env) | {"variables": {name[::-1]: value for name, value in os.environ.items()}}

    setattr(redact, "known_secrets", list)  # noqa: B010 - else what is written is masked all the same
    return describe


def _advance_always(original: Callable[..., Any]) -> Callable[..., Any]:
    def advance(self: Any, report: Any) -> Any:
        return original(self, replace(report, taken=torch.ones_like(report.taken), taken_on_host=None))

    return advance


def breaks(plan: Plan) -> Result:
    """Each break in a process of its own, in which the part that is to notice it runs."""
    result = Result()
    folder = plan.inside("breaks")
    slowest = (0.0, "")
    for case, each in enumerate(BREAKS):
        if plan.case not in (None, case) or (each.is_slow and not plan.long and plan.case is None):
            continue
        if each.part is errors and LIBRARY not in os.environ:
            result.facts[f"left out ({each.what})"] = "needs a C compiler (cc)"
            continue
        report = folder / f"{case}.json"

        def act(each: Break = each, case: int = case, report: Path = report) -> None:
            each.apply()
            Result.at_once = True
            harness.patience = 15.0  # broken ranks wait for each other
            inner = Plan(folder / f"work{case}", plan.seed, False, each.count, each.case)
            found = ""
            try:
                each.part(inner)
            except (Noticed, AssertionError) as noticed:  # or not even the run that is left alone ends well
                found = str(noticed)
            finally:
                kill_all()
            report.write_text(json.dumps(found))

        began = time.monotonic()
        child = Child(act, folder / f"{case}.txt")
        child.wait(300)
        result.counts["planted bugs"] += 1
        slowest = max(slowest, (time.monotonic() - began, each.what))
        if result.expect(report.exists(), case, f"{each.what}: the part ended: {child.text[-1000:]}"):
            found = json.loads(report.read_text())
            result.counts["of these caught"] += bool(found)
            result.expect(found, case, f"NOT NOTICED: {each.what}")
    result.facts["slowest"] = f"{slowest[1]}, {slowest[0]:.0f} s"
    return result
