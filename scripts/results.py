"""Run the published experiments, and write their numbers where they are shown.

    python scripts/results.py                            all that is missing, then the record and the pages
    python scripts/results.py parity_gan --jobs 2        one of them, two runs at a time
    python scripts/results.py --list                     which are recorded, and how long they took
    python scripts/results.py --write                    only the pages, from the record

An experiment is a file in conf/experiment with a place for its result. It is run as a sweep into a folder of its own
below multirun/results, so that finished runs stay and an interrupted one resumes; remove the folder to measure anew.
The record is docs/results.json. From it come the numbers of README.md, the table of docs/SWEEPS.md and the result in
the header of each experiment; a test compares them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from amp_core.cli import compose
from amp_core.cli.run_folders import stored_config, summary_of, sweep_subdir
from amp_core.config.schema import conf_dir
from amp_core.run.lines import write_text

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "results.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "SWEEPS.md")
OPENING = "# <results> written by `make results` from docs/results.json\n"
PLACE = re.compile(f"(?<={re.escape(OPENING)}).*?(?=# </results>\n)", re.DOTALL)
"""The result in the header of an experiment."""
TABLE = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- /results -->)", re.DOTALL)
CELL = re.compile(r"<!-- (\w+)\.(\w+) -->(.*?)<!-- / -->")
"""A number within a page: <!-- experiment.mode -->0.9820 ± 0.0012<!-- / -->."""
MODES = ("fp32", "bf16", "fp16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help="default: all that have a place for a result")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--list", action="store_true", help="what is recorded, and what is missing")
    parser.add_argument("--write", action="store_true", help="run nothing; write the pages from the record")
    flags = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known = experiments()
    if unknown := set(flags.experiments) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(known)}")
    names = flags.experiments or known
    if flags.list:
        for name in names:
            print(f"{name:<26}{facts(record[name]) if name in record else 'not measured yet'}")
        return 0
    failed = []
    for name in [] if flags.write else names:
        print(f"--- {name}", flush=True)
        if run(name, flags.jobs):
            failed.append(name)
            continue
        record[name] = collect(name)
        write_text(RECORD, json.dumps(dict(sorted(record.items())), indent=1, ensure_ascii=False) + "\n")
    for path, text in pages(record).items():
        write_text(path, text)
    if failed:
        print(f"error: not finished: {', '.join(failed)}; the same command resumes them", file=sys.stderr)
    return int(bool(failed))


def experiments() -> list[str]:
    """Those with a place for a result."""
    return sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml") if PLACE.search(path.read_text()))


def run(name: str, num_jobs: int) -> int:
    """Run what is missing of an experiment. Returns the exit code of its sweep."""
    command = [sys.executable, str(ROOT / "train.py"), "-m", f"experiment={name}"]
    if num_jobs > 1:
        command += ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={num_jobs}"]
    # The order of sums, and so the last digits, depend on the number of threads.
    return subprocess.run(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode


def collect(name: str) -> dict[str, Any]:
    """The record of an experiment, from its run folders."""
    planned = compose.sweep_of([f"experiment={name}"])
    runs, metric, config = [], "", {}
    environment: dict[str, Any] = {}
    for job in planned.jobs:
        folder = ROOT / planned.dir / sweep_subdir(job)
        config = stored_config(folder) or {}
        summary = summary_of(folder)
        metric = config["recipe"]["best"]
        found = {"amp": config["amp"]["name"], "seed": config["seed"], "value": summary["eval"][metric]}
        runs.append(found | {"seconds": summary["seconds"]})
        environment = json.loads((folder / "environment.json").read_text())
    return {
        "command": f"python train.py -m experiment={name}",
        "recipe": config["recipe"]["name"],
        "metric": metric,
        "runs": runs,
        "environment": {
            "torch": environment["versions"]["torch"],
            "python": environment["python"],
            "device": environment["device"]["name"],
            "cpu_capability": environment["cpu_capability"],
            "threads": environment["threads"],
            "git_commit": environment["git_commit"],
            "date": environment["time"][:10],
        },
    }


# --- what is shown ----------------------------------------------------------------------------------------------------


def spread(entry: dict[str, Any], mode: str) -> str:
    """Mean and standard deviation over the seeds of a mode."""
    values = [run["value"] for run in entry["runs"] if run["amp"] == mode]
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.4f}"


def facts(entry: dict[str, Any]) -> str:
    """How many runs, how long, on what."""
    there, runs = entry["environment"], entry["runs"]
    minutes = sum(run["seconds"] for run in runs) / 60
    device = there["device"] if there["device"] != "x86_64" else f"a CPU with {there['cpu_capability']}"
    return (
        f"{len(runs)} runs, {minutes:.1f} minutes in all, on {device}, {there['threads']} thread(s), "
        f"torch {there['torch']}, {there['date']}"
    )


def pages(record: dict[str, Any]) -> dict[Path, str]:
    """Every file that shows results, as the record wants it. What is not recorded stays as it is."""
    shown: dict[Path, str] = {}
    for page in PAGES:
        text = TABLE.sub(lambda found: table(record, found.group()), page.read_text())
        shown[page] = CELL.sub(lambda found: cell(record, *found.groups()), text)
    for name in experiments():
        path = conf_dir() / "experiment" / f"{name}.yaml"
        shown[path] = PLACE.sub(lambda _, name=name: header(record.get(name)), path.read_text())
    return shown


def header(entry: dict[str, Any] | None) -> str:
    """The lines in an experiment's header."""
    if entry is None:
        return "# not measured yet\n"
    modes = dict.fromkeys(run["amp"] for run in entry["runs"])
    numbers = "   ".join(f"{mode} {spread(entry, mode)}" for mode in modes)
    return f"# {entry['metric']}: {numbers}\n# {facts(entry)}\n"


