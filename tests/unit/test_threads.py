"""A run on a CPU does not collapse where another process holds a core: its threads soon sleep while they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from amp_core.cli import command

ROOT = Path(__file__).resolve().parents[2]
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def settled(monkeypatch, *, imported: bool, **environ: str) -> dict[str, str]:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "modules", {name: m for name, m in sys.modules.items() if imported or name != "torch"})
    command.limit_spinning()
    return {name: os.environ[name] for name in WAITING if name in os.environ}


def test_threads_sleep_unless_the_environment_says_otherwise(monkeypatch):
    assert settled(monkeypatch, imported=False) == {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "3000"}
    for own in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "100"}, {"KMP_BLOCKTIME": "200"}):
        assert settled(monkeypatch, imported=False, **own) == own


def test_too_late_it_is_left_alone(monkeypatch):
    assert settled(monkeypatch, imported=True) == {}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_program_sets_it_before_torch_is_imported(tmp_path):
    """OpenMP reads it when it is loaded."""
    code = (
        "import sys, os\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': print('spins:', os.environ.get('GOMP_SPINCOUNT')); os._exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import train\n"
        "train.main(['steps=1', 'run_dir=r'])\n"
    )
    environ = {name: value for name, value in os.environ.items() if name not in WAITING}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.stdout == "spins: 3000\n", done.stderr
