"""Which optimizers `Amp` can step, and which of them skip a step on the device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from amp_core.config.schema import AmpConfig
from amp_core.lowp.masters import is_low
from amp_core.step.gradients import weights_of
from amp_core.tensors import inner_optimizers, is_dtensor, is_state_sharded
from amp_core.torch_private import reader


def require_optimizer(optimizer: object) -> None:
    """Raises TypeError for what only looks like an optimizer of torch."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"got a {type(optimizer).__name__}, expected a torch.optim.Optimizer; pass the optimizer inside it, or "
            f"derive its class from torch.optim.Optimizer"
        )


def require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raises TypeError for an optimizer that computes the loss itself, such as LBFGS, and for a wrapper of one."""
    for each in (optimizer, *inner_optimizers(optimizer)):
        if "closure" in (needs := arguments_without_default(type(each).step)):
            raise TypeError(
                f"{type(each).__name__}.step() needs a closure that computes the loss, several times in a step, which "
                f"no loss scale and no skipped step fit; use an optimizer without a closure"
            )
        if needs:
            raise TypeError(f"{type(each).__name__}.step() needs {', '.join(needs)}, which amp.step does not have")


def require_steppable(optimizer: torch.optim.Optimizer) -> None:
    """Raises TypeError for an optimizer that `Amp.step` cannot step, by its name."""
    require_optimizer(optimizer)
    require_no_closure(optimizer)
    inner = inner_optimizers(optimizer)
    if inner and (is_state_sharded(optimizer) or any(map(is_dtensor, weights_of(optimizer)))):
        raise TypeError(
            f"{type(optimizer).__name__} holds a {type(inner[0]).__name__}, whose state is its own, while the layout "
            f"steps shards of weights and state; use {type(inner[0]).__name__} alone, or replicas with whole states"
        )


def require_no_copies(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """Raises TypeError if weights without values between steps were copied into the optimizer's state. Syncs."""
    for each in (optimizer, *inner_optimizers(optimizer)):
        entries = (each.state.get(param) or {} for param in weights_of(optimizer))
        for key, value in ((k, v) for entry in entries for k, v in entry.items() if isinstance(v, Tensor)):
            # A mask of what is below a threshold is empty.
            if bool(value.isnan().any() if value.dtype is not torch.bool else ~value.any()):
                raise TypeError(
                    f"amp={mode}: {type(each).__name__} copied the weights ({key}) when it was built, but fp32 "
                    f"weights have values within a step alone; use amp=o2, or an optimizer that copies none"
                )


@functools.cache
def arguments_without_default(method: Callable[..., Any]) -> list[str]:
    """The required arguments of a method besides `self`."""
    arguments = list(inspect.signature(method).parameters.values())[1:]
    # *args and **kwargs take none.
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in arguments if each.default is each.empty and each.kind not in variable]


def require_fits_mode(optimizer: torch.optim.Optimizer, config: AmpConfig, *, has_weights: bool) -> None:
    """Raises where 16-bit weights of the mode, which `amp.prepare` has made, and those of the optimizer do not fit."""
    in_parts = any(map(is_dtensor, weights_of(optimizer)))
    if config.update is not None and not has_weights and not in_parts:
        raise RuntimeError(
            f"amp={config.name}: no network has {config.weights} weights, so this would train in fp32; call "
            f"amp.prepare(net) before the optimizer is built"
        )
    if has_weights and any(map(is_low, weights_of(optimizer))):
        raise TypeError("the optimizer holds 16-bit weights, which get no gradients; build it on master_params(net)")
    if has_weights and config.update != "master" and not in_parts:  # shards have values between steps, too
        require_no_copies(optimizer, config.name)


def require_own_weights(optimizer: torch.optim.Optimizer, others: Iterable[torch.optim.Optimizer]) -> None:
    """Raises ValueError for a weight of several optimizers of a window, whose gradient would be unscaled twice."""
    owned = {p for other in others for p in weights_of(other)}
    shared = [p for p in weights_of(optimizer) if p in owned]
    if shared:
        raise ValueError(
            f"{len(shared)} weight(s), the first of shape {list(shared[0].shape)}, are owned by two optimizers of one "
            f"window, so that their gradients would be unscaled twice; give each weight to one optimizer, or end the "
            f"window (amp.update) between their steps"
        )


_before = reader("torch.optim.Optimizer._optimizer_step_pre_hooks", lambda optimizer: ())
_after = reader("torch.optim.Optimizer._optimizer_step_post_hooks", lambda optimizer: ())


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the tensor `found_inf` makes `optimizer.step()` a no-op: in fused ones, except SGD with dampening."""
    step, own = type(optimizer).step, optimizer.__dict__
    # Wrappers and subclasses of fused optimizers do more in a step, as do hooks.
    replaced = "step" in own and not _only_counts(own["step"], step)
    if replaced or not _looks_at_found_inf(step) or _before(optimizer) or _after(optimizer):
        return False
    for group in optimizer.param_groups:  # noqa: SIM110  # a generator resumes for each, in every step
        # Dampening applies to all steps but the first taken one, which the host does not know.
        if not group.get("fused") or group.get("dampening"):
            return False
    return True


@functools.cache
def _looks_at_found_inf(step: Callable[..., Any]) -> bool:
    """Whether the step of a class is torch's own or that of `Adam16`, with nothing but torch's functions around it."""
    return all(module.startswith(("torch.optim.", "amp_core.lowp.moments")) for module in _modules(step))


def _modules(function: Any) -> list[str]:
    """Where a function was written, and those that it wraps: `functools.wraps` copies `__module__`."""
    found = []
    while function is not None:
        found.append(getattr(function, "__globals__", {}).get("__name__", ""))
        function = getattr(function, "__wrapped__", None)
    return found


def _only_counts(step: Any, original: Any) -> bool:
    """Whether the step of an instance is the class's, in the function by which schedulers see that it was called."""
    return getattr(step, "__wrapped__", None) is original and _modules(step)[0] == "torch.optim.lr_scheduler"
