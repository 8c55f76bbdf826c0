"""The loss scale moves as GradScaler's does, within a cap and a floor, once per window; its state fits both ways."""

from __future__ import annotations

import copy
import logging
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import rows
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from amp_core import Amp, Schedule
from amp_core.config.errors import ConfigError

INF = float("inf")
HUGE = 3e38  # a slope: finite at a weight of 0, infinite with a loss scale


def amp_of(**fields: Any) -> Amp:
    return Amp.named("fp16", **fields)


def a_weight(value: float = 0.0, lr: float = 1.0, kind: Callable[..., Optimizer] = SGD) -> tuple[Tensor, Optimizer]:
    weight = torch.full((1,), value, requires_grad=True)
    return weight, kind([weight], lr=lr)


def one_step(amp: Amp, weight: Tensor, optimizer: Optimizer, factor: float = 1.0) -> float:
    """A window whose gradient is `factor`; the scale after it."""
    amp.backward((weight * factor).sum())
    amp.step(optimizer)
    amp.update()
    optimizer.zero_grad()
    return amp.scale


def trace(amp: Amp, bad: list[bool]) -> list[float]:
    weight, optimizer = a_weight()
    return [one_step(amp, weight, optimizer, INF if now else 1.0) for now in bad]


# Optimizers for which the mathematics, not only the result, is the reference's: bitwise.
OPTIMIZERS = {
    "sgd": lambda params: SGD(params, lr=0.125, momentum=0.9),
    "sgd_fused": lambda params: SGD(params, lr=0.125, momentum=0.9, weight_decay=0.01, fused=True),
    "adamw": lambda params: AdamW(params, lr=2**-7),
    "adamw_fused": lambda params: AdamW(params, lr=2**-7, fused=True),
}
PATTERNS = int(os.environ.get("OVERFLOW_PATTERNS", 125))
"""Patterns of each of 8 cases: 1,000 in all, or as many as the environment says."""
# Falls with every taken step, and stays a power of two: exact as a tensor on the device, too.
RATES: dict[str, Any] = {"lr_lambda": lambda taken: 0.5**taken}


def with_grad_scaler(scaler: GradScaler, net: nn.Module, optimizer: Optimizer, micros: list[list[Tensor]]) -> Any:
    """Scales, taken steps, and where the schedule stands after each window, as in torch's documentation."""
    schedule, seen = LambdaLR(optimizer, **RATES), []
    for window in micros:
        before = scaler.get_scale()
        for x in window:
            with torch.autocast("cpu", torch.float16):
                loss = net(x).float().square().mean() / len(window)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        is_taken = scaler.get_scale() >= before
        if is_taken:
            schedule.step()
        seen.append((scaler.get_scale(), is_taken, schedule.last_epoch))
    return seen


def with_ours(amp: Amp, net: nn.Module, optimizer: Optimizer, micros: list[list[Tensor]]) -> Any:
    seen: list[Any] = []
    schedule = Schedule(optimizer, lambda o, n: LambdaLR(o, **RATES), len(micros) + 1)
    for window in micros:
        for x in window:
            with amp.autocast():
                loss = net(x).float().square().mean() / len(window)
            amp.backward(loss)
        report = amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
        schedule.advance(report)
        seen.append((amp.scale, bool(report.taken), int(schedule.num_taken)))
    return seen


