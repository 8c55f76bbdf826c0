"""What a step reports, and the state of an optimizer within a window."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_core.step.gradients import weights_of
from amp_core.step.observer import Observer
from amp_core.tensors import inner_optimizers, is_dtensor, is_state_sharded, local
from amp_core.torch_private import reader


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of a step. The tensors are on the device; reading one syncs.

    Whoever counts taken steps sums `taken` for itself, since each count begins at another time: those of schedules,
    averages, 16-bit weights, meters, and of the windows of `Amp`, which several optimizers may share.

    Attributes:
        taken: 0-d bool, false when the step was skipped.
        grad_norm: 0-d float32, the global L2 norm of the unscaled gradients before clipping. Not finite if one is not.
        taken_on_host: `taken` as a bool for optimizers whose steps the host decides; None if decided on the device.
        is_rehearsal: the step was rehearsed and does not count as a step of the run.
    """

    taken: Tensor
    grad_norm: Tensor
    taken_on_host: bool | None = None
    is_rehearsal: bool = False


class Rehearsal(Observer):
    """The outcome of a rehearsed window.

    Args:
        steps: finite gradients move weights and moments, for whoever puts them back; scale and counters do not move.
    """

    def __init__(self, *, steps: bool = False) -> None:
        self.steps = steps
        self.optimizers: set[torch.optim.Optimizer] = set()
        """Those whose step was called."""
        self.losses: list[Tensor] = []
        """What `backward` was given."""
        self.has_gradients = self.has_slope = False
        """Whether there were gradients, and one that is not 0."""
        self._bad: list[Tensor] = []

    def add(self, bad: Tensor) -> None:
        self._bad.append(bad.detach().float().flatten())

    def on_loss(self, loss: Tensor) -> None:
        self.losses.append(loss.detach())
        self.add(~torch.isfinite(self.losses[-1]).all())

    def on_gradients(self, params: Sequence[Tensor], grads: Sequence[Tensor], scaled: bool) -> None:
        self.has_gradients |= bool(grads)
        self.has_slope = self.has_slope or any(g.layout is not torch.strided or bool(g.any()) for g in local(grads))

    @property
    def is_finite(self) -> bool:
        """Whether the gradients, on all ranks, and the losses, on this one, were finite. Waits for the device."""
        return not self._bad or not bool(torch.cat(self._bad).any())


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
        for entry in (each.state.get(param) or {} for param in weights_of(optimizer)):
            for key, value in entry.items():
                # A mask of what is below a threshold is empty.
                reads = isinstance(value, Tensor) and (value.isnan() if value.dtype is not torch.bool else ~value.any())
                if isinstance(reads, Tensor) and bool(reads.any()):
                    raise TypeError(
                        f"amp={mode}: {type(each).__name__} copied the weights ({key}) when it was built, but fp32 "
                        f"weights have values within a step alone; use amp=o2, or an optimizer that copies none"
                    )


@functools.cache
def arguments_without_default(method: Callable[..., Any]) -> list[str]:
    """The arguments besides `self` that a method has to be given."""
    arguments = list(inspect.signature(method).parameters.values())[1:]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in arguments if each.default is each.empty and each.kind not in variable]


@dataclass(slots=True, eq=False)
class OptimizerState:
    """What `Amp` knows about one optimizer within a window."""

    optimizer: torch.optim.Optimizer
    on_device: bool
    """Whether its steps are skipped on the device."""
    reduced: bool = False
    unscaled: bool = False
    stepped: bool = False
    found_inf: Tensor | None = None
    """0-d float32: whether a gradient was found not to be finite when it was unscaled."""
    params: list[Tensor] = field(init=False)
    """Those with gradients; set when its step begins, as is what follows."""
    grads: list[Tensor] = field(init=False)
    in_parts: bool = field(init=False)
    """Whether gradients are sharded."""
    norm: Tensor = field(init=False)
    divisor: Tensor | None = field(init=False)
    """The divisor still to be applied to the gradients, 0-d; None: none."""


_SUPPORT = "_step_supports_amp_scaling"
"""What `torch.amp.GradScaler` asks an optimizer for."""
_before = reader("torch.optim.Optimizer._optimizer_step_pre_hooks", lambda optimizer: ())
_after = reader("torch.optim.Optimizer._optimizer_step_post_hooks", lambda optimizer: ())


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the tensor `found_inf` makes `optimizer.step()` do nothing: of fused ones, but for SGD with dampening.

    Wrappers share the groups of a fused optimizer, and subclasses its attributes, but do more in a step, as do hooks.
    So the very method that is called must be written for it. Dampening applies to all steps but the first taken one,
    which the host does not know.
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
