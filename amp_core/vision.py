"""Import torchvision, also if its C++ operators cannot be loaded.

torchvision's wheel is built against one build of torch. Beside another one (the usual wheel from PyPI beside a CPU-only
torch) its shared library does not load, and `import torchvision` fails with `operator torchvision::nms does not exist`:
it registers shape rules for two operators that were never declared. Declaring those two is enough. Models, data sets
and transforms do not need the operators; a call of `torchvision.ops.nms` still raises torchvision's own error.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType

import torch

from amp_core.config.errors import ConfigError

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # torch removes the operators when the object is collected


def import_torchvision() -> ModuleType:
    """The torchvision module, without what of its compiled code cannot be loaded. ConfigError: it is not installed."""
    try:
        return _import()
    except ModuleNotFoundError as missing:
        if missing.name != "torchvision":
            raise
        raise ConfigError("this needs the package torchvision: pip install 'amp-recipes[vision]'") from missing
    except RuntimeError as error:
        if _declared or "operator torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _declared.append(library)
    return _import()


def _import() -> ModuleType:
    with warnings.catch_warnings():
        # Raised when TORCHVISION_WARN_WHEN_EXTENSION_LOADING_FAILS is set: the case handled here.
        warnings.filterwarnings("ignore", message="Failed to load '.*' extension", category=UserWarning)
        return importlib.import_module("torchvision")
