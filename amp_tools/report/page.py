"""A study as a page, as Markdown and as JSON.

The page is one file: pictures inline, no script, nothing loaded from anywhere, in the reader's choice of light or dark.
Names of folders and texts of errors come from outside, so everything is escaped, and a policy in the page forbids
scripts.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

from amp_core.config.redact import redact
from amp_tools.report.charts import COLOURS, STYLE, Line, LinePanel, Panel, Row, RowPanel, band_of, svg
from amp_tools.report.folders import Curves, Headroom, Run, plain, read_curves, read_headroom, read_reports, visible
from amp_tools.report.groups import Group, Section, Study, counted, digits_for, made_on, of_those, shown, signed, spread

MOST_SECTIONS = 12
"""With pictures; the table has all."""
MOST_GROUPS = len(COLOURS)
"""In a picture."""
MOST_LINES = 200_000
"""Of metrics.jsonl, in all runs together."""
_LONG = 2000
"""Rows of a table."""
_MANY = 20
"""Verdicts on the groups of a section, in text."""


# --- pictures ---------------------------------------------------------------------------------------------------------


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
    most = min(2000, max(200, MOST_LINES // max(num_runs, 1)))
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
        LinePanel(_title(f"{metric} in evaluation"), bands, lines("eval", metric), name="metric"),
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


def _title(text: str) -> str:
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
    return [LinePanel(f"{_title(section.metric)}, difference to {base.label}", note, lines, zero=True, name="gap")]


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
                rows.append(Row(group.label, colours[group.label], c.difference, text, c.low, c.high))
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
                rows.append(Row(group.label, colours[group.label], ratio, f"{ratio:.2f}×", low, high))
        note = "samples per second, as a ratio with its 95 % interval; right is faster"
        found.append(RowPanel(f"Speed, in times of {base.label}", note, rows, 1.0, name="speed_ratio"))
    rows = []
    for group in groups:
        if group.values:
            values = list(group.values.values())
            text = f"{spread(values)}  n = {len(values)}"
            rows.append(Row(group.label, colours[group.label], statistics.fmean(values), text, points=values))
    found.append(
        RowPanel(
            f"{_title(metric)} of every seed",
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


# --- the page ---------------------------------------------------------------------------------------------------------

_DARK = ("#d5d9e0", "#5ab4f0", "#ff8f4d", "#2fcf9f", "#e495d2", "#e2bf4e", "#8cb8ff", "#ff8a8a")


def _palette(colours: Sequence[str]) -> str:
    return " ".join(f"--c{i}: {colour};" for i, colour in enumerate(colours))


_CSS = (
    """
:root { color-scheme: light dark;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --serif: Charter, "Bitstream Charter", "Iowan Old Style", Georgia, "Times New Roman", serif;
  --paper: #fdfdfb; --ink: #1d2129; --quiet: #636a76; --grid: #e4e6ea; --rule: #cfd3da; --equal: #dff0e5;
  --danger: #fbe3e0;
  --bad: #b3261e; --good: #1a7340; LIGHT }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --ink: #e8eaee; --quiet: #9aa2af; --grid: #2a2f38;
  --rule: #3b424e;
  --equal: #1d3a2a; --danger: #40201f; --bad: #ff8a80; --good: #6fd698; DARK } }
* { box-sizing: border-box }
html { background: var(--paper); color: var(--ink); font: 16px/1.5 var(--sans); -webkit-text-size-adjust: 100% }
body { max-width: 78rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; overflow-wrap: anywhere }
h1 { font: 600 clamp(1.7rem, 4.6vw, 2.9rem)/1.15 var(--serif); margin: .35rem 0 .8rem; max-width: 24em;
  letter-spacing: -.01em;
  overflow-wrap: break-word }
h2 { font: 600 1.5rem/1.25 var(--serif); margin: 3rem 0 .6rem; padding-top: 1rem; border-top: 2px solid var(--ink) }
h3 { font: 600 1.05rem/1.3 var(--sans); margin: 2.2rem 0 .8rem }
p, li { max-width: 46rem }
.kicker, .deck, .note, figcaption small, .facts { color: var(--quiet) }
.kicker { font-size: .85rem; margin: 0 }
.deck { font-size: 1.02rem; margin: 0 }
.facts { display: block; font-size: .86rem }
ul.verdicts { list-style: none; padding: 0; margin: 1.6rem 0 0; display: grid; gap: 1.1rem }
ul.verdicts li { border-left: 4px solid var(--k); padding-left: .9rem; max-width: none; display: grid;
  gap: .2rem 1.4rem;
  grid-template-columns: minmax(5rem, 9rem) minmax(12rem, 1fr) minmax(20rem, 3fr) }
ul.verdicts strong { color: var(--k); font-size: 1.1rem; line-height: 1.4 }
ul.verdicts .bad { grid-column: 2 / -1 }
@media (max-width: 44rem) { ul.verdicts li { display: block } ul.verdicts .claim { display: block;
  margin-top: .25rem } }
.one { white-space: nowrap }
.four { --least: 27rem }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--least, 21rem)), 1fr));
  gap: 2rem 2.2rem; align-items: start }
