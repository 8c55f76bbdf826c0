"""Imports of before version 0.2 keep working until 0.3: modules that have moved, and names that have changed.

A program that imports `amp_core.losses` or `amp_core.Micro` gets what is in their place now, and a `DeprecationWarning`
that says what to write.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

NAMES = {
    "Birth": "FirstNonFinite",
    "Damaged": "CorruptFile",
    "Micro": "MicroBatch",
    "Piece": "Shard",
    "WholeStep": "CudaGraphStep",
    "decides_on_device": "can_skip_on_device",
    "examine": "validate",
    "gathered": "gather_full_state",
    "is_cut": "is_state_sharded",
    "is_part": "is_dtensor",
    "joint_norm": "global_grad_norm",
    "nearest": "suggest",
    "obstacle": "why_not_capturable",
    "on_parts": "step_on_local_shards",
    "shares": "microbatch_weights",
    "structure": "parse",
    "theirs": "torch_step",
    "trainable": "master_params",
    "whole": "full_tensor",
    "whole_copy": "full_copy",
}
"""Old name: new name."""

MODULES = {
    "agreement": ("checkpoints.reading",),
    "buffers": ("step.buffers",),
    "checkpoint": (
        "checkpoints.checkpoint",
        "checkpoints.reading",
        "checkpoints.plain_state",
        "checkpoints.parts",
        "checkpoints.sharded",
        "checkpoints.folders",
    ),
    "checks": ("config.checks",),
    "clip": ("step.clip",),
    "compiled": ("memory.compiled",),
    "compose": ("cli.compose", "cli.overrides", "cli.run_folders"),
    "datasets": ("data",),
    "datasets.base": ("data.base",),
    "datasets.identities": ("data.identities",),
    "datasets.images": ("data.images",),
    "datasets.masks": ("data.masks",),
    "datasets.records": ("data.records",),
    "datasets.text": ("data.text",),
    "config": ("config.schema", "config.rules", "config.lengths"),
    "doctor.advise": ("amp_tools.advise", "amp_tools.findings"),
    "doctor.cost": ("amp_tools.cost",),
    "doctor.forecast": ("amp_tools.forecast", "amp_tools.census", "amp_tools.heatmap"),
    "doctor.profile": ("amp_tools.profile", "amp_tools.measure"),
    "ema": ("step.ema",),
    "environment": ("run.process", "run.environment", "run.stop", "run.rendezvous", "run.locks"),
    "errors": ("config.errors",),
    "export": ("checkpoints.export",),
    "float8": ("lowp.float8",),
    "footprint": ("layouts.memory_model",),
    "fp16_convolutions": ("lowp.fp16_convolutions",),
    "fused": ("step.fused",),
    "graph": ("memory.graph",),
    "heartbeat": ("run.heartbeat",),
    "help": ("cli.help",),
    "islands": ("lowp.islands",),
    "launch": ("run.launch",),
    "layout": ("layouts.ddp", "tensors"),
    "lease": ("cli.lease",),
    "lint": ("lowp.lint",),
    "log": ("run.log", "run.lines", "run.trackers"),
    "loop": ("run.loop", "run.meters"),
    "losses": ("heads.losses",),
    "machine": ("run.machine",),
    "moments": ("lowp.moments",),
    "op_policy": ("lowp.op_policy",),
    "optimizers": ("step.optimizers",),
    "partial_fc": ("heads.partial_fc",),
    "pieces": ("checkpoints.shards",),
    "precision": ("step.amp", "step.report"),
    "preflight": ("run.preflight",),
    "recast": ("memory.recast",),
    "recompute": ("memory.recompute",),
    "redact": ("config.redact",),
    "report": ("amp_tools.report",),
    "rounding": ("lowp.rounding",),
    "scaler": ("step.scaler",),
    "schedule": ("step.schedule",),
    "shards": ("layouts.fsdp", "tensors", "checkpoints.shards", "checkpoints.parts"),
    "stages": ("layouts.stages",),
    "sweep": ("cli.sweep",),
    "sync_debug": ("memory.sync_debug",),
    "teardown": ("run.teardown",),
    "verification": ("heads.verification",),
    "versions": ("config.versions",),
    "weights": ("lowp.weights",),
    "window": ("step.window",),
    "zero": ("layouts.zero",),
}
"""Old module: where its names are now, below amp_core unless they begin with amp_tools."""


def renamed(home: str, name: str) -> str | None:
    """The new name for an old one, with a warning; None where there was none."""
    if name in NAMES:
        warn(f"{home}.{name}", f"{home}.{NAMES[name]}")
    return NAMES.get(name)


def _full(home: str) -> str:
    return home if home.startswith("amp_tools") else f"amp_core.{home}"


def find(module: str, name: str) -> Any:
    """What a name of an old module is now.

    Raises:
        AttributeError: it had no such name.
    """
    if not name.startswith("__"):
        for home in MODULES[module.removeprefix("amp_core.")]:
            found = importlib.import_module(_full(home))
            for known in (name, NAMES.get(name, name)):
                if hasattr(found, known):
                    return getattr(found, known)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is {new} now; the old name works until version 0.3", DeprecationWarning, stacklevel=3)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds old modules, before the folders of bytecode that an update of the sources leaves behind."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        name = fullname.removeprefix("amp_core.")
        if name == fullname or name == "config" or name not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        homes = MODULES[module.__name__.removeprefix("amp_core.")]
        warn(module.__name__, " or ".join(map(_full, homes)))
        module.__dict__["__getattr__"] = lambda name: find(module.__name__, name)


def install() -> None:
    """Let old modules be imported. `import amp_core` does it."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
