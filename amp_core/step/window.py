"""The micro-batches of one optimizer step, and their weights.

Accumulated gradients equal those of the one big batch only when each micro-batch's mean loss is weighted by its share
of the samples (or tokens) of the whole window over all ranks. Dividing by a fixed number makes a ragged tail too
small; a mean of means favours short micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_core.tensors import several_ranks


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
    """The length of the first dimension of the first tensor in `batch`, a tensor or nested containers."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    values = batch.values() if isinstance(batch, dict) else batch
    if isinstance(values, Iterable) and not isinstance(batch, str):
        for value in values:
            return num_samples(value)
    raise TypeError(f"cannot count the samples of a {type(batch).__name__}; pass count=, a function of the batch")


def windows(
    batches: Iterable[Any],
    accumulation: int = 1,
    *,
    count: Callable[[Any], int | Tensor] | None = None,
    world_size: int = 1,
) -> Iterator[list[MicroBatch]]:
    """Group micro-batches into windows whose weights sum to 1, also in a ragged tail, over all ranks.

    In a process group every rank takes part: the weights are shares of the window over all ranks, and all ranks see the
    same number of windows of the same length. A rank that has fewer micro-batches repeats its last one with weight 0,
    so that no collective blocks.

    Args:
        batches: finite or endless.
        accumulation: micro-batches per window, at least 1; the last window may hold fewer.
        count: the size of a batch, for example its valid tokens: an int, or a 0-d tensor that stays on its device.
            Default: its samples. If it may be 0, compute the loss as a sum divided by `count.clamp(min=1)`: an empty
            mean is NaN.
        world_size: for a plain DistributedDataParallel network, which averages gradients over its ranks: its number of
            ranks. Weights are multiplied by it, which undoes that division. Omit it for networks wrapped by this
            project, which sum.

    Yields:
        A list of `MicroBatch`.

    Raises:
        ValueError: `accumulation` below 1; or, on every rank, that one has no batch at all while others have some.
    """
    if accumulation < 1:
        raise ValueError(f"windows(accumulation={accumulation}): expected at least 1")
    count = count or num_samples
    together = several_ranks()
    iterator = iter(batches)
    spare = None
    while True:
        window = list(islice(iterator, accumulation))
        length, starved = len(window), not window and spare is None
        if together:
            most = torch.tensor([length, int(starved)], device=_collective_device())
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            length, starved = most.tolist()
        if length == 0:
            return
        if starved:  # on every rank: if only one raised, the others would hang
            raise ValueError("a rank has no batch at all while others have some; give every rank data")
        counts: list[int | Tensor] = [count(batch) for batch in window]
        if len(window) < length:
            filler = window[-1] if window else spare
            counts += [counts[-1] * 0 if counts else count(filler) * 0] * (length - len(window))
            window += [filler] * (length - len(window))
        spare = window[-1]
        yield window_of(window, [weight * world_size for weight in microbatch_weights(counts)])


def window_of(batches: Sequence[Any], weights: Sequence[float | Tensor]) -> list[MicroBatch]:
    """The micro-batches of one window from their batches and weights, in this order."""
    return [
        MicroBatch(batch, weight, is_last=i == len(batches))
        for i, (batch, weight) in enumerate(zip(batches, weights, strict=True), 1)
    ]


def microbatch_weights(counts: Sequence[int | Tensor]) -> list[float | Tensor]:
    """The weights of a window's micro-batches: each count divided by that of the window on all ranks.

    Args:
        counts: of this rank's micro-batches, ints or 0-d tensors, which stay on their device; collective.
    """
    total = _total(counts)
    # All tokens may be masked; 0 / 0 would write NaN into the weights.
    return [c / total.clamp(min=1) if isinstance(total, Tensor) else c / max(total, 1) for c in counts]


def _collective_device() -> torch.device:
    """Where small host numbers must lie for a collective: NCCL has no CPU tensors."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _total(counts: Sequence[int | Tensor]) -> int | Tensor:
    """The count of the window over all ranks. Stays on the device if the counts are tensors."""
    total = sum(counts)
    if not several_ranks():
        return total
    if isinstance(total, Tensor):
        total = total.clone()
        dist.all_reduce(total)
        return total
    on_device = torch.tensor(total, device=_collective_device())
    dist.all_reduce(on_device)
    return int(on_device)


def sync_grads(*nets: nn.Module, when: bool) -> contextlib.AbstractContextManager[Any]:
    """Reduce gradients over ranks in this forward and backward only `when` it is the window's last.

    Both passes must lie inside: DistributedDataParallel decides in the forward pass, other layouts in the backward.
    Without a wrapper that reduces gradients this does nothing.
    """
    if when:
        return contextlib.nullcontext()
    contexts = [net.no_sync() for net in nets if hasattr(net, "no_sync")]  # type: ignore[operator]
    contexts += [_without_reduction(net) for net in nets if hasattr(net, "set_requires_gradient_sync")]
    if len(contexts) == 1:
        return contexts[0]
    stack = contextlib.ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


@contextlib.contextmanager
def _without_reduction(net: Any) -> Iterator[None]:
    """`no_sync` for networks sharded by `fully_shard`: gradients stay unsharded, in fp32, until reduced."""
    net.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        net.set_requires_gradient_sync(True)
