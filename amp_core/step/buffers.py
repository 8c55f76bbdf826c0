"""Restore running statistics after a skipped step.

A batch that overflows in the forward pass puts inf into `running_mean` and NaN into `running_var` of every BatchNorm
behind it. Skipping the step protects the weights but not the statistics, and every later evaluation returns NaN. An
overflow only in the backward pass leaves the statistics of a batch that was not trained on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.lowp.weights import master_params
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
            if len(found) != len(self._owners) or any(
                a[2] is not b[2] for a, b in zip(found, self._owners, strict=True)
            ):
                self._owners = found
                self._groups = _grouped([buffer for _, _, buffer in found])
            for group in self._groups:
                torch.cat(group.parts, out=group.kept)

    def settle(self, taken: Tensor | None) -> None:
        """End the window: keep what the forward passes wrote if `taken` (0-d bool), else restore the snapshot.

        None keeps all of it.
        """
        if not self._armed:
            return
        self._armed = False
        if taken is not None:
            self._choose(taken)

    def note_bypass(self) -> None:
        """Log once that statistics are not guarded, since the module that was given is not the one that is called."""
        if not self._is_noted and any(module.training for module in self._modules):
            self._is_noted = True
            logger.warning(
                "a step was taken without a call of the guarded %s, so a skipped step does not restore its buffers; "
                "call amp.guard with the module that the training loop calls",
                type(self._net()).__name__,
            )

    @torch.no_grad()
    def _choose(self, taken: Tensor) -> None:
        # Buffers that a forward pass replaced by new tensors are restored one by one.
        replaced = [
            i for i, (module, name, buffer) in enumerate(self._owners) if buffers_of(module)[name] is not buffer
        ]
        before = {i: kept for group in self._groups for i, kept in group.kept_of(replaced)} if replaced else {}
        for group in self._groups:
            moves = taken.to(group.kept.device, non_blocking=True)
            # where, not lerp: 0 * NaN is NaN.
            chosen = torch.where(moves, torch.cat(group.parts), group.kept)
            foreach_copy_(group.parts, list(chosen.split(group.sizes)))
        for i, kept in before.items():
            module, name, buffer = self._owners[i]
            now = buffers_of(module)[name]
            if now is not None:
                moves = taken.to(now.device, non_blocking=True)
                buffers_of(module)[name] = torch.where(moves, now, kept.view(buffer.shape))


class _Group:
    """Buffers of one dtype on one device, handled together: a network has dozens, each of which would cost three
    operations.

    Attributes:
        numbers: indices of the buffers.
        parts: flat views of them; a non-contiguous one is alone, in its shape.
        sizes: sizes of the parts.
        kept: the snapshot, concatenated.
    """

    def __init__(self, numbers: list[int], buffers: list[Tensor]) -> None:
        self.numbers = numbers
        self.parts = [b.detach().view(-1) if b.is_contiguous() else b.detach() for b in buffers]
        self.sizes = [len(part) for part in self.parts]
        self.kept = torch.cat(self.parts)

    def kept_of(self, numbers: list[int]) -> Iterator[tuple[int, Tensor]]:
        """The snapshots of those buffers that are in this group."""
        for number, kept in zip(self.numbers, self.kept.split(self.sizes), strict=True):
            if number in numbers:
                yield number, kept


def _grouped(buffers: list[Tensor]) -> list[_Group]:
    found: dict[Any, list[int]] = {}
    for i, buffer in enumerate(buffers):
        alone = None if buffer.is_contiguous() else i
        found.setdefault((buffer.device, buffer.dtype, alone), []).append(i)
    return [_Group(numbers, [buffers[i] for i in numbers]) for numbers in found.values()]
