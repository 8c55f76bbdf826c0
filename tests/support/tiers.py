"""Which rows of a table `make test` runs; the others carry the mark `slow` and are left to `make test-all`.

The mark `one_in` chooses among the rows of several tables at once, where no row stands for more than the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rows(values: Iterable[Any], *fast: Any, every: int = 0, single: bool = False) -> list[Any]:
    """Rows for `pytest.mark.parametrize`: fast are those that equal one of `fast`, and one of `every` of all.

    Args:
        single: the test takes one argument, so a tuple is its value.

    Raises:
        ValueError: an entry of `fast` is none of the rows.
    """
    values = list(values)
    if missing := [row for row in fast if row not in values]:
        raise ValueError(f"{missing} is no row of {values}")
    return [
        row
        if row in fast or (every and number % every == 0)
        else pytest.param(*(row if isinstance(row, tuple) and not single else (row,)), marks=pytest.mark.slow)
        for number, row in enumerate(values)
    ]
