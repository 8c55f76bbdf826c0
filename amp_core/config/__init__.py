"""The configuration; imports no torch."""

from __future__ import annotations

from typing import Any

from amp_core import moved


def __getattr__(name: str) -> Any:
    value = moved.find(__name__, name)
    moved.warn(f"{__name__}.{name}", f"{value.__module__}.{value.__name__}" if hasattr(value, "__name__") else name)
    return value
