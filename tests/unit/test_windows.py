"""Accumulated gradients are those of the one big batch: ragged tails, tokens, masks, several ranks."""

from __future__ import annotations

import itertools
import math
import random
import re
import textwrap
from collections import UserDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiers import rows
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from amp_core import Amp, Clip, sync_grads, windows
from amp_core.layouts.ddp import wrap_ddp
from amp_core.layouts.fsdp import build_mesh, wrap_fsdp
from amp_core.step.window import num_samples
from amp_core.tensors import full_tensor

IGNORE = -100


@pytest.mark.parametrize("accumulation", [1, 2, 3, 4])
@pytest.mark.parametrize("num_batches", range(1, 10))
def test_accumulated_gradients_are_those_of_the_big_batch(num_batches: int, accumulation: int) -> None:
    """Batches of unequal sizes, in float64: equal but for the order of summation."""
    draw = random.Random(num_batches)
    batches = [torch.randn(draw.randint(1, 5), 3, dtype=torch.float64) for _ in range(num_batches)]
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    cut = list(windows(batches, accumulation))
    assert [len(window) for window in cut[:-1]] == [accumulation] * (-(-num_batches // accumulation) - 1)
    assert all(a.batch is b for a, b in zip(itertools.chain(*cut), batches, strict=True))
    for window in cut:
        assert [micro.is_last for micro in window] == [False] * (len(window) - 1) + [True]
        assert sum(float(micro.weight) for micro in window) == pytest.approx(1, abs=1e-15)
        net.zero_grad()
        for micro in window:
            (net(micro.batch).square().mean() * micro.weight).backward()
        ours = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        net(torch.cat([micro.batch for micro in window])).square().mean().backward()
        for a, p in zip(ours, net.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=1e-12, atol=1e-14)


def test_endless_loaders_are_read_no_further_than_needed_and_empty_ones_have_no_window() -> None:
    read: list[int] = []
    endless = (read.append(i) or torch.ones(2) for i in itertools.count())
    assert [len(window) for window in itertools.islice(windows(endless, 3), 2)] == [3, 3]
    assert len(read) <= 7  # at most one ahead
    assert list(windows([], 2)) == []
    with pytest.raises(ValueError, match="accumulation"):
        list(windows([torch.ones(1)], 0))


PICTURES = tuple(torch.ones(3, 5, 4 + i) for i in range(4))  # [C, H, W], as a detection batch has them


@pytest.mark.parametrize("batch, samples", [
    (torch.ones(3), 3),
    (torch.ones(()), 1),
    ((torch.ones(3, 2), 1), 3),
    ([torch.tensor(0.1), torch.ones(3, 2)], 3),
    (torch.nested.nested_tensor([torch.ones(1), torch.ones(2), torch.ones(5)], layout=torch.jagged), 3),
    ({"x": {"y": torch.ones(3)}}, 3),
    ([{"x": torch.ones(3)}, {"y": torch.ones(3)}], 3),
    (UserDict(x=torch.ones(3)), 3),
    ((PICTURES, torch.ones(4)), 4),
    ({"pictures": PICTURES, "labels": torch.ones(4)}, 4),
    ((PICTURES, tuple({"boxes": torch.ones(2, 4)} for _ in PICTURES)), None),
    ((PICTURES[:1], (7,)), None),
    ([{"picture": picture, "label": 7} for picture in PICTURES], None),
    ("text", None),
    ([], None),
])  # fmt: skip
def test_samples_are_those_of_the_fields_and_never_channels(batch: Any, samples: int | None) -> None:
    if samples is None:
        with pytest.raises(TypeError, match="pass count="):
            num_samples(batch)
    else:
        assert num_samples(batch) == samples


COUNTS: list[tuple[Any, Callable[[float], Any]]] = [
    *((pair, kind) for pair in ((0.25, 0.125), (1e-30, 3e-30), (0.0, 2.0)) for kind in (float, torch.tensor)),
    ((0.5, 3.5), partial(torch.tensor, dtype=torch.float64)),
    ((200, 100), partial(torch.tensor, dtype=torch.uint8)),  # their sum wraps around
    ((256, 1), partial(torch.tensor, dtype=torch.bfloat16)),  # their sum is 256
]


def test_weights_are_shares_of_counts_of_any_type() -> None:
    for counts, kind in COUNTS:
        (window,) = windows(map(torch.tensor, counts), 2, count=lambda batch, kind=kind: kind(batch.item()))
        expected = [c / math.fsum(counts) for c in counts]
        assert [float(micro.weight) for micro in window] == pytest.approx(expected, rel=2**-23)
    for bad in (-1, float("nan")):
        with pytest.raises(ValueError, match="at least 0"):
            list(windows([torch.tensor(3.0), torch.tensor(bad)], 2, count=torch.Tensor.item))


def token_batches(dead: set[int], num_batches: int = 5) -> list[tuple[Tensor, Tensor]]:
    """(inputs, targets) of 2 sequences of 6 tokens, of which some do not count; in the dead ones none does."""
    batches = []
    for i in range(num_batches):
        targets = torch.randint(0, 7, (2, 6))
        targets[torch.rand(2, 6) < 0.5] = IGNORE
        targets[0, 0] = 1
        batches.append(
            (torch.randn(2, 6, 4, dtype=torch.float64), torch.full((2, 6), IGNORE) if i in dead else targets)
        )
    return batches


def valid(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != IGNORE).sum()


def token_loss(net: nn.Module, batch: tuple[Tensor, Tensor], reduction: str) -> Tensor:
    return F.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORE, reduction=reduction)


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("dead", [set(), {0}, {1, 4}, {3}, {0, 1, 2}, {4, 3}], ids=str)
def test_token_weights_equal_the_big_batch_also_with_fully_masked_micro_batches(dead, as_tensor):
    net, batches = nn.Linear(4, 7).double(), token_batches(dead)
    for window in windows(batches, 3, count=valid if as_tensor else lambda batch: int(valid(batch))):
        assert all(isinstance(micro.weight, Tensor) == as_tensor for micro in window)
        net.zero_grad()
        for micro in window:
            mean = token_loss(net, micro.batch, "sum") / valid(micro.batch).clamp(min=1)
            (mean * micro.weight).backward()
        ours = net.weight.grad.clone()
        net.zero_grad()
        big = tuple(torch.cat(parts) for parts in zip(*(micro.batch for micro in window), strict=True))
        (token_loss(net, big, "sum") / valid(big).clamp(min=1)).backward()
        rtol = 1e-6 if as_tensor else 1e-12  # weights that are tensors are fp32
        torch.testing.assert_close(ours, net.weight.grad, rtol=rtol, atol=1e-14)
        assert ours.isfinite().all()  # a window without a single token has gradients of zero


# --- several ranks. A rank's functions stand here because they are sent by name.


def ragged(rank: int, num_batches: tuple[int, ...]) -> list[Tensor]:
    """The batches of one rank, of unequal sizes, the same in every process."""
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(1 + (i + rank) % 3, 3, dtype=torch.float64, generator=generator) for i in range(num_batches[rank])
    ]


