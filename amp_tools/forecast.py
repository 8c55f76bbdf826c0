"""What fp16 would do to a run, told from a few windows of it in bf16.

Autocast to bf16 casts where autocast to fp16 does, and bf16 has the range of fp32: nothing overflows, nothing vanishes,
and every number shows how large it would have been. So one look at a window says

- which modules overflow in fp16, and are to be kept in fp32;
- how large the loss scale may be;
- which gradients become 0 at that scale, and what becomes 0 after them.

The first is found by treatment. A module whose numbers are the first beyond fp16's is made an island and the window
computed again, for its result, in fp32 from there on, may be too large for the cast in front of the next layer. The
last is found by imitation: the window is computed again while small numbers are rounded as fp16 does it as soon as they
are born, so that what is made of those that become 0 is missing, too.

    python scripts/doctor.py forecast recipe=segmentation --check

Of gradients of gradients this holds roughly: parts of them do not grow with the loss scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amp_core.config.errors import ConfigError
from amp_core.doctor.diagnosis import keep_fp32_override
from amp_core.doctor.locate import Doctor
from amp_core.doctor.statistics import KINDS, LOST
from amp_core.doctor.trace import _UNWRITTEN, HALF, Location, Trace, _is_view, _key, _last_node, _tensors, current_node
from amp_core.doctor.watch import doctor_of
from amp_core.memory.recompute import recomputed
from amp_core.run.replay import replay, rerun_step, restore, snapshot

if TYPE_CHECKING:
    from amp_core.run.loop import Loop
    from amp_core.step.amp import Amp

LARGEST = 65504.0
SMALLEST = 2.0**-24
MOST_SCALE = 2.0**24
"""The cap of conf/amp/fp16.yaml."""
SHARE = 0.01
"""Of the non-zero numbers of a layer; from here on losing them counts."""
AT_RISK = 2.0
"""Bits of headroom: a factor of four is soon lost to a longer training or an odd batch."""
_FLOAT8 = {False: (448.0, 2.0**-10), True: (57344.0, 2.0**-17)}
"""Forward e4m3, backward e5m2: the largest number, and what is rounded to 0."""
_MASK = 2.0**100
"""What is larger stands for infinity, such as bf16's `finfo.min` in an attention mask, and would be fp16's there."""
_WRITES = {"full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "where"}
"""A large number that the program writes down itself, as in an attention mask, is none that it has computed."""
_NORMAL = 2.0**-14
"""What is smaller has fewer digits in fp16, down to none."""
_ZERO, _NOT_FINITE, _BIAS = 1, 510, 127
_MOST_ROUNDS = 64

Windows = Generator[Any, None, Any]


# --- numbers ----------------------------------------------------------------------------------------------------------


@dataclass
class Numbers:
    """How large the numbers of one or several tensors are, exactly."""

    counts: Tensor
    """int64 [512] on the CPU: at 2 * (exponent + 127), and one further for the power of two itself; 0 is at 1."""
    amax: float = 0.0
    lost_float8: int = 0
    """How many that are not 0 become 0 in float8, each tensor scaled by its largest."""

    @classmethod
    def none(cls) -> Numbers:
        return cls(torch.zeros(512, dtype=torch.int64))

    @classmethod
    def of(cls, tensor: Tensor, *, backward: bool = False) -> Numbers:
        """Waits for the device."""
        values = tensor.detach().float().abs().flatten()
        bits = values.view(torch.int32)
        counts = torch.bincount(((bits >> 23) << 1) + ((bits & 0x7FFFFF) == 0), minlength=512).cpu()
        amax = torch.where(values < _MASK, values, 0.0).max().item() if len(values) else 0.0
        largest, lost = _FLOAT8[backward]
        return cls(counts, amax, int(((values > 0) & (values <= lost * (amax / largest))).sum()))

    def add(self, other: Numbers) -> None:
        self.counts = self.counts + other.counts
        self.amax = max(self.amax, other.amax)
        self.lost_float8 += other.lost_float8

    @property
    def zeros(self) -> int:
        return int(self.counts[_ZERO])

    @property
    def not_zero(self) -> int:
        return int(self.counts.sum()) - self.zeros

    @property
    def headroom(self) -> float:
        """Bits between the largest number and fp16's."""
        return math.log2(LARGEST / self.amax) if self.amax else math.inf

    def lost(self, limit: float) -> float:
        """The share of the non-zero numbers up to a power of two."""
        at = 2 * (round(math.log2(limit)) + _BIAS)
        lost = int(self.counts[:at].sum()) - self.zeros + int(self.counts[at + 1])
        return lost / max(self.not_zero, 1)

    @property
    def exponents(self) -> dict[int, float]:
        """The share of the non-zero numbers by exponent; -127 holds the subnormal ones of bf16."""
        pairs = self.counts.view(-1, 2).sum(1)
        pairs[0] -= self.zeros
        return {i - _BIAS: n / self.not_zero for i, n in enumerate(pairs[: _NOT_FINITE // 2].tolist()) if n}

    def to_dict(self) -> dict[str, Any]:
        total = int(self.counts.sum())
        return {
            "amax": self.amax,
            "headroom": self.headroom,
            "numbers": total,
            "zeros": self.zeros / max(total, 1),
            "not_finite": int(self.counts[_NOT_FINITE:].sum()),
            "exponents": {str(e): share for e, share in self.exponents.items()},
            "underflow_float8": self.lost_float8 / max(self.not_zero, 1),
            "subnormal_bf16": int(self.counts[0]) / max(self.not_zero, 1),
        }


@dataclass(eq=False)
class _Look:
    """The 16-bit result of one operation."""

    kind: str
    module: str | None
    place: Location
    op: str
    numbers: Numbers
    is_birth: bool
    """Too large for fp16, and made of numbers that are not."""
    culprit: str | None
    """The module that is to compute in fp32 then."""


class Census(Trace):
    """Measures every 16-bit result inside of `with census:`; waits for the device at each.

    Args:
        names: of modules.
        imitate: a loss scale: small numbers are rounded as in fp16 at this scale, many of them to 0. None: none are.
    """

    def __init__(self, names: Mapping[nn.Module, str], *, imitate: float | None = None) -> None:
        super().__init__(names, {})
        self.looks: list[_Look] = []
        self._imitate = imitate
        self._owners = {_key(p): name for module, name in names.items() for p in module.parameters(recurse=False)}
        self._casts: dict[int, str] = {}
        self._beyond: set[int] = set()
        self._last: dict[int, _Look] = {}
        self._cast_back: dict[int, _Look] = {}
        self._gradients: set[int] = set()

    @contextmanager
    def counting(self, amp: Amp) -> Iterator[None]:
        """`with census:`, and hears from `amp` which tensor is the first gradient."""

        def first(seed: Tensor) -> None:
            self._gradients.add(_key(seed))

        amp.beginnings.append(first)
        try:
            with self:
                yield
        finally:
            amp.beginnings.remove(first)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._pauses or "c10d" in func.namespace:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        node = current_node()
        place = self._place_of(node, name)
        inputs = list(_tensors((args, kwargs)))
        is_cast, owner = name == "_to_copy", None
        if is_cast and node is None:
            owner = self._owners.get(_key(inputs[0]))
            if owner is not None and inputs[0].requires_grad and torch.is_grad_enabled():
                self._casts.setdefault(_last_node(), owner)
        elif is_cast and node is not None and node._sequence_nr() in self._casts:
            # The gradient of a 16-bit weight on its way back to fp32.
            look = self._last.get(_key(inputs[0]))
            if look is not None:
                look.kind, look.module = "weight_gradients", self._casts[node._sequence_nr()]
        for tensor in inputs if node is not None else ():
            # A gradient too large for a cast back to 16 bits: what helps is that the number itself was never cast.
            if _key(tensor) in self._cast_back and place.module is not None:
                self._cast_back.pop(_key(tensor)).culprit = place.module
        is_after = any(_key(tensor) in self._beyond for tensor in inputs if tensor.dtype in HALF)
        # What a backward pass recomputes is no gradient: a loss scale does not make it larger.
        is_seed = name == "ones_like" and node is None and inputs[0].numel() == 1  # what `autograd.grad` begins with
        is_gradient = is_seed or any(_key(tensor) in self._gradients for tensor in inputs)
        result = func(*args, **kwargs)
        if _is_view(func):
            return result
        for tensor in _tensors(result):
            (self._gradients.add if is_gradient else self._gradients.discard)(_key(tensor))
        if name in _UNWRITTEN:
            return result
        for tensor in _tensors(result):
            if tensor.dtype in HALF and tensor.numel():
                # What is cast is known more exactly before.
                exact = inputs[0] if is_cast and inputs[0].is_floating_point() else tensor
                self._measure(name, place, tensor, exact, owner, node is not None and is_gradient, is_after)
        return result

    def _measure(
        self,
        name: str,
        place: Location,
        tensor: Tensor,
        exact: Tensor,
        owner: str | None,
        backward: bool,
        is_after: bool,
    ) -> None:
        if self._imitate is not None:
            scaled = exact.detach().float() * (self._imitate if backward else 1.0)
            rounded = scaled.half().float() / (self._imitate if backward else 1.0)
            exact = tensor.copy_(torch.where(scaled.abs() < _NORMAL, rounded, exact))
        is_beyond, key = bool((tensor.abs() > LARGEST).any()), _key(tensor)
        (self._beyond.add if is_beyond else self._beyond.discard)(key)
        if recomputed() is not None:  # was looked at in the forward pass
            self._last.pop(key, None)
            return
        numbers = Numbers.of(exact, backward=backward)
        kind = "activation_gradients" if backward else "weights" if owner is not None else "activations"
        is_birth = numbers.amax > LARGEST and not is_after and name not in _WRITES
        look = _Look(kind, place.module if owner is None else owner, place, name, numbers, is_birth, place.module)
        self.looks.append(look)
        self._last[key] = look
        self._cast_back.pop(key, None)
        if is_birth and backward and name == "_to_copy":
            self._cast_back[key] = look


# --- what is said -----------------------------------------------------------------------------------------------------


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
    """Those that do already, as amp.keep_fp32 has them."""
    outside: list[str]
    """Lines that overflow and that no island reaches, such as those of the loss."""
    at_risk: list[str]
    """Modules with less than two bits of headroom."""
    largest_gradient: float
    """Of all 16-bit gradients, at loss scale 1, with the islands."""
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
            lines += _wrapped(
                "  overflow    ", f"keep in fp32: {', '.join(n or 'the whole network' for n in self.islands)}"
            )
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


_MOST_LINES = 30
_MOST_NAMED = 8


def _line(row: Row, scale: str) -> str:
    shares = row.lost if row.is_gradient and row.lost else row.underflow
    unscaled, scaled = (f"{shares[one]:.1%}" if one in shares else "" for one in ("1", scale))
    mark = ""
    if not row.is_gradient and row.headroom < AT_RISK:
        mark = "OVERFLOW" if row.headroom < 0 else "at risk"
    text = f"  {_label(row.module, row.module_class):<36} {row.kind.replace('_', ' '):<20} {row.numbers.amax:>9.3g}"
    text += (
        f" {row.headroom:>8.1f} {unscaled:>9} {scaled if row.is_gradient else '':>11} {row.lost_float8:>8.1%}  {mark}"
    )
    return text.rstrip()


def _label(module: str | None, module_class: str) -> str:
    if not module:
        return "(outside of the networks)" if module is None else "(the network itself)"
    # A number alone says little.
    text = f"{module} {module_class}" if module.rpartition(".")[2].isdigit() else module
    return text if len(text) <= 36 else f"…{text[-35:]}"


def _wrapped(head: str, text: str, width: int = 118) -> list[str]:
    lines, line = [], head
    for word in text.split(" "):
        if len(line) + len(word) > width:
            lines.append(line.rstrip())
            line = " " * len(head)
        line += f"{word} "
    return [*lines, line.rstrip()]


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
    kept = doctor.island_names()
    plain, islands, outside = _Tally(), list[str](), list[str]()

    def births(step: int) -> Generator[Any, None, list[_Look]]:
        return _first_births((yield from _look_at(loop, doctor, step)))

    def treat(step: int) -> Windows:
        census = yield from _look_at(loop, doctor, step)
        plain.add(census)
        before = list(islands)
        with doctor._islands(islands):
            found = _first_births(census) if not islands else (yield from births(step))
        for _ in range(_MOST_ROUNDS):
            names = dict.fromkeys(look.culprit for look in found if look.culprit is not None)
            with doctor._islands([*islands, *names]) as made:
                new = [name for name in made if name not in islands]
                if not new:
                    break
                islands.extend(new)
                found = yield from births(step)
        outside.extend(f"{look.place.source}    {look.place.code}".rstrip() for look in found)
        # One that overflowed because of another one may do without.
        for name in islands[len(before) :]:
            rest = [one for one in islands if one != name]
            with doctor._islands(rest):
                without = (yield from births(step)) if rest else found
            if rest and _places(without) <= _places(found):
                islands.remove(name)

    for _ in range(num_windows):
        yield from treat(loop.step + 1)
        with rerun_step(loop) as window:
            yield window
    reference = _Tally() if islands else plain
    with doctor._islands(islands):
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
    with replay(loop, step) as (rehearsal, window):
        census = Census(doctor.names)
        rehearsal.watcher = census
        with census.counting(loop.amp):
            yield window
    return census


def _first_births(census: Census) -> list[_Look]:
    """Of the forward pass; where there is none, those of the backward pass at a loss scale of 1."""
    births = [look for look in census.looks if look.is_birth]
    return [look for look in births if not look.kind.endswith("gradients")] or births


def _places(births: list[_Look]) -> set[tuple[str | None, str]]:
    return {(look.culprit, look.place.source) for look in births}


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
    """What was forecast, and what happened."""

    forecast: list[str]
    measured: list[str]

    @property
    def precision(self) -> float:
        """The share of the forecast that happened; 1 when nothing was."""
        return self._share(self.forecast, self.measured)

    @property
    def recall(self) -> float:
        """The share of what happened that was forecast; 1 when nothing did."""
        return self._share(self.measured, self.forecast)

    @staticmethod
    def _share(these: Sequence[str], others: Sequence[str]) -> float:
        return sum(one in others for one in these) / len(these) if these else 1.0

    def __str__(self) -> str:
        both = sum(one in self.measured for one in self.forecast)
        text = f"precision {self.precision:.2f}, recall {self.recall:.2f}"
        text += f" ({len(self.forecast)} forecast, {len(self.measured)} measured, {both} in both)"
        missed = [one for one in self.measured if one not in self.forecast]
        wrong = [one for one in self.forecast if one not in self.measured]
        text += f"; missed: {', '.join(missed[:3])}" if missed else ""
        return text + (f"; not needed: {', '.join(wrong[:3])}" if wrong else "")


@dataclass
class Check:
    """How right a forecast was, by the same windows in fp16."""

    islands: Score
    scale_forecast: float
    scale_measured: float
    """The largest power of two, up to 2^24, at which all of the windows are finite; 0: none."""
    underflow: Score
    """Of layers' gradients that lose more than 1 % at the scale that was forecast."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        scores = {name: getattr(self, name) for name in ("islands", "underflow")}
        rates = {name: {"precision": one.precision, "recall": one.recall} for name, one in scores.items()}
        return {
            name: rates.get(name, {}) | value if name in rates else value
            for name, value in dataclasses.asdict(self).items()
        }

    def __str__(self) -> str:
        return "\n".join(
            [
                "the same steps in fp16",
                "",
                *_wrapped("  islands     ", str(self.islands)),
                f"  loss scale  the largest that fits: {self.scale_forecast:.10g} forecast, "
                f"{self.scale_measured:.10g} measured",
                *_wrapped("  underflow   ", str(self.underflow)),
            ]
        )


def check_windows(loop: Loop, told: Forecast, found: list[Check]) -> Windows:
    """A driver through the windows of a forecast in fp16. Appends to `found`.

    Islands that are needed are those that the doctor finds, by breaking operation after breaking operation, until the
    window is finite at a loss scale of 1. With them follow the largest scale and the zeros.
    """
    doctor, start = doctor_of(loop), snapshot(loop)
    needed, scales, tally = list[str](), list[float](), _Tally()
    with ExitStack() as islands:
        for _ in told.windows:
            with loop.amp.scaler.held_at(1.0):
                for _ in range(_MOST_ROUNDS):
                    diagnosis = yield from doctor.diagnose(lambda step=loop.step + 1: replay(loop, step))
                    if diagnosis is None or not diagnosis.islands or diagnosis.cause == "position collision":
                        break
                    needed += islands.enter_context(doctor._islands(diagnosis.islands))
                with rerun_step(loop) as window:
                    yield window
        # Once more, with what later windows needed from the start, as the forecast has it.
        restore(loop, start)
        for _ in told.windows:
            scales.append((yield from _largest_finite(loop, loop.step + 1)))
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


def _largest_finite(loop: Loop, step: int) -> Generator[Any, None, float]:
    low, high = -1, round(math.log2(MOST_SCALE)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        with loop.amp.scaler.held_at(2.0**middle), replay(loop, step) as (rehearsal, window):
            yield window
        if rehearsal.is_finite:
            low = middle
        else:
            high = middle
    return 2.0**low if low >= 0 else 0.0


# --- the picture ------------------------------------------------------------------------------------------------------


def draw(told: Forecast, path: str | Path) -> None:
    """A heat map: for each kind of numbers a panel, layers from top to bottom, exponents from left to right.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ConfigError("--picture needs matplotlib: pip install 'amp-recipes[data]'") from missing
    import numpy

    known = {row.module for row in told.rows}
    modules: list[str | None] = [name for name in told.order if name in known]
    modules += [None] if None in known else []
    exponents = [e for row in told.rows for e in row.numbers.exponents]
    low, high = max(min([*exponents, -26]) - 1, _PICTURE[0]), min(max([*exponents, 16]) + 1, _PICTURE[1])
    size = 8.0 if len(modules) <= 60 else 6.5
    figure = Figure(figsize=(15, 2.2 + len(modules) * size * 1.45 / 72), layout="constrained")
    panels = figure.subplots(1, len(KINDS), sharey=True)
    shift = math.log2(told.init_scale)
    for panel, kind in zip(panels, KINDS, strict=True):
        image = numpy.full((len(modules), high - low + 1), numpy.nan)
        for row in told.rows:
            for e, share in row.numbers.exponents.items() if row.kind == kind else ():
                image[modules.index(row.module), min(max(e, low), high) - low] = share
        for i in range(0, len(modules), 2):
            panel.axhspan(i - 0.5, i + 0.5, color="0.965", zorder=0, linewidth=0)
        edges = numpy.arange(low, high + 2), numpy.arange(len(modules) + 1) - 0.5
        mesh = panel.pcolormesh(*edges, image, cmap="YlGnBu", norm=LogNorm(1e-4, 1.0), zorder=1)
        # A loss scale moves gradients to the right, which is drawn as limits moved to the left.
        shifts = {shift: "-", 0.0: ":"} if kind.endswith("gradients") and shift else {0.0: "-"}
        for by, style in shifts.items():
            for limit in (-24 - by, 16 - by):
                panel.axvline(limit, color=_RED, linewidth=1.3, linestyle=style, zorder=2)
        by = next(iter(shifts))
        panel.axvspan(low, max(-24 - by, low), color=_BLUE, alpha=0.10, zorder=0.5, linewidth=0)
        panel.axvspan(min(16 - by, high + 1), high + 1, color=_RED, alpha=0.10, zorder=0.5, linewidth=0)
        panel.set_xlim(low, high + 1)
        panel.set_xlabel("exponent", fontsize=9)
        limits = f"—  fp16 at loss scale {told.init_scale:.0f},  ···  at 1" if by else "—  fp16's limits"
        panel.set_title(f"{kind.replace('_', ' ')}\n({limits})", fontsize=10)
        panel.tick_params(labelsize=8, length=2)
        panel.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    first = panels[0]
    first.set_ylim(len(modules) - 0.5, -0.5)
    classes = {row.module: row.module_class for row in told.rows if row.module_class}
    first.set_yticks(range(len(modules)), [_label(name, classes.get(name, "")) for name in modules], fontsize=size)
    for label, name in zip(first.get_yticklabels(), modules, strict=True):
        if name in told.islands:
            label.set(color=_RED, fontweight="bold")
    bar = figure.colorbar(
        mesh, ax=list(panels), fraction=0.015, pad=0.01, aspect=30, shrink=min(1.0, 30 / len(modules))
    )
    bar.set_label("share of the layer's numbers that are not 0", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    note = f", bold: to be kept in fp32 ({len(told.islands)})" if told.islands else ""
    steps = f"steps {told.windows[0]} to {told.windows[-1]}" if len(told.windows) > 1 else f"step {told.windows[0]}"
    figure.suptitle(f"16-bit numbers by layer and exponent, {steps} in bf16{note}", fontsize=11)
    figure.savefig(path, dpi=130)


_RED, _BLUE = "#c1121f", "#457b9d"
_PICTURE = (-70, 40)
"""Exponents at most; what lies beyond is drawn at the edge."""