@pytest.mark.parametrize("accumulation", rows([1, 4], 1))
@pytest.mark.parametrize("name", rows(OPTIMIZERS, "sgd"))
def test_scales_and_weights_are_those_of_grad_scaler_for_1000_overflow_patterns(name: str, accumulation: int) -> None:
    draw = random.Random(f"{name}{accumulation}")
    num_skipped = 0
    for _ in range(PATTERNS):
        knobs = {
            "init_scale": draw.choice([2.0**12, 2.0**16]),
            "growth_interval": draw.choice([1, 2, 3, 5]),
            "growth_factor": draw.choice([2.0, 4.0]),
            "backoff_factor": draw.choice([0.5, 0.25]),
        }
        chance = draw.choice([0.1, 0.3, 0.6])
        micros = [[torch.randn(2, 3) for _ in range(accumulation)] for _ in range(8)]
        for window in micros:
            if draw.random() < chance:
                draw.choice(window)[0, 0] = draw.choice([INF, float("nan")])
        ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
        theirs.load_state_dict(ours.state_dict())
        a, b = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](theirs.parameters())
        if name == "sgd_fused":  # torch leaves its momentum uninitialised when the first step is skipped
            b.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in theirs.parameters()})
        seen = with_ours(amp_of(min_scale=2.0**-40, max_scale=2.0**40, **knobs), ours, a, micros)
        assert seen == with_grad_scaler(GradScaler("cpu", **knobs), theirs, b, micros)
        assert all(torch.equal(x, y) for x, y in zip(ours.parameters(), theirs.parameters(), strict=True))
        num_skipped += sum(not is_taken for _, is_taken, _ in seen)
    assert 0.1 < num_skipped / (8 * PATTERNS) < 0.6  # both kinds of steps were seen


def test_scale_stops_at_its_cap() -> None:
    assert trace(amp_of(init_scale=2.0**22, growth_interval=1), [False] * 4) == [2.0**23] + [2.0**24] * 3
    # A cap that is no multiple is met exactly.
    assert trace(amp_of(init_scale=3.0, max_scale=8.0, growth_interval=1), [False] * 3) == [6.0, 8.0, 8.0]


def test_scale_stops_at_its_floor_and_recovers() -> None:
    weight, optimizer = a_weight()
    amp = amp_of(growth_interval=2)
    scales = [one_step(amp, weight, optimizer, INF) for _ in range(170)]
    assert min(scales) == scales[-1] == 1.0 and weight.item() == 0.0
    assert [one_step(amp, weight, optimizer) for _ in range(4)] == [1, 2, 2, 4]
    assert weight.item() == -4.0


@pytest.mark.parametrize("fused", [False, True])
def test_static_scale_never_moves_and_still_skips(fused: bool) -> None:
    amp = amp_of(init_scale=128.0, dynamic=False, growth_interval=1)
    weight, optimizer = a_weight(kind=lambda params, lr: SGD(params, lr=lr, fused=fused))
    assert [one_step(amp, weight, optimizer, factor) for factor in (1.0, INF, 1.0)] == [128.0] * 3
    assert weight.item() == -2.0


def test_init_above_the_cap_is_clamped() -> None:
    assert amp_of(init_scale=65536.0, max_scale=1024.0).scale == 1024.0
    assert Amp.named("fp16_capped", samples=4).scale == 512.0


def test_capped_growth_freezes_at_the_cap_and_resumes_after_a_backoff() -> None:
    amp = Amp.named("fp16_capped", samples=4, growth_interval=2)
    weight, optimizer = a_weight()
    used = []
    for is_bad in [False] * 5 + [True] + [False] * 6:
        used.append(amp.scale)
        one_step(amp, weight, optimizer, INF if is_bad else 1.0)
    # The streak of clean steps begins anew at the overflow.
    assert used == [512] * 6 + [256, 256] + [512] * 4
    # insightface's scaler saves growth_factor 1, which the stock constructor refuses and with which it never grows.
    stock = GradScaler("cpu")
    stock.load_state_dict(amp.state_dict())
    assert stock.get_scale() == 512 and stock.get_growth_factor() == 2.0
    again = Amp.named("fp16_capped", samples=2)
    again.load_state_dict(amp.state_dict())
    assert again.scale == 256.0  # a smaller micro-batch has a lower cap


