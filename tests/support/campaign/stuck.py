"""Processes that stand still, are slow, or get in each other's way: noticed in time and said, and nothing hangs."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import train
from amp_core.data.loading import Batches
from amp_core.run import loop as loop_module
from amp_core.run.loop import Loop
from amp_core.run.stop import SIGNALS, exit_code_of
from campaign import Plan, Result
from campaign.harness import (
    TELLING,
    Child,
    arguments,
    checkpoints,
    last_step,
    slow_steps,
    start,
    state,
    summary,
    wait_until,
)
from campaign.runs import BAD, Alone, Kind, clear, descendants, finishes_as_if_alone, workers_of

SETTINGS = (*TELLING, "steps=60", "save_every=7", "eval_every=1000", BAD)
PATIENCE = 0.05
"""layout.timeout_minutes: three seconds."""
BOUND = 30.0
"""Seconds in which a run ends that was asked to."""
GONE_SECONDS = 2.0
"""For the kernel to end what was killed, and for the first process to take note of orphans."""
PHASES = ("start", "step", "evaluation", "save", "teardown")


def stuck(plan: Plan) -> Result:
    """Stopped ranks and data workers, killed launchers."""
    result = Result()
    folder = plan.inside("stuck")
    alone = Alone(folder)
    _stopped(plan, folder, alone, result)
    _killed_launchers(plan, folder, result)
    _signals_while_a_worker_is_stopped(plan, folder, alone, result)
    _signals_while_a_rank_is_stopped(plan, folder, result)
    return result


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
            result.counts["ranks stopped"] += 1
            result.expect(code == 1, case, f"{what}: the other ends with {code}: {other.text[-700:]}")
            result.expect("imed out" in other.text or "imeout" in other.text, case, f"{what}: {other.text[-700:]}")
            children[rank].kill()
        else:
            time.sleep(rng.uniform(0.2, 1.5))
            children[rank].signal(signal.SIGCONT)
            result.counts["ranks stopped and continued"] += 1
            codes = [child.wait() for child in children]
            result.expect(codes == [0, 0], case, f"{what} for a while: {codes}: {children[0].text[-700:]}")
        finishes_as_if_alone(torn, kind, expected, result, case, what)
        clear(torn)
    result.facts["timeout, and longest until a stopped rank was noticed"] = f"{60 * PATIENCE:.0f} s, {longest:.1f} s"


def _killed_launchers(plan: Plan, folder: Path, result: Result) -> None:
    """SIGKILL to a launcher while its workers import, meet or train: they end, too, and the run goes on."""
    torn = folder / "torn"
    command = arguments(*SETTINGS, f"run_dir={torn}", "layout=ddp", "layout.nproc_per_node=2")
    longest = 0.0
    for case, rng in plan.cases("killed launchers", short=1, long=12):
        child = Child(lambda: train.main([*command, "steps=1000000"]), folder / "torn.0.txt")
        wait_until(lambda child=child: len(workers_of(child.pid)) == 2, child)
        after = rng.uniform(0.0, 6.0)
        time.sleep(after)
        workers = workers_of(child.pid)
        began = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        left = set(workers)
        while left and time.monotonic() < began + BOUND:
            time.sleep(0.02)
            left = {pid for pid in left if Path(f"/proc/{pid}").exists()}
        longest = max(longest, time.monotonic() - began)
        child.wait()
        result.counts["launchers killed"] += 1
        what = f"a launcher is killed {after:.1f} s after its workers began"
        result.expect(not left, case, f"{what}: {left} are left: {child.text[-700:]}", "unbounded waits")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        again = Child(lambda: train.main([*command, f"steps={last_step(torn) + 30}"]), folder / "torn.0.txt")
        result.expect(again.wait() == 0, case, f"{what}: does not go on: {again.text[-700:]}")
        clear(torn)
    result.facts["longest until the workers of a killed launcher had ended"] = f"{longest:.1f} s"


def _stop_workers(rank: int, *, phase: str, step: int, mark: Path) -> None:
    """SIGSTOP to all data workers in a phase of the run, once, and a mark that it was done."""
    init = Batches.__init__
    opened: list[Batches] = []
    evaluates = False

    def stop() -> None:
        if not mark.exists():
            for batches in opened:
                for worker in batches._workers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGSTOP)
            mark.touch()

    def opening(self: Batches, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        opened.append(self)
        if phase == "start" or (phase == "evaluation" and evaluates):
            stop()

    def before(owner: Any, name: str, when: str) -> None:
        original = getattr(owner, name)

        def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal evaluates
            evaluates = name == "_evaluate"
            if phase == when and getattr(self, "step", step) >= step:
                stop()
            return original(self, *args, **kwargs)

        setattr(owner, name, observed)

    setattr(Batches, "__init__", opening)  # noqa: B010 - an observer
    before(Loop, "_after_step", "step")
    before(Loop, "_evaluate", "")
    before(Loop, "_save", "save")
    before(loop_module, "_end", "teardown")


def _told_to_stop(
    child: Child, number: int, twice: random.Random | None, result: Result, case: object, what: str
) -> float:
    """Seconds from a signal, with `twice` from a SIGINT some time after it, to the end, which must come in time."""
    began = time.monotonic()
    child.signal(number)
    if twice:
        time.sleep(twice.uniform(0.1, 1.0))
        began = time.monotonic()
        child.signal(signal.SIGINT)
    code = child.wait(2 * BOUND)
    took = time.monotonic() - began
    codes = (0, exit_code_of(128 + number), *((130, -signal.SIGINT) if twice else ()))
    if result.expect(code in codes, case, f"{what}: exit code {code}: {child.text[-1500:]}"):
        result.expect(took < BOUND, case, f"{what}: {took:.1f} s", "unbounded waits")
    return took


def _signals_while_a_worker_is_stopped(plan: Plan, folder: Path, alone: Alone, result: Result) -> None:
    """Signals to a run whose data workers are stopped: it ends in time, saves, and goes on; a second, Ctrl-C, at once."""
    kind = Kind((*SETTINGS, "steps=20", "save_every=5", "eval_every=3", "log_every=4", "data.num_workers=2"))
    expected, _ = alone.of(kind)
    torn, mark = folder / "torn", folder / "torn.mark"
    longest, after_second = 0.0, 0.0
    for case, rng in plan.cases("signals while a worker is stopped", short=2, long=60):
        phase = PHASES[(case + 1) % len(PHASES)]
        step = rng.randrange(2, 15)
        before = functools.partial(_stop_workers, phase=phase, step=step, mark=mark)
        (child,) = start(torn, kind.command, before=before)
        wait_until(mark.exists, child)
        number, twice = rng.choice(SIGNALS), case % 3 == 1
        what = f"workers stopped in phase {phase} from step {step} on, {number.name}{' and SIGINT' if twice else ''}"
        took = _told_to_stop(child, number, rng if twice else None, result, case, what)
        result.counts["signals to runs with stopped data workers"] += 1
        longest, after_second = (longest, max(after_second, took)) if twice else (max(longest, took), after_second)
        if not twice:
            saved = state(torn)["progress"]["step"] if checkpoints(torn) else 0
            told = summary(torn)["step"] if (torn / "summary.json").exists() else 0  # stopped before it began
            result.expect(saved == told, case, f"{what}: saved {saved}, stopped at {told}")
        finishes_as_if_alone(torn, kind, expected, result, case, what)
        clear(torn)
    result.facts["longest from a signal to the end, with stopped data workers"] = f"{longest:.1f} s"
    result.facts["longest from a second Ctrl-C to the end"] = f"{after_second:.1f} s"


def _signals_while_a_rank_is_stopped(plan: Plan, folder: Path, result: Result) -> None:
    """The same of a rank under our own launcher, or of a process that loads its data: all of them end in time."""
    torn = folder / "torn"
    cadences = {
        "step": "log_every=1",
        "evaluation": "eval_every=1",
        "save": "save_every=1",
        "start": "",
        "teardown": "",
    }
    longest, after_second = 0.0, 0.0
    # Short: a rank in a step, with a second signal. tests/runs/test_lost_ranks.py has the data worker of a rank.
    for case, rng in plan.cases("signals while a rank is stopped", short=(1,), long=48):
        phase, of_loader = PHASES[case % len(PHASES)], case // len(PHASES) % 2 == 1
        steps = 8 if phase == "teardown" else 1000000
        settings = (*SETTINGS, f"steps={steps}", *filter(None, [cadences[phase]]), "data.num_samples=960")
        settings += ("data.num_workers=1",) if of_loader else ()
        command = arguments(*settings, f"run_dir={torn}", "layout=ddp", "layout.nproc_per_node=2")
        child = Child(functools.partial(train.main, command), folder / "torn.0.txt")
        if phase == "start":
            wait_until(lambda child=child: len(workers_of(child.pid)) == 2, child)
            time.sleep(rng.uniform(0, 4))
        elif phase == "teardown":
            wait_until(lambda: (torn / "summary.json").exists() and summary(torn)["status"] == "finished", child)
        else:
            wait_until(lambda: last_step(torn) > 3, child)
            time.sleep(rng.uniform(0, 0.5))
        workers = workers_of(child.pid)
        number, twice = rng.choice(SIGNALS), case % 3 == 1
        victims = [pid for worker in workers for pid in descendants(worker)] if of_loader else workers
        who = "data worker of a rank" if of_loader else "rank"
        what = f"a {who} stopped in phase {phase}, {number.name}{' and SIGINT' if twice else ''}"
        if victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(victims), signal.SIGSTOP)
        took = _told_to_stop(child, number, rng if twice else None, result, case, what)
        result.counts[f"signals to launchers {f'with a stopped {who}' if victims else 'before their workers'}"] += 1
        end = time.monotonic() + GONE_SECONDS
        left = {*workers, *victims}
        while left and time.monotonic() < end:
            time.sleep(0.01)
            left = {pid for pid in left if Path(f"/proc/{pid}").exists()}
        result.expect(not left, case, f"{what}: {left} are left")
        longest, after_second = (longest, max(after_second, took)) if twice else (max(longest, took), after_second)
        clear(torn)
    result.facts["longest from a signal to the end, with a stopped rank"] = f"{longest:.1f} s"
    result.facts["longest from a second Ctrl-C, with a stopped rank"] = f"{after_second:.1f} s"
