"""Why a run is not faster: what its steps spend their time on, and what to do about each share of it.

The windows of a run are computed three times: as in training, for the time of whole steps; under torch's profiler, for
the time of each operation; and watched by a dispatch mode that knows modules and source lines. The last two are the
same windows, so their operations are matched in order, and the slow dispatch mode is in none of the times.

    report = advise(train_step, model, amp, optimizers=[optimizer])       # a plain loop
    print(report)

What is found are pure functions of the `Profile`, the `FINDERS`. Shares are those of a whole step, with the wait for
its data. They overlap: a cast may also be a small operator, so they do not add up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import statistics
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from amp_core.doctor.locate import Doctor
from amp_core.doctor.trace import Place, Trace, _is_view, _key, _tensors, named_tensors
from amp_core.float8 import MULTIPLE, float8_is_emulated
from amp_core.lint import find_unsafe
from amp_core.precision import Amp

if TYPE_CHECKING:
    from amp_core.loop import Loop

HALF = ("float16", "bfloat16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_MULTIPLIED = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0}
"""Products of matrices, and which of their inputs is the first factor."""
_PRODUCTS = {*_MULTIPLIED, "convolution", "convolution_backward", "mv", "addmv", "mkldnn_rnn_layer", "_cudnn_rnn"}
_POINTWISE = {"native_dropout", "native_dropout_backward", "fill_", "zero_", "zeros_like", "ones_like"}
"""Those without torch's tag that move as many bytes as they compute numbers."""
_WITHOUT_WORK = (
    "empty",
    "new_empty",
    "set_",
    "resize_",
    "detach",
    "lift_fresh",
    "_local_scalar_dense",
    "record_stream",
)
_WAITS = {"_local_scalar_dense", "equal", "nonzero", "_unique2", "masked_select"}
"""Hand the host a number, or a size that depends on one."""

_SMALL = {"cpu": 10e-6, "cuda": 5e-6}
"""Seconds: about what starting an operation takes, so that a shorter one is mostly overhead."""
_NARROW = 64
"""Smaller products are bound by memory traffic, and their sizes usually given: colours, classes, heads."""
_HARMLESS = ("perf.", "optimizer.fused=", "data.num_workers=")
"""Overrides that do not change what is computed."""
_MARK = "amp_recipes::window"
_NUM_WARM_UPS = 3
_PASSED = 4
"""Events of other operations that may lie before the next one, such as the autocast of a product around its casts."""
_FAR = 100  # events between two operations of one thread; backward nodes and composite operations lie between


# --- what is known of a run -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation took or gave."""

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    num_bytes: int = 0
    key: int = 0
    """The same for the same storage, as long as it lives."""
    weight: str = ""
    """Its name, if it is a weight."""
    is_nchw: bool = False
    """4-d and not in the order of channels_last."""


@dataclass
class Op:
    """An operation of a window, below autograd and autocast."""

    name: str
    """As in torch.ops, with its namespace: aten::addmm."""
    place: Place
    backward: bool = False
    inputs: list[Operand] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)
    is_view: bool = False
    """Computes nothing: a view, or memory that is not written."""
    is_pointwise: bool = False
    is_blocking: bool = False
    """A copy to or from the host that was not asked to go on in the background."""
    convolution: tuple[Any, ...] = ()
    """Stride, padding, dilation, whether transposed, output padding, groups."""
    seconds: float = 0.0
    """On a GPU those of its kernels."""
    host_seconds: float = 0.0
    num_kernels: int = 0
    optimizer: str = ""
    """The optimizer in whose step it lies."""

    @property
    def short(self) -> str:
        return self.name.split("::")[-1]

    @property
    def is_product(self) -> bool:
        return self.short in _PRODUCTS or "attention" in self.short

    @property
    def is_cast(self) -> bool:
        """From one floating-point type to another."""
        if self.short not in ("_to_copy", "copy_") or not self.inputs or not self.outputs:
            return False
        pair = {self.inputs[-1].dtype, self.outputs[0].dtype}
        return len(pair) == 2 and all("float" in dtype for dtype in pair)

    @property
    def num_bytes(self) -> int:
        """Read and written, once each."""
        return sum(each.num_bytes for each in (*self.inputs, *self.outputs))


@dataclass(frozen=True)
class Units:
    """How a device multiplies in the type of the mode."""

    device: str
    emulated: str = ""
    """Why its 16-bit products are no fast ones, in words; empty: they are."""
    speedup: float = 1.0
    """Of a large product over the same in fp32, measured."""
    balance: float | None = None
    """Operations per byte of memory traffic at which large products and memory take equally long, measured."""


@dataclass(frozen=True)
class OptimizerFacts:
    """What is known of an optimizer."""

    name: str
    is_fused: bool
    has_fused: bool
    is_loop: bool = False
    """One weight at a time, in Python."""
    seconds: float = 0.0
    """In all profiled windows."""


