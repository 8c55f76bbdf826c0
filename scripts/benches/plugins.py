"""Time of a step with the scaler of `amp_plugins` and with its doctor, as ratios to the same loop with torch's scaler.

Forward and backward pass, `step` and `update` of a loop for torch's scaler; without a loss scale torch's does nothing
at all. Ratios and microseconds per window are of the CPU's time, which other programs disturb less than the clock.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import torch
from torch import Tensor, nn

from amp_plugins import GradScaler
from amp_plugins.doctor import LoopDoctor
from benches.loops import Step
from benches.result import Number, Result, ratios, take_turns
from benches.step import keep_freed_memory
from benches.values import count, some_of
from benches.work import MODES, WORKS, loss_of

FULL = ["--rounds", "40"]
SHORT = ["--work", "mlp", "--modes", "fp32", "--rounds", "2", "--slice", "0.01"]
CONTESTANTS = ("torch", "again", "plugin", "plugin, doctor")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", default="mlp,gpt", type=some_of(WORKS), help=f"of {', '.join(WORKS)}")
    parser.add_argument("--modes", default="bf16,fp16", type=some_of(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--rounds", type=count, default=20)
    parser.add_argument("--slice", type=float, default=0.05, help="seconds of a turn")


def measure(flags: argparse.Namespace) -> Result:
    result = Result("plugins", flags.command, flags.device)
    keep_freed_memory()
    for work in flags.work:
        for mode in flags.modes:
            for fused in (True, False):
                steps = {who: _step(who, work, mode, flags.device, fused=fused) for who in CONTESTANTS}
                runs = {who: functools.partial(_seconds, step, flags.device) for who, step in steps.items()}
                num_steps = max(1, round(flags.slice / runs["torch"](5)[0]))
                for run in runs.values():
                    run(3)
                turns = take_turns({who: functools.partial(run, num_steps) for who, run in runs.items()}, flags.rounds)
                cpu = {who: [turn[1] for turn in times] for who, times in turns.items()}
                found = ratios(cpu, "torch", "again")
                for who, times in turns.items():
                    more = [1e6 * (a - b) for a, b in zip(cpu[who], cpu["torch"], strict=True)]
                    result.add(
                        work=work,
                        mode=mode,
                        AdamW="fused" if fused else "not fused",
                        scaler=who,
                        ms=Number.of([1e3 * turn[0] for turn in times]),
                        **{"CPU ratio": found[who], "more CPU us": Number.of(more, aa=0.0)},
                    )
    return result


def _step(who: str, work: str, mode: str, device: str, *, fused: bool) -> Step:
    net, (batch,) = WORKS[work].net(device), WORKS[work].batches(1, device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    kind: Any = GradScaler if who.startswith("plugin") else torch.amp.GradScaler  # type: ignore[attr-defined]
    scaler = kind(device, 1024.0, enabled=mode == "fp16")
    dtype = MODES[mode]

    def compute(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            return loss_of(net(inputs), targets)

    if who.startswith("plugin"):
        scaler.guard(net)
    if who.endswith("doctor"):
        compute = LoopDoctor(scaler, net).watch(compute)

    def step() -> None:
        scaler.scale(compute(net, *batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _seconds(step: Step, device: str, num_steps: int) -> tuple[float, float]:
    """Of one step, by the clock and of the CPU."""
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / num_steps, (time.process_time() - cpu) / num_steps
