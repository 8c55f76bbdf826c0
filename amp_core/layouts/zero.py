"""Optimizer state sharded over the replicas of DDP (ZeRO stage 1, Rajbhandari et al., arXiv:1910.02054).

    share_state(net)                      # once, on every rank, before the first step
    with on_slices(optimizer):            # around a step: `Amp.step` does it
        optimizer.step()

Weights and gradients are replicated. The weights of an optimizer are concatenated and split into one slice per rank; a
rank holds the moments of its slice and steps it; then all ranks gather the new weights. Most optimizers are
elementwise, so a split may go through a weight, at a multiple of 64 elements, where vectorised kernels restart: the
step is bit-identical. For optimizers that need whole matrices the splits are between weights.

`torch.distributed.optim.ZeroRedundancyOptimizer` is not used: it wraps another optimizer, which does not get
`found_inf` and `grad_scale`, by which fused steps are skipped; it only splits between weights, so that a large
embedding is on one rank; and its state dict consists of pickled objects.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from amp_core.config.schema import WHOLE_MATRICES
from amp_core.lowp.masters import master_params
from amp_core.lowp.moments import flat
from amp_core.step.gradients import same, weights_of
from amp_core.tensors import StateLayout, all_gather, several_ranks, state_layouts
from amp_core.torch_private import foreach_copy_

_ALIGN = 64  # elements


class _Slice(NamedTuple):
    """A range of a weight's elements, in memory order."""

    number: int  # of the weight among the sharded ones, in the optimizer's order
    start: int
    end: int


