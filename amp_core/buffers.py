"""Running statistics that a skipped step leaves untouched.

A batch that overflows in the forward pass puts inf into `running_mean` and NaN into `running_var` of every BatchNorm
behind it. The skipped step saves the weights; nothing saves the statistics, and evaluation returns NaN for ever after.
Even an overflow in the backward pass alone leaves the statistics of a batch that was never learned from.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.weights import trainable


class BufferGuard:
    """Remembers a network's buffers at the first forward of a window and puts them back after a skipped step.

    All buffers that belong to the network's state are remembered: BatchNorm writes its statistics without a trace in
    their version counters, so which ones change cannot be told. Nothing here waits for the device. Modules that have
    none when the guard is made are never looked at again.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = weakref.ref(net)
        self._owners: list[tuple[nn.Module, str]] = []
        self._live: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._armed = False
        self._modules = [m for m in net.modules() if m._buffers.keys() - m._non_persistent_buffers_set]
        self.has_buffers = bool(self._modules)
        if self.has_buffers:
            net.register_forward_pre_hook(self._before_forward)
        self.parameters = frozenset(trainable(net))

    def _before_forward(self, net: nn.Module, inputs: Any) -> None:
        # A deep copy of the network carries this hook along; it must not speak for the original.
        if self._armed or net is not self._net():
            return
        found = [
            (module, name, buffer)
            for module in self._modules
            if module.training
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        if not found:  # evaluation, or a network without statistics
            return
        self._armed = True
        live = [buffer for _, _, buffer in found]
        if len(live) != len(self._live) or any(a is not b for a, b in zip(live, self._live, strict=True)):
            self._owners = [(module, name) for module, name, _ in found]
            self._live, self._kept = live, [torch.empty_like(buffer) for buffer in live]
        with torch.no_grad():
            torch._foreach_copy_(self._kept, live)

    def settle(self, taken: Tensor | None) -> None:
        """End the window: keep what the forward passes wrote where `taken` (0-d bool), else put it back.

        None keeps all of it.
        """
        if not self._armed:
            return
        self._armed = False
        if taken is not None:
            self._choose(taken)

    @torch.no_grad()
    def _choose(self, taken: Tensor) -> None:
        for (module, name), live, kept in zip(self._owners, self._live, self._kept, strict=True):
            buffer = module._buffers[name]
            if buffer is None:
                continue
            # where, not lerp: 0 * NaN is NaN.
            moves = taken.to(buffer.device, non_blocking=True)
            if buffer is live:
                torch.where(moves, buffer, kept, out=buffer)
            else:  # the forward pass put another tensor in its place
                module._buffers[name] = torch.where(moves, buffer, kept)
