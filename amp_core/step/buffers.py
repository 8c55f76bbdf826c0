"""Restore running statistics after a skipped step.

A batch that overflows in the forward pass puts inf into `running_mean` and NaN into `running_var` of every BatchNorm
behind it. Skipping the step protects the weights but not the statistics, and every later evaluation returns NaN. An
overflow only in the backward pass leaves the statistics of a batch that was not trained on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.lowp.weights import master_params
from amp_core.step.gradients import same
from amp_core.torch_private import buffers_of, foreach_copy_, passing_buffers_of

logger = logging.getLogger("amp_recipes")


class BufferGuard:
    """Snapshots a network's buffers at the first forward of a window and restores them after a skipped step.

    All buffers that belong to the network's state are remembered: BatchNorm writes its statistics without a trace in
    their version counters, so which ones change cannot be told. Buffers that are not part of the state
    (`persistent=False`), such as masks and caches, are left alone: what a skipped step writes there stays. Nothing here
    waits for the device. Modules that have none when the guard is made are never looked at again.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = weakref.ref(net)
        self._owners: list[tuple[nn.Module, str, Tensor]] = []
        self._groups: list[_Group] = []
        self._armed = self._is_noted = False
        self.was_called = False
        """In the present window."""
        self._modules = [m for m in net.modules() if buffers_of(m).keys() - passing_buffers_of(m)]
        self.has_buffers = bool(self._modules)
        if self.has_buffers:
            net.register_forward_pre_hook(self._before_forward)
        self.parameters = frozenset(master_params(net))

    def _before_forward(self, net: nn.Module, inputs: Any) -> None:
        # A deep copy of the network copies this hook; it must not act for the original.
        if self._armed or net is not self._net():
            return
        found = [
            (module, name, buffer)
            for module in self._modules
            if module.training
            for name, buffer in buffers_of(module).items()
            if buffer is not None and name not in passing_buffers_of(module)
        ]
        if not found:  # evaluation, or a network without statistics
            return
        self._armed = self.was_called = True
        with torch.no_grad():
            if not same([buffer for _, _, buffer in found], [buffer for _, _, buffer in self._owners]):
                self._owners = found
                self._groups = [_Group(parts) for (parts,) in flat_groups((buffer,) for _, _, buffer in found)]
            for group in self._groups:
                torch.cat(group.parts, out=group.kept)

    @torch.no_grad()
    def settle(self, taken: Tensor | None) -> None:
        """End the window: keep what forward passes wrote if `taken` (0-d bool) or None, else restore the snapshot."""
        was_armed, self._armed = self._armed, False
        if not was_armed or taken is None:
            return
        for group in self._groups:
            moves = taken.to(group.kept.device, non_blocking=True)
            # where, not lerp: 0 * NaN is NaN.
            chosen = torch.where(moves, torch.cat(group.parts), group.kept)
            foreach_copy_(group.parts, list(chosen.split(group.sizes)))
        for module, name, buffer in self._owners:
            now = buffers_of(module)[name]
            if now is not buffer and now is not None:  # a forward pass put a new tensor in its place
                moves = taken.to(now.device, non_blocking=True)
                buffers_of(module)[name] = torch.where(moves, now, buffer.detach())

    def note_bypass(self) -> None:
        """Log once that statistics are not guarded, since the module that was given is not the one that is called."""
        if not self._is_noted and any(module.training for module in self._modules):
            self._is_noted = True
            logger.warning(
                "a step was taken without a call of the guarded %s, so a skipped step does not restore its buffers; "
                "call amp.guard with the module that the training loop calls",
                type(self._net()).__name__,
            )


class _Group:
    """Flat buffers of one kind, and their snapshot."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts
        self.sizes = [len(part) for part in parts]
        self.kept = torch.cat(parts)


def flat_groups(rows: Iterable[Sequence[Tensor]]) -> list[tuple[list[Tensor], ...]]:
    """The columns of rows of tensors, such as a buffer and its average, flat and for each kind together.

    A ResNet-50 has 159 buffers, each of which costs kernels. A row with a non-contiguous tensor is alone, in its shape.
    """
    found: dict[Any, list[list[Tensor]]] = {}
    for i, row in enumerate(rows):
        flat = all(tensor.is_contiguous() for tensor in row)
        kind = (*((tensor.device, tensor.dtype) for tensor in row), None if flat else i)
        found.setdefault(kind, []).append([tensor.detach().view(-1) if flat else tensor.detach() for tensor in row])
    return [tuple(map(list, zip(*same_kind, strict=True))) for same_kind in found.values()]
