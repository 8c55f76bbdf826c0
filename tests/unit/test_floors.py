"""Imports go one way, from floor to floor; floors, files and the path of a step stay short enough to read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import floors  # noqa: E402  # pyright: ignore[reportMissingImports]


def test_every_import_goes_to_a_floor_above():
    assert floors.upward() == []


@pytest.mark.parametrize("module, line, allowed", [
    ("amp_core.step.amp", "from amp_core.tensors import local", True),
    ("amp_core.step.amp", "from amp_core.layouts.zero import share_state", False),
    ("amp_core.step.amp", "from amp_core.layouts import zero", False),
    ("amp_core.memory.graph", "import amp_core.run.loop", False),
    ("amp_core.models.gpt", "from amp_core.step.clip import Clip", False),
    ("amp_core.models.gpt", "from amp_core.lowp.islands import keep_fp32", True),
    ("amp_core.doctor.watch", "from amp_core.cli.compose import compose", False),
    ("amp_core.run.loop", "def f():\n    from amp_tools import forecast", False),
    ("amp_core.run.loop", "if TYPE_CHECKING:\n    from amp_core.doctor.watch import Watch", True),
    ("amp_tools.forecast", "from amp_core.doctor.watch import Watch", True),
])  # fmt: skip
def test_an_import_of_a_floor_below_is_seen(module, line, allowed, tmp_path, monkeypatch):
    path = tmp_path / "code.py"
    path.write_text(line + "\n")
    known = floors.modules()
    monkeypatch.setattr(floors, "ROOT", tmp_path)
    monkeypatch.setattr(floors, "modules", lambda: known | {module: path})
    monkeypatch.setattr(floors, "imports", lambda p, original=floors.imports: original(p) if p == path else iter(()))
    assert (floors.upward() == []) is allowed


def test_no_modules_import_each_other(tmp_path, monkeypatch):
    assert floors.circle() == []
    one, other, known = tmp_path / "one.py", tmp_path / "other.py", floors.modules()
    one.write_text("from amp_core.run.other import f\n")
    other.write_text("def f():\n    from amp_core.run import one")
    monkeypatch.setattr(floors, "modules", lambda: known | {"amp_core.run.one": one, "amp_core.run.other": other})
    assert {"amp_core.run.one", "amp_core.run.other"} <= set(floors.circle())


def test_every_budget_is_kept():
    spent = floors.spent()
    assert {name: lines for name, lines in spent.items() if lines > floors.BUDGETS[name][0]} == {}
    named = " ".join(parts for _, parts in floors.BUDGETS.values()).split()
    assert set(floors.ABOUT) <= set(named)
    assert floors.tests_to_code() <= floors.TESTS_TO_CODE


def test_a_file_has_at_most_500_lines():
    assert [path for path in floors.modules().values() if floors.lines_of(path) > 500] == []
    assert floors.lines_below("train.py") <= 500


def test_the_loop_has_at_most_350_lines():
    lines = (ROOT / "amp_core/run/loop.py").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("class Loop"))
    end = next(i for i, line in enumerate(lines) if i > start and line and not line.startswith((" ", "#")))
    assert end - start <= 350


def test_what_one_reads_to_follow_a_recipe_and_a_step():
    files = floors.closure("recipes/classification.py")
    assert len(files) <= floors.MOST_MODULES and sum(map(floors.lines_of, files)) <= floors.MOST_LINES
    files = floors.closure("amp_core/step/amp.py")
    assert sum(map(floors.lines_of, files)) <= floors.MOST_LINES_OF_STEP


def test_what_one_fp16_step_goes_through():
    """In a process of its own: what other tests have imported, such as DTensor, makes a step take other ways."""
    code = "import json, floors; print(json.dumps(floors.path_of_a_step()))"
    environ = os.environ | {"PYTHONPATH": str(ROOT / "scripts"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    path = json.loads(done.stdout.splitlines()[-1])
    assert "amp_core/step/fused.py" in path  # the functions were seen
    assert sum(length for functions in path.values() for _, length in functions) <= floors.MOST_LINES_OF_PATH


def test_the_architecture_page_lists_the_floors_in_their_order():
    page = (ROOT / "docs/ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(\.\./amp_\S+\) \| (.*) \|$", page, re.MULTILINE)
    assert rows == list(floors.ABOUT.items())
