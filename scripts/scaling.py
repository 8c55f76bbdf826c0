"""The page docs/SCALING.md: memory and traffic of every layout, as modelled, as measured, and on paper for many GPUs.

    python scripts/scaling.py              # prints it
    python scripts/scaling.py --write      # puts it into docs/

Really trains a small language model in every layout on 1, 2 and 4 processes, on CPUs, and counts bytes: of the storages
that a rank holds, and of the tensors that it hands to collectives. About half a minute. The model is
`amp_core/layouts/memory_model.py`; the tables for many GPUs are computed from it, for networks without memory.
"""

from __future__ import annotations

import argparse
import functools
import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import Amp, Ema, sync_grads
from amp_core.config.rules import SHARDED, amp_config
from amp_core.layouts.ddp import wrap_ddp
from amp_core.layouts.fsdp import build_mesh, wrap_fsdp
from amp_core.layouts.memory_model import (
    Collective,
    Memory,
    Weight,
    lay_out,
    memory,
    memory_of,
    saved_for_backward,
    traffic,
    weights_of,
)
from amp_core.layouts.zero import share_state
from amp_core.lowp.weights import master_params
from amp_core.memory.recompute import recompute_blocks
from amp_core.models.gpt import GPT
from amp_core.run.teardown import end_process_group
from amp_core.tensors import local

PAGE = Path(__file__).resolve().parent.parent / "docs" / "SCALING.md"
CPU = torch.device("cpu")
TOLERANCE = 0.02
"""Between model and measurement, relative. What is not modelled: slices are cut at multiples of 64 elements."""
ACTIVATION_TOKENS = 100

# Assumptions of the tables for many GPUs.
MACHINE = 8
"""GPUs."""
NVLINK, NETWORK = 450e9, 50e9
"""Bytes per second that a GPU sends within a machine, and to others."""
HOP, FAR_HOP = 3e-6, 10e-6
"""Seconds until a message is there, within a machine and between two."""
FLOPS = 0.4 * 989e12
"""Operations of a GPU per second: 40 % of an H100's peak in bf16."""
TOKENS = 16_384
"""Per GPU and step, in one micro-batch."""
USABLE = 60e9
"""Bytes of a GPU for what does not grow with the batch."""
SIZES = {"124M": (50_304, 768, 12), "1.3B": (50_304, 2048, 24), "6.7B": (50_304, 4096, 32), "70B": (50_304, 8192, 86)}
"""Tokens of the vocabulary, width, depth; the last layer is tied to the embedding."""


@dataclass(frozen=True)
class Case:
    """One way to train."""

    layout: str
    num_ranks: int = 1
    mode: str = "bf16"
    accumulation: int = 1
    zero: bool = False
    compress: bool = False
    recompute: bool = False
    shard_size: int | None = None

    @property
    def name(self) -> str:
        options = {"shard_optimizer": self.zero, "compress": self.compress, "checkpoint_activations": self.recompute}
        return " + ".join([f"`{self.layout}`", *(f"`{key}`" for key, is_on in options.items() if is_on)])


CASES = [
    Case("single", mode="fp32"),
    Case("single"),
    Case("single", mode="o2"),
    Case("single", mode="bf16_pure"),
    *(Case("ddp", n, accumulation=a) for n, a in ((2, 1), (2, 4), (4, 1))),
    Case("ddp", 2, compress=True),
    Case("ddp", 4, compress=True),
    Case("ddp", 2, "o2"),
    Case("ddp", 2, zero=True),
    Case("ddp", 4, zero=True),
    Case("ddp", 4, "o2", zero=True),
    Case("fsdp", 2, "fp32"),
    *(Case("fsdp", n, accumulation=a) for n, a in ((2, 1), (2, 4), (4, 1))),
    Case("fsdp", 2, recompute=True),
    Case("hsdp", 4, shard_size=2),
    Case("hsdp", 4, accumulation=4, shard_size=2),
]


