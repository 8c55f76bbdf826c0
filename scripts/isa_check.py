"""The numeric tests once for each instruction set of this CPU: what other CPUs compute, as far as this one can show it.

    python scripts/isa_check.py                              # each oneDNN level as on a CPU that has no more
    python scripts/isa_check.py --all --jobs 2               # every level with every vector width
    python scripts/isa_check.py --sets AVX2/avx2 --tests tests/unit/test_clip.py
    python scripts/isa_check.py --write                      # puts this CPU's rows into docs/RELIABILITY.md

A set is LEVEL/WIDTH. LEVEL caps oneDNN (ONEDNN_MAX_CPU_ISA: convolutions, 16-bit products), WIDTH caps torch's own
kernels (ATEN_CPU_CAPABILITY) and MKL (MKL_ENABLE_INSTRUCTIONS: fp32 products). Sets that this CPU lacks are left out.
Exit code 1 when a test failed. The default tests, those that compare numbers most, take about a minute of one core for
each set; all of them: --tests tests/unit tests/recipes tests/runs/test_fsdp.py.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "RELIABILITY.md"
BEGIN, END = "<!-- begin of the instruction sets -->", "<!-- end of the instruction sets -->"
COLUMNS = ["CPU", "torch", "date", "oneDNN at most / torch and MKL at most, passed / failed / skipped"]

LEVELS = {
    "SSE41": {"sse4_1"},
    "AVX2": {"avx2", "fma"},
    "AVX512_CORE": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "AVX512_CORE_BF16": {"avx512_bf16"},
    "AVX512_CORE_FP16": {"avx512_fp16"},
    "default": set(),
}
"""oneDNN's caps from low to high, and the flags of /proc/cpuinfo that each needs; `default` is all that the CPU has."""
WIDTHS = {"default": "SSE4_2", "avx2": "AVX2", "avx512": "AVX512"}
"""Caps of torch's own kernels, and MKL's of the same width."""
MACHINES = {"SSE41": "default", "AVX2": "avx2"}
"""The widest vectors of a CPU that ends at this level; the others have AVX-512."""

UNIT = "clip fused losses moments precision products right_and_wrong schedule_ema"
RECIPES = "contrastive custom_function gan partial_fc"
TESTS = [f"tests/unit/test_{name}.py" for name in UNIT.split()]
TESTS += [f"tests/recipes/test_{name}.py" for name in RECIPES.split()]


@dataclass
class Result:
    level: str
    width: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def cpu() -> tuple[str, set[str]]:
    """Name and flags of this CPU. Without /proc/cpuinfo, and on CPUs that are not x86: no flags, so the default set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), set()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(fields.get("flags", "").split())
    telling = [flag for flag in ("amx_bf16", "avx512_fp16", "avx512_bf16", "avx512f", "avx2") if flag in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(telling[:2])})", flags


def sets_of(flags: set[str], *, whole: bool) -> list[tuple[str, str]]:
    """(level, width) of what a CPU with these flags can run; the last one is the CPU as it is."""
    widths = ["default", *(["avx2"] if "avx2" in flags else []), *(["avx512"] if "avx512f" in flags else [])]
    levels = [level for level, needed in LEVELS.items() if flags and needed <= flags]
    if "amx_tile" not in flags and len(levels) > 1:
        del levels[-2]  # the highest is the default
    if whole:
        return [(level, width) for level in levels or ["default"] for width in widths]
    machines = [(level, MACHINES.get(level, widths[-1])) for level in levels if level != "default"]
    return machines + [("default", width) for width in widths]


def check(level: str, width: str, tests: list[str]) -> Result:
    caps = {"ONEDNN_MAX_CPU_ISA": level, "ATEN_CPU_CAPABILITY": width, "MKL_ENABLE_INSTRUCTIONS": WIDTHS[width]}
    env = os.environ | caps | {"OMP_NUM_THREADS": "1"}
    result, began = Result(level, width), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    result.seconds = time.monotonic() - began
    for case in cases:
        kinds = {child.tag: child for child in case}
        bad = kinds.get("failure", kinds.get("error"))
        if bad is not None:
            reason = " ".join(bad.get("message", "").split())[-300:]  # the end of a rank's exception says most
            result.failures.append(f"{case.get('classname')}::{case.get('name')}: {reason}")
        elif "skipped" in kinds:
            result.skipped += 1
        else:
            result.passed += 1
    if done.returncode not in (0, 1) or not cases:
        result.failures.append(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    result.failed = len(result.failures)
    return result


def write(name: str, results: list[Result]) -> None:
    """Renew these sets in the row of this CPU; sets and rows of others stay."""
    head, rest = PAGE.read_text().split(BEGIN)
    table, tail = rest.split(END)
    rows = {row[0]: row for row in re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", table, re.MULTILINE)[2:]}
    old = rows[name][3].split(", ") if name in rows else []
    new = [f"{each.level}/{each.width} {each.passed}/{each.failed}/{each.skipped}" for each in results]
    counts = dict(text.split() for text in [*old, *new])
    rows[name] = (name, version("torch"), str(date.today()), ", ".join(" ".join(item) for item in counts.items()))
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "| --- " * len(COLUMNS) + "|",
        *(f"| {' | '.join(row)} |" for row in rows.values()),
    ]
    PAGE.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every level with every width")
    parser.add_argument("--sets", nargs="+", help="only these, as LEVEL/WIDTH")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files, or anything else that pytest takes")
    parser.add_argument("--jobs", type=int, default=1, help="sets at the same time, of one core each")
    parser.add_argument("--write", action="store_true", help="renew the row of this CPU in docs/RELIABILITY.md")
    flags = parser.parse_args()
    name, has = cpu()
    possible = sets_of(has, whole=True)
    chosen = sets_of(has, whole=flags.all)
    if flags.sets:
        known = {"/".join(each): each for each in possible}
        unknown = [each for each in flags.sets if each not in known]
        if unknown:
            parser.error(f"--sets: this CPU has no {', '.join(unknown)}; it has {', '.join(known)}")
        chosen = [known[each] for each in flags.sets]
    print(f"{name}, torch {version('torch')}: {len(chosen)} instruction sets", flush=True)
    results = []
    with ThreadPoolExecutor(flags.jobs) as pool:
        for each in pool.map(lambda pair: check(pair[0], pair[1], flags.tests), chosen):
            results.append(each)
            counts = f"{each.passed:5} passed {each.failed:3} failed {each.skipped:4} skipped {each.seconds:6.0f} s"
            print(f"{each.level + '/' + each.width:26}{counts}", flush=True)
            for failure in each.failures:
                print(f"  FAILED {failure}", flush=True)
    if flags.write:
        write(name, results)
    return int(any(each.failed for each in results))


if __name__ == "__main__":
    sys.exit(main())
