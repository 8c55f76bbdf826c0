"""Learning rates and averages move with the steps that were taken, and with no others."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LRScheduler

from amp_core import Amp, Ema, Schedule, StepReport
from amp_core.config.schema import OptimizerConfig, ScheduleConfig
from amp_core.step.optimizers import build_optimizer
from amp_core.step.schedule import build_schedule, check_schedule

INF = float("inf")
Make = Callable[[Optimizer, int], LRScheduler]


def report(taken: bool) -> StepReport:
    return StepReport(torch.tensor(taken), torch.tensor(1.0), taken)


def one_step(amp: Amp, net: nn.Module, optimizer: Optimizer, bad: bool) -> StepReport:
    amp.backward(sum(p.square().sum() for p in net.parameters()) * (INF if bad else 1.0))
    result = amp.step(optimizer)
    amp.update()
    optimizer.zero_grad()
    return result


S = torch_schedulers
SCHEDULERS: dict[str, Make] = {
    "StepLR": lambda o, n: S.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o, n: S.MultiStepLR(o, [2, 5, 7], 0.3),
    "ConstantLR": lambda o, n: S.ConstantLR(o, 0.2, 4),
    "LinearLR": lambda o, n: S.LinearLR(o, 0.1, 1.0, 5),
    "ExponentialLR": lambda o, n: S.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o, n: S.PolynomialLR(o, n, 2.0),
    "CosineAnnealingLR": lambda o, n: S.CosineAnnealingLR(o, n, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o, n: S.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o, n: S.OneCycleLR(o, [g["lr"] for g in o.param_groups], n, cycle_momentum=False),
    "CyclicLR": lambda o, n: S.CyclicLR(o, 1e-3, 0.1, 3, mode="triangular2", cycle_momentum=False),
    "LambdaLR": lambda o, n: S.LambdaLR(o, lambda k: 1 / (1 + k)),
    "LambdaLR per group": lambda o, n: S.LambdaLR(o, [lambda k: 0.9**k, lambda k: 1.0 - k / n]),
    "MultiplicativeLR": lambda o, n: S.MultiplicativeLR(o, lambda k: 0.8 + 0.01 * k),
    "SequentialLR": lambda o, n: S.SequentialLR(o, [S.LinearLR(o, 0.1, 1.0, 3), S.CosineAnnealingLR(o, n - 3)], [3]),
    "ChainedScheduler": lambda o, n: S.ChainedScheduler([S.ConstantLR(o, 0.5, 3), S.ExponentialLR(o, 0.9)]),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: SGD(groups, momentum=0.9),
    "adamw_fused": lambda groups: AdamW(groups, fused=True),
    "nadam": lambda groups: NAdam(groups),
}


def two_groups(kind: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(net, (0.3, 0.02), strict=True)]
    return net, OPTIMIZERS[kind](groups)


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_is_torch_s_scheduler_stepped_on_taken_steps_only(name: str, kind: str) -> None:
    (net, optimizer), (twin, reference), steps = two_groups(kind), two_groups(kind), 10
    schedule = Schedule(optimizer, SCHEDULERS[name], steps)
    scheduler = SCHEDULERS[name](reference, steps)
    amp, other, draw = Amp.named("fp16", init_scale=256.0), Amp.named("fp16", init_scale=256.0), random.Random(name)
    num_taken = 0
    while num_taken < steps:
        assert rates(optimizer) == pytest.approx(rates(reference), rel=1e-6)  # fp32 on the device
        assert float(schedule.rate) == rates(optimizer)[0]
        bad = draw.random() < 0.4
        schedule.advance(one_step(amp, net, optimizer, bad))
        if not bad:
            num_taken += 1
            one_step(other, twin, reference, False)
            if num_taken < steps:  # OneCycleLR refuses one more
                scheduler.step()
        assert schedule.state_dict() == {"num_taken": num_taken, "num_steps": steps}
        assert schedule.counters() == {"moved": int(not bad)}
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)  # the rate's rounding to fp32


@pytest.mark.parametrize("fused", [True, False])
def test_a_loaded_schedule_tells_the_rate_of_the_last_step(fused: bool) -> None:
    """A line of the log may come before the next step of this optimizer."""
    net, amp = nn.Linear(1, 1), Amp.named("fp16", init_scale=256.0)
    optimizer = SGD(net.parameters(), lr=1.0, fused=fused)
    schedule = Schedule(optimizer, SCHEDULERS["OneCycleLR"], 8)
    for bad in (False, False, True, False):
        used = float(schedule.rate)
        schedule.advance(one_step(amp, net, optimizer, bad))
        assert float(schedule.last_rate()) == pytest.approx(used, rel=2**-24)
        other = Schedule(SGD(nn.Linear(1, 1).parameters(), lr=1.0, fused=fused), SCHEDULERS["OneCycleLR"], 8)
        other.load_state_dict(schedule.state_dict())
        other.load_counters(schedule.counters())
        assert float(other.last_rate()) == float(schedule.last_rate())
        assert float(other.rate) == float(schedule.rate)


@pytest.mark.parametrize("fused", [True, False])
def test_steps_beyond_the_table_keep_its_last_rate(fused: bool) -> None:
    net = nn.Linear(1, 1)
    optimizer = SGD(net.parameters(), lr=1.0, fused=fused)
    schedule, amp, seen = Schedule(optimizer, SCHEDULERS["OneCycleLR"], 4), Amp.named("fp32"), []
    for _ in range(7):
        seen += rates(optimizer)
        schedule.advance(one_step(amp, net, optimizer, False))
    assert seen[3:] == [seen[3]] * 4 and seen[3] < 1e-4 and schedule.state_dict()["num_taken"] == 7


@pytest.mark.parametrize("order", ["optimizer first", "schedule first"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_schedule_loaded_in_the_middle_continues_as_if_never_stopped(kind: str, order: str) -> None:
    def run(parts: tuple[nn.Module, Optimizer, Schedule], *bad: bool) -> list[float]:
        net, optimizer, schedule = parts
        amp, seen = Amp.named("fp32"), []
        for now in bad:
            schedule.advance(one_step(amp, net, optimizer, now))
            seen.append(float(schedule.rate))
        return seen + rates(optimizer)

    def build(num_steps: int) -> tuple[nn.Module, Optimizer, Schedule]:
        net, optimizer = two_groups(kind)
        return net, optimizer, Schedule(optimizer, SCHEDULERS["CosineAnnealingLR"], num_steps)

    whole = build(10)
    run(whole, False, True, False, False)
    net, optimizer, schedule = copy.deepcopy([part.state_dict() for part in whole])
    for num_steps in (10, 3):  # the saved length holds
        again = build(num_steps)
        loads = [(again[0], net), (again[1], optimizer), (again[2], schedule)]
        for part, state in loads if order == "optimizer first" else loads[::-1]:
            part.load_state_dict(copy.deepcopy(state))
        assert rates(again[1]) == rates(whole[1]) and again[2].state_dict() == schedule
        reference = build(10)
        run(reference, False, True, False, False)
        assert run(again, False, True, False) == run(reference, False, True, False)
        assert all(torch.equal(a, b) for a, b in zip(again[0].parameters(), reference[0].parameters(), strict=True))


def test_a_fixed_length_is_not_replaced_by_the_saved_one() -> None:
    schedule = Schedule(two_groups("sgd")[1], SCHEDULERS["LinearLR"], 5, fixed=True)
    schedule.load_state_dict({"num_taken": 2, "num_steps": 100})
    assert schedule.state_dict() == {"num_taken": 2, "num_steps": 5}


# --- the `schedule` and `optimizer` groups


def config(name: str, horizon: int | None = None, **options: Any) -> ScheduleConfig:
    return ScheduleConfig(name, horizon, options)


@pytest.mark.parametrize("name, final", [("warmup_cosine", 0.01), ("warmup_linear", 0.0)])
def test_warm_up_rises_to_the_peak_and_falls_to_the_final_fraction(name: str, final: float) -> None:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    schedule = build_schedule(config(name, warmup=0.1, final=final), optimizer, 100)
    seen = []
    for _ in range(100):
        seen += rates(optimizer)
        schedule.advance(report(True))
    peak = seen.index(max(seen))
    assert 9 <= peak <= 10 and max(seen) == pytest.approx(2.0) and 0 < seen[0] <= 0.2
    assert seen[: peak + 1] == sorted(seen[: peak + 1]) and seen[peak:] == sorted(seen[peak:], reverse=True)
    assert seen[-1] == pytest.approx(2.0 * final, abs=0.03)  # at the last step, or one step after it


def test_the_horizon_goes_before_the_length_of_the_run() -> None:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = build_schedule(config("LinearLR", 8, start_factor=0.5, total_iters=4), optimizer, 100)
    assert schedule.state_dict() == {"num_taken": 0, "num_steps": 8} and float(schedule.rate) == 0.5


BAD = [
    (config("ReduceLROnPlateau"), "needs a metric"),
    (config("LRScheduler"), "is abstract"),
    (config("StepLL"), "there is no such schedule"),
    (config("StepLR"), "step_size"),
    (config("OneCycleLR"), "momentum"),
    (config("StepLR", step_size=3, gamm=1.0), "schedule.options.gamm: StepLR has no such option"),
    (config("StepLR", step_size=3, gamma=-0.5), "StepLR gives rates that are negative or not finite"),
]


@pytest.mark.parametrize("bad, said", BAD)
def test_schedules_that_cannot_work_are_named_before_the_start(bad: ScheduleConfig, said: str) -> None:
    problems = check_schedule(bad)
    assert len(problems) == 1 and "schedule" in problems[0] and said in problems[0]
    good = config("OneCycleLR", cycle_momentum=False), config("StepLR", step_size=2), config("constant")
    assert [check_schedule(cfg) for cfg in good] == [[], [], []]


def test_norms_and_biases_have_no_weight_decay_and_frozen_weights_no_optimizer() -> None:
    net, head = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2)), nn.Linear(2, 2)
    net[2].requires_grad_(False)
    optimizer = build_optimizer(OptimizerConfig("AdamW", 0.1, 0.5, None, "float32", {}), net, head)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {p: 0.5 * (p.dim() > 1) for m in (net, head) for p in m.parameters() if p.requires_grad} == decays
    assert optimizer.defaults["fused"]


# --- averages


def ema_reference(values: list[Tensor], start: Tensor, decay: float, warmup: bool) -> Tensor:
    average = start.double()
    for t, value in enumerate(values):  # t: taken steps before this one
        d = min(decay, (1 + t) / (10 + t)) if warmup else decay
        average = d * average + (1 - d) * value.double()
    return average


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999])
def test_the_average_is_that_of_the_taken_steps(decay: float, warmup: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    net.register_buffer("flags", torch.zeros(4, dtype=torch.bool))
    net.register_buffer("fine", torch.zeros(4, 3, dtype=torch.float64).t())
    start, ema, values = copy.deepcopy(net.state_dict()), Ema(net, decay, warmup=warmup), []
    for i in range(12):
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn(p.shape))
        net(torch.randn(4, 3))
        net.flags.logical_xor_(torch.rand(4) < 0.5), net.fine.normal_()
        taken = i % 3 != 0
        if taken:
            values.append(copy.deepcopy(net.state_dict()))
        ema.update(report(taken))
    assert not ema.model.training and not any(p.requires_grad for p in ema.model.parameters())
    assert int(ema.num_taken) == 8
    for key, value in ema.model.state_dict().items():
        if value.is_floating_point():
            expected = ema_reference([state[key] for state in values], start[key], decay, warmup)
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)  # fp32 against fp64
        else:
            assert torch.equal(value, values[-1][key])  # a count is not averaged


class Masked(nn.Module):
    """Infinite numbers where networks hold them: in masks, in frozen tables; beside one that becomes infinite, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([-0.0, 0.0, 1.0]))
        self.bias = nn.Parameter(torch.tensor([[-INF, INF, -0.0], [0.5, 1e38, -1e38]]).t(), requires_grad=False)
        self.codes = nn.Parameter(torch.tensor([3, -5], dtype=torch.int8), requires_grad=False)
        self.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
        self.register_buffer("window", torch.tensor([0.0, -INF, INF, -0.0], dtype=torch.float64))


