"""The pictures of a report: what each shows, by section."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from amp_tools.report.charts import COLOURS, Line, LinePanel, Panel, Row, RowPanel, band_of
from amp_tools.report.folders import Curves, Headroom, read_curves, read_headroom
from amp_tools.report.groups import Group, Section
from amp_tools.report.words import digits_for, metric_words, signed, speed_words, spread

MOST_GROUPS = len(COLOURS)
"""In a picture."""
MOST_LINES = 200_000
"""Lines of metrics.jsonl, in all runs together."""


def drawn_groups(section: Section) -> list[Group]:
    """The reference and the best; all of them where they are few."""
    sign = -1 if section.better == "min" else 1
    ranked = sorted(
        section.groups,
        key=lambda g: (g is section.reference, sign * statistics.fmean(g.values.values()) if g.values else -1e300),
        reverse=True,
    )[:MOST_GROUPS]
    return [group for group in section.groups if any(group is one for one in ranked)]


def panels_of(section: Section, colours: dict[str, int], num_runs: int) -> list[tuple[str, list[Panel]]]:
    """The pictures of a section under their headings; those without content are left out."""
    groups = drawn_groups(section)
    most = min(2000, max(40, MOST_LINES // max(num_runs, 1)))
    few = min(40, max(4, 8000 // max(num_runs, 1)))
    keys = {section.metric, "loss", "loss_scale", "skipped", "samples_per_second"}
    curves = {id(run): read_curves(run, keys, most) for group in groups for run in group.runs}
    rooms = {id(run): read_headroom(run, few) for group in groups for run in group.runs}
    metric = section.metric

    def lines(split: Literal["train", "eval"], key: str, bins: int = 120) -> list[Line]:
        return _lines(groups, colours, {run: getattr(found, split).get(key, []) for run, found in curves.items()}, bins)

    results = _result_panels(section, groups, colours)
    bands = "line: mean, band: lowest to highest seed"
    course: list[Panel] = [
        LinePanel(capitalised(f"{metric} in evaluation"), bands, lines("eval", metric), name="metric"),
        LinePanel("Training loss", bands, lines("train", "loss"), name="loss"),
    ]
    if metric != "loss":
        course.append(LinePanel("Loss in evaluation", bands, lines("eval", "loss"), name="eval_loss"))
    for panel in course:
        _choose_scale(panel)
    course[1:1] = _gap_panel(section, groups, colours, curves)
    precision: list[Panel] = []
    scaling = [g for g in groups if any(_moves(curves[id(run)]) for run in g.runs)]
    if scaling:
        scales = {run: found.train.get("loss_scale", []) for run, found in curves.items()}
        note = "what the loss is multiplied with before the backward pass; it halves when a step overflows"
        precision.append(
            LinePanel("Loss scale", note, _lines(scaling, colours, scales, 2000), "log2", name="loss_scale")
        )
    skipped = lines("train", "skipped", 2000)
    if any(y > 0 for line in skipped for _, y in line.points + line.band):
        note = "steps whose gradients were not finite, counted from the start"
        precision.append(LinePanel("Skipped steps", note, skipped, from_zero=True, is_count=True, name="skipped"))
    precision += _room_panels(groups, colours, rooms)
    speed: list[Panel] = [
        LinePanel(
            "Throughput",
            "samples per second, from 0",
            lines("train", "samples_per_second", 40),
            from_zero=True,
            name="speed",
        )
    ]
    speed += _memory_panel(groups, colours)
    found = [("The result", results), ("On the way", course), ("Close to the limits of 16 bits", precision)]
    found.append(("Cost", speed))
    kept = [
        (name, [p for p in panels if (p.rows if isinstance(p, RowPanel) else _has_points(p))]) for name, panels in found
    ]
    return [(name, panels) for name, panels in kept if panels]


def _has_points(panel: LinePanel) -> bool:
    return any(line.points for line in panel.lines)


def _moves(curves: Curves) -> bool:
    return any(scale != 1.0 for _, scale in curves.train.get("loss_scale", []))


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _choose_scale(panel: Panel) -> None:
    if isinstance(panel, LinePanel) and "loss" in panel.name:
        values = [y for line in panel.lines if line.end != "cross" for _, y in line.points]
        if values and min(values) > 0 and max(values) / min(values) > 8:
            panel.scale = "log"
            panel.note += "; log scale"


def _lines(groups: Sequence[Group], colours: dict[str, int], points: dict[int, Any], bins: int) -> list[Line]:
    """A curve for the finished runs of each group, and one for each other run."""
    found = []
    for group in groups:
        colour = colours[group.label]
        series = [points[id(run)] for run in group.finished if points.get(id(run))]
        others = [run for run in group.runs if run.status != "finished" and points.get(id(run))]
        if series:
            means, band = band_of(series, bins)
            found.append(Line(group.label, colour, means, band))
        for run in others[:10]:
            course, _ = band_of([points[id(run)]], bins)
            end = "open" if run.status in ("running", "preempted") else "cross"
            text = f"{group.label}, seed {run.config.get('seed')}: {run.status}"
            found.append(Line(text, colour, course, end=end))
    return found


def _gap_panel(
    section: Section, groups: Sequence[Group], colours: dict[str, int], curves: dict[int, Curves]
) -> list[Panel]:
    """The metric minus the reference's with the same seed: what is left to see where curves lie upon each other."""
    base = section.reference
    if base is None:
        return []
    of_base = {run.config.get("seed"): dict(curves[id(run)].eval.get(section.metric, [])) for run in base.finished}
    lines = []
    for group in groups:
        pairs = []
        for run in group.finished if group is not base else ():
            other = of_base.get(run.config.get("seed"), {})
            points = curves[id(run)].eval.get(section.metric, [])
            pairs.append([(step, value - other[step]) for step, value in points if step in other])
        pairs = [points for points in pairs if points]
        if pairs:
            lines.append(Line(group.label, colours[group.label], *band_of(pairs)))
    note = f"minus {base.label} with the same seed; line: mean, band: lowest to highest seed"
    return [LinePanel(f"{capitalised(section.metric)}, difference to {base.label}", note, lines, zero=True, name="gap")]