PAGE_TEXT = """\
# Scaling: memory and traffic of each layout

What each layout holds and sends, and when to switch, by the memory model `amp_core/layouts/memory_model.py` (also
behind `dry_run=true`), which is checked against bytes counted on 1, 2 and 4 processes. Made by
`python scripts/scaling.py --write` with torch {version}. Activations are extra; they grow with the batch.

## When to switch

1. `ddp` while it fits: little traffic, overlapped with the backward pass.
2. `layout.shard_optimizer=true` when only the moments do not fit, with much `accumulation`, or in modes with 16-bit
   weights (`o2`, `bf16_pure`), which `fsdp` does not support.
3. `fsdp` when weights or gradients do not fit either, on one machine or a few.
4. `hsdp` with `shard_size` = GPUs per machine when `fsdp`'s ring gets too long: gathers stay within a machine.
5. `perf.checkpoint_activations` when activations do not fit, in any layout: 8 instead of 6 operations per weight and
   token, no more traffic.

Largest network, in billions of weights, that fits {usable:.0f} GB per GPU in `amp=bf16` with AdamW, without / with an
average:

{biggest}

`layout.compress=bf16` sends gradients in bfloat16 and sums them in fp32; fp16 is not offered, since a gradient of 3
overflows at the initial loss scale. `python train.py --help layout` has the other settings.

## Memory

Bytes per weight on one process, for weights of linear layers:

{per_weight}

`fp16`, `o1`, `fp8` are as `bf16`, `tf32` and `o0` as `fp32`; `bf16_pure` with `amp.update=kahan` holds 4 bytes per
weight. SGD with momentum has half of Adam's moments, plain SGD none. "Copies" are the 16-bit weights that autocast
caches, none for norms and embeddings.

`fsdp` divides weights, gradients, moments and average by the number of ranks, `hsdp` by `shard_size`, `shard_optimizer`
only the moments. Instead of copies, sharded layouts hold the largest block, gathered, and with `accumulation` above 1
unsharded fp32 gradients; prefer a larger `batch_size` with `perf.checkpoint_activations=true`.

## Traffic

Bytes per weight that a rank sends per step with very many ranks (`hsdp`: groups of {machine}); a little less with few:

{sent_per_weight}

Replicas all-reduce once per window. `layout.shard_optimizer` gathers the new fp32 weights after the step, which does
not overlap with computing. Sharded layouts gather every block twice per micro-batch, in 16 bits where autocast casts
it: prefer larger micro-batches to `accumulation`.

## Model and measurement

Bytes by the model for a GPT of {small} weights (width 64, depth 4) with AdamW and an average, on the rank that holds
the most, and the largest relative difference to what was measured: {largest}. "Within a step" are copies, or unsharded
gradients. Not modelled: buffers that DDP broadcasts, the alignment of shards to 64 elements. Not measured: the gathered
block and the memory of running collectives.

{comparison}

Activations that a block saves for the backward pass in bf16, per token and feature of the residual stream:
{kept:.1f} bytes, or {kept_less:.1f} with `perf.checkpoint_activations`. For the 6.7B network below and {tokens:,}
tokens that is {example:,.0f} GB or {example_less:,.0f} GB.

## Projection: 8, 64 and 1024 GPUs

Computed from the model, not measured. Assumed: machines of {machine} GPUs that each send {nvlink:.0f} GB/s within the
machine (latency {hop:.0f} us) and {network:.0f} GB/s to others ({far_hop:.0f} us); tree all-reduce, otherwise rings;
{flops:.0f} TFLOP/s in bf16 (40 % of 989), 6 operations per weight and token, {tokens:,} tokens per step in one
micro-batch; `amp=bf16`, AdamW, an average, tied embedding. Replicas overlap with the backward pass (two thirds of the
computing), sharded layouts with all of it, the gather of `shard_optimizer` with nothing.

In a cell: GB per GPU without activations; communication that does not overlap with computing, relative to the time of
computing; tokens per GPU and step at which it overlaps.

{projection}
"""


