"""How much a step costs: this project's against others', side by side in one run.

    python scripts/bench.py step                                   seconds, as ratios to the loop written by hand
    python scripts/bench.py step --work mlp,gpt --modes bf16 --rounds 40 --json step.json --picture step.png
    python scripts/bench.py cost                                   Python calls, operators, casts, waits: exact counts

By hand is autocast, GradScaler, clip_grad_norm_ and a fused AdamW as in torch's tutorials. Accelerate, Lightning Fabric
and Lightning's Trainer take part where they are installed: pip install -e '.[bench]'. In `step` all take turns in one
process, in slices of a twentieth of a second and in another order each round; a second loop written by hand shows which
differences mean nothing. Printed are medians over rounds of the ratio to the loop by hand in the same round, and their
95 % intervals.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benches.counts import count
from benches.loops import STEPS, Make, Timed, TimedTrainer, by_hand
from benches.work import MODES, WORKS

NEEDS = {"accelerate": "accelerate", "fabric": "lightning", "trainer": "lightning"}
ONLY_ON_GPUS = {("accelerate", "fp16"), ("fabric", "fp16"), ("trainer", "fp16")}
"""These refuse fp16 on a CPU."""


def is_there(name: str) -> bool:
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


def machine(device: str) -> dict[str, Any]:
    """What the numbers belong to."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bf16 units": torch.cuda.is_available() or "amx_bf16" in _flags() or "avx512_bf16" in _flags(),
    } | {name: version(name) for name in ("accelerate", "lightning") if importlib.util.find_spec(name)}


