"""A table of run folders: mean and deviation of the results over seeds, one row per group of equal settings.

    python scripts/report.py multirun/classification/2026-11-21_10-00-00
    python scripts/report.py multirun/parity --by recipe.name --columns amp.name

Prints Markdown. Without --metric each run counts with the metric that its recipe calls best. Folders without a finished
run are named on stderr and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amp_core.compose import status_of, stored_config

Run = dict[str, Any]
"""A summary.json; `value` is the metric, `metric` its name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or folders that hold them")
    parser.add_argument("--by", default="amp.name", help="the setting that makes a row")
    parser.add_argument("--columns", help="a second setting, which makes a column")
    parser.add_argument("--metric", help="default: what the recipe calls best")
    flags = parser.parse_args()
    groups: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(path for folder in flags.folders for path in folder.rglob("summary.json")):
        config, status = stored_config(path.parent), status_of(path.parent)
        if status != "finished" or config is None:
            print(f"left out: {path.parent}: {status}", file=sys.stderr)
            continue
        try:
            run = json.loads(path.read_text())
            metric = flags.metric or config["recipe"]["best"]
            run |= {"metric": metric, "value": float(run["eval"][metric])}
            row, column = setting(config, flags.by), setting(config, flags.columns) if flags.columns else ""
        except (KeyError, TypeError, ValueError) as problem:
            print(f"left out: {path.parent}: cannot be read: {problem!r}", file=sys.stderr)
            continue
        groups[row][column].append(run)
    lines = pivot(groups, flags.by) if flags.columns else listing(groups, flags.by)
    print("\n".join("| " + " | ".join(cells) + " |" for cells in lines))


def setting(config: Any, key: str) -> str:
    for part in key.split("."):
        config = config[part]
    return str(config)


def spread(runs: list[Run]) -> str:
    values = [run["value"] for run in runs]
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.4f}"


def listing(groups: dict[str, dict[str, list[Run]]], by: str) -> list[Sequence[str]]:
    metrics = {run["metric"] for columns in groups.values() for run in columns[""]}
    rows: list[Sequence[str]] = [
        [by, "runs", " or ".join(sorted(metrics)), "lowest, highest", "samples/s, median", "peak MiB", "skipped steps"],
        ["---"] * 7,
    ]
    for name, columns in groups.items():
        runs = columns[""]
        values = [run["value"] for run in runs]
        speed = statistics.median(run["samples_per_second"] for run in runs)
        memory = max(run["peak_memory_bytes"] for run in runs) / 2**20
        skipped = sum(run["skipped"] for run in runs)
        bounds = f"{min(values):.4f}, {max(values):.4f}"
        row = [f"`{name}`", str(len(runs)), spread(runs), bounds, f"{speed:,.0f}", f"{memory:,.0f}", str(skipped)]
        rows.append(row)
    return rows


def pivot(groups: dict[str, dict[str, list[Run]]], by: str) -> list[Sequence[str]]:
    order = ["fp32", "bf16", "fp16"]
    names = sorted(
        {name for columns in groups.values() for name in columns},
        key=lambda n: (order.index(n), n) if n in order else (9, n),
    )
    rows: list[Sequence[str]] = [[by, "metric", *(f"`{name}`" for name in names), "runs"], ["---"] * (len(names) + 3)]
    for row, columns in groups.items():
        runs = [run for found in columns.values() for run in found]
        cells = [spread(columns[name]) if columns[name] else "" for name in names]
        rows.append([f"`{row}`", " or ".join(sorted({run["metric"] for run in runs})), *cells, str(len(runs))])
    return rows


if __name__ == "__main__":
    main()
