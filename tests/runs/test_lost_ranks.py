"""After a signal a rank that ended before the others ends them, too, although gloo does not tell them that it is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from running import state, summary
from test_recipes import arguments

import train
from amp_core.checkpoints import folders
from amp_core.cli.compose import compose
from amp_core.run import launch
from amp_core.run.environment import Job
from recipes import runner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# In case "stuck" a rank whose data worker stands still gives up. What it forked before keeps its connections open, so
# that its partner never sees them closed, as gloo sometimes misses it. In case "late" rank 0 ends long after the other.
WORKER = """
import functools, os, signal, sys, time
from pathlib import Path
from amp_core.data.loading import Batches
from amp_core.run import process
from amp_core.run.launch import work
from recipes import runner

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
    time.sleep(10)

if CASE == "late" and os.environ["RANK"] == "0":
    process.end_process_group = end_late
if os.environ["RANK"] == "1":
    Batches.__next__ = functools.partialmethod(lambda self, act: at_ten(act, self), stop if CASE == "stuck" else id)
os._exit(work(Path(sys.argv[1]), runner))
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
    job = Job(compose(command), str(folder / "run"), command)
    sender = threading.Thread(target=signal_when, args=[mark])
    sender.start()
    outcome = launch.launch(job, runner("classification"), [sys.executable, str(script)])
    sender.join()
    took = time.time() - mark.stat().st_mtime
    left = launch._processes_of(script)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert bool(left) == (launch.BEREFT_SECONDS > launch.SHUTDOWN_SECONDS)  # what was forked to hold the connections
    assert outcome.exit_code == outcome.signalled == 143
    return outcome, took


@pytest.mark.slow
@pytest.mark.parametrize("is_watched", [True, False])
def test_a_rank_that_gave_up_ends_its_partner_that_did_not_notice(tmp_path, monkeypatch, is_watched):
    patience = 20
    monkeypatch.setattr(launch, "SHUTDOWN_SECONDS", patience)
    if not is_watched:
        monkeypatch.setattr(launch, "BEREFT_SECONDS", 1000)
    outcome, took = launched(tmp_path, monkeypatch, "stuck")
    if is_watched:
        assert outcome.error is not None and "a rank ended before the others" in outcome.error
        assert took < patience
    else:
        assert took > patience


@pytest.mark.slow
def test_a_rank_that_ends_long_after_the_others_in_order_is_not_killed(tmp_path, monkeypatch):
    outcome, took = launched(tmp_path, monkeypatch, "late")
    assert outcome.error is None and took > 10 > launch.BEREFT_SECONDS
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


class Ranks:
    """Two processes that look like ranks to the launcher, which was told to stop them."""

    def __init__(self, folder: Path) -> None:
        self.job_file, self.checkpoints = folder / "job.json", folder / "checkpoints"
        self.checkpoints.mkdir()
        command = [sys.executable, "-c", "import time; time.sleep(60)", str(self.job_file)]
        self.processes = [subprocess.Popen(command) for _ in range(2)]
        self.watch = launch._Signals(self.job_file, 2, self.checkpoints, lambda text, number: RuntimeError(text))
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
    monkeypatch.setattr(launch, "BEREFT_SECONDS", 1)
    both = Ranks(tmp_path)
    yield both
    both.end()


def test_the_partner_of_a_rank_that_is_gone_is_killed(ranks):
    assert ranks.are_left_alone(3.0)  # both are there
    ranks.lose(1)
    assert ranks.processes[0].wait(30) == -signal.SIGKILL
    assert "a rank ended before the others" in ranks.watch.killed


def test_the_partner_of_a_rank_that_ended_in_order_is_left_alone(ranks):
    (ranks.job_file.parent / "ended.1").touch()
    ranks.lose(1)
    assert ranks.are_left_alone(4.0)


def test_who_writes_a_checkpoint_is_killed_only_after_it(ranks):
    mine, of_another = (ranks.checkpoints / f".tmp-step_00000007-{ranks.processes[n].pid}" for n in (0, 1))
    of_another.mkdir()
    mine.mkdir()
    ranks.lose(1)
    assert ranks.are_left_alone(4.0)
    mine.rename(ranks.checkpoints / "step_00000007")
    assert ranks.processes[0].wait(30) == -signal.SIGKILL
