"""The numbers of docs/RELIABILITY.md that take large files or many processes, measured.

    python tests/campaign/attacks.py                    all of them, 20 minutes
    python tests/campaign/attacks.py sweep folders      some

Works on Linux. Needs 600 MB in --work, a temporary folder by default.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "recipes")]

import torch  # noqa: E402
from small import COMMON, SMALL  # noqa: E402
from test_lost_machine import seconds_until_noticed  # noqa: E402

from amp_core.checkpoints.plain_state import serialise  # noqa: E402
from campaign.files import forge  # noqa: E402

TRAIN = [sys.executable, str(ROOT / "train.py")]
ARGUMENTS = [*COMMON, *SMALL["custom_function"], "recipe=custom_function"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[[], *ATTACKS], default=[])
    parser.add_argument("--work", type=Path)
    flags = parser.parse_args()
    for name in flags.what or ATTACKS:
        work = Path(tempfile.mkdtemp(prefix="attacks-", dir=flags.work))
        try:
            for line in ATTACKS[name](work):
                print(f"{name}: {line}", flush=True)
        finally:
            shutil.rmtree(work)
    return 0


def used(command: list[str], code: int = 0) -> tuple[float, float, float]:
    """Seconds, seconds of processor time and peak MB of a command and what it starts."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == code, (command, process.returncode)
    return time.monotonic() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


def sweep(work: Path, num_jobs: int = 200) -> list[str]:
    """How long it takes until the first job of a sweep is started."""
    began = time.monotonic()
    command = [*TRAIN, "-m", f"hydra.sweep.dir={work}", *ARGUMENTS, "steps=1000000", f"seed=range({num_jobs})"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not any(work.glob("*/summary.json")):
            assert process.poll() is None
            time.sleep(0.05)
        took = time.monotonic() - began
        times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
        cpu = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    finally:
        process.terminate()  # it ends after its step
        process.wait(60)
    return [f"{num_jobs} jobs: the first one starts after {took:.1f} s, {cpu:.1f} s of processor time"]


def folders(work: Path, num_runs: int = 20_000) -> list[str]:
    """How long it takes to list and to compare many runs: copies of one with numbers of their own."""
    first = work / "runs" / "first"
    used([*TRAIN, *ARGUMENTS, "steps=4", f"run_dir={first}"])
    summary = json.loads((first / "summary.json").read_text())
    config = (first / ".hydra/config.yaml").read_text()
    assert "\nseed: 0\n" in config
    for number in range(1, num_runs):
        folder = work / "runs" / f"{number:05d}"
        (folder / ".hydra").mkdir(parents=True)
        changed = {"loss": summary["eval"]["loss"] * (1 + random.random()), "accuracy": random.random()}
        (folder / "summary.json").write_text(json.dumps(summary | {"eval": changed}))
        seed, rate = number % 100, 0.001 * (1 + number // 100)
        (folder / ".hydra/config.yaml").write_text(
            config.replace("\nseed: 0\n", f"\nseed: {seed}\n").replace("lr: 0.002\n", f"lr: {rate}\n")
        )
        for name in ("metrics.jsonl", "environment.json", "train.log"):
            os.link(first / name, folder / name)
    said = []
    for name, more in (("runs.py", []), ("report.py", ["--out", str(work / "report.html")])):
        took, cpu, _ = used([sys.executable, str(ROOT / "scripts" / name), str(work / "runs"), *more])
        said.append(f"{num_runs} folders, {name}: {took:.1f} s, {cpu:.1f} s of processor time")
    return said


def metrics(work: Path, num_bytes: int = 403_000_000, tries: int = 3) -> list[str]:
    """What a long metrics.jsonl adds to a resume: all of it stays, or nearly all is cut."""
    first = work / "first"
    used([*TRAIN, *ARGUMENTS, "steps=4", f"run_dir={first}"])
    line = json.loads((first / "metrics.jsonl").read_text().splitlines()[-2])
    (newest,) = (first / "checkpoints").glob("step_*")
    contents = torch.load(newest / "state.pt", weights_only=True)
    num_lines = num_bytes // (len(json.dumps(line)) + 7)  # the steps have more digits

    with (work / "lines").open("w") as file:
        file.writelines(json.dumps(line | {"step": number}) + "\n" for number in range(1, num_lines + 1))

    def resumed(step: int, is_long: bool) -> tuple[float, float]:
        """Processor time and peak MB of two steps from a checkpoint of `step`."""
        found = []
        for _ in range(tries):
            torn = work / "torn"
            shutil.copytree(first, torn, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl"))
            state = contents | {"progress": contents["progress"] | {"step": step, "samples": 4 * step}}
            forge(torn / "checkpoints" / f"step_{step:08d}", b"".join(serialise(state)), step)
            if is_long:
                shutil.copy(work / "lines", torn / "metrics.jsonl")
            found.append(used([*TRAIN, *ARGUMENTS, f"steps={step + 2}", "log_every=2", f"run_dir={torn}"])[1:])
            with (torn / "metrics.jsonl").open("rb") as file:  # not read as a whole: the next peak begins at our size
                left = sum(1 for _ in file)
            assert 0 <= left - (step if is_long else 0) <= 3, left  # two log lines and an evaluation
            shutil.rmtree(torn)
        return statistics.median(cpu for cpu, _ in found), statistics.median(peak for _, peak in found)

    said = []
    for what, step in (("all stays", num_lines), ("nearly all is cut", 100)):
        cpu, peak = resumed(step, True)
        cpu_of_few, peak_of_few = resumed(step, False)
        more = f"{cpu - cpu_of_few:+.1f} s of processor time, {peak - peak_of_few:+.0f} MB"
        said.append(
            f"{num_bytes / 1e6:.0f} MB, {what}: {more}, beside {cpu_of_few:.1f} s, {peak_of_few:.0f} MB without"
        )
    return said


def machines(work: Path, num_losses: int = 50, at_once: int = 3) -> Iterator[str]:
    """How long it takes until a launcher notices that another one is lost, 0 to 10 s after its workers started."""
    draw = random.Random(0)
    delays = [draw.uniform(0, 10) for _ in range(num_losses)]

    def lose(number: int) -> float:
        place = work / str(number)
        place.mkdir()
        return seconds_until_noticed(place, delays[number])

    seconds = []
    with ThreadPoolExecutor(at_once) as pool:
        for delay, each in zip(delays, pool.map(lose, range(num_losses)), strict=True):
            seconds.append(each)
            yield f"lost after {delay:.1f} s: noticed after {each:.1f} s, at most {max(seconds):.1f} s in {len(seconds)}"
    yield f"{sum(each < 60 for each in seconds)} of {num_losses} noticed within 60 s"


ATTACKS: dict[str, Any] = {"sweep": sweep, "folders": folders, "metrics": metrics, "machines": machines}

if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
