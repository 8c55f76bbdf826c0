"""Two launchers: one is killed with its workers before these have met, or the link between both is cut."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from running import Forked
from shared import free_port
from test_recipes import arguments

from amp_core.cli.compose import compose
from amp_core.config.job import Job
from amp_core.config.processes import with_argument
from amp_core.config.rules import build
from amp_core.run import launch

ROOT = Path(__file__).resolve().parents[2]
# Workers that wait for each other for ten seconds instead of a minute.
WORKER = """
import os, sys
from pathlib import Path
from amp_core.run import rendezvous
from amp_core.run.launch import work
from recipes import run

rendezvous.MEETING_SECONDS = (10.0, 10.0)
os._exit(work(Path(sys.argv[1]), run))
"""

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


def machine(folder: Path, script: Path, command: list[str], run: Path) -> int:
    """A launcher, with its temporary files in a folder of its own."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    tempfile.tempdir = str(folder)
    job = Job(build(compose(command)), str(run), command)
    return launch.launch(job, run, [sys.executable, str(script)]).exit_code


def test_a_machine_lost_before_its_workers_met_is_noticed_and_the_other_starts_again(own_folder):
    port = free_port()
    command = arguments("custom_function", "steps=100000", "save_every=50", "eval_every=100000", "layout=ddp")
    command += ["layout.nproc_per_node=1", "layout.nnodes=1:2", "layout.max_restarts=3", "layout.rdzv_id=lost"]
    command += [f"layout.rdzv_endpoint=127.0.0.1:{port}", "layout.timeout_minutes=1", f"run_dir={own_folder / 'run'}"]
    script = own_folder / "worker.py"
    script.write_text(WORKER)
    launchers, places = [], [own_folder / "survivor", own_folder / "lost"]
    try:
        for each in places:
            each.mkdir()
            launchers.append(Forked(machine, each, script, command, own_folder / "run"))
            # The first one holds the meeting point.
            assert wait_for(lambda: listens(port), 60), launchers[0].output.read_text()
        assert wait_for(lambda: all(map(workers_of, places)), 120)
        (survivor,), lost = workers_of(places[0]), workers_of(places[1])
        began = time.monotonic()
        for pid in (launchers[1].pid, *lost):
            os.kill(pid, signal.SIGKILL)
        # It imports torch for seconds before it waits for the others.
        gone = wait_for(lambda: survivor not in workers_of(places[0]), 60)
        assert gone and time.monotonic() - began > 10, launchers[0].output.read_text()
        assert launchers[0].poll() is None
        assert wait_for(lambda: workers_of(places[0]), 60)  # and start again, without it
    finally:
        for launcher, each in zip(launchers, places, strict=False):
            for pid in (launcher.pid, *workers_of(each)):
                if launcher.poll() is None or pid != launcher.pid:
                    os.kill(pid, signal.SIGKILL)
            launcher.process.join()


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
