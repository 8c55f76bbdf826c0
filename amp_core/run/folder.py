"""The run folder: locked by the run that writes there, its settings and its summary. Rank 0 writes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from amp_core.config.errors import CheckpointError, SaveError
from amp_core.config.files import read_json, remove_leftovers
from amp_core.run import locks
from amp_core.run.environment import Environment, peak_memory
from amp_core.run.lines import write_json, write_text
from amp_core.run.locks import lock_folder
from amp_core.run.machine import describe

logger = logging.getLogger("amp_recipes")


@contextlib.contextmanager
def writing(run_dir: Path | None) -> Iterator[None]:
    """Turn an OSError into a SaveError that names the run folder."""
    try:
        yield
    except OSError as problem:
        raise SaveError(f"run_dir={run_dir}: cannot be written: {problem.strerror or problem}") from problem


class RunFolder:
    """The folder of a run; on all ranks, but only rank 0 opens it. Without one nothing is written."""

    def __init__(self, env: Environment) -> None:
        self._env, self.path = env, env.run_dir
        self.before: dict[str, Any] = {}
        """What summary.json held when this run began."""
        self._lock: IO[str] | None = None
        self._new: list[Path] = []
        """Folders that `open` created, innermost first."""
        self._begun = False

    def open(self) -> None:
        """Create the run folder and take its lock. Rank 0. What it holds is not touched before `begin`."""
        if self.path is None or not self._env.is_main:
            return
        with writing(self.path):
            path = self.path.absolute()  # fails in a folder that was removed
            for tries_left in reversed(range(100)):
                self._new = [folder for folder in (path, *path.parents) if not folder.exists()]
                try:
                    path.mkdir(parents=True, exist_ok=True)
                    self._lock = lock_folder(self.path)
                    break
                except FileNotFoundError:  # perhaps a refused run has just removed the folders that it made
                    if not tries_left:  # in /proc each try fails like that
                        raise
            with contextlib.suppress(FileNotFoundError, ValueError):
                self.before = read_json(self.path / "summary.json")

    def check(self) -> None:
        """Before a checkpoint or a sample is written. SaveError: the path leads to another folder than was locked."""
        if self.path is not None and self._lock is not None and not locks.is_of(self._lock, self.path):
            raise SaveError(
                f"run_dir={self.path}: the folder or its .lock was moved or removed while this run wrote there. "
                "Nothing more is written. To resume, move it back, or give its new place as run_dir."
            )

    def begin(self) -> None:
        """Write what is known at the start. Called once nothing can refuse the run any more."""
        if self.path is None or not self._env.is_main:
            return
        with writing(self.path):
            hydra = self.path / ".hydra"
            hydra.mkdir(exist_ok=True)
            for place in (self.path, hydra, self.path / "doctor"):
                remove_leftovers(place)
            from omegaconf import OmegaConf

            write_text(hydra / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(self._env.cfg.to_dict())))
            write_text(hydra / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(self._env.job.overrides)))
            write_json(self.path / "environment.json", describe(self._env))
        self._begun = True
        self.write_summary("running", 0)

    def write_summary(self, status: str, exit_code: int, error: str | None = None) -> None:
        """summary.json of the run; only rank 0 writes, and only when there is a run folder."""
        is_refused = bool(self._new) and exit_code == CheckpointError.exit_code
        says = self._begun or (status == "failed" and self._env.cfg.task == "train" and not is_refused)
        if self.path is None or self._lock is None or not says:
            return
        if not locks.is_of(self._lock, self.path):  # moved: a folder of this name now is not ours
            return
        defaults = {
            "status": status,
            "exit_code": exit_code,
            "step": 0,
            "eval": {},
            "amp": self._env.cfg.amp.name,
            "device": self._env.device.type,
            "world_size": self._env.world_size,
            "samples_per_second": None,
            "data_wait": None,
            "peak_memory_bytes": peak_memory(self._env.device),
            "memory": None,
            "skipped": 0,
            "seconds": round(time.monotonic() - self._env.started, 3),
        }
        try:
            write_json(self.path / "summary.json", defaults | self._env.summary | {"error": error})
        except OSError as problem:
            message = f"{self.path / 'summary.json'}: cannot be written: {problem.strerror or problem}"
            if status == "finished":
                raise SaveError(f"{message}; it does not record that the run has finished") from problem
            logger.warning(message)  # a full disk must not hide what happened

    def close(self) -> None:
        if self._lock is None:
            return
        refused = self._new and not self._begun
        if refused and self.path is not None and locks.is_of(self._lock, self.path):  # leave nothing behind
            (self.path / ".lock").unlink()
            with contextlib.suppress(OSError):
                for folder in self._new:
                    folder.rmdir()
        self._lock.close()
        self._lock = None