@pytest.mark.parametrize("warmup", [True, False])
def test_what_is_infinite_or_does_not_change_is_copied_bit_for_bit(warmup: bool) -> None:
    net = Masked()
    ema = Ema(net, 0.9, warmup=warmup)

    def bits() -> list[tuple[Tensor, Tensor]]:
        pairs = [(ema.model.state_dict()[name], value) for name, value in net.state_dict().items()]
        return [tuple(t.contiguous().view(torch.uint8) for t in pair) for pair in pairs]

    for taken in (True, False, True):
        ema.update(report(taken))
        assert all(map(torch.equal, *zip(*bits(), strict=True)))
    old, start = net.window.clone(), ema.model.state_dict()["bias"].clone()
    net.window.copy_(torch.tensor([-INF, 2.0, -INF, 1.0]))
    net.bias.data.copy_(torch.tensor([[0.0, -INF, INF], [-INF, 1.0, -1e38]]).t())
    ema.update(report(False))
    assert torch.equal(ema.model.window, old) and torch.equal(ema.model.bias, start)
    ema.update(report(True))
    assert ema.model.window[:3].tolist() == [-INF, 2.0, -INF] and 0.0 < ema.model.window[3] < 1.0
    assert torch.equal(ema.model.bias[:, 0], net.bias[:, 0])
    assert ema.model.bias[:, 1].isfinite().tolist() == [False, True, True] and ema.model.bias[2, 1] == -1e38


