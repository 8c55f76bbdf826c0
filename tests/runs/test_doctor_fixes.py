"""Fixes are tried for several steps, which are taken and undone; what breaks on the way is not printed."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from loops import amps_step, same, state_of, torchs_step
from running import same_but, state, summary
from test_doctor import reports, start
from torch import nn

import recipes.classification
from amp_core import Amp, Doctor, keep_fp32
from amp_core.doctor import fixes, locate, plain_loop


class Loud(nn.Module):
    """Overflows fp16 inside."""

    def forward(self, x):
        return x * 1e3 * 1e3 / 1e6


class Growing(nn.Module):
    """Overflows fp16 inside after the first step that is taken: `log` should gain 1 in each."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        factor = 1e6 ** self.log.detach()
        return x * factor / factor + (self.log - self.log.detach())


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 2))


def twice():
    return network(Loud(), nn.Linear(4, 4), Growing())


def loss_of(net, x):
    growth = [module.log for module in net if isinstance(module, Growing)]
    return net(x).float().square().mean() - sum(growth)


def amps_loop(net, optimizer, x, losses, scale=8.0):
    amp = Amp.named("fp16", init_scale=scale)
    return amp, amps_step(amp, optimizer, lambda: loss_of(net, x), losses)


def torchs_loop(net, optimizer, x, losses, scale=8.0):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    step = torchs_step(optimizer, lambda: loss_of(net, x), scaler=scaler, zeroes="last", losses=losses)
    return Amp.named("fp16"), step


def optimizer_of(net, kind="SGD"):
    return torch.optim.SGD(net.parameters(), 1.0) if kind == "SGD" else torch.optim.AdamW(net.parameters(), 1.0)


@pytest.mark.parametrize("loop", [amps_loop, torchs_loop])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_fix_lasts_for_the_steps_that_it_was_tried_for(loop, kind, monkeypatch):
    net, x, losses = twice(), torch.randn(8, 4), []
    optimizer = optimizer_of(net, kind)
    net[3].log.grad = torch.zeros(())
    optimizer.step()  # so that there are moments
    optimizer.zero_grad()
    amp, step = loop(net, optimizer, x, losses)
    before, random = state_of(net, optimizer), torch.get_rng_state()
    diagnosis = Doctor(amp, net).locate(step, x)
    assert same(state_of(net, optimizer), before)
    assert torch.equal(random, torch.get_rng_state())
    assert diagnosis is not None and (diagnosis.module, diagnosis.islands) == ("1", ["1", "3"])
    assert (diagnosis.fixes[0].python, diagnosis.fixes[0].steps) == ('keep_fp32(model, ["1", "3"])', fixes.STEPS)
    assert "(tried: finite for 5 steps on this batch)" in str(diagnosis)

    def trained_with(names):
        fixed, trained = copy.deepcopy(net), []
        own = optimizer_of(fixed, kind)
        own.load_state_dict(optimizer.state_dict())
        _, train = loop(keep_fp32(fixed, names), own, x, trained)
        for _ in range(fixes.STEPS):
            train()
        return torch.tensor(trained)

    # What was tried, before bf16, is what training with the fix computes, in every bit.
    assert torch.equal(trained_with(diagnosis.islands), torch.tensor(losses[-2 * fixes.STEPS : -fixes.STEPS]))
    # Tried for the window alone, a fix is printed that the next step breaks.
    monkeypatch.setattr(fixes, "STEPS", 1)
    diagnosis = Doctor(amp, net).locate(step, x)
    assert diagnosis is not None and diagnosis.fixes[0].python == 'keep_fp32(model, ["1"])'
    assert "(tried: finite for this window)" in str(diagnosis)
    monkeypatch.undo()
    first, *_, last = trained_with(["1"]).isfinite().tolist()
    assert first and not last


def test_a_step_that_calls_no_optimizer_is_tried_for_its_window():
    net, x = twice(), torch.randn(8, 4)
    amp = Amp.named("fp16", init_scale=8.0)

    def step():
        with amp.autocast():
            loss = loss_of(net, x)
        amp.backward(loss)

    diagnosis = Doctor(amp, net).locate(step, x)
    assert diagnosis is not None and diagnosis.fixes[0].steps == 1
    assert "(tried: finite for this window)" in str(diagnosis)


