"""State as plain data: what is written, and that nothing read can run code."""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core.checkpoints.folders import FORMAT
from amp_core.config.errors import CheckpointError
from amp_core.layouts.fsdp import slice_of
from amp_core.tensors import Slice, is_dtensor

_SCALARS = (str, int, float, bool, type(None))
_LARGE = 1 << 16  # bytes of a tensor from which on it is not copied to be written
# Optimizer states that have the shape of their parameter, in the classes of torch.optim.
LIKE_PARAMETER = {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg"}
LIKE_PARAMETER |= {"grad_avg", "acc_delta", "ax", "prev", "step_size", "variance"}


class Part(Protocol):
    """What can be saved under a name: a net, an optimizer, an `Amp`, a `Schedule`, an `Ema`, ..."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def encode(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest; its `digest` is the SHA-256 of the compact form of all the rest."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    compact = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(compact.encode()).hexdigest()
    return (json.dumps({**rest, "digest": digest}, sort_keys=True, indent=2, allow_nan=False) + "\n").encode()


def unpickle(data: bytes, path: Path) -> dict[str, Any]:
    """Plain data from the bytes of a `state.pt`, or CheckpointError."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > len(data):
                raise ValueError("it is compressed")
        contents = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True, mmap=False)
        _require_plain(contents, len(data))
    except Exception as error:  # a hostile file can make the readers raise anything
        reason = str(error).split("WeightsUnpickler error: ")[-1].strip() or type_name(error)
        raise CheckpointError(f"{path}: refused: {reason.splitlines()[0]}") from error
    if not isinstance(contents, dict) or type(contents.get("format")) is not int:
        raise CheckpointError(f"{path}: refused: it is not a checkpoint of this project (it has no `format`)")
    if contents["format"] > FORMAT:
        raise CheckpointError(f"{path} has format {contents['format']}, newer than {FORMAT}: update this project")
    if not (isinstance(contents.get("progress"), dict) and isinstance(contents.get("config"), dict)):
        raise CheckpointError(f"{path}: refused: progress and config are not dictionaries")
    return contents


def _require_plain(contents: object, num_bytes: int) -> None:
    """Raises ValueError at any other type, and at tensors that claim more memory than the file has."""
    storages: dict[int, int] = {}
    for where, tensor in _tensors(contents):
        _require_dense(tensor, where)
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        if tensor.numel() * tensor.element_size() > storage.nbytes():
            raise ValueError(f"{where} is larger than its data")
    if sum(storages.values()) > num_bytes:
        raise ValueError("its tensors are larger than the file")


def _tensors(value: object, where: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(key, f"a key of {where or 'it'}")
            yield from _tensors(item, _join(where, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, _join(where, index))
    elif type(value) not in _SCALARS:
        raise ValueError(f"{where} is a {type_name(value)}")


def portable(part: Part, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state as it goes to the file: plain names, learning rates as numbers, and the class of an optimizer."""
    if isinstance(part, nn.Module):
        return {plain: state[name] for plain, name in plain_names(part, state).items()}
    if isinstance(part, Optimizer):
        groups = [
            {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
            for group in state["param_groups"]
        ]
        return {**state, "param_groups": groups, "class": type(part).__name__}
    return state


def plain_names(net: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Plain name -> the name in `net.state_dict()`, which has a component more for every wrapper on the way."""
    wrappers = []
    for path, module in net.named_modules(remove_duplicate=False):
        inner = None
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = "module"
        elif "_orig_mod" in dict(module.named_children()):  # torch.compile; importing its class would cost 2 s
            inner = "_orig_mod"
        if inner:
            prefix = f"{path}." if path else ""
            wrappers.append((f"{prefix}{inner}.", prefix))
    plain_names = {}
    for name in names:
        plain = name
        for wrapped, prefix in reversed(wrappers):  # innermost first: its path has the outer ones in it
            if plain.startswith(wrapped):
                plain = prefix + plain[len(wrapped) :]
        plain_names[plain] = name
    return plain_names


Data = Sequence[bytes | bytearray | memoryview]
"""The contents of a file, in order."""


def serialise(contents: dict[str, Any]) -> Data:
    """What `to_plain` returned as the contents of a file, which look into its large tensors and copy the rest.

    torch.save to a full disk raises "unexpected pos" instead of the reason, and to memory would copy all once more,
    holding the interpreter's lock.
    """
    file = _Collector(tensor for _, tensor in _tensors(contents))
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # four times as fast, and the SHA-256 is stronger
    try:
        torch.save(contents, cast(Any, file))
    finally:
        torch.serialization.set_crc32_options(crc)
    return file.data


class _Collector:
    """A file for torch.save."""

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


def digest_of(data: Data) -> dict[str, Any]:
    """The entry of a file in the manifest."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(part)
    return {"bytes": sum(map(len, data)), "sha256": digest.hexdigest()}


def to_plain(
    value: Any, where: str, copies: dict[tuple[Any, ...], Tensor], to_host: Callable[[Tensor], Tensor] = Tensor.cpu
) -> Any:
    """The same in plain containers and plain CPU tensors that own exactly their data; what was shared stays shared."""
    if isinstance(value, Tensor):
        _require_dense(value, where)
        tensor = value.detach()
        key = is_same(tensor)
        if key not in copies:
            copy = to_host(tensor.resolve_conj().resolve_neg())
            is_view = copy.untyped_storage().nbytes() != copy.numel() * copy.element_size()
            copies[key] = copy.clone() if is_view else copy  # torch.save would write all that a view looks into
        return copies[key]
    if isinstance(value, dict):
        for key in value:
            if type(key) not in _SCALARS:
                raise ValueError(f"{where} has a {type_name(key)} as a key; a checkpoint takes str, int, float, bool")
        return {key: to_plain(item, _join(where, key), copies, to_host) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_plain(item, _join(where, index), copies, to_host) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value) not in _SCALARS:
        raise ValueError(
            f"{where} is a {type_name(value)}; a checkpoint takes tensors, str, int, float, bool, None, list, tuple"
            " and dict"
        )
    if type(value) is int and value.bit_length() > 2000:  # pickle has a code for longer ones that a safe load lacks
        raise ValueError(f"{where} is an integer of {value.bit_length()} bits")
    return value


def is_same(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors that show the same memory in the same way."""
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def all_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from all_tensors(item)


def copied(value: Any) -> Any:
    if is_dtensor(value):
        value = slice_of(value)
    if isinstance(value, Slice):
        return replace(value, tensor=copied(value.tensor))
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value


def _require_dense(tensor: Tensor, where: str) -> None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise ValueError(f"{where} is a {type_name(tensor)} ({tensor.layout}); gather it into a plain dense tensor")
    if tensor.is_meta or tensor.is_quantized:
        raise ValueError(f"{where} is a meta or quantized tensor")


def finite(value: Any) -> float | None:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def type_name(value: object) -> str:
    return type(value).__name__
