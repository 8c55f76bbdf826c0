"""Steps of fused optimizers through lists that are made once are torch's own, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR

from amp_core import Amp, Clip

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda groups: SGD(groups, lr=0.1, fused=True),
    "sgd nesterov": lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "sgd maximize": lambda groups: SGD(groups, lr=1e-3, momentum=0.9, maximize=True, fused=True),
    "adam": lambda groups: Adam(groups, weight_decay=0.01, fused=True),
    "adam amsgrad": lambda groups: Adam(groups, amsgrad=True, fused=True),
    "adamw": lambda groups: AdamW(groups, fused=True),
    "adamw, rate on the device": lambda groups: AdamW(groups, lr=torch.tensor(1e-3), fused=True),
    "adagrad": lambda groups: Adagrad(groups, fused=True),  # goes torch's way
}


class Run:
    """A small network trained in fp16; `watched` makes each step torch's own."""

    def __init__(self, make: Make, *, watched: bool) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 3))
        params = list(self.net.parameters())
        self.make = lambda: make([{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}])
        self.watched = watched
        self.amp = Amp.named("fp16", init_scale=1024.0)
        self.use(self.make())

    def use(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        if self.watched:
            ConstantLR(optimizer, factor=1.0)  # puts a step of its own into the optimizer

    def step(self, seed: int, *, bad: bool = False, without_last: bool = False) -> None:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        with self.amp.autocast():
            loss = (self.net[:3] if without_last else self.net)(x).square().mean()
        self.amp.backward(loss * float("inf") if bad else loss)
        self.amp.step(self.optimizer, Clip.norm(0.05))
        self.amp.update()
        self.amp.zero_grad(self.optimizer)

    def facts(self) -> list[Tensor]:
        entries = list(self.optimizer.state_dict()["state"].values())
        moments = [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
        return [*self.net.state_dict().values(), *moments, self.amp.scaler.scale]

    @property
    def goes_our_way(self) -> bool:
        return self.optimizer.__dict__["_amp_core_step"] is not None


def same(runs: list[Run]) -> bool:
    ours, theirs = (run.facts() for run in runs)
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_is_that_of_torch(name: str) -> None:
    runs = [Run(OPTIMIZERS[name], watched=watched) for watched in (False, True)]
    for seed in range(12):
        for run in runs:
            # The first step of all is skipped, and two in the middle; some weights miss a step.
            run.step(seed, bad=seed in (0, 5, 6), without_last=seed == 8)
        assert same(runs), seed
    assert runs[0].goes_our_way == (name != "adagrad") and not runs[1].goes_our_way


def change_groups(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.02, 0.1


def move_a_weight(run: Run) -> None:
    first, second = run.optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


def load(run: Run) -> None:
    state = copy.deepcopy(run.optimizer.state_dict())
    run.use(run.make())
    run.optimizer.load_state_dict(state)


def replace_moments(run: Run) -> None:
    entry = next(iter(run.optimizer.state.values()))
    entry["exp_avg"] = torch.full_like(entry["exp_avg"], 0.5)
    entry["step"] = entry["step"].clone()


def forget(run: Run) -> None:
    run.optimizer.state.clear()


def begin_to_watch(run: Run) -> None:
    ConstantLR(run.optimizer, factor=1.0)


CHANGES = (change_groups, move_a_weight, load, replace_moments, forget, begin_to_watch)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_under_its_hands_is_seen(change: Callable[[Run], None]) -> None:
    runs = [Run(OPTIMIZERS["adamw"], watched=watched) for watched in (False, True)]
    for seed in range(9):
        for run in runs:
            if seed in (3, 6):
                change(run)
            run.step(seed)
        assert same(runs), seed


def test_the_state_is_where_torch_has_it() -> None:
    """Its own step goes on from ours, and a copy of the optimizer is whole."""
    runs = [Run(OPTIMIZERS["adamw"], watched=watched) for watched in (False, True)]
    for run in runs:
        for seed in range(3):
            run.step(seed)
        run.net(torch.ones(2, 5)).sum().backward()
        run.optimizer.step()
    assert same(runs)
    twin = copy.deepcopy(runs[0].optimizer)
    assert "_amp_core_step" not in vars(twin)
    assert [float(entry["step"]) for entry in twin.state.values()] == [4.0] * 6


def test_gradients_are_dropped_as_by_the_optimizer() -> None:
    net, amp = nn.Linear(2, 2), Amp.named("fp32")
    own, seen = SGD(net.parameters(), lr=0.1), []
    own.zero_grad = lambda set_to_none: seen.append(set_to_none)  # type: ignore[method-assign, assignment]
    net(torch.ones(1, 2)).sum().backward()
    amp.zero_grad(own)
    assert seen == [True] and net.weight.grad is not None
    amp.zero_grad(SGD(net.parameters(), lr=0.1))
    assert net.weight.grad is None and net.bias.grad is None
