"""Two launchers: one is killed with its workers before these have met, or the link between both is cut."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shared import free_port
from test_recipes import arguments

from amp_core.config.processes import with_argument

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def workers_of(folder: Path) -> set[int]:
    """Process ids of the workers whose job's file lies in this folder."""
    return {pid for job in folder.glob("*/job.json") for pid in with_argument(job)}


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def seconds_until_noticed(place: Path, after: float) -> float:
    """Loses one of two machines so many seconds after its workers started. How long the other one's worker lives on.

    Then it must start again, without the lost one.
    """
    port = free_port()
    command = arguments("custom_function", "steps=100000", "save_every=50", "eval_every=100000", "layout=ddp")
    command += ["layout.nproc_per_node=1", "layout.nnodes=1:2", "layout.max_restarts=3", "layout.rdzv_id=lost"]
    command += [f"layout.rdzv_endpoint=127.0.0.1:{port}", "layout.timeout_minutes=1", f"run_dir={place / 'run'}"]
    launchers, places = [], [place / "survivor", place / "lost"]
    try:
        for each in places:
            each.mkdir()
            with (each / "output.txt").open("w") as output:
                launchers.append(
                    subprocess.Popen(
                        [sys.executable, ROOT / "train.py", *command],
                        env=os.environ | {"TMPDIR": str(each), "OMP_NUM_THREADS": "1"},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
            # The first one holds the meeting point.
            assert wait_for(lambda: listens(port), 60), (places[0] / "output.txt").read_text()
        assert wait_for(lambda: all(map(workers_of, places)), 120)
        time.sleep(after)
        (survivor,), lost = workers_of(places[0]), workers_of(places[1])
        began = time.monotonic()
        for pid in (launchers[1].pid, *lost):
            os.kill(pid, signal.SIGKILL)
        assert wait_for(lambda: survivor not in workers_of(places[0]), 120), (places[0] / "output.txt").read_text()
        took = time.monotonic() - began
        assert launchers[0].poll() is None
        assert wait_for(lambda: workers_of(places[0]), 120)  # and start again, without it
        return took
    finally:
        for launcher, each in zip(launchers, places, strict=False):
            for pid in (launcher.pid, *workers_of(each)):
                if launcher.poll() is None or pid != launcher.pid:
                    os.kill(pid, signal.SIGKILL)
            launcher.wait()


def test_a_machine_lost_before_its_workers_met_is_noticed(tmp_path):
    # They import torch for seconds before they meet, and wait for each other for a minute.
    assert seconds_until_noticed(tmp_path, after=0.0) < 120


def test_a_cut_link_ends_both_launchers_with_the_timeouts_of_the_kernel(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, ROOT / "scripts" / "faults.py", "--short", "--only", "network", "--json", report]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (part,) = json.loads(report.read_text())["parts"]
    if "left out" in part["facts"]:
        pytest.skip(part["facts"]["left out"])
    assert sum(part["counts"].values()) > 0 and not part["violations"]
