"""What a CUDA graph does, on a CPU: the operators of a function written down, and computed again without the function.

As a capture does, recording computes nothing that stays: memory that was there before and the random state are put
back, and what was allocated holds no numbers. Playing runs the same operators on the same tensors in the same order; no
Python of the step runs, so whatever the step kept in Python, or asked Python for, is what it was when it was recorded.
As in a capture, what hands a number to the host is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from waits import WAITS

aten = torch.ops.aten


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _memory(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class Tape(TorchDispatchMode):
    """Writes down operators with the tensors they read, wrote and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, Any, Any, Any]] = []
        self.own: dict[int, torch.UntypedStorage] = {}
        self.foreign: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        read = tensors((args, kwargs))
        for tensor in read:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.own and storage.data_ptr() not in self.foreign:
                self.foreign[storage.data_ptr()] = (storage, storage.clone())
        returned = func(*args, **kwargs)
        for tensor in tensors(returned):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.foreign:
                self.own[storage.data_ptr()] = storage  # kept, so that no other tensor gets its address
        # Memory, as a graph knows it: a Parameter may get other memory later (`param.data = ...`).
        self.entries.append((func, *tree_map(_memory, (args, kwargs, returned))))
        return returned

    @torch.no_grad()
    def play(self) -> None:
        for func, args, kwargs, returned in self.entries:
            again = func(*args, **kwargs)
            for old, new in zip(tensors(returned), tensors(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():  # neither a view nor in place
                    old.detach().copy_(new)


def record(call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """In the place of `amp_core.memory.graph.capture_on_cuda`."""
    state = torch.get_rng_state()
    tape = Tape()
    try:
        with tape:
            returned = call()
    finally:
        for storage, before in tape.foreign.values():
            storage.copy_(before)
        for storage in tape.own.values():  # NaN, where a capture leaves what happens to be there
            storage.fill_(255)
        torch.set_rng_state(state)
    return returned, tape.play


class _Waits(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in WAITS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def noted_waits() -> Iterator[list[str]]:
    """In the place of `amp_core.memory.sync_debug.noted_waits`, which asks CUDA."""
    found: list[str] = []
    with _Waits(found):
        yield found
