"""Ends process groups in the only order that cannot hang: what uses them is freed first.

A `DistributedDataParallel` owns a C++ reducer, which owns its process group. If the reducer is its last owner, freeing
the module (torch 2.13) joins the threads of gloo while it holds the GIL; a thread of gloo that frees its last work item
waits for the GIL: a deadlock. NCCL in turn waits for every CUDA graph that captured its communicator.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback

import torch
import torch.distributed as dist

from amp_core.config.errors import Interrupted
from amp_core.torch_private import find


def end_process_group() -> None:
    """Destroy all process groups, also while an exception is handled. A no-op without any. Never raises.

    `DistributedDataParallel` modules cannot be called afterwards. Captured CUDA graphs that the caller still refers to
    must have been dropped (`CudaGraphStep.forget`).

    After an exception the frames of its traceback are cleared, since their local variables keep modules alive, and NCCL
    is aborted: its collectives may wait for ranks that are gone.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    problem = sys.exc_info()[1]
    chain: list[BaseException] = [problem] if problem is not None else []
    for error in chain:
        traceback.clear_frames(error.__traceback__)
        others = (error.__cause__, error.__context__)
        chain += [other for other in others if other is not None and all(other is not one for one in chain)]
    gc.collect()  # a loop and its graph refer to each other
    _drop_reducers()
    # All ranks agree on an interruption, unless one gave up waiting for its data.
    in_order = problem is None or (isinstance(problem, Interrupted) and problem.__cause__ is None)
    # A failing teardown after complete work is no failure of the run.
    with contextlib.suppress(Exception):
        if in_order or "nccl" not in dist.get_backend_config():
            dist.destroy_process_group()
        else:
            find("torch.distributed.distributed_c10d._abort_process_group", dist.destroy_process_group)()


def _drop_reducers() -> None:
    """Free the reducers of modules that are still referenced, by a running function, a cache or a test."""
    for module in gc.get_objects():
        # By its type: isinstance would ask proxies for their class, and so run their code.
        if issubclass(type(module), torch.nn.parallel.DistributedDataParallel):
            for name in ("logger", "reducer"):  # the logger refers to the reducer
                module.__dict__.pop(name, None)
