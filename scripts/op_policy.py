"""The page docs/OP_POLICY.md: what autocast casts on a CPU and on CUDA, by calling every operator of a table.

    python scripts/op_policy.py            # prints it
    python scripts/op_policy.py --write    # puts it into docs/

Needs no GPU and takes about five seconds. The page holds for the version of torch that it names.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from pathlib import Path

import torch

from amp_core.lowp.op_policy import KEPT, THROUGH_FP32, cuda_policy, observed

PAGE = Path(__file__).resolve().parent.parent / "docs" / "OP_POLICY.md"

TEXT = """\
# What autocast casts, by device

CPU autocast and CUDA autocast differ for {differ} of {ops} operators. `amp.op_policy=cuda` gives a CPU the decisions
of CUDA for a whole run, with real arithmetic and gradients
(`python train.py amp=fp16 amp.op_policy=cuda device=cpu`); then {left} differ{those}.

Made by `python scripts/op_policy.py --write` with torch {version}, by calling each operator under autocast to fp16;
checked by `tests/unit/test_op_policy.py`. CUDA's column needs no GPU: fake tensors go through CUDA's dispatch.
Operators that do not accept them are missing: GRU cells, `grid_sample`, whole recurrent layers.

| in a cell | the result |
| --- | --- |
| fp16, fp32 | has this dtype, whether the inputs are 16-bit or fp32 |
| as given | has the dtype of the input |
| widest | is fp32 as soon as one input is |
| as given, not mixed | has the dtype of the inputs, which must be the same |
| raises | is an error |
| one / another | is the one for 16-bit inputs, the other for fp32 inputs |

## Different on a CPU and on CUDA

{different}

## The same on both

{same}

## What `amp.op_policy=cuda` changes

It also removes casts that only CPU autocast has. `{through}` then computes in fp32 and rounds its
result, because a CPU has no 16-bit kernel for it. These keep their CPU casts:

{kept}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.parent.name}/{PAGE.name} instead")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


def columns(dtype: torch.dtype) -> dict[str, tuple[str, str, str]]:
    """By operator: what a CPU makes of it, what CUDA does, and what a CPU does with CUDA's policy."""
    cpu, cuda = observed("cpu", dtype), observed("cuda", dtype)
    with cuda_policy():
        changed = observed("cpu", dtype)
    return {name: (cpu[name], cuda[name], changed[name]) for name in cpu}


def page() -> str:
    table = columns(torch.float16)
    left = [name for name, (_, cuda, changed) in table.items() if changed != cuda]
    different: dict[tuple[str, str], list[str]] = {}
    same: dict[tuple[str], list[str]] = {}
    for name, (cpu, cuda, _) in table.items():
        if cpu == cuda:
            same.setdefault((cpu,), []).append(name)
        else:
            different.setdefault((cpu, cuda), []).append(name)
    return TEXT.format(
        version=minor_version(),
        ops=len(table),
        differ=sum(map(len, different.values())),
        left=len(left),
        those=f" ({', '.join(left)})" if left else "",
        different=grouped(["CPU, fp16", "CUDA, fp16"], different),
        same=grouped(["both, fp16"], same),
        through=THROUGH_FP32,
        kept="\n".join(f"- {result}:\n  {listed(names)}" for result, names in KEPT.items()),
    )


def grouped(titles: list[str], groups: Mapping[tuple[str, ...], list[str]]) -> str:
    """A table with a row for each decision, and the operators with it."""
    rows = [[*titles, "operators"], ["---"] * (len(titles) + 1)]
    rows += [[*decision, "; ".join(names)] for decision, names in groups.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def listed(names: str) -> str:
    """Names in backquotes, on as many lines as they take."""
    return textwrap.fill(", ".join(f"`{name}`" for name in names.split()), 115, subsequent_indent="  ")


def minor_version() -> str:
    """The minor version of torch, such as 2.13: lists change between these."""
    return ".".join(torch.__version__.split(".")[:2])


if __name__ == "__main__":
    main()
