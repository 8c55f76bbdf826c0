"""A generative adversarial network: two networks, two optimizers, one loss scale, one update per step.

The lesson: each loss is scaled and each optimizer steps separately, so one may skip while the other steps; the scale is
updated once, after both, because the gradients of the second are still scaled. A gradient penalty differentiates a
gradient: its inner pass is scaled like any backward pass, to avoid underflow, and unscaled explicitly, since no
optimizer owns the result (`amp.grad` does both). In fp16 the default scale is always too large: the inner pass starts
with a gradient of 1 times 65536, above fp16's 65504. The discriminator skips 4 steps, of which the generator takes 3,
and the scale stays at 4096.

    python train.py recipe=gan                                       WGAN-GP on 4,000 MNIST digits, bf16, 500 steps
    python train.py recipe=gan amp=fp16 recipe.num_critic_steps=5    five critic steps per generator step
    python train.py recipe=gan recipe.penalty=r1 recipe.penalty_weight=1 recipe.share_graph=true
    python train.py recipe=gan data=image_folder data.path=/data/faces data.image_size=64 model.options.width=64

Writes samples/step_*.png at each evaluation. Expected: ema_sliced_wasserstein 0.091, 0.093, 0.095 with seeds 1 to 3 in
bf16 (0.095, 0.091 in fp32 with the first two, 0.095 in fp16 with the first), in 20 s of one core of a server CPU with
AVX512-BF16. Between training images and the held-out ones it is 0.065, from Gaussian noise 0.60.

Sources: Gulrajani et al., "Improved Training of Wasserstein GANs" (arXiv:1704.00028); R1: Mescheder et al., "Which
Training Methods for GANs do actually Converge?" (arXiv:1801.04406); torch's notes on automatic mixed precision
(docs.pytorch.org/docs/stable/notes/amp_examples.html), on gradient penalties and on several losses and optimizers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, sync_grads
from amp_core.config.schema import Config, RecipeConfig, expected
from amp_core.config.sources import package_folder
from amp_core.data.base import evenly_spread
from amp_core.models.family import Family, ImageShape, check_choice, check_count
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.run.samples import write_images
from amp_core.tensors import unwrap

DATA = "images"
LAYOUTS = ("single", "data_parallel", "ddp")  # double backward: sharded weights are freed in between
NUM_COMPARED = 1000  # held-out images, and equally many generated ones
Penalty = Literal["wgan_gp", "r1", "none"]


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    penalty: Penalty
    """Gradient penalty of the discriminator: wgan_gp, with Wasserstein losses; r1 or none, with logistic ones."""
    penalty_weight: float | None
    """Its weight, lambda or gamma in the papers; null: 10, as there; unused with penalty=none."""
    num_critic_steps: int
    """Discriminator steps per generator step; the discriminator steps in each window."""
    share_graph: bool
    """If both step: one forward pass of the fakes through the discriminator for both losses. Both gradients are then
    those at the same weights; otherwise the generator sees the discriminator's new weights."""


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    weight = knobs.penalty_weight
    problems = expected(
        knobs,
        num_critic_steps=(knobs.num_critic_steps >= 1, "at least 1"),
        penalty_weight=(weight is None or 0 < weight < math.inf, "a number above 0, or recipe.penalty=none"),
    )
    if knobs.best.startswith("ema_") and cfg.ema.decay is None:
        problems.append(f"ema.decay=null: recipe.best={knobs.best} needs averages; use recipe.best={knobs.best[4:]}")
    if cfg.layout.static_graph:
        problems.append(
            "layout.static_graph=true: recipe=gan goes through its networks in another way from window to window, and "
            "DDP would leave gradients out; leave it out"
        )
    if cfg.perf.compile is not None:
        problems.append(
            f"perf.compile={cfg.perf.compile}: recipe=gan differentiates a gradient and keeps graphs for a second "
            f"loss, which compiled code does not; use perf=default"
        )
    if package_folder("torchvision") is None:
        problems.append("recipe=gan needs the package torchvision for its samples: pip install 'amp-recipes[vision]'")
    if knobs.penalty == "none" and weight is not None:
        problems.append(f"recipe.penalty_weight={weight:g}: has no effect with recipe.penalty=none; leave it out")
    return problems


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: sliced_wasserstein, with the prefix `ema_` for EMA weights."""
    knobs = Knobs(**cfg.recipe)
    penalty_weight = 10.0 if knobs.penalty_weight is None else knobs.penalty_weight
    data = build_data(cfg.data, seed=cfg.seed)
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    nets = env.wrap(build_model(cfg.model.name, MODELS, options=cfg.model.options, **data.facts), amp)
    assert isinstance(nets, nn.ModuleDict)
    G, D = nets["generator"], nets["discriminator"]
    G_weights, D_weights = list(G.parameters()), list(D.parameters())
    latent: Any = unwrap(G).latent
    G_optimizer, D_optimizer = build_optimizer(cfg.optimizer, G), build_optimizer(cfg.optimizer, D)
    num_steps, horizon, every = env.num_steps(data), cfg.schedule.horizon, knobs.num_critic_steps
    D_schedule = build_schedule(cfg.schedule, D_optimizer, num_steps)
    # G steps in one window of `every`; its schedule moves with its own steps.
    G_settings = replace(cfg.schedule, horizon=horizon and -(-horizon // every))
    G_schedule = build_schedule(G_settings, G_optimizer, max(1, num_steps // every))
    ema = build_ema(cfg.ema, G)
    clip = Clip.of(cfg.clip)

    def train_step(
        window: list[MicroBatch], with_generator: bool
    ) -> tuple[StepReport, StepReport | None, list[Tensor]]:
        shared = with_generator and knobs.share_graph
        loss_D, penalty, loss_G = totals = [torch.zeros((), device=env.device) for _ in range(3)]
        noise, mixes = loop.draw(torch.randn, latent), loop.draw(torch.rand, 1, 1, 1, stream=1)
        for micro, z, mix in zip(window, noise, mixes, strict=True):
            real, _ = micro.batch
            with sync_grads(G, D, when=micro.is_last):
                with amp.autocast():
                    # D's loss takes the fakes as constants; only a loss of G that shares the graph leads back to G.
                    with torch.set_grad_enabled(shared):
                        fake = G(z)
                    # One pass for both: D has no BatchNorm, so a score depends on its own image alone.
                    # In fp32 from here: a mean of 16-bit numbers would be 16-bit.
                    of_real, of_fake = D(torch.cat([real, fake])).float().chunk(2)
                    loss = discriminator_loss(knobs.penalty, of_real, of_fake)
                    slope = gradient_penalty(knobs.penalty, amp, D, real, fake, mix)
                # Into D alone: what this loss would add to G's gradients belongs to no step.
                amp.backward(loss + penalty_weight * slope, micro.weight, inputs=D_weights, retain_graph=shared)
                loss_D += loss.detach() * micro.weight
                penalty += slope.detach() * micro.weight
                if shared:
                    loss = generator_loss(knobs.penalty, of_fake)
                    amp.backward(loss, micro.weight, inputs=G_weights)
                    loss_G += loss.detach() * micro.weight
        report_D = amp.step(D_optimizer, clip)
        if with_generator and not shared:
            for micro, z in zip(window, loop.draw(torch.randn, latent, stream=2), strict=True):
                with sync_grads(G, when=micro.is_last):
                    with amp.autocast():
                        # Unwrapped: this pass creates no gradients in D for DDP to wait for.
                        loss = generator_loss(knobs.penalty, unwrap(D)(G(z)).float())
                    amp.backward(loss, micro.weight, inputs=G_weights)
                loss_G += loss.detach() * micro.weight
        report_G = amp.step(G_optimizer, clip) if with_generator else None
        amp.update()  # once, after both: all gradients of the step have one scale
        amp.zero_grad(D_optimizer, G_optimizer)
        D_schedule.advance(report_D)
        if report_G is not None:
            G_schedule.advance(report_G)
            if ema is not None:
                ema.update(report_G)
        return report_D, report_G, totals

    @functools.cache
    def held_out() -> Tensor:
        images, _ = evenly_spread(env.eval_part(data.eval), NUM_COMPARED)
        return images.to(env.device)

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        # Every rank computes all of it: the distance needs all images, and there are few.
        z = torch.randn(len(held_out()), latent, generator=torch.Generator().manual_seed(0)).to(env.device)
        with amp.autocast():
            fakes = torch.cat([net(part) for part in z.split(100)]).float()
        if net is (unwrap(G) if ema is None else ema.model):
            write_images(env, loop.step, fakes[:64], like=held_out())
        return {"sliced_wasserstein": sliced_wasserstein(fakes, held_out())}

    # The first network is evaluated.
    nets = {"generator": G, "discriminator": D}
    optimizers = {"generator_optimizer": G_optimizer, "discriminator_optimizer": D_optimizer}
    schedules = {"discriminator_schedule": D_schedule, "generator_schedule": G_schedule}
    loop = Loop(env, data, amp=amp, evaluate=evaluate, predict=None, **nets, **optimizers, **schedules, ema=ema)
    for window in loop.windows():
        report_D, report_G, (loss, penalty, loss_G) = train_step(window, (loop.step + 1) % every == 0)
        loop.log(report_D, of="discriminator", loss=loss, penalty=penalty)
        if report_G is not None:
            loop.log(report_G, of="generator", loss_generator=loss_G)
    return loop.eval


def discriminator_loss(penalty: Penalty, of_real: Tensor, of_fake: Tensor) -> Tensor:
    """Discriminator loss from fp32 scores [B]. The logistic one is softplus, which avoids log(0)."""
    if penalty == "wgan_gp":
        # Equation 3 of Gulrajani et al. without the penalty: its negative estimates the Wasserstein distance.
        return of_fake.mean() - of_real.mean()
    # softplus(-x) = -log sigmoid(x), and softplus(x) = -log(1 - sigmoid(x)).
    return F.softplus(of_fake).mean() + F.softplus(-of_real).mean()


def generator_loss(penalty: Penalty, of_fake: Tensor) -> Tensor:
    """Generator loss from fp32 scores [B]. The logistic one is the non-saturating loss (arXiv:1406.2661)."""
    return -of_fake.mean() if penalty == "wgan_gp" else F.softplus(-of_fake).mean()


def gradient_penalty(penalty: Penalty, amp: Amp, D: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """Penalty on the gradient norm g of `D`: wgan_gp, (g - 1)^2 between real and fake images; r1, g^2 / 2 at real ones.

    Mean over samples, fp32.

    Call it inside autocast: the penalty is part of the forward pass, and differentiated again.

    Args:
        penalty: which one.
        amp: the mode.
        D: images -> scores [B].
        real: images, fp32 [B, C, H, W].
        fake: equally many generated ones.
        mix: share of the real image, [B, 1, 1, 1], from 0 to 1.
    """
    if penalty == "none":
        return real.new_zeros(())
    # wgan_gp: mix * real + (1 - mix) * fake, a point between the two, where the optimal critic has slope 1.
    images = (torch.lerp(fake.float(), real, mix) if penalty == "wgan_gp" else real).detach().requires_grad_()
    (gradient,) = amp.grad(D(images), images)
    # Of fp32 images, in fp32: the square of a component is infinite in fp16 from 256 on.
    square = gradient.flatten(1).square().sum(1)
    if penalty == "r1":
        # R1: gamma / 2 E[|grad D|^2] at real images; gamma is recipe.penalty_weight.
        return square.mean() / 2
    # At 0 the root has an infinite gradient, and 0 times infinity is NaN.
    return ((square + 1e-12).sqrt() - 1).square().mean()


def sliced_wasserstein(a: Tensor, b: Tensor, *, num_directions: int = 256) -> float:
    """Sliced Wasserstein-2 distance of two sets of images, over random directions of pixel space. Syncs.

    In one dimension it is that of the sorted values (Rabin et al. 2011). Squares are averaged over directions, which
    are always the same.

    Args:
        a: fp32 [N, C, H, W].
        b: equally many.
        num_directions: number of projections.
    """
    directions = torch.randn(a[0].numel(), num_directions, generator=torch.Generator().manual_seed(0)).to(a.device)
    directions = F.normalize(directions, dim=0)
    x, y = ((images.flatten(1) @ directions).sort(dim=0).values for images in (a, b))
    return (x - y).square().mean().sqrt().item()


class Generator(nn.Module):
    """Images [B, C, H, W], of any range, from noise [B, latent]."""

    def __init__(self, image_shape: ImageShape, width: int, latent: int, norm: str) -> None:
        super().__init__()
        self.latent, self.size = latent, image_shape[1:]
        num_doublings = _num_halvings(image_shape)
        channels = width * 2 ** (num_doublings - 1)
        start = [-(-side // 2**num_doublings) for side in self.size]

        def normalise(channels: int) -> nn.Module:
            return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(max(1, channels // 4), channels)

        layers: list[nn.Module] = [nn.Linear(latent, channels * start[0] * start[1])]
        layers += [nn.Unflatten(1, (channels, *start)), normalise(channels), nn.ReLU()]
        for _ in range(num_doublings - 1):
            layers += [nn.ConvTranspose2d(channels, channels // 2, 4, 2, 1), normalise(channels // 2), nn.ReLU()]
            channels //= 2
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(channels, image_shape[0], 4, 2, 1))

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z)[..., : self.size[0], : self.size[1]]


def dcgan(*, image_shape: ImageShape, width: int = 16, latent: int = 64, norm: str = "group") -> nn.Module:
    """A ModuleDict of `generator`, noise [B, latent] -> images [B, C, H, W], and `discriminator`, images -> scores [B].

    Strided convolutions (Radford et al., arXiv:1511.06434). The generator's last layer is linear, so that images may
    have any range. The discriminator has no BatchNorm: a penalty on each sample's gradient is meaningless if its score
    depends on the rest of the batch (Gulrajani et al.).

    Args:
        width: channels at the finest resolution, doubled with each halving of it. Multiples of 8 suit Tensor Cores.
        latent: size of the noise vector.
        norm: the generator's normalisation: group, or batch, whose statistics are per micro-batch.
    """
    check_count("width", width)
    check_count("latent", latent)
    check_choice("norm", norm, ("group", "batch"))
    if min(image_shape[1:]) < 4:
        raise ValueError(f"images of {image_shape[1]}x{image_shape[2]} pixels, expected at least 4x4")
    channels, layers = image_shape[0], []
    sides = list(image_shape[1:])
    for i in range(_num_halvings(image_shape) + 1):
        layers += [nn.Conv2d(channels, width * 2**i, 4, 2, 1), nn.LeakyReLU(0.2)]
        channels, sides = width * 2**i, [side // 2 for side in sides]
    layers += [nn.Flatten(), nn.Linear(channels * sides[0] * sides[1], 1), nn.Flatten(0)]
    return nn.ModuleDict(
        {"generator": Generator(image_shape, width, latent, norm), "discriminator": nn.Sequential(*layers)}
    )


def _num_halvings(image_shape: ImageShape) -> int:
    """How often the shorter side is halved until 7 or fewer pixels are left, at least once."""
    shorter, num = min(image_shape[1:]), 1
    while -(-shorter // 2**num) > 7:
        num += 1
    return num


MODELS = Family(
    what="a generator with its discriminator",
    builders={"dcgan": dcgan},
    example={"image_shape": (3, 64, 64)},
)
