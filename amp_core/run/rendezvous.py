"""The store through which the workers of an attempt find each other."""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
import uuid

import torch.distributed as dist

from amp_core.config.processes import launched, launcher

MEETING_SECONDS = (60.0, 300.0)
"""The least and most time for which the workers of an attempt wait for each other, else as long as a collective does:
some import from a slow disk."""

_stores: tuple[dist.Store, dist.Store] | None = None


def worker_stores(timeout_minutes: float | None = None) -> tuple[dist.Store, dist.Store]:
    """What the workers of an agent share in this attempt, and in all; under torchrun `timeout_minutes` are not known.

    Keys of earlier attempts stay in the agent's store, and would confuse a new process group. Connected once.
    """
    global _stores
    if _stores is None:
        has_met = threading.Event()
        threading.Thread(target=_end_without_launcher, args=[has_met], daemon=True).start()
        least, most = MEETING_SECONDS
        seconds = most if timeout_minutes is None else min(max(least, 60.0 * timeout_minutes), most)
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=not agent_hosts and os.environ["RANK"] == "0",
                timeout=datetime.timedelta(seconds=seconds),
            )
            _stores = dist.PrefixStore(f"amp_recipes/{_meet(store, seconds)}", store), store
        finally:
            has_met.set()
    return _stores


def _meet(everything: dist.Store, seconds: float) -> str:
    """A name that all ranks of this attempt have and no other attempt had.

    The agent's count of restarts is none: it stays when a machine comes back, and differs between machines. So each
    rank sends a number of its own, and only an answer to that number can be from rank 0 of the same attempt.
    """
    rank, own = int(os.environ["RANK"]), uuid.uuid4().hex
    store = dist.PrefixStore("amp_recipes/meeting", everything)
    if rank:
        store.set(f"{rank}", own)
        name = store.get(own).decode()
        store.set(f"{name}/{rank}", "")
        return name
    missing, end = set(range(1, int(os.environ["WORLD_SIZE"]))), time.monotonic() + seconds
    while missing:
        for other in sorted(missing):
            if store.check([f"{other}"]):  # of this attempt, or left by an earlier one
                store.set(store.get(f"{other}").decode(), own)
            if store.check([f"{own}/{other}"]):
                missing.remove(other)
        if time.monotonic() > end:
            raise RuntimeError(f"ranks {sorted(missing)} did not arrive within {seconds:g} s")
        time.sleep(0.01)
    return own


def _end_without_launcher(has_met: threading.Event) -> None:
    """While a worker waits for a store that may have died with its launcher; later `Stop` watches the launcher."""
    parent = launcher or os.getppid()
    while not has_met.wait(0.2):
        if os.getppid() != parent:
            print("error: the launcher was killed before the run began", file=sys.stderr, flush=True)
            os._exit(1)


def others_start_again() -> bool:
    """Whether the agents of other machines resume from the last checkpoint when this one's workers end."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return launched() and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and restarts > 0
