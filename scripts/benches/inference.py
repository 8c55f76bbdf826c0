"""Inference: autocast against converted weights, their time, memory, and how far predictions differ from fp32.

Every way predicts the same batches in turns. Autocast keeps fp32 weights and casts them in each batch; converted
weights (`model.half()`, `model.bfloat16()`) are cast once, and layers such as BatchNorm compute in 16 bits, too. `cnn`
is trained on MNIST digits first and compared on others; the rest have random weights, and only their time is shown.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from amp_core.data.images import every_fifth, read_mnist_subset
from benches.result import Number, Picture, Result, ratios, take_turns
from benches.values import compile_all, count, numbers, some_of
from benches.work import WORKS, loss_of

SHORT = ["--samples", "1,8", "--rounds", "2", "--batches", "2", "--steps", "20"]
FULL = ["--rounds", "30"]

WAYS: dict[str, tuple[torch.dtype, bool]] = {
    "fp32": (torch.float32, False),
    "fp32 again": (torch.float32, False),
    "bf16 autocast": (torch.bfloat16, False),
    "fp16 autocast": (torch.float16, False),
    "bf16 weights": (torch.bfloat16, True),
    "fp16 weights": (torch.float16, True),
}
"""dtype, and whether the weights have it."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", default="cnn", type=some_of(WORKS), help=f"networks, with commas: {', '.join(WORKS)}")
    parser.add_argument("--samples", default="1,8,64", type=numbers, help="of a batch, with commas")
    parser.add_argument("--rounds", type=count, default=10)
    parser.add_argument("--batches", type=count, default=10, help="in a turn")
    parser.add_argument("--steps", type=count, default=200, help="to train cnn")
    parser.add_argument("--compile", action="store_true", help="compile every way with torch.compile")


def predictor(net: nn.Module, way: str, device: str, *, compiled: bool) -> Callable[[Tensor], Tensor]:
    """Logits of a batch, fp32, by one of `WAYS`."""
    dtype, converts = WAYS[way]
    own = copy.deepcopy(net).eval()
    own = own.to(dtype) if converts else own

    def forward(inputs: Tensor) -> Tensor:
        return own(inputs)

    if compiled:
        # Code of its own: ways that share some look through the guards of each other at every call.
        forward.__code__ = forward.__code__.replace(co_name=way)
        forward = torch.compile(forward)
    casts = dtype is not torch.float32 and not converts

    @torch.no_grad()
    def predict(inputs: Tensor) -> Tensor:
        if converts and inputs.is_floating_point():
            inputs = inputs.to(dtype)
        with torch.autocast(device, dtype=dtype, enabled=casts):
            return forward(inputs).float()

    predict.weights = sum(tensor.nbytes for tensor in own.state_dict().values())  # type: ignore[attr-defined]
    return predict


def digits(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """(images to train on, their labels, images to compare on)."""
    images, labels = read_mnist_subset()
    held_out = torch.from_numpy(every_fifth(labels))
    pixels = torch.from_numpy(images).float().div_(255).sub_(0.13).div_(0.31)
    return pixels[~held_out].to(device), torch.from_numpy(labels)[~held_out].to(device), pixels[held_out].to(device)


def train(net: nn.Module, images: Tensor, labels: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(labels), (64,), generator=generator).to(labels.device)
        loss_of(net(images[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


def difference(predict: Callable[[Tensor], Tensor], expected: Tensor, images: Tensor) -> tuple[float, float]:
    """Share of equal classes, and the largest difference between two probabilities."""
    found = torch.cat([predict(part) for part in images.split(64)]).softmax(1)
    return (found.argmax(1) == expected.argmax(1)).double().mean().item(), (found - expected).abs().max().item()


def measure(flags: argparse.Namespace) -> Result:
    drawn = Picture({"to fp32": "time to fp32"}, lines="way", panels=("network", "samples"), at=1.0)
    result = Result("inference", flags.command, flags.device, drawn)
    result.notes.append("Times of a batch, and their ratios in the same turn; equal classes and max |dp|: to fp32.")
    for name in flags.work:
        if flags.compile:
            compile_all()
        net, images = WORKS[name].net(flags.device), None
        if name == "cnn":
            *data, images = digits(flags.device)
            train(net, *data, steps=flags.steps)
        ways = {way: predictor(net, way, flags.device, compiled=flags.compile) for way in WAYS}
        expected = None if images is None else torch.cat([ways["fp32"](part) for part in images.split(64)]).softmax(1)
        for samples in flags.samples:
            batches = [inputs for inputs, _ in WORKS[name].batches(flags.batches, flags.device, samples)]
            peaks: dict[str, int] = {}

            def turn(way: str, ways=ways, batches=batches, peaks=peaks) -> float:  # type: ignore[no-untyped-def]
                on_gpu, before = flags.device == "cuda", 0
                if on_gpu:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                began = time.perf_counter()
                for batch in batches:
                    ways[way](batch)
                if on_gpu:
                    torch.cuda.synchronize()
                    peaks[way] = torch.cuda.max_memory_allocated() - before
                return (time.perf_counter() - began) / len(batches) * 1e3

            for way in ways:  # kernels are chosen, and networks compiled
                turn(way)
            times = take_turns({way: lambda way=way: turn(way) for way in ways}, flags.rounds)
            to_fp32 = ratios(times, "fp32", "fp32 again")
            for way, predict in ways.items():
                row = {"network": name, "samples": samples, "way": way, "ms": Number.of(times[way])}
                row |= {"to fp32": to_fp32[way], "weights MB": round(predict.weights / 1e6, 3)}  # type: ignore[attr-defined]
                row |= {"more at peak, MB": round(peaks[way] / 1e6, 3) if peaks else None}
                equal, most = (None, None)
                if expected is not None and images is not None:
                    equal, most = difference(predict, expected, images)
                result.add(**row, **{"equal classes": equal, "max |dp|": most})
    return result
