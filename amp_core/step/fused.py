"""The step of torch's fused optimizers without torch's per-step Python overhead.

`optimizer.step()` looks up the state of every weight, groups tensors by device and dtype, enters a profiler scope, and
increments each weight's step count (and decrements it after a skipped step), one tensor at a time. For a small network
that takes longer than the arithmetic. Here the lists are cached and the counts share one tensor. Kernels, arguments,
state and every bit of the result are torch's, so both may be mixed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_core.step.gradients import same
from amp_core.tensors import is_state_sharded, step_on_local_shards
from amp_core.torch_private import find, reader

if TYPE_CHECKING:
    from amp_core.step.state import OptimizerState

_fused_sgd_, _fused_adam_ = find("torch._fused_sgd_"), find("torch._fused_adam_")
_fused_adamw_ = find("torch._fused_adamw_")
_MOMENTS: dict[Any, tuple[str, ...]] = {torch.optim.SGD: ("momentum_buffer",)} if _fused_sgd_ else {}
if _fused_adam_ and _fused_adamw_:
    _MOMENTS |= dict.fromkeys((torch.optim.Adam, torch.optim.AdamW), ("exp_avg", "exp_avg_sq"))
# If torch does not tell whether there are hooks, assume there are.
_all_before = find("torch.optim.optimizer._global_optimizer_pre_hooks", True)
_all_after = find("torch.optim.optimizer._global_optimizer_post_hooks", True)
_before = reader("torch.optim.Optimizer._optimizer_step_pre_hooks", lambda optimizer: True)
_after = reader("torch.optim.Optimizer._optimizer_step_post_hooks", lambda optimizer: True)
_TORCHS = getattr(find("torch.optim.Optimizer.profile_hook_step"), "__globals__", {})
_is_profiling = reader("torch.autograd.profiler._is_profiler_enabled", lambda profiler: True)
_CACHE = "_amp_core_step"
"""Where an optimizer keeps its `FusedStep`: no part of its state, neither saved nor copied with it."""
_Entry = dict[str, Any]
_step, _mean, _square, _largest = map(itemgetter, ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"))


class FusedStep:
    """A cached step of an optimizer with initialised state; made by `of`."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
        self._optimizer, self._all, self._state = optimizer, params, optimizer.state
        self._entries = list(optimizer.state.values())
        self._settings = _settings(optimizer)
        have = set(map(id, params))
        self._params = [[p for p in group["params"] if id(p) in have] for group in optimizer.param_groups]
        self._members = [[optimizer.state.get(p, {}) for p in params] for params in self._params]
        self._kernel: Any = _sgd
        self.counts: Tensor | None = None
        self._counted: list[dict[str, Any]] = []
        self._steps: list[Tensor] = []
        if type(optimizer) is not torch.optim.SGD:
            # Views of one tensor, so that one operator increments all.
            self._kernel, self._counted = _adam, [entry for members in self._members for entry in members]
            self.counts = torch.stack([entry["step"] for entry in self._counted])
            self._steps = list(self.counts.unbind())
            for entry, step in zip(self._counted, self._steps, strict=True):
                entry["step"] = step

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, params: list[Tensor], device: torch.device) -> FusedStep | None:
        """The cached step of a fused optimizer over its weights with gradients; None if only torch's own step works."""
        moments = _MOMENTS.get(type(optimizer))
        if moments is None or not params or {(p.device, p.dtype) for p in params} != {(device, params[0].dtype)}:
            return None
        for group in optimizer.param_groups:
            if isinstance(group.get("betas", (0.0,))[0], Tensor) or group.get("differentiable"):
                return None
            needed = moments if group.get("momentum", 1.0) else ()
            if group.get("amsgrad"):
                needed = (*needed, "max_exp_avg_sq")
            for param in group["params"]:
                # A weight without a gradient is not stepped and needs no state: any tensor stands for it.
                entry = optimizer.state.get(param, {}) if param.grad is not None else dict.fromkeys(needed, param)
                if any(not isinstance(entry.get(key), Tensor) for key in needed):
                    return None
        return cls(optimizer, params)

    def fits(self, params: list[Tensor]) -> bool:
        """Whether the weights, groups and state that the lists were made from are unchanged."""
        # By identity: loaded states and added groups are other objects, and comparing values would wait for the device.
        state, counts = self._optimizer.state, map(is_, map(_step, self._counted), self._steps)
        is_same = state is self._state and same(params, self._all) and same(state.values(), self._entries)
        return is_same and _settings(self._optimizer) == self._settings and all(counts)

    def take(self, grads: list[Tensor], taken: Tensor, found_inf: Tensor, divisor: Tensor | None) -> None:
        """Do what `optimizer.step()` does, with the gradients of the weights, in their order."""
        if self.counts is not None:
            self.counts.add_(taken)  # the kernels do nothing in a skipped step, whatever the count is
        # The kernels divide by `grad_scale` while they read a gradient, and write the quotient back.
        rest = iter(grads)
        for group, params, members in zip(self._optimizer.param_groups, self._params, self._members, strict=True):
            if params:
                mine = list(islice(rest, len(params)))
                self._kernel(group, params, mine, members, grad_scale=divisor, found_inf=found_inf)


