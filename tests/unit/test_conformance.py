"""The checks of `amp_conformance` are right: a right loop passes all, each wrong one is caught by what should catch it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from running import Forked

from amp_conformance import CHECKS
from amp_conformance.__main__ import main
from amp_conformance.networks import apart, mean, numbers
from amp_conformance.table import REPRODUCE
from amp_conformance.task import Batch
from amp_core.vision import import_torchvision

pytestmark = pytest.mark.usefixtures("own_folder")

ROOT = Path(__file__).resolve().parents[2]
SHOW = "import json, sys; sys.path.insert(0, 'tests/support'); import amp_conformance; from broken_trainers import *;"
SHOW += "from broken_trainers import BROKEN; from amp_conformance.trainers.by_hand import ByHand;"


def forked(act: Callable[[], int]) -> tuple[int | None, str, str]:
    """Exit code, output and messages of a process that has imported torch and run nothing.

    Checks fork, and this process may have threads.
    """
    process = Forked(_in_root, act)
    said = process.communicate(timeout=280)[0]
    return process.returncode, Path("printed").read_text(), said


def _in_root(act: Callable[[], int]) -> int:
    with Path("printed").open("w") as file, contextlib.redirect_stdout(file):
        os.chdir(ROOT)
        return act()


def told(code: str) -> object:
    """The JSON that code prints."""
    status, printed, said = forked(partial(_execute, SHOW + "\n" + code))
    assert status == 0, said
    return json.loads(printed)


def _execute(code: str) -> int:
    exec(code, {"__name__": "__main__"})
    return 0


def table(*arguments: str) -> tuple[int | None, list[str]]:
    """Exit code and lines of the command line."""
    status, printed, _ = forked(partial(_conformance, arguments))
    return status, printed.splitlines()


def _conformance(arguments: Sequence[str]) -> int:
    import_torchvision()  # as scripts/conformance.py
    return main(arguments)


@pytest.mark.slow
def test_the_right_loop_passes_every_check() -> None:
    code, lines = table("--trainer", "by_hand")
    assert [line for line in lines[1:] if not line.startswith("passed ")] == []
    assert code == 0 and len(lines) > 30


def test_amp_core_passes_every_check() -> None:
    code, lines = table("--trainer", "ours")
    assert [line for line in lines[1:] if not line.startswith("passed ")] == []
    assert code == 0


@pytest.mark.slow
def test_each_broken_trainer_is_caught_by_what_should_catch_it() -> None:
    code = "print(json.dumps([[c.__name__, str(r)] for c, right in BROKEN.items() for r in amp_conformance.run(c(), sorted(right))"
    code += " if r.status not in ('failed', 'error')] + [len(BROKEN)]))"
    *missed, number = told(code)  # type: ignore[misc]
    assert missed == []
    assert number >= 20


def test_no_seed_makes_a_wrong_weighting_right() -> None:
    """A mean of means is that of all samples where the means are equal, as they are for one seed in some twelve."""

    def hidden(draws: list[list[Batch]]) -> int:
        return sum(mean(*batches) == (mean(batches[0]) + mean(batches[1])) / 2 for batches in draws)

    seeds = [random.Random(seed) for seed in range(1000)]
    assert hidden([apart(draw, 1, 3) for draw in seeds]) == 0
    assert hidden([[numbers(draw, size=1), numbers(draw, size=3)] for draw in seeds]) > 20
    # Nor is a window that begins a micro-batch or a window too early or late the right one.
    sums = [mean(one) + mean(other) for one, other in pairwise(apart(random.Random(0), *[2] * 12, largest=31))]
    assert len(set(sums)) == 11


@pytest.mark.slow
def test_each_broken_trainer_is_caught_by_nothing_else() -> None:
    """Each of them meets a sixth of the other checks, and each check a sixth of them: all pairs take minutes."""
    code = "print(json.dumps([[c.__name__, str(r)] for i, (c, right) in enumerate(BROKEN.items())"
    code += " for r in amp_conformance.run(c(), [n for k, n in enumerate(amp_conformance.CHECKS)"
    code += " if n not in right and (i + k) % 6 == 0]) if r.status != 'passed']))"
    assert told(code) == []


@pytest.mark.slow
def test_a_trainer_that_raises_hangs_or_dies_does_not_stop_the_others() -> None:
    code = "names = ['zero gradients', 'processes skip together'];"
    code += "print(json.dumps([str(r) for c in (Raises, Hangs, Dies, ByHand)"
    code += " for r in amp_conformance.run(c, names, limit=2 if c is Hangs else 20)]))"
    raised, raised_on_ranks, hung, hung_on_ranks, died, died_on_ranks, *right = told(code)  # type: ignore[misc]
    assert raised.startswith("error") and raised_on_ranks.startswith("error") and "ValueError: out of order" in raised
    assert hung.startswith("hung") and hung_on_ranks.startswith("hung") and "no answer within 2 s" in hung
    assert died.startswith("error") and died_on_ranks.startswith("error") and "its process died" in died
    assert all(each.startswith("passed") for each in right) and len(right) == 2


@pytest.mark.slow
def test_a_trainer_that_changes_the_process_is_told_and_changes_no_other_check() -> None:
    code = "names = ['zero gradients', 'sparse gradients'];"
    code += "print(json.dumps([str(r) for r in amp_conformance.run(ChangesTheProcess, names)]))"
    for each in told(code):  # type: ignore[attr-defined]
        assert each.startswith("passed")  # the second begins as the first did
        assert "default dtype (torch.float32 -> torch.float64)" in each and "autocast (False -> True)" in each
        assert "gradients (True -> False)" in each and "seed (" in each and "threads (1 -> 3)" in each
        assert "deterministic algorithms (False -> True)" in each and "matmul precision (highest -> medium)" in each


@pytest.mark.slow
def test_what_a_hanging_trainer_started_is_ended_with_it() -> None:
    code = """
