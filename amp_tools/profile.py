"""What the steps of a run spend their time on: each operation with its time, its module and its source line.

Windows are computed three times: as in training, for the time of whole steps; under torch's profiler, for the time of
each operation; and watched by a dispatch mode that knows modules and source lines. The last two are the same windows,
so their operations are matched in order, and the slow dispatch mode is in none of the times.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import statistics
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from amp_core.doctor.locate import Doctor
from amp_core.doctor.trace import Location, Trace, _is_view, _key, _tensors, current_node, named_tensors
from amp_core.lowp.float8 import float8_is_emulated
from amp_core.lowp.lint import find_unsafe
from amp_core.run.replay import rerun_step
from amp_core.step.amp import Amp
from amp_core.torch_private import cpu_has

if TYPE_CHECKING:
    from amp_core.run.loop import Loop

HALF = ("float16", "bfloat16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
MULTIPLIED = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0}
"""Products of matrices, and which of their inputs is the first factor."""
_PRODUCTS = {*MULTIPLIED, "convolution", "convolution_backward", "mv", "addmv", "mkldnn_rnn_layer", "_cudnn_rnn"}
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
_MARK = "amp_recipes::window"
NUM_WARM_UPS = 3
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


def spell(seconds: float) -> str:
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


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
            lines.append(f"  {'tried':<10}a step takes {spell(after)} with it, and {spell(before)} without")
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
    layouts: dict[Any, tuple[float, float]] = field(default_factory=dict)
    """Seconds of some convolutions, by `layout_key`: as they are, and in channels_last."""
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


def layout_key(op: Op) -> tuple[Any, ...]:
    return (op.inputs[0].shape, op.inputs[1].shape, op.inputs[0].dtype, op.convolution)


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
        node = current_node()
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

    def _hint(self, kind: str, place: Location, title: str, evidence: str, advice: str) -> None:
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


Times = tuple[list[float], list[float]]


def time_windows(again: Again, amp: Amp, num_windows: int) -> Generator[Any, None, Times]:
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


def time_with_loader(loop: Loop, num_windows: int) -> Generator[Any, None, Times]:
    """The same with the data as training loads them."""
    device = loop.amp.device
    steps, loads = [], []
    with loop.feed.loading(
        loop.samples,
    ) as windows:
        for number in range(NUM_WARM_UPS + num_windows):
            if number == NUM_WARM_UPS:
                _wait_for(device)
                start = time.perf_counter()
            began = time.perf_counter()
            window = next(windows)
            loaded = time.perf_counter()
            with rerun_step(loop, window):
                yield window
            if number >= NUM_WARM_UPS:
                loads.append(loaded - began)
                steps.append(time.perf_counter() - loaded)
        _wait_for(device)
        total = time.perf_counter() - start
    if device.type != "cuda":
        return steps, loads
    # The host is ahead of a GPU: it waits for data when computing alone is faster than the whole.
    steps, _ = yield from time_windows(partial(rerun_step, loop), loop.amp, num_windows)
    return steps, [max(total / num_windows - statistics.median(steps), 0.0)] * num_windows


def measure(
    doctor: Doctor,
    optimizers: Sequence[torch.optim.Optimizer],
    again: Again,
    rewind: Callable[[], None],
    num_windows: int,
    timed: Generator[Any, None, Times],
) -> Generator[Any, None, Profile]:
    amp, device = doctor.amp, doctor.amp.device
    yield from time_windows(again, amp, NUM_WARM_UPS)
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


def seconds_of(function: Callable[[], Any], device: torch.device | None = None) -> float:
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
        best = [min(a, seconds_of(function, device)) for a, function in zip(best, functions, strict=True)]
        if turn >= 2 and time.perf_counter() > end:
            break
    return best


# --- the device -------------------------------------------------------------------------------------------------------


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
        lacks = name in HALF and not cpu_has(name)
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
            cost[layout_key(op)] += op.seconds
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