def a_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def train_on_a_rank(rank: int, plain: bool, num_batches: tuple[int, ...]) -> tuple[Any, int, int]:
    """Weights, windows and reductions of gradients of a rank with fewer or more batches than the others."""
    num_reductions = 0

    def count(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        nonlocal num_reductions
        num_reductions += 1
        return default_hooks.allreduce_hook(state, bucket)

    net = DistributedDataParallel(a_net()) if plain else wrap_ddp(a_net(), torch.device("cpu"))
    if plain:
        net.register_comm_hook(None, count)
    amp, optimizer, num_windows = Amp.named("fp32"), SGD(net.parameters(), lr=0.1), 0
    world_size = dist.get_world_size() if plain else 1
    for window in windows(ragged(rank, num_batches), 2, world_size=world_size):
        num_windows += 1
        for micro in window:
            with sync_grads(net, when=micro.is_last):
                loss = net(micro.batch).square().mean()
                amp.backward(loss * micro.weight)
        assert amp.step(optimizer).taken
        amp.update()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()], num_windows, num_reductions


@pytest.mark.parametrize("plain", rows([False, True], False), ids=["ours", "plain"])
@pytest.mark.parametrize("num_batches", rows([(5, 3), (1, 4), (3, 3)], (5, 3), single=True), ids=str)
def test_uneven_ranks_end_together_and_equal_one_process(num_batches, plain, on_ranks):
    results = on_ranks(train_on_a_rank, plain, num_batches)
    net = a_net()
    optimizer = SGD(net.parameters(), lr=0.1)
    both = [ragged(rank, num_batches) for rank in (0, 1)]
    num_windows = -(-max(num_batches) // 2)
    for k in range(num_windows):
        big = torch.cat([batch for batches in both for batch in batches[2 * k : 2 * k + 2]])
        net(big).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for params, windows_seen, reductions in results:
        assert windows_seen == num_windows and reductions == (num_windows if plain else 0)
        for a, b in zip(params, net.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-14)
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))


