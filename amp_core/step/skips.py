"""Skip steps that are outliers, besides those that overflow.

`amp.skip_above` automates the remedy of PaLM (https://arxiv.org/abs/2204.02311, section 5.1), which went back to a
checkpoint before a spike and left out the batches around it. Here only the step itself is left out, and nothing is
repeated; the threshold, a multiple of the running median, is ours.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

MEDIAN_STEPS, MIN_STEPS = 64, 16
"""Steps in the running median, and steps before it is used. After a lasting jump of the loss 64 / 2 + 1 = 33 steps are
skipped, which must stay below `max_consecutive_skips` (50)."""


class RunningMedian:
    """The losses and gradient norms of an optimizer's last steps, on the device.

    A loss is the absolute value of the sum over a window's micro-batches, unweighted. Steps that were skipped as
    outliers count, too: a lasting change is the new normal after half of `MEDIAN_STEPS` steps.
    """

    def __init__(self, device: torch.device, saved: list[list[float]] | None = None) -> None:
        self.ring = torch.full((2, MEDIAN_STEPS), torch.inf, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        if saved:  # oldest first
            self.ring[:, : len(saved[0])] = torch.tensor(saved)
            self.count.fill_(len(saved[0]))

    def judge(self, sizes: Tensor, factor: float, *, record: bool) -> Tensor:
        """1 if the loss or the norm (`sizes`, [2] float32) is above `factor` times its median, else 0 (0-d float32)."""
        # Empty places are inf and sort to the end, so this is the lower median of what is there.
        lower_middle = (self.count.clamp(1, MEDIAN_STEPS) - 1) // 2
        median = self.ring.sort(1).values.index_select(1, lower_middle)[:, 0]
        # A median of 0 is that of losses that were not given, or of weights without gradients: there is no scale.
        is_outlier = ((sizes > factor * median) & (median > 0)).any() & (self.count[0] >= MIN_STEPS)
        if record:
            # By `where` and `index_copy_`, not `if`, which would wait. Overflows are left out: inf raises a median.
            place = self.count % MEDIAN_STEPS
            is_finite = sizes.isfinite().all()
            kept = torch.where(is_finite, sizes[:, None], self.ring.index_select(1, place))
            self.ring.index_copy_(1, place, kept)
            self.count += is_finite
        return is_outlier.float()

    def state(self) -> list[list[float]]:
        """What `saved` takes. Waits for the device."""
        count = int(self.count)
        return self.ring.roll(-count, 1)[:, max(MEDIAN_STEPS - count, 0) :].tolist()  # oldest first


class Outliers:
    """`amp.skip_above`: whether steps are so far from the usual that they are skipped."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor, self._device = factor, device
        self._usual: dict[weakref.ref[torch.optim.Optimizer], RunningMedian] = {}  # never shrinks, see `state`
        self._saved: list[list[list[float]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Outliers:
        # A weakref cannot be copied, and the optimizers of the copy are others.
        twin = Outliers(self.factor, self._device)
        twin.load(self.state())
        return twin

    def sizes(self, loss: Tensor | None, norm: Tensor) -> list[Tensor]:
        """The two numbers that the ranks agree on by their maximum; NaN is inf, which all ranks see alike."""
        loss = torch.zeros_like(norm) if loss is None else loss.abs()
        return [size.nan_to_num(torch.inf, torch.inf) for size in (loss, norm)]

    def judge(self, optimizer: torch.optim.Optimizer, sizes: list[Tensor], *, record: bool) -> Tensor:
        """1 if the step of an optimizer is an outlier, else 0 (0-d float32). No host-device sync."""
        key = weakref.ref(optimizer)
        if key not in self._usual:
            saved = self._saved[len(self._usual)] if len(self._usual) < len(self._saved) else None
            self._usual[key] = RunningMedian(self._device, saved)
        return self._usual[key].judge(torch.stack(sizes), self.factor, record=record)

    def state(self) -> list[list[list[float]]]:
        """The numbers of each optimizer, in the order of their first steps: whose they are after a resume. Waits."""
        mine = [usual.state() for usual in self._usual.values()]
        return mine + self._saved[len(mine) :]

    def load(self, state: list[list[list[float]]]) -> None:
        """Continue from what `state` returned."""
        self._saved, self._usual = state, {}
