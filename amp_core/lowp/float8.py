"""Linear layers that multiply in float8 under autocast (Micikevicius et al., arXiv:2209.05433).

    left_alone = use_float8(net)            # [(name, reason)]; weights, names and checkpoints do not change
    with torch.autocast("cuda", torch.bfloat16):
        loss = net(inputs)                  # the rest computes in bfloat16

Inputs and weights become e4m3 (3 bits after the point, up to 448), gradients e5m2 (2 bits, up to 57344), each tensor
with its own scale, which maps its largest element to the end of the range. Products are summed in fp32.

On a GPU of compute capability 8.9 and higher (Ada, Hopper) the matmuls run on float8 units; elsewhere they are
emulated: the same numbers multiplied in fp32, which is slower than bfloat16 and only shows the accuracy.

A cast to e4m3 saturates (since torch 2.13; before, it makes NaN): inf becomes 448, and an overflow would pass
the finite check of gradients. Here the scale of a tensor that holds inf or NaN is not finite either, so the product is
NaN and the step is skipped.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core.lowp.islands import island_names
from amp_core.torch_private import find

_scaled_mm = find("torch._scaled_mm")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of both sizes of a layer, for the float8 units


def use_float8(net: nn.Module, patterns: Iterable[str] = ("*",)) -> list[tuple[str, str]]:
    """Make linear layers of `net` whose names match a glob multiply in float8 under autocast, in place.

    Call it after `keep_fp32`. Only the class of a layer changes: weights and names stay, copies and pickles work.
    Returns (name, reason) of the matching linear layers that are not converted. ValueError: a pattern matches no linear
    layer, or no layer can be converted.
    """
    linears = {name: module for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    chosen = {}
    for pattern in patterns:
        found = fnmatch.filter(linears, pattern)
        if not found:
            raise ValueError(f"float8: {pattern!r} matches none of the linear layers: {', '.join(linears) or 'none'}")
        chosen |= dict.fromkeys(found)
    islands = island_names(net)
    left_alone = []
    for name in chosen:
        reason = _obstacle(name, linears[name], islands)
        if reason:
            left_alone.append((name, reason))
        else:
            linears[name].__class__ = Float8Linear
    if len(left_alone) == len(chosen):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_alone)
        raise ValueError(f"float8: no linear layer can be converted. {reasons}")
    return left_alone


def _obstacle(name: str, layer: nn.Linear, islands: list[str]) -> str | None:
    if any(island in ("", name) or name.startswith(f"{island}.") for island in islands):
        return "it is part of an fp32 island"
    if type(layer) is not nn.Linear:
        return None if type(layer) is Float8Linear else f"it is a {type(layer).__name__}, with a forward of its own"
    sizes = {"inputs": layer.in_features, "outputs": layer.out_features}
    odd = [f"{size} {what}" for what, size in sizes.items() if size % MULTIPLE]
    return f"{' and '.join(odd)}: no multiple of {MULTIPLE}" if odd else None


def float8_is_emulated(device: str | torch.device) -> bool:
    """Whether `device` has no float8 units and results are emulated in fp32."""
    device = torch.device(device)
    return device.type != "cuda" or _scaled_mm is None or torch.cuda.get_device_capability(device) < (8, 9)


class Float8Linear(nn.Linear):
    """An `nn.Linear` that multiplies in float8 under autocast and in fp32 without. Made by `use_float8`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the dtype of autocast."""
        device_type = input.device.type
        if not torch.is_autocast_enabled(device_type) or not input.numel():  # an empty tensor has no maximum
            return super().forward(input)
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            rows = input.reshape(-1, self.in_features)
            # The weight gradient sums over rows, which must be a multiple too.
            missing = -len(rows) % MULTIPLE
            padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
            output: Tensor = _Product.apply(padded, self.weight, dtype)  # type: ignore[assignment]
            output = output[: len(rows)].view(*input.shape[:-1], self.out_features)
            return output if self.bias is None else output + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    """rows [M, K] times weight [N, K], transposed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        x, x_scale = quantise(rows, E4M3)
        w, w_scale = quantise(weight, E4M3)
        ctx.save_for_backward(x, x_scale, w, w_scale)
        ctx.dtypes = rows.dtype, weight.dtype
        return multiply(x, x_scale, w, w_scale, dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("float8 layers have no second derivative (create_graph=True); use amp=bf16 here")
        x, x_scale, w, w_scale = ctx.saved_tensors
        g, g_scale = quantise(grads[0], E5M2)
        to_rows = to_weight = None
        if ctx.needs_input_grad[0]:
            to_rows = multiply(g, g_scale, w.t().contiguous(), w_scale, ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            to_weight = multiply(g.t().contiguous(), g_scale, x.t().contiguous(), x_scale, ctx.dtypes[1])
        return to_rows, to_weight, None


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` in float8, and the 0-d fp32 factor by which to multiply it. No host-device sync.

    Finite values never overflow, and zeros stay zeros. If `x` is not finite, neither is the factor.
    """
    largest = torch.finfo(dtype).max
    # The bound keeps the reciprocal finite for zeros, and propagates inf and NaN.
    factor = torch.linalg.vector_norm(x, torch.inf).float().clamp(min=1e-30) / largest
    return (x.float() / factor).clamp(-largest, largest).to(dtype), factor


def multiply(
    a: Tensor, a_factor: Tensor, b: Tensor, b_factor: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """a [M, K] times b [N, K], transposed; both contiguous and float8, not both e5m2. Factors are those of `quantise`.

    `fast` lets Hopper accumulate with fewer bits, enough for the forward pass but not for gradients.
    """
    if float8_is_emulated(a.device):
        # TF32 suffices: float8 has fewer digits.
        return (a.float() @ b.float().t() * (a_factor * b_factor)).to(dtype)
    return _scaled_mm(a, b.t(), scale_a=a_factor, scale_b=b_factor, out_dtype=dtype, use_fast_accum=fast)
