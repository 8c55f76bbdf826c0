"""Runs checks: each in its own processes, with a time limit."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from amp_conformance.checks import CHECKS, Check, Failed
from amp_conformance.task import NotOffered, Trainer

LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Result:
    """What came of a check.

    Attributes:
        check: its name.
        status: "passed", "failed", "not offered", "error" (the trainer raised), or "hung".
        seen: what was seen, for anything but "passed".
        note: global state that the trainer left changed.
        seed: of the numbers drawn.
    """

    check: str
    status: str
    seen: str = ""
    note: str = ""
    seed: int = 0

    def __str__(self) -> str:
        said = "; ".join(filter(None, (self.seen, self.note and f"left changed: {self.note}")))
        return f"{self.status:<12} {self.check}" + (f": {said}" if said else "")


def run(
    trainer: Trainer | type[Trainer],
    checks: Sequence[str] = (),
    *,
    seed: int | None = None,
    limit: float = LIMIT_SECONDS,
) -> list[Result]:
    """Put a trainer through checks.

    Args:
        trainer: see `task.Trainer`; or its class.
        checks: names; none: all.
        seed: of the numbers that are drawn; None: another one each time.
        limit: seconds for one check, after which it is "hung" and the next begins.

    Raises:
        KeyError: there is no check of such a name.
    """
    importlib.import_module("torch._dynamo")  # an optimizer's first step does, for seconds, in each process
    trainer = trainer() if isinstance(trainer, type) else trainer
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    return [_run(CHECKS[name], trainer, seed, limit) for name in checks or CHECKS]


def _run(check: Check, trainer: Trainer, seed: int, limit: float) -> Result:
    # Forked: what a trainer needs is imported once. Nothing here computes before, so there are no threads to lose.
    context = multiprocessing.get_context("fork")
    # The ranks meet here, as at an agent of torchrun: a port that is chosen before it is opened may be taken by then.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if check.ranks > 1 else None
    port = 0 if store is None else store.port
    processes, ends = [], []
    for rank in range(check.ranks):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, check, trainer, seed, rank, port), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(mine)
    deadline, found = time.monotonic() + limit, []
    for end in ends:
        status, seen, note = "hung", f"no answer within {limit:g} s", ""
        if end.poll(max(0.0, deadline - time.monotonic())):
            try:
                status, seen, note = end.recv()
            except EOFError:
                status, seen = "error", "its process died"
        found.append(Result(check.name, status, seen, note, seed))
    for process in processes:
        process.join(0.5 if all(each.status != "hung" for each in found) else 0)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)  # with what it started
        process.join()
    order = ("not offered", "failed", "error", "hung", "passed")
    return min(found, key=lambda each: order.index(each.status))


def _child(end: Connection, check: Check, trainer: Trainer, seed: int, rank: int, port: int) -> None:
    os.setsid()
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    if check.ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": check.ranks, "LOCAL_WORLD_SIZE": check.ranks}
        os.environ.update({key: str(value) for key, value in names.items()}, TORCHELASTIC_RUN_ID="conformance")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    warnings.simplefilter("ignore")
    before = _global_state()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # loggers hold the streams, not the names
        os.dup2(nothing, stream)
    try:
        check.run(trainer, random.Random(f"{seed} {check.name}"))
        answer = ("passed", "")
    except NotOffered as reason:
        answer = ("not offered", str(reason))
    except Failed as failure:
        answer = ("failed", str(failure))
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300]
        answer = ("error", f"{type(error).__name__}: {text} ({os.path.basename(where.filename)}:{where.lineno})")
    after = _global_state()
    changed = ", ".join(f"{name} ({before[name]} -> {after[name]})" for name in before if before[name] != after[name])
    end.send((*answer, changed))
    end.close()
    os._exit(0)  # no teardown of groups whose other member may be gone


def _global_state() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "gradients": torch.is_grad_enabled(),
        "seed": torch.initial_seed(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
    }
