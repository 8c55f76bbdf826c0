"""Margin softmax with Partial FC: class centres sharded over ranks, of which a step uses a sample.

    head = PartialFC(num_classes=2_000_000, embedding=512, sample_rate=0.1, device="cuda")
    optimizer = torch.optim.SGD([head.active], lr=0.1, momentum=0.9, fused=True)
    state = head.carry(optimizer)                                # momentum follows its row; part of a checkpoint

    head.sample(labels)                                          # once per window, from the labels of all micro-batches
    loss, x_grad = head(features.detach(), labels, micro.weight)
    amp.backward(features, gradient=x_grad)                      # scales a gradient instead of a loss
    report = amp.step([backbone_optimizer, optimizer], clip, unscaled=[optimizer], sharded=[optimizer])
    head.write_back()                                            # writes the sampled rows back

A classifier over millions of identities does not fit on one device: [num_classes, embedding] weights, and [batch,
num_classes] logits. Here each rank holds a contiguous slice of the centres and computes its columns of the logits for
the samples of all ranks; maximum and sum of the softmax are reduced over ranks. In each step a rank uses a random
subset of its slice that contains every class with a sample in the window.

Everything is float32 with autocast off. In fp16 the cosine of two nearly equal directions rounds to above 1, where acos
is NaN and the square root in cos(a + m) has a NaN or infinite gradient.

Sources: ArcFace, Deng et al. (arXiv:1801.07698); CosFace, Wang et al. (arXiv:1801.09414); Partial FC, An et al.
(arXiv:2010.05222, arXiv:2203.15565).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core.lowp.islands import keep_fp32
from amp_core.tensors import Slice, several_ranks

# --- margins ----------------------------------------------------------------------------------------------------------


def arcface(cosine: Tensor, margin: float) -> Tensor:
    """cos(a + margin) for the angle a, without computing a: acos has an infinite gradient at 1.

    Where a + margin exceeds pi and the cosine would rise again, a falling straight line continues it.
    """
    # The gradient is cosine / sine; for a sine below 0.001 it is set to 0. The normalisation before has gradient sine.
    sine = (1.0 - cosine * cosine).clamp(min=1e-6).sqrt()
    turned = cosine * math.cos(margin) - sine * math.sin(margin)
    return torch.where(cosine > -math.cos(margin), turned, cosine - math.sin(margin) * margin)


MARGINS: dict[str, Callable[[Tensor, float], Tensor]] = {"arcface": arcface, "cosface": torch.sub}
"""Functions of the cosine between a sample and the centre of its class."""


# --- the head ---------------------------------------------------------------------------------------------------------


class PartialFC:
    """Softmax cross-entropy of scaled cosines with a margin for the own class, over centres sharded over ranks.

    In a process group every method is called on all ranks. Only the state methods sync with the device.

    Args:
        num_classes: over all ranks, at least one per rank; they differ by at most one.
        kind: one of `MARGINS`.
        margin: ArcFace: an angle in radians (0.5 is usual); CosFace: a cosine (0.4 is usual).
        scale: scale of the cosines before the softmax.
        sample_rate: share of its classes that a rank uses in a step, in (0, 1], or more: those of all samples fit.
        seed: of the initial centres, which do not depend on the number of ranks.

    Attributes:
        active: the sampled rows, float32 [K, embedding], which an optimizer steps; gradients accumulate here.
        centres: all rows of this rank, float32 [stop - start, embedding].
        start, stop: the classes of this rank.

    ValueError: a value out of range.
    """

    def __init__(
        self,
        num_classes: int,
        embedding: int,
        *,
        kind: str = "arcface",
        margin: float = 0.5,
        scale: float = 64.0,
        sample_rate: float = 1.0,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if several_ranks() else (0, 1)
        if num_classes < self.world_size:
            raise ValueError(f"{num_classes} classes on {self.world_size} ranks, expected at least one per rank")
        if kind not in MARGINS or not (0 < sample_rate <= 1 and scale > 0 and 0 <= margin < math.pi):
            expected = f"one of {', '.join(MARGINS)}, a margin in [0, pi), a scale above 0, a rate in (0, 1]"
            raise ValueError(f"{kind=}, {margin=}, {scale=}, {sample_rate=}: expected {expected}")
        self.num_classes, self.embedding = num_classes, embedding
        self.margin, self.scale, self.sample_rate = margin, scale, sample_rate
        self._add_margin = MARGINS[kind]
        self.start, self.stop = self._slice(self.rank)
        self.centres = _initial_centres(self.start, self.stop, embedding, seed).to(device)
        self.active = nn.Parameter(self.centres)
        self._index: Tensor | None = None  # indices of `active` in `centres`; None: all rows
        self._state: RowState | None = None

    def carry(self, optimizer: torch.optim.Optimizer) -> RowState:
        """Make the state of the optimizer of `active` follow the rows. Call it once, before `sample`."""
        self._state = RowState(self, optimizer)
        return self._state

    @torch.no_grad()
    def sample(self, *labels: Tensor) -> None:
        """Sample the classes of a window, and copy their rows into `active`.

        All classes with a sample in the window, on any rank, and random others up to a fixed number, by the default
        generator of the device. `labels` are those of each micro-batch, int64 [B], equally many on every rank.
        """
        num_rows = self.stop - self.start
        everyone = _gather(torch.cat(labels))
        count = max(math.ceil(self.sample_rate * num_rows), min(num_rows, len(everyone)))
        if count == num_rows:
            self._index, self.active.data = None, self.centres
        else:
            priority = torch.rand(num_rows + 1, device=everyone.device)  # the last one is for other ranks' classes
            local = torch.where(self._is_here(everyone), everyone - self.start, num_rows)
            priority.index_fill_(0, local, 2.0)
            self._index = priority[:-1].topk(count).indices.sort().values
            self.active.data = self.centres[self._index]
        if self._state is not None:
            self._state.fetch(self._index)

    @keep_fp32
    @torch.no_grad()
    def __call__(self, features: Tensor, labels: Tensor, weight: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
        """Loss and gradient of a micro-batch. Adds the gradient of the centres, unscaled, to `active.grad`.

        Uses one matrix of [samples of all ranks, K], for cosines, logits, probabilities and their gradient in turn.

        Args:
            features: float [B, embedding], as many samples on every rank; need not be normalised.
            labels: int64 [B], classes that `sample` was given.
            weight: of the mean loss over these samples, such as `micro.weight`: their share of the window.

        Returns:
            The loss of these samples times `weight`, 0-d: its sum over micro-batches and ranks is the loss of the
            window. And the gradient of that sum with respect to `features`, float32 [B, embedding]: complete; the
            backbone's reduction must sum it over ranks, not average it.
        """
        batch = len(labels)
        x, y, w = _gather(features.detach()), _gather(labels), _gather(torch.ones_like(features[:, 0]) * weight / batch)
        with torch.enable_grad():
            directions, centres = F.normalize(x.requires_grad_()), F.normalize(self.active)
        cosine = directions.detach() @ centres.detach().T
        column, here = self._locate(y)
        with torch.enable_grad():
            target = cosine.gather(1, column).requires_grad_()
            moved = self._add_margin(target, self.margin)
        logits = cosine.scatter_(1, column, torch.where(here, moved.detach(), target)).mul_(self.scale)

        # The softmax over all ranks' classes: by the largest logit of all, so that no exponential exceeds 1. A sample's
        # own logit is on one rank, and 0 on the others: a sum brings it, and the denominator, to all in one reduction.
        largest = logits.amax(1, keepdim=True)
        if self.world_size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        exponentials = logits.sub_(largest).exp_()
        own = torch.where(here, moved * self.scale, 0.0)
        sums = torch.cat([exponentials.sum(1, keepdim=True), own], dim=1)
        if self.world_size > 1:
            dist.all_reduce(sums)
        total, own = sums.split(1, dim=1)
        losses = (total.log() + largest - own)[:, 0] * w

        # d loss / d logit = w * (probability - is_own); then back through scale, margin, product and normalisation.
        gradient = exponentials.mul_((self.scale * w)[:, None] / total)
        other = gradient.gather(1, column)
        (own,) = torch.autograd.grad(moved, target, other - (self.scale * w)[:, None])
        gradient.scatter_(1, column, torch.where(here, own, other))
        torch.autograd.backward([directions, centres], [gradient @ centres.detach(), gradient.T @ directions.detach()])
        assert x.grad is not None
        first = self.rank * batch
        return losses[first : first + batch].sum(), _reduce_scatter(x.grad, batch)

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the rows of `active` and their optimizer state back to this rank's rows.

        Call it after the step, taken or skipped. Rows that were not sampled do not change.
        """
        if self._index is not None:
            self.centres.index_copy_(0, self._index, self.active)
        if self._state is not None:
            self._state.store(self._index)

    def state_dict(self) -> dict[str, Any]:
        """{"weight": float32 [num_classes, embedding] on the CPU} on rank 0, {} on the others. Collective, by gloo."""
        weight = self.gather_rows(self.centres)
        return {} if weight is None else {"weight": weight}

    def sharded_state_dict(self) -> dict[str, Any]:
        """The same with this rank's `Slice` in place of the whole, in the same memory. Not collective."""
        return {"weight": self.slice_of(self.centres)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's slice of a state that was saved on any number of ranks, or in shards the `Slice` itself.

        ValueError: it has other classes or another embedding.
        """
        self.take_rows(self.centres, state["weight"])

    # --- rows ---------------------------------------------------------------------------------------------------------

    def gather_rows(self, rows: Tensor) -> Tensor | None:
        """The rows of all ranks on the CPU of rank 0, None elsewhere. Called on all ranks."""
        rows = rows.detach().cpu()
        if self.rank:
            dist.send(rows.contiguous(), dst=0)
            return None
        if self.world_size == 1:
            return rows
        everything = rows.new_empty(self.num_classes, *rows.shape[1:])
        everything[: self.stop] = rows
        for rank in range(1, self.world_size):
            dist.recv(everything[slice(*self._slice(rank))], src=rank)
        return everything

    def slice_of(self, rows: Tensor) -> Slice:
        return Slice(rows.detach(), self.start, self.num_classes)

    def take_rows(self, rows: Tensor, everything: Tensor | Slice) -> None:
        """Copy this rank's slice of `everything` into `rows`."""
        first, last = self.span(everything.shape)
        if isinstance(everything, Tensor):
            rows.copy_(everything[first:last])
        elif (everything.dim, everything.start, everything.stop) == (0, first, last):
            rows.copy_(everything.tensor)
        else:
            raise ValueError(f"found rows {everything.start} to {everything.stop}, expected {first} to {last}")

    def span(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """This rank's rows [start, stop) of [num_classes, embedding]. ValueError: it is another shape."""
        if tuple(shape) != (expected := (self.num_classes, self.embedding)):
            raise ValueError(f"rows are {tuple(shape)} there and {expected} here")
        return self.start, self.stop

    def _slice(self, rank: int) -> tuple[int, int]:
        each, more = divmod(self.num_classes, self.world_size)
        start = rank * each + min(rank, more)
        return start, start + each + (rank < more)

    def _is_here(self, labels: Tensor) -> Tensor:
        return (labels >= self.start) & (labels < self.stop)

    def _locate(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each sample's own class (0 if another rank has it), and whether it is here: both [N, 1]."""
        here = self._is_here(labels)
        column = torch.where(here, labels - self.start, 0)
        if self._index is not None:
            column = torch.where(here, torch.searchsorted(self._index, column), 0)
        return column[:, None], here[:, None]


class RowState:
    """The optimizer state of `PartialFC.active` for all rows of a rank. Made by `PartialFC.carry`.

    Tensors with the shape of the rows (momentum, second moments) follow them; others (a step count) are shared.
    """

    def __init__(self, head: PartialFC, optimizer: torch.optim.Optimizer) -> None:
        self.head, self.optimizer, self.span = head, optimizer, head.span
        self.rows: dict[str, Tensor] = {}

    def fetch(self, index: Tensor | None) -> None:
        """Give the optimizer the state of rows `index`; None: all rows."""
        state = self.optimizer.state[self.head.active]
        for key, rows in self.rows.items():
            state[key] = rows if index is None else rows[index]

    def store(self, index: Tensor | None) -> None:
        """Store the optimizer's state of rows `index`; None: all rows."""
        for key, value in self.optimizer.state[self.head.active].items():
            if isinstance(value, Tensor) and value.shape == self.head.active.shape:
                if index is not None:
                    rows = self.rows.get(key)
                    rows = value.new_zeros(self.head.centres.shape) if rows is None else rows
                    value = rows.index_copy_(0, index, value)
                self.rows[key] = value

    def state_dict(self) -> dict[str, Any]:
        """{"rows": name -> [num_classes, ...], "shared": name -> value}; {} on ranks above 0. Called on all ranks."""
        found = self._with(self.head.gather_rows)
        return {} if self.head.rank else found

    def sharded_state_dict(self) -> dict[str, Any]:
        """Like `PartialFC.sharded_state_dict`."""
        return self._with(self.head.slice_of)

    def _with(self, rows_of: Callable[[Tensor], Any]) -> dict[str, Any]:
        shared = {k: v for k, v in self.optimizer.state[self.head.active].items() if k not in self.rows}
        return {"rows": {key: rows_of(value) for key, value in sorted(self.rows.items())}, "shared": shared}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Like `PartialFC.load_state_dict`."""
        self.rows = {key: torch.empty_like(self.head.centres) for key in state["rows"]}
        for key, everything in state["rows"].items():
            self.head.take_rows(self.rows[key], everything)
        # torch chooses device and dtype of shared state.
        own = self.optimizer.state_dict()
        self.optimizer.load_state_dict(own | {"state": {0: dict(state["shared"])}})


# --- between ranks ----------------------------------------------------------------------------------------------------


def _gather(tensor: Tensor) -> Tensor:
    """All-gather [B, ...] of each rank to [world_size * B, ...]."""
    if not several_ranks():
        return tensor
    everyone = tensor.new_empty(dist.get_world_size() * len(tensor), *tensor.shape[1:])
    dist.all_gather(list(everyone.split(len(tensor))), tensor.contiguous())
    return everyone


def _reduce_scatter(tensor: Tensor, batch: int) -> Tensor:
    """Reduce-scatter: this rank's [batch, ...] of the sum over ranks of `tensor`, [world_size * batch, ...]."""
    if not several_ranks():
        return tensor
    own = torch.empty_like(tensor[:batch])
    dist.reduce_scatter(own, list(tensor.split(batch)))
    return own


_BLOCK = 4096


def _initial_centres(start: int, stop: int, embedding: int, seed: int) -> Tensor:
    """Rows `start` to `stop` of an infinite normal matrix with standard deviation 0.01, as in insightface."""
    generator = torch.Generator()
    rows = torch.empty(stop - start, embedding)
    for block in range(start // _BLOCK, math.ceil(stop / _BLOCK)):
        generator.manual_seed((seed * 0x9E3779B97F4A7C15 + block) % 2**63)
        values = torch.empty(_BLOCK, embedding).normal_(std=0.01, generator=generator)
        first, last = max(start, block * _BLOCK), min(stop, (block + 1) * _BLOCK)
        rows[first - start : last - start] = values[first - block * _BLOCK : last - block * _BLOCK]
    return rows
