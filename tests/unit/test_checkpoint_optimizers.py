"""Checkpoints of optimizers: states, settings and counts resume bit for bit, whatever the class, dtype or layout."""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import bits, forge, must_load, pickled, tiny
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from amp_core import Amp, Ema, Schedule, master_params
from amp_core.checkpoints.checkpoint import Checkpoint
from amp_core.config.schema import OptimizerConfig
from amp_core.lowp.moments import Adam16
from amp_core.step.optimizers import build_optimizer


def test_states_keep_a_dtype_that_is_not_their_parameters(tmp_path: Path) -> None:
    net = tiny(1.0).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.weight]["master"] = torch.full((4, 4), 1.0001)
    Checkpoint(tmp_path, model=net, optimizer=optimizer).save(1)
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    must_load(Checkpoint(tmp_path, model=net, optimizer=other))
    assert bits(other.state[net.weight]["master"]) == bits(optimizer.state[net.weight]["master"])


def test_the_live_optimizer_keeps_its_hyperparameters_and_its_very_learning_rate(tmp_path: Path) -> None:
    def build(lr: float, decay: float) -> tuple[nn.Linear, torch.optim.Optimizer, Tensor]:
        net, rate = tiny(1.0), torch.tensor(lr)
        groups = [{"params": [net.weight]}, {"params": [net.bias]}]
        return net, torch.optim.AdamW(groups, lr=rate, weight_decay=decay, betas=(0.9, 1 - decay), fused=True), rate

    net, optimizer, _ = build(0.5, 0.1)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    path = Checkpoint(tmp_path, model=net, optimizer=optimizer).save(1)
    groups = torch.load(path / "state.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [0.5, 0.5] and type(groups[0]["lr"]) is float

    net, optimizer, rate = build(0.25, 0.2)
    live_groups = optimizer.param_groups
    before = [{key: value for key, value in group.items() if key != "params"} for group in live_groups]
    must_load(Checkpoint(tmp_path, model=net, optimizer=optimizer))
    assert optimizer.param_groups is live_groups
    assert all(group["lr"] is rate for group in live_groups) and rate.item() == 0.25
    assert [{key: value for key, value in group.items() if key != "params"} for group in live_groups] == before
    assert [parameter for group in live_groups for parameter in group["params"]] == [net.weight, net.bias]
    assert len(optimizer.state) == 2


S = torch.optim.lr_scheduler


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: S.StepLR(o, 3, 0.1),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 12),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.8),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, 1.0, 3), S.CosineAnnealingLR(o, 9)], [3]),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, 3), S.ExponentialLR(o, 0.9)]),
    "none, by hand": lambda o: None,
}


