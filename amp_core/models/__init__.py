"""Networks by name, in families."""

from amp_core.models.family import Family, build_model, check_model
from amp_core.models.images import CLASSIFIERS

__all__ = ["CLASSIFIERS", "Family", "build_model", "check_model"]
