"""The micro-batches of one optimizer step, and their weights.

Accumulated gradients equal those of the one big batch only when each micro-batch's mean loss is weighted by its share
of the samples (or tokens) of the whole window over all ranks. Dividing by a fixed number makes a ragged tail too
small; a mean of means favours short micro-batches.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_core.tensors import several_ranks, widest


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass.

    Attributes:
        batch: what the loader gave.
        weight: share of the window, a float, or a 0-d tensor when counts are tensors. Multiply the mean loss by it.
        is_last: the window ends with this one; gradients are reduced over ranks here.
    """

    batch: Any
    weight: float | Tensor
    is_last: bool


def num_samples(batch: Any) -> int:
    """The first dimension of the first tensor among the fields of `batch`; 1 if it is 0-d. TypeError: there is none.

    A batch is a tensor, or a mapping or sequence of fields, in which mappings may nest. Nested sequences are
    ignored: a detection batch's images [C, H, W] in a tuple look like collated fields of C samples.
    """
    first = batch
    if isinstance(batch, list | tuple | dict) and batch:
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    if isinstance(first, Tensor) and first.ndim:  # most batches, without generators
        return first.size(0)
    tensors = list(_fields(batch, is_outermost=True))
    if not tensors:
        raise TypeError(
            f"cannot count the samples of a {type(batch).__name__} without a tensor among its fields; pass count=, a "
            f"function of the batch, such as count=lambda batch: len(batch[0])"
        )
    return next((tensor.size(0) for tensor in tensors if tensor.ndim), 1)


def _fields(batch: Any, *, is_outermost: bool = False) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for field in batch.values():
            yield from _fields(field)
    # A list of mappings with the same keys is a list of samples that were not collated.
    elif (
        is_outermost
        and isinstance(batch, list | tuple)
        and not all(isinstance(each, Mapping) and each.keys() == batch[0].keys() for each in batch)
    ):
        for field in batch:
            yield from _fields(field)


def windows(
    batches: Iterable[Any],
    accumulation: int = 1,
    *,
    count: Callable[[Any], float | Tensor] | None = None,
    world_size: int = 1,
) -> Iterator[list[MicroBatch]]:
    """Group micro-batches into windows whose weights sum to 1, also in a ragged tail, over all ranks.

    In a process group this is collective: all ranks see the same number of windows of the same length. A rank that has
    fewer micro-batches repeats its last one with weight 0, so that no collective blocks. Lengths are exchanged once per
    window, in host memory, without a device sync.

    Args:
        batches: finite or endless.
        accumulation: micro-batches per window, at least 1; the last window may hold fewer.
        count: the size of a batch, such as its valid tokens: a number, or a 0-d tensor that stays on its device.
            Default: its samples (`num_samples`). If it may be 0, compute the loss as a sum divided by
            `count.clamp(min=1)`: an empty mean is NaN.
        world_size: for a plain DistributedDataParallel network, which averages gradients: its number of ranks, by which
            weights are multiplied. Omit it for networks wrapped by this project, which sum.

    Raises:
        ValueError: `accumulation` below 1; a negative count; or one rank has no batch at all while others have some
            (raised on every rank).
        TypeError: no `count`, and a batch whose samples cannot be counted.
    """
    if accumulation < 1:
        raise ValueError(f"windows(accumulation={accumulation}): expected at least 1")
    count = count or num_samples
    is_distributed = several_ranks()
    iterator = iter(batches)
    spare = None
    while True:
        window = list(islice(iterator, accumulation))
        counts: list[float | Tensor] = [count(batch) for batch in window]
        length, starved, total = len(window), not window and spare is None, _sum(counts)
        if is_distributed:
            lengths, starving, totals = _gather([length, starved, 0 if isinstance(total, Tensor) else total])
            length, starved = int(max(lengths)), any(starving)
            if not isinstance(total, Tensor):
                total = sum(totals)
        if length == 0:
            return
        if starved:  # on every rank: if only one raised, the others would hang
            raise ValueError("a rank has no batch at all while others have some; give every rank data")
        if len(window) < length:
            # With a count of 0 it adds zeros, and every rank enters as many collectives as the others.
            filler = window[-1] if window else spare
            counts += [counts[-1] * 0 if counts else count(filler) * 0] * (length - len(window))
            window += [filler] * (length - len(window))
            total = _sum(counts) if isinstance(counts[0], Tensor) else total
        # For a rank whose data end before those of others.
        spare = window[-1]
        weights = _shares(counts, total)
        yield window_of(window, weights if world_size == 1 else [weight * world_size for weight in weights])


