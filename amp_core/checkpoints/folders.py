"""Files and step folders that are whole on disk or not there, and the removal of old ones.

Whatever changes the file system goes through `os`, call by call, so that a test can stop between any two.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amp_core.checkpoints.manifest import CorruptFile, inspect, step_folders
from amp_core.config.errors import CheckpointError, SaveError

_TEMPORARY = re.compile(r"\.tmp-(?:old-)?step_[0-9]{8,}-([0-9]+)")
_CHUNK = 1 << 26  # macOS refuses to write 2 GiB at once


# --- step folders -----------------------------------------------------------------------------------------------------


def write_step(target: Path, files: Mapping[str, Sequence[Any]]) -> None:
    """Writes a step folder. Any call of it may be the last: the newest checkpoint loads all the same."""
    temporary = make_temporary(target)
    try:
        for name, data in files.items():
            write_file(temporary / name, *data)
        publish(temporary, target)
    finally:
        abandon(temporary)


def make_temporary(target: Path) -> Path:
    """The empty folder in which a step is written before it gets its name."""
    temporary = _temporary_folder(target)
    with saving(target):
        make_folder(target.parent)
        if os.path.lexists(temporary):  # of a dead process with our number, as containers give the same ones out
            remove(temporary)
        os.mkdir(temporary)
    return temporary


def publish(temporary: Path, target: Path) -> None:
    """Gives a step folder its name when its files are on disk."""
    sync_folder(temporary)
    damaged = set_aside(target) if os.path.lexists(target) else None
    os.rename(temporary, target)
    sync_folder(target.parent)
    if damaged:
        with contextlib.suppress(OSError):  # the new one is safe, and the next run tries again
            remove(damaged)


def abandon(temporary: Path) -> None:
    """Removes what was not published."""
    with contextlib.suppress(OSError):
        if os.path.lexists(temporary):
            remove(temporary)


def remove_old(
    folder: Path, current: int, keep: int, best: tuple[str, str] | None, verify: Callable[[Path], bool]
) -> None:
    """Removes what is neither among the newest nor the best. Damaged ones do not count, and stay.

    Args:
        folder: of the step folders.
        current: the step that was just written, which stays.
        keep: how many of the newest stay.
        best: (metric, "max" or "min"): the one with the best value stays, too.
        verify: whether the files of a step are sound; called for those that are to stay.
    """
    metrics: dict[int, dict[str, Any]] = {}
    paths = step_folders(folder)
    for step, path in paths.items():
        with contextlib.suppress(CorruptFile, CheckpointError):
            metrics[step] = inspect(path)["metrics"]
    damaged: set[int] = set()

    def is_sound(step: int) -> bool:
        if step not in damaged and not verify(paths[step]):
            damaged.add(step)
        return step not in damaged

    if len(metrics) > keep:
        newest = itertools.islice(filter(is_sound, sorted(metrics, reverse=True)), keep)
        kept = {current, *newest, *itertools.islice(filter(is_sound, ranking(metrics, best)), 1)}
        for step in sorted(metrics.keys() - kept - damaged):
            remove(set_aside(paths[step]))


def ranking(metrics: Mapping[int, Mapping[str, float | None]], best: tuple[str, str] | None) -> list[int]:
    """Steps with a value of the metric, the best first, the later one of equals before the other."""
    if best is None:
        return []
    name, mode = best
    values = {step: value for step, of in metrics.items() if (value := of.get(name)) is not None}
    return sorted(values, key=lambda step: (values[step] if mode == "max" else -values[step], step), reverse=True)


def set_aside(folder: Path) -> Path:
    """Renames what is to be removed, so that no step folder is ever seen half deleted."""
    trash = _temporary_folder(folder, "old-")
    if os.path.lexists(trash):
        remove(trash)
    os.rename(folder, trash)
    sync_folder(folder.parent)
    return trash


@contextlib.contextmanager
def saving(target: Path, num_bytes: int = 0) -> Iterator[None]:
    """Turns an error of the system into a SaveError."""
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"cannot save {target}: {error.strerror or error} ({num_bytes} bytes needed, "
            f"{_free_bytes(target.parent)} free). Earlier checkpoints are intact."
        ) from error


def _temporary_folder(folder: Path, prefix: str = "") -> Path:
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


# --- files ------------------------------------------------------------------------------------------------------------


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


def _free_bytes(folder: Path) -> int | str:
    """Free space where `folder` is or would be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        space = os.statvfs(folder)
    except OSError:
        return "an unknown number"
    return space.f_bavail * space.f_frsize
