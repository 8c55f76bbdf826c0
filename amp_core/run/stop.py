"""Early stop of a run: signals and the time limit, agreed between all ranks without waiting."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from amp_core.config.errors import RunError
from amp_core.config.processes import launched
from amp_core.run.rendezvous import others_start_again

PATIENCE = (5.0, 20.0)
"""Seconds for which a rank that was asked to stop still waits for data: as the only rank, and as one of several, which
then have to stop without a checkpoint."""
TIME_LIMIT = 75
"""Why a run stops before its end: `max_minutes`. Other reasons are 128 and the number of a signal."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that end a run in order: after the step, with a checkpoint."""


def exit_code_of(reason: int) -> int:
    """The exit code of a run that stopped for this reason; 75 (start the same command again) also after SIGUSR1."""
    return 75 if reason == 128 + signal.SIGUSR1 else reason


class Stop:
    """Whether to stop, agreed between ranks: a signal on one rank, or the time limit, ends all at the same step.

    `poll` costs the host a microsecond and never waits for the device: the ranks exchange one number per step in the
    background and act on it one step later.
    """

    def __init__(self, group: dist.ProcessGroup | None, max_minutes: float | None) -> None:
        self.code = 0
        """Why this rank asks to stop: 128 and a signal, or `TIME_LIMIT`; 0: it does not. Ranks act on the largest."""
        self._is_signalled = False
        self._is_twice = False
        self._deadline = None if max_minutes is None else time.monotonic() + 60.0 * max_minutes
        self._group = group
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._host = self._flag.numpy()  # the same memory, readable without a tensor operation
        self._work: dist.Work | None = None
        self._parent = os.getppid() if launched() else None

    def is_asked(self) -> bool:
        """Whether this rank asks to stop.

        KeyboardInterrupt: immediately. The signal's own exception may have been lost in a callback of the interpreter.
        """
        if self._is_twice:
            raise KeyboardInterrupt
        if not self.code and self._deadline is not None and time.monotonic() >= self._deadline:
            self.code = TIME_LIMIT
        return bool(self.code)

    def poll(self) -> int:
        """Called by all ranks equally often. Returns the agreed reason to stop, 0 to continue."""
        self.is_asked()
        if self._parent is not None and not self.code and os.getppid() != self._parent:
            # The agent was killed: training would continue without a terminal and hold the run folder.
            if others_start_again():
                raise RunError("the launcher of this machine was killed; those of other machines continue without it")
            self.code = 128 + signal.SIGTERM
        if self._group is None:
            return self.code
        agreed = 0
        if self._work is not None:
            self._work.wait()
            agreed = int(self._host[0])
        self._host[0] = self.code
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def on_signal(self, number: int, frame: object) -> None:
        if self._is_signalled and number == signal.SIGINT:
            # Ctrl-C after any first signal: stop immediately.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self._is_twice = True
            raise KeyboardInterrupt
        self._is_signalled = True
        self.code = self.code or 128 + number
