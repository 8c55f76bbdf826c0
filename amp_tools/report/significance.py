"""Statistical tests over seeds: whether two groups of runs differ, are equal, or neither can be shown.

Three questions, three answers. "Better" or "worse" needs a t-test that rejects equal means. "Equal" needs more than a
test that does not reject: the interval of the difference must lie within a margin (two one-sided t-tests). Everything
else is "not settled", and says how many seeds would tell.

Groups with the same seeds are compared pairwise (the same initial weights and order of the data), others by Welch's
test. Of several comparisons the p-values are Holm's: all claims of a report together are false with at most 5 %.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from amp_core.config.errors import ConfigError

LEVEL = 0.05
LEAST_SEEDS = 3
MOST_SEEDS = 1000

Kind = Literal["better", "worse", "higher", "lower", "equal", "identical", "not settled", "too few seeds"]


def t_two_sided(t: float, df: float) -> float:
    """The probability of a value of Student's t that is at least as far from 0."""
    return float(2 * _special().stdtr(df, -abs(t)))


def t_quantile(level: float, df: float) -> float:
    """The t whose two-sided probability is `level`: 12.7 for 0.05 and 1, towards 1.96 for many."""
    return float(_special().stdtrit(df, 1 - level / 2))


def _special() -> Any:
    try:
        from scipy import special
    except ImportError as missing:
        raise ConfigError("comparing runs needs the package scipy: pip install 'amp-recipes[report]'") from missing
    return special


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values adjusted for all of them together; None stays, and does not count."""
    order = sorted((p, i) for i, p in enumerate(values) if p is not None)
    adjusted: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        adjusted[i] = largest
    return adjusted


# --- one comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """The difference of two means, and the verdict on it."""

    group: str
    reference: str
    counts: tuple[int, int]
    """Seeds of the group, and of the reference."""
    difference: float
    """Mean of the group minus mean of the reference."""
    margin: float | None
    """What counts as equal; None: not tested."""
    better: Literal["max", "min"] | None
    """Whether more is better; None: neither is."""
    kind: Kind = "not settled"
    test: Literal["paired t-test", "Welch's t-test", "sign test", "none"] = "none"
    low: float | None = None
    """The 95 % interval of the difference, of this comparison alone; None when there is no spread to make one of."""
    high: float | None = None
    p: float | None = None
    """The probability of a difference this large if there were none."""
    p_equal: float | None = None
    """The probability of a difference this small if it were as large as the margin."""
    spread: float | None = None
    """Standard deviation of a seed's difference; of unpaired seeds that of the difference of two."""
    seeds_needed: int | None = None
    """About how many of each would settle what is not, if mean and spread stay; None where no number of them would."""
    p_adjusted: float | None = None
    p_equal_adjusted: float | None = None
    num_comparisons: int = 1

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def compare(
    group: str,
    values: Mapping[int, float],
    reference: str,
    others: Mapping[int, float],
    *,
    margin: float | None = None,
    better: Literal["max", "min"] | None = None,
    may_pair: bool = True,
) -> Comparison:
    """Compare two groups of runs.

    Args:
        values, others: by seed.
        margin: the largest difference that counts as none.
        better: whether more is better; None: neither is.
        may_pair: false for what a seed has no part in, such as speed.
    """
    a, b = list(values.values()), list(others.values())
    counts = len(a), len(b)
    difference = statistics.fmean(a) - statistics.fmean(b)
    plain = Comparison(group, reference, counts, difference, margin, better)
    if min(counts) < LEAST_SEEDS:
        return dataclasses.replace(plain, kind="too few seeds")
    paired = may_pair and values.keys() == others.keys()
    # What is left of rounding is no spread: a t of 10^15 would follow.
    rounding = 1e-9 * max(map(abs, [*a, *b]))
    if paired:
        differences = [values[seed] - others[seed] for seed in values]
        if max(map(abs, differences)) <= rounding:
            return dataclasses.replace(plain, kind="identical")
        spread = statistics.stdev(differences)
        if spread <= rounding:  # a t-test needs spread; that all have one sign is a test, too
            return dataclasses.replace(plain, test="sign test", p=2.0 ** (1 - len(differences)))
        error, df = spread / math.sqrt(len(differences)), len(differences) - 1.0
    else:
        parts = [statistics.variance(a) / len(a), statistics.variance(b) / len(b)]
        if math.sqrt(sum(parts)) <= rounding:
            return plain if difference else dataclasses.replace(plain, kind="identical")
        error = math.sqrt(sum(parts))
        df = sum(parts) ** 2 / sum(part**2 / (n - 1) for part, n in zip(parts, counts, strict=True))
        spread = math.sqrt(statistics.variance(a) + statistics.variance(b))
    reach = t_quantile(LEVEL, df) * error
    p_equal = None
    if margin is not None:
        t = (margin - abs(difference)) / error
        p_equal = t_two_sided(t, df) / 2 if t > 0 else 1 - t_two_sided(t, df) / 2
    return dataclasses.replace(
        plain,
        test="paired t-test" if paired else "Welch's t-test",
        low=difference - reach,
        high=difference + reach,
        p=t_two_sided(difference / error, df),
        p_equal=p_equal,
        spread=spread,
    )


def _seeds_needed(c: Comparison, count: int) -> int | None:
    """How many seeds of each would settle one of `count` comparisons; MOST_SEEDS: that many, or more."""
    level = LEVEL / max(count, 1)  # the strictest of Holm's levels
    if c.test == "sign test":  # p = 2^(1 - n)
        return math.floor(1 - math.log2(level)) + 1
    if c.spread is None:
        return None
    groups = 1 if c.test == "paired t-test" else 2
    size = abs(c.difference)

    def is_enough(seeds: int) -> bool:  # the interval shrinks around the difference: until it leaves out 0, or
        error, df = c.spread / math.sqrt(seeds), float(groups * (seeds - 1))  # type: ignore[operator]
        within = t_quantile(min(LEVEL, 2 * level), df) * error  # lies within the margin, with one-sided tests
        return t_quantile(level, df) * error < size or size + within <= (c.margin or 0.0)

    return bisect.bisect_left(range(MOST_SEEDS), True, lo=min(c.counts) + 1, key=is_enough)


def judge(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The verdict on each comparison of one report about one kind of number; p-values are adjusted for their count."""
    p, p_equal = holm([c.p for c in comparisons]), holm([c.p_equal for c in comparisons])
    count = sum(c.p is not None for c in comparisons)
    judged = []
    for c, adjusted, equal in zip(comparisons, p, p_equal, strict=True):
        kind = c.kind
        if kind == "not settled":
            is_within = None not in (c.margin, c.low, c.high) and max(-c.low, c.high) <= c.margin  # type: ignore[operator]
            if is_within and equal is not None and equal < LEVEL:
                kind = "equal"
            elif adjusted is not None and adjusted < LEVEL:
                names: tuple[Kind, Kind] = ("higher", "lower")
                if c.better is not None:
                    names = ("better", "worse") if c.better == "max" else ("worse", "better")
                kind = names[0] if c.difference > 0 else names[1]
        needed = _seeds_needed(c, count) if kind == "not settled" else None
        facts = {"p_adjusted": adjusted, "p_equal_adjusted": equal, "num_comparisons": count, "seeds_needed": needed}
        judged.append(dataclasses.replace(c, kind=kind, **facts))
    return judged
