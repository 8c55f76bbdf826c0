"""A forecast of fp16 for a run, from a few windows in bf16.

Autocast to bf16 casts where autocast to fp16 does, and bf16 has the range of fp32: nothing overflows, nothing vanishes,
and every number shows how large it would have been. So one look at a window says

- which modules overflow in fp16, and are to be kept in fp32;
- how large the loss scale may be;
- which gradients become 0 at that scale, and what becomes 0 after them.

Overflows are found by treatment: the module with the first numbers beyond fp16's becomes an island, and the window is
computed again, until nothing overflows. Underflow is found by imitation: the window is computed again while each new
small number is rounded as fp16 rounds it, so that what is made of those that become 0 is missing, too.

    python scripts/doctor.py forecast recipe=segmentation --check

For gradients of gradients this is an approximation: parts of them do not grow with the loss scale.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from amp_core.config.errors import ConfigError
from amp_core.doctor.diagnosis import keep_fp32_override
from amp_core.doctor.fixes import FixSearch
from amp_core.doctor.locate import Doctor, doctor_of
from amp_core.doctor.statistics import KINDS, LOST
from amp_core.lowp.islands import islands_of
from amp_core.run.replay import replay, rerun_step, restore, snapshot
from amp_core.step.observer import observing
from amp_tools.census import LARGEST, Census, Look, Numbers

if TYPE_CHECKING:
    from amp_core.run.loop import Loop

MOST_SCALE = 2.0**24
"""The cap of conf/amp/fp16.yaml."""
SHARE = 0.01
"""A loss of more than this share of a layer's non-zero numbers is reported."""
AT_RISK = 2.0
"""Bits of headroom: a factor of four is soon lost to a longer training or an odd batch."""
_MOST_ROUNDS, _MOST_LINES, _MOST_NAMED = 64, 30, 8

Windows = Generator[Any, None, Any]


# --- the result -------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """The numbers of one kind in one module, or those of one operation."""

    module: str | None
    """None: outside of the networks, such as in the loss."""
    module_class: str
    kind: str
    numbers: Numbers
    op: str = ""
    source: str = ""
    code: str = ""
    underflow: dict[str, float] = field(default_factory=dict)
    """Share of the non-zero numbers too small for fp16, by loss scale; on forward numbers it has no influence."""
    lost: dict[str, float] = field(default_factory=dict)
    """Share of the numbers that are not 0 in bf16 and 0 in fp16: too small themselves, or what these have made."""

    @property
    def is_gradient(self) -> bool:
        return self.kind.endswith("gradients")

    @property
    def headroom(self) -> float:
        return self.numbers.headroom

    @property
    def lost_float8(self) -> float:
        return self.numbers.lost_float8 / max(self.numbers.not_zero, 1)

    def to_dict(self) -> dict[str, Any]:
        operation = {"op": self.op, "source": self.source, "code": self.code} if self.op else {}
        shares = {"underflow": self.underflow} | ({"lost": self.lost} if self.lost else {})
        known = {"module": self.module, "module_class": self.module_class, "kind": self.kind}
        return known | operation | self.numbers.to_dict() | shares


