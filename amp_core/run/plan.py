"""The plan of a run: what a log begins with and a dry run prints."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from amp_core.checkpoints.reading import find_checkpoint
from amp_core.config.schema import scale_cap
from amp_core.layouts.memory_model import traffic, weights_of
from amp_core.lowp.islands import island_names
from amp_core.run.layers import show_layers
from amp_core.run.log import Log
from amp_core.run.perf import planned_memory
from amp_core.run.resume import named_place, repeats
from amp_core.run.terminal import say
from amp_core.run.throughput import flops_per_token, peak_of
from amp_core.step.window import MicroBatch
from amp_core.tensors import unwrap

if TYPE_CHECKING:
    from amp_core.run.loop import Loop

logger = logging.getLogger("amp_recipes")


def open_log(loop: Loop, notes: list[str], warnings: list[str]) -> Log:
    """Open the log of a run, and write its first lines."""
    env, cfg = loop.env, loop.cfg
    assert env.run_dir is not None
    if loop.step and (before := env.folder.before.get("eval_at_start")):
        env.summary["eval_at_start"] = before
    log = Log(
        env.run_dir,
        cfg.log,
        rank=env.rank,
        run_config=cfg.to_dict(),
        name=env.run_dir.name,
        start_step=loop.step,
        total_steps=loop.num_steps,
        shows_scale=cfg.amp.scaling,
    )
    if env.is_main:
        for note in notes:
            logger.info("%s", note)
        for warning in warnings:
            logger.warning("%s", warning)
        logger.info("%s", plan(loop))
        logger.info("run folder: %s", env.run_dir)
    return log


def dry_run(loop: Loop, count: Callable[[Any], Tensor] | None) -> Iterator[list[MicroBatch]]:
    """Print the plan, and have the recipe compute a small window for the table of layers."""
    if loop.env.is_main:
        if (place := named_place(loop.cfg)) is not None:
            find_checkpoint(Path(place))
        say("\n".join([*loop.env.job.notes, *repeats(loop), plan(loop), plan_in_detail(loop)]))
    yield from show_layers(loop, count)


def plan(loop: Loop) -> str:
    """What runs, in a few lines of text."""
    cfg, env, data = loop.cfg, loop.env, loop.data
    params = [p for net in loop.nets for p in unwrap(net).parameters()]
    packed = (getattr(p, "quant_state", None) or p for p in params)  # two of 4 bits are in a byte
    memory = planned_memory(loop)
    more = memory.most - memory.total
    within = f", up to {more / 2**20:.1f} MiB more within a step" if more else ""
    optimizer = loop.optimizers[0]
    fused = " fused" if all(group.get("fused") for group in optimizer.param_groups) else ""
    amp = f"amp={cfg.amp.name}"
    if cfg.amp.scaling:
        smallest, largest = loop.amp.limits
        cap = scale_cap(cfg.amp, cfg.batch_size)
        amp += f" (numbers from {smallest:.1e} to {largest:.1e}, scale at most {cap:.10g})"
    smoothing = cfg.recipe.get("label_smoothing", 0)
    remark = [f"  the training loss includes label smoothing of {smoothing:g}, the evaluation loss does not"]
    passes = loop.num_steps * loop.feed.samples_per_step / len(data.train)
    return "\n".join(
        [
            f"{cfg.recipe['name']}: {cfg.model.name} ({sum(math.prod(each.shape) for each in packed):,} parameters) on "
            f"{cfg.data.name} ({len(data.train):,} training samples)",
            f"  {amp} on {env.world_size} x {env.device.type}, "
            f"{type(optimizer).__name__}{fused}, "
            f"schedule {cfg.schedule.name} over {loop.schedule.num_steps} steps",
            f"  {loop.num_steps} steps of {loop.feed.samples_per_step} samples ({cfg.batch_size} x accumulation "
            f"{loop.feed.accumulation} x {env.world_size} rank(s)), {passes:.3g} epochs",
            f"  {memory.total / 2**20:.1f} MiB per rank for weights, gradients, moments"
            f"{' and averages' if loop.ema else ''}{within}; activations come on top",
            *(remark if smoothing else []),
        ]
    )


def plan_in_detail(loop: Loop) -> str:
    """What a dry run prints in addition: where memory goes, what is sent, when it evaluates and saves."""
    cfg, env, mib = loop.cfg, loop.env, 2**20
    memory = planned_memory(loop)
    kinds = {name: size for name, size in vars(memory).items() if size}
    spelled = ", ".join(f"{name} {size / mib:.1f}" for name, size in kinds.items())
    lines = [f"  MiB per rank: {spelled}; with the activations of {cfg.batch_size} samples on top"]
    if env.world_size > 1:
        sent = traffic(
            [weight for net in loop.nets for weight in weights_of(net, cfg.amp)],
            cfg.amp,
            env.world_size,
            accumulation=loop.feed.accumulation,
            compress=cfg.layout.compress is not None,
            bucket_mb=cfg.layout.bucket_mb or 25.0,
        )
        lines.append(f"  each rank sends {sum(one.sent for one in sent) / mib:.1f} MiB per step")
    steps = loop.num_steps
    lines += [
        f"  evaluates {len(env.eval_part(loop.data.eval)):,} samples {_times(cfg.eval_every, steps)}; best checkpoint "
        f"by {cfg.recipe['best']} ({cfg.recipe['best_is']})",
        f"  saves about {(memory.weights + memory.moments + memory.averages) / mib:.1f} MiB a rank "
        f"{_times(cfg.save_every, steps)}, keeps {cfg.checkpoint.keep} and the best; "
        f"metrics {_times(cfg.log_every, steps)}",
    ]
    lines += _roof(loop)
    inside = [name or "the whole network" for net in loop.nets for name in island_names(unwrap(net))]
    if inside:
        lines.append(f"  fp32 islands: {', '.join(inside[:8])}{', ...' if len(inside) > 8 else ''}")
    return "\n".join([*lines, "checked: settings, names, data, device, network, optimizer; nothing was written"])


def _roof(loop: Loop) -> list[str]:
    """An upper bound on tokens per second, from the model's FLOPs and GPUs' stated peaks; nothing for other recipes."""
    length = loop.data.facts.get("length")
    found = [flops_per_token(unwrap(net), length) for net in loop.nets] if length else []
    if len(found) != 1 or found[0] is None:
        return []
    rates = {name: peak_of(name, loop.cfg.amp) for name in ("NVIDIA A100", "NVIDIA H100 80GB HBM3")}
    said = ", ".join(f"{peak / found[0]:,.0f} on an {name}" for name, peak in rates.items() if peak)
    return [f"  {found[0] / 1e9:.3g} GFLOP per token; tokens/s at most, at the stated peak: {said}"] if said else []


def _times(every: int, steps: int) -> str:
    """A cadence in words; the last step is always due."""
    return f"every {every} steps and at the end" if every < steps else "at the end"
