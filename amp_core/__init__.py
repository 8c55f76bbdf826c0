"""What must be right about mixed precision, for any PyTorch training loop.

    from amp_core import Amp, Clip, windows, sync_grads, keep_fp32

Names are imported when they are first used: the configuration alone needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_core.checkpoints.checkpoint import Checkpoint as Checkpoint
    from amp_core.checkpoints.checkpoint import Loaded as Loaded
    from amp_core.config.schema import AmpConfig as AmpConfig
    from amp_core.doctor.diagnosis import Diagnosis as Diagnosis
    from amp_core.doctor.locate import Doctor as Doctor
    from amp_core.lowp.islands import carry_autocast as carry_autocast
    from amp_core.lowp.islands import keep_fp32 as keep_fp32
    from amp_core.lowp.masters import master_params as master_params
    from amp_core.step.amp import Amp as Amp
    from amp_core.step.clip import Clip as Clip
    from amp_core.step.ema import Ema as Ema
    from amp_core.step.report import StepReport as StepReport
    from amp_core.step.schedule import Schedule as Schedule
    from amp_core.step.window import MicroBatch as MicroBatch
    from amp_core.step.window import sync_grads as sync_grads
    from amp_core.step.window import windows as windows

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
    "master_params": "lowp.masters",
    "windows": "step.window",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'amp_core' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"amp_core.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
