"""A face recognition run on insightface's verification sets, by insightface's protocol.

    python scripts/verify_faces.py outputs/face_recognition/2026-01-31_12-00-00 lfw.bin cfp_fp.bin agedb_30.bin

Exit codes: 2 wrong arguments or files, 3 no usable checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amp_core.cli.command import answering
from amp_tools.faces import verify_run


@answering
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder or a checkpoint")
    parser.add_argument("bins", type=Path, nargs="+", help=".bin files")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "xpu", "mps"))
    flags = parser.parse_args(arguments)
    for name, found in verify_run(flags.run, flags.bins, flags.device).items():
        print(f"{name}: accuracy {found['accuracy']:.4f} ± {found['std']:.4f}, TAR {found['tar']:.4f} at FAR 1e-3")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
