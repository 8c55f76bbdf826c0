"""The pictures of a report: lines over steps, and rows of numbers; as SVG in the page's colours, and as PNG.

A panel says what is to be seen, and matplotlib draws it once for both. In the SVG text stays text, each colour becomes
a variable of the page, which has its own for a dark background, and a pointer finds the numbers of a step or a row.
"""

from __future__ import annotations

import bisect
import io
import itertools
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from amp_core.config.errors import ConfigError
from amp_core.config.files import visible
from amp_tools.report.folders import Points

WIDTH = 400
_ROW, _MARK, _REACH = 42, 28, 8
"""Height of a row, and where in it lie its marks: from _MARK - _REACH to _MARK + _REACH, below the label."""
_LEFT, _TOP, _BELOW = 48.0, 10.0, 24.0
_MOST_STRIPS = 60
"""Places of a picture of lines that have a text for the pointer."""
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
COLOURS = ("#3d4451", "#0072b2", "#d55e00", "#009e73", "#a0408f", "#8a6d00", "#2f7fc1", "#a33b3b")
"""The groups' colours on white, the reference first; distinguishable with any colour vision."""
DARK = ("#d5d9e0", "#5ab4f0", "#ff8f4d", "#2fcf9f", "#e495d2", "#e2bf4e", "#8cb8ff", "#ff8a8a")
"""The same on black."""
INK, QUIET, GRID, PAPER = "#1d2129", "#636a76", "#e4e6ea", "#fdfdfb"
EQUAL, DANGER, BAD = "#dff0e5", "#fbe3e0", "#b3261e"
VARIABLES = {colour: f"c{i}" for i, colour in enumerate(COLOURS)}
VARIABLES |= {INK: "ink", QUIET: "quiet", GRID: "grid", PAPER: "paper", EQUAL: "equal", DANGER: "danger", BAD: "bad"}
"""Each colour of a picture, and the variable of the page that takes its place."""


@dataclass
class Line:
    """One curve."""

    label: str
    colour: int
    points: list[tuple[float, float]]
    band: list[tuple[float, float]] = field(default_factory=list)
    """Lowest and highest seed, at the points."""
    end: Literal["", "cross", "open"] = ""
    """A mark where it ends early; such a curve is dashed and has no label."""


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
    more: str = ""
    """Shown with the pointer upon the row, besides `text`."""


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

    More steps than `bins` are put together, and averaged within each curve first.
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


