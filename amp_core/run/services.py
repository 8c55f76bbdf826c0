"""What is around the steps of a loop: its plan and log, a dry run, a CUDA graph, fault injection, measured memory."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, profiler

from amp_core.config.schema import scale_cap
from amp_core.layouts.memory_model import Memory, memory_of, saved_for_backward, traffic, weights_of
from amp_core.lowp.islands import island_names
from amp_core.memory.recast import Recast
from amp_core.run.environment import CapturedStep
from amp_core.run.inject import fault as inject_fault
from amp_core.run.layers import show_layers
from amp_core.run.lines import wrapped
from amp_core.run.log import Log, say
from amp_core.run.loop import Loop
from amp_core.run.resume import open_checkpoint, progress_of, repeats, resume
from amp_core.step.window import MicroBatch
from amp_core.tensors import unwrap

__all__ = ["open_checkpoint", "progress_of", "resume", "say"]

logger = logging.getLogger("amp_recipes")


def open_log(loop: Loop, notes: list[str], warnings: list[str]) -> Log:
    """The log of a run, with what it begins with."""
    env, cfg = loop.env, loop.cfg
    assert env.run_dir is not None
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
    if cfg.perf.compile is not None:
        env.placement.compiler.clock = functools.partial(log.clock, "compiling")
    if env.is_main:
        for note in notes:
            logger.info("%s", note)
        for warning in warnings:
            logger.warning("%s", warning)
        logger.info("%s", plan(loop), extra={"is_plan": True})
        logger.info("run folder: %s", env.run_dir)
    return log


def predict(loop: Loop, notes: list[str]) -> None:
    """All of task=predict."""
    from amp_core.run import predict  # other runs do not predict

    predict.predict(loop, notes)


def dry_run(loop: Loop, count: Callable[[Any], Tensor] | None) -> Iterator[list[MicroBatch]]:
    """Print the plan, and have the recipe compute a small window for the table of layers."""
    if loop.env.is_main:
        lines = [*loop.env.job.notes, *repeats(loop), plan(loop), plan_in_detail(loop)]
        say(wrapped("\n".join(lines), sys.stdout))
    yield from show_layers(loop, count)


def captured_step(loop: Loop) -> CapturedStep | None:
    """The step as a CUDA graph, for perf.graph; None where it cannot be one."""
    env, cfg = loop.env, loop.cfg
    if not cfg.perf.graph:
        return None
    from amp_core.memory.graph import CudaGraphStep, why_not_capturable

    # Also those whose state is saved as a part of something else.
    optimizers = list(dict.fromkeys([*loop.optimizers, *(s.optimizer for s in loop.schedules.values())]))
    problem = why_not_capturable(env.devices, cfg.layout, env.world_size, optimizers)
    if problem is not None:
        env.job.notes.append(f"perf.graph=true: running eagerly instead: {problem}")
        return None
    graph = CudaGraphStep(
        loop.nets, loop.optimizers, list(loop.schedules.values()), loop.amp, lambda: env.seed_step(loop.step + 1)
    )
    env.closing.callback(graph.forget)  # NCCL waits at its end for graphs that use its communicator
    return graph


def fault(loop: Loop, window: list[MicroBatch]) -> contextlib.AbstractContextManager[bool]:
    """Around the window of `debug.inject`."""
    assert loop.cfg.debug.inject is not None
    return inject_fault(loop.cfg.debug.inject, loop.model, loop.amp, window, rank=loop.env.rank)


_UNPROFILED = 5
"""Steps before perf.profile records: allocations, choices of kernels and compilation come first."""


@contextlib.contextmanager
def profiling(loop: Loop) -> Iterator[Callable[[], Any]]:
    """Around the steps of a run, with what is to be called after each: records those of perf.profile on rank 0."""
    env, num_steps = loop.env, loop.cfg.perf.profile
    if not num_steps or not env.is_main:
        yield lambda: None
        return
    first = loop.step + _UNPROFILED + 1
    on_cuda = env.device.type == "cuda"

    def write(recorded: profiler.profile) -> None:
        if loop.step < first:
            return
        began = time.monotonic()
        assert env.run_dir is not None
        path = env.run_dir / "profile" / f"steps_{first}_to_{loop.step}"
        try:
            path.parent.mkdir(exist_ok=True)
            recorded.export_chrome_trace(f"{path}.json")
            table = recorded.key_averages().table(f"self_{'cuda' if on_cuda else 'cpu'}_time_total", row_limit=50)
            path.with_suffix(".txt").write_text(table)
            logger.info("perf.profile: %s.json and .txt", path)
        except (OSError, RuntimeError) as problem:  # the run is worth more than its profile
            logger.warning("perf.profile: %s cannot be written: %s", path, problem)
        loop.clock.pause(time.monotonic() - began)

    activities = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if on_cuda else [])]
    schedule = profiler.schedule(wait=_UNPROFILED - 1, warmup=1, active=num_steps, repeat=1)
    with profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write, record_shapes=True, acc_events=True
    ) as recorder:
        yield recorder.step
    if loop.step < first:
        logger.warning("perf.profile=%d: nothing was recorded: the run ended before step %d", num_steps, first)


def plan(loop: Loop) -> str:
    """What runs, in a few lines of text."""
    cfg, env, data = loop.cfg, loop.env, loop.data
    params = [p for net in loop.nets for p in unwrap(net).parameters()]
    memory = _memory(loop)
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
            f"{cfg.recipe['name']}: {cfg.model.name} ({sum(map(_numel, params)):,} parameters) on "
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
    """What a dry run tells besides: where memory goes, what is sent, when it evaluates and saves."""
    cfg, env, mib = loop.cfg, loop.env, 2**20
    memory = _memory(loop)
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
        f"  evaluates {len(loop.data.eval):,} samples {_times(cfg.eval_every, steps)}; best checkpoint by "
        f"{cfg.recipe['best']} ({cfg.recipe['best_is']})",
        f"  saves about {(memory.weights + memory.moments + memory.averages) / mib:.1f} MiB a rank "
        f"{_times(cfg.save_every, steps)}, keeps {cfg.checkpoint.keep} and the best; "
        f"metrics {_times(cfg.log_every, steps)}",
    ]
    inside = [name or "the whole network" for net in loop.nets for name in island_names(unwrap(net))]
    if inside:
        lines.append(f"  fp32 islands: {', '.join(inside[:8])}{', ...' if len(inside) > 8 else ''}")
    return "\n".join([*lines, "checked: settings, names, data, device, network, optimizer; nothing was written"])


def saved_tensors(loop: Loop) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What is to be entered around each window: recasts weights for backward passes, and measures the first window."""
    params = (p for net in loop.nets for p in net.parameters())
    return functools.partial(_around_window, loop, Recast(params) if loop.cfg.perf.recast_weights else None)


