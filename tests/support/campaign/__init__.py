"""The fault campaign: this project's promises under faults that are made on purpose.

A part is a function of a `Plan` that tries a kind of fault many times and returns a `Result`. Runs are real processes,
forked from this one, which has imported torch and done one run: a run then takes half a second. `scripts/faults.py` is
the command; nothing here is imported by a run of its own accord.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# The project of this very folder, whatever is installed; also in the workers that runs start.
ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy starts threads, which a fork would lose


@dataclass(frozen=True)
class Plan:
    """What to try."""

    work: Path
    """An empty folder."""
    seed: int = 0
    long: bool = False
    count: int | None = None
    """Cases per loop, instead of those of the form."""
    case: int | None = None
    """Only this one of every loop."""

    def cases(self, loop: str, *, short: int | tuple[int, ...], long: int) -> Iterator[tuple[int, random.Random]]:
        """(number, randomness of its own) of each case, so that one of them can be repeated alone.

        Args:
            loop: part of the randomness.
            short: how many cases the short form has, or which.
            long: how many the long form has.
        """
        chosen = self.count or (long if self.long else short)
        chosen = range(chosen) if isinstance(chosen, int) else chosen
        for case in chosen if self.case is None else [self.case]:
            yield case, random.Random(f"{self.seed}/{loop}/{case}")

    def inside(self, name: str) -> Path:
        folder = self.work / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


COLUMNS = ("lost", "differing lines", "unbounded waits", "other")
"""What a broken promise is counted as: training that was lost or changed, lines of metrics, a process that does not end
in time, anything else."""


@dataclass
class Result:
    """What a part found."""

    counts: Counter[str] = field(default_factory=Counter)
    """What was tried -> how often."""
    violations: list[str] = field(default_factory=list)
    columns: Counter[str] = field(default_factory=Counter)
    """Violations in each of `COLUMNS`."""
    facts: dict[str, str] = field(default_factory=dict)
    """What was measured, and why something was left out."""

    def expect(self, holds: object, case: object, what: str, column: str = "other") -> bool:
        """Record a violation unless the promise holds. One that names an exit code None is a process that hung."""
        if not holds:
            self.violations.append(f"case {case}: {what}")
            hung = column == "other" and re.search(r"\bNone\b", what)
            self.columns["unbounded waits" if hung else column] += 1
        return bool(holds)

    @property
    def tries(self) -> int:
        return sum(count for what, count in self.counts.items() if "of these" not in what)
