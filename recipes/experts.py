"""A mixture of experts: the router in fp32, since its choice is discrete, and its auxiliary losses with it.

The lesson, in three parts. A router picks the 2 best of 8 experts for each token. 16 bits round its logits, and where
two are close the token goes to another expert: not a small error, but another function. So the router is an fp32 island
(the selective precision of Switch Transformers), and evaluation reports the share of tokens that 16 bits would send
elsewhere, `flips`. Two losses keep routing sound: one balances the load, the z-loss keeps logits small, and its square
overflows fp16 above 256. Both are fp32, and means over images, so that accumulation and ranks do not change them. And
which expert got how many tokens is never read back: each computes all tokens, and the others are multiplied by 0 (with
more experts, a grouped matrix product). So an expert without a token has gradients of 0, not None.

    python train.py recipe=experts                                   patches of 4,000 MNIST digits, bf16
    python train.py recipe=experts amp=fp16 clip=norm accumulation=2 batch_size=32
    python train.py recipe=experts recipe.balance=0 recipe.z_loss=0             without the auxiliary losses

Expected: accuracy 0.931 in bf16, 0.930 in fp32, 0.926 in fp16 (means of seeds 1 to 3, standard deviations up to 0.004),
in 10 s of one core of a server CPU. A router in 16 bits would flip 0.16 % of the tokens in bf16, 0.02 % in fp16.

Sources: Fedus et al., "Switch Transformers" (arXiv:2101.03961); z-loss: Zoph et al., "ST-MoE" (arXiv:2202.08906).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, keep_fp32, sync_grads
from amp_core.config.schema import Config, RecipeConfig, expected
from amp_core.models import Family
from amp_core.models.family import ImageShape, check_count
from amp_core.models.images import top_class
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.tensors import widest

DATA = "images"
CHOSEN = 2  # experts per token
PATCH = 7


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    balance: float
    """Weight of the load-balancing loss; 0: none."""
    z_loss: float
    """Weight of the squared log-sum-exp of the router's logits; 0: none."""


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    return expected(
        knobs,
        balance=(0 <= knobs.balance < math.inf, "a number of at least 0"),
        z_loss=(0 <= knobs.z_loss < math.inf, "a number of at least 0"),
    )


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: loss, accuracy, and the shares of flips and of the busiest expert."""
    knobs = Knobs(**cfg.recipe)
    data = build_data(cfg.data, seed=cfg.seed)
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    model = env.wrap(build_model(cfg.model.name, MODELS, options=cfg.model.options, **data.facts), amp)
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model)
    clip = Clip.of(cfg.clip)

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        total = torch.zeros((), device=env.device)
        for micro in window:
            images, labels = micro.batch
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    logits, routed, _ = model(images)
                    balance, z_loss = auxiliary_losses(routed)
                    # Means over images, all three: one weight of the micro-batch suits their sum.
                    loss = F.cross_entropy(logits, labels) + knobs.balance * balance + knobs.z_loss * z_loss
                amp.backward(loss, micro.weight)
            total += loss.detach() * micro.weight
        report = amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, total

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        # Loss, correct, samples, flipped tokens, tokens of each expert: summed on the device, read back once.
        totals = torch.zeros((), dtype=widest(env.device), device=env.device)
        for images, labels in env.eval_batches(data.eval):
            with amp.autocast():
                logits, routed, low = net(images)
                loss = F.cross_entropy(logits, labels, reduction="sum")
            chosen = choice(routed)
            flipped = (chosen != choice(low)).any(dim=-1)
            sums = [loss, (logits.argmax(1) == labels).sum(), labels.new_tensor(len(labels)), flipped.sum()]
            totals = totals + torch.cat([torch.stack(sums), chosen.sum((0, 1))])
        loss, correct, num, flips, *load = env.sum_over_ranks(totals).tolist()
        # sum(load) is CHOSEN times the number of tokens.
        shares = {"flips": flips * CHOSEN / sum(load), "busiest": max(load) / sum(load)}
        return {"loss": loss / num, "accuracy": correct / num, **shares}

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema}
    predict = lambda net, batch: top_class(net(batch[0])[0])  # noqa: E731
    loop = Loop(env, data, amp=amp, evaluate=evaluate, predict=predict, **parts)
    for window in loop.windows():
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    return loop.eval


def choice(routed: Tensor) -> Tensor:
    """Which experts take a token, as ones and zeros in the shape of the logits, [..., num_experts]."""
    return torch.zeros_like(routed).scatter(-1, routed.topk(CHOSEN, dim=-1).indices, 1.0)


@keep_fp32
def auxiliary_losses(routed: Tensor) -> tuple[Tensor, Tensor]:
    """The load-balancing loss, 1 for an even load, and the z-loss: fp32, means over images [B, N, num_experts].

    The load is that of an image: a product of means over a batch would depend on how the batch is divided.
    """
    # Equation 4 of Switch Transformers. The load has no gradient; the probabilities have.
    load, probability = choice(routed).mean(1) / CHOSEN, routed.softmax(dim=-1).mean(1)
    # Even, load and probability are 1 / E: E times E products of 1 / E^2 is 1. The z-loss is (log sum exp)^2.
    return routed.shape[-1] * (load * probability).sum(-1).mean(), routed.logsumexp(dim=-1).square().mean()


# --- the network ------------------------------------------------------------------------------------------------------


@keep_fp32
def combine_weights(routed: Tensor) -> Tensor:
    """The weight of each expert for each token, fp32: the softmax over the chosen, 0 for the others."""
    # exp(-inf) is exactly 0: experts that were not chosen add nothing, and their logits get no gradient.
    return routed.masked_fill(choice(routed) == 0, -math.inf).softmax(dim=-1)


class Experts(nn.Module):
    """Perceptrons of one hidden layer. Every one computes every token, and the weights combine what they return."""

    def __init__(self, num: int, width: int, hidden: int) -> None:
        super().__init__()
        # A deviation of 1 / sqrt(inputs) keeps the variance of what comes in.
        self.up = nn.Parameter(torch.randn(num, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(num, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        # Every expert gets every token: no shape depends on the routing, which the host would have to wait for.
        tokens = x.flatten(0, -2).expand(len(self.up), -1, -1)
        found = torch.bmm(F.gelu(torch.bmm(tokens, self.up)), self.down)  # in 16 bits; times fp32 weights, fp32
        return (found * weights.flatten(0, -2).mT[:, :, None]).sum(0).view_as(x)


class Mixture(nn.Module):
    """A classifier of patches: images to (logits, the router's logits in fp32 and in the dtype of autocast).

    Args:
        width: numbers of a patch; a hidden layer has twice as many. Multiples of 8 suit Tensor Cores.
        num_experts: at least 2.
    """

    def __init__(self, *, num_classes: int, image_shape: ImageShape, width: int = 32, num_experts: int = 8) -> None:
        super().__init__()
        check_count("width", width)
        if num_experts < CHOSEN:
            raise ValueError(f"num_experts={num_experts}, expected at least {CHOSEN}")
        self.embed = nn.Conv2d(image_shape[0], width, PATCH, stride=PATCH)
        num = (image_shape[1] // PATCH) * (image_shape[2] // PATCH)
        self.places = nn.Parameter(torch.randn(num, width) / 2)
        self.norm, self.norm_after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.router = keep_fp32(nn.Linear(width, num_experts, bias=False))
        self.experts = Experts(num_experts, width, 2 * width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(images).flatten(2).mT + self.places
        tokens = self.norm(x)
        routed = self.router(tokens)
        # The gradient reaches the router through the weights: which experts they are is a step function.
        x = x + self.experts(tokens, combine_weights(routed))
        # Without the island; its weights are fp32 also where those of the network are not.
        low = routed if self.training else F.linear(tokens, self.router.weight.to(tokens.dtype))
        return self.head(self.norm_after(x).mean(1)), routed, low


MODELS = Family(
    what="a mixture of experts", builders={"mixture": Mixture}, example={"num_classes": 10, "image_shape": (1, 28, 28)}
)
