"""Token shards for data=tokens, from texts: files and folders of plain text, *.jsonl, *.parquet.

    python scripts/tokens.py books --tokenizer smollm2 --out shards
    python scripts/tokens.py fineweb/*.parquet --tokenizer gpt2 --out fineweb10B --format llmc --val-tokens 100000000

Documents end with EOS and are never cut between shards. A killed run resumes with the same command. manifest.json has
the tokenizer's hash, dtypes and counts, <shard>.ends.npy the ends of documents. Exit codes: 2 a wrong file, by its
line; 4 cannot write.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amp_core.cli.command import answering
from amp_tools.tokens import FORMATS, Job, make_shards


@answering
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="files and folders")
    parser.add_argument("--tokenizer", required=True, help="a folder with tokenizer.json, or the file")
    parser.add_argument("--out", required=True, type=Path, help="the folder of the shards, a new or an unfinished one")
    parser.add_argument("--format", default="nanogpt", help=f"{', '.join(FORMATS)} (default: %(default)s)")
    parser.add_argument("--field", default="text", help="key or column with the document (default: %(default)s)")
    parser.add_argument("--shard-tokens", type=int, default=Job.shard_tokens, help="at most (default: %(default)s)")
    parser.add_argument("--val-tokens", type=int, default=0, help="of the first documents, as val_* (default: none)")
    parser.add_argument("--num-processes", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    flags = parser.parse_args(arguments)
    sizes = {"shard_tokens": flags.shard_tokens, "val_tokens": flags.val_tokens, "num_processes": flags.num_processes}
    job = Job(flags.sources, flags.tokenizer, flags.out, flags.format, flags.field, **sizes)
    print("\n".join(make_shards(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
