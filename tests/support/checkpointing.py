"""What the tests of checkpoints share: bits to compare, a small network, and checkpoints made by hand."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import torch
from shared import names, seal
from torch import Tensor, nn
from torch.optim import AdamW

from amp_core.checkpoints.checkpoint import Checkpoint, Loaded

FORMATS = ["single", "sharded"]
FILE = "whole_00000.safetensors"


def bits(value: Any) -> Any:
    """A value that compares equal only when every bit and every type is equal."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().cpu().flatten().contiguous().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    return type(value), repr(value)


def tiny(value: float = 0.0, size: int = 4) -> nn.Linear:
    net = nn.Linear(size, size)
    nn.init.constant_(net.weight, value)
    nn.init.constant_(net.bias, value)
    return net


def must_load(checkpoint: Checkpoint, path: Path | None = None) -> Loaded:
    loaded = checkpoint.load(path)
    assert loaded is not None
    return loaded


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(name.removeprefix("step_")) for name in names(folder))


def forge(folder: Path, data: bytes, step: int = 1, **changes: Any) -> Path:
    """A step folder with a manifest that is right."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.pt").write_bytes(data)
    files = {"state.pt": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    seal(folder, {"format": 1, "step": step, "files": files, "metrics": {}, **changes})
    return folder


def pickled(contents: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(contents, buffer, **options)
    return buffer.getvalue()


def whole(**entries: Any) -> dict[str, Any]:
    return {"scaler": {}, "progress": {}, "config": {}, "format": 1, **entries}


class Recorder:
    """A part that is not a net and not an optimizer."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.loaded: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)

    def reset(self) -> None:
        self.loaded.append("reset")


class Parts:
    """Two networks with their moments, and a part that is no tensor."""

    def __init__(self, value: float = 0.0) -> None:
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        for tensor in self.net.state_dict().values():
            tensor.fill_(value)
        self.net[2].weight = nn.Parameter(torch.full((3, 3), value).bfloat16())
        self.optimizer = AdamW(self.net.parameters())
        for param in self.net.parameters():
            param.grad = torch.full_like(param, value)
        self.optimizer.step()

    def checkpoint(self, folder: Path, **options: Any) -> Checkpoint:
        options = {"format": "sharded"} | options
        return Checkpoint(folder, model=self.net, optimizer=self.optimizer, **options)

    def state(self) -> Any:
        return [self.net.state_dict(), self.optimizer.state_dict()["state"]]
