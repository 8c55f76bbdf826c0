"""How often the host waits for the device: 0 times per step with a fused optimizer, else once.

One wait is one `aten::_local_scalar_dense`, which is what `.item()`, `float(tensor)` and `if tensor:` become; it reaches
a dispatch mode on a CPU as it does on a GPU. The profiler shows more of them on a CPU: there the kernels of fused
optimizers read the learning rate, `found_inf` and `grad_scale` from host memory inside the kernel. That is no wait, and
the dispatcher, which sees what Python asks for, does not count it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import rows
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from waits import waits

from amp_core import Amp, Clip, Ema, Schedule, sync_grads, windows


class Training:
    """Everything at once: accumulation, guard, clipping, schedule, average."""

    def __init__(self, mode: str, make: Callable[..., Optimizer], clip: Any, accumulation: int) -> None:
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.amp = Amp.named(mode, samples=8 if mode == "fp16_capped" else None)
        self.optimizer, self.clip = make(self.net.parameters()), clip
        self.schedule = Schedule(self.optimizer, lambda o, n: CosineAnnealingLR(o, n), 20)
        self.ema = Ema(self.net, 0.9)
        self.amp.guard(self.net)
        batches = [torch.randn(8, 4) for _ in range(3 * accumulation - 1)] + [torch.full((8, 4), torch.inf)]
        self.windows = windows(batches, accumulation, count=lambda batch: batch.isfinite().sum())

    def window(self) -> None:
        for micro in next(self.windows):
            with sync_grads(self.net, when=micro.is_last):
                with self.amp.autocast():
                    loss = self.net(micro.batch).float().square().mean()
                self.amp.backward(loss * micro.weight)
        report = self.amp.step(self.optimizer, self.clip)
        self.amp.update()
        self.optimizer.zero_grad()
        self.schedule.advance(report)
        self.ema.update(report)


FUSED: list[Callable[..., Optimizer]] = [
    lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    lambda p: Adam(p, fused=True),
    lambda p: AdamW(p, fused=True),
    lambda p: Adagrad(p, fused=True),
]
CLIPS = [None, Clip.norm(1.0), Clip.value(0.1), Clip.adaptive(0.01), lambda params, grads: grads[0].mul_(2.0)]
clips = pytest.mark.parametrize("clip", CLIPS, ids=["none", "norm", "value", "adaptive", "function"])


@clips
@pytest.mark.parametrize("mode", rows(["fp32", "tf32", "bf16", "fp16", "fp16_capped"], "fp16"))
def test_a_fused_step_waits_never(mode: str, clip: Any) -> None:
    """The first, a taken and a skipped one."""
    for make in FUSED:
        for accumulation in (1, 4):
            training = Training(mode, make, clip, accumulation)
            assert [waits(training.window) for _ in range(3)] == [0, 0, 0]


def test_several_optimizers_and_a_separate_unscale_wait_never_either() -> None:
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    amp, optimizers = Amp.named("fp16"), [AdamW(net.parameters(), fused=True) for net in nets]

    def window() -> None:
        amp.backward(sum(net(torch.ones(1, 2)).sum() for net in nets))
        for optimizer in optimizers:
            amp.unscale_(optimizer)
            amp.step(optimizer, Clip.norm(1.0))
        amp.update()

    assert [waits(window) for _ in range(3)] == [0, 0, 0]


def test_a_gradient_penalty_waits_never() -> None:
    """Dividing by `get_scale()`, the usual way, waits once."""
    net, amp, scaler = nn.Linear(2, 1), Amp.named("fp16"), GradScaler("cpu")
    scaler.scale(torch.ones(1))

    def penalise() -> None:
        grads = amp.grad(net(torch.ones(1, 2)).square(), list(net.parameters()))
        amp.backward(sum(g.square().sum() for g in grads))

    assert waits(penalise) == 0 and waits(scaler.get_scale) == 1


def test_what_is_known_to_wait_is_counted() -> None:
    """The counter sees a wait where there is one, and what the usual parts cost."""
    net, amp = nn.Linear(2, 2), Amp.named("fp16")
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(net)
    net(torch.ones(1, 2)).sum().backward()
    assert waits(lambda: amp.scale) == 1
    assert waits(lambda: clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)) == 1
    assert waits(lambda: average.update_parameters(net)) == 2
    assert waits(lambda: bool(torch.ones(()) > 0)) == waits(lambda: torch.ones(2).nonzero()) == 1


# What a step costs on top of the optimizer's own step, which on a CPU may read its step counts. 1: the host decides.
COST = {
    "ASGD": 1, "Adadelta": 1, "Adafactor": 1, "Adagrad": 1, "Adam": 1, "AdamW": 1, "Adamax": 1, "Muon": 1, "NAdam": 1,
    "RAdam": 1, "RMSprop": 1, "Rprop": 1, "SGD": 1,
}  # fmt: skip
REFUSED = {"LBFGS": "a closure", "SparseAdam": "takes only sparse gradients"}


def test_the_table_names_every_optimizer_of_torch() -> None:
    kinds = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    assert kinds - {"Optimizer"} == COST.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", COST)
def test_other_optimizers_cost_what_the_table_says(name: str) -> None:
    def step(ours: bool) -> list[int]:
        weight = torch.randn(3, 3, requires_grad=True)
        optimizer, amp, counts = getattr(torch.optim, name)([weight]), Amp.named("fp16"), Counter[int]()
        for i in range(3):
            loss: Tensor = weight.square().sum()
            amp.backward(loss) if ours else loss.backward()
            counts[i] = waits(lambda: (amp.step(optimizer), amp.update()) if ours else optimizer.step())
            optimizer.zero_grad()
        return list(counts.values())

    assert [a - b for a, b in zip(step(True), step(False), strict=True)] == [COST[name]] * 3
