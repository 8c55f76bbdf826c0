"""Checks of what outlasts a step, the loss scale and checkpoints, and of several processes."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_conformance.checks import BAD, SCALE, Failed, Seen, check, expect, follow, line, scale_of, see
from amp_conformance.networks import (
    Line,
    Rows,
    Two,
    apart,
    filled,
    halving,
    mean,
    mean_loss,
    numbers,
    one_for_each,
    sgd,
    with_momentum,
)
from amp_conformance.task import Batch, NotOffered, Task, Trainer, View, same, whole

KILLED = "exact; killed at 12 random points, one in each twelfth of the calls of functions that a save makes"

# --- loss scale -------------------------------------------------------------------------------------------------------


@check("loss scale", "The scale stays where gradients overflow: no step is ever taken.", "loss-scale")
def an_overflow_halves_the_scale_once(trainer: Trainer, draw: random.Random) -> None:
    seen = follow(
        trainer, line([numbers(draw), numbers(draw)], [filled(BAD), numbers(draw)], mode="fp16", accumulation=2)
    )
    expect("the loss scale before", scale_of(seen[0]), SCALE)
    expect("the loss scale after an overflow", scale_of(seen[1]), SCALE / 2)


@check("loss scale", "The scale grows too early and overflows again and again, or never grows.", "loss-scale")
def the_scale_grows_after_clean_windows_in_a_row(trainer: Trainer, draw: random.Random) -> None:
    good, bad = [numbers(draw)], [filled(BAD)]
    seen = follow(trainer, line(good, good, bad, good, good, good, mode="fp16", growth_interval=3))
    for window, right in enumerate((SCALE, SCALE, SCALE / 2, SCALE / 2, SCALE / 2, SCALE)):
        expect(f"the loss scale after window {window + 1}", scale_of(seen[window]), right)


@check("loss scale", "Without a bound the scale grows to infinity where gradients are small.", "loss-scale")
def the_scale_has_a_largest_value(trainer: Trainer, draw: random.Random) -> None:
    epoch = [filled(2.0**-12) for _ in range(6)]
    (seen,) = follow(trainer, line(epoch, mode="fp16", growth_interval=1, max_scale=4 * SCALE))
    expect("the loss scale after 6 clean windows", scale_of(seen), 4 * SCALE)


@check("loss scale", "The scale silently reaches 0: nothing is learned from then on.", "loss-scale")
def the_scale_has_a_smallest_value_or_an_error(trainer: Trainer, draw: random.Random) -> None:
    try:
        (seen,) = follow(trainer, line([filled(BAD) for _ in range(24)], mode="fp16"))
    except NotOffered:
        raise
    except Exception:
        return  # reported
    if not scale_of(seen) >= 1:
        raise Failed(f"after 24 overflows the loss scale is {scale_of(seen):.3g} and nothing was raised")


def _two(epochs: Sequence[Sequence[Batch]], **settings: object) -> Task:
    return Task(Two, mean_loss, one_for_each, epochs, mode="fp16", init_scale=SCALE).but(**settings)


@check("loss scale", "An overflow in one network changes the scale before the other is unscaled.", "several-losses")
def one_scale_for_several_optimizers(trainer: Trainer, draw: random.Random) -> None:
    for column in (0, 1):
        x, y = numbers(draw, width=2)
        right = -float(x[:, 1 - column].double().mean())
        x[:, column] = BAD
        (seen,) = follow(trainer, _two([[(x, y)]]))  # a sum: the gradients of one know nothing of the other
        names = ("a.weight", "b.weight")
        expect(f"{names[column]} after its overflow", float(seen.state[names[column]]), 0.0)
        other = float(seen.state[names[1 - column]])
        if other not in (0.0, right):  # skipped together, or each by itself
            raise Failed(f"{names[1 - column]}, whose gradients are finite, is {other:.6g}, expected {right:.6g} or 0")
        expect("the loss scale", scale_of(seen), SCALE / 2)


@check("loss scale", "With two optimizers the scale grows twice as fast.", "several-losses")
def several_optimizers_grow_the_scale_once(trainer: Trainer, draw: random.Random) -> None:
    epochs = [[numbers(draw, width=2)] for _ in range(2)]
    seen = follow(trainer, _two(epochs, growth_interval=2))
    expect("the loss scale after 1 clean window", scale_of(seen[0]), SCALE)
    expect("the loss scale after 2 clean windows", scale_of(seen[1]), 2 * SCALE)


@check("loss scale", "Clipping one network unscales the other twice, or not at all.", "step")
def several_optimizers_are_clipped(trainer: Trainer, draw: random.Random) -> None:
    batch = numbers(draw, width=2)
    (seen,) = follow(trainer, _two([[batch]], clip=100.0))
    for column, name in enumerate(("a.weight", "b.weight")):
        expect(name, float(seen.state[name]), -float(batch[0][:, column].double().mean()))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _resumed(trainer: Trainer, task: Task, calls: int, **changes: object) -> tuple[list[Seen], list[Seen]]:
    """What the uninterrupted run and one that is resumed after some calls of `after` show for the rest."""
    seen: list[Seen] = []
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "saved")

        def after(view: View) -> None:
            seen.append(see(view))
            if len(seen) == calls:
                if view.save is None:
                    raise NotOffered("does not save")
                view.save(saved)

        trainer.run(task, after)
        done = 0 if task.every else calls
        return seen[calls:], follow(trainer, task.but(load=saved, done=done, **changes))


@check("checkpoints", "A preempted run ends with another network.", "resume")
def a_resumed_run_equals_one_without_a_stop(trainer: Trainer, draw: random.Random) -> None:
    epochs = [[numbers(draw), numbers(draw)] for _ in range(4)]
    task = line(*epochs, mode="fp16").but(optimizers=with_momentum)
    for right, seen in zip(*_resumed(trainer, task, 2), strict=True):
        if not same(right.state, seen.state):
            expect("the weight after resuming", seen.weight, right.weight)


@check("checkpoints", "After a stop within an epoch some samples are seen twice, or never.", "processes")
def a_run_resumed_within_an_epoch_equals_one_without_a_stop(trainer: Trainer, draw: random.Random) -> None:
    batches = apart(draw, *[2] * 12, largest=31)
    task = line(batches[:6], batches[6:], mode="fp16", accumulation=2, every=1).but(optimizers=with_momentum)
    right, seen = _resumed(trainer, task, 2)
    if len(right) != 4 or len(seen) != 4:
        raise Failed(f"{len(seen)} windows were made after resuming, expected 4")
    for number, (one, other) in enumerate(zip(right, seen, strict=True), 3):
        if not same(one.state, other.state):
            expect(f"the weight after window {number}", other.weight, one.weight)


@check("checkpoints", "A process killed while saving leaves no checkpoint.", "resume", KILLED)
def a_save_that_is_killed_leaves_the_last_checkpoint(trainer: Trainer, draw: random.Random) -> None:
    epochs = [[numbers(draw)] for _ in range(3)]
    task = line(*epochs, mode="fp16").but(optimizers=with_momentum)
    right = {_with_momentum(*(mean(*epochs[i]) for i in some)) for some in ((0, 1, 2), (0, 2))}
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # killed processes leave their temporary files
        calls = _save_twice(trainer, task, Path(folder, "whole"), None)
        for kill in range(12):
            at = int(calls * (kill + draw.random()) / 12)
            saved = Path(folder, f"killed{kill}")
            pid = os.fork()
            if pid == 0:
                _save_twice(trainer, task, saved, at)
                os._exit(0)
            os.waitpid(pid, 0)
            seen: list[Seen] = []
            try:
                trainer.run(task.but(load=saved, done=2), lambda view: seen.append(see(view)))  # noqa: B023
            except Exception as error:
                text = f"{type(error).__name__}: {error}"[:200]
                raise Failed(f"killed at call {at} of {calls} of a save, loading: {text}") from error
            if not seen or seen[-1].weight not in right:
                found = seen[-1].weight if seen else "no epoch"
                raise Failed(
                    f"killed at call {at} of {calls} of a save: the run ends with {found}, expected one of {right}"
                )


def _save_twice(trainer: Trainer, task: Task, path: Path, at: int | None) -> int:
    """Save after two epochs, to the same path. At a call of a function in the second save this process is killed.

    Returns:
        How many calls and returns, of Python and C, the second save takes.
    """
    saves = calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(view: View) -> None:
        nonlocal saves
        if view.save is None:
            raise NotOffered("does not save")
        saves += 1
        sys.setprofile(count if saves == 2 else None)
        try:
            view.save(path)
        finally:
            sys.setprofile(None)

    trainer.run(task.but(epochs=task.epochs[:2]), after)
    return calls


def _with_momentum(*gradients: float) -> float:
    """The weight after SGD(lr=1, momentum=0.5) from 0."""
    weight = velocity = 0.0
    for gradient in gradients:
        velocity = 0.5 * velocity + gradient
        weight -= velocity
    return weight


@check("checkpoints", "The learning rate starts over with each job.", "resume")
def the_schedule_is_saved(trainer: Trainer, draw: random.Random) -> None:
    epochs = [[numbers(draw), numbers(draw)] for _ in range(3)]
    for right, seen in zip(*_resumed(trainer, line(*epochs, mode="fp16", schedule=halving), 2), strict=True):
        expect("the learning rate after resuming", seen.rates[0], right.rates[0])
        expect("the weight after resuming", seen.weight, right.weight)


@check("checkpoints", "Each job starts with skipped steps until the loss scale is found again.", "resume")
def the_loss_scale_is_saved(trainer: Trainer, draw: random.Random) -> None:
    good, bad = [numbers(draw)], [filled(BAD)]
    task = line(bad, bad, good, good, good, mode="fp16", growth_interval=3)
    _, seen = _resumed(trainer, task, 4)
    expect("the loss scale, a clean window after resuming", scale_of(seen[0]), SCALE / 2)


@check("checkpoints", "The average starts over with each job.", "resume")
def the_average_is_saved(trainer: Trainer, draw: random.Random) -> None:
    epochs = [[numbers(draw), numbers(draw)] for _ in range(3)]
    for right, seen in zip(*_resumed(trainer, line(*epochs, mode="fp16", ema=0.5), 2), strict=True):
        assert right.ema is not None and seen.ema is not None
        if not same(right.ema, seen.ema):
            raise Failed("the average differs from that of the run without a stop")


@check("checkpoints", "A checkpoint cannot be loaded in another mode.", "resume")
def the_mode_may_change_between_save_and_load(trainer: Trainer, draw: random.Random) -> None:
    epochs = [[numbers(draw)] for _ in range(2)]
    right = -sum(mean(*epoch) for epoch in epochs)
    for before, after in (("fp16", "fp32"), ("fp32", "fp16"), ("fp16", "bf16"), ("bf16", "fp16")):
        try:
            _, seen = _resumed(trainer, line(*epochs, mode=before), 1, mode=after)
        except NotOffered:
            raise
        except Exception as error:
            raise Failed(f"saved in {before}, loaded in {after}: {type(error).__name__}: {error}") from error
        expect(f"the weight, saved in {before} and loaded in {after}", seen[0].weight, right)


# --- processes --------------------------------------------------------------------------------------------------------


def _on_all(value: float | None) -> list[float]:
    found: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return [math.nan if each is None else each for each in found]


def _gathered(trainer: Trainer, task: Task) -> list[dict[str, list[float]]]:
    """Of each epoch the weight and the loss scale on all ranks."""
    seen: list[dict[str, list[float]]] = []

    def after(view: View) -> None:
        weight = {name: value for name, value in view.state().items() if "own" not in name}
        numbers = {"weight": float(next(iter(weight.values())).flatten()[0]), "loss scale": view.scale}
        seen.append({name: _on_all(value) for name, value in numbers.items()})

    trainer.run(task, after)
    if len(seen) != len(task.epochs):
        raise Failed(f"{len(seen)} epochs were made, expected {len(task.epochs)}")
    return seen


def _rank() -> int:
    return int(os.environ["RANK"])  # also before there is a group


def _expect_on_ranks(what: str, seen: list[float], right: float, bound: float = 0.0) -> None:
    for rank, each in enumerate(seen):
        expect(f"{what} on rank {rank}", each, right, bound)


@check("processes", "Several processes train with other gradients than one with the whole batch.", "processes", ranks=2)
def processes_equal_a_larger_batch(trainer: Trainer, draw: random.Random) -> None:
    batches = [[numbers(draw) for _ in range(2)] for _ in range(6)]
    seen = _gathered(trainer, line([each[_rank()] for each in batches], mode="fp16", accumulation=4, ranks=2))
    flat = [[batch for pair in some for batch in pair] for some in (batches[:4], batches[4:])]
    _expect_on_ranks("the weight", seen[0]["weight"], -mean(*flat[0]) - mean(*flat[1]))


@check("processes", "After an overflow on one process the replicas differ for good.", "processes", ranks=2)
def processes_skip_together(trainer: Trainer, draw: random.Random) -> None:
    bad = draw.randrange(2)
    good = [numbers(draw) for _ in range(2)]
    first = filled(BAD) if _rank() == bad else numbers(draw)
    seen = _gathered(trainer, line([first], [good[_rank()]], mode="fp16", ranks=2))
    _expect_on_ranks("the weight after an overflow on one process", seen[0]["weight"], 0.0)
    _expect_on_ranks("the weight after the next window", seen[1]["weight"], -mean(*good))


class _WithOwn(nn.Module):
    """A shared line, and a weight that each process has for itself, such as a shard of a large last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = Line(), Line()
        self._ddp_params_and_buffers_to_ignore = ["own.weight"]

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x[:, :1]) + self.own(x[:, 1:])


