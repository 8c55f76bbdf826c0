"""The step of torch's fused optimizers without torch's per-step Python overhead.

`optimizer.step()` looks up the state of every weight, groups tensors by device and dtype, enters a profiler scope, and
increments each weight's step count (and decrements it after a skipped step), one tensor at a time. For a small network
that takes longer than the arithmetic. Here the lists are cached and the counts share one tensor. Kernels, arguments,
state and every bit of the result are torch's, so both may be mixed.
"""

from __future__ import annotations

import sys
from operator import is_
from typing import Any

import torch
from torch import Tensor

from amp_core.step.report import PendingStep
from amp_core.tensors import is_state_sharded, step_on_local_shards
from amp_core.torch_private import find, is_missing, reader

_fused_sgd_, _fused_adam_ = find("torch._fused_sgd_"), find("torch._fused_adam_")
_fused_adamw_ = find("torch._fused_adamw_")
_MOMENTS: dict[Any, tuple[str, ...]] = {
    cls: moments
    for cls, moments, kernels in (
        (torch.optim.SGD, ("momentum_buffer",), [_fused_sgd_]),
        (torch.optim.Adam, ("exp_avg", "exp_avg_sq"), [_fused_adam_, _fused_adamw_]),
        (torch.optim.AdamW, ("exp_avg", "exp_avg_sq"), [_fused_adam_, _fused_adamw_]),
    )
    if None not in kernels
}
# If torch does not tell whether there are hooks, assume there are.
_all_before = find("torch.optim.optimizer._global_optimizer_pre_hooks", True)
_all_after = find("torch.optim.optimizer._global_optimizer_post_hooks", True)
_before = reader("torch.optim.Optimizer._optimizer_step_pre_hooks", lambda optimizer: True)
_after = reader("torch.optim.Optimizer._optimizer_step_post_hooks", lambda optimizer: True)
_TORCHS = getattr(find("torch.optim.Optimizer.profile_hook_step"), "__globals__", {})
is_missing("torch.autograd.profiler._is_profiler_enabled")  # logged here; it changes and is read in each step