@pytest.mark.parametrize("format", ["single", "sharded"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_continues_from_the_rate_of_the_saved_run(tmp_path: Path, name: str, format: Any) -> None:
    """In either order of the parts, and also where the checkpoint was made just before the save."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        net = tiny(0.5)
        optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1) if format == "single" else 0.1, fused=True)
        return net, optimizer, SCHEDULERS[name](optimizer)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, first: int, last: int) -> None:
        for step in range(first, last):
            net(torch.randn(2, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            elif step == 2:
                optimizer.param_groups[0]["weight_decay"] *= 3.0
                optimizer.param_groups[0]["lr"] *= 0.3

    straight = build()
    train(*straight, 0, 12)
    for late, reverse in itertools.product((False, True) if "hand" not in name else (False,), (False, True)):
        folder, names = tmp_path / f"{late}{reverse}", ("model", "optimizer", "scheduler")
        first, second = build(), build()
        parts = [dict(list(zip(names, run, strict=True))[:: -1 if reverse else 1]) for run in (first, second)]
        checkpoint = None if late else Checkpoint(folder, format=format, **parts[0])
        train(*first, 0, 5)
        (checkpoint or Checkpoint(folder, format=format, **parts[0])).save(5)
        assert must_load(Checkpoint(folder, **parts[1])).notes == ()
        train(*second, 5, 12)
        assert bits(second[0].state_dict()) == bits(straight[0].state_dict())


class Grouped(torch.optim.SGD):
    """Has state in its groups: `k` among its defaults, `step` from its first step on, a tensor, and settings of a kind."""

    def __init__(self, params: Any, lr: float = 0.1, kind: torch.dtype = torch.float32) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group |= {"k": 0, "weight_sum": torch.zeros(()), "kind": kind, "train_mode": True}
        self.defaults |= {"k": 0, "train_mode": False, "weight_sum": 0.0}

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["step"] = group.get("step", 0) + 1
            group["weight_sum"] += 1.0 / group["k"]
            for p in group["params"]:
                self.state[p]["exp_avg_sq"] = p.grad.square().sum()  # one number for each weight
        super().step()


@pytest.mark.parametrize("format", ["single", "sharded"])
def test_state_in_groups_is_loaded_and_settings_are_not(tmp_path: Path, format: Any) -> None:
    def build(**settings: Any) -> tuple[nn.Module, Any]:
        net = tiny(0.5)
        return net, Grouped(net.parameters(), **settings)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            net(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    (net, optimizer), (net2, optimizer2) = build(), build(lr=0.2)
    for each, scale in ((optimizer, 0.5), (optimizer2, 0.8)):
        each.param_groups[0]["lr_scale"] = scale  # of the loop, for whatever it is
    train(net, optimizer)
    Checkpoint(tmp_path, format=format, model=net, optimizer=optimizer).save(3)
    groups = optimizer2.param_groups
    loaded = must_load(Checkpoint(tmp_path, model=net2, optimizer=optimizer2))
    assert loaded.notes == (
        "optimizer: group 0 keeps lr=0.2, not lr=0.1 of the checkpoint",
        "optimizer: group 0 takes lr_scale=0.5 of the checkpoint in place of lr_scale=0.8",
    )
    assert optimizer2.param_groups is groups
    groups[0]["lr"] = 0.1
    assert groups[0]["k"] == groups[0]["step"] == 3 and groups[0]["kind"] is torch.float32
    train(net, optimizer), train(net2, optimizer2)

    def everything(net: nn.Module, optimizer: Any) -> Any:
        groups = [{key: value for key, value in group.items() if key != "kind"} for group in optimizer.param_groups]
        return bits([net.state_dict(), {**optimizer.state_dict(), "param_groups": groups and None}, groups[0]["k"]])

    assert everything(net2, optimizer2) == everything(net, optimizer)


def test_a_rate_that_a_schedule_sets_is_no_changed_setting(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        net = tiny(0.5)
        optimizer = SGD(net.parameters(), lr=0.1)
        return {
            "model": net,
            "optimizer": optimizer,
            "schedule": Schedule(optimizer, lambda made, _: StepLR(made, 1, 0.5), 4),
        }

    parts, amp = build(), Amp.named("fp32")
    amp.backward(parts["model"](torch.ones(1, 4)).square().sum())
    parts["schedule"].advance(amp.step(parts["optimizer"]))
    Checkpoint(tmp_path, **parts).save(1)
    other = build()
    assert must_load(Checkpoint(tmp_path, **other)).notes == ()
    before, after = (float(each["optimizer"].param_groups[0]["lr"]) for each in (parts, other))
    assert before == after < 0.1


def test_a_snapshot_puts_back_what_is_in_the_groups(tmp_path: Path) -> None:
    net = tiny(0.5)
    optimizer = Grouped(net.parameters())
    checkpoint = Checkpoint(tmp_path, model=net, optimizer=optimizer)
    snapshot = checkpoint.snapshot()
    net(torch.ones(1, 4)).square().sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.7
    checkpoint.restore(snapshot)
    group = optimizer.param_groups[0]
    assert (group["k"], group["lr"], group["weight_sum"].item(), net.weight.mean().item()) == (0, 0.1, 0.0, 0.5)


def test_a_schedule_here_keeps_its_rates_whatever_the_file_has(tmp_path: Path) -> None:
    def build(lr: float) -> dict[str, Any]:
        net = tiny(0.5)
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr, fused=True)
        return {"schedule": Schedule(optimizer, lambda o, n: S.CosineAnnealingLR(o, n), 10), "optimizer": optimizer}

    first, second, amp = build(0.1), build(0.4), Amp.named("fp32")
    checkpoint = Checkpoint(tmp_path, **first)
    for _ in range(4):
        first["optimizer"].param_groups[0]["params"][0].grad = torch.ones(4, 4)
        first["schedule"].advance(amp.step(first["optimizer"]))
        amp.update()
    checkpoint.save(4)
    assert must_load(Checkpoint(tmp_path, **dict(reversed(second.items())))).notes == ()
    rates = [float(parts["optimizer"].param_groups[0]["lr"]) for parts in (first, second)]
    assert rates[1] == pytest.approx(4 * rates[0], rel=1e-6)  # of the new peak; both are rounded to fp32


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_step_counts_lie_where_the_live_optimizer_wants_them(tmp_path: Path, fused: bool) -> None:
    net = tiny(1.0)
    optimizer = torch.optim.AdamW(net.parameters(), fused=not fused)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    Checkpoint(tmp_path, optimizer=optimizer).save(1)
    device = torch.device("meta")  # stands for any device that is not the CPU
    live = torch.optim.AdamW(net.to(device).parameters(), fused=fused)
    must_load(Checkpoint(tmp_path, optimizer=live))
    for state in live.state.values():
        assert state["step"].device == (device if fused else torch.device("cpu"))
        assert state["exp_avg"].device == device


@pytest.mark.parametrize("make", [Adam16, partial(torch.optim.Adam, fused=True), torch.optim.SGD])
def test_moments_follow_weights_into_another_memory_format(tmp_path: Path, make: Any) -> None:
    """A fused step pairs numbers by their place in memory: in the old strides weights would get others' moments."""
    grads = torch.randn(3, 4, 3, 2, 2, generator=torch.Generator().manual_seed(0))

    def begin(memory_format: torch.memory_format) -> tuple[Checkpoint, nn.Module, Any]:
        net = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=memory_format)
        optimizer = make(net.parameters(), lr=0.1) if make is not torch.optim.SGD else make(net.parameters(), 0.1, 0.9)
        return Checkpoint(tmp_path, model=net, optimizer=optimizer), net, optimizer

    def train(net: nn.Module, optimizer: Any, grads: Tensor) -> None:
        for grad in grads:
            net.weight.grad = torch.empty_like(net.weight).copy_(grad)
            optimizer.step()

    checkpoint, net, optimizer = begin(torch.contiguous_format)
    train(net, optimizer, grads[:2])
    checkpoint.save(2)
    train(net, optimizer, grads[2:])
    checkpoint, moved, optimizer = begin(torch.channels_last)
    checkpoint.load()
    train(moved, optimizer, grads[2:])
    # Adam16 rounds by the place in memory.
    torch.testing.assert_close(moved.weight, net.weight, rtol=0, atol=1e-3 if make is Adam16 else 1e-7)
    # What torch itself loads, too.
    saved = optimizer.state_dict()
    _, net, optimizer = begin(torch.contiguous_format)
    optimizer.load_state_dict(saved)
    assert make is not Adam16 or optimizer.state[net.weight]["exp_avg"].stride() == net.weight.stride()


class Plain:
    """A training loop without `Loop`, in which the gradients of some steps are not finite.

    In channels_last: fp32 sides of 16-bit weights are one number, expanded, between steps, without the strides that their
    moments must have.
    """

    def __init__(self, mode: str, optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4))
        self.net, self.amp = net.to(memory_format=torch.channels_last), Amp.named(mode)  # type: ignore[call-overload]
        self.amp.prepare(self.net)
        options = {"momentum": 0.9} if optimizer == "SGD" else {}
        config = OptimizerConfig(optimizer, 0.01, 0.1, None, "float32", options)
        is_16bit = optimizer == "Adam16"
        self.optimizer = Adam16(master_params(self.net)) if is_16bit else build_optimizer(config, self.net)
        self.ema, self.slow = Ema(self.net, 0.9), Ema(self.net, 0.99)

    def checkpoint(self, folder: Path, **way: Any) -> Checkpoint:
        parts: dict[str, Any] = {"model": self.net, "optimizer": self.optimizer, "ema": self.ema, "slow": self.slow}
        return Checkpoint(folder, scaler=self.amp, **parts, **way)

    def train(self, steps: range, bad: tuple[int, ...] = (1, 3)) -> None:
        for i in steps:
            x = torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(i))
            x = x.to(memory_format=torch.channels_last)
            with self.amp.autocast():
                loss = self.net(x).float().square().mean()
            self.amp.backward(loss * (math.inf if i in bad else 1.0))
            report = self.amp.step(self.optimizer)
            self.amp.update()
            self.amp.zero_grad(self.optimizer)
            self.ema.update(report)
            if i > 1:  # this average begins later
                self.slow.update(report)

    def everything(self) -> Any:
        parts = (self.net, self.optimizer, self.ema, self.slow, self.amp)
        counts = [int(self.amp.num_skipped), int(self.amp.num_consecutive_skips), int(self.ema.num_taken)]
        counts += [int(self.slow.num_taken), *(int(weights.num_taken) for weights in self.amp.weights)]
        return bits([part.state_dict() for part in parts]), counts


