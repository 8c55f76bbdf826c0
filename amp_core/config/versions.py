"""The versions of torch and Python that the tests pass with. Imports no torch; an older Python can read it, too."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version

TESTED = (
    ("2.11.0", "0.26.0", "3.12"),
    ("2.12.0", "0.27.0", "3.11"),
    ("2.13.0", "0.28.0", "3.11"),
    ("2.13.0", "0.28.0", "3.12"),
    ("2.13.0", "0.28.0", "3.13"),
    ("2.14.1", "0.29.2", "3.12"),
    ("2.15.0", "0.29.2", "3.13"),
)
"""torch, torchvision and Python: the rows of `make matrix`, which writes their results into docs/RELIABILITY.md."""
ANYWAY = "AMP_ANY_VERSION"
"""The environment variable that lets other versions run."""


def untested(torch: str | None = None, python: str | None = None) -> str | None:
    """Says what is wrong with these versions, by default those of this Python and the installed torch, or None."""
    if os.environ.get(ANYWAY):
        return None
    if torch is None:
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "(not installed)"
    python = python or "{}.{}.{}".format(*sys.version_info[:3])
    minors = tuple(f"{row[0].rpartition('.')[0]}." for row in TESTED)
    if torch.startswith(minors) and f"{python}.".startswith(tuple(f"{row[2]}." for row in TESTED)):
        return None
    seen = [f"{row[0]} with Python {row[2]}" for row in TESTED]
    return (
        f"torch {torch} with Python {python} is not supported; tested: torch {', '.join(seen)}. "
        f"Install one of these, or set {ANYWAY}=1 to try."
    )
