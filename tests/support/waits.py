"""A counter of what makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.equal, aten.nonzero}
"""Whatever hands the host a number, or a size that depends on one."""


class Waits(TorchDispatchMode):
    """Counts them, on a CPU as on a GPU."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.overloadpacket in WAITS
        return func(*args, **(kwargs or {}))


def waits(run: Callable[[], Any]) -> int:
    """How often `run()` makes the host wait."""
    with Waits() as mode:
        run()
    return mode.num
