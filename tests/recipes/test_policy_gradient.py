"""Rollout and training disagree by rounding: by how much in each dtype, what it does to the gradient, and what helps."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from running import lines
from shared import UNIT_OF as UNIT
from shared import relative
from test_recipes import runs_of
from torch import Tensor, nn

from amp_core import Amp
from amp_core.models import build_model
from recipes.policy_gradient import (
    MODELS,
    Knobs,
    Prompts,
    advantages,
    distances,
    gumbel,
    inputs_of,
    log_probabilities,
    policy_loss,
    rollout,
    take_weights,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KNOBS = Knobs("policy_gradient", "1 steps", "accuracy", "max", 8, 6, 8, None, None)


pytestmark = pytest.mark.usefixtures("own_folder")
run = runs_of("policy_gradient")


def network() -> nn.Module:
    """With logits of a standard deviation of 4, as of a network that has learnt."""
    torch.manual_seed(0)
    net = build_model("gpt", MODELS, options={"width": 64, "depth": 2, "heads": 2}, vocab_size=9, length=12)
    with torch.no_grad():
        net.get_submodule("head").weight.mul_(4)  # type: ignore[operator]
    return net


@functools.cache
def mismatch(training: str, engine: str) -> dict[str, float]:
    """Of 256 answers, sampled in one dtype and learnt from in another."""
    net, sampler = network(), network().to(DTYPES[engine])
    take_weights(sampler, net)
    prompts = Prompts(KNOBS, 256, 0).__getitems__([(i, 0) for i in range(256)])
    answers, sampled = rollout(sampler, prompts, gumbel(torch.rand(256, 6, 8)))
    with torch.no_grad(), Amp.named(training).autocast():
        learned = log_probabilities(net(inputs_of(prompts, answers))[:, 6:].float(), answers)
    return {key: value.item() for key, value in distances(learned, sampled).items()}


def test_bf16_is_8_times_as_far_off_policy_as_fp16_and_fp32_not_at_all() -> None:
    """Rounding is the only cause, and its unit is 2^-11 in fp16, 2^-8 in bf16: 8 to first order, within a factor of 2."""
    found = {mode: mismatch(mode, mode) for mode in UNIT}
    for key in ("mismatch", "ratio_error"):
        assert 4 < found["bf16"][key] / found["fp16"][key] < 16
        assert found["fp32"][key] < 2.0**-8 * found["fp16"][key]  # 2^-13 but for the order of sums


def test_an_engine_in_fp32_helps_little_since_training_rounds_too() -> None:
    """With as many independent roundings in both, one of two would leave 1 / sqrt(2) of the distance."""
    both, one = mismatch("bf16", "bf16"), mismatch("bf16", "fp32")
    assert 0.5 < one["mismatch"] / both["mismatch"] < 1


@pytest.mark.parametrize("mode", UNIT)
def test_a_log_softmax_in_16_bits_rounds_what_it_returns(mode: str) -> None:
    """Of 200 symbols: log-probabilities between -4 and -8, where numbers are 8 units apart, so off by 2 on average."""
    torch.manual_seed(0)
    logits = torch.randn(1, 512, 201).to(DTYPES[mode])
    symbols = torch.randint(200, (1, 512))
    expected = log_probabilities(logits.double(), symbols)
    kept = (expected < -4) & (expected > -8)
    right, wrong = (log_probabilities(given, symbols).double() - expected for given in (logits.float(), logits))
    # A maximum, a difference, a sum of 200 (typically 14 roundings), its logarithm, a difference: each of numbers below 8.
    assert right.abs().max() < 8 * 18 * UNIT["fp32"] and kept.float().mean() > 0.8
    if mode != "fp32":
        assert wrong[kept].abs().mean() > UNIT[mode]
        assert wrong[kept].abs().mean() == pytest.approx(2 * UNIT[mode], rel=0.2)


def expected_gradients(logits: Tensor, rewards: Tensor, dtype: torch.dtype, cap: float | None) -> Tensor:
    """Of answers of one symbol, over all symbols that a sampler with rounded logits may give, each as often as it does.

    In float64, for many policies: logits and rewards [policies, symbols].
    """
    logits = logits.clone().requires_grad_()
    sampled = logits.detach().to(dtype).double().log_softmax(1)
    policy_loss(logits.log_softmax(1), sampled, sampled.exp() * rewards, cap).backward()
    assert logits.grad is not None
    return logits.grad


def test_ratios_of_probabilities_undo_the_bias_of_a_sampler_that_rounds() -> None:
    """Without them the bias is that of rounding: 8 times as large in bf16 as in fp16, within a factor of 2."""
    torch.manual_seed(0)
    logits, rewards = 4 * torch.randn(1000, 64, dtype=torch.float64), torch.randn(1000, 64, dtype=torch.float64)
    true = expected_gradients(logits, rewards, torch.float64, None)
    off = {}
    for mode in ("fp16", "bf16"):
        # Of terms that are exponentials of numbers below 32, which two roundings of their unit change.
        right = expected_gradients(logits, rewards, DTYPES[mode], math.inf)
        assert relative(right, true) < 64 * 32 * 2.0**-53
        off[mode] = relative(expected_gradients(logits, rewards, DTYPES[mode], None), true)
    assert 4 < off["bf16"] / off["fp16"] < 16 and off["bf16"] > UNIT["bf16"]


def test_a_weight_is_truncated_at_the_cap() -> None:
    learned = torch.tensor([[0.0, -1.0, -3.0]], requires_grad=True)
    policy_loss(learned, torch.tensor([[-3.0, -1.5, -1.0]]), torch.ones(1, 3), 2.0).backward()
    assert learned.grad is not None
    assert torch.allclose(learned.grad, -torch.tensor([[2.0, math.exp(0.5), math.exp(-2.0)]]) / 3)


def test_advantages_of_a_group_have_mean_0_and_are_0_where_all_answers_are_alike() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])[:, None]
    found = advantages(rewards, 4)[:, 0]
    assert found[:4].tolist() == [0.5, -0.5, -0.5, 0.5] and not found[4:].any()


def test_symbols_are_sampled_with_their_probabilities() -> None:
    net, num = network(), 4_000
    prompt = Prompts(KNOBS, 1, 0).__getitems__([(0, 0)]).expand(num, -1)
    answers, sampled = rollout(net, prompt, gumbel(torch.rand(num, 2, 8)))
    with torch.no_grad():
        probabilities = net(prompt[:1])[0, -1, :-1].softmax(0)
    shares = answers[:, 0].bincount(minlength=8) / num
    assert ((shares - probabilities).abs() <= 5 * (probabilities / num).sqrt()).all()
    assert torch.allclose(sampled[:, 0].exp(), probabilities[answers[:, 0]], rtol=1e-5)
    assert answers.max() < 8  # never the sign for an answer


def test_prompts_are_functions_of_their_index_and_epoch() -> None:
    prompts = Prompts(KNOBS, 100, 3)
    both = prompts.__getitems__([(5, 0), (5, 1)])
    assert torch.equal(prompts.__getitems__([(5, 1)])[0], both[1]) and not torch.equal(both[0], both[1])
    many = prompts.__getitems__([(i, 0) for i in range(100)])
    assert many.shape == (100, 7) and set(many[:, :6].unique().tolist()) == set(range(8)) and (many[:, 6] == 8).all()


def test_a_line_of_metrics_tells_how_far_off_policy_a_run_is() -> None:
    settings = ["steps=2", "log_every=1", "recipe.importance_cap=2"]
    low, high = (
        [line["mismatch"] for line in lines(run(mode, f"amp={mode}", *settings)) if line["split"] == "train"]
        for mode in ("fp32", "bf16")
    )
    assert max(low) < 2.0**-8 * min(high)
    mixed = run("mixed", "amp=bf16", "recipe.rollout_dtype=float32", *settings)
    assert 0 < lines(mixed)[0]["mismatch"] < 1