@pytest.mark.parametrize("loop", [amps_loop, torchs_loop])
def test_no_precision_is_printed_as_the_fix_of_what_breaks_in_each(loop):
    net, x = network(Loud()), torch.randn(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), 1e12)
    amp, step = loop(net, optimizer, x, [])
    diagnosis = Doctor(amp, net).locate(step, x)
    assert diagnosis is not None and diagnosis.module == "1" and not diagnosis.islands
    assert [fix.kind for fix in diagnosis.fixes] == ["code"] and "learning rate" in diagnosis.fixes[0].text
    assert diagnosis.cause == "training diverges" and "With a learning rate of 0 it does not." in diagnosis.why
    assert "Without autocast step" in diagnosis.why and "tried" not in str(diagnosis)
    wide, broken = copy.deepcopy(net), []
    for _ in range(fixes.STEPS):
        loss = F.mse_loss(wide(x), torch.zeros(8, 2))
        broken.append(not loss.isfinite())
        loss.backward()
        with torch.no_grad():
            for p in wide.parameters():
                p -= 1e12 * p.grad
                p.grad = None
    assert broken[0] is False and any(broken)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_fix_with_which_no_weight_moves_is_none(dtype):
    """A dice loss: the sum of the program's own fp16 targets stays infinite, and what is divided by it becomes 0."""
    net, x, targets = nn.Sequential(nn.Linear(8, 512)), torch.randn(256, 8), torch.ones(256, 512, dtype=dtype)
    optimizer, amp = torch.optim.SGD(net.parameters(), 0.1), Amp.named("fp16", init_scale=16.0)
    losses = list[float]()

    def dice():
        p = net(x).sigmoid() + 0.5
        return (1 - (2 * (p * targets.to(p.dtype)).sum() + 1) / (p.sum() + targets.sum() + 1)).float()

    step = amps_step(amp, optimizer, dice, losses)
    diagnosis = Doctor(amp, net).locate(step, x)
    assert diagnosis is not None and diagnosis.cause == "overflow in a reduction"
    tried = [fix for fix in diagnosis.fixes if fix.verified]
    assert bool(tried) == (dtype is torch.float32)
    flat = [fix for fix in diagnosis.fixes if "all gradients are 0" in fix.text]
    assert [fix.verified for fix in flat] == [False] * (dtype is torch.float16)
    before = copy.deepcopy([*net.parameters()])
    keep_fp32(net, ["0"])
    step()
    moved = not same([*net.parameters()], before)
    assert math.isfinite(losses[-1]) and moved == bool(tried)


@pytest.mark.parametrize("rate, diverges", [(30.0, True), (0.01, False)])
def test_a_fix_with_which_the_loss_grows_is_none(rate, diverges):
    """fp32 would take many more steps to its end than are tried; at the smaller rate the overflow is of fp16 alone."""
    torch.manual_seed(0)
    net, x, losses = nn.Linear(8, 4), torch.randn(16, 8), list[float]()
    optimizer, amp = torch.optim.SGD(net.parameters(), rate), Amp.named("fp16", init_scale=1.0)
    with torch.no_grad():
        net.weight.mul_(1e5)
    diagnosis = Doctor(amp, net).locate(amps_step(amp, optimizer, lambda: net(x).float().square().mean(), losses), x)
    assert diagnosis is not None
    assert (diagnosis.cause == "training diverges", "tried" in str(diagnosis)) == (diverges, not diverges)
    assert ("the loss grows from" in diagnosis.why and "it grows, too" in diagnosis.why) == diverges
    wide, seen = copy.deepcopy(net), []
    optimizer = torch.optim.SGD(wide.parameters(), rate)
    for _ in range(fixes.STEPS):
        loss = wide(x).square().mean()
        seen.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (seen[-1] > 10 * seen[0]) == diverges and all(map(math.isfinite, seen))


def test_a_loss_scale_that_the_next_step_breaks_is_lowered(monkeypatch):
    """The first step makes gradients four times as large."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    nn.init.constant_(net[0].weight, 0.0)
    factor = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([{"params": net.parameters(), "lr": 0.0}, {"params": [factor], "lr": 1.0}])
    amp, x = Amp.named("fp16", init_scale=2.0**24), torch.randn(8, 4)

    def loss():
        return net(x).float().sum() * factor.detach() - 3 * factor * (factor.detach() < 2)

    step = amps_step(amp, optimizer, loss)
    lasting = Doctor(amp, net).locate(step, x)
    monkeypatch.setattr(fixes, "STEPS", 1)
    first = Doctor(amp, net).locate(step, x)
    assert first is not None and lasting is not None and first.cause == lasting.cause == "loss scale too large"
    assert first.scale_that_fits == 4 * (lasting.scale_that_fits or 0.0)
    assert lasting.fixes[0].steps == 5 and factor == 1.0  # a weight that is in no network is put back, too


class LouderByStep(nn.Module):
    """Overflows fp16 inside after the first step that is taken."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        factor = 1e6 ** self.steps.clamp(max=5.0)
        if self.training:
            self.steps += 1
        return x * factor / factor


