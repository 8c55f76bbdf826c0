"""The command line: put trainers through the checks, and write tables.

python -m amp_conformance --trainer accelerate --trainer fabric
python -m amp_conformance --trainer my_package.my_module:MyTrainer
python -m amp_conformance --seed 1 --seed 2 --keep results.json --write page.md
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from amp_conformance import CHECKS, Trainer, run
from amp_conformance.checks import with_fused
from amp_conformance.table import FUSED, Row, keep, kept, write

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


def load(name: str) -> Trainer:
    """A trainer by its name, or by `module:Class`.

    Raises:
        ValueError: it cannot be made, or has no `run`.
    """
    plain = name.removesuffix("+")
    module, _, cls = TRAINERS.get(plain, name).rpartition(":")
    try:
        if not module:
            raise ValueError("there is no such trainer")
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code is 1 if a check failed."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("amp_conformance", description=__doc__, formatter_class=style)
    parser.add_argument("--trainer", action="append", metavar="NAME", help=f"{', '.join(TRAINERS)}, or module:Class")
    parser.add_argument("--check", action="append", choices=CHECKS, metavar="NAME", help="one check; default: all")
    parser.add_argument("--seed", type=int, action="append", help="of the numbers drawn; may be repeated; default: new")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one check (default 60)")
    parser.add_argument("--fused", action="store_true", help="with fused optimizers in every check")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep results in it; run what it lacks, and --trainer"
    )
    parser.add_argument("--write", type=Path, action="append", metavar="PAGE", help="put tables between its marks")
    flags = parser.parse_args(arguments)
    sys.path.insert(0, "")  # for module:Class of the current folder
    if (flags.write or flags.keep) and flags.check:
        parser.error("--write and --keep need all checks; leave out --check")
    suffix = FUSED if flags.fused else ""
    rows = kept(flags.keep) if flags.keep else {}
    names = [name for name in (*TRAINERS, *PLUGGED) if f"{name}{suffix}" not in rows and _is_installed(name)]
    seeds = flags.seed or [random.SystemRandom().randrange(2**31)]  # the same for all, to compare
    checks = flags.check or [name for name in CHECKS if not (flags.fused and name.endswith(", fused"))]
    failed = False
    for name in flags.trainer or names:
        try:
            trainer = load(name)
        except ValueError as unusable:
            parser.error(str(unusable))
        used = with_fused(trainer) if flags.fused else trainer
        row = Row.worst(f"{name}{suffix}", trainer, [run(used, checks, seed=seed, limit=flags.limit) for seed in seeds])
        rows[row.name] = row
        failed |= bool(row.failed)
        if flags.keep:
            keep(flags.keep, row)
        print(f"== {row.title}{suffix}")
        for check, (status, seen) in row.results.items():
            wrong = f" ({CHECKS[check].wrong})" if status in ("failed", "error", "hung") else ""
            print(f"{status:<12} {check}" + (f": {seen}" if seen else "") + wrong, flush=True)
        for note in row.notes:
            print(f"left changed: {note}")
    for page in flags.write or ():
        try:
            write(page, rows)
        except ValueError as error:
            parser.error(str(error))
    return int(failed)


def _is_installed(name: str) -> bool:
    try:
        load(name)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
