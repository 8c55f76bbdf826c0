"""A whole optimizer step as one CUDA graph: captured once, then replayed without Python.

    report, loss = loop.run(train_step, window)      # with perf=graph

The graph contains all of `train_step`. This works because the skip decision, the learning rate and the counters are
tensors on the device, and because a window ends without gradients: `zero_grad(set_to_none=True)` inside the capture
leaves them in the graph's memory pool, and nothing outside has their addresses.

A graph reads and writes fixed memory. So a window is copied into static buffers, the step returns the same tensors
each time, and random numbers follow the seed set before each step: torch passes seed and offset of the default
generator to a graph at replay. Other Python code of a step runs only once, at capture; so steps run eagerly if they are
inspected (reruns of the doctor, sampled statistics, injected faults) or if a window has another shape.

A failed capture cannot be undone: torch's allocators and, before 2.13, its random generator stay in it, so that later
steps fail or leak memory. So the last step before it runs under sync detection, and a step that syncs is never
captured. If CUDA still refuses a capture, the run ends.

Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs, and NVIDIA's
https://docs.nvidia.com/dl-cuda-graph/ (streams of gradients, capture modes, pinned memory).
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_core.config.errors import RunError
from amp_core.config.schema import SHARDED, LayoutConfig
from amp_core.memory.sync_debug import noted_waits
from amp_core.step.amp import Amp
from amp_core.step.fused import counts_of
from amp_core.step.schedule import Schedule
from amp_core.step.steppable import can_skip_on_device
from amp_core.step.window import MicroBatch
from amp_core.torch_private import find

_pytree = find("torch.utils._pytree")
logger = logging.getLogger("amp_recipes")

Step = Callable[[list[MicroBatch]], Any]

NUM_WARM_UPS = 3
"""Eager steps before the capture: libraries choose their kernels, optimizers create their state."""
NUM_WARM_UPS_DDP = 11
"""DistributedDataParallel times its first ten steps with events, which cannot be captured."""


def why_not_capturable(
    devices: Sequence[torch.device], layout: LayoutConfig, world_size: int, optimizers: Sequence[torch.optim.Optimizer]
) -> str | None:
    """Why the steps of a run cannot be captured, as far as known before the first step, or None."""
    reasons = {
        f"CUDA graphs are for GPUs, this is a {devices[0].type}": devices[0].type != "cuda",
        "this torch has no torch.utils._pytree": _pytree is None,
        f"layout={layout.name} gathers and frees weights from Python": layout.name in SHARDED and world_size > 1,
        f"layout={layout.name} computes on several devices from threads": len(devices) > 1,
        "layout.shard_optimizer gathers weights from Python": layout.shard_optimizer and world_size > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or unfit(optimizers)


def unfit(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Why an optimizer's steps need the host to decide, or None."""
    names = (type(each).__name__ for each in optimizers if not can_skip_on_device(each))
    return next((f"{name} is not fused, so the host decides whether a step is taken" for name in names), None)


