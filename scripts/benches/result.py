"""What a benchmark found: numbers, their intervals, where they were taken; as a table, a file, a picture, a page."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from benches import ROOT

T = TypeVar("T")

PEERS = ("accelerate", "lightning", "timm")
INTERVAL = "a bootstrapped 95 % interval of the median; with fewer than 5 turns the smallest and the largest"
SPREAD = (
    "aa is the relative noise: of a ratio, the far end of the interval of a second loop like the reference; of other "
    "numbers, the difference between the medians of odd and even turns"
)
"""What `low`, `high` and `aa` of a number mean; both are in every file."""


@dataclass(frozen=True)
class Number:
    """A median, its interval, and how far the same measurement lies from itself."""

    median: float
    low: float
    high: float
    aa: float
    """Relative."""

    @classmethod
    def of(cls, samples: Sequence[float], aa: float | None = None) -> Number:
        """Median and interval of the turns, in the order in which they were taken.

        Args:
            samples: at least one.
            aa: None: from odd and even turns.
        """
        median = statistics.median(samples)
        if aa is None:
            halves = [statistics.median(half) for half in (samples[::2], samples[1::2] or samples)]
            aa = abs(halves[0] / halves[1] - 1) if halves[1] else 0.0
        return cls(median, *interval(samples), aa)


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """As `INTERVAL` says."""
    if len(samples) < 5:
        return min(samples), max(samples)
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(samples, k=len(samples))) for _ in range(1000))
    return medians[24], medians[975]


@dataclass(frozen=True)
class Picture:
    """How rows become a picture: a dot and its interval for each, in panels."""

    values: dict[str, str]
    """Columns to draw, side by side, and what their axes say."""
    lines: str
    """The leftmost column."""
    panels: tuple[str, ...] = ()
    """Columns that divide the rows into panels, one below the other."""
    series: str | None = None
    """The column that is shown by colour."""
    at: float | None = None
    """Where a line is drawn: what the ratios are to."""
    left_out: str | None = None
    """A line that is 1 by definition."""
    shared: bool = True
    """Whether panels have one axis."""


@dataclass
class Result:
    """Rows of a table. Keys are the titles of columns; values are words, counts, or `Number`s."""

    what: str
    command: list[str]
    device: str
    picture: Picture | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What makes the command fail, after everything is written."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    began: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = about(self.device) | {
            "command": shlex.join(["python", "scripts/bench.py", self.what, *self.command])
        }
        print(f"{self.began['cpu']}, {self.began['gpu'] or 'no GPU'}, torch {self.began['torch']}", flush=True)

    def add(self, **row: Any) -> None:
        """A row, shown immediately."""
        if not self.rows or self.rows[-1].keys() != row.keys():
            print("  ".join(f"{key:>{_width(value, key)}}" for key, value in row.items()))
        self.rows.append(row)
        print("  ".join(f"{shown(value):>{_width(value, key)}}" for key, value in row.items()), flush=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain, for a file."""
        facts = {"what": self.what, "machine": self.began, "interval": INTERVAL, "spread": SPREAD}
        facts["notes"] = self.notes + self.problems
        rows = [{k: asdict(v) if isinstance(v, Number) else v for k, v in row.items()} for row in self.rows]
        return facts | {"picture": asdict(self.picture) if self.picture else None, "rows": rows}

    def write(self, file: Path | None, picture: Path | None) -> None:
        """What the command line asks for."""
        found = json.loads(json.dumps(self.to_dict()))
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found, indent=1) + "\n")
        if picture and found["picture"] and self.rows:
            picture.parent.mkdir(parents=True, exist_ok=True)
            draw(found, picture)
            print(f"picture: {picture}")
        elif picture:
            print(f"no picture of {self.what}")


def _width(value: Any, title: str) -> int:
    least = {Number: 24, float: 9, int: 7, bool: 5}.get(type(value), 11)
    return max(least, len(title))


def shown(value: Any) -> str:
    """A cell: words as they are, counts whole, measured numbers with three digits and their interval."""
    if isinstance(value, Number):
        value = asdict(value)
    if isinstance(value, dict):
        return f"{_digits(value['median'])} [{_digits(value['low'])}, {_digits(value['high'])}]"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return _digits(value) if isinstance(value, float) else str(value)


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


