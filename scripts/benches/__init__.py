"""What `scripts/bench.py` measures.

A benchmark is a module here with two functions, and takes part by existing:

    def options(parser: argparse.ArgumentParser) -> None    its own options; --json, --picture and --device are given
    def measure(flags: argparse.Namespace) -> Result        see `result`

The first line of its docstring is its line in `--help`. Two constants are optional: `FULL`, its options in
`bench.py all`; `SHORT`, those for a look of seconds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The project of this very folder, whatever is installed.
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
