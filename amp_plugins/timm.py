"""timm: `NativeScaler` in place of `timm.utils.NativeScaler`, in every precision.

loss_scaler = NativeScaler(device.type, enabled=amp_dtype == torch.float16)
loss_scaler.guard(model)
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import timm.utils

from amp_plugins.names import require
from amp_plugins.scaler import GradScaler


class NativeScaler(timm.utils.NativeScaler):
    """The scaler of timm's train.py, called with loss and optimizer. Its schedules by `step_update` cannot be followed.

    Args:
        device: of the network.
        enabled: False in bf16 and fp32, where train.py has none.
        **policy: see `GradScaler`.
    """

    def __init__(self, device: str = "cuda", *, enabled: bool = True, **policy: Any) -> None:
        require("timm")
        super().__init__(device)
        self._scaler = GradScaler(device, enabled=enabled, **policy)
        self.guard, self.follow = self._scaler.guard, self._scaler.follow

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As timm's; an empty state, of a mode without a scale, begins with a fresh one."""
        if state_dict:
            super().load_state_dict(state_dict)