# --- where ------------------------------------------------------------------------------------------------------------


def about(device: str) -> dict[str, Any]:
    """What the numbers belong to: machine, versions, time, commit."""
    versions: dict[str, str] = {}
    for name in PEERS:
        with contextlib.suppress(PackageNotFoundError):
            if importlib.util.find_spec(name):
                versions[name] = version(name)
    cuda = device == "cuda"
    flags = _cpuinfo("flags").split()
    return {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "bf16 units of the cpu": "amx_bf16" in flags or "avx512_bf16" in flags,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpus": torch.cuda.device_count() if cuda else 0,
        "device": device,
        "threads": torch.get_num_threads(),
        "load before": round(os.getloadavg()[0], 2),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"cuda": torch.version.cuda} if cuda else {}),
        **versions,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpuinfo(key: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    return ""


def _commit() -> str | None:
    """With a + where files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    return None


# --- turns ------------------------------------------------------------------------------------------------------------


def take_turns(runners: dict[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each runner returns, `rounds` times, in another order each round: what drifts hits all alike."""
    found: dict[str, list[T]] = {name: [] for name in runners}
    order, shuffle = list(runners), random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            found[name].append(runners[name]())
    return found


def ratios(times: dict[str, list[float]], to: str, again: str) -> dict[str, Number]:
    """Ratios within the same round, with the spread of the reference against its twin."""
    found = {who: [a / b for a, b in zip(times[who], times[to], strict=True)] for who in times}
    spread = max(abs(bound - 1) for bound in interval(found[again]))
    return {who: Number.of(values, aa=spread) for who, values in found.items()}


# --- picture ----------------------------------------------------------------------------------------------------------

COLOURS = ("#3b4a5a", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a5195", "#8a8a8a")
"""Distinguishable with red-green colour blindness."""


def draw(found: dict[str, Any], path: Path) -> None:
    """The rows of a file as a picture, on white also in dark mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    picture = Picture(**found["picture"])
    rows = [row for row in found["rows"] if row[picture.lines] != picture.left_out]
    keys = [tuple(row[key] for key in picture.panels) for row in rows]
    panels = list(dict.fromkeys(keys))
    series = list(dict.fromkeys(row[picture.series] for row in rows)) if picture.series else [None]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(series)}
    members = [[row for row, key in zip(rows, keys, strict=True) if key == panel] for panel in panels]
    lines = [list(dict.fromkeys(row[picture.lines] for row in inside)) for inside in members]
    present = [{row[picture.series] for row in inside} if picture.series else {None} for inside in members]
    heights = [0.5 + len(names) * max(0.2, 0.11 * len(of)) for names, of in zip(lines, present, strict=True)]
    figure, axes = plt.subplots(
        *(len(panels), len(picture.values)),
        figsize=(2.6 + 4.4 * len(picture.values), 1.2 + sum(heights)),
        gridspec_kw={"height_ratios": heights},
        sharex="col" if picture.shared else False,
        squeeze=False,
        facecolor="white",
        layout="constrained",
    )
    shown_series: dict[str, Any] = {}
    for i, panel in enumerate(panels):
        local = [name for name in series if name in present[i]]
        for j, (column, label) in enumerate(picture.values.items()):
            axis = axes[i, j]
            if picture.at is not None:
                axis.axvline(picture.at, color="0.6", lw=1, zorder=0)
            for row in members[i]:
                value = row.get(column)
                if value is None:
                    continue
                middle, low, high = (
                    (value["median"], value["low"], value["high"]) if isinstance(value, dict) else (value,) * 3
                )
                name = row[picture.series] if picture.series else None
                y = lines[i].index(row[picture.lines]) + 0.8 / len(local) * (local.index(name) - (len(local) - 1) / 2)
                axis.plot([low, high], [y, y], color=colours[name], lw=2, alpha=0.45, solid_capstyle="butt")
                (dot,) = axis.plot([middle], [y], "o", ms=4, color=colours[name])
                shown_series.setdefault(name if isinstance(name, str) else f"{picture.series} {name}", dot)
            axis.set_yticks(range(len(lines[i])), [str(name) for name in lines[i]] if j == 0 else [], fontsize=8)
            if j == 0 and not isinstance(lines[i][0], str):
                axis.set_ylabel(picture.lines, fontsize=8)
            axis.set_ylim(len(lines[i]) - 0.45, -0.55)
            axis.tick_params(axis="x", labelsize=8)
            axis.grid(axis="x", color="0.92", lw=0.8)
            axis.set_axisbelow(True)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
            if j == 0 and picture.panels:
                title = ", ".join(
                    v if isinstance(v, str) else f"{k} {v}" for k, v in zip(picture.panels, panel, strict=True)
                )
                axis.set_title(title, fontsize=9, loc="left")
            if i == len(panels) - 1:
                axis.set_xlabel(label, fontsize=9)
    for axis in axes.flat if picture.at is None else ():
        axis.set_xlim(left=0)
    if picture.series:
        figure.legend(
            shown_series.values(), shown_series.keys(), ncols=6, loc="outside lower center", fontsize=8, frameon=False
        )
    machine = found["machine"]
    where = f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {machine['date'][:10]}"
    figure.suptitle(where, fontsize=8, color="0.35", x=0.01, ha="left")
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


# --- page -------------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
# Benchmarks

What is measured, and how: [docs/SPEED.md](../docs/SPEED.md#benchmarks). `python scripts/bench.py table` makes this page
from the files beside it, and `tests/runs/test_bench.py` compares them.

    python scripts/bench.py all --out benchmarks/NAME    # all files of a machine, about ten minutes on two quiet cores
    python scripts/bench.py table                        # this page

A number is a median with its interval: {interval}. Each result names
its date and commit; `inference`, `scale`, `start` and `tail` can be measured again at theirs.

In the files, {spread}.
"""


def page(folder: Path) -> str:
    """The page of all `NAME/*.json` in a folder."""
    text = INTRODUCTION.format(interval=INTERVAL, spread=SPREAD)
    machines = sorted({file.parent for file in folder.glob("*/*.json")})
    if not machines:
        text += "\nThere are no results yet.\n"
    for machine in machines:
        text += f"\n## {machine.name}\n"
        for file in sorted(machine.glob("*.json")):
            text += "\n" + section(json.loads(file.read_text()), file.relative_to(folder))
    return text


def section(found: dict[str, Any], file: Path) -> str:
    """How a file was made, its picture, its table."""
    machine = found["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "cuda", *PEERS) if machine.get(name))
    cores = f"{machine['gpus']} x {machine['gpu']}" if machine["gpu"] else f"{machine['cpu']}, {machine['cores']} cores"
    text = f"### {found['what']}\n\n    {machine['command']}\n\n"
    text += f"{machine['date'][:10]}, commit {machine['commit']}. {cores}, {machine['threads']} thread(s) a process, "
    busy = " (loaded: read CPU times)" if machine["load before"] >= machine["cores"] else ""
    text += f"load {machine['load before']} before{busy}. {versions}. [{file.name}]({file.as_posix()})\n"
    text += "".join(f"\n{note}\n" for note in found["notes"])
    if found["picture"] and found["rows"]:
        text += f"\n![{found['what']}]({file.with_suffix('.png').as_posix()})\n"
    table = "\n".join(markdown(found["rows"]))
    if len(found["rows"]) > 30:
        return text + f"\n<details><summary>{len(found['rows'])} rows</summary>\n\n{table}\n\n</details>\n"
    return text + f"\n{table}\n"


def markdown(rows: Sequence[dict[str, Any]]) -> Iterable[str]:
    """A table whose columns are all keys of the rows, in order of appearance."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    right = {key for row in rows for key, value in row.items() if not isinstance(value, str) and value is not None}
    yield f"| {' | '.join(keys)} |"
    yield f"| {' | '.join('---:' if key in right else '---' for key in keys)} |"
    for row in rows:
        yield f"| {' | '.join(shown(row.get(key)) for key in keys)} |"
