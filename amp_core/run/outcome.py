"""Whether a run that made all its steps has learned anything."""

from __future__ import annotations

import math
from collections.abc import Mapping

from amp_core.config.errors import Diverged
from amp_core.config.schema import AmpConfig


def check_result(metrics: Mapping[str, float], *, step: int, skipped: int, amp: AmpConfig, scale: float) -> None:
    """Hold the last evaluation and the number of skipped steps against a run that worked.

    Steps that only brought the loss scale from its start down to where it is now were no failure, unless the run ended
    before the first step that was taken: then it has learned nothing.

    Args:
        metrics: of the last evaluation, the same on every rank.
        step: steps that were made.
        skipped: those of them that were skipped.
        amp: the mode.
        scale: the loss scale at the end.

    Raises:
        Diverged: a metric is not finite, no step was taken, or more than half of the steps were skipped.
    """
    searched = 0
    if amp.scaling and amp.init_scale and amp.backoff_factor:
        searched = max(0, round(math.log(scale / amp.init_scale, amp.backoff_factor)))
    how = f"{skipped} of {step} steps were skipped"
    if bad := [f"{name} {value:g}" for name, value in metrics.items() if not math.isfinite(value)]:
        raise Diverged(f"diverged: {', '.join(bad)} at the end, and {how}; expected finite metrics. Lower optimizer.lr")
    if skipped == step == searched:
        raise Diverged(
            f"diverged: {how}, the loss scale came down from {amp.init_scale:.10g} to {scale:.10g} and no step was "
            f"taken. The same command with more steps continues; amp.init_scale={scale / 2:.10g} begins lower"
        )
    if skipped == step or 2 * (skipped - searched) > step:
        raise Diverged(f"diverged: {how}, expected at most half; lower optimizer.lr, or see the doctor's report")
