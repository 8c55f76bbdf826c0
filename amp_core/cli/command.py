"""Programs: the command `amp-recipes`, which is train.py from any folder; their names in messages, their ends, their
threads. Imports no torch: how threads wait must be settled before."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from amp_core.config.errors import RunError
from amp_core.config.redact import shown
from amp_core.run.terminal import complain

MOST_LINES, LONGEST = 40, 8192
"""Problems that a message lists, and characters of an argument: Hydra's parser takes minutes for longer ones."""

_ABOVE = Path(__file__).resolve().parents[2]
_IS_CHECKOUT = (_ABOVE / "train.py").is_file()
TRAIN = _ABOVE / ("" if _IS_CHECKOUT else "amp_recipes") / "train.py"


def main() -> None:
    """Run train.py as a program, so that what it sets up before it imports anything holds here, too."""
    if _IS_CHECKOUT:
        sys.path.insert(0, str(_ABOVE))  # Hydra finds our sweeper in it
    runpy.run_path(str(TRAIN), run_name="__main__")


def program() -> str:
    """How a user calls train.py here: by its command where that was typed or where it is installed."""
    typed = any(Path(text).name == "amp-recipes" for text in sys.orig_argv[:2])
    return "amp-recipes" if typed or not _IS_CHECKOUT else "python train.py"


def tool(name: str) -> str:
    """How a user calls a program of `scripts/` here."""
    return f"python scripts/{name}.py" if _IS_CHECKOUT else f"python -m amp_recipes.scripts.{name}"


def limit_spinning() -> None:
    """Let OpenMP's threads sleep after waiting for 0.1 ms, in this process and in those that it starts.

    By default they spin for much longer. Where another process holds one of the cores, each parallel region then waits
    until the scheduler takes a spinning thread away, so that a run takes many times as long. Sleeping immediately would
    cost a small network half of its speed on an idle machine. GNU's OpenMP reads the count of spins; others read the
    policy alone, and sleep immediately. A no-op if torch is imported already, or the environment sets how to wait.
    """
    ours = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "3000"}
    if "torch" not in sys.modules and not {*ours, "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ |= ours


def answering(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """`main(arguments) -> exit code` of a program: an error that its user can act on becomes one message and a code."""

    @functools.wraps(main)
    def answered(arguments: list[str]) -> int:
        try:
            return main(arguments)
        except RunError as refused:
            say_error(refused)
            return refused.exit_code

    return answered


def say_error(refused: RunError) -> None:
    """Print each problem on its own line, on one rank only."""
    if problems := getattr(refused, "problems", str(refused).splitlines()):
        lines = [shown(problem) for problem in problems[:MOST_LINES]]
        lines = [line if len(line) < LONGEST else f"{line[:LONGEST]}..." for line in lines]
        if more := problems[MOST_LINES:]:
            lines.append(f"and {len(more)} more")
        complain("\n       ".join(lines))
