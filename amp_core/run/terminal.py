"""The terminal: colours, messages above a progress bar."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tqdm import tqdm

from amp_core.config.files import visible
from amp_core.config.redact import redact, shown

TICK_SECONDS = 0.1
"""How often `Log.advance` does more than compare the time."""
LINE_SECONDS = 5.0
"""Least time between progress lines when stderr is not a terminal."""
_LEVEL = re.compile(r"^(\[rank \d+\] )?(error|warning|critical):")
_WHOLE = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {remaining} left {desc}"
_BAR_LINES = (_WHOLE, "{n_fmt}/{total_fmt} {remaining} left", "{n_fmt}/{total_fmt}", "{percentage:.0f}%")
"""What a terminal shows of the progress: the first that fits."""
_LEAST_BAR = 6
_FIRST_TO_GO = ("lr", "none skipped", "loss_scale", "data_wait", "samples_per_second", "skipped", "loss")
"""Facts that are left out on a narrow terminal, in this order."""
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
    print(tinted(shown(f"error: {message}"), sys.stderr), file=sys.stderr)


class Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(redact(super().format(record)))


def tinted(text: str, stream: Any) -> str:
    """`text` with its leading `error:` in red, or `warning:` in yellow, if the stream is one that shows colours.

    As in Python itself: NO_COLOR forbids them, else FORCE_COLOR demands them, else terminals have them but dumb ones.
    """
    forced = os.environ.get("FORCE_COLOR", "0") not in ("", "0")
    if os.environ.get("NO_COLOR") or not (forced or is_screen(stream)):
        return text
    return _LEVEL.sub(
        lambda found: f"{found[1] or ''}\x1b[1;{31 if found[2] == 'error' else 33}m{found[2]}:\x1b[0m", text
    )


def is_screen(stream: Any) -> bool:
    """Whether this is a terminal that can move its cursor and show colours."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


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
            _Bar.write(tinted(f"{self._prefix}{level}{self.format(record)}", stream), file=stream)
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # a closed pipe (`| head`); train.log has the message
            pass


class _Bar(tqdm):
    monitor_interval = 0  # its watching thread would be there when data loaders fork


_Bar.set_lock(threading.RLock())  # tqdm's own is made for several processes, and starts one on macOS


class Progress:
    """A bar on a terminal, plain lines in a file."""

    def __init__(self, total_steps: int, *, shows_scale: bool) -> None:
        self._total = total_steps
        self._shows_scale = shows_scale
        self._is_terminal = is_screen(sys.stderr)
        self._bar: _Bar | None = None
        self._facts: dict[str, str] = {}
        self._start: tuple[float, int] | None = None
        self._last_line = -math.inf
        self._waiting: str | None = None

    def advance(self, step: int) -> None:
        self._begin(step)
        if self._bar is not None:
            self._fit()
            self._bar.update(step - self._bar.n)

    def show(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._begin(step)
        if self._bar is not None:
            self._facts = self._facts_of(metrics)
            self._bar.n = step
            self._fit()
            self._bar.refresh()
        elif not self._is_terminal:
            began, first = self._start or (0.0, step)
            facts = [f"step {step}/{self._total}", *self._facts_of(metrics).values()]
            if step > first:
                left = (time.monotonic() - began) / (step - first) * max(self._total - step, 0)
                facts.append(f"{tqdm.format_interval(left)} left")
            self._waiting = "  ".join(facts)
            if step >= self._total or time.monotonic() - self._last_line >= LINE_SECONDS:
                self._print()

    @contextlib.contextmanager
    def clock(self, what: str, began: float) -> Iterator[None]:
        """A line on a terminal that counts the seconds since a `time.monotonic()`, from a thread that ends with it."""
        if not self._is_terminal:
            yield
            return
        ended = threading.Event()
        with _Bar(bar_format="{desc}", file=sys.stderr, leave=False) as line:

            def tick() -> None:
                while True:
                    line.set_description_str(f"{what}: {tqdm.format_interval(time.monotonic() - began)}")
                    if ended.wait(TICK_SECONDS * 10):
                        return

            thread = threading.Thread(target=tick, daemon=True)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()

    def close(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.close()
        self._print()

    def _begin(self, step: int) -> None:
        # The clock starts with the first finished step: what came before (set-up, compilation) does not recur.
        if self._start is None:
            self._start = time.monotonic(), step
            if self._is_terminal:
                self._bar = _Bar(
                    total=self._total,
                    initial=step,
                    file=sys.stderr,
                    dynamic_ncols=True,
                    mininterval=0,
                    miniters=1,
                    bar_format=_WHOLE,
                )
                if (self._bar.format_dict["ncols"] or 0) <= 0:  # a terminal that does not know its size
                    self._bar.dynamic_ncols, self._bar.ncols = None, 79

    def _fit(self) -> None:
        """Leave out whole facts, the least important first, until a line fits: a truncated number would be wrong."""
        assert self._bar is not None
        state = dict(self._bar.format_dict)
        columns, facts = state["ncols"], dict(self._facts)
        gone = [name for name in _FIRST_TO_GO if name in facts]
        for line in [_WHOLE] * (len(gone) + 1) + list(_BAR_LINES[1:]):
            text = " ".join(facts.values()).replace(" samples/s", "/s")
            plain = state | {"bar_format": line.replace("{bar}", " " * _LEAST_BAR), "prefix": text, "ncols": None}
            self._bar.bar_format = line
            self._bar.set_description_str(text, refresh=False)
            if len(tqdm.format_meter(**plain)) <= columns:
                break
            if gone:
                del facts[gone.pop(0)]

    def _print(self) -> None:
        if self._waiting is not None:
            print(self._waiting, file=sys.stderr, flush=True)
            self._last_line = time.monotonic()
            self._waiting = None

    def _facts_of(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        """Such as "loss 0.4312", for those that are there."""
        formats = {
            "loss": "loss {:.4g}",
            "lr": "lr {:.1e}",
            **({"loss_scale": "scale {:.10g}"} if self._shows_scale else {}),
            "skipped": "skipped {:.0f}",
            "samples_per_second": "{:.0f} samples/s",
        }
        found = {key: text.format(float(metrics[key])) for key, text in formats.items() if metrics.get(key) is not None}
        if (waited := metrics.get("data_wait") or 0.0) >= LARGE_WAIT:
            found["data_wait"] = f"{100 * waited:.0f} % waiting for data"
        return {"none skipped" if text == "skipped 0" else key: text for key, text in found.items()}
