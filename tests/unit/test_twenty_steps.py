"""20 steps of every mode lie as far from the same steps in fp32 on a CPU as the mode may round, on a CPU and on a GPU.

How far that is is computed: the CPU trains once more with a random relative error in the inputs, weights and results of
every linear layer, and in the gradients of these, as large as the mode may round (`ROUNDING`). The bound is three times
the distance that results, as three standard deviations. True rounding errors are at most as large as those drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import rows
from torch import nn

from amp_core import Amp, Clip, Ema, Schedule, windows
from amp_core.lowp.masters import fp32_values, master_params

ROOT = Path(__file__).resolve().parents[2]
on_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# Half the distance of two neighbouring numbers, relative.
FP32, BF16, FP16, E4M3, E5M2 = 2.0**-24, 2.0**-8, 2.0**-11, 2.0**-4, 2.0**-3
ROUNDING = dict.fromkeys(("fp16", "fp16_capped", "o2", "o3"), (FP16, FP16)) | {
    "fp32": (FP32, FP32),
    "tf32": (2 * FP16, 2 * FP16),  # as many bits after the point as fp16; the units may cut off the rest
    "bf16": (BF16, BF16),
    "bf16_pure": (BF16, BF16),
    "fp8": (E4M3, E5M2),
}
"""In the forward and in the backward pass."""
STORED = {"o3": FP16, "bf16_pure": 2 * BF16}
"""What a weight is off after each step. Stochastic rounding errs by up to a whole distance."""
SIZES = (64, 128, 16)  # multiples of 16, for float8
SAMPLES = 64
CASES = [(mode, optimizer) for mode in ROUNDING for optimizer in ("AdamW", "SGD")]


def loop(mode: str, optimizer: str, device: str, noise: bool = False) -> tuple[nn.Module, Callable[[], Any]]:
    """A network, and a function that trains it for one step. With `noise` the mode's rounding is imitated in fp32."""
    forward, backward = (u + max(SIZES) ** 0.5 * FP32 for u in ROUNDING[mode])  # and sums in fp32, in another order
    generator = torch.Generator().manual_seed(1)

    def drawn(shape: torch.Size, error: float) -> torch.Tensor:
        return 1 + error * (2 * torch.rand(shape, generator=generator) - 1)

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * drawn(x.shape, forward)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * drawn(grads[0].shape, backward)

    class Noisy(nn.Linear):
        def forward(self, input: Any) -> Any:
            off: Any = Off.apply
            return off(F.linear(off(input), off(self.weight), off(self.bias)))

    torch.manual_seed(0)
    layer = Noisy if noise else nn.Linear
    net = nn.Sequential(layer(*SIZES[:2]), nn.Tanh(), layer(*SIZES[1:]))
    images, teacher = torch.randn(2, SAMPLES, SIZES[0]), torch.randn(SIZES[0], SIZES[-1])
    labels = (images @ teacher).argmax(-1)
    net, images, labels = net.to(device), images.to(device), labels.to(device)
    amp = Amp.named("fp32" if noise else mode, device, samples=SAMPLES)  # type: ignore[arg-type]
    amp.prepare(net)
    amp.guard(net)
    weights = master_params(net)
    # An eps far below the gradients would turn the rounding of those near zero into whole steps.
    options = {"lr": 0.1, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.01, "eps": 1e-3}
    made = getattr(torch.optim, optimizer)(weights, fused=True, **options)
    schedule = Schedule(made, lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n), 100)
    ema = Ema(net, 0.9)

    def step() -> Any:
        for micro in (window := next(iter(windows(list(zip(images, labels, strict=True)), 2)))):
            with amp.autocast():
                loss = F.cross_entropy(net(micro.batch[0]).float(), micro.batch[1])
            amp.backward(loss * micro.weight)
        assert len(window) == 2
        report = amp.step(made, Clip.norm(1.0))
        amp.update()
        made.zero_grad()
        schedule.advance(report)
        ema.update(report)
        if noise and mode in STORED:
            with torch.no_grad():
                for weight in weights:
                    weight *= drawn(weight.shape, STORED[mode])
        return amp.num_skipped

    return net, step


def flat(net: nn.Module) -> torch.Tensor:
    """The weights as one float64 vector on the CPU; of o2 the fp32 ones."""
    return torch.cat([value.detach().cpu().double().flatten() for value in fp32_values(net.parameters())])


@functools.cache
def reference(mode: str, optimizer: str, noise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights after 20 steps on the CPU in fp32, and the first ones."""
    net, step = loop(mode, optimizer, "cpu", noise)
    first = flat(net)
    for _ in range(20):
        step()
    return flat(net), first


def distance(device: str, mode: str, optimizer: str, lost: tuple[int, ...] = ()) -> float:
    """Of 20 steps without those that are lost, to those of the CPU in fp32, relative to the bound."""
    exact, _ = reference("fp32", optimizer, False)
    noisy, _ = reference(mode, optimizer, True)
    net, step = loop(mode, optimizer, device)
    skipped = [step() for number in range(20) if number not in lost][-1]
    assert skipped.item() == 0
    return ((flat(net) - exact).norm() / (3 * (noisy - exact).norm())).item()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("mode, optimizer", rows(CASES, ("fp16", "AdamW"), ("bf16", "SGD")))
def test_twenty_steps_lie_as_far_from_fp32_as_the_mode_rounds(mode: str, optimizer: str, device: str) -> None:
    assert distance(device, mode, optimizer) <= 1


@pytest.mark.parametrize("mode, optimizer", rows(CASES, ("fp16", "AdamW"), ("bf16", "SGD")))
def test_the_bound_sees_that_steps_are_lost(mode: str, optimizer: str) -> None:
    """One of the 20; in the modes of the fewest digits every other."""
    lost = tuple(range(1, 20, 2)) if mode in ("bf16_pure", "fp8") else (10,)
    assert distance("cpu", mode, optimizer, lost) > 1
