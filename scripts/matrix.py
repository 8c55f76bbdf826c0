"""The tests in other versions of torch and Python: an environment for each, and a table of what passed.

    python scripts/matrix.py                        every row, make test's tests
    python scripts/matrix.py --only 2.11 --all      the rows with this torch or Python, every test
    python scripts/matrix.py -- tests/unit -k clip  other arguments for pytest; the table stays as it is

A row whose interpreter or wheels cannot be found is not run, and that is printed. Exit code 1 when a test failed or no
row could run. Needs no packages: any Python that this project supports runs it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from amp_core.config.versions import TESTED  # noqa: E402

EXTRAS = "wandb,tensorboard,data,dev"
PAGE = ROOT / "docs" / "RELIABILITY.md"
BEGIN, END = "<!-- begin of the versions -->", "<!-- end of the versions -->"
HEAD = "| torch | torchvision | Python | tests | passed/failed/skipped | date |"


class NotRun(Exception):
    """Why a row cannot run here."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="rows with this torch or Python: 2.11, 3.13")
    parser.add_argument("--all", action="store_true", help="the slow tests, too")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="where the environments lie")
    parser.add_argument("--workers", default="2", help="of pytest")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    flags = parser.parse_args()
    rows = [row for row in TESTED if any(row[0].startswith(text) or row[2] == text for text in flags.only)]
    num_run, num_failed = 0, 0
    for torch, torchvision, python in rows:
        name = f"torch {torch}, Python {python}"
        print(f"--- {name}", flush=True)
        try:
            interpreter = environment(flags.folder, torch, torchvision, python)
        except NotRun as why:
            print(f"not run: {name}: {why}", flush=True)
            continue
        result = run(interpreter, flags)
        num_run += 1
        num_failed += result["ended"] != 0
        print(f"{name}: {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped", flush=True)
        if not flags.pytest:
            write(result)
    print(f"{num_run} of {len(rows)} rows run, {num_failed} of them failed")
    return int(num_failed > 0 or num_run == 0)


def environment(folder: Path, torch: str, torchvision: str, python: str) -> Path:
    """The interpreter of an environment with these versions, which is made unless it is there and up to date."""
    place = folder.resolve() / f"torch{torch}-py{python}"
    interpreter, stamp = place / "bin" / "python", place / "installed"
    # The set of constraints.txt, but for the packages that are varied.
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch")]
    wanted = "\n".join([*pins, (ROOT / "pyproject.toml").read_text(), str(ROOT)])
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return interpreter
    base = find_python(python)
    if not interpreter.exists():
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([base, "-m", "venv", place], check=True)
    constraints = place / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    packages = ["-e", f"{ROOT}[{EXTRAS}]", f"torch=={torch}", f"torchvision=={torchvision}"]
    command = [interpreter, "-m", "pip", "install", "--disable-pip-version-check", "-c", constraints, *packages]
    print(f"installing into {place}", flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        raise NotRun("\n    ".join(["pip cannot install it:", *(errors or done.stderr.splitlines()[-5:])]))
    stamp.write_text(digest)
    return interpreter


def find_python(version: str) -> str:
    """An interpreter on the PATH or among pyenv's versions that starts and has this version."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for candidate in (f"python{version}", *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}")))):
        ask = "import sys, venv, ensurepip; print(sys.executable)"
        if shutil.which(candidate):  # pyenv's shims stand on the PATH for versions that are not chosen, too
            done = subprocess.run([candidate, "-c", ask], capture_output=True, text=True)
            if not done.returncode:
                return done.stdout.strip()
    raise NotRun(f"there is no python{version} with venv, neither on the PATH nor in {pyenv}")


def run(interpreter: Path, flags: argparse.Namespace) -> dict:
    """Run the tests. Returns a row of the table as values, and `ended`, pytest's exit code."""
    report = interpreter.parent.parent / "junit.xml"
    report.unlink(missing_ok=True)
    marks = [] if flags.all else ["-m", "not slow"]
    command = [interpreter, "-m", "pytest", "-q", "-n", flags.workers, "--dist", "worksteal", f"--junitxml={report}"]
    command += [*marks, *flags.pytest]
    # The environment's programs come first, as if it were activated: tests start `torchrun` and `train.py` by name.
    path = os.pathsep.join([str(interpreter.parent), os.environ["PATH"]])
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path})
    if not report.exists():
        raise SystemExit(f"error: pytest ended with {done.returncode} and wrote no report")
    suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    ask = "from importlib.metadata import version as v; from platform import python_version as p"
    ask += "; print(v('torch'), v('torchvision'), p())"
    versions = subprocess.run([interpreter, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    return {
        **dict(zip(("torch", "torchvision", "python"), versions, strict=True)),
        "tests": "all" if flags.all else "not slow",
        "passed": counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"],
        "failed": counts["failures"] + counts["errors"],
        "skipped": counts["skipped"],
        "date": datetime.date.today().isoformat(),
        "ended": done.returncode,
    }


def write(result: dict) -> None:
    """Put a row into the table of the page, in the place of an earlier one of these versions."""
    head, rest = PAGE.read_text().split(BEGIN)
    old, tail = rest.split(END)
    counts = "/".join(str(result[key]) for key in ("passed", "failed", "skipped"))
    if result["ended"] not in (0, 1):
        counts += f" (pytest ended with {result['ended']})"
    cells = [*(result[key] for key in ("torch", "torchvision", "python", "tests")), counts, result["date"]]
    known = {row_key(line): line for line in old.splitlines() if re.match(r"\| \d", line)}
    line = f"| {' | '.join(cells)} |"
    known[row_key(line)] = line
    rows = [known[key] for key in ((torch, python) for torch, _, python in TESTED) if key in known]
    table = "\n".join([HEAD, re.sub(r"[^|]+", " --- ", HEAD), *rows])
    PAGE.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")


def row_key(line: str) -> tuple[str, str]:
    torch, _, python = (cell.strip() for cell in line.split("|")[1:4])
    return torch.split("+")[0], ".".join(python.split(".")[:2])


if __name__ == "__main__":
    sys.exit(main())
