"""The cost of the doctor: steps with and without it, interleaved in one run of a recipe.

A driver for `Environment.driver`. The ways take turns step by step and go through the same windows. On a CPU the
processor's time is compared.
"""

from __future__ import annotations

import operator
import random
import statistics
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch

from amp_core.doctor.statistics import Statistics
from amp_core.doctor.watch import Watch
from amp_core.run.replay import window_of
from amp_core.step.observer import around_window

if TYPE_CHECKING:
    from amp_core.run.loop import Loop

_WINDOWS = 16
_LINE = 10
"""Steps between readings, as log_every has it."""


class Cost:
    """Step times without a doctor (twice, which shows the noise), with one that watches, and with statistics."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, loop: Loop, count: Any) -> Generator[Any, None, None]:
        device = loop.env.device
        windows = [window_of(loop, loop.step + 1 + i) for i in range(_WINDOWS)]
        ways: dict[str, tuple[Watch | None, Any]] = {
            "off": (None, None),
            "off, again": (None, None),
            "watch": (Watch(loop), None),
            "statistics": (None, Statistics(loop)),
        }
        self.seconds = {name: [] for name in ways}
        for turn in range(self.num_steps):
            # In random order: what follows statistics finds cold caches.
            for name in random.Random(turn).sample(list(ways), len(ways)):
                loop.watch, loop.statistics = ways[name]
                loop.observers = [each for each in ways[name] if each is not None]
                began = _now(device)
                with loop.step_of(windows[turn % _WINDOWS]), around_window(loop.observers, loop.step + 1):
                    yield windows[turn % _WINDOWS]
                if loop.watch is not None and turn % _LINE == 0:
                    torch.stack(list(loop.watch.facts().values())).tolist()
                self.seconds[name].append(_now(device) - began)
        loop.watch, loop.statistics, loop.observers = None, None, []

    def ratio(self, way: str) -> tuple[float, str]:
        """Median of a turn's step times against those without a doctor, and as text with its 95% interval."""
        ratios = sorted(map(operator.truediv, self.seconds[way], self.seconds["off"]))
        middle, half = (len(ratios) - 1) / 2, 0.98 * len(ratios) ** 0.5  # between two order statistics
        low, high = ratios[max(round(middle - half), 0)], ratios[min(round(middle + half), len(ratios) - 1)]
        return statistics.median(ratios), f"{statistics.median(ratios):.4f}  (95% interval {low:.4f} to {high:.4f})"

    def __str__(self) -> str:
        step, sampled = 1e3 * statistics.median(self.seconds["off"]), self.ratio("statistics")
        return f"""{self.num_steps} steps of each way, taking turns; without a doctor {step:.2f} ms (median)
  off, again                     {self.ratio("off, again")[1]}
  doctor=watch                   {self.ratio("watch")[1]}
  doctor.statistics_every=1      {sampled[1]}
  doctor.statistics_every=100    {1 + (sampled[0] - 1) / 100:.4f}  (a hundredth of the line above)"""


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() if device.type == "cuda" else time.process_time()
