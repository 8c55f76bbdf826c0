"""Accelerate: `protect(accelerator)`, before or after `prepare`.

accelerator = Accelerator(mixed_precision="bf16")
scaler = protect(accelerator)
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from amp_core.step.buffers import CopySafeHook
from amp_plugins.doctor import LoopDoctor, Terms
from amp_plugins.names import require
from amp_plugins.scaler import GradScaler, scaler_for

_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_STEPS_ITSELF = {DistributedType.DEEPSPEED: "DeepSpeed", DistributedType.MEGATRON_LM: "Megatron-LM"}


TERMS = Terms(
    bf16='Accelerator(mixed_precision="bf16")',
    scale="protect(accelerator, {})",
    load="accelerator.load_state(...)",
)


def protect(
    accelerator: Accelerator, scaler: GradScaler | None = None, *, doctor: bool = False, **policy: Any
) -> GradScaler:
    """Give an accelerator a `GradScaler` of ours, also in bf16 and fp32, and guard the networks that it prepares.

    Schedules that it prepared move with taken steps, with fused optimizers too; it reads once per step whether one
    was. Its checkpoints hold the scale as before.

    Args:
        accelerator: it may have prepared something before, or do it later.
        scaler: the one to use; None: a new one.
        doctor: examine skipped steps: `scaler.doctor.watch` decorates the function that computes a loss; networks that
            return one, as those of transformers, are watched without it. A step is examined before the next one begins.
        **policy: for the new one, as `init_scale`, `max_consecutive_skips`.

    Returns:
        The scaler. Called again: the one that is there.

    Raises:
        ValueError: DeepSpeed or Megatron-LM step by themselves; see also `scaler_for`.
    """
    require("accelerate")
    if isinstance(accelerator.scaler, GradScaler):
        if doctor and accelerator.scaler.doctor is None:
            _attach(accelerator.scaler)
        return accelerator.scaler
    if (name := _STEPS_ITSELF.get(accelerator.distributed_type)) is not None:
        raise ValueError(
            f"{name} scales, clips and steps by itself, and asks no scaler: use its own settings (fp16 or bf16)"
        )
    # On a CPU Accelerate trains fp16 as fp32: it has no scaler there, and its clipping does not unscale.
    precision = str(accelerator.mixed_precision) if accelerator.native_amp else "no"
    before: Any = accelerator.scaler
    if precision == "fp16" and before is not None:  # as GradScalerKwargs say
        names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
        policy = {name: getattr(before, f"_{name}") for name in names} | policy
    what = f"the accelerator mixed_precision={precision!r}"
    device, dtype = accelerator.device.type, _DTYPES[precision]
    scaler = scaler_for(what, scaler, device, dtype, policy, enabled=precision == "fp16")
    accelerator.scaler = scaler
    for optimizer in accelerator._optimizers:
        optimizer.__setstate__({"scaler": scaler})  # it wraps the step again
    for net in accelerator._models:
        scaler.guard(net)
    if doctor:
        _attach(scaler)
    accelerator.prepare_model = functools.partial(_prepare_model, accelerator)  # type: ignore[method-assign]
    return scaler


def _prepare_model(accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    made, scaler = type(accelerator).prepare_model(accelerator, model, *args, **kwargs), accelerator.scaler
    if made not in scaler.nets and not kwargs.get("evaluation_mode"):
        scaler.guard(made)
        _watch(scaler.doctor, made)
    return made


def _attach(scaler: GradScaler) -> None:
    doctor = LoopDoctor(scaler, lambda: list(scaler.nets), terms=TERMS)
    for net in scaler.nets:
        _watch(doctor, net)


def _watch(doctor: LoopDoctor | None, net: Any) -> None:
    """Keep what a network is called with, unless a function around it is watched."""

    def note(net: Any, args: Any, kwargs: Any) -> None:
        if doctor is not None and not doctor.is_decorating and net.training and torch.is_grad_enabled():
            doctor.note(net, args, kwargs)

    if doctor is not None:
        net.register_forward_pre_hook(CopySafeHook(note), with_kwargs=True)
