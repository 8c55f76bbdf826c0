"""The files of a run: JSON and text, whole or not at all; JSON lines, appended and cut at a step."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from amp_core.config.files import open_file, write_whole
from amp_core.config.redact import masked

_LONGEST = 1 << 20
"""Bytes of a line; more is no line of a run."""


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

    OSError: it is no regular file, or cannot be read or written.
    """
    try:
        file = os.fdopen(open_file(path, os.O_RDWR), "r+b")
    except FileNotFoundError:
        return {}
    last: dict[str, int] = {}
    with file:
        end, rest = 0, list[bytes]()  # where the first line goes, and what stays behind it
        for line in iter(lambda: file.readline(_LONGEST), b""):
            split, step = _key(line)
            if last.get(split, -1) < step <= last_step:
                last[split] = step
                if line.endswith(b"\n") and file.tell() == end + len(line):
                    end += len(line)
                else:
                    rest.append(line.rstrip(b"\n") + b"\n")
        file.seek(end)
        file.writelines(rest)  # a process killed after it leaves some lines twice, and the next resume cuts them
        file.truncate()
    return last


def _key(line: bytes) -> tuple[str, int]:
    """(split, step) of a line; step -1: the line is not ours, or truncated."""
    try:
        entry = json.loads(line)
        return str(entry.get("split", "")), int(entry["step"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return "", -1


class LineFile:
    """Appends whole lines, each with one write; the first failure is logged, and later lines are tried again."""

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
