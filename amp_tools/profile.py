"""The measurements of some windows of a run: operations with time, module and source line."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from amp_core.doctor.trace import Location

HALF = ("float16", "bfloat16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
MULTIPLIED = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0}
"""Products of matrices, and which of their inputs is the first factor."""
_PRODUCTS = {*MULTIPLIED, "convolution", "convolution_backward", "mv", "addmv", "mkldnn_rnn_layer", "_cudnn_rnn"}


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation took or gave."""

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    num_bytes: int = 0
    weight: str = ""
    """Its name, if it is a weight."""
    is_nchw: bool = False
    """4-d and not in the order of channels_last."""


@dataclass
class Op:
    """An operation of a window, below autograd and autocast."""

    name: str
    """As in torch.ops, with its namespace: aten::addmm."""
    place: Location
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
    """How many times as fast as in fp32 a large product is, measured."""
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


def spell(seconds: float) -> str:
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


@dataclass(frozen=True)
class Trial:
    """What a change gave: shares of a step's time, per sample, from pairs of turns without and with it."""

    gain: float
    """By the median of the ratios of a pair."""
    low: float
    high: float
    """By the second largest and the second least ratio: so is the interval of a median whatever the distribution."""
    num_pairs: int
    how: str

    def __str__(self) -> str:
        coverage = 1 - 2 * (1 + self.num_pairs) / 2**self.num_pairs
        interval = f"{coverage:.0%} interval {self.low:.1%} to {self.high:.1%}"
        return f"{self.gain:.1%} of a step ({interval}, {self.num_pairs} pairs of turns, {self.how})"


def trial_of(pairs: Iterable[Sequence[float]], part: float, how: str) -> Trial:
    """The gain by pairs of seconds per sample, without and with a change of what takes `part` of a step."""
    gains = sorted(part * (1 - after / before) for before, after in pairs)
    return Trial(statistics.median(gains), gains[1], gains[-2], len(gains), how)


@dataclass(frozen=True)
class Finding:
    """Something that costs time, or that is not right in 16 bits."""

    title: str
    share: float | None
    """Forecast: the share of a step's time that what was found takes; None: not known here, or not about time."""
    evidence: str
    place: str
    advice: str
    override: str | None = None
    tried: Trial | None = None

    @property
    def cause(self) -> str:
        """The same for findings that one change would cure."""
        return self.override or f"{self.title} {self.place}"

    @property
    def rank(self) -> tuple[int, float, float]:
        """Sorts: measured gains, what was not tried by its forecast, what was tried and gave nothing."""
        share = -1.0 if self.share is None else self.share
        return (1, share, 0.0) if self.tried is None else (2 * (self.tried.low > 0), self.tried.gain, share)

    def __str__(self) -> str:
        gains = {2: f"gains {self.tried.gain:.0%} of a step: " if self.tried else "", 0: "no gain measured: ", 1: ""}
        lines = textwrap.wrap(gains[self.rank[0]] + self.title, 114)
        share = "" if self.share is None else f"it takes {self.share:.1%} of a step"
        about = [("measured", self.evidence), ("place", self.place), ("advice", self.advice)]
        about += [("", self.override or ""), ("forecast", share), ("tried", str(self.tried or (share and "not tried")))]
        for key, text in about:
            wrapped = textwrap.wrap(text, 102, break_long_words=False, break_on_hyphens=False)
            lines += [f"  {key if i == 0 else '':<10}{line}" for i, line in enumerate(wrapped)]
        return "\n".join(lines)


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
    cadences: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By the name of the setting: every so many steps so many seconds."""
    keep_fp32: list[str] = field(default_factory=list)
    """The setting's islands."""
    trials: dict[str, Trial] = field(default_factory=dict)
    """What was gained without a cause, by `Finding.cause`."""
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
        """The share of all time that these seconds within the profiled windows are."""
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


def sizes(op: Op) -> tuple[int, ...]:
    """What the units multiply: (rows, inner, columns), and (inputs, outputs) per group of a convolution; else ()."""
    if op.short in MULTIPLIED:
        a, b = op.inputs[MULTIPLIED[op.short] :][:2]
        return (a.shape[-2], a.shape[-1], b.shape[-1])
    if op.short in ("convolution", "convolution_backward"):
        weight = op.inputs[1 if op.short == "convolution" else 2].shape
        groups = op.convolution[5] if op.convolution else 1
        return (weight[1], weight[0] // groups)  # of a transposed one the other way round
    return ()


def flops(op: Op) -> int:
    """Multiplications and additions of a product; 0 for what is none."""
    if op.short in MULTIPLIED:
        m, k, n = sizes(op)
        a = op.inputs[MULTIPLIED[op.short]].shape
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
