"""What surrounds a 16-bit denoiser: noise levels, weights of the loss, and averages, in fp32 and wrong in 16 bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from running import summary
from shared import UNIT, data_config, relative
from test_recipes import runs_of
from torch import Tensor, nn

from amp_core import Amp, Ema, StepReport
from amp_core.data import build_data
from recipes import diffusion
from recipes.diffusion import SIGMA_DATA, denoise, sample, weighted_losses

LEVELS = (80.0, 5.0, 0.3, 0.02, 0.005, 0.002)


TAKEN = StepReport(torch.tensor(True), torch.tensor(1.0))


pytestmark = pytest.mark.usefixtures("own_folder")
run = runs_of("diffusion")


class Given(nn.Module):
    """A network whose output is known, and which keeps its inputs."""

    def __init__(self, output: Tensor | float) -> None:
        super().__init__()
        self.output: Any = output

    def forward(self, x: Tensor, c_noise: Tensor) -> Tensor:
        self.seen = x, c_noise
        return self.output if isinstance(self.output, Tensor) else torch.full_like(x, self.output)


def digits() -> tuple[Tensor, Tensor]:
    """64 held-out digits with a standard deviation of 0.5, and noise."""
    images, _ = build_data(data_config("mnist_subset"), seed=0).eval.__getitems__([(15 * i, 0) for i in range(64)])
    torch.manual_seed(0)
    return SIGMA_DATA * images, torch.randn_like(images)


def levels(sigma: float, num: int = 64) -> Tensor:
    return torch.full((num,), sigma, dtype=torch.float64)


def entering(dtype: torch.dtype, sigma: float) -> tuple[float, Tensor, float]:
    """The loss at one noise level in a dtype, and its gradient with respect to the network's output, times its size.

    Also how much larger the terms of the error are than the error: what cancels.
    """
    images, noise = digits()
    output = 0.5 * torch.randn(images.shape).to(dtype).requires_grad_()
    net = Given(output)
    given = images.to(dtype), noise.to(dtype), levels(sigma).to(dtype)
    loss = weighted_losses(net, *given).mean()
    (gradient,) = torch.autograd.grad(loss, output)
    with torch.no_grad():
        error = denoise(net, images.double() + sigma * noise, levels(sigma)) - images
    cancelled = (2 * images.norm() + sigma * noise.norm() + 0.5 * min(sigma, 0.5) * noise.norm()) / error.norm()
    return loss.item(), gradient.detach().double() * images.numel(), cancelled.item()


def test_a_perfect_network_denoises_and_the_weighted_loss_is_the_formula_of_the_paper() -> None:
    images, noise = (t.double() for t in digits())
    for sigma in LEVELS:
        x, total = images + sigma * noise, sigma**2 + SIGMA_DATA**2
        target = (images - SIGMA_DATA**2 / total * x) * total**0.5 / (sigma * SIGMA_DATA)
        net = Given(target)
        # The last step of the error subtracts numbers of up to 6 standard deviations of x.
        assert (denoise(net, x, levels(sigma)) - images).abs().max() < 16 * 2.0**-53 * (6 * sigma + 2)
        seen, c_noise = net.seen
        assert torch.allclose(seen, x / total**0.5) and torch.allclose(c_noise, levels(math.log(sigma) / 4))
        output = torch.randn_like(images)
        expected = (output - target).square().mean((1, 2, 3))  # the weight of the network's own error is 1
        assert torch.allclose(weighted_losses(Given(output), images, noise, levels(sigma)), expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sigma", LEVELS)
def test_the_network_sees_variance_1_at_every_noise_level_and_its_gradient_is_that_of_float64(sigma: float) -> None:
    images, noise = digits()
    net = Given(0.0)
    denoise(net, images + sigma * noise, levels(sigma).float())
    assert 0.9 < net.seen[0].std() < 1.1
    _, expected, cancelled = entering(torch.float64, sigma)
    _, right, _ = entering(torch.float32, sigma)
    # Of an error of variance 1 + 0.25, twice: between 2.2 and 2.3. Each of three terms is the result of at most 8
    # roundings, and the factors of their sum of 12.
    assert 2.1 < expected.square().mean().sqrt() < 2.4
    assert relative(right, expected) < (8 * cancelled + 12) * UNIT[torch.float32]


def test_the_sampler_follows_the_exact_flow_of_gaussian_data() -> None:
    """For normal data the ideal denoiser is c_skip x: an output of 0. Heun's error falls with the square of the steps."""
    torch.manual_seed(0)
    noise, amp = torch.randn(4, 1, 4, 4), Amp.named("fp32")
    exact = SIGMA_DATA * 80.0 / math.hypot(80.0, SIGMA_DATA) * noise
    errors = [relative(sample(Given(0.0), amp, noise, num), exact) for num in (18, 36, 72)]
    assert [errors[0] / errors[1], errors[1] / errors[2]] == pytest.approx([4, 4], rel=0.2)


