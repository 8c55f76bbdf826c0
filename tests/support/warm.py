"""Processes of tests are forked from a server that has imported what a run imports, and has run nothing.

Forking pytest itself would be unsafe as soon as any test has started a thread.
"""

from __future__ import annotations

import gc
import multiprocessing
from multiprocessing.context import ForkServerContext

import torch

_PARTS = {
    "torch": ["_dynamo", "distributed.fsdp", "distributed.checkpoint", "utils.serialization"],
    "amp_core.run": ["confusion", "environment", "launch", "loop", "plan", "preflight", "process", "recipe", "replay"],
    "amp_core": [
        *("run.resume", "run.samples", "run.stop", "layouts.ddp", "layouts.low_shards", "layouts.zero", "lowp.moments"),
        *("lowp.prepare", "doctor.statistics", "doctor.watch", "heads.metrics", "data.prepare"),
    ],
}
_PRELOAD = ["pytest", "train", "omegaconf._impl", "importlib.readers"]
_PRELOAD += [f"{package}.{name}" for package, names in _PARTS.items() for name in names]
"""What would else be imported in each process, for a second and more."""


def server() -> ForkServerContext:
    """The server, which starts with the first process that is asked of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def begin() -> None:
    """The first line of a process of the server: one thread, and no more than its own objects to search for garbage.

    All else is shared with the server until it is written to, and counting references writes: the collection at the
    end of a process group would copy the memory of all that was imported.
    """
    gc.freeze()
    torch.set_num_threads(1)
