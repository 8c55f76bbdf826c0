"""Diffusion: a 16-bit network inside fp32 preconditioning, an fp32 loss and fp32 averages.

The lesson, in three parts. Noise levels span four decades, but with the preconditioning of EDM the network's input,
target and gradient have variance 1 at every level, so the network runs in 16 bits. What surrounds it stays fp32: near
the lowest level the noise is below one rounding of a bf16 pixel, and a third of the gradient would be rounding error.
The weight of the loss, 1 / sigma^2 + 1 / sigma_data^2, exceeds fp16's range below sigma = 0.0039: such a step is
skipped at any loss scale. And samples come from averaged weights: an average stored in bf16 stops moving when 1 - decay
of its distance to the weights is below half of its spacing, 0.2 to 0.4 % of its value.

    python train.py recipe=diffusion                                       4,000 MNIST digits, bf16
    python train.py recipe=diffusion amp=fp16 accumulation=2 batch_size=32
    python train.py recipe=diffusion data=image_folder data.path=/data/faces data.image_size=32 model.options.width=64

Writes samples/step_*.png at each evaluation. Expected: ema_loss 0.2113, 0.2130 with seeds 1, 2 in bf16; 0.2115, 0.2130,
0.2082 with seeds 1 to 3 in fp32; 0.2113 with seed 1 in fp16; 1 untrained.

Source: Karras et al. (EDM), arXiv:2206.00364: table 1 for preconditioning and loss, algorithm 1 for the sampler.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, keep_fp32, sync_grads
from amp_core.config.schema import Config, RecipeConfig, expected
from amp_core.config.sources import package_folder
from amp_core.data.base import evenly_spread
from amp_core.models import Family
from amp_core.models.family import ImageShape, check_count
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.run.samples import write_images
from amp_core.tensors import unwrap

DATA = "images"
SIGMA_DATA = 0.5  # standard deviation of the data, as in the paper
HIGHEST, LOWEST = 80.0, 0.002  # noise levels of the sampler
NUM_COMPARED = 1000  # held-out images
FREQUENCIES = 8  # of the noise level, for the network


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    log_sigma_mean: float
    """Mean of the logarithm of the noise levels in training."""
    log_sigma_std: float
    """Its standard deviation."""
    num_sampler_steps: int
    """Noise levels that the sampler visits."""


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    problems = expected(
        knobs,
        log_sigma_std=(0 < knobs.log_sigma_std < math.inf, "a number above 0"),
        num_sampler_steps=(knobs.num_sampler_steps >= 2, "at least 2"),
    )
    if knobs.best.startswith("ema_") and cfg.ema.decay is None:
        problems.append(f"ema.decay=null: recipe.best={knobs.best} needs averages; use recipe.best={knobs.best[4:]}")
    if package_folder("torchvision") is None:
        problems.append("recipe=diffusion: its samples need the package torchvision: pip install 'amp-recipes[vision]'")
    return problems


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: loss, with the prefix `ema_` for EMA weights."""
    knobs = Knobs(**cfg.recipe)
    data = build_data(cfg.data, seed=cfg.seed)
    shape = data.facts["image_shape"]
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    model = env.wrap(build_model(cfg.model.name, MODELS, options=cfg.model.options, **data.facts), amp)
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model)
    clip = Clip.of(cfg.clip)

    def level(normal: Tensor) -> Tensor:  # of noise, from a standard normal number
        # ln(sigma) is normal; the defaults are the -1.2 and 1.2 of table 1.
        return (knobs.log_sigma_mean + knobs.log_sigma_std * normal).exp()

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        total = torch.zeros((), device=env.device)
        # By seed and step for the whole window: a sample gets the same noise however the window is divided.
        noises, normals = loop.draw(torch.randn, *shape), loop.draw(torch.randn, stream=1)
        for micro, noise, normal in zip(window, noises, normals, strict=True):
            images, _ = micro.batch
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    # The loader normalises images to a deviation of about 1; the formulas are for SIGMA_DATA.
                    loss = weighted_losses(model, SIGMA_DATA * images, noise, level(normal)).mean()
                amp.backward(loss, micro.weight)
            total += loss.detach() * micro.weight
        report = amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, total

    @functools.cache
    def held_out() -> tuple[Tensor, Tensor, Tensor]:
        # Always the same noise and the same eight equally probable levels, in turn.
        images, _ = evenly_spread(env.eval_part(data.eval), NUM_COMPARED)
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
        sigma = level(torch.special.ndtri((torch.arange(len(images)) % 8 + 0.5) / 8))
        return (SIGMA_DATA * images).to(env.device), noise.to(env.device), sigma.to(env.device)

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        # Every rank computes all of it, as there are few images.
        images, noise, sigma = held_out()
        with amp.autocast():
            parts = zip(images.split(100), noise.split(100), sigma.split(100), strict=True)
            losses = torch.cat([weighted_losses(net, *part) for part in parts])
        if net is (unwrap(model) if ema is None else ema.model):
            made = sample(net, amp, noise[:64], knobs.num_sampler_steps)
            write_images(env, loop.step, made, like=images)
        return {"loss": losses.mean().item()}

    loop = Loop(env, data, amp=amp, model=model, optimizer=optimizer, schedule=schedule, ema=ema, evaluate=evaluate)
    for window in loop.windows():
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    return loop.eval


