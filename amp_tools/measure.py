"""Where the time of a run's steps goes: each operation with its time, module and source line."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from amp_core.data.loading import Batches
from amp_core.doctor.locate import Doctor
from amp_core.doctor.trace import Location, Trace, current_node, is_view, named_tensors, storage_key, tensors_in
from amp_core.lowp.float8 import float8_is_emulated
from amp_core.lowp.lint import find_unsafe
from amp_core.run.replay import rerun_step
from amp_core.step.amp import Amp
from amp_core.torch_private import cpu_has
from amp_tools.profile import HALF, Finding, Op, Operand, OptimizerFacts, Profile, Units

if TYPE_CHECKING:
    from amp_core.run.loop import Loop
_POINTWISE = {"native_dropout", "native_dropout_backward", "fill_", "zero_", "zeros_like", "ones_like"}
"""Those without torch's tag that move as many bytes as they compute numbers."""
_WITHOUT_WORK = ("empty", "new_empty", "set_", "resize_", "detach", "lift_fresh")
_WITHOUT_WORK += ("_local_scalar_dense", "record_stream")
_PREFETCHED = inspect.signature(Batches).parameters["prefetch"].default  # by each worker
_MARK = "amp_recipes::window"
NUM_WARM_UPS = 3
_PREFETCHED = inspect.signature(Batches).parameters["prefetch"].default  # by each worker
_MARK = "amp_recipes::window"
NUM_WARM_UPS = 3
NUM_PAIRS = 6
"""Turns without and with a change: the median of so many ratios lies outside of their range with a chance of 1/32."""
_PASSED = 4
"""Events of other operations that may lie before the next one, such as the autocast of a product around its casts."""
_FAR = 100  # events between two operations of one thread; backward nodes and composite operations lie between


# --- watching ---------------------------------------------------------------------------------------------------------


class Listing(Trace):
    """All operations of a window with their places. Looks at no number, so it does not wait for the device."""

    def __init__(self, names: Mapping[nn.Module, str], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(names, {})
        self._tensors = {storage_key(tensor): name for name, tensor in tensors.items()}
        self.ops: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        node = current_node()
        place = self._place_of(node, func.overloadpacket.__name__)
        inputs = [self._operand(tensor) for tensor in tensors_in((args, kwargs))]
        result = func(*args, **kwargs)
        outputs = [self._operand(tensor) for tensor in tensors_in(result)]
        short = func.overloadpacket.__name__
        first = {"convolution": 3, "convolution_backward": 4}.get(short)
        is_pointwise = torch.Tag.pointwise in func.tags or short in _POINTWISE
        op = Op(
            func._schema.name,
            place,
            node is not None,
            inputs,
            outputs,
            is_view(func) or short.startswith(_WITHOUT_WORK),
            False,
            _is_blocking(short, inputs, outputs) and not (kwargs.get("non_blocking") or True in args[2:]),
            () if first is None else tuple(map(_plain, args[first : first + 6])),
        )
        op.is_pointwise = is_pointwise or op.is_cast
        self.ops.append(op)
        return result

    def _operand(self, tensor: Tensor) -> Operand:
        name = self._tensors.get(storage_key(tensor), "")
        nchw = tensor.ndim == 4 and tensor.layout is torch.strided
        return Operand(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.device.type,
            tensor.numel() * tensor.element_size(),
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
            found = [text for kind, text in inherited if kind in ("sigmoid", "probability") and "float16" in text]
            if found:
                evidence = f"{call.name} of a {found[0]}: above 0.998 in bf16, and 0.9998 in fp16, it is rounded to 1"
                advice = (
                    "binary_cross_entropy_with_logits takes the logits; or put sigmoid and loss into an fp32 island"
                )
                self._hint("bce", call.place, "the logarithm of a 16-bit probability", evidence, advice)
        for _, text in {mark for mark in marks - inherited if mark[0] == "eps"}:
            advice = "use an eps that 16 bits can hold (1e-5), or compute this line in fp32"
            self._hint("eps", call.place, "an eps that is 0 in 16 bits", text, advice)
        return marks

    def _hint(self, kind: str, place: Location, title: str, evidence: str, advice: str) -> None:
        self.hints.setdefault((kind, place.source), Finding(title, None, evidence, str(place), advice))

    def findings(self, doctor: Doctor) -> list[Finding]:
        """With positions that fell together, and what the settings of modules tell."""
        for found in self.collisions:
            evidence = f"{found.distinct} integers up to {found.largest:g} in {found.dtype}: {found.kept} are different"
            advice = "compute positions, and what they are multiplied with, in fp32: inside of autocast(enabled=False)"
            self._hint("positions", found.place, "positions that 16 bits cannot tell apart", evidence, advice)
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


def time_windows(
    again: Again, amp: Amp, num_windows: int, clock: Callable[[], float] = time.perf_counter
) -> Generator[Any, None, Times]:
    """Seconds of steps, and of their waiting for data: none."""
    steps = []
    for _ in range(num_windows):
        with again() as window:
            _wait_for(amp.device)
            began = clock()
            yield window
            _wait_for(amp.device)
            steps.append(clock() - began)
    return steps, [0.0] * num_windows


def time_with_loader(loop: Loop, num_windows: int) -> Generator[Any, None, Times]:
    """The same with the data as training loads them, once the batches loaded ahead are used up.

    They are drained without computing; then as many windows are computed, in which workers that are fast enough get
    ahead again. Workers deliver in bursts of a batch each: several bursts are measured.
    """
    device, workers = loop.amp.device, loop.cfg.data.num_workers
    ahead = math.ceil(workers * _PREFETCHED / loop.feed.accumulation) + 1  # one more that is on its way to the device
    num_warm_ups, num_windows = max(NUM_WARM_UPS, ahead), max(num_windows, 4 * ahead)
    steps, loads = [], []
    with loop.feed.loading(loop.samples) as windows:
        for _ in range(ahead):
            next(windows)
        for number in range(num_warm_ups + num_windows):
            if number == num_warm_ups:
                _wait_for(device)
                start = time.perf_counter()
            began = time.perf_counter()
            window = next(windows)
            loaded = time.perf_counter()
            with rerun_step(loop, window):
                yield window
            if number >= num_warm_ups:
                loads.append(loaded - began)
                steps.append(time.perf_counter() - loaded)
        _wait_for(device)
        total = time.perf_counter() - start
    if device.type != "cuda":
        return steps, loads
    # The host is ahead of a GPU: it waits for data when computing alone is faster than the whole.
    steps, _ = yield from time_windows(partial(rerun_step, loop), loop.amp, num_windows)
    return steps, [max(total / num_windows - statistics.median(steps), 0.0)] * num_windows


def clock_of(device: torch.device) -> Callable[[], float]:
    """The CPU time of the process, which other processes disturb less; on a GPU, whose time it is not, the wall's."""
    return time.process_time if device.type == "cpu" else time.perf_counter


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
