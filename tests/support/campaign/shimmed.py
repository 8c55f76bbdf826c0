"""Calls that fail below the run folder: by a small library that is loaded before libc."""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import train
from amp_core.checkpoints.folders import is_sound
from campaign import Plan, Result
from campaign.harness import checkpoints, outcome, start
from campaign.runs import Alone, clear, expect_same

SOURCE = Path(__file__).with_name("shim.c")
LIBRARY = "AMP_RECIPES_SHIM"
"""Environment variable: the library, where this process has loaded it."""
CALLS = {"open": 1, "write": 2, "fsync": 4, "rename": 8, "any call": 15}
ERRORS = {name: getattr(errno, name) for name in ("EIO", "ENOSPC", "EROFS", "EFBIG")}
LINES_MISSING = "lines will be missing"


def load_before_libc(folder: Path) -> None:
    """Start this program again with the library; without a compiler, or with it already there, nothing happens."""
    compiler = shutil.which("cc")
    if os.environ.get(LIBRARY) or compiler is None:
        return
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    before = os.environ.get("LD_PRELOAD")
    environ = {LIBRARY: str(library), "LD_PRELOAD": f"{library}:{before}" if before else str(library)}
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environ)


def _left_out(result: Result) -> bool:
    if not os.environ.get(LIBRARY):
        result.facts["left out"] = "needs a C compiler (cc)"
    return not os.environ.get(LIBRARY)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ[LIBRARY])
    library.shim_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_int]
    library.shim_count.restype = library.shim_failed.restype = ctypes.c_long
    return library


def _with_failing_calls(rank: int, *, folder: Path, calls: int, at: range, number: int) -> None:
    """Make calls below the run folder fail, and note how many there were, and how many failed."""
    library, run = _library(), train.main
    library.shim_fail(os.fsencode(folder), calls, at.start, at.stop, number)

    def main(command: list[str]) -> int:
        try:
            return run(command)
        finally:
            counts = library.shim_count(), library.shim_failed()
            library.shim_fail(b"", 0, 0, 0, 0)
            folder.with_name(f"{folder.name}.calls").write_text(json.dumps(counts))

    setattr(train, "main", main)  # noqa: B010 - a fault


def errors(plan: Plan) -> Result:
    """Opening, writing, bringing to disk and renaming fail once, for a while or from then on: what `ERRORS` names."""
    result = Result()
    if _left_out(result):
        return result
    folder = plan.inside("errors")
    alone, torn = Alone(folder), folder / "torn"
    kinds = 24 if plan.long else 3
    for case, rng in plan.cases("errors", short=5, long=240):
        kind, expected, _ = alone.drawn(plan, f"errors/{case % kinds}", num_ranks=1)
        name, error = rng.choice(sorted(CALLS)), rng.choice(sorted(ERRORS))
        fault = functools.partial(_with_failing_calls, folder=torn, calls=CALLS[name], number=ERRORS[error])
        (child,) = start(torn, kind.command, before=functools.partial(fault, at=range(0)))
        assert child.wait() == 0, child.text[-900:]
        most = json.loads(torn.with_name("torn.calls").read_text())[0]
        clear(torn)
        begin = rng.randint(1, most)
        at = range(begin, begin + rng.choice([0, 0, 1, 5, 10**9]))
        (child,) = start(torn, kind.command, before=functools.partial(fault, at=at))
        code = child.wait()
        failed = json.loads(torn.with_name("torn.calls").read_text())[1]
        times = "once" if failed == 1 else f"{failed} times" if at.stop < 10**9 else "for ever"
        what = f"{error} at {name} {begin} of {most}, {times}"
        result.counts[f"runs with a failing call ({error})"] += failed > 0
        result.counts["of these ended with 4 and resumed"] += bool(failed and code)
        result.expect(code in (0, 2, 4), case, f"{what}: exit code {code}: {child.text[-700:]}")
        # At the start of a line: errno's own texts hold the word, too.
        is_clear = (
            len(re.findall(r"^error: ", child.text, re.MULTILINE)) == (code != 0) and "Traceback" not in child.text
        )
        result.expect(is_clear, case, f"{what}: no clear message: {child.text[-1500:]}")
        result.expect(not failed or code or len(child.text.splitlines()) < 60, case, f"{what}: says too much")
        damaged = [path.name for path in checkpoints(torn) if not is_sound(path)]
        result.expect(not damaged, case, f"{what}: {damaged} are damaged")
        is_whole = LINES_MISSING not in child.text
        if code:
            (again,) = start(torn, kind.command)
            result.expect(again.wait() == 0, case, f"{what}: does not go on: {again.text[-900:]}")
        told = outcome(torn)
        if not is_whole:
            result.counts["of these reported missing lines"] += 1
            expected, told = expected | {"lines": None}, told | {"lines": None}
        expect_same(expected, told, result, case, what)
        clear(torn)
    result.facts["kinds of runs, all drawn"] = str(kinds)
    return result
