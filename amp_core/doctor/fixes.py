"""Fixes of a window: fp32 islands and loss scales with which it is finite, and so are the steps that follow.

A candidate is tried by training on: with steps that are taken, of the windows that follow in a run, of the same batch
in a plain loop; then everything is put back. What breaks within `STEPS` steps is not printed as tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from amp_core.doctor.diagnosis import ADVICE, BF16, BY_HAND, Diagnosis, Fix, advice_for, keep_fp32_override, listed
from amp_core.doctor.findings import Finding, Search
from amp_core.doctor.plain_loop import in_32_bits, in_bf16, without_autocast
from amp_core.lowp.islands import islands_of
from amp_core.memory.compiled import BACKWARD, may_compile
from amp_core.step.report import Rehearsal

if TYPE_CHECKING:
    from amp_core.doctor.locate import Doctor
    from amp_core.doctor.trace import Trace

Replay = Callable[..., contextlib.AbstractContextManager[tuple[Rehearsal, Any]]]
Trying = Callable[[], contextlib.AbstractContextManager[int]]
OUTSIDE = Fix("code", "compile backward passes outside autocast", python=BACKWARD)

STEPS = 5
"""Steps for which a fix is tried: the window, and those after it."""
_BEYOND_ISLANDS = "overflow in fp32", "sigmoid before", "targets longer", "infinite constant", "bad input", "poisoned"
"""How causes begin for which no island is tried: other bits change nothing."""
_MOST_ROUNDS = 8
_HALVINGS = (1, 1, 1, 1, 2, 4)
"""Of a loss scale that a later step of a trial needs smaller, one after another."""
_GROWN = 10.0
"""A loss that has grown by more times itself in a trial's steps is no success."""
_LEAST_SCALE = -24
"""Exponent of the smallest loss scale that is tried: below 2^-24 of a number fp16 holds nothing."""


class Trial(NamedTuple):
    """For how many steps training is finite, at a loss scale and with islands."""

    steps: int
    holds: bool
    """For all steps that were to be tried."""
    has_finite_losses: bool
    """In the step that breaks: only gradients overflow."""
    losses: Sequence[float] = ()
    """The largest of each step."""
    is_flat: bool = False
    """All gradients are 0, and in 32 bits they are not."""
    scale: float = 1.0
    islands: Sequence[str] = ()
    """Those that could be made."""

    @property
    def grows(self) -> bool:
        """Whether the loss grows in every step, and much in all: no success, also where it is finite."""
        losses = self.losses
        rises = bool(losses) and all(a < b for a, b in itertools.pairwise(losses))
        return rises and losses[-1] - losses[0] > _GROWN * abs(losses[0])


