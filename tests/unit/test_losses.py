"""A cross entropy in chunks: what it computes in every dtype, what it keeps, and what it stands for in a network."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from running import lines, state
from torch import Tensor, nn
from torch.optim import SGD

import train
from amp_core import Amp, keep_fp32
from amp_core.heads.losses import LossHead, give_loss, linear_cross_entropy
from amp_core.layouts.fsdp import build_mesh, wrap_fsdp
from amp_core.layouts.memory_model import saved_for_backward
from amp_core.lowp.masters import master_params
from amp_core.models import build_model
from amp_core.models.gpt import LANGUAGE_MODELS

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
N, D, V = 300, 48, 1000


def case(dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [3, 100, D], weight, bias, targets: every seventh has none, nor has a whole chunk of 32."""
    hidden, weight, bias = torch.randn(3, 100, D), torch.randn(V, D) / D**0.5, torch.randn(V)
    targets = torch.randint(V, (3, 100))
    targets.view(-1)[::7] = targets.view(-1)[32:64] = -100
    return *(x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight, bias)), targets  # type: ignore[return-value]


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    logits = logits if logits.dtype is FP64 else logits.float()
    return F.cross_entropy(logits, targets.flatten(), reduction="sum")


def chunked(*args: Any) -> Tensor:
    return linear_cross_entropy(*args, chunk=32)


def results(loss_of: Any, mode: str = "fp32", dtype: torch.dtype = FP32) -> list[Tensor]:
    """Loss of a mean over tokens, and gradients with respect to hidden states, weight and bias."""
    torch.manual_seed(1)
    hidden, weight, bias, targets = case(dtype)
    amp = Amp.named(mode)  # type: ignore[arg-type]
    with amp.autocast():
        loss = loss_of(hidden, weight, targets, bias) / N
    if dtype is FP64:
        loss.backward()
    else:
        amp.backward(loss)
    grads = [x.grad / (1 if dtype is FP64 else amp.scale) for x in (hidden, weight, bias)]  # type: ignore[operator]
    return [loss.detach(), *grads]


def errors(found: list[Tensor]) -> list[float]:
    """Relative, to float64 without chunks."""
    exact = results(whole, dtype=FP64)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def test_the_loss_and_its_gradients_are_those_without_chunks() -> None:
    assert max(errors(results(chunked, dtype=FP64))) < 1e-12
    assert (
        max(errors(results(chunked))) < 32 * 2.0**-24
    )  # sums of up to 1,000 terms, typically off by its root of units


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_in_16_bits_it_is_no_worse_than_without_chunks(mode: str) -> None:
    ours, plain = errors(results(chunked, mode)), errors(results(whole, mode))
    assert all(a <= 1.02 * b + 1e-6 for a, b in zip(ours, plain, strict=True)), (ours, plain)


def test_the_loss_scale_reaches_the_products() -> None:
    """Gradients of classes that no token has are tiny: without the scale, as in a forward pass, fp16 loses them."""
    torch.manual_seed(1)
    absent = torch.ones(V, dtype=torch.bool)
    absent[case()[3].flatten().clamp(min=0)] = False
    exact = results(whole, dtype=FP64)[2][absent]

    def error(scale: float) -> float:
        found = results(lambda *args: chunked(*args) * scale, "fp16")[2][absent].double() / scale
        return float((found - exact).norm() / exact.norm())

    assert error(1.0) < 8 * 2.0**-11  # logits of up to 5 are rounded, their probabilities, and what these multiply
    # What reaches the products is a probability over 300 tokens times 2^-20: below 2^-25, so 0 in fp16 in any kernel.
    assert error(2.0**-36) == 1.0


def test_a_chunk_without_targets_costs_0_and_so_does_a_batch() -> None:
    hidden, weight, bias, targets = case()
    loss = chunked(hidden, weight, torch.full_like(targets, -100), bias)
    loss.backward()
    assert loss == 0
    assert all(not bool(x.grad.any()) for x in (hidden, weight, bias))  # type: ignore[union-attr]


def test_it_refuses_a_second_derivative() -> None:
    hidden, weight, _, targets = case()
    with pytest.raises(RuntimeError, match=r"no second derivative.*loss_chunk=null"):
        torch.autograd.grad(chunked(hidden, weight, targets), hidden, create_graph=True)


