"""fp32 values in 16 bits: as upper and lower bits, or stochastically rounded, without bias."""

from __future__ import annotations

import torch
from torch import Tensor


def halve(value: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 nearest to fp32 numbers but NaN, and the 16 bits (int16) with which `whole` gives back every bit."""
    # Halves of a last digit round away from zero: with ties to even, 65,537 fp32 numbers round to one even bfloat16,
    # for which no 16 bits suffice. That differs for one number in 2^17.
    bits = value.contiguous().view(torch.int32)
    # As int16 a lower half from 0x8000 on is negative: there the upper half is rounded up, and `whole` takes it back.
    rest = bits.to(torch.int16)
    return (bits >> 16).add_(rest < 0).to(torch.int16).view(torch.bfloat16), rest


def whole(low: Tensor, rest: Tensor) -> Tensor:
    """The fp32 numbers that `halve` took apart."""
    high = low.contiguous().view(torch.int16).int().sub_((rest < 0).int())
    return ((high << 16) | (rest.int() & 0xFFFF)).view(torch.float32)


def round_stochastically(value: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 to bfloat16, up with the probability of the truncated fraction, so that the mean error is 0.

    Values representable in bfloat16, inf and NaN do not change. `noise`: as many int32 from 0 to 65535; overwritten.
    """
    # Sign and magnitude: a carry out of the low half makes the next bfloat16 away from zero, for either sign.
    # 16 random bits carry into the upper half with the probability of the lower half / 2^16.
    bits = noise.view(value.shape).add_(value.view(torch.int32)).bitwise_and_(-0x10000)
    return torch.where(value.isnan(), value, bits.view(torch.float32)).to(torch.bfloat16)


def noise_16bit(count: int, step: Tensor, start: int = 0) -> Tensor:
    """[count] int32 from 0 to 65535, a function of `step` (0-d int64) and the position only, from `start` on.

    The same on all devices and ranks, without a generator state to save.
    """
    first = (start + (1 << 31)) % (1 << 32) - (1 << 31)  # as int32, whose sums are those modulo 2^32
    places = torch.arange(count, dtype=torch.int32, device=step.device).add_(first)
    # A hash of the step: with the step itself the next noise would be this one shifted by one position.
    return _mix(places.add_(_mix(step.to(torch.int32, copy=True)))).bitwise_and_(0xFFFF)


def _mix(x: Tensor) -> Tensor:
    # lowbias32 of https://github.com/skeeto/hash-prospector (public domain).
    x ^= (x >> 16) & 0xFFFF  # the shift extends the sign
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x
