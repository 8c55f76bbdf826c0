"""How long a checkpoint holds up training, in each format and with or without a thread, side by side in one run.

    python scripts/save_pause.py                       # 2 ranks, 300 MB of weights and moments between them
    python scripts/save_pause.py --ranks 4 --megabytes 2000 --folder /data --json result.json

A network of linear layers is sharded over the ranks (fsdp), on the CPU. The pause is the time in `save`, on the slowest
rank; what is durable when it returns, and what only after `wait`, differs. The four ways take turns; medians, and their
ratios to one file without a thread. Times depend on the disk and on what else the machine does: compare within a run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amp_core import Checkpoint
from amp_core.shards import build_mesh, wrap_fsdp

WAYS = {
    "single": {"format": "single", "background": False},
    "single, background": {"format": "single", "background": True},
    "sharded": {"format": "sharded", "background": False},
    "sharded, background": {"format": "sharded", "background": True},
}
WIDTH = 1024


def measure(rank: int, flags: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", flags.ranks)
    timeout = datetime.timedelta(minutes=10)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=flags.ranks, timeout=timeout)
    depth = max(1, round(flags.megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    net: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
    if flags.ranks > 1:
        net = wrap_fsdp(net, build_mesh(torch.device("cpu"), flags.ranks))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    ways = {}
    for name, way in WAYS.items():
        parts = {"model": net, "optimizer": optimizer}
        ways[name] = Checkpoint(Path(folder, name), keep=1, writer=rank == 0, **way, **parts)  # type: ignore[arg-type]
    pauses: dict[str, list[float]] = {name: [] for name in WAYS}
    totals: dict[str, list[float]] = {name: [] for name in WAYS}
    for step in range(flags.rounds + 1):
        for name, checkpoint in ways.items():
            dist.barrier()
            began = time.monotonic()
            checkpoint.save(step)
            pause = time.monotonic() - began
            checkpoint.wait()
            times = torch.tensor([pause, time.monotonic() - began])
            dist.all_reduce(times, op=dist.ReduceOp.MAX)
            if step:  # the first one makes the buffers of the copies
                pauses[name].append(float(times[0]))
                totals[name].append(float(times[1]))
    if rank == 0:
        num_bytes = sum(path.stat().st_size for path in Path(folder, "single").rglob("state.pt"))
        report(flags, num_bytes, pauses, totals)
    dist.destroy_process_group()


def report(
    flags: argparse.Namespace, num_bytes: int, pauses: dict[str, list[float]], totals: dict[str, list[float]]
) -> None:
    rows = {
        name: {"pause": statistics.median(pauses[name]), "until durable": statistics.median(totals[name])}
        for name in WAYS
    }
    base = rows["single"]["pause"]
    print(f"{num_bytes / 1e6:.0f} MB over {flags.ranks} rank(s), medians of {flags.rounds}")
    print("| way | pause, s | to `single` | until durable, s |\n| --- | --- | --- | --- |")
    for name, row in rows.items():
        print(f"| {name} | {row['pause']:.3f} | {row['pause'] / base:.2f} | {row['until durable']:.3f} |")
    if flags.json:
        facts = {"bytes": num_bytes, "ranks": flags.ranks, "rounds": flags.rounds, "torch": torch.__version__}
        flags.json.write_text(json.dumps(facts | {"ways": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=300, help="weights and two moments, over all ranks")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each way, after a first one")
    parser.add_argument("--folder", type=Path, help="where to save; default: the folder for temporary files")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    flags = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="save-pause-", dir=flags.folder)
    try:
        mp.start_processes(measure, (flags, folder), flags.ranks, start_method="spawn")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
