"""Seconds from the command to the first loss, as ratios to a script that does nothing else; and of questions.

All are whole processes, from exec to the line with the first loss on their standard output (questions: to their end),
in turns, in another order each round. By hand is `benches/first_step.py`; `again` is that once more, and shows which
differences mean nothing. CPU seconds, of the process and of what it waited for, up to the same line depend less on what
else the machine does; they come from /proc and are missing elsewhere.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benches import ROOT
from benches.result import Number, Picture, Result, ratios, take_turns
from benches.values import count

FULL = ["--rounds", "10"]
SHORT = ["--rounds", "2"]
BY_HAND = [str(ROOT / "scripts" / "benches" / "first_step.py")]
TRAIN = str(ROOT / "train.py")
ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Modules are read as bytecode, as wherever they were imported before: compiling ours would take a tenth of a start."""
QUESTIONS = {"import torch": ["-c", "import torch"], "--cfg job": [TRAIN, "--cfg", "job"], "--help": [TRAIN, "--help"]}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=count, default=10)
    parser.add_argument("--run", default="", help="settings of the run beside its defaults, with blanks")


def measure(flags: argparse.Namespace) -> Result:
    result = Result(
        "start",
        flags.command,
        flags.device,
        Picture({"seconds": "seconds", "ratio": "to the script by hand"}, lines="process", left_out="again"),
    )
    cpu: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
        numbers = itertools.count()

        def ours() -> list[str]:
            run_dir = Path(folder, str(next(numbers)))
            return [TRAIN, "steps=1", f"device={flags.device}", f"run_dir={run_dir}", *flags.run.split()]

        commands = {"by hand": lambda: BY_HAND, "again": lambda: BY_HAND, "train.py": ours}
        runners = {
            who: functools.partial(_until_first_loss, who, command, folder, cpu) for who, command in commands.items()
        }
        runners |= {
            who: functools.partial(_to_its_end, who, command, folder, cpu) for who, command in QUESTIONS.items()
        }
        for run in runners.values():  # reads the files from the disk
            run()
        cpu.clear()
        times = take_turns(runners, flags.rounds)
    found, of_cpu = ratios(times, "by hand", "again"), ratios(cpu, "by hand", "again") if cpu else {}
    for who in runners:
        row = {"process": who, "seconds": Number.of(times[who]), "ratio": found[who]}
        if cpu:
            row |= {"CPU seconds": Number.of(cpu[who]), "CPU ratio": of_cpu[who]}
        result.add(**row)
    return result


def _until_first_loss(who: str, command, folder: str, cpu: dict[str, list[float]]) -> float:
    """Seconds to the line of the first step. What comes after it is killed."""
    said = []
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *command()],
        cwd=folder,
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said.append(line)
                if line.startswith("step 1"):
                    seconds = time.monotonic() - began
                    _note_cpu(who, process.pid, cpu)
                    return seconds
        finally:
            process.kill()
    raise RuntimeError(f"{who}: ended without a first step:\n{''.join(said)}")


def _to_its_end(who: str, command: list[str], folder: str, cpu: dict[str, list[float]]) -> float:
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, *command], cwd=folder, env=ENVIRON, stdout=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    seconds = time.monotonic() - began
    _note_cpu(who, process.pid, cpu)
    if process.wait():
        raise RuntimeError(f"{who}: exit code {process.returncode}")
    return seconds


def _note_cpu(who: str, pid: int, cpu: dict[str, list[float]]) -> None:
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        ticks = stat.read_text().rpartition(")")[2].split()[11:15]  # user and system, own and of children
        cpu.setdefault(who, []).append(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"))
