"""What the usual way gives in plain torch, and by how much it is wrong; that ours is right is shown where ours is tested."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared import a_weight
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

INF, FP16, BF16 = float("inf"), torch.float16, torch.bfloat16


def without_a_scale() -> float:
    """Gradients that are not 0 of a loss weighted by 1e-5."""
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.autocast("cpu", FP16):
        loss = net(torch.randn(1024, 8)).float().square().mean()
    (loss * 1e-5).backward()
    return sum(float(p.grad.count_nonzero()) for p in net.parameters())


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


def norm_of_an_overflow() -> str:
    weight, _ = a_weight()
    (weight * INF).sum().backward()
    with pytest.raises(RuntimeError, match="non-finite") as raised:
        clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
    return f"{type(raised.value).__name__}, {clip_grad_norm_([weight], 1.0):g}"


def scale_and_hook(bad: bool, interval: int, static: bool) -> tuple[bool, bool, bool]:
    """Whether a step is taken, the scale changes, and the optimizer's hook is called."""
    weight, optimizer = a_weight(fused=True)
    called: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: called.append(True))
    scaler = GradScaler("cpu", 4.0, growth_interval=interval)
    scaler.scale((weight * (INF if bad else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update(4.0) if static else scaler.update()
    return weight.item() != 0.0, scaler.get_scale() != 4.0, bool(called)


def anomaly(scale: float) -> tuple[bool, bool]:
    """Whether gradients overflow in a sound network, and whether anomaly detection raises."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    with torch.autocast("cpu", FP16):
        loss = net(torch.randn(8, 8)).float().sum()
    with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
        try:
            (loss * scale).backward()
        except RuntimeError:
            return True, True
    return not all(p.grad.isfinite().all() for p in net.parameters()), False


def without_the_division(kind: type[Optimizer]) -> float:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = kind([weight], lr=0.01)
    for _ in range(4):
        weight.sum().backward()
    optimizer.step()
    return round(-weight.item(), 6)


def tail_that_is_not_stepped() -> list[float]:
    """10 micro-batches an epoch, 4 a window, gradients dropped only after a step."""
    weight, seen = torch.zeros(1, requires_grad=True), []
    for i in (*range(10), *range(10)):
        (weight.sum() / 4).backward()
        if (i + 1) % 4 == 0:
            seen.append(weight.grad.item())
            weight.grad = None
    return seen


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


def schedule_after_three_overflows_in_five() -> float:
    optimizer = a_weight()[1]
    scheduler = LambdaLR(optimizer, lambda k: 0.001 * (1 + k))
    optimizer.step()
    for _ in range(5):
        scheduler.step()
    return round(optimizer.param_groups[0]["lr"], 9)


def average_after_a_skipped_step() -> float:
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(net)
    nn.init.zeros_(net.weight)  # as another optimizer leaves it
    average.update_parameters(net)
    return round(average.module.weight.item(), 6)


def eps_in_fp16() -> tuple[float, ...]:
    x = torch.zeros((), dtype=FP16)
    return ((1 / (x + 1e-8)).item(), (x / (x + 1e-5)).item(), (1 / (x + 1e-5)).item())


def sums_in_bf16() -> tuple[float, float]:
    total = torch.zeros((), dtype=BF16)
    for _ in range(512):
        total = total + 1 / 512
    return total.item(), (torch.tensor(256.0, dtype=BF16) + 0.5).item()


def samples_of_a_loader_made_again() -> int:
    """Different samples of 12, stopped after 6: the saved state is that after the shuffle, and the loader shuffles anew."""
    data = TensorDataset(torch.arange(12))
    torch.manual_seed(0)
    loader = iter(DataLoader(data, batch_size=2, shuffle=True))
    seen = [next(loader)[0] for _ in range(3)]  # then the state is saved and put back
    return len(
        set(torch.cat([*seen, *[batch for (batch,) in DataLoader(data, batch_size=2, shuffle=True)][3:]]).tolist())
    )


def sampler_without_set_epoch() -> bool:
    sampler = DistributedSampler(range(12), num_replicas=1, rank=0, shuffle=True)
    return list(sampler) == list(sampler)


USUAL: dict[str, tuple[Callable[[], Any], Any]] = {
    "fp16 without a loss scale": (without_a_scale, 0),
    "scales that are exact": (scales_that_are_exact, [2.0**10, 2.0**20]),
    "SGD, clipped before unscaling": (lambda: clipped_before_unscaling(SGD, 0.5), pytest.approx(2.0**-16, rel=1e-3)),
    "Adam, clipped before unscaling": (
        lambda: clipped_before_unscaling(Adam, 0.1),
        pytest.approx(1.0, rel=0.04),
    ),  # an eps of 1e-8 beside 2.8e-7
    "clipped by value before unscaling": (by_value_before_unscaling, (65536.0, True)),
    "the norm of an overflow": (norm_of_an_overflow, "RuntimeError, inf"),
    "a scale that grows is no skip": (lambda: scale_and_hook(False, 1, False), (True, True, True)),
    "a static scale shows no skip": (lambda: scale_and_hook(True, 2000, True), (False, False, True)),
    "anomaly detection of a calibration": (lambda: anomaly(2.0**16), (True, True)),
    "anomaly detection without a NaN": (lambda: anomaly(2.0**15), (True, False)),
    "SGD without the division": (lambda: without_the_division(SGD), 0.04),
    "Adam without the division": (lambda: without_the_division(Adam), 0.01),
    "a tail that is not stepped": (tail_that_is_not_stepped, [1.0, 1.0, 1.5, 1.0]),
    "unscaled within a window": (lambda: within_a_window("unscale"), -512.5),
    "rescaled within a window": (lambda: within_a_window("rescale"), -1.5),
    "neither": (lambda: within_a_window(""), -1.0),
    "an update after each step": (lambda: update_after_each_step(False), -2.0),
    "an update after each step, unscaled first": (lambda: update_after_each_step(True), -(2.0**-16)),
    "a schedule of windows": (schedule_after_three_overflows_in_five, 0.006),
    "an average of windows": (average_after_a_skipped_step, 0.9),
    "an eps in fp16": (eps_in_fp16, (INF, 0.0, INF)),
    "sums in bf16": (sums_in_bf16, (0.5, 256.0)),
    "a shuffling loader made again": (samples_of_a_loader_made_again, 9),
    "a sampler without set_epoch": (sampler_without_set_epoch, True),
}


@pytest.mark.parametrize("name", USUAL)
def test_the_usual_way(name: str) -> None:
    found, expected = USUAL[name]
    assert found() == expected
