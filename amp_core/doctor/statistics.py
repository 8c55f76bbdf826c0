"""Ranges of every layer's values, sampled in training: largest value, share lost in fp16, histogram of exponents.

Every `doctor.statistics_every` steps one window is measured on the device, without host-device sync. Hooks exist only
during this window, so other steps cost nothing. Results are copied to the host in the background and written with the
next log line, to `doctor/statistics.jsonl` and to the trackers.

    weights               at the start of the window, in their storage dtype
    activations           outputs of modules without submodules
    activation_gradients  their gradients in the backward pass, scaled by the loss scale
    weight_gradients      after the window, summed over micro-batches (and by DDP over ranks), unscaled

A layer that is called several times in a window, such as with accumulation, counts all calls.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.checkpoints.plain_state import all_tensors
from amp_core.doctor.locate import doctor_of
from amp_core.doctor.values import spread
from amp_core.lowp.masters import master_params
from amp_core.memory.recompute import recomputed
from amp_core.run.log import Log
from amp_core.run.loop import Loop
from amp_core.run.meters import PendingCopy
from amp_core.step.observer import Observer, observing

KINDS = ("weights", "activations", "activation_gradients", "weight_gradients")
LOST = 2.0**-25
"""fp16 rounds to 0 up to here: half of its smallest value, and ties go to even, which is 0."""
LIMIT = 2**16
"""At most this many elements of a tensor are counted; its largest value covers all elements."""

Key = tuple[str, str]


class Statistics(Observer):
    """Measures sampled windows of one run, on rank 0 only: its activations are those of its micro-batches."""

    def __init__(self, loop: Loop) -> None:
        assert loop.cfg.doctor.statistics_every is not None
        self.every, self._amp = loop.cfg.doctor.statistics_every, loop.amp
        doctor = doctor_of(loop)
        names = doctor.names
        self._leaves = [(name, module) for module, name in names.items() if not any(module.children())]
        own = {p: name for module, name in names.items() for p in module.parameters(recurse=False)}
        self._weights = [(name, p) for p, name in own.items() if p.is_floating_point()]
        # With 16-bit weights gradients are on their fp32 sides.
        pairs = [pair for _, net in doctor.nets for pair in zip(net.parameters(), master_params(net), strict=True)]
        self._owners = {side: own[p] for p, side in pairs if p in own}
        self._found: dict[Key, Tensor] = {}
        self._pending: list[tuple[int, list[Key], PendingCopy]] = []

    @contextlib.contextmanager
    def around_window(self, step: int) -> Iterator[None]:
        """Measures the window of a step that is due. No host-device sync."""
        if step % self.every:
            yield
            return
        self._found = {}
        scale = self._amp.scaler.scale.clone()  # the step may change it
        for name, weight in self._weights:
            self._measure(name, "weights", weight)
        with contextlib.ExitStack() as hooks:
            for name, module in self._leaves:
                hooks.enter_context(module.register_forward_hook(functools.partial(self._after_forward, name)))
            hooks.enter_context(observing(self._amp.observers, self))
            yield
        row = torch.cat([scale.double().reshape(1), *(each.to(scale.device) for each in self._found.values())])
        self._pending.append((step, list(self._found), PendingCopy(row)))
        self._found = {}

    def write(self, log: Log, upto: int | None = None) -> None:
        """Write the samples up to a step, waiting for their values; None: all."""
        while self._pending and (upto is None or self._pending[0][0] <= upto):
            step, keys, numbers = self._pending.pop(0)
            scale, *values = numbers.values()
            layers: dict[str, dict[str, Any]] = {}
            for i, (name, kind) in enumerate(keys):
                layers.setdefault(name, {})[kind] = _shares(values[i * _WIDTH : (i + 1) * _WIDTH])
            log.statistics({"step": step, "loss_scale": scale, "layers": layers})

    def _after_forward(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if recomputed() is not None:
            return
        for tensor in all_tensors(output):
            self._measure(name, "activations", tensor)
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._measure, name, "activation_gradients"))

    def on_gradients(self, params: Sequence[Tensor], grads: Sequence[Tensor], scaled: bool) -> None:
        for param, grad in zip(params, grads, strict=True):
            if param in self._owners:
                scale = self._amp.scaler.scale if scaled else None
                self._measure(self._owners[param], "weight_gradients", grad, scale)  # type: ignore[index]

    @torch.no_grad()
    def _measure(self, name: str, kind: str, tensor: Tensor, scale: Tensor | None = None) -> None:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
            return
        tensor = tensor.detach()
        largest = torch.stack(torch.aminmax(tensor)).abs().amax().float()  # no copy, propagates NaN
        values = spread(tensor, LIMIT).float().abs()
        lost = ((values > 0) & (values <= LOST)).sum()
        if scale is not None:
            largest, values = largest / scale.to(values.device), values / scale.to(values.device)
        # The stored exponent; 0 has its own bin. Integer sums do not depend on order.
        place = torch.where(values != 0, (values.view(torch.int32) >> 23) + 1, 0)
        counts = torch.zeros(_WIDTH - 2, dtype=torch.int64, device=values.device)
        counts.index_add_(0, place, torch.ones_like(place, dtype=torch.int64))
        row = torch.cat([torch.stack([largest.double(), lost.double()]), counts.double()])
        if (before := self._found.get((name, kind))) is not None:  # its device may differ
            before = before.to(row.device)
            row = torch.cat([torch.maximum(before[:1], row[:1]), before[1:] + row[1:]])
        self._found[name, kind] = row


_WIDTH = 2 + 257
"""Numbers of a layer: the largest value, non-finite if the tensor is; how many sampled values are not 0 and too small
for fp16; a count for each bin: 0, subnormal, exponents from -126 to 127, non-finite."""


def _shares(row: list[float]) -> dict[str, Any]:
    largest, lost, zeros, *counts, not_finite = row
    not_zero = sum(counts)
    return {
        "amax": largest if math.isfinite(largest) else None,
        "underflow": lost / max(not_zero, 1),
        "zeros": zeros / (zeros + not_zero + not_finite),
        "exponents": {str(e): n / not_zero for e, n in enumerate(counts, -127) if n},
    }
