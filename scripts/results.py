"""Run the published experiments, and write their numbers where they are shown.

    python scripts/results.py                            all that is missing, then the record and the pages
    python scripts/results.py parity_gan --jobs 2        one of them, two runs at a time
    python scripts/results.py --list                     which are recorded, and how long they took
    python scripts/results.py --write                    only the pages, from the record

An experiment is a file in conf/experiment with a place for its result. It is run as a sweep into its own folder
below multirun/results, so that finished runs stay and an interrupted one resumes; remove the folder to measure again.
An experiment that compares modes (parity_*, losing_*) gets more seeds in its file while the verdict of
scripts/report.py is "not settled", up to 40. The record is docs/results.json. From it come the agreement of
modes in README.md, the tables of docs/SWEEPS.md and the result in the header of each experiment; a test compares them.
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

from amp_core.cli import compose
from amp_core.cli.run_folders import content_of, stored_config, sweep_subdir
from amp_core.config.options import conf_dir
from amp_core.run.lines import write_text
from amp_tools.report.groups import margin_of
from amp_tools.report.significance import Comparison, compare, judge
from amp_tools.report.words import digits_for, signed

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "results.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "SWEEPS.md")
OPENING = "# <results> written by `make results` from docs/results.json\n"
PLACE = re.compile(f"(?<={re.escape(OPENING)}).*?(?=# </results>\n)", re.DOTALL)
"""The result in the header of an experiment."""
SEEDS = re.compile(r"(?<=\n      seed: ).*(?=\n)")
"""The seeds of an experiment, as its file holds them."""
TABLE = re.compile(r"(?<=<!-- (parity|losing) -->\n).*?(?=<!-- /\1 -->)", re.DOTALL)
AGREEMENT = re.compile(r"(?<=<!-- agreement -->).*?(?=<!-- / -->)", re.DOTALL)
MODES = ("fp32", "bf16", "fp16")
STEP, MOST = 10, 40
"""Seeds to begin with and to add at least, and the most."""
MARGINS = {"parity_gan": "0.003", "parity_speech": "0.005"}
"""Where 0.5 % of a mean that falls towards 0 is none: 0.5 % of the distance of Gaussian noise, 0.60; of all symbols."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help="default: all that have a place for a result")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--list", action="store_true", help="what is recorded, and what is missing")
    parser.add_argument("--write", action="store_true", help="run nothing; write the pages from the record")
    flags = parser.parse_args()
    record = load()
    known = experiments()
    if unknown := set(flags.experiments) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(known)}")
    names = flags.experiments or known
    if flags.list:
        for name in names:
            print(f"{name:<26}{facts(record[name]) if name in record else 'not measured yet'}")
        return 0
    failed: list[str] = []
    for name in [] if flags.write else names:  # first all with their seeds, then those that need more
        print(f"--- {name}", flush=True)
        if run(name, flags.jobs):
            failed.append(name)
            continue
        record = load() | {name: collect(name)}  # others may have written meanwhile
        write_text(RECORD, json.dumps(dict(sorted(record.items())), indent=1, ensure_ascii=False) + "\n")
    more = [name for name in names if not flags.write and name not in failed and add_seeds(name, record[name])]
    # In a new process: one process reads the file of an experiment once.
    if more and subprocess.run([sys.executable, __file__, "--jobs", str(flags.jobs), *more]).returncode:
        failed += more
    record = load()
    for path, text in pages(record).items():
        write_text(path, text)
    if failed:
        print(f"error: not finished: {', '.join(failed)}; the same command resumes them", file=sys.stderr)
    return int(bool(failed))


