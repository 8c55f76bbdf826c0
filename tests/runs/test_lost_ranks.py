"""Nobody waits for what is gone: ranks for a rank, a launcher for its meeting point, workers for their launcher."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from running import state, summary
from shared import free_port
from test_recipes import arguments

import train
from amp_core.checkpoints import folders
from amp_core.cli.compose import compose
from amp_core.config import processes
from amp_core.config.job import Job
from amp_core.config.rules import build
from amp_core.run import launch
from recipes import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# In case "stuck" a rank whose data worker stands still gives up. What it forked before keeps its connections open, so
# that its partner never sees them closed, as gloo sometimes misses it. In case "late" rank 0 ends long after the other.
WORKER = """
import functools, os, signal, sys, time
from pathlib import Path
from amp_core.data.loading import Batches
from amp_core.run import process
from amp_core.run.launch import work
from recipes import run

process.PATIENCE = (1.0, 1.0)
wait, end = Batches.__next__, process.end_process_group

def at_ten(act, self):
    if self._workers and self._number == 9:
        act(self._workers[0].pid)
        Path(MARK).touch()
    return wait(self)

def stop(worker):
    if os.fork() == 0:
        os.setsid()
        signal.alarm(60)
        while True:
            time.sleep(1)
    os.kill(worker, signal.SIGSTOP)

def end_late():
    end()
    time.sleep(4)

if CASE == "late" and os.environ["RANK"] == "0":
    process.end_process_group = end_late
if os.environ["RANK"] == "1":
    Batches.__next__ = functools.partialmethod(lambda self, act: at_ten(act, self), stop if CASE == "stuck" else id)
os._exit(work(Path(sys.argv[1]), run))
"""


def signal_when(mark: Path) -> None:
    while not mark.exists():
        time.sleep(0.05)
    time.sleep(1.0)  # its partner is in a collective by then
    os.kill(os.getpid(), signal.SIGTERM)


def launched(folder: Path, monkeypatch, case: str) -> tuple[launch.Outcome, float]:
    """How a run of two ranks ends that gets a SIGTERM, and after how many seconds."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    mark, script = folder / "mark", folder / "worker.py"
    script.write_text(WORKER.replace("MARK", repr(str(mark))).replace("CASE", repr(case)))
    command = arguments(
        "classification", "steps=1000000", "data.num_workers=1", "layout=ddp", "layout.nproc_per_node=2"
    )
    job = Job(build(compose(command)), str(folder / "run"), command)
    sender = threading.Thread(target=signal_when, args=[mark])
    sender.start()
    outcome = launch.launch(job, run, [sys.executable, str(script)])
    sender.join()
    took = time.time() - mark.stat().st_mtime
    left = processes.with_argument(script)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left  # also not what was forked to hold the connections
    assert outcome.exit_code == outcome.signalled == 143
    return outcome, took


@pytest.mark.slow
def test_a_rank_that_gave_up_ends_its_partner_that_did_not_notice(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SHUTDOWN_SECONDS", 40)
    outcome, took = launched(tmp_path, monkeypatch, "stuck")
    assert outcome.error is not None and "ended before the others" in outcome.error and took < 40


@pytest.mark.slow
def test_a_rank_that_ends_long_after_the_others_in_order_is_not_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "STANDSTILL_SECONDS", 1)
    outcome, took = launched(tmp_path, monkeypatch, "late")
    assert outcome.error is None and took > 4 > launch.STANDSTILL_SECONDS
    assert state(tmp_path / "run")["progress"]["step"] == summary(tmp_path / "run")["step"] > 0


