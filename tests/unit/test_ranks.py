"""All ranks skip the same steps: with weights of their own, poisoned statistics, or no gradient at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiers import rows
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from amp_core import Amp, Clip, Ema, sync_grads
from amp_core.layouts.ddp import wrap_ddp

INF = float("inf")
OnRanks = Callable[..., list[Any]]
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd_fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.1),
    "adamw_fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "adagrad_fused": lambda p: Adagrad(p, lr=0.1, fused=True),
}


def values(net: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in net.state_dict().values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- a backbone under DDP, and a head of which every rank holds its own part


def sharded(rank: int, mode: str, kind: str, joint: bool, bad_rank: int | None) -> dict[str, Any]:
    """Three steps; in the second the head of `bad_rank` gets an infinite gradient after the backward pass."""
    backbone = DistributedDataParallel(nn.Linear(4, 4))
    torch.manual_seed(rank)
    head = nn.Linear(4, 2)
    groups = [[*backbone.parameters(), *head.parameters()]] if joint else [backbone.parameters(), head.parameters()]
    optimizers = [OPTIMIZERS[kind](group) for group in groups]
    amp = Amp.named(mode)
    taken, scales = [], []
    for i in range(3):
        torch.manual_seed(10 * i + rank)
        if i == 1 and bad_rank is None:
            continue  # the run that never saw it
        with amp.autocast():
            loss = head(backbone(torch.randn(8, 4))).float().square().mean() / 8
        amp.backward(loss)
        if i == 1 and rank == bad_rank:
            head.weight.grad[0, 0] = INF
        taken.append([bool(amp.step(optimizer).taken) for optimizer in optimizers])
        amp.update()
        scales.append(amp.scale)
        for optimizer in optimizers:
            optimizer.zero_grad()
    return {"backbone": values(backbone), "head": values(head), "taken": taken, "scales": scales}


@pytest.mark.parametrize("kind", rows(OPTIMIZERS, "adamw_fused"))
@pytest.mark.parametrize("mode", ["fp16", "fp32"])
def test_an_overflow_of_one_rank_s_own_weights_is_skipped_by_all(mode: str, kind: str, on_ranks: OnRanks) -> None:
    a, b = on_ranks(sharded, mode, kind, True, 0)
    assert a["taken"] == b["taken"] == [[True], [False], [True]]
    assert a["scales"] == b["scales"] == ([65536, 32768, 32768] if mode == "fp16" else [1, 1, 1])
    assert same(a["backbone"], b["backbone"])
    never = on_ranks(sharded, mode, kind, True, None)
    assert [same(x["head"] + x["backbone"], y["head"] + y["backbone"]) for x, y in zip((a, b), never, strict=True)] == [
        True,
        True,
    ]


@pytest.mark.parametrize("kind", rows(["sgd", "adamw_fused"], "adamw_fused"))
def test_of_two_optimizers_all_ranks_skip_the_same_one(kind: str, on_ranks: OnRanks) -> None:
    a, b = on_ranks(sharded, "fp16", kind, False, 1)
    assert a["taken"] == b["taken"] == [[True, True], [True, False], [True, True]]
    assert a["scales"] == b["scales"] == [65536, 32768, 32768] and same(a["backbone"], b["backbone"])


def without_gradients(rank: int, fused: bool) -> tuple[list[bool], float, list[float]]:
    """Rank 1's head takes no part in the first window: it has no gradient there, and then an infinite one."""
    weight = torch.zeros(1, requires_grad=True)
    amp, optimizer, taken = Amp.named("fp16"), SGD([weight], lr=1.0, fused=fused), []
    for i in range(3):
        if i != 0 or rank == 0:
            amp.backward(weight.sum() * (INF if i == 1 and rank == 1 else 1.0))
        taken.append(bool(amp.step(optimizer).taken))
        amp.update()
        optimizer.zero_grad()
    return taken[1:], amp.scale, weight.tolist()


@pytest.mark.parametrize("fused", [True, False])
def test_a_rank_without_gradients_keeps_no_other_waiting(fused: bool, on_ranks: OnRanks) -> None:
    a, b = on_ranks(without_gradients, fused)
    assert a[0] == b[0] == [False, True] and a[1] == b[1] == 32768.0
    assert (a[2], b[2]) == ([-2.0], [-1.0])


