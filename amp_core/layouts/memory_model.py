"""The memory model: bytes that a rank holds and sends per step, by layout. `docs/SCALING.md` is made from it.

    weights = weights_of(net, amp_config)                          # any network, also on the meta device
    memory(weights, amp_config).total, [each.sent for each in traffic(weights, amp_config, 8)]

It counts weights, gradients, optimizer state, EMA and autocast's weight copies, for the rank that holds the most.
Activations grow with the batch and come on top: `saved_for_backward` measures them.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.config.schema import AmpConfig
from amp_core.layouts.fsdp import cast_whole
from amp_core.layouts.low_shards import shard_of
from amp_core.layouts.zero import bucket_size, is_shared
from amp_core.lowp.masters import is_low, master_params
from amp_core.lowp.weights import low_weights
from amp_core.memory.recast import Recast, cast_weight
from amp_core.step.ema import Ema
from amp_core.step.fused import bare_step
from amp_core.tensors import HALF, blocks, is_sharded, plans, shard_group, unwrap
from amp_core.torch_private import base_of, storage_of

FP32, LOW = 4, 2  # bytes


@dataclass(frozen=True)
class Weight:
    """One weight, and what decides how many bytes a rank holds and sends for it."""

    shape: tuple[int, ...]
    low: bool = False  # stored in 16 bits
    itemsize: int = FP32  # bytes of a stored element that is not `low`: 1 in 8 bits, and for a pair of 4-bit numbers
    cast: bool = False  # autocast casts it, so that sharded layouts gather it in 16 bits
    group: int = 0  # weights of one group are gathered together
    moments: float | None = 2.0  # optimizer state per element, in fp32 elements; None: not trained
    averaged: bool = False
    parts: int = 1  # number of ranks over which it is sharded
    slices: int = 1  # number of ranks over which only its optimizer state is sharded

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def gathered_size(self) -> int:
        """Bytes of an element when its shards are gathered."""
        return LOW if self.cast or self.low else FP32

    @property
    def part(self) -> int:
        """Elements of the largest shard: rows are not split."""
        return self.numel if self.parts == 1 else -(-self.shape[0] // self.parts) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank between steps, and what is added within a step."""

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    averages: int = 0
    copies: int = 0  # 16-bit weights cached from the forward to the backward pass
    gathered: int = 0  # the largest gathered block of sharded weights
    unreduced: int = 0  # unsharded gradients of sharded weights, kept until the last micro-batch of a window

    @property
    def total(self) -> int:
        """Bytes between the backward pass and the step."""
        return self.weights + self.gradients + self.moments + self.averages

    @property
    def most(self) -> int:
        """An upper bound within a step; not all of it needs to exist at the same time."""
        return self.total + self.copies + self.gathered + self.unreduced

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def weights_of(net: nn.Module, amp: AmpConfig) -> list[Weight]:
    """The weights of a network, on any device, in its layout if it is wrapped."""
    net = unwrap(net)
    shape_of = plans[net].outline if is_sharded(net) else net
    casts = amp.dtype != "float32"
    whole = {p for module in cast_whole(shape_of) for p in module.parameters()} if casts else set()
    if amp.update is not None and is_sharded(net):  # gathered in 16 bits
        whole = set(low_weights(shape_of))
    group_of = {p: number for number, block in enumerate(blocks(shape_of), 1) for p in block.parameters()}
    return [
        Weight(
            shape=tuple(param.shape),
            low=is_low(live) or (live if (shard := shard_of(live)) is None else shard.low).dtype in HALF,
            itemsize=live.element_size(),
            cast=param in whole and live.is_floating_point(),
            group=2 * group_of.get(param, 0) + (param in whole),
            parts=1 if (ranks := shard_group(live)) is None else ranks.size(),
            slices=torch.distributed.get_world_size() if is_shared(side) else 1,
        )
        for live, side, param in zip(net.parameters(), master_params(net), shape_of.parameters(), strict=True)
    ]


