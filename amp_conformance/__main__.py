"""The command line: put trainers through the checks, and write a table.

python -m amp_conformance --trainer accelerate --trainer fabric
python -m amp_conformance --trainer my_package.my_module:MyTrainer
"""

from __future__ import annotations

import argparse
import importlib
import itertools
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


ORDER = ("hung", "error", "failed", "passed", "not offered")


@dataclass(frozen=True)
class Row:
    """A trainer, and what came of its checks: of each the worst of all seeds."""

    name: str
    trainer: Trainer
    results: list[Result]

    @classmethod
    def worst(cls, name: str, trainer: Trainer, runs: Sequence[list[Result]]) -> Row:
        """Of runs with several seeds."""
        return cls(name, trainer, [min(each, key=lambda r: ORDER.index(r.status)) for each in zip(*runs, strict=True)])

    @property
    def score(self) -> str:
        """How many it passed of those that it offers."""
        found = [each.status for each in self.results]
        return f"{found.count('passed')} of {len(found) - found.count('not offered')}"


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
    """The results in Markdown: checks that somebody fails x trainers, each before and with its plugin; their set-up."""
    named = {each.name: each for each in rows}
    alone = [row for name, row in named.items() if not (name.endswith("+") and name[:-1] in named)]
    pairs = [(row, named.get(f"{row.name}+")) for row in alone]
    lines = [f"torch {version('torch')}, {platform.machine()}, {date.today()}, `{command}`.", ""]
    lines += [f"`{REPRODUCE}` runs one check; the names of trainers are {', '.join(TRAINERS)}, with `+` protected.", ""]
    names = [
        f"{one.name} {version(one.package) if one.package else ''}".strip() for one in (r.trainer for r, _ in pairs)
    ]
    lines += [f"| check: what a failure does | {' | '.join(names)} |", "| --- |" + " --- |" * len(pairs)]
    passed = 0
    for number, (name, check) in enumerate(CHECKS.items()):
        found = [[each.results[number].status for each in pair if each] for pair in pairs]
        if {"failed", "error", "hung"}.isdisjoint(itertools.chain(*found)):
            passed += 1
        else:
            marks = " | ".join(" / ".join(dict.fromkeys(MARKS[status] for status in each)) for each in found)
            lines.append(f"| [{name}](BEHAVIOURS.md#{check.trap}): {check.wrong} | {marks} |")
    total = [" / ".join(each.score for each in pair if each) for pair in pairs]
    lines += [f"| **passed of what is offered** | {' | '.join(total)} |", ""]
    lines += [f"The other {passed} checks are passed by every trainer that offers them."] if passed else []
    lines += ["", "### How each trainer is set up", ""]
    for row, plus in pairs:
        notes = {result.note for result in row.results if result.note}
        left = f" It leaves changed: {'; '.join(sorted(note.split(' (')[0] for note in notes))}." if notes else ""
        more = f" [Protected](OTHER_TRAINERS.md): {plus.trainer.configuration}." if plus else ""
        lines.append(f"- [{row.trainer.name}]({row.trainer.documentation}): {row.trainer.configuration}.{left}{more}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code is 1 if a check failed."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("amp_conformance", description=__doc__, formatter_class=style)
    parser.add_argument("--trainer", action="append", metavar="NAME", help=f"{', '.join(TRAINERS)}, or module:Class")
    parser.add_argument("--check", action="append", choices=CHECKS, metavar="NAME", help="one check; default: all")
    parser.add_argument("--seed", type=int, action="append", help="of the numbers drawn; may be repeated; default: new")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one check (default 60)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the marks of this page")
    flags = parser.parse_args(arguments)
    sys.path.insert(0, "")  # for module:Class of the current folder
    if flags.write and flags.check:
        parser.error("--write needs all checks; leave out --check")
    installed = [name for name in (*TRAINERS, *PLUGGED) if flags.trainer or _is_installed(name)]
    seeds = flags.seed or [random.SystemRandom().randrange(2**31)]  # the same for all, to compare
    rows = []
    for name in flags.trainer or installed:
        try:
            trainer = load(name)
        except ValueError as unusable:
            parser.error(str(unusable))
        runs = [run(trainer, flags.check or (), seed=seed, limit=flags.limit) for seed in seeds]
        rows.append(Row.worst(name, trainer, runs))
        print(f"== {trainer.name}")
        for result in rows[-1].results:
            print(result, flush=True)
    if flags.write:
        page = flags.write.read_text()
        head, _, rest = page.partition(BEGIN)
        if not rest or END not in rest:
            parser.error(f"{flags.write}: the marks {BEGIN} and {END} are missing")
        drawn = "".join(f" --seed {seed}" for seed in seeds)
        command = f"python scripts/conformance.py{drawn} --write {flags.write}"
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
