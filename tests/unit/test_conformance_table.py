"""The tables of docs/CONFORMANCE.md are those of the kept results."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from amp_conformance import CHECKS
from amp_conformance.__main__ import PLUGGED, TRAINERS
from amp_conformance.table import FUSED, Row, keep, kept, table, write

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "conformance.json"


def test_the_page_shows_the_results_that_are_kept(tmp_path: Path) -> None:
    page, copy, rows = ROOT / "docs" / "CONFORMANCE.md", tmp_path / "page.md", kept(RESULTS)
    copy.write_text(page.read_text())
    write(copy, rows)
    assert copy.read_text() == page.read_text()
    row = rows["lightning+"]
    worse = dataclasses.replace(row, results=row.results | {"zero gradients": ["failed", "the weight is 1"]})
    write(copy, rows | {worse.name: worse})
    assert copy.read_text() != page.read_text()


def test_all_trainers_were_put_through_all_checks_with_two_seeds() -> None:
    rows, ways = kept(RESULTS), {"": list(CHECKS), FUSED: [name for name in CHECKS if not name.endswith(", fused")]}
    assert rows.keys() == {f"{name}{way}" for name in (*TRAINERS, *PLUGGED) for way in ways}
    for row in rows.values():
        assert list(row.results) == ways[FUSED if row.name.endswith(FUSED) else ""], row.name
        assert row.seeds == [1, 2], row.name


def made(name: str, **found: str) -> Row:
    title = "Lamp 2" if name[0] == "l" else "Torch"
    results = {check: [status, "seen"] for check, status in zip(list(CHECKS)[:2], found.values(), strict=True)}
    return Row(name, title, "as it comes", "https://x", [1, 2], ["torch 2", "cpu", "2026-01-01"], results, [])


def test_a_table_shows_each_trainer_before_and_with_its_plugin(tmp_path: Path) -> None:
    first, second = list(CHECKS)[:2]
    rows = [made("lamp", a="passed", b="failed"), made("lamp+", a="passed", b="passed")]
    rows += [made("torch", a="passed", b="not offered"), made("lamp/fused", a="error", b="failed")]
    for row in rows:
        keep(tmp_path / "found.json", row)
    assert list(kept(tmp_path / "found.json").values()) == rows
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    shown = table(kept(tmp_path / "found.json")).splitlines()
    (line,) = [each for each in shown if each.startswith(f"| [{second}]")]
    assert line.endswith("| **no**→yes |")
    (line,) = [each for each in shown if each.startswith(f"| [{first}]")]  # as with fused optimizers alone
    assert line.endswith("| **error** |")
    assert [each for each in shown if "passed of" in each] == [
        "| **passed of offered** | 1/2→2/2 |",
        "| **passed of offered** | 0/2 |",
    ]
    assert any("Without a failure: Torch (1/1)." in each for each in shown)
    (tmp_path / "page.md").write_text("no marks")
    with pytest.raises(ValueError, match="the marks <!-- begin of the table -->"):
        write(tmp_path / "page.md", {})
