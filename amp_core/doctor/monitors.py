"""The doctor of a run, by `doctor` and `doctor.statistics_every`."""

from __future__ import annotations

from amp_core.doctor.statistics import Statistics
from amp_core.doctor.trace import NEEDED
from amp_core.doctor.watch import Watch
from amp_core.run.loop import Loop
from amp_core.torch_private import is_missing


def doctor(loop: Loop) -> tuple[Watch | None, Statistics | None]:
    """The watch and the statistics of this run, or None. The watch needs the private torch names of the trace."""
    watch = None if loop.cfg.doctor.name == "off" or is_missing(*NEEDED) else Watch(loop)
    sampled = loop.cfg.doctor.statistics_every is not None and loop.env.is_main
    return watch, Statistics(loop) if sampled else None