def load() -> dict[str, Any]:
    """The record."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


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


def add_seeds(name: str, entry: dict[str, Any]) -> bool:
    """Write more seeds into the file of an experiment that is not settled. Returns whether there are more."""
    num = len({run["seed"] for run in entry["runs"]})
    needed = [c.seeds_needed or 0 for c in verdicts(name, entry).values() if c.kind in ("not settled", "too few seeds")]
    if not needed or num >= MOST:
        return False
    path = conf_dir() / "experiment" / f"{name}.yaml"
    path.write_text(SEEDS.sub(f"range(1,{min(MOST, max(num + STEP, *needed)) + 1})", path.read_text()))
    return True


def group_of(job: list[str]) -> str:
    """What a job of a sweep sets besides its seed, without "amp=" where that is the mode."""
    return " ".join(text.removeprefix("amp=") for text in job if not text.startswith(("seed=", "experiment=")))


def collect(name: str) -> dict[str, Any]:
    """The record of an experiment, from its run folders."""
    planned = compose.sweep_of([f"experiment={name}"])
    runs, metric, config = [], "", {}
    environment: dict[str, Any] = {}
    for job in planned.jobs:
        folder = ROOT / planned.dir / sweep_subdir(ROOT / planned.dir, job)
        config = stored_config(folder) or {}
        summary = content_of(folder, "summary.json")
        metric = config["recipe"]["best"]
        found = {"group": group_of(job), "seed": config["seed"], "value": summary["eval"][metric]}
        runs.append(found | {"seconds": summary["seconds"]})
        environment = json.loads((folder / "environment.json").read_text())
    return {
        "command": f"python train.py -m experiment={name}",
        "recipe": config["recipe"]["name"],
        "metric": metric,
        "better": config["recipe"]["best_is"],
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


def groups(entry: dict[str, Any]) -> dict[str, dict[int, float]]:
    """The metric by seed of each group; the first is the reference."""
    found: dict[str, dict[int, float]] = {}
    for run in entry["runs"]:
        found.setdefault(run["group"], {})[run["seed"]] = run["value"]
    return found


def verdicts(name: str, entry: dict[str, Any]) -> dict[str, Comparison]:
    """Each group beside the reference, as scripts/report.py judges them; nothing for an experiment of one mode."""
    base, *others = groups(entry).items()
    margin = margin_of(MARGINS.get(name, "0.5%"), statistics.fmean(base[1].values()))
    about = {"margin": margin, "better": entry["better"]}
    found = judge([compare(label, values, *base, **about) for label, values in others])
    return {comparison.group: comparison for comparison in found}


def verdict(c: Comparison) -> str:
    """Difference, its 95 % interval, and what follows unless that is "equal"."""
    kind = "" if c.kind == "equal" else f" **{c.kind}**"
    if c.low is None or c.high is None:
        return f"{signed(c.difference, 4)}{kind}"
    digits = digits_for((c.high - c.low) / 2)
    interval = f"[{signed(c.low, digits)}, {signed(c.high, digits)}]"
    return f"{signed(c.difference, digits)} {interval}{kind}"


def spread(entry: dict[str, Any], group: str) -> str:
    """Mean and standard deviation over the seeds of a group."""
    values = list(groups(entry)[group].values())
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.4f}"


def facts(entry: dict[str, Any]) -> str:
    """How many runs, how long (the machine may have been shared), on what."""
    there, runs = entry["environment"], entry["runs"]
    seconds = [run["seconds"] for run in runs]
    device = there["device"] if there["device"] != "x86_64" else f"a CPU with {there['cpu_capability']}"
    return (
        f"{len(runs)} runs of {min(seconds):.0f} to {max(seconds):.0f} s of wall clock on {device}, "
        f"{there['threads']} thread(s), torch {there['torch']}, {there['date']}"
    )


def pages(record: dict[str, Any]) -> dict[Path, str]:
    """Every file that shows results, as the record wants it. What is not recorded stays as it is."""
    shown: dict[Path, str] = {}
    for page in PAGES:
        text = TABLE.sub(lambda found: table(record, found.group(1)), page.read_text())
        shown[page] = AGREEMENT.sub(lambda _: agreement(record), text)
    for name in experiments():
        path = conf_dir() / "experiment" / f"{name}.yaml"
        shown[path] = PLACE.sub(lambda _, name=name: header(record.get(name)), path.read_text())
    return shown


def header(entry: dict[str, Any] | None) -> str:
    """The lines in an experiment's header."""
    if entry is None:
        return "# not measured yet\n"
    numbers = "   ".join(f"{group} {spread(entry, group)}" for group in groups(entry))
    return f"# {entry['metric']}: {numbers}\n# {facts(entry)}\n"


def table(record: dict[str, Any], kind: str) -> str:
    """What experiments of a kind, parity or losing, say: a row per recipe or per group."""
    names = ["recipe", "metric", "`fp32`", "`bf16`", "`fp16`", "margin", "seeds"]
    if kind == "losing":
        names = ["what loses", "recipe", "metric", "remedy: its result", "difference", "margin", "seeds"]
    rows = [names, ["---"] * len(names)]
    for name in experiments():
        if not name.startswith(f"{kind}_"):
            continue
        if name not in record:
            rows.append([f"`{name.removeprefix(f'{kind}_')}`", "not measured yet", *[""] * 5])
            continue
        entry = record[name]
        base, *others = groups(entry)
        found = verdicts(name, entry)
        reference = spread(entry, base)
        about = [f"±{found[others[0]].margin:.2g}", str(found[others[0]].counts[0])]
        if kind == "parity":
            agreed = [verdict(found[mode]) for mode in MODES[1:]]
            rows.append([f"`{name.removeprefix('parity_')}`", entry["metric"], reference, *agreed, *about])
        for group in others if kind == "losing" else []:
            side = [f"`{group}`", f"`{entry['recipe']}`", entry["metric"], f"`{base}`: {reference}"]
            rows.append([*side, verdict(found[group]), *about])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def agreement(record: dict[str, Any]) -> str:
    """How many recipes agree, and which do not."""
    names = [name for name in experiments() if name.startswith("parity_")]
    parts = []
    for mode in MODES[1:]:
        found: dict[str, list[str]] = {"equal": [], "identical": []}
        for name in names:
            kind = verdicts(name, record[name])[mode].kind if name in record else "not measured"
            found.setdefault(kind, []).append(name.removeprefix("parity_"))
        alike = len(found.pop("equal") + found.pop("identical"))
        rest = "; ".join(f"{kind}: {', '.join(recipes)}" for kind, recipes in found.items())
        parts.append(f"`{mode}` in {alike} of {len(names)} experiments" + (f" ({rest})" if rest else ""))
    return " and ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
