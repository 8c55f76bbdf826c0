"""Who writes what of a sharded checkpoint, and copies to host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_core.checkpoints import pieces
from amp_core.checkpoints.part_state import net_of, parameters_of
from amp_core.checkpoints.pieces import Entry, StatePath
from amp_core.checkpoints.plain_state import Part, plain_names
from amp_core.layouts.fsdp import replicas, slice_of
from amp_core.tensors import Slice, is_dtensor


def share_out(
    parts: Mapping[str, Part], states: Mapping[str, Any], rank: int, num_ranks: int
) -> tuple[list[Entry], list[tuple[int, int, int, str, Tensor]], dict[str, Any]]:
    """Which rank writes what. Every rank comes to the same result by itself, but for the tensors.

    What lies over ranks is written by those who have it, copies of it in turns. Weights and their moments that every
    rank has are shared out. All else is what it is on rank 0: small, or not the same everywhere, as running statistics.

    Returns:
        The table without its pieces; (number, start, stop, "parts" or "whole", tensor) for each piece that this rank
        writes; the states with None in place of the tensors of the table.
    """
    entries: list[Entry] = []
    mine: list[tuple[int, int, int, str, Tensor]] = []
    numbers: dict[Any, int] = {}
    num_bytes = [0] * num_ranks

    def share(place: StatePath, value: Any, same_as: Any, is_replica: bool) -> bool:
        if not (
            isinstance(value, Slice) or is_dtensor(value) or (is_replica and value.ndim and value.dtype in pieces.NAMES)
        ):
            return False
        if same_as in numbers:
            i = numbers[same_as]
            entries[i] = replace(entries[i], places=(*entries[i].places, place))
            return True
        own = (
            value if isinstance(value, Slice) else slice_of(value) if is_dtensor(value) else Slice(value, 0, len(value))
        )
        if own.tensor.dtype not in pieces.NAMES:
            raise ValueError(
                f"{'.'.join(map(str, place))} has the dtype {own.tensor.dtype}, which cannot be saved in pieces"
            )
        i = numbers[same_as] = len(entries)
        entries.append(Entry((place,), own.tensor.dtype, own.shape, own.dim))
        if isinstance(value, Slice):
            writes = True
        elif is_dtensor(value):
            number, count = replicas(value)
            writes = i % count == number
        else:
            writer = num_bytes.index(min(num_bytes))
            num_bytes[writer] += value.numel() * value.element_size()
            writes = writer == rank
        if writes and own.tensor.numel():
            is_partial = isinstance(value, Slice) or own.stop - own.start < own.total
            mine.append((i, own.start, own.stop, "parts" if is_partial else "whole", own.tensor))
        return True

    rest = {}
    for name, part in parts.items():
        shared = _shared_names(part)
        sizes = {}
        if isinstance(part, Optimizer):
            sizes = {number: parameter.shape for number, parameter in parameters_of(part, states[name]["param_groups"])}

        def walk(value: Any, place: StatePath, shared: Any = shared, sizes: Any = sizes) -> Any:
            if isinstance(value, Tensor | Slice):
                inside = place[1:]
                is_moment = len(inside) == 3 and inside[0] == "state" and value.shape == sizes.get(inside[1])
                is_weight = len(inside) == 1 and inside[0] in shared
                same_as = (place[0], shared.get(inside[0], inside)) if len(inside) == 1 else place
                return None if share(place, value, same_as, is_moment or is_weight) else value
            if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
                return {key: walk(item, (*place, key)) for key, item in value.items()}
            return [walk(item, (*place, i)) for i, item in enumerate(value)] if isinstance(value, list) else value

        rest[name] = walk(states[name], (name,))
    return entries, mine, rest


def _shared_names(part: Part) -> dict[str, int]:
    """Plain names of the weights of a network or of its average, and what tied ones have in common."""
    net = net_of(part)
    if net is None:
        return {}
    weights = dict(net.named_parameters(remove_duplicate=False))
    return {plain: id(weights[name]) for plain, name in plain_names(net, weights).items()}


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
