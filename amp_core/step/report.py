"""The reports of a step and of a rehearsed window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_core.step.observer import Observer
from amp_core.tensors import local


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of a step. The tensors are on the device; reading one syncs.

    Schedules, averages, 16-bit weights and meters each sum `taken`, since their counts begin at different times.

    Attributes:
        taken: 0-d bool, false when the step was skipped.
        grad_norm: 0-d float32, the global L2 norm of the unscaled gradients before clipping. Not finite if one is not.
        taken_on_host: `taken` as a bool for optimizers whose steps the host decides; None if decided on the device.
        is_rehearsal: the step was rehearsed and does not count as a step of the run.
        overflow: 0-d float32, 1 if a gradient of any rank was not finite.
        outlier: 0-d float32, 1 if the step was far from the usual; None without `amp.skip_above`.
    """

    taken: Tensor
    grad_norm: Tensor
    taken_on_host: bool | None = None
    is_rehearsal: bool = False
    overflow: Tensor | None = None
    outlier: Tensor | None = None

    @property
    def reason(self) -> str | None:
        """Why the step was skipped; None: it was taken. Waits for the device."""
        if bool(self.taken):
            return None
        if self.overflow is not None and bool(self.overflow):
            return "a gradient is not finite"
        if self.outlier is not None and bool(self.outlier):
            return "loss or gradient norm is far above its running median"
        return "a loss is not finite, or there are no gradients"


class Rehearsal(Observer):
    """The outcome of a rehearsed window."""

    def __init__(self, *, steps: bool = False) -> None:
        """`steps`: finite gradients change weights and moments, which the caller restores; scale and counters stay."""
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

    def examine(self, optimizers: Sequence[torch.optim.Optimizer], skipped: Tensor) -> Tensor:
        """Note a step; returns whether it is skipped here."""
        self.add(skipped)
        self.optimizers.update(optimizers)
        return skipped if self.steps else torch.ones_like(skipped)

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
