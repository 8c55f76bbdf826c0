"""What several test files need: settings of data sets, distances, damaged files, free ports."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from amp_core.config.schema import DataConfig, read_option


def data_config(name: str, **values: Any) -> DataConfig:
    """A data set of conf/data, with other values."""
    return dataclasses.replace(DataConfig(**read_option("data", name)), **values)


def relative(a: Tensor, b: Tensor) -> float:
    """Distance of `a` to `b`, relative to the norm of `b`, in fp64."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def a_weight(lr: float = 1.0, **options: Any) -> tuple[Tensor, Optimizer]:
    """A weight of 0, and SGD over it."""
    weight = torch.zeros(1, requires_grad=True)
    return weight, SGD([weight], lr=lr, **options)


def flip(path: Path, at: int = -1) -> None:
    """Change a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a checkpoint with its digest; by hand, so that it holds the format of the file too."""
    manifest.pop("digest", None)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    text = json.dumps({**manifest, "digest": digest}, sort_keys=True, indent=2) + "\n"
    (folder / "manifest.json").write_text(text)


def script(path: str) -> Any:
    """A program of this repository as a module, `scripts/doctor.py` as `scripts_doctor`."""
    file = Path(__file__).resolve().parents[2] / path
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
