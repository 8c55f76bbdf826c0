"""Runs in a terminal: conditions that pick them, values by name, a table that fits.

A name is one of `COLUMNS`, a result such as `eval.accuracy`, or a setting by its full key such as `optimizer.lr`; of a
group, such as `model`, its option's name.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amp_core.config.errors import ConfigError
from amp_core.config.files import visible
from amp_tools.report.folders import Run, age

COLUMNS: dict[str, Callable[[Run], Any]] = {
    "status": lambda run: run.status,
    "recipe": lambda run: run.recipe or None,
    "amp": lambda run: run.amp or None,
    "seed": lambda run: run.config.get("seed"),
    "step": lambda run: run.count("step"),
    "metric": lambda run: run.best,
    "result": lambda run: run.result(),
    "speed": lambda run: run.count("samples_per_second"),
    "memory": lambda run: run.count("peak_memory_bytes"),
    "skipped": lambda run: run.count("skipped"),
    "seconds": lambda run: run.count("seconds"),
    "exit_code": lambda run: run.count("exit_code"),
    "age": lambda run: age(run) / 86400 if run.changed else None,
    "folder": lambda run: str(run.path),
}
"""`speed` in samples per second, `memory` in bytes, `age` in days since the last change."""
SHOWN = ("status", "recipe", "amp", "seed", "step", "metric", "result", "speed", "age", "folder")
_OPERATORS: dict[str, Any] = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


def value_of(run: Run, name: str) -> Any:
    """A value by name; None when the run has none of that name."""
    if name in COLUMNS:
        return COLUMNS[name](run)
    if name.startswith("eval."):
        return run.evaluation.get(name.removeprefix("eval."))
    return run.config.get(name, run.config.get(f"{name}.name"))


def check_names(names: Sequence[str], runs: Sequence[Run]) -> None:
    """ConfigError: no run has a value of such a name."""
    known = set(COLUMNS) | {key for run in runs for key in run.config}
    known |= {f"eval.{key}" for run in runs for key in run.evaluation}
    groups = {key.removesuffix(".name") for key in known if key.endswith(".name")}
    problems = []
    for name in names:
        if name not in known | groups and runs:
            near = difflib.get_close_matches(name, known | groups, 3)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"Such as: {', '.join(COLUMNS)}, or any setting."
            problems.append(f"{name}: no run has a value of that name. {hint}")
    if problems:
        raise ConfigError(problems)


def condition(text: str) -> tuple[str, Callable[[Run], bool]]:
    """The name in `eval.accuracy>0.98`, `status!=finished` or `amp=fp16*`, and whether it holds for a run.

    A value that is missing, or is no number where numbers are compared, fulfils nothing but `!=`. ConfigError: it is
    no condition.
    """
    found = re.fullmatch(r"([^=<>!\s]+)(>=|<=|!=|>|<|=)(.*)", text)
    if not found:
        hint = "; folders stand before --where" if Path(text).exists() else ""
        raise ConfigError(f"--where {text}: expected NAME=VALUE, or another of = != > >= < <={hint}")
    name, sign, wanted = found.groups()
    limit, compare = _number(wanted), _OPERATORS.get(sign)
    if compare and limit is None:
        raise ConfigError(f"--where {text}: expected a number behind {sign}")

    def holds(run: Run) -> bool:
        value = value_of(run, name)
        is_number = isinstance(value, int | float)
        if compare:
            return is_number and not isinstance(value, bool) and bool(compare(value, limit))
        if value is None:
            same = wanted in ("null", "None", "")
        else:
            same = (
                float(value) == limit if is_number and limit is not None else fnmatch.fnmatchcase(_plain(value), wanted)
            )
        return same == (sign == "=")

    return name, holds


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def sort_runs(runs: Sequence[Run], name: str) -> list[Run]:
    """By a value, rising; falling with a minus in front. Runs without one come last."""
    falling, name = name.startswith("-"), name.removeprefix("-")
    found = [(value_of(run, name), run) for run in runs]
    have = [(value, run) for value, run in found if value is not None]
    if any(not isinstance(value, int | float) for value, _ in have):
        have = [(str(value), run) for value, run in have]
    have.sort(key=lambda pair: pair[0], reverse=falling)
    return [run for _, run in have] + [run for value, run in found if value is None]


def cell(name: str, value: Any) -> str:
    """A value as a cell of the table."""
    if value is None:
        return "-"
    if name == "age":
        return duration(value * 86400)
    if name == "memory":
        return f"{value / 2**20:,.0f} MiB"
    if name in ("step", "speed", "skipped", "seconds", "exit_code"):
        return f"{value:,.0f}"
    if name == "result" or name.startswith("eval."):
        return f"{value:.4f}"
    return visible(f"{value:g}" if isinstance(value, float) else _plain(value)).replace("\n", " ").replace("\t", " ")


def duration(seconds: float) -> str:
    """Such as 40s, 5m, 3h, 12d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s" if math.isfinite(seconds) else "-"


def table(names: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Aligned lines.

    What is wider than `width` is cut in the middle of the last column: names of jobs begin with what was varied, and
    end with what tells them apart. None: nothing is cut.
    """
    columns = list(zip(names, *rows, strict=True))
    sizes = [max(map(len, column)) for column in columns]
    if width is not None:
        sizes[-1] = max(12, width - sum(sizes[:-1]) - 2 * (len(sizes) - 1))
    is_number = [all(re.fullmatch(r"[-+\d.,e%]*|-", text) for text in column[1:]) for column in columns]
    lines = []
    for row in [names, *rows]:
        cells = [
            text.rjust(n) if right else text.ljust(n) for text, n, right in zip(row, sizes, is_number, strict=True)
        ]
        if len(row[-1]) > sizes[-1]:
            tail = min(9, sizes[-1] // 3)
            cells[-1] = f"{row[-1][: sizes[-1] - tail - 1]}…{row[-1][-tail:]}"
        lines.append("  ".join(cells).rstrip())
    return lines if width is None else [line[:width] for line in lines]
