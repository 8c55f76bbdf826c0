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
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in arguments if each.default is each.empty and each.kind not in variable]


def require_fits_mode(optimizer: torch.optim.Optimizer, config: AmpConfig, *, has_weights: bool) -> None:
    """Raises where 16-bit weights of the mode and the weights of the optimizer do not fit.

    `has_weights`: `amp.prepare` has made 16-bit weights.
    """
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


def require_own_weights(
    optimizer: torch.optim.Optimizer, others: Iterable[torch.optim.Optimizer], checked: Any
) -> None:
    """Raises ValueError for a weight of several optimizers, whose gradient would be unscaled twice.

    `checked`, a set, remembers which optimizers, with how many groups, have none.
    """
    # Not by weights: to compare those in every step takes longer than a small step.
    among = frozenset((id(o), len(o.param_groups)) for o in (*others, optimizer))
    if among in checked:
        return
    owned = {p for other in others for p in weights_of(other)}
    shared = [p for p in weights_of(optimizer) if p in owned]
    if shared:
        raise ValueError(
            f"{len(shared)} weight(s), the first of shape {list(shared[0].shape)}, are owned by two optimizers of one "
            f"window, so that their gradients would be unscaled twice; give each weight to one optimizer, or end the "
            f"window (amp.update) between their steps"
        )
    checked.add(among)


_SUPPORT = "_step_supports_amp_scaling"
"""The attributes of an optimizer that `torch.amp.GradScaler` reads."""
_before = reader("torch.optim.Optimizer._optimizer_step_pre_hooks", lambda optimizer: ())
_after = reader("torch.optim.Optimizer._optimizer_step_post_hooks", lambda optimizer: ())


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the tensor `found_inf` makes `optimizer.step()` a no-op: in fused ones, except SGD with dampening.

    Wrappers and subclasses of fused optimizers do more in a step, as do hooks: the method that is called must be
    written for it. Dampening applies to all steps but the first taken one, which the host does not know.
    """
    kind, own = type(optimizer), optimizer.__dict__
    by_itself = _skips_by_itself(kind, kind.step)
    if (
        by_itself is None
        or ("step" in own and not _only_counts(own["step"], kind.step))
        or (by_itself and not own.get(_SUPPORT, getattr(kind, _SUPPORT, False)))
        or _before(optimizer)
        or _after(optimizer)
    ):
        return False
    for group in optimizer.param_groups:  # noqa: SIM110  # a generator resumes for each, in every step
        if not group.get("fused", by_itself) or group.get("dampening"):
            return False
    return True


@functools.cache
def _skips_by_itself(kind: type, step: Callable[..., Any]) -> bool | None:
    """Whether a class looks at `found_inf`: True; False: torch's own, where its groups are fused; None: it does not."""
    step = _unhooked(step)
    if all(module.startswith("torch.optim.") for module in _modules(step)):
        return False
    # The class that wrote the step, whose constructor says whether it is made for `found_inf`.
    owner = [cls for cls in kind.__mro__ if _unhooked(vars(cls).get("step")) is step][-1]
    names = getattr(getattr(vars(owner).get("__init__"), "__code__", None), "co_names", ())
    says_so = vars(owner).get(_SUPPORT) is True or _SUPPORT in names
    is_replaced = owner.__module__.startswith("torch.optim.")
    # By the older contract it would take the scaler itself.
    takes_scaler = "grad_scaler" in inspect.signature(step).parameters
    return True if says_so and not is_replaced and not takes_scaler else None


def _unhooked(step: Any) -> Any:
    """A step without the function that `torch.optim.Optimizer` puts around it, to call hooks."""
    is_hooked = getattr(step, "hooked", False) and _modules(step)[0] == "torch.optim.optimizer"
    return step.__wrapped__ if is_hooked else step


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
