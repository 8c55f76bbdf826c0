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


class BufferGuard:
    """Remembers a network's buffers at the first forward of a window and puts them back after a skipped step.

    A buffer that did not change since it was last remembered (seen by its version counter) costs nothing. Nothing here
    waits for the device.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = weakref.ref(net)
        self._kept: dict[Tensor, tuple[Tensor, int]] = {}
        self._armed = False
        self._hook = net.register_forward_pre_hook(self._before_forward)
        self.parameters = frozenset(net.parameters())

    def _before_forward(self, net: nn.Module, inputs: Any) -> None:
        # A deep copy of the network carries this hook along; it must not speak for the original.
        if self._armed or not net.training or net is not self._net():
            return
        self._armed = True
        live = {}
        with torch.no_grad():
            for buffer in net.buffers():
                kept = self._kept.get(buffer)
                if kept is None:
                    kept = (buffer.detach().clone(), buffer._version)
                elif kept[1] != buffer._version:
                    kept[0].copy_(buffer)
                    kept = (kept[0], buffer._version)
                live[buffer] = kept
        self._kept = live

    @torch.no_grad()
    def settle(self, taken: Tensor) -> None:
        """End the window: keep what the forward passes wrote where `taken` (0-d bool), else put it back."""
        if not self._armed:
            return
        self._armed = False
        for buffer, (kept, version) in self._kept.items():
            if buffer._version != version:
                # where, not lerp: 0 * NaN is NaN.
                torch.where(taken, buffer, kept, out=buffer)
