"""What a recipe runs in: device, ranks, networks, and as protocols what its launcher hands it.

`amp_core.run.process` makes it and tears it down, so that a recipe imports what a step needs, not what is around a run.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_core.config.errors import STATUS, RunError
from amp_core.config.lengths import num_steps
from amp_core.config.schema import Config, parse
from amp_core.layouts.placement import Placement
from amp_core.run.stop import Stop
from amp_core.step.amp import Amp
from amp_core.step.report import StepReport
from amp_core.step.window import MicroBatch
from amp_core.tensors import UNTESTED_DEVICES

Step = Callable[[list[MicroBatch]], Any]
"""The computation of a whole step from its window."""
Driver = Callable[[Any, Callable[[Any], Tensor] | None], Iterator[Any]]
"""(loop, count) -> windows, for tools that look at a recipe instead of training it."""


@dataclass
class Job:
    """A checked configuration and where it runs. Composed once; other processes get it as JSON."""

    cfg: Config
    run_dir: str | None
    """None: nothing is written (dry run, evaluation of a checkpoint)."""
    overrides: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Warnings found before the start."""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Job:
        values = json.loads(text)
        problems: list[str] = []
        job = cls(**values | {"cfg": parse(Config, values["cfg"], "", problems)})
        assert not problems, problems  # the configuration was checked before it was written
        return job


