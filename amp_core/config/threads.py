"""How the threads of a CPU wait for each other. Imports no torch: it has to be settled before."""

from __future__ import annotations

import os
import sys

_SETTINGS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": None}


def limit_spinning() -> None:
    """Let OpenMP's threads sleep when they have waited for 0.1 ms, in this process and in those that it starts.

    By default they spin for much longer. Where another process holds one of the cores, each parallel region then waits
    until the scheduler takes a spinning thread away, so that a run takes many times as long. Sleeping at once would
    cost a small network half of its speed on an idle machine. GNU's OpenMP reads the count of spins; others read the
    policy alone, and sleep at once. Nothing happens if torch is imported already, or the environment says how to wait.
    """
    if "torch" not in sys.modules and not _SETTINGS.keys() & os.environ.keys():
        os.environ.update({name: value for name, value in _SETTINGS.items() if value is not None})
