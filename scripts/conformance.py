"""Put trainers through the checks of `amp_conformance`, and write the table of docs/CONFORMANCE.md.

python scripts/conformance.py --trainer accelerate
python scripts/conformance.py --write docs/CONFORMANCE.md       all that are installed
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_conformance.__main__ import main
from amp_core.vision import import_torchvision

if __name__ == "__main__":
    import_torchvision()  # timm and Lightning import it in a way that fails beside a CPU-only torch
    sys.exit(main())
