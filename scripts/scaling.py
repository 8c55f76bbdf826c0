"""Check the memory model, `amp_core/layouts/memory_model.py`, against counted bytes: of every layout, on CPUs.

    python scripts/scaling.py              # 1 and 2 processes, about half a minute

Trains a small language model, and counts the storages that a rank holds and the tensors that it hands to collectives.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import Amp, Ema, sync_grads
from amp_core.config.rules import amp_config
from amp_core.config.schema import SHARDED
from amp_core.layouts.ddp import wrap_ddp
from amp_core.layouts.fsdp import build_mesh, wrap_fsdp
from amp_core.layouts.memory_model import Collective, Memory, lay_out, memory, memory_of, traffic, weights_of
from amp_core.layouts.zero import share_state
from amp_core.lowp.weights import master_params
from amp_core.memory.recompute import recompute_blocks
from amp_core.models.gpt import GPT
from amp_core.run.teardown import end_process_group
from amp_core.tensors import local

TOLERANCE = 0.02
"""Between model and measurement, relative. Not modelled: slices are cut at multiples of 64 elements."""
SIZES: dict[str, Any] = {"vocab_size": 256, "length": 16, "width": 64, "depth": 4, "heads": 2}


@dataclass(frozen=True)
class Case:
    layout: str
    num_ranks: int = 1
    mode: str = "bf16"
    accumulation: int = 1
    zero: bool = False
    compress: bool = False
    recompute: bool = False
    shard_size: int | None = None


CASES = [
    *(Case("single", mode=mode) for mode in ("fp32", "bf16", "o2", "bf16_pure")),
    *(Case("ddp", 2, accumulation=a) for a in (1, 4)),
    Case("ddp", 2, compress=True),
    *(Case("ddp", 2, mode, zero=zero) for mode, zero in (("o2", False), ("bf16", True), ("o2", True))),
    Case("fsdp", 2, "fp32"),
    *(Case("fsdp", 2, accumulation=a) for a in (1, 4)),
    Case("fsdp", 2, recompute=True),
    Case("hsdp", 2, shard_size=2),
]


class Traffic(TorchDispatchMode):
    """Bytes that collectives are about, by kind, and of the 16-bit copies that autocast makes of weights."""

    KINDS = dict(allreduce="all_reduce", allgather="all_gather", alltoall="all_to_all")  # noqa: C408, RUF012

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.payload: Counter[str] = Counter()
        self.copies = 0
        self._weights = {weight.untyped_storage()._cdata for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_")
            kind = next((kind for prefix, kind in self.KINDS.items() if name.startswith(prefix)), "reduce_scatter")
            # The whole: what is gathered, what is scattered, what is summed.
            self.payload[kind] += max(_num_bytes(arg) for arg in args[:2])
        elif func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._weights:
            self.copies += result.nbytes
        return result


def _num_bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else sum(map(_num_bytes, value)) if isinstance(value, list) else 0


def _held(tensors: Iterable[Tensor | None]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def build(case: Case, amp: Amp) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = GPT(**SIZES)
    amp.prepare(net)
    if case.recompute:
        recompute_blocks(net)
    if case.layout in SHARDED:
        mesh = build_mesh(torch.device("cpu"), case.num_ranks, case.shard_size)
        net = wrap_fsdp(net, mesh, None if amp.dtype is torch.float32 else amp.dtype)
    elif case.layout == "ddp" and not amp.weights:
        net = wrap_ddp(net, torch.device("cpu"), compress=case.compress)
    if case.zero:
        share_state(net)
    return net


def measure(case: Case) -> tuple[Memory, Counter[str], Memory]:
    """What one rank holds and sends in its second step, and what a run says of these networks."""
    amp = Amp.named(case.mode, **({"init_scale": 1024.0} if case.mode == "o2" else {}))  # type: ignore[arg-type]
    net = build(case, amp)
    optimizer, ema = torch.optim.AdamW(master_params(net), fused=True), Ema(net, 0.99)
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        copies = unreduced = 0
        with Traffic(net.parameters() if case.layout not in SHARDED else ()) as counted:
            for i in range(1, case.accumulation + 1):
                with sync_grads(net, when=i == case.accumulation):
                    with amp.autocast():
                        loss = net(tokens[:, :-1]).float().logsumexp(-1).mean()
                    copies, counted.copies = counted.copies, 0
                    amp.backward(loss / case.accumulation)
                if i < case.accumulation:
                    unreduced = max(unreduced, _unreduced(net))
            report = amp.step(optimizer)
        masters = master_params(net)
        held = Memory(
            weights=_held([*local(net.parameters()), *(masters if amp.config.update == "master" else [])]),
            gradients=_held(local(p.grad for p in masters)),  # type: ignore[misc]
            moments=_held(local(v for e in optimizer.state.values() for v in e.values() if v.ndim)),
            averages=_held(local(ema.model.parameters())),
            copies=copies,
            unreduced=unreduced,
        )
        amp.update()
        optimizer.zero_grad()
        ema.update(report)
    return held, counted.payload, memory_of([net], [optimizer], ema, amp.config, accumulation=case.accumulation)


def _unreduced(net: nn.Module) -> int:
    """Whole gradients that a sharded network keeps until the end of a window. torch has no public name for them."""
    modules = [module for module in net.modules() if hasattr(module, "_get_fsdp_state")]
    groups = {module._get_fsdp_state()._fsdp_param_group for module in modules} - {None}  # type: ignore[operator]
    params = [param for group in groups for param in group.fsdp_params]
    grads = [getattr(param, "_unsharded_param", param.sharded_param).grad for param in params]
    return _held([*(param.unsharded_accumulated_grad for param in params), *grads])


def modelled(case: Case) -> tuple[Memory, Counter[str]]:
    """What a rank holds, and the bytes that collectives are about, from the shapes alone."""
    amp = amp_config(case.mode)
    with torch.device("meta"):
        net = GPT(**SIZES)
    weights = lay_out(weights_of(net, amp), case.layout, case.num_ranks, shard_size=case.shard_size, zero=case.zero)
    # Only BatchNorm and islands keep fp32 weights in every mode, and a language model has none.
    weights = [replace(weight, low=amp.update is not None, averaged=True) for weight in weights]
    payload: Counter[str] = Counter()
    for each in traffic(weights, amp, case.num_ranks, accumulation=case.accumulation, compress=case.compress):
        payload[each.kind] += each.payload
    return memory(weights, amp, accumulation=case.accumulation), payload


def sent(payload: Counter[str], case: Case) -> float:
    """Bytes that a rank sends; hsdp's all-reduce is between groups."""
    ranks = dict.fromkeys(payload, case.shard_size or case.num_ranks)
    ranks["all_reduce"] = case.num_ranks // (case.shard_size or 1)
    return sum(Collective(kind, ranks[kind], num, 1).sent for kind, num in payload.items())


