"""Why a run is not faster: what one of its steps shows, without trying anything else.

A window is computed once more under a dispatch mode that knows modules and source lines. What is found are pure
functions of the `Window`, the `FINDERS`; they count operations, bytes and multiplications, so that they say of a GPU
what they see on a CPU. Only the wait for data is timed. Where the time goes is shown by perf.profile, in a trace.

    for finding in advise(train_step, model, amp):       # a plain loop
        print(finding)
"""

from __future__ import annotations

import math
import os
import statistics
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amp_core.checkpoints.plain_state import all_tensors
from amp_core.doctor.locate import Doctor, doctor_of
from amp_core.doctor.places import Location, current_node
from amp_core.doctor.trace import Trace
from amp_core.doctor.values import named_tensors, storage_key
from amp_core.lowp.products import is_emulated, products_of
from amp_core.run.replay import rerun_step
from amp_core.step.amp import Amp
from amp_core.torch_private import cpu_has

if TYPE_CHECKING:
    from amp_core.run.loop import Loop

_MULTIPLES = {"float16": 8, "bfloat16": 8, "float8_e4m3fn": 16, "float8_e5m2": 16}
"""Of which Tensor Cores want sizes to be, by dtype. Source as in `lint.find_slow`."""
_FACTORS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0}
"""Products of matrices, and which of their inputs is the first factor."""
_PRODUCTS = {*_FACTORS, "convolution", "convolution_backward", "mv", "addmv", "mkldnn_rnn_layer", "_cudnn_rnn"}
_READS = {"_local_scalar_dense", "equal", "nonzero", "_unique2", "masked_select"}
"""Hand the host a number, or a size that depends on one."""
_NARROW = 64
"""Sizes below are usually given: colours, classes, heads."""
_BALANCE = 139
"""Operations per byte of memory traffic below which Tensor Cores wait for memory on each GPU that has them: 125 TFLOP/s
and 0.9 TB/s of a V100 are the least of NVIDIA's data sheets (A100: 156, H100: 295)."""
_LEAST = 0.05
"""Smaller shares are not worth a change."""
_NUM_TIMED = 5


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation took or gave."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    num_bytes: int = 0
    is_weight: bool = False


