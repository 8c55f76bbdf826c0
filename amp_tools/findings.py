"""Causes of lost time in a profile: pure functions, the `FINDERS`."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from amp_core.doctor.trace import Location
from amp_core.lowp.float8 import MULTIPLE
from amp_core.torch_private import cpu_has
from amp_tools.profile import FLOAT8, HALF, MULTIPLIED, Finding, Op, Profile, flops, sizes, spell

_WAITS = {"_local_scalar_dense", "equal", "nonzero", "_unique2", "masked_select"}
"""Hand the host a number, or a size that depends on one."""

_SMALL = {"cpu": 10e-6, "cuda": 5e-6}
"""Seconds: about what starting an operation takes, so that a shorter one is mostly overhead."""
_VIEWS = 8
"""The same in views, which compute nothing and slow down with the machine: one on 8 numbers takes the time of about 4
(AMD EPYC family 26, under the profiler), so that one of less than 8 computes for less time than it takes to start."""
_NARROW = 64
"""Smaller products are bound by memory traffic, and their sizes usually given: colours, classes, heads."""


def find_slow_units(p: Profile) -> list[Finding]:
    """A device without units for the type of the mode, where it costs more than fp32."""
    unit = p.units
    if unit is None or p.dtype == "float32" or (not unit.emulated and unit.speedup >= 0.8):
        return []
    low = [op for op in p.ops if op.is_product and op.inputs and op.inputs[0].dtype != "float32"]
    evidence = f"a large product in {p.dtype} runs at {unit.speedup:.2f} times the speed of fp32"
    evidence += f"; products in {p.dtype} take {p.share_of(low):.0%} of a step"
    has_bf16 = p.dtype == "bfloat16" and unit.speedup > 1  # beneath emulated float8
    if p.dtype == "float16" and p.device == "cpu":
        has_bf16 = cpu_has("bfloat16")
    other = "amp=bf16" if has_bf16 else "amp=fp32"
    if p.device == "cuda" and p.dtype == "bfloat16" and not has_bf16:
        other = "amp=fp16"
    title = f"{unit.device} {unit.emulated or f'is slower in {p.dtype} than in fp32'}"
    share = p.share_of(low) * (1 - unit.speedup) if unit.speedup < 1 else None
    return [Finding(title, share, evidence, _place(low), "use a mode that this device has units for", other)]


def find_odd_sizes(p: Profile) -> list[Finding]:
    """Sizes of 16-bit products that are no multiples of what the units take. Source as in `lint.find_slow`."""
    products = [op for op in p.ops if op.is_product]
    total = sum(op.seconds for op in products)
    operations = sum(flops(op) for op in products)
    odd: dict[int, list[Op]] = defaultdict(list)
    for op in products:
        dtype = op.inputs[0].dtype if op.inputs else ""
        multiple = MULTIPLE if dtype in FLOAT8 else 8
        if dtype not in (*HALF, *FLOAT8):
            continue
        for size in sorted({size for size in sizes(op) if size >= _NARROW and size % multiple}):
            odd[size].append(op)
    found = []
    # The rest is told by the costliest.
    for size, ops in sorted(odd.items(), key=lambda item: sum(op.seconds for op in item[1]), reverse=True)[:5]:
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
        names = " and ".join(dict.fromkeys(_name(op.place) for op in ops))
        title = f"the size {size} in {names} is no multiple of {multiple}, which Tensor Cores want"
        override = f"batch_size={padded}" if size == p.batch_size else None
        found.append(Finding(title, share, evidence, _place(ops), advice, override))
    return found


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
    override = _twice_the_batch(p) if part > 0.3 and p.accumulation % 2 == 0 else None
    evidence = (
        f"{len(casts) / p.num_steps:g} casts per step, {part:.0%} of their time for weights. Most of it in {worst}"
    )
    title = "casts from one floating-point type to another"
    return [Finding(title, share, evidence, _place(casts), "; ".join(advice), override)]


def find_small_operators(p: Profile) -> list[Finding]:
    """Steps that are made of operations so short that starting them is what takes the time."""
    work, bound = [op for op in p.work if p.device == "cpu" or op.num_kernels], _SMALL[p.device]
    if p.device == "cpu" and (views := [op.seconds for op in p.ops if op.is_view and op.seconds]):
        bound = _VIEWS * statistics.median(views)
    if not work:
        return []
    small = [op for op in work if op.seconds / max(op.num_kernels, 1) < bound]
    at_stake = p.share_of(small) + p.between
    if len(small) < len(work) / 2 or len(small) < 20 * p.num_steps or at_stake < 0.3:
        return []
    what = "kernels" if p.device == "cuda" else "operations"
    evidence = (
        f"{len(work) / p.num_steps:.0f} operations per step of {spell(statistics.median(op.seconds for op in work))} "
        f"(median); {len(small) / len(work):.0%} of them are {what} below {bound * 1e6:.0f} µs and take "
        f"{p.share_of(small):.0%} of the time, and {p.between:.0%} is spent between operations"
    )
    override = _twice_the_batch(p)
    advice = "larger micro-batches: the same number of operations for more samples"
    if override and "accumulation" not in override:
        advice += " (this one changes the training: more samples per step)"
    if p.device == "cuda":
        advice += "; or torch.compile(model, mode='reduce-overhead'), which starts a step's kernels all at once"
    return [Finding("many small operations", at_stake, evidence, _place(small), advice, override)]


def _twice_the_batch(p: Profile) -> str | None:
    """The setting for micro-batches twice as large, with as many samples per step as before where that can be."""
    if not p.batch_size:
        return None
    return f"batch_size={2 * p.batch_size}" + (f" accumulation={p.accumulation // 2}" * (p.accumulation % 2 == 0))


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
            evidence += "; on a CPU there is nothing to wait for, on a GPU each empties the queue of kernels"
        found.append(Finding(f"waits for the device at {source}", share, evidence, str(place), advice, override))
    return found


def find_loading(p: Profile) -> list[Finding]:
    """Steps that wait for their data."""
    if p.loading is None:
        return []
    compute, waited = p.compute, p.wait
    share = waited / p.step
    if share < 0.05:
        return []
    needed = math.ceil(p.loading / compute) if compute else p.num_cores
    wanted = max(1, min(needed + (p.device == "cuda"), p.num_cores))
    evidence = (
        f"{spell(waited)} of waiting and {spell(compute)} of computing per step with data.num_workers={p.num_workers}; "
        f"one process makes the data of a step in {spell(p.loading)}"
    )
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
        evidence = f"its step takes {spell(each.seconds / p.num_steps)}, with {len(ops) / p.num_steps:.0f} operations, "
        evidence += f"{how}; and the host waits for the device once per step to know whether to skip"
        advice = "the fused form updates all weights in one kernel and is skipped on the device (fused=True in torch)"
        if not each.has_fused:
            advice = "it has no fused form: another optimizer, such as AdamW"
        override = "optimizer.fused=true" if each.has_fused else None
        found.append(Finding(f"{each.name} is not fused", share, evidence, _place(ops), advice, override))
    return found


def find_channels_first(p: Profile) -> list[Finding]:
    """Convolutions of NCHW tensors in 16 bits, or on a GPU, where channels_last may be faster: to be tried."""
    forward = [op for op in p.ops if op.short == "convolution" and op.inputs and op.inputs[0].is_nchw]
    forward = [op for op in forward if p.device == "cuda" or op.inputs[0].dtype in HALF]
    names = {_name(op.place) for op in forward}
    share = p.share_of(op for op in p.ops if op.short.startswith("convolution") and _name(op.place) in names)
    if share < 0.05:
        return []
    evidence = f"{len(forward) / p.num_steps:g} convolutions per step on NCHW"
    advice = "store networks and images in NHWC (model.to(memory_format=torch.channels_last), and the images)"
    if p.channels_last:
        advice = "perf.channels_last is on, but something before this layer puts the images back: a reshape or a stack"
    override = None if p.channels_last else "perf.channels_last=true"
    return [Finding("convolutions without channels_last", share, evidence, _place(forward), advice, override)]


def find_pointwise_chains(p: Profile) -> list[Finding]:
    """Pointwise operations that follow each other, each of which reads and writes memory for a few operations."""
    chains = list(_chains(p.work))
    members = [op for chain in chains for op in chain]
    share = p.share_of(members)
    if share < 0.05:
        return []
    most = "; ".join(f"{where}: {p.share_of(ops):.1%}" for where, ops in _groups(members)[:3])
    longest = [op.short for op in max(chains, key=len)]
    evidence = f"chains of pointwise operations. Most of their time in {most}. The longest: {', '.join(longest[:8])}"
    evidence += ", ..." if len(longest) > 8 else ""
    advice = "torch.compile fuses them; or write them with one function of torch that does the same"
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
    override = _twice_the_batch(p)
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
        evidence = f"about {spell(seconds)} every {every} steps of {spell(p.step)}"
        enough = 49 * seconds / p.step  # 2%
        digit = 10 ** math.floor(math.log10(enough))
        fewer = f"{name}={math.ceil(enough / digit) * digit}"
        advice = "less often: then it is below 2%"
        found.append(Finding(f"{what} part of the run", share, evidence, name, advice, fewer))
    return found


def find_islands(p: Profile) -> list[Finding]:
    """Products that the fp32 islands of the setting keep from the units of the mode."""
    wide = [op for op in p.ops if op.is_product and op.inputs and op.inputs[0].dtype == "float32"]
    share = p.share_of(wide)
    if not p.keep_fp32 or p.dtype == "float32" or share < 0.05:
        return []
    products = sum(op.is_product for op in p.ops)
    evidence = f"{len(wide)} of {products} products are in fp32, by amp.keep_fp32=[{','.join(p.keep_fp32)}]"
    if p.units is not None:
        evidence += f"; a large one in {p.dtype} runs at {p.units.speedup:.2f} times the speed"
    advice = "keep only what needs fp32: doctor.py forecast names the layers that overflow"
    return [Finding("large fp32 islands", share, evidence, _place(wide), advice, "amp.keep_fp32=[]")]


def find_costly_autocast(p: Profile) -> list[Finding]:
    """A mode that was tried to be slower than fp32 for this network on this device."""
    if "amp=fp32" not in p.trials or p.trials["amp=fp32"].low <= 0:
        return []
    casts = [op for op in p.ops if op.is_cast]
    advice = f"this network is too small for {p.dtype} to pay on this device, or the device has no units for it"
    evidence = f"{len(casts) / p.num_steps:g} casts per step take {p.share_of(casts):.1%} of it"
    return [Finding(f"amp={p.amp} is slower than fp32", None, evidence, _place(casts), advice, "amp=fp32")]


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
    find_islands,
    find_costly_autocast,
)


# --- places, chains ---------------------------------------------------------------------------------------------------


def _shapes(op: Op) -> str:
    first = MULTIPLIED.get(op.short, 0)
    return f"{op.short} of " + " and ".join(str(list(each.shape)) for each in op.inputs[first : first + 2])


def _name(place: Location) -> str:
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
