"""Errors that end a run, each with its exit code.

| code | raised for |
| --- | --- |
| 2 | `ConfigError`: a bad command line or configuration |
| 3 | `CheckpointError`: no usable checkpoint |
| 4 | `SaveError`: a checkpoint cannot be written |
| 5 | `Diverged`: too many skipped steps in a row or in all, or a last metric that is not finite |
| 75, 130, 143 | `Interrupted`: the time limit or SIGUSR1, SIGINT, SIGTERM, after a checkpoint; resume to go on |

Everything else that escapes a run is a failure and exits with 1.
"""

from __future__ import annotations

from collections.abc import Iterable

STATUS = {0: "finished", 2: "refused", 5: "diverged", 75: "preempted", 130: "preempted", 143: "preempted"}
"""How a run with an exit code ended; with any other one it failed."""


class RunError(Exception):
    """A problem of the run that its user can act on: one message, no traceback."""

    exit_code = 1


class ConfigError(RunError):
    """A bad command line or configuration. Carries every problem that was found.

    Args:
        problems: one or more sentences, each naming the full key, what was found, what was expected.
    """

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class CheckpointError(RunError):
    """No usable checkpoint: none is sound, or the one that was named does not fit."""

    exit_code = 3


class SaveError(RunError):
    """A checkpoint cannot be written (full disk, read-only folder). Earlier ones are intact."""

    exit_code = 4


class Diverged(RunError):
    """Too many steps had non-finite gradients, or the last evaluation is not finite."""

    exit_code = 5


class Interrupted(RunError):
    """The run stopped early on purpose, after a checkpoint: a signal (130, 143, 75) or the time limit (75)."""

    def __init__(self, message: str, exit_code: int, by_signal: bool) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.by_signal = by_signal

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, int, bool]]:  # pickled by what runs jobs of a sweep
        return type(self), (str(self), self.exit_code, self.by_signal)