@pytest.mark.parametrize("format", ["single", "sharded"])
def test_a_data_worker_that_dies_inside_a_save_is_one_message(tmp_path, monkeypatch, capfd, format):
    """torch tells of it by an exception wherever the program is."""
    write_file = folders.write_file

    def die_and_write(path, *data):
        (worker,) = multiprocessing.active_children()
        os.kill(worker.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        write_file(path, *data)

    monkeypatch.setattr(folders, "write_file", die_and_write)
    command = arguments("classification", "steps=4", "save_every=2", "data.num_workers=1", f"checkpoint={format}")
    assert train.main([*command, f"run_dir={tmp_path / 'run'}"]) == 1
    said = capfd.readouterr().err
    assert "DataLoader worker (pid" in said and "Use a smaller data.num_workers" in said and "Traceback" not in said
    assert list((tmp_path / "run/checkpoints").iterdir()) == [] and summary(tmp_path / "run")["exit_code"] == 1


class Hasty(threading.Event):
    """Waits a tenth of the time."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout and timeout / 10)


class Ranks:
    """Two processes that look like ranks to the launcher, which was told to stop them."""

    def __init__(self, folder: Path) -> None:
        self.job_file, self.checkpoints = folder / "job.json", folder / "checkpoints"
        self.checkpoints.mkdir()
        command = [sys.executable, "-c", "import time; time.sleep(60)", str(self.job_file)]
        self.processes = [subprocess.Popen(command) for _ in range(2)]
        self.watch = launch._Signals(self.job_file, 2, self.checkpoints, lambda text, number: RuntimeError(text))
        self.watch._is_over = Hasty()
        with pytest.raises(RuntimeError, match="SIGTERM"):
            self.watch._on_signal(signal.SIGTERM, None)

    def lose(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].wait()

    def are_left_alone(self, seconds: float) -> bool:
        """Whether the other one still runs after so many seconds."""
        time.sleep(seconds)
        return self.processes[0].poll() is None and self.watch.killed is None

    def end(self) -> None:
        self.watch._is_over.set()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "STANDSTILL_SECONDS", 3)
    both = Ranks(tmp_path)
    yield both
    both.end()


@pytest.mark.parametrize("case", ["gone", "ended in order", "while its partner saves"])
def test_the_partner_of_a_rank_that_is_gone_is_killed(ranks, case):
    mine, of_another = (ranks.checkpoints / f".tmp-step_00000007-{ranks.processes[n].pid}" for n in (0, 1))
    of_another.mkdir()
    if case == "ended in order":
        (ranks.job_file.parent / "ended.1").touch()
    elif case == "while its partner saves":
        mine.mkdir()
    assert ranks.are_left_alone(0.6)  # both are there
    ranks.lose(1)
    if case != "gone":
        assert ranks.are_left_alone(1.0)
    if case == "while its partner saves":
        mine.rename(ranks.checkpoints / "step_00000007")
    if case != "ended in order":
        assert ranks.processes[0].wait(30) == -signal.SIGKILL and "ended before the others" in ranks.watch.killed


@pytest.mark.parametrize("is_silent, has_worker", [(True, False), (True, True), (False, False)])
def test_a_launcher_stops_waiting_for_a_store_that_is_gone_when_no_worker_is_left(
    tmp_path, monkeypatch, is_silent, has_worker
):
    """The connection stands as one does whose link is cut: nothing arrives, and nothing says that it is over."""
    monkeypatch.setattr(launch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(launch, "CUT_OFF_SECONDS", 0.2)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path / "job.json")])
    listener = socket.create_server(("127.0.0.1", 0))
    other = socket.create_connection(listener.getsockname())
    store, _ = listener.accept()
    try:
        if not has_worker:
            worker.kill()
            worker.wait()
        if is_silent:
            listener.close()
        with launch._lifeline(f"127.0.0.1:{other.getpeername()[1]}", tmp_path / "job.json"):
            is_closed = bool(select.select([other], [], [], 20 if is_silent and not has_worker else 1)[0])
        assert is_closed == (is_silent and not has_worker)
    finally:
        worker.kill()
        worker.wait()
        for each in (listener, other, store):
            each.close()


WAITS = """
import os, subprocess, sys
os.environ |= {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
os.environ |= {"MASTER_PORT": sys.argv[1], "TORCHELASTIC_USE_AGENT_STORE": "True"} | ({LAUNCHER})
worker = "import os; from amp_core.run.rendezvous import worker_stores; os.write(1, b'waits'); worker_stores()"
worker = subprocess.Popen([sys.executable, "-c", worker])
worker.wait()
"""


@pytest.mark.parametrize("of", ["ours", "torchrun"])
def test_a_worker_ends_with_its_launcher_also_before_it_found_the_store(of):
    """Its store went with the launcher: nobody listens at that port."""
    environ = '{"AMP_RECIPES_LAUNCHER": str(os.getpid())}' if of == "ours" else "{}"
    command = [sys.executable, "-c", WAITS.replace("{LAUNCHER}", environ), str(free_port())]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert launcher.stdout.read(5) == b"waits"
    launcher.kill()
    # The worker holds the other ends of both pipes.
    _, said = launcher.communicate(timeout=60)
    assert b"the launcher was killed before the run began" in said


JOBLIB = """
import os, sys
from pathlib import Path
from amp_core.cli.sweep import run_apart
if os.fork():
    os.wait()
command = [sys.executable, "-c", "import time; print('runs', flush=True); time.sleep(60)"]
run_apart(command, Path("/nowhere"), environ={}, in_worker=True)
print("idles", flush=True)
os.read(0, 1)
"""


def test_a_worker_of_a_killed_sweep_does_not_stay():
    """One of joblib would idle for minutes, and leave its semaphores."""
    sweep = subprocess.Popen([sys.executable, "-c", JOBLIB], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert sweep.stdout.readline() == b"runs\n"
    sweep.kill()
    assert sweep.stdout.read() == b""  # until all have ended
    sweep.wait()
    sweep.stdin.close()
    sweep.stdout.close()
