"""The tables of docs/CONFORMANCE.md and docs/OTHER_TRAINERS.md are those of the kept results."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from amp_conformance import CHECKS
from amp_conformance.__main__ import PLUGGED, TRAINERS
from amp_conformance.table import FUSED, Row, counts, keep, kept, table, write

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "conformance.json"


@pytest.mark.parametrize("name", ["CONFORMANCE.md", "OTHER_TRAINERS.md"])
def test_a_page_shows_the_results_that_are_kept(name: str, tmp_path: Path) -> None:
    page, rows = ROOT / "docs" / name, kept(RESULTS)
    (tmp_path / name).write_text(page.read_text())
    write(tmp_path / name, rows)
    assert (tmp_path / name).read_text() == page.read_text()
    row = rows["lightning+"]
    worse = dataclasses.replace(row, results=row.results | {"zero gradients": ["failed", "the weight is 1"]})
    write(tmp_path / name, rows | {worse.name: worse})
    assert (tmp_path / name).read_text() != page.read_text()


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
    assert line.endswith("| **no** / yes | - |")
    (line,) = [each for each in shown if each.startswith(f"| [{first}]")]  # as with fused optimizers alone
    assert line.endswith("| **error** | - |")
    assert [each for each in shown if "passed of what" in each] == [
        "| **passed of what is offered** | 1 of 2 / 2 of 2 | 1 of 1 |",
        "| **passed of what is offered** | 0 of 2 | - |",
    ]
    assert counts({row.name: row for row in rows[:2]}).splitlines()[2:] == [
        "| without | 1 of 2 |",
        "| with the plugin | 2 of 2 |",
    ]
    (tmp_path / "page.md").write_text("no marks")
    with pytest.raises(ValueError, match="the marks <!-- begin of the table -->"):
        write(tmp_path / "page.md", {})
