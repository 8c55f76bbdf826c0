"""torchao's AdamW with 8-bit moments, for `Amp.step`, schedules and checkpoints of plain tensors.

Weights with at least 4096 elements, in multiples of 256, have 2.03 bytes of state in place of 8, in blocks of 256 with
one fp32 scale each (Dettmers et al., arXiv:2110.02861); all others have fp32 moments. A step is not fused, so the host
waits for the device once. On a GPU torchao compiles it, once per shape; on a CPU it runs without the compiler.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

import torch
from torch import Tensor

_disabled = logging.root.manager.disable
logging.disable(logging.WARNING)  # of kernels for GPUs, which are not needed here
_torchao: Any = importlib.import_module("torchao.optim")
logging.disable(_disabled)
_State8: Any = importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit


class AdamW8bit(_torchao.AdamW8bit):
    """AdamW with 8-bit moments. Its state dict has {"codes", "scale", "signed"} for each quantised moment."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None, "a step of one evaluation"
        for group in self.param_groups:  # schedules set numbers, torchao takes tensors
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
        on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
            super().step()

    def state_ratio(self, param: Tensor) -> float:
        """State per element of a weight, in fp32 elements."""
        is_low = param.numel() >= 4096 and param.numel() % self.block_size == 0  # torchao's rule
        return 2 * (1 / 4 + 1 / self.block_size) if is_low else 2.0

    def state_dict(self) -> dict[str, Any]:
        """In plain tensors."""
        found = super().state_dict()
        return {**found, "state": {n: {k: _plain(v) for k, v in entry.items()} for n, entry in found["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` returned."""
        states = {n: {k: _quantised(v) for k, v in e.items()} for n, e in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": states})


def _plain(value: Any) -> Any:
    if not isinstance(value, _State8):
        return value
    return {"codes": value.codes, "scale": value.scale, "signed": value.signed}


def _quantised(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    levels = _State8.zeros((1,), value["signed"], 1, device=value["codes"].device).qmap
    return _State8(value["codes"], value["scale"], levels, value["signed"], dtype=torch.float32)