def test_a_frozen_16_bit_weight_may_be_infinite_and_a_frozen_weight_may_get_other_memory() -> None:
    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(torch.tensor([[-INF, 1.0], [2.0, INF]], dtype=torch.bfloat16), requires_grad=False)
    net.bias.requires_grad_(False)
    ema = Ema(net, 0.0, warmup=False)
    ema.update(report(True))
    net.bias.data = torch.full((2,), 7.0)
    ema.update(report(True))
    assert ema.model.weight.tolist() == [[-INF, 1.0], [2.0, INF]] and ema.model.bias.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("warmup, decay", [(w, 1.0 - 10.0**-digits) for w in (True, False) for digits in range(1, 13)])
def test_the_weight_of_a_step_is_that_of_float64(warmup: bool, decay: float) -> None:
    """Within 2^-22: 10 + t, its reciprocal, the product with 9 and 1 - decay are rounded by at most 2^-24 each."""
    for t in (0, 1, 7, 1000, 2**24 + 1, 10**9 + 7):
        net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(net.weight)
        ema = Ema(net, decay, warmup=warmup)
        ema.num_taken.fill_(t)
        nn.init.ones_(net.weight)
        ema.update(report(True))
        exact = max(1.0 - decay, 9.0 / (10 + t)) if warmup else 1.0 - decay
        assert abs(ema.model.weight.item() - exact) <= 2.0**-22 * exact


