"""A checkpoint of either format as one plain file, in one process: for other programs, or to go on from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from amp_core.checkpoints import checkpoint, folders, pieces, plain_state, reading
from amp_core.checkpoints.pieces import Entry, Shard
from amp_core.config.errors import CheckpointError, ConfigError

PARTS = ("model", "ema")
SUFFIXES = (".pt", ".safetensors")


def export(source: Path, target: Path, part: str | None = None) -> list[str]:
    """Writes one file, whole or not at all, after every byte of the checkpoint that it takes was verified.

    Args:
        source: a run folder, a folder of checkpoints (the newest sound one), a step folder, or a `state.pt`.
        target: ends in `.pt` or `.safetensors`, and is not there yet. The latter is written piece by piece, with one
            piece of a sharded checkpoint in memory at a time.
        part: `model`, `ema`, or any other network of the checkpoint: its state dict. None: the whole checkpoint as
            `Checkpoint` in format `single` writes it, which `resume=` takes; only as `.pt`.

    Returns:
        What has to be said: where it came from, and checkpoints that were rejected.

    Raises:
        ConfigError: a target that is there, or of another kind.
        CheckpointError: no sound checkpoint, or none with this part.
        SaveError: the target cannot be written.
    """
    problems = []
    if target.suffix not in SUFFIXES:
        problems.append(f"{target}: expected a name that ends in {' or '.join(SUFFIXES)}")
    elif part is None and target.suffix != ".pt":
        problems.append(f"{target}: a whole checkpoint is more than tensors; use --part {' or '.join(PARTS)}, or a .pt")
    if os.path.lexists(target):
        problems.append(f"{target}: is there already; choose another name")
    if not source.exists():
        problems.append(f"{source}: there is no such file or folder; expected a run folder or a checkpoint")
    if problems:
        raise ConfigError(problems)
    temporary = target.absolute().with_name(f".tmp-{target.name}-{os.getpid()}")
    with checkpoint._saving(target.absolute()), _removed(temporary):
        choice = _Choice(part, temporary if target.suffix == ".safetensors" else None)
        found = reading.find(source, None, choice.open)
        if found is None:
            raise CheckpointError(f"{source}: there is no checkpoint")
        if target.suffix == ".pt":
            contents = found.contents if part is None else found.contents[part]
            data = plain_state.serialise(contents)
            with checkpoint._saving(target.absolute(), sum(map(len, data))):
                folders.write_file(temporary, *data)
        else:
            choice.complete(found.contents)
        os.rename(temporary, target)
        folders.sync_folder(target.absolute().parent)
    what = f"all of step {found.step}" if part is None else f"{part} of step {found.step}"
    return [*found.notes, f"wrote {target} ({os.stat(target).st_size:,} bytes): {what}, {found.path}"]


@contextlib.contextmanager
def _removed(path: Path) -> Iterator[None]:
    """What is left of a file is removed when it ends."""
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@dataclass
class _Choice:
    """What is taken of a checkpoint, and the safetensors file to which its pieces go at once."""

    part: str | None
    path: Path | None

    def open(self, folder: Path, contents: dict[str, Any]) -> _Choice:
        """Looks at a checkpoint before its shards are read."""
        if self.part is None:
            return self
        state = contents.get(self.part)
        if not isinstance(state, dict) or self.part in ("progress", "config"):
            names = [name for name, state in contents.items() if isinstance(state, dict)]
            raise CheckpointError(f"{folder} has no {self.part}; it has {', '.join(names)}")
        others = [str(name) for name, value in state.items() if not (isinstance(name, str) and _fits(value))]
        if others and self.path is not None:
            raise CheckpointError(f"{folder}: {self.part} holds more than tensors ({others[0]}): use a .pt file")
        if self.path is not None:
            self._begin(state)
        return self

    def span(self, entry: Entry) -> tuple[int, int, int] | None:
        wanted = self.part is None or entry.places[0][0] == self.part
        return (entry.dim, 0, entry.length) if wanted else None

    def value(self, entry: Entry, tensor: Tensor) -> Tensor:
        return tensor

    @property
    def sink(self) -> Callable[[Entry, Shard, Tensor], None] | None:
        """Takes a piece in place of memory."""
        return None if self.path is None else self._write

    def _begin(self, state: dict[str, Tensor]) -> None:
        assert self.path is not None
        whole = [_entry(name, tensor) for name, tensor in state.items()]
        begin = pieces.head((entry, Shard(0, entry.length, "")) for entry in whole)
        self.offsets, end = {}, len(begin)
        for name, entry in zip(state, whole, strict=True):
            self.offsets[name] = end
            end += entry.num_bytes(0, entry.length)
        self.path.unlink(missing_ok=True)  # of a checkpoint that was damaged
        # Zeros first: then a disk that becomes full is an error here.
        zeros = [b"\0" * min(1 << 24, rest) for rest in range(end - len(begin), 0, -(1 << 24))]
        with checkpoint._saving(self.path, end):
            folders.write_file(self.path, begin, *zeros)

    def _write(self, entry: Entry, piece: Shard, tensor: Tensor) -> None:
        """A piece of a tensor goes to its place, row by row if it was cut along another dimension than the first."""
        assert self.path is not None
        outer = 1
        for size in entry.shape[: entry.dim]:
            outer *= size
        inner = entry.num_bytes(0, 1) // outer
        data = pieces.buffer_of(tensor)
        row = (piece.stop - piece.start) * inner
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            for place in entry.places:
                begin = self.offsets[place[1]] + piece.start * inner
                for i in range(outer):
                    part, where = data[i * row : (i + 1) * row], begin + i * entry.length * inner
                    while part:
                        written = os.pwrite(descriptor, part[: 1 << 24], where)
                        part, where = part[written:], where + written
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def complete(self, contents: dict[str, Any]) -> None:
        """Adds what was no piece."""
        for name, tensor in contents[str(self.part)].items():
            if not tensor.is_meta and tensor.numel():
                entry = _entry(name, tensor)
                self._write(entry, Shard(0, entry.length, ""), tensor)


def _fits(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in pieces.NAMES


def _entry(name: str, tensor: Tensor) -> Entry:
    return _Whole(((name, name),), tensor.dtype, tuple(tensor.shape), 0)


class _Whole(Entry):
    """A tensor in one piece, which may have no dimensions."""

    @property
    def name(self) -> str:
        return str(self.places[0][1])

    @property
    def length(self) -> int:
        return self.shape[0] if self.shape else 1

    def shape_of(self, start: int, stop: int) -> tuple[int, ...]:
        return (stop - start, *self.shape[1:]) if self.shape else ()
