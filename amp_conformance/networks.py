"""Networks so small that the right answer is known exactly, and what they record."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from amp_conformance.task import Batch, NotOffered


class Line(nn.Module):
    """y = w x, with w = 0 at first. With `mean_loss` and SGD(lr=1) a step moves w by the mean of x."""

    def __init__(self, width: int = 1, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, width), start))

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] -> [B, 1]"""
        return F.linear(x, self.weight)


class Two(nn.Module):
    """Two lines, of the two columns of x."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Line(), Line()

    def forward(self, x: Tensor) -> Tensor:
        """[B, 2] -> [B, 1]"""
        return self.a(x[:, :1]) + self.b(x[:, 1:])


class Normed(nn.Module):
    """A layer that overflows fp16 for large inputs, and BatchNorm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = Line(start=4.0), nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1] -> [B, 1]"""
        return self.norm(self.first(x))


class Rows(nn.Module):
    """Two weights, of the two columns of x, as the rows of one matrix: with two shards each process has one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 2] -> [B, 1]"""
        return x @ self.weight


class Bag(nn.Module):
    """An embedding with sparse gradients, of the numbers in x."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 1, sparse=True)
        nn.init.zeros_(self.table.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1] -> [B, 1]"""
        return self.table(x[:, 0].long())


class _Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, seen: list[bool]) -> Tensor:  # type: ignore[override]
        ctx.seen = seen  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.seen.append(torch.is_autocast_enabled("cpu"))  # type: ignore[attr-defined]
        return grad, None


class Recorder(Line):
    """Records the dtype that it computes in, and whether autocast is on in its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
        self.in_backward: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1] -> [B, 1]"""
        y = super().forward(x)
        self.dtypes[self.training].add(y.dtype)
        return _Look.apply(y, self.in_backward) if self.training else y  # type: ignore[no-any-return]


class WithIsland(nn.Module):
    """Two lines, the second in fp32: a part without autocast, as torch's documentation writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.island = Recorder(), Recorder()

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1] -> [B, 1]"""
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.island(x.float())


def mean_loss(net: nn.Module, batch: Batch, grad: object = None) -> Tensor:
    """The mean of the outputs, in fp32."""
    return net(batch[0]).float().mean()


def with_constant(net: nn.Module, batch: Batch, grad: object = None) -> Tensor:
    """`mean_loss` plus the mean of the targets: a number without a gradient."""
    return mean_loss(net, batch) + batch[1].mean()


def penalty(net: nn.Module, batch: Batch, grad: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The mean square of 2^-7 times the slopes, taken of outputs times 2^-26: slopes that fp16 holds only if scaled."""
    x = batch[0].clone().requires_grad_()
    return (2.0**19 * grad(net(x).float() * 2.0**-26, x)).square().mean()


def sgd(net: nn.Module) -> list[Optimizer]:
    """lr=1: weights show gradients."""
    return [SGD(net.parameters(), lr=1.0)]


def with_momentum(net: nn.Module) -> list[Optimizer]:
    """An optimizer with state, whose steps are exact for small integers."""
    return [SGD(net.parameters(), lr=1.0, momentum=0.5)]


def one_for_each(net: nn.Module) -> list[Optimizer]:
    """An optimizer for each child."""
    return [SGD(child.parameters(), lr=1.0) for child in net.children()]


def fused(make: Callable[[nn.Module], Sequence[Optimizer]]) -> Callable[[nn.Module], list[Optimizer]]:
    """The same optimizers, each as one kernel that is told on the device whether to step."""

    def made(net: nn.Module) -> list[Optimizer]:
        if any(getattr(module, "sparse", False) for module in net.modules()):
            raise NotOffered("torch's fused optimizers take no sparse gradients")
        groups = [(each, [{"params": group["params"]} for group in each.param_groups]) for each in make(net)]
        return [type(each)(parts, **each.defaults | {"fused": True}) for each, parts in groups]  # type: ignore[call-arg]

    return made


def halving(optimizer: Optimizer) -> LambdaLR:
    """A learning rate that halves with each step: exact."""
    return LambdaLR(optimizer, lambda n: 0.5**n)


def numbers(draw: random.Random, size: int = 2, width: int = 1, largest: int = 7) -> Batch:
    """A micro-batch of random integers from 1 to `largest`; up to 7 they are exact in every mode."""
    x = torch.tensor([[float(draw.randint(1, largest)) for _ in range(width)] for _ in range(size)])
    return x, torch.zeros(size, 1)


def apart(draw: random.Random, *sizes: int, largest: int = 7) -> list[Batch]:
    """Micro-batches of random integers, no two with the same mean, and no two pairs of neighbours with the same sum.

    Else a trainer that weights them wrongly, or takes others, may compute what is right.
    """
    while True:
        batches = [numbers(draw, size, largest=largest) for size in sizes]
        means = [mean(batch) for batch in batches]
        sums = [one + other for one, other in pairwise(means)]
        if len(set(means)) == len(means) and len(set(sums)) == len(sums):
            return batches


def filled(value: float, size: int = 2, width: int = 1) -> Batch:
    """A micro-batch of one number."""
    return torch.full((size, width), value), torch.zeros(size, 1)


def mean(*batches: Batch) -> float:
    """The mean over all samples of the first column, in float64."""
    return float(torch.cat([x[:, 0] for x, _ in batches]).double().mean())
