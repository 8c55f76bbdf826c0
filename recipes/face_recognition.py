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
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from amp_core.config.errors import ConfigError
from amp_core.config.schema import Config
from amp_core.data import build_data
from amp_core.data.loading import eval_loader, to_device
from amp_core.heads.partial_fc import PartialFC
from amp_core.heads.verification import verify
from amp_core.models import build_model
from amp_core.models.iresnet import EMBEDDERS
from amp_core.run.environment import Environment
from amp_core.run.loop import Loop
from amp_core.step.amp import Amp
from amp_core.step.clip import Clip
from amp_core.step.ema import build_ema
from amp_core.step.optimizers import build_optimizer
from amp_core.step.report import StepReport
from amp_core.step.schedule import build_schedule
from amp_core.step.window import MicroBatch, sync_grads

DATA = "identities"
MODELS = EMBEDDERS


@dataclass(frozen=True)
class Knobs:
    """This recipe's own settings."""

    name: str
    length: str
    """Default length of a run: a number and steps, epochs or samples."""
    best: str
    """The metric that selects the best checkpoint."""
    best_is: str
    """max or min."""
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
        head.sample(*(micro.batch[1] for micro in window))
        for micro in window:
            images, labels = micro.batch
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    features = model(images)
                loss, x_grad = head(features.detach(), labels, micro.weight)
                amp.backward(features, gradient=x_grad)
            total += loss
        report = amp.step([optimizer, *of_head], clip, unscaled=of_head, sharded=of_head, unclipped=unclipped)
        amp.update()
        head.write_back()
        amp.zero_grad(optimizer, head_optimizer)
        schedule.advance(report)
        head_schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, total

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        # Each rank fills in its rows; the sum over ranks has all of them.
        embeddings = torch.zeros(len(data.eval), knobs.embedding, device=env.device)
        identities = torch.zeros(len(data.eval), dtype=torch.int64, device=env.device)
        batches = eval_loader(
            data.eval,
            batch_size=max(cfg.batch_size, 128),
            rank=env.rank,
            world_size=env.world_size,
            num_workers=cfg.data.num_workers,
            pin_memory=env.device.type == "cuda",
        )
        on_device = to_device(batches, env.device, channels_last=cfg.perf.channels_last)
        for rows, (images, labels) in zip(batches.rows, on_device, strict=True):
            with amp.autocast():
                embeddings[rows] = net(images).float()
            identities[rows] = labels
        return verify(env.sum_over_ranks(embeddings), env.sum_over_ranks(identities), scale=knobs.scale)

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
    problems = []
    if knobs.embedding < 1:
        problems.append(f"recipe.embedding={knobs.embedding}: expected at least 1")
    if not 0 < knobs.sample_rate <= 1:
        problems.append(f"recipe.sample_rate={knobs.sample_rate:g}: expected above 0 and at most 1")
    if not 0 <= knobs.margin < math.pi:
        problems.append(f"recipe.margin={knobs.margin:g}: expected at least 0 and below pi")
    if not 0 < knobs.scale < math.inf:
        problems.append(f"recipe.scale={knobs.scale:g}: expected a finite number above 0")
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
