"""Reading checkpoints: the newest sound one, verified before it is used, the same on all ranks."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from amp_core.checkpoints import shards
from amp_core.checkpoints.folders import MANIFEST, STATE, STEP_FOLDER, CorruptFile, inspect, read_file, step_folders
from amp_core.checkpoints.parts import AveragedPart
from amp_core.checkpoints.plain_state import unpickle
from amp_core.checkpoints.shards import StatePath, Want
from amp_core.config.errors import CheckpointError, RunError, SaveError

T = TypeVar("T")


class Ranks:
    """The ranks of a group that takes tensors in host memory, such as gloo's; or this process alone.

    Both methods are collective, and wait for all ranks. What `act` raises is raised on all of them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.num = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def first(self, act: Callable[[], T]) -> T:
        """What `act` returns on rank 0. The others do not call it."""
        return self.each(lambda: act() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def each(self, act: Callable[[], T]) -> list[T]:
        """What `act` returns on each rank, in order. Where several raise, the problem of the lowest rank counts."""
        if self.num == 1:
            return [act()]
        problem, told = None, (None, None)
        try:
            told = None, act()
        except Exception as error:  # whatever it is: the others must not wait for this rank
            problem = error
            # As a class and a text, since not every exception can be pickled.
            kind = type(error) if type(error) in (SaveError, CheckpointError, CorruptFile, ValueError) else RuntimeError
            name = f"{type(error).__name__}: " if kind is RuntimeError and not isinstance(error, RunError) else ""
            told = kind, f"{name}{error}"
        everyone: list[Any] = [None] * self.num
        dist.all_gather_object(everyone, told, group=self.group)
        for rank, (kind, value) in enumerate(everyone):
            if kind is not None:
                raise problem if rank == self.rank and problem is not None else kind(f"rank {rank}: {value}")
        return [value for _, value in everyone]


class Selection(NamedTuple):
    """The parts of a checkpoint that are loaded."""

    want: Want  # raises ValueError if nothing fits
    wanted: Mapping[str, Any] = MappingProxyType({})  # name of a part -> its state
    fresh: Sequence[AveragedPart] = ()  # parts that the checkpoint lacks
    notes: Sequence[str] = ()
    conversions: Sequence[str] = ()


Select = Callable[[Path, dict[str, Any]], Selection]  # of (folder or file, contents), before shards are read


@dataclass(frozen=True)
class Found:
    """A sound checkpoint."""

    contents: dict[str, Any]
    step: int
    path: Path
    digest: str
    selection: Selection
    notes: tuple[str, ...] = ()


def read(path: str | os.PathLike[str], *, key: str = "") -> dict[str, Any]:
    """Reads a checkpoint with no parts at hand: verified as in `Checkpoint.load`, full tensors on the CPU.

    `path` is a step folder, a `state.pt`, a folder of checkpoints, or a run folder (its newest sound one); `key` is the
    setting that named it. CheckpointError: there is none, or none is sound.
    """
    return find_checkpoint(Path(path), key=key).contents


class NoCheckpoint(CheckpointError):
    """The given path holds no checkpoint at all, neither sound nor damaged."""


def find_checkpoint(path: Path, ranks: Ranks | None = None, select: Select | None = None, key: str = "") -> Found:
    """The checkpoint that `path` means: the named one, or the newest sound one of a folder.

    With `ranks` all of them find the same one. Collective. CheckpointError: none is sound. NoCheckpoint: there is none.
    """
    ranks, select = ranks or Ranks(), select or (lambda path, contents: Selection(shards.want_all))
    kind, candidates = ranks.first(lambda: _candidates(path))
    notes: list[str] = []
    found: Found | None = None

    def attempt(candidate: Path) -> tuple[int, str]:
        nonlocal found
        found = (_open_file if kind == "file" else _open)(candidate, select, tuple(notes))
        return found.step, found.digest

    for candidate in candidates:
        try:
            told = ranks.each(functools.partial(attempt, candidate))
        except CorruptFile as rejected:
            if kind:
                raise CheckpointError(f"{path} is damaged: {rejected}") from rejected
            notes.append(f"{candidate} is damaged and was not used: {rejected}")
            found = None  # frees what another rank found damaged
            continue
        # Folders that are not shared look alike: they may hold the same step of different runs.
        if any(one != told[0] for one in told):
            raise CheckpointError(f"{candidate}: the ranks read different ones: {told}; do all see the same folder?")
        assert found is not None
        return found
    if notes:
        raise CheckpointError("no checkpoint is sound: " + "; ".join(notes))
    why = "holds neither a run nor a checkpoint"
    if any((path / name).exists() for name in (".hydra", "summary.json", "checkpoints")):
        why = "the run has saved no checkpoint yet; resume it with its own command, or name another one"
    if not path.exists():
        why = "there is no such file or folder; expected a run, a checkpoint, or its file"
    raise NoCheckpoint(f"{key and f'{key}='}{path}: {why}")


def _candidates(path: Path) -> tuple[str, list[Path]]:
    """("file" or "folder" if it is one checkpoint, else "", what to try in this order)."""
    try:
        if path.is_file():
            is_state = path.name == STATE and (path.parent / MANIFEST).exists()
            return ("folder", [path.parent]) if is_state else ("file", [path])
        # A damaged step folder that was named is refused, and not taken for an empty folder of checkpoints.
        if STEP_FOLDER.fullmatch(path.name) or (path / MANIFEST).exists() or (path / STATE).exists():
            return "folder", [path]
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        return "", [candidate for _, candidate in sorted(step_folders(folder).items(), reverse=True)]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _open_file(path: Path, select: Select, notes: tuple[str, ...]) -> Found:
    """A state without a manifest."""
    data = read_file(path)
    contents = unpickle(data, path)
    if "sharded" in contents:
        raise CheckpointError(f"{path} is one file of a sharded checkpoint: name its folder, with the {MANIFEST}")
    step = contents["progress"].get("step")
    step = step if type(step) is int and step >= 0 else 0
    notes = (*notes, f"{path} has no {MANIFEST}: it was not verified")
    return Found(contents, step, path, hashlib.sha256(data).hexdigest(), select(path, contents), notes)


def _open(folder: Path, select: Select, notes: tuple[str, ...]) -> Found:
    manifest = inspect(folder)
    # The bytes that are hashed are those that are used: they cannot change in between.
    data = read_file(folder / STATE)
    if hashlib.sha256(data).hexdigest() != manifest["files"][STATE]["sha256"]:
        raise CorruptFile(f"{STATE} does not have the SHA-256 of the manifest")
    contents = unpickle(data, folder / STATE)
    count = contents.pop("sharded", None)
    if count is None and "tensors" not in manifest:
        digest = manifest["files"][STATE]["sha256"]
        return Found(contents, manifest["step"], folder, digest, select(folder, contents), notes)
    entries = shards.decode(manifest.get("tensors"))
    files = {name: entry["bytes"] for name, entry in manifest["files"].items() if name != STATE}
    # Each has its own digest: what is whole may still be of two saves.
    if count != len(entries) or files != {name: shards.size_of(own) for name, own in shards.by_file(entries).items()}:
        raise CorruptFile(f"{STATE}, {MANIFEST} and shards do not belong together")
    for entry in entries:
        for path in entry.paths:
            # Shapes before numbers: another model is refused before gigabytes are read.
            _put(contents, path, torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
    selection = select(folder, contents)
    digests = {name: about["sha256"] for name, about in manifest["files"].items()}
    try:
        found = shards.read(folder, entries, digests, selection.want)
    except ValueError as problem:
        raise CheckpointError(f"{folder} is of another model: {problem}. Nothing was loaded.") from problem
    for i, tensor in found.items():
        for path in entries[i].paths:
            _put(contents, path, tensor)
    return Found(contents, manifest["step"], folder, manifest["digest"], selection, notes)


def _put(contents: dict[str, Any], path: StatePath, value: Any) -> None:
    """Put a tensor where the state has None or a meta tensor."""
    inside: Any = contents
    try:
        for key in path[:-1]:
            inside = inside[key]
        before = inside[path[-1]]
    except (KeyError, IndexError, TypeError) as error:
        raise CorruptFile(f"{STATE} has no place for {'.'.join(map(str, path))}") from error
    if type(inside) not in (dict, list) or not (before is None or (isinstance(before, Tensor) and before.is_meta)):
        raise CorruptFile(f"{STATE} has something else in the place of {'.'.join(map(str, path))}")
    inside[path[-1]] = value