class _Cut:
    """Which rank holds which state. The same on all ranks."""

    def __init__(self, params: Sequence[Tensor], num_ranks: int, *, between: bool) -> None:
        self.params = list(params)
        self.slices: list[list[_Slice]] = [[] for _ in range(num_ranks)]
        total, done, rank = sum(p.numel() for p in params), 0, 0
        for number, param in enumerate(params):
            start, size = 0, param.numel()
            while start < size:
                # The end of this rank's slice in this weight: from the total, so that roundings do not add up.
                room = total * (rank + 1) // num_ranks - done
                end = min(start + -(-max(room, 0) // _ALIGN) * _ALIGN, size) if room < size - start else size
                if between:  # a matrix goes to the rank with room for half of it: none is off its share by more
                    end = size if room >= size / 2 or rank == num_ranks - 1 else 0
                if end > start:
                    self.slices[rank].append(_Slice(number, start, end))
                    done += end - start
                    start = end
                if start < size:
                    rank += 1


_shared = WeakTensorKeyDictionary()  # weights whose optimizer state is sharded -> their strides during a step
_cuts: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Cut] = weakref.WeakKeyDictionary()


def share_state(net: nn.Module) -> None:
    """Shard the state of any optimizer of these replicated weights over the ranks, before its first step.

    Each step gathers the new weights, in addition to the all-reduce of gradients. Call it after `Amp.prepare`. A step
    is then collective, as are checkpoints (`Checkpoint` gathers full states).
    """
    # The fp32 side of a 16-bit weight may have no memory between steps.
    for param, weight in zip(master_params(net), net.parameters(), strict=True):
        _shared[param] = weight.stride()


def bucket_size(num_ranks: int) -> int:
    """Elements per gather: 32 MiB, or with many ranks 256 KiB of each, to limit the number of calls."""
    return max(1 << 23, num_ranks << 16)


def is_shared(param: Tensor) -> bool:
    """Whether the optimizer state of a weight is, or will be, sharded over the ranks."""
    return param in _shared


def _cut_of(optimizer: torch.optim.Optimizer) -> _Cut | None:
    if not _shared or not several_ranks():
        return None
    params = [p for p in weights_of(optimizer) if p in _shared]
    cut = _cuts.get(optimizer)
    if cut is None and params:
        between = type(optimizer).__name__ in WHOLE_MATRICES
        cut = _cuts[optimizer] = _Cut(params, dist.get_world_size(), between=between)
    if cut is not None and not same(params, cut.params):
        raise RuntimeError(
            "the weights of an optimizer changed after its state was sharded over ranks; build another optimizer, "
            "or use layout.shard_optimizer=false"
        )
    return cut


def _empty(param: Tensor, **options: Any) -> Tensor:
    return torch.empty_strided(param.shape, _shared[param], **options)


def _part(tensor: Tensor, piece: _Slice) -> Tensor:
    """A slice of a weight, or of a tensor with its memory layout; a slice of all of it keeps its shape."""
    if piece.end - piece.start == tensor.numel():
        return tensor.detach()
    return flat(tensor)[piece.start : piece.end]


# --- a step -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_slices(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around a step: the optimizer holds this rank's slices in place of weights; then all ranks gather the weights.

    Collective, for weights given to `share_state`; all ranks need gradients for the same ones. No host-device sync.
    """
    cut = _cut_of(optimizer)
    if cut is None:
        yield
        return
    mine = {cut.params[piece.number]: piece for piece in cut.slices[dist.get_rank()]}
    plain: dict[Tensor, Tensor] = {}
    for param, piece in mine.items():
        if param.grad is not None:
            grad = param.grad
            assert param.stride() == _shared[param], "a weight whose memory format changed"
            if grad.stride() != param.stride():
                grad = _empty(param, dtype=grad.dtype, device=grad.device).copy_(grad)
            plain[param] = _part(param, piece)
            plain[param].grad = _part(grad, piece)
            if param in optimizer.state:
                optimizer.state[plain[param]] = optimizer.state.pop(param)
    lists = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        # Weights without a slice here are left out: other ranks step them.
        group["params"] = [plain.get(p, p) for p in group["params"] if p not in _shared or p in plain]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params
        for param, part in plain.items():
            if part in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(part)
    _gather([param if param.grad is not None else None for param in cut.params], cut.slices)


def _gather(params: Sequence[Tensor | None], slices: Sequence[Sequence[_Slice]]) -> None:
    """All-gather each rank's slices of the weights, some megabytes at a time, one dtype after the other."""
    rank, num_ranks = dist.get_rank(), len(slices)
    for dtype in dict.fromkeys(param.dtype for param in params if param is not None):
        streams = [
            [
                sendable(flat(param)[piece.start : piece.end])
                for piece in held
                if (param := params[piece.number]) is not None and param.dtype is dtype
            ]
            for held in slices
        ]
        some = next(part for stream in streams for part in stream)
        length = max(sum(map(Tensor.numel, stream)) for stream in streams)
        for start in range(0, length, size := bucket_size(num_ranks) // num_ranks):
            pieces = [list(_window(stream, start, start + size)) for stream in streams]
            sizes = [list(map(Tensor.numel, parts)) for parts in pieces]
            # all_gather takes one size: the shorter ones are padded.
            width = max(map(sum, sizes))
            sent = some.new_zeros(width)
            if sizes[rank]:
                foreach_copy_(list(sent[: sum(sizes[rank])].split(sizes[rank])), pieces[rank])
            received = sent.new_empty(num_ranks * width)
            all_gather(received, sent)
            for other, parts in enumerate(pieces):
                if other != rank and parts:  # what this rank sent is in its weights already
                    foreach_copy_(parts, list(received[other * width :][: sum(sizes[other])].split(sizes[other])))


def sendable(tensor: Tensor) -> Tensor:
    """A flat tensor viewed as a dtype that every backend sends; not all send 16-bit and complex numbers."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.view(torch.uint8)


def _window(stream: Sequence[Tensor], start: int, end: int) -> Iterator[Tensor]:
    """A range of concatenated tensors, as views."""
    for part in stream:
        low, high = max(start, 0), min(end, part.numel())
        if low < high:
            yield part[low:high]
        start, end = start - part.numel(), end - part.numel()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def whole_state(optimizer: torch.optim.Optimizer, *, keep: bool = True) -> dict[str, Any]:
    """`optimizer.state_dict()` as in one process, sharded states gathered in host memory. Collective.

    Without `keep`, on ranks that need no result, sharded states are left out.
    """
    cut, state = _cut_of(optimizer), optimizer.state_dict()
    if cut is None:
        return state
    number_of = {param: number for number, param in enumerate(weights_of(optimizer))}
    shared = {number_of[param] for param in cut.params}

    def told(value: Any) -> Any:  # what stands for it until its owner sends it
        return value.to("meta" if value.ndim else "cpu", copy=True) if isinstance(value, Tensor) else value

    mine = {n: {key: told(value) for key, value in e.items()} for n, e in state["state"].items() if n in shared}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    entries: dict[int, dict[str, Any]] = {n: e for n, e in state["state"].items() if n not in shared}
    for owner, (pieces, described) in enumerate(zip(cut.slices, found, strict=True)):
        for piece in pieces:
            param = cut.params[piece.number]
            number = number_of[param]
            for key, value in described.get(number, {}).items():
                if isinstance(value, Tensor) and value.is_meta:
                    sent = torch.empty_like(value, device=param.device)
                    if owner == dist.get_rank():
                        sent.copy_(state["state"][number][key])
                    # One at a time, in the same order on all ranks: nobody holds more than one besides what it keeps.
                    dist.broadcast(sendable(flat(sent)), owner)
                    if keep and piece.end - piece.start == param.numel():
                        value = sent.cpu()
                    elif keep:
                        value = entries.get(number, {}).get(key)
                        value = _empty(param, dtype=sent.dtype) if value is None else value
                        flat(value)[piece.start : piece.end] = sent.cpu()
                if keep:
                    entries.setdefault(number, {})[key] = value
    return {**state, "state": dict(sorted(entries.items()))}


def slices_of(optimizer: torch.optim.Optimizer, states: dict[Any, Any], numbers: Sequence[Any]) -> dict[Any, Any]:
    """This rank's slices of full states, by number of the weight in `numbers`, in their order. No collective."""
    cut = _cut_of(optimizer)
    if cut is None:
        return states
    mine = {cut.params[piece.number]: piece for piece in cut.slices[dist.get_rank()]}
    taken: dict[Any, Any] = {}
    for number, param in zip(numbers, weights_of(optimizer), strict=True):
        if number not in states or (param in _shared and param not in mine):
            continue
        taken[number] = states[number]
        if param in mine and mine[param].end - mine[param].start < param.numel():
            taken[number] = {key: _cut_like(value, param, mine[param]) for key, value in states[number].items()}
    return taken


def _cut_like(value: Any, param: Tensor, piece: _Slice) -> Any:
    if not isinstance(value, Tensor) or value.shape != param.shape:
        return value
    return _part(_empty(param, dtype=value.dtype, device=value.device).copy_(value), piece).clone()


state_layouts.append(StateLayout(lambda optimizer: _cut_of(optimizer) is not None, on_slices, whole_state, slices_of))
