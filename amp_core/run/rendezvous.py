"""The store through which the workers of an attempt find each other."""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
import uuid

LAUNCHER = "AMP_RECIPES_LAUNCHER"
"""Environment variable of our workers: the process id of their launcher. Workers of torchrun take their
parent's, before the import of torch, which takes seconds."""
_launcher = int(os.environ.get(LAUNCHER) or (os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0))

import torch.distributed as dist  # noqa: E402


def launched() -> bool:
    """Whether this process is one of several started by torchrun or by torch's elastic agent."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


class WorkerStore:
    """Text shared by the workers of an agent. Keys of earlier attempts stay in the agent's store, and would confuse a
    new process group; so all but `first` are kept apart by attempt."""

    def __init__(self, timeout_minutes: float | None) -> None:
        least, most = MEETING_SECONDS
        self._seconds = most if timeout_minutes is None else min(max(least, 60.0 * timeout_minutes), most)
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._all = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=not agent_hosts and os.environ["RANK"] == "0",
            timeout=datetime.timedelta(seconds=self._seconds),
        )
        self._attempt = dist.PrefixStore(f"amp_recipes/{self._meet()}", self._all)

    def _meet(self) -> str:
        """A name that all ranks of this attempt have and no other attempt had.

        The agent's count of restarts is none: it stays when a machine comes back, and differs between machines. So each
        rank sends a number of its own, and only an answer to that number can be from rank 0 of the same attempt.
        """
        rank, own = int(os.environ["RANK"]), uuid.uuid4().hex
        store = dist.PrefixStore("amp_recipes/meeting", self._all)
        if rank:
            store.set(f"{rank}", own)
            name = store.get(own).decode()
            store.set(f"{name}/{rank}", "")
            return name
        missing, end = set(range(1, int(os.environ["WORLD_SIZE"]))), time.monotonic() + self._seconds
        while missing:
            for other in sorted(missing):
                if store.check([f"{other}"]):  # of this attempt, or left by an earlier one
                    store.set(store.get(f"{other}").decode(), own)
                if store.check([f"{own}/{other}"]):
                    missing.remove(other)
            if time.monotonic() > end:
                raise RuntimeError(f"ranks {sorted(missing)} did not arrive within {self._seconds:g} s")
            time.sleep(0.01)
        return own

    def set(self, key: str, text: str) -> None:
        self._attempt.set(key, text)

    def get(self, key: str) -> str:
        """Wait until a rank has set it."""
        return self._attempt.get(key).decode()

    def first(self, key: str, text: str) -> str:
        """The value that the first attempt set."""
        return self._all.compare_set(f"amp_recipes/{key}", "", text).decode()

    def for_process_group(self) -> dist.Store:
        return dist.PrefixStore("process_group", self._attempt)


MEETING_SECONDS = (60.0, 300.0)
"""The least and most time for which the workers of an attempt wait for each other, else as long as a collective does:
some import from a slow disk."""

_store: WorkerStore | None = None


def worker_store(timeout_minutes: float | None = None) -> WorkerStore:
    """The store of this worker's agent, connected once; under torchrun the run's `timeout_minutes` are not known."""
    global _store
    if _store is None:
        has_met = threading.Event()
        threading.Thread(target=_end_without_launcher, args=[has_met], daemon=True).start()
        try:
            _store = WorkerStore(timeout_minutes)
        finally:
            has_met.set()
    return _store


def _end_without_launcher(has_met: threading.Event) -> None:
    """While a worker waits for a store that may have died with its launcher; later `Stop` watches the launcher."""
    launcher = _launcher or os.getppid()
    while not has_met.wait(0.2):
        if os.getppid() != launcher:
            print("error: the launcher was killed before the run began", file=sys.stderr, flush=True)
            os._exit(1)


def others_start_again() -> bool:
    """Whether the agents of other machines resume from the last checkpoint when this one's workers end."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return launched() and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and restarts > 0