import os, select
class Starts(ByHand):
    def window(self, window):
        os.fork()
        while True:
            pass
here, there = os.pipe()  # closed when nothing that inherited it lives
amp_conformance.run(Starts, ["zero gradients"], limit=2)
os.close(there)
print(len(select.select([here], [], [], 10)[0]))
"""
    assert told(code) == 1


def test_an_unknown_trainer_is_refused_in_a_sentence() -> None:
    status, printed, said = forked(partial(main, ["--trainer", "fabrik"]))
    assert status == 2 and printed == ""
    assert "error: --trainer fabrik: " in said and "expected one of by_hand, textbook" in said


@pytest.mark.slow
def test_the_example_of_the_page_runs() -> None:
    page = (ROOT / "docs" / "CONFORMANCE.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    status, printed, said = forked(partial(_execute, example))
    assert status == 0, said
    found = dict(reversed(line.split(maxsplit=1)) for line in printed.splitlines())  # type: ignore[arg-type]
    assert found["accumulation equals a larger batch"] == "passed"
    assert any(line.startswith("failed") and "a nan in bf16 reaches no weight" in line for line in printed.splitlines())


@pytest.mark.parametrize(
    "name",
    [
        f"{name}{plus}"
        for name in ("accelerate", "fabric", "lightning", "huggingface", "timm", "ignite")
        for plus in ("", "+")
    ],
)
@pytest.mark.slow
def test_the_adapters_of_other_trainers_work(name: str) -> None:
    if (
        importlib.util.find_spec(
            {"fabric": "lightning", "huggingface": "transformers"}.get(name.rstrip("+"), name.rstrip("+"))
        )
        is None
    ):
        pytest.skip(f"{name} is not installed")
    # A fourth of the checks; scripts/conformance.py runs all, for the page.
    few = ["accumulation equals a larger batch", *list(CHECKS)[len(name) % 4 :: 4]]
    _, lines = table("--trainer", name, *(text for check in dict.fromkeys(few) for text in ("--check", check)))
    assert any(line.startswith("passed       accumulation equals a larger batch") for line in lines)
    kept = json.loads((ROOT / "benchmarks" / "conformance.json").read_text())[name]["results"]
    refused = tuple(f"error        {check}: " for check, (result, _) in kept.items() if result == "error")
    assert [line for line in lines if line.startswith(("hung", "error")) and not line.startswith(refused)] == []


def test_the_package_stands_alone() -> None:
    """Nothing of this project is imported but by its adapters."""
    found = {
        path.name: re.findall(
            r"^\s*(?:from|import) (amp_core|amp_plugins|amp_tools|recipes)\b", path.read_text(), re.MULTILINE
        )
        for path in (ROOT / "amp_conformance").rglob("*.py")
    }
    assert {name for name, imports in found.items() if imports} == {"ours.py", "plugged.py"}


@pytest.mark.slow
def test_the_line_of_the_page_reproduces_one_check() -> None:
    line = shlex.split(REPRODUCE.replace("NAME", "textbook").replace("CHECK", "a nan in fp32 reaches no weight"))
    assert f"`{REPRODUCE}` runs one check" in (ROOT / "docs" / "CONFORMANCE.md").read_text()
    assert subprocess.run([sys.executable, *line[1:]], cwd=ROOT, capture_output=True, check=False).returncode == 1
