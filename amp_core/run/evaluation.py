"""Evaluation of a run's network and its EMA, which stops between two batches when the run stops."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core.config.errors import Diverged
from amp_core.config.schema import AmpConfig
from amp_core.data.base import Dataset
from amp_core.data.loading import GaveUp, checking_batches
from amp_core.run.environment import Environment
from amp_core.run.meters import Clock, Symptoms
from amp_core.step.amp import Amp
from amp_core.step.ema import Ema
from amp_core.tensors import share_buffers, unwrap

Evaluate = Callable[[nn.Module], dict[str, float]]
Predict = Callable[[nn.Module, Any], dict[str, Tensor]] | None
"""(network, batch on the device) to what is predicted, by name, with samples along the first dimension; or nothing."""


class Evaluation:
    """Evaluates a network and its average, whose metrics have `ema_` in front, on all ranks alike.

    `evaluate` gives the metrics of a network on the evaluation data; the clock of training is paused meanwhile.
    """

    def __init__(
        self,
        env: Environment,
        evaluate: Evaluate,
        model: nn.Module,
        ema: Ema | None,
        clock: Clock,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self._env, self.evaluate, self._model, self._ema, self._clock = env, evaluate, model, ema, clock
        self._optimizers = optimizers
        self.metrics: dict[str, float] = {}
        """The last results."""
        self.step = -1
        """The step of the last results."""
        self.where = ""
        """Where metrics became non-finite while training is finite; empty: nowhere."""
        self.asked = 0
        """Why the last one was stopped: what `Stop.poll` returned."""

    def run(self, step: int) -> bool:
        """Evaluate; false if a signal or the time limit stopped it between two batches."""
        began = time.monotonic()
        try:
            with checking_batches(self._check_stop):
                self.metrics = self.metrics_of_nets()
        except _Stopped:
            return False
        except GaveUp:
            if self._env.world_size > 1:  # the other ranks are still in the evaluation
                raise
            self.asked = self._env.stop.code
            return False
        self.step = step
        self._env.report_compiling()
        self._clock.exclude(time.monotonic() - began)
        return True

    def metrics_of_nets(self) -> dict[str, float]:
        """The metrics, without a stop."""
        net = unwrap(self._model)
        nets = [net] if self._ema is None else [net, self._ema.model]
        share_buffers(*nets)  # rank 0's are saved, so rank 0's are evaluated
        with self.averaged():
            metrics = self.evaluate(net.eval())
        net.train()
        if self._ema is not None:
            metrics |= {f"ema_{name}": value for name, value in self.evaluate(self._ema.model).items()}
        return metrics

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Within, the network has the weights at which its optimizer evaluates (schedule-free ones: their average)."""
        if not any(hasattr(each, "eval") for each in self._optimizers):
            return contextlib.nullcontext()
        from amp_core.step.foreign import averaged

        return averaged(self._optimizers)

    def _check_stop(self, number: int, *_: Any) -> None:
        if number:  # all ranks have two batches or more, or none has
            self.asked = self._env.stop.poll()
            if self.asked:
                raise _Stopped


class _Stopped(Exception):
    """The ranks agreed to stop in the middle of an evaluation."""


def spell(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def check_metrics(metrics: Mapping[str, float], *, where: str = "", how: str = "") -> None:
    """Raise Diverged if a metric is not finite; `where` it became so, if training was finite, and `how` that went."""
    if bad := [f"{name} {value:g}" for name, value in metrics.items() if not math.isfinite(value)]:
        found = f"diverged: {', '.join(bad)} at the end{how}; expected finite metrics"
        if where:
            raise Diverged(f"{found}. Not finite in evaluation alone: {where}")
        raise Diverged(f"{found}. Lower optimizer.lr; if the training loss is finite, try task=evaluate amp=fp32")


def check_result(
    metrics: Mapping[str, float],
    *,
    step: int,
    skipped: int,
    amp: AmpConfig,
    scale: float,
    streak: int = 0,
    where: str = "",
) -> None:
    """Check the last evaluation and the number of skipped steps. Raises Diverged for a run that learned nothing.

    Steps that only brought the loss scale from its start down to where it is now were no failure, unless the run
    ended before the first step that was taken: then it has learned nothing; or at the smallest scale, still skipping
    (`streak` steps in a row at the end).
    """
    searched = 0
    is_lost = streak > 0 and scale <= (amp.min_scale or 0)
    if amp.scaling and amp.init_scale and amp.backoff_factor and not is_lost:
        searched = max(0, round(math.log(scale / amp.init_scale, amp.backoff_factor)))
    how = f"{skipped} of {step} steps were skipped"
    check_metrics(metrics, where=where, how=f", and {how}")
    if skipped == step == searched:
        raise Diverged(
            f"diverged: {how}, the loss scale came down from {amp.init_scale:.10g} to {scale:.10g} and no step was "
            f"taken. The same command with more steps continues; amp.init_scale={scale / 2:.10g} begins lower"
        )
    if skipped == step or 2 * (skipped - searched) > step:
        raise Diverged(
            f"diverged: {how}, expected at most half; see the doctor's report, if there is one, or lower optimizer.lr"
        )


def why_diverged(symptoms: Symptoms, most: int, headline: str | None) -> str:
    """The message of a run with too many skipped steps in a row; `headline`: what the doctor found."""
    message = (
        f"{symptoms.streak} steps in a row up to step {symptoms.step} had gradients that are not finite "
        f"(amp.max_consecutive_skips={most}), loss scale {symptoms.scale:g}. The weights are those of the last good "
        f"step."
    )
    if headline is not None:
        return f"{message} The doctor found: {headline}"
    return (
        f"{message} Look for an overflow in the forward pass: keep its module in fp32 (amp.keep_fp32), lower "
        f"optimizer.lr, or use amp=bf16; doctor=watch looks for it"
    )


def embed(env: Environment, amp: Amp, net: nn.Module, dataset: Dataset, dim: int) -> tuple[Tensor, Tensor]:
    """Embeddings, fp32 [N, dim], and labels [N] of a whole data set on every rank; each computes its share."""
    embeddings = torch.zeros(len(dataset), dim, device=env.device)
    labels = torch.zeros(len(dataset), dtype=torch.int64, device=env.device)
    loader = env.eval_loader(dataset)
    for rows, (images, of_images) in zip(loader.rows, env.eval_batches(loader), strict=True):
        with amp.autocast():
            embeddings[rows] = net(images).float()
        labels[rows] = of_images
    # The rows of the other ranks are 0.
    return env.sum_over_ranks(embeddings), env.sum_over_ranks(labels)
