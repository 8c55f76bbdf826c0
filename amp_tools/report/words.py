"""What a comparison says, in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from amp_tools.report.folders import Run
from amp_tools.report.significance import LEAST_SEEDS, MOST_SEEDS, Comparison


def brief(value: Any) -> str:
    """A setting's value, short."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def signed(value: float, digits: int) -> str:
    """With a true minus sign."""
    return f"{value:+.{digits}f}".replace("-", "−")


def digits_for(size: float) -> int:
    """Digits behind the point that show two significant ones of a number of this size."""
    return 4 if size <= 0 or not math.isfinite(size) else min(8, max(0, 1 - math.floor(math.log10(size))))


def p_words(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.995 else "p = 1.0"


def metric_words(c: Comparison, metric: str) -> tuple[str, str]:
    """The verdict on the metric, and its statistics."""
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
    elif c.kind != "not settled":
        claim = f"{metric} {c.kind} by {abs(c.difference):.{digits}f}"
    else:
        claim = f"{metric} not settled, "
        claim += "the seeds give no spread to test with" if c.low is None else f"the interval reaches beyond {margin}"
        if c.seeds_needed is not None:
            about = "about" if c.seeds_needed < MOST_SEEDS else "more than"
            claim += f"; {about} {c.seeds_needed:,} seeds each would tell"
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
