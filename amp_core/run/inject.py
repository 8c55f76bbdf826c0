"""Fault injection by `debug.inject`, to test skipped steps and the doctor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from amp_core.checkpoints.plain_state import all_tensors
from amp_core.config.errors import ConfigError
from amp_core.config.schema import InjectConfig
from amp_core.step.amp import Amp
from amp_core.step.observer import Observer, observing
from amp_core.step.window import MicroBatch
from amp_core.tensors import is_dtensor, local, unwrap


@contextlib.contextmanager
def fault(inject: InjectConfig, model: nn.Module, amp: Amp, window: list[MicroBatch], *, rank: int) -> Iterator[bool]:
    """Around the computation of the window of `inject.step`: puts the fault into it, if it is this rank's.

    Yields whether the window is to be dropped. ConfigError: the batch has no place for it.
    """
    net, is_dropped = unwrap(model), inject.where == "drop"
    with contextlib.ExitStack() as undo:
        if is_dropped or inject.rank != rank:
            pass
        elif inject.where == "batch":
            tensor = next((each for each in all_tensors(window[0].batch) if each.is_floating_point()), None)
            if tensor is None:
                raise ConfigError(
                    "debug.inject.where=batch: the batch has no floating-point tensor; use where=gradient"
                )
            tensor.fill_(inject.value)
        elif inject.where == "activation":
            layer = next(m for m in net.modules() if any(True for _ in m.parameters(recurse=False)))
            hook = layer.register_forward_hook(lambda m, inputs, output: torch.as_tensor(output) + inject.value)
            undo.callback(hook.remove)
        elif is_dtensor(weight := next(p for p in net.parameters() if p.requires_grad)):
            undo.enter_context(observing(amp.observers, _BadShard(set(net.parameters()), inject.value)))
        else:
            undo.callback(weight.register_hook(lambda grad: torch.full_like(grad, inject.value)).remove)
        yield is_dropped


class _BadShard(Observer):
    """Makes a gradient bad on this rank alone: sharded ones pass no hook of autograd on their way to the weights."""

    def __init__(self, weights: set[Tensor], value: float) -> None:
        self._weights, self._value = weights, value

    def on_gradients(self, params: Sequence[Tensor], grads: Sequence[Tensor], scaled: bool) -> None:
        shards = local(grad for param, grad in zip(params, grads, strict=True) if param in self._weights)
        for shard in [shard for shard in shards if shard.numel()][:1]:  # a rank holds nothing of a small one
            shard.fill_(self._value)