def test_capped_mode_needs_the_samples_of_a_micro_batch() -> None:
    with pytest.raises(ConfigError, match="samples"):
        Amp.named("fp16_capped")


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 5])
def test_saved_state_continues_in_grad_scaler_and_back(cut: int, ours_first: bool) -> None:
    micros = [[torch.full((1, 3), INF if now else 0.01)] for now in (0, 0, 1, 0, 0, 1, 0, 0, 0, 0)]

    def run(scaler: Any, micros: list[list[Tensor]]) -> list[float]:
        net, loop = nn.Linear(3, 1), with_ours if isinstance(scaler, Amp) else with_grad_scaler
        return [scale for scale, *_ in loop(scaler, net, SGD(net.parameters(), lr=0.0), micros)]

    kinds = [lambda: amp_of(growth_interval=3), lambda: GradScaler("cpu", growth_interval=3)]
    first, second, whole = kinds[not ours_first](), kinds[ours_first](), kinds[1]()
    scales = run(first, micros[:cut])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert scales + run(second, micros[cut:]) == run(whole, micros)
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16"])
def test_states_cross_modes(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    fp16, other = amp_of(), Amp.named(mode)
    other.load_state_dict(fp16.state_dict())  # ignored
    assert other.scale == 1.0 and other.state_dict() == {}
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fp16.load_state_dict(other.state_dict())
    assert fp16.scale == 65536.0 and len(caplog.records) == 1  # begins afresh, said once
    with pytest.raises(RuntimeError):  # the usual code
        GradScaler("cpu").load_state_dict({})


def test_the_state_of_a_mode_without_a_scale_begins_afresh_in_a_scale_that_has_moved() -> None:
    amp = amp_of(growth_interval=2)
    trace(amp, [True, False])
    amp.load_state_dict({})
    assert amp.state_dict() == amp_of(growth_interval=2).state_dict()


def test_knobs_stay_those_of_the_config_and_the_difference_is_said(caplog: pytest.LogCaptureFixture) -> None:
    saved = GradScaler("cpu", 1024.0, growth_interval=7, growth_factor=8.0).state_dict() | {"_growth_tracker": 1}
    amp = amp_of(growth_interval=2)
    with caplog.at_level(logging.INFO):
        amp.load_state_dict(saved)
    assert "growth_interval" in caplog.text
    assert trace(amp, [False] * 3) == [2048, 2048, 4096]  # the saved streak of 1, then this config's 2 and factor 2
    assert amp.state_dict()["growth_interval"] == 2


@pytest.mark.parametrize("scale", [0.0, -1.0, INF, float("nan")])
def test_a_saved_scale_that_is_unusable_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        amp_of().load_state_dict(amp_of().state_dict() | {"scale": scale})


def test_a_saved_scale_outside_of_cap_and_floor_is_clamped() -> None:
    for saved, used in ((2.0**100, 2.0**24), (2.0**-20, 1.0)):
        amp = amp_of()
        amp.load_state_dict(amp.state_dict() | {"scale": saved})
        assert amp.scale == used


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [0, 1])
def test_one_optimizer_skips_alone_and_the_scale_falls_once(bad: int, fused: bool, unscale_first: bool) -> None:
    pairs, amp = [a_weight(kind=lambda p, lr: SGD(p, lr=lr, fused=fused)) for _ in range(2)], amp_of()
    for i, (weight, _) in enumerate(pairs):
        amp.backward((weight * (HUGE if i == bad else 1.0)).sum(), retain_graph=True)
    for _, optimizer in pairs if unscale_first else ():
        amp.unscale_(optimizer)
    taken = [bool(amp.step(optimizer).taken) for _, optimizer in pairs]
    amp.update()
    assert taken == [bad == 1, bad == 0] and amp.scale == 32768.0
    assert [weight.item() for weight, _ in pairs] == [-1.0 if each else 0.0 for each in taken]


