"""State as plain data: made for writing, and read such that no code runs and memory is bounded by the file's size."""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor, nn

from amp_core.checkpoints.folders import DEFAULTS, FORMAT, CorruptFile
from amp_core.config.errors import CheckpointError
from amp_core.tensors import Slice, is_dtensor, slice_of

_SCALARS = (str, int, float, bool, type(None))
_LARGE = 1 << 16  # tensors of at least so many bytes are written without a copy
_MOST_BITS = 2000  # of an integer: pickle has a code for longer ones that a safe load lacks


def unpickle(data: bytes, path: Path) -> dict[str, Any]:
    """Plain data from the bytes of a `state.pt`. CheckpointError: it is of a newer version.

    CorruptFile: it is refused, as it holds anything else, or claims more memory or time than its size allows.
    """
    try:
        # Before it is executed: what `weights_only` permits can still take hours, or all memory.
        num_items = scan(io.BytesIO(data))
        contents = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True, mmap=False)
        _require_plain(contents, len(data), num_items)
    except Exception as error:  # a hostile file can make the readers raise anything
        reason = str(error).split("WeightsUnpickler error: ")[-1].strip() or type(error).__name__
        raise CorruptFile(f"{path.name}: refused: {reason.splitlines()[0][:200]}") from error
    if not isinstance(contents, dict) or type(contents.get("format")) is not int:
        raise CorruptFile(f"{path.name}: refused: it is not a checkpoint of this project (it has no `format`)")
    if contents["format"] > FORMAT:
        raise CheckpointError(f"{path} has format {contents['format']}, newer than {FORMAT}: update this project")
    if not (isinstance(contents.get("progress"), dict) and isinstance(contents.get("config"), dict)):
        raise CorruptFile(f"{path.name}: refused: progress and config are not dictionaries")
    return {**DEFAULTS, **contents}


# What torch.save writes of plain containers: keys of dictionaries, and names that it refers to.
_KEYS = {"BINUNICODE", "BININT", "BININT1", "BININT2", "BINFLOAT", "NEWTRUE", "NEWFALSE", "NONE"}
_GLOBALS = re.compile(
    r"torch (\w+Storage|u?int\d+|b?float\w+|complex\d+|bool)|torch\.storage UntypedStorage|"
    r"torch\._utils _rebuild_(tensor_v[23]|parameter)|collections OrderedDict"
)


def scan(file: BinaryIO, *, is_ours: bool = True, is_zip: bool = True) -> int:
    """Scans a pickle before it is executed. Returns its size, which bounds the number of items it can hold.

    Allowed is what `torch.save` of plain containers writes: no other calls, and as keys only strings, numbers of 64
    bits, booleans and None. To hash nested tuples that share their items takes 2^n steps, and large integers can be
    chosen to have equal hashes. Unless it `is_ours`, only such tuples are refused. Unless it `is_zip`, it is in torch's
    old format, five pickles in a row. ValueError: it is refused.
    """
    size, num_hashed = file.seek(0, io.SEEK_END), 0
    file.seek(0)
    if is_zip:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > size:  # then a small file could take all memory
            raise ValueError("it is compressed")
        # Exactly one: of two, torch might execute the one that is not scanned.
        (entry,) = [entry for entry in entries if entry.filename.endswith("data.pkl")]
        # Not `archive.read`, which would miss the checksum that `serialise` leaves out.
        file.seek(entry.header_offset + 26)
        file.seek(sum(int.from_bytes(file.read(2), "little") for _ in range(2)), io.SEEK_CUR)
        size = entry.file_size
    # A pickle is a program for a machine with a stack and a memo: it is run here without making objects.
    stack: list[Any] = []  # names of operations, and of tuples how many items their hash takes
    memo: dict[Any, Any] = {}
    for code, argument, _ in (each for _ in range(1 if is_zip else 5) for each in pickletools.genops(file)):
        if "PUT" in code.name:
            memo[argument] = stack[-1]
            continue
        taken: list[Any] = []
        count = len(code.stack_before)
        if pickletools.markobject in code.stack_before:
            count = code.stack_before.index(pickletools.markobject)
            while (kind := stack.pop()) != "MARK":
                taken.append(kind)
        taken += [stack.pop() for _ in range(count)]  # the last one first
        kind = memo[argument] if "GET" in code.name else code.name
        if code.name.startswith("TUPLE"):
            kind = sum(kind if type(kind) is int else 1 for kind in taken)
        if type(kind) is int:
            num_hashed += kind
            if num_hashed > 10_000_000 + size:  # a second
                raise ValueError("damaged: its tuples hold each other more often than the file has bytes")
        elif code.name == "GLOBAL":
            kind = str(argument)
            if is_ours and not _GLOBALS.fullmatch(kind):
                raise ValueError(f"it refers to {kind.replace(' ', '.')}")
        elif code.name == "LONG1" and int(argument or 0).bit_length() < 64:
            kind = "BININT"
        # `taken` is a value, its key, the value before, ..., and at the end the dictionary.
        elif is_ours and code.name in ("SETITEM", "SETITEMS") and not _KEYS.issuperset(taken[1:-1:2]):
            raise ValueError("a key of a dictionary is neither text nor a number of 64 bits")
        # Made of pairs, it would have keys that were not checked above.
        elif is_ours and code.name == "REDUCE" and taken[1] == "collections OrderedDict" and taken[0] != "EMPTY_TUPLE":
            raise ValueError("a dictionary is made of something")
        stack += [kind] * len(code.stack_after)
    return size


