"""The doctor in a run: fills the protocols of `amp_core.run.monitor`, as `doctor` and `doctor.statistics_every` say."""

from __future__ import annotations

from amp_core.doctor.statistics import Statistics
from amp_core.doctor.trace import NEEDED
from amp_core.doctor.watch import Watch
from amp_core.run.loop import Loop
from amp_core.torch_private import is_missing


def monitors(loop: Loop) -> tuple[Watch | None, Statistics | None]:
    """What watches this run and what measures it. Without what the trace needs of torch, nothing watches."""
    watch = None if loop.cfg.doctor.name == "off" or is_missing(*NEEDED) else Watch(loop)
    sampled = loop.cfg.doctor.statistics_every is not None and loop.env.is_main
    return watch, Statistics(loop) if sampled else None
