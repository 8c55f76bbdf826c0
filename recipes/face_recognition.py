"""Face recognition: a 16-bit backbone under an fp32 head that is sharded over all ranks.

The lesson has four parts, in the order of a step.

A gradient is scaled, not a loss. The margin softmax (ArcFace, CosFace) over Partial FC computes the loss and its
gradient with respect to the features itself, in fp32 and unscaled: fp16 is worst for cosines (just above 1, acos is
NaN). `amp.backward(features, gradient=x_grad)` scales that gradient on its way into the backbone. The head's own
gradients are not scaled: `unscaled=[head_optimizer]`.

The reduction sums. The loss is a mean over the samples of all ranks and x_grad is complete, so the backbone's gradients
must be summed over ranks. Plain DistributedDataParallel averages: without a factor of world_size its gradients are too
small by exactly that factor.

All optimizers step, or none. Each rank has its own centres, so one rank may see an inf that the others do not: in the
usual loop weights and scales of ranks then diverge. The usual loop also always steps the head: one overflow leaves NaN
in the class centres for good. `amp.step` takes both optimizers, agrees over ranks, and skips both or none. Each is
clipped by its own norm, the head's over all ranks (`sharded`).

The loss scale is capped (`amp=fp16_capped`): at 128 times the batch, as insightface does, before the norm is clipped.
insightface also starts it at the batch, `'amp.init_scale=${batch_size}'`, and clips the backbone alone,
`recipe.clip_only=backbone`. `scripts/verify_faces.py <run folder> lfw.bin` evaluates by its protocol.

Expected with the defaults, one seed on one CPU core: 965 steps on 1,380 letters give, on 344 others, an accuracy of
0.982 and a true accept rate of 0.68 at a false accept rate of 1e-3, in fp32 (23 s), bf16 (25 s) and fp16_capped with
clipping (136 s: fp16 convolutions are emulated there). An untrained net has 0.839 and 0.14.

    python train.py recipe=face_recognition                    letters in 12 faces, evaluated on others, bf16
    python train.py recipe=face_recognition amp=fp16_capped clip=norm clip.max_norm=5
    python train.py recipe=face_recognition recipe.sample_rate=0.3 layout=ddp layout.nproc_per_node=2 batch_size=64
    python train.py recipe=face_recognition model=iresnet50 data=records data.path=/data/ms1m optimizer=sgd_face \\
        recipe.embedding=512 recipe.scale=64 recipe.margin=0.5 amp=fp16_capped clip=norm clip.max_norm=5 epochs=20 \\
        layout=ddp perf.channels_last=true
    python train.py recipe=face_recognition data=synthetic_identities data.num_classes=2000000 recipe.sample_rate=0.1 \\
        recipe.embedding=512 optimizer=sgd_face steps=100      cost of a head of 2,000,000 identities

Sources: Deng et al., "ArcFace" (arXiv:1801.07698); Wang et al., "CosFace" (arXiv:1801.09414); An et al., "Partial FC"
(arXiv:2010.05222) and "Killing Two Birds with One Stone" (arXiv:2203.15565); insightface's arcface_torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, keep_fp32, sync_grads
from amp_core.config.errors import ConfigError
from amp_core.config.schema import Config, RecipeConfig, expected
from amp_core.heads.partial_fc import PartialFC
from amp_core.heads.verification import verify
from amp_core.models.family import Builder, Family, ImageShape, check_count, check_probability
from amp_core.run.evaluation import embed
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule

DATA = "identities"


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    embedding: int
    """Dimension of a feature vector."""
    loss: Literal["arcface", "cosface"]
    """arcface: margin on the angle between a feature and the centre of its class; cosface: on its cosine."""
    margin: float
    """ArcFace: radians, 0.5 for faces; CosFace: 0.4 for faces."""
    scale: float
    """Scale of the cosines before the softmax; 64 for faces. Not the loss scale."""
    sample_rate: float
    """Share of its classes that a rank uses in a step; those with a sample in the window are always included."""
    clip_only: Literal["backbone"] | None
    """backbone: the head is not clipped, as in insightface; null: both, each by its own norm."""


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last verification: accuracy, tar_at_far_1e-3, ... on held-out identities."""
    knobs = Knobs(**cfg.recipe)
    data = build_data(cfg.data, seed=cfg.seed, channels=MODELS.in_channels(cfg.model.name))
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    net = build_model(cfg.model.name, MODELS, options=cfg.model.options, embedding=knobs.embedding, **data.facts)
    model = env.wrap(net, amp)
    head = build_head(knobs, data.facts["num_classes"], env)
    optimizer = build_optimizer(cfg.optimizer, model)
    # The parameter is the sampled rows; `carry` brings each row its momentum before a step and keeps it after.
    head_optimizer = build_optimizer(cfg.optimizer, nn.ParameterList([head.active]))
    head_state = head.carry(head_optimizer)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    head_schedule = build_schedule(cfg.schedule, head_optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model)
    clip = Clip.of(cfg.clip)
    of_head = [head_optimizer]
    unclipped = of_head if knobs.clip_only == "backbone" else []

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        total = torch.zeros((), device=env.device)
        # Once for the window: its micro-batches meet the same centres, those of its classes and random others.
        head.sample(*(micro.batch[1] for micro in window))
        for micro in window:
            images, labels = micro.batch
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    features = model(images)
                # Detached: the head returns the gradient of the features itself, in fp32 and complete over all ranks.
                loss, x_grad = head(features.detach(), labels, micro.weight)
                # The head's own gradients are complete and unscaled; only this one is scaled, on its way into 16 bits.
                amp.backward(features, gradient=x_grad)
            total += loss
        # In one call: an infinity in the gradient of one rank's centres skips both optimizers, on all ranks.
        report = amp.step([optimizer, *of_head], clip, unscaled=of_head, sharded=of_head, unclipped=unclipped)
        amp.update()
        head.write_back()  # the sampled centres, into the shard of all
        amp.zero_grad(optimizer, head_optimizer)
        schedule.advance(report)
        head_schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, total

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        # Every rank gets all embeddings: a pair is of any two images, not of a batch.
        embeddings, identities = embed(env, amp, net, env.eval_part(data.eval, 8), knobs.embedding)
        return verify(embeddings, identities, scale=knobs.scale)

    loop = Loop(
        env,
        data,
        amp=amp,
        evaluate=evaluate,
        predict=lambda net, batch: {"embedding": net(batch[0]).float()},
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        ema=ema,
        head=head,
        head_optimizer=head_state,
        head_schedule=head_schedule,
    )
    for window in loop.windows():
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    return loop.eval


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    problems = expected(
        knobs,
        embedding=(knobs.embedding >= 1, "at least 1"),
        sample_rate=(0 < knobs.sample_rate <= 1, "above 0 and at most 1"),
        margin=(0 <= knobs.margin < math.pi, "at least 0 and below pi"),
        scale=(0 < knobs.scale < math.inf, "a finite number above 0"),
    )
    if knobs.clip_only is not None and cfg.clip.name == "none":
        problems.append("recipe.clip_only=backbone: has no effect with clip=none; use clip=norm")
    return problems