@dataclass
class Forecast:
    """What fp16 is going to do to the first windows of a run."""

    windows: list[int]
    """Steps, counted from 1."""
    rows: list[Row]
    """By module, in the network's order, and kind; before any treatment."""
    operations: list[Row]
    order: list[str]
    """Names of all modules."""
    islands: list[str]
    """Modules that must compute in fp32, besides those that do."""
    kept: list[str]
    """Those that do already by amp.keep_fp32."""
    outside: list[str]
    """Lines that overflow and that no island reaches, such as those of the loss."""
    at_risk: list[str]
    """Modules with less than two bits of headroom."""
    largest_gradient: float
    """The largest 16-bit gradient, at loss scale 1, with the islands."""
    largest_scale: float
    """The largest power of two at which no gradient overflows in these windows."""
    init_scale: float
    """With one bit to spare. The next batch is another one: where its largest gradient is up to twice that of these, a
    scale that just fits loses a step, and half of it only one more bit of the smallest numbers."""
    reference: dict[tuple[str | None, str], Numbers] = field(default_factory=dict, repr=False)
    """The numbers in bf16, with the islands."""

    @property
    def override(self) -> str:
        """For the command line."""
        names = [*self.kept, *self.islands]
        islands = [keep_fp32_override(names)] if names else []
        return " ".join(["amp=fp16", *islands, f"amp.init_scale={self.init_scale:.10g}"])

    def underflowing(self, scale: float) -> list[Row]:
        """Gradients that lose more than 1 % at this scale, 1 or `init_scale`."""
        return [row for row in self.rows if row.is_gradient and row.lost.get(f"{scale:.10g}", 0.0) > SHARE]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; complete."""

        def named(rows: Iterable[Row], scale: float) -> list[dict[str, Any]]:
            return [{"module": r.module, "kind": r.kind, "lost": r.lost[f"{scale:.10g}"]} for r in rows]

        return {
            "windows": self.windows,
            "fp16": {
                "islands": self.islands,
                "outside": self.outside,
                "at_risk": self.at_risk,
                "largest_gradient": self.largest_gradient,
                "largest_scale": self.largest_scale,
                "init_scale": self.init_scale,
                "underflow_at_init_scale": named(self.underflowing(self.init_scale), self.init_scale),
                "underflow_at_scale_1": named(self.underflowing(1.0), 1.0),
                "override": self.override,
            },
            "layers": [row.to_dict() for row in self.rows],
            "operations": [row.to_dict() for row in self.operations],
        }

    def __str__(self) -> str:
        first, last = self.windows[0], self.windows[-1]
        scale = f"{self.init_scale:.10g}"
        lines = [
            f"fp16, forecast from steps {first} to {last} in bf16",
            "",
            f"  {'':<36} {'':<20} {'':>9} {'bits of':>8} {'becomes 0 in fp16':>21} {'in fp8':>8}",
            f"  {'layer':<36} {'numbers':<20} {'largest':>9} {'headroom':>8} {'unscaled':>9} {'at ' + scale:>11}",
        ]
        worst = sorted(self.rows, key=lambda row: row.headroom)
        lines += [_line(row, scale) for row in worst[:_MOST_LINES]]
        if len(worst) > _MOST_LINES:
            lines.append(f"  and {len(worst) - _MOST_LINES} more with more headroom")
        lines += ["", *self._conclusions()]
        return "\n".join(lines)

    def _conclusions(self) -> list[str]:
        lines = []
        if self.islands:
            named = ", ".join(name or "the whole network" for name in self.islands)
            lines += _wrapped("  overflow    ", f"keep in fp32: {named}")
        else:
            lines.append("  overflow    none: no number of the forward pass exceeds 65504")
        lines += [f"  overflow    not in a module that could be an island: {line}" for line in self.outside]
        if self.at_risk:
            lines += _wrapped("  at risk     ", f"less than {AT_RISK:g} bits of headroom: {', '.join(self.at_risk)}")
        lines.append(
            f"  loss scale  {self.init_scale:.10g}: the largest gradient is {self.largest_gradient:.3g}, "
            f"{self.largest_scale:.10g} just fits; one bit to spare"
        )
        for scale in sorted({self.init_scale, 1.0}, reverse=True):
            named = self._named(self.underflowing(scale))
            text = f"at scale {scale:.10g} gradients lose more than {SHARE:.0%} in: {named}"
            lines += _wrapped("  underflow   ", text)
        rows = [row for row in self.rows if row.lost_float8 > SHARE]
        named = self._named(rows)
        lines += _wrapped("  float8      ", f"with a scale for each tensor more than {SHARE:.0%} becomes 0 in: {named}")
        largest = max((row.numbers.amax for row in self.rows), default=0.0)
        lines += [f"  bf16        holds them all: the largest is {largest:.3g}", "", f"  -> {self.override}"]
        return lines

    @staticmethod
    def _named(rows: Sequence[Row]) -> str:
        names = [f"{row.module or '.'} ({row.kind.replace('_', ' ')})" for row in rows]
        more = len(names) - _MOST_NAMED
        return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "") or "no layer"


def _line(row: Row, scale: str) -> str:
    shares = row.lost if row.is_gradient and row.lost else row.underflow
    unscaled, scaled = (f"{shares[one]:.1%}" if one in shares else "" for one in ("1", scale))
    mark = ""
    if not row.is_gradient and row.headroom < AT_RISK:
        mark = "OVERFLOW" if row.headroom < 0 else "at risk"
    text = f"  {label(row.module, row.module_class):<36} {row.kind.replace('_', ' '):<20} {row.numbers.amax:>9.3g}"
    text += (
        f" {row.headroom:>8.1f} {unscaled:>9} {scaled if row.is_gradient else '':>11} {row.lost_float8:>8.1%}  {mark}"
    )
    return text.rstrip()


def label(module: str | None, module_class: str) -> str:
    if not module:
        return "(outside of the networks)" if module is None else "(the network itself)"
    # A number alone says little.
    text = f"{module} {module_class}" if module.rpartition(".")[2].isdigit() else module
    return text if len(text) <= 36 else f"…{text[-35:]}"


def _wrapped(head: str, text: str) -> list[str]:
    indents = {"initial_indent": head, "subsequent_indent": " " * len(head)}
    return textwrap.wrap(text, 118, **indents, break_long_words=False, break_on_hyphens=False)  # type: ignore[arg-type]


# --- the driver -------------------------------------------------------------------------------------------------------


class _Tally:
    """What several windows came to, by module and by operation."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str | None, str], Row] = {}
        self.operations: dict[tuple[Any, ...], Row] = {}
        self.largest_gradient = 0.0

    def add(self, census: Census) -> None:
        for look in census.looks:
            place, key = look.place, (look.module, look.kind)
            kind_of = place.kind if look.module == place.module else ""
            if key not in self.rows:
                self.rows[key] = Row(look.module, kind_of, look.kind, Numbers.none())
            row = self.rows[key]
            row.module_class = row.module_class or kind_of
            row.numbers.add(look.numbers)
            where = (*key, look.op, place.source)
            if where not in self.operations:
                empty = Numbers.none()
                self.operations[where] = Row(*key[:1], kind_of, look.kind, empty, look.op, place.source, place.code)
            self.operations[where].numbers.add(look.numbers)
            if row.is_gradient:
                self.largest_gradient = max(self.largest_gradient, look.numbers.amax)