@pytest.mark.one_in(2)
@pytest.mark.parametrize("steps", [fixes.STEPS, 1])
def test_a_run_is_healed_once_of_what_breaks_one_step_after_another(steps, tmp_path, monkeypatch):
    build = recipes.classification.build_model
    layers = [nn.Conv2d(3, 3, 1), Loud(), nn.Conv2d(3, 3, 1), LouderByStep()]
    monkeypatch.setattr(
        recipes.classification, "build_model", lambda *a, **k: nn.Sequential(*copy.deepcopy(layers), build(*a, **k))
    )
    monkeypatch.setattr(fixes, "STEPS", steps)
    common = ["amp=fp16", "amp.init_scale=8", "steps=8", "log_every=1"]
    assert start(tmp_path / "healed", *common, "doctor=heal", "doctor.after_skips=2") == 0
    islands = [report["islands"] for report in reports(tmp_path / "healed")]
    assert islands == ([["1", "3"]] if steps > 1 else [["1"], ["3"]])
    assert summary(tmp_path / "healed")["skipped"] == len(islands)
    # Steps that were tried leave nothing behind.
    assert start(tmp_path / "watched", *common, "doctor.after_skips=2") in (0, 5)
    assert start(tmp_path / "alone", *common, "doctor=off") in (0, 5) and reports(tmp_path / "watched")
    assert not same_but(state(tmp_path / "watched"), state(tmp_path / "alone"))


class Doubled(nn.Linear):
    """Overflows in fp16, and so does what follows it."""

    def forward(self, x):
        return super().forward(x) * 1e5


@pytest.mark.parametrize(
    "net, loss, mode, windows",
    [
        # Watched, and its step taken: weights may be NaN only then.
        (lambda: nn.Linear(8, 4), torch.mean, "fp16", 2),
        # Watched, and in fp32.
        (lambda: nn.Linear(8, 4), lambda y: torch.log(y.relu() * 0).mean(), "fp16", 2),
        # Watched.
        (lambda: poisoned(nn.Linear(8, 4)), torch.mean, "fp32", 1),
        # Watched, and five steps with the island, five in bf16; one in fp32, whose loss bf16 has to have.
        (lambda: Doubled(8, 4), torch.mean, "fp16", 12),
        # The first island is tried at two scales, and what breaks then watched; both islands, each alone, and five steps
        # each with both and in bf16; one in fp32.
        (lambda: nn.Sequential(Doubled(8, 4), Doubled(4, 4)), torch.mean, "fp16", 18),
    ],
)
def test_a_diagnosis_computes_as_few_windows_as_it_needs(net, loss, mode, windows, monkeypatch):
    for module in (fixes, locate, plain_loop):  # what may be compiled is computed once more
        monkeypatch.setattr(module, "may_compile", lambda: False)
    torch.manual_seed(0)
    net, x, count = net(), torch.randn(6, 8), []
    amp = Amp.named(mode, **({"init_scale": 8.0} if mode == "fp16" else {}))
    optimizer = torch.optim.SGD(net.parameters(), 1e-12)

    step = amps_step(amp, optimizer, lambda: loss(net(x)).float() * 1e-9)
    diagnosis = Doctor(amp, net).locate(lambda: (count.append(1), step()), x)
    is_healthy = type(net) is nn.Linear and loss is torch.mean and bool(net.weight.isfinite().all())
    assert (diagnosis is None) == is_healthy and len(count) == windows


def poisoned(net):
    with torch.no_grad():
        net.weight[0, 0] = float("nan")
    return net


class Lossy(nn.Module):
    """One product that overflows float16, and a square that is 0 in it and makes most of the loss in fp32."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        with torch.no_grad():
            self.last.weight.fill_(3e4)

    def forward(self, x):
        h = self.first(x).abs() + 1
        return self.last(h).float().mean() * 1e-6 + ((h * 1e-5) ** 2).float().mean() * 1e12


def test_a_fix_with_another_loss_than_fp32_has_is_widened():
    torch.manual_seed(0)
    net, x = Lossy(), torch.randn(8, 4)
    amp, optimizer = Amp.named("fp16", init_scale=1.0), torch.optim.SGD(net.parameters(), 1e-9)
    losses = []

    step = amps_step(amp, optimizer, lambda: net(x), losses)
    with torch.no_grad():
        exact = net(x).item()
    diagnosis = Doctor(amp, net).locate(step, x)
    assert diagnosis is not None and diagnosis.module == "last" and diagnosis.islands == [""]
    assert 0 < min(loss for loss in losses if math.isfinite(loss)) < exact / 2  # an island at `last` alone is finite
    fixed = keep_fp32(copy.deepcopy(net))
    with amp.autocast():
        assert fixed(x).item() == pytest.approx(exact, rel=1e-5)
