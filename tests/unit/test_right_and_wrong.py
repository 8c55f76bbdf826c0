"""What the usual way gives in plain torch, and by how much it is wrong; that ours is right is shown where ours is tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared import a_weight
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, Optimizer

INF, FP16, BF16 = float("inf"), torch.float16, torch.bfloat16


def scales_that_are_exact() -> list[float]:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(16, 8)

    def grads(scale: float) -> list[Tensor]:
        net.zero_grad()
        (net(x).square().mean() * scale).backward()
        return [p.grad / scale for p in net.parameters()]

    return [scale for scale in (2.0**10, 2.0**20, 1000.0) if all(map(torch.equal, grads(scale), grads(1.0)))]


def clipped_before_unscaling(kind: type[Optimizer], lr: float) -> float:
    """How far a step moves that clips scaled gradients to 0.1, relative to one that clips unscaled ones."""
    moved = []
    for unscales in (False, True):
        weight = torch.zeros(4, requires_grad=True)
        scaler, optimizer = GradScaler("cpu"), kind([weight], lr=lr)
        scaler.scale((weight * torch.tensor([1.0, -2.0, 3.0, 4.0])).sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        clip_grad_norm_([weight], 0.1)
        scaler.step(optimizer)
        moved.append(float(weight.detach().norm()))
    return moved[0] / moved[1]


def by_value_before_unscaling() -> tuple[float, bool]:
    """The scale after an overflow, and whether its step was taken."""
    weight, optimizer = a_weight()
    scaler = GradScaler("cpu")
    scaler.scale((weight * INF).sum()).backward()
    clip_grad_value_([weight], 1.0)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), weight.item() != 0


def without_the_division(kind: type[Optimizer]) -> float:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = kind([weight], lr=0.01)
    for _ in range(4):
        weight.sum().backward()
    optimizer.step()
    return round(-weight.item(), 6)


def within_a_window(mistake: str) -> float:
    """The step of two gradients of 0.5."""
    weight, optimizer = a_weight()
    scaler = GradScaler("cpu", 1024.0)
    scaler.scale(weight.sum() / 2).backward()
    if mistake:
        scaler.unscale_(optimizer) if mistake == "unscale" else scaler.update(512.0)
    scaler.scale(weight.sum() / 2).backward()
    scaler.step(optimizer)
    return weight.item()


def update_after_each_step(unscale_first: bool) -> float:
    """The step of the second of two optimizers, whose gradient is 1."""
    (a, opt_a), (b, opt_b) = a_weight(), a_weight()
    scaler = GradScaler("cpu")
    scaler.scale((a * (1.0 if unscale_first else INF)).sum() + b.sum()).backward()
    for optimizer in (opt_a, opt_b) if unscale_first else ():
        scaler.unscale_(optimizer)
    for optimizer in (opt_a, opt_b):
        scaler.step(optimizer)
        scaler.update()
    return b.item()


def sums_in_bf16() -> tuple[float, float]:
    total = torch.zeros((), dtype=BF16)
    for _ in range(512):
        total = total + 1 / 512
    return total.item(), (torch.tensor(256.0, dtype=BF16) + 0.5).item()


USUAL: dict[str, tuple[Callable[[], Any], Any]] = {
    "scales that are exact": (scales_that_are_exact, [2.0**10, 2.0**20]),
    "SGD, clipped before unscaling": (lambda: clipped_before_unscaling(SGD, 0.5), pytest.approx(2.0**-16, rel=1e-3)),
    "Adam, clipped before unscaling": (
        lambda: clipped_before_unscaling(Adam, 0.1),
        pytest.approx(1.0, rel=0.04),
    ),  # an eps of 1e-8 beside 2.8e-7
    "clipped by value before unscaling": (by_value_before_unscaling, (65536.0, True)),
    "SGD without the division": (lambda: without_the_division(SGD), 0.04),
    "Adam without the division": (lambda: without_the_division(Adam), 0.01),
    "unscaled within a window": (lambda: within_a_window("unscale"), -512.5),
    "rescaled within a window": (lambda: within_a_window("rescale"), -1.5),
    "neither": (lambda: within_a_window(""), -1.0),
    "an update after each step": (lambda: update_after_each_step(False), -2.0),
    "an update after each step, unscaled first": (lambda: update_after_each_step(True), -(2.0**-16)),
    "sums in bf16": (sums_in_bf16, (0.5, 256.0)),
}


@pytest.mark.parametrize("name", USUAL)
def test_the_usual_way(name: str) -> None:
    found, expected = USUAL[name]
    assert found() == expected
