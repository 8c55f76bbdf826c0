"""Runs that are killed or told to stop, and that go on: the result is, bit for bit, that of a run left alone."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import system_calls
from chats import chat_settings
from running import differing

import train
from amp_core.data import loading
from amp_core.run.stop import SIGNALS, Stop, exit_code_of
from campaign import Plan, Result
from campaign.drawn import drawn_kind
from campaign.harness import (
    LOSES_RANKS,
    TELLING,
    Child,
    Kind,
    arguments,
    checkpoints,
    column_of,
    first,
    last_step,
    lines,
    outcome,
    run,
    start,
    state,
    summary,
    wait_until,
    wait_without_partner,
)

TORN = ["steps=12", "save_every=1", "eval_every=5", "checkpoint.keep=2", *TELLING]
CADENCES = ("log_every", "save_every", "eval_every")
MOST = (5, 4, 7)
"""The largest of each that is drawn."""


def _kind(recipe: str = "classification", *settings: str, num_ranks: int = 1) -> Kind:
    return Kind((*TORN, *settings), recipe, num_ranks)


class Alone:
    """Results of runs that nothing happens to, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Kind, tuple[dict[str, Any], float]] = {}
        self._calls: dict[Kind, list[int]] = {}

    def of(self, kind: Kind) -> tuple[dict[str, Any], float]:
        """(outcome, seconds)"""
        if kind not in self._known:
            folder = self.folder / f"alone{len(self._known)}"
            began = time.monotonic()
            count = functools.partial(_count_calls, folder=folder)
            codes = run(folder, kind.command, num_ranks=kind.num_ranks, before=count)
            seconds = time.monotonic() - began
            text = folder.with_name(f"{folder.name}.0.txt").read_text()
            assert codes == [0] * kind.num_ranks, (kind, codes, text[-3000:])
            self._known[kind] = outcome(folder), seconds
            self._calls[kind] = [_calls_file(folder, rank).stat().st_size for rank in range(kind.num_ranks)]
        return self._known[kind]

    def calls(self, kind: Kind) -> list[int]:
        """The calls of each rank that change files, in all its saves."""
        self.of(kind)
        return self._calls[kind]

    def drawn(self, plan: Plan, draw: str, **options: Any) -> tuple[Kind, dict[str, Any], float]:
        """(a kind that is drawn with its cadences, its outcome, seconds)"""
        kind, _ = with_cadences(drawn_kind(plan, draw, **options), plan, draw)
        return kind, *self.of(kind)


def expect_same(expected: Any, told: Any, result: Result, case: object, what: str) -> None:
    """Two outcomes must agree in every bit."""
    found = differing(expected, told)
    result.expect(not found, case, f"{what}: another result: {first(found)}", column_of(found))


def finishes_as_if_alone(
    folder: Path, kind: Kind, expected: dict[str, Any], result: Result, case: object, what: str
) -> None:
    """Start the run once more; it must end well and with the result of the run that was left alone."""
    children = start(folder, kind.command, num_ranks=kind.num_ranks)
    codes = [child.wait() for child in children]
    went_on = f"{what}: goes on with {codes}: {children[0].text[-700:]}"
    if result.expect(codes == [0] * len(codes), case, went_on, "other" if None in codes else "lost"):
        expect_same(expected, outcome(folder), result, case, what)


def clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for path in folder.parent.glob(f"{folder.name}.*"):
        path.unlink()


