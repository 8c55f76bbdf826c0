"""The command `amp-recipes`: train.py, from any folder; and what messages call the programs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_ABOVE = Path(__file__).resolve().parents[2]
_IS_CHECKOUT = (_ABOVE / "train.py").is_file()


def main() -> None:
    """Run train.py as a program, so that what it sets up before it imports anything holds here, too."""
    if _IS_CHECKOUT:
        sys.path.insert(0, str(_ABOVE))  # Hydra finds our sweeper in it
    runpy.run_path(str(_ABOVE / ("" if _IS_CHECKOUT else "amp_recipes") / "train.py"), run_name="__main__")


def program() -> str:
    """How a user calls train.py here: by its command where that was typed or where it is installed."""
    typed = any(Path(text).name == "amp-recipes" for text in sys.orig_argv[:2])
    return "amp-recipes" if typed or not _IS_CHECKOUT else "python train.py"


def tool(name: str) -> str:
    """How a user calls a program of `scripts/` here."""
    return f"python scripts/{name}.py" if _IS_CHECKOUT else f"python -m amp_recipes.scripts.{name}"
