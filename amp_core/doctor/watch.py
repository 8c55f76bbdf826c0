"""The doctor of a run: detects steps that should not be skipped, reruns their window, reports, heals.

Nothing is read back between log lines: the first skipped step and the first non-finite loss are recorded on the device
and read with the metrics. A window needs no copy of its data: its samples and randomness are functions of (seed, rank,
step). The doctor acts on a loss that is not finite; without a loss scale on any skipped step; with one on
`doctor.after_skips` skipped steps in a row, and on skipped steps at the minimum scale.

An overflow of a training that diverges is no question of precision: islands would hold for a few steps. So the window's
largest loss and the norm of the weights are held against those with the weights that the run began with.

While steps are skipped the weights do not change, and the rerun is exact. Otherwise the window is rerun with the
current weights, and if it is finite with them, the run restores its last checkpoint, trains again up to that step,
examines it, and restores the current state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import operator
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amp_core.config.errors import ConfigError
from amp_core.config.redact import redact
from amp_core.doctor.diagnosis import Diagnosis
from amp_core.doctor.findings import Search
from amp_core.doctor.locate import doctor_of
from amp_core.doctor.plain_loop import without_autocast
from amp_core.doctor.silent import Silent
from amp_core.doctor.statistics import Statistics
from amp_core.doctor.trace import NEEDED
from amp_core.doctor.values import is_finite
from amp_core.run.lines import write_json, write_text
from amp_core.run.loop import Loop
from amp_core.run.meters import Symptoms
from amp_core.run.replay import indices_of, replay, rerun_step, restore, snapshot, trying
from amp_core.run.resume import make_islands
from amp_core.step.observer import Observer
from amp_core.step.report import StepReport
from amp_core.tensors import has_16bit, local
from amp_core.torch_private import is_missing

logger = logging.getLogger("amp_recipes")

_NEVER = 2**52  # exact in float64
_GROWN = 2.0
"""A norm of all weights that has grown by more, with a loss that has more than doubled, is no training."""
_SMALL = 2**30
"""Largest state in bytes that is snapshot in host memory until there is a checkpoint."""
_what = operator.attrgetter("cause", "op", "module", "source", "samples")


class Watch(Observer):
    """Watches one run."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.cfg = loop, loop.cfg.doctor
        self.doctor = doctor_of(loop)
        self.silent = Silent(loop, self.doctor)
        self.last: Diagnosis | None = None
        self.num_calls = 0
        self._examined = -1
        self._firsts = torch.zeros(2, dtype=torch.int64, device=loop.env.device)
        self._origin: tuple[int, Any] | None = None
        """The step and the state that the run began with."""

    def around_run(self) -> contextlib.AbstractContextManager[None]:
        """Snapshot the initial state, if it is small, until there is a checkpoint."""
        weights = [p for net in self.loop.nets for p in net.parameters()]
        if sum(p.numel() * p.element_size() for p in weights) < _SMALL:
            self._origin = self.loop.step, snapshot(self.loop)
        return contextlib.nullcontext()

    def note(self, report: StepReport, loss: Tensor | None) -> None:
        """Record the first skipped step and the first non-finite loss. No host-device sync."""
        finite = report.taken if loss is None else torch.isfinite(loss.detach())
        bad = torch.stack([report.taken, finite]).logical_not_()
        torch.maximum(self._firsts, bad * (_NEVER - (self.loop.step + 1)), out=self._firsts)

    def around_window(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Counts zeros in the step of a log line, of outputs unless compiled modules would compile again for hooks."""
        if self.loop.graph is not None or step % self.loop.cfg.log_every:  # a captured step calls no hooks
            return contextlib.nullcontext()
        return self.silent.sampling(outputs=self.loop.cfg.perf.compile is None)

    def facts(self) -> dict[str, Tensor]:
        """The values to read back with the metrics; resets them."""
        firsts = self._firsts
        self._firsts = torch.zeros_like(firsts)
        if self.loop.env.world_size > 1:
            dist.all_reduce(firsts, op=dist.ReduceOp.MAX)
        return {"first_skip": firsts[0], "first_bad_loss": firsts[1]} | self.silent.facts()

    def completed(self, symptoms: Symptoms, facts: dict[str, float]) -> Symptoms:
        """The symptoms with the values of `facts` that were read back."""
        self.silent.read(symptoms, facts)
        firsts = {name: _NEVER - int(value) if value else None for name, value in facts.items()}
        return dataclasses.replace(symptoms, **firsts)

    def is_called(self, symptoms: Symptoms) -> bool:
        """Whether these symptoms need an examination."""
        return bool(self.silent.candidates) or self._needs_diagnosis(symptoms)

    def _needs_diagnosis(self, symptoms: Symptoms) -> bool:
        policy = self.loop.amp.scaler.policy
        if self.num_calls >= self.cfg.max_reports:
            return False
        if symptoms.first_bad_loss is not None:  # a loss scale does not make a loss infinite
            return True
        if policy is None:
            return symptoms.first_skip is not None
        at_floor = policy.dynamic and symptoms.scale <= policy.min_scale and symptoms.streak > 0
        return symptoms.streak >= self.cfg.after_skips or at_floor

    def examine(self, symptoms: Symptoms) -> Search[Any]:
        """Yield windows to rerun; return the diagnosis, or None."""
        loop = self.loop
        yield from self.silent.examine(symptoms.step)
        if not self._needs_diagnosis(symptoms) and symptoms.streak < loop.cfg.amp.max_consecutive_skips:
            return None
        streak, policy = int(loop.amp.num_consecutive_skips), loop.amp.scaler.policy
        begin = loop.step - streak + 1
        first = symptoms.first_bad_loss if symptoms.first_bad_loss is not None else symptoms.first_skip
        if streak and symptoms.first_bad_loss is None and (policy is not None or first is None or first >= begin):
            first = begin  # the first of consecutive skipped steps, all with the same weights
        if first is None or self._examined >= (begin if streak else first):
            return self.last
        self._examined = first
        self.num_calls += 1
        unchanged = streak > 0 and first >= begin
        logger.info("the doctor reruns step %d", first)
        weights = "the weights of the step" if unchanged else f"the weights of step {loop.step}"
        diagnosis = yield from self._diagnose(first)
        is_poisoned = diagnosis is not None and diagnosis.cause == "poisoned weight"
        if is_poisoned or (diagnosis is None and not unchanged):
            start = loop.checkpoint.newest_before(first) or self._origin
            if start is not None and start[0] < first:
                found = yield from self._from_checkpoint(start, first)
                if diagnosis is None or (found and found.cause == "poisoned by the optimizer"):
                    diagnosis = found
                    weights = f"the weights of the step, trained again from step {start[0]}"
        if diagnosis is None:
            diagnosis = self.doctor.unlocated(
                "The step was skipped when it was trained, and is finite now. Weights or random numbers differed: set "
                "deterministic=true and a smaller save_every for an exact rerun. Or a data worker loads other samples "
                "than the main process does: compare with data.num_workers=0."
            )
        diagnosis.step, diagnosis.weights = diagnosis.step or first, weights
        if diagnosis.cause.startswith(("overflow", "loss scale too large", "gradient norm")):
            yield from self._hold_against_the_start(diagnosis, first)
        add_samples(loop, diagnosis, first)
        before, self.last = self.last, diagnosis
        if before is not None and _what(before) == _what(diagnosis):
            logger.info("step %d: the same as at step %s", first, before.step)
            return diagnosis
        if self.cfg.name == "heal" and diagnosis.islands and diagnosis.cause != "position collision":
            yield from self._heal(diagnosis, first, streak)
        self._report(diagnosis)
        return diagnosis

    def _diagnose(self, step: int) -> Search[Diagnosis | None]:
        loop = self.loop
        undone = functools.partial(trying, loop, step) if self._origin is not None else None
        return (yield from self.doctor.diagnose(functools.partial(replay, loop, step), undone))

    def _from_checkpoint(self, start: tuple[int, Any], step: int) -> Search[Diagnosis | None]:
        loop = self.loop
        if start[0] + 1 < step:
            logger.info("the doctor trains steps %d to %d again", start[0] + 1, step - 1)
        with trying(loop, step):
            restore(loop, start[1])
            while loop.step < step - 1:
                with rerun_step(loop) as window:
                    yield window
                weights = local(p for net in loop.nets for p in net.parameters())
                if not all(self.doctor.agree(all(map(is_finite, weights)))):  # made so by this step
                    return (yield from self._from_checkpoint(start, loop.step))
            diagnosis = yield from self._diagnose(step)
            if diagnosis is not None:
                diagnosis.step = step
            return diagnosis

    def _hold_against_the_start(self, diagnosis: Diagnosis, step: int) -> Search[Any]:
        """Change the diagnosis if training diverges, whatever the precision."""
        loop = self.loop
        # Also of a first step: a window that was skipped for one optimizer was not for another.
        if self._origin is None or has_16bit(loop.env.nets):
            return
        loss, norm = yield from self._loss_and_norm(step)
        with trying(loop, step):
            restore(loop, self._origin[1])
            first_loss, first_norm = yield from self._loss_and_norm(step)
        # A recipe may report no loss. One that is NaN now is no better than one that has grown.
        has_grown = math.isfinite(first_loss) and not loss <= first_loss + abs(first_loss)
        if first_norm and norm > _GROWN * first_norm and has_grown:
            how = "" if loop.amp.dtype is torch.float32 else "without autocast "
            diagnosis.diverges(
                f" But {how}the loss of this window is {loss:.4g}, and {first_loss:.4g} with the weights "
                f"of step {self._origin[0]}, whose norm has grown from {first_norm:.4g} to {norm:.4g}."
            )

    def _loss_and_norm(self, step: int) -> Search[tuple[float, float]]:
        """The largest of a window's losses without autocast, and the norm of all weights.

        Not their mean: those of a GAN cancel.
        """
        loop = self.loop
        with without_autocast(), loop.amp.scaler.held_at(1.0), replay(loop, step) as (rehearsal, window):
            yield window
        norm = math.hypot(*(w.double().norm().item() for net in loop.nets for w in local(net.parameters())))
        found = self.doctor.agree(([loss.item() for loss in rehearsal.losses], norm))
        losses = [loss for losses, _ in found for loss in losses]
        largest = max(losses) if losses and all(map(math.isfinite, losses)) else math.nan
        return largest, self.doctor.over_ranks(norm for _, norm in found)

    def _heal(self, diagnosis: Diagnosis, step: int, streak: int) -> Search[Any]:
        loop, policy = self.loop, self.loop.amp.scaler.policy
        make_islands(loop, diagnosis.islands)
        diagnosis.healed = True
        if policy is None or not policy.dynamic or not streak:
            return
        # The scale fell needlessly: restore it, as far as the healed window allows.
        scale = loop.amp.scale
        wanted = min(scale * policy.backoff_factor ** -min(streak, 126), policy.max_scale)
        while wanted > scale:
            loop.amp.scaler.set(wanted)
            if (yield from self.doctor.is_finite(functools.partial(replay, loop, step))):
                return
            wanted *= policy.backoff_factor
        loop.amp.scaler.set(scale)

    def _report(self, diagnosis: Diagnosis) -> None:
        env, text = self.loop.env, str(diagnosis)
        if not env.is_main or env.run_dir is None:
            return
        path = env.run_dir / "doctor" / f"step_{diagnosis.step:08d}.txt"
        with contextlib.suppress(OSError):  # a full disk must not end the run
            path.parent.mkdir(exist_ok=True)
            write_text(path, redact(text) + "\n")
            write_json(path.with_suffix(".json"), diagnosis.to_dict())
        logger.warning("the doctor's report (%s)\n%s", path, text)
        if self.num_calls == self.cfg.max_reports:
            logger.info("doctor.max_reports=%d: this was the last report", self.cfg.max_reports)


def add_samples(loop: Loop, diagnosis: Diagnosis, step: int) -> None:
    """Convert rows of a micro-batch to indices of the data set."""
    batches = indices_of(loop, step, diagnosis.rank)
    rows, diagnosis.samples = diagnosis.samples, []
    # An entry of the window is called batch[micro-batch][...]; an operation's micro-batch is unknown.
    named = re.match(r"batch\[(\d+)\]", diagnosis.tensor)
    batch = batches[int(named[1])] if named else batches[0] if len(batches) == 1 else []
    # If most of a batch is affected, the samples are not the cause.
    if rows and max(rows) < len(batch) and len(rows) <= max(1, len(batch) // 4):
        diagnosis.samples = [batch[row] for row in rows]


def diagnose_step(loop: Loop, step: int, found: list[Diagnosis | None]) -> Search[Any]:
    """A driver (`env.driver`) that trains up to a step of a run again and examines it. Fills `found`."""
    if step <= loop.step:
        raise ConfigError(f"--step {step}: the checkpoint is at step {loop.step}; expected a later step")
    if step > loop.num_steps:
        raise ConfigError(f"--step {step}: the run ends at step {loop.num_steps}; expected an earlier step")
    while loop.step < step - 1:
        with rerun_step(loop) as window:
            yield window
    window, undone = functools.partial(replay, loop, step), functools.partial(trying, loop, step)
    diagnosis = yield from doctor_of(loop).diagnose(window, undone)
    if diagnosis is not None:
        diagnosis.step, diagnosis.weights = step, "the weights of the step"
        add_samples(loop, diagnosis, step)
    found.append(diagnosis)


def doctor(loop: Loop) -> tuple[Watch | None, Statistics | None]:
    """The watch and the statistics of a run, or None. The watch needs the private torch names of the trace."""
    watch = None if loop.cfg.doctor.name == "off" or is_missing(*NEEDED) else Watch(loop)
    sampled = loop.cfg.doctor.statistics_every is not None and loop.env.is_main
    return watch, Statistics(loop) if sampled else None