def forecast_windows(loop: Loop, num_windows: int, found: list[Forecast]) -> Windows:
    """A driver through the next windows of a run in bf16. Appends to `found`.

    Each window is looked at with the weights that the ones before it have left. Everything is computed several times:
    to look, with each new set of islands, and with the small numbers missing.

    Args:
        loop: of a mode that autocasts to bfloat16, with one process.
    """
    if loop.amp.dtype is not torch.bfloat16 or loop.amp.weights:
        raise ConfigError(f"amp={loop.cfg.amp.name}: a forecast looks at numbers in autocast to bfloat16; use amp=bf16")
    doctor, start, first = doctor_of(loop), snapshot(loop), loop.step + 1
    kept = islands_of(doctor.nets) if loop.cfg.amp.keep_fp32 else []  # else the network's own, which stay
    plain, islands, outside = _Tally(), list[str](), list[str]()

    def overflows(step: int) -> Generator[Any, None, list[Look]]:
        return _first_overflows((yield from _look_at(loop, doctor, step)))

    def treat(step: int) -> Windows:
        census = yield from _look_at(loop, doctor, step)
        plain.add(census)
        before = list(islands)
        with doctor.as_islands(islands):
            found = _first_overflows(census) if not islands else (yield from overflows(step))
        for _ in range(_MOST_ROUNDS):
            names = dict.fromkeys(look.island for look in found if look.island is not None)
            with doctor.as_islands([*islands, *names]) as made:
                new = [name for name in made if name not in islands]
                if not new:
                    break
                islands.extend(new)
                found = yield from overflows(step)
        outside.extend(f"{look.place.source}    {look.place.code}".rstrip() for look in found)
        # One that overflowed because of another one may do without.
        for name in islands[len(before) :]:
            rest = [one for one in islands if one != name]
            with doctor.as_islands(rest):
                without = (yield from overflows(step)) if rest else found
            if rest and _places(without) <= _places(found):
                islands.remove(name)

    for _ in range(num_windows):
        yield from treat(loop.step + 1)
        with rerun_step(loop) as window:
            yield window
    reference = _Tally() if islands else plain
    with doctor.as_islands(islands):
        if islands:
            restore(loop, start)
            for _ in range(num_windows):
                yield from _train(loop, doctor, reference)
        largest, scale = _scales(reference.largest_gradient)
        imitations = {one: _Tally() for one in (1.0, scale)}
        for one, tally in imitations.items():
            restore(loop, start)
            for _ in range(num_windows):
                yield from _train(loop, doctor, tally, imitate=one)
    restore(loop, start)
    order = list(doctor.names.values())
    rows = sorted(plain.rows.values(), key=lambda row: (_rank(row.module, order), KINDS.index(row.kind)))
    operations = list(plain.operations.values())
    for row in [*rows, *operations]:
        for one in (1.0, scale) if row.is_gradient else (1.0,):
            row.underflow[f"{one:.10g}"] = row.numbers.lost(LOST / one)
    for row in rows:
        before = reference.rows.get((row.module, row.kind))
        for one, tally in imitations.items():
            after = tally.rows.get((row.module, row.kind))
            if before is not None and after is not None:
                row.lost[f"{one:.10g}"] = _lost(before.numbers, after.numbers)
    named = {row.module for row in rows if not row.is_gradient and 0 <= row.headroom < AT_RISK}
    found.append(
        Forecast(
            windows=list(range(first, first + num_windows)),
            rows=rows,
            operations=operations,
            order=order,
            islands=islands,
            kept=kept,
            outside=list(dict.fromkeys(outside)),
            at_risk=[name for name in order if name in named and name not in islands],
            largest_gradient=reference.largest_gradient,
            largest_scale=largest,
            init_scale=scale,
            reference={key: row.numbers for key, row in reference.rows.items()},
        )
    )