def memory(weights: Sequence[Weight], amp: AmpConfig, *, accumulation: int = 1) -> Memory:
    """Bytes on the rank that holds the most."""
    # What an update keeps of a 16-bit weight besides its 16 bits. Sharded, "master" keeps the masters alone: 4 bytes.
    side = {"master": FP32, "remainder": LOW}.get(amp.update or "", 0)
    trained = [weight for weight in weights if weight.moments is not None]
    blocks = Counter[int]()
    for weight in weights:
        if weight.parts > 1:
            blocks[weight.group // 2] += weight.numel * weight.gathered_size
    return Memory(
        weights=sum(
            (LOW + (min(side, LOW) if weight.parts > 1 else side) if weight.low else weight.itemsize) * weight.part
            for weight in weights
        ),
        gradients=sum(FP32 * weight.part for weight in trained),
        moments=sum(math.ceil(FP32 * weight.moments * weight.part / weight.slices) for weight in trained),  # type: ignore[operator]
        averages=sum(FP32 * weight.part for weight in weights if weight.averaged),
        copies=sum(LOW * weight.numel for weight in weights if weight.cast and weight.parts == 1),
        gathered=max(blocks.values(), default=0),
        unreduced=sum(FP32 * w.numel for w in trained if w.parts > 1) if accumulation > 1 else 0,
    )


@dataclass(frozen=True)
class Collective:
    """One kind of communication in a step."""

    kind: str  # all_reduce, all_gather, reduce_scatter or all_to_all
    num_ranks: int
    payload: int  # bytes of the full tensors, over all calls of a step
    calls: int

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in ring and pairwise algorithms."""
        # In a ring a rank passes on all parts but one. An all-reduce is a reduce-scatter and an all-gather.
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * self.payload * (self.num_ranks - 1) / self.num_ranks


def traffic(
    weights: Sequence[Weight],
    amp: AmpConfig,
    num_ranks: int,
    *,
    accumulation: int = 1,
    compress: bool = False,
    bucket_mb: float = 25.0,
) -> list[Collective]:
    """The communication of one step of one optimizer. Running statistics and logged values come on top."""
    if num_ranks == 1:
        return []
    found = [Collective("all_reduce", num_ranks, 4, 1)]
    replicas = [weight for weight in weights if weight.parts == 1 and weight.moments is not None]
    if replicas:
        numel = sum(weight.numel for weight in replicas)
        calls = math.ceil(FP32 * numel / ((32 if amp.update else bucket_mb) * 2**20))
        if compress:
            padded = LOW * numel
            found += [Collective(kind, num_ranks, padded, calls) for kind in ("all_to_all", "all_gather")]
        else:
            found.append(Collective("all_reduce", num_ranks, FP32 * numel, calls))
        shared = FP32 * sum(weight.numel for weight in replicas if weight.slices > 1)
        if shared:
            calls = math.ceil(shared / (FP32 * bucket_size(num_ranks)))
            found.append(Collective("all_gather", num_ranks, shared, calls))
    cut = [weight for weight in weights if weight.parts > 1]
    if cut:
        parts = cut[0].parts
        groups = len({weight.group for weight in cut})
        # Each group once before the forward and once before the backward pass of each micro-batch, rows padded.
        once = sum(weight.part * parts * weight.gathered_size for weight in cut)
        found.append(Collective("all_gather", parts, 2 * accumulation * once, 2 * accumulation * groups))
        # Gradients are summed in fp32, whatever is gathered for the forward pass, and once per window.
        whole = FP32 * sum(weight.part * parts for weight in cut)
        found.append(Collective("reduce_scatter", parts, whole, groups))
        if num_ranks > parts:
            found.append(Collective("all_reduce", num_ranks // parts, whole // parts, groups))  # of replicated groups
        found.append(Collective("all_reduce", parts, 4, 1))  # the norm
    return found


# --- activations ------------------------------------------------------------------------------------------------------


class Saved:
    """Bytes that autograd saves for backward passes, at their peak. Each storage counts once, weights do not."""

    def __init__(self, weights: Iterable[Tensor], recast: Recast | None = None) -> None:
        self._weights = {storage_of(weight) for weight in weights}
        self._recast = recast
        self._uses = Counter[int]()
        self._live, self._most = Counter[bool](), Counter[bool]()  # bytes by `_Kept.is_copy`

    def pack(self, tensor: Tensor) -> Any:
        kept = tensor if self._recast is None else self._recast.pack(tensor)
        memory = storage_of(tensor)
        if kept is not tensor or memory in self._weights:
            return kept
        weight = cast_weight(tensor if base_of(tensor) is None else base_of(tensor))
        return _Kept(self, tensor, memory, weight is not None and storage_of(weight) in self._weights)

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, _Kept):
            return kept.tensor
        return kept if self._recast is None else self._recast.unpack(kept)

    def add(self, kept: _Kept) -> None:
        # Several nodes may save one storage: it lives until the last of them lets go.
        self._uses[kept.memory] += 1
        if self._uses[kept.memory] == 1:
            self._live[kept.is_copy] += kept.num_bytes
            if self._live.total() > self.total:
                self._most = self._live.copy()

    def remove(self, kept: _Kept) -> None:
        self._uses[kept.memory] -= 1
        if not self._uses[kept.memory]:
            self._live[kept.is_copy] -= kept.num_bytes

    @property
    def total(self) -> int:
        return self._most.total()

    @property
    def activations(self) -> int:
        return self._most[False]

    @property
    def copies(self) -> int:
        """Autocast's copies of weights."""
        return self._most[True]


class _Kept:
    """A saved tensor, alive while a graph holds it."""

    __slots__ = ("is_copy", "memory", "num_bytes", "saved", "tensor")

    def __init__(self, saved: Saved, tensor: Tensor, memory: int, is_copy: bool) -> None:
        self.saved, self.tensor, self.memory, self.is_copy = saved, tensor, memory, is_copy
        self.num_bytes = tensor.untyped_storage().nbytes()
        saved.add(self)

    def __del__(self) -> None:
        self.saved.remove(self)


@contextlib.contextmanager
def saved_for_backward(weights: Iterable[Tensor], recast: Recast | None = None) -> Iterator[Saved]:
    """Measure what is saved for backward, except `weights`; use it around both passes. No host-device sync.

    Of recomputed blocks only the inputs count. Fake tensors count like real ones; other threads are not counted. With
    perf.recast_weights pass its `recast`: of nested saved-tensor hooks only the innermost are called.
    """
    saved = Saved(weights, recast)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        yield saved


# --- of a run ---------------------------------------------------------------------------------------------------------


def memory_of(
    nets: Iterable[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    ema: Ema | None,
    amp: AmpConfig,
    *,
    accumulation: int = 1,
) -> Memory:
    """The memory of existing networks, wrapped or not; optimizers may own other weights too. No collective."""
    state_of: dict[Tensor, float] = {}
    for optimizer in optimizers:
        by_weight = getattr(optimizer, "state_ratio", None)  # 8-bit moments depend on the size of a weight
        for group in optimizer.param_groups:
            ratio = state_ratio(optimizer, group) if by_weight is None else 0.0
            state_of |= {p: ratio if by_weight is None else by_weight(p) for p in group["params"]}
    averaged = None if ema is None else ema.source
    total, seen = Memory(), set()
    for net in map(unwrap, nets):
        sides = master_params(net)
        found = [
            replace(weight, moments=state_of.get(side), averaged=net is averaged)
            for weight, side in zip(weights_of(net, amp), sides, strict=True)
        ]
        seen.update(sides)
        total += memory(found, amp, accumulation=accumulation)
    others = [Weight(tuple(p.shape), moments=ratio) for p, ratio in state_of.items() if p not in seen]
    return total + memory(others, amp)


def state_ratio(optimizer: torch.optim.Optimizer, group: dict[str, Any] | None = None) -> float:
    """Optimizer state per weight element, in fp32 elements, measured by one step on a small weight."""
    weight = nn.Parameter(torch.zeros(16, 16))
    weight.grad = torch.zeros_like(weight)
    group = {k: v for k, v in (group or optimizer.param_groups[0]).items() if k != "params"}
    try:
        twin = type(optimizer)([{"params": [weight], **group, "lr": 0.0}])  # type: ignore[call-arg]
        with torch.no_grad():
            bare_step(twin)
    except (TypeError, ValueError, RuntimeError):
        # One that needs more than its groups to be built. Most keep two moments.
        return 2.0
    return sum(v.nbytes for v in twin.state[weight].values() if isinstance(v, Tensor) and v.ndim) / weight.nbytes
