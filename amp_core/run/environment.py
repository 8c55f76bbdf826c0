"""What a recipe runs in: device, ranks, networks.

`amp_core.run.process` makes it and tears it down, so that a recipe imports what a step needs, not what surrounds a run.
"""

from __future__ import annotations

import contextlib
import datetime
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_core.config.errors import STATUS, RunError
from amp_core.config.lengths import num_steps
from amp_core.data.base import Dataset, Spread
from amp_core.data.loading import EvalLoader, to_device
from amp_core.tensors import UNTESTED_DEVICES

if TYPE_CHECKING:
    from amp_core.config.job import Job
    from amp_core.doctor.statistics import Statistics
    from amp_core.doctor.watch import Watch
    from amp_core.layouts.placement import Placement
    from amp_core.run.folder import RunFolder
    from amp_core.run.stop import Stop
    from amp_core.step.amp import Amp

Driver = Callable[[Any, Callable[[Any], Tensor] | None], Iterator[Any]]
"""(loop, count) -> windows, for tools that look at a recipe instead of training it."""


class Environment:
    """Handed to every recipe. Made by `process.environment`, which also sets `placement`, `stop` and `folder`."""

    def __init__(self, job: Job, device: torch.device, rank: int, local_rank: int, world_size: int) -> None:
        self.job = job
        self.cfg = job.cfg
        self.device = device
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.planned_ranks = world_size
        """Ranks at the maximum number of machines of an elastic run, which sets the samples per step."""
        self.run_dir = Path(job.run_dir) if job.run_dir else None
        if self.run_dir is not None and self.run_dir.is_symlink():
            self.run_dir = self.run_dir.resolve()  # where it leads to now: links found later are not followed
        self.placement: Placement
        self.stop: Stop
        self.folder: RunFolder
        self.host_group: dist.ProcessGroup | None = None
        self.started = time.monotonic()
        self.summary: dict[str, Any] = {}
        self.nets: list[tuple[str, nn.Module]] = []
        """The wrapped networks, and the prefix of their modules' names: that in the dictionary, or nothing."""
        self.driver: Driver | None = None
        """Takes the place of training in `Loop.windows`: (loop, count) -> windows that the recipe computes."""
        self.doctor: Callable[[Any], tuple[Watch | None, Statistics | None]] = lambda loop: (None, None)
        """Makes the doctor of a loop, and its statistics."""
        self.closing = contextlib.ExitStack()
        """Callbacks for the end of the run, however it ends."""

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
        """Within, nothing runs compiled, so that hooks and dispatch modes see every operation."""
        if self.cfg.perf.compile is None:
            return contextlib.nullcontext()
        from amp_core.memory.compiled import eagerly

        return eagerly()

    def num_steps(self, data: Any) -> int:
        """Length of the run in steps, on `data.train`."""
        samples = self.cfg.batch_size * self.cfg.accumulation * self.planned_ranks
        return num_steps(self.cfg, num_samples=len(data.train), samples_per_step=samples)

    def eval_part(self, dataset: Dataset, together: int = 1) -> Dataset:
        """What is evaluated of a data set: all of it, or `eval.samples` in runs of neighbours that belong together."""
        return dataset if self.cfg.eval.samples is None else Spread(dataset, self.cfg.eval.samples, together)

    def eval_loader(self, dataset: Dataset, batch_size: int = 128) -> EvalLoader:
        """This rank's share of a data set, in batches of at least `batch_size` samples on the CPU."""
        return EvalLoader(
            dataset,
            batch_size=max(self.cfg.batch_size, batch_size),
            rank=self.rank,
            world_size=self.world_size,
            num_workers=self.cfg.data.num_workers,
            pin_memory=self.device.type == "cuda",
        )

    def eval_batches(self, dataset: Dataset | EvalLoader, batch_size: int = 128) -> Iterator[Any]:
        """Batches of the `eval_part` of a data set, or of a loader, on the device: every sample once over all ranks.
        Add up sums, and divide at the end."""
        loader = dataset if isinstance(dataset, EvalLoader) else self.eval_loader(self.eval_part(dataset), batch_size)
        return to_device(loader, self.device, channels_last=self.cfg.perf.channels_last)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def new_host_group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks for tensors in host memory; None for a single rank. Collective."""
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