@contextlib.contextmanager
def _around_window(loop: Loop, recast: Recast | None) -> Iterator[None]:
    if loop.memory is not None:
        with contextlib.nullcontext() if recast is None else recast.hooks():
            yield
        return
    # What the first window needs for its backward passes, where one thread computes it as written.
    loop.memory = vars(_memory(loop)) | {"activations": None}
    if loop.cfg.perf.name != "default" or loop.cfg.layout.name not in ("single", "ddp"):
        yield
        return
    tensors = (t for net in loop.nets for t in (*net.parameters(), *net.buffers()))
    with saved_for_backward(tensors, recast) as saved:
        yield
    loop.memory["activations"] = saved.activations


def _numel(param: Tensor) -> int:
    """Numbers of a weight, also of one in 4 bits, whose tensor holds two in each element."""
    packed = getattr(param, "quant_state", None)  # of bitsandbytes
    return param.numel() if packed is None else math.prod(packed.shape)


def _memory(loop: Loop) -> Memory:
    memory = memory_of(loop.nets, loop.optimizers, loop.ema, loop.cfg.amp, accumulation=loop.feed.accumulation)
    return replace(memory, copies=0) if loop.cfg.perf.recast_weights else memory


def _times(every: int, steps: int) -> str:
    """When a cadence comes, in words: it always comes at the end."""
    return f"every {every} steps and at the end" if every < steps else "at the end"
