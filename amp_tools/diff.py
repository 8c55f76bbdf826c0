"""Where two modes part: the same window in both, layer by layer.

    python scripts/doctor.py diff amp=fp32 amp=bf16 recipe=segmentation --picture parts.png

The error of a layer is that of its inputs passed on, and its own. Its own is measured against the layer in fp32 at the
inputs that it had, and compared with what one rounding of inputs, weights and output explains, which is computed, too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.checkpoints.plain_state import all_tensors
from amp_core.config.errors import ConfigError
from amp_core.lowp.formats import quantise
from amp_core.lowp.islands import named_modules
from amp_core.run.loop import Loop
from amp_core.run.replay import replay, rerun_step

TIMES = 2.0
"""Of the error that one rounding explains: more is beyond it, since a layer of several operations rounds between."""
FLOOR = 2.0**-20
"""Relative error that sums in another order explain, in fp32: 16 last digits."""


@dataclass
class Seen:
    """One call of a layer in a window."""

    layer: nn.Module
    """A copy in fp32, before the window."""
    inputs: list[Tensor]
    output: Tensor
    gradient: Tensor | None = None
    """Of the loss by the output, unscaled."""


@dataclass
class Window:
    """What a window computed in one mode."""

    name: str
    low: torch.dtype
    calls: dict[tuple[str, int], Seen] = field(default_factory=dict)
    """By layer, and how often it was called before; in the order of the forward pass."""


@dataclass(frozen=True)
class Row:
    """A layer in two modes; errors are relative, in the L2 norm."""

    name: str
    kind: str
    activations: float
    own: float
    """The error that the layer itself adds, and what one rounding explains of it; NaN where it draws numbers."""
    explained: float
    gradients: float

    @property
    def is_beyond(self) -> bool:
        """Whether rounding does not explain the error that the layer adds."""
        return self.own > TIMES * self.explained + FLOOR


def record(loop: Loop, step: int, into: Window) -> Generator[Any, None, None]:
    """A driver (`env.driver`) that trains up to a step of a run and records its window. Fills `into`."""
    while loop.step < step - 1:
        with rerun_step(loop) as window:
            yield window
    with _recording(loop, into), replay(loop, step) as (_, window):
        yield window


@contextlib.contextmanager
def _recording(loop: Loop, into: Window) -> Iterator[None]:
    scale, hooks = loop.amp.scale, []
    into.low = loop.amp._low

    def see(name: str, plain: nn.Module, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found = [t for t in all_tensors(output) if t.is_floating_point()]
        if not found:
            return
        number = next(n for n in itertools.count() if (name, n) not in into.calls)
        inputs = [_kept(t) for t in all_tensors([args, kwargs])]
        call = into.calls[name, number] = Seen(plain, inputs, _kept(found[0]))
        if found[0].requires_grad:
            found[0].register_hook(lambda grad: setattr(call, "gradient", _kept(grad) / scale))

    for module, name in named_modules(loop.env.nets).items():
        if not any(module.children()):
            plain = copy.deepcopy(module).float()
            hooks.append(module.register_forward_hook(functools.partial(see, name, plain), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _kept(tensor: Tensor) -> Tensor:
    # A copy: a layer behind may write into it.
    return tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def compare(first: Window, second: Window) -> list[Row]:
    """A row for each call of a layer that both windows have; the first is the reference."""
    rows = []
    for (name, number), ours in second.calls.items():
        theirs = first.calls.get((name, number))
        if theirs is None or theirs.output.shape != ours.output.shape:
            continue
        own, explained = _own_error(theirs.layer, ours, second.low)
        gradients = torch.nan
        if ours.gradient is not None and theirs.gradient is not None:
            gradients = error(ours.gradient, theirs.gradient)
        called = f"{name} (call {number + 1})" if number else name
        row = Row(called, type(ours.layer).__name__, error(ours.output, theirs.output), own, explained, gradients)
        rows.append(row)
    return rows


def error(found: Tensor, exact: Tensor) -> float:
    """The L2 norm of the difference, relative to that of `exact`; 0 where both are 0."""
    off = (found.double() - exact.double()).norm()
    return 0.0 if off == 0 else float(off / exact.double().norm())


@torch.no_grad()
def _own_error(layer: nn.Module, call: Seen, low: torch.dtype) -> tuple[float, float]:
    """What a layer adds to the error of its inputs, and what rounding explains of it."""
    if not any(True for _ in layer.parameters()) or len(call.inputs) != 1 or isinstance(layer, nn.RNNBase):
        return torch.nan, torch.nan
    how = getattr(call.layer, "products", None)

    def rounded(tensor: Tensor, part: str) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if how is not None and tensor.ndim > 1:
            return quantise(tensor.reshape(-1, tensor.shape[-1]), getattr(how, part)).dense().view(tensor.shape)
        return tensor.to(low).to(tensor.dtype)

    plain, coarse = (copy.deepcopy(layer).cpu().float() for _ in range(2))
    for module in (plain, coarse):
        module.train(call.layer.training)
    for param in coarse.parameters():
        param.copy_(rounded(param, "weights"))
    exact = plain(*call.inputs)
    simulated = coarse(*(rounded(each, "inputs") for each in call.inputs)).to(low).float()
    return error(call.output, exact), error(simulated, exact)


def table(rows: list[Row], names: tuple[str, str]) -> str:
    """The rows as text, and the first layer whose error rounding does not explain."""
    lines = [f"{'layer':<32}{'type':<18}{'activations':>12}{'its own':>10}{'rounding':>10}{'gradients':>11}"]
    for row in rows:
        numbers = f"{row.activations:>12.1e}{row.own:>10.1e}{row.explained:>10.1e}{row.gradients:>11.1e}"
        lines.append(f"{row.name[:31]:<32}{row.kind[:17]:<18}{numbers}{' <-' if row.is_beyond else ''}")
    first = next((row for row in rows if row.is_beyond), None)
    told = f"rounding explains what {names[1]} adds to {names[0]} in every layer"
    if first is not None:
        told = (
            f"{first.name} ({first.kind}) is the first layer beyond rounding: it adds {first.own:.1e}, one rounding of "
            f"inputs, weights and output explains {first.explained:.1e}"
        )
    return "\n".join([*lines, told])


def draw(rows: list[Row], names: tuple[str, str], path: str | Path) -> None:
    """Errors by layer as a picture. ConfigError: matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ConfigError("--picture needs matplotlib: pip install 'amp-recipes[data]'") from missing
    figure = Figure(figsize=(max(6.0, 0.22 * len(rows) + 2), 4.8), layout="constrained")
    axes = figure.subplots()
    for what, style in (("activations", "o-"), ("gradients", "s-"), ("own", "^"), ("explained", "_")):
        axes.plot([getattr(row, what) or torch.nan for row in rows], style, markersize=4, linewidth=1, label=what)
    for number, row in enumerate(rows):
        if row.is_beyond:
            axes.axvspan(number - 0.5, number + 0.5, color="#c1121f", alpha=0.15, linewidth=0)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), [row.name for row in rows], rotation=90, fontsize=7)
    axes.set_ylabel("relative error")
    axes.set_title(f"{names[1]} against {names[0]}, layer by layer", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
