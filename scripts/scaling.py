"""Memory and traffic of every layout: the model `amp_core/layouts/memory_model.py` against counted bytes.

    python scripts/scaling.py              # 1 and 2 processes, about half a minute

Trains a small language model in every layout on CPUs, and counts bytes: of the storages that a rank holds, and of the
tensors that it hands to collectives. The tables of docs/SCALING.md are computed from that model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import Amp, Ema, sync_grads
from amp_core.config.rules import amp_config
from amp_core.config.schema import SHARDED
from amp_core.layouts.ddp import wrap_ddp
from amp_core.layouts.fsdp import build_mesh, wrap_fsdp
from amp_core.layouts.memory_model import (
    Collective,
    Memory,
    lay_out,
    memory,
    memory_of,
    traffic,
    weights_of,
)
from amp_core.layouts.zero import share_state
from amp_core.lowp.weights import master_params
from amp_core.memory.recompute import recompute_blocks
from amp_core.models.gpt import GPT
from amp_core.run.teardown import end_process_group
from amp_core.tensors import local

CPU = torch.device("cpu")
TOLERANCE = 0.02
"""Between model and measurement, relative. What is not modelled: slices are cut at multiples of 64 elements."""


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
    *(Case("ddp", 2, accumulation=a) for a in (1, 4)),
    Case("ddp", 2, compress=True),
    Case("ddp", 2, "o2"),
    Case("ddp", 2, zero=True),
    Case("ddp", 2, "o2", zero=True),
    Case("fsdp", 2, "fp32"),
    *(Case("fsdp", 2, accumulation=a) for a in (1, 4)),
    Case("fsdp", 2, recompute=True),
    Case("hsdp", 2, shard_size=2),
]


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


def modelled(case: Case) -> tuple[Memory, list[Collective]]:
    """From the shapes alone."""
    amp = amp_config(case.mode)
    with torch.device("meta"):
        net = GPT(vocab_size=256, length=16, width=64, depth=4, heads=2)
    weights = lay_out(weights_of(net, amp), case.layout, case.num_ranks, shard_size=case.shard_size, zero=case.zero)
    # Norms keep fp32 weights in no mode: only BatchNorm and islands do, and a language model has none.
    weights = [replace(weight, low=amp.update is not None, averaged=True) for weight in weights]
    exchanged = traffic(weights, amp, case.num_ranks, accumulation=case.accumulation, compress=case.compress)
    return memory(weights, amp, accumulation=case.accumulation), exchanged


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


def difference(case: Case, held: Memory, payload: dict[str, int]) -> float:
    """The largest difference between what a rank holds and sends and the model, relative."""
    model, exchanged = modelled(case)
    parts = ("weights", "gradients", "moments", "averages", "copies", "unreduced")
    pairs = [(getattr(model, part), getattr(held, part)) for part in parts]
    pairs.append((sent(by_kind(exchanged), case), sent(payload, case)))
    return max(abs(a - b) / max(a, b, 1) for a, b in pairs)


def measured(rank: int, num_ranks: int, folder: str) -> list[tuple[str, float, bool]]:
    """Cases of this many processes, their differences, and whether a run would say what the model says."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    try:
        found = []
        for case in (case for case in CASES if case.num_ranks == num_ranks):
            held, payload, said = measure(case)
            name = f"{case.name} {case.mode} x {case.num_ranks}, accumulation {case.accumulation}"
            found.append((name, difference(case, held, payload), said == modelled(case)[0]))
    finally:
        end_process_group()
    torch.save(found, f"{folder}/{rank}.pt")
    return found


def compare(num_ranks: int) -> list[tuple[str, float, bool]]:
    """What `measured` returns, of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(measured, (num_ranks, folder), num_ranks, start_method="spawn")
        return [each for rank in range(num_ranks) for each in torch.load(f"{folder}/{rank}.pt", weights_only=True)]


def main() -> int:
    """The exit code is 1 if the model is off."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    wrong = 0
    for num_ranks in (1, 2):
        for name, largest, is_said in compare(num_ranks):
            print(f"{name:60} {largest:7.3%} off, {'' if is_said else 'not '}what a run says")
            wrong += largest >= TOLERANCE or not is_said
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
