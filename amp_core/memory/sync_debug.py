"""torch.cuda.set_sync_debug_mode for a region: which operations make the host wait for the GPU."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

Mode = Literal["default", "warn", "error"]


def set_sync_debug(mode: Mode) -> None:
    """Set the mode for the whole process, all threads, without its warning."""
    # It says that the mode is a prototype. Where warnings are errors it is raised after the mode was set, and what
    # follows runs in that mode.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def sync_debug(mode: Mode) -> Iterator[None]:
    """Set the mode inside the context, and "default" again at its end."""
    try:
        set_sync_debug(mode)
        yield
    finally:
        set_sync_debug("default")


@contextlib.contextmanager
def noted_waits() -> Iterator[list[str]]:
    """Collect where this thread waits for the GPU inside the context: "file.py:12", once per wait.

    Waits do not interrupt the context. Backward passes count at the call that started them. Other warnings pass. torch
    does not see torch.cuda.synchronize and waits for events.
    """
    here, found = threading.get_ident(), []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
            if "synchronizing CUDA operation" not in str(message):
                show(message, category, filename, lineno, *more)
            elif threading.get_ident() == here:  # other threads may wait
                found.append(f"{Path(filename).name}:{lineno}")

        warnings.showwarning = note
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        with sync_debug("warn"):
            yield found
