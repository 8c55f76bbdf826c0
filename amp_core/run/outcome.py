"""Whether a run that made all its steps has learned anything."""

from __future__ import annotations

import math
from collections.abc import Mapping

from amp_core.config.errors import Diverged


def check_result(metrics: Mapping[str, float], *, step: int, skipped: int) -> None:
    """Hold the last evaluation and the number of skipped steps against a run that worked.

    Args:
        metrics: of the last evaluation, the same on every rank.
        step: steps that were made.
        skipped: those of them that were skipped.

    Raises:
        Diverged: a metric is not finite, or more than half of the steps were skipped.
    """
    how = f"{skipped} of {step} steps were skipped"
    if bad := [f"{name} {value:g}" for name, value in metrics.items() if not math.isfinite(value)]:
        raise Diverged(f"diverged: {', '.join(bad)} at the end, and {how}; expected finite metrics. Lower optimizer.lr")
    if 2 * skipped > step:
        raise Diverged(
            f"diverged: {how}, so the network hardly trained; lower optimizer.lr, or see the doctor's report"
        )
