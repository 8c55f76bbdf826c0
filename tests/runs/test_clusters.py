"""Schedulers: the scripts of scripts/slurm with stand-ins for the commands of SLURM, and signals to a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running import lines, state, summary, wait_until
from small import RUN

from amp_core.run import launch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "scripts" / "slurm").glob("*.sbatch"))
SMALL = [*RUN, "save_every=1000000", "eval_every=1000000", "log_every=1"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_scripts_are_sound_bash(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.slow
def test_a_job_writes_a_checkpoint_before_its_time_is_over_queues_again_and_finishes(tmp_path):
    """`srun` runs its command here; `scontrol` notes what it was asked for. All else is real."""
    commands, asked, run_dir = tmp_path / "bin", tmp_path / "asked", tmp_path / "run"
    commands.mkdir()
    for name, text in {"srun": 'exec "$@"', "scontrol": f'echo "$@" >> {asked}'}.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHON": sys.executable}
    environ |= {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "OMP_NUM_THREADS": "1"}
    job = ["bash", ROOT / "scripts" / "slurm" / "requeue.sbatch", *SMALL, f"run_dir={run_dir}", "layout=single"]
    first = subprocess.Popen([*job, "steps=400"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(lambda: (run_dir / "metrics.jsonl").exists() and len(lines(run_dir)) > 2, first)
    first.send_signal(signal.SIGUSR1)  # to the shell alone, as --signal=B:USR1@120 does
    said = first.communicate(timeout=60)[0].decode()
    assert first.returncode == 0 and asked.read_text() == "requeue 7\n", said
    assert (summary(run_dir)["status"], summary(run_dir)["exit_code"]) == ("preempted", 75)
    stopped = summary(run_dir)["step"]
    assert stopped < 400 and state(run_dir)["progress"]["step"] == stopped
    again = environ | {"SLURM_RESTART_COUNT": "1"}
    done = subprocess.run([*job, "steps=400"], env=again, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"continuing from step {stopped}" in done.stdout, done.stdout + done.stderr
    assert summary(run_dir)["status"] == "finished" and asked.read_text() == "requeue 7\n"
    assert [line["step"] for line in lines(run_dir) if line["split"] == "train"] == list(range(1, 401))


class Stopped(Exception):
    def __init__(self, message, number):
        super().__init__(message)
        self.number = number


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_second_interrupt_kills_workers_that_do_not_end(first, tmp_path):
    job_file = tmp_path / "job.json"
    deaf = (
        "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print(flush=True); time.sleep(100)"
    )
    command = [sys.executable, "-c", deaf]
    workers = [subprocess.Popen([*command, str(job_file)], stdout=subprocess.PIPE) for _ in range(2)]
    other = subprocess.Popen([*command, str(tmp_path / "other.json")], stdout=subprocess.PIPE)
    for process in (*workers, other):
        process.stdout.readline()
    signals = launch._Signals(job_file, 2, tmp_path, Stopped)
    before = signal.getsignal(signal.SIGINT)
    try:
        with signals:
            with pytest.raises(Stopped) as stopped:
                signal.raise_signal(first)
            assert stopped.value.number == first
            os.kill(os.getpid(), signal.SIGTERM)  # nothing more: the workers are being stopped already
            assert [process.poll() for process in workers] == [None, None] and not signals.killed
            os.kill(os.getpid(), signal.SIGINT)
            assert [process.wait(10) for process in workers] == [-signal.SIGKILL] * 2
            assert signals.killed == launch.TWICE and other.poll() is None
    finally:
        for process in (*workers, other):
            process.kill()
            process.communicate()
    assert signal.getsignal(signal.SIGINT) is before
