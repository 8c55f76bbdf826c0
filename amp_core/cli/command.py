"""The command `amp-recipes` of an installed package: train.py, from any folder."""

from __future__ import annotations

import runpy
from pathlib import Path


def main() -> None:
    """Run train.py as a program, so that what it sets up before it imports anything holds here, too."""
    above = Path(__file__).resolve().parents[2]
    installed = above / "amp_recipes" / "train.py"
    runpy.run_path(str(installed if installed.is_file() else above / "train.py"), run_name="__main__")
