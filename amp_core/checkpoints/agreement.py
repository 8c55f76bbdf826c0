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
        return self.each(lambda: act() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def each(self, act: Callable[[], T]) -> list[T]:
        """What `act` returns on each rank, in order. Where several raise, the problem of the lowest rank counts."""
        if self.num == 1:
            return [act()]
        problem, told = None, (None, None)
        try:
            told = None, act()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            problem = error
            kind = type(error) if type(error) in (SaveError, CheckpointError, CorruptFile, ValueError) else RuntimeError
            name = f"{type(error).__name__}: " if kind is RuntimeError and not isinstance(error, RunError) else ""
            told = kind, f"{name}{error}"
        everyone: list[Any] = [None] * self.num
        dist.all_gather_object(everyone, told, group=self.group)
        for rank, (kind, value) in enumerate(everyone):
            if kind is not None:
                raise problem if rank == self.rank and problem is not None else kind(f"rank {rank}: {value}")
        return [value for _, value in everyone]
