"""The short form of the fault campaign: faults made on purpose, and every promise kept after each."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from shared import script

ROOT = Path(__file__).resolve().parents[2]
# Parts of one group share a process, which imports torch once; groups are run side by side.
GROUPS = {
    "files": ["saves", "damage", "pickles", "errors"],
    "runs": ["kills", "signals", "elastic"],
    "processes": ["restarts", "stuck"],
}
LONG_ONLY = ["network"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and forks what macOS would not let fork")


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_no_promise_is_broken(group, tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, ROOT / "scripts" / "faults.py", "--short", "--only", ",".join(GROUPS[group])]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--json", report], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(report.read_text())["parts"]
    assert [part["part"] for part in parts] == GROUPS[group]
    assert all(sum(part["counts"].values()) > 0 and not part["violations"] for part in parts)
    assert "stuck" not in GROUPS[group] or "signals to launchers with a stopped rank" in parts[-1]["counts"]


def test_every_part_is_in_a_group_and_on_the_page():
    parts = list(script("scripts/faults.py").PARTS)
    assert sorted(parts) == sorted(part for group in [*GROUPS.values(), LONG_ONLY] for part in group)
    page = (ROOT / "docs" / "RELIABILITY.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| \w.* \| [\d,]+ \|$", page, re.MULTILINE) == parts


def test_a_power_cut_leaves_what_was_brought_to_disk(tmp_path):
    """The model of a disk itself: a rename lasts from the fsync of its folder on, data from that of their file."""
    from campaign.saves import Disk

    root = tmp_path / "root"
    root.mkdir()
    (root / "old").write_bytes(b"old")
    disk, rng = Disk(root), random.Random(0)

    def left(kind):
        place = tmp_path / f"left{len(list(tmp_path.iterdir()))}"
        disk.leave(place, kind, rng)
        return {path.name: path.read_bytes() for path in place.iterdir()}

    disk.apply(("open", (root / "a",), 3))
    disk.apply(("write", (3, b"new data"), 8))
    assert left("least") == {"old": b"old"} and left("names") == {"old": b"old", "a": b""}
    disk.apply(("fsync", (3,), None))
    disk.apply(("rename", (root / "a", root / "b"), None))
    assert left("least") == {"old": b"old"} and left("names") == {"old": b"old", "b": b"new data"}
    states = {tuple(sorted(left("any"))) for _ in range(50)}
    assert states == {("old",), ("a", "old"), ("b", "old")}
    disk.apply(("open", (root,), 4))
    disk.apply(("fsync", (4,), None))
    assert left("least") == {"old": b"old", "b": b"new data"}
