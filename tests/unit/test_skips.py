"""Other rules for the loss scale, passes at a smaller one, steps far from the usual, and why a step was skipped."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import rows
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_core import Amp
from amp_core.config.errors import ConfigError
from amp_core.step.skips import MEDIAN_STEPS, MIN_STEPS

INF = float("inf")


def megatron(bad: list[bool], scale: float, interval: int, patience: int) -> list[float]:
    """Megatron-LM, megatron/core/optimizer/grad_scaler.py, DynamicGradScaler.update."""
    growth, hysteresis, seen = 0, patience, []
    for found_inf in bad:
        if found_inf:
            growth, hysteresis = 0, hysteresis - 1
            if hysteresis <= 0:
                scale = max(scale * 0.5, 1.0)
        else:
            growth += 1
            if growth == interval:
                growth, hysteresis, scale = 0, patience, scale * 2.0
        seen.append(scale)
    return seen


def deepspeed(bad: list[bool], scale: float, interval: int, patience: int) -> list[float]:
    """DeepSpeed, deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler.update_scale, consecutive_hysteresis."""
    hysteresis, last, seen = patience, -1, []
    for iteration, overflow in enumerate(bad):
        if overflow:
            if patience == 1 or hysteresis == 1:
                scale = max(scale / 2.0, 1.0)
            else:
                hysteresis -= 1
            last = iteration
        else:
            hysteresis = patience
            if (iteration - last) % interval == 0:
                scale *= 2.0
        seen.append(scale)
    return seen


@pytest.mark.parametrize("num", rows([50, 1000], 50))
@pytest.mark.parametrize("rule", [megatron, deepspeed])
def test_the_scale_moves_as_megatrons_and_deepspeeds_on_1000_patterns(
    rule: Callable[..., list[float]], num: int
) -> None:
    draw, is_consecutive, moved = random.Random(0), rule is deepspeed, 0
    numbers = {False: torch.tensor(0.0), True: torch.tensor(1.0)}
    for _ in range(num):
        interval, patience, chance = draw.choice([1, 2, 3, 5]), draw.choice([1, 2, 3, 4]), draw.choice([0.1, 0.3, 0.6])
        bad = [draw.random() < chance for _ in range(24)]
        fields = {"consecutive_hysteresis": is_consecutive and patience > 1}
        amp = Amp.named("fp16", max_scale=2.0**60, growth_interval=interval, hysteresis=patience, **fields)
        ours = []
        for number, now in enumerate(bad):
            amp.scaler.update(numbers[now])
            ours.append(amp.scale)
            if number == 11:  # a resumed run
                state = amp.state_dict()
                amp = Amp(amp.config)
                amp.load_state_dict(state)
        assert ours == rule(bad, 65536.0, interval, patience)
        moved += ours != megatron(bad, 65536.0, interval, 1)
    assert moved > num / 2  # hysteresis matters


def network(kind: Callable[..., Optimizer] = SGD) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    return net, kind(net.parameters(), lr=0.1)


def window(amp: Amp, net: nn.Module, optimizer: Optimizer, x: Tensor, factor: float = 1.0) -> Any:
    amp.backward(net(x).square().mean() * factor)
    report = amp.step(optimizer)
    amp.update()
    amp.zero_grad(optimizer)
    return report


def outliers(mode: str, *, resumes: bool = False, factor: float = 1000.0) -> tuple[list[bool], float, Amp]:
    """Which of 40 steps are taken; the 10th and the 30th are `factor` times as large."""
    weight = torch.ones(3, requires_grad=True)
    optimizer = SGD([weight], lr=1e-4, fused=True)
    amp, taken = Amp.named(mode, skip_above=10.0), []
    for step in range(1, 41):
        if resumes and step == 25:
            counters = copy.deepcopy(amp.counters())
            state, amp = amp.state_dict(), Amp.named(mode, skip_above=10.0)
            amp.load_state_dict(state), amp.load_counters(counters)
        amp.backward((weight * (factor if step in (10, 30) else 1 + step % 3)).sum())
        report = amp.step(optimizer)
        taken.append(bool(report.taken))
        assert bool(report.taken) or report.reason == "loss or gradient norm is far above its running median"
        amp.update()
        optimizer.zero_grad()
    return taken, weight.sum().item(), amp


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_a_step_far_from_the_usual_is_skipped_and_the_scale_stays(mode: str) -> None:
    taken, weight, amp = outliers(mode)
    assert [step for step, was in enumerate(taken, 1) if not was] == [30]  # not before the median has 16 steps
    assert MIN_STEPS == 16 and amp.scale == (65536.0 if mode == "fp16" else 1.0) and int(amp.num_skipped) == 1
    again = outliers(mode, resumes=True)
    assert (taken, weight) == again[:2] and amp.counters() == again[2].counters()
    assert all(outliers(mode, factor=9.0)[0])


def test_a_lasting_change_is_the_usual_after_half_of_the_window() -> None:
    weight = torch.ones(1, requires_grad=True)
    optimizer, amp, taken = SGD([weight], lr=0.0, fused=True), Amp.named("fp32", skip_above=10.0), []
    for step in range(2 * MEDIAN_STEPS):
        amp.backward((weight * (1.0 if step < MEDIAN_STEPS else 100.0)).sum())
        taken.append(bool(amp.step(optimizer).taken))
        amp.update()
        optimizer.zero_grad()
    assert taken == [True] * MEDIAN_STEPS + [False] * (MEDIAN_STEPS // 2 + 1) + [True] * (MEDIAN_STEPS // 2 - 1)


def on_one_rank(rank: int) -> list[Any]:
    """From the 20th step on one rank's loss alone is large, though its gradient is not."""
    weight = torch.ones(1, requires_grad=True)
    optimizer, amp, taken = SGD([weight], lr=0.1, fused=True), Amp.named("bf16", skip_above=5.0), []
    for step in range(24):
        amp.backward(weight.sum() * 1.0 + (100.0 if rank and step == 20 else INF if rank and step == 22 else 0.0))
        taken.append(bool(amp.step(optimizer).taken))
        amp.update()
        optimizer.zero_grad()
    return [taken, amp.counters()]


