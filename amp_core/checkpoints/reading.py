"""Reading checkpoints: the newest sound one, verified before it is used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_core.checkpoints import shards
from amp_core.checkpoints.agreement import Ranks
from amp_core.checkpoints.folders import MANIFEST, STATE, STEP_FOLDER, CorruptFile, inspect, read_file, step_folders
from amp_core.checkpoints.parts import AveragedPart, Part, spans_of
from amp_core.checkpoints.plain_state import unpickle
from amp_core.checkpoints.shards import Entry, Span, StatePath
from amp_core.config.errors import CheckpointError
from amp_core.tensors import Slice


def read(path: str | os.PathLike[str], *, notes: list[str] | None = None) -> dict[str, Any]:
    """Reads a checkpoint with no parts at hand: verified as in `Checkpoint.load`, tensors whole and on the CPU.

    Args:
        path: a step folder, a `state.pt`, a folder of checkpoints, or a run folder (the newest sound one of it).
        notes: what has to be said is appended here.

    Raises:
        CheckpointError: there is none, none is sound, or it is refused.
    """
    found = find(Path(path))
    if found is None:
        raise CheckpointError(f"{path}: there is no checkpoint")
    if notes is not None:
        notes += found.notes
    return found.contents


# Finding, verifying, unpickling.


@dataclass(frozen=True)
class Selection:
    """The states that parts take of a checkpoint, and the rows of sharded tensors that this rank needs."""

    path: Path
    parts: Mapping[str, Part]
    wanted: dict[str, Any]
    """Name of a part -> its state."""
    fresh: list[AveragedPart]
    """Parts that the checkpoint lacks."""
    notes: list[str]
    conversions: list[str]
    _spans: dict[str, Callable[[Entry], tuple[Span, bool]]] = field(default_factory=dict)

    def span(self, entry: Entry) -> Span | None:
        """The rows of a tensor that this rank needs. CheckpointError: no part has such a tensor."""
        return None if entry.paths[0][0] not in self.wanted else self._span(entry)[0]

    def value(self, entry: Entry, tensor: Tensor) -> Tensor | Slice:
        """What was read, as the part wants it."""
        (dim, start, _), is_slice = self._span(entry)
        return Slice(tensor, start, entry.shape[dim], dim) if is_slice else tensor

    def _span(self, entry: Entry) -> tuple[Span, bool]:
        name = str(entry.paths[0][0])
        if name not in self._spans:
            self._spans[name] = spans_of(self.parts[name], self.wanted[name])
        try:
            return self._spans[name](entry)
        except ValueError as problem:
            text = f"{self.path} is of another model: {name}: {problem}. Nothing was loaded."
            raise CheckpointError(text) from problem


_Select = Callable[[Path, dict[str, Any]], Any]
"""(folder, contents) -> a `Selection`, or what has its `span` and `value`."""


@dataclass(frozen=True)
class _Found:
    contents: dict[str, Any]
    step: int
    path: Path
    digest: str
    notes: list[str]
    selection: Any
    """What `select` returned."""


def find(path: Path, ranks: Ranks | None = None, select: _Select | None = None) -> _Found | None:
    """The checkpoint that `path` means: the named one, or the newest sound one of a folder; None if that has none.

    Args:
        path: see `read`.
        ranks: that are to find the same one.
        select: selects of the tensors in shards; None: all of them.
    """
    ranks = ranks or Ranks()
    is_named, candidates = ranks.first(lambda: _candidates(path))
    notes: list[str] = []
    for candidate in candidates:
        opened: list[_Found] = []

        def attempt(candidate: Path = candidate, opened: list[_Found] = opened) -> tuple[int, str]:
            opened.append((_open if is_named != "file" else _open_file)(candidate, select))
            return opened[0].step, opened[0].digest

        try:
            told = ranks.each(attempt)
        except CorruptFile as rejected:
            if is_named:
                raise CheckpointError(f"{path} is damaged: {rejected}") from rejected
            notes.append(f"{candidate} is damaged and was not used: {rejected}")
            continue
        if any(one != told[0] for one in told):
            raise CheckpointError(f"{candidate}: the ranks read different ones: {told}; do all see the same folder?")
        opened[0].notes.extend(notes)
        return opened[0]
    if notes:
        raise CheckpointError("no checkpoint is sound: " + "; ".join(notes))
    return None


def _candidates(path: Path) -> tuple[str, list[Path]]:
    """("file" or "folder" if it is one checkpoint, else "", what to try in this order)."""
    try:
        if path.is_file():
            is_state = path.name == STATE and (path.parent / MANIFEST).exists()
            return ("folder", [path.parent]) if is_state else ("file", [path])
        if STEP_FOLDER.fullmatch(path.name) or (path / MANIFEST).exists() or (path / STATE).exists():
            return "folder", [path]
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        return "", [candidate for _, candidate in sorted(step_folders(folder).items(), reverse=True)]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _open_file(path: Path, select: _Select | None) -> _Found:
    """A state without a manifest."""
    data = read_file(path)
    contents = unpickle(data, path)
    if "sharded" in contents:
        raise CheckpointError(f"{path} is one file of a sharded checkpoint: name its folder, with the {MANIFEST}")
    step = contents["progress"].get("step")
    step = step if type(step) is int and step >= 0 else 0
    note = f"{path} has no {MANIFEST}: it was not verified"
    selection = select(path, contents) if select else None
    digest = hashlib.sha256(data).hexdigest()
    return _Found(contents, step, path, digest, [note], selection)


def _open(folder: Path, select: _Select | None = None) -> _Found:
    manifest, data = _verify(folder)
    contents = unpickle(data, folder / STATE)
    count = contents.pop("sharded", None)
    digest = manifest["files"][STATE]["sha256"]
    if count is None and "tensors" not in manifest:
        return _Found(contents, manifest["step"], folder, digest, [], select(folder, contents) if select else None)
    entries = _table(manifest)
    if count != len(entries):
        raise CorruptFile(f"{STATE} and {MANIFEST} do not belong together")
    for entry in entries:
        for path in entry.paths:
            _put(contents, path, torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
    selection = select(folder, contents) if select else None
    digests = {name: about["sha256"] for name, about in manifest["files"].items()}
    span = selection.span if selection else lambda entry: (entry.dim, 0, entry.length)
    found = shards.read(folder, entries, digests, span)
    for i, tensor in found.items():
        for path in entries[i].paths:
            _put(contents, path, selection.value(entries[i], tensor) if selection else tensor)
    return _Found(contents, manifest["step"], folder, manifest["digest"], [], selection)


def _put(contents: dict[str, Any], path: StatePath, value: Any) -> None:
    """Puts a tensor where the state has None, or what was put there before."""
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


def _verify(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The manifest, and the bytes of the state: those that were hashed, so that they cannot change before use."""
    manifest = inspect(folder)
    data = read_file(folder / STATE)
    if hashlib.sha256(data).hexdigest() != manifest["files"][STATE]["sha256"]:
        raise CorruptFile(f"{STATE} does not have the SHA-256 of the manifest")
    return manifest, data


def _table(manifest: dict[str, Any]) -> list[Entry]:
    """The table of tensors, if it and the files belong together."""
    entries = shards.decode(manifest.get("tensors"))
    contents = shards.by_file(entries)
    files = {name: entry["bytes"] for name, entry in manifest["files"].items() if name != STATE}
    if files != {name: shards.size_of(items) for name, items in contents.items()}:
        raise CorruptFile(f"{MANIFEST}: the files are not those that its table needs")
    return entries
