"""A window, and each optimizer in it: its gradients are reduced, unscaled, measured and clipped, and it steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from amp_core.step.clip import Clip
from amp_core.step.fused import bare_step
from amp_core.step.gradients import check_gradients, lay_out_gradients, norm_of, not_finite, with_grads
from amp_core.step.scaler import LossScale
from amp_core.step.steppable import can_skip_on_device
from amp_core.tensors import multiply_, several_ranks, step_on_local_shards
from amp_core.torch_private import version_of

if TYPE_CHECKING:
    from amp_core.lowp.weights import LowPrecisionWeights

_has_stepped = attrgetter("stepped")


@dataclass(slots=True, eq=False)
class OptimizerState:
    """What `Amp` knows about one optimizer within a window."""

    optimizer: torch.optim.Optimizer
    scaler: LossScale
    weights: Sequence[LowPrecisionWeights]
    """Those with 16 bits."""
    reduced: bool = False
    unscaled: bool = False
    stepped: bool = False
    found_inf: Tensor | None = None
    """0-d float32: whether a gradient was found not to be finite when it was unscaled."""
    on_device: bool = field(init=False)
    """Whether its step is skipped on the device; set when that begins, as is what follows."""
    params: list[Tensor] = field(init=False)
    """Those with gradients."""
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
            inverse, zero = self.scaler.inverse, self.scaler.numbers[0.0]
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
        self.on_device = can_skip_on_device(self.optimizer)
        params, grads = self.params, self.grads = with_grads(self.optimizer)
        scaled, zero = scaled and self.scaler.policy is not None, self.scaler.numbers[0.0]
        self.in_parts = check_gradients(grads, scaled=scaled, optimizer=self.optimizer)
        for weights in self.weights:
            weights.begin_step(params)
        if not self.in_parts:
            lay_out_gradients(params, grads)
        norm = norm_of(grads, zero, sharded=self.in_parts)
        norm = _over_ranks(norm) if joined else norm
        self.divisor = self.scaler.scale if scaled and not self.unscaled else None
        self.norm = norm if self.divisor is None else norm / self.divisor
        # Before clipping, which would multiply an infinite gradient by max_norm / inf = 0, to NaN, and others to 0.
        found_inf = not_finite(self.norm, zero)
        if self.found_inf is not None:
            found_inf = torch.maximum(found_inf, self.found_inf)
        if isinstance(clip, Clip) and clip.kind == "norm":
            # One division unscales and clips, in a fused kernel while it reads the gradients anyway.
            divisor = clip.divisor(self.norm, self.scaler.numbers)
            self.divisor = divisor if self.divisor is None else divisor.mul_(self.divisor)
        elif clip is not None and grads:
            found_inf = self._clip_in_place(clip, found_inf, zero)
        return found_inf

    def _clip_in_place(self, clip: Clip | Callable[..., None], found_inf: Tensor, zero: Tensor) -> Tensor:
        """Clip where a divisor cannot; returns `found_inf`, also of what clipping wrote."""
        self._divide()
        clip(self.params, self.grads)
        if isinstance(clip, Clip) and clip.kind == "value":  # clamping keeps finite values finite
            return found_inf
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


def _over_ranks(norm: Tensor) -> Tensor:
    # Squares add up over disjoint shards. An inf or NaN of one rank reaches all, so that all skip alike.
    squares = norm.square()
    dist.all_reduce(squares)
    return squares.sqrt()


@dataclass(slots=True, eq=False)
class WindowState:
    """What `Amp` knows about the window, from its first backward pass to `update`."""

    states: dict[torch.optim.Optimizer, OptimizerState] = field(default_factory=dict)
    outcomes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of each step: whether gradients overflowed, and whether it was skipped, 0-d float32."""
    loss: Tensor | None = None
    """The sum of its losses, 0-d: not finite if one of them is not."""
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

    def require_unchanged(self, before: list[list[tuple[int, int]]]) -> None:
        """RuntimeError: gradients are no longer those that `unscaled_gradients` returned."""
        if before != self.unscaled_gradients():
            raise RuntimeError(
                "amp.backward added scaled gradients to gradients that amp.unscale_ had unscaled; call unscale_ once, "
                "after the last backward of the window"
            )

    def outcome(self, zero: Tensor) -> tuple[Tensor, Tensor] | None:
        """Whether any step overflowed, and whether any was skipped; None without gradients. Collective."""
        if not all(map(_has_stepped, self.states.values())):
            self._add_unstepped(zero)
        if len(self.outcomes) < 2:
            return self.outcomes[0] if self.outcomes else None
        # There is one scale: an overflow of any optimizer lowers it, and several lower it once.
        overflow, skipped = (functools.reduce(torch.maximum, column) for column in zip(*self.outcomes, strict=True))
        return overflow, skipped

    def _add_unstepped(self, zero: Tensor) -> None:
        """Count optimizers that were unscaled, perhaps found infinite and therefore not stepped."""
        found = [state.found_inf for state in self.states.values() if not state.stepped]
        bad = functools.reduce(torch.maximum, [each for each in found if each is not None], zero.clone())
        if several_ranks():
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        self.outcomes.append((bad, bad))