@pytest.mark.parametrize("sigma, wrong", [(0.02, 0.06), (0.005, 0.2), (0.002, 0.37)])
def test_around_the_network_bf16_rounds_by_as_much_as_the_noise(sigma: float, wrong: float) -> None:
    """Its unit for pixels between 1 and 2 is 0.008. One rounding is 2^16 times that of fp32."""
    _, expected, _ = entering(torch.float64, sigma)
    errors = [relative(entering(dtype, sigma)[1], expected) for dtype in (torch.bfloat16, torch.float32)]
    assert errors[0] == pytest.approx(wrong, rel=0.2) and errors[0] > 2.0**12 * errors[1]


def test_the_weight_of_the_loss_overflows_fp16_below_a_noise_level_of_0_0039() -> None:
    """1 / 0.0039^2 = 65,746. Of the levels in training 1 in 7,000 is lower: with 64 in a step, one step in 100."""
    images, noise = digits()
    net = Given(0.0)
    for sigma, overflows in ((0.004, False), (0.0038, True)):
        right, wrong = (
            weighted_losses(net, images.to(dtype), noise.to(dtype), levels(sigma).to(dtype))
            for dtype in (torch.float32, torch.float16)
        )
        assert 0.5 < right.mean() < 2 and bool(wrong.isinf().any()) == overflows
    share = torch.special.ndtr(torch.tensor((math.log(0.0039) + 1.2) / 1.2, dtype=torch.float64)).item()
    assert 1 / share == pytest.approx(7000, rel=0.1) and (1 - share) ** 64 == pytest.approx(0.99, abs=2e-3)


def test_infinities_of_the_weight_are_skipped_at_any_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise levels around 0.018, so that it happens soon. A scale of 65536 is small enough, and 1 does not help."""
    settings = ["steps=30", "amp=fp16", "doctor=off", "recipe.log_sigma_mean=-4"]
    assert summary(run("right", *settings))["skipped"] == 0
    infinite = []

    def losses(net: nn.Module, *given: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return weighted_losses(net, *given)
        found = weighted_losses(net, *(tensor.half() for tensor in given))  # all in the dtype of the network
        infinite.append(not bool(found.isfinite().all()))
        return found

    monkeypatch.setattr(diffusion, "weighted_losses", losses)
    assert summary(run("wrong", *settings, "amp.init_scale=1"))["skipped"] == sum(infinite) > 0


def test_an_average_in_bf16_stands_still() -> None:
    """A weight goes from 1 to 2, and the average is to follow by 0.001 of the way in each step."""
    weight, low = nn.Linear(1, 1, bias=False), torch.ones(1, dtype=torch.bfloat16)
    nn.init.ones_(weight.weight)
    ema = Ema(weight, 0.999, warmup=False)
    nn.init.constant_(weight.weight, 2.0)
    for _ in range(2000):
        ema.update(TAKEN)
        low.lerp_(weight.weight.detach()[0].bfloat16(), 0.001)
    # 2,000 roundings of numbers below 2.
    assert next(ema.model.parameters()).item() == pytest.approx(2 - 0.999**2000, abs=2000 * 2.0**-24)
    assert low.item() == 1.0  # 0.001 is less than 0.004, half of the distance of its numbers
