"""Networks with 16-bit weights, and four ways to update them.

    weights = LowPrecisionWeights(net, torch.bfloat16, "stochastic")
    optimizer = Adam(master_params(net), fused=True)     # owns fp32 weights, and keeps fp32 moments
    ...                                                  # net(inputs), loss.backward(): without autocast
    params = [p for p in master_params(net) if p.grad is not None]
    weights.reduce_(params)                              # in place of DistributedDataParallel
    weights.begin_step(params)
    optimizer.step()
    weights.end_step(params, taken)

An update below half of a weight's last digit is lost: 1 - 1000 * 1e-3 stays 1.0 in bfloat16. So a step is always
computed in fp32, and the modes differ in how much of the result they keep:

    update       a weight is                                     bytes per weight between steps
    master       the rounded copy of an fp32 master weight       6   (Micikevicius et al., arXiv:1710.03740; apex's O2)
    remainder    its upper 16 bits, rounded, and the lower ones   4   (Transformer Engine, modded-nanogpt)
    stochastic   bfloat16, stochastically rounded                2   (Gupta et al., arXiv:1502.02551)
    nearest      16-bit, rounded to nearest                      2   (apex's O3; stalls)

Gradients are 16-bit in the backward pass and summed in fp32, layer by layer: 512 times 1/512 sums to 0.5 in bfloat16.
The optimizer only sees fp32, so its moments are fp32: with fp16 moments Adam's eps of 1e-8 is 0 and its first step
divides by zero.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_core.lowp.masters import buckets, master_params, sides
from amp_core.lowp.rounding import halve, noise_16bit, round_stochastically, whole
from amp_core.tensors import HALF, several_ranks
from amp_core.torch_private import NormBase, foreach_copy_, is_missing, version_of

Update = Literal["master", "remainder", "stochastic", "nearest"]

_SEES_WRITES = not is_missing("torch.Tensor._version")


@dataclasses.dataclass(slots=True, eq=False)
class Fp32Side:
    """The fp32 side of a 16-bit weight. Holds no reference to the weight, which `sides` would keep alive."""

    master: nn.Parameter
    """The tensor that the optimizer owns. Unless `keeps`, it has memory only during a step and reads as NaN between
    steps."""
    keeps: bool
    rest: Tensor | None
    """remainder: the lower bits of the value, int16."""
    version: int | None = None
    """The version of the weight when it was last known to be the rounded value; None: a program has its `data`."""

    def value(self, low: Tensor) -> Tensor:
        """The fp32 value of the weight `low`, exactly. No host-device sync."""
        if self.version != version_of(low):
            self._take_changes(low)
        if self.keeps:
            return self.master.detach()
        return join(low.detach(), self.rest)

    @torch.no_grad()
    def _take_changes(self, low: Tensor) -> None:
        """What was written into the weight replaces the value where this no longer rounds to it."""
        if self.keeps:
            # Where the weight is still the rounded master nobody wrote, and the digits behind it stay.
            self.master.copy_(torch.where(low == self.master.to(low.dtype), self.master, low.float()))
        elif self.rest is not None:
            self.rest.masked_fill_(low == 0, 0)  # any bits round to the weight; half of a last digit remains elsewhere
        self.version = version_of(low)

    def take(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Store `value`, and return the 16-bit weight."""
        if self.keeps:
            self.master.copy_(value)
        return part(value, dtype, self.rest)


def join(low: Tensor, rest: Tensor | None) -> Tensor:
    """The fp32 value of a 16-bit tensor and its rest, as `part` made them."""
    return low.float() if rest is None else whole(low, rest)


def part(value: Tensor, dtype: torch.dtype, rest: Tensor | None) -> Tensor:
    """The 16-bit tensor for `value`; `rest` gets the lower bits that it lacks (int16)."""
    if rest is None:
        return value.to(dtype)
    low, lacking = halve(value.to(rest.device, torch.float32))
    rest.copy_(lacking)
    return low


_grad: Any = torch.Tensor.grad
_data: Any = torch.Tensor.data


class _LowParameter(nn.Parameter):
    """A 16-bit weight. Its gradient is that of its fp32 side: a module, a wrapper and `p.grad = None` clear it."""

    @property
    def grad(self) -> Tensor | None:
        # A tracer refuses gradients of another dtype, and needs none.
        return sides[self].master.grad if self in sides and not torch.compiler.is_compiling() else _grad.__get__(self)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if self not in sides:
            _grad.__set__(self, grad)
        else:
            sides[self].master.grad = None if grad is None else grad.float()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        self._has_unseen_writes()
        return _data.__get__(self)

    @data.setter
    def data(self, data: Tensor) -> None:
        self._has_unseen_writes()
        _data.__set__(self, data)

    def _has_unseen_writes(self) -> None:
        # `data` is another tensor in the same memory: what is written there leaves no trace in the weight's version.
        if self in sides:
            sides[self].version = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin: Any = super().__deepcopy__(memo)
        if type(twin) is _LowParameter:
            twin.__class__ = nn.Parameter  # type: ignore[assignment]
        return twin


