"""What tests of whole runs read in a run folder, and how they compare it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from warm import begin, server

import train


def refused_before_the_start(arguments, key, capsys):
    """A command line ends with 2 and one message that names `key`, and nothing is created in the present folder."""
    assert train.main(["device=cpu", *arguments]) == 2
    text = capsys.readouterr().err
    assert key in text and text.count("error:") == 1 and text.count("\n  ") <= 1, text
    assert not list(Path.cwd().iterdir())


class Forked:
    """`function(*arguments)` in a process of its own, as `subprocess.Popen` has it, and its result is the exit code.

    It is forked from the server of `warm`: to start one takes no seconds of imports.
    """

    def __init__(self, function: Callable[..., int], *arguments: Any) -> None:
        self.output = Path(f"output{len(list(Path().glob('output*')))}").absolute()
        self.process = server().Process(target=_forked, args=(Path.cwd(), self.output, function, arguments))
        self.process.start()
        self.pid: int = self.process.pid  # type: ignore[assignment]

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote, both streams as one, when it has ended."""
        self.process.join(timeout)
        assert self.returncode is not None, f"still running after {timeout} s"
        return self.output.read_text(), ""


def _forked(folder: Path, output: Path, function: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    os.chdir(folder)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    begin()
    sys.exit(function(*arguments))


def wait_until(condition: Callable[[], Any], process: Any = None, seconds: float = 90) -> None:
    """Returns when a condition holds; fails when the process has ended, or after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """A process and what it has started, and so on."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(pid), *(grandchild for child in children for grandchild in descendants(int(child)))]


def checkpoints(folder):
    return sorted(Path(folder, "checkpoints").glob("step_*"))


def state(folder):
    return torch.load(checkpoints(folder)[-1] / "state.pt", weights_only=True)


def summary(folder):
    return json.loads(Path(folder, "summary.json").read_text())


def lines(folder):
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


CLOCKS = {"samples_per_second", "tokens_per_second", "mfu", "data_wait", "seconds"}


def timeless(metrics):
    """Lines without what the clock decides."""
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in metrics]


def differing(a, b, path=""):
    """Where two nested states differ in any bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        same = same and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        return [] if same else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{path}: {sorted(map(str, a.keys() ^ b.keys()))} on one side only"]
        return [found for key in a for found in differing(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [f"{path}: {len(a)} and {len(b)} items"]
        return [found for i, pair in enumerate(zip(a, b, strict=True)) for found in differing(*pair, f"{path}[{i}]")]
    return [] if a == b or (a != a and b != b) else [f"{path}: {a!r} and {b!r}"]


def same_but(a, b, *ignored):
    """The states agree in every bit, apart from top-level entries or paths that begin with one of `ignored`."""
    a, b = ({k: v for k, v in s.items() if k != "config"} for s in (a, b))
    return [d for d in differing(a, b) if not d.startswith(tuple(f".{i}" for i in ignored))]