def test_all_ranks_skip_what_is_far_on_one(on_ranks: Callable[..., list[Any]]) -> None:
    first, second = on_ranks(on_one_rank)
    assert first == second and [step for step, was in enumerate(first[0]) if not was] == [20, 22]


def test_the_report_tells_why_a_step_was_skipped() -> None:
    net, optimizer = network()
    amp = Amp.named("fp16", growth_interval=1, init_scale=2.0**10)
    x = torch.randn(4, 8)
    reasons = [window(amp, net, optimizer, x, factor).reason for factor in (1.0, INF)]
    assert reasons == [None, "a gradient is not finite"]
    amp.backward(net(x).sum() + torch.tensor(INF), 1 / 3)
    assert "a loss is not finite" in str(amp.step(optimizer).reason)


def test_the_scale_survives_a_detour_through_bf16() -> None:
    amp = Amp.named("fp16")
    amp.scaler.update(torch.tensor(1.0))
    amp.scaler.update(torch.tensor(0.0))
    here, counters = amp.state_dict(), amp.counters()
    expected = dict(here)
    for mode in ("bf16", "fp32", "fp16"):
        amp = Amp.named(mode)
        amp.load_state_dict(here), amp.load_counters(counters)
        here, counters = amp.state_dict(), amp.counters()
        assert here == ({} if mode != "fp16" else expected)
    assert "kept_scale" not in counters


BAD = {
    "hysteresis": ({"hysteresis": 0}, "amp.hysteresis=0: expected at least 1"),
    "without a scale": ({"name": "bf16", "hysteresis": 2}, "amp.hysteresis=2: has no effect in amp=bf16"),
    "fixed": ({"dynamic": False, "hysteresis": 2}, "amp.hysteresis=2: has no effect with amp.dynamic=false"),
    "alone": ({"consecutive_hysteresis": True}, "no effect with amp.hysteresis=1"),
    "below": ({"skip_above": 1.0}, "amp.skip_above=1: expected a factor above 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_policies_are_refused(case: str) -> None:
    fields, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        Amp.named(str(fields.get("name", "fp16")), **{k: v for k, v in fields.items() if k != "name"})
