"""What every recipe imports of a run."""

from amp_core.data import build_data
from amp_core.models import build_model
from amp_core.run.environment import Environment
from amp_core.run.loop import Loop
from amp_core.step.ema import build_ema
from amp_core.step.optimizers import build_optimizer
from amp_core.step.schedule import build_schedule

__all__ = ["Environment", "Loop", "build_data", "build_ema", "build_model", "build_optimizer", "build_schedule"]
