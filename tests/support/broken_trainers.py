"""Trainers that are wrong in one way each, and the checks that have to catch them: no more, no fewer.

Each is the right loop with one method replaced, as it is found in loops that people use.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_conformance.task import Batch, Task, Window
from amp_conformance.trainers.by_hand import ByHand

BROKEN: dict[type[ByHand], set[str]] = {}
"""The trainers, and the names of the checks that catch them."""


def caught_by(*checks: str) -> Any:
    """Register a class."""

    def register(cls: type[ByHand]) -> type[ByHand]:
        BROKEN[cls] = set(checks)
        return cls

    return register


@caught_by("the last window of an epoch is shorter", "processes equal a larger batch")
class DropsTheTail(ByHand):
    def window(self, window: Window) -> None:
        if len(window) == self.task.accumulation:
            super().window(window)


@caught_by("the last window of an epoch is shorter", "processes equal a larger batch")
class DividesByAFixedNumber(ByHand):
    def weights(self, window: Window) -> list[float]:
        return [weight * len(window) / self.task.accumulation for weight in super().weights(window)]


@caught_by("micro batches of unequal size", "processes with unequal counts")
class TakesAMeanOfMeans(ByHand):
    def weights(self, window: Window) -> list[float]:
        return [1 / len(window) for _ in window]


@caught_by(
    "accumulation equals a larger batch",
    "the last window of an epoch is shorter",
    "micro batches of unequal size",
    "the average counts windows",
    "a whole window is clipped",
    "a bad micro batch skips its whole window",
    "processes equal a larger batch",
    "processes with unequal counts",
)
class SumsMicroBatches(ByHand):
    def weights(self, window: Window) -> list[float]:
        return [1.0 for _ in window]


@caught_by(
    "gradients are unscaled before they are clipped", "a whole window is clipped", "several optimizers are clipped"
)
class ClipsScaledGradients(ByHand):
    def finish(self, optimizer: Optimizer) -> bool:
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = self.norm(params)
        if not self.agree(math.isfinite(norm)):
            return False
        if self.task.clip is not None:
            self.clip(params, norm, self.task.clip)
        self.unscale(params)
        optimizer.step()
        return True


@caught_by("fp32 is clipped as well")
class ClipsInFp16Only(ByHand):
    def clip(self, params: Sequence[Tensor], norm: float, largest: float) -> None:
        if self.task.mode == "fp16":
            super().clip(params, norm, largest)


@caught_by("a whole window is clipped", "at most one wait per window")
class ClipsEachMicroBatch(ByHand):
    def backward(self, batch: Batch, weight: float, *, is_last: bool) -> None:
        if self.task.ranks > 1:  # gradients live in the buckets of DistributedDataParallel
            super().backward(batch, weight, is_last=is_last)
            return
        params = list(self.net.parameters())
        before = [None if p.grad is None else p.grad.clone() for p in params]
        for p in params:
            p.grad = None
        super().backward(batch, weight, is_last=is_last)
        if self.task.clip is not None:
            norm = self.norm(params) / self.scale
            if norm > self.task.clip * weight:
                super().clip(params, norm, self.task.clip * weight)
        for p, old in zip(params, before, strict=True):
            if old is not None:
                p.grad = old if p.grad is None else p.grad + old

    def clip(self, params: Sequence[Tensor], norm: float, largest: float) -> None:
        """Done before."""


@caught_by("zero gradients")
class DividesByTheNorm(ByHand):
    def clip(self, params: Sequence[Tensor], norm: float, largest: float) -> None:
        for param in params:
            if param.grad is not None:
                param.grad = param.grad / torch.tensor(norm) * min(norm, largest)


@caught_by(
    "a skipped step leaves weights and momentum",
    "a bad micro batch skips its whole window",
    "a nan in fp32 reaches no weight",
    "a nan in bf16 reaches no weight",
    "a nan that is clipped reaches no weight",
    "running statistics survive a skipped step",
    "an overflow halves the scale once",
    "the scale grows after clean windows in a row",
    "the schedule ignores skipped steps",
    "the average ignores skipped steps",
    "one scale for several optimizers",
    "the loss scale is saved",
    "processes skip together",
)
class NeverLooks(ByHand):
    def agree(self, is_finite: bool) -> bool:
        return True


@caught_by(
    "a nan in fp32 reaches no weight", "a nan in bf16 reaches no weight", "a nan that is clipped reaches no weight"
)
class LooksInFp16Only(ByHand):
    def agree(self, is_finite: bool) -> bool:
        return super().agree(is_finite or self.task.mode != "fp16")


@caught_by("the schedule ignores skipped steps")
class AdvancesTheScheduleAlways(ByHand):
    def after_step(self, taken: Sequence[bool]) -> None:
        for schedule, is_taken in zip(self.schedules, taken, strict=False):
            if not is_taken:
                schedule.step()
        super().after_step(taken)


@caught_by("the schedule counts windows")
class AdvancesTheScheduleWithEachMicroBatch(ByHand):
    def after_step(self, taken: Sequence[bool]) -> None:
        super().after_step(taken)
        for schedule in self.schedules * (self.task.accumulation - 1):
            schedule.step()


@caught_by("the average ignores skipped steps")
class AveragesAlways(ByHand):
    def after_step(self, taken: Sequence[bool]) -> None:
        super().after_step(taken)
        if self.ema is not None and self.task.ema is not None and not all(taken):
            self.average(self.ema, self.task.ema)


@caught_by("the average counts windows")
class AveragesWithEachMicroBatch(ByHand):
    def backward(self, batch: Batch, weight: float, *, is_last: bool) -> None:
        super().backward(batch, weight, is_last=is_last)
        if self.ema is not None and self.task.ema is not None and not is_last:
            self.average(self.ema, self.task.ema)


@caught_by("running statistics survive a skipped step")
class KeepsBadStatistics(ByHand):
    def restore(self, buffers: Sequence[Tensor]) -> None:
        """Nothing."""


@caught_by(
    "a bad micro batch skips its whole window", "an overflow halves the scale once", "at most one wait per window"
)
class DropsBadMicroBatches(ByHand):
    def backward(self, batch: Batch, weight: float, *, is_last: bool) -> None:
        if bool(batch[0].isfinite().all()) or self.task.accumulation == 1:
            super().backward(batch, weight, is_last=is_last)


@caught_by(
    "a skipped step leaves weights and momentum",
    "the schedule ignores skipped steps",
    "the average ignores skipped steps",
    "running statistics survive a skipped step",
    "an overflow halves the scale once",
    "the scale grows after clean windows in a row",
    "one scale for several optimizers",
    "the loss scale is saved",
)
class ZeroesBadGradients(ByHand):
    def norm(self, params: Sequence[Tensor]) -> float:
        if self.task.mode == "fp16":
            for param in params:
                if param.grad is not None and not param.grad.is_sparse:
                    param.grad = param.grad.nan_to_num(posinf=0.0, neginf=0.0)
        return super().norm(params)


@caught_by("one scale for several optimizers")
class LowersTheScaleBetweenOptimizers(ByHand):
    def finish(self, optimizer: Optimizer) -> bool:
        is_taken = super().finish(optimizer)
        if not is_taken and optimizer is not self.optimizers[-1]:
            self.scale /= 2
        return is_taken


@caught_by("several optimizers grow the scale once", "one scale for several optimizers")
class UpdatesOncePerOptimizer(ByHand):
    def update(self, is_clean: bool) -> None:
        for _ in self.optimizers:
            super().update(is_clean)


@caught_by("the scale has a largest value")
class GrowsWithoutBound(ByHand):
    def update(self, is_clean: bool) -> None:
        if is_clean and self.clean + 1 == self.task.growth_interval and self.task.mode == "fp16":
            self.scale, self.clean = 2 * self.scale, 0
        else:
            super().update(is_clean)


@caught_by("the scale has a smallest value or an error")
class ShrinksInSilence(ByHand):
    def update(self, is_clean: bool) -> None:
        if is_clean or self.task.mode != "fp16":
            super().update(is_clean)
        else:
            self.scale, self.clean = self.scale / 2, 0


@caught_by("the scale grows after clean windows in a row")
class NeverForgetsCleanWindows(ByHand):
    def update(self, is_clean: bool) -> None:
        clean = self.clean
        super().update(is_clean)
        if not is_clean:
            self.clean = clean


@caught_by("the loss scale is saved")
class ForgetsTheScale(ByHand):
    def load(self, state: dict[str, Any]) -> None:
        super().load({**state, "mode": "fp32"})


@caught_by(
    "a resumed run equals one without a stop",
    "a run resumed within an epoch equals one without a stop",
    "a save that is killed leaves the last checkpoint",
)
class ForgetsMomentum(ByHand):
    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        for optimizer in self.optimizers:
            optimizer.state.clear()


@caught_by("a run resumed within an epoch equals one without a stop")
class ForgetsThePosition(ByHand):
    def load(self, state: dict[str, Any]) -> None:
        super().load({**state, "made": 0})


@caught_by("a save that is killed leaves the last checkpoint")
class SavesInPlace(ByHand):
    def write(self, state: dict[str, Any], folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        torch.save(state, folder / "state.pt")


@caught_by("penalties see unscaled gradients")
class ForgetsToScaleInnerGradients(ByHand):
    def grad(self, output: Tensor, inputs: Tensor) -> Tensor:
        return torch.autograd.grad(output.sum(), inputs, create_graph=True)[0]


@caught_by("an island in fp32 stays one also in a copy")
class CastsInEachLayer(ByHand):
    def run(self, task: Task, after: Any) -> None:
        def net() -> nn.Module:
            made = task.net()
            for each in made.modules():
                each.register_forward_pre_hook(lambda *_: torch.set_autocast_enabled("cpu", task.mode != "fp32"))
            return made

        super().run(task.but(net=net), after)


@caught_by("the schedule is saved")
class ForgetsTheSchedule(ByHand):
    def load(self, state: dict[str, Any]) -> None:
        rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        super().load({**state, "schedules": [schedule.state_dict() for schedule in self.schedules]})
        for group, rate in zip((g for o in self.optimizers for g in o.param_groups), rates, strict=True):
            group["lr"] = rate


@caught_by("the average is saved")
class ForgetsTheAverage(ByHand):
    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        if self.ema is not None:
            self.ema.load_state_dict(state["net"])


@caught_by("the mode may change between save and load")
class InsistsOnTheMode(ByHand):
    def load(self, state: dict[str, Any]) -> None:
        if state["mode"] != self.task.mode:
            raise KeyError("scaler")
        super().load(state)


@caught_by("processes agree when only one overflows")
class DecidesOnEachProcess(ByHand):
    def agree(self, is_finite: bool) -> bool:
        return is_finite


@caught_by("processes equal a larger batch", "processes with unequal counts", "processes skip together")
class ForgetsThatGradientsAreAveraged(ByHand):
    def weights(self, window: Window) -> list[float]:
        return [weight / self.task.ranks for weight in super().weights(window)]


@caught_by("autocast is off in the backward pass")
class RunsTheBackwardPassUnderAutocast(ByHand):
    def backward(self, batch: Batch, weight: float, *, is_last: bool) -> None:
        with self.autocast():
            super().backward(batch, weight, is_last=is_last)


@caught_by("evaluation runs under the same autocast")
class EvaluatesInFp32(ByHand):
    def evaluate(self, inputs: Tensor) -> Tensor:
        self.net.eval()
        with torch.no_grad():
            output = self.net(inputs)
        self.net.train()
        return output


@caught_by("at most one wait per window")
class ReadsEachLoss(ByHand):
    def backward(self, batch: Batch, weight: float, *, is_last: bool) -> None:
        super().backward(batch, weight, is_last=is_last)
        float(self.scale * torch.ones(()))


@caught_by("a copy of the network uses its own weights", "an island in fp32 stays one also in a copy")
class PatchesForward(ByHand):
    def run(self, task: Task, after: Any) -> None:
        def net() -> nn.Module:
            made = task.net()
            inner = made.forward
            made.forward = lambda x: inner(x)
            return made

        super().run(task.but(net=net), after)


class Raises(ByHand):
    def window(self, window: Window) -> None:
        raise ValueError("out of order")


class Hangs(ByHand):
    def window(self, window: Window) -> None:
        while True:
            pass


class Dies(ByHand):
    def window(self, window: Window) -> None:
        os._exit(0)


class ChangesTheProcess(ByHand):
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
