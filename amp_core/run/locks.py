"""The lock of a run folder, held by the open file `.lock`: a killed process leaves none behind."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import weakref
from pathlib import Path
from typing import IO

from amp_core.config.errors import ConfigError
from amp_core.config.files import open_file


def acquire(folder: Path) -> IO[str]:
    """Locks `.lock` in a folder, which is made if it is not there.

    Only the holder of the lock may remove the file. So it is compared after locking: another process may have removed
    the file that was opened, and a third one holds the lock of the file that replaced it.

    BlockingIOError: another process holds it; `strerror` is what the file says about its owner. Other OSErrors: it
    cannot be made, or is no regular file.
    """
    while True:
        try:  # not what a link leads to, since it is emptied
            descriptor = open_file(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as problem:
            if problem.errno == errno.EINVAL:
                raise OSError(0, "its .lock is no regular file") from problem
            raise
        lock = os.fdopen(descriptor, "r+", errors="replace")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            owner = lock.read(200).strip()
            lock.close()
            raise BlockingIOError(problem.errno, owner or "another process") from problem
        if is_of(lock, folder):
            _held.add(lock)
            return lock
        lock.close()


_held: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked process: a data worker that hangs when its run is killed would hold the lock for it."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def is_of(lock: IO[str], folder: Path) -> bool:
    """Whether a lock is the one of the folder that has this path now."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / ".lock", follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return False


def lock_folder(run_dir: Path) -> IO[str]:
    """Take the lock of a run folder, and write into it who has it. ConfigError: another process has it."""
    try:
        lock = acquire(run_dir)
    except BlockingIOError as problem:
        raise ConfigError(
            f"run_dir={run_dir}: is being written by {problem.strerror}; wait for it, or choose another run_dir"
        ) from problem
    lock.truncate()
    lock.write(f"process {os.getpid()} on {platform.node()}")
    lock.flush()
    return lock
