"""Faults that raise nothing: gradients and activations that became 0 in fp16, 16-bit weights that do not move, infinite
running variances, a loss scale at its floor, evaluations that are not finite.

The step of a log line is counted on the device, and the worst modules are read with the line. One above its limit is
computed again under a larger loss scale or without autocast: dead channels of a ReLU and unused rows of an embedding
are 0 there, too. Each kind is reported once in a run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from amp_core.checkpoints.plain_state import all_tensors
from amp_core.data.loading import checking_batches
from amp_core.doctor.diagnosis import ADVICE, advice_for, cause_of, keep_fp32_override, listed
from amp_core.doctor.findings import Search
from amp_core.doctor.fixes import FixSearch
from amp_core.doctor.locate import Doctor
from amp_core.doctor.plain_loop import without_autocast
from amp_core.doctor.trace import Trace
from amp_core.doctor.values import bad_rows, is_finite, named_tensors, spread
from amp_core.lowp.islands import as_islands, islands_of, named_modules
from amp_core.lowp.masters import is_low, master_params
from amp_core.memory.recompute import recomputed
from amp_core.run.loop import Loop
from amp_core.run.meters import Symptoms
from amp_core.run.replay import replay
from amp_core.step.observer import Observer, observing
from amp_core.tensors import HALF, local

logger = logging.getLogger("amp_recipes")

_LEAST = {"outputs": 2.0**-7, "gradients": 0.5, "weights": 0.5, "statistics": 0.0}
"""A module with a larger share of such numbers is examined."""
_GATES = tuple(f"torch.nn.modules.{name}" for name in ("activation", "container", "dropout", "pooling"))


class Silent(Observer):
    """Looks for silent faults of a run."""

    def __init__(self, loop: Loop, doctor: Doctor) -> None:
        self.loop, self.doctor = loop, doctor
        self.candidates: dict[str, str] = {}
        """Kind -> module, of the last log line."""
        self._names = list(doctor.names.values())
        self._places = {module: i for i, module in enumerate(doctor.names)}
        pairs = [pair for _, net in doctor.nets for pair in zip(net.parameters(), master_params(net), strict=True)]
        own: dict[Tensor, int] = {p: i for m, i in self._places.items() for p in m.parameters(recurse=False)}
        self._owner: dict[Tensor, int] = {side: own[p] for p, side in pairs}
        self._has_fp16 = loop.amp.limits[1] < torch.finfo(torch.bfloat16).max
        # Other updates of 16-bit weights are exact, or without bias.
        rounds = any(weights.update == "nearest" for weights in loop.amp.weights)
        self._low: dict[Tensor, Tensor] = {
            side: p for p, side in pairs if p.dtype in HALF and (rounds or not is_low(p))
        }
        self._cleared = torch.zeros(len(_LEAST), len(self._names), dtype=torch.float64, device=loop.env.device)
        self._table, self._counts = self._cleared, dict[tuple[str, int], list[tuple[Tensor, int]]]()
        self._should_move, self._before = dict[Tensor, Tensor](), dict[Tensor, Tensor]()
        self._since = loop.step, loop.amp.num_skipped.clone()
        self._where = ""
        self._tries = dict.fromkeys([*_LEAST, "floor", "evaluation"], 3)

    @contextlib.contextmanager
    def sampling(self, *, outputs: bool) -> Iterator[None]:
        """Count zeros of a window, on the device."""
        # A hook of modules would be copied with them, such as for a teacher.
        is_hooked = outputs and self._has_fp16
        self._counts = {}
        hooked = register_module_forward_hook(self._after_forward) if is_hooked else contextlib.nullcontext()
        with hooked, observing(self.loop.amp.observers, self):
            yield

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module in self._places and type(module).__module__ not in _GATES and recomputed() is None:
            for tensor in all_tensors(output):
                self._count("outputs", self._places[module], tensor)

    def on_gradients(self, params: Sequence[Tensor], grads: Sequence[Tensor], scaled: bool) -> None:
        for param, grad in zip(params, local(grads), strict=True):
            if self._has_fp16 and param in self._owner:
                self._count("gradients", self._owner[param], grad)
            if param in self._low:
                self._should_move[param] = _sample(grad) != 0

    def _count(self, kind: str, index: int, tensor: Tensor) -> None:
        if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel():
            # Some columns of a large tensor, all rows: a sample, a token or a weight's row as a whole becomes 0.
            part = tensor.detach()[..., :: 1 + (tensor.numel() >> 14)] if tensor.ndim else tensor.detach()
            number = torch.count_nonzero(part).to(self._cleared.device, non_blocking=True)
            self._counts.setdefault((kind, index), []).append((number, part.numel()))

    def facts(self) -> dict[str, Tensor]:
        """The worst module of each kind, to be read with the metrics."""
        self._table = self._shares(self._unmoved())
        worst = (self._table - self._cleared).max(1)
        return {f"{what} {kind}": worst[j][i] for j, what in enumerate("@#") for i, kind in enumerate(_LEAST)}

    def _shares(self, shares: dict[tuple[str, int], Tensor]) -> Tensor:
        """A row for each kind, a column for each module."""
        found, self._counts = self._counts, {}
        for at, each in found.items():
            shares[at] = 1 - torch.stack([n for n, _ in each]).sum() / sum(size for _, size in each)
        for module, i in self._places.items():
            if isinstance(variance := getattr(module, "running_var", None), Tensor):
                shares["statistics", i] = (~variance.isfinite()).double().mean()
        zero = self._cleared.new_zeros(())
        rows = [shares.get((kind, i), zero).to(zero) for kind in _LEAST for i in range(len(self._names))]
        table = torch.stack(rows).view_as(self._cleared)
        if self.loop.env.world_size > 1:
            dist.all_reduce(table)
            table /= self.loop.env.world_size
        return table

    def _unmoved(self) -> dict[tuple[str, int], Tensor]:
        """Shares of 16-bit weights that are those of the last log line, and should have moved."""
        loop, before, (step, skipped), wanted = self.loop, self._before, self._since, self._should_move
        shares: dict[tuple[str, int], Tensor] = {}
        if not self._low:
            return shares
        self._before = {p: _sample(low) for p, low in self._low.items()}
        self._should_move, self._since = {}, (loop.step, loop.amp.num_skipped.clone())
        moves = loop.step - step > loop.amp.num_skipped - skipped
        for schedule in loop.schedules.values():
            moves = moves & (schedule.last_rate() > 0)
        for p, want in wanted.items():
            if p in before:
                still = (before[p] == self._before[p]) & want & moves.to(want.device)
                share, at = still.sum() / want.sum().clamp(min=1), ("weights", self._owner[p])
                shares[at] = torch.maximum(share, shares.get(at, share))
        return shares

    def read(self, symptoms: Symptoms, facts: dict[str, float]) -> None:
        """Take its numbers out of the `facts` that were read back, and note what to examine."""
        worst = {kind: (facts.pop(f"@ {kind}"), self._names[int(facts.pop(f"# {kind}"))]) for kind in _LEAST}
        candidates = {kind: name for kind, (share, name) in worst.items() if share > _LEAST[kind]}
        policy = self.loop.amp.scaler.policy
        if policy and policy.dynamic and symptoms.scale <= policy.min_scale < policy.init_scale and not symptoms.streak:
            candidates["floor"] = ""  # with skipped steps the log says it
        self.candidates = {kind: name for kind, name in candidates.items() if self._tries[kind] > 0}

    def examine(self, step: int) -> Search[None]:
        """Yield windows to rerun; log what they prove."""
        candidates, self.candidates = self.candidates, {}
        looks = {"gradients": self._gradients, "outputs": self._outputs, "floor": self._floor}
        for kind, name in candidates.items():
            if kind == "gradients" and self._tries["outputs"] < 0:
                continue  # a consequence
            self._tries[kind] -= 1
            found = (yield from looks[kind](step, name)) if kind in looks else self._told(kind, name)
            if found is not None:
                self._warn(kind, step, found)
            else:  # not again before half of the rest is so, too
                row, share = list(_LEAST).index(kind), self._table[list(_LEAST).index(kind)]
                self._cleared[row] = torch.where(share > _LEAST[kind], (1 + share) / 2, self._cleared[row])

    def _warn(self, kind: str, step: int, text: str) -> None:
        self._tries[kind] = -1
        logger.warning("step %d: %s", step, text)

    def _told(self, kind: str, name: str) -> str:
        if kind == "statistics":
            return (
                f"running variances of {name} are not finite, its channels are dead in evaluation: the square of its "
                f"input exceeds fp32; scale it down, and reset_running_stats() or an earlier checkpoint (resume=...)"
            )
        how = {"o3": "amp=o2", "bf16_pure": "amp.update=stochastic"}.get(self.loop.cfg.amp.name, "keep them in fp32")
        return f"{name}: most 16-bit weights did not move since the last log line, lost to rounding; {how}"

    def _rerun(self, step: int, kind: str, scale: float) -> Search[dict[str, float]]:
        """Shares by module, in the order of computation; {}: the step is not finite."""
        amp = self.loop.amp
        with amp.scaler.held_at(scale), self.sampling(outputs=True), replay(self.loop, step) as (rehearsal, window):
            yield window
        order = self.doctor.agree([i for each, i in self._counts if each == kind])[0]
        row = self._shares({})[list(_LEAST).index(kind)].tolist()
        return {self._names[i]: row[i] for i in order} if all(self.doctor.agree(rehearsal.is_finite)) else {}

    def _gradients(self, step: int, name: str) -> Search[str | None]:
        amp, policy, tried = self.loop.amp, self.loop.amp.scaler.policy, dict[str, float]()
        scale, how = amp.scale, "" if policy else "amp=o2 "
        now = (yield from self._rerun(step, "gradients", scale)).get(name, 0.0)
        for larger in (scale * 2.0**k for k in (4, 8, 12, 16)):
            if not (shares := (yield from self._rerun(step, "gradients", larger))):
                break
            more = f" amp.max_scale={larger:.10g}" if policy and larger > policy.max_scale else ""
            tried[f"{how}amp.init_scale={larger:.10g}{more}"] = shares[name]
        if not tried and self.doctor.can_make_islands:
            with self.doctor.as_islands([name]) as names:
                tried[self._islands(names)] = (yield from self._rerun(step, "gradients", scale)).get(name, 1.0)
        least = min(tried.values(), default=1.0)
        if 1 - now >= (1 - least) / 2:
            return None  # at most half of what is not 0 was lost
        how = next(how for how, share in tried.items() if share <= least + 0.01)
        return (
            f"{now:.1%} of the gradients of {name} are 0 at loss scale {scale:g}, {tried[how]:.1%} with {how} (tried)"
        )

    def _outputs(self, step: int, name: str) -> Search[str | None]:
        if not self.doctor.can_make_islands:
            return None
        scale, least = self.loop.amp.scale, _LEAST["outputs"]
        half = yield from self._rerun(step, "outputs", scale)
        with without_autocast():
            full = yield from self._rerun(step, "outputs", min(scale, 1.0))
        lost = {each: share for each, share in half.items() if each in full and share > full[each] + least}
        for each, share in lost.items():
            with self.doctor.as_islands([each]) as names:
                fixed = yield from self._rerun(step, "outputs", scale)
                how = f"{share:.1%} of the outputs of {each} are 0 in fp16 only; {self._islands(names)} (tried)"
            if fixed and all(fixed[other] <= full[other] + least for other in lost):
                return how
        each = next(iter(lost), None)
        return each and f"{lost[each]:.1%} of the outputs of {each} are 0 in fp16 only; amp=bf16"

    def _floor(self, step: int, name: str) -> Search[str | None]:
        policy, names = self.loop.amp.scaler.policy, list[str]()
        assert policy is not None
        run = functools.partial(replay, self.loop, step)
        high = min(policy.init_scale, policy.max_scale)
        with self.loop.amp.scaler.held_at(high):
            if self.doctor.can_make_islands and not (yield from self.doctor.is_finite(run)):
                names = yield from FixSearch(self.doctor, run, None).smallest_islands(None)
        how = f"{self._islands(names)} (tried at loss scale {high:g})" if names else "amp=bf16"
        return f"the loss scale is at its floor amp.min_scale={policy.min_scale:g}, small gradients may be 0; {how}"

    def _islands(self, names: list[str]) -> str:
        return keep_fp32_override(list(dict.fromkeys([*islands_of(self.doctor.nets), *names])))

    def evaluated(self, step: int, metrics: dict[str, float]) -> str:
        """Where metrics that are not finite became so, in an evaluation with every operation watched. On every rank."""
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad and self._tries["evaluation"] >= 0:
            self._where = self._in_evaluation()
            self._warn("evaluation", step, f"{', '.join(bad)} of the evaluation is not finite: {self._where}")
        return self._where if bad else ""

    def _in_evaluation(self) -> str:
        loop, doctor = self.loop, self.doctor
        averages = [("", loop.ema.model)] if loop.ema else []
        names = doctor.names | named_modules(averages)
        tensors = named_tensors([*doctor.nets, *averages], ())
        if spoilt := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
            return f"{', '.join(spoilt[:3])} is not finite"
        samples = list[int]()

        def look_at(number: int, rows: slice, batch: Any) -> None:
            for tensor in named_tensors((), batch).values():
                samples.extend(rows.start + row for row in bad_rows(tensor) if len(tensor) == rows.stop - rows.start)

        trace = Trace(names, named_tensors(doctor.nets, ()))
        with loop.env.eagerly(), checking_batches(look_at), trace:
            loop.evaluation.metrics_of_nets()
        findings = [finding for findings in doctor.agree(trace.findings[:1]) for finding in findings]
        if not findings:
            bad = sorted({sample for each in doctor.agree(samples) for sample in each})
            if not bad:
                return "no operation that was watched made it of finite numbers"
            return f"samples {listed(bad)} of the evaluation data. Try: {ADVICE['bad input'].text}"
        diagnosis = doctor.describe(findings[0], cause_of(findings[0]))
        modules = [module for module, name in names.items() if name and name == diagnosis.module]
        text = f"{diagnosis.headline.partition(': ')[2]}. {diagnosis.why}"
        with loop.env.eagerly(), as_islands(modules if doctor.can_make_islands else []) as made:
            with contextlib.suppress(RuntimeError):  # code with explicit casts may then meet other dtypes
                if made and all(map(math.isfinite, loop.evaluation.metrics_of_nets().values())):
                    return f"{text} Try: {self._islands([diagnosis.module or ''])} (tried)"
        advice = advice_for(diagnosis.cause, findings[0])
        return text + (f" Try: {advice.text}" if advice is not None else "")


def _sample(tensor: Tensor) -> Tensor:
    """A copy of at most 4096 numbers of this rank, from all over the tensor."""
    return spread(local([tensor])[0].detach(), 2**12).clone()
