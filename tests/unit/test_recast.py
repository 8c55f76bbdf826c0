"""Copies of weights that are made once more: the same gradients bit for bit, and 2 bytes per weight less."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from running import same_but, state, summary
from torch import Tensor, nn

import train
from amp_core import Amp
from amp_core.layouts.memory_model import saved_for_backward
from amp_core.memory.recast import Recast

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from benches import activations


class Tied(nn.Module):
    """Convolutions, a linear layer that is used twice, and one whose weights are those of another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.twice, self.tied = nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied.weight = self.twice.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.tied(F.gelu(self.twice(F.gelu(self.twice(x)))))


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_are_the_same_bits_and_no_copy_is_kept(mode: str, channels_last: bool) -> None:
    order = torch.channels_last if channels_last else torch.contiguous_format
    plain = Tied().to(memory_format=order)
    images = torch.randn(4, 3, 8, 8, requires_grad=True).to(memory_format=order)
    kept, grads = [], []
    for recasts in (False, True):
        net, amp = copy.deepcopy(plain), Amp.named(mode)  # type: ignore[arg-type]
        recast = Recast(net.parameters()) if recasts else None
        with saved_for_backward(net.parameters(), recast) as saved:
            with amp.autocast():
                loss = net(images).float().square().mean()
            amp.backward(loss)
        kept.append(saved)
        grads.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, *grads))
    assert kept[0].copies >= 2 * sum(p.numel() for p in plain.parameters() if p.ndim > 1)
    assert kept[1].copies == 0 and kept[1].activations == kept[0].activations


def test_a_weight_that_changed_in_between_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Recast(net.parameters()).hooks(), torch.autocast("cpu", torch.bfloat16):
        loss = net(torch.ones(2, 4)).sum()
    with torch.no_grad():
        net[1].weight.mul_(2)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="was changed between the forward and the backward pass"):
        loss.backward()


def test_a_run_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["device=cpu", "amp=bf16", "data=synthetic", "data.num_samples=64", "data.image_size=8", "model=mlp"]
    common += ["batch_size=8", "accumulation=2", "steps=3", "log.progress=false", "data.num_workers=0"]
    for name, more in (("kept", []), ("recast", ["perf.recast_weights=true"])):
        assert train.main([*common, *more, f"run_dir={tmp_path / name}"]) == 0
    assert not same_but(state(tmp_path / "kept"), state(tmp_path / "recast"))
    memory = [summary(tmp_path / name)["memory"] for name in ("kept", "recast")]
    assert memory[0]["copies"] > memory[1]["copies"] == 0 and memory[0]["activations"] == memory[1]["activations"] > 0


def test_gpt2_keeps_less_than_half_of_what_it_keeps_in_fp32() -> None:
    """The goal of docs/SPEED.md, a sample at a time: 0.45. `bench.py activations` has the other networks."""
    plain, chunks, recast = (
        activations.kept("gpt2", mode, way, 1).total
        for mode, way in (("fp32", "plain"), ("bf16", "chunks"), ("bf16", "recast"))
    )
    assert recast < 0.45 * plain < chunks
    sizes = {"depth": 1, "vocab_size": 600, "length": 64}
    fake, real = (activations.kept("gpt2", "bf16", "chunks", 1, fake=fake, **sizes) for fake in (True, False))
    assert fake.activations == real.activations and fake.copies == real.copies
