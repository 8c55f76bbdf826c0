"""Why a run is not faster: where the time of a step goes, and what to do about each part.

The windows of a run are computed three times: as in training, for the time of whole steps; under torch's profiler, for
the time of each operation; and watched by a dispatch mode that knows modules and source lines. The last two are the
same windows, so their operations are matched in order, and the slow dispatch mode is in none of the times.

    report = advise(train_step, model, amp, optimizers=[optimizer])       # a plain loop
    print(report)

What is found are pure functions of the `Profile`, the `FINDERS`; their shares are forecasts. What a setting changes is
then tried, in turns with the run as it is, and findings are ranked by what was gained. Shares and gains are of a whole
step, with the wait for its data. They overlap: a cast may also be a small operator, so they do not add up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import textwrap
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_core.doctor.locate import Doctor
from amp_core.run.replay import rerun_step, restore, snapshot
from amp_core.step.amp import Amp
from amp_tools.findings import FINDERS, waits
from amp_tools.measure import NUM_WARM_UPS, measure, seconds_of, time_windows, time_with_loader
from amp_tools.profile import Finding, Profile, spell
from amp_tools.trials import try_reads

if TYPE_CHECKING:
    from amp_core.run.loop import Loop


@dataclass(frozen=True)
class Report:
    """What was found, the largest gain first."""

    what: str
    profile: Profile
    findings: list[Finding]
    hints: list[Finding]
    """What is not right in 16 bits, whatever it costs."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        p = self.profile
        return {
            "what": self.what,
            "amp": p.amp,
            "device": p.units.device if p.units else p.device,
            "step_seconds": p.step,
            "waits_per_step": len(waits(p)) / p.num_steps,
            "operations_per_step": len(p.work) / p.num_steps,
            "matched": p.matched,
            "breakdown": p.breakdown(),
            "findings": [dataclasses.asdict(each) for each in self.findings],
            "hints": [dataclasses.asdict(each) for each in self.hints],
        }

    def __str__(self) -> str:
        p = self.profile
        per_step = p.profiled / p.num_steps
        where = p.units.device if p.units else p.device
        head = f"{self.what}: a step takes {spell(p.step)} ({len(p.steps)} measured: computing takes from"
        head += f" {spell(min(p.steps))} to {spell(max(p.steps))}; {spell(per_step)} under the profiler)"
        lines = [
            *textwrap.wrap(f"{head} with amp={p.amp} on {where}", 120),
            f"{len(p.work) / p.num_steps:.0f} operations per step, {len(waits(p)) / p.num_steps:g} waits for the "
            f"device; {p.matched:.0%} of the operations were matched with their time",
            "",
            *(f"  {name:<22}{share:6.1%}" for name, share in p.breakdown().items()),
            "",
        ]
        for number, each in enumerate(self.findings, 1):
            lines += [textwrap.indent(str(each), "   ").replace("   ", f"{number:>2} ", 1), ""]
        if not self.findings:
            lines += ["nothing was found: no share of the time that a known change would give back", ""]
        if self.hints:
            lines += ["not right in 16 bits:", ""]
            lines += [textwrap.indent(str(each), "   ") + "\n" for each in self.hints]
        return "\n".join(lines).rstrip()


def examine(what: str, profile: Profile) -> Report:
    """Everything that is found in a profile, the largest gain first; what one change would cure is one finding."""
    found = [finding for finder in FINDERS for finding in finder(profile)]
    found = [dataclasses.replace(each, tried=profile.trials.get(each.cause)) for each in found]
    causes: dict[str, Finding] = {}
    for each in sorted(found, key=lambda finding: finding.rank, reverse=True):
        first = causes.setdefault(each.cause, each)
        if first is not each:
            evidence = f"{first.evidence}. Also: {each.title} ({each.evidence})"
            causes[each.cause] = dataclasses.replace(first, evidence=evidence)
    return Report(what, profile, list(causes.values()), profile.hints)


# --- drivers ------------------------------------------------------------------------------------------------------


def advise(
    step: Callable[[], Any],
    nets: nn.Module | Iterable[tuple[str, nn.Module]],
    amp: Amp,
    *,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    num_windows: int = 10,
    what: str = "the loop",
) -> Report:
    """Look at a plain training loop. Its data, and what it does with them before `step`, are not looked at.

    Args:
        step: computes a window and takes its step; called a few times more than 3 * `num_windows`. It trains for good;
            numbers that it reads from tensors are in some of the steps those of the step before, to time the wait.
        nets: one network, or pairs of a name and a network.
        amp: the mode that trains.
        optimizers: that `step` steps.
        num_windows: how many to measure.
        what: the name in the report.
    """
    doctor = Doctor(amp, nets)
    timed = time_windows(contextlib.nullcontext, amp, num_windows)
    again = contextlib.nullcontext
    steps = try_reads(measure(doctor, optimizers, again, lambda: None, num_windows, timed), again, amp)
    try:
        while True:
            next(steps)
            step()
    except StopIteration as done:
        return examine(what, done.value)


def advise_run(loop: Loop, num_windows: int, found: list[Profile]) -> Generator[Any, None, None]:
    """A driver (`env.driver`) that measures a recipe from where it stands. Appends to `found`."""
    from amp_core.doctor.watch import doctor_of  # which needs the run's log, as plain loops do not

    doctor, cfg = doctor_of(loop), loop.cfg
    yield from time_windows(partial(rerun_step, loop), loop.amp, NUM_WARM_UPS)
    began = time.perf_counter()
    saved = snapshot(loop)
    saving = time.perf_counter() - began
    timed, again = time_with_loader(loop, num_windows), partial(rerun_step, loop)
    measuring = measure(doctor, loop.optimizers, again, lambda: restore(loop, saved), num_windows, timed)
    p = yield from try_reads(measuring, again, loop.amp)
    p.num_workers, p.batch_size = cfg.data.num_workers, cfg.batch_size
    p.accumulation, p.channels_last = loop.feed.accumulation, cfg.perf.channels_last
    p.keep_fp32 = list(cfg.amp.keep_fp32)
    with loop.feed.loading(loop.samples, num_workers=0) as windows:
        p.loading = statistics.median([seconds_of(lambda: next(windows)) for _ in range(4)][1:])
    # The forward pass is about a third of a step, and needs no more than that for a sample of the evaluation.
    evaluating = len(loop.data.eval) / loop.feed.samples_per_step * p.compute / 3
    p.cadences = {"eval_every": (cfg.eval_every, evaluating), "save_every": (cfg.save_every, saving)}
    found.append(p)
