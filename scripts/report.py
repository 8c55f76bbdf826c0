"""A table of run folders: mean and deviation of the results over seeds, one row per group of equal settings.

    python scripts/report.py multirun/classification/2026-11-21_10-00-00 [--by amp.name] [--metric accuracy]

Prints Markdown. Folders that hold no finished run are named on stderr and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from amp_core.compose import stored_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or folders that hold them")
    parser.add_argument("--by", default="amp.name", help="the setting that makes a row")
    parser.add_argument("--metric", default="accuracy")
    flags = parser.parse_args()
    groups: dict[str, list[dict]] = defaultdict(list)
    for path in sorted(path for folder in flags.folders for path in folder.rglob("summary.json")):
        summary, config = json.loads(path.read_text()), stored_config(path.parent)
        if summary.get("status") != "finished" or config is None:
            print(f"left out: {path.parent}: {summary.get('status')}", file=sys.stderr)
            continue
        value = config
        for key in flags.by.split("."):
            value = value[key]
        groups[str(value)].append(summary)
    print(f"| {flags.by} | runs | {flags.metric} | lowest, highest | samples/s, median | skipped steps |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, summaries in groups.items():
        values = [summary["eval"][flags.metric] for summary in summaries]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        speed = statistics.median(summary["samples_per_second"] for summary in summaries)
        skipped = sum(summary["skipped"] for summary in summaries)
        print(
            f"| `{name}` | {len(values)} | {statistics.mean(values):.4f} ± {deviation:.4f} "
            f"| {min(values):.4f}, {max(values):.4f} | {speed:,.0f} | {skipped} |"
        )


if __name__ == "__main__":
    main()
