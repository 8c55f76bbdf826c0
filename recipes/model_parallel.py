"""A network over several devices of one process, with autocast inside `forward`.

The lesson: autocast is thread-local. Code that runs parts of a network in threads (nn.DataParallel its replicas, a
pipeline its stages) must enter autocast in each thread; the safe place is the `forward` that the thread calls. A thread
without it silently computes in fp32, or fails where a 16-bit input meets an fp32 weight. nn.DataParallel passes on
whether autocast is enabled but not the dtype; `layout=data_parallel` fixes that.

    python train.py recipe=model_parallel                                   two stages, on a CPU both on it
    python train.py recipe=model_parallel layout.nproc_per_node=2           and DistributedDataParallel over 2 processes
    python train.py recipe=model_parallel recipe.chunks=4 recipe.pipeline=threads
    python train.py recipe=model_parallel model=resnet50 data=imagenet data.path=/data/imagenet layout.num_stages=4

Threads are bit-identical: `recipe.pipeline=off` with the same chunks gives the same weights. Another number of chunks
changes a network with BatchNorm, which normalises each chunk separately.

Expected: accuracy 0.975 ± 0.003 on 1,000 held-out digits (bf16, seeds 1 to 3), in 10 s on one CPU core.

Sources: "Working with Multiple GPUs" in torch's notes on automatic mixed precision
(docs.pytorch.org/docs/stable/notes/amp_examples.html); Huang et al., "GPipe" (arXiv:1811.06965).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, keep_fp32, sync_grads
from amp_core.config.errors import ConfigError
from amp_core.config.schema import Config, RecipeConfig, expected
from amp_core.layouts.stages import Stages
from amp_core.models.family import stands_for
from amp_core.models.images import CLASSIFIERS, top_class
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.tensors import widest

DATA = "images"
MODELS = CLASSIFIERS
LAYOUTS = ("model_parallel",)


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    chunks: int
    """Chunks of a micro-batch. Sequentially they save memory; with threads they keep stages busy."""
    pipeline: str
    """off: stages run sequentially. threads: each stage in its own thread, on different chunks."""
    label_smoothing: float
    """Label smoothing, from 0 to below 1."""


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    problems = expected(
        knobs,
        pipeline=(knobs.pipeline in ("off", "threads"), '"off" (in quotes in a file) or threads'),
        chunks=(knobs.chunks >= 1, "at least 1"),
        label_smoothing=(0 <= knobs.label_smoothing < 1, "at least 0 and below 1"),
    )
    if knobs.pipeline == "threads" and knobs.chunks == 1:
        problems.append("recipe.pipeline=threads: recipe.chunks=1 leaves nothing to overlap; use more, such as 4")
    return problems


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: loss and accuracy, with the prefix `ema_` for EMA weights."""
    knobs = Knobs(**cfg.recipe)
    data = build_data(cfg.data, seed=cfg.seed, channels=MODELS.in_channels(cfg.model.name))
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    model = env.wrap(build_stages(cfg, knobs, env.devices, amp, **data.facts), amp)
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model)
    clip = Clip.of(cfg.clip)

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        total = torch.zeros((), device=env.device)
        for micro in window:
            images, labels = micro.batch
            with sync_grads(model, when=micro.is_last):
                # Not under `amp.autocast()`, which holds for this thread only: every stage enters it itself.
                logits = model(images)
                # fp32 by hand: under autocast cross_entropy would see to it, and here it is off.
                loss = F.cross_entropy(logits.float(), labels, label_smoothing=knobs.label_smoothing)
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
        # loss, correct, samples: summed on the device, read back once.
        totals = torch.zeros(3, dtype=widest(env.device), device=env.device)
        for images, labels in env.eval_batches(data.eval):
            logits = net(images)
            loss = F.cross_entropy(logits.float(), labels, reduction="sum")
            totals += torch.stack([loss, (logits.argmax(1) == labels).sum(), labels.new_tensor(len(labels))])
        loss, correct, num_samples = env.sum_over_ranks(totals).tolist()
        return {"loss": loss / num_samples, "accuracy": correct / num_samples}

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema}
    loop = Loop(env, data, amp=amp, evaluate=evaluate, predict=lambda net, batch: top_class(net(batch[0])), **parts)
    for window in loop.windows():
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    return loop.eval


def build_stages(cfg: Config, knobs: Knobs, devices: list[torch.device], amp: Amp, **facts) -> Stages:
    """The network of the `model` group, split into one stage per device.

    Raises:
        ConfigError: it cannot be split.
    """
    net = build_model(cfg.model.name, MODELS, options=cfg.model.options, **facts)
    try:
        # Islands first: a container that is an island is not split.
        keep_fp32(net, cfg.amp.keep_fp32)
        threads = knobs.pipeline == "threads"
        # Cut by cost: the slowest stage sets the pace of the pipeline.
        stages = Stages(net, devices, amp, image_shape=facts["image_shape"], chunks=knobs.chunks, threads=threads)
    except ValueError as problem:
        raise ConfigError(f"model.name={cfg.model.name}: {problem}") from problem
    stands_for(net, stages)  # for task=export
    return stages
