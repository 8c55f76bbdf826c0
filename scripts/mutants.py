"""Mutants of the core: which changes of its code do the tests notice?

    python scripts/mutants.py --count 200                 # draws with --seed 0, resumes from mutants.jsonl
    python scripts/mutants.py --again 17 --tests tests/unit/test_clip.py    # once more, after a test was written
    python scripts/mutants.py --equivalent 17 "a cache: only the time changes"
    python scripts/mutants.py                             # the table of docs/RELIABILITY.md

A mutant is one change of one expression or statement, never in annotations, docstrings, decorators, messages or what is
logged. In a copy of this tree the fast tests are first run once, to see which of them reach which line (a table beside
the JSON file); then each mutant meets the tests that reach its line, and those whose lines run in other processes. One
at a time. Each mutant is a line of the JSON file; a later line about the same mutant replaces the former.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
GLOBS = ("amp_core/step/*.py", "amp_core/lowp/*.py", "amp_core/layouts/*.py", "amp_core/checkpoints/parts.py")
TESTS = """
    recipes/gan recipes/model_parallel recipes/segmentation runs/fsdp runs/scaling unit/adam8 unit/behaviours
    campaign/optimizers runs/low_shards unit/buffers unit/checkpoint unit/checkpoint_damage
    unit/checkpoint_optimizers unit/clip unit/compiled unit/ddp unit/products unit/through_fp32 unit/formats
    unit/fused unit/graph unit/groups unit/idioms unit/islands unit/island_patterns unit/losses unit/meters
    unit/misuse unit/moments unit/muon unit/observer unit/op_policy unit/precision unit/ranks unit/recast unit/recompute
    unit/right_and_wrong unit/scaler unit/schedule_ema unit/skips unit/sparse_gradients unit/step_cost unit/waits
    unit/weights unit/weights_in_networks unit/windows unit/zero"""
FLIPPED = {ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn, ast.Lt: ast.GtE, ast.Gt: ast.LtE}
FLIPPED |= {new: old for old, new in FLIPPED.items()}
BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
SECONDS = 400
"""A mutant's tests have as long."""


