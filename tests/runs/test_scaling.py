"""The memory model says what is measured: storages that a rank holds, tensors that it hands to collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import Amp, Ema, sync_grads
from amp_core.config.rules import amp_config
from amp_core.config.schema import SHARDED
from amp_core.layouts.ddp import wrap_ddp
from amp_core.layouts.fsdp import build_mesh, shard_for
from amp_core.layouts.memory_model import Collective, Memory, Weight, memory, memory_of, traffic, weights_of
from amp_core.layouts.zero import bucket_size, share_state
from amp_core.lowp.masters import master_params
from amp_core.memory.recompute import recompute_blocks
from amp_core.models.gpt import GPT
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
    *(Case("fsdp", 2, mode) for mode in ("fp32", "o2", "bf16_pure")),
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
    # A `LowShard` is its 16 bits.
    storages = [getattr(tensor, "low", tensor).untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def build(case: Case, amp: Amp) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = GPT(**SIZES)
    amp.prepare(net, gathers=case.layout in SHARDED)
    if case.recompute:
        recompute_blocks(net)
    if case.layout in SHARDED:
        net = shard_for(amp, net, build_mesh(torch.device("cpu"), case.num_ranks, case.shard_size))
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
            weights=_held(local([*net.parameters(), *masters])),
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
    # Only BatchNorm and islands keep fp32 weights in every mode, and a language model has none.
    where = {"parts": (case.shard_size or case.num_ranks) if case.layout in SHARDED else 1}
    where |= {"slices": case.num_ranks if case.zero else 1}
    weights = [replace(w, low=amp.update is not None, averaged=True, **where) for w in weights_of(net, amp)]
    payload: Counter[str] = Counter()
    for each in traffic(weights, amp, case.num_ranks, accumulation=case.accumulation, compress=case.compress):
        payload[each.kind] += each.payload
    return memory(weights, amp, accumulation=case.accumulation), payload


def sent(payload: Counter[str], case: Case) -> float:
    """Bytes that a rank sends; hsdp's all-reduce is between groups."""
    ranks = dict.fromkeys(payload, case.shard_size or case.num_ranks)
    ranks["all_reduce"] = case.num_ranks // (case.shard_size or 1)
    return sum(Collective(kind, ranks[kind], num, 1).sent for kind, num in payload.items())


def differences(rank: int, cases: list[Case]) -> list[tuple[str, float, bool]]:
    """(case, largest relative difference, whether a run says what the model says)."""
    found = []
    for case in cases:
        (held, payload, said), (model, expected) = measure(case), modelled(case)
        parts = ("weights", "gradients", "moments", "averages", "copies", "unreduced")
        pairs = [(getattr(model, part), getattr(held, part)) for part in parts]
        pairs.append((sent(expected, case), sent(payload, case)))
        found.append((repr(case), max(abs(a - b) / max(a, b, 1) for a, b in pairs), said == model))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_model_is_what_is_measured(num_ranks: int, on_ranks: Any) -> None:
    """And what a run says of itself is the model."""
    for rank in on_ranks(differences, [case for case in CASES if case.num_ranks == num_ranks], num_ranks=num_ranks):
        assert rank and not [row for row in rank if row[1] >= TOLERANCE or not row[2]]


def test_rows_are_not_cut() -> None:
    """With 5 rows on 2 ranks one holds 3, and both gather 6."""
    weights = [Weight((5, 10), parts=2)]
    amp = amp_config("fp32")
    assert memory(weights, amp).weights == 4 * 30
    gathered = next(each for each in traffic(weights, amp, 2) if each.kind == "all_gather")
    assert (gathered.payload, gathered.sent) == (2 * 4 * 60, 4 * 60)


def test_two_neighbouring_groups_are_whole_at_a_time() -> None:
    """The next is gathered while one is used: of 8, 8, 16 and 4 numbers the last two."""
    weights = [Weight((rows, 4), group=group, parts=2) for group, rows in enumerate((2, 2, 4, 1))]
    assert memory(weights, amp_config("fp32")).gathered == 4 * (16 + 4)


def test_a_frozen_base_in_8_bits_counts_as_it_is_stored() -> None:
    net = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 4, bias=False)).requires_grad_(False)
    net[0].weight = nn.Parameter(torch.zeros(32, 64, dtype=torch.int8), requires_grad=False)
    net[1].requires_grad_()
    optimizer = torch.optim.AdamW(net[1].parameters())
    found = memory_of([net], [optimizer], None, amp_config("bf16"))
    held = sum(param.nbytes for param in net.parameters())
    assert (found.weights, found.gradients, found.moments) == (held, 4 * 128, 8 * 128)
    assert found.copies == 2 * 128  # autocast casts what is floating point


def test_sharded_gradients_are_whole_until_the_last_micro_batch() -> None:
    weights = [Weight((6, 10), parts=2), Weight((8,), moments=None, parts=2)]
    found = [memory(weights, amp_config("fp32"), accumulation=count).unreduced for count in (1, 2, 3)]
    assert found == [0, 4 * 60, 4 * 60]


def test_averages_and_weights_outside_of_networks_count() -> None:
    net, outside = nn.Linear(8, 4), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*net.parameters(), outside], lr=0.1, momentum=0.9)
    found = memory_of([net], [optimizer], Ema(net, 0.9), amp_config("fp32"))
    assert (found.averages, found.moments) == (4 * 36, 4 * 39)


def test_a_block_is_gathered_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    groups = [weight.group // 2 for weight in weights_of(net, amp_config("bf16"))]
    assert groups == [0, 0, 1, 1, 1, 1]


def test_only_sharded_state_gathers_weights_in_calls_of_32_mib_or_more() -> None:
    amp, weights = amp_config("fp32"), [Weight((1 << 23, 2))]
    for zero, expected in ((False, []), (True, [(4 << 24, 2)])):
        sent = traffic([replace(w, slices=2 if zero else 1) for w in weights], amp, 2)
        assert [(each.payload, each.calls) for each in sent if each.kind == "all_gather"] == expected
        assert [(each.payload, each.calls) for each in sent if each.payload == 4] == [(4, 1)]  # one check of finiteness
    assert traffic(weights, amp, 1) == []
    assert [bucket_size(ranks) for ranks in (2, 128, 1024)] == [1 << 23, 1 << 23, 1 << 26]