class FusedStep:
    """A cached step of an optimizer with initialised state; made by `of`.

    Attributes:
        params: the weights that it steps, in the order of the groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
        self.params = params
        self._optimizer = optimizer
        self._state = optimizer.state
        self._entries = list(optimizer.state.values())
        self._settings = _settings(optimizer)
        have = set(map(id, params))
        self._members = [
            [optimizer.state.get(p, {}) for p in group["params"] if id(p) in have] for group in optimizer.param_groups
        ]
        sizes = [sum(id(p) in have for p in group["params"]) for group in optimizer.param_groups]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self._ranges = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._counts: Tensor | None = None
        self._steps: list[list[Tensor]] = []
        if type(optimizer) is not torch.optim.SGD:
            # Views of one tensor, so that one operator increments all.
            entries = [entry for members in self._members for entry in members]
            self._counts = torch.stack([entry["step"] for entry in entries])
            for entry, step in zip(entries, self._counts.unbind(), strict=True):
                entry["step"] = step
            self._steps = [[entry["step"] for entry in members] for members in self._members]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, params: list[Tensor], device: torch.device) -> FusedStep | None:
        """The cached step of `optimizer` over its weights that have gradients; None if only torch's own step works.

        Args:
            optimizer: fused.
            params: its weights that have gradients, in the order of the groups.
            device: of `found_inf` and `grad_scale`.
        """
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
                entry = optimizer.state.get(param, {}) if param.grad is not None else dict.fromkeys(needed, param)
                if any(not isinstance(entry.get(key), Tensor) for key in needed):
                    return None
        return cls(optimizer, params)

    def fits(self, params: list[Tensor]) -> bool:
        """Whether the weights, groups and state that the lists were made from are unchanged."""
        state = self._optimizer.state
        return (
            state is self._state
            and len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and len(state) == len(self._entries)
            and all(map(is_, state.values(), self._entries))
            and _settings(self._optimizer) == self._settings
            and all(
                all(map(is_, [entry["step"] for entry in members], steps))
                for members, steps in zip(self._members, self._steps, strict=False)
            )
            and not is_watched(self._optimizer)
        )

    def take(self, grads: list[Tensor], taken: Tensor, found_inf: Tensor, divisor: Tensor | None) -> None:
        """Do what `optimizer.step()` does. No host-device sync.

        Args:
            grads: of `params`, in their order.
            taken: 0-d bool, whether the step is taken.
            found_inf: 0-d float32, 1 where it is not.
            divisor: 0-d float32; gradients are divided by it first, in place.
        """
        if self._counts is not None:
            self._counts.add_(taken)  # the kernels do nothing in a skipped step, whatever the count is
        for i, group in enumerate(self._optimizer.param_groups):
            start, end = self._ranges[i]
            if start == end:
                continue
            members = self._members[i]
            if self._counts is None:
                _fused_sgd_(
                    self.params[start:end],
                    grads[start:end],
                    [entry["momentum_buffer"] for entry in members] if group["momentum"] else [],
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    lr=group["lr"],
                    dampening=group["dampening"],
                    nesterov=group["nesterov"],
                    maximize=group["maximize"],
                    is_first_step=False,
                    grad_scale=divisor,
                    found_inf=found_inf,
                )
                continue
            beta1, beta2 = group["betas"]
            kernel: Any = _fused_adamw_ if group["decoupled_weight_decay"] else _fused_adam_
            kernel(
                self.params[start:end],
                grads[start:end],
                [entry["exp_avg"] for entry in members],
                [entry["exp_avg_sq"] for entry in members],
                [entry["max_exp_avg_sq"] for entry in members] if group["amsgrad"] else [],
                self._steps[i],
                amsgrad=group["amsgrad"],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                grad_scale=divisor,
                found_inf=found_inf,
            )


def take_step(pending: PendingStep, taken: Tensor, found_inf: Tensor) -> None:
    """A step of a fused optimizer that is taken or skipped on the device. No host-device sync.

    Args:
        pending: the optimizer, and its gradients.
        taken: 0-d bool.
        found_inf: 0-d float32, 1 where it is not taken.
    """
    optimizer, grads, divisor = pending.optimizer, pending.grads, pending.divisor
    if pending.in_parts or is_state_sharded(optimizer):
        with step_on_local_shards(optimizer):
            torch_step(optimizer, found_inf, divisor)
        return
    own: FusedStep | None = optimizer.__dict__.get("_amp_core_step")
    if own is None and not is_watched(optimizer):
        own = FusedStep.of(optimizer, pending.params, found_inf.device)
    elif own is not None and not own.fits(pending.params):
        own = None
    optimizer.__dict__["_amp_core_step"] = own  # not part of its state: neither saved nor copied with it
    if own is None:
        torch_step(optimizer, found_inf, divisor)
    elif getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
        with _scope(optimizer):  # profile the same path that runs without a profiler
            own.take(grads, taken, found_inf, divisor)
    else:
        own.take(grads, taken, found_inf, divisor)


def counts_of(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The tensor that holds all of its step counts, if they share one."""
    own: FusedStep | None = optimizer.__dict__.get("_amp_core_step")
    return None if own is None else own._counts


def torch_step(optimizer: torch.optim.Optimizer, found_inf: Tensor, divisor: Tensor | None) -> None:
    """`optimizer.step()` with `found_inf` and `grad_scale` set as `torch.amp.GradScaler` sets them."""
    _fill_momentum(optimizer)
    optimizer.found_inf, optimizer.grad_scale = found_inf, divisor  # type: ignore[attr-defined]
    try:
        bare_step(optimizer)
    finally:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without importing torch's compiler, which takes as long as importing torch. Without gradients.

    torch wraps a step in a profiler scope and in a function that sets the grad mode and informs the compiler.
    """
    step: Any = None if is_watched(optimizer) else type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    if (
        step is None
        or getattr(step, "__globals__", None) is not _TORCHS
        or not hasattr(step, "__wrapped__")
        or optimizer.defaults.get("differentiable")
        or torch.is_grad_enabled()
        or "torch._dynamo" in sys.modules
    ):
        optimizer.step()
    elif getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
        with _scope(optimizer):
            step.__wrapped__(optimizer)
    else:
        step.__wrapped__(optimizer)


def _scope(optimizer: torch.optim.Optimizer) -> torch.autograd.profiler.record_function:
    """The profiler scope, with torch's name for it."""
    return torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step")


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something depends on `optimizer.step()` being called: hooks, a scheduler."""
    return bool(
        "step" in optimizer.__dict__  # a learning rate scheduler or a tracker has put its own there
        or not getattr(type(optimizer).step, "hooked", False)
        or _before(optimizer)
        or _after(optimizer)
        or _all_before
        or _all_after
    )


def _settings(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    """The settings of each group that determine the lists."""
    return [
        (len(group["params"]), group.get("amsgrad"), not group.get("momentum"), group.get("differentiable"))
        for group in optimizer.param_groups
    ]


def _fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Zero momentum buffers before the first step of a fused SGD.

    torch allocates them uninitialised if that step is skipped, and the next step would move the weights to 1e20.
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for param in group["params"] if group["momentum"] else ():
                if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None:
                    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
