"""Results and errors that all ranks share: an error of one rank is raised on all, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from amp_core.checkpoints.manifest import CorruptFile
from amp_core.config.errors import CheckpointError, RunError, SaveError

T = TypeVar("T")
_SPOKEN = (SaveError, CheckpointError, CorruptFile, ValueError)
"""Problems that other ranks raise as what they are."""


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
        problem, told = None, [None, None]
        if self.rank == 0:
            problem, value = _attempt(act)
            told = [None if problem is None else _spell(problem), value]
        dist.broadcast_object_list(told, group=self.group, group_src=0)
        if told[0] is not None:
            raise problem or _spoken(0, told[0])
        return told[1]  # type: ignore[return-value]

    def each(self, act: Callable[[], T]) -> list[T]:
        """What `act` returns on each rank, in order. Where several raise, the problem of the lowest rank counts."""
        if self.num == 1:
            return [act()]
        problem, value = _attempt(act)
        told: list[Any] = [None] * self.num
        dist.all_gather_object(told, (None if problem is None else _spell(problem), value), group=self.group)
        for rank, (text, _) in enumerate(told):
            if text is not None:
                raise problem if rank == self.rank and problem is not None else _spoken(rank, text)
        return [value for _, value in told]


def _attempt(act: Callable[[], T]) -> tuple[Exception | None, T | None]:
    try:
        return None, act()
    except Exception as problem:  # whatever it is, the others must not wait for this rank
        return problem, None


def _spell(problem: Exception) -> tuple[int, str]:
    for number, kind in enumerate(_SPOKEN):
        if type(problem) is kind:
            return number, str(problem)
    return -1, str(problem) if isinstance(problem, RunError) else f"{type(problem).__name__}: {problem}"


def _spoken(rank: int, told: tuple[int, str]) -> Exception:
    number, text = told
    return (_SPOKEN[number] if number >= 0 else RuntimeError)(f"rank {rank}: {text}")