def _train(loop: Loop, doctor: Doctor, tally: _Tally, *, imitate: float | None = None) -> Windows:
    """Take the next step, and count."""
    census = Census(doctor.names, imitate=imitate)
    # What the optimizer computes is fp32, and no business of the census.
    with rerun_step(loop) as window, census.counting(loop.amp):
        yield window
    tally.add(census)


def _look_at(loop: Loop, doctor: Doctor, step: int) -> Generator[Any, None, Census]:
    with replay(loop, step) as (_, window):
        census = Census(doctor.names)
        with observing(loop.amp.observers, census), census.counting(loop.amp):
            yield window
    return census


def _first_overflows(census: Census) -> list[Look]:
    """The first overflows of the forward pass, or else those of the backward pass at a loss scale of 1."""
    overflows = [look for look in census.looks if look.is_first]
    return [look for look in overflows if not look.kind.endswith("gradients")] or overflows


def _places(overflows: list[Look]) -> set[tuple[str | None, str]]:
    return {(look.island, look.place.source) for look in overflows}


def _scales(largest_gradient: float) -> tuple[float, float]:
    """The largest power of two at which it does not overflow, and the same with one bit to spare."""
    if not largest_gradient:
        return MOST_SCALE, MOST_SCALE
    fits = 2.0 ** math.floor(math.log2(LARGEST / largest_gradient))
    return min(fits, MOST_SCALE), min(max(fits / 2, 1.0), MOST_SCALE)