@dataclass
class Profile:
    """What was measured of some windows of a run."""

    ops: list[Op]
    num_steps: int
    """That `ops` are of."""
    profiled: float
    """Seconds of these steps under the profiler, without the wait for data."""
    steps: list[float]
    """Seconds of steps without profiler, without the wait for data."""
    loads: list[float]
    """Seconds that these waited for data."""
    amp: str = "fp32"
    dtype: str = "float32"
    """What the mode multiplies in."""
    device: str = "cpu"
    units: Units | None = None
    optimizers: list[OptimizerFacts] = field(default_factory=list)
    matched: float = 1.0
    """Share of the operations that were found in the profile."""
    loading: float | None = None
    """Seconds that this process takes to make the data of one step; None: there is no loader."""
    num_workers: int = 0
    num_cores: int = 1
    batch_size: int | None = None
    accumulation: int = 1
    channels_last: bool = False
    """Whether the setting is on."""
    layouts: dict[Any, tuple[float, float]] = field(default_factory=dict)
    """Seconds of some convolutions, by `_layout_key`: as they are, and in channels_last."""
    cadences: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By the name of the setting: every so many steps so many seconds."""
    fp32_step: float | None = None
    """Seconds of a step of the same run in fp32."""
    hints: list[Finding] = field(default_factory=list)

    @property
    def compute(self) -> float:
        """Seconds of a step without the wait for its data. Median."""
        return statistics.median(self.steps)

    @property
    def wait(self) -> float:
        """Seconds that a step waits for its data."""
        # Workers deliver in bursts, of which only the mean tells. One process does the same each time.
        return statistics.mean(self.loads) if self.num_workers else statistics.median(self.loads)

    @property
    def step(self) -> float:
        """Seconds of a whole step."""
        return self.compute + self.wait

    @property
    def busy(self) -> float:
        """Share of the time that is not the wait for data."""
        return self.compute / max(self.step, 1e-12)

    def share(self, seconds: float) -> float:
        """Of all time, for seconds within the profiled windows."""
        return min(seconds / max(self.profiled, 1e-12), 1.0) * self.busy

    def share_of(self, ops: Iterable[Op]) -> float:
        return self.share(sum(op.seconds for op in ops))

    @property
    def work(self) -> list[Op]:
        """Without views and memory that is not written."""
        return [op for op in self.ops if not op.is_view]

    def breakdown(self) -> dict[str, float]:
        """Where the time goes; adds up to 1."""
        parts = {"waiting for data": 1 - self.busy}
        own = [op for op in self.ops if not op.optimizer]
        parts["products"] = self.share_of(op for op in own if op.is_product)
        parts["casts"] = self.share_of(op for op in own if op.is_cast)
        parts["other pointwise"] = self.share_of(op for op in own if op.is_pointwise and not op.is_cast)
        parts["optimizer"] = self.share(sum(each.seconds for each in self.optimizers))
        rest = [op for op in own if not (op.is_product or op.is_cast or op.is_pointwise)]
        parts["other operations"] = self.share_of(rest)
        idle = "idle between kernels" if self.device == "cuda" else "between operations"
        parts[idle] = max(1 - sum(parts.values()), 0.0)
        return parts

    @property
    def between(self) -> float:
        """Share of the time in which no operation runs: Python, autograd, dispatch; on a GPU, in which it idles."""
        return list(self.breakdown().values())[-1]


@dataclass(frozen=True)
class Finding:
    """Something that costs time, or that is not right in 16 bits."""

    title: str
    share: float | None
    """Of a step's time that is at stake, at most; None: not known here, or no matter of time."""
    evidence: str
    place: str
    advice: str
    override: str | None = None
    tried: tuple[float, float] | None = None
    """Seconds of a step without the override, and with it."""

    def __str__(self) -> str:
        share = "" if self.share is None else f"up to {self.share:.0%} of a step: "
        lines = textwrap.wrap(f"{share}{self.title}", 114)
        for key, text in (("measured", self.evidence), ("place", self.place), ("advice", self.advice)):
            wrapped = textwrap.wrap(text, 102, break_long_words=False, break_on_hyphens=False)
            lines += [f"  {key if i == 0 else '':<10}{line}" for i, line in enumerate(wrapped)]
        if self.override:
            lines.append(f"  {'':<10}{self.override}")
        if self.tried:
            before, after = self.tried
            lines.append(f"  {'tried':<10}a step takes {_ms(after)} with it, and {_ms(before)} without")
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """What was found, the largest share first, and what of it was measured."""

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
        head = f"{self.what}: a step takes {_ms(p.step)} ({len(p.steps)} measured: computing takes from"
        head += f" {_ms(min(p.steps))} to {_ms(max(p.steps))}; {_ms(per_step)} under the profiler)"
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
    """Everything that is found in a profile."""
    found = [finding for finder in FINDERS for finding in finder(profile)]
    found.sort(key=lambda finding: -1.0 if finding.share is None else finding.share, reverse=True)
    return Report(what, profile, found, profile.hints)


def try_out(report: Report, seconds: Callable[[list[str]], float | None]) -> Report:
    """The report with what came of the overrides that leave the training as it is.

    A share is a bound: what one layer gains in another layout, its neighbours may lose.

    Args:
        seconds: of a step with these overrides; None when it could not be measured.
    """
    harmless = [f for f in report.findings if f.override and f.override.startswith(_HARMLESS)]
    before = seconds([]) if harmless else None
    after = {f.override: seconds([f.override]) for f in harmless if f.override}
    findings = []
    for finding in report.findings:
        measured = after.get(finding.override or "")
        pair = None if before is None or measured is None else (before, measured)
        findings.append(dataclasses.replace(finding, tried=pair))
    return dataclasses.replace(report, findings=findings)


# --- what is found ----------------------------------------------------------------------------------------------------


def find_slow_units(p: Profile) -> list[Finding]:
    """A device without units for the type of the mode, where it costs more than fp32."""
    if p.units is None or p.dtype == "float32":
        return []
    unit = p.units
    if not unit.emulated and unit.speedup >= 0.8:
        return []
    low = [op for op in p.ops if op.is_product and op.inputs and op.inputs[0].dtype != "float32"]
    evidence = f"a large product in {p.dtype} runs at {unit.speedup:.2f} times the speed of fp32"
    evidence += f"; products in {p.dtype} take {p.share_of(low):.0%} of a step"
    has_bf16 = p.dtype == "bfloat16" and unit.speedup > 1  # beneath emulated float8
    if p.dtype == "float16" and p.device == "cpu":
        has_bf16 = _cpu_has("bfloat16")
    other = "amp=bf16" if has_bf16 else "amp=fp32"
    if p.device == "cuda" and p.dtype == "bfloat16" and not has_bf16:
        other = "amp=fp16"
    title = f"{unit.device} {unit.emulated or f'is slower in {p.dtype} than in fp32'}"
    return [
        Finding(
            title,
            p.share_of(low) * (1 - unit.speedup) if unit.speedup < 1 else None,
            evidence,
            _place(low) if low else "everywhere",
            "use a mode that this device has units for",
            other,
        )
    ]


