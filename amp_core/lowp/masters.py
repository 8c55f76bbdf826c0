"""The fp32 sides of 16-bit weights, as optimizers, averages and checkpoints see them; without such weights a no-op."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from amp_core.tensors import full_copy, is_sharded

_BUCKET = 1 << 23  # elements that are handled at a time: 32 MiB in fp32
sides = WeakTensorKeyDictionary()
"""16-bit weight -> its `Fp32Side` (lowp/weights.py)."""


def master_params(net: nn.Module) -> list[nn.Parameter]:
    """The parameters for an optimizer: the fp32 side of each 16-bit weight, and all other weights, in the usual order.

    They get the gradients. Those of `bf16_pure` and `o3` have values within a step alone, and are NaN between steps.
    """
    return [sides[p].master.requires_grad_(p.requires_grad) if p in sides else p for p in net.parameters()]


def weights_by_side() -> dict[Tensor, Tensor]:
    """fp32 side -> its 16-bit weight, whose strides it has in a step. Between steps it may be one number, expanded."""
    return {side.master: low for low, side in sides.items()}


def is_low(param: Tensor) -> bool:
    """Whether a weight is held in 16 bits."""
    return param in sides


def fp32_values(params: Iterable[Tensor]) -> list[Tensor]:
    """The values of weights, in fp32 for 16-bit ones. Read only."""
    return [sides[p].value(p) if p in sides else p.detach() for p in params]


def fp32_copy(net: nn.Module) -> nn.Module:
    """A deep copy of `net` with its fp32 values, which computes in fp32. Unsharded; collective if `net` is sharded."""
    if is_sharded(net):  # which gathers fp32 values
        return full_copy(net)
    twin = copy.deepcopy(net)
    for module in twin.modules():
        for hooks in (table for table in vars(module).values() if isinstance(table, dict)):
            for key in [key for key, hook in hooks.items() if _is_of_weights(hook)]:  # casts to 16 bits
                del hooks[key]
    for p, low in zip(twin.parameters(), net.parameters(), strict=True):
        if low in sides:
            p.data = sides[low].value(low).clone()
    return twin


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one device with at most `_BUCKET` elements, or a single larger one."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.numel() > _BUCKET or tensor.device != bucket[0].device):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def _is_of_weights(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps some of them
    return getattr(getattr(hook, "func", hook), "__module__", None) == "amp_core.lowp.weights"