class Environment:
    """Handed to every recipe. Made by `process.environment`, which also hands in what has a protocol for its type."""

    def __init__(self, job: Job, device: torch.device, rank: int, local_rank: int, world_size: int) -> None:
        self.job = job
        self.cfg = job.cfg
        self.device = device
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.planned_ranks = world_size
        """Ranks when all machines of an elastic run are there: they decide about the samples per step."""
        self.run_dir = Path(job.run_dir) if job.run_dir else None
        if self.run_dir is not None and self.run_dir.is_symlink():
            self.run_dir = self.run_dir.resolve()  # where it leads to now: links found later are not followed
        self.placement = Placement(self)
        self.stop: Stop
        self.folder: Folder
        self.services: Services
        self.host_group: dist.ProcessGroup | None = None
        self.started = time.monotonic()
        self.summary: dict[str, Any] = {}
        self.nets: list[tuple[str, nn.Module]] = []
        """What was wrapped, and what stands before its modules' names: that in the dictionary, or nothing."""
        self.driver: Driver | None = None
        """Takes the place of training in `Loop.windows`: (loop, count) -> windows that the recipe computes."""
        self.monitors: Callable[[Any], tuple[Monitor | None, Measurement | None]] = lambda loop: (None, None)
        """Makes what watches a loop, and what measures some of its steps."""
        self.closing = contextlib.ExitStack()
        """What is done when the run ends, however it ends."""

    @property
    def devices(self) -> list[torch.device]:
        """All devices of this process, `device` first. On a CPU the stages of model_parallel share it."""
        return self.placement.devices

    @property
    def is_main(self) -> bool:
        """Rank 0, the only one that writes."""
        return self.rank == 0

    def wrap(self, net: nn.Module, amp: Amp, *, has_weights: bool = False) -> nn.Module:
        """`net` on the device, with its fp32 islands, its statistics guarded, in the layout of the run.

        In layout model_parallel its parts stay on the devices where they are. Networks in an `nn.ModuleDict` are
        wrapped one by one, in place; names of islands are those in the dictionary.

        The first network starts from `model.weights`, unless it `has_weights` or a checkpoint replaces all of them.
        """
        if self.cfg.model.weights is not None and not (self.nets or has_weights):
            from amp_core.run.pretrained import start_from

            self.job.notes.append(start_from(self.cfg, self.run_dir, net))
        wrapped = self.placement.wrap(net, amp, self.job.notes)
        self.nets += wrapped
        return net if isinstance(net, nn.ModuleDict) else wrapped[0][1]

    def report_compiling(self) -> None:
        """Log what was compiled since the last call, if anything."""
        if self.cfg.perf.compile is not None:
            self.placement.compiler.report()

    def eagerly(self) -> AbstractContextManager[None]:
        """Inside of it nothing runs as compiled code, so that hooks and dispatch modes see every operation."""
        if self.cfg.perf.compile is None:
            return contextlib.nullcontext()
        from amp_core.memory.compiled import eagerly

        return eagerly()

    def num_steps(self, data: Any) -> int:
        """Length of the run in steps, on `data.train`."""
        samples = self.cfg.batch_size * self.cfg.accumulation * self.planned_ranks
        return num_steps(self.cfg, num_samples=len(data.train), samples_per_step=samples)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def new_host_group(self) -> dist.ProcessGroup | None:
        """All ranks, for tensors in host memory; None for a single one. Collective."""
        if self.world_size == 1:
            return None
        timeout = datetime.timedelta(minutes=self.cfg.layout.timeout_minutes)
        return dist.new_group(backend="gloo", timeout=timeout)  # type: ignore[return-value] - this rank is in it

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. Called by all of them; waits for them, not for the device."""
        if self.world_size == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.host_group)
        return bool(flags.numpy())

    def seed_step(self, step: int) -> None:
        """Randomness of a step as a function of (seed, rank, step), so that no generator state needs saving.

        Seeds the global generators of `random`, torch and, where it is imported, numpy.
        """
        # Odd constants spread neighbouring steps and ranks over the generator's seeds.
        seed = (self.cfg.seed * 0x9E3779B97F4A7C15 + self.rank * 0xBF58476D1CE4E5B9 + step * 0x94D049BB133111EB) % 2**63
        random.seed(seed)
        if (in_numpy := sys.modules.get("numpy.random")) is not None:
            in_numpy.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        if self.device.type in UNTESTED_DEVICES:
            torch.get_device_module(self.device).manual_seed(seed)
        for number, device in enumerate(self.devices if self.device.type == "cuda" else ()):
            # Replicas and stages on further devices draw numbers of their own.
            generator = torch.cuda.default_generators[device.index or 0]
            generator.manual_seed((seed + number * 0xD6E8FEB86659FD93) % 2**63)


def outcome_of(problem: BaseException) -> tuple[int, str]:
    """Exit code and status of a run that ended with this exception."""
    code = problem.exit_code if isinstance(problem, RunError) else 130 if isinstance(problem, KeyboardInterrupt) else 1
    return code, STATUS.get(code, "failed")


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's peak on a GPU, the process's peak resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --- what an environment is handed by `amp_core.run.process` ----------------------------------------------------------


class Folder(Protocol):
    """The run folder: `amp_core.run.folder.RunFolder`."""

    before: dict[str, Any]

    def begin(self) -> None: ...
    def check(self) -> None: ...
    def write_summary(self, status: str, exit_code: int) -> None: ...


class Services(Protocol):
    """What a loop calls and what knows loops: the module `amp_core.run.services`."""

    open_checkpoint: Callable[[Any], Any]
    progress_of: Callable[[Any], dict[str, Any]]
    resume: Callable[[Any], tuple[list[str], list[str]]]
    open_log: Callable[[Any, list[str], list[str]], Any]
    dry_run: Callable[[Any, Callable[[Any], Tensor] | None], Iterator[list[MicroBatch]]]
    predict: Callable[[Any, list[str]], None]
    captured_step: Callable[[Any], CapturedStep | None]
    saved_tensors: Callable[[Any], Callable[[], AbstractContextManager[None]]]
    fault: Callable[[Any, list[MicroBatch]], AbstractContextManager[bool]]
    profiling: Callable[[Any], Any]
    say: Callable[[str], None]


class LogLike(Protocol):
    """Where a run reports: `amp_core.run.log.Log`."""

    def metrics(self, metrics: Mapping[str, Any]) -> None: ...
    def statistics(self, line: Mapping[str, Any]) -> None: ...
    def advance(self, step: int) -> None: ...
    def close(self, summary: Mapping[str, Any]) -> None: ...


class CapturedStep(Protocol):
    """A step that is captured once and replayed: `amp_core.memory.graph.CudaGraphStep`."""

    is_capturing: bool

    @property
    def is_used(self) -> bool: ...
    def forget(self) -> None: ...
    def __call__(self, step: Step, window: list[MicroBatch]) -> Any: ...


# --- what a loop is handed by `amp_core.doctor.monitors` --------------------------------------------------------------


@dataclass(frozen=True)
class Symptoms:
    """What a log line says about the steps since the last one. All ranks have the same."""

    step: int
    """At which they were read."""
    streak: int
    """Steps skipped in a row up to `step`."""
    scale: float
    """The loss scale."""
    first_skip: int | None = None
    """The first skipped step since the last line, known to a monitor."""
    first_bad_loss: int | None = None
    """The first step since the last line whose loss was not finite, known to a monitor."""


class Finding(Protocol):
    """The result of an examination."""

    healed: bool

    @property
    def headline(self) -> str: ...


class Monitor(Protocol):
    """Looks at the steps of a run and examines those that went wrong."""

    last: Any
    """The last `Finding`, or None."""

    def start(self) -> None:
        """The run begins, or resumes."""

    def sampling(self) -> AbstractContextManager[None]:
        """Around the computation of the window of a log line. Does not wait for the device."""
        ...

    def note(self, of: str, report: StepReport, loss: Tensor | None) -> None:
        """A step was computed. Does not wait for the device."""

    def facts(self) -> dict[str, Tensor]:
        """0-d tensors to read back with the next log line. On every rank."""
        ...

    def completed(self, symptoms: Symptoms, found: dict[str, float]) -> Symptoms:
        """The symptoms with what `facts` were, now on the host."""
        ...

    def is_called(self, symptoms: Symptoms) -> bool:
        """Whether these symptoms need an examination."""
        ...

    def examine(self, symptoms: Symptoms) -> Generator[list[MicroBatch], None, Any]:
        """Yields windows that the recipe computes again; returns a `Finding`, or None."""
        ...

    def evaluated(self, step: int, metrics: dict[str, float]) -> str:
        """Where an evaluation with these metrics became non-finite; empty: nowhere. On every rank."""
        ...


class Measurement(Protocol):
    """Measures some steps of a run."""

    every: int

    def sampling(self, step: int) -> AbstractContextManager[None]:
        """Around the computation of a step's window."""
        ...

    def write(self, log: LogLike, upto: int | None = None) -> None:
        """Report what was measured up to a step; None: all."""