def find_odd_sizes(p: Profile) -> list[Finding]:
    """Sizes of 16-bit products that are no multiples of what the units take. Source as in `amp_core.lint.find_slow`."""
    products = [op for op in p.ops if op.is_product]
    total = sum(op.seconds for op in products)
    operations = sum(flops(op) for op in products)
    odd: dict[tuple[str, int], list[Op]] = defaultdict(list)
    for op in products:
        dtype = op.inputs[0].dtype if op.inputs else ""
        multiple = MULTIPLE if dtype in FLOAT8 else 8
        if dtype not in (*HALF, *FLOAT8):
            continue
        for size in sorted({size for size in sizes(op) if size >= _NARROW and size % multiple}):
            odd[_name(op.place), size].append(op)
    found = []
    for (name, size), ops in odd.items():
        dtype = ops[0].inputs[0].dtype
        multiple = MULTIPLE if dtype in FLOAT8 else 8
        padded = size + -size % multiple
        rows = p.batch_size is not None and size % p.batch_size == 0
        advice = f"pad {size} to {padded}" + (", by another batch size or length of the samples" if rows else "")
        seconds = sum(op.seconds for op in ops)
        evidence = (
            f"{len(ops) / p.num_steps:g} products per step in {dtype}, such as {_shapes(ops[0])}: "
            f"{seconds / max(total, 1e-12):.0%} of the time and {sum(map(flops, ops)) / max(operations, 1):.0%} of the "
            f"operations of all products"
        )
        if p.device != "cuda":
            evidence += "; it matters on a GPU, a CPU pads by itself"
        share = p.share(seconds) if p.device == "cuda" else None
        title = f"the size {size} in {name} is no multiple of {multiple}, which Tensor Cores want"
        override = f"batch_size={padded}" if size == p.batch_size else None
        found.append(Finding(title, share, evidence, _place(ops), advice, override))
    # The rest is told by the first few: they are sorted by what they cost.
    cost = {id(finding): sum(op.seconds for op in ops) for finding, ops in zip(found, odd.values(), strict=True)}
    return sorted(found, key=lambda finding: cost[id(finding)], reverse=True)[:5]


def find_casts(p: Profile) -> list[Finding]:
    """Time in copies from one floating-point type to another."""
    casts = [op for op in p.ops if op.is_cast]
    share = p.share_of(casts)
    if share < 0.05:
        return []
    forward = [op for op in casts if any(each.weight for each in op.inputs)]
    # Their gradients are cast back at the same place.
    places = {(op.place, op.inputs[-1].shape) for op in forward}
    of_weights = forward + [op for op in casts if op.backward and (op.place, op.inputs[-1].shape) in places]
    part = sum(op.seconds for op in of_weights) / max(sum(op.seconds for op in casts), 1e-12)
    worst = "; ".join(f"{where}: {p.share_of(ops):.1%}" for where, ops in _groups(casts)[:3])
    advice = []
    if part > 0.3:
        advice.append(
            "weights are cast once per micro-batch: fewer and larger micro-batches, or a mode whose weights are "
            "16-bit (amp=o2, amp=bf16_pure)"
        )
    if part < 0.7:
        advice.append("activations change their type where 16-bit and fp32 operations alternate: fewer fp32 islands")
    override = None
    if part > 0.3 and p.batch_size and p.accumulation % 2 == 0:
        override = f"batch_size={2 * p.batch_size} accumulation={p.accumulation // 2}"
    return [
        Finding(
            "casts from one floating-point type to another",
            share,
            f"{len(casts) / p.num_steps:g} casts per step, {part:.0%} of their time for weights. Most of it in {worst}",
            _place(casts),
            "; ".join(advice),
            override,
        )
    ]


def find_small_operators(p: Profile) -> list[Finding]:
    """Steps that are made of operations so short that starting them is what takes the time."""
    work, bound = [op for op in p.work if p.device == "cpu" or op.num_kernels], _SMALL[p.device]
    if not work:
        return []
    small = [op for op in work if op.seconds / max(op.num_kernels, 1) < bound]
    at_stake = p.share_of(small) + p.between
    if len(small) < len(work) / 2 or len(small) < 20 * p.num_steps or at_stake < 0.3:
        return []
    what = "kernels" if p.device == "cuda" else "operations"
    evidence = (
        f"{len(work) / p.num_steps:.0f} operations per step of {_ms(statistics.median(op.seconds for op in work))} "
        f"(median); {len(small) / len(work):.0%} of them are {what} below {bound * 1e6:.0f} µs and take "
        f"{p.share_of(small):.0%} of the time, and {p.between:.0%} is spent between operations"
    )
    override = None
    if p.batch_size and p.accumulation % 2 == 0:
        override = f"batch_size={2 * p.batch_size} accumulation={p.accumulation // 2}"
    elif p.batch_size:
        override = f"batch_size={2 * p.batch_size}"
    advice = "larger micro-batches: the same number of operations for more samples"
    if override and "accumulation" not in override:
        advice += " (this one changes the training: more samples per step)"
    if p.device == "cuda":
        advice += "; or torch.compile(model, mode='reduce-overhead'), which starts a step's kernels all at once"
    return [Finding("many small operations", at_stake, evidence, _place(small), advice, override)]


def waits(p: Profile) -> list[Op]:
    """Operations that make the host wait for the device: what `.item()`, `float(tensor)` and `if tensor:` become.

    On a CPU there is nothing to wait for, and they are counted all the same: the loop may run on a GPU some day.
    """
    if p.device == "cpu":  # the counters that an optimizer reads stay on the host wherever it runs
        return [op for op in p.ops if op.short in _WAITS and not op.optimizer]
    on_device = [op for op in p.ops if any(each.device == p.device for each in op.inputs)]
    return [op for op in on_device if op.short in _WAITS] + [op for op in p.ops if op.is_blocking]


def find_waits(p: Profile) -> list[Finding]:
    """Source lines at which the host waits for the device."""
    lines: dict[str, list[Op]] = defaultdict(list)
    for op in waits(p):
        lines[op.place.source].append(op)
    found = []
    for source, ops in sorted(lines.items(), key=lambda item: len(item[1]), reverse=True):
        place = ops[0].place
        advice = "keep the number on the device (sum it in a tensor), and read it only where a line is logged"
        override = None
        if "amp.step(" in place.code or any(op.optimizer for op in ops):
            advice = "an optimizer that is not fused lets the host decide whether a step is skipped: use a fused one"
            override = "optimizer.fused=true" if any(o.has_fused and not o.is_fused for o in p.optimizers) else None
        elif any(op.is_blocking for op in ops):
            advice = "copy from page-locked memory with non_blocking=True, or make the tensor on the device"
        evidence = f"{len(ops) / p.num_steps:g} per step: {place.code or ops[0].name}"
        share = p.share(sum(op.host_seconds for op in ops)) if p.device == "cuda" else None
        if share is None:
            evidence += "; on a CPU it costs nothing, on a GPU each empties the queue of kernels"
        found.append(Finding(f"waits for the device at {source}", share, evidence, str(place), advice, override))
    return found


