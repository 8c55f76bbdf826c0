"""Networks by name, in families."""

from __future__ import annotations

from amp_core.models.family import Family, build_model, check_model

__all__ = ["Family", "build_model", "check_model"]
