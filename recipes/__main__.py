"""A worker: `python -m recipes JOB_FILE`, started by torch's elastic agent on behalf of train.py."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    if len(sys.argv) != 2 or "LOCAL_RANK" not in os.environ:
        from amp_core.cli.command import program

        print(f"error: python -m recipes is a worker of layout=ddp; use {program()} --help", file=sys.stderr)
        sys.exit(2)
    gc.disable()  # collections look again and again at all that was imported so far

from amp_core.run.launch import work
from recipes import run


def main() -> None:
    gc.freeze()
    gc.enable()
    code = work(Path(sys.argv[1]), run)
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads sometimes abort at exit; all work is done and written.
    os._exit(code)


if __name__ == "__main__":
    main()
