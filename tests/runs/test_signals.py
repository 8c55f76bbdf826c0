"""Signals: the step is finished and a checkpoint written, on all ranks alike, also where a data worker stands still."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from running import Forked, checkpoints, descendants, lines, state, summary, wait_until
from shared import free_port
from test_recipes import as_rank
from test_runs import SMALL, finish, fork, start
from tiers import rows

import train
from amp_core.data import loading
from amp_core.run import process as run_process
from amp_core.run.stop import Stop

pytestmark = pytest.mark.usefixtures("own_folder")

TWO = ["layout=ddp", "layout.nproc_per_node=2"]


@pytest.mark.parametrize(
    "number, layout", rows([(signal.SIGTERM, []), (signal.SIGINT, []), (signal.SIGUSR1, TWO)], (signal.SIGTERM, []))
)
def test_a_signal_finishes_the_step_and_writes_a_checkpoint(number, layout):
    settings = ["steps=1000000", "run_dir=a", "save_every=1000000", "eval_every=1000000", *layout]
    process = (start if layout else fork)(*settings)
    wait_until(lambda: Path("a/metrics.jsonl").exists() and len(lines("a")) > 1, process)
    everyone = descendants(process.pid)
    process.send_signal(number)
    code = 75 if number == signal.SIGUSR1 else 128 + number
    out = finish(process, code=code, timeout=40)
    assert "Traceback" not in out
    assert summary("a")["status"] == "preempted" and summary("a")["exit_code"] == code
    assert state("a")["progress"]["step"] == summary("a")["step"]
    assert not [pid for pid in everyone if Path(f"/proc/{pid}").exists()]
    assert [line["step"] for line in lines("a")] == sorted({line["step"] for line in lines("a")})


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("when", rows(["the first batch", "a step", "an evaluation"], "a step"))
def test_a_signal_ends_a_run_whose_data_worker_stands_still(when):
    """With a checkpoint of the last step; and a second one, Ctrl-C, at once."""
    steps = {"the first batch": 0, "a step": 3, "an evaluation": 4}[when]
    settings = ["steps=1000000", "log_every=1", "run_dir=a", "data.num_workers=1", "eval_every=4"]

    def begin(patience):
        process = Forked(run_with_a_stopped_worker, steps, patience, [*SMALL, *settings])
        wait_until(Path("stopped").exists, process)
        Path("stopped").unlink()
        return process

    process = begin(1.5)
    process.send_signal(signal.SIGTERM)
    out = finish(process, code=143, timeout=30)  # after `PATIENCE`
    step, ahead = summary("a")["step"], 2 if when == "a step" else 0  # batches that the worker had loaded before
    assert steps <= step <= steps + ahead and summary("a")["status"] == "preempted"
    assert f"stopped at step {step} of" in out and ("a checkpoint was written" in out) == bool(step)
    assert [path.name for path in checkpoints("a")] == [f"step_{step:08d}"] * bool(step)
    shutil.rmtree("a")
    process = begin(60.0)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert "interrupted twice" in finish(process, code=130, timeout=30)
    assert time.monotonic() - begun < 4


def run_with_a_stopped_worker(steps, patience, arguments):
    """All data workers are stopped when they are there, and so many steps were made."""
    init = loading.Batches.__init__
    polls = 0
    run_process.PATIENCE = (patience, patience)

    def stop_them(batches):
        for worker in batches._iterator._workers:
            os.kill(worker.pid, signal.SIGSTOP)
        Path("stopped").touch()

    def made(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.last = self
        if polls == steps:
            stop_them(self)

    def polled(self):
        nonlocal polls
        polls += 1
        if polls == steps and steps % 4:
            stop_them(made.last)
        return poll(self)

    poll, Stop.poll, loading.Batches.__init__ = Stop.poll, polled, made
    return train.main(arguments)


def test_a_signal_to_one_rank_stops_all_at_the_same_step():
    settings = [*SMALL, "steps=1000000", "run_dir=a", "save_every=1000000", "layout=ddp"]
    port = free_port()
    ranks = [Forked(as_rank, rank, port, True, settings) for rank in range(2)]
    wait_until(lambda: Path("a/metrics.jsonl").exists() and len(lines("a")) > 1, ranks[0])
    ranks[1].send_signal(signal.SIGINT)
    for rank in ranks:
        assert "Traceback" not in finish(rank, code=130, timeout=40)
    assert summary("a")["status"] == "preempted" and summary("a")["exit_code"] == 130
    assert state("a")["progress"]["step"] == summary("a")["step"]
