"""The files of a run: JSON and text, whole or not at all; JSON lines, appended and cut at a step."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from amp_core.config.files import open_file, write_whole
from amp_core.config.redact import masked

_STEPS = re.compile(rb'\n\{"step": ?(\d{1,15}), *"split"')
_BLOCK, _MOST_BLANK = 1 << 20, 64


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
    """Whether all lines are of steps after the last one; much faster than parsing each."""
    steps = _STEPS.findall(b"\n" + block)
    return bool(steps) and len(steps) == block.count(b"\n") and min(map(int, steps)) > last_step


def _key(line: bytes) -> tuple[str, int] | None:
    """(split, step) of a line; None: the line is not ours, or truncated."""
    try:
        entry = json.loads(line)
        return str(entry.get("split", "")), int(entry["step"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


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