class FixSearch:
    """Searches fixes of one window, which is computed inside of `replay`.

    `trying`: a context in which steps may be taken, since it undoes them; gives how many there may be. None: none.
    """

    def __init__(self, doctor: Doctor, replay: Replay, trying: Trying | None) -> None:
        self.doctor, self.replay = doctor, replay
        self.trying: Trying = trying or (lambda: contextlib.nullcontext(1))
        self.amp, self.agree = doctor.amp, doctor.agree
        self._optimizers = set[torch.optim.Optimizer]()
        self._growing: Trial | None = None
        """The last trial of a fix that held, if the loss grew in it."""
        self._scale = min(doctor.amp.scale, 1.0)
        self._wides: dict[bool, Trial] = {}
        self._wide_loss: float | None = None

    # --- what to change -----------------------------------------------------------------------------------------------

    def too_large(self, diagnosis: Diagnosis, scale: float, fits: float) -> Search[None]:
        """Write a diagnosis of a loss scale that is too large, where `fits` is finite for this window."""
        policy = self.amp.scaler.policy
        assert policy is not None
        grads = diagnosis.output
        if grads is not None and grads.dtype != "float32":
            diagnosis.phase = "backward"  # also of what a backward pass begins with
        is_backward = diagnosis.phase == "backward"
        what = f"gradients exceed {grads.dtype}" if grads and is_backward else "the loss exceeds float32"
        diagnosis.cause = "loss scale too large"
        diagnosis.why = f"With a loss scale of {scale:g} {what}; with {fits:g} the window is finite."
        trial = yield from self._at_smaller_scales(fits)
        diagnosis.scale_that_fits = trial.scale
        if not trial.holds:
            yield from self._give_up(diagnosis, f"loss scale {trial.scale:g}", trial, is_said=trial.scale == fits)
            return
        plain = self.doctor.plain
        grown = scale > policy.init_scale and not (plain and plain.scaler)  # torch's has no cap
        if not policy.dynamic:  # which cannot come down where a later window needs less
            trial = yield from self.lasts(trial.scale / 2)
        diagnosis.scale_that_fits = fits = trial.scale
        fields = {"max_scale": fits} if grown else {"init_scale": fits}
        text = "cap the loss scale" if grown else "begin with a smaller loss scale"
        if fits < policy.min_scale:
            fields |= {"min_scale": 2.0**_LEAST_SCALE}  # other windows may need less
        elif policy.dynamic:
            text += "; a dynamic one also gets there by itself, one skipped step per halving"
        diagnosis.fixes = [self._scale_fix(text, trial, **fields)]

    def add_fixes(self, diagnosis: Diagnosis, finding: Finding) -> Search[None]:
        """Add fixes to a diagnosis."""
        cause = diagnosis.cause
        advice = advice_for(cause, finding)
        if cause == "poisoned buffer" and advice is not None:
            # A guard restores buffers after skipped steps: what it has let through came with a step that was taken.
            guards = "amp.guard(net), in a loop that calls amp.step, restores it after skipped steps"
            more = "lower the learning rate (optimizer.lr)" if self.amp.is_guarding else guards
            advice = dataclasses.replace(advice, text=f"{advice.text}; if an earlier batch left it there, {more}")
        is_large = cause == "bad input" and bool(finding.op)  # finite numbers, which fp32 and bf16 hold
        if (not cause.startswith(_BEYOND_ISLANDS) or is_large) and self.doctor.can_make_islands:
            found = yield from self._try_islands(diagnosis)
            if found is None:
                return
            if not found and (is_large or "overflow" in cause) and (yield from self._casts_by_itself(finding)):
                advice = BY_HAND
                diagnosis.cause = "overflow in a cast" if is_large else cause  # the samples are sound, the cast is not
        if advice is BF16 and self.amp.limits[1] > torch.finfo(torch.float16).max:
            advice = BY_HAND
        if advice is BF16 and self.doctor.plain and not self.amp.weights:
            with in_bf16(self.amp.device.type):
                trial = yield from self.lasts(diagnosis.loss_scale)
                if trial.holds and (yield from self._is_far_from_fp32(trial)):
                    diagnosis.why += " In bf16 the window is finite, and its loss far from that in fp32."
                    advice = None if diagnosis.fixes else ADVICE["rounding in 16 bits"]
                elif trial.holds:
                    advice = dataclasses.replace(BF16, verified=True, steps=trial.steps)
                elif diagnosis.fixes:
                    advice = None
                else:
                    advice = BY_HAND
                    if not (yield from self._recurs(finding)):
                        wide = yield from self._in_fp32()
                        advice = dataclasses.replace(BF16, verified=False) if wide.steps else ADVICE["overflow in fp32"]
                        diagnosis.why += "" if wide.steps else " Without autocast the window is not finite either."
        diagnosis.fixes += [] if advice is None else [advice]

    def unless_it_diverges(self, diagnosis: Diagnosis) -> Search[None]:
        """Withdraw fixes with which the loss grows, if it does in fp32, too, and with a learning rate of 0 does not."""
        if (growing := self._growing) is None or not any(fix.verified for fix in diagnosis.fixes):
            return
        wide, still = (yield from self._in_fp32()), (yield from self._in_fp32(moves=False))
        if (wide.grows or (wide.steps and not wide.holds)) and still.holds and not still.grows:
            first, last = growing.losses[0], growing.losses[-1]
            diagnosis.diverges(
                f" Where the window is finite, the loss grows from {first:.3g} to {last:.3g} in {growing.steps} steps; "
                f"without autocast it {'grows' if wide.holds else 'ends in a NaN'}, too, and with a learning rate of 0 "
                "it does not."
            )

    def scale_down(self, diagnosis: Diagnosis) -> Search[None]:
        """Put a loss scale below 1 before the other fixes, if there is one that fits."""
        fits = yield from self.largest_scale(min(diagnosis.loss_scale, 1.0), _LEAST_SCALE)
        if fits is not None:
            trial = yield from self._at_smaller_scales(fits)
            if trial.holds:
                diagnosis.scale_that_fits = fits = trial.scale
                fix = self._scale_fix("scale the loss down", trial, init_scale=fits, min_scale=2.0**_LEAST_SCALE)
                diagnosis.fixes.insert(0, fix)

    def _try_islands(self, diagnosis: Diagnosis) -> Search[bool | None]:
        """Add islands to a diagnosis. False: none make the window finite; None: in no precision do they last."""
        scale, module = diagnosis.loss_scale, diagnosis.module
        names = [] if module is None else [module]
        trial = (yield from self._islands_at(names, scale)) if names else Trial(0, False, False)
        if not trial.steps:
            # A window that a smaller loss scale fixes needs no island.
            with self.amp.scaler.held_at(min(scale, 1.0)):
                was_eager = not may_compile() or (self.amp.scaler.policy is not None and scale >= 2)
                names = yield from self.smallest_islands(module, is_too_small=bool(names) and was_eager)
            if not names:
                return False
            trial = yield from self._islands_at(names, scale)
        if trial.steps and not trial.holds:
            first, broken = f"{listed(trial.islands)} in fp32", trial
            first += f" at loss scale {trial.scale:g}" if trial.scale < scale else ""
            wide = yield from self._in_fp32()
            for _ in range(_MOST_ROUNDS if wide.holds else 0):
                with self.doctor.as_islands(trial.islands):
                    following = yield from self._first_module_at(trial.scale, trial.steps)
                names = [""] if following is None or following in names else [*names, following]
                trial = yield from self._islands_at(names, scale)
                if trial.holds or names == [""]:
                    break
            if not trial.holds:
                yield from self._give_up(diagnosis, first, broken)
                return None
        is_far = bool(trial.steps) and (yield from self._is_far_from_fp32(trial))
        if is_far and names != [""]:  # more than this was lost to 16 bits
            whole = yield from self._islands_at([""], scale)
            if whole.islands:  # else the network cannot be one, as where Accelerate has patched its forward
                trial = whole
                is_far = not trial.holds or (yield from self._is_far_from_fp32(trial))
        if is_far or not trial.steps:
            why = "finite, but not when it is rerun: does it change its batch?"
            if may_compile():
                why = "finite in eager code, but not as it is compiled here"
            if trial.is_flat or is_far:
                why = "finite, and " + ("all gradients are 0" if trial.is_flat else "its loss is far from that in fp32")
            text = f"compute in fp32: {listed(trial.islands)}: {why}"
            diagnosis.fixes.append(Fix("override", text, python=self._call(trial.islands), verified=False))
            # By default a compiled backward pass keeps the forward's autocast.
            diagnosis.fixes += [] if trial.is_flat or is_far or not may_compile() else [OUTSIDE]
            return True
        diagnosis.islands = list(trial.islands)
        diagnosis.scale_that_fits = trial.scale if trial.scale < scale else None
        diagnosis.fixes.append(self.island_fix(trial.islands, diagnosis.scale_that_fits, trial.steps))
        return True

    def _islands_at(self, names: list[str], scale: float) -> Search[Trial]:
        """How long islands last."""
        with self.doctor.as_islands(names) as made:
            return (yield from self._at_smaller_scales(scale))._replace(islands=made)

    def _give_up(self, diagnosis: Diagnosis, what: str, trial: Trial, *, is_said: bool = False) -> Search[None]:
        """Report that a fix does not last, and what else to do."""
        diagnosis.why += "" if is_said else f" With {what} the window is finite."
        diagnosis.why += f" Step {trial.steps} after it breaks."
        wide = yield from self._in_fp32()
        advice = ADVICE.get(diagnosis.cause, BF16)
        if wide.steps and not wide.holds:
            diagnosis.why += f" Without autocast step {wide.steps} after it breaks, too."
            if (yield from self._in_fp32(moves=False)).holds:
                diagnosis.diverges(" With a learning rate of 0 it does not.")
                return
            # The window breaks without `what`, and what follows breaks with it.
            wider = ADVICE["overflow in fp32"]
            advice = dataclasses.replace(wider, text=f"{what}, which alone is not enough; and {wider.text}")
        if advice is not BF16 or self.amp.limits[1] <= torch.finfo(torch.float16).max:
            diagnosis.fixes.append(advice)

    # --- trials -------------------------------------------------------------------------------------------------------

    def lasts(self, scale: float, *, moves: bool = True) -> Search[Trial]:
        """For how many steps training is finite, compiled if it is; the learning rate is 0 unless it `moves`."""
        losses, has_slope = list[float](), False
        with self.trying() as most, self.amp.scaler.held_at(scale):
            most = min(most, STEPS)
            for group in [] if moves else [group for each in self._optimizers for group in each.param_groups]:
                group["lr"] = group["lr"] * 0.0
            for step in range(most):
                with self.replay(ahead=step, as_trained=True, steps=most > 1) as (rehearsal, window):
                    yield window
                self._optimizers |= rehearsal.optimizers
                if not all(self.agree(rehearsal.is_finite)):
                    told = rehearsal.losses
                    is_told = bool(told) or rehearsal.has_gradients  # of a loss, or of gradients that a recipe has
                    finite = is_told and all(bool(loss.isfinite().all()) for loss in told)
                    return Trial(step, False, all(self.agree(finite)), self.agree(losses)[0], scale=scale)
                losses.append(self.loss_of(rehearsal))
                has_slope = has_slope or any(self.agree(rehearsal.has_slope))
        if not has_slope and self.doctor.may_leave_autocast:
            with without_autocast(), in_32_bits(self.doctor.nets), self.replay() as (rehearsal, window):
                yield window
            if any(self.agree(rehearsal.has_slope and rehearsal.is_finite)):
                return Trial(0, False, True, is_flat=True, scale=scale)
        trial = Trial(most, True, True, self.agree(losses)[0], scale=scale)
        self._growing = trial if trial.grows else None
        return trial

    def loss_of(self, rehearsal: Rehearsal) -> float:
        """The largest loss of a window, also of a loop that scales it itself."""
        is_scaled = self.doctor.plain is not None and self.doctor.plain.scaler is not None
        largest = max((float(loss.float().sum()) for loss in rehearsal.losses), default=0.0)
        return largest / self.amp.scale if is_scaled else largest

    def _in_fp32(self, *, moves: bool = True) -> Search[Trial]:
        """As `lasts`, without autocast, at a loss scale of 1 or less. Tried once."""
        if moves not in self._wides:
            growing = self._growing
            with without_autocast():
                wide = self._wides[moves] = yield from self.lasts(self._scale, moves=moves)
            self._wide_loss = wide.losses[0] if wide.losses else math.nan
            self._growing = growing  # fp32 is no candidate
        return self._wides[moves]

    def _is_far_from_fp32(self, trial: Trial) -> Search[bool]:
        """Whether the first loss of a trial is less than half of that in fp32, or more than twice."""
        if not self.doctor.may_leave_autocast:
            return False
        there, here = self._wide_loss, trial.losses[0] if trial.losses else 0.0
        if there is None:
            with self.amp.scaler.held_at(self._scale), without_autocast(), self.replay() as (rehearsal, window):
                yield window
                has_loss = bool(rehearsal.losses)  # it may raise, if the program itself casts
                there = self._wide_loss = self.agree(self.loss_of(rehearsal) if has_loss else math.nan)[0]
        return math.isfinite(there) and not 0.5 * abs(there) <= abs(here) <= 2 * abs(there)

    def _first_module_at(self, scale: float, steps: int) -> Search[str | None]:
        """The module that breaks a trial after this many steps."""
        with self.trying(), self.amp.scaler.held_at(scale):
            for step in range(steps):
                with self.replay(ahead=step, as_trained=True, steps=True) as (_, window):
                    yield window
            trace, _ = yield from self.doctor.trace(functools.partial(self.replay, ahead=steps, steps=True))
        return self._module_of(trace)

    def _module_of(self, trace: Trace, others_than: Sequence[str] = ()) -> str | None:
        """The module of the first finding, of the first rank that has one."""
        found = self.agree(trace.first and trace.first.place.module)
        return next((module for module in found if module is not None and module not in others_than), None)

    def _at_smaller_scales(self, scale: float) -> Search[Trial]:
        """How long training is finite at the largest loss scale that fits."""
        trial = yield from self.lasts(scale)
        if self.amp.scaler.policy is None:
            return trial
        if not trial.steps and (fits := (yield from self.largest_scale(scale))) is not None:
            trial = yield from self.lasts(fits)
        for halvings in _HALVINGS if trial.steps else ():
            if trial.holds or not trial.has_finite_losses or trial.scale <= 1.0:
                break
            trial = yield from self.lasts(max(trial.scale / 2**halvings, 1.0))
        return trial

    def largest_scale(self, scale: float, least: int = 0) -> Search[float | None]:
        """The largest power of two below `scale`, from 2^least, at which the window is finite; None: there is none."""
        low, middle, high = least - 1, least, math.floor(math.log2(scale))  # 2^high is too large
        while low < middle < high:
            with self.amp.scaler.held_at(2.0**middle):
                fits = yield from self.doctor.is_finite(self.replay, as_trained=True)
            low, high = (middle, high) if fits else (low, middle)
            middle = (low + high) // 2
        return 2.0**low if low >= least else None

    def _recurs(self, finding: Finding) -> Search[bool]:
        trace, _ = yield from self.doctor.trace(self.replay)
        found = [(each.op, each.place, each.output.dtype) for each in trace.findings]
        return any(self.agree((finding.op, finding.place, finding.output.dtype) in found))

    def _casts_by_itself(self, finding: Finding) -> Search[bool]:
        """Whether an operation still runs in 16 bits, and overflows, in an island."""
        module = finding.place.module
        if module is None and self.doctor.plain is None:  # other code may not bear other dtypes
            return False
        with without_autocast() if module is None else self.doctor.as_islands([module]):
            return (yield from self._recurs(finding))

    # --- as settings --------------------------------------------------------------------------------------------------

    def _scale_fix(self, text: str, trial: Trial, **fields: float) -> Fix:
        override = " ".join(f"amp.{name}={value:.17g}" for name, value in fields.items())
        scale = fields.get("init_scale") or fields["max_scale"]
        python = f'Amp.named("{self.amp.config.name}"{"".join(f", {name}={x:.17g}" for name, x in fields.items())})'
        if self.doctor.plain and (scaler := self.doctor.plain.scaler):
            interval = scaler.get_growth_interval()
            more = f", growth_interval={interval}" if interval != 2000 else ""  # in which it was tried
            python = f'torch.amp.GradScaler("{self.amp.device.type}", init_scale={scale:.17g}{more})'
        return Fix("override", text, override, python, True, trial.steps)

    def island_fix(self, names: Sequence[str], scale: float | None = None, steps: int = 1) -> Fix:
        """A fix that keeps modules in fp32, and begins with a smaller loss scale."""
        text = f"compute in fp32: {listed(names)}"
        # An override replaces the list: include the existing islands.
        override, python = keep_fp32_override([*islands_of(self.doctor.nets), *names]), self._call(names)
        if scale is not None:
            text += "; and begin with a smaller loss scale"
            override += f" amp.init_scale={scale:g}"
            python += f"; {self._scale_fix('', Trial(1, True, True), init_scale=scale).python}"
        return Fix("override", text, override, python, True, steps)

    def _call(self, names: Sequence[str]) -> str:
        """These modules as islands, as a line of Python; networks that have names are called by them."""
        calls = []
        for net, _ in self.doctor.nets:
            dot = f"{net}." if net else ""
            inside = ["" if name == net else name.removeprefix(dot) for name in names if f"{name}.".startswith(dot)]
            patterns = f", {json.dumps(inside)}" if inside != [""] else ""
            calls += [f"keep_fp32({net or 'model'}{patterns})"] if inside else []
        return "; ".join(dict.fromkeys(calls))

    # --- islands ------------------------------------------------------------------------------------------------------

    def smallest_islands(self, first: str | None, *, is_too_small: bool = False) -> Search[list[str]]:
        """A smallest set of islands that makes the window finite; [] if there is none.

        First the module of the first finding, then also those found after it, then every module. From a sufficient set,
        halves are removed while the rest is sufficient (delta debugging: Zeller and Hildebrandt, "Simplifying and
        isolating failure-inducing input", 2002).
        """
        names: list[str] = [] if first is None else [first]
        enough = False
        for i in range(_MOST_ROUNDS if names else 0):
            with self.doctor.as_islands(names) as names:
                enough = (i > 0 or not is_too_small) and (yield from self.doctor.is_finite(self.replay))
                if enough:
                    break
                trace, _ = yield from self.doctor.trace(self.replay)
            following = self._module_of(trace, names)
            if following is None:
                break
            names = [*names, following]
        leaves = [name for module, name in self.doctor.names.items() if not any(module.children())]
        for whole in (leaves, [""] if "" in self.doctor.names.values() else []):
            if whole and not enough:
                with self.doctor.as_islands(whole) as names:
                    enough = yield from self.doctor.is_finite(self.replay)
        return (yield from self._minimise(names)) if enough else []

    def _minimise(self, names: list[str]) -> Search[list[str]]:
        parts = 2
        while len(names) > 1:
            size = math.ceil(len(names) / parts)
            for start in range(0, len(names), size):
                rest = names[:start] + names[start + size :]
                with self.doctor.as_islands(rest):
                    enough = yield from self.doctor.is_finite(self.replay)
                if enough:
                    names, parts = rest, max(parts - 1, 2)
                    break
            else:
                if size == 1:
                    break
                parts = min(parts * 2, len(names))
        return names
