"""A small language model that is trained in any layout, and what its ranks send."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from running import same_but
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import Amp, Ema, Schedule, sync_grads
from amp_core.checkpoints.parts import gather_full_state
from amp_core.layouts.ddp import wrap_ddp
from amp_core.layouts.fsdp import build_mesh, shard_for
from amp_core.lowp.masters import master_params
from amp_core.models.gpt import GPT

CPU = torch.device("cpu")
MODES = ["fp32", "bf16", "fp16"]


def lay_out(net: nn.Module, layout: str, amp: Amp, gather: torch.dtype | None = None) -> nn.Module:
    if layout == "ddp":
        return net if amp.weights else wrap_ddp(net, CPU)
    if layout in ("fsdp", "hsdp"):
        mesh = build_mesh(CPU, dist.get_world_size(), 2 if layout == "hsdp" else None)
        net = shard_for(amp, net, mesh, gather)
    return net


def gpt(**options: Any) -> GPT:
    torch.manual_seed(7)
    return GPT(vocab_size=31, length=8, width=32, depth=2, heads=2, **options)


class Training:
    """Windows of a small language model in any layout, the same samples over all ranks."""

    def __init__(self, layout: str, mode: str, *, net: nn.Module | None = None, num_micros: int = 2, **options: Any):
        # A scale that fp16 need not leave, so that a skipped step is one that a test asked for.
        fields: dict[str, Any] = {"init_scale": 1024.0} if mode in ("fp16", "o2") else {}
        self.amp = Amp.named(mode, **fields | options.pop("fields", {}))
        net = net or gpt()
        if self.amp.config.format is not None or self.amp.config.update is not None:
            self.amp.prepare(net, gathers=layout in ("fsdp", "hsdp"))
        self.net = lay_out(net, layout, self.amp, options.pop("gather", None))
        self.amp.guard(self.net)
        self.num_micros = num_micros
        self.clip = options.pop("clip", None)
        make: Callable[..., Optimizer] = options.pop("optimizer", functools.partial(SGD, momentum=0.9))
        self.optimizer = make(master_params(self.net), **{"lr": 0.1, "fused": True, **options})
        self.schedule = Schedule(self.optimizer, lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n), 10)
        self.ema = Ema(self.net, 0.9)
        self.step = 0

    def window(self, spoil: Callable[[], None] | None = None) -> tuple[float, float, bool]:
        """The loss over all ranks, the gradient norm, and whether the step was taken."""
        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(self.step)
        tokens = torch.randint(31, (8, 9))
        total = torch.zeros(())
        for i, micro in enumerate(tokens.chunk(self.num_micros)):
            mine = micro.chunk(num_ranks)[rank]
            with sync_grads(self.net, when=i == self.num_micros - 1):
                with self.amp.autocast():
                    logits = self.net(mine[:, :-1]).float()
                    loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
                loss = loss / (self.num_micros * num_ranks)
                self.amp.backward(loss)
            total += loss.detach()
        if spoil is not None:
            spoil()
        report = self.amp.step(self.optimizer, self.clip)
        self.amp.update()
        self.optimizer.zero_grad()
        self.schedule.advance(report)
        self.ema.update(report)
        self.step += 1
        dist.all_reduce(total)
        return float(total), float(report.grad_norm), bool(report.taken)

    @torch.no_grad()
    def loss_of_average(self) -> float:
        torch.manual_seed(99)
        tokens = torch.randint(31, (8, 9))
        with self.amp.autocast():
            logits = self.ema.model(tokens[:, :-1]).float()
        return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))

    def parts(self) -> dict[str, Any]:
        names = ("net", "optimizer", "schedule", "ema")
        return {"model" if name == "net" else name: getattr(self, name) for name in names} | {"scaler": self.amp}

    def values(self) -> dict[str, dict[str, Tensor]]:
        """Whole weights, averages and moments, by plain names."""
        model = {k.removeprefix("module."): v.clone() for k, v in gather_full_state(self.net.state_dict()).items()}
        moments = {
            f"{number}.{key}": value.clone()
            for number, entry in gather_full_state(self.optimizer.state_dict()["state"]).items()
            for key, value in entry.items()
        }
        ema = {key: value.clone() for key, value in gather_full_state(self.ema.state_dict()).items()}
        return {"model": model, "ema": ema, "moments": moments}


def same(a: Any, b: Any) -> bool:
    return not same_but({"": a}, {"": b})


class Collectives(TorchDispatchMode):
    """Names of the collectives, with the dtypes of what they send."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sent = next(
                t
                for arg in reversed(args)
                for t in ([arg] if isinstance(arg, Tensor) else arg if isinstance(arg, list) else [])
                if isinstance(t, Tensor)
            )
            self.seen.append((func.overloadpacket.__name__.strip("_"), str(sent.dtype).removeprefix("torch.")))
        return func(*args, **(kwargs or {}))

    def of(self, kind: str, dtype: str = "") -> int:
        return sum(kind in name and dtype in sent for name, sent in self.seen)