@pytest.mark.parametrize("bad", [INF, -INF, float("nan")], ids=str)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_that_is_not_finite_skips_though_its_gradients_are(bad: float, mode: str, fused: bool) -> None:
    """GradScaler takes this step. Neither the scale nor a step that follows another backward pass is touched."""
    (a, opt_a), (b, opt_b) = [a_weight(kind=lambda p, lr: SGD(p, lr=lr, fused=fused)) for _ in range(2)]
    amp, stock = Amp.named(mode), GradScaler("cpu")
    before = amp.scale
    loss = (a * 1.0).sum() + torch.tensor(bad)
    stock.scale(loss).backward(retain_graph=True)
    stock.step(opt_a)
    assert a.item() == -1.0
    opt_a.zero_grad()
    for number in range(101):  # neither those before nor those after hide it
        amp.backward(loss if number == 50 else (a * 0.01).sum())
    reports = [amp.step(opt_a)]
    amp.backward((b * 1.0).sum())
    reports.append(amp.step(opt_b))
    amp.update()
    assert [bool(report.taken) for report in reports] == [False, True] and reports[0].grad_norm.isfinite()
    assert (a.item(), b.item(), amp.scale) == (-1.0, -1.0, before)
    assert (amp.num_skipped, amp.num_consecutive_skips) == (1, 1)
    opt_a.zero_grad()
    amp.backward((a * 1.0).sum())
    assert amp.step(opt_a).taken  # it is forgotten with its window
    amp.update()
    assert (amp.num_skipped, amp.num_consecutive_skips) == (1, 0)


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_a_bad_batch_that_was_dropped_does_not_skip_the_next_one(mode: str) -> None:
    amp, (weight, optimizer) = Amp.named(mode), a_weight()
    taken = []
    for bad in (False, True, False, True, False):
        amp.backward((weight * 1.0).sum() + (INF if bad else 0.0))
        if not bad:
            taken.append(bool(amp.step(optimizer).taken))
            amp.update()
        optimizer.zero_grad()
    assert taken == [True] * 3 and weight.item() == -3.0


def losses_of_ranks(rank: int) -> list[float]:
    """A loss that is infinite on rank 1 alone, with finite gradients; then an inf in what one rank or both unscale."""
    amp, (weight, optimizer), (other, unstepped) = amp_of(), a_weight(), a_weight()
    amp.backward(weight.sum() + torch.tensor(INF if rank else 0.0))
    found = [float(amp.step(optimizer).taken)]
    amp.update()
    found += [amp.scale, weight.item()]
    for factors in ((1.0, HUGE), (0.0, HUGE), (HUGE, HUGE)):
        optimizer.zero_grad(), unstepped.zero_grad()
        amp.backward(weight.sum())
        if factors[rank]:  # else this rank has no gradient at all
            amp.backward((other * factors[rank]).sum())
        amp.unscale_(unstepped)
        found.append(float(amp.step(optimizer).taken))
        amp.update()
        found += [amp.scale, float(amp.num_skipped)]
    return found


def test_ranks_agree_about_a_bad_loss_and_an_optimizer_that_is_not_stepped(on_ranks: Callable[..., Any]) -> None:
    expected = [0.0, 65536.0, 0.0, 1.0, 32768.0, 2.0, 1.0, 16384.0, 3.0, 1.0, 8192.0, 4.0]
    assert on_ranks(losses_of_ranks) == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_gradients_for_penalties_keep_what_their_inputs_are(dtype: torch.dtype) -> None:
    """The gradient of |x|^2 / 3, which is 2 x / 3, also its imaginary part, in the precision of x."""
    x = torch.tensor([0.5, -2.0], dtype=dtype)
    x = (x * (1 + 2j) if dtype.is_complex else x).requires_grad_()
    amp = amp_of(init_scale=1024.0)
    square = (x * x.conj()).real if dtype.is_complex else x * x
    (found,) = amp.grad(square.sum() / 3, x)
    wide = torch.promote_types(dtype, torch.float32)
    assert found.dtype == wide and found.requires_grad
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, 2 * x.detach().to(wide) / 3, rtol=4 * eps, atol=0)
    with pytest.raises(TypeError, match="expected real numbers"):
        amp.grad(torch.ones(1, dtype=torch.complex64, requires_grad=True), x)
