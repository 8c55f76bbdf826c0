"""Segmentation with binary masks: the loss that autocast refuses, and two safe forms of it.

The lesson: binary cross-entropy of a probability p has the gradient 1/p, up to 1e12, and fp16 ends at 65504. Autocast
refuses `F.binary_cross_entropy` on CUDA and allows it on a CPU. There are two fixes (`recipe.loss`):

    logits  `binary_cross_entropy_with_logits`: sigmoid and logarithm in one, in fp32 under autocast; the gradient is
            sigmoid(z) - y, which never overflows and never vanishes where the network is wrong
    fp32    an fp32 island that holds the sigmoid *and* the loss; the logits arrive there as fp32

The usual fix, sigmoid under autocast and only the loss in fp32, does not work: the probability was rounded before it
was cast. In fp16 it is exactly 1 from a logit of 8.3 on. If such a pixel is background, its loss is 100, where torch
clamps it, instead of 8.3, and its gradient NaN (infinity from the loss times p (1 - p) = 0). In bf16 it is 1 from a
logit of 6.25 on: the most wrong pixels have gradient 0. Even the fp32 form has gradient 0 from 16.7 on, where fp32
rounds to 1, so `logits` is the default. tests/recipes/test_segmentation.py shows each number.

`reduction="none"` does not change that, and is needed here: pixels have weights (void 0, mask `mask_weight`), and the
loss of a window is the sum of weighted losses over the sum of weights, over all micro-batches and ranks. A batch that
overflows would leave NaN in BatchNorm's statistics although the step is skipped; `env.wrap` guards them.

    python train.py recipe=segmentation                        digits on photographs, bf16
    python train.py recipe=segmentation amp=fp16 recipe.loss=fp32 accumulation=4 batch_size=4
    python train.py recipe=segmentation data=mask_folder data.path=/data/cracks model.options.width=32

Expected: IoU 0.745 to 0.78 after the 300 steps of the default, in three seeds each of fp32, bf16 and fp16 (means 0.769,
0.763, 0.769); 15 s on one core of a CPU, 105 s in fp16, which that CPU emulates.

Sources: Ronneberger et al., "U-Net" (arXiv:1505.04597); torch's notes on automatic mixed precision, "Prefer
binary_cross_entropy_with_logits over binary_cross_entropy" (docs.pytorch.org/docs/stable/amp.html).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, keep_fp32, sync_grads
from amp_core.config.schema import Config, RecipeConfig, expected
from amp_core.data.masks import VOID
from amp_core.models import Family
from amp_core.models.family import ImageShape, check_count, check_probability
from amp_core.models.unet import double_convolution, way_up
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.tensors import widest

DATA = "masks"


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    loss: Literal["logits", "fp32"]
    """The form of binary cross-entropy, see above."""
    mask_weight: float
    """Weight of a mask pixel; background pixels have 1, void ones 0."""


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    return expected(knobs, mask_weight=(knobs.mask_weight > 0, "a number above 0"))


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: loss, iou and dice, with the prefix `ema_` for EMA weights."""
    knobs = Knobs(**cfg.recipe)
    pixel_losses = LOSSES[knobs.loss]
    data = build_data(cfg.data, seed=cfg.seed, channels=MODELS.in_channels(cfg.model.name))
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    model = env.wrap(build_model(cfg.model.name, MODELS, options=cfg.model.options, **data.facts), amp)
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model)
    clip = Clip.of(cfg.clip)

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        total = torch.zeros((), device=env.device)
        for micro in window:
            images, masks = micro.batch
            weights = pixel_weights(masks, knobs.mask_weight)
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    losses = pixel_losses(model(images), targets(masks))
                # A micro-batch of only void pixels would divide 0 by 0.
                loss = (losses * weights).sum() / weights.sum().clamp(min=1)
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
        # Over the whole set, not per image: small masks would count as much as large ones.
        losses = torch.zeros(2, dtype=widest(env.device), device=env.device)
        pixels = torch.zeros(3, data.facts["num_masks"], dtype=widest(env.device), device=env.device)
        for images, masks in env.eval_batches(data.eval, 32):
            with amp.autocast():
                logits = net(images)
                of_pixels = pixel_losses(logits, targets(masks))
            # Sums of both: batches differ in their weights, so a mean of their means is not the mean.
            weights = pixel_weights(masks, knobs.mask_weight)
            losses += torch.stack([(of_pixels * weights).sum(), weights.sum()])
            pixels += overlap(logits, masks)
        loss, weight = env.sum_over_ranks(losses).tolist()
        both, predicted, true = env.sum_over_ranks(pixels)
        # An empty mask that was predicted empty is correct.
        # IoU = |A and B| / |A or B| with |A or B| = |A| + |B| - |A and B|; Dice = 2 |A and B| / (|A| + |B|).
        iou = torch.where(predicted + true > 0, both / (predicted + true - both), 1.0)
        dice = torch.where(predicted + true > 0, 2 * both / (predicted + true), 1.0)
        return {"loss": loss / weight, "iou": iou.mean().item(), "dice": dice.mean().item()}

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema}
    loop = Loop(env, data, amp=amp, evaluate=evaluate, predict=lambda net, batch: {"masks": net(batch[0]) > 0}, **parts)
    # By the denominator of the loss, so that a window's mean is that of one big batch.
    for window in loop.windows(count=lambda batch: pixel_weights(batch[1], knobs.mask_weight).sum()):
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    return loop.eval


