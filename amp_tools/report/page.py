"""A study as a page: one file with its pictures inline, without scripts, in light or dark as the reader's system is.

Names of folders and texts of errors come from outside: jinja2 escapes everything, and a policy in the page forbids
scripts. The page itself is `page.html`.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment
from markupsafe import Markup

from amp_core.config.files import visible
from amp_core.config.redact import redact
from amp_tools.report.charts import COLOURS, DARK, VARIABLES, Panel, svg
from amp_tools.report.folders import Run, read_reports
from amp_tools.report.groups import Section, Study, made_on
from amp_tools.report.panels import MOST_GROUPS, capitalised, drawn_groups, panels_of
from amp_tools.report.text import MOST_SECTIONS
from amp_tools.report.words import brief, counted, reason, spread

_LONG = 2000
"""Rows of a table."""


def html_page(
    study: Study, folders: Sequence[Path], *, pictures: list[Panel] | None = None, place: Path = Path()
) -> str:
    """The whole page. ConfigError: matplotlib is not installed.

    Args:
        folders: where the runs were looked for.
        pictures: filled with the panels, in their order.
        place: the folder that the page is for; its links to the runs begin there.
    """
    colours = _colours(study)
    shown_sections = study.sections[:MOST_SECTIONS]
    num_runs = sum(len(group.runs) for section in shown_sections for group in drawn_groups(section))
    sections = []
    for section in shown_sections:
        parts = panels_of(section, colours, num_runs)
        if pictures is not None:
            pictures += [panel for _, panels in parts for panel in panels]
        drawn = [(name, [(panel, Markup(redact(svg(panel)))) for panel in panels]) for name, panels in parts]
        sections.append((section, _listed_groups(section), drawn))
    paths = [str(run.path.absolute()) for run in study.runs]
    base = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    linked = functools.partial(_linked, base=base, place=place)
    statuses = Counter(run.status for run in study.runs)
    counts = ", ".join(f"{count:,} {status}" for status, count in statuses.most_common())
    template = Environment(autoescape=True, finalize=_redacted).from_string(
        Path(__file__).with_name("page.html").read_text()
    )
    return visible(
        template.render(
            study=study,
            sections=sections,
            colours=colours,
            light=VARIABLES,
            dark=DARK,
            most_rows=_LONG,
            most_groups=MOST_GROUPS,
            recipes=", ".join(sorted({run.recipe for run in study.runs if run.recipe})),
            where=", ".join(str(folder) for folder in folders[:4]) + (" ..." if len(folders) > 4 else ""),
            today=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
            counts="all finished" if set(statuses) == {"finished"} else counts,
            made_on=made_on(study.runs),
            overview=_overview(study),
            differences=_differences(study),
            unfinished=_unfinished(study, linked),
            damaged=[["; ".join(run.problems), linked(run)] for run in study.runs if run.problems],
            all_runs=_all_runs(study, linked),
            base=base,
            capitalised=capitalised,
            counted=counted,
            spread=lambda values: spread(list(values)),
        )
    )


def _redacted(value: Any) -> Any:
    return value if isinstance(value, Markup) else redact(str(value))


def _colours(study: Study) -> dict[str, int]:
    """One colour for a group in the whole page; the reference, of several the most common, has the neutral one."""
    references = Counter(section.reference.label for section in study.sections if section.reference is not None)
    found = dict.fromkeys((label for label, _ in references.most_common(1)), 0)
    free = 0 if not found else 1
    for section in study.sections:
        for group in drawn_groups(section):
            if group.label not in found:
                found[group.label] = free
                free = free % (len(COLOURS) - 1) + 1
    return found | {g.label: 0 for s in study.sections for g in s.groups if g.label not in found}


def _listed_groups(section: Section) -> list[Any]:
    """The groups with a verdict, the reference first."""
    few = section.groups if len(section.groups) <= MOST_GROUPS else drawn_groups(section)
    rest = [group for group in few if group is not section.reference]
    return rest if section.reference is None else [section.reference, *rest]


def _overview(study: Study) -> tuple[list[str], list[list[Any]]]:
    labels = list(dict.fromkeys(group.label for section in study.sections for group in section.groups))[:10]
    rows = []
    for section in study.sections:
        by_label = {group.label: group for group in section.groups}
        cells: list[Any] = [section.title, section.metric]
        for label in labels:
            c, group = section.differences.get(label), by_label.get(label)
            text = spread(list(group.values.values())) if group else ""
            kind = {"worse": "bad", "better": "good"}.get(c.kind, "note") if c else "note"
            cells.append({"kind": kind, "text": f"{text}, {c.kind}"} if c else text)
        rows.append(cells)
    return ["settings", "metric", *labels], rows


def _differences(study: Study) -> tuple[list[str], list[list[str]]] | None:
    groups = [group for section in study.sections for group in section.groups]
    if not study.differing or len(groups) < 2:
        return None
    if len(study.sections) == 1 and len(groups) <= 8:
        rows = []
        for key in study.differing:
            values = [dict.fromkeys(brief(run.config.get(key)) for run in group.runs) for group in groups]
            rows.append([key, *(", ".join(each)[:80] for each in values)])
        return ["setting", *(group.label for group in groups)], rows
    rows = []
    for key, values in study.differing.items():
        more = f" and {len(values) - 12} more" if len(values) > 12 else ""
        rows.append([key, (", ".join(brief(value) for value in values[:12]) + more)[:400]])
    return ["setting", "values"], rows


def _unfinished(study: Study, linked: Callable[[Run], dict[str, str]]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for run in study.runs:
        if run.status != "finished":
            reports = read_reports(run) if len(rows) < 200 else []
            why = [line for line in [reason(run), *map(_report_line, reports)] if line]
            code = run.summary.get("exit_code")
            code = "" if run.status in ("running", "stopped") or code is None else str(code)
            rows.append([{"kind": "bad", "text": run.status}, _count(run, "step"), code, why, linked(run)])
    return rows


def _report_line(report: dict[str, Any]) -> str:
    """A doctor's report in a line."""
    fixes = report.get("fixes")
    first = fixes[0] if isinstance(fixes, list) and fixes and isinstance(fixes[0], dict) else {}
    where = f" in {report['module']}" if report.get("module") else ""
    advice = f"; try {first['override']}" if first.get("override") else ""
    return f"doctor: step {report.get('step')}: {report.get('cause')}{where}{advice}"[:500]


def _count(run: Run, key: str) -> str:
    value = run.count(key)
    return "" if value is None else f"{value:,.0f}"


def _linked(run: Run, *, base: str, place: Path) -> dict[str, str]:
    """The folder of a run below that of all runs, as a link."""
    path = str(run.path.absolute())
    target = os.path.relpath(path, place.absolute())
    return {"kind": "path", "text": os.path.relpath(path, base), "link": quote(os.fsencode(target)), "title": path}


def _all_runs(study: Study, linked: Callable[[Run], dict[str, str]]) -> list[list[Any]]:
    rows = []
    for run in study.runs[:_LONG]:
        value = run.result()
        result = "" if value is None else f"{value:.4f}"
        numbers = [_count(run, "step"), result, _count(run, "samples_per_second")]
        rows.append([run.amp, run.config.get("seed", ""), run.status, *numbers, linked(run)])
    return rows + [[]] * max(0, len(study.runs) - _LONG)
