"""Results and errors that all ranks share: an error of one rank is raised on all, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from amp_core.checkpoints.folders import CorruptFile
from amp_core.config.errors import CheckpointError, RunError, SaveError

T = TypeVar("T")


class Ranks:
    """The ranks of a group that takes tensors in host memory, such as gloo's; or this process alone.

    Both methods are collective, and wait for all ranks. What `act` raises is raised on all of them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.num = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def first(self, act: Callable[[], T]) -> T:
        """What `act` returns on rank 0. The others do not call it."""
        if self.num == 1:
            return act()
        problem, told = _attempt(act) if self.rank == 0 else (None, None)
        shared = [told]
        dist.broadcast_object_list(shared, group=self.group, group_src=0)
        return self._results([shared[0]], problem)[0]

    def each(self, act: Callable[[], T]) -> list[T]:
        """What `act` returns on each rank, in order. Where several raise, the problem of the lowest rank counts."""
        if self.num == 1:
            return [act()]
        problem, told = _attempt(act)
        everyone: list[Any] = [None] * self.num
        dist.all_gather_object(everyone, told, group=self.group)
        return self._results(everyone, problem)

    def _results(self, everyone: list[Any], problem: Exception | None) -> list[Any]:
        for rank, (kind, value) in enumerate(everyone):
            if kind is not None:
                raise problem if rank == self.rank and problem is not None else kind(f"rank {rank}: {value}")
        return [value for _, value in everyone]


def _attempt(act: Callable[[], Any]) -> tuple[Exception | None, tuple[type[Exception] | None, Any]]:
    """The problem of this rank; for the others None and the result, or the kind of error and its text."""
    try:
        return None, (None, act())
    except Exception as problem:  # whatever it is, the others must not wait for this rank
        if type(problem) in (SaveError, CheckpointError, CorruptFile, ValueError):
            return problem, (type(problem), str(problem))
        is_clear = isinstance(problem, RunError)
        return problem, (RuntimeError, str(problem) if is_clear else f"{type(problem).__name__}: {problem}")
