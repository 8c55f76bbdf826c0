"""What watches a run from outside of this floor: the doctor fills these protocols, and a run does without them, too."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from amp_core.run.log import Log
from amp_core.step.report import StepReport
from amp_core.step.window import MicroBatch


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
