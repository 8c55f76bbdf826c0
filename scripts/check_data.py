"""Read every sample of a data set once, and list those that cannot be read: data.check=true without a recipe.

    python scripts/check_data.py image_folder /data/pets                  # {train,val}/<class>/*
    python scripts/check_data.py records /data/faces --workers 8
    python train.py data=image_folder data.path=/data/pets data.exclude=bad_samples.txt     # leaves them out

The list is bad_samples.txt in the present folder. Exit codes: 0 all can be read, 2 some cannot, or wrong arguments,
4 the list cannot be written, 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amp_core.cli.command import answering
from amp_core.config.kinds import KINDS
from amp_core.config.options import read_option
from amp_core.config.schema import DataConfig
from amp_core.run.check import check_samples


@answering
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=sorted(KINDS), metavar="data", help="what data= takes, such as image_folder")
    parser.add_argument("path", nargs="?", help="data.path")
    parser.add_argument("--eval-path", help="data.eval_path")
    parser.add_argument("--exclude", help="a list that is there; its samples go to the new one unread")
    parser.add_argument("--workers", type=int, help="processes")
    flags = parser.parse_args(arguments)
    values = read_option("data", flags.data)
    given = {"path": flags.path, "eval_path": flags.eval_path, "exclude": flags.exclude, "num_workers": flags.workers}
    check_samples(DataConfig(**values | {key: value for key, value in given.items() if value is not None}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
