"""Sums on the device between two log lines, read back without blocking, and the clock of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from amp_core.step.report import StepReport


class Meter:
    """What is to be logged of the steps of one optimizer, summed on the device since the last line."""

    def __init__(self, device: torch.device, num_skipped: int = 0) -> None:
        self.report: StepReport | None = None
        self.num_skipped = torch.full((), num_skipped, dtype=torch.int64, device=device)
        self._zero = torch.zeros((), device=device)
        self.clear()

    def clear(self) -> None:
        self.is_fresh = False
        self.sums: dict[str, Tensor] = {}
        self.num_taken = self._zero

    def add(self, report: StepReport, values: dict[str, Tensor]) -> None:
        self.report, self.is_fresh = report, True
        for name, value in values.items():
            # A skipped step has no loss: NaN would spoil the mean.
            value = torch.where(report.taken, value.detach().float(), 0.0)
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.num_taken = self.num_taken + report.taken
        self.num_skipped = self.num_skipped + ~report.taken


class Reading:
    """Numbers on their way from the device: copied in the background, waited for only when they are used."""

    def __init__(self, numbers: Tensor, names: list[tuple[str, str]], step: int, rate: float, waited: float) -> None:
        self.names, self.step, self.rate, self.waited = names, step, rate, waited
        self._event = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def values(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


class Clock:
    """Samples per second of training alone, and the share of it spent waiting for data: evaluation and saving do not
    count."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, samples: int) -> None:
        self._began = self._lap = time.monotonic()
        self._first = self._samples = samples
        self._paused = self._paused_in_lap = 0.0
        self._waited = self._waited_in_lap = 0.0

    def pause(self, seconds: float) -> None:
        self._paused += seconds
        self._paused_in_lap += seconds

    def waiting(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; the time in which they are waited for counts."""
        batches = iter(batches)
        while True:
            began = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            seconds = time.monotonic() - began
            self._waited += seconds
            self._waited_in_lap += seconds
            yield batch

    def lap(self, samples: int) -> tuple[float, float]:
        """Samples per second, and the share of the time in which data were waited for, since the last lap."""
        now = time.monotonic()
        seconds = max(now - self._lap - self._paused_in_lap, 1e-9)
        found = (samples - self._samples) / seconds, min(self._waited_in_lap / seconds, 1.0)
        self._lap, self._samples, self._paused_in_lap, self._waited_in_lap = now, samples, 0.0, 0.0
        return found

    def _seconds(self) -> float:
        return max(time.monotonic() - self._began - self._paused, 1e-9)

    def overall(self, samples: int) -> float:
        return (samples - self._first) / self._seconds()

    def overall_wait(self) -> float:
        return min(self._waited / self._seconds(), 1.0)