def build_head(knobs: Knobs, num_classes: int, env: Environment) -> PartialFC:
    """This rank's shard of the head.

    Raises:
        ConfigError: a setting out of range, or more ranks than identities.
    """
    try:
        return PartialFC(
            num_classes,
            knobs.embedding,
            kind=knobs.loss,
            margin=knobs.margin,
            scale=knobs.scale,
            sample_rate=knobs.sample_rate,
            device=env.device,
            seed=env.cfg.seed,
        )
    except ValueError as problem:
        raise ConfigError(f"recipe: {problem}") from problem


def glyphnet(*, image_shape: ImageShape, embedding: int, width: int = 16, dropout: float = 0.0) -> nn.Module:
    """Three convolutions and an embedding layer, for small gray images. Without BatchNorm.

    Args:
        width: channels of the first layer, doubled in each further one. Multiples of 8 suit Tensor Cores.
        dropout: probability, before the last layer.
    """
    check_count("width", width)
    check_probability("dropout", dropout)
    channels, height, columns = image_shape
    cells = math.ceil(height / 8) * math.ceil(columns / 8)
    net = nn.Sequential()
    for inputs, outputs in ((channels, width), (width, 2 * width), (2 * width, 4 * width)):
        net.append(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1))
        net.append(nn.PReLU(outputs))
    net.append(nn.Flatten())
    net.append(nn.Dropout(dropout))
    # An island, as the features enter cosines: d(angle) = -d(cos) / sin, without bound near an angle of 0.
    net.append(keep_fp32(nn.Linear(4 * width * cells, embedding)))
    return net


class _IResNet(nn.Module):
    """A ResNet with a first convolution of stride 1, pre-normalised blocks and PReLU (arXiv:1801.07698, 2004.04989).

    Its weights have the names of insightface's arcface_torch, so that its published files load.
    """

    def __init__(self, image_shape: ImageShape, embedding: int, blocks: Sequence[int], dropout: float) -> None:
        super().__init__()
        channels, height, columns = image_shape
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.prelu = nn.PReLU(64)
        self.layer1 = _stage(64, 64, blocks[0])
        self.layer2 = _stage(64, 128, blocks[1])
        self.layer3 = _stage(128, 256, blocks[2])
        self.layer4 = _stage(256, 512, blocks[3])
        self.bn2 = nn.BatchNorm2d(512)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(512 * math.ceil(height / 16) * math.ceil(columns / 16), embedding)
        self.features = nn.BatchNorm1d(embedding)
        self.features.weight.requires_grad_(False)  # the head's normalisation would cancel a gain
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.prelu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.dropout(torch.flatten(self.bn2(x), 1))
        return self.features(self.fc(x))


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.prelu = nn.PReLU(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.prelu(self.bn2(self.conv1(self.bn1(x))))
        y = self.bn3(self.conv2(y))
        return y + (x if self.downsample is None else self.downsample(x))


def _stage(inputs: int, outputs: int, num_blocks: int) -> nn.Sequential:
    return nn.Sequential(_Block(inputs, outputs, 2), *(_Block(outputs, outputs, 1) for _ in range(num_blocks - 1)))


def _iresnet(*blocks: int) -> Builder:
    """The builder of a network with so many blocks in each stage, of 64, 128, 256 and 512 channels."""

    def build(*, image_shape: ImageShape, embedding: int, dropout: float = 0.0) -> nn.Module:
        check_probability("dropout", dropout)
        # The last matmul sums 25,088 terms, and its gradient comes first in the backward pass.
        return keep_fp32(_IResNet(image_shape, embedding, blocks, dropout), ["fc", "features"])

    return build


# All map images [B, C, H, W] to float32 features [B, embedding], not normalised: the last layer is an fp32 island.
MODELS = Family(
    what="a face recognition backbone",
    builders={
        "glyphnet": glyphnet,
        "iresnet18": _iresnet(2, 2, 2, 2),
        "iresnet34": _iresnet(3, 4, 6, 3),
        "iresnet50": _iresnet(3, 4, 14, 3),
        "iresnet100": _iresnet(3, 13, 30, 3),
    },
    example={"image_shape": (3, 112, 112), "embedding": 512},
)
