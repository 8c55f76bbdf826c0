"""List, filter, compare and prune runs.

    python scripts/runs.py                                              # all below outputs, multirun and runs
    python scripts/runs.py multirun/lr --where status=finished 'eval.accuracy>0.98' --sort -result
    python scripts/runs.py --where amp=fp16* --columns amp,seed,optimizer.lr,result,folder
    python scripts/runs.py compare outputs/classification/A outputs/classification/B
    python scripts/runs.py prune --older 30                             # shows what would go: runs without a result
    python scripts/runs.py prune --checkpoints --older 7 --yes          # removes checkpoints but the newest and best

--where takes status, recipe, amp, seed, step, result, speed, memory, skipped, seconds, exit_code, age (days), eval.*,
and any setting by its key; with = (also a pattern such as fp16*), !=, and > >= < <=, which a shell wants in quotes.
prune removes nothing without --yes, never anything of an active run, and only what runs write themselves. Before
it removes checkpoints, it verifies those that stay.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amp_core.cli.command import answering
from amp_core.config.errors import ConfigError
from amp_core.config.redact import shown
from amp_core.run.terminal import say
from amp_tools.report.folders import Run, find_runs, plain, read_run
from amp_tools.report.groups import differing_settings
from amp_tools.report.prune import Plan, carry_out, plan_checkpoints, plan_runs
from amp_tools.report.prune import as_dict as plan_as_dict
from amp_tools.report.table import COLUMNS, SHOWN, cell, check_names, condition, sort_runs, table, value_of

COMMANDS = ("list", "compare", "prune")
PLACES = ("outputs", "multirun", "runs")


def picked(args: argparse.Namespace) -> list[Run]:
    """The runs that were asked for; what was skipped is reported on stderr."""
    folders = args.folders or [folder for folder in map(Path, PLACES) if folder.is_dir()]
    if gone := [str(folder) for folder in folders if not folder.exists()]:
        raise ConfigError([f"{folder}: there is no such folder" for folder in gone])
    notes: list[str] = []
    runs = [read_run(folder) for folder in find_runs(folders, notes)]
    for note in notes:
        print(f"passed over: {shown(note)}", file=sys.stderr)
    conditions = [condition(text) for text in args.where]
    check_names([name for name, _ in conditions], runs)
    return [run for run in runs if all(holds(run) for _, holds in conditions)]


def terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def show(args: argparse.Namespace) -> int:
    """Print the table."""
    runs = picked(args)
    names = [name.strip() for name in args.columns.split(",")] if args.columns else list(SHOWN)
    check_names([*names, *([args.sort.removeprefix("-")] if args.sort else [])], runs)
    if args.sort:
        runs = sort_runs(runs, args.sort)
    if args.json:
        everything = [
            {name: of(run) for name, of in COLUMNS.items()}
            | {"eval": run.evaluation, "error": run.error or None, "problems": run.problems, "config": run.config}
            for run in runs
        ]
        say(json.dumps(plain(everything), indent=2))
        return 0
    if not runs:
        print("no runs", file=sys.stderr)
        return 0
    width = terminal_width()
    rows = [[cell(name, value_of(run, name)) for name in names] for run in runs]
    shared = (
        os.path.commonpath([run.path.parent for run in runs])
        if len({run.path.is_absolute() for run in runs}) == 1
        else ""
    )
    if width is not None and names[-1] == "folder" and shared:
        say(shown(f"in {shared}"))
        rows = [
            [*row[:-1], cell("folder", os.path.relpath(run.path, shared))] for row, run in zip(rows, runs, strict=True)
        ]
    say("\n".join(table(names, rows, width)))
    return 0


def compare(args: argparse.Namespace) -> int:
    """Settings that differ, and results, side by side."""
    runs = [read_run(folder) for folder in (args.a, args.b)]
    for run in runs:
        if not run.config and not run.summary:
            raise ConfigError(f"{run.path}: holds no run ({'; '.join(run.problems)})")
    settings = differing_settings(runs, irrelevant=())
    results = [name for name in COLUMNS if name not in ("folder", "recipe", "amp", "seed", "metric", "result")]
    metrics = list(dict.fromkeys(f"eval.{name}" for run in runs for name in run.evaluation))
    both = {name: [value_of(run, name) for run in runs] for name in [*metrics, *results]}
    if args.json:
        about = {"runs": [str(run.path) for run in runs], "results": both}
        chosen = {name: [run.config.get(name) for run in runs] for name in settings}
        say(json.dumps(plain(about | {"settings": chosen}), indent=2))
        return 0
    rows = [[name, *(cell(name, run.config.get(name)) for run in runs), ""] for name in settings]
    rows += [["", "", "", ""]] if rows else []
    for name, values in both.items():
        if any(value is not None for value in values):
            a, b = values
            is_ratio = name in ("speed", "seconds", "memory") and a and b
            change = f"{b / a:.2f}x" if is_ratio else f"{b - a:+.4g}" if _are_numbers(a, b) and name != "age" else ""
            rows.append([name, *(cell(name, value) for value in values), change])
    say(shown(f"A  {args.a}\nB  {args.b}\n\n") + "\n".join(table(["", "A", "B", "B to A"], rows, None)))
    return 0


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def prune(args: argparse.Namespace) -> int:
    """Show what would be removed, and remove it with --yes."""
    if not args.older >= 0:
        raise ConfigError(f"--older {args.older}: expected days, 0 or more")
    plan = plan_checkpoints if args.checkpoints else plan_runs
    plans = [found for run in picked(args) if (found := plan(run, args.older)) is not None]
    if args.json:
        say(json.dumps([plan_as_dict(found) for found in plans], indent=2))
    failures = 0
    for found in plans:
        problem = carry_out(found, whole=not args.checkpoints) if args.yes else None
        failures += problem is not None
        if problem:
            print(shown(f"not removed: {found.run.path}: {problem}"), file=sys.stderr)
        elif not args.json:
            say(_line(found, "removed" if args.yes else "would remove", args.checkpoints))
    total = sum(found.bytes for found in plans) / 2**20
    what = f"{len(plans)} runs" if not args.checkpoints else f"checkpoints of {len(plans)} runs"
    if not args.json:
        say(
            f"{what}, {total:,.1f} MiB" + ("" if args.yes or not plans else "; nothing was removed, add --yes to do it")
        )
    return 1 if failures else 0


def _line(plan: Plan, did: str, checkpoints: bool) -> str:
    what = f"{len(plan.paths)} checkpoints of " if checkpoints else ""
    tail = f" ({plan.keeps})" if plan.keeps else ""
    return shown(f"{did}: {what}{plan.run.path}  {plan.run.status}, {plan.bytes / 2**20:,.1f} MiB{tail}")


@answering
def main(arguments: Sequence[str]) -> int:
    """Run a command line; without a command it lists. Returns the exit code."""
    arguments = list(arguments)
    if not arguments or arguments[0] not in (*COMMANDS, "-h", "--help"):
        arguments.insert(0, "list")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")

    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("folders", nargs="*", type=Path, help="where to look; default: outputs, multirun and runs")
    chosen.add_argument("--where", nargs="+", action="extend", default=[], metavar="CONDITION", help="such as amp=bf16")
    chosen.add_argument("--json", action="store_true")

    command = commands.add_parser("list", parents=[chosen], help="a table of runs (the default)")
    command.add_argument("--sort", metavar="NAME", help="by this value, rising; -NAME: falling")
    command.add_argument("--columns", metavar="NAME,NAME", help=f"default: {','.join(SHOWN)}")
    command.set_defaults(do=show)

    command = commands.add_parser("compare", help="two runs side by side")
    command.add_argument("a", type=Path)
    command.add_argument("b", type=Path)
    command.add_argument("--json", action="store_true")
    command.set_defaults(do=compare)

    command = commands.add_parser("prune", parents=[chosen], help="remove runs without a result, or checkpoints")
    command.add_argument("--older", type=float, default=14.0, metavar="DAYS", help="untouched for so long; default: 14")
    command.add_argument(
        "--checkpoints", action="store_true", help="of all runs, but the newest sound one and the best"
    )
    command.add_argument("--yes", action="store_true", help="do it")
    command.set_defaults(do=prune)

    # `--sort -result`: argparse would take the minus for an option.
    arguments = [
        f"--sort={arguments[i + 1]}" if text == "--sort" and i + 1 < len(arguments) else text
        for i, text in enumerate(arguments)
        if i == 0 or arguments[i - 1] != "--sort"
    ]
    args = parser.parse_args(arguments)
    return args.do(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
