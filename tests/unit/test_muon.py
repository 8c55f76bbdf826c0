"""Muon for hidden matrices and AdamW for the rest are one optimizer: torch's steps, skipped together, saved whole."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import differing, state
from torch import Tensor, nn

import train
from amp_core import Amp, Clip
from amp_core.config.schema import OptimizerConfig
from amp_core.layouts.ddp import wrap_ddp
from amp_core.layouts.zero import share_state, whole_state
from amp_core.lowp.masters import master_params
from amp_core.models.gpt import GPT
from amp_core.models.images import cnn
from amp_core.step.muon import hidden_matrices
from amp_core.step.optimizers import build_optimizer, check_optimizer

OnRanks = Callable[..., list[Any]]
CONFIG = OptimizerConfig("Muon", 0.01, 0.1, None, "float32", {"adjust_lr_fn": "match_rms_adamw", "betas": [0.9, 0.95]})
OVERFLOW = 6


def net_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8), nn.Linear(8, 4))


def loss_of(net: nn.Module, step: int) -> Tensor:
    ids = torch.randint(0, 16, (32,), generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", torch.float16):
        out = net(ids)
    return out.float().square().mean() * (1e38 if step == OVERFLOW else 1.0)


def test_every_bit_is_that_of_two_optimizers_and_grad_scaler() -> None:
    ours, theirs = net_of(), net_of()
    amp, optimizer = Amp.named("fp16", init_scale=2.0**12), build_optimizer(CONFIG, ours)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    hidden = [theirs[1].weight, theirs[3].weight]
    large, small = [theirs[0].weight, theirs[4].weight], [p for p in theirs.parameters() if p.ndim < 2]
    muon = torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups: list[dict[str, Any]] = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True)
    for step in range(20):
        amp.backward(loss_of(ours, step))
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)
        scaler.scale(loss_of(theirs, step)).backward()
        scaler.step(muon)
        scaler.step(adamw)
        scaler.update()
        theirs.zero_grad()
    assert amp.scale == scaler.get_scale() == 2.0**11 and int(amp.num_skipped) == 1
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert not all(map(torch.equal, ours.parameters(), net_of().parameters()))


def test_kernels_are_matrices_of_one_row_per_output() -> None:
    """In channels_last their columns lie in another order, which is that of the reference here."""
    for layout, order in ((torch.contiguous_format, (0, 1, 2, 3)), (torch.channels_last, (0, 2, 3, 1))):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Flatten(), nn.Linear(8, 2)).to(memory_format=layout)  # type: ignore[call-overload]
        kernel = net[0].weight
        twin = nn.Parameter(kernel.detach().permute(order).flatten(1).clone())
        muon = torch.optim.Muon([twin], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        optimizer = build_optimizer(CONFIG, net)
        for _ in range(3):
            net(torch.randn(4, 3, 3, 3).to(memory_format=layout)).square().mean().backward()
            twin.grad = kernel.grad.permute(order).flatten(1)  # type: ignore[union-attr]
            optimizer.step()
            muon.step()
            optimizer.zero_grad()
        assert torch.equal(kernel.detach().permute(order).flatten(1), twin)
        assert optimizer.state[kernel]["momentum_buffer"].stride() == kernel.stride()


@pytest.mark.parametrize("mode", ["o2", "o3"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kernels_of_16_bit_weights_are_stepped_in_fp32(mode: str, layout: torch.memory_format) -> None:
    """As those of an fp32 network with the same gradients, then rounded. In o3 they have memory only during a step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Flatten(), nn.Linear(8, 2)).to(memory_format=layout)  # type: ignore[call-overload]
    amp = Amp.named(mode, device="cpu", **({"init_scale": 1.0} if mode == "o2" else {}))
    twin = copy.deepcopy(net)
    amp.prepare(net)
    optimizer, reference = build_optimizer(CONFIG, net), build_optimizer(CONFIG, twin)
    for _ in range(3):
        if mode == "o3":  # no fp32 weights are kept
            for param, low in zip(twin.parameters(), net.parameters(), strict=True):
                param.data.copy_(low)
        amp.backward(net(torch.randn(4, 3, 3, 3).to(memory_format=layout)).square().mean())
        for param, side in zip(twin.parameters(), master_params(net), strict=True):
            assert side.grad is not None
            param.grad = side.grad.to(param.dtype, copy=True)
        report = amp.step(optimizer)
        assert bool(report.taken)
        reference.step()
        amp.update()
        amp.zero_grad(optimizer)
        assert all(torch.equal(p.half(), low) for p, low in zip(twin.parameters(), net.parameters(), strict=True))


