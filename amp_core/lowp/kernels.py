"""Kernels of ours in place of torch's, in the whole process and all its threads, until they are removed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from amp_core.torch_private import find

end_library = find("torch.library.Library._destroy")
"""Restores torch's kernels; None: nothing is to be replaced."""


class Kernels:
    """Those of one dispatch key, by the name of their operator. Starts without any."""

    def __init__(self, key: str) -> None:
        self.names: set[str] = set()
        self._key, self._switching = key, threading.Lock()
        self._library: torch.library.Library | None = None

    def add(self, kernels: Mapping[str, Any], **how: Any) -> None:
        """Register those of operators that have none yet; `how` as in `torch.library.Library.impl`."""
        with self._switching, warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?s).*[Oo]verriding a previously registered kernel", UserWarning)
            self._library = self._library or torch.library.Library("aten", "IMPL")
            try:
                for name in kernels.keys() - self.names:  # a second kernel would outlive the first one's removal
                    self._library.impl(name, kernels[name], self._key, **how)
                    self.names.add(name)
            except BaseException:
                self._remove()
                raise

    def remove(self) -> None:
        """Restore torch's own. Idempotent."""
        with self._switching:
            self._remove()

    def _remove(self) -> None:
        if self._library is not None:
            end_library(self._library)
        self._library = None
        self.names.clear()