def window_of(batches: Sequence[Any], weights: Sequence[float | Tensor]) -> list[MicroBatch]:
    """The micro-batches of one window from their batches and weights, in this order."""
    return [
        MicroBatch(batch, weight, is_last=i == len(batches))
        for i, (batch, weight) in enumerate(zip(batches, weights, strict=True), 1)
    ]


def microbatch_weights(counts: Sequence[float | Tensor]) -> list[float | Tensor]:
    """The weights of this rank's micro-batches: counts divided by the window's total over all ranks. Collective."""
    total = _sum(counts)
    if several_ranks() and not isinstance(total, Tensor):
        total = sum(_gather([total])[0])
    return _shares(counts, total)


def _sum(counts: Sequence[float | Tensor]) -> float | Tensor:
    """The sum of counts on this rank, exact: tensors are summed in int64, or in the widest float of their device."""
    is_tensor = bool(counts) and isinstance(counts[0], Tensor)  # numbers and tensors may be mixed
    if is_tensor or isinstance(total := sum(counts), Tensor):
        first, *rest = [c.to(_wide(c)) if isinstance(c, Tensor) and c.dtype is not torch.int64 else c for c in counts]
        return sum(rest, first)  # not from 0: adding a Python number takes as long as adding three tensors
    if not total >= 0 or (counts and min(counts) < 0):
        raise ValueError(f"a micro-batch counts {min(counts)}; expected a number of at least 0")
    return total


def _wide(count: Tensor) -> torch.dtype:
    # uint8 overflows at 255, and 256 + 1 is 256 in bfloat16.
    return widest(count.device) if count.is_floating_point() else torch.int64


def _shares(counts: Sequence[float | Tensor], total: float | Tensor) -> list[float | Tensor]:
    """Each count divided by the total; tensors in fp32 (float64 stays), whose totals are summed over ranks here."""
    # All tokens of a window may be masked: 0 / 0 would make its weights, and then all gradients, NaN.
    if not isinstance(total, Tensor):
        return [c / (total or 1) for c in counts]
    if several_ranks():
        total = total.clone()
        dist.all_reduce(total)
    total = torch.where(total > 0, total, 1) if total.is_floating_point() else total.clamp(min=1)
    dtypes = [torch.promote_types(getattr(c, "dtype", torch.float32), torch.float32) for c in counts]
    return [(c / total).to(dtype) for c, dtype in zip(counts, dtypes, strict=True)]


_host_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _gather(numbers: Sequence[float]) -> list[list[float]]:
    """Each number as a list over ranks, exchanged in host memory. Collective."""
    # NCCL takes no CPU tensors, and reading its result back would wait for all work queued on the GPU. So without a CPU
    # backend the first call makes a second group, of gloo.
    world = dist.group.WORLD
    if world not in _host_groups:
        has_cpu = "cpu:" in dist.get_backend_config()
        _host_groups[world] = world if has_cpu else dist.new_group(backend="gloo")
    # float64 holds integers up to 2^53 exactly: counts of tokens, too.
    mine = torch.tensor(numbers, dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine, group=_host_groups[world])
    return [list(column) for column in zip(*(row.tolist() for row in every), strict=True)]


def sync_grads(*nets: nn.Module, when: bool) -> contextlib.AbstractContextManager[Any]:
    """Reduce gradients over ranks in this micro-batch only if it is the last of its window (`when=micro.is_last`).

    The forward pass must run inside. With DistributedDataParallel it decides for its backward pass, wherever that runs;
    with `fully_shard` the latest `sync_grads` decides. Do not nest it over one network. A no-op without such a wrapper.
    """
    stack = contextlib.ExitStack()
    for net in nets:
        if hasattr(net, "set_requires_gradient_sync"):
            _hold(net, not when)
        if not when and hasattr(net, "no_sync"):
            stack.enter_context(net.no_sync())  # type: ignore[operator]
    return stack


def _hold(net: Any, hold: bool) -> None:
    """Accumulate gradients of a sharded network unsharded, in fp32 (`hold`), or reduce them, from now on."""
    if hold != (net in _holding):  # the call visits all modules, so only when it changes something
        net.set_requires_gradient_sync(not hold)
        (_holding.add if hold else _holding.discard)(net)


_holding: weakref.WeakSet[nn.Module] = weakref.WeakSet()
