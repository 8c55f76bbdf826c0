"""Copies of tensors in host memory, for saving in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Copies:
    """Copies of tensors in host memory that the next save uses again; pinned for what comes from a GPU."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        """In the order of their use."""
        self._free: dict[Any, deque[Tensor]] = {}
        self._devices: set[torch.device] = set()
        self._on_their_way: list[torch.cuda.Event] = []

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Makes and writes memory for copies of such tensors; they may be on the device meta."""
        self._buffers += [_host_memory(tensor).zero_() for tensor in tensors]

    def begin(self) -> None:
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            self._free.setdefault(_kind(buffer, buffer.is_pinned()), deque()).append(buffer)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy that is there after `wait`."""
        free = self._free.get(_kind(tensor, tensor.is_cuda))
        buffer = free.popleft() if free else _host_memory(tensor)
        self._buffers.append(buffer.copy_(tensor, non_blocking=tensor.is_cuda))
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return buffer

    def end(self) -> None:
        """From here on the tensors may change, by what their device does next. Forgets buffers that nothing used."""
        self._free.clear()
        for device in self._devices:
            self._on_their_way.append(torch.cuda.Event(blocking=True))
            self._on_their_way[-1].record(torch.cuda.current_stream(device))
        self._devices.clear()

    def wait(self) -> None:
        """Waits for what is on its way."""
        while self._on_their_way:
            self._on_their_way.pop().synchronize()


def _kind(tensor: Tensor, pinned: bool) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride(), pinned


def _host_memory(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
