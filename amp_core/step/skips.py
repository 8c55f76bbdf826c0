"""Besides overflows: skip steps that are outliers, and compute a window again at a smaller scale.

`amp.skip_above` is the rule of PaLM's restarts (https://arxiv.org/abs/2204.02311, section 5.1) without the restart:
leave out the batch that a spike came from. `amp.retry` costs a pass where halving the scale costs the batch.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from amp_core.step.amp import Amp

LENGTH, LEAST = 64, 16
"""Steps in the running median, and steps before it is used."""


class Usual:
    """The losses and gradient norms of an optimizer's last steps, on the device.

    Steps that were skipped as outliers count, too: a lasting change is the new normal after half of `LENGTH` steps.
    """

    def __init__(self, device: torch.device, saved: list[list[float]] | None = None) -> None:
        self.ring = torch.full((2, LENGTH), torch.inf, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        if saved:  # oldest first
            self.ring[:, : len(saved[0])] = torch.tensor(saved)
            self.count.fill_(len(saved[0]))

    def judge(self, sizes: Tensor, factor: float, *, remembers: bool) -> Tensor:
        """1 if the loss or the norm, [2] float32, is above `factor` medians, else 0 (0-d float32). No sync."""
        middle = (self.count.clamp(1, LENGTH) - 1) // 2
        median = self.ring.sort(1).values.index_select(1, middle)[:, 0]
        far = ((sizes > factor * median) & (median > 0)).any() & (self.count[0] >= LEAST)
        if remembers:
            place = self.count % LENGTH
            is_finite = sizes.isfinite().all()
            kept = torch.where(is_finite, sizes[:, None], self.ring.index_select(1, place))
            self.ring.index_copy_(1, place, kept)
            self.count += is_finite
        return far.float()

    def state(self) -> list[list[float]]:
        """What `saved` takes. Waits for the device."""
        count = int(self.count)
        return self.ring.roll(-(count % LENGTH) if count > LENGTH else 0, 1)[:, :count].tolist()


class Outliers:
    """`amp.skip_above`: whether steps are so far from the usual that they are skipped."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor, self._device = factor, device
        self._usual: dict[weakref.ref[torch.optim.Optimizer], Usual] = {}
        self._saved: list[list[list[float]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Outliers:
        twin = Outliers(self.factor, self._device)
        twin.load(self.state())
        return twin

    def sizes(self, loss: Tensor | None, norm: Tensor) -> list[Tensor]:
        """The two numbers that the ranks agree on by their maximum; NaN is inf, which all ranks see alike."""
        loss = torch.zeros_like(norm) if loss is None else loss.abs()
        return [size.nan_to_num(torch.inf, torch.inf) for size in (loss, norm)]

    def judge(self, optimizer: torch.optim.Optimizer, sizes: list[Tensor], *, remembers: bool) -> Tensor:
        """1 if the step of an optimizer is an outlier, else 0 (0-d float32). No host-device sync."""
        key = weakref.ref(optimizer)
        if key not in self._usual:
            saved = self._saved[len(self._usual)] if len(self._usual) < len(self._saved) else None
            self._usual[key] = Usual(self._device, saved)
        return self._usual[key].judge(torch.stack(sizes), self.factor, remembers=remembers)

    def state(self) -> list[list[list[float]]]:
        """The numbers of each optimizer, in the order of their first steps. Waits for the device."""
        mine = [usual.state() for usual in self._usual.values()]
        return mine + self._saved[len(mine) :]

    def load(self, state: list[list[list[float]]]) -> None:
        """Continue from what `state` returned."""
        self._saved, self._usual = state, {}


@dataclasses.dataclass(slots=True)
class Attempts:
    """The attempts at one window; `Amp.update` decides whether there is another."""

    left: int
    before: Tensor
    """The scale before the first pass, 0-d."""
    num: int = 0
    again: bool = False

    def settle(self, amp: Amp, overflow: Tensor, num_steps: int) -> bool:
        """Whether the window is computed again at a smaller scale. Waits for the device."""
        if num_steps > 1:
            raise RuntimeError(f"amp.retry: the window has {num_steps} steps, and one may be taken; expected one")
        self.again = bool(overflow) and self.left > 0
        if self.again:
            self.left, self.num = self.left - 1, self.num + 1
            amp.scaler.lower()
        elif bool(overflow):
            amp.scaler.set(self.before)
        return self.again


def attempts(amp: Amp) -> Iterator[int]:
    """Yield once per pass over a window: again while it overflows, at a smaller scale, `amp.retry` times at most.

        for attempt in attempts(amp):
            ...                         # the whole window: micro-batches, step, update, zero_grad

    The generators of random numbers are where they were. After a pass that did not overflow training continues at its
    scale; if all do, the scale is that from before, and the overflow counts once.
    """
    if not amp.config.retry:
        yield 0
        return
    on_gpu = amp.device.type == "cuda"
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state(amp.device) if on_gpu else None
    passes = amp.attempts = Attempts(amp.config.retry, amp.scaler.scale.clone())
    try:
        yield 0
        while passes.again:
            passes.again = False
            torch.set_rng_state(host)
            if device is not None:
                torch.cuda.set_rng_state(device, amp.device)
            yield passes.num
    finally:
        amp.attempts = None


def counters_of(amp: Amp) -> dict[str, Any]:
    """What `Amp.counters` returns."""
    return {
        "skipped": int(amp.num_skipped),
        "consecutive_skips": int(amp.num_consecutive_skips),
        "rounded": [int(weights.num_taken) for weights in amp.weights],
        **({} if amp.outliers is None else {"usual": amp.outliers.state()}),
        **({"kept_scale": amp.scaler.kept} if amp.scaler.kept else {}),
    }


def load_counters(amp: Amp, progress: Mapping[str, Any]) -> None:
    """Restore what `counters_of` returned."""
    amp.num_skipped.fill_(int(progress.get("skipped", 0)))
    amp.num_consecutive_skips.fill_(int(progress.get("consecutive_skips", 0)))
    rounded = [*progress.get("rounded", []), *[0] * len(amp.weights)]
    for weights, num_taken in zip(amp.weights, rounded, strict=False):
        weights.num_taken.fill_(int(num_taken))
    if amp.outliers is not None:
        amp.outliers.load(progress.get("usual", []))
    if kept := progress.get("kept_scale"):
        amp.scaler.recall(kept)
