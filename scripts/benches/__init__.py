"""What `scripts/bench.py` measures: contestants (`loops`), what they train (`work`), and how they are compared."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The project of this very folder, whatever is installed.
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
