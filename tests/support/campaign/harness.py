"""Runs as forked processes, and what is compared of them."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import small
import torch
import torch.distributed as dist
from running import checkpoints, summary, timeless
from running import lines as all_lines

import train
from amp_core.checkpoints.reading import read
from amp_core.run.stop import Stop
from recipes import RECIPES, find

MORE = {"distillation": ["recipe.teacher_steps=3"], "gan": ["recipe.num_critic_steps=2"]}
SMALL = {name: [*each, *MORE.get(name, [])] for name, each in small.SMALL.items() if name != "model_parallel"}
# A scale that overflows at first, and an average: state that is only right if it was put back.
TELLING = ["amp=fp16", "amp.init_scale=16777216", "accumulation=2", "clip=norm", "clip.max_norm=0.5", "ema.decay=0.9"]

COLLECTIVE_SECONDS = 30.0
LOSES_RANKS = (f"layout.timeout_minutes={COLLECTIVE_SECONDS / 60}",)
"""For runs that lose ranks and have no launcher that ends the others. Gloo mostly notices at once that a connection was
closed, but not when that happens in the middle of a collective's setup: then only the timeout ends the wait."""

patience = 120.0
"""Seconds until a process is said to hang."""
_children: set[int] = set()
_agents: list[Child] = []


def arguments(*overrides: str, recipe: str = "classification") -> list[str]:
    """A command line of a run that takes milliseconds per step."""
    return [f"recipe={recipe}", *small.COMMON, *SMALL[recipe], *overrides]


@dataclass(frozen=True)
class Kind:
    """What is run."""

    settings: tuple[str, ...]
    recipe: str = "classification"
    num_ranks: int = 1

    @property
    def command(self) -> list[str]:
        return arguments(*self.settings, recipe=self.recipe)

    @property
    def name(self) -> str:
        return f"{self.recipe} on {self.num_ranks}" + (" in shards" if self.is_sharded else "")

    @property
    def is_sharded(self) -> bool:
        return "checkpoint=sharded" in self.settings


def warm_up(work: Path) -> None:
    """Pay here for what every run would pay for: imports, and what torch sets up at the first step."""
    import torch._dynamo  # what DistributedDataParallel imports
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    for name in RECIPES:
        find(name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = train.main(arguments(*TELLING, "steps=12", f"run_dir={work / 'first'}"))
    assert code == 0
    gc.collect()
    gc.freeze()  # what no collection touches is not copied for each process
    running = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").is_dir() else 1
    assert running == 1, f"{running} threads: what is forked from this process could hang"


class Child:
    """A forked process in a session of its own, with its output in a file.

    Args:
        act: what it does; its result is the exit code. 99 when it raises.
        output: the file.
        environ: variables on top of this process's.
    """

    def __init__(self, act: Callable[[], int | None], output: Path, environ: Mapping[str, str] | None = None) -> None:
        self.output = output
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._live(act, environ or {})
        self.code: int | None = None
        self.hung = False
        """It did not end in the time that `wait` gave it."""
        self._is_gone = False
        _children.add(self.pid)

    def _live(self, act: Callable[[], int | None], environ: Mapping[str, str]) -> None:
        code: int | None = 99
        try:
            os.setsid()
            _children.clear()
            _agents.clear()
            output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)  # says where it hangs, see `wait`
            os.environ.update(environ)
            code = act() or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code or 0)

    @property
    def text(self) -> str:
        """All that it and earlier ones with this file have printed."""
        return self.output.read_text(errors="replace")

    def poll(self) -> int | None:
        """The exit code, minus the signal if one ended it, or None while it runs."""
        if not self._is_gone:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ended(status)
        return self.code

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code; None if it had to be killed because it did not end in time (default: `patience`)."""
        end = time.monotonic() + (patience if seconds is None else seconds)
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        if not self._is_gone:
            self.hung = True
            self.signal(signal.SIGUSR2)
            time.sleep(0.2)
            self.kill()
        return None if self.hung else self.code

    def kill(self) -> None:
        """SIGKILL to it and what it started; at once and without a trace."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # before its setsid
        if not self._is_gone:
            self._ended(os.waitpid(self.pid, 0)[1])

    def signal(self, number: int) -> None:
        if self._is_gone:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _ended(self, status: int) -> None:
        self._is_gone, self.code = True, os.waitstatus_to_exitcode(status)
        _children.discard(self.pid)


