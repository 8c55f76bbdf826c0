"""The plan of a run and its memory as text, for the log and for a dry run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from amp_core.config.schema import scale_cap
from amp_core.layouts.memory_model import Memory, memory_of, saved_for_backward, traffic, weights_of
from amp_core.lowp.islands import island_names
from amp_core.run.state import Run
from amp_core.tensors import unwrap


def plan(run: Run) -> str:
    """What runs, in a few lines."""
    cfg, env, data = run.cfg, run.env, run.data
    params = [p for net in run.nets for p in unwrap(net).parameters()]
    memory = _memory(run)
    more = memory.most - memory.total
    within = f", up to {more / 2**20:.1f} MiB more within a step" if more else ""
    optimizer = run.optimizers[0]
    amp = f"amp={cfg.amp.name}"
    if cfg.amp.scaling:
        smallest, largest = run.amp.limits
        cap = scale_cap(cfg.amp, cfg.batch_size)
        amp += f" (numbers from {smallest:.1e} to {largest:.1e}, scale at most {cap:g})"
    smoothing = cfg.recipe.get("label_smoothing", 0)
    remark = [f"  the training loss includes label smoothing of {smoothing:g}, the evaluation loss does not"]
    passes = run.num_steps * run.feed.samples_per_step / len(data.train)
    return "\n".join(
        [
            f"{cfg.recipe['name']}: {cfg.model.name} ({sum(p.numel() for p in params):,} parameters) on "
            f"{cfg.data.name} ({len(data.train):,} training samples)",
            f"  {amp} on {env.world_size} x {env.device.type}, "
            f"{type(optimizer).__name__}{' fused' if _is_fused(optimizer) else ''}, "
            f"schedule {cfg.schedule.name} over {run.schedule.num_steps} steps",
            f"  {run.num_steps} steps of {run.feed.samples_per_step} samples ({cfg.batch_size} x accumulation "
            f"{run.feed.accumulation} x {env.world_size} rank(s)), {passes:.3g} epochs",
            f"  {memory.total / 2**20:.1f} MiB per rank for weights, gradients, moments"
            f"{' and averages' if run.ema else ''}{within}; activations come on top",
            *(remark if smoothing else []),
        ]
    )


def plan_in_detail(run: Run) -> str:
    """What a dry run tells besides: where memory goes, what is sent, when it evaluates and saves."""
    cfg, env, mib = run.cfg, run.env, 2**20
    memory = memory_of(run.nets, run.optimizers, run.ema, cfg.amp, accumulation=run.feed.accumulation)
    kinds = {name: size for name, size in vars(memory).items() if size}
    spelled = ", ".join(f"{name} {size / mib:.1f}" for name, size in kinds.items())
    lines = [f"  MiB per rank: {spelled}; with the activations of {cfg.batch_size} samples on top"]
    if env.world_size > 1:
        sent = traffic(
            [weight for net in run.nets for weight in weights_of(net, cfg.amp)],
            cfg.amp,
            env.world_size,
            accumulation=run.feed.accumulation,
            compress=cfg.layout.compress is not None,
            bucket_mb=cfg.layout.bucket_mb or 25.0,
        )
        lines.append(f"  each rank sends {sum(one.sent for one in sent) / mib:.1f} MiB per step")
    steps = run.num_steps
    lines += [
        f"  evaluates {len(run.data.eval):,} samples {_times(cfg.eval_every, steps)}; best checkpoint by "
        f"{cfg.recipe['best']} ({cfg.recipe['best_is']})",
        f"  saves about {(memory.weights + memory.moments + memory.averages) / mib:.1f} MiB a rank "
        f"{_times(cfg.save_every, steps)}, keeps {cfg.checkpoint.keep} and the best; "
        f"metrics {_times(cfg.log_every, steps)}",
    ]
    inside = [name or "the whole network" for net in run.nets for name in island_names(unwrap(net))]
    if inside:
        lines.append(f"  fp32 islands: {', '.join(inside[:8])}{', ...' if len(inside) > 8 else ''}")
    return "\n".join([*lines, "checked: settings, names, data, device, network, optimizer; nothing was written"])


@contextlib.contextmanager
def measuring(run: Run) -> Iterator[None]:
    """Around the first window: counts what its backward passes need, where one thread computes it as written."""
    if run.memory is not None:
        with contextlib.nullcontext() if run.recast is None else run.recast.hooks():
            yield
        return
    run.memory = vars(_memory(run)) | {"activations": None}
    if run.cfg.perf.name != "default" or run.cfg.layout.name not in ("single", "ddp"):
        yield
        return
    tensors = (t for net in run.nets for t in (*net.parameters(), *net.buffers()))
    with saved_for_backward(tensors, run.recast) as saved:
        yield
    run.memory["activations"] = saved.activations


def _memory(run: Run) -> Memory:
    memory = memory_of(run.nets, run.optimizers, run.ema, run.cfg.amp, accumulation=run.feed.accumulation)
    return memory if run.recast is None else replace(memory, copies=0)


def _times(every: int, steps: int) -> str:
    """When a cadence comes, in words: it always comes at the end."""
    return f"every {every} steps and at the end" if every < steps else "at the end"


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)