@pytest.mark.parametrize("change, aside", [
    ({}, {"embed.weight", "table.weight", "head.weight"}),
    ({"tied": True}, {"embed.weight", "table.weight"}),
    ({"parametrised": "embed"}, {"embed.parametrizations.weight.original", "table.weight", "head.weight"}),
    ({"parametrised": "head"}, {"embed.weight", "table.weight", "head.parametrizations.weight.original"}),
])  # fmt: skip
def test_embeddings_and_the_last_layer_are_left_to_adamw(change: dict[str, Any], aside: set[str]) -> None:
    tied, parametrised = change.get("tied", False), change.get("parametrised")
    net = GPT(vocab_size=32, length=8, width=8, depth=1, heads=1, tied=tied, positions="learned")
    if parametrised:
        nn.utils.parametrize.register_parametrization(getattr(net, parametrised), "weight", nn.Identity())
    found = {name for name, param in net.named_parameters() if param in hidden_matrices([net])}
    matrices = {name for name, param in net.named_parameters() if param.ndim == 2}
    assert found and matrices - found == aside
    net = cnn(num_classes=10, image_shape=(1, 28, 28))
    assert sorted(p.ndim for p in hidden_matrices([net])) == [4] * sum(isinstance(m, nn.Conv2d) for m in net.modules())


def test_a_network_without_hidden_matrices_is_left_to_adamw_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert type(build_optimizer(CONFIG, nn.Linear(4, 2))) is torch.optim.AdamW
    assert "no hidden matrix; AdamW steps all weights" in caplog.text


@pytest.mark.parametrize("options, found", [
    ({"ns_steps": 3, "betas": [0.9, 0.99]}, None),
    ({"n_steps": 3}, r"optimizer\.options\.n_steps: Muon has no such option.*ns_steps"),
    ({"ns_steps": 0}, r"refuses its settings: ns_steps=0, expected at least 1"),
    ({"adjust_lr_fn": "adam"}, r"refuses its settings: .*adam is not supported"),
    ({"betas": [0.9, 2.0]}, r"refuses its settings: Invalid beta"),
])  # fmt: skip
def test_options_are_checked(options: dict[str, Any], found: str | None) -> None:
    problems = check_optimizer(OptimizerConfig("Muon", 0.1, 0.0, None, "float32", options))
    if found is None:
        assert problems == []
    else:
        assert len(problems) == 1 and re.search(found, problems[0])


# --- runs ---------------------------------------------------------------------------------------------------------------


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """With a learning rate that moves for both, a skipped step, and a stop in between."""
    common = [
        "recipe=classification",
        "model.options.width=4",
        "ema.decay=0.9",
        "optimizer=muon",
        "device=cpu",
        "amp=fp16",
        "batch_size=8",
        "data.num_workers=0",
    ]
    common += ["schedule=warmup_cosine", "schedule.horizon=6", "clip=norm", "log=none", "eval_every=100"]
    common += ["debug.inject={where: gradient, step: 2, value: inf}"]
    assert train.main([*common, "steps=6", f"run_dir={tmp_path}/whole"]) == 0
    assert train.main([*common, "steps=3", f"run_dir={tmp_path}/parts"]) == 0
    assert train.main([*common, "steps=6", f"run_dir={tmp_path}/parts"]) == 0
    whole, parts = state(tmp_path / "whole"), state(tmp_path / "parts")
    for key in ("model", "optimizer", "scaler", "schedule"):
        assert not differing(whole[key], parts[key])
    assert whole["optimizer"]["class"] == "MuonAdamW" and whole["schedule"]["num_taken"] == 5
    rates = {group["lr"] for group in whole["optimizer"]["param_groups"]}
    assert len(rates) == 1 and rates != {1e-2}
    entries = [set(entry) for entry in whole["optimizer"]["state"].values()]
    assert {"momentum_buffer"} in entries and {"step", "exp_avg", "exp_avg_sq"} in entries


def trained(rank: int, slices: bool) -> list[Any]:
    net = net_of()
    ddp = wrap_ddp(net, torch.device("cpu"), exact=True)
    if slices:
        share_state(net)
    amp, optimizer = Amp.named("fp16", init_scale=2.0**12), build_optimizer(CONFIG, net)
    for step in range(8):
        amp.backward(loss_of(ddp, step if step == OVERFLOW else 100 + 2 * step + rank), 0.5)
        amp.step(optimizer, Clip.norm(0.5))
        amp.update()
        amp.zero_grad(optimizer)
    held = sum(v.numel() for entry in optimizer.state.values() for v in entry.values())
    return [[p.detach() for p in net.parameters()], whole_state(optimizer)["state"], int(amp.num_skipped), held]


def test_replicas_and_slices_are_the_same_in_every_bit(on_ranks: OnRanks) -> None:
    replicas, slices = (on_ranks(functools.partial(trained, slices=slices), num_ranks=2) for slices in (False, True))
    assert not differing(replicas[0][:2], replicas[1][:2])
    for rank in range(2):
        assert not differing(replicas[rank][:3], slices[rank][:3]) and replicas[rank][2] == 1
        assert slices[rank][3] < replicas[rank][3]
