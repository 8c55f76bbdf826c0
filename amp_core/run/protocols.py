"""What a run is handed by its launcher, as protocols: a recipe imports what a step needs, not what is around a run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from amp_core.step.amp import Amp
from amp_core.step.report import StepReport
from amp_core.step.window import MicroBatch

Step = Callable[[list[MicroBatch]], Any]
"""The computation of a whole step from its window."""


# --- of an environment, by `amp_core.run.process` ---------------------------------------------------------------------


class Placement(Protocol):
    """Puts networks where they compute: `amp_core.layouts.placement.Placement`."""

    compiler: Any

    @property
    def devices(self) -> list[torch.device]: ...

    def wrap(self, net: nn.Module, amp: Amp, notes: list[str]) -> list[tuple[str, nn.Module]]: ...


class Stop(Protocol):
    """Whether a run is to end early: `amp_core.run.stop.Stop`."""

    code: int

    def poll(self) -> int: ...


class Folder(Protocol):
    """The run folder: `amp_core.run.folder.RunFolder`."""

    before: dict[str, Any]

    def moved(self, checkpoint: Path) -> str | None: ...

    def begin(self) -> None: ...

    def check(self) -> None: ...

    def write_summary(self, status: str, exit_code: int) -> None: ...


class Log(Protocol):
    """Where a run reports: `amp_core.run.log.Log`."""

    def metrics(self, metrics: Mapping[str, Any]) -> None: ...

    def statistics(self, line: Mapping[str, Any]) -> None: ...

    def advance(self, step: int) -> None: ...

    def info(self, message: str) -> None: ...

    def warning(self, message: str) -> None: ...

    def close(self, summary: Mapping[str, Any]) -> None: ...


class CapturedStep(Protocol):
    """A step that is captured once and replayed: `amp_core.memory.graph.CudaGraphStep`."""

    is_capturing: bool

    @property
    def is_used(self) -> bool: ...

    def forget(self) -> None: ...

    def __call__(self, step: Step, window: list[MicroBatch]) -> Any: ...


class Services(Protocol):
    """What a loop asks for by its settings: the module `amp_core.run.services`."""

    def open_log(self, loop: Any, loaded: Any, notes: list[str], warnings: list[str]) -> Log: ...

    def dry_run(self, loop: Any, count: Callable[[Any], Tensor] | None) -> Iterator[list[MicroBatch]]: ...

    def captured_step(self, loop: Any) -> CapturedStep | None: ...

    def fault(self, loop: Any, window: list[MicroBatch]) -> AbstractContextManager[bool]: ...

    def saved_tensors(self, loop: Any) -> Callable[[], AbstractContextManager[None]]: ...

    def say(self, message: str) -> None: ...


# --- of a loop, by the doctor -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Symptoms:
    """What a log line says about the steps since the last one. All ranks have the same."""

    step: int
    """At which they were read."""
    streak: int
    """Steps skipped in a row up to `step`."""
    scale: float
    """The loss scale."""
    first_skip: int | None = None
    """The first skipped step since the last line, known to a monitor."""
    first_bad_loss: int | None = None
    """The first step since the last line whose loss was not finite, known to a monitor."""


class Finding(Protocol):
    """The result of an examination."""

    healed: bool

    @property
    def headline(self) -> str: ...


class Monitor(Protocol):
    """Looks at the steps of a run and examines those that went wrong."""

    last: Any
    """The last `Finding`, or None."""

    def start(self) -> None:
        """The run begins, or resumes."""

    def note(self, of: str, report: StepReport, loss: Tensor | None) -> None:
        """A step was computed. Does not wait for the device."""

    def facts(self) -> dict[str, Tensor]:
        """0-d tensors to read back with the next log line. On every rank."""
        ...

    def completed(self, symptoms: Symptoms, found: dict[str, float]) -> Symptoms:
        """The symptoms with what `facts` were, now on the host."""
        ...

    def is_called(self, symptoms: Symptoms) -> bool:
        """Whether these symptoms need an examination."""
        ...

    def examine(self, symptoms: Symptoms) -> Generator[list[MicroBatch], None, Any]:
        """Yields windows that the recipe computes again; returns a `Finding`, or None."""
        ...


class Measurement(Protocol):
    """Measures some steps of a run."""

    every: int

    def sampling(self, step: int) -> AbstractContextManager[None]:
        """Around the computation of a step's window."""
        ...

    def write(self, log: Log, upto: int | None = None) -> None:
        """Report what was measured up to a step; None: all."""
