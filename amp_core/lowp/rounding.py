"""fp32 numbers kept in 16 bits without a bias: as a sum of two, or rounded up and down by chance."""

from __future__ import annotations

import torch
from torch import Tensor


def split(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two 16-bit tensors whose sum is `value` to about twice the digits of one. Splitting the sum gives the same two.

    Args:
        value: float32, of any shape. Its difference to the sum is at most 2^-17 of it (bfloat16).
        dtype: bfloat16 or float16.
    """
    low = value.to(dtype)
    # Once more, for ties: the remainder may have been rounded to just half of a last digit.
    value = low.float() + (value - low.float()).to(dtype)
    low = value.to(dtype)
    return low, (value - low.float()).to(dtype)


def round_stochastically(value: Tensor, noise: Tensor) -> Tensor:
    """fp32 to bfloat16, up with the probability that is the share cut off, so that the mean error is 0.

    What bfloat16 can hold, inf and NaN stay as they are.

    Args:
        value: float32, of any shape.
        noise: int32 from 0 to 65535, as many elements. Overwritten.
    """
    # Sign and magnitude: a carry out of the low half makes the next bfloat16 away from zero, for either sign.
    bits = noise.view(value.shape).add_(value.view(torch.int32)).bitwise_and_(-0x10000)
    return torch.where(value.isnan(), value, bits.view(torch.float32)).to(torch.bfloat16)


def noise_16bit(count: int, step: Tensor) -> Tensor:
    """[count] int32 from 0 to 65535: a function of `step` and the place alone, in integers.

    So it is the same on all devices and ranks, and there is no generator whose state would have to be saved. Mixes bits
    as lowbias32 of https://github.com/skeeto/hash-prospector does (public domain).

    Args:
        count: at most 2^31.
        step: 0-d int64 tensor.
    """
    places = torch.arange(count, dtype=torch.int32, device=step.device)
    # A hash of the step, not the step, or the next one's noise were this one's, moved by a place.
    return _mix(places.add_(_mix(step.to(torch.int32, copy=True)))).bitwise_and_(0xFFFF)


def _mix(x: Tensor) -> Tensor:
    x ^= (x >> 16) & 0xFFFF  # the shift copies the sign
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x
