"""What a change gains: steps without and with it, in turns, so that what else the machine does falls on both alike."""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from amp_core.run.replay import rerun_step, window_of
from amp_core.step.amp import Amp
from amp_tools.findings import find_waits
from amp_tools.measure import NUM_WARM_UPS, Again, clock_of, time_windows, time_with_loader
from amp_tools.profile import Profile, trial_of

if TYPE_CHECKING:
    from amp_core.run.loop import Loop

NUM_PAIRS = 9
_CLOCKS = {"cpu": "CPU time", "cuda": "wall time"}
LOADER = "data.num_workers="


def time_run(
    loop: Loop, num_windows: int, with_loader: bool, found: list[tuple[float, float]]
) -> Generator[Any, None, None]:
    """A driver for one turn of a trial, always of the same window.

    Appends to `found` the seconds that a sample computes (median), and those of a whole step for a sample (mean).
    """
    per_step, mean = loop.feed.samples_per_step, 0.0
    again = partial(rerun_step, loop, window_of(loop, loop.step + 1))
    yield from time_windows(again, loop.amp, NUM_WARM_UPS)
    steps, _ = yield from time_windows(again, loop.amp, num_windows, clock_of(loop.amp.device))
    if with_loader:
        whole, loads = yield from time_with_loader(loop, num_windows)
        mean = statistics.mean(whole) + statistics.mean(loads)
    found.append((statistics.median(steps) / per_step, mean / per_step))


class Reads:
    """Numbers read from tensors at a source line: `.item()`, `float(x)`, `int(x)`, `if x:`, `.tolist()`.

    Those that torch reads within a function that the line calls are not found.
    """

    def __init__(self, source: str) -> None:
        path, _, line = source.rpartition(":")
        self._path, self._line = path, int(line) if line.isdigit() else -1
        self._known: list[Any] = []
        self.num_skipped = 0

    @contextlib.contextmanager
    def window(self, again: Again, skip: bool) -> Iterator[Any]:
        """Around a window. `skip`: each read gives its number of the window before, without a wait."""
        new: list[Any] = []

        def reader(read: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(read)
            def number(tensor: Tensor) -> Any:
                frame = sys._getframe(1)
                if frame.f_lineno != self._line or not frame.f_code.co_filename.endswith(self._path):
                    return read(tensor)
                is_known = skip and len(new) < len(self._known)
                self.num_skipped += is_known
                new.append(self._known[len(new)] if is_known else read(tensor))
                return new[-1]

            return number

        names = ("item", "tolist", "__float__", "__int__", "__bool__")
        for name in names:  # inherited from a class written in C
            setattr(Tensor, name, reader(getattr(Tensor, name)))
        try:
            with again() as window:
                yield window
        finally:
            for name in names:
                delattr(Tensor, name)
        self._known = new


def _direction(number: int) -> int:
    """A B, B A, A B, ...: what drifts falls on both alike."""
    return -1 if number % 2 else 1


def try_reads(measuring: Generator[Any, None, Profile], again: Again, amp: Amp) -> Generator[Any, None, Profile]:
    """The measured profile, with what a step gains when the reads of a line do not wait; of three lines at most."""
    p = yield from measuring
    for finding in [each for each in find_waits(p) if each.override is None][:3]:
        reads, pairs = Reads(finding.title.rpartition(" ")[2]), []
        for number in range(NUM_PAIRS):
            pair = [0.0, 0.0]
            for skip in (False, True)[:: _direction(number)]:
                steps, _ = yield from time_windows(partial(reads.window, again, skip), amp, 3, clock_of(amp.device))
                pair[skip] = statistics.median(steps)
            pairs.append(pair)
        if reads.num_skipped:
            how = f"{_CLOCKS[p.device]}, each read gave the number of the step before"
            p.trials[finding.cause] = trial_of(pairs, p.busy, how)
    return p


def try_out(p: Profile, overrides: Iterable[str | None], turn: Callable[[str], tuple[float, float] | None]) -> None:
    """Fill `p.trials` with what each setting gains, in turns with the run as it is. Of 16 bits, fp32 is tried too.

    Args:
        p: the profile of the run as it is.
        overrides: the settings; those that change no step, and None, are left out.
        turn: seconds for a sample of a run with this override ("": none): computing, and of whole steps; None: it
            failed.
    """
    names = [each for each in overrides if each and not each.startswith(("eval_every=", "save_every="))]
    names += ["amp=fp32"] if p.dtype != "float32" and "amp=fp32" not in names else []
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in ("", *names)}
    for number in range(NUM_PAIRS if names else 0):
        for name in list(turns)[:: _direction(number)]:
            seconds = turn(name)
            if seconds is None and not name:
                return
            elif seconds is None:
                del turns[name]
            else:
                turns[name].append(seconds)
    for name in list(turns)[1:]:
        is_whole = name.startswith(LOADER)
        pairs = [(a[is_whole], b[is_whole]) for a, b in zip(turns[""], turns[name], strict=True)]
        p.trials[name] = trial_of(pairs, *((1.0, "wall time") if is_whole else (p.busy, _CLOCKS[p.device])))
