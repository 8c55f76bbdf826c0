"""The terminal: messages above a progress bar."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from amp_core.config.files import visible
from amp_core.config.redact import redact, shown

TICK_SECONDS = 0.1
"""How often `Log.advance` does more than compare the time."""
LINE_SECONDS = 5.0
"""Least time between progress lines when stderr is not a terminal."""
LARGE_WAIT = 0.1
"""A share of the time spent waiting for data that the progress line mentions."""


def say(message: str) -> None:
    """Print to stdout; a closed pipe (`| head`) or a full disk does not end a run."""
    try:
        print(redact(message), flush=True)
    except OSError:
        # What is still buffered would raise again at exit.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def complain(message: str) -> None:
    """Print an error to stderr, without keys and passwords."""
    print(shown(f"error: {message}"), file=sys.stderr)


class Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(redact(super().format(record)))


class TerminalHandler(logging.Handler):
    """Messages to stdout, warnings to stderr, above the bar."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        self._prefix = f"[rank {rank}] " if rank > 0 else ""
        self.setFormatter(Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        stream = sys.stderr if is_warning else sys.stdout
        level = f"{record.levelname.lower()}: " if is_warning else ""
        try:
            _Bar.write(f"{self._prefix}{level}{self.format(record)}", file=stream)
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # a closed pipe (`| head`); train.log has the message
            pass


class _Bar(tqdm):
    monitor_interval = 0  # its watching thread would be there when data loaders fork


_Bar.set_lock(threading.RLock())  # tqdm's own is made for several processes, and starts one on macOS


class Progress:
    """A bar on a terminal, plain lines in a file."""

    BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {remaining} left {desc}"
    LINE = "step {n_fmt}/{total_fmt}  {desc}  {remaining} left"
    BAR_COLUMNS = 45
    """What the bar takes without the facts."""

    def __init__(self, total_steps: int, *, shows_scale: bool) -> None:
        self._total = total_steps
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._bar: _Bar | None = None
        self._next_line = 0.0
        self._is_held = False  # a line off a terminal came too soon after another
        # The most important first: a narrow terminal shows only those that fit, as a number that is cut would be wrong.
        self._formats = {"loss": "loss {:.4g}", "skipped": "skipped {:.0f}", "samples_per_second": "{:.0f} samples/s"}
        self._formats |= {"loss_scale": "scale {:.10g}"} if shows_scale else {}
        self._formats |= {"lr": "lr {:.1e}", "data_wait": "{:.0%} waiting for data"}

    def show(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Move to a step, with the numbers of a log line, if there is one."""
        if self._bar is None:
            # Its clock starts with the first finished step: what came before (set-up, compilation) does not recur.
            self._bar = _Bar(
                total=self._total,
                initial=step,
                disable=False,  # TQDM_DISABLE is about other bars: log.progress=false is for this one
                file=sys.stderr if self._is_terminal else io.StringIO(),
                dynamic_ncols=self._is_terminal,
                bar_format=self.BAR if self._is_terminal else self.LINE,
            )
            if (self._bar.ncols or 0) <= 0 and self._is_terminal:  # one that does not know its size
                self._bar.dynamic_ncols, self._bar.ncols = None, 79
        self._bar.n = step
        if metrics is not None:
            self._bar.set_description_str(self._facts_of(metrics, self._bar.format_dict["ncols"]), refresh=False)
        if self._is_terminal:
            self._bar.refresh()
        elif metrics is not None:
            self._is_held = step < self._total and time.monotonic() < self._next_line
            if not self._is_held:
                self._print()

    def _print(self) -> None:
        self._next_line = time.monotonic() + LINE_SECONDS
        print(self._bar, file=sys.stderr, flush=True)

    def close(self, step: int) -> None:
        if self._bar is not None:
            self.show(max(step, self._bar.n))
            if self._is_held:
                self._print()
            self._bar.close()

    def _facts_of(self, metrics: Mapping[str, Any], columns: int | None) -> str:
        """Such as "loss 0.4312  skipped 0", of those that are there and fit."""
        facts = []
        for name, text in self._formats.items():
            number = metrics.get(name)
            if number is not None and (name != "data_wait" or number >= LARGE_WAIT):
                facts.append(text.format(float(number)))
        while facts and columns and len("  ".join(facts)) > columns - self.BAR_COLUMNS:
            facts.pop()
        return "  ".join(facts)