def wrapped_as(kind: str) -> nn.Module:
    """In fp32, `plain` alone takes the mean over ranks."""
    net = a_net().float()
    if kind == "fsdp":
        return wrap_fsdp(net, build_mesh(torch.device("cpu"), 2))
    return wrap_ddp(net, torch.device("cpu"), static_graph=kind == "static")


def after_a_forward_that_was_dropped(rank: int) -> list[list[float]]:
    """The gradient of the bias in windows of two micro-batches, each after a forward pass without a backward pass."""
    found = []
    for mode, static_graph in itertools.product(("fp32", "bf16", "fp16"), (False, True)):
        amp = Amp.named(mode, **({"init_scale": 1024.0} if mode == "fp16" else {}))
        net = nn.Linear(3, 1)
        wrapped = wrap_ddp(net, torch.device("cpu"), static_graph=static_graph)
        for _ in range(3):
            for is_last in (False, True):
                with sync_grads(wrapped, when=is_last):
                    with amp.autocast():
                        loss = wrapped(torch.ones(1, 3)).float().sum()
                    amp.backward(loss)
            found.append(net.bias.grad.item() / amp.scale)
            wrapped.zero_grad()
            with amp.autocast():
                wrapped(torch.ones(1, 3))
    return found


def test_a_forward_that_was_dropped_leaves_no_reduction_behind(on_ranks: Callable[..., Any]) -> None:
    """1 for each of four samples. Torch's DDP reduces the first micro-batch after it too, and sums of sums are 6."""
    assert on_ranks(after_a_forward_that_was_dropped) == [[4.0] * 18] * 2


KINDS = ("ddp", "static", "fsdp")


def num_reductions(profile: Any) -> int:
    return sum("gloo:" in event.name and "reduce" in event.name for event in profile.events())


def two_windows(rank: int) -> list[tuple[list[Tensor], int]]:
    """Gradients of the second of two windows of four micro-batches, and its reductions."""
    found = []
    for kind, inside in itertools.product(KINDS, (True, False)):
        wrapped, amp = wrapped_as(kind), Amp.named("fp32")
        for _ in range(2):
            wrapped.zero_grad()
            with torch.profiler.profile() as profile:
                for i, batch in enumerate(ragged(rank, (4, 4))):
                    with sync_grads(wrapped, when=i == 3):
                        loss = wrapped(batch.float()).square().sum()
                        if inside:
                            amp.backward(loss)
                    if not inside:
                        amp.backward(loss)
        found.append(([full_tensor(p.grad) for p in wrapped.parameters()], num_reductions(profile)))
    return found


def test_the_forward_pass_decides_where_the_backward_pass_reduces(on_ranks: Callable[..., Any]) -> None:
    """Once per window and group of weights, wherever `amp.backward` is called; gradients are those of the big batch."""
    net = a_net()
    net(torch.cat([*ragged(0, (4, 4)), *ragged(1, (4, 4))])).square().sum().backward()
    for grads, num_reductions in itertools.chain(*on_ranks(two_windows)):
        assert num_reductions == 1
        for a, p in zip(grads, net.parameters(), strict=True):
            # fp32 sums of 16 samples through two layers
            bound = 64 * 2**-24
            torch.testing.assert_close(a.double(), p.grad, rtol=bound, atol=bound * p.grad.abs().max().item())


PAGES = ("README.md", "docs/my_loop.py")


def loop_of(page: str) -> str:
    """The loop over windows in a page's code, over `model`, `loader`, `optimizer` and `amp`, without averages."""
    code = (Path(__file__).parents[2] / page).read_text()
    found = re.search(r"^ *for window in windows\(loader.*?zero_grad\(optimizer\)$", code, re.DOTALL | re.MULTILINE)
    assert found
    return textwrap.dedent(found[0])


