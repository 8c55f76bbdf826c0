"""What a check asks a trainer to do, and what it looks at.

A trainer is anything with `run(task, after)`. It trains the task's network on its epochs and calls `after` with a
`View` at the end of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batch = tuple[Tensor, Tensor]
"""The inputs and targets of a micro-batch, on the CPU."""
Window = Sequence[Batch]


class NotOffered(Exception):
    """A trainer cannot express what a task asks for. Its message says what."""


@dataclass(frozen=True)
class Task:
    """A training run, as a user describes it to a trainer.

    Attributes:
        net: builds the network, the same weights each time.
        loss: the mean over the samples of a micro-batch, from the network that the trainer calls and the micro-batch.
        penalty: the loss takes a third argument, `grad(output, input)`: the gradient of the sum of `output`, not
            scaled, differentiable, and not lost where fp16 has no such small numbers. See `inner_gradient`.
        optimizers: builds the optimizers of a network; most tasks have one.
        epochs: the micro-batches of each epoch, in order. The trainer forms windows of `accumulation` micro-batches;
            the last of an epoch may be shorter. In a process group each rank has its own.
        every: windows between two calls of `after`; 0: at the end of each epoch.
        mode: "fp32", "bf16" or "fp16": the dtype of autocast.
        accumulation: micro-batches per optimizer step.
        clip: the largest global L2 norm of the gradients of an optimizer, of the unscaled window.
        schedule: builds the scheduler of an optimizer; advanced once per optimizer step.
        ema: decay of an exponential moving average of the weights, updated once per optimizer step.
        init_scale: the first loss scale of fp16.
        growth_interval: clean windows before the loss scale doubles.
        max_scale: the loss scale never grows beyond this; None: as the trainer does.
        weighted: a sample counts the same whichever micro-batch or rank it is in, also where their sizes differ.
        load: a path that `View.save` wrote to, to resume from.
        done: whole epochs that were made before the save; the trainer continues with `epochs[done]`. Where it has to go
            on within that epoch it must know by itself.
        ranks: processes of the group that the trainer joins; this process is one of them (RANK, WORLD_SIZE,
            MASTER_ADDR and MASTER_PORT are set; the backend is gloo).
        sharded: each of the `ranks` keeps a shard of the weights: `shard(net)` in place of DistributedDataParallel.
    """

    net: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    optimizers: Callable[[nn.Module], Sequence[Optimizer]]
    epochs: Sequence[Sequence[Batch]]
    mode: str = "fp32"
    accumulation: int = 1
    clip: float | None = None
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    ema: float | None = None
    init_scale: float = 2.0**16
    growth_interval: int = 2000
    max_scale: float | None = None
    penalty: bool = False
    every: int = 0
    weighted: bool = False
    load: Path | None = None
    done: int = 0
    ranks: int = 1
    sharded: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of autocast; float32: none."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.mode]

    def autocast(self) -> torch.autocast:
        """torch's context of a forward pass in the mode."""
        is_on = self.dtype is not torch.float32
        return torch.autocast("cpu", dtype=self.dtype if is_on else None, enabled=is_on)

    def scaler(self) -> Any:
        """torch's scaler with the policy of the task, disabled unless the mode is fp16."""
        is_on = self.mode == "fp16"
        return torch.amp.GradScaler("cpu", self.init_scale, growth_interval=self.growth_interval, enabled=is_on)  # type: ignore[attr-defined]

    def windows(self, epoch: int) -> list[Window]:
        """The windows of an epoch."""
        batches, n = self.epochs[epoch], self.accumulation
        return [batches[start : start + n] for start in range(0, len(batches), n)]

    def is_due(self, epoch: int, made: int) -> bool:
        """Whether `after` is to be called when so many windows of an epoch were made."""
        return made % (self.every or len(self.windows(epoch))) == 0

    def but(self, **changes: object) -> Task:
        """The task with other values."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def require(self, who: str, **offered: bool) -> None:
        """Raise for what the task asks for and a trainer does not offer.

        Args:
            who: the trainer.
            offered: False by the names `several`, `accumulation`, `clip`, `schedule`, `ema`, `max_scale`, `weighted`,
                `load`, `ranks`, `sharded`, `penalty`, `every`.

        Raises:
            NotOffered: with the first of them.
        """
        asked = {
            "several": len(self.optimizers(self.net())) > 1,
            "accumulation": self.accumulation > 1,
            "clip": self.clip is not None,
            "schedule": self.schedule is not None,
            "ema": self.ema is not None,
            "max_scale": self.max_scale is not None,
            "weighted": self.weighted,
            "load": self.load is not None,
            "ranks": self.ranks > 1,
            "sharded": self.sharded,
            "penalty": self.penalty,
            "every": self.every > 0,
        }
        names = {"several": "several optimizers", "max_scale": "a largest loss scale", "weighted": "sample weights"}
        names |= {"sharded": "FSDP2", "penalty": "gradients within the loss", "every": "going on within an epoch"}
        for name, is_offered in offered.items():
            if asked[name] and not is_offered:
                raise NotOffered(f"{who}: {names.get(name, name)}")


@dataclass(frozen=True)
class View:
    """What a check sees after an epoch. Reading it changes nothing.

    Attributes:
        net: the network, not wrapped.
        optimizers: as the trainer steps them.
        scale: the loss scale of the next window; None: there is none, or the trainer does not tell.
        ema: the averaged network, not wrapped.
        evaluate: the output of the network for some inputs, as the trainer evaluates; None: it does not.
        save: write a checkpoint to a path: a file or a folder. If it was saved to before, the new one counts from now
            on. None: the trainer does not.
    """

    net: nn.Module
    optimizers: Sequence[Optimizer]
    scale: float | None = None
    ema: nn.Module | None = None
    evaluate: Callable[[Tensor], Tensor] | None = None
    save: Callable[[Path], None] | None = None

    def state(self) -> dict[str, Tensor]:
        """Copies of weights and buffers by name."""
        return {name: value.detach().clone() for name, value in self.net.state_dict().items()}

    @property
    def rates(self) -> list[float]:
        """The learning rate of each optimizer."""
        return [float(optimizer.param_groups[0]["lr"]) for optimizer in self.optimizers]


class Trainer(Protocol):
    """What is checked.

    Attributes:
        name: for the table.
        package: the distribution whose version is shown; None: torch's.
        configuration: one sentence: how it is set up, the best that it permits.
        documentation: where that is described.
    """

    name: str
    package: str | None
    configuration: str
    documentation: str

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """Train, and call `after` at the end of each epoch from `task.done` on, or after each `task.every` windows.

        Raises:
            NotOffered: the trainer cannot express the task.
        """


def evaluator(
    net: nn.Module, context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
) -> Callable[[Tensor], Tensor]:
    """For `View.evaluate`: the network in evaluation mode, without gradients, in a context."""

    def evaluate(inputs: Tensor) -> Tensor:
        net.eval()
        with torch.no_grad(), context():
            output = net(inputs)
        net.train()
        return output

    return evaluate


def inner_gradient(scaler: torch.amp.GradScaler | None) -> Callable[[Tensor, Tensor], Tensor]:  # type: ignore[name-defined]
    """For tasks with `penalty`: as torch's examples of mixed precision do, with the scaler of fp16."""

    def grad(output: Tensor, inputs: Tensor) -> Tensor:
        scale = scaler.get_scale() if scaler is not None else 1.0
        with torch.autocast("cpu", enabled=False):
            return torch.autograd.grad(output.float().sum() * scale, inputs, create_graph=True)[0].float() / scale

    return grad


def over_ranks(task: Task, net: nn.Module) -> nn.Module:
    """The network as torch trains it on the ranks of a task: with DistributedDataParallel, with FSDP2, or alone.

    Joins the process group of several ranks, if this process is not in it yet.
    """
    if task.ranks > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    if task.sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        return fully_shard(net, mesh=init_device_mesh("cpu", (task.ranks,)))  # type: ignore[return-value]
    return DistributedDataParallel(net) if task.ranks > 1 else net


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each process has a shard. Collective."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()  # type: ignore[no-any-return]


def plain(net: nn.Module) -> nn.Module:
    """The network inside of `DistributedDataParallel` or a like wrapper."""
    while isinstance(getattr(net, "module", None), nn.Module):
        net = net.module  # type: ignore[assignment]
    return net


def same(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether two states are equal in every bit, up to the sign of zeros."""
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)
