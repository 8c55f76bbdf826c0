"""A forecast as a picture."""

from __future__ import annotations

import math
from pathlib import Path

from amp_core.config.errors import ConfigError
from amp_core.doctor.statistics import KINDS
from amp_tools.forecast import Forecast, label

_RED, _BLUE = "#c1121f", "#457b9d"
_PICTURE = (-70, 40)
"""Exponents at most; what lies beyond is drawn at the edge."""


def draw(told: Forecast, path: str | Path) -> None:
    """A heat map: for each kind of numbers a panel, layers from top to bottom, exponents from left to right."""
    try:
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ConfigError("--picture needs matplotlib: pip install 'amp-recipes[data]'") from missing
    import numpy

    known = {row.module for row in told.rows}
    modules: list[str | None] = [name for name in told.order if name in known]
    modules += [None] if None in known else []
    exponents = [e for row in told.rows for e in row.numbers.exponents]
    low, high = max(min([*exponents, -26]) - 1, _PICTURE[0]), min(max([*exponents, 16]) + 1, _PICTURE[1])
    size = 8.0 if len(modules) <= 60 else 6.5
    figure = Figure(figsize=(15, 2.2 + len(modules) * size * 1.45 / 72), layout="constrained")
    panels = figure.subplots(1, len(KINDS), sharey=True)
    shift = math.log2(told.init_scale)
    for panel, kind in zip(panels, KINDS, strict=True):
        image = numpy.full((len(modules), high - low + 1), numpy.nan)
        for row in told.rows:
            for e, share in row.numbers.exponents.items() if row.kind == kind else ():
                image[modules.index(row.module), min(max(e, low), high) - low] = share
        for i in range(0, len(modules), 2):
            panel.axhspan(i - 0.5, i + 0.5, color="0.965", zorder=0, linewidth=0)
        edges = numpy.arange(low, high + 2), numpy.arange(len(modules) + 1) - 0.5
        mesh = panel.pcolormesh(*edges, image, cmap="YlGnBu", norm=LogNorm(1e-4, 1.0), zorder=1)
        # A loss scale moves gradients to the right, which is drawn as limits moved to the left.
        shifts = {shift: "-", 0.0: ":"} if kind.endswith("gradients") and shift else {0.0: "-"}
        for by, style in shifts.items():
            for limit in (-24 - by, 16 - by):
                panel.axvline(limit, color=_RED, linewidth=1.3, linestyle=style, zorder=2)
        by = next(iter(shifts))
        panel.axvspan(low, max(-24 - by, low), color=_BLUE, alpha=0.10, zorder=0.5, linewidth=0)
        panel.axvspan(min(16 - by, high + 1), high + 1, color=_RED, alpha=0.10, zorder=0.5, linewidth=0)
        panel.set_xlim(low, high + 1)
        panel.set_xlabel("exponent", fontsize=9)
        limits = f"—  fp16 at loss scale {told.init_scale:.0f},  ···  at 1" if by else "—  fp16's limits"
        panel.set_title(f"{kind.replace('_', ' ')}\n({limits})", fontsize=10)
        panel.tick_params(labelsize=8, length=2)
        panel.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    first = panels[0]
    first.set_ylim(len(modules) - 0.5, -0.5)
    classes = {row.module: row.module_class for row in told.rows if row.module_class}
    first.set_yticks(range(len(modules)), [label(name, classes.get(name, "")) for name in modules], fontsize=size)
    for text, name in zip(first.get_yticklabels(), modules, strict=True):
        if name in told.islands:
            text.set(color=_RED, fontweight="bold")
    bar = figure.colorbar(
        mesh, ax=list(panels), fraction=0.015, pad=0.01, aspect=30, shrink=min(1.0, 30 / len(modules))
    )
    bar.set_label("share of the layer's numbers that are not 0", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    note = f", bold: to be kept in fp32 ({len(told.islands)})" if told.islands else ""
    steps = f"steps {told.windows[0]} to {told.windows[-1]}" if len(told.windows) > 1 else f"step {told.windows[0]}"
    figure.suptitle(f"16-bit numbers by layer and exponent, {steps} in bf16{note}", fontsize=11)
    figure.savefig(path, dpi=130)
