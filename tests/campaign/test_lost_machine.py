"""Two launchers, and one is killed with its workers before these have met: the other one notices."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_recipes import arguments

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def workers_of(folder: Path) -> set[int]:
    """Process ids of the workers whose job's file lies in this folder."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            if command.rstrip(b"\0").endswith(b"job.json") and os.fsencode(folder) in command:
                found.add(int(entry.name))
    return found


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_machine_lost_before_its_workers_met_is_noticed(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = arguments("custom_function", "steps=100000", "save_every=50", "eval_every=100000", "layout=ddp")
    command += ["layout.nproc_per_node=1", "layout.nnodes=1:2", "layout.max_restarts=3", "layout.rdzv_id=lost"]
    command += [f"layout.rdzv_endpoint=127.0.0.1:{port}", f"run_dir={tmp_path / 'run'}"]
    launchers, places = [], [tmp_path / "survivor", tmp_path / "lost"]
    try:
        for place in places:
            place.mkdir()
            with (place / "output.txt").open("w") as output:
                launchers.append(
                    subprocess.Popen(
                        [sys.executable, ROOT / "train.py", *command],
                        env=os.environ | {"TMPDIR": str(place), "OMP_NUM_THREADS": "1"},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
            assert wait_for(lambda: listens(port), 60)  # the first one holds the meeting point
        assert wait_for(lambda: all(map(workers_of, places)), 120)
        (survivor,), lost = workers_of(places[0]), workers_of(places[1])
        for pid in (launchers[1].pid, *lost):  # they import torch for seconds before they meet
            os.kill(pid, signal.SIGKILL)
        # 30 s until it counts as lost, then its partner's workers end.
        assert wait_for(lambda: survivor not in workers_of(places[0]), 60), (places[0] / "output.txt").read_text()
        assert launchers[0].poll() is None
        assert wait_for(lambda: workers_of(places[0]), 120)  # and start again, without it
        assert "no sign of life for 30 s" in (places[0] / "output.txt").read_text()
    finally:
        for launcher, place in zip(launchers, places, strict=False):
            for pid in (launcher.pid, *workers_of(place)):
                if launcher.poll() is None or pid != launcher.pid:
                    os.kill(pid, signal.SIGKILL)
            launcher.wait()
