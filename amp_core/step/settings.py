"""What `Amp` sets for the whole process, and how it is undone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from amp_core.config.errors import ConfigError
from amp_core.config.schema import AmpConfig
from amp_core.tensors import HALF, UNTESTED_DEVICES, is_there

_allow_in_convolutions = functools.partial(setattr, torch.backends.cudnn, "allow_tf32")
_before: dict[Callable[[Any], None], Any] = {}
"""Functions that set TF32, and what was set before the first change."""


def require_device(device: torch.device) -> None:
    """ConfigError for a device that is not supported, or not there."""
    if device.type not in ("cpu", "cuda", *UNTESTED_DEVICES):
        raise ConfigError(f"device={device}: expected cpu, cuda, {' or '.join(UNTESTED_DEVICES)}")
    if device.type in UNTESTED_DEVICES and not is_there(device.type):
        raise ConfigError(f"device={device}: torch finds no such accelerator on this machine")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device}: this machine has no CUDA GPU, or torch was built without CUDA")


def set_for(config: AmpConfig, device: torch.device, low: torch.dtype, wanted: bool = True) -> None:
    """Set what a mode needs beyond its own tensors. `low`: the dtype of activations."""
    if not wanted:
        return
    if device.type == "cuda":
        set_tf32(config.matmul_precision)
    if config.op_policy == "cuda" and device.type == "cpu" and config.dtype != "float32":
        from amp_core.lowp.op_policy import use_cuda_policy  # other runs need none of it

        use_cuda_policy()
    if low in HALF and device.type == "cpu":  # without units torch's kernels are 10 to 80 times slower than fp32
        from amp_core.lowp.through_fp32 import compute_in_fp32

        compute_in_fp32(low)


def restore() -> None:
    """Undo all that `set_for` has set in this process. Idempotent."""
    for setting, value in _before.items():  # what was there before the first `Amp`, however many there were
        setting(value)
    _before.clear()
    # Modules that are not imported have changed nothing.
    for module, undo in (("op_policy", "restore_policy"), ("through_fp32", "restore_kernels")):
        if (loaded := sys.modules.get(f"amp_core.lowp.{module}")) is not None:
            getattr(loaded, undo)()


def set_tf32(precision: str) -> None:
    """TF32 in products and convolutions, as `torch.set_float32_matmul_precision` names it."""
    _before.setdefault(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    _before.setdefault(_allow_in_convolutions, torch.backends.cudnn.allow_tf32)
    torch.set_float32_matmul_precision(precision)
    # Convolutions use TF32 by default, which would not be `fp32`.
    _allow_in_convolutions(precision != "highest")