def find_loading(p: Profile) -> list[Finding]:
    """Steps that wait for their data."""
    if p.loading is None:
        return []
    compute, waited = p.compute, p.wait
    # Workers are ahead when the measurement begins; what they cannot keep up with shows later.
    later = max(p.loading / max(p.num_workers, 1) - compute, 0.0) if p.num_workers else 0.0
    stall = max(waited, later)
    share = stall / (stall + compute)
    if share < 0.05:
        return []
    needed = math.ceil(p.loading / compute) if compute else p.num_cores
    wanted = max(1, min(needed + (p.device == "cuda"), p.num_cores))
    evidence = (
        f"{_ms(waited)} of waiting and {_ms(compute)} of computing per step with data.num_workers={p.num_workers}; "
        f"one process makes the data of a step in {_ms(p.loading)}"
    )
    if later > waited:
        evidence += f", so that {p.num_workers} fall behind by {_ms(later)} per step once their lead is used up"
    override = None
    if p.num_workers and waited > p.loading:
        advice = "handing the data over from workers takes longer than making them here"
        override = "data.num_workers=0"
    elif wanted > p.num_workers:
        advice = f"{needed} worker(s) keep up with the steps; there are {p.num_cores} core(s)"
        if p.device == "cpu":
            advice += ", which they share with the training on a CPU: compare"
        override = f"data.num_workers={wanted}"
    else:
        advice = "more workers do not help here: decode and resize the data once, beforehand"
    place = "the input pipeline (data set, its augmentation, the copy to the device)"
    return [Finding("steps wait for their data", share, evidence, place, advice, override)]


def find_unfused(p: Profile) -> list[Finding]:
    """Optimizers that do with several kernels, or in a loop over the weights, what one could do."""
    found = []
    for each in p.optimizers:
        share = p.share(each.seconds)
        ops = [op for op in p.work if op.optimizer == each.name]
        if each.is_fused or not (each.has_fused or (each.is_loop and share >= 0.02)):
            continue
        how = "one weight at a time" if each.is_loop else "in lists of weights (foreach)"
        evidence = f"its step takes {_ms(each.seconds / p.num_steps)}, with {len(ops) / p.num_steps:.0f} operations, "
        evidence += f"{how}; and the host waits for the device once per step to know whether to skip"
        advice = "the fused form updates all weights in one kernel and is skipped on the device (fused=True in torch)"
        if not each.has_fused:
            advice = "it has no fused form: foreach=true where it fits in memory, or another optimizer, such as AdamW"
        override = "optimizer.fused=true" if each.has_fused else "+optimizer.options.foreach=true"
        found.append(Finding(f"{each.name} is not fused", share, evidence, _place(ops), advice, override))
    return found


def find_channels_first(p: Profile) -> list[Finding]:
    """Convolutions of NCHW tensors that were measured to be faster in NHWC, the layout of channels_last."""
    forward = [op for op in p.ops if op.short == "convolution" and op.inputs and op.inputs[0].is_nchw]
    measured = [(op, p.layouts[_layout_key(op)]) for op in forward if _layout_key(op) in p.layouts]
    first, last = (sum(pair[i] for _, pair in measured) for i in (0, 1))
    if not first or last > 0.95 * first:
        return []
    names = {_name(op.place) for op in forward}
    both = [op for op in p.ops if op.short.startswith("convolution") and _name(op.place) in names]
    op = max((op for op, _ in measured), key=lambda op: op.seconds)
    one = p.layouts[_layout_key(op)]
    evidence = (
        f"{len(forward) / p.num_steps:g} convolutions per step on NCHW; with their backward pass "
        f"{p.share_of(both):.0%} of a step. One of {list(op.inputs[0].shape)} takes "
        f"{_ms(one[0])}, and {_ms(one[1])} in channels_last"
    )
    advice = "store networks and images in NHWC (model.to(memory_format=torch.channels_last), and the images)"
    if p.channels_last:
        advice = "perf.channels_last is on, but something before this layer puts the images back: a reshape or a stack"
    share = p.share_of(both) * (1 - last / first)
    if share < 0.05:
        return []
    override = None if p.channels_last else "perf.channels_last=true"
    return [Finding("convolutions without channels_last", share, evidence, _place(forward), advice, override)]


def find_pointwise_chains(p: Profile) -> list[Finding]:
    """Pointwise operations that follow each other, each of which reads and writes memory for a few operations."""
    chains = list(_chains(p.work))
    total, saved = 0.0, 0.0
    lines: dict[str, float] = defaultdict(float)
    members: list[Op] = []
    for chain in chains:
        seconds = sum(op.seconds for op in chain)
        gain = max(seconds * (1 - _fused_bytes(chain) / max(sum(op.num_bytes for op in chain), 1)), 0.0)
        total, saved = total + seconds, saved + gain
        place = chain[0].place
        lines[_name(place) + (f" ({place.kind})" if place.kind else "")] += gain
        members += chain
    share = p.share(saved)
    if share < 0.05:
        return []
    most = sorted(lines.items(), key=lambda item: item[1], reverse=True)[:3]
    longest = max(chains, key=len)
    evidence = (
        f"chains of pointwise operations take {p.share(total):.0%} of a step; fused, they would move "
        f"{saved / max(total, 1e-12):.0%} fewer bytes. Most of it in "
        f"{'; '.join(f'{name}: {p.share(seconds):.1%}' for name, seconds in most)}. The longest: "
        f"{', '.join(op.short for op in longest[:8])}{', ...' if len(longest) > 8 else ''}"
    )
    advice = (
        "torch.compile fuses them (of the whole network, or of these modules); or write them with one function of "
        "torch that does the same. The share is a bound: what the backward pass needs is still written"
    )
    return [Finding("pointwise operations that could be fused", share, evidence, _place(members), advice)]