def cell(record: dict[str, Any], name: str, mode: str, before: str) -> str:
    shown = spread(record[name], mode) if name in record else before
    return f"<!-- {name}.{mode} -->{shown}<!-- / -->"


def table(record: dict[str, Any], before: str) -> str:
    """Modes side by side: a row per experiment `parity_*`."""
    rows = {line.split("`")[1]: line for line in before.splitlines() if line.startswith("| `")}
    for name in (name for name in experiments() if name.startswith("parity_")):
        recipe = name.removeprefix("parity_")
        if name in record:
            entry = record[name]
            numbers = " | ".join(spread(entry, mode) for mode in MODES)
            row = f"| `{recipe}` | {entry['metric']} | {numbers} | {len(entry['runs'])} | {settings(name)} |"
            rows[recipe] = row
        elif recipe not in rows:
            rows[recipe] = f"| `{recipe}` | | not measured yet | | | | {settings(name)} |"
    names = ["recipe", "metric", *(f"`{mode}`" for mode in MODES), "runs", "settings"]
    head = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    unrecorded = [recipe for recipe in sorted(rows) if f"parity_{recipe}" not in record]
    earlier = [recipe for recipe in unrecorded if "not measured" not in rows[recipe]]
    note = ["", f"Measured before there was a record: {', '.join(earlier)}."] if earlier else []
    return "\n".join([*head, *(rows[recipe] for recipe in sorted(rows)), *note]) + "\n"


def settings(name: str) -> str:
    """What an experiment sets, as on a command line."""
    content = OmegaConf.to_container(OmegaConf.load(conf_dir() / "experiment" / f"{name}.yaml"))
    assert isinstance(content, dict)

    def flat(values: dict[Any, Any], prefix: str) -> list[str]:
        found = []
        for key, value in values.items():
            found += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}={value}"]
        return found

    own = flat({key: value for key, value in content.items() if key not in ("defaults", "hydra")}, "")
    return f"`{' '.join(own)}`" if own else "defaults"


if __name__ == "__main__":
    sys.exit(main())