BAD = "debug.inject={where: batch, step: 4}"
SHARDS = ("checkpoint=sharded", "checkpoint.background=true")
TEXT = ("data=text", f"data.path={Path(train.__file__).parent / 'conf'}", "data.num_samples=32")
CHAT = "data=chat"
"""Stands for the settings of chats, which are made for a campaign."""
KINDS = [
    _kind("classification", BAD, "model.options.dropout=0.2"),
    _kind("classification", "debug.inject={where: gradient, step: 4, rank: 1}", num_ranks=2),
    _kind("classification", *SHARDS, num_ranks=2),
    _kind("gan"),
    _kind("classification", "amp=bf16", "amp.init_scale=null", "optimizer=sgd", "schedule=step"),
    _kind("face_recognition"),
    _kind("face_recognition", num_ranks=2),
    _kind("language_model"),
    _kind("classification", BAD, "data.num_workers=2"),
    _kind("distillation"),
    _kind("contrastive"),
    _kind("segmentation"),
    _kind("custom_function"),
    _kind("classification", num_ranks=3),
    _kind("classification", BAD, "checkpoint.background=true"),
    _kind("language_model", "layout=fsdp", *SHARDS, num_ranks=2),
    _kind("language_model", "layout=fsdp", "checkpoint=sharded", num_ranks=3),
    _kind("face_recognition", *SHARDS, num_ranks=2),
    _kind("language_model", *TEXT, "data.packing=best_fit"),
    _kind("language_model", *TEXT, "data.packing=chunks", "layout=fsdp", *SHARDS, num_ranks=2),
    _kind("language_model", *TEXT, "data.mix={amp:0.3,clip:0.7}", num_ranks=2),
    _kind("finetuning", CHAT, num_ranks=2),
]
NUM_SHORT = 3
NUM_VARIANTS = 3
"""Cadences that are drawn for each kind; each needs a run that is left alone."""


def with_cadences(kind: Kind, plan: Plan, draw: object) -> tuple[Kind, list[int]]:
    """The kind with cadences of logging, saving and evaluating that are drawn one by one."""
    rng = random.Random(f"{plan.seed}/cadences/{draw}")
    drawn = [rng.randint(1, most) for most in MOST]
    settings = (f"{name}={every}" for name, every in zip(CADENCES, drawn, strict=True))
    return replace(kind, settings=(*kind.settings, *settings)), drawn


def _with(chats: list[str], settings: tuple[str, ...]) -> list[str]:
    return [each for setting in settings for each in (chats if setting == CHAT else [setting])]


class Deadly(system_calls.Calls):
    """Kills its process at one of the calls of its saves."""

    def _call(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], at: dict[str, int]) -> Any:
        self.trace.append((name, (), None))
        if len(self.trace) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **at)


