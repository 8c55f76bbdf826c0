"""8-bit moments of torchao: what they hold, what they cost, saved in plain tensors and continued bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from running import differing, refused_before_the_start, state
from torch import nn

import train
from amp_core import Amp, Clip
from amp_core.config.schema import OptimizerConfig
from amp_core.layouts.memory_model import memory_of
from amp_core.step import optimizers
from amp_core.step.optimizers import build_optimizer, check_optimizer

CONFIG = OptimizerConfig("AdamW8bit", 0.01, 0.1, None, "float32", {})
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


def net_of() -> nn.Module:
    """A matrix of 8192 elements, whose moments are quantised, and smaller weights, whose moments are not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4))


def trained(
    optimizer_of: Any, steps: int = 20, overflow: int | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, Amp]:
    net = net_of()
    amp, optimizer = Amp.named("fp16", init_scale=2.0**12), optimizer_of(net)
    for step in range(steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        with amp.autocast():
            loss = net(x).float().square().mean()
        amp.backward(loss * (1e38 if step == overflow else 1.0))
        amp.step(optimizer, Clip.norm(1.0))
        amp.update()
        amp.zero_grad(optimizer)
    return net, optimizer, amp


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@needs_torchao
def test_a_skipped_step_leaves_no_trace_and_memory_is_what_is_estimated() -> None:
    net, optimizer, amp = trained(lambda net: build_optimizer(CONFIG, net), overflow=19)
    shorter, other, _ = trained(lambda net: build_optimizer(CONFIG, net), steps=19)
    assert int(amp.num_skipped) == 1 and torch.equal(weights(net), weights(shorter))
    assert not differing(optimizer.state_dict()["state"], other.state_dict()["state"])
    entries = [entry[key] for entry in optimizer.state_dict()["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    parts = [[e["codes"], e["scale"]] if isinstance(e, dict) else [e] for e in entries]
    held = sum(tensor.nbytes for part in parts for tensor in part)
    assert held == memory_of([net], [optimizer], None, amp.config).moments
    assert [len(part) for part in parts] == [2, 2, 1, 1, 1, 1, 1, 1]
    assert sum(tensor.nbytes for tensor in parts[0] + parts[1]) == 2 * (1 + 4 / 256) * 64 * 128


@needs_torchao
def test_its_weights_are_near_those_of_fp32_moments() -> None:
    net, _, _ = trained(lambda net: build_optimizer(CONFIG, net))
    exact, _, _ = trained(lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1, fused=True))
    start = weights(net_of())
    assert 0 < (weights(net) - weights(exact)).norm() < 0.5 * (weights(exact) - start).norm()


@needs_torchao
def test_kernels_in_channels_last() -> None:
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        net = nn.Conv2d(32, 32, 3).to(memory_format=layout)  # type: ignore[call-overload]
        optimizer = build_optimizer(CONFIG, net)
        for step in range(3):
            torch.manual_seed(step)
            net.weight.grad = torch.randn(32, 32, 3, 3).to(memory_format=layout)
            optimizer.step()
        found.append(net.weight.detach().contiguous())
    assert torch.equal(*found)


@needs_torchao
def test_a_run_resumes_bit_for_bit_from_plain_tensors(tmp_path: Path) -> None:
    """`weights_only` loads the file without torchao's classes."""
    common = ["recipe=classification", "model=mlp", "optimizer=adamw_8bit", "device=cpu", "amp=fp16", "batch_size=8"]
    common += ["data.num_workers=0", "schedule=warmup_cosine", "schedule.horizon=6", "clip=norm", "log=none"]
    common += ["eval_every=100", "debug.inject={where: gradient, step: 2, value: inf}"]
    assert train.main([*common, "steps=6", f"run_dir={tmp_path}/whole"]) == 0
    assert train.main([*common, "steps=3", f"run_dir={tmp_path}/parts"]) == 0
    assert train.main([*common, "steps=6", f"run_dir={tmp_path}/parts"]) == 0
    whole, parts = state(tmp_path / "whole"), state(tmp_path / "parts")
    for key in ("model", "optimizer", "scaler", "schedule"):
        assert not differing(whole[key], parts[key])
    moments = whole["optimizer"]["state"][0]["exp_avg"]
    assert whole["optimizer"]["class"] == "AdamW8bit" and set(moments) == {"codes", "scale", "signed"}
    assert moments["codes"].dtype is torch.uint8 and type(moments["codes"]) is torch.Tensor


def test_without_torchao_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    (problem,) = check_optimizer(CONFIG)
    assert (
        "needs the package torchao; pip install torchao, or use optimizer=adamw optimizer.state_dtype=bfloat16"
        in problem
    )
    monkeypatch.chdir(tmp_path)
    refused_before_the_start(["optimizer=adamw_8bit"], "optimizer.name=AdamW8bit: needs the package torchao", capsys)


def test_on_a_gpu_it_needs_the_compiler_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None if name == "triton" else object())
    (problem,) = check_optimizer(CONFIG, on_cuda=True)
    assert "needs the package triton" in problem


@needs_torchao
@pytest.mark.parametrize("arguments, key", [
    (["optimizer.fused=true"], "optimizer.fused"),
    (["optimizer.options.bf16_stochastic_round=true"], "optimizer.options.bf16_stochastic_round"),
    (["layout=fsdp", "layout.nproc_per_node=2"], "optimizer.name=AdamW8bit"),
    (["layout=ddp", "layout.nproc_per_node=2", "layout.shard_optimizer=true"], "optimizer.name=AdamW8bit"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(arguments, key, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused_before_the_start(["optimizer=adamw_8bit", *arguments], key, capsys)
