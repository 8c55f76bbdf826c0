"""What a comparison says, in words."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from amp_tools.report.significance import LEAST_SEEDS, MOST_SEEDS, Comparison

if TYPE_CHECKING:
    from amp_tools.report.folders import Run
    from amp_tools.report.groups import Group, Section


def shown(value: Any) -> str:
    """A setting's value, short."""
    return f"{value:g}" if isinstance(value, float) else "null" if value is None else str(value)


def signed(value: float, digits: int) -> str:
    """With a true minus sign."""
    return f"{value:+.{digits}f}".replace("-", "−")


def digits_for(size: float) -> int:
    """Digits behind the point that show two significant ones of a number of this size."""
    return 4 if size <= 0 or not math.isfinite(size) else min(8, max(0, 1 - math.floor(math.log10(size))))


def p_words(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.995 else "p = 1.0"


def metric_words(c: Comparison, metric: str) -> tuple[str, str]:
    """What can be said of the metric, and the statistics behind it."""
    half = (c.high - c.low) / 2 if c.low is not None and c.high is not None else abs(c.difference)
    digits = digits_for(half)
    n = f"n = {c.counts[0]} and {c.counts[1]} seeds"
    if c.counts[0] == c.counts[1]:
        n = f"n = {counted(c.counts[0], 'seed')} each"
    difference = f"difference {signed(c.difference, digits)}"
    if c.kind == "identical":
        return f"{metric} identical, every seed gave the same number", n
    if c.kind == "too few seeds":
        return f"too few seeds to tell about {metric}", f"{difference}, {n}, at least {LEAST_SEEDS} are needed"
    facts = [difference]
    if c.low is not None and c.high is not None:
        facts.append(f"95 % interval [{signed(c.low, digits)}, {signed(c.high, digits)}]")
    if c.p is not None:
        several = c.num_comparisons > 1 and c.p_adjusted is not None
        facts.append(p_words(c.p) + (f" (Holm {p_words(c.p_adjusted)[2:].removeprefix('= ')})" if several else ""))  # type: ignore[arg-type]
    facts += [n] + ([c.test] if c.test != "none" else [])
    margin = "" if c.margin is None else f"±{c.margin:.{digits_for(c.margin)}f}"
    if c.kind == "equal":
        claim = f"{metric} equal within {margin}"
    elif c.kind != "unclear":
        claim = f"{metric} {c.kind} by {abs(c.difference):.{digits}f}"
    elif c.low is None:
        claim = f"{metric} cannot be judged, the seeds give no spread to test with"
    else:
        claim = f"{metric} not settled, the interval reaches beyond {margin}"
        if c.seeds_needed is not None and c.seeds_needed > min(c.counts):
            claim += f"; about {c.seeds_needed:,} seeds each would tell" if c.seeds_needed < MOST_SEEDS else ""
    return claim, ", ".join(facts)


def speed_words(c: Comparison) -> tuple[str, str]:
    """The same for the speed."""
    ratio = math.exp(c.difference)
    n = f"n = {c.counts[0]} and {c.counts[1]}"
    if c.low is None or c.high is None:
        return (
            f"{ratio:.2f}× as fast as {c.reference}",
            f"{n}, too few runs to tell" if c.kind == "too few seeds" else n,
        )
    interval = f"95 % interval [{math.exp(c.low):.2f}, {math.exp(c.high):.2f}]"
    if c.kind in ("better", "worse"):
        return f"{ratio:.2f}× as fast as {c.reference}", interval
    return f"not shown to be faster or slower than {c.reference}", f"{ratio:.2f}×, {interval}"


def counted(count: int, thing: str) -> str:
    """Such as "1 seed", "5 seeds"."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def of_those(group: Group) -> str:
    """Which of its runs did not finish; empty when all did."""
    if not group.lost:
        return ""
    total, lost = len(group.runs), ", ".join(f"{count} {status}" for status, count in sorted(group.lost.items()))
    if total == 1:
        return f" Its only run is no part of the comparison: {next(iter(group.lost))}."
    return f" Of its {total:,} runs, {lost}: not part of the comparison."


GOOD = ("equal", "identical", "better")


def headline_of(section: Section) -> str:
    base = section.reference
    if base is None:
        group = max(section.groups, key=lambda g: len(g.values), default=None)
        if group is None or not group.values:
            return "No run has finished yet."
        return f"{section.metric} {spread(list(group.values.values()))} over {counted(len(group.values), 'seed')}."
    good = [label for label, c in section.differences.items() if c.kind in GOOD]
    faster = [label for label in good if label in section.ratios and section.ratios[label].kind == "better"]
    if faster:
        fastest = max(section.ratios[label].difference for label in faster)
        alike = [label for label in faster if fastest - section.ratios[label].difference < 0.03]
        speeds = " and ".join(dict.fromkeys(f"{math.exp(section.ratios[label].difference):.2f}×" for label in alike))
        train = "trains" if len(alike) == 1 else "train"
        same = "; ".join(dict.fromkeys(_as_good(section, label) for label in alike))
        return f"{_listed(alike)} {train} {speeds} as fast as {base.label}, {same}."
    better = [label for label in good if section.differences[label].kind == "better"]
    if better:
        label = max(better, key=lambda name: abs(section.differences[name].difference))
        return f"{label} is no faster than {base.label}, but its {section.metric} is better."
    kinds = {c.kind for c in section.differences.values()}
    if not kinds:
        return (
            f"Nothing can be compared yet: no finished runs beside {base.label}."
            if base.values
            else "No run has finished."
        )
    if kinds == {"too few seeds"}:
        return "Too few seeds to tell: run at least three of each."
    if kinds <= {"unclear", "too few seeds"}:
        return f"Not settled: {section.metric} varies too much between seeds to tell the groups from {base.label}."
    if good:
        named = _listed(good)
        are = "is" if len(good) == 1 else "are"
        return f"Stay with {base.label}: {named} {are} as good, and not shown to be faster."
    return f"Stay with {base.label}: nothing else is shown to be as good."


def _listed(labels: Sequence[str]) -> str:
    return " and ".join(labels) if len(labels) < 4 else f"{len(labels)} groups"


def _as_good(section: Section, label: str) -> str:
    c = section.differences[label]
    if c.kind == "identical":
        return f"with the same {section.metric} on every seed"
    if c.kind == "better":
        return f"and its {section.metric} is better"
    assert c.margin is not None
    return f"with {section.metric} equal within ±{c.margin:.{digits_for(c.margin)}f}"


def headline_of_many(sections: list[Section]) -> str:
    if not sections:
        return "No runs to report on."
    kinds: dict[str, list[str]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    for section in sections:
        for label, c in section.differences.items():
            kinds[label].append(c.kind)
            if label in section.ratios:
                ratios[label].append(math.exp(section.ratios[label].difference))
    bases = {section.reference.label for section in sections if section.reference and section.differences}
    base = bases.pop() if len(bases) == 1 else "the reference"
    parts = []
    for label, found in sorted(kinds.items(), key=lambda item: -len(item[1]))[:3]:
        good, bad = sum(kind in GOOD for kind in found), sum(kind == "worse" for kind in found)
        text = f"{label} is shown to be as good as {base} in" if not parts else f"{label} in"
        text += f" {good} of {len(found)}" + (" settings" if not parts else "") + (f", worse in {bad}" if bad else "")
        parts.append(text + (f" ({statistics.median(ratios[label]):.2f}× as fast)" if ratios[label] else ""))
    return "; ".join(parts) + "." if parts else f"{counted(len(sections), 'setting')}, nothing to compare within them."


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    if not values:
        return "none"
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"


def reason(run: Run) -> str:
    """Why a run is no result."""
    if run.status == "running":
        return ""
    if run.status == "unknown":
        return "what became of it cannot be read"
    if run.status == "stopped":
        return "it was killed, or the machine went down; the same command resumes it"
    lines = [line for line in run.error.strip().splitlines() if line.strip()]
    text = lines[-1] if lines and "Traceback" in lines[0] else lines[0] if lines else ""
    return text[:500]
