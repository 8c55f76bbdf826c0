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

from amp_core.config.options import read_option
from amp_core.config.schema import DataConfig

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance of neighbouring numbers, relative: the most that one rounding changes."""
UNIT_OF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""The same by mode."""


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


_ports = list[socket.socket]()


def free_port() -> int:
    """A port of this machine that nobody else is given while this process lives.

    What `bind` finds for port 0 is free only until the probe closes: any connection may get it before a server listens.
    So this is one that the system hands out to nobody; a socket of that name keeps it from other tests.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for port in [*range(first - 1, 1023, -1), *range(last + 1, 65536)]:
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0amp_recipes_port_{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:  # somebody's
            lock.close()
        else:
            _ports.append(lock)
            return port
    raise RuntimeError(f"no free port outside {first} to {last}, which the system hands out by itself")