def find_memory_bound(p: Profile) -> list[Finding]:
    """Layers whose weights are read for too few rows: a larger batch costs them hardly any time."""
    if p.units is None or p.units.balance is None:
        return []
    thin = []
    for op in p.ops:
        if op.short in ("mm", "addmm") and not op.backward and op.seconds:
            m, k, n = sizes(op)
            if m < min(k, n) and flops(op) / max(op.num_bytes, 1) < p.units.balance:
                thin.append(op)
    names = {_name(op.place) for op in thin}
    all_of = [op for op in p.ops if op.is_product and _name(op.place) in names]
    share = p.share_of(all_of)
    if not thin or share < 0.15:
        return []
    intensity = statistics.median(flops(op) / max(op.num_bytes, 1) for op in thin)
    evidence = (
        f"{len(thin) / p.num_steps:g} products per step, such as {_shapes(thin[0])}, do {intensity:.0f} operations per "
        f"byte (median); this device wants {p.units.balance:.0f} to be busy. They and their backward pass take "
        f"{share:.0%} of a step"
    )
    override = f"batch_size={2 * p.batch_size}" if p.batch_size else None
    if p.batch_size and p.accumulation % 2 == 0:
        override = f"batch_size={2 * p.batch_size} accumulation={p.accumulation // 2}"
    advice = "larger micro-batches: the weights are read once for more rows"
    return [Finding("layers bound by reading their weights", share, evidence, _place(thin), advice, override)]


def find_cadences(p: Profile) -> list[Finding]:
    """Evaluation and checkpoints that come too often."""
    found = []
    for name, (every, seconds) in p.cadences.items():
        share = seconds / (seconds + every * p.step)
        if share < 0.05:
            continue
        what = {"eval_every": "evaluation takes", "save_every": "checkpoints take"}.get(name, f"{name} takes")
        evidence = f"about {_ms(seconds)} every {every} steps of {_ms(p.step)}"
        enough = 49 * seconds / p.step  # 2%
        digit = 10 ** math.floor(math.log10(enough))
        fewer = f"{name}={math.ceil(enough / digit) * digit}"
        found.append(
            Finding(f"{what} part of the run", share, evidence, name, "less often: then it is below 2%", fewer)
        )
    return found


def find_costly_autocast(p: Profile) -> list[Finding]:
    """A mode that is slower than fp32 for this network on this device."""
    if p.fp32_step is None or p.dtype == "float32":
        return []
    step = p.compute
    if step < 1.05 * p.fp32_step:
        return []
    casts = [op for op in p.ops if op.is_cast]
    evidence = f"a step computes for {_ms(step)}, and for {_ms(p.fp32_step)} in fp32 (medians, without data)"
    advice = f"this network is too small for {p.dtype} to pay on this device, or the device has no units for it"
    share = (1 - p.fp32_step / step) * p.busy
    return [Finding(f"amp={p.amp} is slower than fp32", share, evidence, _place(casts), advice, "amp=fp32")]


FINDERS: tuple[Callable[[Profile], list[Finding]], ...] = (
    find_slow_units,
    find_odd_sizes,
    find_casts,
    find_small_operators,
    find_waits,
    find_loading,
    find_unfused,
    find_channels_first,
    find_pointwise_chains,
    find_memory_bound,
    find_cadences,
    find_costly_autocast,
)


# --- sizes, places, chains --------------------------------------------------------------------------------------------