def test_reset_begins_again_from_the_present_weights() -> None:
    net = nn.Linear(2, 2)
    ema = Ema(net, 0.9)
    for _ in range(5):
        nn.init.normal_(net.weight)
        ema.update(report(True))
    ema.reset()
    fresh = Ema(net, 0.9)
    for _ in range(3):
        nn.init.normal_(net.weight)
        ema.update(report(True)), fresh.update(report(True))
    assert int(ema.num_taken) == 3 and torch.equal(ema.model.weight, fresh.model.weight)


@pytest.mark.parametrize("decay", [1.0, -0.1, 2.0])
def test_a_decay_outside_of_0_to_1_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        Ema(nn.Linear(1, 1), decay)


# --- groups that are added, schedulers and optimizers that do not fit


@pytest.mark.parametrize(
    "add", [Optimizer.add_param_group, lambda optimizer, group: optimizer.param_groups.append(group)]
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_group_that_is_added_has_the_rate_of_one_that_was_there(kind: str, add: Callable[..., Any]) -> None:
    (_, optimizer), (_, other) = two_groups(kind), two_groups(kind)
    new = {**optimizer.param_groups[0], "params": [torch.zeros(1, requires_grad=True)], "lr": 0.7}
    other.add_param_group(dict(new))
    schedule, expected = (Schedule(each, SCHEDULERS["CosineAnnealingLR"], 10) for each in (optimizer, other))
    for i in range(6):
        if i == 3 and add is Optimizer.add_param_group:
            optimizer.add_param_group(new)
            assert rates(optimizer) == rates(other)  # before the next step
        elif i == 3:
            add(optimizer, new)
        schedule.advance(report(i != 1)), expected.advance(report(i != 1))
        assert rates(optimizer) == rates(other)[: 2 if i < 3 else 3]
    again = Schedule(two_groups(kind)[1], SCHEDULERS["CosineAnnealingLR"], 10)
    again.load_state_dict(schedule.state_dict())
    assert rates(again.optimizer) == rates(optimizer)[:2]


def test_a_group_that_the_scheduler_is_not_made_for_is_refused_and_gone() -> None:
    _, optimizer = two_groups("sgd")
    schedule = Schedule(optimizer, SCHEDULERS["LambdaLR per group"], 10)
    with pytest.raises(ValueError, match=r"made for 2 groups, and another was added .* build the Schedule when all"):
        optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    schedule.advance(report(True))
    assert len(optimizer.param_groups) == 2


REFUSED: dict[str, tuple[Any, str]] = {
    "class": (S.ReduceLROnPlateau, r"ReduceLROnPlateau.step\(\) needs metrics, .* leave out Schedule and call"),
    "made": (lambda o, n: S.ReduceLROnPlateau(o), r"ReduceLROnPlateau.step\(\) needs metrics"),
    "object": (S.ExponentialLR(SGD(nn.Linear(1, 1).parameters()), 0.9), "make is a ExponentialLR, expected a function"),
    "momentum": (lambda o, n: S.OneCycleLR(o, 0.1, n), "momentum"),
    "betas": (lambda o, n: S.OneCycleLR(o, 0.1, n), "momentum"),
    "nothing": (lambda o, n: None, "make returns a NoneType, expected a torch.optim.lr_scheduler"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_table_is_refused_in_a_sentence(case: str) -> None:
    make, sentence = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=sentence):
        Schedule(two_groups("adamw_fused" if case == "betas" else "sgd")[1], make, 10)


def test_a_schedule_of_no_optimizer_or_without_rates_is_refused() -> None:
    _, optimizer = two_groups("sgd")
    with pytest.raises(TypeError, match=r"got a list, expected a torch.optim.Optimizer"):
        Schedule([optimizer], SCHEDULERS["ExponentialLR"], 10)  # type: ignore[arg-type]
    optimizer.param_groups[1]["lr"] = None  # as of transformers' Adafactor with relative steps
    with pytest.raises(ValueError, match="no learning rate"):
        Schedule(optimizer, SCHEDULERS["ExponentialLR"], 10)
