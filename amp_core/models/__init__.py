"""Networks by name, in families, each in a module of its own."""

from __future__ import annotations

import importlib
from typing import Any

from amp_core.models.family import Family, build_model, check_model

_HOME = {
    "CLASSIFIERS": "images",
    "EMBEDDERS": "iresnet",
    "GANS": "dcgan",
    "LANGUAGE_MODELS": "gpt",
}

__all__ = ["Family", "build_model", "check_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