class CudaGraphStep:
    """Captures the step of a run and replays it; `why_not_capturable` is None.

    Optimizers that only a schedule knows step, too. `amp` drops its window if a capture fails; `reseed` seeds the step.
    """

    def __init__(
        self,
        nets: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedules: Sequence[Schedule],
        amp: Amp,
        reseed: Callable[[], None],
    ) -> None:
        self._nets, self._owned, self._schedules, self._amp, self._reseed = nets, optimizers, schedules, amp, reseed
        self._optimizers = list(dict.fromkeys([*optimizers, *(schedule.optimizer for schedule in schedules)]))
        replicated = any(isinstance(net, DistributedDataParallel) for net in nets)
        self._num_warm_ups = NUM_WARM_UPS_DDP if replicated else NUM_WARM_UPS
        self._refused: str | None = None
        self.is_capturing = False
        for optimizer in self._optimizers:
            # Loaded moments are at other addresses than those in the graph.
            optimizer.register_load_state_dict_post_hook(lambda _: self.forget())
        self.forget()

    @property
    def is_used(self) -> bool:
        """Whether it was called for a step of the current run."""
        return self._step is not None or self._refused is not None

    def forget(self) -> None:
        """Capture again: memory that the graph knows by its address was replaced."""
        self._step: Step | None = None
        self._key: Any = None
        self._num_computed = 0
        self._play: Callable[[], None] | None = None
        self._returned: Any = None
        self._static: list[Tensor] = []
        self._taken: list[Tensor | None] = []
        self._counts: list[Tensor | None] = []

    def __call__(self, step: Step, window: list[MicroBatch]) -> Any:
        """`step(window)`. What is returned is overwritten by the next step."""
        if self._refused is not None:
            return step(window)
        tensors, key = _split(window)
        if self._step != step:  # another network's step, in a recipe that trains several in turn
            self.forget()
            self._step, self._key = step, key
        if key != self._key:  # a window of another shape
            return step(window)
        if self._play is not None and not all(map(is_, self._counts, map(counts_of, self._optimizers))):
            # An eager step in between has moved the step counts.
            self.forget()
            self._step, self._key = step, key
        if self._play is None:
            if self._num_computed < self._num_warm_ups:
                self._num_computed += 1
                if self._num_computed < self._num_warm_ups:
                    return step(window)
                with noted_waits() as waits:
                    returned = step(window)
                if waits:
                    self._refuse(f"a step waits for the device at {waits[0]}, which a graph cannot capture")
                return returned
            problem = self._try(step, window, tensors)
            if problem is not None:
                self._give_up(problem)
                return step(window)
        for buffer, tensor in zip(self._static, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        assert self._play is not None
        self._play()
        # The only Python state of a step.
        for schedule, taken in zip(self._schedules, self._taken, strict=True):
            schedule.last_taken = taken
        return self._returned

    def _try(self, step: Step, window: list[MicroBatch], tensors: list[Tensor]) -> str | None:
        """Capture; returns the reason if it is not possible."""
        self._static = [tensor.clone() for tensor in tensors]
        fixed = _join(window, self._static)
        before, put_back = self._addresses(), self._places()
        torch.clear_autocast_cache()  # a cast weight cached outside would be a constant inside
        self.is_capturing = True
        try:
            with _capturable(self._optimizers):
                self._returned, self._play = capture_on_cuda(lambda: step(fixed))
        except RuntimeError as problem:
            put_back()
            return _told(problem)
        finally:
            self.is_capturing = False
            torch.clear_autocast_cache()
        changed = [name for name, address in self._addresses().items() if before.get(name) != address]
        if changed:
            put_back()
            return f"a step replaces the tensor of {changed[0]}"
        self._taken = [schedule.last_taken for schedule in self._schedules]
        self._counts = list(map(counts_of, self._optimizers))
        logger.info("perf.graph: step captured, and replayed from here on")
        return None

    def _addresses(self) -> dict[str, int]:
        """The addresses of the run's state."""
        found: dict[str, int] = {}
        for i, net in enumerate(self._nets):
            for kind, named in (("weight", net.named_parameters()), ("buffer", net.named_buffers())):
                found |= {f"the {kind} {name} of network {i}": tensor.data_ptr() for name, tensor in named}
        # The state of optimizers that are no part of the run belongs to another object, which may gather it in each
        # step.
        for i, optimizer in enumerate(self._owned):
            for j, state in enumerate(optimizer.state.values()):
                values = {name: value for name, value in state.items() if isinstance(value, Tensor)}
                found |= {f"{name} of weight {j} in optimizer {i}": value.data_ptr() for name, value in values.items()}
        return found

    def _places(self) -> Callable[[], None]:
        """A function that restores the tensors of the run's state: a capture leaves tensors without values."""
        modules = [module for net in self._nets for module in net.modules()]
        tables: list[Any] = [table for module in modules for table in vars(module).values() if isinstance(table, dict)]
        for optimizer in self._optimizers:
            tables += [optimizer.state, *optimizer.state.values()]
        before = [dict(table) for table in tables]

        def put_back() -> None:
            for table, entries in zip(tables, before, strict=True):
                table.clear()
                table.update(entries)

        return put_back

    def _give_up(self, problem: str) -> None:
        """Undo the capture, which computed nothing."""
        self._refuse(problem)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._amp.forget_window()
        self._reseed()

    def _refuse(self, problem: str) -> None:
        self.forget()
        self._refused = problem
        logger.warning("perf.graph=true: the step cannot be captured, running eagerly instead: %s", problem)


def capture_on_cuda(call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Capture what `call` does as one CUDA graph, without running it. Returns its result and the function that replays.

    On the current stream, which is not the default one (`environment` makes sure): autograd nodes remember their
    stream, and a graph may use no other. What `call` raised is raised, and nothing is left of the capture. RunError:
    CUDA refused it, and this process cannot recover.
    """
    graph = torch.cuda.CUDAGraph()
    raised: Exception | None = None
    try:
        # thread_local: threads that pin memory and watch collectives keep running, and do nothing on this stream.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            try:
                returned = call()
            except Exception as problem:
                raised = problem
                raise
    except Exception as problem:
        if problem is raised:  # the capture ended cleanly
            raise
        raise RunError(
            f"perf.graph=true: CUDA refused to capture a step, and this process cannot take another step: "
            f"{_told(raised or problem)}. Use perf.graph=false"
        ) from problem
    return returned, graph.replay


def _told(problem: Exception) -> str:
    """The first line of an exception, and where it was raised outside torch's files."""
    frames = traceback.extract_tb(problem.__traceback__)
    outside = [frame for frame in frames if "/site-packages/" not in frame.filename] or frames
    where = f" ({Path(outside[-1].filename).name}:{outside[-1].lineno}: {outside[-1].line})" if outside else ""
    return next(iter(str(problem).strip().splitlines()), type(problem).__name__) + where


def _split(window: list[MicroBatch]) -> tuple[list[Tensor], Any]:
    """The tensors of a window, and its structure: windows of equal structure differ only in values."""
    leaves, tree = _pytree.tree_flatten([(micro.batch, micro.weight) for micro in window])
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rest = [
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]
    return tensors, (tree, rest)


def _join(window: list[MicroBatch], tensors: list[Tensor]) -> list[MicroBatch]:
    """`window` with other tensors."""
    leaves, tree = _pytree.tree_flatten([(micro.batch, micro.weight) for micro in window])
    fresh = iter(tensors)
    leaves = [next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    pairs = _pytree.tree_unflatten(leaves, tree)
    return [replace(micro, batch=b, weight=w) for micro, (b, w) in zip(window, pairs, strict=True)]


@contextlib.contextmanager
def _capturable(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Adam refuses to be captured unless its groups are `capturable`; fused, it computes the same either way."""
    # Only inside the context: groups are part of checkpoints, and other devices refuse the flag.
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "capturable" in group]
    before = [group["capturable"] for group in groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group["capturable"] = value
