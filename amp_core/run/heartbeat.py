"""Heartbeats between the launchers of several machines, to notice a lost machine at any time.

torch's agent learns of a lost machine only from a collective that fails. While workers import and meet there is none,
and they would wait for the lost ones until a timeout. So each launcher sets a key every two seconds, and watches those
of the others: where one stands still, its agent starts its workers again without that machine, or ends the run.

A rendezvous of torch, registered by name, around its own one ("c10d").
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)

logger = logging.getLogger("amp_recipes")

BACKEND = "c10d_with_heartbeats"
BEAT_SECONDS = 2.0
LOST_SECONDS = 30.0
"""Longer than a launcher on a busy machine stands still."""
LEFT = "left"
"""Set by a launcher that ends in order: its workers may still be finishing elsewhere."""


def configs(max_restarts: int, timeout_minutes: float) -> dict[str, Any]:
    """`LaunchConfig.rdzv_configs` for this rendezvous, with `layout.max_restarts` and `layout.timeout_minutes`.

    Without restarts a lost machine ends the run, after `timeout_minutes` as in a collective.
    """
    patience = LOST_SECONDS if max_restarts else max(LOST_SECONDS, 60.0 * timeout_minutes)
    return {"patience": patience, "restarts": max_restarts > 0}


class Watched(RendezvousHandler):
    """A rendezvous whose partners are watched: one without a sign of life for `patience` seconds is lost.

    With `restarts` workers start again without it; otherwise the run ends.
    """

    def __init__(self, inner: RendezvousHandler, patience: float, restarts: bool) -> None:
        self._inner = inner
        self._patience, self._restarts = patience, restarts
        self._store: dist.Store | None = None
        self._signs: dict[int, tuple[bytes, float]] = {}
        """Of each other machine the last sign of life, and since when it stands."""
        self._looked = 0.0
        self._own: tuple[dist.Store, str] | None = None
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._inner.next_rendezvous()
        now = time.monotonic()
        self._store = info.store
        self._signs = {rank: (b"", now) for rank in range(info.world_size) if rank != info.rank}
        # A store of its own: the agent waits in its one, and holds its lock meanwhile.
        self._own = info.store.clone(), f"heartbeat/{info.rank}"  # type: ignore[attr-defined]
        if not self._beating.is_alive():
            self._beating.start()
        return info

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(BEAT_SECONDS if count else 0.0):
            count += 1
            assert self._own is not None
            store, key = self._own
            with contextlib.suppress(RuntimeError):  # the machine of the store is gone: the agent finds out by itself
                store.set(key, str(count))

    def num_nodes_waiting(self) -> int:
        waiting = self._inner.num_nodes_waiting()
        lost = self._lost()
        if not waiting and lost:
            names = f"machine(s) {', '.join(map(str, lost))} of {len(self._signs) + 1}"
            text = f"{names}: no sign of life for {self._patience:g} s"
            if not self._restarts:
                raise RendezvousError(text)
            logger.warning("%s; the workers here start again without", text)
            return len(lost)
        return waiting

    def _lost(self) -> list[int]:
        """Which machines have been silent for too long."""
        now = time.monotonic()
        if self._store is None or now < self._looked + BEAT_SECONDS:
            return []
        self._looked = now
        for rank, (last, _) in self._signs.items():
            key = f"heartbeat/{rank}"
            value = self._store.get(key) if self._store.check([key]) else b""
            if value != last or value == LEFT.encode():
                self._signs[rank] = value, now
        return [rank for rank, (_, since) in self._signs.items() if now - since > self._patience]

    def leave(self) -> None:
        """End in order: this machine is not to be taken for lost."""
        self._ended.set()
        if self._beating.is_alive():
            self._beating.join()
        if self._own is not None:
            store, key = self._own
            with contextlib.suppress(RuntimeError):
                store.set(key, LEFT)
            self._own = None

    def shutdown(self) -> bool:
        self.leave()
        return self._inner.shutdown()

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()


_open: list[Watched] = []


def _create(params: RendezvousParameters) -> RendezvousHandler:
    inner_params = copy.copy(params)
    inner_params.backend = "c10d"
    inner = rendezvous_handler_registry.create_handler(inner_params)
    _open.append(Watched(inner, params.get("patience"), params.get("restarts")))
    return _open[-1]


def leave() -> None:
    """To be called when the launcher ends: torch does not close a rendezvous that a signal ended."""
    while _open:
        _open.pop().leave()


rendezvous_handler_registry.register(BACKEND, _create)
