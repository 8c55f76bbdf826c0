"""A window, and each optimizer in it: its gradients are reduced, unscaled, measured and clipped, and it steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from amp_core.step.clip import Clip
from amp_core.step.fused import bare_step
from amp_core.step.gradients import (
    check_gradients,
    lay_out_gradients,
    norm_of,
    norm_over_ranks,
    not_finite,
    with_grads,
)
from amp_core.step.scaler import LossScale, Numbers
from amp_core.step.steppable import can_skip_on_device
from amp_core.tensors import multiply_, several_ranks, step_on_local_shards
from amp_core.torch_private import version_of

if TYPE_CHECKING:
    from amp_core.lowp.weights import LowPrecisionWeights


@dataclass(slots=True, eq=False)
class OptimizerState:
    """What `Amp` knows about one optimizer within a window."""

    optimizer: torch.optim.Optimizer
    on_device: bool
    """Whether its steps are skipped on the device."""
    scaler: LossScale
    weights: Sequence[LowPrecisionWeights]
    """Those with 16 bits."""
    numbers: Numbers
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

    def _reduce(self) -> None:
        """Reduce gradients of 16-bit weights over ranks, once per window."""
        for weights in self.weights if not self.reduced else ():
            weights.reduce_(with_grads(self.optimizer)[0])
        self.reduced = True

    def unscale(self) -> None:
        """Unscale its gradients in place before its step."""
        if self.unscaled or self.stepped:
            raise RuntimeError(
                "amp.unscale_ was already called for this optimizer in this window, or it was already stepped; call it "
                "once, after the last backward and before amp.step"
            )
        self._reduce()
        params, grads = with_grads(self.optimizer)
        in_parts = check_gradients(grads, scaled=self.scaler.policy is not None, optimizer=self.optimizer)
        if not in_parts and not self.weights:  # 16-bit weights have strides to compare within a step alone
            lay_out_gradients(params, grads)
        if grads:
            inverse, zero = self.scaler.inverse, self.numbers[0.0]
            # Of the unscaled norm: at a scale below 1 the inverse is above 1, and finite gradients may overflow by it.
            self.found_inf = not_finite(norm_of(grads, zero, sharded=in_parts) * inverse, zero)
            multiply_(grads, inverse)
        self.unscaled = True

    def examine(self, clip: Clip | Callable[..., None] | None, *, scaled: bool, joined: bool) -> Tensor:
        """Measure and clip its gradients; return 1 if one of them is not finite, else 0 (0-d float32).

        `scaled`: they are, unless they were unscaled before. `joined`: use the global norm over all ranks.
        """
        if self.stepped:
            raise RuntimeError("amp.step was called twice for one optimizer; call amp.update() once per window")
        if self.weights:
            self._reduce()
        if self.unscaled:  # before something may have come to watch the step
            self.on_device = can_skip_on_device(self.optimizer)
        params, grads = self.params, self.grads = with_grads(self.optimizer)
        scaled, zero = scaled and self.scaler.policy is not None, self.numbers[0.0]
        self.in_parts = check_gradients(grads, scaled=scaled, optimizer=self.optimizer)
        for weights in self.weights:
            weights.begin_step(params)
        if not self.in_parts:
            lay_out_gradients(params, grads)
        norm = norm_of(grads, zero, sharded=self.in_parts)
        norm = norm_over_ranks(norm) if joined else norm
        self.divisor = self.scaler.scale if scaled and not self.unscaled else None
        self.norm = norm if self.divisor is None else norm / self.divisor
        # Before clipping, which would multiply an infinite gradient by max_norm / inf = 0, to NaN, and others to 0.
        found_inf = not_finite(self.norm, zero)
        if self.found_inf is not None:
            found_inf = torch.maximum(found_inf, self.found_inf)
        if isinstance(clip, Clip) and clip.kind == "norm" and clip.folded:
            # One division unscales and clips, in a fused kernel while it reads the gradients anyway.
            divisor = clip.divisor(self.norm, self.numbers)
            self.divisor = divisor if self.divisor is None else divisor.mul_(self.divisor)
        elif clip is not None and grads:
            found_inf = self._clip_in_place(clip, found_inf, zero)
        return found_inf

    def _clip_in_place(self, clip: Clip | Callable[..., None], found_inf: Tensor, zero: Tensor) -> Tensor:
        """Clip where a divisor cannot; returns `found_inf`, also of what clipping wrote."""
        self._divide()
        if isinstance(clip, Clip):
            clip(self.params, self.grads, self.norm)
            if clip.kind != "adaptive":  # clamping and a factor keep finite values finite; a quotient may not
                return found_inf
        else:
            clip(self.params, self.grads)
        return torch.maximum(found_inf, not_finite(norm_of(self.grads, zero, sharded=self.in_parts), zero))

    def _divide(self) -> None:
        if self.divisor is not None:
            # As in torch.amp.GradScaler. The reciprocal of a power of two is exact.
            multiply_(self.grads, self.divisor.reciprocal())
            self.divisor = None

    def step_on_host(self, taken: bool | None) -> None:
        """Step if the host has read that the step is `taken`."""
        # Also in a skipped step: whoever reads the gradients behind it finds them unscaled.
        self._divide()
        if taken:
            with step_on_local_shards(self.optimizer):
                bare_step(self.optimizer)


@dataclass(slots=True, eq=False)
class WindowState:
    """What `Amp` knows about the window, from its first backward pass to `update`."""

    states: dict[torch.optim.Optimizer, OptimizerState] = field(default_factory=dict)
    outcomes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of each step: whether gradients overflowed, and whether it was skipped, 0-d float32."""
    loss: Tensor | None = None
    """The sum of its losses, 0-d: not finite if one of them is not."""
    num_stepped: int = 0
    is_open: bool = False
    is_stepping: bool = False
    """Since the last backward pass; the next one begins a phase, with losses of its own."""

    def unscaled_gradients(self) -> list[list[tuple[int, int]]]:
        """The versions of the gradients that `unscale_` divided and that no step has used yet."""
        pending = [o for o, state in self.states.items() if state.unscaled and not state.stepped]
        for optimizer in pending:
            if not with_grads(optimizer)[1]:
                del self.states[optimizer]  # its gradients are gone: that window was given up
        gradients = [with_grads(optimizer)[1] for optimizer in pending if optimizer in self.states]
        return [[(id(grad), version_of(grad)) for grad in grads] for grads in gradients]

    def outcome(self, zero: Tensor) -> tuple[Tensor, Tensor] | None:
        """Whether any step overflowed, and whether any was skipped; None without gradients. Collective."""
        if len(self.states) > self.num_stepped:  # unscaled, perhaps found infinite and therefore not stepped
            found = [state.found_inf for state in self.states.values() if not state.stepped]
            bad = functools.reduce(torch.maximum, [each for each in found if each is not None], zero.clone())
            if several_ranks():
                dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            self.outcomes.append((bad, bad))
        # There is one scale: an overflow of any optimizer lowers it, and several lower it once.
        if len(self.outcomes) > 1:
            overflow, skipped = (functools.reduce(torch.maximum, column) for column in zip(*self.outcomes, strict=True))
            return overflow, skipped
        return self.outcomes[0] if self.outcomes else None
