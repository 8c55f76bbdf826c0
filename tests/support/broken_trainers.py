"""Trainers that are wrong in one way each, and the checks that have to catch them: no more, no fewer.

Each is the right loop with one method replaced, as it is found in loops that people use.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_conformance import CHECKS
from amp_conformance.task import Batch, Task, Window
from amp_conformance.trainers.by_hand import ByHand as Right

BROKEN: dict[type[Right], set[str]] = {}
"""The trainers, and the names of the checks that catch them."""


def broken(name: str, *caught_by: str, **methods: Callable[..., Any]) -> None:
    """Register the right loop with these methods in the place of its own. What catches it, also catches it fused."""
    fused = CHECKS.keys() & {f"{name}, fused" for name in caught_by}
    BROKEN[type(name, (Right,), methods)] = {*caught_by, *fused}


def nothing(*_: Any) -> None:
    """What is forgotten."""


TAIL, RANKS, COUNTS = (
    "the last window of an epoch is shorter",
    "processes equal a larger batch",
    "processes with unequal counts",
)
BETWEEN, BITS = "running statistics survive between windows that nobody looks at", "a nan reaches no weight of 16 bits"
LOSS, SHARDS = "a loss that is not finite skips its window", "shards skip together when one overflows"
UNEQUAL, SKIPS_WINDOW = "micro batches of unequal size", "a bad micro batch skips its whole window"
CLIPPED, COUNTED, WAITS = "a whole window is clipped", "the average counts windows", "at most one wait per window"
broken("DropsTheTail", TAIL, RANKS, window=lambda t, w: Right.window(t, w) if len(w) == t.task.accumulation else None)
broken(
    *("DividesByAFixedNumber", TAIL, RANKS),
    weights=lambda t, w: [each * len(w) / t.task.accumulation for each in Right.weights(t, w)],
)
broken("TakesAMeanOfMeans", UNEQUAL, COUNTS, weights=lambda t, w: [1 / len(w) for _ in w])
broken(
    *(
        "SumsMicroBatches",
        "accumulation equals a larger batch",
        TAIL,
        UNEQUAL,
        COUNTED,
        CLIPPED,
        SKIPS_WINDOW,
        RANKS,
        COUNTS,
    ),
    weights=lambda t, w: [1.0 for _ in w],
)
broken(
    *("ForgetsThatGradientsAreAveraged", RANKS, COUNTS, "processes skip together", SHARDS),
    weights=lambda t, w: [each / t.task.ranks for each in Right.weights(t, w)],
)


def clips_before_it_unscales(t: Right, optimizer: Optimizer) -> bool:
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = t.norm(params)
    if not t.agree(math.isfinite(norm)):
        return False
    if t.task.clip is not None:
        t.clip(params, norm, t.task.clip)
    t.unscale(params)
    optimizer.step()
    return True


def clips_each_micro_batch(t: Right, batch: Batch, weight: float, *, is_last: bool) -> None:
    if t.task.ranks > 1:  # gradients live in the buckets of DistributedDataParallel
        Right.backward(t, batch, weight, is_last=is_last)
        return
    params = list(t.net.parameters())
    before = [None if p.grad is None else p.grad.clone() for p in params]
    for p in params:
        p.grad = None
    Right.backward(t, batch, weight, is_last=is_last)
    if t.task.clip is not None:
        norm = t.norm(params) / t.scale
        if norm > t.task.clip * weight:
            Right.clip(t, params, norm, t.task.clip * weight)
    for p, old in zip(params, before, strict=True):
        if old is not None:
            p.grad = old if p.grad is None else p.grad + old


def divides_by_the_norm(t: Right, params: Sequence[Tensor], norm: float, largest: float) -> None:
    for param in params:
        if param.grad is not None:
            param.grad = param.grad / torch.tensor(norm) * min(norm, largest)


broken(
    *(
        "ClipsScaledGradients",
        "gradients are unscaled before they are clipped",
        CLIPPED,
        "several optimizers are clipped",
    ),
    finish=clips_before_it_unscales,
)
broken(
    *("ClipsInFp16Only", "fp32 is clipped as well"),
    clip=lambda t, *about: Right.clip(t, *about) if t.task.mode == "fp16" else None,
)
broken("ClipsEachMicroBatch", CLIPPED, WAITS, backward=clips_each_micro_batch, clip=nothing)
broken("DividesByTheNorm", "zero gradients", clip=divides_by_the_norm)


SKIPPED = (
    "a skipped step leaves weights and momentum",
    "the schedule ignores skipped steps",
    "the average ignores skipped steps",
)
SKIPPED += (
    "running statistics survive a skipped step",
    "an overflow halves the scale once",
    "one scale for several optimizers",
)
SKIPPED += ("the scale grows after clean windows in a row", "the loss scale is saved")
NANS = [f"a nan {where} reaches no weight" for where in ("in fp32", "in bf16", "that is clipped")]


def moves_schedules(t: Right, taken: Sequence[bool]) -> None:
    for schedule, is_taken in zip(t.schedules, taken, strict=False):
        if not is_taken:
            schedule.step()
    Right.after_step(t, taken)


def moves_schedules_often(t: Right, taken: Sequence[bool]) -> None:
    Right.after_step(t, taken)
    for schedule in t.schedules * (t.task.accumulation - 1):
        schedule.step()


def averages(t: Right, when: bool) -> None:
    if t.ema is not None and t.task.ema is not None and when:
        t.average(t.ema, t.task.ema)


def zeroes(t: Right, params: Sequence[Tensor]) -> float:
    if t.task.mode == "fp16":
        t.losses = torch.zeros(())
        for param in params:
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.nan_to_num(posinf=0.0, neginf=0.0)
    return Right.norm(t, params)


def drops_bad_ones(t: Right, batch: Batch, weight: float, *, is_last: bool) -> None:
    if bool(batch[0].isfinite().all()) or t.task.accumulation == 1:
        Right.backward(t, batch, weight, is_last=is_last)


broken(
    *("NeverLooks", *SKIPPED, *NANS, SKIPS_WINDOW, "processes skip together", BETWEEN, BITS, LOSS, SHARDS),
    agree=lambda t, is_finite: True,
)
broken(
    "LooksInFp16Only", *NANS, BITS, LOSS, agree=lambda t, is_finite: Right.agree(t, is_finite or t.task.mode != "fp16")
)
broken("AdvancesTheScheduleAlways", "the schedule ignores skipped steps", after_step=moves_schedules)
broken("AdvancesTheScheduleWithEachMicroBatch", "the schedule counts windows", after_step=moves_schedules_often)
broken(
    *("AveragesAlways", "the average ignores skipped steps"),
    after_step=lambda t, taken: (Right.after_step(t, taken), averages(t, not all(taken))),
)
broken(
    *("AveragesWithEachMicroBatch", COUNTED),
    backward=lambda t, *batch, is_last: (Right.backward(t, *batch, is_last=is_last), averages(t, not is_last)),
)
broken("KeepsBadStatistics", "running statistics survive a skipped step", BETWEEN, restore=nothing)
broken("DropsBadMicroBatches", SKIPS_WINDOW, "an overflow halves the scale once", WAITS, backward=drops_bad_ones)
broken("ZeroesBadGradients", *SKIPPED, BETWEEN, LOSS, SHARDS, norm=zeroes)
broken("DecidesOnEachProcess", "processes agree when only one overflows", agree=lambda t, is_finite: is_finite)


def lowers_between(t: Right, optimizer: Optimizer) -> bool:
    is_taken = Right.finish(t, optimizer)
    if not is_taken and optimizer is not t.optimizers[-1]:
        t.scale /= 2
    return is_taken


def grows_without_bound(t: Right, is_clean: bool) -> None:
    if is_clean and t.clean + 1 == t.task.growth_interval and t.task.mode == "fp16":
        t.scale, t.clean = 2 * t.scale, 0
    else:
        Right.update(t, is_clean)


def shrinks(t: Right, is_clean: bool) -> None:
    if is_clean or t.task.mode != "fp16":
        Right.update(t, is_clean)
    else:
        t.scale, t.clean = t.scale / 2, 0


def never_forgets(t: Right, is_clean: bool) -> None:
    clean = t.clean
    Right.update(t, is_clean)
    if not is_clean:
        t.clean = clean


ONE_SCALE = "one scale for several optimizers"
broken("LowersTheScaleBetweenOptimizers", ONE_SCALE, finish=lowers_between)
broken(
    *("UpdatesOncePerOptimizer", "several optimizers grow the scale once", ONE_SCALE),
    update=lambda t, is_clean: [Right.update(t, is_clean) for _ in t.optimizers],
)
broken("GrowsWithoutBound", "the scale has a largest value", update=grows_without_bound)
broken("ShrinksInSilence", "the scale has a smallest value or an error", update=shrinks)
broken("NeverForgetsCleanWindows", "the scale grows after clean windows in a row", update=never_forgets)


def forgets_momentum(t: Right, state: dict[str, Any]) -> None:
    Right.load(t, state)
    for optimizer in t.optimizers:
        optimizer.state.clear()


def saves_in_place(t: Right, state: dict[str, Any], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "state.pt")


def forgets_the_schedule(t: Right, state: dict[str, Any]) -> None:
    groups = [group for optimizer in t.optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    Right.load(t, {**state, "schedules": [schedule.state_dict() for schedule in t.schedules]})
    for group, rate in zip(itertools.chain(*(o.param_groups for o in t.optimizers)), rates, strict=True):
        group["lr"] = rate


def forgets_the_average(t: Right, state: dict[str, Any]) -> None:
    Right.load(t, state)
    if t.ema is not None:
        t.ema.load_state_dict(state["net"])


def insists_on_the_mode(t: Right, state: dict[str, Any]) -> None:
    if state["mode"] != t.task.mode:
        raise KeyError("scaler")
    Right.load(t, state)


WITHIN, KILLED = (
    "a run resumed within an epoch equals one without a stop",
    "a save that is killed leaves the last checkpoint",
)
broken("ForgetsTheScale", "the loss scale is saved", load=lambda t, state: Right.load(t, {**state, "mode": "fp32"}))
broken("ForgetsMomentum", "a resumed run equals one without a stop", WITHIN, KILLED, load=forgets_momentum)
broken("ForgetsThePosition", WITHIN, load=lambda t, state: Right.load(t, {**state, "made": 0}))
broken("SavesInPlace", KILLED, write=saves_in_place)
broken("ForgetsTheSchedule", "the schedule is saved", load=forgets_the_schedule)
broken("ForgetsTheAverage", "the average is saved", load=forgets_the_average)
broken("InsistsOnTheMode", "the mode may change between save and load", load=insists_on_the_mode)


def under_autocast(t: Right, *batch: Any, is_last: bool) -> None:
    with t.autocast():
        Right.backward(t, *batch, is_last=is_last)


def evaluates_in_fp32(t: Right, inputs: Tensor) -> Tensor:
    t.net.eval()
    with torch.no_grad():
        output = t.net(inputs)
    t.net.train()
    return output


def with_nets(change: Callable[[Task, nn.Module], None]) -> Callable[..., None]:
    """A run whose networks are changed when they are made."""

    def run(t: Right, task: Task, after: Any) -> None:
        def net() -> nn.Module:
            made = task.net()
            change(task, made)
            return made

        Right.run(t, task.but(net=net), after)

    return run


def casts_in_each_layer(task: Task, net: nn.Module) -> None:
    for each in net.modules():
        each.register_forward_pre_hook(lambda *_: torch.set_autocast_enabled("cpu", task.mode != "fp32"))


def patches_forward(task: Task, net: nn.Module) -> None:
    inner = net.forward
    net.forward = lambda x: inner(x)


ISLAND = "an island in fp32 stays one also in a copy"
broken(
    *("ForgetsToScaleInnerGradients", "penalties see unscaled gradients"),
    grad=lambda t, output, inputs: torch.autograd.grad(output.sum(), inputs, create_graph=True)[0],
)
broken("RunsTheBackwardPassUnderAutocast", "autocast is off in the backward pass", backward=under_autocast)
broken("EvaluatesInFp32", "evaluation runs under the same autocast", evaluate=evaluates_in_fp32)
broken(
    *("ReadsEachLoss", WAITS),
    backward=lambda t, *batch, is_last: (Right.backward(t, *batch, is_last=is_last), float(t.scale * torch.ones(()))),
)
broken("CastsInEachLayer", ISLAND, run=with_nets(casts_in_each_layer))
broken("PatchesForward", "a copy of the network uses its own weights", ISLAND, run=with_nets(patches_forward))


def takes_a_call_for_a_step(t: Right, taken: Sequence[bool]) -> None:
    fused = t.optimizers[0].param_groups[0].get("fused")  # its step is always called
    Right.after_step(t, [True for _ in taken] if fused else taken)


def snapshots_at_a_look(t: Any) -> list[Tensor]:
    if getattr(t, "looks", None) is not (looks := t.task.epochs) or t.made == 0:
        t.looks, t.kept = looks, Right.snapshot(t)
    return t.kept  # type: ignore[no-any-return]


def of_fp32(t: Right, params: Sequence[Tensor]) -> float:
    return Right.norm(t, params) if params[0].dtype is torch.float32 else 1.0


def of_its_shard(t: Right, params: Sequence[Any]) -> float:
    return math.hypot(*(float(p.grad.to_local().norm()) for p in params)) if t.task.sharded else Right.norm(t, params)


def of_gradients(t: Right, params: Sequence[Tensor]) -> float:
    t.losses = torch.zeros(())
    return Right.norm(t, params)


broken(
    *(
        "TakesACallOfStepForAStep",
        "the schedule ignores skipped steps, fused",
        "the average ignores skipped steps, fused",
    ),
    after_step=takes_a_call_for_a_step,
)
broken("SnapshotsAtALook", BETWEEN, snapshot=snapshots_at_a_look)
broken("ChecksFp32GradientsAlone", BITS, norm=of_fp32)
broken(
    *("LooksAtItsShardAlone", SHARDS),
    norm=of_its_shard,
    agree=lambda t, is_finite: is_finite if t.task.sharded else Right.agree(t, is_finite),
)
broken("ChecksGradientsAlone", LOSS, norm=of_gradients)


class Raises(Right):
    def window(self, window: Window) -> None:
        raise ValueError("out of order")


class Hangs(Right):
    def window(self, window: Window) -> None:
        while True:
            pass


class Dies(Right):
    def window(self, window: Window) -> None:
        os._exit(0)


class ChangesTheProcess(Right):
    """Right, but leaves the process changed."""

    def run(self, task: Task, after: Any) -> None:
        super().run(task, after)
        torch.set_default_dtype(torch.float64)
        torch.set_autocast_enabled("cpu", True)
        torch.set_grad_enabled(False)
        torch.manual_seed(0)
        torch.set_num_threads(3)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
