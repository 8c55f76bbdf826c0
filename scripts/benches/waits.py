"""How often the host waits for the device in a whole run of each recipe, per step and per log line: exact counts.

Runs of train.py with clipping, accumulation, averaged weights, a schedule, the doctor watching, and log lines. A longer
run is compared with a shorter one, one that logs with one that does not: what is read at the start and the end drops
out. On a CPU reads are counted that would wait on a GPU (`aten::_local_scalar_dense` and its kin, lists of
floating-point numbers); on a GPU those that did, by amp_core.memory.sync_debug, and waits for events. There a step
of our loop also runs 200 times in the mode that makes a wait an error.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core.config.rules import amp_config
from amp_core.memory.sync_debug import noted_waits, sync_debug
from benches.loops import adamw, ours
from benches.modes import QUIET, SMALL, RunFailed, go, runs
from benches.result import Result
from benches.work import MODES, WORKS
from recipes import RECIPES

SHORT = ["--recipes", "classification", "--modes", "bf16"]

aten = torch.ops.aten
HAND_OVER = {aten._local_scalar_dense, aten.equal, aten.nonzero}
"""Whatever hands the host a number, or a size that depends on one."""
EVERYTHING = [
    "accumulation=2",
    "clip=norm",
    "clip.max_norm=1",
    "ema.decay=0.9",
    "schedule=warmup_cosine",
    "doctor=watch",
]
SHORTER, LONGER, EVERY = 4, 8, 2
"""Steps of the two runs; steps between log lines."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipes", default=",".join(sorted(RECIPES)), help="with commas")
    parser.add_argument("--modes", default="bf16,fp16", help="with commas")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every run; may be repeated")


def measure(flags: argparse.Namespace) -> Result:
    result = Result("waits", flags.command, flags.device)
    result.notes.append(f"Runs with {' '.join(EVERYTHING)}. Counts, not times.")
    with runs(300.0) as start:
        for recipe in flags.recipes.split(","):
            for mode in flags.modes.split(","):
                base = [f"recipe={recipe}", f"amp={mode}", f"device={flags.device}", *QUIET, *SMALL[recipe]]
                # From 2^16 a run of one step may skip it, and ends as diverged.
                base += ["amp.init_scale=1024"] if amp_config(mode).scaling else []
                base += [*EVERYTHING, "batch_size=4", *flags.set]
                found = start(of_a_run, base, flags.device)
                if isinstance(found, dict):
                    result.add(recipe=recipe, mode=mode, **found)
        if flags.device == "cuda":
            for mode in MODES:
                result.notes.append(start(strict, mode))
                print(result.notes[-1], flush=True)
    return result


def of_a_run(overrides: list[str], device: str) -> dict[str, float]:
    """Waits per step that does not log, and per log line."""

    def count(steps: int, every: int) -> int:
        with tempfile.TemporaryDirectory() as folder, counted(device) as found:
            if why := go([*overrides, f"steps={steps}", f"log_every={every}", "schedule.horizon=100"], folder):
                raise RunFailed(why)
        return found[0]

    count(1, 1000)  # what happens once in a process
    # The end of a run is a line in all of them, at its cadence: sums of an unfinished line are read when it is saved.
    shorter, longer, logging = count(SHORTER, SHORTER), count(LONGER, LONGER), count(LONGER, EVERY)
    lines = LONGER // EVERY - 1
    return {
        "waits per step": (longer - shorter) / (LONGER - SHORTER),
        "waits per log line": (logging - longer) / lines,
    }


@contextlib.contextmanager
def counted(device: str) -> Iterator[list[int]]:
    """Inside of it waits are counted into the one entry of the list."""
    found = [0]
    if device == "cpu":
        # `tolist` bypasses the dispatcher. Integers are counts of samples, which never were on a device.
        with _Reads(found), _calls(torch.Tensor, "tolist", found, lambda tensor: tensor.is_floating_point()):
            yield found
        return
    with noted_waits() as waits, _calls(torch.cuda.Event, "synchronize", found, lambda event: True):
        yield found
    found[0] += len(waits)


@contextlib.contextmanager
def _calls(kind: type, name: str, found: list[int], counts: Callable[[Any], bool]) -> Iterator[None]:
    """Counts the calls of a method, in this process."""
    method = getattr(kind, name)

    def wrapper(self: Any, *args: Any) -> Any:
        found[0] += counts(self)
        return method(self, *args)

    setattr(kind, name, wrapper)
    try:
        yield
    finally:
        setattr(kind, name, method)


class _Reads(TorchDispatchMode):
    def __init__(self, found: list[int]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[0] += func.overloadpacket in HAND_OVER
        return func(*args, **(kwargs or {}))


def strict(mode: str, steps: int = 200) -> str:
    """Raises where a step of our loop waits. On a GPU."""
    work = WORKS["mlp"]
    step = ours(work.net("cuda"), work.batches(4, "cuda"), mode, "cuda", adamw)
    for _ in range(3):
        step()
    with sync_debug("error"):
        for _ in range(steps):
            step()
    return f"{steps} steps of our loop in {mode}, accumulation 4: no wait (each would have been an error)."