def _sgd(group: _Entry, params: list[Tensor], grads: list[Tensor], members: list[_Entry], **on_device: Any) -> None:
    settings = {key: group[key] for key in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")}
    buffers = [entry["momentum_buffer"] for entry in members] if group["momentum"] else []
    _fused_sgd_(params, grads, buffers, is_first_step=False, **settings, **on_device)


def _adam(group: _Entry, params: list[Tensor], grads: list[Tensor], members: list[_Entry], **on_device: Any) -> None:
    settings = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    means, squares, steps = list(map(_mean, members)), list(map(_square, members)), list(map(_step, members))
    largest = list(map(_largest, members)) if group["amsgrad"] else []
    beta1, beta2 = group["betas"]
    kernel: Any = _fused_adamw_ if group["decoupled_weight_decay"] else _fused_adam_
    kernel(params, grads, means, squares, largest, steps, beta1=beta1, beta2=beta2, **settings, **on_device)


def take_step(state: OptimizerState, taken: Tensor, found_inf: Tensor, *, several_ranks: bool) -> None:
    """Step a fused optimizer if `taken` (0-d bool), which `found_inf` (0-d float32) tells its kernels. No sync."""
    optimizer, divisor = state.optimizer, state.divisor
    own: FusedStep | None = None
    in_parts = state.in_parts or (several_ranks and is_state_sharded(optimizer))
    if not (in_parts or must_be_called(optimizer)):
        own = optimizer.__dict__.get(_CACHE)
        if own is None or not own.fits(state.params):
            own = FusedStep.of(optimizer, state.params, found_inf.device)
    optimizer.__dict__[_CACHE] = own
    if own is None:
        with step_on_local_shards(optimizer) if in_parts else nullcontext():
            torch_step(optimizer, found_inf, divisor)
    else:
        take = _scope(optimizer)(own.take) if _is_profiling(torch.autograd.profiler) else own.take
        take(state.grads, taken, found_inf, divisor)


def counts_of(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The tensor that holds all of its step counts, if they share one."""
    own: FusedStep | None = optimizer.__dict__.get(_CACHE)
    return None if own is None else own.counts


def torch_step(optimizer: torch.optim.Optimizer, found_inf: Tensor, divisor: Tensor | None) -> None:
    """`optimizer.step()` with `found_inf` and `grad_scale` set as `torch.amp.GradScaler` sets them."""
    _fill_momentum(optimizer)
    optimizer.found_inf, optimizer.grad_scale = found_inf, divisor  # type: ignore[attr-defined]
    try:
        bare_step(optimizer)
    finally:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without importing torch's compiler, which takes as long as importing torch. In no_grad."""
    # torch wraps a step in a profiler scope and in a function that sets the grad mode and informs the compiler.
    hooked: Any = type(optimizer).step
    step = None if must_be_called(optimizer) else hooked.__wrapped__
    if (
        step is None
        or getattr(hooked, "__globals__", None) is not _TORCHS  # another decorator has copied `hooked`
        or getattr(step, "__globals__", None) is not _TORCHS
        or not hasattr(step, "__wrapped__")
        or optimizer.defaults.get("differentiable")
        or torch.is_grad_enabled()
        or "torch._dynamo" in sys.modules
    ):
        optimizer.step()
    elif _is_profiling(torch.autograd.profiler):
        _scope(optimizer)(step.__wrapped__)(optimizer)
    else:
        step.__wrapped__(optimizer)


def _scope(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    """A decorator: the profiler scope, with torch's name for it."""
    return torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step")


def must_be_called(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something depends on `optimizer.step()` being called: hooks, a scheduler."""
    # A scheduler or a tracker puts its step into the instance; a wrapper's class has its own, without torch's hooks.
    is_own = "step" in optimizer.__dict__ or not getattr(type(optimizer).step, "hooked", False)
    return is_own or bool(_before(optimizer) or _after(optimizer) or _all_before or _all_after)


def _settings(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    """The settings of each group that determine the lists."""
    return [(len(g["params"]), g.get("amsgrad"), not g.get("momentum")) for g in optimizer.param_groups]


def _fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Zero momentum buffers before the first step of a fused SGD."""
    # torch allocates them uninitialised if that step is skipped, and the next step would move the weights to 1e20.
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for param in group["params"] if group["momentum"] else ():
                if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None:
                    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
