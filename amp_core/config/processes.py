"""Other processes of this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path


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
