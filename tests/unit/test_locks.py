"""A run folder has one writer, whoever removes its lock and whenever; a run whose folder is moved stops."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amp_core.config.errors import ConfigError, SaveError
from amp_core.run import locks
from amp_core.run.folder import RunFolder
from amp_core.run.locks import lock_folder


def starting(folder: Path) -> RunFolder:
    """That of a run that has its folder and may still be refused."""
    env: Any = SimpleNamespace(run_dir=folder, is_main=True)
    found = RunFolder(env)
    found.open()
    return found


def before_the_lock(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Another process gets in between the opening of `.lock` and its locking, once."""
    flock, pending = locks.fcntl.flock, [act]

    def late(*arguments: object) -> None:
        if pending:
            pending.pop()()
        flock(*arguments)

    monkeypatch.setattr(locks.fcntl, "flock", late)


def writers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A refused run removes its lock after a second one has opened it, and a third one starts: who may write?"""
    first, found = starting(folder), []

    def others() -> None:
        first.close()
        assert not folder.exists()
        found.append(starting(folder))

    before_the_lock(monkeypatch, others)
    with contextlib.suppress(ConfigError):
        found.append(starting(folder))
    count = len(found)
    for env in found:
        env._lock.close()
    return count


def test_a_lock_that_was_removed_and_made_anew_makes_no_second_writer(tmp_path, monkeypatch):
    assert writers(tmp_path / "a", monkeypatch) == 1


def test_a_folder_that_a_refused_run_removed_is_made_again(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    first = starting(folder)
    before_the_lock(monkeypatch, first.close)
    second = starting(folder)
    assert second._lock is not None and locks.is_of(second._lock, folder)
    second.close()
    assert not folder.exists()


def test_a_run_does_not_remove_the_lock_of_another_one_in_the_place_of_its_folder(tmp_path):
    first = starting(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    second = starting(tmp_path / "run")
    with pytest.raises(SaveError, match="was moved or removed while this run wrote there"):
        first.check()
    first.close()
    second.check()
    with pytest.raises(ConfigError, match="is being written"):
        lock_folder(tmp_path / "run")
    second.close()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_lock_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / ".lock")
    with pytest.raises(SaveError, match="cannot be written"):
        starting(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def is_free_beside_a_forked_process(folder: Path) -> bool:
    """Whether the lock ends with its process, which has forked another one that goes on."""
    lock, (read, write), (begun, began) = lock_folder(folder), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.write(began, b"x")
        os.read(read, 1)
        os._exit(0)
    try:
        os.read(begun, 1)
        lock.close()  # what the end of a process does
        with contextlib.suppress(ConfigError):
            lock_folder(folder).close()
            return True
        return False
    finally:
        for descriptor in (read, write, begun, began):
            os.close(descriptor)
        os.waitpid(child, 0)


def test_a_data_worker_that_outlives_its_run_does_not_hold_the_folder(tmp_path):
    assert is_free_beside_a_forked_process(tmp_path)
