"""Activation checkpointing: blocks save only their inputs and recompute the rest in the backward pass.

    recompute_blocks(net)     # after `keep_fp32` and `Amp.prepare`, before the network is wrapped for a layout

The recomputation must repeat the forward pass without side effects. `torch.utils.checkpoint` restores random state and
autocast; this module handles buffers: a BatchNorm would update its running statistics twice, and a result that depends
on a buffer changed by the forward pass (spectral normalisation) would differ. So a block is recomputed with copies of
the buffers from before the forward pass, which are then discarded.

The class of a block changes, like that of an fp32 island: names, hooks, `isinstance` and copies stay.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_core.lowp.islands import Generated, subclass
from amp_core.tensors import blocks
from amp_core.torch_private import buffers_of, passing_buffers_of

_here = threading.local()


def recomputed() -> nn.Module | None:
    """The block that is being recomputed in this thread; counters ignore it."""
    return getattr(_here, "block", None)


def recompute_blocks(net: nn.Module) -> int:
    """Make each block of `net` recompute its activations in the backward pass, in place. Returns the number of blocks.

    Blocks are those that layout=fsdp gathers one at a time, see `tensors.blocks`. Gradients, random numbers and
    buffers are bit-identical. Evaluation does not change. Non-persistent buffers are assumed to be constant.
    ValueError: there is none; or an instance's patched `forward` would bypass it.
    """
    found = list(blocks(net))
    if not found:
        raise ValueError(f"{type(net).__name__} has no blocks: modules with submodules in nn.ModuleList, nn.Sequential")
    for block in found:
        if "forward" in vars(block):
            raise ValueError(f"a {type(block).__name__} has a patched forward, by hand or by torch.compile")
        _to_recomputed(block)
    return len(found)


class _Recomputed(Generated):
    """Tells the class of a recomputed block."""


@functools.cache
def _class_of(base: Any) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(base.forward, self)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        contexts = contextlib.nullcontext(), _Again(self)
        return checkpoint(run, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)

    # `islands` uses `computes` to detect islands. Messages and reports show the original name.
    computes = getattr(base, "computes", base.forward)
    return subclass(base, _Recomputed, base.__name__, _to_recomputed, forward=forward, computes=computes)


def _to_recomputed(module: nn.Module) -> nn.Module:
    if not isinstance(module, _Recomputed):
        module.__class__ = _class_of(type(module))
    return module


class _Again:
    """Around each recomputation (several of a retained graph): use the buffers from before the forward pass."""

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
