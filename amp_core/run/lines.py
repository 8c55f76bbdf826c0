"""Files of lines, the terminal and the progress bar."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from amp_core.config.files import open_file, visible, write_whole
from amp_core.config.redact import masked, redact

TICK_SECONDS = 0.1
"""How often `Log.advance` does more than compare the time."""
LINE_SECONDS = 5.0
"""Least time between progress lines when stderr is not a terminal."""
_STEPS = re.compile(rb'\n\{"step": ?(\d{1,15}), *"split"')
_BLOCK, _MOST_BLANK = 1 << 20, 64
_LEVEL = re.compile(r"^(\[rank \d+\] )?(error|warning|critical):")
_WHOLE = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {remaining} left {desc}"
_BAR_LINES = (_WHOLE, "{n_fmt}/{total_fmt} {remaining} left", "{n_fmt}/{total_fmt}", "{percentage:.0f}%")
"""What a terminal shows of the progress: the first that fits."""
_LEAST_BAR = 6
_FIRST_TO_GO = ("lr", "none skipped", "loss_scale", "data_wait", "samples_per_second", "skipped", "loss")
"""Facts that a narrow terminal does without, in this order."""
LARGE_WAIT = 0.1
"""A share of the time spent waiting for data that the progress line mentions."""


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write a JSON file whole or not at all (OSError). Numbers that are not finite become null."""
    write_whole(Path(path), (dumps(content, indent=2) + "\n").encode())


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file whole or not at all (OSError)."""
    write_whole(Path(path), text.encode())


def dumps(content: Any, indent: int | None = None) -> str:
    return json.dumps(masked(to_plain(content)), indent=indent, allow_nan=False)


def to_plain(value: Any) -> Any:
    """What JSON can hold: null for numbers that are not finite, text for what it does not know."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [to_plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors and the numbers and arrays of numpy
        return to_plain(value.tolist())
    return str(value)


def numbers_of(prefix: str, value: Any) -> list[tuple[str, float]]:
    """The numbers in a nested dictionary, under names such as train/loss."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in numbers_of(f"{prefix}/{key}", item)]
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [(prefix, value)] if isinstance(value, (int, float)) else []


def cut_lines(path: Path, last_step: int) -> dict[str, int]:
    """Keep the whole lines up to `last_step`, each (split, step) once. Returns the last step of each split.

    Lines are appended in order, so only the end of the file is read, back to the last block that has nothing to cut.
    OSError: it is no regular file, ends with much that is no line, or cannot be read or written.
    """
    try:
        file = os.fdopen(open_file(path, os.O_RDWR), "r+b")
    except FileNotFoundError:
        return {}
    with file:
        start, end = _tail(file, last_step)
        kept: dict[tuple[str, int], bytes] = {}
        file.seek(start)
        for line in file.read(end - start).split(b"\n"):
            key = _key(line)
            if key is not None and key[1] <= last_step:
                kept[key] = line + b"\n"
        content = b"".join(kept.values())
        file.seek(start)
        if file.read(len(content)) == content:
            file.truncate(start + len(content))
        elif start == 0:
            write_whole(path, content)
        else:  # a process killed between the two leaves some lines twice, and the next resume cuts them
            file.seek(start)
            file.write(content)
            file.truncate()
    return dict(sorted(kept))


def _tail(file: BinaryIO, last_step: int) -> tuple[int, int]:
    """Where the last lines begin that are in order and all stay, 0 when there are none, and where those that all go."""
    end, num_blank = file.seek(0, os.SEEK_END), 0
    beyond = end
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        block = file.read(end - start)
        first = block.find(b"\n") + 1 if start else 0
        whole = block[first : block.rfind(b"\n") + 1]
        if end == beyond and _is_beyond(whole, last_step):
            end = beyond = start + first
            continue
        keys = [_key(line) for line in whole.split(b"\n")[:-1]]
        known = [key for key in keys if key is not None and key[1] <= last_step]
        steps = [step for _, step in known]
        if keys and len(set(known)) == len(keys) and steps == sorted(steps):
            return start + first, beyond
        num_blank = 0 if any(keys) else num_blank + 1
        if num_blank == _MOST_BLANK:
            raise OSError(0, f"has no line of a run in its last {num_blank * _BLOCK >> 20} MiB; move it away")
        end = start
    return 0, beyond


def _is_beyond(block: bytes, last_step: int) -> bool:
    """Whether all lines are of steps after the last one; many times as fast as a look at each."""
    steps = _STEPS.findall(b"\n" + block)
    return bool(steps) and len(steps) == block.count(b"\n") and min(map(int, steps)) > last_step


def _key(line: bytes) -> tuple[str, int] | None:
    """(split, step) of a line; None for what is no line of ours, or half of one."""
    try:
        entry = json.loads(line)
        return str(entry.get("split", "")), int(entry["step"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


class LineFile:
    """Appends whole lines, each with one write; the first failure is said, and later lines are tried again."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn
        self._file: io.FileIO | None = None
        self._has_failed = False

    def append(self, line: str) -> None:
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        try:
            if self._file is None:
                self._file = io.FileIO(open_file(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
            end = self._file.seek(0, os.SEEK_END)
            if self._file.write(data) != len(data):
                self._file.truncate(end)  # or the next line would continue this half
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._warn(f"{self.path} cannot be written, lines will be missing: {error}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(redact(super().format(record)))


class FileHandler(logging.Handler):
    """train.log."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._file = LineFile(path, warn)
        self.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._file.append(self.format(record))

    def close(self) -> None:
        self._file.close()
        super().close()


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
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        stream = sys.stderr if is_warning else sys.stdout
        level = f"{record.levelname.lower()}: " if is_warning else ""
        try:
            text = f"{self._prefix}{level}{self.format(record)}"
            if getattr(record, "is_plan", False):
                text = wrapped(text, stream)
            _Bar.write(tinted(text, stream), file=stream)
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # a closed pipe (`| head`); train.log has the message
            pass


def wrapped(text: str, stream: Any) -> str:
    """`text` with lines that end between words on a terminal; what continues a line stands further in."""
    if not is_screen(stream):
        return text
    columns = max(40, shutil.get_terminal_size().columns - 1)
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        whole = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": indent}
        lines += textwrap.wrap(line, columns, **whole) or [""]
    return "\n".join(lines)


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
            left = self._seconds_left(step)
            facts = [f"step {step}/{self._total}", *self._facts_of(metrics).values()]
            self._waiting = "  ".join(facts + ([f"{tqdm.format_interval(left)} left"] if left is not None else []))
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
        """Leave out whole facts, the least important first, until a line fits: a number cut short is another one."""
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

    def _seconds_left(self, step: int) -> float | None:
        if self._start is None or step <= self._start[1]:
            return None
        return (time.monotonic() - self._start[0]) / (step - self._start[1]) * max(self._total - step, 0)

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
