"""Processes that stand still, are slow, or get in each other's way: noticed in time and said, and nothing hangs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import train
from campaign import Plan, Result
from campaign.harness import (
    TELLING,
    Child,
    arguments,
    first,
    last_step,
    outcome,
    slow_steps,
    start,
    unequal,
    wait_until,
)
from campaign.runs import BAD, Alone, Kind, clear, descendants, finishes_as_if_alone, workers_of

SETTINGS = (*TELLING, "steps=60", "save_every=7", "eval_every=1000", BAD)
PATIENCE = 0.05
"""layout.timeout_minutes: three seconds."""


def stuck(plan: Plan) -> Result:
    """Stopped ranks, slow ranks, dead data workers, two launchers on one run folder."""
    result = Result()
    folder = plan.inside("stuck")
    alone = Alone(folder)
    _two_launchers(plan, folder, alone, result)
    _stopped(plan, folder, alone, result)
    _data_worker(plan, folder, alone, result)
    if plan.long:
        _stopped_worker(plan, folder, result)
    return result


def _two_launchers(plan: Plan, folder: Path, alone: Alone, result: Result) -> None:
    kind = Kind(SETTINGS)
    expected, _ = alone.of(kind)
    torn = folder / "torn"
    for case, rng in plan.cases("launchers", short=2, long=12):
        many = [start(torn, kind.command, before=slow_steps, output=folder / "torn.0")]
        time.sleep(rng.choice([0.0, 0.0, rng.uniform(0, 0.5), rng.uniform(0, 1.5)]))
        many += [start(torn, kind.command, before=slow_steps, output=folder / f"torn.{n}") for n in (1, 2)]
        codes = [child.wait() for (child,) in many]
        result.counts["launchers that met in one run folder"] += 3
        texts = [child.text for (child,) in many]
        what = f"three launchers: exit codes {codes}"
        result.expect(sorted(map(str, codes)) == ["0", "2", "2"], case, f"{what}: {[text[-500:] for text in texts]}")
        for code, text in zip(codes, texts, strict=True):
            is_clear = text.count("error: ") == 1 and "run_dir" in text and "Traceback" not in text
            result.expect(code != 2 or is_clear, case, f"{what}: {text[-500:]}")
        found = unequal(expected, outcome(torn)) if 0 in codes else []
        result.expect(not found, case, f"{what}: another result: {first(found)}")
        clear(torn)


def _stopped(plan: Plan, folder: Path, alone: Alone, result: Result) -> None:
    """A rank stands still: for a while, or for ever."""
    kind = Kind(SETTINGS, num_ranks=2)
    patient, hasty = kind.command, [*kind.command, f"layout.timeout_minutes={PATIENCE}"]
    expected, _ = alone.of(kind)
    torn = folder / "torn"
    longest = 0.0
    for case, rng in plan.cases("stopped", short=2, long=8):
        for_ever = case % 2 == 0
        children = start(torn, hasty if for_ever else patient, num_ranks=2, before=slow_steps)
        wait_until(lambda: last_step(torn) > 0, children[0])
        time.sleep(rng.uniform(0, 0.5))
        rank = rng.randrange(2)
        children[rank].signal(signal.SIGSTOP)
        what = f"rank {rank} stands still"
        if for_ever:
            began = time.monotonic()
            other = children[1 - rank]
            code = other.wait(30)
            longest = max(longest, time.monotonic() - began)
            result.counts["ranks that stood still for ever"] += 1
            result.expect(code == 1, case, f"{what}: the other ends with {code}: {other.text[-700:]}")
            result.expect("imed out" in other.text or "imeout" in other.text, case, f"{what}: {other.text[-700:]}")
            children[rank].kill()
        else:
            time.sleep(rng.uniform(0.2, 1.5))
            children[rank].signal(signal.SIGCONT)
            result.counts["ranks that stood still for a while"] += 1
            codes = [child.wait() for child in children]
            result.expect(codes == [0, 0], case, f"{what} for a while: {codes}: {children[0].text[-700:]}")
        finishes_as_if_alone(torn, kind, expected, result, case, what)
        clear(torn)
    result.facts["timeout, and longest until a rank that stood still was noticed"] = (
        f"{60 * PATIENCE:.0f} s, {longest:.1f} s"
    )


def _data_worker(plan: Plan, folder: Path, alone: Alone, result: Result) -> None:
    """A process that loads data is killed, or stands still for a while."""
    kind = Kind((*SETTINGS, "data.num_workers=2"))
    expected, _ = alone.of(kind)
    torn = folder / "torn"
    for case, rng in plan.cases("data workers", short=2, long=10):
        (child,) = start(torn, kind.command, before=slow_steps)
        wait_until(lambda: last_step(torn) > 0, child)
        workers = descendants(child.pid)
        if not workers:
            continue
        result.counts["data workers killed"] += 1
        os.kill(rng.choice(workers), signal.SIGKILL)
        code = child.wait(60)
        what = "a data worker is killed"
        result.expect(code == 1, case, f"{what}: exit code {code}: {child.text[-700:]}")
        result.expect("DataLoader worker" in child.text, case, f"{what}: {child.text[-700:]}")
        finishes_as_if_alone(torn, kind, expected, result, case, what)
        clear(torn)


def _stopped_worker(plan: Plan, folder: Path, result: Result) -> None:
    """The same under our own launcher, which must end all of its workers, also the one that stands still."""
    torn = folder / "torn"
    command = arguments(*SETTINGS, "steps=1000000", f"run_dir={torn}", "layout=ddp", "layout.nproc_per_node=2")
    longest = 0.0
    for case, rng in plan.cases("stopped workers", short=1, long=1):
        child = Child(lambda: train.main([*command, f"layout.timeout_minutes={PATIENCE}"]), folder / "torn.0.txt")
        wait_until(lambda: last_step(torn) > 3, child)
        workers = workers_of(child.pid)
        began = time.monotonic()
        if result.expect(len(workers) == 2, case, f"{len(workers)} workers: {child.text[-700:]}"):
            os.kill(rng.choice(workers), signal.SIGSTOP)
            code = child.wait(90)
            longest = max(longest, time.monotonic() - began)
            result.counts["workers of the launcher that stood still for ever"] += 1
            result.expect(code == 1, case, f"a worker stands still: exit code {code}: {child.text[-1500:]}")
            left = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
            result.expect(not left, case, f"a worker stands still: {left} are left")
        clear(torn)
    result.facts["longest until the launcher had ended all"] = f"{longest:.1f} s"
