"""The numbers of tensors: what is not finite, in tensors of any layout and dtype; tensors and their names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.tensors import local
from amp_core.torch_private import storage_of

_DEEPEST = 8


@dataclass(frozen=True)
class Range:
    """The range of absolute values of a tensor's finite elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    smallest: float
    """Smallest value that is not 0."""
    largest: float
    zeros: float
    """Share of zeros."""
    not_finite: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Range:
        values = dense(tensor).flatten()
        values = values.abs() if values.is_complex() else values.double().abs()
        finite = values[values.isfinite()]
        positive = finite[finite > 0]
        return cls(
            name,
            dtype_name(tensor.dtype),
            tuple(values.shape if tensor.is_nested else tensor.shape),
            positive.min().item() if len(positive) else 0.0,
            positive.max().item() if len(positive) else 0.0,
            int((finite == 0).sum()) / len(values) if len(values) else 0.0,
            len(values) - len(finite),
        )

    def __str__(self) -> str:
        text = f"{self.name} {self.dtype}{list(self.shape)}: "
        if self.not_finite and self.not_finite == math.prod(self.shape):
            return f"{text}none of {self.not_finite:,} is finite"
        if not math.prod(self.shape):
            return f"{text}empty"
        zero = "0" if self.not_finite else "all 0"
        text += f"|x| from {self.smallest:.3g} to {self.largest:.3g}" if self.largest else zero
        share = f"{self.zeros:.1%}" if self.zeros >= 0.0005 else "under 0.1%"
        text += f", {share} zeros" if self.zeros and self.largest else ""
        return text + (f", {self.not_finite:,} not finite" if self.not_finite else "")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def storage_key(tensor: Tensor) -> int:
    try:
        return storage_of(tensor)
    except (NotImplementedError, RuntimeError):  # no storage: sparse, or a wrapper
        return id(tensor)


def has_numbers(tensor: Tensor) -> bool:
    """Whether it holds floating-point numbers that can be read: not on the meta device, not packed."""
    has_fractions = tensor.is_floating_point() or tensor.is_complex()
    return has_fractions and not tensor.is_meta and tensor.dtype is not torch.float4_e2m1fn_x2


def is_plain(tensor: Tensor) -> bool:
    """Whether it is one strided array, not sparse and not nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_whole(tensor: Tensor) -> bool:
    """Whether it covers its storage."""
    return not is_plain(tensor) or tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The arrays that hold the numbers of a tensor of any layout; views of its memory unless duplicates are summed."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return [*tensor.unbind()]
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    return [(tensor.coalesce() if tensor.is_sparse else tensor).values()]


def dense(tensor: Tensor) -> Tensor:
    """All numbers of a tensor in one array."""
    parts = [part.resolve_conj() for part in parts_of(tensor)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.flatten() for part in parts] or [torch.empty(0, dtype=tensor.dtype, device=tensor.device)])


def compared(tensor: Tensor) -> Tensor:
    """In a dtype that has comparisons: float8 has none."""
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def comparable(tensor: Tensor) -> Tensor:
    """All numbers of a tensor: real, in a dtype that has comparisons."""
    values = compared(dense(tensor))
    return torch.view_as_real(values) if values.is_complex() else values


def is_finite(tensor: Tensor) -> bool:
    if not has_numbers(tensor) or not tensor.numel():
        return True
    values = comparable(tensor)
    if math.isfinite(values.sum().item()):  # else a sum of finite numbers overflowed, or one is not finite
        return True
    # Far faster than a test of each number; a NaN is both the smallest and the largest.
    in_memory = sorted(range(values.ndim), key=values.stride, reverse=True)  # ten times faster than across it
    return bool(torch.stack(values.permute(in_memory).aminmax()).isfinite().all())


def has_nan(tensor: Tensor) -> bool:
    return bool(comparable(tensor).isnan().any())


def has_positive_infinity(tensor: Tensor) -> bool:
    return bool((comparable(tensor) == math.inf).any())


def has_new(result: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether numbers of a pointwise result are not finite where those that it was given are."""
    if not all(is_plain(each) and each.ndim <= result.ndim for each in (result, *given)):
        return False
    is_new = ~compared(result).isfinite()
    for each in given:
        is_new = is_new & compared(each).isfinite()
    return bool(is_new.any())


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers."""
    if (a.dtype, a.device, a.layout, a.is_meta) != (b.dtype, b.device, b.layout, False):
        return False
    a, b = comparable(a), comparable(b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def num_rows(tensor: Tensor) -> int:
    return tensor.shape[:1].numel() if is_plain(tensor) else 0


def bad_rows(tensor: Tensor) -> list[int]:
    """Indices along the first dimension with non-finite elements; [] if all rows have them."""
    if not is_plain(tensor) or not tensor.ndim or tensor.shape[0] < 2:
        return []
    rows = (~torch.isfinite(compared(tensor.detach()))).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist()
    return rows if len(rows) < tensor.shape[0] else []


def spread(tensor: Tensor, limit: int) -> Tensor:
    """At most `limit` evenly spread elements of a tensor, one-dimensional. A view if its memory is dense."""
    # In memory order, so that channels_last images are not copied.
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.permute(order).reshape(-1)
    step = max(-(-len(flat) // limit), 1)
    while step > 1 and math.gcd(step, len(flat)) > 1:
        step += 1  # a divisor of a dimension would sample the same few channels
    return flat[::step]


def named_tensors(nets: Iterable[tuple[str, nn.Module]], batch: Any) -> dict[str, Tensor]:
    """Weights and buffers by name, and the tensors of a batch as `batch[0]`, `batch[1]`, ..."""
    found: dict[str, Tensor] = {}
    for number, (prefix, net) in enumerate(nets, 1):
        dot = f"{prefix}." if prefix else ""
        own = {f"weight {dot}{name}": tensor for name, tensor in net.named_parameters()}
        own |= {f"buffer {dot}{name}": tensor for name, tensor in net.named_buffers()}
        # Two networks without a prefix may have the same names.
        own = dict(zip(own, local(own.values()), strict=True))
        found |= {f"{name} of network {number}" if name in found else name: tensor for name, tensor in own.items()}
    return found | dict(_walk(batch, "batch"))


def own_names(nets: Iterable[tuple[str, nn.Module]]) -> dict[Tensor, str]:
    """The names of weights and buffers."""
    return {tensor: name.partition(" ")[2] for name, tensor in named_tensors(nets, ()).items()}


def _walk(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    if type(value).__name__ == "ndarray" and value.dtype.kind == "f" and value.flags.writeable:
        yield name, torch.from_numpy(value)
        return
    if depth > _DEEPEST:  # objects may refer to each other
        return
    items = list[tuple[str, Any]]()
    if isinstance(value, Mapping):
        items = [(f"{name}[{key}]", item) for key, item in value.items()]
    elif isinstance(value, tuple | list):
        items = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    elif not callable(value):
        fields = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else ()
        keys = dict.fromkeys([*fields, *getattr(value, "__dict__", ())])
        items = [(f"{name}.{key}", getattr(value, key, None)) for key in keys]
    for its_name, item in items:
        yield from _walk(item, its_name, depth + 1)
