"""Sums on the device between two log lines, read back without blocking, and the clock of a run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amp_core.step.amp import Amp
from amp_core.step.report import StepReport
from amp_core.step.schedule import Schedule
from amp_core.tensors import widest

logger = logging.getLogger("amp_recipes")


class Meter:
    """The sums over the steps of one optimizer since the last log line, on the device."""

    def __init__(self, device: torch.device, num_skipped: int = 0) -> None:
        self.grad_norm: Tensor | None = None
        """Norm of the last step, also of one before the last line; None: there was none."""
        # Steps start at what an earlier run skipped, and taken steps at 0: the difference is what both skipped.
        self._num_steps = num_skipped
        self._num_taken = torch.zeros((), dtype=torch.int64, device=device)
        self._zero = torch.zeros((), device=device)
        self.clear()

    def clear(self) -> None:
        self.is_fresh = False
        self.sums: dict[str, Tensor] = {}
        self._before = self._num_taken.clone()

    @property
    def num_taken_since_line(self) -> Tensor:
        """Taken steps since the last line, 0-d int64."""
        return self._num_taken - self._before

    @property
    def num_skipped(self) -> Tensor:
        """Skipped steps, also those before the last line and those it was made with, 0-d int64."""
        return self._num_steps - self._num_taken

    def add(self, report: StepReport, values: dict[str, Tensor]) -> None:
        """Add a step. `values`: this rank's shares of means over the window, which add up to them over all ranks."""
        self.grad_norm, self.is_fresh = report.grad_norm, True
        for name, value in values.items():
            # A skipped step has no loss: NaN would spoil the mean.
            value = torch.where(report.taken, value.detach().float(), self._zero)
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self._num_steps += 1
        self._num_taken += report.taken

    def state(self) -> dict[str, Any]:
        """The sums as plain numbers. Waits for the device."""
        return {
            "sums": {name: float(value) for name, value in self.sums.items()},
            "num_taken": int(self.num_taken_since_line),
            "grad_norm": None if self.grad_norm is None else float(self.grad_norm),
            "is_fresh": self.is_fresh,
        }

    def load_state(self, state: Mapping[str, Any], sums: Mapping[str, float]) -> None:
        """Restore what `state` returned, with these sums."""
        device = self._num_taken.device
        self.sums = {name: torch.tensor(value, device=device) for name, value in sums.items()}
        self._num_steps += int(state["num_taken"])
        self._num_taken += int(state["num_taken"])
        self.grad_norm = None if state["grad_norm"] is None else torch.tensor(state["grad_norm"], device=device)
        self.is_fresh = bool(state["is_fresh"])


