"""Image classification: the whole mixed-precision step in one loop, for every mode.

The lesson: a step is unscale, check, clip, step, update, in that order, for fp32, bf16 and fp16 alike; micro-batches
are weighted so that accumulation changes nothing; evaluation runs under the same autocast as training; EMA weights,
schedule and BatchNorm statistics move only with taken steps.

    python train.py                                            a small CNN on 4,000 MNIST digits, bf16
    python train.py amp=fp16 accumulation=4 batch_size=16 clip=norm ema.decay=0.99
    python train.py model=resnet18 data=cifar10 data.path=/data/cifar optimizer=sgd
    python train.py model=resnet50 data=imagenet data.path=/data/imagenet batch_size=256 perf.channels_last=true

Expected: accuracy 0.982 ± 0.002 on 1,000 held-out digits in fp32, bf16 and fp16 (five seeds each), in 12 to 15 s
on two CPU cores with bf16 units; fp16 takes 29 s of one core with AVX512-FP16 (its convolutions sum in fp32).

Sources: Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740); torch's notes on automatic mixed precision
(docs.pytorch.org/docs/stable/notes/amp_examples.html).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, sync_grads
from amp_core.config.schema import Config, RecipeConfig, expected
from amp_core.models.images import CLASSIFIERS, top_class
from amp_core.run.confusion import Confusion
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.tensors import widest

DATA = "images"
SOFT_TARGETS = True  # of data.mixup and data.cutmix
MODELS = CLASSIFIERS


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    label_smoothing: float
    """Label smoothing, from 0 to below 1."""


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    return expected(knobs, label_smoothing=(0 <= knobs.label_smoothing < 1, "at least 0 and below 1"))


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: loss and accuracy, with the prefix `ema_` for EMA weights."""
    knobs = Knobs(**cfg.recipe)
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
            images, labels = micro.batch
            # Ranks exchange gradients once per window, in the backward pass of its last micro-batch.
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    loss = F.cross_entropy(model(images), labels, label_smoothing=knobs.label_smoothing)
                # Outside of autocast: a backward pass has the dtypes of its forward pass. The weights of a window sum
                # to 1 over all ranks, so that its gradients are those of one big batch, also in a ragged tail.
                amp.backward(loss, micro.weight)
            total += loss.detach() * micro.weight
        # Unscales before it clips, or the threshold would depend on the loss scale; checks before it steps, so that no
        # infinity reaches a weight. The host does not learn whether the step was taken: `report` stays on the device.
        report = amp.step(optimizer, clip)
        amp.update()  # the scale, once the last optimizer has used it
        amp.zero_grad(optimizer)
        # A skipped step moves neither the learning rate nor the average.
        schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, total

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        # loss, correct, samples: summed on the device, read back once.
        totals = torch.zeros(3, dtype=widest(env.device), device=env.device)
        confusion = Confusion(env, data.facts["num_classes"], loop.classes)
        for images, labels in env.eval_batches(data.eval):
            with amp.autocast():
                logits = net(images)
                loss = F.cross_entropy(logits, labels, reduction="sum")
            confusion.add(labels, logits)
            totals += torch.stack([loss, (logits.argmax(1) == labels).sum(), labels.new_tensor(len(labels))])
        confusion.write()
        loss, correct, num_samples = env.sum_over_ranks(totals).tolist()
        return {"loss": loss / num_samples, "accuracy": correct / num_samples}

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema}
    loop = Loop(env, data, amp=amp, evaluate=evaluate, predict=lambda net, batch: top_class(net(batch[0])), **parts)
    for window in loop.windows():
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    return loop.eval
