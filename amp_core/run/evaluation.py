"""Evaluation of a run's network and its EMA; it stops between two batches when the run stops."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from amp_core.data.loading import GaveUp, interruptible
from amp_core.run.environment import Environment
from amp_core.run.meters import Clock
from amp_core.step.ema import Ema
from amp_core.tensors import unwrap

Evaluate = Callable[[nn.Module], dict[str, float]]


class Evaluation:
    """Evaluates on all ranks alike.

    Args:
        env: where the run is.
        evaluate: metrics of a network on the evaluation data; on every rank.
        model: the network.
        ema: its average, whose metrics have `ema_` in front.
        clock: of training, which this pauses.
    """

    def __init__(self, env: Environment, evaluate: Evaluate, model: nn.Module, ema: Ema | None, clock: Clock) -> None:
        self._env, self._evaluate, self._model, self._ema, self._clock = env, evaluate, model, ema, clock
        self.metrics: dict[str, float] = {}
        """The last results."""
        self.step = -1
        """At which they were made."""
        self.asked = 0
        """Why the last one was stopped: what `Stop.poll` said."""

    def run(self, step: int) -> bool:
        """Evaluate, and say whether it came to its end: a signal or the time limit stop it between two batches."""
        began = time.monotonic()
        try:
            with interruptible(self._check_stop):
                self.metrics = self.metrics_of_nets()
        except _Stopped:
            return False
        except GaveUp:
            if self._env.world_size > 1:  # the others are still in it
                raise
            self.asked = self._env.stop.code
            return False
        self.step = step
        self._env.report_compiling()
        self._clock.pause(time.monotonic() - began)
        return True

    def metrics_of_nets(self) -> dict[str, float]:
        """The metrics, without a stop."""
        net = unwrap(self._model)
        nets = [net] if self._ema is None else [net, self._ema.model]
        if self._env.world_size > 1:
            # Running statistics differ between ranks; rank 0's are saved, so rank 0's are evaluated.
            for buffer in (buffer for each in nets for buffer in each.buffers()):
                dist.broadcast(buffer, 0)
        metrics = self._evaluate(net.eval())
        net.train()
        if self._ema is not None:
            metrics |= {f"ema_{name}": value for name, value in self._evaluate(self._ema.model).items()}
        return metrics

    def _check_stop(self) -> None:
        self.asked = self._env.stop.poll()
        if self.asked:
            raise _Stopped


class _Stopped(Exception):
    """The ranks agreed to stop in the middle of an evaluation."""


def spell(metrics: dict[str, float]) -> str:
    """Metrics in a line of the log."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
