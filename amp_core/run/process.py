"""Run a job in this process: set it up, and restore everything afterwards, however the run ends."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from amp_core.config.errors import ConfigError, Interrupted, RunError
from amp_core.config.job import Job
from amp_core.config.processes import launched
from amp_core.config.redact import redact
from amp_core.config.schema import ONE_PROCESS, Config
from amp_core.data.loading import DIED, bounded_waits
from amp_core.layouts.placement import Placement
from amp_core.run.environment import Environment, outcome_of
from amp_core.run.folder import RunFolder
from amp_core.run.rendezvous import worker_stores
from amp_core.run.stop import PATIENCE, SIGNALS, TIME_LIMIT, Stop, exit_code_of
from amp_core.run.teardown import end_process_group
from amp_core.step import settings
from amp_core.tensors import UNTESTED_DEVICES

TWICE = "interrupted twice: stopped immediately; the steps since the last checkpoint are lost"

Run = Callable[[Config, Environment], dict[str, float]]


def check_variables() -> None:
    """Raises ConfigError for variables of torchrun that are missing or contradict each other; on each rank."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    texts = [os.environ.get(name, "")[:20] for name in names]
    rank, ranks, local_rank, here, port = (int(text) if text.isascii() and text.isdigit() else -1 for text in texts)
    is_sound = 0 <= rank < ranks < 2**16 and 0 <= local_rank < here <= ranks and 0 < port < 2**16
    if not (is_sound and os.environ.get("MASTER_ADDR")):
        found = ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))
        raise ConfigError(
            f"{found}, MASTER_ADDR={os.environ.get('MASTER_ADDR', '')}: expected what torchrun sets: RANK below "
            f"WORLD_SIZE, LOCAL_RANK below LOCAL_WORLD_SIZE, and where rank 0 listens"
        )


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    eval: dict[str, float]
    error: str | None = None
    """The message for the user; None after success."""
    signalled: int = 0
    """The exit code that a signal asked for, also if it came too late for this run: a sweep starts no further job."""
    is_alone: bool = False
    """This rank was interrupted at a point where the others may wait for it."""


def on_cuda(cfg: Config) -> bool:
    return cfg.device in ("auto", "cuda") and torch.cuda.is_available()