def _require_plain(contents: object, num_bytes: int, num_items: int) -> None:
    """Raises ValueError at any other type, and at tensors or containers that are more than the file has room for."""
    storages: dict[int, int] = {}
    for count, (where, value) in enumerate(_leaves(contents)):
        if count > num_items:
            raise ValueError("its containers hold each other more often than the file has bytes")
        if not isinstance(value, Tensor):
            _require_scalar(value, where)
            continue
        _require_dense(value, where)
        storage = value.untyped_storage()
        # By storage: tensors that share memory count once.
        storages[storage.data_ptr()] = storage.nbytes()
        if value.numel() * value.element_size() > storage.nbytes():
            raise ValueError(f"{_name(where)} is larger than its data")
    if sum(storages.values()) > num_bytes:
        raise ValueError("its tensors are larger than the file")


_Where = tuple[object, ...]  # the keys that lead to a value in nested containers


def _leaves(value: object, where: _Where = ()) -> Iterator[tuple[_Where, object]]:
    """Each container (as None), key and other value, with its path."""
    if not isinstance(value, dict | list | tuple):
        yield where, value
        return
    yield where, None
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict):
            yield (*where, "a key"), key
        yield from _leaves(item, (*where, key))


def _name(where: _Where) -> str:
    return ".".join(map(str, where))


def _require_scalar(value: object, where: _Where) -> None:
    if type(value) not in _SCALARS:
        what = "tensors, str, int, float, bool, None, list, tuple and dict"
        raise ValueError(f"{_name(where)} is a {type(value).__name__}; a checkpoint takes {what}")
    if type(value) is int and value.bit_length() > _MOST_BITS:
        raise ValueError(f"{_name(where)} is an integer of {value.bit_length()} bits")


def _require_dense(tensor: Tensor, where: _Where) -> None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise ValueError(f"{_name(where)} is a {type(tensor).__name__} ({tensor.layout}); expected a dense tensor")
    if tensor.is_meta or tensor.is_quantized:
        raise ValueError(f"{_name(where)} is a meta or quantized tensor")


def serialise(contents: dict[str, Any]) -> list[bytearray | memoryview]:
    """The bytes of the file for what `to_plain` returned, in pieces: views of its large tensors, copies of the rest.

    torch.save hides the reason when a disk is full, and into memory copies all tensors, holding the interpreter's lock.
    """
    file = _Collector(all_tensors(contents))
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # four times as fast, and the SHA-256 is stronger
    try:
        torch.save(contents, cast(Any, file))
    finally:
        torch.serialization.set_crc32_options(crc)
    return file.data


class _Collector:
    """A file object for torch.save, which keeps views of large tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.data: list[bytearray | memoryview] = [bytearray()]
        self._large: dict[int, memoryview] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() >= _LARGE:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
                self._large[storage.data_ptr()] = whole.numpy().data

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        known = None
        if len(view) >= _LARGE:  # torch hands over the memory of the tensor itself
            known = self._large.get(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        if known is not None and len(known) == len(view):
            self.data += [known, bytearray()]
        else:
            last = self.data[-1]
            assert isinstance(last, bytearray)
            last += view
        return len(view)

    def flush(self) -> None:
        pass


def to_plain(
    value: Any,
    copies: dict[tuple[Any, ...], Tensor] | None = None,
    to_host: Callable[[Tensor], Tensor] = Tensor.cpu,
    where: _Where = (),
) -> Any:
    """The same in plain containers and plain CPU tensors that own exactly their data; shared tensors stay shared."""
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        _require_dense(value, where)
        tensor = value.detach()
        key = view_of(tensor)
        if key not in copies:
            copy = to_host(tensor.resolve_conj().resolve_neg())
            is_view = copy.untyped_storage().nbytes() != copy.numel() * copy.element_size()
            copies[key] = copy.clone() if is_view else copy  # torch.save would write all that a view looks into
        return copies[key]
    if isinstance(value, dict):
        for key in value:
            if type(key) not in _SCALARS:
                raise ValueError(f"{_name(where)} has a {type(key).__name__} as a key: expected str, int, float, bool")
        return {key: to_plain(item, copies, to_host, (*where, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_plain(item, copies, to_host, (*where, index)) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    _require_scalar(value, where)
    return value


def view_of(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors that view the same memory in the same way."""
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A nested state with `change` applied to what is no container."""
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    return type(value)(mapped(item, change) for item in value) if type(value) in (list, tuple) else change(value)


def all_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from all_tensors(item)


def copied(value: Any) -> Any:
    """A nested state with copies of its tensors in host memory; of a DTensor, of this rank's slice."""

    def copy(leaf: Any) -> Any:
        leaf = slice_of(leaf) if is_dtensor(leaf) else leaf
        if isinstance(leaf, Slice):
            return replace(leaf, tensor=copy(leaf.tensor))
        return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf

    return mapped(value, copy)


class Copies:
    """Host memory for copies of tensors, reused by the next save; pinned for copies from a GPU."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}  # by kind
        self._used: list[tuple[Any, Tensor]] = []  # in this save
        self._devices: set[torch.device] = set()
        self._pending: list[torch.cuda.Event] = []  # behind the copies of each device

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy that is complete after `wait`."""
        free = self._free.get(_kind(tensor))
        buffer = free.pop() if free else torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._used.append((_kind(tensor), buffer.copy_(tensor, non_blocking=tensor.is_cuda)))
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return buffer

    def end(self) -> None:
        """Ends a save: work queued from here on may change its tensors. Frees buffers that it did not use."""
        self._free = {}
        for kind, buffer in self._used:
            self._free.setdefault(kind, []).append(buffer)
        for device in self._devices:
            self._pending.append(torch.cuda.Event(blocking=True))
            self._pending[-1].record(torch.cuda.current_stream(device))
        self._used, self._devices = [], set()

    def wait(self) -> None:
        """Wait for pending copies."""
        while self._pending:
            self._pending.pop().synchronize()


def _kind(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_cuda