# --- mutants ----------------------------------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """The mutants of one node: kind, the node that is replaced, its new text."""

    def like(**fields: Any) -> str:
        changed = copy.copy(node)
        vars(changed).update(fields)
        return f"({ast.unparse(changed)})"

    if isinstance(node, ast.Compare):
        for kind, table in ("comparison flipped", FLIPPED), ("boundary", BOUNDARY):
            for i, op in enumerate(node.ops):
                if type(op) in table:
                    yield kind, node, like(ops=[*node.ops[:i], table[type(op)](), *node.ops[i + 1 :]])
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        sides = node.left, node.right
        if not any(isinstance(x, ast.JoinedStr) or isinstance(getattr(x, "value", 0), str) for x in sides):
            yield "arithmetic", node, like(op=ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield "and, or", node, like(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "not or minus removed", node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        values = [not node.value] if isinstance(node.value, bool) else [node.value + 1, 0 if node.value else -1]
        for value in values:
            yield "constant", node, repr(value)
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return value", node.value, "None"
        if isinstance(node.value, ast.Call) and node.value.args and not isinstance(node.value.args[0], ast.Starred):
            yield "return value", node.value, f"({ast.unparse(node.value.args[0])})"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call deleted", node, "pass"
    elif isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                yield "keyword dropped", node, like(keywords=node.keywords[:i] + node.keywords[i + 1 :])
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp) else getattr(node, "ifs", [])
    for test in tests:
        yield "condition", test, "True"
        yield "condition", test, "False"


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes whose meaning is code: no annotations, decorators, messages, f-strings, or what is logged."""
    logs = isinstance(node, ast.Expr) and ast.unparse(node).startswith(("logger.", "warnings.warn"))
    if logs or isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child)


def mutants() -> list[dict[str, Any]]:
    """All mutants, in the order of files and places."""
    found = []
    for path in sorted(path for glob in GLOBS for path in ROOT.glob(glob)):
        source = path.read_bytes()
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node in walk(ast.parse(source)):
            for kind, at, new in changes(node):
                begin, end = starts[at.lineno - 1] + at.col_offset, starts[at.end_lineno - 1] + at.end_col_offset  # type: ignore[attr-defined]
                place = {"file": str(path.relative_to(ROOT)), "line": at.lineno, "begin": begin, "end": end}  # type: ignore[attr-defined]
                found.append({**place, "kind": kind, "old": source[begin:end].decode(), "new": new})
    return found


# --- which tests reach which line: a plugin of pytest, and the table that it writes -----------------------------------

if "AMP_MUTANTS_MAP" in os.environ:
    _failed: set[str] = set()

    def pytest_runtest_logreport(report: Any) -> None:
        _failed.update([report.nodeid] if report.failed else [])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: Any) -> Iterator[Any]:
        lines: set[str] = set()
        places: dict[Any, str | None] = {}

        def trace(frame: Any, event: str, _: Any) -> Any:
            name = frame.f_code.co_filename
            if name not in places:
                inside = name.removeprefix(os.getcwd() + "/")
                places[name] = inside if any(Path(inside).match(glob) for glob in GLOBS) else None
            if places[name] is None:
                return None
            lines.add(f"{places[name]}:{frame.f_lineno}")
            return trace

        begin = time.perf_counter()
        threading.settrace(trace)
        sys.settrace(trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            in_ranks = "on_ranks" in getattr(item, "fixturenames", ())
            with open(os.environ["AMP_MUTANTS_MAP"], "a") as file:
                if item.nodeid not in _failed:  # it would kill every mutant
                    file.write(json.dumps([item.nodeid, [time.perf_counter() - begin, sorted(lines), in_ranks]]) + "\n")


def run_tests(tree: Path, arguments: list[str], seconds: float = SECONDS, **variables: str) -> tuple[int, str]:
    """Exit code (-1: out of time) and output of the tests named, all rows of their tables, in a fork that has torch."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            code: int = pytest.ExitCode.INTERNAL_ERROR
            try:
                os.setsid()
                os.chdir(tree)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.environ |= {"PYTHONPATH": f"{tree}:{tree}/scripts", "OMP_NUM_THREADS": "1", **variables}
                sys.path[:0] = [str(tree), f"{tree}/scripts"]
                code = pytest.main(["-q", "-m", "not slow or one_in", "-p", "no:cacheprovider", *arguments])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)  # whatever is raised: the caller's loop belongs to the parent alone
        end, done, status = time.monotonic() + seconds, 0, 0
        while not done and time.monotonic() < end:
            time.sleep(0.1)
            done, status = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its ranks too
        if not done:
            os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status) if done else -1, output.read()


def tests_of(mutant: dict[str, Any], reached: dict[str, Any], budget: float) -> list[list[str]]:
    """The tests that reach the line of a mutant: 30 of the file that reaches it most, then others, quickest first.

    At module level: those that reach the file. Those after the first have `budget` seconds. Of layouts, whose lines run
    in ranks, the tests in ranks come last, of the files that name the module.
    """
    file, line = mutant["file"], f"{mutant['file']}:{mutant['line']}"
    found = [test for test, (_, lines, _) in reached.items() if line in lines]
    found = found or [test for test, (_, lines, _) in reached.items() if any(at.startswith(file + ":") for at in lines)]
    found.sort(key=lambda test: reached[test][0])
    files = Counter(test.split("::")[0] for test in found)
    first = [test for test in found if test.startswith(max(files, key=files.__getitem__))][:30]
    ends = accumulate(reached[test][0] for test in found if test not in first)
    rest = [test for test, end in zip((t for t in found if t not in first), ends, strict=True) if end < budget]
    name = ".".join(Path(file).with_suffix("").parts[1:])
    ranked = [
        t for t, (_, _, in_ranks) in reached.items() if in_ranks and t not in found and name.startswith("layouts")
    ]
    return [first, [*rest, *(t for t in ranked if name in (ROOT / t.split("::")[0]).read_text())]]


