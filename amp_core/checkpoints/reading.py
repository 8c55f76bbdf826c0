"""Reading checkpoints: the newest sound one, verified before it is used."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_core.checkpoints import pieces
from amp_core.checkpoints.agreement import Ranks
from amp_core.checkpoints.folders import FORMAT, MANIFEST, SHARD, STATE, STEP_FOLDER
from amp_core.checkpoints.part_state import net_of, parameters_of
from amp_core.checkpoints.pieces import CorruptFile, Entry, Span, StatePath
from amp_core.checkpoints.plain_state import Part, encode, plain_names, unpickle
from amp_core.config.errors import CheckpointError
from amp_core.layouts.fsdp import slice_of
from amp_core.tensors import Slice, is_dtensor


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
    """What is taken of a checkpoint."""

    path: Path
    parts: Mapping[str, Part]
    wanted: dict[str, Any]
    """Name of a part -> its state."""
    fresh: list[Callable[[], Any]]
    notes: list[str]
    conversions: list[str]
    sink: None = None
    _known: dict[str, dict[Any, Tensor]] = field(default_factory=dict)

    def span(self, entry: Entry) -> Span | None:
        """What this rank needs of a tensor. CheckpointError: no part has such a tensor."""
        name, *rest = entry.places[0]
        if name not in self.wanted:
            return None
        part = self.parts[str(name)]
        if hasattr(part, "span"):
            try:
                return 0, *part.span(tuple(rest), entry.shape)  # type: ignore[attr-defined]
            except ValueError as problem:
                raise CheckpointError(f"{self.path}: {name} does not fit: {problem}") from problem
        live = self._live(entry)
        if live is None or tuple(live.shape) != entry.shape:
            here = "nothing" if live is None else str(tuple(live.shape))
            raise CheckpointError(
                f"{self.path} is of another model: {entry.name} is {entry.shape} there and {here} here. "
                f"Nothing was loaded."
            )
        if not is_dtensor(live):
            return entry.dim, 0, entry.length
        mine = slice_of(live)
        return mine.dim, mine.start, mine.stop

    def value(self, entry: Entry, tensor: Tensor) -> Tensor | Slice:
        """What was read, as the part wants it."""
        span = self.span(entry)
        assert span is not None
        is_split = hasattr(self.parts[str(entry.places[0][0])], "span") or is_dtensor(self._live(entry))
        return Slice(tensor, span[1], entry.shape[span[0]], span[0]) if is_split else tensor

    def _live(self, entry: Entry) -> Tensor | None:
        name, *rest = entry.places[0]
        part = self.parts[str(name)]
        if isinstance(part, Optimizer):
            if str(name) not in self._known:
                self._known[str(name)] = dict(parameters_of(part, self.wanted[str(name)]["param_groups"]))
            return self._known[str(name)].get(rest[1]) if len(rest) == 3 and rest[0] == "state" else None
        return self._tensors(str(name)).get(rest[0]) if len(rest) == 1 else None

    def _tensors(self, name: str) -> dict[Any, Tensor]:
        """Of a network or its average, by plain names."""
        if name not in self._known:
            net = net_of(self.parts[name])
            live = {} if net is None else net.state_dict()
            self._known[name] = {} if net is None else {k: live[v] for k, v in plain_names(net, live).items()}
        return self._known[name]


_Select = Callable[[Path, dict[str, Any]], Any]
"""(folder, contents) -> a `Selection`, or what has its `span`, `value` and `sink`."""


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
        select: what is taken of the tensors in shards; all, if it is None.
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
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    contents = unpickle(data, path)
    if "sharded" in contents:
        raise CheckpointError(f"{path} is one file of a sharded checkpoint: name its folder, with the {MANIFEST}")
    step = contents["progress"].get("step")
    note = f"{path} has no {MANIFEST}: it was not verified"
    selection = select(path, contents) if select else None
    digest = hashlib.sha256(data).hexdigest()
    return _Found(contents, step if type(step) is int else 0, path, digest, [note], selection)


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
        for place in entry.places:
            _put(contents, place, torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
    selection = select(folder, contents) if select else None
    digests = {name: about["sha256"] for name, about in manifest["files"].items()}
    span = selection.span if selection else lambda entry: (entry.dim, 0, entry.length)
    found = pieces.read(folder, entries, digests, span, selection.sink if selection else None)
    for i, tensor in found.items():
        for place in entries[i].places:
            _put(contents, place, selection.value(entries[i], tensor) if selection else tensor)
    return _Found(contents, manifest["step"], folder, manifest["digest"], [], selection)


def _put(contents: dict[str, Any], place: StatePath, value: Any) -> None:
    """Puts a tensor where the state has None, or what was put there before."""
    inside: Any = contents
    try:
        for key in place[:-1]:
            inside = inside[key]
        before = inside[place[-1]]
    except (KeyError, IndexError, TypeError) as error:
        raise CorruptFile(f"{STATE} has no place for {'.'.join(map(str, place))}") from error
    if type(inside) not in (dict, list) or not (before is None or (isinstance(before, Tensor) and before.is_meta)):
        raise CorruptFile(f"{STATE} has something else in the place of {'.'.join(map(str, place))}")
    inside[place[-1]] = value


def _verify(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The manifest, and the bytes of the state: those that were hashed, so that they cannot change before use."""
    manifest = inspect(folder)
    data = _read_file(folder / STATE)
    if hashlib.sha256(data).hexdigest() != manifest["files"][STATE]["sha256"]:
        raise CorruptFile(f"{STATE} does not have the SHA-256 of the manifest")
    return manifest, data