def unet(*, num_masks: int, image_shape: ImageShape, width: int = 8, depth: int = 3, dropout: float = 0.0) -> nn.Module:
    """A small U-Net with batch normalisation. 113,000 parameters with the defaults; any height and width.

    Source: Ronneberger, Fischer, Brox, "U-Net" (arXiv:1505.04597); here with padded convolutions.

    Args:
        width: channels at full resolution, doubled with each halving of it. Multiples of 8 suit Tensor Cores.
        depth: how often the resolution is halved.
        dropout: probability, for whole channels at the lowest resolution.
    """
    check_count("width", width)
    check_count("depth", depth)
    check_probability("dropout", dropout)
    return UNet(image_shape[0], num_masks, width, depth, dropout)


class UNet(nn.Module):
    """Two convolutions per resolution, down and up again, with a skip connection at each but the lowest."""

    def __init__(self, channels: int, num_masks: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            double_convolution(inputs, outputs) for inputs, outputs in zip([channels, *widths], widths, strict=False)
        )
        self.dropout = nn.Dropout2d(dropout)
        self.narrow = nn.ModuleList(nn.Conv2d(2 * outputs, outputs, 1) for outputs in reversed(widths[:-1]))
        self.up = nn.ModuleList(double_convolution(2 * outputs, outputs) for outputs in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, num_masks, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, skips = images, []
        for level, block in enumerate(self.down):
            # Rounded up: a last odd row is kept, and on the way up each map gets the size of its skip.
            x = block(F.max_pool2d(x, 2, ceil_mode=True) if level else x)
            skips.append(x)
        return self.head(way_up(self.dropout(skips.pop()), skips, self.narrow, self.up))


MODELS = Family(
    what="a segmentation network",
    builders={"unet": unet},
    example={"num_masks": 1, "image_shape": (3, 64, 64)},
    outputs=lambda image_shape, num_masks: (2, num_masks, *image_shape[1:]),
    in_channels=lambda name: 3 if ":" in name else None,
    libraries={"timm": "timm_segmenter"},
)
"""Images [B, C, H, W] to logits [B, num_masks, H, W], one binary mask per channel."""


def with_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss per pixel, fp32 under autocast. Both [B, K, H, W]; `targets` float32, 0 or 1."""
    # (1 - y) z - log sigmoid(z), and log sigmoid(z) = min(0, z) - log(1 + exp(-|z|)): no exponential overflows.
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")


@keep_fp32
def in_fp32(logits: Tensor, targets: Tensor) -> Tensor:
    """The same from probabilities. `keep_fp32` disables autocast and casts 16-bit arguments to fp32."""
    # The sigmoid, too, is in the island: a cast does not bring back what rounding p to 16 bits has lost.
    return F.binary_cross_entropy(torch.sigmoid(logits), targets, reduction="none")


LOSSES = {"logits": with_logits, "fp32": in_fp32}


def targets(masks: Tensor) -> Tensor:
    """float32 [B, K, H, W] of 0 and 1; void pixels are 0 with weight 0."""
    return (masks == 1).float()


def pixel_weights(masks: Tensor, mask_weight: float) -> Tensor:
    """float32 [B, K, H, W]: 0 for void, `mask_weight` in the mask, 1 in the background."""
    return (masks != VOID).float() + (mask_weight - 1) * (masks == 1)


def overlap(logits: Tensor, masks: Tensor) -> Tensor:
    """int64 [3, K]: pixels in both, predicted (a probability above 1/2) and true, without void pixels."""
    predicted, true = (logits > 0) & (masks != VOID), masks == 1
    # Integers: fp32 counts to 2^24, the pixels of 256 images of 256 x 256.
    return torch.stack([part.sum(dim=(0, 2, 3)) for part in (predicted & true, predicted, true)])
