"""Options of layout=ddp: static graphs with accumulation, the size of buckets, gradients sent in bfloat16."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_training import Collectives
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from amp_core import Amp, sync_grads
from amp_core.layouts.ddp import wrap_ddp

CPU = torch.device("cpu")
OnRanks = Callable[..., list[Any]]


def small() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 150), nn.Linear(150, 2))


def gradients(net: Any, rank: int, num_micros: int, num_windows: int = 3) -> list[list[Tensor]]:
    found = []
    for window in range(num_windows):
        for i in range(num_micros):
            torch.manual_seed(100 * window + 10 * i + rank)
            with sync_grads(net, when=i == num_micros - 1):
                net(torch.randn(4, 8)).square().sum().backward()
        found.append([p.grad.clone() for p in net.parameters()])
        for p in net.parameters():
            p.grad = None
    return found


def joined(lists: list[list[Tensor]]) -> list[Tensor]:
    return list(itertools.chain.from_iterable(lists))


# --- static graphs


def in_static_graphs(rank: int) -> list[bool]:
    found = []
    for num_micros in (1, 3):
        for bucket_mb in (None, 0.05):
            nets = [
                wrap_ddp(small(), CPU, exact=True, static_graph=static, bucket_mb=bucket_mb) for static in (False, True)
            ]
            a, b = (gradients(net, rank, num_micros) for net in nets)
            found.append(all(torch.equal(x, y) for x, y in zip(joined(a), joined(b), strict=True)))
    return found


def test_a_static_graph_changes_no_bit_in_windows_of_any_length(on_ranks: OnRanks) -> None:
    assert on_ranks(in_static_graphs, num_ranks=3) == [[True] * 4] * 3


def num_reductions(rank: int) -> list[Any]:
    found: list[Any] = []
    for bucket_mb in (None, 0.02):
        net = wrap_ddp(small(), CPU, bucket_mb=bucket_mb)
        gradients(net, rank, 1)
        with Collectives() as seen:
            gradients(net, rank, 2, num_windows=1)
        found.append(seen.of("allreduce"))
    return found


def test_small_buckets_are_more_reductions(on_ranks: OnRanks) -> None:
    assert on_ranks(num_reductions) == [[1, 2]] * 2


# --- micro-batches that all reduce


def without_sync_grads(rank: int, options: dict[str, Any]) -> list[str]:
    """What two micro-batches raise that both reduce, between which nothing, a step or `zero_grad` happens.

    Another network's loss may go through a network that was stepped and not cleared, such as a discriminator.
    """
    found = []
    for between in ("", "amp", "step", "zero", "set to None", "unused"):
        net, amp = wrap_ddp(small(), CPU, **options), Amp.named("fp32")
        optimizer = SGD(net.parameters(), lr=0.1, fused=between != "step")
        names = list(net.state_dict())
        try:
            for _ in range(2):
                loss = net(torch.randn(4, 8)).square().sum()
                loss.backward()
                if between == "amp":
                    amp.step(optimizer)
                    amp.update()
                elif between == "step":
                    optimizer.step()
                elif between in ("zero", "set to None"):
                    optimizer.zero_grad(set_to_none=between == "set to None")
                elif between == "unused":  # a forward pass alone reduces nothing
                    net(torch.randn(4, 8))
                    break
            found.append("")
        except RuntimeError as problem:
            found.append(str(problem))
        assert names == [f"module.{name}" for name in small().state_dict()]
    return found


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"compress": True, "bucket_mb": 0.05}], ids=str)
def test_a_sum_over_ranks_that_would_be_summed_once_more_is_refused(options: Any, on_ranks: OnRanks) -> None:
    for forgotten, *fine in on_ranks(without_sync_grads, options):
        assert "sync_grads(net, when=micro.is_last)" in forgotten and fine == [""] * 5


# --- gradients in bfloat16


def compressed(rank: int) -> dict[str, Any]:
    plain = gradients(wrap_ddp(small(), CPU), rank, 2)
    rounded = gradients(wrap_ddp(small(), CPU, compress=True, bucket_mb=0.05), rank, 2)
    weight = nn.Linear(4, 1, bias=False)
    net = wrap_ddp(weight, CPU, compress=True)
    parts = torch.ones(1, 4)
    parts[0, rank] = 256.0  # so that whatever the order of the ranks is, it comes first somewhere
    net(parts).sum().backward()
    low = parts.bfloat16()
    dist.all_reduce(low)
    return {
        "sums": weight.weight.grad,
        "low": low,
        "gradients": joined(rounded),
        "errors": [float((a - b).norm() / a.norm()) for a, b in zip(joined(plain), joined(rounded), strict=True)],
    }


def test_compressed_gradients_are_added_in_fp32_and_are_the_same_on_all_ranks(on_ranks: OnRanks) -> None:
    """Each number is rounded when it is sent and when the sum is. 256 + 1 is 256 in bfloat16."""
    ranks = on_ranks(compressed, num_ranks=4)
    for found in ranks:
        assert found["sums"].tolist() == [[260.0] * 4]  # of 259, halfway between 258 and 260
        assert 256.0 in found["low"]
        assert all(torch.equal(a, b) for a, b in zip(found["gradients"], ranks[0]["gradients"], strict=True))
        errors = [error for error in found["errors"] if error == error]
        assert 0 < max(errors) < 2 * 2**-8


def with_a_gradient_of(rank: int, value: float, hook: bool, mode: str) -> list[Any]:
    weight, amp = nn.Linear(1, 1, bias=False), Amp.named(mode)
    if hook:
        net = DistributedDataParallel(weight)
        net.register_comm_hook(None, fp16_compress_hook)
        value = value * dist.get_world_size()  # it takes the mean
    else:
        net = wrap_ddp(weight, CPU, compress=True)
    optimizer = SGD(net.parameters(), lr=1.0, fused=True)
    amp.backward(net(torch.ones(1, 1)), torch.full((1, 1), value / 2))
    before = weight.weight.detach().clone()
    report = amp.step(optimizer)
    amp.update()
    return [bool(report.taken), amp.scale, float(before - weight.weight.detach())]


def with_gradients(rank: int) -> list[list[Any]]:
    low = [with_a_gradient_of(rank, 3.0, hook, "fp16") for hook in (False, True)]
    return low + [with_a_gradient_of(rank, value, False, "fp32") for value in (3.4e38, math.inf, math.nan, 1e18)]


def test_a_true_gradient_of_3_overflows_in_fp16_and_not_in_bfloat16(on_ranks: OnRanks) -> None:
    """At the first loss scale of 65536. What bfloat16 cannot hold either is skipped by all ranks."""
    for ours, torch_s, *beyond, fits in on_ranks(with_gradients):
        assert ours[:2] == [True, 65536.0] and ours[2] == pytest.approx(3.0, rel=2**-20)
        assert torch_s == [False, 32768.0, 0.0] and beyond == [[False, 1.0, 0.0]] * 3 and fits[0]
