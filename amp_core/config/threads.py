"""How the threads of a CPU wait for each other. Imports no torch: it has to be settled before."""

from __future__ import annotations

import os
import sys

_SETTINGS = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}


def wait_passively() -> None:
    """Let OpenMP's threads sleep while they wait, in this process and in those that it starts.

    By default they spin. Where another process holds one of the cores, each parallel region then waits until the
    scheduler takes a spinning thread away, so that a run takes many times as long. Nothing happens when torch was
    imported already, or when the environment says how to wait.
    """
    if "torch" not in sys.modules and not _SETTINGS & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "passive"
