"""What a step costs besides its arithmetic: Python calls, casts, waits. Exact counts, no clock."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from amp_core import Amp
from amp_core.models import build_model
from amp_core.models.images import CLASSIFIERS

ROOT = Path(__file__).resolve().parents[2]
Batches = list[tuple[Tensor, Tensor]]


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return build_model("mlp", CLASSIFIERS, num_classes=10, image_shape=(1, 28, 28), options={})


def batches(num: int) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 1, 28, 28, generator=generator), torch.randint(10, (8,), generator=generator))
        for _ in range(num)
    ]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, str], dict[str, int]]:
    """(mode, accumulation, loop) -> what `scripts/bench.py cost` counts."""
    report = tmp_path_factory.mktemp("bench") / "cost.json"
    command = [sys.executable, ROOT / "scripts" / "bench.py", "cost", "--work", "mlp", "--json", report]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(report.read_text())["rows"]
    return {(row["mode"], row["accumulation"], row["loop"]): row for row in rows}


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("num, most", [(1, 102), (4, 280)])
def test_a_step_calls_fewer_functions_than_one_by_hand(counts: Any, mode: str, num: int, most: int) -> None:
    """Though it has a schedule, checks in every mode and weights of micro-batches, which that one has not.

    For the check of the loss it has one operation more where there is no loss scale.
    """
    ours, by_hand = counts[mode, num, "ours"], counts[mode, num, "by hand"]
    assert ours["calls"] <= most and ours["calls"] < 0.65 * by_hand["calls"] and ours["waits"] == 0
    assert ours["operations"] <= by_hand["operations"] + (mode == "fp32" or num == 1)


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_a_weight_is_cast_once_per_window(counts: Any, mode: str) -> None:
    assert counts[mode, 4, "ours"]["casts"] <= 0.75 * counts[mode, 4, "by hand"]["casts"]
    assert counts[mode, 1, "ours"]["casts"] == counts[mode, 1, "by hand"]["casts"]


def gradients(mode: str, share: bool) -> Iterator[list[Tensor]]:
    """Gradients of three windows, a step after each."""
    net, amp = mlp(), Amp.named(mode)  # type: ignore[arg-type]
    optimizer = SGD(net.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        with amp.cache_weight_casts() if share else torch.enable_grad():
            for images, labels in batches(4):
                with amp.autocast():
                    loss = F.cross_entropy(net(images), labels) / 4
                amp.backward(loss)
                with torch.no_grad(), amp.autocast():  # looks at the network, and must not be remembered
                    net(images)
        yield [p.grad.clone() for p in net.parameters() if p.grad is not None]
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_shared_casts_change_no_bit_of_a_gradient(mode: str) -> None:
    for alone, shared in zip(gradients(mode, False), gradients(mode, True), strict=True):
        assert len(alone) == len(shared) == 6
        assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_a_pass_without_gradients_is_not_remembered() -> None:
    images, labels = batches(1)[0]
    net, amp = mlp(), Amp.named("bf16")
    with amp.cache_weight_casts():
        with torch.no_grad(), amp.autocast():
            net(images)
        with amp.autocast():
            loss = F.cross_entropy(net(images), labels)
    amp.backward(loss)
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stale_is_left_behind(fails: bool) -> None:
    """After a window, also one that was broken off, the next pass sees the weights as they are."""
    images, _ = batches(1)[0]
    net, amp = mlp(), Amp.named("bf16")
    try:
        with amp.cache_weight_casts():
            with amp.autocast():
                before = net(images)
            if fails:
                raise KeyError
    except KeyError:
        pass
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0)
    with amp.autocast():
        assert bool(before.any()) and not bool(net(images).any())
