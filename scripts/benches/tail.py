"""The end of a step alone, gradients given: check, clip, step, scale, zero. In fp16, of ResNet-18's weights.

`by hand` is GradScaler.unscale_, clip_grad_norm_, a fused AdamW, update, zero_grad; `textbook` the same with torch's
default AdamW. Gradients are written anew before every step, outside of the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from amp_core import Amp, Clip
from benches.result import Number, Picture, Result, ratios, take_turns
from benches.values import count
from benches.work import WORKS

FULL = ["--rounds", "40"]
SHORT = ["--rounds", "3", "--work", "mlp"]
SCALE = 1024.0


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", default="resnet18", choices=WORKS, help="whose weights")
    parser.add_argument("--rounds", type=count, default=20)
    parser.add_argument("--turn", type=count, default=2, help="steps of a turn")


Tail = Callable[[], None]


def textbook(params: list[Tensor], device: str, fused: bool | None) -> Tail:
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler(device, init_scale=SCALE)  # type: ignore[attr-defined]
    scaler.scale(torch.ones((), device=device))

    def tail() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return tail


def ours(params: list[Tensor], device: str) -> Tail:
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    amp, clip = Amp.named("fp16", device=device, init_scale=SCALE), Clip.norm(1.0)

    def tail() -> None:
        amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)

    return tail


MAKE: dict[str, Callable[[list[Tensor], str], Tail]] = {
    "by hand": lambda params, device: textbook(params, device, True),
    "again": lambda params, device: textbook(params, device, True),
    "textbook": lambda params, device: textbook(params, device, None),
    "ours": ours,
}


class Timed:
    """Some turns of a tail, on weights of its own."""

    def __init__(self, who: str, shapes: list[torch.Size], device: str, turn: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
        self.grads = [torch.randn(shape, generator=generator).to(device) * SCALE for shape in shapes]
        self.tail, self.device, self.turn = MAKE[who](self.params, device), device, turn

    def __call__(self) -> float:
        """Seconds of one."""
        seconds = 0.0
        for _ in range(self.turn):
            for param, grad in zip(self.params, self.grads, strict=True):
                param.grad = grad.clone()
            self._wait()
            began = time.perf_counter()
            self.tail()
            self._wait()
            seconds += time.perf_counter() - began
        return seconds / self.turn

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(flags: argparse.Namespace) -> Result:
    result = Result(
        "tail",
        flags.command,
        flags.device,
        Picture({"to by hand": "time of the end of a step, to that of the fused loop by hand"}, "loop", at=1.0),
    )
    shapes = [p.shape for p in WORKS[flags.work].net("cpu").parameters()]
    runners = {who: Timed(who, shapes, flags.device, flags.turn) for who in MAKE}
    for run in runners.values():
        run()
        run()
    check(runners)
    times = take_turns(dict(runners), flags.rounds)
    fused, default = ratios(times, "by hand", "again"), ratios(times, "textbook", "textbook")
    result.notes.append(
        f"{len(shapes)} tensors, {sum(shape.numel() for shape in shapes):,} weights ({WORKS[flags.work].title}), fp16, "
        "AdamW, clipping by norm. All end with the same weights."
    )
    for who in MAKE:
        columns = {"to by hand": fused[who], "to textbook": default[who]}
        result.add(loop=who, ms=Number.of([1e3 * seconds for seconds in times[who]]), **columns)
    return result


def check(runners: dict[str, Timed]) -> None:
    """Weights after as many steps are the same but for rounding."""
    for who, run in runners.items():
        for mine, its in zip(run.params, runners["by hand"].params, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6, msg=lambda text, who=who: f"{who}: {text}")