def short(value: float, digits: int = 4) -> str:
    """Such as 12k, 0.25, 3M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.{digits}g}{unit}".replace("-", "−")
    is_whole = abs(value) >= 1000 and digits == 4
    return (f"{value:,.0f}" if is_whole else f"{value:,.{digits}g}").replace("-", "−")


def tick_labels(ticks: Sequence[float], kind: str) -> list[str]:
    """A label for each tick, no two alike: with as many digits as that takes."""
    if kind == "log2":
        return [f"2{str(round(math.log2(tick))).translate(_SUPERSCRIPT)}" for tick in ticks]
    step = max(map(abs, ticks), default=0.0) * 1e-9  # a locator's 0 may be 1e-17
    ticks = [0.0 if abs(tick) < step else tick for tick in ticks]
    labels = ([short(tick, digits) for tick in ticks] for digits in range(4, 18))
    return next(found for found in labels if len(set(found)) == len(set(ticks)))


def _limits(panel: LinePanel) -> tuple[float, float, str]:
    """The lowest and highest number, and the scale; curves that ended badly may leave the picture, others not."""
    is_bounded = panel.from_zero or panel.scale == "log2"
    kept = [line for line in panel.lines if is_bounded or line.end != "cross"] or panel.lines
    values = [y for line in kept for _, y in line.points] + [y for line in kept for pair in line.band for y in pair]
    kind = panel.scale if values and min(values) > 0 else "linear"
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if panel.zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if panel.floor is not None:
        low, high = min(low, panel.floor[0] - 0.5), max(high, panel.floor[0] + 1)
    if kind == "log2":
        first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
        return (2.0 ** (first - (first == last)), 2.0 ** (last + (first == last)), kind)
    if kind == "log":
        return low / 1.05, high * 1.05, kind
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if panel.from_zero and low >= 0 else low - room), high + room, kind


def _range_of(panel: RowPanel) -> tuple[float, float]:
    values = [v for row in panel.rows for v in (row.value, row.low, row.high, *row.points) if v is not None]
    values += [panel.origin] if panel.origin is not None else []
    values += [0.0] if panel.bars else []
    if panel.margin is not None and panel.origin is not None:
        values += [panel.origin - panel.margin, panel.origin + panel.margin]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if panel.bars else low - room), high + room


# --- drawing ----------------------------------------------------------------------------------------------------------


@contextmanager
def _style(flag: str) -> Iterator[None]:
    try:
        import matplotlib as mpl
    except ImportError as missing:
        raise ConfigError(f"{flag} needs the package matplotlib: pip install 'amp-recipes[report]'") from missing
    spines = dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left", "axes.spines.bottom"), False)
    colours = {"grid.color": GRID, "xtick.labelcolor": QUIET, "ytick.labelcolor": QUIET, "text.color": INK}
    svg = {"svg.fonttype": "none", "svg.hashsalt": "amp", "text.parse_math": False}  # names of groups may hold a $
    sizes = {"font.size": 12, "xtick.labelsize": 11, "ytick.labelsize": 11, "xtick.bottom": False, "ytick.left": False}
    grid = {"axes.grid": True, "axes.axisbelow": True, "figure.facecolor": "none", "axes.facecolor": "none"}
    style: Any = {**spines, **colours, **svg, **sizes, **grid}
    with mpl.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing")  # a box is drawn for it
        yield


def _figure(panel: Panel, room: float = 0) -> tuple[Any, float]:
    """The picture, in points; `room` of them are left free at the top."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    is_lines = isinstance(panel, LinePanel)
    below = _BELOW if is_lines or not panel.bars else 8.0
    height = 236.0 if is_lines else _ROW * len(panel.rows) + below
    left, right = (_LEFT, _right(panel)) if is_lines else (8.0, 8.0)
    figure = Figure(figsize=(WIDTH / 72, (height + room) / 72), dpi=72)
    top = _TOP if is_lines else 0.0
    box = left, below, WIDTH - left - right, height - below - top
    axes = figure.add_axes(tuple(n / (height + room if i % 2 else WIDTH) for i, n in enumerate(box)))  # type: ignore[arg-type]
    if isinstance(panel, LinePanel):
        _draw_lines(panel, axes)
    else:
        _draw_rows(panel, axes)
    for text in figure.findobj(Text):
        text.set_text(visible(text.get_text()))
    return figure, height