# --- running statistics under DDP, which copies those of rank 0 to all at every forward pass


def poisoned(rank: int, bad_rank: int | None, guard: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """Five windows of two micro-batches; in the middle one the second of `bad_rank` is infinite."""
    net = wrap_ddp(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), torch.device("cpu"))
    amp, optimizer = Amp.named("bf16"), SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    ema = Ema(net, 0.9)
    if guard:
        amp.guard(net)
    for i in range(5):
        torch.manual_seed(10 * i + rank)
        micros = [torch.randn(4, 3), torch.randn(4, 3)]
        if i == 2 and bad_rank is None:
            continue
        if i == 2 and rank == bad_rank:
            micros[1].fill_(INF)
        for i_micro, x in enumerate(micros):
            with sync_grads(net, when=i_micro == 1):
                with amp.autocast():
                    loss = net(x).float().square().mean() / 4
                amp.backward(loss)
        report = amp.step(optimizer)
        assert bool(report.taken) == (i != 2)
        amp.update()
        optimizer.zero_grad()
        ema.update(report)
    return values(net), values(ema.model)


@pytest.mark.parametrize("bad_rank", rows([0, 1], 1))
def test_statistics_poisoned_on_one_rank_are_put_back_on_all(bad_rank: int, on_ranks: OnRanks) -> None:
    seen, never = on_ranks(poisoned, bad_rank), on_ranks(poisoned, None)
    for (net, average), (clean, clean_average) in zip(seen, never, strict=True):
        assert same(net, clean) and same(average, clean_average)


def test_without_the_guard_rank_0_poisons_all(on_ranks: OnRanks) -> None:
    assert [any(value.isnan().any() for value in net) for net, _ in on_ranks(poisoned, 0, False)] == [True, True]


# --- two ranks are one process


def parity(rank: int, mode: str, clip: Clip | None, fused: bool) -> tuple[list[Tensor], list[float]]:
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    world_size = dist.get_world_size()
    net = wrap_ddp(copy.deepcopy(plain), torch.device("cpu")) if world_size > 1 else plain
    amp, norms = Amp.named(mode, **({"init_scale": 1024.0} if mode == "fp16" else {})), []
    optimizer = AdamW(net.parameters(), lr=0.01, fused=fused)
    for i in range(4):
        torch.manual_seed(i)
        x = torch.randn(8, 3)
        if i == 1:
            x[5] = INF  # on the last rank only
        with amp.autocast():
            loss = net(x.chunk(world_size)[rank]).float().square().mean() / world_size
        amp.backward(loss)
        report = amp.step(optimizer, clip)
        assert bool(report.taken) == (i != 1)
        amp.update()
        optimizer.zero_grad()
        norms.append(float(report.grad_norm))
    return values(net), norms[:1] + norms[2:]


@pytest.mark.parametrize("clip", rows([None, Clip.norm(0.05), Clip.adaptive(0.01)], Clip.norm(0.05)), ids=str)
@pytest.mark.parametrize("mode, tolerance", [("fp32", 1e-5), ("fp16", 5e-3)])  # the order of sums; fp16's rounding
def test_two_ranks_equal_one_process(mode: str, tolerance: float, clip: Clip | None, on_ranks: OnRanks) -> None:
    (a, norms_a), (b, norms_b) = on_ranks(parity, mode, clip, True)
    ((one, norms),) = on_ranks(parity, mode, clip, True, num_ranks=1)
    assert same(a, b) and norms_a == norms_b == pytest.approx(norms, rel=tolerance)
    for x, y in zip(a, one, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


# --- a resumed run adds the ranks in the order of the one that went on


def torn(rank: int) -> list[list[Tensor]]:
    """The weights after six steps; and after the same six, with a wrapper made anew after the third."""
    results = []
    for num_wrappers in (1, 2):
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        for part in range(num_wrappers):
            ddp = wrap_ddp(net, torch.device("cpu"), exact=True)
            for i in range(part * 3, 6 if part == num_wrappers - 1 else 3):
                torch.manual_seed(10 * i + rank)
                ddp(torch.randn(16, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append([parameter.detach().clone() for parameter in net.parameters()])
    return results


def test_three_ranks_add_in_the_same_order_after_a_resume(on_ranks: OnRanks) -> None:
    assert all(same(*pair) for pair in on_ranks(torn, num_ranks=3))
