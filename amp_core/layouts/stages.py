"""A network split into stages on several devices of one process.

    net = Stages(net, [torch.device("cuda", 0), torch.device("cuda", 1)], amp, image_shape=(3, 224, 224))

Autocast is entered inside `forward`, by each stage in its thread: autocast is thread-local, and a new thread starts
without it. Plain model parallelism leaves all devices but one idle; with `threads` a micro-batch is split into chunks,
and a stage computes one chunk while the stage before computes the next (Huang et al., "GPipe", arXiv:1811.06965).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from amp_core.lowp.islands import island_names
from amp_core.step.amp import Amp

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Stages(nn.Module):
    """The layers of `net` under their own names, so the state dict does not change.

    Outputs return to the first device. In evaluation a batch is not split into chunks. With the same `chunks` threads
    are bit-identical: every layer sees them in the same order, in which autograd sums their gradients. BatchNorm uses
    the statistics of a chunk, so another number of chunks trains differently; without it by the order of sums alone.

    Args:
        net: a chain: its children are called in order, each with the output of the previous one. `nn.Sequential`, and
            torchvision's AlexNet, VGG, ResNet, MobileNetV3, EfficientNet, ConvNeXt and RegNet. Its layers are moved to
            the devices; make fp32 islands before.
        devices: one per stage; the same one several times is allowed.
        image_shape: (C, H, W), to check the chain and count the floating-point operations of its layers. Stages are
            split so that the costliest one is as cheap as possible.
        chunks: number of chunks of a training batch.
        threads: compute stages concurrently, each in its own thread.

    ValueError: `net` is not a chain, has fewer layers than devices, or its threads would share a random generator.
    """

    def __init__(
        self,
        net: nn.Module,
        devices: Sequence[torch.device],
        amp: Amp,
        *,
        image_shape: Sequence[int],
        chunks: int = 1,
        threads: bool = False,
    ) -> None:
        super().__init__()
        if "" in island_names(net):
            raise ValueError("the whole network is an fp32 island; use amp=fp32")
        self.devices, self.chunks, self.threads = list(devices), chunks, threads
        layers = dict(_layers(net))
        costs = _costs(net, layers, image_shape)
        if len(layers) < len(devices):
            raise ValueError(f"{len(layers)} layers cannot be split into {len(devices)} stages")
        names = list(layers)
        self.stages = [names[start:end] for start, end in cuts(costs, len(devices))]  # of the layers of each
        drawing = [i for i, stage in enumerate(self.stages) if any(_draws(layers[name]) for name in stage)]
        if threads and len({self.devices[i] for i in drawing}) < len(drawing):
            raise ValueError(
                f"the stages {', '.join(map(str, drawing))} have dropout and draw from one random generator, in an "
                f"order that depends on the timing of threads; keep dropout in one stage"
            )
        for device, stage in zip(self.devices, self.stages, strict=True):
            for name in stage:
                layers[name].to(device)
        for name, child in net.named_children():
            self.add_module(name, child)
        # A function, which copies of the network share; a bound method would copy the mode. Without the weight cache:
        # all threads share it, and the first to leave its region clears it.
        self._autocast = lambda: amp.autocast(cache=False)

    def forward(self, images: Tensor) -> Tensor:
        chunks = images.chunk(self.chunks) if self.training else (images,)
        if self.threads and len(chunks) > 1:
            outputs = self._threaded(chunks)
        else:
            outputs = [functools.reduce(self._compute, range(len(self.stages)), chunk) for chunk in chunks]
        return torch.cat([output.to(self.devices[0], non_blocking=True) for output in outputs])

    def _threaded(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        grad = torch.is_grad_enabled()  # thread-local, like autocast

        def follow(stage: int, before: Tensor | Future[Tensor]) -> Tensor:
            with torch.set_grad_enabled(grad):
                return self._compute(before.result() if isinstance(before, Future) else before, stage)

        with contextlib.ExitStack() as stack:
            # One thread per stage takes its chunks in this order, which fixes that of random numbers and sums.
            pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in self.stages]
            outputs: list[Any] = list(chunks)
            for stage, pool in enumerate(pools):
                outputs = [pool.submit(follow, stage, output) for output in outputs]
            return [output.result() for output in outputs]

    def _compute(self, x: Tensor, stage: int) -> Tensor:
        x = x.to(self.devices[stage], non_blocking=True)
        with self._autocast():
            for name in self.stages[stage]:
                x = _call(self.get_submodule(name), x)
        return x


def cuts(costs: Sequence[float], num_parts: int) -> list[tuple[int, int]]:
    """Split a list into non-empty ranges so that the costliest is as cheap as possible."""
    best = {start: (sum(costs[start:]), [(start, len(costs))]) for start in range(len(costs))}
    # Dynamic programming over the number of parts, n^2 sums for each: networks have few layers.
    for rest in range(1, num_parts):
        # From the front, while later entries still describe one range less.
        for start in range(len(costs) - rest):
            # From the back: of equals the last, so that a layer without cost stays with the one before it.
            ends = range(len(costs) - rest, start, -1)
            most = {end: max(sum(costs[start:end]), best[end][0]) for end in ends}
            end = min(ends, key=most.__getitem__)
            best[start] = most[end], [(start, end), *best[end][1]]
    return best[0][1]


def _layers(net: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children by name; a plain `nn.Sequential` is replaced by its children."""
    for name, child in net.named_children():
        if type(child).forward is nn.Sequential.forward:
            yield from _layers(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _call(layer: nn.Module, x: Tensor) -> Tensor:
    # torchvision's networks flatten between two children.
    return layer(x.flatten(1) if isinstance(layer, nn.Linear) and x.ndim == 4 else x)


@torch.no_grad()
def _costs(net: nn.Module, layers: dict[str, nn.Module], image_shape: Sequence[int]) -> list[float]:
    """Floating-point operations of each layer. The chain must return what the network returns."""
    training = net.training
    net.eval()
    x = images = torch.randn(2, *image_shape, generator=torch.Generator().manual_seed(0))
    costs = []
    try:
        expected = net(images.clone())
        for layer in layers.values():
            with FlopCounterMode(display=False) as counter:
                x = _call(layer, x.clone())
            costs.append(float(counter.get_total_flops()))
        if not torch.equal(x, expected):
            raise ValueError("it computes something else")
    except Exception as error:  # layers raise anything for an unsuitable input
        reason = " ".join(str(error).split())
        raise ValueError(f"{type(net).__name__} is not the chain of its children: {reason}") from error
    finally:
        net.train(training)
    return costs


def _draws(layer: nn.Module) -> bool:
    """Whether a layer draws random numbers in training."""
    return any(
        (isinstance(module, _DROPOUTS) and module.p > 0) or type(module).__name__ in ("RReLU", "StochasticDepth")
        for module in layer.modules()
    )
