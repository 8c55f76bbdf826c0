"""What a recipe runs in: device, ranks, run folder, signals. Always torn down, whatever happens inside."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from amp_core.config.errors import ConfigError, RunError, SaveError
from amp_core.config.files import read_json
from amp_core.config.lengths import num_steps
from amp_core.config.rules import ONE_PROCESS, build, is_elastic, node_range
from amp_core.config.schema import Config
from amp_core.data.loading import bounded_waits
from amp_core.layouts.placement import Placement
from amp_core.lowp.fp16_convolutions import in_use, kept_convolutions
from amp_core.run import locks
from amp_core.run.lines import write_json, write_text
from amp_core.run.machine import describe_cpu, describe_device, describe_versions
from amp_core.run.monitor import Measurement, Monitor
from amp_core.run.rendezvous import launched, worker_store
from amp_core.run.stop import PATIENCE, SIGNALS, Stop
from amp_core.run.teardown import end_process_group
from amp_core.step.amp import Amp

logger = logging.getLogger("amp_recipes")

Driver = Callable[[Any, Callable[[Any], torch.Tensor] | None], Iterator[Any]]
"""(loop, count) -> windows, for tools that look at a recipe instead of training it."""


@dataclass
class Job:
    """All that a worker needs to know, as JSON: it is composed once and handed to every rank."""

    config: dict[str, Any]
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
        return cls(**json.loads(text))


def exit_code_of(reason: int) -> int:
    """The exit code of a run that stopped for this reason: 75 asks to be started again, as SIGUSR1 means it, too."""
    return 75 if reason == 128 + signal.SIGUSR1 else reason


class Environment:
    """Handed to every recipe. Made by `environment`."""

    def __init__(
        self, job: Job, cfg: Config, device: torch.device, rank: int, local_rank: int, world_size: int
    ) -> None:
        self.job = job
        self.cfg = cfg
        self.device = device
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.placement = Placement(self)
        self.planned_ranks = world_size
        """Ranks when all machines of an elastic run are there: they decide about the samples per step."""
        self.run_dir = Path(job.run_dir) if job.run_dir else None
        self.stop: Stop
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
        self.summary_before: dict[str, Any] = {}
        """What summary.json held when this run began."""
        self._lock: IO[str] | None = None
        self._is_new = self._begun = False

    @property
    def devices(self) -> list[torch.device]:
        """All devices of this process, `device` first. On a CPU the stages of model_parallel share it."""
        return self.placement.devices

    @property
    def is_main(self) -> bool:
        """Rank 0, the only one that writes."""
        return self.rank == 0

    def wrap(self, net: nn.Module, amp: Amp) -> nn.Module:
        """`net` on the device, with its fp32 islands, its statistics guarded, in the layout of the run.

        In layout model_parallel its parts stay on the devices where they are. Networks in an `nn.ModuleDict` are
        wrapped one by one, in place; names of islands are those in the dictionary.

        The first network of a run starts from `model.weights`, unless a checkpoint replaces its weights anyway.
        """
        if self.cfg.model.weights is not None and not self.nets:
            from amp_core.run.pretrained import start_from

            self.job.notes.append(start_from(self.cfg, self.run_dir, net))
        wrapped = self.placement.wrap(net, amp, self.job.notes)
        self.nets += wrapped
        return net if isinstance(net, nn.ModuleDict) else wrapped[0][1]

    def report_compiling(self) -> None:
        """Log what was compiled since the last call, if anything."""
        if self.cfg.perf.compile is not None:
            self.placement.compiler.report()

    def eagerly(self) -> contextlib.AbstractContextManager[None]:
        """Inside of it nothing runs as compiled code, so that hooks and dispatch modes see every operation."""
        if self.cfg.perf.compile is None:
            return contextlib.nullcontext()
        from amp_core.memory.compiled import eagerly

        return eagerly()

    def num_steps(self, data: Any) -> int:
        """Length of the run in steps, on `data.train`."""
        samples = self.cfg.batch_size * self.cfg.accumulation * self.planned_ranks
        return num_steps(self.cfg, num_samples=len(data.train), samples_per_step=samples)

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
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

    def write_summary(self, status: str, exit_code: int, error: str | None = None) -> None:
        """summary.json of the run; only rank 0 writes, and only when there is a run folder."""
        if self.run_dir is None or self._lock is None or not (self._begun or status == "failed"):
            return
        if not locks.is_of(self._lock, self.run_dir):  # moved: what is there now is not ours
            return
        defaults = {
            "status": status,
            "exit_code": exit_code,
            "step": 0,
            "eval": {},
            "amp": self.cfg.amp.name,
            "device": self.device.type,
            "world_size": self.world_size,
            "samples_per_second": None,
            "data_wait": None,
            "peak_memory_bytes": peak_memory(self.device),
            "memory": None,
            "skipped": 0,
            "seconds": round(time.monotonic() - self.started, 3),
        }
        try:
            write_json(self.run_dir / "summary.json", defaults | self.summary | {"error": error})
        except OSError as problem:
            message = f"{self.run_dir / 'summary.json'}: cannot be written: {problem.strerror or problem}"
            if status == "finished":
                raise SaveError(f"{message}; it does not record that the run has finished") from problem
            logger.warning(message)  # a full disk must not hide what happened

    def seed_step(self, step: int) -> None:
        """Randomness of a step as a function of (seed, rank, step), so that no generator state needs saving."""
        # Odd constants spread neighbouring steps and ranks over the generator's seeds.
        seed = (self.cfg.seed * 0x9E3779B97F4A7C15 + self.rank * 0xBF58476D1CE4E5B9 + step * 0x94D049BB133111EB) % 2**63
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        for number, device in enumerate(self.devices if self.device.type == "cuda" else ()):
            # Replicas and stages on further devices draw numbers of their own.
            generator = torch.cuda.default_generators[device.index or 0]
            generator.manual_seed((seed + number * 0xD6E8FEB86659FD93) % 2**63)

    def open_folder(self) -> None:
        """Create the run folder and take its lock. Rank 0. What it holds is not touched before `begin`."""
        if self.run_dir is None or not self.is_main:
            return
        try:
            while self._lock is None:
                self._is_new = not self.run_dir.exists()
                self.run_dir.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # a refused run has just removed the folder that it made
                    self._lock = lock_folder(self.run_dir)
            with contextlib.suppress(FileNotFoundError, ValueError):
                self.summary_before = read_json(self.run_dir / "summary.json")
        except OSError as problem:
            raise SaveError(f"run_dir={self.run_dir}: cannot be written: {problem.strerror or problem}") from problem

    def check_folder(self) -> None:
        """Called before a checkpoint is written.

        Raises:
            SaveError: the run folder is not the one any more that this run has locked.
        """
        if self.run_dir is not None and self._lock is not None and not locks.is_of(self._lock, self.run_dir):
            raise SaveError(
                f"run_dir={self.run_dir}: the folder or its .lock was moved or removed while this run wrote there. "
                "Nothing more is written. To resume, move it back, or give its new place as run_dir."
            )

    def begin(self) -> None:
        """Write what is known at the start. Called when nothing can refuse the run any more."""
        if self.run_dir is None or not self.is_main:
            return
        try:
            hydra = self.run_dir / ".hydra"
            hydra.mkdir(exist_ok=True)
            from omegaconf import OmegaConf

            write_text(hydra / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(self.job.config)))
            write_text(hydra / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(self.job.overrides)))
            write_json(self.run_dir / "environment.json", describe(self))
        except OSError as problem:
            raise SaveError(f"run_dir={self.run_dir}: cannot be written: {problem.strerror or problem}") from problem
        self._begun = True
        self.write_summary("running", 0)

    def close_folder(self) -> None:
        if self._lock is None:
            return
        refused = self._is_new and not self._begun
        if refused and self.run_dir is not None and locks.is_of(self._lock, self.run_dir):  # leave nothing behind
            (self.run_dir / ".lock").unlink()
            with contextlib.suppress(OSError):
                self.run_dir.rmdir()
        self._lock.close()
        self._lock = None


def lock_folder(run_dir: Path) -> IO[str]:
    """Take the lock of a run folder, and write into it who has it.

    Raises:
        ConfigError: another process writes there.
    """
    try:
        lock = locks.acquire(run_dir)
    except BlockingIOError as problem:
        raise ConfigError(
            f"run_dir={run_dir}: is being written by {problem.strerror}; wait for it, or choose another run_dir"
        ) from problem
    lock.truncate()
    lock.write(f"process {os.getpid()} on {platform.node()}")
    lock.flush()
    return lock


@contextlib.contextmanager
def environment(job: Job) -> Iterator[Environment]:
    """Set the process up for one run and put everything back afterwards.

    Sets: device, process group, random seeds, deterministic algorithms, cuDNN's choice of them, signal handlers. The
    last three, the matmul precision and autocast's policy are process-wide and outlive a run; they are restored.
    """
    cfg = build(job.config)
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if cfg.layout.name in ONE_PROCESS:
        rank, local_rank, world_size = 0, 0, 1
    device = resolve_device(cfg.device, local_rank * (cfg.layout.num_stages or 1))
    env = Environment(job, cfg, device, rank, local_rank, world_size)
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    deterministic = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic)
    handlers: dict[int, Any] = {}
    undo = contextlib.ExitStack()
    undo.enter_context(kept_convolutions())
    if cfg.amp.op_policy == "cuda":
        from amp_core.lowp.op_policy import kept_policy  # other runs need none of it

        undo.enter_context(kept_policy())
    if cfg.perf.compile is not None:
        from amp_core.memory.compiled import allow_graphs  # other runs need no compiler

        undo.enter_context(allow_graphs())
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.reset_peak_memory_stats(device)
            if cfg.perf.graph:
                # Nodes of autograd belong to the stream on which they are made, and the default one cannot be recorded.
                undo.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        if cfg.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.deterministic = True
        undo.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = cfg.perf.cudnn_benchmark and not cfg.deterministic
        if cfg.layout.name == "ddp" or world_size > 1:
            _join(cfg, device, rank, world_size)
            env.host_group = env.new_host_group()
        if is_elastic(cfg) and launched():
            here = torch.tensor(int(os.environ["LOCAL_WORLD_SIZE"]))
            if world_size > 1:
                dist.broadcast(here, 0, group=env.host_group)  # the plan is one, should machines differ
            nodes = node_range(cfg.layout.nnodes)
            assert nodes is not None
            env.planned_ranks = nodes[1] * int(here)
        env.stop = Stop(env.host_group, cfg.max_minutes)
        undo.enter_context(bounded_waits(cfg.data.timeout_minutes, env.stop.is_asked, PATIENCE[world_size > 1]))
        # After the process group exists: its set-up may not be interrupted half-way.
        stoppable = cfg.task == "train" and not cfg.dry_run  # the rest may be ended at any moment
        if stoppable:
            undo.enter_context(env.stop.in_order())
        for number in SIGNALS if stoppable else ():
            with contextlib.suppress(ValueError):  # not in the main thread: signals are somebody else's there
                handlers[number] = signal.signal(number, env.stop.on_signal)
        torch.manual_seed(cfg.seed)
        env.open_folder()
        if world_size > 1:
            dist.barrier(group=env.host_group)  # the folder is there before any rank looks into it
        yield env
    except BaseException as problem:
        code, status = outcome_of(problem)
        if code != 2:  # a refused run leaves the folder as it was
            env.write_summary(status, code, f"{type(problem).__name__}: {problem}")
        raise
    finally:
        env.closing.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        env.close_folder()
        env.nets.clear()
        end_process_group()
        if cfg.deterministic:  # to ask for what is there already would import torch's compiler, for a second
            torch.use_deterministic_algorithms(deterministic[0])
            torch.backends.cudnn.deterministic = deterministic[1]
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        undo.close()


def outcome_of(problem: BaseException) -> tuple[int, str]:
    """Exit code and status of a run that ended with this exception."""
    if isinstance(problem, KeyboardInterrupt):
        return 130, "preempted"
    if isinstance(problem, RunError):
        status = {5: "diverged", 75: "preempted", 130: "preempted", 143: "preempted"}
        return problem.exit_code, status.get(problem.exit_code, "failed")
    return 1, "failed"


def _join(cfg: Config, device: torch.device, rank: int, world_size: int) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=worker_store().for_process_group() if launched() else dist.HashStore(),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=cfg.layout.timeout_minutes),
        # With several devices per process each collective says by its tensors where it runs.
        device_id=device if device.type == "cuda" and cfg.layout.num_stages is None else None,
    )


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of this rank: `auto` is cuda where there is one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's peak on a GPU, the process's peak resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe(env: Environment) -> dict[str, Any]:
    """Versions, device, git commit and command line."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    return {
        "command": env.job.command,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": describe_versions(),
        "device": describe_device(env.device),
        **describe_cpu(),
        "fp16_convolutions": "fp32, rounded" if in_use() else None,
        "world_size": env.world_size,
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain")),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
