"""What a checkpoint costs training: the stall in `save`, to one copy of the state; slower steps while it is written.

The state is that of AdamW: weights and two moments of a GPT. `one copy` is the time of copying all of it into tensors
that are there and were written before: no way to go on training at once can take less on a CPU. In the background
`save` returns when the state was copied, and a thread writes; the first save makes the copies' memory. All take turns,
in another order each round. `its CPU` is the CPU time of the stall alone, to that of the copy, which depends less on
what else the machine does; `durable` is from the call until the checkpoint is safe on disk; `steps` the time of small
training steps while the thread writes, to their time before and after. Times to disk depend on the disk (--folder).
With --ranks the network is sharded over processes, also in a folder of shards.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from amp_core import Checkpoint
from amp_core.layouts.fsdp import build_mesh, wrap_fsdp
from amp_core.models.gpt import GPT
from amp_core.run.teardown import end_process_group
from benches.result import Number, Picture, Result, take_turns
from benches.values import count, some_of
from benches.work import WORKS, loss_of

FULL = ["--sizes", "25,100", "--rounds", "7"]
SHORT = ["--sizes", "1", "--rounds", "2"]
SHAPES = {1: (256, 1), 25: (512, 8), 100: (1024, 8)}
"""Millions of parameters -> width and depth."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes",
        default="25,100",
        type=some_of([*map(str, SHAPES)]),
        help=f"millions of parameters, of {', '.join(map(str, SHAPES))}",
    )
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--ranks", type=count, default=1, help="processes that hold the network in parts (fsdp, gloo)")
    parser.add_argument("--folder", type=Path, help="where to save; default: the folder for temporary files")


def measure(flags: argparse.Namespace) -> Result:
    result = Result(
        "checkpoint",
        flags.command,
        flags.device,
        Picture(
            {"to one copy": "stall of training, to one copy of the state"}, lines="save", panels=("parameters",), at=1.0
        ),
    )
    for size in map(int, flags.sizes):
        folder = tempfile.mkdtemp(prefix="bench-checkpoint-", dir=flags.folder)
        try:
            arguments = (flags.ranks, size, flags.rounds, flags.device, folder)
            mp.start_processes(measure_rank, arguments, flags.ranks, start_method="spawn")
            found = json.loads(Path(folder, "found.json").read_text())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        add_rows(result, size, found)
    return result


def add_rows(result: Result, size: int, found: dict[str, dict[str, list[float]]]) -> None:
    copies = found["stall"]["one copy"]
    for way, stalls in found["stall"].items():
        row: dict[str, Any] = {"parameters": f"{size} million", "save": way, "stall, s": Number.of(stalls)}
        row["to one copy"] = Number.of([a / b for a, b in zip(stalls, copies, strict=True)])
        cpu = zip(found["cpu"][way], found["cpu"]["one copy"], strict=True)
        row["its CPU"] = Number.of([a / b for a, b in cpu])
        for key in ("durable", "load", "steps"):
            row[key] = Number.of(found[key][way]) if way in found[key] else None
        result.add(**row)


class Rank:
    """One process, and what it measures. Durations are those of the slowest rank."""

    def __init__(self, rank: int, num_ranks: int, size: int, device: str, folder: Path) -> None:
        self.rank, self.num_ranks, self.folder = rank, num_ranks, folder
        width, depth = SHAPES[size]
        net: nn.Module = GPT(vocab_size=256, length=64, width=width, depth=depth, heads=4).to(device)
        if num_ranks > 1:
            net = wrap_fsdp(net, build_mesh(torch.device(device), num_ranks))
        optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self.parts = {"model": net, "optimizer": optimizer}
        own = [*net.parameters(), *(m for state in optimizer.state.values() for m in state.values())]
        self.state = [getattr(t, "to_local", lambda t=t: t)().detach() for t in own]
        self.copies = [torch.zeros_like(tensor, device="cpu") for tensor in self.state]
        self.step, self.found = 0, {key: {} for key in ("stall", "cpu", "durable", "load", "steps")}

    def note(self, key: str, name: str, value: float) -> None:
        self.found[key].setdefault(name, []).append(value)

    def slowest(self, seconds: float) -> float:
        if self.num_ranks == 1:
            return seconds
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def copy(self) -> float:
        began, cpu = time.monotonic(), time.thread_time()
        for mine, there in zip(self.copies, self.state, strict=True):
            mine.copy_(there)
        self.note("cpu", "one copy", time.thread_time() - cpu)
        return self.slowest(time.monotonic() - began)

    def checkpoint(self, name: str, way: dict[str, Any]) -> Checkpoint:
        return Checkpoint(self.folder / name, keep=1, writer=self.rank == 0, **way, **self.parts)

    def save(self, name: str, checkpoint: Checkpoint) -> float:
        self.step += 1
        if self.num_ranks > 1:
            dist.barrier()
        began, cpu = time.monotonic(), time.thread_time()
        checkpoint.save(self.step)
        self.note("cpu", name, time.thread_time() - cpu)
        stall = self.slowest(time.monotonic() - began)
        checkpoint.wait()
        self.note("durable", name, self.slowest(time.monotonic() - began))
        return stall

    def load(self, name: str, checkpoint: Checkpoint) -> None:
        began = time.monotonic()
        checkpoint.load()
        self.note("load", name, self.slowest(time.monotonic() - began))

    def steps(self, name: str, checkpoint: Checkpoint) -> None:
        """Small steps, with much Python in them, while a thread writes, to those before."""
        net, (batch,) = WORKS["mlp"].net("cpu"), WORKS["mlp"].batches(1, "cpu")
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

        def step() -> float:
            began = time.monotonic()
            loss_of(net(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            return time.monotonic() - began

        before = statistics.fmean(step() for _ in range(500))
        self.step += 1
        checkpoint.save(self.step)
        during = []
        while checkpoint._task is not None and not checkpoint._task.done():
            during.append(step())
        checkpoint.wait()
        after = statistics.fmean(step() for _ in range(500))
        if during:
            self.note("steps", name, statistics.fmean(during) / (0.5 * (before + after)))


def measure_rank(rank: int, num_ranks: int, size: int, rounds: int, device: str, folder: str) -> None:
    torch.set_num_threads(1)
    if num_ranks > 1:
        store = dist.FileStore(f"{folder}/store", num_ranks)
        timeout = datetime.timedelta(minutes=10)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    one = Rank(rank, num_ranks, size, device, Path(folder))
    runners: dict[str, Callable[[], float]] = {"one copy": one.copy}
    kept: dict[str, Checkpoint] = {}
    for form in ("single", "sharded") if num_ranks > 1 else ("single",):
        for background in (False, True):
            name = f"{form}, background" if background else form
            way = {"format": form, "background": background}
            kept[name] = one.checkpoint(name, way)
            one.save(name, kept[name])
            runners[name] = functools.partial(one.save, name, kept[name])
        name = f"{form}, background, first"
        runners[name] = lambda name=name, way=way: one.save(name, one.checkpoint(name, way))
    one.copy()
    for key in ("cpu", "durable"):
        one.found[key].clear()
    one.found["stall"] = take_turns(runners, rounds)
    for _ in range(rounds):
        for name, checkpoint in kept.items():
            one.load(name, checkpoint)
            if checkpoint.background and num_ranks == 1:
                one.steps(name, checkpoint)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(one.found))
    end_process_group()