def check(rank: int, num_ranks: int, folder: str) -> None:
    """Write the differences of the cases of this many processes, and whether a run says what the model says."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    found = []
    try:
        for case in (case for case in CASES if case.num_ranks == num_ranks):
            (held, payload, said), (model, expected) = measure(case), modelled(case)
            parts = ("weights", "gradients", "moments", "averages", "copies", "unreduced")
            pairs = [(getattr(model, part), getattr(held, part)) for part in parts]
            pairs.append((sent(expected, case), sent(payload, case)))
            found.append((repr(case), max(abs(a - b) / max(a, b, 1) for a, b in pairs), said == model))
    finally:
        end_process_group()
    torch.save(found, f"{folder}/{num_ranks}-{rank}.pt")


def main() -> int:
    """The exit code is 1 if the model is off."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    wrong = 0
    # Ranks are forked from a server that has imported what they need, once.
    mp.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "amp_core"])
    for num_ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            if num_ranks == 1:
                check(0, 1, folder)
            else:
                mp.start_processes(check, (num_ranks, folder), num_ranks, start_method="forkserver")
            rows = [torch.load(f"{folder}/{num_ranks}-{rank}.pt", weights_only=True) for rank in range(num_ranks)]
        for name, largest, is_said in itertools.chain(*rows):
            print(f"{largest:7.3%} off, {'' if is_said else 'not '}what a run says: {name}")
            wrong += largest >= TOLERANCE or not is_said
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