LOOPS = [("fp16", "AdamW"), ("bf16_pure", "AdamW"), ("bf16_pure", "Muon"), ("bf16_pure", "Adam16")]
LOOPS += [("o2", "Muon"), ("o2", "SGD"), ("o3", "AdamW"), ("o3", "SGD")]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", [{}, {"format": "sharded"}, {"background": True}], ids=str)
@pytest.mark.parametrize("mode, optimizer", LOOPS)
def test_a_plain_loop_resumes_with_its_counts(tmp_path: Path, mode: str, optimizer: str, way: dict[str, Any]) -> None:
    run, resumed = Plain(mode, optimizer), Plain(mode, optimizer)
    run.train(range(4))
    checkpoint = run.checkpoint(tmp_path, **way)
    checkpoint.save(4, progress={"samples": 32})
    checkpoint.wait()
    rounded = [int(weights.num_taken) for weights in run.amp.weights]
    assert run.everything()[1] == [2, 1, 2, 1, *rounded] and (mode != "bf16_pure" or rounded == [2])
    resumed.train(range(20, 23), bad=(21, 22))  # whatever it was before
    loaded = must_load(resumed.checkpoint(tmp_path))
    counted = {"skipped": 2, "consecutive_skips": 1, "rounded": rounded}
    assert loaded.progress == counted | {"averaged": 2, "averaged_slow": 1, "samples": 32, "step": 4}
    assert resumed.everything() == run.everything()
    resumed.checkpoint(tmp_path).save(5)  # with moments as they were laid out here, one of them of one number
    run.train(range(4, 7)), resumed.train(range(4, 7))
    assert resumed.everything() == run.everything()