def num_processes(cfg: Config) -> int:
    """Processes on this machine when the run is started by `train.py` itself."""
    if cfg.layout.name in ONE_PROCESS:
        return 1
    per_stage = cfg.layout.num_stages or 1
    return cfg.layout.nproc_per_node or (torch.cuda.device_count() // per_stage if on_cuda(cfg) else 1)


def workers_here(cfg: Config) -> int:
    """Workers to start on this machine and to watch; 0: this process runs the job itself."""
    num, layout = num_processes(cfg), cfg.layout
    alone = num == 1 and layout.nodes == (1, 1) and not layout.max_restarts
    is_one = layout.name in ONE_PROCESS or (layout.name == "model_parallel" and alone)
    return 0 if is_one or cfg.data.check else num


def in_process(job: Job, run: Run) -> Outcome:
    try:
        with environment(job) as env:
            result = run(env.cfg, env)
            return Outcome(0, result, signalled=exit_code_of(env.stop.code) if env.stop.code != TIME_LIMIT else 0)
    except (Exception, KeyboardInterrupt) as problem:
        code, _ = outcome_of(problem)
        if isinstance(problem, Interrupted):  # already logged
            return Outcome(code, {}, signalled=code if problem.by_signal else 0, is_alone=problem.__cause__ is not None)
        if isinstance(problem, RuntimeError) and "DataLoader worker (pid" in str(problem):
            # torch's handler of SIGCHLD raises it wherever this process is, such as in a save.
            problem = RunError(f"{str(problem).strip()} {DIED}")
        if isinstance(problem, RunError):
            return Outcome(code, {}, redact(str(problem)))
        if isinstance(problem, KeyboardInterrupt):
            return Outcome(code, {}, TWICE, signalled=code, is_alone=True)
        return Outcome(code, {}, redact(traceback.format_exc()))


@contextlib.contextmanager
def environment(job: Job) -> Iterator[Environment]:
    """Set up the process for one run and restore everything afterwards.

    Sets: device, process group, random seeds, deterministic algorithms, cuDNN's choice of them, signal handlers. The
    last three, the matmul precision and autocast's policy are process-wide and outlive a run; they are restored.
    """
    cfg = job.cfg
    rank, local_rank, world_size = 0, 0, 1
    if cfg.layout.name not in ONE_PROCESS and launched():
        rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = resolve_device(cfg.device, local_rank * (cfg.layout.num_stages or 1))
    with contextlib.ExitStack() as undo:
        settings.restore()  # a run computes the same, whatever `Amp` this process had before
        undo.callback(settings.restore)
        undo.enter_context(_settings(cfg))
        if cfg.perf.compile is not None:
            from amp_core.memory.compiled import allow_graphs  # other runs need no compiler

            undo.enter_context(allow_graphs())
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.reset_peak_memory_stats(device)
            if cfg.perf.graph:
                # Nodes of autograd belong to the stream on which they are made, and the default one cannot be recorded.
                undo.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        undo.callback(end_process_group)
        if cfg.layout.name == "ddp" or world_size > 1:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.PrefixStore("process_group", worker_stores()[0]) if launched() else dist.HashStore(),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(minutes=cfg.layout.timeout_minutes),
                # With several devices per process each collective says by its tensors where it runs.
                device_id=device if device.type == "cuda" and cfg.layout.num_stages is None else None,
            )
        env = Environment(job, device, rank, local_rank, world_size)
        env.host_group = env.new_host_group()
        undo.callback(env.nets.clear)  # before the group ends: they use it
        env.folder = folder = RunFolder(env)
        env.placement = Placement(env)
        try:
            if cfg.layout.is_elastic and launched():
                here = torch.tensor(int(os.environ["LOCAL_WORLD_SIZE"]))
                if world_size > 1:
                    dist.broadcast(here, 0, group=env.host_group)  # the plan is one, should machines differ
                nodes = cfg.layout.nodes
                assert nodes is not None
                env.planned_ranks = nodes[1] * int(here)
            env.stop = stop = Stop(env.host_group, cfg.max_minutes)
            undo.enter_context(bounded_waits(cfg.data.timeout_minutes, stop.is_asked, PATIENCE[world_size > 1]))
            undo.callback(folder.close)
            if cfg.task == "train" and not cfg.dry_run:  # other tasks may be killed at any moment
                # After the process group exists: its set-up may not be interrupted half-way.
                for number in SIGNALS:
                    with contextlib.suppress(ValueError):  # only the main thread may set handlers
                        undo.callback(signal.signal, number, signal.signal(number, stop.on_signal))
            torch.manual_seed(cfg.seed)
            folder.open()
            if world_size > 1:
                dist.barrier(group=env.host_group)  # the folder exists before any rank looks into it
            undo.enter_context(env.closing)
            yield env
        except BaseException as problem:
            code, status = outcome_of(problem)
            if code != 2:  # a refused run leaves the folder as it was
                folder.write_summary(status, code, f"{type(problem).__name__}: {problem}")
            raise


@contextlib.contextmanager
def _settings(cfg: Config) -> Iterator[None]:
    """Sets torch's choice of algorithms; restores what the run, also `Amp`, has changed."""
    cudnn: Any = torch.backends.cudnn
    before = {name: getattr(cudnn, name) for name in ("allow_tf32", "benchmark", "deterministic")}
    was_deterministic, precision = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    cudnn.benchmark = cfg.perf.cudnn_benchmark and not cfg.deterministic
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic = True
    try:
        yield
    finally:
        if cfg.deterministic:  # even an unchanged value would import torch's compiler, which takes a second
            torch.use_deterministic_algorithms(was_deterministic)
        torch.set_float32_matmul_precision(precision)
        for name, value in before.items():
            setattr(cudnn, name, value)


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of this rank: `auto` is cuda where there is one, else the CPU; others are used if named."""
    if name in UNTESTED_DEVICES:
        return torch.device(name, 0)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", local_rank)
