"""Numbers of 8, 6 and 4 bits that share a scale: elements, scales, and rounding to them.

    low = quantise(x, Scaling(E2M1, (1, 32), "e8m0"))     # MXFP4: 32 elements of a row share a power of two
    low.dense()                                           # fp32 again

A `Scaling` says which elements share a scale and what the scale is stored in:

| format | elements | share a scale | the scale |
| --- | --- | --- | --- |
| fp8 | E4M3, gradients E5M2 | a tensor, a row, 1 x 128, or 128 x 128 | fp32: the largest becomes the largest element |
| mxfp8, mxfp6, mxfp4 | E4M3, E3M2, E2M1 | 32 of a row | E8M0, a power of two |
| nvfp4 | E2M1 | 16 of a row, or 16 x 16 | E4M3, and fp32 for the tensor |

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433); OCP Microscaling Formats (MX) v1.0;
NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149), appendix C.

What is not finite stays visible: where a block holds inf or NaN its scale is NaN, so products are NaN and the step is
skipped. A cast alone hides it: E4M3 has no inf, and since torch 2.13 a cast saturates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Element:
    """A floating-point number of a sign, `exponent` bits and `mantissa` bits; no inf is stored."""

    exponent: int
    mantissa: int
    largest: float
    dtype: torch.dtype | None = None
    """torch's, whose cast rounds as `round_to` does and is faster."""

    @property
    def least(self) -> int:
        """The exponent of the smallest normal number, and of all subnormal ones."""
        return 2 - 2 ** (self.exponent - 1)


E4M3 = Element(4, 3, 448.0, torch.float8_e4m3fn)
E5M2 = Element(5, 2, 57344.0, torch.float8_e5m2)
E3M2 = Element(3, 2, 28.0)
E2M1 = Element(2, 1, 6.0)


@dataclass(frozen=True)
class Scaling:
    """How a matrix is stored."""

    element: Element
    block: tuple[int | None, int | None]
    """Rows and columns of the elements that share a scale; None: all of them."""
    scale: Literal["fp32", "e8m0", "nvfp4"] = "fp32"
    rule: Literal["floor", "rceil"] = "rceil"
    """e8m0: floor is OCP's, floor(log2 max) less the element's largest exponent; it saturates what lies between the
    largest element and the next power of two. rceil rounds max / largest up to a power of two."""

    @property
    def is_square(self) -> bool:
        """Whether a matrix and its transpose have the same codes."""
        return self.block[0] == self.block[1]

    def t(self) -> Scaling:
        """That of the transpose."""
        return replace(self, block=self.block[::-1])


class Low(NamedTuple):
    """A stored matrix: `values` [R, C] of elements, and the fp32 `scale` by which to multiply, for blocks of it."""

    values: Tensor
    scale: Tensor
    """[R / rows, 1, C / columns, 1]."""

    def dense(self) -> Tensor:
        """fp32 [R, C]."""
        return (_blocked(self.values.float(), self.scale) * self.scale).view_as(self.values)

    def t(self) -> Low:
        return Low(self.values.t().contiguous(), self.scale.permute(2, 1, 0, 3))


