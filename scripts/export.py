"""Export a checkpoint as one plain file, to resume from or for other programs. No GPU and no process group is needed.

    python scripts/export.py outputs/language_model/2026-01-31_12-00-00 state.pt      # all of it; resume=state.pt
    python scripts/export.py <run folder> model.safetensors --part model              # weights
    python scripts/export.py <run folder>/checkpoints/step_00000500 ema.pt --part ema # averaged weights

The source is a run folder or a checkpoint, in one file or in shards; every byte that is used is verified first, and
nothing that is read can execute code. Exit codes: 2 wrong arguments, 3 no usable checkpoint, 4 cannot write.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amp_core.checkpoints.export import PARTS, export
from amp_core.cli.command import answering


@answering
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a run folder, a step folder, or a state.pt")
    parser.add_argument("target", type=Path, help="a new file, .pt or .safetensors")
    parser.add_argument(
        "--part", help=f"only the state dict of a network: {' or '.join(PARTS)}, or its name in the file"
    )
    flags = parser.parse_args(arguments)
    print("\n".join(export(flags.source, flags.target, flags.part)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
