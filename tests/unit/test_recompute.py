"""Blocks that are computed twice are the same blocks: gradients, random numbers, statistics, names; and keep less."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_training import MODES, Collectives, Training, gpt, same
from torch import Tensor, nn
from torch.optim import AdamW

from amp_core import Amp, Ema, keep_fp32
from amp_core.doctor.trace import Trace
from amp_core.layouts.memory_model import saved_for_backward
from amp_core.lowp.islands import island_names
from amp_core.lowp.masters import master_params
from amp_core.memory.recompute import recompute_blocks, recomputed
from amp_core.step.observer import observing
from amp_tools.census import Census

OnRanks = Callable[..., list[Any]]


def convnet(spectral: bool = True) -> nn.Module:
    """Statistics, dropout, spectral normalisation (which depends on a buffer that it moves), an fp32 island."""
    torch.manual_seed(5)

    def block(inputs: int) -> nn.Module:
        conv = nn.Conv2d(inputs, 8, 3, padding=1)
        conv = nn.utils.spectral_norm(conv) if spectral else conv
        return nn.Sequential(conv, nn.BatchNorm2d(8), nn.Dropout(0.3), nn.Hardtanh(), nn.Conv2d(8, 8, 1))

    net = nn.Sequential(block(2), block(8), nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 3)))
    return keep_fp32(net, "1")


def windows(net: nn.Module, amp: Amp) -> list[Any]:
    """Gradients of three windows of two micro-batches, of which one is skipped; then weights, buffers, averages."""
    amp.guard(net)
    optimizer, ema, found = AdamW(master_params(net), lr=0.1, fused=True), Ema(net, 0.5), []
    for i in range(3):
        for j in range(2):
            torch.manual_seed(2 * i + j)
            x = torch.full((4, 2, 6, 6), torch.inf) if (i, j) == (1, 0) else torch.randn(4, 2, 6, 6)
            with amp.autocast():
                loss = net(x).float().square().mean()
            amp.backward(loss / 2)
        found.append([p.grad.clone() for p in master_params(net)])  # type: ignore[union-attr]
        report = amp.step(optimizer)
        assert bool(report.taken) == (i != 1)
        amp.update()
        optimizer.zero_grad()
        ema.update(report)
    return [found, net.state_dict(), ema.state_dict()]


@pytest.mark.parametrize("mode", [*MODES, "o2", "bf16_pure"])
def test_gradients_statistics_and_averages_keep_every_bit(mode: str) -> None:
    results = []
    for twice in (False, True):
        # torch's spectral normalisation takes no 16-bit weights.
        options: dict[str, Any] = {"init_scale": 256.0} if mode in ("fp16", "o2") else {}
        net, amp = convnet(mode in MODES), Amp.named(mode, **options)
        amp.prepare(net)
        assert not twice or recompute_blocks(net) == 3
        results.append(windows(net, amp))
    assert same(*results)


def kept(net: nn.Module, amp: Amp, x: Tensor) -> int:
    """Bytes that a forward pass keeps for the backward pass, weights left out."""
    with amp.autocast(), saved_for_backward([*net.parameters(), *net.buffers()]) as saved:
        output = net(x)
    assert output.requires_grad
    return saved.total


def test_inputs_of_blocks_are_all_that_is_kept() -> None:
    for mode in ("fp32", "bf16"):
        amp, tokens = Amp.named(mode), torch.zeros(8, 8, dtype=torch.int64)
        plain, twice = gpt(), gpt()
        recompute_blocks(twice)
        a, b = kept(plain, amp, tokens), kept(twice, amp, tokens)
        assert b < 0.4 * a, (a, b)


# --- a network stays what it is


def test_names_classes_islands_and_copies_stay() -> None:
    plain, net = convnet(), convnet()
    recompute_blocks(net)
    recompute_blocks(net)
    assert list(net.state_dict()) == list(plain.state_dict()) and island_names(net) == island_names(plain) == ["1"]
    assert all(isinstance(a, nn.Sequential) for a in net) and repr(net) == repr(plain)
    seen: list[bool] = []
    twin = copy.deepcopy(net)
    for each in (net, twin):
        each[0][0].register_forward_hook(lambda *_: seen.append(recomputed() is twin[0]))  # type: ignore[index]
    twin(torch.randn(4, 2, 6, 6)).sum().backward()
    with torch.no_grad():
        twin(torch.randn(4, 2, 6, 6))
    assert seen == [False, True, False]
    assert net[0][3] is not twin[0][3]  # type: ignore[index]


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no blocks"):
        recompute_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    patched = convnet()
    patched[0].forward = lambda x: x  # type: ignore[index]
    with pytest.raises(ValueError, match="patched forward"):
        recompute_blocks(patched)


def test_a_graph_that_is_kept_is_gone_through_twice() -> None:
    """And gradients are differentiated once more, as penalties do."""
    plain, net = convnet(), convnet()
    recompute_blocks(net)
    found = []
    for each in (plain, net):
        torch.manual_seed(0)
        x = torch.randn(4, 2, 6, 6, requires_grad=True)
        y = each(x).square().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        (y + slope.square().sum()).backward(retain_graph=True)
        y.backward()
        found.append([p.grad for p in each.parameters()])
    assert same(*found)


def observed(observer: Callable[[dict[nn.Module, str]], Any], *, twice: bool, too_large: bool = False) -> Any:
    """A window of a network, of which one block may overflow in fp16, with an observer of the doctor around it."""
    net = gpt(dropout=0.1, positions="alibi")
    if too_large:
        net.blocks[1].down.weight.data.mul_(1e6)  # type: ignore[union-attr]
    if twice:
        recompute_blocks(net)
    amp = Amp.named("fp16" if too_large else "bf16")
    watch = observer({module: name for name, module in net.named_modules()})
    torch.manual_seed(1)
    with amp.rehearse(), watch, observing(amp.observers, watch):
        with amp.autocast():
            loss = net(torch.arange(16).view(2, 8)).float().logsumexp(-1).mean()
        amp.backward(loss)
        amp.step(AdamW(net.parameters(), fused=True))
    return watch


def test_what_watches_operations_sees_the_first_computation() -> None:
    for twice in (False, True):
        first = observed(lambda names: Trace(names, {}), twice=twice, too_large=True).first
        assert (first.op, first.place.module, first.backward) == ("aten._to_copy", "blocks.1.down", False)
    looks = [
        [(look.kind, look.module, look.op, look.numbers.amax) for look in observed(Census, twice=twice).looks]
        for twice in (False, True)
    ]
    assert looks[0] == looks[1] and len(looks[0]) > 50


# --- layouts


def in_layouts(rank: int, cases: list[tuple[str, str, float]]) -> list[Any]:
    found = []
    for layout, mode, dropout in cases:
        for twice in (False, True):
            net = gpt(dropout=dropout)
            if twice:
                recompute_blocks(net)
            t = Training(layout, mode, net=net, optimizer=AdamW)
            with Collectives() as collectives:
                seen = [list(t.window()) for _ in range(2)]
            found.append([seen, t.values(), t.loss_of_average(), collectives.of("allgather")])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, cases", [
    (2, [("ddp", "fp16", 0.1), ("fsdp", "bf16", 0.1), ("fsdp", "fp32", 0.1), ("fsdp", "fp16", 0.0)]),
    (4, [("hsdp", "bf16", 0.1)]),
])  # fmt: skip
def test_every_layout_computes_the_same_bits(num_ranks: int, cases: list[Any], on_ranks: OnRanks) -> None:
    """And sharded ones gather weights as often as before."""
    for found in on_ranks(in_layouts, cases, num_ranks=num_ranks):
        for plain, twice in zip(found[::2], found[1::2], strict=True):
            assert same(plain, twice)