def low_weights(net: nn.Module) -> list[nn.Parameter]:
    """The weights that are 16-bit in such modes: all but those of islands and of batch and instance norms."""
    from amp_core.lowp.islands import island_names  # what else is here needs none of it

    islands = {net.get_submodule(name) for name in island_names(net)}
    kept = {m for m in net.modules() if m in islands or isinstance(m, NormBase)}
    stay = {p for module in kept for p in module.parameters()}
    return [p for p in net.parameters() if p.dtype is torch.float32 and p not in stay]


def compute_in(net: nn.Module, dtype: torch.dtype, lows: Iterable[nn.Parameter]) -> None:
    """Cast between modules as 16-bit weights need it, which `lows` are or are gathered as."""
    from amp_core.lowp.islands import island_names

    lows = set(lows)
    for module in net.modules():
        if any(p in lows for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(functools.partial(_cast_inputs, dtype), with_kwargs=True)
    islands = {net.get_submodule(name) for name in island_names(net)}
    inside = {part for island in islands for part in island.modules() if part is not island}
    # The outermost ones: inside an island everything is fp32.
    for island in islands - inside:
        island.register_forward_hook(functools.partial(_cast_island, dtype))
    net.register_forward_hook(_cast_output)


class LowPrecisionWeights:
    """Stores the weights of `net` in 16 bits and computes in them, without autocast.

    Islands (`keep_fp32`) and batch or instance normalisation keep fp32 weights; PyTorch refuses 16-bit ones beside fp32
    statistics. All buffers stay fp32: fp16 running variances are inf after one batch of standard deviation 2000, and
    positions collide. Modules with 16-bit weights cast their floating inputs, islands cast their outputs back, and
    `net`, the outermost module that is called, returns fp32, also in nested containers.

    `state_dict()` holds fp32 values, so that every mode resumes from every other's checkpoint. Loaded values are kept
    as exactly as the mode can: bit-exact from its own checkpoints, with `num_taken` (`Amp.counters`).

    `grad` of a 16-bit weight is the fp32 gradient that the optimizer gets: `net.zero_grad()` clears it. What a program
    writes into weights, as `p.clamp_()`, `p.data.copy_()` and `nn.init` do, replaces their fp32 values where these no
    longer round to it: before the next step, and in averages and state dicts. Not between replays of a captured step.

    Create it on the device, after `keep_fp32` and before optimizers, EMA and guards. In a process group all ranks start
    with the weights and buffers of rank 0.

    Attributes:
        num_taken: 0-d int64 tensor, taken steps, which seed the noise of stochastic rounding.

    ValueError: the weights are 16-bit already, or none would be.
    """

    @torch.no_grad()
    def __init__(self, net: nn.Module, dtype: torch.dtype, update: Update) -> None:
        if any(p.dtype in HALF for p in net.parameters()):
            raise ValueError("the weights are 16-bit already, their fp32 values are lost; pass a network in fp32")
        lows = low_weights(net)
        if not lows:
            raise ValueError(f"{type(net).__name__} has no weights that could be {dtype}; use a mode with fp32 weights")
        if several_ranks():  # before the cast: not all backends can send 16-bit numbers
            for tensor in (*net.parameters(), *net.buffers()):
                dist.broadcast(tensor.detach(), 0)

        self.dtype = dtype
        self.update = update
        self.num_taken = torch.zeros((), dtype=torch.int64, device=lows[0].device)
        self._nan = {device: torch.full((), torch.nan, device=device) for device in {p.device for p in lows}}
        self._weights: dict[Tensor, tuple[nn.Parameter, Fp32Side]] = {}
        for low in lows:
            side = self._store(low)
            self._weights[side.master] = (low, side)
        self._owned: set[Tensor] = set(master_params(net))

        for module in net.modules():
            if not any(p in sides for p in module.parameters(recurse=False)):
                continue
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # cuDNN needs them contiguous
            module.register_state_dict_post_hook(_save_fp32)
            module.register_load_state_dict_pre_hook(_load_fp32)
        compute_in(net, dtype, lows)

    def __reduce__(self) -> Any:
        raise TypeError(
            "what ties 16-bit weights to their fp32 values is neither copied nor pickled, and with it Amp; save state "
            "dicts, or make another Amp and let it prepare a network in fp32"
        )

    def _store(self, low: nn.Parameter) -> Fp32Side:
        value, trains, keeps = low.detach(), low.requires_grad, self.update == "master"
        rest = torch.zeros_like(value, dtype=torch.int16) if self.update == "remainder" else None
        side = Fp32Side(nn.Parameter(value if keeps else self._nan[low.device].expand(low.shape), trains), keeps, rest)
        low.data = side.take(value, self.dtype)
        side.version = version_of(low)
        sides[low] = side
        if type(low) is nn.Parameter:
            low.__class__ = _LowParameter

        def to_master(low: Tensor) -> None:
            grad = _grad.__get__(low)
            if grad is not None:
                _grad.__set__(low, None)
                with torch.no_grad():
                    before = side.master.grad
                    # As soon as a layer's gradient is there: 16-bit gradients exist of one layer at a time, and sums
                    # are fp32.
                    side.master.grad = grad.float() if before is None else before.add_(grad)

        low.requires_grad_(True).register_post_accumulate_grad_hook(to_master)  # refuses frozen ones
        low.requires_grad_(trains)
        return side

    def _of(self, params: Iterable[Tensor]) -> list[tuple[nn.Parameter, Fp32Side]]:
        return [self._weights[p] for p in params if p in self._weights]

    @torch.no_grad()
    def reduce_(self, params: Iterable[Tensor]) -> None:
        """Sum gradients over ranks in fp32, in a few large buckets. Once per step, before they are unscaled or read."""
        # Of this network alone; all ranks have gradients for the same weights.
        grads = [p.grad for p in params if p in self._owned and p.grad is not None] if several_ranks() else []
        if any(grad.is_sparse for grad in grads):
            raise TypeError("sparse gradients of 16-bit weights cannot be summed over ranks; use sparse=False")
        for bucket in buckets(grads):
            # One call for many weights: the latency of a collective is that of several thousand numbers.
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat)
            parts = flat.split([grad.numel() for grad in bucket])
            foreach_copy_(bucket, [part.view_as(grad) for part, grad in zip(parts, bucket, strict=True)])

    @torch.no_grad()
    def begin_step(self, params: Iterable[Tensor]) -> None:
        """Give the optimizer's `params` their values, before anything reads them, including adaptive clipping."""
        for low, side in self._of(params):
            value = side.value(low)
            if not side.keeps:  # else the optimizer owns the very tensor
                side.master.data = value

    @torch.no_grad()
    def end_step(self, params: Iterable[Tensor], taken: Tensor) -> None:
        """Write the 16-bit weights if `taken` (0-d bool), else leave every bit unchanged. No host-device sync."""
        mine = self._of(params)
        if not mine:
            return
        # After a skipped step: the values of the weights, on which each rounding, also the stochastic one, is exact.
        values = [side.master.detach() for _, side in mine]
        if self.update == "stochastic":
            sizes = [value.numel() for value in values]
            # Seeded by the number of steps: the same on all ranks, whose weights so stay equal, and after a resume.
            noises = noise_16bit(sum(sizes), self.num_taken).split(sizes)
            values = [round_stochastically(v, noise.to(v.device)) for v, noise in zip(values, noises, strict=True)]
        elif self.update == "remainder":
            values = [side.take(value, self.dtype) for value, (_, side) in zip(values, mine, strict=True)]
        for (low, side), value in zip(mine, values, strict=True):
            low.copy_(value)
            side.version = version_of(low)
            if not side.keeps:
                # One NaN, expanded: the memory is free, and what reads it between steps is seen to be wrong.
                side.master.data = self._nan[low.device].expand(low.shape)
        self.num_taken += taken


