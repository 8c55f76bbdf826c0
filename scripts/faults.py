"""The fault campaign: faults made on purpose, many times, and what the project promises checked after each.

    python scripts/faults.py                              everything, in the long form
    python scripts/faults.py --short                      the form of the tests: minutes
    python scripts/faults.py --only kills,damage --count 50 --seed 7 --json result.json
    python scripts/faults.py --only kills --seed 7 --case 13            one case again
    python scripts/faults.py --write docs/RELIABILITY.md  renew the table of that page

Exit code 1 when a promise was broken: each violation says what to repeat it with. Works on Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from campaign import COLUMNS, Plan, Result
from campaign.elastic import elastic
from campaign.files import damaged, pickles
from campaign.harness import kill_all, warm_up
from campaign.network import network
from campaign.runs import kills, restarts, signals
from campaign.saves import saves
from campaign.shimmed import errors, load_before_libc
from campaign.stuck import stuck

PARTS: dict[str, Callable[[Plan], Result]] = {
    "saves": saves,
    "damage": damaged,
    "pickles": pickles,
    "kills": kills,
    "signals": signals,
    "restarts": restarts,
    "elastic": elastic,
    "errors": errors,
    "stuck": stuck,
    "network": network,
}
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    parser.add_argument("--short", action="store_true", help="fewer cases, and only the quick kinds")
    parser.add_argument("--count", type=int, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this case")
    parser.add_argument("--json", type=Path, help="write the counts and the violations to this file")
    parser.add_argument("--write", type=Path, help="renew the table in this page")
    parser.add_argument(
        "--read",
        type=Path,
        nargs="+",
        help="with --write: earlier --json results, the last of a part counts; runs nothing",
    )
    flags = parser.parse_args()
    if flags.read:
        found = [json.loads(path.read_text()) for path in flags.read]
        known = {row["part"]: row for one in found for row in one["parts"]}
        if flags.write is None or known.keys() < PARTS.keys():
            parser.error(f"--read needs --write, and results of all parts; missing: {PARTS.keys() - known.keys()}")
        rows = [known[name] for name in PARTS]
        write_table(flags.write, rows, found[0]["setting"])
        return int(any(row["violations"] for row in rows))
    unknown = set(flags.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--only: no part {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    if flags.write and set(flags.only.split(",")) != set(PARTS):
        parser.error("--write needs all parts; run each with --only and --json, then --read the files")
    if "errors" in flags.only.split(","):
        load_before_libc(Path(tempfile.mkdtemp(prefix="shim-")))
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks where a library has threads
    # What a killed process leaves is the same in memory, and bringing it to disk costs nothing there.
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    work = Path(tempfile.mkdtemp(prefix="faults-", dir=place))
    rows = []
    try:
        warm_up(work)
        for name in flags.only.split(","):
            plan = Plan(work / name, flags.seed, not flags.short, flags.count, flags.case)
            began = time.monotonic()
            result = PARTS[name](plan)
            rows.append(row_of(name, result, time.monotonic() - began))
            say(rows[-1], flags)
            shutil.rmtree(plan.work, ignore_errors=True)
    finally:
        kill_all()
        shutil.rmtree(work, ignore_errors=True)
    print(f"\n{'part':9} {'tries':>7}" + "".join(f"{name:>17}" for name in COLUMNS))
    for row in rows:
        print(f"{row['part']:9} {row['tries']:7,}" + "".join(f"{row['columns'].get(name, 0):17}" for name in COLUMNS))
    if flags.json:
        flags.json.write_text(json.dumps({"setting": setting(flags), "parts": rows}, indent=1) + "\n")
    if flags.write:
        write_table(flags.write, rows, setting(flags))
    return int(any(row["violations"] for row in rows))


def row_of(name: str, result: Result, seconds: float) -> dict[str, object]:
    return {
        "part": name,
        "counts": dict(result.counts),
        "tries": result.tries,
        "columns": dict(result.columns),
        "violations": result.violations,
        "facts": result.facts,
        "seconds": round(seconds, 1),
    }


def say(row: dict, flags: argparse.Namespace) -> None:
    counts = ", ".join(f"{count} {what}" for what, count in row["counts"].items())
    print(f"{row['part']:9} {len(row['violations'])} violations in {row['seconds']} s: {counts}", flush=True)
    for what, fact in row["facts"].items():
        print(f"{'':9} {what}: {fact}", flush=True)
    form = " --short" if flags.short else ""
    for violation in row["violations"]:
        print(f"  VIOLATION {violation}", flush=True)
    if row["violations"]:
        print(f"  repeat with: python scripts/faults.py{form} --only {row['part']} --seed {flags.seed} --case N")


def setting(flags: argparse.Namespace) -> str:
    form = "short" if flags.short else "long"
    system = f"{platform.system()}, Python {platform.python_version()}, torch {version('torch')}"
    return f"{form} form, seed {flags.seed}, {os.cpu_count()} cores, {system}"


def violations(columns: dict[str, int]) -> str:
    """Their numbers by kind."""
    return ", ".join(f"{columns[name]} {name}" for name in COLUMNS if columns.get(name))


def write_table(page: Path, rows: list[dict], how: str) -> None:
    """Write the counts between the two marks of the page; its promises stay."""
    head, rest = page.read_text().split(BEGIN)
    old, tail = rest.split(END)
    promises = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", old, re.MULTILINE))
    table = ["| part | promise | tries |", "| --- | --- | --- |"]
    table += [f"| `{row['part']}` | {promises.get(row['part'], '')} | {row['tries']:,} |" for row in rows]
    bad = [f"`{row['part']}`: {violations(row['columns'])}" for row in rows if row["violations"]]
    tries, seconds = (sum(row[key] for row in rows) for key in ("tries", "seconds"))
    how = f"{how[0].upper()}{how[1:]}: {tries:,} tries in {seconds:.0f} s, {'; '.join(bad) or 'no'} violations."
    page.write_text(f"{head}{BEGIN}\n{how}\n\n" + "\n".join(table) + f"\n{END}{tail}")


if __name__ == "__main__":
    sys.exit(main())
