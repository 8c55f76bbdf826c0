"""Blocks that keep their inputs alone for the backward pass, and compute the rest once more when it is needed.

    recompute_blocks(net)     # after `keep_fp32` and `Amp.prepare`, before the network is wrapped for a layout

The second computation must be the first one again, and leave no trace. `torch.utils.checkpoint` sees to random numbers
and autocast; here, to buffers: a BatchNorm would move its running statistics twice in every window, and what depends on
a buffer that the forward pass changed (spectral normalisation) would compute something else. So it is computed with
copies of the buffers as they were before, which are thrown away.

A block becomes one by a change of its class, as an fp32 island does: names, hooks, `isinstance` and copies stay.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_core.tensors import blocks
from amp_core.torch_private import buffers_of, passing_buffers_of

_here = threading.local()


def recomputed() -> nn.Module | None:
    """The block that is being computed for the second time, in this thread: what counts things leaves that out."""
    return getattr(_here, "block", None)


def recompute_blocks(net: nn.Module) -> int:
    """Let each block of `net` recompute its activations in the backward pass, in place. Never waits for the device.

    Blocks are those that layout=fsdp gathers by themselves, see `tensors.blocks`. Gradients, random numbers and
    buffers are bit for bit those without it. In evaluation nothing changes. Buffers that are no part of the state dict
    are taken for constants.

    Returns:
        The number of blocks.

    Raises:
        ValueError: there is none; or the `forward` of one was patched in the instance, which would bypass it.
    """
    found = list(blocks(net))
    if not found:
        raise ValueError(
            f"{type(net).__name__} has no blocks: modules with parts of their own in an nn.ModuleList or nn.Sequential"
        )
    for block in found:
        if "forward" in vars(block):
            raise ValueError(f"a {type(block).__name__} has a patched forward, by hand or by torch.compile")
        _to_recomputed(block)
    return len(found)


class _Recomputed:
    """Stands before the class of a block in its bases."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Stops here, so that no registry that a model fills from its own `__init_subclass__` sees it."""


@functools.cache
def _class_of(base: Any) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(base.forward, self)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        again = _Again(self)
        contexts = functools.partial(_contexts, again)
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    # `islands` looks at `computes` to tell whether a block is one.
    body = {"__module__": base.__module__, "__doc__": base.__doc__, "forward": forward}
    body["computes"] = getattr(base, "computes", base.forward)
    if hasattr(base, "__deepcopy__"):  # may build its result from the class by name
        body["__deepcopy__"] = lambda self, memo: _to_recomputed(base.__deepcopy__(self, memo))
    # Under its own name, which is what messages and reports show.
    return types.new_class(base.__name__, (_Recomputed, base), exec_body=lambda namespace: namespace.update(body))


def _to_recomputed(module: nn.Module) -> nn.Module:
    if not isinstance(module, _Recomputed):
        module.__class__ = _class_of(type(module))
    return module


def _contexts(again: _Again) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    return contextlib.nullcontext(), again


class _Again:
    """Around each second computation: buffers are as they were before the first one, and afterwards what they are now.

    Can be entered several times, one after the other: a graph that is kept may be gone through more than once.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block, self._outer = block, None
        self._before: list[tuple[nn.Module, str, Tensor]] = [
            (module, name, buffer.detach().clone())
            for module in block.modules()
            if module.training
            for name, buffer in buffers_of(module).items()
            if buffer is not None and name not in passing_buffers_of(module)
        ]
        self._now: list[Tensor | None] = []

    def __enter__(self) -> None:
        self._outer, _here.block = recomputed(), self._block
        self._now = [buffers_of(module)[name] for module, name, _ in self._before]
        for module, name, before in self._before:
            buffers_of(module)[name] = before.clone()

    def __exit__(self, *problem: Any) -> None:
        for (module, name, _), now in zip(self._before, self._now, strict=True):
            buffers_of(module)[name] = now
        self._now = []
        _here.block = self._outer
