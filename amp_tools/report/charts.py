"""The pictures of a report: lines over steps, and rows of numbers; as SVG that follows the page's colours, and as PNG.

A panel says what is to be seen; `svg(panel)` and `save_png(panels, folder)` draw the same one. SVG is written by hand:
its colours are the page's (light and dark), its text stays text, and it needs no library. PNG needs matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from amp_core.config.errors import ConfigError
from amp_tools.report.folders import Points

WIDTH = 400
_ROW = 34
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
COLOURS = ("#3d4451", "#0072b2", "#d55e00", "#009e73", "#a0408f", "#8a6d00", "#2f7fc1", "#a33b3b")
"""Of groups on white, the reference first; told apart with every kind of colour vision. The page has them for black."""


@dataclass
class Line:
    """One curve."""

    label: str
    colour: int
    points: list[tuple[float, float]]
    band: list[tuple[float, float]] = field(default_factory=list)
    """Lowest and highest seed, at the points."""
    end: Literal["", "cross", "open"] = ""
    """A mark where it ends before its time; a curve with one is dashed and has no label of its own."""


@dataclass
class LinePanel:
    """Curves over steps."""

    title: str
    note: str
    lines: list[Line]
    scale: Literal["linear", "log", "log2"] = "linear"
    from_zero: bool = False
    is_count: bool = False
    zero: bool = False
    """With a line at 0, where no difference stands."""
    floor: tuple[float, str] | None = None
    """Below this number lies what the text says."""
    name: str = ""


@dataclass
class Row:
    """One number of a group."""

    label: str
    colour: int
    value: float
    text: str
    low: float | None = None
    high: float | None = None
    points: list[float] = field(default_factory=list)
    """Single runs."""


@dataclass
class RowPanel:
    """A number of each group, one below the other."""

    title: str
    note: str
    rows: list[Row]
    origin: float | None = None
    """Where no difference stands."""
    margin: float | None = None
    """Around the origin."""
    bars: bool = False
    """From 0 to the value."""
    name: str = ""


Panel = LinePanel | RowPanel


# --- numbers ----------------------------------------------------------------------------------------------------------


def band_of(series: Sequence[Points], bins: int = 120) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The mean curve of several, and its lowest and highest, where all of them have a value.

    Args:
        series: (step, value) of each.
        bins: more steps than this are put together, and averaged within each curve first.
    """
    steps = sorted({step for points in series for step, _ in points})
    if not steps:
        return [], []
    width = max(1.0, (steps[-1] - steps[0] + 1) / bins) if len(steps) > bins else 0.0
    tables = []
    for points in series:
        table: dict[float, list[float]] = {}
        for step, value in points:
            table.setdefault((step - steps[0]) // width if width else step, []).append(value)
        tables.append({place: math.fsum(values) / len(values) for place, values in table.items()})
    places = sorted(set.intersection(*map(set, tables))) if tables else []
    columns = [[table[place] for table in tables] for place in places]
    xs = [steps[0] + (place + 0.5) * width if width else place for place in places]
    means = [(x, math.fsum(column) / len(column)) for x, column in zip(xs, columns, strict=True)]
    return means, [(min(column), max(column)) for column in columns] if len(series) > 1 else []


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`: steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Such as 12k, 0.25, 3M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}".replace("-", "−")
    return f"{value:,.4g}".replace("-", "−") if abs(value) < 1000 else f"{value:,.0f}".replace("-", "−")


@dataclass
class _Axis:
    """From numbers to places along a line."""

    low: float
    high: float
    kind: str
    ticks: list[float]

    def at(self, value: float) -> float:
        low, high, value = (self.of(v) for v in (self.low, self.high, value))
        return (value - low) / (high - low) if high > low else 0.5

    def of(self, value: float) -> float:
        return value if self.kind == "linear" else math.log(max(value, 1e-300))

    def text(self, value: float) -> str:
        if self.kind == "log2":
            return f"2{str(round(math.log2(value))).translate(_SUPERSCRIPT)}"
        return short(value)


def axis_of(panel: LinePanel) -> _Axis:
    """The vertical axis; curves that ended badly may leave it, the others not."""
    is_bounded = panel.from_zero or panel.scale == "log2"
    kept = [line for line in panel.lines if is_bounded or line.end != "cross"] or panel.lines
    values = [y for line in kept for _, y in line.points] + [y for line in kept for pair in line.band for y in pair]
    kind = panel.scale
    if kind != "linear" and (not values or min(values) <= 0):
        kind = "linear"
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if panel.zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if panel.floor is not None:
        low, high = min(low, panel.floor[0] - 0.5), max(high, panel.floor[0] + 1)
    if kind == "log2":
        first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
        first, last = (first - 1, last + 1) if first == last else (first, last)
        return _Axis(
            2.0**first, 2.0**last, kind, [2.0**i for i in range(first, last + 1, max(1, (last - first + 3) // 4))]
        )
    if kind == "log":
        low, high = low / 1.05, high * 1.05
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if len(decades) <= 3 else (1,)
        marks = [
            f * 10.0**d for d in decades[:: max(1, len(decades) // 5)] for f in factors if low <= f * 10.0**d <= high
        ]
        return _Axis(low, high, kind, marks if len(marks) > 1 else ticks(low, high))
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = 0.0 if panel.from_zero and low >= 0 else low - room, high + room
    marks = ticks(low, high)
    if panel.is_count:
        marks = [tick for tick in marks if tick == round(tick)]
    return _Axis(low, high, "linear", marks)


def _range_of(panel: RowPanel) -> tuple[float, float]:
    values = [v for row in panel.rows for v in (row.value, row.low, row.high, *row.points) if v is not None]
    values += [panel.origin] if panel.origin is not None else []
    values += [0.0] if panel.bars else []
    if panel.margin is not None and panel.origin is not None:
        values += [panel.origin - panel.margin, panel.origin + panel.margin]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if panel.bars else low - room), high + room


# --- SVG --------------------------------------------------------------------------------------------------------------


def svg(panel: Panel) -> str:
    """The picture as an element for a page that defines the classes in `STYLE`."""
    return _line_svg(panel) if isinstance(panel, LinePanel) else _row_svg(panel)


def _open(height: float, panel: Panel) -> str:
    label = escape(f"{panel.title}. {panel.note}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{label}">'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _cut(text: str, most: int) -> str:
    """Shortened in the middle: labels begin with the mode and end with what tells them apart."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[most // 2 + 1 - most :]}"


def _line_svg(panel: LinePanel) -> str:
    height, top, bottom, left = 236.0, 10.0, 24.0, 40.0
    labelled = [line for line in panel.lines if not line.end and line.points]
    right = max([40.0, *(12.0 + 7.0 * min(len(line.label), 17) for line in labelled)])
    wide, high = WIDTH - left - right, height - top - bottom
    axis = axis_of(panel)
    steps = [x for line in panel.lines for x, _ in line.points] or [0.0, 1.0]
    first, last = min(0.0, *steps), max(steps)
    across = _Axis(first, last if last > first else first + 1, "linear", ticks(first, last, 4))

    def place(x: float, y: float) -> tuple[float, float]:
        return across.at(x) * wide, (1 - axis.at(y)) * high

    parts = [_open(height, panel)]
    if panel.floor is not None:
        at = top + place(0, panel.floor[0])[1]
        parts.append(
            f'<rect x="{left}" y="{at:.1f}" width="{wide:.1f}" height="{top + high - at:.1f}" class="danger"/>'
        )
        parts.append(_text(left + 4, min(at + 12, top + high - 3), panel.floor[1], "warn"))
    for tick in axis.ticks:
        at = top + place(0, tick)[1]
        parts.append(f'<path d="M{left} {at:.1f}h{wide:.1f}" class="grid"/>')
        parts.append(_text(left - 6, at + 4, axis.text(tick), "tick", "end"))
    if panel.zero:
        parts.append(f'<path d="M{left} {top + place(0, 0)[1]:.1f}h{wide:.1f}" class="axis"/>')
    for tick in across.ticks:
        parts.append(_text(left + place(tick, axis.low)[0], height - 6, short(tick), "tick", "middle"))
    parts.append(_text(left + wide + 14, height - 6, "step", "tick"))
    # An inner svg cuts off what leaves the axes.
    parts.append(
        f'<svg x="{left}" y="{top - 4}" width="{wide + 5:.1f}" height="{high + 8:.1f}"><g transform="translate(0 4)">'
    )
    # The reference lies below, broad and pale: a curve upon it is seen, and so is it.
    for line in sorted(panel.lines, key=lambda line: (line.end == "", line.colour)):
        parts.append(f'<g class="c{line.colour}">')
        places = [place(*point) for point in line.points]
        if line.band:
            xs = [x for x, _ in places]
            edge = [(x, place(0, high)[1]) for x, (_, high) in zip(xs, line.band, strict=True)]
            edge += [(x, place(0, low)[1]) for x, (low, _) in reversed(list(zip(xs, line.band, strict=True)))]
            parts.append(f'<path d="{_path(edge)}Z" class="band"/>')
        if len(places) > 1:
            parts.append(f'<path d="{_path(places)}" class="{"line dashed" if line.end else "line"}"/>')
        if places and (len(places) == 1 or line.end == "open"):
            parts.append('<circle cx="{:.1f}" cy="{:.1f}" r="3.5" class="open"/>'.format(*places[-1]))
        if places and line.end == "cross":
            x, y = places[-1][0], min(max(places[-1][1], 4.0), high - 4)
            parts.append(f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" class="line"/>')
        parts.append(f"<title>{escape(line.label)}</title></g>")
    parts.append("</g></svg>")
    wanted = [place(*line.points[-1])[1] + top for line in labelled]
    for line, want, at in zip(labelled, wanted, _apart(wanted, 14.0, top + 2, top + high - 2), strict=True):
        x = left + wide
        parts.append(f'<g class="c{line.colour}">')
        if abs(at - want) > 2:
            parts.append(f'<path d="M{x + 1:.1f} {want:.1f}L{x + 6:.1f} {at:.1f}" class="leader"/>')
        parts.append(_text(x + 8, at + 4, _cut(line.label, 17), "name") + "</g>")
    return "".join([*parts, "</svg>"])


def _path(places: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those wanted, and `gap` apart, in the same order."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [0.0] * len(wanted)
    before = low - gap
    for i in order:
        places[i] = before = max(wanted[i], before + gap)
    after = high + gap
    for i in reversed(order):
        places[i] = after = min(places[i], after - gap)
    return places


def _row_svg(panel: RowPanel) -> str:
    height = _ROW * len(panel.rows) + (8.0 if panel.bars else 28.0)
    left, right = 8.0, 8.0
    wide = WIDTH - left - right
    low, high = _range_of(panel)

    def place(value: float) -> float:
        return left + (value - low) / (high - low) * wide

    foot = height - 22
    parts = [_open(height, panel)]
    if panel.origin is not None and panel.margin is not None:
        a, b = place(panel.origin - panel.margin), place(panel.origin + panel.margin)
        parts.append(f'<rect x="{a:.1f}" y="0" width="{b - a:.1f}" height="{foot:.1f}" class="equal"/>')
    if not panel.bars:
        marks = ticks(low, high, 4)
        for tick in marks:
            parts.append(f'<path d="M{place(tick):.1f} 0V{foot:.1f}" class="grid"/>')
            at = min(max(place(tick), 16), WIDTH - 16)
            text = short(0.0 if abs(tick) < (high - low) * 1e-9 else tick)
            parts.append(_text(at, height - 6, text, "tick", "middle"))
    if panel.origin is not None:
        parts.append(f'<path d="M{place(panel.origin):.1f} 0V{foot:.1f}" class="axis"/>')
    for i, row in enumerate(panel.rows):
        y = _ROW * i + 24.0
        parts.append(f'<g class="c{row.colour}">' + _text(left, y - 10, _cut(row.label, 34), "name"))
        parts.append(_text(WIDTH - right, y - 10, row.text, "number", "end"))
        if panel.bars:
            length = max(place(row.value) - left, 1)
            parts.append(f'<rect x="{left}" y="{y - 4:.1f}" width="{length:.1f}" height="9" class="bar"/>')
        else:
            for point in row.points:
                parts.append(f'<circle cx="{place(point):.1f}" cy="{y:.1f}" r="4" class="run"/>')
            if row.low is not None and row.high is not None:
                parts.append(f'<path d="M{place(row.low):.1f} {y:.1f}H{place(row.high):.1f}" class="interval"/>')
            if row.points:
                parts.append(f'<path d="M{place(row.value):.1f} {y - 7:.1f}v14" class="interval"/>')
            else:
                parts.append(f'<circle cx="{place(row.value):.1f}" cy="{y:.1f}" r="5" class="dot"/>')
        parts.append(f"<title>{escape(row.label)}: {escape(row.text)}</title></g>")
    return "".join([*parts, "</svg>"])


STYLE = """
svg { display: block; width: 100%; height: auto; overflow: visible; font: 12px var(--sans);
  font-variant-numeric: tabular-nums }
svg svg { overflow: hidden }
svg text { fill: var(--ink) }
svg .tick { fill: var(--quiet); font-size: 11px }
svg .name { fill: var(--k); font-weight: 600 }
svg .number { fill: var(--ink) }
svg .warn { fill: var(--bad); font-size: 11px }
svg .grid { stroke: var(--grid); stroke-width: 1; fill: none }
svg .axis { stroke: var(--ink); stroke-width: 1; fill: none }
svg .line { stroke: var(--k); stroke-width: 2; fill: none; stroke-linejoin: round; stroke-linecap: round }
svg .c0 .line:not(.dashed) { stroke-width: 4.5; opacity: .45 }
svg .dashed { stroke-width: 1.3; stroke-dasharray: 3 3 }
svg .band { fill: var(--k); opacity: .16; stroke: none }
svg .leader { stroke: var(--k); stroke-width: 1; opacity: .6; fill: none }
svg .open { fill: var(--paper); stroke: var(--k); stroke-width: 1.6 }
svg .run { fill: var(--k); opacity: .45 }
svg .dot { fill: var(--k); stroke: var(--paper); stroke-width: 1.5 }
svg .interval { stroke: var(--k); stroke-width: 2.4; fill: none; stroke-linecap: round }
svg .bar { fill: var(--k) }
svg .equal { fill: var(--equal) }
svg .danger { fill: var(--danger) }
"""


# --- PNG --------------------------------------------------------------------------------------------------------------


def save_png(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Each panel as a PNG, named after it.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise ConfigError("--png needs the package matplotlib: pip install 'amp-recipes[data]'") from problem
    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
    }
    style |= {"axes.grid": True, "axes.grid.axis": "y", "grid.color": "#e4e6ea", "text.parse_math": False}
    paths = []
    with mpl.rc_context(style):
        for number, panel in enumerate(panels, 1):
            is_lines = isinstance(panel, LinePanel)
            tall = 3.0 if is_lines else 1.0 + 0.34 * len(panel.rows)
            figure = Figure(figsize=(5.2, tall), dpi=200, layout="constrained")
            axes = figure.subplots()
            (_line_png if is_lines else _row_png)(panel, axes)
            axes.set_title(panel.title, loc="left", fontweight="bold")
            path = folder / f"{number:02d}_{panel.name}.png"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(path)
            except OSError as problem:
                raise ConfigError(f"--png {folder}: cannot be written: {problem.strerror or problem}") from problem
            paths.append(path)
    return paths


def _line_png(panel: Any, axes: Any) -> None:
    axis = axis_of(panel)
    if axis.kind != "linear":
        axes.set_yscale("log", base=2 if axis.kind == "log2" else 10)
    axes.set_ylim(axis.low, axis.high)
    axes.set_yticks(axis.ticks, [axis.text(tick) for tick in axis.ticks])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("step")
    if panel.floor is not None:
        axes.axhspan(axis.low, panel.floor[0], color="#fbe3e0", zorder=0)
    labelled = [line for line in panel.lines if not line.end and line.points]
    for line in panel.lines:
        if not line.points:
            continue
        xs, ys = zip(*line.points, strict=True)
        axes.plot(
            xs, ys, color=COLOURS[line.colour], linewidth=1 if line.end else 1.6, linestyle="--" if line.end else "-"
        )
        if line.band:
            axes.fill_between(xs, *zip(*line.band, strict=True), color=COLOURS[line.colour], alpha=0.16, linewidth=0)
        if line.end:
            axes.plot(xs[-1], ys[-1], "x" if line.end == "cross" else "o", color=COLOURS[line.colour], fillstyle="none")
    heights = [axis.at(line.points[-1][1]) for line in labelled]
    for line, at in zip(labelled, _apart(heights, 0.07, 0, 1), strict=True):
        place = {"xycoords": "axes fraction", "color": COLOURS[line.colour], "va": "center", "annotation_clip": False}
        axes.annotate(_cut(line.label, 24), (1.01, at), **place)


def _row_png(panel: Any, axes: Any) -> None:
    axes.grid(axis="y", visible=False)
    axes.set_xlim(*_range_of(panel))
    axes.set_ylim(len(panel.rows) - 0.5, -0.7)
    axes.xaxis.set_visible(not panel.bars)
    axes.set_yticks(range(len(panel.rows)), [_cut(row.label, 24) for row in panel.rows])
    if panel.margin is not None and panel.origin is not None:
        axes.axvspan(panel.origin - panel.margin, panel.origin + panel.margin, color="#e7f1ea", zorder=0)
    if panel.origin is not None:
        axes.axvline(panel.origin, color="#3d4451", linewidth=0.8)
    for y, row in enumerate(panel.rows):
        colour = COLOURS[row.colour]
        if panel.bars:
            axes.barh(y, row.value, height=0.35, color=colour)
        elif row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [y, y], color=colour, linewidth=1.8)
        axes.plot(row.points, [y] * len(row.points), "o", color=colour, alpha=0.45, markersize=5)
        if not panel.bars:
            axes.plot(row.value, y, "|" if row.points else "o", color=colour, markersize=11 if row.points else 6)
        axes.annotate(row.text, (1, y - 0.32), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=8)