def _result_panels(section: Section, groups: Sequence[Group], colours: dict[str, int]) -> list[Panel]:
    found: list[Panel] = []
    base, metric = section.reference, section.metric
    side = {"max": "right is better", "min": "left is better", None: ""}[section.better]
    if base is not None and section.differences:
        rows = []
        for group in groups:
            c = section.differences.get(group.label)
            if c is not None:
                half = abs(c.high - c.low) / 2 if c.low is not None and c.high is not None else abs(c.difference)
                text = f"{signed(c.difference, digits_for(half))}  {c.kind}"
                facts = metric_words(c, metric)[1]
                rows.append(Row(group.label, colours[group.label], c.difference, text, c.low, c.high, more=facts))
        margin = next(iter(section.differences.values())).margin
        note = f"mean difference and 95 % interval; {side}" if side else "mean difference and 95 % interval"
        if margin:
            note += f"; inside the shaded band (±{margin:.{digits_for(margin)}f}) it counts as equal"
        found.append(RowPanel(f"Difference in {metric} to {base.label}", note, rows, 0.0, margin, name="difference"))
    if base is not None and section.ratios:
        rows = []
        for group in groups:
            c = section.ratios.get(group.label)
            if c is not None:
                low, high = (None if v is None else math.exp(v) for v in (c.low, c.high))
                ratio = math.exp(c.difference)
                about = ratio, f"{ratio:.2f}×", low, high
                rows.append(Row(group.label, colours[group.label], *about, more=": ".join(speed_words(c))))
        note = "samples per second, as a ratio with its 95 % interval; right is faster"
        found.append(RowPanel(f"Speed, in times of {base.label}", note, rows, 1.0, name="speed_ratio"))
    rows = []
    for group in groups:
        if group.values:
            values = list(group.values.values())
            text = f"{spread(values)}  n = {len(values)}"
            each = ", ".join(f"seed {seed}: {value:.4f}" for seed, value in list(group.values.items())[:40])
            about = statistics.fmean(values), text
            rows.append(Row(group.label, colours[group.label], *about, points=values, more=each))
    found.append(
        RowPanel(
            f"{capitalised(metric)} of every seed",
            "a dot for each seed, a bar at their mean; mean ± standard deviation",
            rows,
            name="seeds",
        )
    )
    return found


def _room_panels(groups: Sequence[Group], colours: dict[str, int], rooms: dict[int, Headroom]) -> list[Panel]:
    found: list[Panel] = []
    titles = {
        "activations": (
            "Headroom of activations",
            "how many times the largest could still double before fp16 overflows",
        ),
        "activation_gradients": (
            "Headroom of gradients",
            "the same in the backward pass, with the run's own loss scale",
        ),
    }
    for kind, (title, note) in titles.items():
        points = {run: room.points.get(kind, []) for run, room in rooms.items()}
        lines = _lines(groups, colours, points, 120)
        owners = [(group.label, rooms[id(run)].tightest) for group in groups for run in group.runs]
        least = [(*tightest[kind], label) for label, tightest in owners if kind in tightest]
        if least:
            room, layer, step, label = min(least)
            note += f"; tightest: {label}, layer {layer or 'the network itself'} at step {step}, " + (
                "beyond the limit" if room < 0 else f"{room:.1f} doublings"
            )
        found.append(LinePanel(title, note, lines, floor=(0.0, "fp16 overflows"), name=f"headroom_{kind}"))
    return found


def _memory_panel(groups: Sequence[Group], colours: dict[str, int]) -> list[Panel]:
    rows = []
    for group in groups:
        if group.memory:
            rows.append(Row(group.label, colours[group.label], group.memory, f"{group.memory / 2**20:,.0f} MiB"))
    on_cpu = any(run.summary.get("device") == "cpu" for group in groups for run in group.finished)
    note = "the largest of its runs"
    if on_cpu:
        note += "; on a CPU that of the whole process, jobs of a sweep before it included: no measure of the mode"
    return [RowPanel("Peak memory", note, rows, bars=True, name="memory")]
