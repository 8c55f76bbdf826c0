"""Moments of 16 bits: without a bias, skipped without a trace and without a wait, saved and continued bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from running import differing, refused_before_the_start
from sharded_training import Training as Parts
from test_waits import Training
from torch import Tensor, nn
from torch.optim import Adam, AdamW
from waits import waits

from amp_core import Amp, Clip
from amp_core.config.options import read_option
from amp_core.config.schema import OptimizerConfig
from amp_core.layouts.memory_model import memory_of, state_ratio
from amp_core.lowp.moments import Adam16
from amp_core.step.optimizers import check_optimizer


def second_moments(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([each["exp_avg_sq"].flatten().float() for each in optimizer.state.values()])


def after_gradients_fell(make: Any) -> Tensor:
    """Second moments, relative to fp32 ones, 300 steps after gradients became a tenth of what they were."""
    weights = [torch.zeros(1000, requires_grad=True) for _ in range(2)]
    optimizers = [make([weights[0]]), Adam([weights[1]], fused=True)]
    for step in range(350):
        grad = torch.randn(1000) * (1.0 if step < 50 else 0.1)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = grad.clone()
            optimizer.step()
    return second_moments(optimizers[0]) / second_moments(optimizers[1])


def test_moments_rounded_by_chance_follow_and_rounded_to_nearest_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    assert after_gradients_fell(Adam16).mean() == pytest.approx(1, abs=0.01)
    monkeypatch.setattr("amp_core.lowp.moments.round_stochastically", lambda value, noise: value.to(torch.bfloat16))
    assert after_gradients_fell(Adam16).mean() > 1.2


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_step_is_that_of_fp32_moments_but_for_their_last_digits(decoupled: bool) -> None:
    """Also with a learning rate on the device, and weights in channels_last."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)).to(memory_format=torch.channels_last)
    twin = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1))
    twin.load_state_dict(net.state_dict())
    shared: dict[str, Any] = {"lr": torch.tensor(1e-2), "weight_decay": 0.1}
    ours = Adam16(net.parameters(), **shared, decoupled_weight_decay=decoupled)
    plain = (AdamW if decoupled else Adam)(twin.parameters(), **shared, fused=True)
    start = torch.cat([p.detach().flatten() for p in twin.parameters()])
    for _ in range(20):
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            q.grad = torch.randn_like(q)
            p.grad = q.grad.clone(memory_format=torch.preserve_format).to(
                memory_format=torch.channels_last if p.ndim == 4 else torch.contiguous_format
            )
        ours.step()
        plain.step()
    a, b = (torch.cat([p.detach().flatten() for p in each.parameters()]) for each in (net, twin))
    assert (a - b).norm() < 0.01 * (b - start).norm()
    assert {v.dtype for s in ours.state.values() for k, v in s.items() if k != "step"} == {torch.bfloat16}


def test_it_skips_without_a_wait_and_without_a_trace() -> None:
    training = Training("fp16", Adam16, Clip.norm(1.0), 2)  # the last window is infinite
    assert [waits(training.window) for _ in range(2)] == [0, 0]
    before = {k: v.clone() for s in training.optimizer.state.values() for k, v in s.items()}
    weights = [p.clone() for p in training.net.parameters()]
    assert waits(training.window) == 0 and training.amp.num_skipped == 1
    after = {k: v for s in training.optimizer.state.values() for k, v in s.items()}
    assert not differing(before, after)
    assert all(map(torch.equal, weights, training.net.parameters()))


def test_the_footprint_counts_half() -> None:
    net = nn.Linear(64, 32)
    optimizer = Adam16(net.parameters())
    assert state_ratio(optimizer) == 1.0
    (net(torch.ones(1, 64)).sum()).backward()
    optimizer.step()
    held = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if v.ndim)
    assert memory_of([net], [optimizer], None, Amp.named("bf16").config).moments == held == 4 * (64 * 32 + 32)


def sharded(rank: int) -> tuple[list[float], bool]:
    """By how much losses differ from those with fp32 moments; whether moments are 16-bit."""
    ours, plain = (Parts("fsdp", "fp32", optimizer=make, num_micros=1) for make in (Adam16, Adam))
    losses = [(ours.window()[0], plain.window()[0]) for _ in range(3)]
    moments = [v for s in ours.optimizer.state.values() for k, v in s.items() if k != "step"]
    return [abs(a / b - 1) for a, b in losses], {v.dtype for v in moments} == {torch.bfloat16}


def test_parts_of_weights_have_parts_of_16_bit_moments(on_ranks: Any) -> None:
    for errors, are_16bit in on_ranks(sharded):
        assert are_16bit and max(errors) < 0.02, errors


def test_what_it_does_not_work_with_is_refused(tmp_path, monkeypatch, capsys):
    base = OptimizerConfig(**read_option("optimizer", "adamw"))
    for values, problem in [
        ({"name": "SGD"}, "SGD keeps its state in float32"),
        ({"fused": False}, "leave out optimizer.fused=false"),
        ({"options": {"amsgrad": True}}, "leave out optimizer.options.amsgrad"),
        ({"options": {"betas": [0.9, 1.5]}}, "refuses its settings: Invalid beta"),
    ]:
        (found,) = check_optimizer(dataclasses.replace(base, state_dtype="bfloat16", **values))
        assert problem in found
    monkeypatch.chdir(tmp_path)
    together = ["optimizer=adamw", "optimizer.state_dtype=bfloat16", "layout=ddp", "layout.shard_optimizer=true"]
    refused_before_the_start(together, "optimizer.state_dtype=bfloat16", capsys)
    weight = torch.zeros(4, 4)[:, :2].requires_grad_()
    weight.grad = torch.ones(4, 2)
    with pytest.raises(ValueError, match="gaps"):
        Adam16([weight]).step()
