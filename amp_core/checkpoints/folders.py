"""Files and folders that are whole on disk or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

FORMAT = 1
STATE = "state.pt"
MANIFEST = "manifest.json"
SHARD = re.compile(r"(parts|whole)_[0-9]{5,}\.safetensors")
STEP_FOLDER = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")
_TEMPORARY = re.compile(r"\.tmp-(?:old-)?step_[0-9]{8,}-([0-9]+)")
RESERVED = ("progress", "config", "format", "sharded")
_CHUNK = 1 << 26  # macOS refuses to write 2 GiB at once


def temporary_folder(folder: Path, prefix: str = "") -> Path:
    return folder.parent / f".tmp-{prefix}{folder.name}-{os.getpid()}"


def remove_leftovers(folder: Path) -> None:
    """Removes temporary folders of processes that no longer live; a failure costs space and nothing else."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            match = _TEMPORARY.fullmatch(name)
            if match and not _is_alive(int(match[1])):
                remove(folder / name)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def make_folder(folder: Path) -> None:
    if not folder.is_dir():
        make_folder(folder.parent)
        os.mkdir(folder)
        sync_folder(folder.parent)


def write_file(path: Path, *data: bytes | bytearray | memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for rest in map(memoryview, data):
            while rest:
                rest = rest[os.write(descriptor, rest[:_CHUNK]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot do it for a folder
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for name in os.listdir(path):
            remove(path / name)
        os.rmdir(path)
    else:
        os.unlink(path)


def free_bytes(folder: Path) -> int | str:
    """Free space where `folder` is or would be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        space = os.statvfs(folder)
    except OSError:
        return "an unknown number"
    return space.f_bavail * space.f_frsize