@dataclass(frozen=True)
class Op:
    """An operation of a window, below autograd and autocast."""

    name: str
    place: Location
    backward: bool = False
    inputs: Sequence[Operand] = ()
    outputs: Sequence[Operand] = ()
    groups: int = 1
    """Of a convolution."""
    is_blocking: bool = False
    """A blocking copy between host and device."""

    @property
    def is_product(self) -> bool:
        return self.name in _PRODUCTS or "attention" in self.name

    @property
    def is_cast(self) -> bool:
        """From one floating-point type to another."""
        if self.name not in ("_to_copy", "copy_") or not self.inputs or not self.outputs:
            return False
        pair = {self.inputs[-1].dtype, self.outputs[0].dtype}
        return len(pair) == 2 and all("float" in dtype for dtype in pair)

    @property
    def dtype(self) -> str:
        """Of its first input."""
        return self.inputs[0].dtype if self.inputs else ""

    @property
    def num_bytes(self) -> int:
        """Read and written, once each."""
        return sum(each.num_bytes for each in (*self.inputs, *self.outputs))

    @property
    def sizes(self) -> tuple[int, ...]:
        """What the units multiply: (rows, inner, columns), or (inputs, outputs) per group of a convolution."""
        if self.name in _FACTORS:
            a, b = self.inputs[_FACTORS[self.name] :][:2]
            return (a.shape[-2], a.shape[-1], b.shape[-1])
        if self.name in ("convolution", "convolution_backward"):
            weight = self.inputs[1 if self.name == "convolution" else 2].shape
            return (weight[1], weight[0] // self.groups)  # of a transposed one the other way round
        return ()


@dataclass(frozen=True)
class Finding:
    """Something that costs time."""

    title: str
    evidence: str
    place: str
    advice: str
    override: str | None = None

    def __str__(self) -> str:
        lines = [self.title]
        for key, text in [("seen", self.evidence), ("place", self.place), ("advice", self.advice)]:
            wrapped = textwrap.wrap(text, 102, break_long_words=False, break_on_hyphens=False)
            lines += [f"  {key if i == 0 else '':<10}{line}" for i, line in enumerate(wrapped)]
        return "\n".join([*lines, *([f"  {'':<10}{self.override}"] if self.override else [])])


@dataclass
class Window:
    """The operations of a step, and the settings that they depend on."""

    ops: list[Op]
    dtype: str = "float32"
    """What the mode multiplies in."""
    device: str = "cpu"
    missing: str = ""
    """What the device has no units for: the mode is emulated."""
    has_bf16: bool = True
    batch_size: int | None = None
    accumulation: int = 1
    keep_fp32: Sequence[str] = ()
    num_workers: int = 0
    num_cores: int = 1
    compute: float = 0.0
    """Seconds of a step, without the wait for its data."""
    loading: float = 0.0
    """Seconds that one process takes to make the data of a step; 0: there is no loader."""

    @property
    def products(self) -> list[Op]:
        return [op for op in self.ops if op.is_product]


# --- finders ----------------------------------------------------------------------------------------------------------


def find_loading(w: Window) -> list[Finding]:
    """Data that take longer to make than a step to compute."""
    wait = max(w.loading / w.num_workers - w.compute, 0.0) if w.num_workers else w.loading
    if wait < _LEAST * (w.compute + wait) or not wait:
        return []
    needed = math.ceil(w.loading / w.compute) if w.compute else w.num_cores
    wanted = max(1, min(needed, w.num_cores))
    evidence = f"one process makes the data of a step in {_ms(w.loading)}, the step takes {_ms(w.compute)}; with "
    evidence += f"data.num_workers={w.num_workers} each step waits about {_ms(wait)}"
    advice, override = f"{needed} worker(s) keep up; there are {w.num_cores} core(s)", f"data.num_workers={wanted}"
    if wanted <= w.num_workers:
        advice, override = "more workers do not help here: decode and resize the data once, beforehand", None
    place = "the input pipeline (data set, its augmentation, the copy to the device)"
    return [Finding("steps wait for their data", evidence, place, advice, override)]


def find_emulated(w: Window) -> list[Finding]:
    """A device without units for the type of the mode."""
    if not w.missing:
        return []
    other = "amp=bf16" if w.has_bf16 else "amp=fp16" if w.device == "cuda" and w.dtype == "bfloat16" else "amp=fp32"
    low = [op for op in w.products if op.dtype != "float32"]
    evidence = f"{len(low)} of {len(w.products)} products of a step are in 16 bits or less"
    return [Finding(w.missing, evidence, _place(low), "use a mode that this device has units for", other)]


def find_islands(w: Window) -> list[Finding]:
    """Products that the fp32 islands of the setting keep from the units of the mode."""
    wide = [op for op in w.products if op.dtype == "float32"]
    if not w.keep_fp32 or w.dtype == "float32" or len(wide) < _LEAST * len(w.products):
        return []
    evidence = f"{len(wide)} of {len(w.products)} products are in fp32, by amp.keep_fp32=[{','.join(w.keep_fp32)}]"
    advice = "keep only what needs fp32: doctor.py forecast names the layers that overflow"
    return [Finding("large fp32 islands", evidence, _place(wide), advice, "amp.keep_fp32=[]")] if wide else []


def find_casts(w: Window) -> list[Finding]:
    """Casts that move more bytes than the products for which they are made."""
    casts = [op for op in w.ops if op.is_cast]
    moved, total = _bytes(casts), _bytes(w.products)
    if moved <= total:
        return []
    forward = [op for op in casts if any(each.is_weight for each in op.inputs)]
    places = {(op.place, op.inputs[-1].shape) for op in forward}  # where their gradients are cast back, too
    part = _bytes(op for op in casts if op in forward or (op.backward and (op.place, op.inputs[-1].shape) in places))
    part /= moved
    advice, override = [], None
    if part > 0.3:
        advice.append(
            "weights are cast once per micro-batch: fewer and larger micro-batches, or a mode whose weights are "
            "16-bit (amp=o2, amp=bf16_pure)"
        )
        override = _twice_the_batch(w) if w.accumulation % 2 == 0 else None
    if part < 0.7:
        advice.append("activations change their type where 16-bit and fp32 operations alternate: fewer fp32 islands")
    evidence = f"{len(casts)} casts per step move {_mb(moved)} ({part:.0%} for weights), products {_mb(total)}"
    title = "casts move more bytes than the products"
    return [Finding(title, evidence, _place(casts), "; ".join(advice), override)]


def find_odd_sizes(w: Window) -> list[Finding]:
    """Sizes of 16-bit products that are no multiples of what the units take."""
    odd: dict[tuple[int, int], list[Op]] = defaultdict(list)
    for op in w.products:
        multiple = _MULTIPLES.get(op.dtype, 1)
        for size in {size for size in op.sizes if size >= _NARROW and size % multiple}:
            odd[size, multiple].append(op)
    found = []
    # The rest is told by the largest.
    for (size, multiple), ops in sorted(odd.items(), key=lambda item: _bytes(item[1]), reverse=True)[:5]:
        padded = size + -size % multiple
        rows = w.batch_size is not None and size % w.batch_size == 0
        advice = f"pad {size} to {padded}" + (", by another batch size or length of the samples" if rows else "")
        evidence = f"{len(ops)} products per step in {ops[0].dtype}, such as {_shapes(ops[0])}"
        evidence += "" if w.device == "cuda" else "; it matters on a GPU, a CPU pads by itself"
        names = " and ".join(dict.fromkeys(_name(op.place) for op in ops))
        title = f"the size {size} in {names} is no multiple of {multiple}, which Tensor Cores want"
        override = f"batch_size={padded}" if size == w.batch_size else None
        found.append(Finding(title, evidence, _place(ops), advice, override))
    return found


def find_small_batch(w: Window) -> list[Finding]:
    """Layers whose weights are read for too few rows: a larger batch costs them hardly any time."""
    every = [op for op in w.products if op.name in ("mm", "addmm") and not op.backward]
    thin = [op for op in every if op.sizes[0] < min(op.sizes[1:]) and _intensity(op) < _BALANCE]
    if not thin or _bytes(thin) < _bytes(every) / 2:
        return []
    intensity = statistics.median(map(_intensity, thin))
    evidence = f"{len(thin)} products per step, such as {_shapes(thin[0])}, do {intensity:.0f} operations per byte "
    evidence += f"(median); below {_BALANCE} a GPU waits for its memory"
    advice = "larger micro-batches: the weights are read once for more rows"
    return [
        Finding("small batches: layers wait for their weights", evidence, _place(thin), advice, _twice_the_batch(w))
    ]


def find_waits(w: Window) -> list[Finding]:
    """Source lines at which the host waits for the device: `.item()`, `float(tensor)`, `if tensor:`, copies.

    On a CPU there is nothing to wait for, and they are found all the same: the loop may run on a GPU some day.
    """
    lines: dict[str, list[Op]] = defaultdict(list)
    for op in w.ops:
        if op.is_blocking or (op.name in _READS and any(each.device == w.device for each in op.inputs)):
            lines[op.place.source].append(op)
    found = []
    for source, ops in sorted(lines.items(), key=lambda item: len(item[1]), reverse=True):
        advice = "keep the number on the device (sum it in a tensor), and read it only where a line is logged"
        override, code = None, ops[0].place.code
        if ".step(" in code:
            advice = "an optimizer that is not fused lets the host decide whether a step is skipped: use a fused one"
            override = "optimizer.fused=true"
        elif any(op.is_blocking for op in ops):
            advice = "copy from page-locked memory with non_blocking=True, or make the tensor on the device"
        evidence = f"{len(ops)} per step: {code or ops[0].name}; each empties the queue of kernels of a GPU"
        found.append(Finding(f"waits for the device at {source}", evidence, str(ops[0].place), advice, override))
    return found


FINDERS = (find_loading, find_emulated, find_waits, find_islands, find_casts, find_small_batch, find_odd_sizes)


def findings_of(window: Window) -> list[Finding]:
    """Everything that is found, what usually costs most first."""
    return [finding for finder in FINDERS for finding in finder(window)]


def _bytes(ops: Iterable[Op]) -> int:
    return sum(op.num_bytes for op in ops)


def _intensity(op: Op) -> float:
    """Multiplications and additions of a product of two matrices per byte."""
    return 2 * math.prod(op.sizes) / max(op.num_bytes, 1)


def _twice_the_batch(w: Window) -> str | None:
    if w.batch_size is None:
        return None
    fewer = f" accumulation={w.accumulation // 2}" if w.accumulation % 2 == 0 else ""
    return f"batch_size={2 * w.batch_size}{fewer}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g} MB"


def _shapes(op: Op) -> str:
    first = _FACTORS.get(op.name, 0)
    return f"{op.name} of " + " and ".join(str(list(each.shape)) for each in op.inputs[first : first + 2])


def _name(place: Location) -> str:
    return f"line {place.source}" if place.module is None else place.module or "the network itself"


def _place(ops: Iterable[Op]) -> str:
    """Where these operations move most bytes, with how many other modules do the same: `blocks.0 and 3 more`."""
    groups: dict[tuple[str, str, bool], list[Op]] = defaultdict(list)
    for op in ops:
        groups[op.place.kind, op.place.source, op.place.module is None].append(op)
    if not groups:
        return "everywhere"
    group = max(groups.values(), key=_bytes)
    place, names = group[0].place, list(dict.fromkeys(_name(op.place) for op in group))
    if len(names) == 1:
        return str(place)
    return f"{names[0]} and {len(names) - 1} more ({place.kind}), {place.source}"


# --- watching ---------------------------------------------------------------------------------------------------------


class Listing(Trace):
    """All operations of a window with their places. Looks at no number, so it does not wait for the device."""

    def __init__(self, doctor: Doctor) -> None:
        super().__init__(doctor.names, {})
        tensors = named_tensors(doctor.nets, ())
        self._weights = {storage_key(tensor) for name, tensor in tensors.items() if name.startswith("weight ")}
        self.ops: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not hasattr(func, "_schema"):  # given functions, as torch.cond is
            return super().__torch_dispatch__(func, types, args, kwargs)
        name, node = func.overloadpacket.__name__, current_node()
        place = self.places.of(node, name)
        inputs = [self._operand(tensor) for tensor in all_tensors((args, kwargs))]
        result = func(*args, **kwargs)
        outputs = [self._operand(tensor) for tensor in all_tensors(result)]
        groups = {"convolution": args[8:9], "convolution_backward": args[9:10]}.get(name, (1,))[0]
        asynchronous = kwargs.get("non_blocking") or any(each is True for each in args[2:])
        blocks = not asynchronous and _is_blocking(name, inputs, outputs)
        self.ops.append(Op(name, place, node is not None, inputs, outputs, groups, blocks))
        return result

    def _operand(self, tensor: Tensor) -> Operand:
        dtype, num_bytes = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
        is_weight = storage_key(tensor) in self._weights
        return Operand(tuple(tensor.shape), dtype, tensor.device.type, num_bytes, is_weight)


def _is_blocking(name: str, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> bool:
    """A copy between the host and a GPU. One number to the GPU is handed over with the kernel, without waiting."""
    if name not in ("_to_copy", "copy_") or not inputs or not outputs:
        return False
    return inputs[-1].device != outputs[0].device and not (inputs[-1].device == "cpu" and inputs[-1].shape == ())


def _window_of(amp: Amp, listing: Listing) -> Window:
    """What the mode and the device add to the operations."""
    low = amp.dtype if amp.config.update is None else getattr(torch, amp.config.weights)
    name, device = str(low).removeprefix("torch."), amp.device
    if device.type == "cuda":
        capability, what = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        lacks = (name == "float16" and capability < (7, 0)) or (name == "bfloat16" and not has_bf16)
    else:
        what, has_bf16 = f"this CPU ({torch.backends.cpu.get_cpu_capability()})", cpu_has("bfloat16")
        lacks = name in _MULTIPLES and not cpu_has(name)
    missing = f"{what} has no units for {name}, and emulates them" if lacks else ""
    if (form := amp.config.format) is not None and is_emulated(device, products_of(amp.config)):
        missing = f"{what} has no units for {form}, and emulates them in fp32"
    return Window(listing.ops, name, device.type, missing, has_bf16)


def advise(step: Callable[[], Any], nets: nn.Module | Iterable[tuple[str, nn.Module]], amp: Amp) -> list[Finding]:
    """Look at one step of a plain training loop, which is taken. Its data are not looked at.

    Args:
        step: computes a window and takes its step.
        nets: one network, or pairs of a name and a network.
        amp: the mode that trains.
    """
    with (listing := Listing(Doctor(amp, nets))):
        step()
    return findings_of(_window_of(amp, listing))


def advise_run(loop: Loop, found: list[Window]) -> Generator[Any, None, None]:
    """A driver (`env.driver`) that looks at a recipe from where it stands. Appends to `found`."""
    cfg, seconds = loop.cfg, []
    for _ in range(_NUM_TIMED):
        with rerun_step(loop) as window:
            began = time.perf_counter()
            yield window
            if loop.amp.device.type == "cuda":
                torch.cuda.synchronize(loop.amp.device)
            seconds.append(time.perf_counter() - began)
    with rerun_step(loop) as window, (listing := Listing(doctor_of(loop))):
        yield window
    w = _window_of(loop.amp, listing)
    w.batch_size, w.accumulation, w.keep_fp32 = cfg.batch_size, loop.feed.accumulation, list(cfg.amp.keep_fp32)
    w.num_workers = cfg.data.num_workers
    w.num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    w.compute = statistics.median(seconds[1:])  # the first prepares kernels
    with loop.feed.loading(loop.samples, num_workers=0) as windows:
        seconds = []
        for _ in range(_NUM_TIMED):
            began = time.perf_counter()
            next(windows)
            seconds.append(time.perf_counter() - began)
    w.loading = statistics.median(seconds[1:])
    found.append(w)


def to_dict(window: Window) -> dict[str, Any]:
    """Plain values, for JSON."""
    settings = {key: value for key, value in vars(window).items() if key != "ops"}
    findings = [asdict(finding) for finding in findings_of(window)]
    return settings | {"operations": len(window.ops), "findings": findings}