def typed_on_a_rank(rank: int) -> list[tuple[list[Tensor], int]]:
    """The weights after two windows of four micro-batches of a page's loop, and the reductions of the second."""
    found = []
    for kind, page in itertools.product(KINDS, PAGES):
        model = wrapped_as(kind)
        names = {
            "model": model,
            "amp": Amp.named("fp32"),
            "optimizer": SGD(model.parameters(), lr=0.1),
            "device": "cpu",
        }
        names |= {"Clip": Clip, "sync_grads": sync_grads, "windows": windows, "F": F, "loss_fn": F.mse_loss}
        for _ in range(2):
            names["loader"] = [(batch.float(), batch[:, :1].float()) for batch in ragged(rank, (4, 4))]
            with torch.profiler.profile() as profile:
                exec(compile(loop_of(page), page, "exec"), names)
        found.append(([full_tensor(p) for p in model.parameters()], num_reductions(profile)))
    return found


def test_the_loops_of_the_pages_equal_one_process_and_reduce_once(on_ranks: Callable[..., Any]) -> None:
    net = a_net()
    optimizer = SGD(net.parameters(), lr=0.1)
    big = torch.cat([*ragged(0, (4, 4)), *ragged(1, (4, 4))])
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(net(big), big[:, :1]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    for found in on_ranks(typed_on_a_rank):
        for number, (weights, num_reductions) in enumerate(found):
            # Besides the gradients: whether all ranks skip; of shards, their norm.
            assert num_reductions == (3 if number >= 4 else 2)
            for a, p in zip(weights, net.parameters(), strict=True):
                # two steps of fp32 sums of 16 samples through two layers
                torch.testing.assert_close(a.double(), p.detach(), rtol=128 * 2**-24, atol=128 * 2**-24)


def weights_on_a_rank(rank: int, store: str) -> list[Any]:
    """Shares of a plain DDP and of ours, of micro-batches that are masked or missing, and of fractions."""
    found: list[Any] = []
    # Rank 0 has the token loss 1; rank 1 has 3, 4 and 5. The weight's gradient: ours, and the mean of means.
    tokens = torch.tensor([[1.0, IGNORE, IGNORE], [3.0, 4.0, 5.0]][rank])
    for plain, mean_of_means in ((False, False), (True, False), (True, True)):
        net = nn.Linear(1, 1, bias=False)
        wrapped = DistributedDataParallel(net) if plain else wrap_ddp(net, torch.device("cpu"))
        (window,) = windows([tokens], count=lambda batch: (batch != IGNORE).sum(), world_size=2 if plain else 1)
        with sync_grads(wrapped, when=True):
            loss = wrapped(tokens[tokens != IGNORE].unsqueeze(1)).mean()
            (loss if mean_of_means else loss * window[0].weight).backward()
        found.append(net.weight.grad.item())

    def shares(counts: tuple[float, ...], count: Callable[[Tensor], Any]) -> list[list[float]]:
        cut = windows([torch.tensor([n]) for n in counts], 2, count=count)
        return [[float(micro.weight) for micro in window] for window in cut]

    found.append(shares(((3, 0, 2), (0, 5))[rank], lambda batch: batch[0]))
    dist.destroy_process_group()  # the next one has no CPU tensors
    dist.init_process_group("cuda:gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    return [*found, shares(((0.5, 0.25), (0.25,))[rank], torch.Tensor.item)]


def test_ranks_with_1_and_3_tokens_give_the_mean_of_all_and_not_the_mean_of_means(on_ranks, tmp_path):
    """Masked and missing micro-batches weigh nothing; ranks agree in host memory also where the group has none."""
    first, second = on_ranks(weights_on_a_rank, str(tmp_path / "store"))
    assert first == [3.25, 3.25, 2.5, [[0.375, 0.0], [1.0]], [[0.5, 0.25]]]
    assert second == [3.25, 3.25, 2.5, [[0.0, 0.625], [0.0]], [[0.25, 0.0]]]


def without_batches(rank: int) -> str:
    try:
        list(windows([] if rank else [torch.ones(1)]))
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_without_a_batch_is_refused(on_ranks: Callable[..., Any]) -> None:
    """There; the others lose their connection, or are ended by the launcher."""
    other, empty = on_ranks(without_batches)
    assert empty.startswith("ValueError") and "batch" in empty and "Error" in other
