"""Each test is bounded, whatever it does: the watchdog of conftest.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import ctypes, time

def test_sleeps():
    time.sleep(600)

def test_holds_the_gil():
    mutex = ctypes.create_string_buffer(64)  # zeros: an open one
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # the second waits for ever, and no signal ends it

def test_passes():
    pass
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a mutex of zeros is one of glibc")
def test_a_test_that_holds_the_gil_is_ended_and_named(tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 2\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-n", "1"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Timeout (0:00:02" in done.stderr and "in test_holds_the_gil" in done.stderr
    assert "Timeout (>2.0s) from pytest-timeout" in done.stdout  # what can be interrupted still is
    assert "crashed while running 'test_it.py::test_holds_the_gil'" in done.stdout
    assert "PASSED test_it.py::test_passes" in done.stdout