class Counted(system_calls.Calls):
    """Writes a byte for each call."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def _call(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], at: dict[str, int]) -> Any:
        os.write(self._file, b".")
        return real(*args, **at)


def _calls_file(folder: Path, rank: int) -> Path:
    return folder.with_name(f"{folder.name}.{rank}.calls")


def _count_calls(rank: int, *, folder: Path) -> None:
    system_calls.use(Counted(_calls_file(folder, rank)))


def _die_in_a_save(rank: int, *, who: int, at: int) -> None:
    if rank == who:
        system_calls.use(Deadly(at))


def kills(plan: Plan) -> Result:
    """SIGKILL at random moments, half of them inside a save, once or several times; then the run goes on."""
    result = Result()
    folder = plan.inside("kills")
    alone, torn = Alone(folder), folder / "torn"
    kinds = [*(KINDS if plan.long else KINDS[:NUM_SHORT])]
    num_drawn = 32 if plan.long else 0
    kinds += [drawn_kind(plan, f"kills/{number}") for number in range(num_drawn)]
    longest = 0.0
    if find_spec("tokenizers") and find_spec("jinja2"):
        chats = chat_settings(plan.inside("chats"))
        kinds = [replace(kind, settings=tuple(_with(chats, kind.settings))) for kind in kinds]
    else:
        kinds = [kind for kind in kinds if CHAT not in kind.settings]
    for case, rng in plan.cases("kills", short=6, long=220):
        number, variant = case // 2 % len(kinds), case // 2 // len(kinds) % NUM_VARIANTS
        kind, (log_every, _, _) = with_cadences(kinds[number], plan, f"{number}/{variant}")
        expected, seconds = alone.of(kind)
        what = [f"{kind.name} with {' '.join(kind.settings[-3:])}"]
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if case % 2:
                who = rng.randrange(kind.num_ranks) if kind.is_sharded else 0
                at = rng.randint(1, alone.calls(kind)[who])
                die = functools.partial(_die_in_a_save, who=who, at=at)
                children = start(torn, kind.command, num_ranks=kind.num_ranks, before=die)
                children[who].wait()
                died = children[who].code == -signal.SIGKILL
                what.append(f"rank {who} killed at call {at} of its saves")
                ended = f"{what}: ends with {children[who].code}: {children[who].text[-700:]}"
                result.expect(died or children[who].code == 0, case, ended)
                result.counts["kills inside a save"] += died
            else:
                before = last_step(torn)
                command = [*kind.command, *(LOSES_RANKS if kind.num_ranks > 1 else ())]
                children = start(torn, command, num_ranks=kind.num_ranks)
                pause = rng.uniform(0, seconds)
                time.sleep(pause)
                died = all(child.poll() is None for child in children)
                one = rng.randrange(2 * kind.num_ranks)
                what.append(f"killed after {pause:.3f} s")
                result.counts["kills at a random moment"] += died
                # Until the ranks are connected it is the agent that ends the others; after the last step they may part.
                if died and one < kind.num_ranks > 1 and before < last_step(torn) < 12 - log_every:
                    children[one].kill()
                    began = time.monotonic()
                    what.append(f"rank {one} alone")
                    for _, code in wait_without_partner(children):
                        result.expect(code not in (None, 0), case, f"{what}: a partner ends with {code}")
                    longest = max(longest, time.monotonic() - began)
            for child in children:
                child.kill()
        finishes_as_if_alone(torn, kind, expected, result, case, ", ".join(what))
        clear(torn)
    result.facts["kinds of runs"] = f"{len(kinds)}, {num_drawn} of them drawn"
    if longest:
        result.facts["longest until the partners of a killed rank ended"] = f"{longest:.1f} s"
    return result


def _note_polls(rank: int, *, folder: Path) -> None:
    """Note the time of each step's end of this rank."""
    original = Stop.poll
    file = os.open(folder.with_name(f"{folder.name}.{rank}.polls"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def poll(self: Stop) -> int:
        os.write(file, struct.pack("d", time.monotonic()))
        return original(self)

    setattr(Stop, "poll", poll)  # noqa: B010 - an observer


def _polls(folder: Path, rank: int) -> list[float]:
    path = folder.with_name(f"{folder.name}.{rank}.polls")
    data = path.read_bytes() if path.exists() else b""
    return [moment for (moment,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]


def signals(plan: Plan) -> Result:
    """SIGTERM, SIGINT, SIGUSR1 at random moments, to all ranks or to one: all stop at one step, and the run goes on."""
    result = Result()
    folder = plan.inside("signals")
    alone, torn = Alone(folder), folder / "torn"
    num_steps = 60 if plan.long else 30
    settings = (*TELLING, f"steps={num_steps}", BAD)
    most, longest = 0, 0.0
    for case, rng in plan.cases("signals", short=4, long=80):
        num_ranks = [1, 2, 3, 4][case % 4] if plan.long else [1, 2, 1, 3][case % 4]
        number = SIGNALS[case % 3]
        expected_code = exit_code_of(128 + number)
        draw = f"{num_ranks}/{case // 4 % NUM_VARIANTS}"
        kind, _ = with_cadences(Kind(settings, num_ranks=num_ranks), plan, draw)
        if case % 3 == 2:
            draw = f"signals/{num_ranks}/{case // 12}"
            kind, _ = with_cadences(drawn_kind(plan, draw, steps=num_steps, num_ranks=num_ranks), plan, draw)
        expected, seconds = alone.of(kind)
        children = start(torn, kind.command, num_ranks=num_ranks, before=functools.partial(_note_polls, folder=torn))
        wait_until(lambda: last_step(torn) > 0, children[0])
        time.sleep(rng.uniform(0, 0.6 * seconds))
        told = rng.choice([children, [rng.choice(children)]])
        running = all(child.poll() is None for child in children)
        at = time.monotonic()
        for child in told:
            child.signal(number)
        codes = [child.wait() for child in children]
        took = time.monotonic() - at
        what = f"{kind.name}, {number.name} to {len(told)} of them"
        steps = max(sum(moment > at for moment in _polls(torn, rank)) for rank in range(num_ranks))
        if running:
            # The step in progress, and one more in which the ranks agree; the signal may come just after a step's end.
            most, longest = max(most, steps), max(longest, took)
            result.expect(steps <= (2 if num_ranks == 1 else 3), case, f"{what}: {steps} steps after the signal")
        if running and set(codes) != {0}:
            result.counts[f"signals to runs of {num_ranks} processes"] += 1
            result.expect(
                codes == [expected_code] * num_ranks, case, f"{what}: exit codes {codes}: {children[0].text[-700:]}"
            )
            told_by = summary(torn)
            said = told_by["status"], told_by["exit_code"]
            result.expect(said == ("preempted", expected_code), case, f"{what}: summary.json says {said}")
            saved = state(torn)["progress"]["step"] if checkpoints(torn) else None
            result.expect(saved == told_by["step"], case, f"{what}: saved {saved}, stopped at {told_by['step']}")
        finishes_as_if_alone(torn, kind, expected, result, case, what)
        clear(torn)
    result.facts["most steps after a signal"] = str(most)
    result.facts["longest until all had ended"] = f"{longest:.1f} s"
    _evaluations(plan, folder, result)
    return result


def _signal_in_evaluation(rank: int, *, folder: Path, at: tuple[int, int, int]) -> None:
    """Evaluate one sample after the other; note each; at (rank, evaluation, batch) this process gets a signal."""
    keys, batches = loading.eval_keys, loading.EvalLoader.__iter__
    file = os.open(folder.with_name(f"{folder.name}.{rank}.evaluated"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    evaluation = 0

    def one_by_one(num_samples: int, *, batch_size: int, **ranks: int) -> Any:
        return keys(num_samples, batch_size=1, **ranks)

    def observed(self: loading.EvalLoader) -> Any:
        nonlocal evaluation
        evaluation += 1
        here = evaluation
        for number, batch in enumerate(batches(self)):
            os.write(file, struct.pack("2i", here, number))
            if (rank, here, number) == at[:3]:
                os.kill(os.getpid(), SIGNALS[here % 3])
            yield batch

    setattr(loading, "eval_keys", one_by_one)  # noqa: B010 - an observer
    setattr(loading.EvalLoader, "__iter__", observed)  # noqa: B010


def _evaluations(plan: Plan, folder: Path, result: Result) -> None:
    """A signal in the middle of an evaluation: all ranks leave it at one batch, save, and the run goes on."""
    torn, whole = folder / "torn", folder / "whole"
    command = arguments("steps=4", "eval_every=1", "save_every=1000", "amp=bf16", "data.num_samples=192")
    most = 0
    for case, rng in plan.cases("evaluations", short=1, long=24):
        num_ranks = [2, 1, 3][case % 3]
        evaluation = [2, 4, 1, 3][case % 4]  # the fourth is that of the last step
        at = (rng.randrange(num_ranks), evaluation, rng.randrange(6))
        expected = exit_code_of(128 + SIGNALS[evaluation % 3])
        what = f"a signal to rank {at[0]} of {num_ranks} in batch {at[2]} of evaluation {evaluation}"
        never = functools.partial(_signal_in_evaluation, folder=whole, at=(-1, 0, 0))
        assert run(whole, command, num_ranks=num_ranks, before=never) == [0] * num_ranks
        before = functools.partial(_signal_in_evaluation, folder=torn, at=at)
        codes = run(torn, command, num_ranks=num_ranks, before=before)
        text = torn.with_name("torn.0.txt").read_text()
        result.counts["signals during an evaluation"] += 1
        result.expect(codes == [expected] * num_ranks, case, f"{what}: exit codes {codes}: {text[-700:]}")
        for rank in range(num_ranks):
            data_read = torn.with_name(f"torn.{rank}.evaluated").read_bytes()
            last = max(struct.iter_unpack("2i", data_read))
            most = max(most, last[1] - at[2])
            result.expect(last <= (evaluation, at[2] + 2), case, f"{what}: rank {rank} went on to {last}")
        if result.expect(bool(checkpoints(torn)), case, f"{what}: no checkpoint"):
            said = summary(torn)["step"], state(torn)["progress"]["step"]
            result.expect(said == (evaluation, evaluation), case, f"{what}: stopped and saved at {said}")
        evaluated = [line["step"] for line in lines(torn) if line["split"] == "eval"]
        result.expect(evaluated == list(range(1, evaluation)), case, f"{what}: results at {evaluated}")
        codes = run(torn, command, num_ranks=num_ranks, before=functools.partial(never, folder=torn))
        if result.expect(codes == [0] * num_ranks, case, f"{what}: goes on with {codes}"):
            expect_same(outcome(whole), outcome(torn), result, case, what)
        clear(torn)
        clear(whole)
    result.facts["most batches of an evaluation after a signal"] = str(most)


def descendants(pid: int) -> list[int]:
    """Process ids of what a process has started, and of what these have, in order of their start."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def workers_of(pid: int) -> list[int]:
    """Process ids of the ranks that a launcher has started."""
    found = []
    for child in descendants(pid):
        try:
            is_worker = b"recipes" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found += [child] if is_worker else []
    return found


def _is_at(folder: Path, step: int, launcher: int) -> bool:
    return last_step(folder) >= step and len(workers_of(launcher)) == 2


def _are_gone(workers: set[int], launcher: int) -> bool:
    return not workers & set(workers_of(launcher))


def restarts(plan: Plan) -> Result:
    """A rank is killed at a random step, up to three times: the agent starts it again, and the run ends well."""
    result = Result()
    folder = plan.inside("restarts")
    alone, torn = Alone(folder), folder / "torn"
    for case, rng in plan.cases("restarts", short=1, long=8):
        layout = ["ddp", "fsdp"][case % 2]
        num_steps = 150 if plan.long else 40
        settings = (*TELLING, f"steps={num_steps}", "save_every=7", "eval_every=1000", BAD, f"layout={layout}")
        kind = Kind(settings, num_ranks=2)
        expected, _ = alone.of(kind)
        agent = [*kind.command, "layout.nproc_per_node=2", "layout.max_restarts=3", f"run_dir={torn}"]
        child = Child(functools.partial(train.main, agent), folder / "torn.0.txt")
        steps = sorted(rng.sample(range(1, num_steps - 10), rng.choice([1, 1, 2, 3]) if plan.long else 1))
        killed = 0
        for step in steps:
            wait_until(functools.partial(_is_at, torn, step, child.pid), child)
            workers = workers_of(child.pid)
            if len(workers) == 2 and last_step(torn) < num_steps - 1:
                os.kill(rng.choice(workers), signal.SIGKILL)
                killed += 1
                wait_until(functools.partial(_are_gone, set(workers), child.pid), child)
        code = child.wait(180)
        result.counts[f"ranks killed and restarted ({layout})"] += killed
        what = f"a rank killed at steps {steps}"
        if result.expect(code == 0, case, f"{what}: exit code {code}: {child.text[-1500:]}"):
            expect_same(expected, outcome(torn), result, case, what)
        clear(torn)
    return result