def kill_all() -> None:
    """End what is still running."""
    for pid in list(_children):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def start(
    folder: Path,
    command: list[str],
    *,
    num_ranks: int = 1,
    before: Callable[[int], None] | None = None,
    environ: Mapping[str, str] | None = None,
    output: Path | None = None,
    main: Callable[[list[str]], int] | None = None,
) -> list[Child]:
    """Start a run in `folder`, as `python train.py` or, with several ranks, as torchrun starts its workers.

    Args:
        folder: its run folder; the output of rank r goes to `<folder>.r.txt` beside it.
        command: without run_dir.
        num_ranks: above 1, layout=ddp is added where there is no other.
        before: called in each process with its rank, to put a fault or an observer into place.
        environ: variables on top of this process's.
        output: instead of `folder` in the names of the files of outputs.
        main: what is called with the command line; default: that of train.py.
    """
    output = output or folder
    port, alive = _agent(output) if num_ranks > 1 or main else (0, -1)
    chosen = any(item.startswith("layout=") for item in command)
    command = [*command, f"run_dir={folder}", *(["layout=ddp"] if num_ranks > 1 and not chosen else [])]

    def act(rank: int) -> int:
        if before is not None:
            before(rank)
        return (main or train.main)(command)

    def variables(rank: int) -> dict[str, str]:
        if num_ranks == 1 and main is None:
            return dict(environ or {})
        ranks = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
        }
        agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "campaign"}
        agent |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return ranks | agent | dict(environ or {})

    children = [
        Child(lambda rank=rank: act(rank), output.with_name(f"{output.name}.{rank}.txt"), variables(rank))
        for rank in range(num_ranks)
    ]
    if alive >= 0:
        os.close(alive)
    return children


def _agent(output: Path) -> tuple[int, int]:
    """(port, descriptor) of a process that holds the store of the ranks, as an agent does, until all are gone.

    It is gone when nobody has the descriptor any more: to be inherited by the ranks, and closed here.
    """
    for old in _agents[:]:
        if old.poll() is not None:
            _agents.remove(old)
    told, alive = os.pipe(), os.pipe()

    def act() -> None:
        os.close(alive[1])
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(told[1], str(store.port).encode())
        os.read(alive[0], 1)

    _agents.append(Child(act, output.with_name(f"{output.name}.agent.txt")))
    os.close(told[1])
    port = int(os.read(told[0], 100))
    os.close(told[0])
    os.close(alive[0])
    return port, alive[1]


def run(
    folder: Path, command: list[str], *, num_ranks: int = 1, before: Callable[[int], None] | None = None
) -> list[int | None]:
    """The exit codes of a run that is left to itself; None for a rank that hangs."""
    return [child.wait() for child in start(folder, command, num_ranks=num_ranks, before=before)]


def wait_without_partner(children: list[Child]) -> list[tuple[Child, int | None]]:
    """Ranks and their exit codes after one was killed; None for one that hung. Each ends because a collective fails or
    times out, possibly only after another rank timed out."""
    end = time.monotonic() + patience
    return [(child, child.wait(max(end - time.monotonic(), 1.0))) for child in children]


def slow_steps(rank: int) -> None:
    """For `start`: steps that take long enough to do something between them."""
    original = Stop.poll

    def poll(self: Stop) -> int:
        time.sleep(0.02)
        return original(self)

    setattr(Stop, "poll", poll)  # noqa: B010 - the type checker knows that it is a method


def wait_until(condition: Callable[[], object], child: Child, seconds: float = 60.0) -> bool:
    """Whether it came true before the process ended or the time was over."""
    end = time.monotonic() + seconds
    while not condition():
        if child.poll() is not None or time.monotonic() > end:
            return bool(condition())
        time.sleep(0.001)
    return True


def state(folder: Path) -> dict[str, Any]:
    """The newest checkpoint of a run, as plain PyTorch reads it; one in shards as the project does."""
    path = checkpoints(folder)[-1]
    return read(path) if [*path.glob("*.safetensors")] else torch.load(path / "state.pt", weights_only=True)


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what the clock decides."""
    return timeless(all_lines(folder))


def last_step(folder: Path) -> int:
    """The step of the last whole line of metrics.jsonl, 0 when there is none."""
    try:
        whole = (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        return int(json.loads(whole[-1])["step"]) if whole else 0
    except (OSError, ValueError):
        return 0


def outcome(folder: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on what happened to it on the way."""
    told, read, saved = summary(folder), lines(folder), state(folder)
    # The checkpoint of a stop in the last evaluation is not written again after it.
    saved["progress"].pop("is_evaluated")
    kept = {key: told[key] for key in ("status", "exit_code", "step", "eval", "skipped")}
    return {"state": saved | {"config": None}, "lines": read, "summary": kept}


def first(found: list[str], count: int = 3) -> str:
    return "; ".join(found[:count]) + (f" and {len(found) - count} more" if len(found) > count else "")


def column_of(found: list[str]) -> str:
    """What a difference that `differing` found in an outcome is counted as."""
    return "differing lines" if all(path.startswith(".lines") for path in found) else "lost"
