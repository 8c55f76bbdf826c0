"""Launchers notice the loss of a machine by its heartbeat, and nothing else: real rendezvous, on one machine."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from shared import free_port
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters

from amp_core.run import heartbeat
from amp_core.run.rendezvous import meeting_seconds

PATIENCE = 1.0


@pytest.fixture
def two_machines(monkeypatch):
    """Makes two launchers' ends of one rendezvous; left at the end."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)
    made: list[heartbeat.Watched] = []

    def make(*, restarts: bool) -> list[heartbeat.Watched]:
        endpoint = f"127.0.0.1:{free_port()}"
        ends = []
        for is_host in (True, False):
            params = RendezvousParameters(
                heartbeat.BACKEND, endpoint, "test", 2, 2, is_host=is_host, patience=PATIENCE, restarts=restarts
            )
            ends.append(heartbeat._create(params))
        with ThreadPoolExecutor(2) as pool:
            infos = list(pool.map(lambda end: end.next_rendezvous(), ends))
        assert sorted(info.rank for info in infos) == [0, 1]
        made.extend(ends)
        return ends

    yield make
    heartbeat.leave()
    for end in made:
        end.shutdown()  # else torch's own timer ends where it is collected, and may have to wait for its own thread
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def silence(end: heartbeat.Watched) -> None:
    """What SIGKILL does to it, or a cable that is pulled."""
    end._ended.set()
    end._beating.join()


def watched(end: heartbeat.Watched, seconds: float) -> float | None:
    """After how many seconds the agent would start its workers again, or None."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        if end.num_nodes_waiting():
            return time.monotonic() - began
        time.sleep(0.02)
    return None


def test_a_machine_that_beats_is_there_and_a_silent_one_is_lost(two_machines, caplog):
    ours, theirs = two_machines(restarts=True)
    assert watched(ours, 3 * PATIENCE) is None
    silence(theirs)
    seconds = watched(ours, 20 * PATIENCE)
    assert seconds is not None and seconds > PATIENCE / 2
    assert "no sign of life for 1 s" in caplog.text


def test_without_restarts_the_run_ends_and_says_which_machine(two_machines):
    ours, theirs = two_machines(restarts=False)
    silence(theirs)
    with pytest.raises(RendezvousError, match=r"machine\(s\) [01] of 2: no sign of life for 1 s"):
        watched(ours, 20 * PATIENCE)


def test_a_machine_that_left_in_order_is_not_lost(two_machines):
    ours, theirs = two_machines(restarts=True)
    theirs.leave()
    assert watched(ours, 3 * PATIENCE) is None


def test_a_store_that_is_in_use_holds_no_beat_up(two_machines):
    """The agent waits in its store for minutes, at its end, and holds the lock of that connection."""
    ours, theirs = two_machines(restarts=True)
    waiting = threading.Thread(target=theirs._store.get, args=["set later"])
    waiting.start()
    try:
        assert watched(ours, 3 * PATIENCE) is None
    finally:
        ours._store.set("set later", "")
        waiting.join()


def test_how_long_is_waited_follows_the_timeout_of_the_run():
    assert [meeting_seconds(minutes) for minutes in (None, 0.05, 2.0, 10.0)] == [300.0, 60.0, 120.0, 300.0]
    assert heartbeat.configs(3, 10.0) == {"patience": heartbeat.LOST_SECONDS, "restarts": True}
    assert [heartbeat.configs(0, minutes)["patience"] for minutes in (0.05, 10.0)] == [heartbeat.LOST_SECONDS, 600.0]