def _lost(before: Numbers, after: Numbers) -> float:
    return max(after.zeros - before.zeros, 0) / max(before.not_zero, 1)


def _rank(module: str | None, order: list[str]) -> int:
    return order.index(module) if module is not None and module in order else len(order)


# --- was it right? ----------------------------------------------------------------------------------------------------


@dataclass
class Score:
    """What was forecast, what happened, and the share of each that is among the other; of nothing, 1."""

    forecast: list[str]
    measured: list[str]
    precision: float = field(init=False)
    recall: float = field(init=False)

    def __post_init__(self) -> None:
        self.missed = [one for one in self.measured if one not in self.forecast]
        self.wrong = [one for one in self.forecast if one not in self.measured]
        self.precision = 1 - len(self.wrong) / max(len(self.forecast), 1)
        self.recall = 1 - len(self.missed) / max(len(self.measured), 1)

    def __str__(self) -> str:
        text = f"precision {self.precision:.2f}, recall {self.recall:.2f} ({len(self.forecast)} forecast, "
        text += f"{len(self.measured)} measured, {len(self.forecast) - len(self.wrong)} in both)"
        text += f"; missed: {', '.join(self.missed[:3])}" if self.missed else ""
        return text + (f"; not needed: {', '.join(self.wrong[:3])}" if self.wrong else "")


@dataclass
class Check:
    """How right a forecast was, by the same windows in fp16."""

    islands: Score
    scale_forecast: float
    scale_measured: float
    """The largest power of two, up to 2^24, at which all of the windows are finite; 0: none."""
    underflow: Score
    """The gradients of layers that lose more than 1 % at the forecast scale."""

    to_dict = asdict
    """Plain values, for JSON."""

    def __str__(self) -> str:
        scales = f"{self.scale_forecast:.10g} forecast, {self.scale_measured:.10g} measured"
        islands, underflow = (
            _wrapped("  islands     ", str(self.islands)),
            _wrapped("  underflow   ", str(self.underflow)),
        )
        scale = f"  loss scale  the largest that fits: {scales}"
        return "\n".join(["the same steps in fp16", "", *islands, scale, *underflow])


def check_windows(loop: Loop, told: Forecast, found: list[Check]) -> Windows:
    """A driver through the windows of a forecast in fp16. Appends to `found`.

    Needed are the islands that the doctor finds, until the window is finite at a loss scale of 1.
    """
    doctor, start = doctor_of(loop), snapshot(loop)
    needed, scales, tally = list[str](), list[float](), _Tally()
    with ExitStack() as islands:
        for _ in told.windows:
            with loop.amp.scaler.held_at(1.0):
                for _ in range(_MOST_ROUNDS):
                    diagnosis = yield from doctor.diagnose(partial(replay, loop, loop.step + 1))
                    if diagnosis is None or not diagnosis.islands or diagnosis.cause == "position collision":
                        break
                    needed += islands.enter_context(doctor.as_islands(diagnosis.islands))
                with rerun_step(loop) as window:
                    yield window
        # Once more, with what later windows needed from the start, as the forecast has it.
        restore(loop, start)
        for _ in told.windows:
            fixes = FixSearch(doctor, partial(replay, loop, loop.step + 1), None)
            scales.append((yield from fixes.largest_scale(2 * MOST_SCALE)) or 0.0)
            with loop.amp.scaler.held_at(told.init_scale):
                yield from _train(loop, doctor, tally)
    measured = [
        key
        for key, row in tally.rows.items()
        if row.is_gradient and key in told.reference and _lost(told.reference[key], row.numbers) > SHARE
    ]
    forecast = [(row.module, row.kind) for row in told.underflowing(told.init_scale)]
    underflow = Score(*([f"{module or '.'} ({kind})" for module, kind in keys] for keys in (forecast, measured)))
    found.append(Check(Score(told.islands, needed), told.largest_scale, min(scales), underflow))