def test_it_keeps_hidden_states_and_no_logits() -> None:
    """Under bf16 autocast: 2 bytes per element of a hidden state and 4 per token, against 6 per token and class."""
    hidden, weight, _, targets = case()
    kept = {}
    for name, loss_of in (("whole", whole), ("chunked", chunked)):
        with torch.autocast("cpu", BF16), saved_for_backward([weight]) as saved:
            loss = loss_of(hidden, weight, targets)
        assert loss.requires_grad
        kept[name] = saved.total
    labels = 8 * N
    assert kept["chunked"] == 2 * N * D + 4 * N + labels
    assert kept["whole"] > 4 * N * V > 10 * kept["chunked"]


def gpt(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    options = {"width": 32, "depth": 1, "heads": 1} | options
    return build_model("gpt", LANGUAGE_MODELS, options=options, vocab_size=500, length=40)


@pytest.mark.parametrize("mode, island", [("fp32", False), ("bf16", False), ("fp16", True), ("o2", False)])
def test_a_network_whose_head_computes_the_loss(mode: str, island: bool) -> None:
    """Tied weights, islands and 16-bit weights are what they are without chunks."""
    tokens = torch.randint(500, (2, 41))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    net = gpt(tied=True)
    twin = copy.deepcopy(net)
    give_loss(net.head, 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="found LossHead"):
        give_loss(net.head, 16)  # type: ignore[arg-type]
    norms = []
    for each in (net, twin):
        amp = Amp.named(mode)  # type: ignore[arg-type]
        if island:
            keep_fp32(each, "head")
        amp.prepare(each)
        with amp.autocast():
            if each is net:
                assert isinstance(each.head, LossHead) and each(inputs).shape == (2, 40, 500)
                loss = each(inputs, targets=targets)
            else:
                loss = F.cross_entropy(each(inputs).flatten(0, 1).float(), targets.flatten(), reduction="sum")
        amp.backward(loss / 80)
        grads = torch.cat([p.grad.flatten() / amp.scale for p in master_params(each) if p.grad is not None])
        norms.append((loss.detach(), grads))
    assert torch.allclose(norms[0][0], norms[1][0], rtol=1e-5)
    close = 1e-5 if mode == "fp32" else 1e-2
    assert (norms[0][1] - norms[1][1]).norm() < close * norms[1][1].norm()


def losses_of_a_sharded_network(rank: int, chunk: int | None) -> list[float]:
    net, amp = gpt(tied=True), Amp.named("bf16")
    if chunk is not None:
        give_loss(net.head, chunk)  # type: ignore[arg-type]
    net = wrap_fsdp(net, build_mesh(torch.device("cpu"), 2), amp.dtype)
    optimizer, found = SGD(net.parameters(), lr=0.1, fused=True), []
    tokens = torch.randint(500, (4, 41)).chunk(2)[rank]
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    for trains in (True, False):
        with torch.set_grad_enabled(trains), amp.autocast():
            if chunk is None:
                loss = F.cross_entropy(net(inputs).flatten(0, 1).float(), targets.flatten(), reduction="sum")
            else:
                loss = net(inputs, targets=targets)
        found.append(loss.item())
        if trains:
            amp.backward(loss / 80)
            found.append(amp.step(optimizer).grad_norm.item())
            amp.update()
    return found


def test_a_sharded_head_computes_the_loss(on_ranks: Any) -> None:
    found = (on_ranks(losses_of_a_sharded_network, chunk) for chunk in (16, None))
    for ours, plain in zip(*found, strict=True):
        assert ours == pytest.approx(plain, rel=2e-3)


def test_a_run_in_chunks_is_the_run_without(tmp_path: Any) -> None:
    common = ["recipe=language_model", "device=cpu", "amp=fp32", "steps=3", "log_every=1", "data.length=32"]
    common += ["data.num_samples=64", "model.options.width=16", "model.options.depth=1", "model.options.heads=1"]
    common += ["recipe.sample_tokens=0", "recipe.eval_offset=64", "log.progress=false", "save_every=2"]
    for name, more in (("whole", []), ("chunked", ["recipe.loss_chunk=20"])):
        assert train.main([*common, *more, f"run_dir={tmp_path / name}"]) == 0
    for a, b in zip(lines(tmp_path / "whole"), lines(tmp_path / "chunked"), strict=True):
        for key in ("loss", "loss_at_64", "grad_norm"):
            assert key not in a or a[key] == pytest.approx(b[key], rel=1e-5)
    weights = [state(tmp_path / name)["model"] for name in ("whole", "chunked")]
    assert weights[0].keys() == weights[1].keys()
