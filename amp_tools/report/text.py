"""A study as Markdown, as plain data, and the list of runs that are no result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from amp_core.config.files import visible
from amp_core.config.redact import redact
from amp_tools.report.folders import plain
from amp_tools.report.groups import Group, Study
from amp_tools.report.words import reason, spread

MOST_SECTIONS = 12
"""With pictures; the table has all."""
_MANY = 20
"""Verdicts on the groups of a section."""


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
            head = [by, "runs", section.metric, "lowest, highest", "samples/s, geometric mean"]
            head += ["peak MiB", "skipped steps"]
            lines += _rows([head, *([f"`{group.label}`", *_facts(group)] for group in section.groups)])
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
    speed = f"{group.speed:,.0f}" if group.speed else ""
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
            lines.append(f"{run.path}: {', '.join(reasons)}" + (f": {reason(run)}" if reason(run) else ""))
    lines += [f"{run.path}: {'; '.join(run.problems)}" for run in study.runs if run.problems]
    return [visible(redact(line)).replace("\n", " ") for line in [*lines, *study.notes]]


def as_dict(study: Study) -> dict[str, Any]:
    """The whole report as plain data."""
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
        about = {key: getattr(section, key) for key in ("title", "metric", "better", "warnings")}
        about |= {"reference": section.reference.label if section.reference else None, "verdicts": section.sentences}
        sections.append(about | {"groups": groups})
    about = {"headline": study.headline, "by": study.by, "margin": study.margin, "num_runs": len(study.runs)}
    return plain(about | {"differing": study.differing, "sections": sections, "left_out": left_out(study)})
