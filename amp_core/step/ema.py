"""EMA of weights that ignores skipped steps (Polyak and Juditsky, https://doi.org/10.1137/0330046)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.config.schema import EmaConfig
from amp_core.lowp.masters import buckets, fp32_copy, fp32_values
from amp_core.step.buffers import flat_groups
from amp_core.step.gradients import same
from amp_core.step.report import StepReport
from amp_core.tensors import is_sharded, load_state, local, multiply_, sharded_copy, unwrap
from amp_core.torch_private import buffers_of, foreach_copy_, foreach_sub, foreach_sub_

_Group = tuple[list[Tensor], list[Tensor], list[int]]
"""Averages and their values, flat, and the sizes."""


class Ema:
    """An exponential moving average of a network's weights and floating-point buffers.

    Where a buffer or a frozen weight is infinite, as in a causal mask, there is no average: the value is copied. `Amp`
    keeps trained weights finite.

    Args:
        net: the network that is trained, wrapped or not.
        decay: weight of the old average per taken step, at least 0 and below 1.
        warmup: use min(decay, (1 + t) / (10 + t)) after t taken steps, so that the average soon forgets the initial
            weights.
        share_frozen: do not average weights without gradients; the copy has their memory, and they stay frozen.

    Attributes:
        model: the averaged copy: unwrapped, in evaluation mode, without gradients; in fp32 also beside 16-bit weights.
            Sharded if the network is: then all ranks call it, inside autocast.
        num_taken: 0-d int64 tensor, taken steps.
    """

    def __init__(self, net: nn.Module, decay: float, *, warmup: bool = True, share_frozen: bool = False) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"Ema(decay={decay}): expected at least 0 and below 1")
        self.source = unwrap(net)
        self.model = sharded_copy(self.source) if is_sharded(self.source) else fp32_copy(self.source)
        self.model.eval().requires_grad_(False)
        self.decay = decay
        self.warmup = warmup
        self._averages: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._frozen: list[tuple[Tensor, Tensor]] = []
        """Averages and weights that did not train when this was made."""
        for average, weight in zip(self.model.parameters(), self.source.parameters(), strict=True):
            if weight.requires_grad:
                self._averages.append(average)
                self._weights.append(weight)
            elif share_frozen:
                average.data = weight.data
            else:
                self._frozen.append((average, weight))
        names = (name.rpartition(".") for name, _ in self.source.named_buffers())
        self._owners = [(self.source.get_submodule(path), name) for path, _, name in names]
        self._present: list[Tensor | None] | None = None
        self._groups: list[_Group] = []
        device = next(self.model.parameters()).device
        self.num_taken = torch.zeros((), dtype=torch.int64, device=device)
        # In float64: of a decay of 0.9999999, 1 - decay in float32 is 19 % too large.
        self._weight = torch.tensor(1.0 - decay, device=device)

    @torch.no_grad()
    def update(self, report: StepReport) -> None:
        """Move the average towards the weights if the step was taken. No host-device sync."""
        taken, weight = report.taken, self._weight
        if self.warmup:
            # 1 - (1 + t) / (10 + t), without the difference of two numbers near 1. Within 2^-22 of the exact weight.
            weight = torch.maximum(weight, 9.0 / (self.num_taken + 10))
        # A factor and no branch: the host does not know whether the step was taken.
        weight = weight * taken
        if self._averages:
            # average -= weight * (average - value): with weight 0, and where both are equal, no bit changes.
            averages = local(self._averages)
            steps = foreach_sub(averages, fp32_values(local(self._weights)))
            multiply_(steps, weight)
            foreach_sub_(averages, steps)
        present = [buffers_of(module)[name] for module, name in self._owners]
        if self._present is None or not same(present, self._present):
            self._group(present)
        for group in (*self._groups, *(self._frozen_groups() if self._frozen else ())):
            _move(group, weight, taken)
        self.num_taken += taken

    def _group(self, present: list[Tensor | None]) -> None:
        pairs = [pair for pair in zip(self.model.buffers(), present, strict=True) if pair[1] is not None]
        groups = flat_groups(pairs)  # type: ignore[arg-type]
        self._groups = [(averages, values, list(map(len, averages))) for averages, values in groups]
        self._present = present

    def _frozen_groups(self) -> Iterator[_Group]:
        # Made in each step: views would keep the memory of weights that were moved or replaced since.
        averages, weights = map(local, zip(*self._frozen, strict=True))
        for parts, values in flat_groups(zip(averages, fp32_values(weights), strict=True)):
            rest = iter(values)
            for bucket in buckets(parts):  # a frozen network may be large
                yield bucket, list(islice(rest, len(bucket))), list(map(len, bucket))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_groups": [], "_present": None}  # views, which a copy would detach from their base

    def reset(self) -> None:
        """Restart from the current weights."""
        self.model.load_state_dict(self.source.state_dict())
        self.num_taken.zero_()  # warms up again

    def state_dict(self) -> dict[str, Tensor]:
        """The EMA weights, a plain state dict of the network."""
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from EMA weights."""
        load_state(self.model, state)

    def counters(self) -> dict[str, int]:
        """What a resumed run needs besides `state_dict`; `Checkpoint` saves it. Waits for the device."""
        return {"averaged": int(self.num_taken)}

    def load_counters(self, progress: Mapping[str, Any]) -> None:
        """Restore what `counters` returned. A count that is missing is 0."""
        self.num_taken.fill_(int(progress.get("averaged", 0)))


def _move(group: _Group, weight: Tensor, taken: Tensor) -> None:
    parts, values, sizes = group
    before, value = torch.cat(parts), torch.cat(values)
    share, moves = (t.to(before.device, non_blocking=True) for t in (weight, taken))
    if before.is_floating_point():
        step = before - value
        # inf - inf is NaN, as are unguarded statistics after a skipped step, and 0 * NaN: where, not products.
        value = torch.where(step.abs() < torch.inf, before - share * step, value)
    foreach_copy_(parts, list(torch.where(moves, value, before).split(sizes)))


def build_ema(cfg: EmaConfig, net: nn.Module, *, share_frozen: bool = False) -> Ema | None:
    """The EMA of the `ema` group, or None."""
    return None if cfg.decay is None else Ema(net, cfg.decay, warmup=cfg.warmup, share_frozen=share_frozen)