def inspect(folder: Path) -> dict[str, Any]:
    """The manifest, after all checks that need not read the files.

    Raises:
        Damaged: it is damaged.
        CheckpointError: it is sound but written by a newer version.
    """
    raw = _read_file(folder / MANIFEST)
    try:
        manifest = json.loads(raw)
        # Byte for byte, so that no change goes unnoticed, not even of white space.
        if raw != encode(manifest):
            raise CorruptFile(f"{MANIFEST} does not have its own digest")
        if manifest["format"] > FORMAT:
            raise CheckpointError(f"{folder} has format {manifest['format']}, newer than {FORMAT}: update this project")
        step, files = manifest["step"], manifest["files"]
        if type(step) is not int or not isinstance(manifest["metrics"], dict) or STATE not in files:
            raise TypeError
        if STEP_FOLDER.fullmatch(folder.name) and folder.name != f"step_{step:08d}":
            raise CorruptFile(f"it is of step {step}")
        for name, entry in files.items():
            if type(entry["sha256"]) is not str or (name != STATE and not SHARD.fullmatch(name)):
                raise TypeError
            _require_size(folder / name, entry["bytes"])
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptFile(f"{MANIFEST} cannot be understood") from error
    return manifest


def _require_size(path: Path, num_bytes: int) -> None:
    try:
        found = os.stat(path)
    except OSError as error:
        raise CorruptFile(f"{path.name}: {error.strerror or error}") from error
    if found.st_size != num_bytes:
        raise CorruptFile(f"{path.name} has {found.st_size} bytes, not {num_bytes}")
    if not stat.S_ISREG(found.st_mode):
        raise CorruptFile(f"{path.name} is not a file")


def _table(manifest: dict[str, Any]) -> list[Entry]:
    """The table of tensors, if it and the files belong together."""
    try:
        entries = pieces.decode(manifest.get("tensors"))
    except ValueError as error:
        raise CorruptFile(f"{MANIFEST}: {error}") from error
    contents = pieces.by_file(entries)
    files = {name: entry["bytes"] for name, entry in manifest["files"].items() if name != STATE}
    if files != {name: pieces.size_of(items) for name, items in contents.items()}:
        raise CorruptFile(f"{MANIFEST}: the files are not those that its table needs")
    return entries


def is_sound(folder: Path, share: int = 0, num_shares: int = 1) -> bool:
    """Whether a step can be loaded, as far as a share of its files tells."""
    try:
        manifest, _ = _verify(folder)
        if "tensors" in manifest:
            _table(manifest)
        shards = sorted(name for name in manifest["files"] if name != STATE)
        for name in shards[share::num_shares]:
            pieces.verify(folder / name, manifest["files"][name]["bytes"], manifest["files"][name]["sha256"])
    except CorruptFile:
        return False
    return True


def _read_file(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device could last for ever
            raise CorruptFile(f"{path.name} is not a file")
        return path.read_bytes()
    except OSError as error:
        raise CorruptFile(f"{path.name}: {error.strerror or error}") from error


# The file system. Whatever changes it goes through `os`, call by call, so that a test can stop between any two.


def step_folders(folder: Path) -> dict[int, Path]:
    """By number, since names sort wrongly from step 100 million on."""
    try:
        matches = [STEP_FOLDER.fullmatch(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return {}
    return {int(match[1]): folder / match[0] for match in matches if match}
