"""Tensors in pieces over several files: the table of what lies where, the files, and reading what a rank needs.

A table has one `Entry` for each tensor: its dtype and shape, the dimension along which it is cut, and in which file
each piece lies. It stands in the manifest of a checkpoint. The files are safetensors, which any reader of that format
opens; here nothing in them is believed: what the head of a file has to be follows from the table, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

StatePath = tuple[str | int, ...]
"""Keys of dictionaries and numbers in lists, from the top of a nested state down to a tensor."""
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""How the format calls a dtype."""
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_CHUNK = 1 << 24


class CorruptFile(Exception):
    """What a file holds is not what it should hold."""


@dataclass(frozen=True, order=True)
class Shard:
    """Consecutive places along the dimension of its entry, in a file."""

    start: int
    stop: int
    file: str


@dataclass(frozen=True)
class Entry:
    """A tensor of the table."""

    places: tuple[StatePath, ...]
    """Where it stands in the state: more than one if it is shared."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int
    pieces: tuple[Shard, ...] = ()

    @property
    def length(self) -> int:
        """Along the dimension that is cut."""
        return self.shape[self.dim]

    def shape_of(self, start: int, stop: int) -> tuple[int, ...]:
        return *self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :]

    def num_bytes(self, start: int, stop: int) -> int:
        count = self.dtype.itemsize
        for size in self.shape_of(start, stop):
            count *= size
        return count

    @property
    def name(self) -> str:
        return ".".join(map(str, self.places[0]))


Span = tuple[int, int, int]
"""(dimension, first place, behind the last)"""


# --- the table --------------------------------------------------------------------------------------------------------


def encode(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """The table as JSON."""
    return [
        {
            "places": [list(place) for place in entry.places],
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "dim": entry.dim,
            "pieces": [[piece.start, piece.stop, piece.file] for piece in entry.pieces],
        }
        for entry in entries
    ]


def decode(table: Any) -> list[Entry]:
    """What `encode` made.

    Raises:
        ValueError: it says something that cannot be, such as pieces that overlap.
    """
    try:
        entries = [
            Entry(
                tuple(tuple(_a(key, str, int) for key in _a(place, list)) for place in _a(row["places"], list)),
                _DTYPES[row["dtype"]],
                tuple(_a(size, int) for size in _a(row["shape"], list)),
                _a(row["dim"], int),
                tuple(Shard(_a(a, int), _a(b, int), _a(file, str)) for a, b, file in _a(row["pieces"], list)),
            )
            for row in _a(table, list)
        ]
    except (KeyError, TypeError) as error:
        raise ValueError("the table of tensors cannot be understood") from error
    seen: set[StatePath] = set()
    for entry in entries:
        check(entry)
        for place in entry.places:
            if not place or place in seen or place[0] != entry.places[0][0]:
                raise ValueError(f"{entry.name} stands in an impossible place")
            seen.add(place)
    return entries


def _a(value: Any, *types: type) -> Any:
    if type(value) not in types:  # no bool where an int belongs
        raise TypeError
    return value


def check(entry: Entry) -> None:
    """Raises ValueError unless the pieces are the whole tensor, each place once."""
    if not entry.places or not 0 <= entry.dim < len(entry.shape) or not all(0 <= n < 1 << 62 for n in entry.shape):
        raise ValueError(f"{entry.name if entry.places else 'a tensor'} has an impossible shape {entry.shape}")
    reached = 0
    for piece in entry.pieces:
        if piece.start != reached or piece.stop <= piece.start:
            raise ValueError(f"{entry.name} has a piece from {piece.start} to {piece.stop} after place {reached}")
        reached = piece.stop
    if reached != (0 if 0 in entry.shape else entry.length):
        raise ValueError(f"{entry.name} has pieces up to place {reached} of {entry.length}")


# --- files ------------------------------------------------------------------------------------------------------------


def by_file(entries: Iterable[Entry]) -> dict[str, list[tuple[Entry, Shard]]]:
    """What each file holds, in order."""
    found: dict[str, list[tuple[Entry, Shard]]] = {}
    for entry in entries:
        for piece in entry.pieces:
            found.setdefault(piece.file, []).append((entry, piece))
    return found


def head(contents: Iterable[tuple[Entry, Shard]]) -> bytes:
    """The first bytes of a safetensors file that holds these one after the other."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry, piece in contents:
        name, begin, end = entry.name, end, end + entry.num_bytes(piece.start, piece.stop)
        while name in table:
            name += "'"
        shape = list(entry.shape_of(piece.start, piece.stop))
        table[name] = {"dtype": NAMES[entry.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def size_of(contents: list[tuple[Entry, Shard]]) -> int:
    """Bytes of the whole file."""
    return len(head(contents)) + sum(entry.num_bytes(piece.start, piece.stop) for entry, piece in contents)


def buffer_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def verify(path: Path, num_bytes: int, sha256: str) -> None:
    """Raises Damaged unless the file is this one; reads it piece by piece."""
    _stream(path, b"", [(num_bytes, None)], sha256)


def read(
    folder: Path,
    entries: list[Entry],
    digests: Mapping[str, str],
    span: Callable[[Entry], Span | None],
    sink: Callable[[Entry, Shard, Tensor], None] | None = None,
) -> dict[int, Tensor]:
    """What this process needs of the tensors. Opens the files that hold some of it, and verifies each as it reads.

    Holds what is wanted, and one piece.

    Args:
        folder: of the files.
        entries: of a table that was checked.
        digests: SHA-256 of each file, in hex.
        span: what is wanted of a tensor; None: nothing.
        sink: takes each piece of the wanted tensors, whole, and keeps it apart until this returns.

    Returns:
        Number of an entry -> a tensor on the CPU; none with a sink.

    Raises:
        Damaged: a file is not what it should be; nothing that was read may be used.
    """
    wanted = {i: one for i, entry in enumerate(entries) if (one := span(entry)) is not None}
    found: dict[int, Tensor] = {}
    for i, (dim, start, stop) in wanted.items():
        entry = entries[i]
        if 0 in (shape := (*entry.shape[:dim], stop - start, *entry.shape[dim + 1 :])):
            found[i] = torch.empty(shape, dtype=entry.dtype)

    def common(i: int, piece: Shard) -> tuple[int, int] | None:
        """The places along the cut dimension that a piece and what is wanted have in common."""
        if i not in wanted or (i in found and not found[i].numel()):
            return None
        dim, start, stop = wanted[i]
        if dim != entries[i].dim:
            return piece.start, piece.stop
        first, last = max(piece.start, start), min(piece.stop, stop)
        return (first, last) if first < last else None

    def put(i: int, piece: Shard, data: Tensor) -> None:
        entry, (dim, start, stop) = entries[i], wanted[i]
        if sink is not None:
            sink(entry, piece, data)
            return
        shape = (*entry.shape[:dim], stop - start, *entry.shape[dim + 1 :])
        if data.shape == shape and (dim != entry.dim or piece.start == start):
            found[i] = data  # all of it
            return
        both = common(i, piece)
        assert both is not None
        out = found.setdefault(i, torch.empty(shape, dtype=entry.dtype))
        data = data.narrow(entry.dim, both[0] - piece.start, both[1] - both[0])
        if dim == entry.dim:
            out.narrow(dim, both[0] - start, both[1] - both[0]).copy_(data)
        else:
            out.narrow(entry.dim, both[0], both[1] - both[0]).copy_(data.narrow(dim, start, stop - start))

    numbers = {id(entry): i for i, entry in enumerate(entries)}
    for name, contents in by_file(entries).items():
        items = [(numbers[id(entry)], piece) for entry, piece in contents]
        if not any(common(i, piece) for i, piece in items):
            continue
        parts: list[tuple[int, Callable[[memoryview], None] | None]] = []
        for i, piece in items:
            entry = entries[i]

            def take(data: memoryview, i: int = i, piece: Shard = piece, entry: Entry = entry) -> None:
                flat = torch.frombuffer(data, dtype=entry.dtype)
                put(i, piece, flat.view(entry.shape_of(piece.start, piece.stop)))

            parts.append((entry.num_bytes(piece.start, piece.stop), take if common(i, piece) else None))
        _stream(folder / name, head(contents), parts, digests[name])
    return found


def _stream(
    path: Path, begin: bytes, parts: list[tuple[int, Callable[[memoryview], None] | None]], sha256: str
) -> None:
    """Reads a file once, from `begin` on, and hands over the parts that somebody takes."""
    digest = hashlib.sha256()

    def fill(stream: Any, data: memoryview) -> memoryview:
        reached = 0
        while reached < len(data):
            count = stream.readinto(data[reached : reached + _CHUNK])
            if not count:
                raise CorruptFile(f"{path.name} ends too early")
            reached += count
        digest.update(data)
        return data

    try:
        if not path.is_file():  # reading a pipe or a device could last for ever
            raise CorruptFile(f"{path.name} is missing, or not a file")
        with open(path, "rb", buffering=0) as stream:
            if fill(stream, memoryview(bytearray(len(begin)))) != begin:
                raise CorruptFile(f"{path.name} does not begin as its table says")
            for num_bytes, take in parts:
                if take is not None:
                    take(fill(stream, memoryview(bytearray(num_bytes))))
                    continue
                for rest in range(num_bytes, 0, -_CHUNK):
                    fill(stream, memoryview(bytearray(min(rest, _CHUNK))))
            if stream.read(1):
                raise CorruptFile(f"{path.name} is too long")
    except OSError as error:
        raise CorruptFile(f"{path.name}: {error.strerror or error}") from error
    if digest.hexdigest() != sha256:
        raise CorruptFile(f"{path.name} does not have the SHA-256 of the manifest")
