"""Running statistics of a guarded network are those of the steps that were taken, whatever else passes through it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_precision import INF, every_mode, run, sgd
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core import Amp


@every_mode
def test_without_the_guard_the_running_variance_is_nan_for_ever(mode: str) -> None:
    batches = [torch.randn(8, 4), torch.full((8, 4), INF), torch.randn(8, 4)]
    for guard in (True, False):
        _, net = run(mode, "sgd_fused", batches, guard=guard)
        assert net[1].running_var.isfinite().all() == guard
        assert net[1].num_batches_tracked == (2 if guard else 3)
        assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("bad", [False, True])
def test_statistics_of_a_net_that_another_optimizer_s_window_runs_through(bad: bool) -> None:
    """A critic's window runs the generator's forward. Then a bad window of the generator itself is skipped."""
    amp, nets = Amp.named("fp32"), [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 1)]
    generator, critic = nets
    for net in nets:
        amp.guard(net)

    def window(x: Tensor, optimizer: Optimizer) -> None:
        amp.backward(critic(generator(x)).square().mean())
        amp.step(optimizer)
        amp.update()

    before = generator[1].running_mean.clone()
    window(torch.full((4, 2), INF) if bad else torch.randn(4, 2), sgd(critic))
    after = generator[1].running_mean.clone()
    assert torch.equal(after, before) == bad
    for net in nets:
        net.zero_grad()
    window(torch.full((4, 2), INF), sgd(generator))
    assert torch.equal(generator[1].running_mean, after)


def load_threes(net: nn.Module, part: nn.Module) -> None:
    """After a stray pass."""
    net(torch.ones(4, 2))
    part.load_state_dict({key: value * 0 + 3 for key, value in part.state_dict().items()})


def borrow(net: nn.Module) -> None:
    """A pass with buffers of the caller, which are the caller's afterwards."""
    lent = {key: value.clone() for key, value in net.named_buffers()}
    torch.func.functional_call(net, dict(net.named_parameters()) | lent, (torch.ones(4, 2),))
    LENT.append((lent, copy.deepcopy(lent)))


LENT: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
BETWEEN: dict[str, Callable[[nn.Module], Any]] = {
    "update_bn": lambda net: torch.optim.swa_utils.update_bn([torch.randn(4, 2) + 5 for _ in range(3)], net),
    "no_grad": torch.no_grad()(lambda net: net(torch.randn(4, 2))),
    "load": lambda net: load_threes(net, net),
    "load a part": lambda net: load_threes(net, net[1]),  # type: ignore[index]
    "functional_call": borrow,
}


def between_windows(between: Callable[[nn.Module], Any], bad: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    LENT.clear()
    net, amp = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), Amp.named("fp32")
    amp.guard(net)
    optimizer = sgd(net)
    for i, x in enumerate((torch.randn(4, 2), *[torch.full((4, 2), INF)] * bad, torch.randn(4, 2))):
        if i == 1:
            between(net)
        amp.backward(net(x).square().mean())
        with torch.no_grad():
            net(x)  # part of the window
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
    assert all(torch.equal(now[key], then[key]) for now, then in LENT for key in then)
    return net.state_dict()


@pytest.mark.parametrize("between", BETWEEN)
def test_what_is_written_between_windows_survives_a_skipped_step(between: str) -> None:
    seen, never = (between_windows(BETWEEN[between], bad) for bad in (True, False))
    assert all(torch.equal(seen[key], never[key]) for key in never)


@pytest.mark.parametrize("first", ["no_grad", "graph", "no_grad alone"])
def test_passes_without_a_graph_spoil_no_statistics(first: str) -> None:
    """On the batch that is skipped: before and after the one that is trained on, or instead of one."""
    amp, net, critic = Amp.named("fp32"), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), nn.Linear(3, 1)
    amp.guard(net)
    before, x = copy.deepcopy(net.state_dict()), torch.full((4, 2), INF)
    with torch.set_grad_enabled(first == "graph"):
        output = net(x)
    output = output if first == "no_grad alone" else net(x)
    amp.backward(critic(output).square().mean())
    amp.step(sgd(critic))
    amp.update()
    names = [key for key in before if first != "no_grad" or not key.endswith("tracked")]  # a count is finite
    assert all(torch.equal(net.state_dict()[key], before[key]) for key in names)