def _cut(text: str, most: int) -> str:
    """Shortened in the middle: labels begin with the mode and end with what tells them apart."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[most // 2 + 1 - most :]}"


def _right(panel: LinePanel) -> float:
    """Room for the labels."""
    return max([40.0, *(12.0 + 7.0 * min(len(line.label), 17) for line in panel.lines if not line.end and line.points)])


def _draw_lines(panel: LinePanel, axes: Any) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high, kind = _limits(panel)
    if kind != "linear":
        axes.set_yscale("log", base=2 if kind == "log2" else 10)
        only_powers = kind == "log2" or math.log10(high / low) > 3
        locator: Any = LogLocator(2 if kind == "log2" else 10, (1.0,) if only_powers else (1, 2, 5), numticks=6)
    else:
        locator = MaxNLocator(5, integer=panel.is_count)
    _set_ticks(axes.yaxis, locator, low, high, kind)
    axes.yaxis.set_minor_locator(NullLocator())
    _set_ticks(axes.xaxis, MaxNLocator(4), *_steps_of(panel))
    axes.grid(axis="x", visible=False)
    axes.set_ylim(low, high)
    axes.set_xlim(*_steps_of(panel))
    axes.annotate("step", (1, 0), (14, -18), "axes fraction", "offset points", color=QUIET, fontsize=11)
    if panel.floor is not None:
        axes.axhspan(low, panel.floor[0], color=DANGER, zorder=0, linewidth=0)
        axes.annotate(
            panel.floor[1], (0.01, panel.floor[0]), (0, -12), ("axes fraction", "data"), "offset points", color=BAD
        )
    if panel.zero:
        axes.axhline(0, color=INK, linewidth=1)
    # The reference lies below, broad and pale: a curve upon it is seen, and so is it.
    for line in sorted(panel.lines, key=lambda line: (line.end == "", line.colour)):
        if not line.points:
            continue
        colour, (xs, ys) = COLOURS[line.colour], zip(*line.points, strict=True)
        if line.band:
            axes.fill_between(xs, *zip(*line.band, strict=True), color=colour, alpha=0.16, linewidth=0)
        width, alpha = (1.3, 1.0) if line.end else (4.5, 0.45) if line.colour == 0 else (2.0, 1.0)
        axes.plot(xs, ys, color=colour, linewidth=width, alpha=alpha, linestyle="--" if line.end else "-")
        if line.end == "cross":
            axes.plot(xs[-1], min(max(ys[-1], low), high), "x", color=colour, markersize=8, clip_on=False)
        elif line.end == "open" or len(xs) == 1:
            axes.plot(xs[-1], ys[-1], "o", color=colour, markersize=7, markerfacecolor=PAPER, clip_on=False)
    labelled = [line for line in panel.lines if not line.end and line.points]
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = [to_axes.transform(line.points[-1])[1] for line in labelled]
    for line, want, at in zip(labelled, wanted, _apart(wanted, 14 / 202, 0.0, 1.0), strict=True):
        place: dict[str, Any] = {"xycoords": "axes fraction", "va": "center", "color": COLOURS[line.colour]}
        if abs(at - want) > 2 / 202:
            place |= {"arrowprops": {"arrowstyle": "-", "color": COLOURS[line.colour], "alpha": 0.6, "shrinkA": 0}}
        wide = WIDTH - _LEFT - _right(panel)
        text = (wide + 8) / wide, at
        axes.annotate(_cut(line.label, 17), (1, want), text, fontweight="bold", annotation_clip=False, **place)


def _steps_of(panel: LinePanel) -> tuple[float, float]:
    """The first and the last step of the picture."""
    steps = [x for line in panel.lines for x, _ in line.points] or [0.0, 1.0]
    first = min(0.0, *steps)
    return first, max(steps) if max(steps) > first else 1.0


def _set_ticks(axis: Any, locator: Any, low: float, high: float, kind: str = "linear") -> None:
    ticks = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
    axis.set_ticks(ticks, tick_labels(ticks, kind))


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


def _draw_rows(panel: RowPanel, axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    low, high = _range_of(panel)
    _set_ticks(axes.xaxis, MaxNLocator(4), low, high)
    axes.set_xlim(low, high)
    axes.set_ylim(_ROW * len(panel.rows), 0)
    axes.yaxis.set_visible(False)
    axes.xaxis.set_visible(not panel.bars)
    if panel.margin is not None and panel.origin is not None:
        axes.axvspan(panel.origin - panel.margin, panel.origin + panel.margin, color=EQUAL, zorder=0, linewidth=0)
    for i, row in enumerate(panel.rows):
        colour, y = COLOURS[row.colour], _ROW * i + _MARK
        about: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "baseline"}
        room = int((WIDTH - 32 - 7 * len(row.text)) / 7.5)  # a bold letter is at most 7.5 points wide
        axes.annotate(_cut(row.label, min(34, room)), (0, y - 14), color=colour, fontweight="bold", **about)
        axes.annotate(row.text, (1, y - 14), ha="right", **about)
        if panel.bars:
            axes.barh(y, row.value, height=9, color=colour)
            continue
        if panel.origin is not None:  # beside the marks alone, or it would run through the labels
            axes.plot([panel.origin] * 2, [y - _REACH, y + _REACH], color=INK, linewidth=1, solid_capstyle="butt")
        axes.plot(row.points, [y] * len(row.points), "o", color=colour, alpha=0.45, markersize=8, markeredgewidth=0)
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [y, y], color=colour, linewidth=2.4, solid_capstyle="round")
        mark = {"marker": "|", "markersize": 2 * _REACH - 2, "markeredgewidth": 2.4} if row.points else {"marker": "o"}
        edge = colour if row.points else PAPER
        axes.plot(row.value, y, color=colour, **{"markersize": 9, "markeredgecolor": edge, **mark})


# --- what a pointer finds ---------------------------------------------------------------------------------------------


def _strips(panel: Panel, height: float) -> Iterator[tuple[float, float, float, float, str]]:
    """Places of a picture as x, y, width, height, and the numbers that are drawn there."""
    if isinstance(panel, RowPanel):
        for i, row in enumerate(panel.rows):
            yield 0.0, _ROW * i, WIDTH, _ROW, "\n".join(filter(None, [f"{row.label}: {row.text}", row.more]))
        return
    steps = sorted({x for line in panel.lines for x, _ in line.points})
    if not steps:
        return
    count = min(len(steps), _MOST_STRIPS)
    steps = [steps[(i + 1) * len(steps) // count - 1] for i in range(count)]
    first, last = _steps_of(panel)
    wide = (WIDTH - _LEFT - _right(panel)) / (last - first)
    edges = [first, *((a + b) / 2 for a, b in itertools.pairwise(steps)), last]
    before = -math.inf
    for step, (left, right) in zip(steps, itertools.pairwise(edges), strict=True):
        texts = [f"step {step:,.0f}"]
        for line in panel.lines:
            i = bisect.bisect_right(line.points, (step, math.inf)) - 1
            if i >= 0 and line.points[i][0] > before:  # the last one since the strip before
                value = f"{line.points[i][1]:.5g}"
                band = [f"{y:.5g}" for y in line.band[i]] if line.band else []
                texts.append(f"{line.label}  {value}" + (f"  [{band[0]}, {band[1]}]" if band else ""))
        before = step
        yield _LEFT + (left - first) * wide, _TOP, (right - left) * wide, height - _TOP - _BELOW, "\n".join(texts)


def svg(panel: Panel) -> str:
    """The picture as an element for a page that defines `VARIABLES`. ConfigError: matplotlib is not installed."""
    with _style("--out"):
        figure, height = _figure(panel)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = re.sub(r"\s+", " ", drawn.getvalue())
    text = text[text.index('<g id="figure_1">') : text.rindex("</svg>")]
    text = re.sub(r'<g id="[^"]*"(/?)>', r"<g\1>", text).replace("xlink:href", "href").replace("> <", "><")
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0]), text)
    text = re.sub(r' style="[^"]*"', lambda found: _in_page_colours(found[0]), text)
    label = escape(f"{panel.title}. {panel.note}", quote=True)
    hover = "".join(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"><title>{escape(words)}</title></rect>'
        for x, y, w, h, words in _strips(panel, height)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{label}">{text}'
        f'<g class="numbers">{hover}</g></svg>'
    )


def _in_page_colours(style: str) -> str:
    style = re.sub(r"font-family: [^;\"]*;? ?", "", style)
    return re.sub(
        r"#\w{6}\b", lambda found: f"var(--{VARIABLES[found[0]]})" if found[0] in VARIABLES else found[0], style
    )


def save_png(panels: Sequence[Panel], folder: Path) -> None:
    """Save each panel as a PNG, named after it. ConfigError: no matplotlib, or the folder cannot be written."""
    with _style("--png"):
        for number, panel in enumerate(panels, 1):
            figure, _ = _figure(panel, 24)
            figure.text(8 / WIDTH, 0.99, panel.title, va="top", fontweight="bold")
            try:
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(folder / f"{number:02d}_{panel.name}.png", dpi=200, facecolor="white")
            except OSError as problem:
                raise ConfigError(f"--png {folder}: cannot be written: {problem.strerror or problem}") from problem
