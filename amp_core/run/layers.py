"""A table of a network's layers for a dry run, with the dtypes that a real step under autocast shows."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amp_core.checkpoints.plain_state import all_tensors
from amp_core.lowp.islands import island_names, named_modules
from amp_core.lowp.products import pays, products_of
from amp_core.run.replay import replay
from amp_core.run.terminal import say
from amp_core.step.window import MicroBatch
from amp_core.tensors import local, unwrap

if TYPE_CHECKING:
    from amp_core.run.loop import Loop

SAMPLES = 2
"""Samples of the step: BatchNorm needs more than one, and a dry run of a large network has to be short."""
HEAD = ("layer", "type", "weight", "stored in", "output in", "island", "bytes")


def show_layers(loop: Loop, count: Callable[[Any], Tensor] | None) -> Iterator[list[MicroBatch]]:
    """Have the recipe compute one small window that leaves no trace, and print the table. On every rank.

    `output in` is the dtype of a layer's output in that window, seen by a hook.
    """
    names = named_modules(loop.env.nets)
    seen: dict[int, torch.dtype] = {}

    def see(number: int, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [t for t in all_tensors(output) if t.is_floating_point()]
        if tensors:
            seen[number] = tensors[0].dtype

    # By number: networks may share names, and replicas of DataParallel are other modules with the same hooks.
    hooks = [module.register_forward_hook(functools.partial(see, number)) for number, module in enumerate(names)]
    loop.feed = loop.feed.resized(min(SAMPLES, loop.cfg.batch_size))
    loop.feed.count = count
    try:
        with replay(loop, 1) as (_, window):
            yield window
    finally:
        for hook in hooks:
            hook.remove()
    if loop.env.is_main:
        say(_table(loop, names, seen))


def _table(loop: Loop, names: dict[nn.Module, str], seen: dict[int, torch.dtype]) -> str:
    islands = {
        module
        for net in map(unwrap, (net for _, net in loop.env.nets))
        for name in island_names(net)
        for module in net.get_submodule(name).modules()
    }
    amp = loop.cfg.amp
    how = None if amp.format is None else products_of(amp)
    rows: list[tuple[str, ...]] = [HEAD if how is None else (*HEAD, amp.format or "")]
    for number, (module, name) in enumerate(names.items()):
        own = [*module.parameters(recurse=False)]
        if not own and any(module.children()):
            continue
        weight = getattr(module, "weight", None)
        weight = weight if isinstance(weight, Tensor) else next(iter(own), None)
        stored = [*local(own), *local(module.buffers(recurse=False))]
        rows.append(
            (
                name or "(the network)",
                type(module).__name__,
                "x".join(map(str, weight.shape)) if weight is not None else "",
                _spell(weight.dtype) if weight is not None else "",
                _spell(seen[number]) if number in seen else "not called",
                "yes" if module in islands else "",
                f"{sum(t.numel() * t.element_size() for t in stored):,}" if stored else "",
                *(() if how is None else (pays(module, how),)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = collections.Counter(row[-1] for row in rows[1:] if how is not None and row[-1])
    if counts and not counts["pays"]:
        why = ", ".join(f"{num} {reason}" for reason, num in counts.items())
        lines.append(f"no layer is faster in amp={amp.name} ({why}); use amp=bf16 for speed")
    return "\n".join(["layers, observed in a step of a few samples:", *(f"  {line}" for line in lines)])


def _spell(dtype: torch.dtype) -> str:
    known = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    return known.get(dtype, str(dtype).removeprefix("torch."))
