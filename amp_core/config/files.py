"""Safe reading of the files of run folders, which may be damaged: it is bounded and never waits."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

SMALL_FILE = 1 << 20
"""Bytes; a summary has 2 KB, a configuration 5 KB."""
YAML_FILE = 1 << 18
"""The YAML parser reads about 250 KB per second."""
OWN_YAML_FILE = 1 << 16
"""A user's options and experiments, which Hydra reads; ours have at most 5 KB."""
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def kind_of(path: Path) -> str:
    """What stands there, itself and not what a link leads to: "a file", "a folder", "a pipe"; "" for nothing."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    return "a file" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a device")


def why_no_folder(path: Path) -> str | None:
    """Why a folder cannot be made, or written to if it is there; None: it can."""
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        return f"{path} is a file; expected a folder"
    if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
        return f"{path} is read-only; choose a folder that can be written"
    return None


def open_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Anything else raises OSError: no pipe, device or folder is waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return descriptor


def read_bytes(path: str | os.PathLike[str], limit: int = SMALL_FILE) -> bytes:
    """The content of a small file. OSError: it cannot be read; ValueError: it is longer than `limit`."""
    with os.fdopen(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"has {size:,} bytes, expected at most {limit:,}")
        return file.read(size)


def read_text(path: str | os.PathLike[str], limit: int = SMALL_FILE) -> str:
    """The same as text. Raises as `read_bytes`, and ValueError for an empty file and one that is no UTF-8."""
    content = read_bytes(path, limit)
    if not content.strip(b"\0 \n"):
        raise ValueError("is empty")
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        raise ValueError(f"is not UTF-8 (byte {problem.start})") from problem


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a JSON file. Raises as `read_text`, and ValueError if it holds none."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except RecursionError as problem:
        raise ValueError("is nested too deeply") from problem
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    return content


def why_not_yaml(path: Path) -> str | None:
    """Why a user's YAML file is not read by Hydra; None: it is small, also when its anchors are unfolded."""
    from amp_core.config.schema import node_of_yaml

    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        """Nodes, those behind an alias as often as it stands there."""
        if id(node) not in sizes:
            sizes[id(node)] = OWN_YAML_FILE + 1  # of an alias of what it is in
            inside = node.value if isinstance(node.value, list) else ()
            sizes[id(node)] = 1 + sum(
                sum(map(size, each)) if isinstance(each, tuple) else size(each) for each in inside
            )
        return sizes[id(node)]

    try:
        text = read_bytes(path, OWN_YAML_FILE).decode(errors="replace")
        if "*" in text and (node := node_of_yaml(text)) is not None and size(node) > OWN_YAML_FILE:
            return "its anchors unfold to more than any configuration holds; write the values themselves"
    except (OSError, ValueError) as problem:
        return f"cannot be read: {getattr(problem, 'strerror', None) or problem}"
    except RecursionError:
        return "is nested too deeply"
    except Exception:  # the parser raises many kinds; Hydra tells of them with the place
        return None
    return None


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The plain data of a YAML file. Raises as `read_text` and `parse_own_yaml`."""
    return parse_own_yaml(read_text(path, YAML_FILE))


def parse_own_yaml(text: str) -> Any:
    """The plain data of YAML that a run has written. ValueError: not YAML, or it would unfold to more than it is."""
    if len(re.findall(r"(?:^|[\s\[,{:-])[*&][\w-]", text)) > 20:
        raise ValueError("has more YAML anchors than any run writes")  # a few of them unfold to gigabytes
    from amp_core.config.schema import parse_yaml

    try:
        return parse_yaml(text)
    except Exception as problem:  # the parser raises many kinds
        raise ValueError(getattr(problem, "problem", None) or str(problem) or type(problem).__name__) from problem


def visible(text: str) -> str:
    """`text` with what would act on a terminal, or turn the order of letters around, shown as \\x1b and the like."""
    text = text.encode("utf-8", "backslashreplace").decode()  # names of files that are no UTF-8
    return _ACTING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
