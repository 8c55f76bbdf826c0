"""A draw of `doctor_on_operators.py`, of all of it with DOCTOR_ON_OPERATORS=all: in a process of its own, since the list
of operators changes torch's settings, and torch itself may end where numbers are not finite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("doctor_on_operators.py")
IS_ALL = os.environ.get("DOCTOR_ON_OPERATORS") == "all"


@pytest.mark.slow
@pytest.mark.timeout(7200 if IS_ALL else 600)
@pytest.mark.parametrize("part", range(8) if IS_ALL else ["drawn"])
def test_no_operator_ends_a_diagnosis_or_is_changed_by_it(part):
    how = ["0", str(part)] if IS_ALL else ["400", "0"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT, *how], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    # Of four planted numbers three are not finite or end so, and torch computes most cases.
    assert counts["tried"] > counts["refused"] and counts["poisoned weight"] and counts["silent"]