def meet(mutant: dict[str, Any], tree: Path, parts: list[list[str]]) -> dict[str, Any]:
    """What the tests say: killed (by which), timeout or survived."""
    begin, path = time.monotonic(), tree / mutant["file"]
    source = (ROOT / mutant["file"]).read_bytes()
    result, killer = "survived", None
    try:
        path.write_bytes(source[: mutant["begin"]] + mutant["new"].encode() + source[mutant["end"] :])
        for tests in filter(None, parts):
            for old in path.parent.glob(f"__pycache__/{path.stem}.*"):
                old.unlink()
            code, output = run_tests(tree, ["-x", *tests])
            if code:
                killer = next((x.split()[1] for x in output.splitlines() if x.startswith(("FAILED", "ERROR"))), None)
                result = "timeout" if code == -1 else "killed"
                if code > 0 and killer is None:
                    raise RuntimeError(f"pytest itself failed, no test:\n{output[-2000:]}")
                break
    finally:
        path.write_bytes(source)
    num_tests, seconds = sum(map(len, parts)), round(time.monotonic() - begin)
    return {**mutant, "result": result, "by": killer, "tests": num_tests, "seconds": seconds}


def report(rows: list[dict[str, Any]]) -> None:
    names = ["killed", "timeout", "killed by a new test", "equivalent", "survived"]
    print("| kind of change | drawn |", " | ".join(names), "|\n" + "| --- " * (2 + len(names)) + "|")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row["kind"]][row["result"]] += 1
        counts["all"][row["result"]] += 1
    for kind in [*sorted(counts.keys() - {"all"}), "all"]:
        print(f"| {kind} | {counts[kind].total()} |", " | ".join(str(counts[kind][name]) for name in names), "|")
    for row in rows:
        if row["result"] in ("survived", "equivalent"):
            print(f"{row['number']}: {row['file']}:{row['line']}: {row['old']!r} -> {row['new']!r}", row.get("why", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path, default=ROOT / "mutants.jsonl")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of the tests that a mutant meets")
    parser.add_argument("--again", type=int, nargs="*", default=[], help="numbers of mutants")
    parser.add_argument("--tests", nargs="*", default=[], help="in place of those that reach their line")
    parser.add_argument("--equivalent", nargs=2, action="append", default=[], metavar=("NUMBER", "WHY"))
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.is_file() else []
    rows = {row["number"]: row for row in lines}

    def write(row: dict[str, Any]) -> None:
        rows[row["number"]] = row
        with given.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            row["number"], row["result"], f"{row['file']}:{row['line']}", repr(row["old"]), "->", row["new"], flush=True
        )

    for number, why in given.equivalent:
        write({**rows[int(number)], "result": "equivalent", "why": why})
    drawn = mutants()
    random.Random(given.seed).shuffle(drawn)
    todo = [{"number": i, **row} for i, row in enumerate(drawn[: given.count]) if i not in rows]
    todo += [rows[number] for number in given.again]
    if todo:
        for name in ("torch._dynamo", "torch.distributed.fsdp"):
            importlib.import_module(name)  # once, for all forks
        tree = Path(tempfile.gettempdir()) / f"amp_{given.file.stem}"
        shutil.rmtree(tree, ignore_errors=True)
        names = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
        for name in names.splitlines():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        table = given.file.with_suffix(".map")
        if not table.is_file():
            files = ["tests/{}/test_{}.py".format(*name.split("/")) for name in TESTS.split()]
            run_tests(tree, ["-p", "mutants", *files], 3600, AMP_MUTANTS_MAP=str(table.absolute()))
        reached = dict(map(json.loads, table.read_text().splitlines()))
        for mutant in todo:
            row = meet(mutant, tree, [given.tests] if given.tests else tests_of(mutant, reached, given.budget))
            write({**row, "result": "killed by a new test"} if given.tests and row["result"] == "killed" else row)
    report([rows[number] for number in sorted(rows)])


if __name__ == "__main__":
    main()
