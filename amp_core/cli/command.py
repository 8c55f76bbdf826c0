"""The command `amp-recipes` of an installed package: train.py, from any folder."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run train.py as a program, so that what it sets up before it imports anything holds here, too."""
    above = Path(__file__).resolve().parents[2]
    script = above / "amp_recipes" / "train.py"
    if not script.is_file():  # a checkout: Hydra finds our sweeper in it
        sys.path.insert(0, str(above))
        script = above / "train.py"
    runpy.run_path(str(script), run_name="__main__")
