"""Tensors in shards over several files: the table of what lies where, the files, and reading what a rank needs.

The table is in the manifest of a checkpoint. The files are safetensors, which any reader of that format opens; here
the headers are recomputed from the table and compared, byte for byte.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_core.checkpoints.folders import CorruptFile, require_memory, stream
from amp_core.tensors import Slice, split_dimension

StatePath = tuple[str | int, ...]  # keys of dictionaries and numbers in lists, from the top down to a tensor
_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BF16": torch.bfloat16, "BOOL": torch.bool}
_DTYPES |= {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "U8": torch.uint8}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # as safetensors names them


@dataclass(frozen=True, order=True)
class Shard:
    """The rows from `start` to `stop` along the sharded dimension of an entry, in a file."""

    start: int
    stop: int
    file: str


@dataclass(frozen=True)
class Entry:
    """A tensor of the table."""

    paths: tuple[StatePath, ...]  # where it is in the state: several if it is shared
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int  # the sharded one
    shards: tuple[Shard, ...] = ()

    @property
    def length(self) -> int:
        """Size along the sharded dimension."""
        return self.shape[self.dim]

    def shape_of(self, start: int, stop: int, dim: int | None = None) -> tuple[int, ...]:
        dim = self.dim if dim is None else dim
        return *self.shape[:dim], stop - start, *self.shape[dim + 1 :]

    def num_bytes(self, start: int, stop: int) -> int:
        return self.dtype.itemsize * math.prod(self.shape_of(start, stop))

    @property
    def name(self) -> str:
        return ".".join(map(str, self.paths[0]))


Span = tuple[int, int, int]  # dimension, start, stop
Want = Callable[[Entry], tuple[Span, bool] | None]  # the wanted rows, and whether as a `Slice`; None: nothing of it


def want_all(entry: Entry) -> tuple[Span, bool]:
    return (entry.dim, 0, entry.length), False


def encode(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """The table for JSON, which makes lists of tuples."""
    rows = ((e.paths, NAMES[e.dtype], e.shape, e.dim, [(s.start, s.stop, s.file) for s in e.shards]) for e in entries)
    return [dict(zip(("places", "dtype", "shape", "dim", "pieces"), row, strict=True)) for row in rows]


def decode(table: Any) -> list[Entry]:
    """The inverse of `encode`. CorruptFile: an impossible table, such as shards that overlap."""
    try:
        entries = [
            Entry(
                tuple(tuple(_a(key, str, int) for key in _a(path, list)) for path in _a(row["places"], list)),
                _DTYPES[row["dtype"]],
                tuple(_a(size, int) for size in _a(row["shape"], list)),
                _a(row["dim"], int),
                tuple(Shard(_a(a, int), _a(b, int), _a(file, str)) for a, b, file in _a(row["pieces"], list)),
            )
            for row in _a(table, list)
        ]
        seen: set[StatePath] = set()
        for entry in entries:
            check(entry)
            for path in entry.paths:
                if not path or path in seen or path[0] != entry.paths[0][0]:
                    raise ValueError(f"{entry.name} stands in an impossible place")
                seen.add(path)
        # `head` looks for a free name from the first on, which takes the square of their number.
        if max(Counter(entry.name for entry in entries).values(), default=0) > 100:
            raise ValueError("more than 100 tensors have the same name")
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"the table of tensors cannot be understood: {error}") from error
    return entries


def _a(value: Any, *types: type) -> Any:
    if type(value) not in types:  # an int, not a bool
        raise TypeError
    return value


def check(entry: Entry) -> None:
    """Raises ValueError unless torch can have such a tensor, and its shards hold each row once."""
    is_possible = entry.paths and 0 <= entry.dim < len(entry.shape) <= 64 and all(size >= 0 for size in entry.shape)
    # Strides are products of sizes, also where another size is 0.
    if not is_possible or math.prod(max(size, 1) for size in entry.shape) * entry.dtype.itemsize >= 1 << 62:
        raise ValueError(f"{entry.name if entry.paths else 'a tensor'} has an impossible shape {entry.shape[:64]}")
    reached = 0
    for shard in entry.shards:
        if shard.start != reached or shard.stop <= shard.start:
            raise ValueError(f"{entry.name} has a shard from {shard.start} to {shard.stop} after row {reached}")
        reached = shard.stop
    if reached != (0 if 0 in entry.shape else entry.length):
        raise ValueError(f"{entry.name} has shards up to row {reached} of {entry.length}")


def by_file(entries: Iterable[Entry]) -> dict[str, list[tuple[Entry, Shard]]]:
    """The contents of each file, in order."""
    found: dict[str, list[tuple[Entry, Shard]]] = {}
    for entry in entries:
        for shard in entry.shards:
            found.setdefault(shard.file, []).append((entry, shard))
    return found


def head(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The first bytes of a safetensors file that holds tensors of these names, dtypes and shapes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        while name in table:
            name += "'"  # the paths ("a.b",) and ("a", "b") have one name
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    # The numbers behind it begin at a multiple of 8 bytes, as safetensors writes them.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def head_of(contents: Iterable[tuple[Entry, Shard]]) -> bytes:
    """The first bytes of a file of shards."""
    return head((entry.name, entry.dtype, entry.shape_of(shard.start, shard.stop)) for entry, shard in contents)


def replicas(part: Tensor) -> tuple[int, int]:
    """(index of this rank's replica of the shard, number of replicas)."""
    mesh, split = part.device_mesh, split_dimension(part)  # type: ignore[attr-defined]
    number, count = 0, 1  # the coordinates along the other dimensions, as the digits of one number
    for i in range(mesh.ndim):
        if i != split:
            number, count = number * mesh.size(i) + mesh.get_coordinate()[i], count * mesh.size(i)
    return number, count


def size_of(contents: list[tuple[Entry, Shard]]) -> int:
    """Bytes of a file of shards."""
    return len(head_of(contents)) + sum(entry.num_bytes(shard.start, shard.stop) for entry, shard in contents)


def buffer_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy().data


def read(folder: Path, entries: list[Entry], digests: Mapping[str, str], want: Want) -> dict[int, Tensor | Slice]:
    """Reads what this process wants of the tensors: number of an entry -> what was wanted, on the CPU.

    Opens only files that hold some of it, and compares them with `digests`, SHA-256 in hex. Holds what is wanted and
    one shard. CorruptFile: a file is not what it should be, and nothing that was read may be used.
    """
    wanted = {i: one for i, entry in enumerate(entries) if (one := want(entry)) is not None}
    shapes = {i: entries[i].shape_of(start, stop, dim) for i, ((dim, start, stop), _) in wanted.items()}
    num_bytes = sum(entries[i].dtype.itemsize * math.prod(shape) for i, shape in shapes.items())
    # For all at once, before the first allocation: the table may ask for any size.
    require_memory("what is needed of the shards", num_bytes)
    found = {i: torch.empty(shape, dtype=entries[i].dtype) for i, shape in shapes.items()}
    numbers = {id(entry): i for i, entry in enumerate(entries)}
    for name, contents in by_file(entries).items():
        takers = [
            _taker(found[i], entry, shard, wanted[i][0]) if (i := numbers[id(entry)]) in found else None
            for entry, shard in contents
        ]
        if any(takers):
            sizes = [entry.num_bytes(shard.start, shard.stop) for entry, shard in contents]
            stream(folder / name, head_of(contents), zip(sizes, takers, strict=True), digests[name])
    return {
        i: Slice(found[i], start, entries[i].shape[dim], dim) if is_slice else found[i]
        for i, ((dim, start, _), is_slice) in wanted.items()
    }


def _taker(target: Tensor, entry: Entry, shard: Shard, span: Span) -> Callable[[memoryview], None] | None:
    """Copies what is wanted of a shard from its bytes to `target`, the wanted rows of the tensor; None: nothing is."""
    dim, start, stop = span
    first, last, offset = shard.start, shard.stop, 0  # all of its rows, where columns are wanted
    if dim == entry.dim:
        first, last, offset = max(first, start), min(last, stop), start
    if first >= last or start >= stop:
        return None

    def take(data: memoryview) -> None:
        rows = torch.frombuffer(data, dtype=entry.dtype).view(entry.shape_of(shard.start, shard.stop))
        rows = rows.narrow(entry.dim, first - shard.start, last - first)
        rows = rows if dim == entry.dim else rows.narrow(dim, start, stop - start)
        target.narrow(entry.dim, first - offset, last - first).copy_(rows)

    return take