def denoise(net: nn.Module, x: Tensor, sigma: Tensor) -> Tensor:
    """The denoised images D(x; sigma). Computes in the dtype of `x` and `sigma`, the network as autocast has it.

    Args:
        net: called with inputs of variance 1 and log(sigma) / 4.
        x: noisy images [B, C, H, W], fp32.
        sigma: the standard deviation of their noise, fp32 [B].
    """
    s = sigma[:, None, None, None]
    variance = s.square() + SIGMA_DATA**2
    # Table 1 of the paper: input and target of the network have variance 1, and c_out is as small as can be.
    c_in, c_skip, c_out = variance.rsqrt(), SIGMA_DATA**2 / variance, s * SIGMA_DATA * variance.rsqrt()
    # Added in fp32: bf16 numbers from 1 to 2 are 2^-7 = 0.008 apart, the lowest noise is 0.002.
    return c_skip * x + c_out * net(c_in * x, sigma.log() / 4).to(x)


def weighted_losses(net: nn.Module, images: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """The weighted squared error of each denoised image, [B]. About 1 for every sigma before training.

    Args:
        images: clean, with a standard deviation of `SIGMA_DATA`, fp32 [B, C, H, W].
        noise: standard normal, of their shape.
        sigma: the noise levels, [B].
    """
    error = denoise(net, images + sigma[:, None, None, None] * noise, sigma) - images
    # 1 / c_out^2: an error of the network counts the same at every level.
    weight = (sigma.square() + SIGMA_DATA**2) / (sigma * SIGMA_DATA).square()
    return weight * error.square().mean((1, 2, 3))


@torch.no_grad()
def sample(net: nn.Module, amp: Amp, noise: Tensor, num_steps: int) -> Tensor:
    """Images from standard normal noise [B, C, H, W]: Heun's method, with the state in fp32. No host-device sync."""
    # Equal steps of sigma^(1/7), equation 5: small ones where the noise is low.
    ends = HIGHEST ** (1 / 7), LOWEST ** (1 / 7)
    levels = [(ends[0] + i / (num_steps - 1) * (ends[1] - ends[0])) ** 7 for i in range(num_steps)]

    def slope(x: Tensor, sigma: float) -> Tensor:
        with amp.autocast():
            return (x - denoise(net, x, x.new_full((len(x),), sigma))) / sigma

    # At sigma = 80 the image, of deviation 0.5, does not show: x is noise alone.
    x = noise * levels[0]
    for sigma, following in itertools.pairwise([*levels, 0.0]):
        # A trapezoid from here to an Euler step's end; the last level is 0, where the slope is not defined.
        change = (following - sigma) * slope(x, sigma)
        x = x + (change + (following - sigma) * slope(x + change, following)) / 2 if following else x + change
    return x


# --- the network ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions with a residual connection; the noise level scales and shifts in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(min(8, width), width) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.modulation = nn.Linear(2 * FREQUENCIES, 2 * width)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        (norm, norm_again), (conv, conv_again) = self.norms, self.convolutions
        scale, shift = self.modulation(level)[:, :, None, None].chunk(2, dim=1)
        y = norm_again(conv(F.silu(norm(x)))) * (1 + scale) + shift
        return x + conv_again(F.silu(y))


@keep_fp32
def features(c_noise: Tensor) -> Tensor:
    """Cosines and sines of c_noise [B], [B, 2 * FREQUENCIES]. Phases reach 200, which 16 bits would round."""
    phases = c_noise[:, None] * 2.0 ** torch.arange(FREQUENCIES, device=c_noise.device)
    return torch.cat([phases.cos(), phases.sin()], dim=1)


class Denoiser(nn.Module):
    """A U-Net of two resolutions, half and a quarter, for images [B, C, H, W] of any size. Its first output is 0.

    Args:
        width: channels at half of the resolution. Multiples of 8 suit Tensor Cores.
    """

    def __init__(self, *, image_shape: ImageShape, width: int = 32) -> None:
        super().__init__()
        check_count("width", width)
        self.stem = nn.Conv2d(image_shape[0], width, 3, stride=2, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(map(Block, (width, 2 * width, 2 * width, width)))
        self.up = nn.Conv2d(2 * width, width, 1)
        self.head = nn.Conv2d(width, 4 * image_shape[0], 3, padding=1, bias=False)
        # An output of 0 is the mean of the target, whose variance is 1: every level begins with a loss of 1.
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor, c_noise: Tensor) -> Tensor:
        level = features(c_noise)
        skip = self.blocks[0](self.stem(x), level)
        low = self.blocks[2](self.blocks[1](self.down(skip), level), level)
        y = self.blocks[3](skip + F.interpolate(self.up(low), size=skip.shape[-2:], mode="nearest"), level)
        # Strides round up, so an odd side comes out one pixel longer.
        return F.pixel_shuffle(self.head(F.silu(y)), 2)[..., : x.shape[-2], : x.shape[-1]]


MODELS = Family(what="a denoiser", builders={"denoiser": Denoiser}, example={"image_shape": (1, 28, 28)})
