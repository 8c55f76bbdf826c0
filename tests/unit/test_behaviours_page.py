"""The page of behaviours names what exists, and shows every technique and pitfall."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from amp_conformance import CHECKS
from recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "BEHAVIOURS.md").read_text()
NUMBERS = {
    "ranges": "1 5, 2 6 5.23, 3, 20, 71 72 5.35, 5.36, 5.37 7",
    "autocast": "4 70, 10, 11 5.16, 12 14, 13, 18 19, 5.32",
    "islands": "15 17, 16 5.34, 30 68",
    "custom-functions": "53, 54, 55, 56",
    "loss-scale": "21 5.27 5.47 5.48, 25 5.49 24, 28 5.20 29 5.19, 37 38, 26 27 31 32, 34, 5.21, 5.22",
    "step": "22 73, 23, 33 5.15 5.24 5.25, 5.17, 5.18, 5.2 5.12 5.11 5.13, 5.8 5.29",
    "clipping": "35 5.3, 36 39",
    "accumulation": "40 5.1, 41, 42 5.10, 5.4, 5.9, 5.14",
    "several-losses": "43 5.5, 44 46, 45, 47, 48, 49, 50, 51 5.33, 52",
    "processes": "57 5.30, 58, 59, 60 5.41 5.42 5.43, 61, 5.6 5.7, 5.26, 5.28, 5.31",
    "resume": "62 5.39, 63 64 5.40, 5.44, 5.45, 5.46",
    "measuring": "8, 9, 65",
    "debugging": "66, 67 5.38, 69",
    "levels-of-apex": "74, 75",
    "pitfalls-of-single-recipes": "diffusion, experts, finetuning, policy_gradient, speech, supervised",
}
"""The techniques (1 to 75) and pitfalls (5.1 to 5.49) of mixed precision that each item of a heading shows, in order."""


def items() -> dict[str, list[tuple[str, str]]]:
    """The statement of each item and what shows it, by the anchor of the heading above."""
    found: dict[str, list[tuple[str, str]]] = {}
    for title, text in re.findall(r"^#+ ([^\n]*)\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL):
        if rows := re.findall(r"^- (.*)\n  (.*)$", text, re.MULTILINE):
            found[re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")] = rows
    return found


ROWS = [
    (numbers, *row)
    for anchor, rows in items().items()
    for numbers, row in zip(NUMBERS[anchor].split(", "), rows, strict=True)
]


def names_in(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE))


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
    labels = [label for numbers, _, _ in ROWS for label in numbers.split()]
    expected = [str(number) for number in range(1, 76)] + [f"5.{number}" for number in range(1, 50)]
    assert sorted(label for label in labels if label not in RECIPES) == sorted(expected)


def test_the_traps_of_the_conformance_checks_are_headings() -> None:
    assert {check.trap for check in CHECKS.values()} <= items().keys()


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
