"""The command line: put trainers through the checks, and write a table.

python -m amp_conformance --trainer accelerate --trainer fabric
python -m amp_conformance --trainer my_package.my_module:MyTrainer
"""

from __future__ import annotations

import argparse
import importlib
import platform
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from amp_conformance import CHECKS, Result, Trainer, run

TRAINERS = {
    "by_hand": "by_hand:ByHand",
    "textbook": "textbook:Textbook",
    "ours": "ours:Ours",
    "accelerate": "accelerate:Accelerate",
    "fabric": "fabric:Fabric",
    "lightning": "lightning:Lightning",
    "huggingface": "huggingface:HuggingFace",
    "timm": "timm:Timm",
    "ignite": "ignite:Ignite",
}
"""Names on the command line -> modules of `amp_conformance.trainers` and classes. `NAME+`: with its plugin."""
PLUGGED = ("textbook+", "accelerate+", "fabric+", "lightning+", "huggingface+", "timm+", "ignite+")
REPRODUCE = 'python -m amp_conformance --trainer NAME --check "CHECK"'
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"
MARKS = {"passed": "yes", "failed": "**no**", "error": "**error**", "hung": "**hung**", "not offered": "-"}


@dataclass(frozen=True)
class Row:
    """A trainer, and what came of its checks."""

    trainer: Trainer
    results: list[Result]


def load(name: str) -> Trainer:
    """A trainer by its name, or by `module:Class`.

    Raises:
        ValueError: it cannot be made, or has no `run`.
    """
    plain = name.removesuffix("+")
    module, _, cls = TRAINERS.get(plain, name).rpartition(":")
    try:
        if plain != name and plain in TRAINERS:
            trainer = importlib.import_module("amp_conformance.trainers.plugged").plugged(module, cls)()
        else:
            inside = f"amp_conformance.trainers.{module}" if name in TRAINERS else module
            trainer = getattr(importlib.import_module(inside), cls)()
        missing = [name for name in ("run", *Trainer.__annotations__) if not hasattr(trainer, name)]
        if missing:
            raise TypeError(f"{cls} has no {', '.join(missing)}; see amp_conformance.Trainer")
        return trainer  # type: ignore[no-any-return]
    except Exception as error:
        known = ", ".join(TRAINERS)
        raise ValueError(f"--trainer {name}: {error}; expected one of {known}, or module:Class") from error


def table(rows: Sequence[Row], command: str) -> str:
    """The results in Markdown: checks that somebody fails x trainers, and how trainers are set up."""
    lines = [f"torch {version('torch')}, {platform.machine()}, {date.today()}, `{command}`.", ""]
    names = [
        f"{each.name} {version(each.package)}" if each.package else each.name for each in (r.trainer for r in rows)
    ]
    lines += [f"`{REPRODUCE}` runs one check; the names of trainers are {', '.join(TRAINERS)}.", ""]
    lines += [f"| check: what a failure does | {' | '.join(names)} |", "| --- |" + " --- |" * len(rows)]
    passed = 0
    for number, (name, check) in enumerate(CHECKS.items()):
        found = [row.results[number].status for row in rows]
        if {"failed", "error", "hung"}.isdisjoint(found):
            passed += 1
        else:
            marks = " | ".join(MARKS[status] for status in found)
            lines.append(f"| [{name}](BEHAVIOURS.md#{check.trap}): {check.wrong} | {marks} |")
    counts = [[sum(r.status == status for r in row.results) for row in rows] for status in ("passed", "not offered")]
    total = [f"{yes} of {len(CHECKS) - no}" for yes, no in zip(*counts, strict=True)]
    lines += [f"| **passed of what is offered** | {' | '.join(total)} |", ""]
    lines += [f"The other {passed} checks are passed by every trainer that offers them."] if passed else []
    lines += ["", "### How each trainer is set up", ""]
    for row in rows:
        notes = {result.note for result in row.results if result.note}
        left = f" It leaves changed: {'; '.join(sorted(note.split(' (')[0] for note in notes))}." if notes else ""
        lines.append(f"- [{row.trainer.name}]({row.trainer.documentation}): {row.trainer.configuration}.{left}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code is 1 if a check failed."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("amp_conformance", description=__doc__, formatter_class=style)
    parser.add_argument("--trainer", action="append", metavar="NAME", help=f"{', '.join(TRAINERS)}, or module:Class")
    parser.add_argument("--check", action="append", choices=CHECKS, metavar="NAME", help="one check; default: all")
    parser.add_argument("--seed", type=int, help="of the numbers drawn; default: another one each time")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one check (default 60)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the marks of this page")
    flags = parser.parse_args(arguments)
    sys.path.insert(0, "")  # for module:Class of the current folder
    if flags.write and flags.check:
        parser.error("--write needs all checks; leave out --check")
    installed = [name for name in (*TRAINERS, *PLUGGED) if flags.trainer or _is_installed(name)]
    seed = random.SystemRandom().randrange(2**31) if flags.seed is None else flags.seed  # one for all, to compare
    rows = []
    for name in flags.trainer or installed:
        try:
            trainer = load(name)
        except ValueError as unusable:
            parser.error(str(unusable))
        results = run(trainer, flags.check or (), seed=seed, limit=flags.limit)
        rows.append(Row(trainer, results))
        print(f"== {trainer.name}")
        for result in results:
            print(result, flush=True)
    if flags.write:
        page = flags.write.read_text()
        head, _, rest = page.partition(BEGIN)
        if not rest or END not in rest:
            parser.error(f"{flags.write}: the marks {BEGIN} and {END} are missing")
        command = f"python scripts/conformance.py --write {flags.write}"
        flags.write.write_text(f"{head}{BEGIN}\n{table(rows, command)}\n{END}{rest.partition(END)[2]}")
    return int(any(result.status not in ("passed", "not offered") for row in rows for result in row.results))


def _is_installed(name: str) -> bool:
    try:
        load(name)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
