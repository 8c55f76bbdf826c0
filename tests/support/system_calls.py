"""Stands in for the module `os` where checkpoints are written and removed: calls are recorded, refused or the last."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amp_core.checkpoints import folders, sharded
from amp_core.config import files

CHANGING = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
Call = tuple[str, tuple[Any, ...], Any]
"""(name, arguments, result)"""


def use(calls: Any = os) -> None:
    """Have a save make its system calls through `calls`; by default through `os` again."""
    for module in (files, folders, sharded, shutil):
        setattr(module, "os", calls)  # noqa: B010 - the type checker knows that it is no module


class Calls:
    """Notes the calls that change a file system, and ends at one of them.

    Args:
        at: number of the call at which `fault` happens; None: never.
        fault: "before" and "after" end the process there, "half" within a write; an error's number is raised.
    """

    def __init__(self, at: int | None = None, fault: str | int = "") -> None:
        self.at, self.fault = at, fault
        self.trace: list[Call] = []
        self._opened: dict[int, Path] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return (lambda *args, **at: self._call(name, real, args, at)) if name in CHANGING else real

    def _call(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], at: dict[str, int]) -> Any:
        now = len(self.trace) == self.at
        if now and isinstance(self.fault, int):
            self.trace.append((name, (), None))
            if name == "close":
                real(*args)  # it is closed all the same
            raise OSError(self.fault, os.strerror(self.fault))
        if now and self.fault == "before":
            os._exit(9)
        if now and self.fault == "half":
            args = (args[0], bytes(args[1])[: len(args[1]) // 2])
        result = real(*args, **at)
        if now:
            os._exit(9)
        noted = tuple(bytes(arg) if isinstance(arg, memoryview) else arg for arg in args)
        if at:  # paths as they would be without descriptors of their folders
            noted = tuple(self._opened[folder] / name for name, folder in zip(noted, at.values(), strict=False))
        if name == "open":
            self._opened[result] = Path(noted[0])
        self.trace.append((name, noted, result))
        return result
