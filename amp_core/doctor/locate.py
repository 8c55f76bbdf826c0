"""Rerun a window to find where it becomes non-finite, why, and what fixes it.

    doctor = Doctor(amp, model)
    diagnosis = doctor.locate(lambda: train_step(window), window)
    print(diagnosis)

A rerun is a rehearsed step: the window is computed as in training, `amp` and optimizers take no step, and no state
changes. `Loop` reruns the windows of a run in the same way, by passing them to the recipe again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amp_core.checkpoints.reading import Ranks
from amp_core.doctor.diagnosis import ADVICE, BF16, POLES, Cause, Diagnosis, Fix, advice_for, cause_of, explain
from amp_core.doctor.findings import Finding, Search
from amp_core.doctor.fixes import OUTSIDE, FixSearch, Replay, Trying
from amp_core.doctor.plain_loop import PlainLoop, RandomState, in_32_bits, in_one_thread, without_autocast
from amp_core.doctor.steps import after_the_step
from amp_core.doctor.trace import REMOTE, Trace
from amp_core.doctor.values import named_tensors
from amp_core.lowp.islands import as_islands, named_modules
from amp_core.memory.compiled import may_compile
from amp_core.step.amp import Amp
from amp_core.step.observer import observing
from amp_core.step.report import Rehearsal
from amp_core.tensors import has_16bit, is_sharded, unwrap

if TYPE_CHECKING:
    from amp_core.run.loop import Loop

Agree = Callable[[Any], list[Any]]
_LARGEST_NORM = torch.finfo(torch.float32).max ** 0.5
"""The largest number whose square fp32 holds, as a norm needs it."""


class Doctor:
    """Finds where a window becomes non-finite.

    Args:
        amp: the mode of training.
        nets: one network, or pairs of a name and a network, wrapped or not. The name prefixes those of the modules, as
            in `generator.blocks.0`; a single network has none.
        agree: in a process group, gathers a value from every rank on every rank. Reruns contain collectives, so all
            ranks must reach the same conclusions.
    """

    def __init__(
        self, amp: Amp, nets: nn.Module | Iterable[tuple[str, nn.Module]], *, agree: Agree | None = None
    ) -> None:
        self.amp = amp
        self.nets = [(name, unwrap(net)) for name, net in ([("", nets)] if isinstance(nets, nn.Module) else nets)]
        self.names = named_modules(self.nets)
        self._modules, self._attentions = defaultdict[str, list[nn.Module]](list), list[str]()
        for module, name in self.names.items():
            self._modules[name].append(module)
            self._attentions += [name] if isinstance(module, nn.MultiheadAttention) else []
        self.agree: Agree = agree or (lambda value: [value])
        self._random: RandomState | None = None
        self.plain: PlainLoop | None = None
        """The window, if it belongs to another program."""

    def remember(self) -> None:
        """Keep the random state of here, before a window, for a `locate` of that window after it. Copies 5 KB."""
        self._random = RandomState(self.amp.device, self._random)

    def locate(self, step: Callable[[], Any], batch: Any = ()) -> Diagnosis | None:
        """Diagnose a window of a plain training loop. Waits for the device at each operation.

        Weights, gradients, buffers, the batch, loss scale and the random states of torch, its generators, Python and
        numpy are afterwards as they were. Not put back: other state of the program, such as that of a schedule or an
        average; leave these out of `step`. A window begins without gradients. Copies weights, buffers and batch.

        Args:
            step: computes the window: forward, `amp.backward(loss)` or `loss.backward()`, `amp.step(optimizer)` or
                `optimizer.step()`, `zero_grad`. Called several times.
            batch: its tensors, nested in mappings, sequences and objects, are searched for non-finite numbers.

        Returns:
            None if the window is finite and no positions collide.

        Raises:
            RuntimeError: `step` reported no loss and no gradients, and no NaN has ended it early.
            TypeError: an optimizer's `step()` needs a closure or gradients.
        """
        self.plain = loop = PlainLoop(self.amp, self.nets, batch, self._random)
        try:
            diagnosis = loop.drive(self.diagnose(loop.replay, loop.trying), step)
        finally:
            self.plain = None
        if diagnosis is None:
            return None
        diagnosis.in_python = True
        if self._random is not None and diagnosis.cause in ("poisoned weight", "poisoned buffer"):
            diagnosis.why = diagnosis.why.replace("before the window began", "when the window was examined")
            diagnosis.why += " If its own step has made it so, examine the window before its step is taken."
        if (name := loop.steps_scaled) and ("overflow" in diagnosis.cause or "diverges" in diagnosis.cause):
            text = f"{name}.step() was given gradients that no scaler had unscaled: call scaler.step(optimizer)"
            diagnosis.fixes.insert(0, Fix("code", text))
        if loop.is_torchs:
            diagnosis.loss_scale *= loop.scaler is not None
            line = f'torch.autocast("{self.amp.device.type}", dtype=torch.bfloat16)'
            for i, fix in enumerate(diagnosis.fixes):
                if fix.override == BF16.override:
                    diagnosis.fixes[i] = dataclasses.replace(fix, python=line)
        return diagnosis

    def over_ranks(self, norms: Iterable[float]) -> float:
        """The norm of tensors of which each rank holds a shard with one of these norms, or all."""
        return (math.hypot if any(is_sharded(net) for _, net in self.nets) else max)(*norms, 0.0)

    def diagnose(self, replay: Replay, trying: Trying | None = None) -> Search[Diagnosis | None]:
        """Yield the window each time it has to be rerun; return the diagnosis.

        Args:
            replay: a context in which the window is computed once without changing state; gives the rehearsal and the
                window. Eagerly, but for `replay(as_trained=True)`.
            trying: as of `FixSearch`; None: fixes are tried for this window alone.
        """
        fixes = FixSearch(self, replay, trying)
        everywhere = yield from self._look(replay)
        clip = next((one["clip"] for one in everywhere if one["clip"] is not None), None)
        norm = self.over_ranks(one["grad_norm"] for one in everywhere)
        has_bad_tensors = any(one["first"] is not None and not one["first"].op for one in everywhere)
        if clip is not None and _LARGEST_NORM < norm < math.inf and not has_bad_tensors:
            return self._too_long(norm, everywhere, clip)
        if all(one["finite"] for one in everywhere):
            if may_compile() and not (yield from self.is_finite(replay, as_trained=True)):
                why = "The window is finite in eager code, and not as it is compiled here."
                return self.unlocated(why, "not found", OUTSIDE)
            found = (yield from self._collided(fixes, everywhere)) or (yield from self._left_over())
            return found or (yield from after_the_step(fixes))
        broken = [rank for rank, one in enumerate(everywhere) if one["first"] is not None]
        scale = self.amp.scale
        if not broken and norm < math.inf and all(one["is_loss_finite"] for one in everywhere):
            return self._too_long(norm, everywhere)
        if not broken:
            why = "The window is not finite, and no watched operation caused it: perhaps another thread or process did."
            return self.unlocated(why)
        here = everywhere[broken[0]]
        finding: Finding = here["first"]
        cause = cause_of(finding)
        diagnosis = self.describe(finding, cause, here["reached"])
        diagnosis.rank, diagnosis.ranks, diagnosis.num_ranks = broken[0], broken, len(everywhere)
        if here["before"] and not finding.op:
            diagnosis.why += f" So were {', '.join(here['before'][:8])}."
        may_be_rounding = cause in POLES or cause == "eps lost in 16 bits"
        if may_be_rounding and here["has_half"] and self.may_leave_autocast:
            is_fixed = yield from self._in_fp32(diagnosis, finding, replay)
            before, cause = cause, diagnosis.cause
            if not is_fixed and (cause != before or not has_16bit(self.nets)):  # an island does not end it
                diagnosis.fixes = [advice_for(cause, finding) or ADVICE[cause]]
                return diagnosis
        # Also the product of the loss and the scale may overflow.
        is_outside = finding.backward or finding.place.module is None  # also the gradient that a backward pass is given
        may_be_scale = cause == "overflow in fp32" or (is_outside and cause.startswith("overflow"))
        if may_be_scale and self.amp.scaler.policy:
            fits = yield from fixes.largest_scale(scale)
            if fits is not None:
                yield from fixes.too_large(diagnosis, scale, fits)
                yield from fixes.unless_it_diverges(diagnosis)
                return diagnosis
            if scale > 1:  # the overflow may hide what breaks at any scale
                with self.amp.scaler.held_at(1.0):
                    found = yield from self.diagnose(replay, trying)
                if found is not None and (found.op, found.source) != (diagnosis.op, diagnosis.source):
                    found.why += f" This is so at a loss scale of 1, too; at {scale:g} gradients overflow as well."
                    found.fixes = [dataclasses.replace(fix, verified=None, steps=1) for fix in found.fixes]
                    return found
        yield from fixes.add_fixes(diagnosis, finding)
        if cause == "bad input":  # a run is not healed of its data
            diagnosis.islands = []
            diagnosis.fixes.sort(key=lambda fix: fix.kind != "data")
        is_done = diagnosis.cause == "training diverges" or any(fix.verified for fix in diagnosis.fixes)
        if finding.backward and self.amp.scaler.policy and not is_done:
            yield from fixes.scale_down(diagnosis)
        yield from fixes.unless_it_diverges(diagnosis)
        return diagnosis

    def _look(self, replay: Replay) -> Search[list[dict[str, Any]]]:
        """What each rank finds in the window."""
        trace, rehearsal = yield from self.trace(replay)
        first, finite = trace.first, rehearsal.is_finite
        if first is None and not finite and trace.findings and trace.reached:
            # Autograd's work between operations is not seen, so the trail may be lost: take the first non-finite value.
            first = trace.findings[0] if set(trace.reached) != {REMOTE} else None
        if first is not None:
            first.follows_backward |= trace.is_loss_finite and 0 < trace.last_backward < first.operation
        clips = (b for b in trace.findings if "norm" in b.op and not b.backward and b.place.module is None)
        found = {
            "finite": finite,
            "first": first,
            "reached": list(dict.fromkeys(itertools.chain(*trace.reached.values()))) if first else [],
            "has_half": trace.has_half,
            "is_loss_finite": trace.is_loss_finite,
            "grad_norm": trace.grad_norm,
            "largest": trace.largest_gradient,
            "clip": next(clips, None),
            "before": [b.tensor for b in trace.findings if b.number in trace.reached and not b.op and b is not first],
            "collisions": trace.collisions[:1],
        }
        return self.agree(found)

    def tensors(self, window: Any) -> dict[str, Tensor]:
        batch = [getattr(micro, "batch", micro) for micro in window] if isinstance(window, list) else window
        return named_tensors(self.nets, batch)

    def trace(self, replay: Replay, *, in_steps: bool = False) -> Search[tuple[Trace, Rehearsal]]:
        """Watch the window; with `in_steps` the steps of optimizers, too."""
        with replay() as (rehearsal, window):
            trace = Trace(self.names, self.tensors(window), in_steps=in_steps)
            with trace, observing(self.amp.observers, trace), in_one_thread(self.names):
                yield window
        return trace, rehearsal

    def _in_fp32(self, diagnosis: Diagnosis, finding: Finding, replay: Replay) -> Search[bool]:
        """Whether the window is finite in fp32: then 16 bits made the zero, by autocast or the program's own casts."""
        with self.amp.scaler.held_at(min(diagnosis.loss_scale, 1.0)):
            with in_32_bits(self.nets) as wide, without_autocast(), in_one_thread(self.names):
                is_rounding = yield from self.is_finite(replay)
            is_fixed = is_rounding
            if is_rounding and any(self.agree(wide is not None and wide.was_used)):
                with without_autocast():
                    is_fixed = yield from self.is_finite(replay)
        is_eps = diagnosis.cause == "eps lost in 16 bits"
        if is_eps and not is_rounding:  # it would not have helped
            diagnosis.cause = "division or logarithm of zero"
        elif is_rounding and not is_eps:
            kinds: list[Cause] = ["underflow in 16 bits", "cancellation in 16 bits", "rounding in 16 bits"]
            diagnosis.cause = next(kind for kind in kinds if kind.split()[0] in {*dict(finding.marks), "rounding"})
        is_low = has_16bit(self.nets)
        if is_low and not is_rounding:  # or it raised
            return False
        diagnosis.why = f"{explain(finding, diagnosis.cause)} Without autocast the window is "
        diagnosis.why += "finite." if is_fixed else "not finite either"
        if not is_fixed:
            wider = "in 32 bits, its weights too," if is_low else "without the casts that the program itself makes"
            diagnosis.why += f"; {wider} it is." if is_rounding else "."
        return is_fixed

    def _too_long(self, norm: float, everywhere: list[dict[str, Any]], clip: Finding | None = None) -> Diagnosis:
        scaled = f", scaled by {self.amp.scale:g}" if self.amp.scaler.policy else ""
        largest, name = max(one["largest"] for one in everywhere)
        why = (
            f"Each gradient is finite, and the sum of their squares exceeds fp32, which ends at 3.4e38: their norm is "
            f"{norm:.3g}{scaled}, that of {name}, the largest, {largest:.3g}."
        )
        what = "the loss, or its scale," if scaled else "the loss"
        least = 2.0 ** math.ceil(math.log2(norm / _LARGEST_NORM))
        advice = f"if numbers grew in training, lower the learning rate (optimizer.lr); else divide {what} by {least:g}"
        found = self.unlocated(why, "gradient norm beyond fp32", Fix("code", f"{advice} or more"))
        if clip is not None:  # torch's own, by which the gradients are then divided
            found.source, found.code, found.op = clip.place.source, clip.place.code, clip.op
        return found

    def unlocated(self, why: str, cause: Cause = "not found", *fixes: Fix) -> Diagnosis:
        """A diagnosis without an operation."""
        found = Diagnosis(cause, why, amp=self.amp.config.name, loss_scale=self.amp.scale, phase="backward")
        found.fixes = [ADVICE[cause]] if cause in ADVICE else list(fixes)
        found.num_ranks = len(self.agree(None))
        return found

    def is_finite(self, replay: Replay, *, as_trained: bool = False) -> Search[bool]:
        """Whether the window is finite on all ranks."""
        with replay(as_trained=as_trained) as (rehearsal, window):
            yield window
        return all(self.agree(rehearsal.is_finite))

    def _collided(self, fixes: FixSearch, everywhere: list[dict[str, Any]]) -> Search[Diagnosis | None]:
        """Diagnose a finite window whose positions collide in 16 bits."""
        collisions = [(rank, each) for rank, one in enumerate(everywhere) for each in one["collisions"]]
        if not collisions:
            return None
        rank, collision = collisions[0]
        found, at = self.unlocated(collision.why, "position collision"), collision.place
        found = dataclasses.replace(found, phase="forward", op=collision.op, rank=rank, **at.fields)
        if at.module is not None:
            with self.as_islands([at.module]) as names:
                trace, _ = yield from self.trace(fixes.replay)
            if not any(self.agree(bool(trace.collisions))):
                found.islands = names
                found.fixes.insert(0, fixes.island_fix(names))
        return found

    def _left_over(self) -> Search[Diagnosis | None]:
        """Diagnose what a plain loop carries into a finite window on any rank: gradients to which it adds, moments."""
        if self.plain is None:
            return None
        adding = functools.partial(self.plain.replay, keep_grads=True)
        gradient, moment = (max(self.agree(bad)) for bad in (self.plain.bad_gradient(), self.plain.bad_moment()))
        if gradient and not (yield from self.is_finite(adding)):
            why = f"The window is finite, and it adds to gradients of an earlier one: that of {gradient} is not finite."
            return self.unlocated(why, "poisoned gradient")
        if moment:
            why = f"The window is finite, and the optimizer's {moment} is not: the next step writes it into weights."
            return self.unlocated(why, "poisoned moment")
        return None

    def describe(self, finding: Finding, cause: Cause, reached: Sequence[str] = ()) -> Diagnosis:
        """A diagnosis of a first non-finite value, without fixes."""
        late = "step" if finding.follows_backward else "forward"
        return Diagnosis(
            cause,
            explain(finding, cause),
            op=finding.op,
            **finding.place.fields,
            phase="backward" if finding.backward else late if finding.op else "before",
            inputs=finding.inputs,
            output=finding.output,
            reached=list(reached),
            amp=self.amp.config.name,
            loss_scale=self.amp.scale,
            samples=finding.rows,
            tensor=finding.tensor,
        )

    @property
    def may_leave_autocast(self) -> bool:
        """Whether to try windows without it. Networks in 16 bits may raise then: not finite in a plain loop."""
        return self.plain is not None or not has_16bit(self.nets)

    @property
    def can_make_islands(self) -> bool:
        """Whether modules can become fp32 islands."""
        return self.amp.can_make_islands(self.nets)

    @contextlib.contextmanager
    def as_islands(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Make islands inside the context. Yields the names of those that could be made."""
        with contextlib.ExitStack() as stack:
            made = []
            # An nn.MultiheadAttention uses its submodules' weights directly: it is the island, not they.
            whole = [next((each for each in self._attentions if f"{n}.".startswith(f"{each}.")), n) for n in names]
            for name in dict.fromkeys(whole):
                with contextlib.suppress(ValueError):  # a patched or compiled forward would bypass the island
                    made += [name] if stack.enter_context(as_islands(self._modules[name])) else []
            yield made


def doctor_of(loop: Loop) -> Doctor:
    """A doctor for the networks of a run."""
    env = loop.env
    nets = [*env.nets]
    nets += [(name, p) for name, p in loop.parts.items() if p in loop.nets and all(p is not net for _, net in nets)]
    ranks = Ranks(env.host_group)
    return Doctor(loop.amp, nets, agree=lambda value: ranks.each(lambda: value))