class PendingCopy:
    """Numbers on their way to the host. CUDA copies them in the background; on other devices `values` copies them."""

    def __init__(self, numbers: Tensor) -> None:
        self._event = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def values(self) -> list[float]:
        """The numbers. Waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


@dataclass(frozen=True)
class Symptoms:
    """What a log line says about the steps since the last one, the same on all ranks."""

    step: int
    """The step of the line."""
    streak: int
    """Steps skipped in a row up to `step`."""
    scale: float
    """The loss scale."""
    first_skip: int | None = None
    """The first skipped step since the last line; None without the doctor, who fills it in."""
    first_bad_loss: int | None = None
    """The first step since the last line whose loss was not finite, likewise."""


@dataclass(frozen=True)
class Line:
    """A log line on the host, and numbers that are not logged."""

    numbers: dict[str, Any]
    """As in metrics.jsonl."""
    samples_per_second: float
    """Since the last line, not rounded."""
    symptoms: Symptoms
    facts: dict[str, float]
    """The values of the `facts` that `Metrics.begin_line` got."""


class Metrics:
    """The numbers of a run's log lines, the same on all ranks."""

    def __init__(self, amp: Amp, schedules: Mapping[str, Schedule], world_size: int) -> None:
        self._amp, self._schedules, self._world_size = amp, schedules, world_size
        self.meters: dict[str, Meter] = {}
        """By the name of an optimizer in recipes that step several; "" otherwise."""
        self._begun: tuple[PendingCopy, dict[str, list[Any]], dict[str, Any]] | None = None
        """Numbers of a line, the names of each kind of them in their order, and the numbers that the host knows."""
        self._skip_noted = self._floor_noted = False

    def states(self, group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
        """The sums of each rank since the last line, for `load_states`. Waits for the device. Collective.

        Not their sum: in another order of additions, the mean of a run that was resumed would differ in its last bits.
        """
        states: list[Any] = [{of: meter.state() for of, meter in self.meters.items()}]
        if self._world_size > 1:
            own, states = states[0], [None] * self._world_size
            dist.all_gather_object(states, own, group=group)
        return states

    def load_states(self, states: list[dict[str, Any]], rank: int, skipped_of: Mapping[str, int]) -> None:
        """Restore what `states` returned. With another number of ranks, rank 0 takes the sums of all."""
        for of, state in states[0].items():
            self.meters[of] = Meter(self._amp.device, int(skipped_of.get(of, 0)))
            if len(states) == self._world_size:
                sums = states[rank][of]["sums"]
            else:
                total = {name: math.fsum(each[of]["sums"][name] for each in states) for name in state["sums"]}
                sums = total if rank == 0 else dict.fromkeys(total, 0.0)
            self.meters[of].load_state(state, sums)

    def add(self, of: str, report: StepReport, values: dict[str, Tensor]) -> None:
        """Add a step. Does not wait for the device."""
        if of not in self.meters:
            self.meters[of] = Meter(self._amp.device)
        self.meters[of].add(report, values)

    def begin_line(
        self, step: int, lap: tuple[float, float], facts: Mapping[str, Tensor], *, keep_sums: bool = False
    ) -> None:
        """Begin to read the numbers of a line. Does not wait for the device. Collective.

        Before the first step there is no line; without a step since the last one it has neither losses nor norms.
        `lap` is what `Clock.lap` returned, `facts` are 0-d tensors to be read with it, the same on all ranks. With
        `keep_sums` the next line includes the steps of this one, too.
        """
        # Without optimizers that step no longer, such as one that a recipe trains first.
        meters = {of: meter for of, meter in self.meters.items() if meter.is_fresh} or self.meters
        if not meters:
            return
        kinds: dict[str, dict[Any, Tensor]] = {
            "sum": {(of, name): value for of, meter in meters.items() for name, value in meter.sums.items()},
            # Values are shares of a mean, so their sum over ranks is the mean; every rank has counted the same steps.
            "taken": {of: meter.num_taken_since_line / self._world_size for of, meter in meters.items()},
        }
        summed = torch.stack([value for kind in kinds.values() for value in kind.values()])
        if self._world_size > 1:
            dist.all_reduce(summed)
        alike: dict[str, dict[Any, Tensor]] = {
            "run": {
                "loss_scale": self._amp.scaler.scale,
                "skipped": self._amp.num_skipped,
                "streak": self._amp.num_consecutive_skips,
            },
            "grad_norm": {of: m.grad_norm for of, m in meters.items() if m.is_fresh and m.grad_norm is not None},
            "skipped": {of: meter.num_skipped for of, meter in meters.items()},
            "facts": dict(facts),
            # `schedule` -> lr, `generator_schedule` -> lr_generator.
            "lr": {
                f"lr_{name.removesuffix('schedule').strip('_')}".strip("_"): schedule.last_rate().to(self._amp.device)
                for name, schedule in self._schedules.items()
            },
        }
        for meter in meters.values() if not keep_sums else ():
            meter.clear()
        wide = widest(self._amp.device)  # holds counts and scales exactly
        read = [number.detach().to(wide) for kind in alike.values() for number in kind.values()]
        names = {kind: list(numbers) for kind, numbers in (kinds | alike).items()}
        host = {"step": step, "samples_per_second": lap[0], "data_wait": lap[1]}
        self._begun = PendingCopy(torch.cat([summed.to(wide), torch.stack(read)])), names, host

    def finish_line(self) -> Line | None:
        """The line that was begun, or None. Waits for its numbers, and logs what is remarkable about them."""
        if self._begun is None:
            return None
        (pending, names, host), self._begun = self._begun, None
        values = iter(pending.values())
        found = {kind: {name: next(values) for name in each} for kind, each in names.items()}
        taken, rates, run = found["taken"], found["lr"], found["run"]
        norms = {of: norm if math.isfinite(norm) else None for of, norm in found["grad_norm"].items()}
        step, skipped, streak = host["step"], int(run["skipped"]), int(run["streak"])
        line: dict[str, Any] = {"step": step, "split": "train"}
        line |= {name: value / taken[of] if taken[of] else None for (of, name), value in found["sum"].items()}
        line |= {
            # Of several schedules and optimizers the first is also `lr` and `grad_norm`; a loop has a schedule.
            "lr": next(iter(rates.values())),
            "loss_scale": run["loss_scale"],
            "skipped": skipped,
            "grad_norm": next(iter(norms.values()), None),
            "samples_per_second": round(host["samples_per_second"], 3),
            "data_wait": round(host["data_wait"], 4),
        }
        for of in filter(None, taken):
            line |= {f"grad_norm_{of}": norms.get(of), f"skipped_{of}": int(found["skipped"][of])}
        line |= {name: rate for name, rate in rates.items() if name != "lr"}
        self._remark(step, skipped, streak, run["loss_scale"])
        return Line(line, host["samples_per_second"], Symptoms(step, streak, run["loss_scale"]), found["facts"])

    def _remark(self, step: int, skipped: int, streak: int, scale: float) -> None:
        """Log the first skipped step, and a scale at its floor, once in a run."""
        policy = self._amp.scaler.policy
        if skipped and not self._skip_noted:
            self._skip_noted = True
            why = "not usual without a loss scale: look at the data"
            if policy:
                is_usual = "usual while the loss scale settles"
                why = is_usual if policy.dynamic else "the loss scale stays: lower it (amp.init_scale)"
            logger.info("step %d: %d skipped so far, their gradients were not finite (%s)", step, skipped, why)
        if policy and policy.dynamic and scale <= policy.min_scale and streak and not self._floor_noted:
            self._floor_noted = True
            logger.warning(
                "the loss scale is at its floor %g (amp.min_scale) and steps are still skipped (step %d)", scale, step
            )


class Clock:
    """Samples per second, and the share of the time spent waiting for data. Callers `exclude` evaluation and saving."""

    def __init__(self) -> None:
        self._excluded = self._waited = 0.0
        self.start(0)

    def start(self, samples: int) -> None:
        self._run = self._lap = self._now(samples)

    def exclude(self, seconds: float) -> None:
        """Leave out this much of the time that has passed."""
        self._excluded += seconds

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches, and adds up the time spent in `next`."""
        batches = iter(batches)
        while True:
            began = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited += time.monotonic() - began
            yield batch

    def lap(self, samples: int) -> tuple[float, float]:
        """Samples per second, and the share of the time spent waiting for data, since the last lap."""
        found, self._lap = self._since(self._lap, samples), self._now(samples)
        return found

    def overall(self, samples: int) -> tuple[float, float]:
        """The same since the start."""
        return self._since(self._run, samples)

    def _now(self, samples: int) -> tuple[int, float, float]:
        return samples, time.monotonic() - self._excluded, self._waited

    def _since(self, then: tuple[int, float, float], samples: int) -> tuple[float, float]:
        done, seconds, waited = (now - before for now, before in zip(self._now(samples), then, strict=True))
        seconds = max(seconds, 1e-9)
        return done / seconds, min(waited / seconds, 1.0)