def _cpuinfo(key: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    return ""


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _flags() -> list[str]:
    return _cpuinfo("flags").split()


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % interval of the median, by resampling rounds."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[24], medians[975]


def step_rows(flags: argparse.Namespace) -> Iterable[dict[str, Any]]:
    for work in flags.work.split(","):
        for mode in flags.modes.split(","):
            for accumulation in map(int, flags.accumulation.split(",")):
                yield from compare(work, mode, accumulation, flags)


def compare(name: str, mode: str, accumulation: int, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each contestant."""
    work, device = WORKS[name], flags.device
    batches = work.batches(accumulation, device, flags.batch_size)
    runners: dict[str, Callable[[int], float]] = {}
    for who in ["by hand", "again", *flags.against.split(",")]:
        if not is_there(who) or (device == "cpu" and (who, mode) in ONLY_ON_GPUS):
            continue
        net = work.net(device)
        if who == "trainer":
            runners[who] = TimedTrainer(net, batches, mode, device)
        else:
            make: Make = by_hand if who == "again" else STEPS[who]
            runners[who] = Timed(make(net, batches, mode, device), device)
    for run in runners.values():
        run(3)
    num_steps = max(2, round(flags.slice / runners["by hand"](3)))
    times: dict[str, list[float]] = {who: [] for who in runners}
    order = list(runners)
    shuffle = random.Random(0)
    for _ in range(flags.rounds):
        shuffle.shuffle(order)
        for who in order:
            times[who].append(runners[who](num_steps))
    rows = []
    for who in runners:
        ratios = [a / b for a, b in zip(times[who], times["by hand"], strict=True)]
        low, high = interval(ratios)
        row = {"work": name, "mode": mode, "accumulation": accumulation, "loop": who}
        row |= {"ms": 1e3 * statistics.median(times[who]), "ratio": statistics.median(ratios), "low": low, "high": high}
        rows.append(row)
        print(
            f"{name:9} {mode:5} {accumulation:3}  {who:11} {row['ms']:9.2f} ms   {row['ratio']:6.3f}"
            f"   [{low:.3f}, {high:.3f}]",
            flush=True,
        )
    return rows


def cost_rows(flags: argparse.Namespace) -> Iterable[dict[str, Any]]:
    print(f"{'work':9} {'mode':5} acc  {'loop':11} {'calls':>6} {'operators':>10} {'casts':>6} {'waits':>6}")
    for name in flags.work.split(","):
        for mode in flags.modes.split(","):
            for accumulation in map(int, flags.accumulation.split(",")):
                for who, make in STEPS.items():
                    if not is_there(who) or (flags.device == "cpu" and (who, mode) in ONLY_ON_GPUS):
                        continue
                    batches = WORKS[name].batches(accumulation, flags.device, flags.batch_size)
                    found = count(make(WORKS[name].net(flags.device), batches, mode, flags.device))
                    row = {"work": name, "mode": mode, "accumulation": accumulation, "loop": who, **vars(found)}
                    print(
                        f"{name:9} {mode:5} {accumulation:3}  {who:11} {found.calls:6} {found.operations:10} "
                        f"{found.casts:6} {found.waits:6}",
                        flush=True,
                    )
                    yield row


def draw(rows: list[dict[str, Any]], about: dict[str, Any], path: Path) -> None:
    """Ratios with their intervals, a panel for each network and accumulation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = list(dict.fromkeys((row["work"], row["accumulation"]) for row in rows))
    loops = [who for who in dict.fromkeys(row["loop"] for row in rows) if who != "by hand"]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    colours = dict(zip(modes, ("#4c566a", "#2a7f9e", "#c8553d"), strict=False))
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(7, 0.9 + len(panels) * (0.5 + 0.22 * len(loops))), sharex=True, squeeze=False
    )
    for axis, (work, accumulation) in zip(axes[:, 0], panels, strict=True):
        axis.axvline(1, color="0.6", lw=1, zorder=0)
        for m, mode in enumerate(modes):
            for row in rows:
                if (row["work"], row["accumulation"], row["mode"]) == (work, accumulation, mode) and row[
                    "loop"
                ] in loops:
                    y = loops.index(row["loop"]) + 0.22 * (m - (len(modes) - 1) / 2)
                    axis.plot([row["low"], row["high"]], [y, y], color=colours[mode], lw=2, alpha=0.5)
                    axis.plot([row["ratio"]], [y], "o", ms=4, color=colours[mode], label=mode)
        axis.set_yticks(range(len(loops)), loops, fontsize=8)
        axis.set_ylim(len(loops) - 0.4, -0.6)
        axis.set_title(f"{WORKS[work].title}, accumulation {accumulation}", fontsize=9, loc="left")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), ncols=3, loc="lower right", fontsize=8, frameon=False)
    axes[-1, 0].set_xlabel("time of a step, to that of the loop written by hand", fontsize=9)
    figure.suptitle(f"{about['device']}, torch {about['torch']}", fontsize=8, color="0.4", x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="step", choices=["step", "cost"])
    parser.add_argument("--work", default="mlp,cnn,resnet18,gpt", help=f"of {', '.join(WORKS)}")
    parser.add_argument("--modes", default="fp32,bf16,fp16", help=f"of {', '.join(MODES)}")
    parser.add_argument("--accumulation", default="1,4")
    parser.add_argument("--against", default="ours,accelerate,fabric,trainer", help="contestants")
    parser.add_argument("--batch-size", type=int, help="samples of a micro-batch; default: the network's own")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--slice", type=float, default=0.05, help="seconds of a turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    flags = parser.parse_args()
    for key, known in (("work", WORKS), ("modes", MODES), ("against", [*STEPS, "trainer"])):
        unknown = [name for name in getattr(flags, key).split(",") if name not in known]
        if unknown:
            parser.error(f"--{key}: no {', '.join(unknown)}; expected some of {', '.join(known)}")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    about = machine(flags.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    rows = list((step_rows if flags.what == "step" else cost_rows)(flags))
    if flags.json:
        flags.json.write_text(json.dumps({"what": flags.what, "machine": about, "rows": rows}, indent=1) + "\n")
    if flags.picture and flags.what == "step":
        draw(rows, about, flags.picture)


if __name__ == "__main__":
    main()