@check(
    "processes", "After an overflow in one process's own weights loss scales and replicas differ.", "processes", ranks=2
)
def processes_agree_when_only_one_overflows(trainer: Trainer, draw: random.Random) -> None:
    (x, y), good = numbers(draw, width=2), numbers(draw, width=2)
    if _rank() == 0:
        x[:, 1] = BAD
    task = Task(_WithOwn, mean_loss, sgd, [[(x, y)], [good]], mode="fp16", init_scale=SCALE, ranks=2)
    for seen in _gathered(trainer, task):
        for what, numbers_seen in seen.items():
            if len(set(numbers_seen)) > 1 and not all(map(math.isnan, numbers_seen)):
                raise Failed(f"the {what} is {numbers_seen[0]:.6g} on rank 0 and {numbers_seen[1]:.6g} on rank 1")


@check("processes", "Shards: one process skips what the others step, or takes the infinity in.", "processes", ranks=2)
def shards_skip_together_when_one_overflows(trainer: Trainer, draw: random.Random) -> None:
    (x, y), column = numbers(draw, width=2), draw.randrange(2)
    x[:, column] = BAD if _rank() == draw.randrange(2) else 1.0  # in the row of one shard
    good = [numbers(draw, width=2) for _ in range(2)]
    task = Task(Rows, mean_loss, sgd, [[(x, y)], [good[_rank()]]], mode="fp16", init_scale=SCALE, ranks=2, sharded=True)
    seen: list[tuple[list[float], float | None]] = []
    trainer.run(task, lambda view: seen.append((whole(view.net.weight).flatten().tolist(), view.scale)))  # type: ignore[arg-type]
    right = [-float(torch.cat([x for x, _ in good])[:, i].double().mean()) for i in (0, 1)]
    for row in (0, 1):
        expect(f"weight {row} after an overflow in the shard of rank {column}", seen[0][0][row], 0.0)
        expect(f"weight {row} after the next window", seen[1][0][row], right[row])
    if seen[0][1] is not None:
        _expect_on_ranks("the loss scale after it", _on_all(seen[0][1]), SCALE / 2)


@check("processes", "A process with few samples or tokens counts as much as one with many.", "accumulation", ranks=2)
def processes_with_unequal_counts(trainer: Trainer, draw: random.Random) -> None:
    batches = apart(draw, 1, 3)
    seen = _gathered(trainer, line([batches[_rank()]], weighted=True, ranks=2))
    _expect_on_ranks("the weight", seen[0]["weight"], -mean(*batches), bound=7 * 4 * 2.0**-24)