def quantise(x: Tensor, how: Scaling, *, stochastic: bool = False) -> Low:
    """`x` [R, C], rounded to nearest even, or up with the probability of the fraction. No host-device sync.

    Zeros stay zeros. What is larger than the largest element of its block's scale saturates. Stochastic noise comes
    from the device's default generator: seed it with the rank and the step, as a run does, and each rank, layer and
    micro-batch draws its own. ValueError: a size is no multiple of the block's.
    """
    rows, columns = (size if block is None else block for size, block in zip(x.shape, how.block, strict=True))
    if x.shape[0] % rows or x.shape[1] % columns:
        raise ValueError(f"a matrix of {x.shape[0]} x {x.shape[1]} has no blocks of {rows} x {columns}")
    x = x.float().contiguous()
    blocks = x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    # A norm propagates NaN on all devices.
    peak = torch.linalg.vector_norm(blocks, torch.inf, dim=(1, 3), keepdim=True)
    if how.scale == "fp32":
        # The bound keeps the quotient finite for zeros, and lets inf and NaN through.
        scale = peak.clamp(min=1e-30) / how.element.largest
        quotients = blocks / scale
    elif how.scale == "e8m0":
        exponent = _shared_exponent(peak, how)
        power = _power(exponent.clamp(min=-126)) * (1 - 0.5 * (exponent < -126))  # 2^-127 is subnormal
        scale = torch.where(peak.isfinite(), power, torch.nan)
        # A finite block's exponent is at most 126, since every element type reaches 4: no factor is subnormal.
        quotients = blocks * _power(-exponent)
    else:
        scale, quotients = _two_levels(blocks, peak, how.element)
    return Low(_store(quotients, how.element, stochastic).view_as(x), scale)


def _shared_exponent(peak: Tensor, how: Scaling) -> Tensor:
    """The exponent of the power of two that a block shares, from -127 to 127."""
    largest = torch.tensor(how.element.largest, device=peak.device)
    shared = _exponent(peak) - _exponent(largest)
    if how.rule == "rceil":  # from the bits: a quotient in fp32, or its log2, would round 1 + 2^-23 to 1
        shared += _fraction(peak) > _fraction(largest)
    return shared.clamp_(-127, 127)


def _two_levels(blocks: Tensor, peak: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """NVFP4: E4M3 scales of blocks, relative to an fp32 scale that maps the tensor's largest to 448 times 6."""
    # s_enc of appendix C. A block's scale, s_enc * peak / 6 in E4M3, is then 448 for the block with the tensor's peak.
    encode = element.largest * E4M3.largest / peak.amax().clamp(min=1e-30)
    local = _store(peak / element.largest * encode, E4M3, False).float()
    scale = torch.where(peak.isfinite(), local / encode, torch.nan)
    # A block whose scale rounds to 0 is 0: its elements would be below 2^-11 of the tensor's largest.
    return scale, torch.where(local > 0, blocks * (encode / local), 0.0)


def _store(quotients: Tensor, element: Element, stochastic: bool) -> Tensor:
    clamped = quotients.clamp(-element.largest, element.largest)
    if element.dtype is not None and not stochastic:
        return clamped.to(element.dtype)
    values = round_to(clamped, element, torch.rand_like(clamped) if stochastic else None)
    return values if element.dtype is None else values.to(element.dtype)


def round_to(x: Tensor, element: Element, noise: Tensor | None = None) -> Tensor:
    """fp32 `x`, at most the largest element, as the nearest element, ties to even; with `noise` in [0, 1)
    stochastically, without bias."""
    # Between powers of two elements are 2^(exponent - mantissa) apart, and below the smallest normal one, too.
    exponent = _exponent(x).clamp_(min=element.least).sub_(element.mantissa)
    steps = x * _power(-exponent)
    # floor(s + u), u uniform in [0, 1), is the upper neighbour with the probability of the fraction of s.
    steps = steps.round_() if noise is None else steps.add_(noise).floor_()
    return steps.mul_(_power(exponent))


def _exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|) of fp32, int32, exact; -127 of zero and what is subnormal."""
    return (x.view(torch.int32) >> 23).bitwise_and_(0xFF).sub_(127)


def _fraction(x: Tensor) -> Tensor:
    return x.view(torch.int32).bitwise_and(0x7FFFFF)


def _power(exponent: Tensor) -> Tensor:
    """2^exponent in fp32, from -126 to 127, made of its bits: `exp2` and `ldexp` round as a device likes."""
    return (exponent + 127).bitwise_left_shift_(23).view(torch.float32)


def _blocked(x: Tensor, scale: Tensor) -> Tensor:
    rows, _, columns, _ = scale.shape
    return x.view(rows, x.shape[0] // rows, columns, x.shape[1] // columns)
