"""Gradient clipping. It always sees unscaled gradients: `Amp.step` calls it after unscaling.

By norm: Pascanu et al., https://arxiv.org/abs/1211.5063. Adaptive: Brock et al., https://arxiv.org/abs/2102.06171.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from amp_core.config.schema import ClipConfig
from amp_core.step.scaler import Numbers
from amp_core.tensors import is_dtensor, local, shard_group
from amp_core.torch_private import foreach_clamp_max_, foreach_clamp_min_, foreach_copy_


@dataclass(frozen=True)
class Clip:
    """How to clip gradients. Made by `Clip.norm`, `Clip.value` or `Clip.adaptive`."""

    kind: str
    threshold: float

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold < float("inf"):
            raise ValueError(f"Clip.{self.kind}({self.threshold}): expected a positive finite number")

    @classmethod
    def norm(cls, max_norm: float) -> Clip:
        """Scale all gradients by max_norm / norm when their global L2 norm is larger."""
        return cls("norm", max_norm)

    @classmethod
    def value(cls, max_value: float) -> Clip:
        """Clamp each element to [-max_value, max_value]."""
        return cls("value", max_value)

    @classmethod
    def adaptive(cls, factor: float) -> Clip:
        """Limit the gradient norm of each output unit, or of a whole vector, to `factor` times that of its weights."""
        return cls("adaptive", factor)

    @classmethod
    def of(cls, config: ClipConfig) -> Clip | None:
        """The clipping of the `clip` group, or None."""
        thresholds = {"norm": config.max_norm, "value": config.max_value, "adaptive": config.factor}
        threshold = thresholds.get(config.name)
        return None if threshold is None else cls(config.name, threshold)

    def divisor(self, norm: Tensor, numbers: Numbers) -> Tensor:
        """norm: the divisor of all gradients, a 0-d tensor of at least 1, from their 0-d global norm."""
        # 1e-6 as in torch.nn.utils.clip_grad_norm_. Of an infinite norm it is infinite, and that step is skipped.
        return torch.maximum((norm + numbers[1e-6]).div_(numbers[self.threshold]), numbers[1.0])

    def __call__(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """value, adaptive: change the unscaled gradients of `params` (of sparse ones, the values) in place. No sync."""
        if self.kind == "value":
            foreach_clamp_min_(local(grads), -self.threshold)
            foreach_clamp_max_(local(grads), self.threshold)
            return
        pairs = list(zip(params, grads, strict=True))
        if any(param.shape != grad.shape for param, grad in pairs):
            raise TypeError(
                "Clip.adaptive compares each row of a weight and its gradient, which is sparse; use Clip.norm"
            )
        tensors = [tensor for pair in pairs for tensor in pair]
        norms = list(map(_unit_norms, tensors))
        _join_vectors(tensors, norms)
        for grad, weight_norm, grad_norm in zip(local(grads), norms[::2], norms[1::2], strict=True):
            # max(|W|, 1e-3) as in their equation 3: without it the gradient of a weight that begins at 0 would always
            # be clipped to 0. The other bound keeps a gradient of 0 from 0 / 0.
            weight_norm, grad_norm = weight_norm.clamp(min=1e-3), grad_norm.clamp(min=1e-6)
            grad.mul_((self.threshold * weight_norm / grad_norm).clamp_(max=1.0))


def _unit_norms(tensor: Tensor) -> Tensor:
    """Norms of the units in this rank's shard: one for a vector (bias, gain), one per row of a matrix or kernel."""
    (mine,) = local([tensor.detach()])
    return torch.linalg.vector_norm(mine, dim=tuple(range(1, mine.ndim)) or None, keepdim=True)


def _join_vectors(tensors: list[Tensor], norms: list[Tensor]) -> None:
    """Turn norms of sharded vectors into those of the full vectors, in place, with one reduction per group of ranks."""
    # Rows are complete on their rank: sharding splits the first dimension.
    groups: dict[dist.ProcessGroup, list[Tensor]] = {}
    for tensor, norm in zip(tensors, norms, strict=True):
        if not is_dtensor(tensor):
            continue
        if any(placement.is_shard() and placement.dim for placement in tensor.placements):  # type: ignore[attr-defined]
            raise TypeError(f"a weight is laid out as {tensor.placements}: adaptive clipping needs its rows whole")  # type: ignore[attr-defined]
        group = shard_group(tensor)
        if group is not None and tensor.ndim < 2:
            groups.setdefault(group, []).append(norm)
    for group, parts in groups.items():
        # Squares add up over shards, norms do not.
        squares = torch.cat(parts).square()
        dist.all_reduce(squares, group=group)
        foreach_copy_(parts, list(squares.sqrt().split(1)))
