"""Other processes of this machine, and who started this one."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

LAUNCHER = "AMP_RECIPES_LAUNCHER"
"""Environment variable of our workers: the process id of their launcher. Workers of torchrun take their
parent's, before the import of torch, which takes seconds."""
launcher = int(os.environ.get(LAUNCHER) or (os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0))


def launched() -> bool:
    """Whether this process is one of several started by torchrun or by torch's elastic agent."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped, as by SIGSTOP. Linux; elsewhere False."""
    return _status(pid)[:1] in (["T"], ["t"])


def parent_of(pid: int) -> int:
    """Its parent's process id on Linux; elsewhere 0."""
    return int((_status(pid)[1:2] or ["0"])[0])


def _status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def with_argument(file: Path) -> list[int]:
    """Ids of the processes with this file in their command line, and of what they forked."""
    if not Path("/proc/self/cmdline").exists():  # macOS
        table = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, text=True).stdout
        lines = [line.strip().partition(" ") for line in table.splitlines()]
        return [int(pid) for pid, _, command in lines if str(file) in command.split()]
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                command = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                found += [int(entry)] if os.fsencode(file) in command else []
    return found
