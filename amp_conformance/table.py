"""What came of the checks: kept in a file, trainer by trainer, and shown as tables on pages."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from amp_conformance.checks import CHECKS
from amp_conformance.engine import Result
from amp_conformance.task import Trainer

REPRODUCE = 'python -m amp_conformance --trainer NAME --check "CHECK"'
MARKS = {"passed": "yes", "failed": "**no**", "error": "**error**", "hung": "**hung**", "not offered": "-"}
ORDER = ("hung", "error", "failed", "passed", "not offered")
FUSED = "/fused"


@dataclass(frozen=True)
class Row:
    """A trainer, and what came of its checks: of each the worst of all seeds.

    Attributes:
        name: on the command line; ending in `+` with its plugin, then in `/fused` with fused optimizers.
        title: of its column, with its version.
        configuration, documentation: see `Trainer`.
        seeds: of the runs.
        ran_on: torch's version, the processor, the day.
        results: check -> status, and what was seen.
        notes: what it left changed.
    """

    name: str
    title: str
    configuration: str
    documentation: str
    seeds: list[int]
    ran_on: list[str]
    results: dict[str, list[str]]
    notes: list[str]

    @classmethod
    def worst(cls, name: str, trainer: Trainer, runs: Sequence[list[Result]]) -> Row:
        """Of runs with several seeds."""
        found = [min(each, key=lambda r: ORDER.index(r.status)) for each in zip(*runs, strict=True)]
        return cls(
            name,
            f"{trainer.name} {version(trainer.package) if trainer.package else ''}".strip(),
            trainer.configuration,
            trainer.documentation,
            [run[0].seed for run in runs],
            [f"torch {version('torch')}", platform.machine(), str(date.today())],
            {each.check: [each.status, each.seen] for each in found},
            sorted({each.note.split(" (")[0] for run in runs for each in run if each.note}),
        )

    def status(self, check: str) -> str:
        """What came of a check; "not offered" also where it was not run."""
        return self.results.get(check, ["not offered"])[0]

    @property
    def failed(self) -> list[str]:
        """The checks that it offers and does not pass."""
        return [name for name in CHECKS if self.status(name) not in ("passed", "not offered")]

    @property
    def score(self) -> str:
        """How many it passed of those that it offers: 30/51."""
        found = [self.status(name) for name in CHECKS]
        return f"{found.count('passed')}/{len(found) - found.count('not offered')}"


def kept(file: Path) -> dict[str, Row]:
    """The rows of a file, by name; none if there is no file."""
    return {name: Row(name, **row) for name, row in json.loads(file.read_text()).items()} if file.exists() else {}


def keep(file: Path, row: Row) -> None:
    """Put a row into a file, which holds the old rows or the new ones whenever this process ends."""
    rows = kept(file) | {row.name: row}
    told = {name: {key: value for key, value in vars(each).items() if key != "name"} for name, each in rows.items()}
    part = file.with_suffix(".part")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in told.items())  # one a trainer
    part.write_text(f"{{\n{lines}\n}}\n")
    part.replace(file)


def write(page: Path, rows: Mapping[str, Row]) -> None:
    """Put the tables between the marks of a page.

    Raises:
        ValueError: it has no such marks.
    """
    head, begin, rest = page.read_text().partition("<!-- begin of the table -->")
    _, end, tail = rest.partition("<!-- end of the table -->")
    if not end:
        raise ValueError(f"{page}: the marks <!-- begin of the table --> and <!-- end of the table --> are missing")
    page.write_text(f"{head}{begin}\n{table(rows)}\n{end}{tail}")


def _pairs(rows: Mapping[str, Row], suffix: str = "") -> Iterator[tuple[str, list[Row]]]:
    """Trainers, and their rows before and with the plugin."""
    for name in dict.fromkeys(name.removesuffix(FUSED).removesuffix("+") for name in rows):
        yield name, [rows[key] for key in (f"{name}{suffix}", f"{name}+{suffix}") if key in rows]


def _lines(names: Iterable[str], pairs: Sequence[Sequence[Row]]) -> list[str]:
    """A table: a column per trainer, a row for all checks with the same marks; a fused twin joins its check."""
    marks = {
        name: " | ".join("→".join(dict.fromkeys(MARKS[row.status(name)] for row in pair)) or "-" for pair in pairs)
        for name in names
    }
    joined = {f"{name}, fused" for name in marks if marks[name] == marks.get(f"{name}, fused")}
    rows: dict[str, list[str]] = {}
    for name in marks:
        if name not in joined:
            text = f"{name}, fused or not" if f"{name}, fused" in joined else name
            rows.setdefault(marks[name], []).append(f"[{text}](BEHAVIOURS.md#{CHECKS[name].trap})")
    lines = [f"| checks | {' | '.join(pair[0].title for pair in pairs)} |", "| --- |" + " --- |" * len(pairs)]
    lines += [f"| {'<br>'.join(checks)} | {found} |" for found, checks in rows.items()]
    return [*lines, f"| **passed of offered** | {' | '.join('→'.join(row.score for row in pair) for pair in pairs)} |"]


def _split(pairs: Iterable[Sequence[Row]]) -> tuple[list[Sequence[Row]], str]:
    """The trainers that fail a check, and a sentence about the others."""
    ran = [pair for pair in pairs if pair]
    columns = [pair for pair in ran if any(row.failed for row in pair)]
    others = ", ".join(f"{pair[0].title} ({pair[0].score})" for pair in ran if pair not in columns)
    return columns, f" Without a failure: {others}." if others else ""


def table(rows: Mapping[str, Row]) -> str:
    """Checks that somebody fails x trainers that fail one, without and with the plugin; then with fused optimizers."""
    alone, whole = dict(_pairs(rows)), dict(_pairs(rows, FUSED))
    every = [row for pair in alone.values() for row in pair]
    last = max(every, key=lambda row: row.ran_on[-1])
    seeds = " and ".join(map(str, dict.fromkeys(seed for row in every for seed in row.seeds)))
    columns, right = _split(alone.values())
    lines = [f"{', '.join(last.ran_on)}; the worse of seeds {seeds}. `no→yes`: without, and with the plugin.", ""]
    lines += [f"`{REPRODUCE}` runs one check; trainers: {', '.join(alone)}, with `+` protected.", ""]
    bad = [name for name in CHECKS if any(name in row.failed for row in every)]
    lines += [*_lines(bad, columns), ""]
    lines += [f"All trainers pass the other {len(CHECKS) - len(bad)} checks, if they offer them.{right}"]
    if others := [row for pair in whole.values() for row in pair]:

        def as_above(row: Row, name: str) -> str:
            twin = f"{name}, fused"
            return rows[row.name.removesuffix(FUSED)].status(twin if twin in CHECKS else name)

        differ = [
            name for name in CHECKS if any(r.status(name) not in ("not offered", as_above(r, name)) for r in others)
        ]
        columns, right = _split(whole.values())
        lines += ["", f"With fused optimizers in every check, where the result differs.{right}", ""]
        lines += _lines(differ, columns)
    return "\n".join(lines)
