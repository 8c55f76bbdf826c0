"""Stands in for the module `os` where checkpoints are written, so that calls can be recorded, refused or be the last."""

from __future__ import annotations

import os
from typing import Any

from amp_core.checkpoints import folders, sharded


def use(calls: Any = os) -> None:
    """Have a save make its system calls through `calls`; by default through `os` again."""
    for module in (folders, sharded):
        setattr(module, "os", calls)  # noqa: B010 - the type checker knows that it is no module