figure { margin: 0; max-width: 33rem }
figcaption { margin-bottom: .5rem; line-height: 1.35 }
figcaption b { display: block }
figcaption small { display: block; font-size: .8rem; margin-top: .1rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--grid); vertical-align: top;
  overflow-wrap: normal }
td.path { overflow-wrap: anywhere; min-width: 14rem }
th { font-weight: 600; color: var(--quiet) }
td.num, th.num { text-align: right }
.bad { color: var(--bad) } .good { color: var(--good) }
.warning { border-left: 4px solid var(--bad); padding-left: .9rem }
summary { cursor: pointer; font-weight: 600; margin: 1rem 0 }
code { font: .92em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
pre { white-space: pre-wrap; font: .85rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  margin: .3rem 0 }
""".replace("LIGHT", _palette(COLOURS)).replace("DARK", _palette(_DARK))
    + "".join(f".c{i} {{ --k: var(--c{i}) }}\n" for i in range(len(COLOURS)))
    + STYLE
)


def html_page(study: Study, folders: Sequence[Path], *, pictures: list[Panel] | None = None) -> str:
    """The whole page.

    Args:
        study: what it is about.
        folders: where the runs were looked for.
        pictures: filled with the panels, in their order.
    """
    colours = _colours(study)
    sections = study.sections[:MOST_SECTIONS]
    num_runs = sum(len(group.runs) for section in sections for group in drawn_groups(section))
    body = [_header(study, folders)]
    if len(study.sections) > 1:
        body.append("<h2>At a glance</h2>" + _overview(study))
    for section in sections:
        parts = panels_of(section, colours, num_runs)
        if pictures is not None:
            pictures += [panel for _, panels in parts for panel in panels]
        body.append(_section(section, colours, parts, alone=len(study.sections) == 1))
    if len(study.sections) > MOST_SECTIONS:
        body.append(f'<p class="note">Pictures of the first {MOST_SECTIONS} of {len(study.sections)} settings.</p>')
    body += [_differences(study), _missing(study), _all_runs(study), _method(study)]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_e(study.headline)}</title><style>{_CSS}</style></head><body>"
    )
    return visible(head + "\n".join(body) + "</body></html>\n")


def _e(text: Any) -> str:
    return escape(redact(str(text)), quote=True)


def _unbroken(text: str) -> str:
    return text.replace("t-test", "<span class=one>t-test</span>")


def _colours(study: Study) -> dict[str, int]:
    """One colour for a group in the whole page; the reference has the neutral one."""
    found: dict[str, int] = {}
    for section in study.sections:
        if section.reference is not None:
            found.setdefault(section.reference.label, 0)
    free = 0 if not found else 1
    for section in study.sections:
        for group in drawn_groups(section):
            if group.label not in found:
                found[group.label] = free
                free = free % (len(COLOURS) - 1) + 1
    return found | {g.label: 0 for s in study.sections for g in s.groups if g.label not in found}


def _header(study: Study, folders: Sequence[Path]) -> str:
    statuses = Counter(run.status for run in study.runs)
    counts = ", ".join(f"{count:,} {status}" for status, count in statuses.most_common())
    counts = "all finished" if set(statuses) == {"finished"} else counts
    today = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    where = ", ".join(str(folder) for folder in folders[:4]) + (" ..." if len(folders) > 4 else "")
    recipes = ", ".join(sorted({run.recipe for run in study.runs if run.recipe}))
    return (
        f'<p class="kicker">{_e(recipes)} · {_e(where)} · {today}</p><h1>{_e(study.headline)}</h1>'
        f'<p class="deck">{len(study.runs):,} runs: {_e(counts)}. Measured on {_e(made_on(study.runs))}.</p>'
    )


def _section(section: Section, colours: dict[str, int], parts: list[tuple[str, list[Panel]]], *, alone: bool) -> str:
    found = [] if alone else [f"<h2>{_e(section.title or 'all runs')}</h2>"]
    items = []
    for group in section.groups:
        if group is section.reference or (len(section.groups) > MOST_GROUPS and group not in drawn_groups(section)):
            continue
        claims = "".join(
            f'<span class="claim">{_e(_title(claim))}<span class="facts">{_unbroken(_e(facts))}</span></span>'
            for claim, facts in section.claims(group)
        )
        claims = claims or '<span class="claim">Nothing to compare yet</span>'
        lost = f'<span class="claim bad">{_e(of_those(group).strip())}</span>' if of_those(group) else ""
        items.append(f'<li class="c{colours[group.label]}"><strong>{_e(group.label)}</strong>{claims}{lost}</li>')
    if section.reference is not None:
        base = section.reference
        about = f"{_e(_title(section.metric))} {_e(spread(list(base.values.values())))}"
        speed = f"{statistics.fmean(base.speeds.values()):,.0f} samples/s" if base.speeds else ""
        facts = f"{counted(len(base.values), 'seed')}, mean ± standard deviation"
        items.insert(
            0,
            f'<li class="c{colours[base.label]}"><strong>{_e(base.label)}</strong><span class="claim">'
            f'The reference<span class="facts">{speed}</span></span>'
            f'<span class="claim">{about}<span class="facts">{facts}</span></span></li>',
        )
        found.append(f'<ul class="verdicts">{"".join(items)}</ul>')
    if section.reference is not None and of_those(section.reference):
        found.append(f'<p class="warning">{_e(section.reference.label)}:{_e(of_those(section.reference))}</p>')
    found += [f'<p class="warning">{_e(text)}.</p>' for text in section.warnings]
    if len(section.groups) > MOST_GROUPS:
        which = f"{MOST_GROUPS} of {len(section.groups)} groups: the best, and of many some are it by luck"
        found.append(f'<p class="note">Pictures of {which}.</p>')
    for heading, panels in parts:
        kind = "panels four" if len(panels) == 4 else "panels"  # two by two
        found.append(f'<h3>{_e(heading)}</h3><div class="{kind}">')
        for panel in panels:
            caption = f"<b>{_e(panel.title)}</b><small>{_e(panel.note)}</small>"
            found.append(f"<figure><figcaption>{caption}</figcaption>{svg(panel)}</figure>")
        found.append("</div>")
    return "\n".join(found)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells of rows are HTML already."""
    kinds = [' class="num"' if i in numbers else "" for i in range(len(head))]
    cells = "".join(f"<th{kind}>{_e(text)}</th>" for kind, text in zip(kinds, head, strict=True))
    lines = [
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows[:_LONG]
    ]
    more = f'<p class="note">and {len(rows) - _LONG:,} more</p>' if len(rows) > _LONG else ""
    return f'<div class="wide"><table><tr>{cells}</tr>{"".join(lines)}</table></div>{more}'


def _overview(study: Study) -> str:
    labels = list(dict.fromkeys(group.label for section in study.sections for group in section.groups))[:10]
    rows = []
    for section in study.sections:
        by_label = {group.label: group for group in section.groups}
        cells = [_e(section.title), _e(section.metric)]
        for label in labels:
            c, group = section.differences.get(label), by_label.get(label)
            kind = {"worse": "bad", "better": "good"}.get(c.kind, "note") if c else "note"
            verdict = f'<br><span class="{kind}">{_e(c.kind)}</span>' if c else ""
            cells.append(f"{_e(spread(list(group.values.values())))}{verdict}" if group else "")
        rows.append(cells)
    return _table(["settings", "metric", *labels], rows)


def _differences(study: Study) -> str:
    groups = [group for section in study.sections for group in section.groups]
    if not study.differing or len(groups) < 2:
        return ""
    intro = f"<p>The {len(study.differing)} settings that are not the same in all runs.</p>"
    if len(study.sections) == 1 and len(groups) <= 8:
        rows = []
        for key in study.differing:
            cells = []
            for group in groups:
                values = dict.fromkeys(shown(run.config.get(key)) for run in group.runs)
                cells.append(f"<code>{_e(', '.join(values)[:80])}</code>")
            rows.append([f"<code>{_e(key)}</code>", *cells])
        return "<h2>What differs</h2>" + intro + _table(["setting", *(group.label for group in groups)], rows)
    rows = []
    for key, values in study.differing.items():
        text = ", ".join(shown(value) for value in values[:12]) + (
            f" and {len(values) - 12} more" if len(values) > 12 else ""
        )
        rows.append([f"<code>{_e(key)}</code>", f"<code>{_e(text[:400])}</code>"])
    return "<h2>What differs</h2>" + intro + _table(["setting", "values"], rows)


def _missing(study: Study) -> str:
    unfinished = [run for run in study.runs if run.status != "finished"]
    damaged = [run for run in study.runs if run.problems]
    if not (unfinished or damaged or study.notes):
        return "<h2>What is missing</h2><p>Nothing: every run that was found has finished, and all files are whole.</p>"
    found = ["<h2>What is missing</h2>"]
    if unfinished:
        rows = []
        for run in unfinished:
            reports = read_reports(run) if len(rows) < 200 else []
            why = "".join(f"<pre>{_e(line)}</pre>" for line in [_reason(run), *map(_report_line, reports)] if line)
            step, code = run.count("step"), run.summary.get("exit_code")
            cells = [
                "" if step is None else f"{step:,.0f}",
                _e(code) if run.status not in ("running", "stopped") and code is not None else "",
            ]
            rows.append([f'<span class="bad">{_e(run.status)}</span>', *cells, why, _path(run)])
        head = ["status", "step", "exit code", "why", "folder"]
        found += ["<h3>Runs that have not finished</h3>", _table(head, rows, (1, 2))]
    if damaged:
        rows = [[_e("; ".join(run.problems)), _path(run)] for run in damaged]
        found += ["<h3>Files that are missing or damaged</h3>", _table(["what", "folder"], rows)]
    if study.notes:
        notes = "".join(f"<li>{_e(note)}</li>" for note in study.notes[:_LONG])
        found += ["<h3>Passed over</h3>", f"<ul>{notes}</ul>"]
    return "\n".join(found)


def _reason(run: Run) -> str:
    if run.status == "running":
        return ""
    if run.status == "unknown":
        return "what became of it cannot be read"
    if run.status == "stopped":
        return "it ended without a word (killed, or the machine went down); the same command goes on with it"
    lines = [line for line in run.error.strip().splitlines() if line.strip()]
    text = lines[-1] if lines and "Traceback" in lines[0] else lines[0] if lines else ""
    return text[:500]


def _report_line(report: dict[str, Any]) -> str:
    """A doctor's report in a line."""
    fixes = report.get("fixes")
    first = fixes[0] if isinstance(fixes, list) and fixes and isinstance(fixes[0], dict) else {}
    where = f" in {report['module']}" if report.get("module") else ""
    advice = f"; try {first['override']}" if first.get("override") else ""
    return f"doctor: step {report.get('step')}: {report.get('cause')}{where}{advice}"[:500]


def _path(run: Run) -> str:
    return f'<span class="path"><code>{_e(run.path)}</code></span>'


def _all_runs(study: Study) -> str:
    rows = []
    for run in study.runs:
        value, speed, step = run.result(), run.count("samples_per_second"), run.count("step")
        cells = [_e(run.amp), _e(run.config.get("seed", "")), _e(run.status), "" if step is None else f"{step:,.0f}"]
        cells += ["" if value is None else f"{value:.4f}", "" if speed is None else f"{speed:,.0f}", _path(run)]
        rows.append(cells)
    head = ["mode", "seed", "status", "step", "result", "samples/s", "folder"]
    return f"<details><summary>All {len(rows):,} runs</summary>{_table(head, rows, (3, 4, 5))}</details>"


def _method(study: Study) -> str:
    count = study.num_comparisons
    several = "There is one comparison, so nothing is adjusted for several."
    if count > 1:
        several = (
            f"The {count} comparisons of this page are adjusted together (Holm): the chance of one wrong claim of a "
            "difference among them stays below 5 %. The intervals are those of each comparison alone."
        )
    of_reference = " of the reference's mean" if study.margin.endswith("%") else ""
    paragraphs = [
        "Groups with the same seeds are compared pairwise (paired t-test: the same initial weights and order of the "
        "data), others by Welch's t-test; both suppose that the numbers of the seeds scatter about normally. Speeds "
        f"are compared as logarithms, by Welch's test, and adjusted among themselves. {several}",
        f"<b>Equal</b> is said only when the whole 95 % interval lies within the margin of {_e(study.margin)}"
        f"{of_reference} and two one-sided tests agree; a test that merely finds nothing is <b>not settled</b>. Below "
        "three seeds nothing is claimed. Runs that diverged or failed are no part of a comparison, and are counted "
        "beside it: a mode that often fails is not as good, however well the rest of its runs ended.",
        "Curves show at most 2,000 lines of each run, fewer when there are very many runs. Dashed curves are single "
        "runs: a cross where one ended badly, a ring where it still goes on. Speed and memory hold for the machine "
        "they were measured on.",
    ]
    return "<h2>How to read this</h2>" + "".join(f"<p>{text}</p>" for text in paragraphs)


# --- text -------------------------------------------------------------------------------------------------------------


def markdown(study: Study) -> str:
    """Tables and verdicts for a terminal or a README."""
    several = len(study.sections) > 1
    by = ", ".join(study.by) or "group"
    lines = [f"**{study.headline}**", ""] if study.sections else [study.headline]
    if several:
        labels = list(dict.fromkeys(group.label for section in study.sections for group in section.groups))
        rows = [["settings", "metric", *(f"`{label}`" for label in labels), "runs"]]
        for section in study.sections:
            found = {group.label: list(group.values.values()) for group in section.groups}
            cells = [spread(found[label]) if found.get(label) else "" for label in labels]
            count = sum(len(group.finished) for group in section.groups)
            rows.append([f"`{section.title}`", section.metric, *cells, str(count)])
        lines += _rows(rows)
    for section in study.sections[:MOST_SECTIONS]:
        if not several:
            head = [by, "runs", section.metric, "lowest, highest", "samples/s, median", "peak MiB", "skipped steps"]
            lines += _rows([head, *([f"`{group.label}`", *_facts(group)] for group in section.groups)])
        if (
            section is study.sections[min(MOST_SECTIONS, len(study.sections) - 1)]
            and len(study.sections) > MOST_SECTIONS
        ):
            lines += ["", f"and {len(study.sections) - MOST_SECTIONS} more settings, which --json has"]
            break
        verdicts = section.sentences
        if len(verdicts) > _MANY:
            verdicts = [*verdicts[:_MANY], f"and {len(verdicts) - _MANY} more, which --json has"]
        sentences = [*verdicts, *(f"note: {text}" for text in section.warnings)]
        if sentences:
            lines += ["", *([f"{section.title}:"] if several else []), *(f"- {text}" for text in sentences)]
    if len(study.sections) > MOST_SECTIONS:
        lines += ["", f"and {len(study.sections) - MOST_SECTIONS} more settings, which --json has"]
    return visible(redact("\n".join(lines)))


def _facts(group: Group) -> list[str]:
    values = list(group.values.values())
    bounds = f"{min(values):.4f}, {max(values):.4f}" if values else ""
    speed = f"{statistics.median(group.speeds.values()):,.0f}" if group.speeds else ""
    memory = f"{group.memory / 2**20:,.0f}" if group.memory else ""
    return [str(len(group.finished)), spread(values), bounds, speed, memory, str(group.skipped)]


def _rows(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    cells.insert(1, ["---"] * len(cells[0]))
    return ["| " + " | ".join(row) + " |" for row in cells]


def left_out(study: Study) -> list[str]:
    """A line for each run that is no result, and for whatever else was passed over."""
    lines = []
    for run in study.runs:
        if run.status != "finished" or run in study.left_out or run.result() is None:
            reasons = [run.status, *([f"step {run.count('step'):,.0f}"] if run.count("step") is not None else [])]
            reasons += [f"exit code {run.summary.get('exit_code')}"] if run.status in ("failed", "diverged") else []
            lines.append(f"{run.path}: {', '.join(reasons)}" + (f": {_reason(run)}" if _reason(run) else ""))
    lines += [f"{run.path}: {'; '.join(run.problems)}" for run in study.runs if run.problems]
    return [visible(redact(line)).replace("\n", " ") for line in [*lines, *study.notes]]


def as_dict(study: Study) -> dict[str, Any]:
    """Everything that is said, as plain data."""
    sections = []
    for section in study.sections:
        groups = []
        for group in section.groups:
            c, ratio = section.differences.get(group.label), section.ratios.get(group.label)
            groups.append(
                {
                    "label": group.label,
                    "runs": [str(run.path) for run in group.runs],
                    "statuses": dict(Counter(run.status for run in group.runs)),
                    "values": {str(seed): value for seed, value in group.values.items()},
                    "samples_per_second": {str(seed): value for seed, value in group.speeds.items()},
                    "peak_memory_bytes": group.memory,
                    "skipped": group.skipped,
                    "difference": c.to_dict() if c else None,
                    "log_speed_ratio": ratio.to_dict() if ratio else None,
                }
            )
        about = {
            "title": section.title,
            "metric": section.metric,
            "better": section.better,
            "warnings": section.warnings,
        }
        about |= {"reference": section.reference.label if section.reference else None, "verdicts": section.sentences}
        sections.append(about | {"groups": groups})
    about = {"headline": study.headline, "by": study.by, "margin": study.margin, "num_runs": len(study.runs)}
    return plain(about | {"differing": study.differing, "sections": sections, "left_out": left_out(study)})
