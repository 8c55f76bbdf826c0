"""Which mode, and at what cost in accuracy? Run folders and sweeps compared over seeds, in words and pictures.

    python scripts/report.py multirun/classification/2026-11-21_10-00-00 --out report.html
    python scripts/report.py multirun/parity                     # a table and verdicts in the terminal
    python scripts/report.py multirun/lr --by optimizer.lr --margin 0.002 --json

Prints Markdown: a row for each group of runs that differ in the seed alone, or a row for each choice of the settings
that are varied besides --by; then a verdict on each group. --out writes a page with pictures, one file that needs no
network. Runs that have not finished, and folders that cannot be read, are named on stderr and in the page.
docs/REPORTS.md says more.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amp_core.cli.command import answering
from amp_core.config.errors import ConfigError
from amp_core.run.lines import write_text
from amp_core.run.terminal import say
from amp_tools.report.charts import Panel, save_png
from amp_tools.report.folders import find_runs, read_run
from amp_tools.report.groups import make_study
from amp_tools.report.page import html_page
from amp_tools.report.text import as_dict, left_out, markdown


@answering
def main(arguments: list[str]) -> int:
    """Run a command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or folders that hold them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a page, such as report.html")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write its pictures as PNG, too")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of Markdown")
    parser.add_argument(
        "--by", default="", metavar="KEY[,KEY]", help="the settings whose values are compared; default: amp"
    )
    parser.add_argument("--metric", help="default: what the recipe calls best")
    parser.add_argument("--reference", metavar="GROUP", help="what the others are compared with; default: fp32")
    parser.add_argument(
        "--margin", default="0.5%", help="differences up to here count as none; default: 0.5%% of the reference"
    )
    flags = parser.parse_args(arguments)
    notes: list[str] = []
    if gone := [str(folder) for folder in flags.folders if not folder.exists()]:
        raise ConfigError([f"{folder}: there is no such folder" for folder in gone])
    runs = [read_run(folder) for folder in find_runs(flags.folders, notes)]
    by = [key.strip() for key in flags.by.split(",") if key.strip()]
    study = make_study(runs, by=by, metric=flags.metric, reference=flags.reference, margin=flags.margin)
    study.notes += notes
    if flags.out or flags.png:
        pictures: list[Panel] = []
        place = flags.out.parent if flags.out else Path()
        page = html_page(study, flags.folders, pictures=pictures, place=place)
        if flags.out:
            _write(flags.out, page)
        if flags.png:
            save_png(pictures, flags.png)
    say(json.dumps(as_dict(study), indent=2) if flags.json else markdown(study))
    for line in left_out(study):
        print(f"left out: {line}", file=sys.stderr)
    for place in (flags.out, flags.png):
        if place:
            print(f"written: {place}", file=sys.stderr)
    return 0


def _write(path: Path, page: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, page)
    except OSError as problem:
        raise ConfigError(f"--out {path}: cannot be written: {problem.strerror or problem}") from problem


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