def sizes(op: Op) -> tuple[int, ...]:
    """What the units multiply: (rows, inner, columns), and (inputs, outputs) per group of a convolution; else ()."""
    if op.short in _MULTIPLIED:
        a, b = op.inputs[_MULTIPLIED[op.short] :][:2]
        return (a.shape[-2], a.shape[-1], b.shape[-1])
    if op.short in ("convolution", "convolution_backward"):
        weight = op.inputs[1 if op.short == "convolution" else 2].shape
        groups = op.convolution[5] if op.convolution else 1
        return (weight[1], weight[0] // groups)  # of a transposed one the other way round
    return ()


def flops(op: Op) -> int:
    """Multiplications and additions of a product; 0 for what is none."""
    if op.short in _MULTIPLIED:
        m, k, n = sizes(op)
        a = op.inputs[_MULTIPLIED[op.short]].shape
        return 2 * m * k * n * (a[0] if len(a) == 3 else 1)
    if op.short in ("convolution", "convolution_backward") and op.outputs:
        backward = op.short == "convolution_backward"
        weight = op.inputs[2 if backward else 1].shape
        transposed = bool(op.convolution and op.convolution[3])
        # As many positions as the output has; of a transposed one, as the input.
        image = op.inputs[(1 if backward else 0) if transposed else 0].shape if backward or transposed else None
        image = image or op.outputs[0].shape
        return 2 * image[0] * math.prod(image[2:]) * math.prod(weight) * (2 if backward else 1)
    return 0


def _shapes(op: Op) -> str:
    first = _MULTIPLIED.get(op.short, 0)
    return f"{op.short} of " + " and ".join(str(list(each.shape)) for each in op.inputs[first : first + 2])


def _name(place: Place) -> str:
    return f"line {place.source}" if place.module is None else place.module or "the network itself"


def _groups(ops: Iterable[Op]) -> list[tuple[str, list[Op]]]:
    """By class of module and source line, the most time first, with a name: `blocks.0.mlp and 3 more`."""
    groups: dict[tuple[str, str, bool], list[Op]] = defaultdict(list)
    for op in ops:
        groups[op.place.kind, op.place.source, op.place.module is None].append(op)
    named = []
    for group in sorted(groups.values(), key=lambda group: sum(op.seconds for op in group), reverse=True):
        names = list(dict.fromkeys(_name(op.place) for op in group))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        kind = group[0].place.kind
        named.append((names[0] + more + (f" ({kind})" if kind else ""), group))
    return named


def _place(ops: Iterable[Op]) -> str:
    """Where most of the time of these operations is spent."""
    groups = _groups(ops)
    if not groups:
        return "everywhere"
    name, group = groups[0]
    place = group[0].place
    return str(place) if place.module is None else f"{name}, {place.source}"


def _chains(ops: Sequence[Op]) -> Iterator[list[Op]]:
    """Runs of at least two pointwise operations of one module and direction, outside of optimizers."""
    chain: list[Op] = []
    for op in ops:
        joins = op.is_pointwise and not op.optimizer and bool(op.outputs)
        if chain and not (joins and (op.place.module, op.backward) == (chain[0].place.module, chain[0].backward)):
            if len(chain) > 1:
                yield chain
            chain = []
        if joins:
            chain.append(op)
    if len(chain) > 1:
        yield chain


def _fused_bytes(chain: list[Op]) -> int:
    """Of one kernel for the whole chain: what comes from outside of it is read, and what it ends with is written."""
    made: set[int] = set()
    read: dict[int, int] = {}
    for op in chain:
        read |= {each.key: each.num_bytes for each in op.inputs if each.key not in made}
        made |= {each.key for each in op.outputs}
    return sum(read.values()) + sum(each.num_bytes for each in chain[-1].outputs)


def _layout_key(op: Op) -> tuple[Any, ...]:
    return (op.inputs[0].shape, op.inputs[1].shape, op.inputs[0].dtype, op.convolution)


def _ms(seconds: float) -> str:
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


# --- watching ---------------------------------------------------------------------------------------------------------


class Listing(Trace):
    """All operations of a window with their places. Looks at no number, so it does not wait for the device."""

    def __init__(self, names: Mapping[nn.Module, str], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(names, {})
        self._tensors = {_key(tensor): name for name, tensor in tensors.items()}
        self.ops: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        node = torch._C._current_autograd_node()
        place = self._place_of(node, func.overloadpacket.__name__)
        inputs = [self._operand(tensor) for tensor in _tensors((args, kwargs))]
        result = func(*args, **kwargs)
        outputs = [self._operand(tensor) for tensor in _tensors(result)]
        short = func.overloadpacket.__name__
        first = {"convolution": 3, "convolution_backward": 4}.get(short)
        is_pointwise = torch.Tag.pointwise in func.tags or short in _POINTWISE
        op = Op(
            func._schema.name,
            place,
            node is not None,
            inputs,
            outputs,
            _is_view(func) or short.startswith(_WITHOUT_WORK),
            False,
            _is_blocking(short, inputs, outputs) and not (kwargs.get("non_blocking") or True in args[2:]),
            () if first is None else tuple(map(_plain, args[first : first + 6])),
        )
        op.is_pointwise = is_pointwise or op.is_cast
        self.ops.append(op)
        return result

    def _operand(self, tensor: Tensor) -> Operand:
        key = _key(tensor)
        name = self._tensors.get(key, "")
        nchw = tensor.ndim == 4 and tensor.layout is torch.strided
        return Operand(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.device.type,
            tensor.numel() * tensor.element_size(),
            key,
            name.removeprefix("weight ") if name.startswith("weight ") else "",
            nchw and not tensor.is_contiguous(memory_format=torch.channels_last),
        )


class _Hints(Trace):
    """Keeps what `Trace` marks, also where every number stayed finite."""

    def __init__(self, names: Mapping[nn.Module, str], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(names, tensors)
        self.hints: dict[tuple[str, str], Finding] = {}

    def _new_marks(self, call: Any, outputs: list[Tensor]) -> frozenset[tuple[str, str]]:
        marks = super()._new_marks(call, outputs)
        inherited = {mark for each in call.inputs for mark in self._marks.get(each.key, ())}
        if call.name in ("binary_cross_entropy", "log", "log2", "log10") and not call.backward:
            found = [text for kind, text in inherited if kind == "sigmoid" and "float16" in text]
            if found:
                self._hint(
                    "bce",
                    call.place,
                    "the logarithm of a 16-bit probability",
                    f"{call.name} of a {found[0]}: above 0.998 in bf16, and 0.9998 in fp16, it is rounded to 1",
                    "binary_cross_entropy_with_logits takes the logits; or put sigmoid and loss into an fp32 island",
                )
        for _, text in {mark for mark in marks - inherited if mark[0] == "eps"}:
            self._hint(
                "eps",
                call.place,
                "an eps that is 0 in 16 bits",
                text,
                "use an eps that 16 bits can hold (1e-5), or compute this line in fp32",
            )
        return marks

    def _hint(self, kind: str, place: Place, title: str, evidence: str, advice: str) -> None:
        self.hints.setdefault((kind, place.source), Finding(title, None, evidence, str(place), advice))

    def findings(self, doctor: Doctor) -> list[Finding]:
        """With positions that fell together, and what the settings of modules tell."""
        for found in self.collisions:
            evidence = f"{found.distinct} integers up to {found.largest:g} in {found.dtype}: {found.kept} are different"
            self._hint(
                "positions",
                found.place,
                "positions that 16 bits cannot tell apart",
                evidence,
                "compute positions, and what they are multiplied with, in fp32: inside of autocast(enabled=False)",
            )
        hints = list(self.hints.values())
        for prefix, net in doctor.nets:
            for name, reason in find_unsafe(net, _low(doctor.amp)):
                full = ".".join(filter(None, [prefix, name]))
                if not any(hint.place.startswith(f"{full} (") for hint in hints):
                    advice = reason.partition("; ")[2]
                    title = "a part that is unsafe in 16 bits"
                    hints.append(Finding(title, None, reason, full or "the network itself", advice))
        return hints


def _is_blocking(name: str, inputs: list[Operand], outputs: list[Operand]) -> bool:
    """A copy between the host and a GPU. One number to the GPU is handed over with the kernel, without waiting."""
    if name not in ("_to_copy", "copy_") or not inputs or not outputs:
        return False
    return inputs[-1].device != outputs[0].device and not (inputs[-1].device == "cpu" and inputs[-1].shape == ())


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _low(amp: Amp) -> torch.dtype:
    """What the mode multiplies in, or keeps the weights in."""
    return amp.dtype if amp.config.update is None else getattr(torch, amp.config.weights)


# --- measuring --------------------------------------------------------------------------------------------------------

Again = Callable[[], contextlib.AbstractContextManager[Any]]
"""A context in which the next window is computed and its step taken; gives the window."""


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
        step: computes a window and takes its step; called a few times more than 3 * `num_windows`. It trains for good.
        nets: one network, or pairs of a name and a network.
        amp: the mode that trains.
        optimizers: that `step` steps.
        num_windows: how many to measure.
        what: the name in the report.
    """
    doctor = Doctor(amp, nets)
    timed = _timed(contextlib.nullcontext, amp, num_windows)
    course = _measure(doctor, optimizers, contextlib.nullcontext, lambda: None, num_windows, timed)
    try:
        while True:
            next(course)
            step()
    except StopIteration as done:
        return examine(what, done.value)


def advise_run(loop: Loop, num_windows: int, found: list[Profile]) -> Generator[Any, None, None]:
    """A course (`env.course`) that measures a recipe from where it stands. Appends to `found`."""
    from amp_core.doctor.watch import doctor_of  # which needs the run's log, as plain loops do not

    doctor, cfg = doctor_of(loop), loop.cfg
    yield from _timed(loop.training_again, loop.amp, _NUM_WARM_UPS)
    began = time.perf_counter()
    position = loop.position()
    saving = time.perf_counter() - began
    timed = _timed_with_loader(loop, num_windows)
    p = yield from _measure(
        doctor, loop.optimizers, loop.training_again, lambda: loop.go_to(position), num_windows, timed
    )
    p.num_workers, p.batch_size = cfg.data.num_workers, cfg.batch_size
    p.accumulation, p.channels_last = loop.accumulation, cfg.perf.channels_last
    with loop.loading(num_workers=0) as windows:
        p.loading = statistics.median([_seconds(lambda: next(windows)) for _ in range(4)][1:])
    # The forward pass is about a third of a step, and needs no more than that for a sample of the evaluation.
    evaluating = len(loop.data.eval) / loop.samples_per_step * p.compute / 3
    p.cadences = {"eval_every": (cfg.eval_every, evaluating), "save_every": (cfg.save_every, saving)}
    found.append(p)


def time_run(loop: Loop, num_windows: int, found: list[tuple[float, float]]) -> Generator[Any, None, None]:
    """A course that only measures steps, for a comparison.

    Appends to `found` the seconds that a step computes, and those that it takes with the wait for its data. Medians.
    """
    yield from _timed(loop.training_again, loop.amp, _NUM_WARM_UPS)
    steps, loads = yield from _timed_with_loader(loop, num_windows)
    whole = [step + load for step, load in zip(steps, loads, strict=True)]
    found.append((statistics.median(steps), statistics.median(whole)))


Times = tuple[list[float], list[float]]


def _timed(again: Again, amp: Amp, num_windows: int) -> Generator[Any, None, Times]:
    """Seconds of steps, and of their waiting for data: none."""
    steps = []
    for _ in range(num_windows):
        with again() as window:
            _wait_for(amp.device)
            began = time.perf_counter()
            yield window
            _wait_for(amp.device)
            steps.append(time.perf_counter() - began)
    return steps, [0.0] * num_windows


def _timed_with_loader(loop: Loop, num_windows: int) -> Generator[Any, None, Times]:
    """The same with the data as training loads them."""
    device = loop.amp.device
    steps, loads = [], []
    with loop.loading() as windows:
        for number in range(_NUM_WARM_UPS + num_windows):
            if number == _NUM_WARM_UPS:
                _wait_for(device)
                start = time.perf_counter()
            began = time.perf_counter()
            window = next(windows)
            loaded = time.perf_counter()
            with loop.training_again(window):
                yield window
            if number >= _NUM_WARM_UPS:
                loads.append(loaded - began)
                steps.append(time.perf_counter() - loaded)
        _wait_for(device)
        total = time.perf_counter() - start
    if device.type != "cuda":
        return steps, loads
    # The host is ahead of a GPU: it waits for data when computing alone is faster than the whole.
    steps, _ = yield from _timed(loop.training_again, loop.amp, num_windows)
    return steps, [max(total / num_windows - statistics.median(steps), 0.0)] * num_windows


def _measure(
    doctor: Doctor,
    optimizers: Sequence[torch.optim.Optimizer],
    again: Again,
    rewind: Callable[[], None],
    num_windows: int,
    timed: Generator[Any, None, Times],
) -> Generator[Any, None, Profile]:
    amp, device = doctor.amp, doctor.amp.device
    yield from _timed(again, amp, _NUM_WARM_UPS)
    steps, loads = yield from timed
    rewind()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(num_windows):
            with again() as window, record_function(_MARK):
                yield window
                _wait_for(device)
    rewind()
    listings = []
    for _ in range(num_windows):
        with again() as window:
            listing = Listing(doctor.names, named_tensors(doctor.nets, ()))
            with listing:
                yield window
        listings.append(listing.ops)
    hints = _Hints(doctor.names, named_tensors(doctor.nets, ()))
    with again() as window, hints:
        yield window
    events = _Events(profiler.events() or (), device.type == "cuda")
    num_matched = sum(map(events.fill, listings, events.windows))
    ops = [op for listing in listings for op in listing]
    dtype = str(_low(amp)).removeprefix("torch.")
    found = Profile(ops, num_windows, events.seconds, steps, loads, amp.config.name, dtype, device.type)
    found.matched = num_matched / max(sum(op.short != "detach" for op in ops), 1)
    found.units = measure_units(device, _low(amp), float8=amp.config.float8)
    found.optimizers = [_facts(optimizer, events.optimizers, optimizers) for optimizer in optimizers]
    found.num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found.layouts = measure_layouts(ops, device)
    found.hints = hints.findings(doctor)
    return found


class _Events:
    """The events of a profile by window, and the operations among them."""

    def __init__(self, events: Iterable[Any], on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
        marks = sorted((event for event in host if event.name == _MARK), key=_start)
        roots = [event for event in host if event.cpu_parent is None and event.name != _MARK]
        self.windows: list[list[Any]] = []
        self.seconds = sum(mark.time_range.elapsed_us() for mark in marks) * 1e-6
        self.optimizers: dict[str, float] = defaultdict(float)
        for mark in marks:
            # Autograd computes in a thread of its own on a GPU, whose events are nobody's children.
            inside = [r for r in roots if mark.time_range.start <= _start(r) <= mark.time_range.end]
            self.windows.append(_in_order([*mark.cpu_children, *inside]))
        for window in self.windows:
            for event, _, optimizer in window:
                if event.name.startswith(_OPTIMIZER) and event.name.removeprefix(_OPTIMIZER) == optimizer:
                    self.optimizers[optimizer.removesuffix(".step")] += self._seconds(event)

    def _seconds(self, event: Any) -> float:
        return (event.device_time_total if self._on_cuda else event.cpu_time_total) * 1e-6

    def fill(self, ops: list[Op], window: list[tuple[Any, int, str]]) -> int:
        """Give operations the times of the events that they are, in the same order. Returns how many had one.

        What an operation calls by itself is part of it, and no other operation is looked for there.
        """
        at = num_matched = num_missing = 0
        names = {op.name.rstrip("_") for op in ops}
        for op in ops:
            if op.short == "detach":  # a dispatch mode sees more of them than there are without one
                continue
            passed = 0
            for here in range(at, min(at + _FAR, len(window))):
                event, size, optimizer = window[here]
                # Under a dispatch mode autograd sums gradients into new memory, otherwise in place.
                if event.name.rstrip("_") == op.name.rstrip("_"):
                    op.seconds, op.host_seconds = self._seconds(event), event.cpu_time_total * 1e-6
                    op.num_kernels = sum(len(each.kernels) for each, _, _ in window[here : here + size])
                    op.optimizer = optimizer.removesuffix(".step")
                    at, num_matched, num_missing = here + size, num_matched + 1, 0
                    break
                # One that only the dispatch mode saw must not be looked for behind those that follow it.
                passed += event.name.rstrip("_") in names
                if passed > _PASSED and num_missing < 8:
                    break
            num_missing += passed > _PASSED
        return num_matched


_OPTIMIZER = "Optimizer.step#"


def _start(event: Any) -> float:
    return event.time_range.start


def _in_order(roots: list[Any]) -> list[tuple[Any, int, str]]:
    """Each event before its children: (event, number of events in it with itself, optimizer around it)."""
    found: list[tuple[Any, int, str]] = []

    def visit(event: Any, optimizer: str) -> None:
        if event.name.startswith(_OPTIMIZER):
            optimizer = event.name.removeprefix(_OPTIMIZER)
        here = len(found)
        found.append((event, 0, optimizer))
        for child in sorted(event.cpu_children, key=_start):
            visit(child, optimizer)
        found[here] = (event, len(found) - here, optimizer)

    for root in sorted(roots, key=_start):
        visit(root, "")
    return found


def _facts(
    optimizer: torch.optim.Optimizer, seconds: Mapping[str, float], every: Sequence[torch.optim.Optimizer]
) -> OptimizerFacts:
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    # The profile names classes: optimizers of one class share its time.
    same = sum(type(other) is type(optimizer) for other in every)
    on_cuda = any(p.is_cuda for group in groups for p in group["params"])
    return OptimizerFacts(
        name,
        all(group.get("fused") for group in groups),
        "fused" in inspect.signature(type(optimizer)).parameters,
        any(group.get("foreach") is False or (group.get("foreach") is None and not on_cuda) for group in groups),
        seconds.get(name, 0.0) / same,
    )


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(function: Callable[[], Any], device: torch.device | None = None) -> float:
    began = time.perf_counter()
    function()
    if device is not None:
        _wait_for(device)
    return time.perf_counter() - began


def _race(functions: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """The fewest seconds that each takes, in turns, so that whatever else runs on the machine hits all of them."""
    for function in functions:
        function()
    _wait_for(device)
    best, end = [math.inf] * len(functions), time.perf_counter() + 0.1 * len(functions)
    for turn in range(100):
        best = [min(a, _seconds(function, device)) for a, function in zip(best, functions, strict=True)]
        if turn >= 2 and time.perf_counter() > end:
            break
    return best


# --- the device -------------------------------------------------------------------------------------------------------


def _cpu_has(dtype: str) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    supported = {
        "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported,
        "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported,
    }
    return bool(supported[dtype]())


@torch.no_grad()
def measure_units(device: torch.device, dtype: torch.dtype, *, float8: bool = False) -> Units:
    """How fast `device` multiplies in `dtype`, next to fp32, and how fast its memory is. Takes below a second."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        what = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
        lacks = {
            "float16": (major, minor) < (7, 0),
            "bfloat16": major < 8 or not torch.cuda.is_bf16_supported(including_emulation=False),
        }.get(name, False)
        n, megabytes = 4096, 256
    else:
        what = f"this CPU ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} thread(s))"
        lacks = name in HALF and not _cpu_has(name)
        n, megabytes = 256, 16
    emulated = f"has no units for {name}, and emulates them" if lacks else ""
    if float8 and float8_is_emulated(device):
        emulated = "has no float8 units, and emulates them in fp32"
    a = torch.randn(n, n, device=device)
    low = a.to(dtype)
    big = torch.empty(megabytes * 2**18, device=device)
    slow_product, product, copy = _race([lambda: a @ a, lambda: low @ low, big.clone], device)
    balance = (2 * n**3 / product) / (2 * big.numel() * 4 / copy)
    return Units(what, emulated, 1.0 if dtype is torch.float32 else slow_product / product, balance)


def measure_layouts(ops: Sequence[Op], device: torch.device, most: int = 2) -> dict[Any, tuple[float, float]]:
    """Seconds of the `most` costliest convolutions on NCHW, forward and backward: as they are, and in channels_last."""
    cost: dict[Any, float] = defaultdict(float)
    for op in ops:
        matters = op.short == "convolution" and (device.type == "cuda" or op.inputs[0].dtype in HALF)
        if matters and op.inputs[0].is_nchw:
            cost[_layout_key(op)] += op.seconds
    found = {}
    for key in sorted(cost, key=lambda key: cost[key], reverse=True)[:most]:
        image, weight, dtype, settings = key
        tensors = [torch.randn(shape, device=device, dtype=getattr(torch, dtype)) for shape in (image, weight)]
        runs = []
        for layout in (torch.contiguous_format, torch.channels_last):
            x, w = (t.to(memory_format=layout).requires_grad_() for t in tensors)
            gradient = torch.ops.aten.convolution(x, w, None, *settings).detach()

            def both(x: Tensor = x, w: Tensor = w, gradient: Tensor = gradient, settings: Any = settings) -> None:
                torch.autograd.grad(torch.ops.aten.convolution(x, w, None, *settings), (x, w), gradient)

            runs.append(both)
        first, last = _race(runs, device)
        found[key] = (first, last)
    return found