# --- hooks: functions of this module, so that a network can be copied and pickled with them


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_island(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    low = _cast(output, dtype)
    if isinstance(low, Tensor) and low is not output and not low.is_inference() and _SEES_WRITES:
        # Should it be the output of the network, the unrounded one is returned in its place.
        low.whole = output, version_of(low)  # type: ignore[attr-defined]
    return low


def _cast_output(module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors in `dtype`, also within containers."""
    from amp_core.lowp.islands import changed  # what else is here needs none of it

    def cast(tensor: Tensor) -> Tensor:
        # The output of a final island is returned unrounded, unless it was modified since.
        whole, version = getattr(tensor, "whole", (None, None))
        return (tensor if whole is None or version != version_of(tensor) else whole).to(dtype)

    return changed(value, lambda tensor: tensor.is_floating_point() and tensor.dtype is not dtype, cast)


def _save_fp32(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
        if p in sides and prefix + name in state:
            state[prefix + name] = sides[p].value(p)


@torch.no_grad()
def _load_fp32(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise ValueError("load_state_dict(assign=True) would replace 16-bit weights; use assign=False")
    for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
        new = state.get(prefix + name)
        if p in sides and isinstance(new, Tensor) and new.shape == p.shape:  # else torch raises its own error
            state[prefix + name] = sides[p].take(new, p.dtype)
