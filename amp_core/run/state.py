"""What a run is made of, for what works on a run and is not the training loop itself. `Loop` is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from amp_core.checkpoints.checkpoint import Checkpoint
from amp_core.config.schema import Config
from amp_core.data import Data
from amp_core.memory.recast import Recast
from amp_core.run.environment import Environment
from amp_core.run.evaluation import Evaluation
from amp_core.run.feed import Feed
from amp_core.run.meters import Metrics
from amp_core.step.amp import Amp
from amp_core.step.ema import Ema
from amp_core.step.schedule import Schedule
from amp_core.step.window import MicroBatch

Step = Callable[[list[MicroBatch]], Any]
"""The computation of a whole step from its window."""


class CapturedStep(Protocol):
    """A step that is captured once and replayed: `amp_core.memory.graph.CudaGraphStep`."""

    is_capturing: bool

    @property
    def is_used(self) -> bool: ...

    def forget(self) -> None: ...

    def __call__(self, step: Step, window: list[MicroBatch]) -> Any: ...


class Run(Protocol):
    """Parts, settings and position of a run."""

    env: Environment
    cfg: Config
    data: Data
    amp: Amp
    parts: dict[str, Any]
    nets: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    schedules: dict[str, Schedule]
    schedule: Schedule
    ema: Ema | None
    feed: Feed
    evaluation: Evaluation
    metrics: Metrics
    checkpoint: Checkpoint
    graph: CapturedStep | None
    recast: Recast | None
    memory: dict[str, int | None] | None
    islands: list[str]
    planned_samples: int
    owes_evaluation: bool
    step: int
    samples: int

    @property
    def num_steps(self) -> int: ...
