"""What `perf` puts around the steps of a run: a CUDA graph, a profile, weights cast again; and its measured memory."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import profiler

from amp_core.layouts.memory_model import Memory, memory_of, saved_for_backward
from amp_core.memory.recast import Recast
from amp_core.step.observer import Observer

if TYPE_CHECKING:
    from amp_core.memory.graph import CudaGraphStep
    from amp_core.run.loop import Loop

logger = logging.getLogger("amp_recipes")


def captured_step(loop: Loop) -> CudaGraphStep | None:
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


def observers(loop: Loop) -> list[Observer]:
    """The observers of a run besides its doctor; the last is innermost."""
    num_steps = loop.cfg.perf.profile if loop.env.is_main else None
    return [*([Profile(loop, num_steps)] if num_steps else []), SavedTensors(loop)]


class Profile(Observer):
    """Records the steps of perf.profile."""

    WAIT = 5
    """Steps before it records: allocations, choices of kernels and compilation come first."""

    def __init__(self, loop: Loop, num_steps: int) -> None:
        self._loop, self._num_steps = loop, num_steps
        self._first = self._step = 0

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        self._first, self._step = self._loop.step + self.WAIT + 1, self._loop.step
        on_cuda = self._loop.env.device.type == "cuda"
        with profiler.profile(
            activities=[profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if on_cuda else [])],
            schedule=profiler.schedule(wait=self.WAIT - 1, warmup=1, active=self._num_steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            acc_events=True,
        ) as self._recorder:
            yield
        if self._step < self._first:
            found = "perf.profile=%d: nothing was recorded: the run ended before step %d"
            logger.warning(found, self._num_steps, self._first)

    @contextlib.contextmanager
    def around_window(self, step: int) -> Iterator[None]:
        yield
        self._step = step
        self._recorder.step()

    def _write(self, recorded: profiler.profile) -> None:
        if self._step < self._first:
            return
        began, run_dir = time.monotonic(), self._loop.env.run_dir
        assert run_dir is not None
        path = run_dir / "profile" / f"steps_{self._first}_to_{self._step}"
        try:
            path.parent.mkdir(exist_ok=True)
            recorded.export_chrome_trace(f"{path}.json")
            by = f"self_{'cuda' if self._loop.env.device.type == 'cuda' else 'cpu'}_time_total"
            path.with_suffix(".txt").write_text(recorded.key_averages().table(by, row_limit=50))
            logger.info("perf.profile: %s.json and .txt", path)
        except (OSError, RuntimeError) as problem:  # the run is worth more than its profile
            logger.warning("perf.profile: %s cannot be written: %s", path, problem)
        self._loop.clock.exclude(time.monotonic() - began)


class SavedTensors(Observer):
    """Measures what the first window saves for backward passes; in all of them casts weights again, if asked to."""

    def __init__(self, loop: Loop) -> None:
        self._loop, perf = loop, loop.cfg.perf
        self._recast = Recast(p for net in loop.nets for p in net.parameters()) if perf.recast_weights else None

    def around_window(self, step: int) -> contextlib.AbstractContextManager[None]:
        if self._loop.memory is None:
            return self._first_window()
        return contextlib.nullcontext() if self._recast is None else self._recast.hooks()

    @contextlib.contextmanager
    def _first_window(self) -> Iterator[None]:
        loop = self._loop
        loop.memory = vars(planned_memory(loop)) | {"activations": None}
        # Only eager code in one thread can be measured.
        if loop.cfg.perf.name != "default" or loop.cfg.layout.name not in ("single", "ddp"):
            yield
        else:
            tensors = (t for net in loop.nets for t in (*net.parameters(), *net.buffers()))
            with saved_for_backward(tensors, self._recast) as saved:
                yield
            loop.memory["activations"] = saved.activations
        if self._recast is None:
            loop.observers.remove(self)


def planned_memory(loop: Loop) -> Memory:
    """What a rank needs besides activations, by the memory model."""
    memory = memory_of(loop.nets, loop.optimizers, loop.ema, loop.cfg.amp, accumulation=loop.feed.accumulation)
    return replace(memory, copies=0) if loop.cfg.perf.recast_weights else memory
