"""Throughput and efficiency of 1, 2, 4, ... processes (DDP): accumulation 1 and 4, several batch sizes.

Every process trains on samples of its own (gloo on CPUs, NCCL on GPUs), with our loop. Efficiency is the throughput
to that of one process times the number of processes; on a CPU it cannot exceed cores by processes. `sent MB` is what a
rank sends in a step, by the formulas of layouts/memory_model.py that docs/SCALING.md compares with measurements.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.optim.lr_scheduler import LambdaLR

from amp_core import Amp, Clip, Schedule, sync_grads
from amp_core.config.rules import amp_config
from amp_core.layouts.ddp import wrap_ddp
from amp_core.layouts.memory_model import lay_out, traffic, weights_of
from amp_core.run.teardown import end_process_group
from benches.loops import MAX_NORM, adamw
from benches.result import Number, Picture, Result
from benches.values import count, numbers, some_of
from benches.work import MODES, WORKS, loss_of

SHORT = ["--processes", "1,2", "--rounds", "1", "--turns", "2", "--batch-sizes", "8"]
Case = tuple[str, int, int]
"""Mode, accumulation, samples of a micro-batch."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", default=None, help="default: 1,2,4; on GPUs up to their number")
    parser.add_argument("--work", default="resnet18", choices=WORKS)
    parser.add_argument("--modes", default="bf16", type=some_of(MODES))
    parser.add_argument("--accumulation", default="1,4", type=numbers)
    parser.add_argument("--batch-sizes", default="4,16", type=numbers, help="samples of a micro-batch and process")
    parser.add_argument("--rounds", type=count, default=2, help="times that each number of processes is started")
    parser.add_argument("--turns", type=count, default=5, help="of each case in a round")
    parser.add_argument("--slice", type=float, default=0.3, help="seconds of a turn")


def measure(flags: argparse.Namespace) -> Result:
    result = Result(
        "scale",
        flags.command,
        flags.device,
        Picture(
            {"samples/s": "samples per second, of all processes", "efficiency": "efficiency"},
            lines="processes",
            panels=("mode", "accumulation"),
            series="batch size",
        ),
    )
    most = torch.cuda.device_count() if flags.device == "cuda" else 4
    counts = numbers(flags.processes) if flags.processes else [n for n in (1, 2, 4, 8) if n <= most]
    if flags.device == "cuda" and max(counts) > most:
        raise SystemExit(f"error: --processes {max(counts)} needs {max(counts)} GPUs; this machine has {most}")
    cases = [(mode, a, size) for mode in flags.modes for a in flags.accumulation for size in flags.batch_sizes]
    times: dict[tuple[int, Case], list[float]] = {(n, case): [] for n in counts for case in cases}
    for turn in range(flags.rounds):
        for num_ranks in counts[:: -1 if turn % 2 else 1]:
            for case, seconds in zip(cases, on_ranks(num_ranks, cases, flags), strict=True):
                times[num_ranks, case] += seconds
    cores = os.cpu_count() or 1
    if flags.device == "cpu" and max(counts) > cores:
        result.notes.append(
            f"There are {cores} cores: with more processes than that the efficiency is at most cores by processes."
        )
    for case in cases:
        mode, accumulation, size = case
        alone = Number.of([accumulation * size / seconds for seconds in times[counts[0], case]]).median / counts[0]
        for num_ranks in counts:
            rates = [num_ranks * accumulation * size / seconds for seconds in times[num_ranks, case]]
            result.add(
                mode=mode,
                accumulation=accumulation,
                **{"batch size": size},
                processes=num_ranks,
                **{
                    "samples/s": Number.of(rates),
                    "efficiency": Number.of([rate / num_ranks / alone for rate in rates]),
                },
                **{"sent MB": sent(flags.work, mode, accumulation, num_ranks) / 1e6},
            )
    return result


def sent(work: str, mode: str, accumulation: int, num_ranks: int) -> float:
    """Bytes per rank and step, of gradients and weights."""
    with torch.device("meta"):
        net = WORKS[work].build()
    amp = amp_config(mode)
    weights = lay_out(weights_of(net, amp), "ddp" if num_ranks > 1 else "single", num_ranks)
    return sum(each.sent for each in traffic(weights, amp, num_ranks, accumulation=accumulation))


def on_ranks(num_ranks: int, cases: list[Case], flags: argparse.Namespace) -> list[list[float]]:
    """Seconds per step of each case, turn by turn, of the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (num_ranks, cases, flags, folder), num_ranks, start_method="spawn")  # type: ignore[arg-type]
        return torch.load(f"{folder}/times.pt", weights_only=True)


def rank_main(rank: int, num_ranks: int, cases: list[Case], flags: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(flags.device, rank) if flags.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(f"{folder}/store", num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(minutes=5),
    )
    try:
        steps = [step_of(flags.work, case, device, rank, num_ranks) for case in cases]
        repeats = []
        for step in steps:
            timed(step, 2, device)
            repeats.append(max(1, round(flags.slice / timed(step, 1, device))))
        found: list[list[float]] = [[] for _ in cases]
        for _ in range(flags.turns):
            for i, step in enumerate(steps):
                found[i].append(timed(step, repeats[i], device))
        if rank == 0:
            torch.save(found, f"{folder}/times.pt")
    finally:
        end_process_group()


def step_of(work: str, case: Case, device: torch.device, rank: int, num_ranks: int) -> Any:
    """A step of our loop on samples of this rank."""
    mode, accumulation, size = case
    net = WORKS[work].net(str(device))
    batches = WORKS[work].batches(accumulation * num_ranks, str(device), size)[rank::num_ranks]
    amp = Amp.named(mode, device=str(device))  # type: ignore[arg-type]
    model = wrap_ddp(net, device) if num_ranks > 1 else net
    amp.guard(model)
    optimizer, clip, share = adamw(net), Clip.norm(MAX_NORM), 1 / (len(batches) * num_ranks)
    schedule = Schedule(optimizer, lambda o, n: LambdaLR(o, lambda _: 1.0), 1000)

    def step() -> None:
        for i, (inputs, targets) in enumerate(batches, 1):
            with sync_grads(model, when=i == len(batches)):
                with amp.autocast():
                    loss = loss_of(model(inputs), targets)
                amp.backward(loss, share)
        report = amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)

    return step


def timed(step: Any, repeats: int, device: torch.device) -> float:
    """Seconds of one, the same number on all ranks: that of the slowest."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor([(time.perf_counter() - began) / repeats], device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()
