"""What the bits of a result depend on besides the code: processor, instruction set, threads, torch, GPU.

Kernels are chosen by what the processor has and sum in an order that depends on the number of threads. So a run that
is resumed elsewhere is as good as before, but no longer bit for bit the run that was not interrupted.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from amp_core.config.files import read_json
from amp_core.config.options import CONFIG_DIR
from amp_core.lowp.through_fp32 import in_use
from amp_core.run.environment import Environment

_FEATURES = re.compile(r"(sse4|avx|amx|fma|f16c|asimd|sve|bf16|i8mm)\w*|sme\d*")
"""Instruction sets that kernels are chosen by, as Linux names them."""
_OF_CPU = ("cpu", "cpu_features", "cpu_capability", "onednn_max_cpu_isa", "threads")
"""The keys of `describe_cpu`."""


def describe(env: Environment) -> dict[str, Any]:
    """Versions, device, git commit and command line."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    return {
        "command": env.job.command,
        "folder": os.getcwd(),  # relative paths among the settings begin here
        "config_dir": os.environ.get(CONFIG_DIR) or None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": describe_versions(),
        "device": describe_device(env.device),
        **describe_cpu(),
        "through_fp32": in_use(),
        "world_size": env.world_size,
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain")),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def describe_cpu() -> dict[str, Any]:
    """The processor and how torch uses it, as environment.json keeps it."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
    fields = dict(re.findall(r"^(.*?)\s*:[ \t]*(.*)$", text, re.MULTILINE))
    name = fields.get("model name") or " ".join(fields[key] for key in ("CPU implementer", "CPU part") if key in fields)
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    features = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "cpu": name or platform.processor() or platform.machine(),
        "cpu_features": sorted(filter(_FEATURES.fullmatch, features)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # ATEN_CPU_CAPABILITY may have lowered it
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "threads": torch.get_num_threads(),
    }


def describe_versions() -> dict[str, str]:
    """The versions of the packages that a run computes with, where they are installed."""
    found = {}
    for package in ("torch", "torchvision", "hydra-core", "omegaconf", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def describe_device(device: torch.device) -> dict[str, Any]:
    """The device that a run computes on, as environment.json keeps it."""
    if device.type != "cuda":
        return {"type": device.type, "name": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }


def changed_machine(checkpoint: Path, device: torch.device) -> str | None:
    """What to log when a checkpoint was made on another machine than this one: one sentence that names both.

    None if they are alike, or nothing is known about the other one: environment.json of its run folder tells.
    """
    before: Any = None
    for folder in checkpoint.absolute().parents[:3]:
        with contextlib.suppress(OSError, ValueError):
            before = read_json(folder / "environment.json")
            break
    now = {"device": describe_device(device), "versions": describe_versions(), **describe_cpu()}
    try:
        then, here = _what_matters(before), _what_matters(now)
    except (KeyError, TypeError):  # no such file, or another's
        return None
    changed = [key for key in then if key in here and then[key] != here[key]]
    if not changed:
        return None
    return (
        f"the checkpoint was made with {_spell(then, here, changed)}, this run continues with "
        f"{_spell(here, then, changed)}: from here on bits may differ from those of an uninterrupted run"
    )


def _what_matters(described: dict[str, Any]) -> dict[str, Any]:
    """By name, what decides about bits, from the contents of environment.json."""
    device = described["device"]
    found = {"device": device["type"], "torch": described["versions"]["torch"]}
    if device["type"] == "cuda":
        return found | {"gpu": device["name"], "cuda": device["cuda"]}
    return found | {key: described[key] for key in _OF_CPU}


def _spell(these: dict[str, Any], others: dict[str, Any], keys: list[str]) -> str:
    words = []
    for key in keys:
        value = these[key]
        if isinstance(value, list) and isinstance(others[key], list):
            value = " ".join(str(each) for each in value if each not in others[key]) or "none of these"
        words.append(f"{key}={'unset' if value is None else value}")
    return ", ".join(words)
