"""Gradient clipping. It always sees unscaled gradients: `Amp.step` calls it after unscaling.

By norm: Pascanu et al., https://arxiv.org/abs/1211.5063. Adaptive: Brock et al., https://arxiv.org/abs/2102.06171.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from amp_core.config import ClipConfig


@dataclass(frozen=True)
class Clip:
    """What to do with gradients that are too large. Made by `Clip.norm`, `Clip.value` or `Clip.adaptive`."""

    kind: str
    threshold: float

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold < float("inf"):
            raise ValueError(f"Clip.{self.kind}({self.threshold}): expected a positive finite number")

    @classmethod
    def norm(cls, max_norm: float) -> Clip:
        """Scale all gradients by max_norm / norm when their joint L2 norm is larger."""
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
        """The clipping that the `clip` group asks for."""
        thresholds = {"norm": config.max_norm, "value": config.max_value, "adaptive": config.factor}
        threshold = thresholds.get(config.name)
        return None if threshold is None else cls(config.name, threshold)

    def coefficient(self, norm: Tensor) -> Tensor:
        """norm: the factor for all gradients, a 0-d tensor of at most 1, from their 0-d joint norm."""
        return (self.threshold / (norm + 1e-6)).clamp_(max=1.0)

    def __call__(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """value and adaptive: change the unscaled gradients in place. Does not wait for the device.

        Args:
            params: the weights.
            grads: their gradients, in the same order and shapes.
        """
        if self.kind == "value":
            torch._foreach_clamp_min_(grads, -self.threshold)
            torch._foreach_clamp_max_(grads, self.threshold)
            return
        if self.kind != "adaptive":
            raise ValueError(f"Clip.{self.kind} is applied through its coefficient")
        for param, grad in zip(params, grads, strict=True):
            # A vector (bias, gain) is one unit; a matrix or kernel has one per output row.
            dims = tuple(range(1, grad.ndim)) or None
            weight_norm = _unit_norm(param.detach(), dims).clamp_(min=1e-3)
            grad_norm = _unit_norm(grad, dims).clamp_(min=1e-6)
            grad.mul_((self.threshold * weight_norm / grad_norm).clamp_(max=1.0))


def _unit_norm(tensor: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    return torch.linalg.vector_norm(tensor, dim=dims, keepdim=True)