def test_counts_of_another_order_of_parts_find_their_part(tmp_path: Path) -> None:
    run, resumed = Plain("fp16"), Plain("fp16")
    run.train(range(4))
    run.checkpoint(tmp_path).save(4)
    must_load(Checkpoint(tmp_path, slow=resumed.slow, ema=resumed.ema))
    assert (int(resumed.slow.num_taken), int(resumed.ema.num_taken)) == (1, 2)


def test_counts_are_put_back_with_a_snapshot_and_are_0_where_a_checkpoint_has_none(tmp_path: Path) -> None:
    run = Plain("bf16_pure")
    run.train(range(4))
    checkpoint, before = run.checkpoint(tmp_path), run.everything()
    snapshot = checkpoint.snapshot()
    run.train(range(4, 6))
    checkpoint.restore(snapshot)
    assert run.everything() == before
    contents = torch.load(checkpoint.save(4) / "state.pt", weights_only=True)
    # As `Loop` saved them in version 0.1, which knew one average; and as a plain loop did, which saved no counts.
    old = {"samples": 32, "skipped": 7, "consecutive_skips": 3, "skipped_of": {}, "averaged": 5, "rounded": [4]}
    for name, progress, counts in (("loop", old, [7, 3, 5, 5, 4]), ("plain", {}, [0] * 5)):
        data = pickled(contents | {"progress": progress | {"step": 4}})
        must_load(checkpoint, forge(tmp_path / name / "step_00000004", data, step=4))
        assert run.everything() == (before[0], counts)
