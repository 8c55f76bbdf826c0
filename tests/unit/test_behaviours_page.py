"""The page of behaviours names what exists, and leaves no number out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "BEHAVIOURS.md").read_text()
ROWS = re.findall(r"^- \*\*([\w., ]+)\*\* (.*)\n  (.*)$", PAGE, re.MULTILINE)
NUMBERS = [str(number) for number in range(1, 76)] + [f"5.{number}" for number in range(1, 50)]


def names_in(path: Path) -> set[str]:
    functions = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}


TESTS = {path.name: names_in(path) for path in (ROOT / "tests").glob("*/test_*.py")}
MODES = {path.stem for path in (ROOT / "conf" / "amp").glob("*.yaml")}


def missing(shown: str) -> list[str]:
    """What an item names, in backquotes, that does not exist."""
    found = []
    for name in re.findall(r"`([^`]+)`", shown):
        file, _, test = name.partition("::")
        kind, _, option = name.partition("=")
        if test:
            exists = test in TESTS.get(file, ())
        elif option:
            exists = option in {"recipe": set(RECIPES), "amp": MODES}.get(kind, ())
        else:
            exists = (ROOT / name).is_file()
        found += [] if exists else [name]
    return found


def test_every_number_is_in_one_item() -> None:
    labels = [label for row in ROWS for label in row[0].split(", ")]
    assert sorted(label for label in labels if label not in RECIPES) == sorted(NUMBERS)


@pytest.mark.parametrize("numbers, statement, shown", ROWS, ids=[row[0] for row in ROWS])
def test_what_an_item_names_exists(numbers: str, statement: str, shown: str) -> None:
    assert statement.strip() and "`" in shown and not missing(shown)


def test_a_name_that_does_not_exist_is_found() -> None:
    assert missing("`test_clip.py::test_nothing`, `amp=fp17`, `recipe=none`, `scripts/none.py`") == [
        "test_clip.py::test_nothing",
        "amp=fp17",
        "recipe=none",
        "scripts/none.py",
    ]
    assert not missing("`amp=fp16`, `recipe=classification`, `scripts/bench.py`")
