"""What a step reports, and the state of an optimizer within a window."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from amp_core.tensors import local


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of a step. The tensors are on the device; reading one syncs.

    Whoever counts taken steps sums `taken` for itself, since each count begins at another time: those of schedules,
    averages, 16-bit weights, meters, and of the windows of `Amp`, which several optimizers may share.

    Attributes:
        taken: 0-d bool, false when the step was skipped.
        grad_norm: 0-d float32, the global L2 norm of the unscaled gradients before clipping. Not finite if one is not.
        taken_on_host: `taken` as a bool for optimizers whose steps the host decides; None if decided on the device.
        is_rehearsal: the step was rehearsed: it is none of the run's.
    """

    taken: Tensor
    grad_norm: Tensor
    taken_on_host: bool | None = None
    is_rehearsal: bool = False


class Watcher(Protocol):
    """Gets the events of a rehearsal; `amp_core.doctor.trace.Trace` is one."""

    def on_loss(self, loss: Tensor) -> None: ...

    def on_gradients(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


Observer = Callable[[Sequence[Tensor], Sequence[Tensor], bool], None]
"""(weights, their gradients, whether these are scaled)."""


class Rehearsal:
    """The outcome of a rehearsed window.

    Args:
        steps: finite gradients move weights and moments, for whoever puts them back; scale and counters do not move.
    """

    def __init__(self, *, steps: bool = False) -> None:
        self.steps = steps
        self.optimizers: set[torch.optim.Optimizer] = set()
        """Those whose step was called."""
        self.watcher: Watcher | None = None
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
        if self.watcher is not None:
            self.watcher.on_loss(loss)

    def show(self, gradients: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
        """Show the watcher weights and gradients before a step; it sees nothing of the step itself until `resume`."""
        self.has_gradients |= any(grads for _, grads in gradients)
        every = (grad for _, grads in gradients for grad in local(grads))
        self.has_slope = self.has_slope or any(grad.layout is not torch.strided or bool(grad.any()) for grad in every)
        if self.watcher is not None:
            for params, grads in gradients:
                self.watcher.on_gradients(params, grads)
            self.watcher.pause()

    def resume(self) -> None:
        if self.watcher is not None:
            self.watcher.resume()

    @property
    def is_finite(self) -> bool:
        """Whether the gradients, on all ranks, and the losses, on this one, were finite. Waits for the device."""
        return not self._bad or not bool(torch.cat(self._bad).any())


def require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raises TypeError for an optimizer that computes the loss itself, such as LBFGS."""
    if _needs_closure(type(optimizer)):
        raise TypeError(
            f"{type(optimizer).__name__}.step() needs a closure that computes the loss, several times in a step, which "
            f"no loss scale and no skipped step fit; use an optimizer without a closure"
        )


@functools.cache
def _needs_closure(kind: type) -> bool:
    parameter = inspect.signature(kind.step).parameters.get("closure")  # type: ignore[attr-defined]
    return parameter is not None and parameter.default is inspect.Parameter.empty


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


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimizer can be skipped by a tensor: fused ones, but for SGD with dampening.

    Dampening applies to all steps but the first taken one, which the host does not know.
    """
    return all(group.get("fused") and not group.get("dampening") for group in optimizer.param_groups)
