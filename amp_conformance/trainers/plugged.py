"""The trainers of this folder with the line of `amp_plugins` that protects them."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
from typing import Any

from amp_conformance.task import Task
from amp_plugins import GradScaler

_LINES = {
    "textbook": "amp_plugins.GradScaler in place of torch's, in every mode; guard(net), follow(schedules, average)",
    "accelerate": "protect(accelerator)",
    "fabric": "plugins=[FabricPrecision(...)]",
    "lightning": "plugins=[AmpPrecision(...)]",
    "huggingface": "class SafeTrainer(AmpMixin, Trainer)",
    "timm": "amp_plugins.timm.NativeScaler in every mode; guard(net), follow(schedule, average)",
    "ignite": "scaler=amp_plugins.GradScaler(...) in every mode; guard(net), follow(schedule, average)",
}


def policy(task: Task) -> dict[str, Any]:
    """The arguments of a scaler of ours."""
    bound = {} if task.max_scale is None else {"max_scale": task.max_scale}
    more = {"growth_interval": task.growth_interval, "enabled": task.mode == "fp16", "dtype": task.dtype}
    return {"init_scale": task.init_scale} | bound | more


def attach(self: Any, scaler: Any, net: Any, *parts: object) -> None:
    """For trainers whose user writes the loop."""
    scaler.guard(net)
    scaler.follow(*parts)


def _scale(self: Any, accelerator: Any, task: Task) -> None:
    from amp_plugins.accelerate import protect

    protect(accelerator, GradScaler("cpu", **policy(task)))


def _native(self: Any, task: Task) -> Any:
    from amp_plugins.timm import NativeScaler

    return NativeScaler("cpu", **policy(task))


def _plugin(self: Any, task: Task) -> Any:
    from amp_conformance.trainers.fabric import NAMES
    from amp_plugins import lightning

    kind = lightning.FabricPrecision if "Fabric" in self.name else lightning.AmpPrecision
    return kind(NAMES[task.mode], "cpu", GradScaler("cpu", **policy(task)))


def _scaler(self: Any, task: Task) -> Any:
    return GradScaler("cpu", **policy(task))


_METHODS: dict[str, dict[str, Any]] = {
    "textbook": {"scaler": _scaler, "attach": attach},
    "ignite": {"scaler": _scaler, "attach": attach},
    "timm": {"scaler": _native, "attach": attach},
    "accelerate": {"scale": _scale},
    "huggingface": {"scale": _scale},
    "fabric": {"plugin": _plugin},
    "lightning": {"plugin": _plugin},
}


def plugged(module: str, cls: str) -> Any:
    """A trainer of this folder with its line."""
    base = getattr(importlib.import_module(f"amp_conformance.trainers.{module}"), cls)
    more = {"name": f"{base.name} + plugin", "configuration": _LINES[module], "bounded": True}
    return type(f"{cls}Plus", (base,), {"documentation": "OTHER_TRAINERS.md", **_METHODS[module], **more})
