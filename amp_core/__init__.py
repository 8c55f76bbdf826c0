"""What must be right about mixed precision, for any PyTorch training loop.

    from amp_core import Amp, Clip, windows, sync_grads, keep_fp32

Names are imported when they are first used: the configuration alone needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_core.checkpoints.checkpoint import Checkpoint, Loaded
    from amp_core.config.schema import AmpConfig
    from amp_core.doctor.diagnosis import Diagnosis
    from amp_core.doctor.locate import Doctor
    from amp_core.lowp.islands import carry_autocast, keep_fp32
    from amp_core.lowp.weights import master_params
    from amp_core.step.amp import Amp
    from amp_core.step.clip import Clip
    from amp_core.step.ema import Ema
    from amp_core.step.report import StepReport
    from amp_core.step.schedule import Schedule
    from amp_core.step.window import MicroBatch, sync_grads, windows

__version__ = "0.2.0"

_HOME = {
    "Amp": "step.amp",
    "AmpConfig": "config.schema",
    "Checkpoint": "checkpoints.checkpoint",
    "Clip": "step.clip",
    "Diagnosis": "doctor.diagnosis",
    "Doctor": "doctor.locate",
    "Ema": "step.ema",
    "Loaded": "checkpoints.checkpoint",
    "MicroBatch": "step.window",
    "Schedule": "step.schedule",
    "StepReport": "step.report",
    "carry_autocast": "lowp.islands",
    "keep_fp32": "lowp.islands",
    "sync_grads": "step.window",
    "master_params": "lowp.weights",
    "windows": "step.window",
}

__all__ = [
    "Amp",
    "AmpConfig",
    "Checkpoint",
    "Clip",
    "Diagnosis",
    "Doctor",
    "Ema",
    "Loaded",
    "MicroBatch",
    "Schedule",
    "StepReport",
    "carry_autocast",
    "keep_fp32",
    "master_params",
    "sync_grads",
    "windows",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'amp_core' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"amp_core.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
