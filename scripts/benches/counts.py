"""Exact counts of what a step does, the same on every machine with the same torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core.lowp import through_fp32


@dataclass(frozen=True)
class Counts:
    """Exact counts of one step."""

    calls: int
    """Python functions called; built-in ones do not count."""
    operations: int
    """Operators of aten that were dispatched."""
    casts: int
    """To and from 16 bits."""
    waits: int
    """Times that the host read something from the device."""


_LOW = {torch.float16, torch.bfloat16}


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = self.casts = self.waits = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if function is torch.ops.aten._to_copy.default:
            self.casts += not _LOW.isdisjoint((args[0].dtype, (kwargs or {}).get("dtype", args[0].dtype)))
        self.waits += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def count(step: Callable[[], None]) -> Counts:
    """Counts of the third of three steps, with the calls of a fourth one."""
    for _ in range(2):
        step()
    with _Operators() as operators:
        step()
    calls = 0

    def seen(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        # Kernels in Python belong to a CPU without 16-bit units, and all loops share them.
        calls += event == "call" and frame.f_code.co_filename != through_fp32.__file__

    sys.setprofile(seen)
    try:
        step()
    finally:
        sys.setprofile(None)
    return Counts(calls - 1, operators.operations, operators.casts, operators.waits)