# --- measuring --------------------------------------------------------------------------------------------------------


class Counter(TorchDispatchMode):
    """Bytes that collectives are about, and bytes of the 16-bit copies that autocast makes of weights."""

    KINDS = {  # noqa: RUF012
        "allreduce": "all_reduce",
        "allgather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "alltoall": "all_to_all",
    }

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.payload: dict[str, int] = {}
        self.copies = 0
        self._weights = {weight.untyped_storage()._cdata for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_")
            kind = next((kind for prefix, kind in self.KINDS.items() if name.startswith(prefix)), name)
            # The whole: what is gathered, what is scattered, what is summed.
            self.payload[kind] = self.payload.get(kind, 0) + max(_num_bytes(arg) for arg in args[:2])
        elif func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._weights:
            self.copies += result.nbytes
        return result


def _num_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0


def build(case: Case, amp: Amp) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = GPT(vocab_size=256, length=16, width=64, depth=4, heads=2)
    amp.prepare(net)
    if case.recompute:
        recompute_blocks(net)
    if case.layout in SHARDED:
        dtype = None if amp.dtype is torch.float32 else amp.dtype
        net = wrap_fsdp(net, build_mesh(CPU, case.num_ranks, case.shard_size), dtype)
    elif case.layout == "ddp" and not amp.weights:
        net = wrap_ddp(net, CPU, compress=case.compress)
    if case.zero:
        share_state(net)
    return net


def kept(depth: int, recompute: bool) -> int:
    """Bytes that a forward pass in bf16 keeps for the backward pass, weights and their copies left out."""
    torch.manual_seed(0)
    net = GPT(vocab_size=256, length=ACTIVATION_TOKENS, width=64, depth=depth, heads=2)
    if recompute:
        recompute_blocks(net)
    tokens = torch.zeros(1, ACTIVATION_TOKENS, dtype=torch.int64)
    with saved_for_backward([*net.parameters(), *net.buffers()]) as saved, torch.autocast("cpu", torch.bfloat16):
        output = net(tokens)
    assert output.requires_grad
    return saved.activations


def per_block(recompute: bool) -> float:
    """Bytes of activations per token, feature of the stream, and block."""
    return (kept(4, recompute) - kept(2, recompute)) / (2 * ACTIVATION_TOKENS * 64)


def measure(case: Case) -> tuple[Memory, dict[str, int], Memory]:
    """What one rank holds and sends in the second step; and what the model says of the very networks."""
    amp = Amp.named(case.mode, **({"init_scale": 1024.0} if case.mode == "o2" else {}))  # type: ignore[arg-type]
    net = build(case, amp)
    optimizer = AdamW(master_params(net), fused=True)
    ema = Ema(net, 0.99)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        counter = Counter(net.parameters() if case.layout not in SHARDED else ())
        counter.__enter__()
        unreduced = 0
        for i in range(case.accumulation):
            tokens = torch.randint(256, (2, 17), generator=generator)
            with sync_grads(net, when=i == case.accumulation - 1):
                with amp.autocast():
                    loss = net(tokens[:, :-1]).float().logsumexp(-1).mean()
                copies, counter.copies = counter.copies, 0
                amp.backward(loss / case.accumulation)
            if i < case.accumulation - 1:
                unreduced = max(unreduced, _unreduced(net))
        report = amp.step(optimizer)
        counter.__exit__(None, None, None)
        masters = master_params(net) if amp.config.update == "master" else []
        held = Memory(
            weights=_storages([*local(net.parameters()), *masters]),
            gradients=_storages(local(p.grad for p in master_params(net))),  # type: ignore[misc]
            moments=_storages(local(v for e in optimizer.state.values() for v in e.values() if v.ndim)),
            averages=_storages(local(ema.model.parameters())),
            copies=copies,
            unreduced=unreduced,
        )
        amp.update()
        optimizer.zero_grad()
        ema.update(report)
    said = memory_of([net], [optimizer], ema, amp.config, accumulation=case.accumulation)
    return held, counter.payload, said


def _storages(tensors: Iterable[Tensor]) -> int:
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def _unreduced(net: nn.Module) -> int:
    """Whole gradients that a sharded network keeps until the end of a window. torch has no public name for them."""
    modules = [module for module in net.modules() if hasattr(module, "_get_fsdp_state")]
    groups = {module._get_fsdp_state()._fsdp_param_group for module in modules} - {None}  # type: ignore[operator]
    params = [param for group in groups for param in group.fsdp_params]
    grads = [getattr(param, "_unsharded_param", param.sharded_param).grad for param in params]
    return _storages(g for g in (*(param.unsharded_accumulated_grad for param in params), *grads) if g is not None)


def _rank(rank: int, num_ranks: int, cases: list[Case], folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{num_ranks}", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    try:
        found = [(vars(held), sent, vars(predicted)) for held, sent, predicted in map(measure, cases)]
        torch.save(found, f"{folder}/{num_ranks}_{rank}.pt")
    finally:
        end_process_group()


def measured(cases: list[Case]) -> list[tuple[Memory, dict[str, int], Memory]]:
    """Measurements of the rank that holds the most, for each case."""
    found: dict[Case, tuple[Memory, dict[str, int], Memory]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in sorted({case.num_ranks for case in cases}):
            mine = [case for case in cases if case.num_ranks == num_ranks]
            mp.start_processes(_rank, (num_ranks, mine, folder), num_ranks, start_method="spawn")
            ranks = [torch.load(f"{folder}/{num_ranks}_{rank}.pt", weights_only=True) for rank in range(num_ranks)]
            for i, case in enumerate(mine):
                seen = [(Memory(**held), sent, Memory(**predicted)) for held, sent, predicted in (r[i] for r in ranks)]
                found[case] = max(seen, key=lambda each: each[0].most)
    return [found[case] for case in cases]


# --- the model --------------------------------------------------------------------------------------------------------


def modelled(case: Case, net: nn.Module | None = None) -> tuple[Memory, list[Collective]]:
    """From the shapes alone."""
    weights = planned(case, net or plain(256, 64, 4, length=16))
    amp = amp_config(case.mode)
    exchanged = traffic(weights, amp, case.num_ranks, accumulation=case.accumulation, compress=case.compress)
    return memory(weights, amp, accumulation=case.accumulation), exchanged


@functools.cache
def plain(vocab_size: int, width: int, depth: int, *, length: int = 2048, tied: bool = False) -> nn.Module:
    with torch.device("meta"):
        return GPT(vocab_size=vocab_size, length=length, width=width, depth=depth, heads=width // 32, tied=tied)


def planned(case: Case, net: nn.Module) -> list[Weight]:
    amp = amp_config(case.mode)
    weights = lay_out(weights_of(net, amp), case.layout, case.num_ranks, shard_size=case.shard_size, zero=case.zero)
    # Norms keep fp32 weights in no mode: only BatchNorm and islands do, and a language model has none.
    return [replace(weight, low=amp.update is not None, averaged=True) for weight in weights]


def sent(kinds: dict[str, int], case: Case) -> float:
    """Bytes that a rank sends, of payloads by kind; hsdp's all-reduce is between groups."""
    total = 0.0
    for kind, payload in kinds.items():
        ranks = case.num_ranks
        if case.shard_size is not None:
            ranks = case.num_ranks // case.shard_size if kind == "all_reduce" else case.shard_size
        total += Collective("", kind, ranks, payload, 1).sent
    return total


def by_kind(exchanged: list[Collective]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in exchanged:
        found[each.kind] = found.get(each.kind, 0) + each.payload
    return found


# --- on paper ---------------------------------------------------------------------------------------------------------


def seconds(each: Collective) -> float:
    """Seconds of a collective: bytes over bandwidth, and the latency of each call."""
    if each.num_ranks == 1:
        return 0.0
    machines = each.num_ranks if each.strides else math.ceil(each.num_ranks / MACHINE)
    together = each.num_ranks // machines  # GPUs of a machine, each of which has a network card of its own
    bandwidth = NVLINK if machines == 1 else min(NVLINK, together * NETWORK)
    if each.kind == "all_reduce":  # a tree, up and down
        way = 2 * (math.ceil(math.log2(together)) * HOP + math.ceil(math.log2(machines)) * FAR_HOP)
    else:  # a ring
        way = (each.num_ranks - machines) * HOP + (machines * FAR_HOP if machines > 1 else 0.0)
    return each.sent / bandwidth + each.calls * way


def projected(case: Case, net: nn.Module) -> tuple[float, float, float]:
    """Bytes of a GPU, communication that is not hidden over the time of computing, and tokens that hide it."""
    held, exchanged = modelled(case, net)
    num_weights = sum(p.numel() for p in net.parameters())
    per_token = (8 if case.recompute else 6) * num_weights / FLOPS
    alone = sum(seconds(each) for each in exchanged if each.what != "gradients" and not is_state_sharded(case))
    beside = sum(seconds(each) for each in exchanged) - alone
    # Replicas reduce during the backward pass, two thirds of the computing; parts are gathered and reduced during all.
    share = 1.0 if is_state_sharded(case) else 2 / 3
    computing = per_token * TOKENS
    return held.most, (alone + max(0.0, beside - share * computing)) / computing, beside / (share * per_token)


def is_state_sharded(case: Case) -> bool:
    return case.layout in SHARDED


def projection() -> str:
    nets = [plain(vocab_size, width, depth, tied=True) for vocab_size, width, depth in SIZES.values()]
    lines = table("GPUs", "layout", *SIZES)
    for gpus in (8, 64, 1024):
        cases = [Case("ddp", gpus), Case("ddp", gpus, zero=True), Case("fsdp", gpus)]
        if gpus > MACHINE:
            cases.append(Case("hsdp", gpus, shard_size=MACHINE))
        for case in cases:
            found = [projected(case, net) for net in nets]
            cells = [f"{held / 1e9:,.1f}; {left:.1%}; {tokens:,.0f}" for held, left, tokens in found]
            lines.append(f"| {gpus} | {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", f"| {' | '.join('---:' if i else '---' for i in range(len(names)))} |"]


MODES = {"`fp32`": "fp32", "`bf16`, `fp16`": "bf16", "`o2`": "o2", "`bf16_pure`": "bf16_pure", "`o3`": "o3"}


def per_weight() -> str:
    """Bytes per weight that one process holds, of a network all of whose weights are those of linear layers."""
    lines = table("mode", "weights", "gradients", "moments (Adam)", "average", "copies, within a step")
    for title, mode in MODES.items():
        held = memory([replace(w, low=mode in ("o2", "bf16_pure", "o3")) for w in _uniform(mode)], amp_config(mode))
        parts = (held.weights, held.gradients, held.moments, held.averages, held.copies)
        lines.append(f"| {title} | {' | '.join(f'{part / 2**20:g}' for part in parts)} |")
    return "\n".join(lines)


def _uniform(mode: str) -> list[Weight]:
    return [Weight((1024, 1024), cast=amp_config(mode).dtype != "float32", averaged=True)]


def sent_per_weight() -> str:
    """Bytes per weight and step that a rank sends, of a million ranks, in groups of 8 where there are groups."""
    num_ranks = 2**20
    lines = table("layout, mode", "gradients", "weights", "accumulation=1", "accumulation=8")
    cases = [
        Case("ddp", num_ranks),
        Case("ddp", num_ranks, compress=True),
        Case("ddp", num_ranks, zero=True),
        Case("fsdp", num_ranks, "fp32"),
        Case("fsdp", num_ranks),
        Case("hsdp", num_ranks, shard_size=8),
    ]
    for case in cases:
        weights = lay_out(
            [replace(weight, shape=(num_ranks, 1)) for weight in _uniform(case.mode)],
            *(case.layout, num_ranks),
            shard_size=case.shard_size,
            zero=case.zero,
        )

        def amount(what: str, accumulation: int, case: Case = case, weights: list[Weight] = weights) -> float:
            options: dict[str, Any] = {"accumulation": accumulation, "compress": case.compress}
            exchanged = traffic(weights, amp_config(case.mode), num_ranks, **options)
            return sum(each.sent for each in exchanged if each.what == what) / num_ranks

        sums = [amount("gradients", a) + amount("weights", a) for a in (1, 8)]
        parts = [amount("gradients", 1), amount("weights", 1), *sums]
        lines.append(f"| {case.name}, {case.mode} | {' | '.join(f'{part:.3g}' for part in parts)} |")
    return "\n".join(lines)


# --- the page ---------------------------------------------------------------------------------------------------------


def row(case: Case, held: Memory, payload: dict[str, int]) -> str:
    """What the model says, in bytes, and the largest difference of a measurement to it."""
    model, exchanged = modelled(case)
    numbers = [(model.total, held.total), (model.copies + model.unreduced, held.copies + held.unreduced)]
    numbers.append((round(sent(by_kind(exchanged), case)), round(sent(payload, case))))
    difference = max(abs(a - b) / max(b, 1) for a, b in numbers)
    cells = " | ".join(f"{a:,}" for a, _ in numbers)
    return f"| {case.name} | {case.mode} | {case.num_ranks} | {case.accumulation} | {cells} | {difference:.3%} |"


def comparison() -> str:
    lines = table(*("layout", "mode", "ranks", "accumulation", "held", "within a step", "sent per step", "difference"))
    lines += [row(case, held, payload) for case, (held, payload, _) in zip(CASES, measured(CASES), strict=True)]
    return "\n".join(lines)


def differences(rows: str) -> list[float]:
    """The last cells of the comparison's rows."""
    return [float(line.rstrip("| %").rpartition(" ")[2]) / 100 for line in rows.splitlines()[2:]]


def biggest() -> str:
    """Weights that fit, for some numbers of GPUs."""
    lines = table("layout", "8 GPUs", "64 GPUs", "1024 GPUs")
    for case in (Case("ddp"), Case("ddp", zero=True), Case("fsdp"), Case("hsdp", shard_size=MACHINE)):
        cells = []
        for gpus in (8, 64, 1024):
            sizes = []
            for averaged in (False, True):
                weights = lay_out(
                    [replace(weight, shape=(2**20, 1), averaged=averaged) for weight in _uniform("bf16")],
                    *(case.layout, gpus),
                    shard_size=case.shard_size,
                    zero=case.zero,
                )
                held = memory(weights, amp_config("bf16"))
                sizes.append(f"{USABLE / ((held.total + held.copies) / 2**20) / 1e9:,.1f}")
            cells.append(" / ".join(sizes))
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    rows = comparison()
    example = TOKENS * SIZES["6.7B"][1] * SIZES["6.7B"][2] / 1e9
    return PAGE_TEXT.format(
        version=".".join(torch.__version__.split(".")[:2]),
        per_weight=per_weight(),
        sent_per_weight=sent_per_weight(),
        small=f"{sum(p.numel() for p in plain(256, 64, 4, length=16).parameters()):,}",
        largest=f"{max(differences(rows)):.2%}",
        comparison=rows,
        kept=per_block(False),
        kept_less=per_block(True),
        example=example * per_block(False),
        example_less=example * per_block(True),
        machine=MACHINE,
        nvlink=NVLINK / 1e9,
        network=NETWORK / 1e9,
        hop=HOP * 1e6,
        far_hop=FAR_HOP * 1e6,
        flops=FLOPS / 1e12,
        tokens=TOKENS,
        projection=projection(),
        usable=USABLE / 1e9,
        biggest=biggest(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.parent.name}/{PAGE.name} instead")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
