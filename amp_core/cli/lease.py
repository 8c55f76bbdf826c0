"""GPUs and cores of a machine, shared out to jobs that run side by side.

A lease is a lock on a file per device, held by the open file: it ends with the process that holds it, however that
ends. A job's process inherits the file (`pass_fds`), so a device stays taken until both the job and who started it are
gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from amp_core.config.schema import Config

POLL_SECONDS = 0.2


@contextlib.contextmanager
def lease(
    count: int,
    devices: Sequence[str],
    folder: Path,
    *,
    waiting: Callable[[], None] = lambda: None,
    given_up: Callable[[], bool] = lambda: False,
) -> Iterator[dict[str, int]]:
    """Take `count` of the devices, waiting for them as long as others have them: device -> descriptor of its lock.

    Waiting jobs queue: the first takes what becomes free until it has enough. So jobs that need several devices
    neither block each other with a part of them nor starve behind those that need one. `waiting` is called once, when
    there is something to wait for; `given_up` is asked while waiting, and true raises InterruptedError.
    """
    if count > len(devices):
        raise ValueError(f"{count} devices asked for, and there are {len(devices)}: {', '.join(devices)}")
    if not count:
        yield {}
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    taken: dict[str, int] = {}
    said = False
    try:
        while len(taken) <= count:
            for name in ("line", *devices):  # only who has the line, the head of the queue, takes devices
                if name not in taken and len(taken) <= count and (name == "line" or "line" in taken):
                    taken |= _locked(folder, name)
            if len(taken) <= count and given_up():
                raise InterruptedError
            if len(taken) <= count:
                if not said:
                    waiting()
                said = True
                time.sleep(POLL_SECONDS)
        os.close(taken.pop("line"))
        yield {name: taken[name] for name in devices if name in taken}
    finally:
        for file in taken.values():
            os.close(file)


def _locked(folder: Path, name: str) -> dict[str, int]:
    """{name: descriptor of the locked file}; empty: another process has it. OSError: this file system has no locks."""
    file = os.open(folder / re.sub(r"[^\w.-]", "_", name), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            return {}
        raise
    return {name: file}


def lease_folder() -> Path:
    """Where this user's leases on this machine are. Numbers of GPUs count within a job of SLURM."""
    return Path(tempfile.gettempdir(), f"amp_recipes_{os.getuid()}", f"gpus{os.environ.get('SLURM_JOB_ID', '')}")


def visible_devices(num_gpus: int) -> list[str]:
    """The names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them; torch sees `num_gpus`."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    # CUDA ends the list at the first one that it does not know.
    return named[:num_gpus] or [str(number) for number in range(num_gpus)]


def gpus_of(cfg: Config, num_gpus: int) -> int:
    """How many of the machine's GPUs a run takes."""
    if cfg.device == "cpu" or not num_gpus:
        return 0
    if cfg.layout.name == "single":
        return 1
    if cfg.layout.name == "data_parallel":
        return num_gpus
    stages = cfg.layout.num_stages or 1
    return min(num_gpus, (cfg.layout.nproc_per_node or num_gpus // stages) * stages)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
