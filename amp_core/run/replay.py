"""Recompute steps of a run, and snapshot and restore its state, for the doctor and tools."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_core.run.resume import set_progress
from amp_core.step.report import Rehearsal
from amp_core.step.window import MicroBatch

if TYPE_CHECKING:
    from amp_core.run.loop import Loop


def first_sample(loop: Loop, step: int) -> int:
    """The number of the first sample of a step."""
    return loop.samples - (loop.step - step + 1) * loop.feed.samples_per_step


def indices_of(loop: Loop, step: int, rank: int) -> list[list[int]]:
    """The data set's indices of the samples of a step, by micro-batch."""
    return loop.feed.indices_at(first_sample(loop, step), rank)


def window_of(loop: Loop, step: int) -> list[MicroBatch]:
    """The window of a step, loaded again. On every rank."""
    return loop.feed.window_at(first_sample(loop, step))


@contextlib.contextmanager
def replay(
    loop: Loop, step: int, *, as_trained: bool = False, ahead: int = 0, steps: bool = False
) -> Iterator[tuple[Rehearsal, list[MicroBatch]]]:
    """Around a computation of the window of `step` that leaves no trace: no step, no metrics. On every rank.

    To be used by what yields the window to the recipe. Eagerly, or compiled `as_trained`. The window that is `ahead`
    of it may be computed instead, and `steps` be taken, both within `trying`.
    """
    step += ahead
    eager = contextlib.nullcontext() if as_trained else loop.env.eagerly()
    window, here = window_of(loop, step), (loop.step, loop.samples)
    loop.step, loop.samples = step - 1, first_sample(loop, step)
    try:
        with loop.amp.rehearse(steps=steps) as rehearsal, eager, rerun_step(loop, window):
            yield rehearsal, window
    finally:
        loop.step, loop.samples = here


@contextlib.contextmanager
def trying(loop: Loop, step: int) -> Iterator[int]:
    """Around steps that are taken from `step` on and undone. Yields how many the run has."""
    present = snapshot(loop)
    try:
        yield loop.num_steps - step + 1
    finally:
        restore(loop, present)


@contextlib.contextmanager
def rerun_step(loop: Loop, window: list[MicroBatch] | None = None) -> Iterator[list[MicroBatch]]:
    """Context for computing the next step's window, loaded if not given: takes the step, without metrics."""
    window = window or window_of(loop, loop.step + 1)
    loop.is_replay = True
    try:
        with loop.step_of(window):
            yield window
    finally:
        loop.is_replay = False


def snapshot(loop: Loop) -> dict[str, Any]:
    """The whole state of the run, copied to host memory, for `restore`. Waits for the device."""
    return {"parts": loop.checkpoint.snapshot(), "progress": {"step": loop.step, "samples": loop.samples}}


def restore(loop: Loop, saved: dict[str, Any] | Path) -> None:
    """Restore a snapshot, or a checkpoint of this run."""
    if isinstance(saved, dict):
        loop.checkpoint.restore(saved["parts"])
        progress = saved["progress"]
    else:
        loaded = loop.checkpoint.load(saved)
        assert loaded is not None
        progress = loaded.progress
    set_progress(loop, progress)
    if loop.graph is not None:
        loop.graph.forget()
