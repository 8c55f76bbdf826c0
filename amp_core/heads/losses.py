"""Cross entropy over a large vocabulary, without materialising all logits.

    give_loss(net.head, chunk=512)       # before `keep_fp32`, `Amp.prepare` and the layout: the head's class changes
    loss = net.head(hidden, targets)     # summed over the valid tokens; net.head(hidden) are logits as before

A vocabulary of 50,257 takes 300 KB per token: 16-bit logits, fp32 logits, and their log-softmax, saved for the backward
pass. Here the logits of a chunk of tokens are computed, reduced to one fp32 number per token and discarded. The
backward pass computes them again, four matmuls instead of three, and saves only `hidden`: 1.5 KB for a width of 768.

The alternative, gradients computed in the forward pass (Liger's kernels, torch 2.13's `F.linear_cross_entropy`), saves
that matmul, but holds the weight's fp32 gradient from the forward pass on, and does not know the loss scale: a
probability of 1/50,257 is subnormal in fp16, and a separate factor would not fall after an overflow. Here 16-bit
gradients are those without chunks, and overflow when those do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, chunk: int, ignore_index: int = -100
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, reduction="sum")`, `chunk` tokens at a time.

    Matmuls run in the autocast dtype, or without autocast in that of `hidden`; the rest is fp32, or float64 for float64
    inputs. The weight gradient is summed over chunks in fp32. No host-device sync.

    Args:
        hidden: floating point [..., D]; `weight` is [V, D], `bias` [V].
        targets: int64 [...], from 0 to V - 1 or `ignore_index`. Ignored tokens have loss 0, also if all are ignored.
        chunk: tokens whose logits are materialised at a time, at least 1.

    Returns:
        A 0-d tensor, float32 or float64. Its backward pass raises RuntimeError with `create_graph=True`.
    """
    device_type = hidden.device.type
    casts = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if casts else hidden.dtype
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    with torch.autocast(device_type, enabled=False):
        return _Loss.apply(rows, weight, bias, labels, (chunk, ignore_index, dtype))  # type: ignore[return-value]


class LossHead(nn.Linear):
    """A last layer that returns logits, or the loss if it gets targets. Made by `give_loss`."""

    chunk: int

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:
        """[..., in_features] to logits [..., out_features]; with int64 targets [...] to the summed cross entropy."""
        if targets is None:
            return super().forward(input)
        return linear_cross_entropy(input, self.weight, targets, self.bias, chunk=self.chunk)


def give_loss(head: nn.Linear, chunk: int) -> None:
    """Make a network's last layer compute the loss of `chunk` tokens at a time, in place: names and weights stay.

    In layout=fsdp its weights are gathered in fp32, and in amp=fp8 it multiplies in bfloat16. ValueError: the layer's
    class is not `nn.Linear`.
    """
    if type(head) is not nn.Linear:
        raise ValueError(
            f"expected an nn.Linear, found {type(head).__name__}: call give_loss before what changes layers"
        )
    head.__class__ = LossHead
    head.chunk = chunk  # type: ignore[assignment]


class _Loss(torch.autograd.Function):
    """The summed loss of rows [N, D] with labels [N]; `how`: chunk, ignored label, dtype of the matmuls."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: tuple[int, int, torch.dtype]
    ) -> Tensor:
        chunk, ignore_index, dtype = how
        low, rows = weight.to(dtype), hidden.to(dtype)
        exact = torch.float64 if dtype is torch.float64 else torch.float32
        valid = labels != ignore_index
        labels = labels.where(valid, 0)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        # Infinity for an ignored token, so that its probabilities below are 0.
        log_sums = torch.full(labels.shape, torch.inf, dtype=exact, device=hidden.device)
        for start in range(0, len(rows), chunk):
            here = slice(start, start + chunk)
            logits = _logits(rows[here], low, bias, exact)
            picked = logits.gather(1, labels[here, None])[:, 0]
            largest = logits.amax(1)
            sums = logits.sub_(largest[:, None]).exp_().sum(1).log_().add_(largest)
            total += (sums - picked).where(valid[here], 0).sum()
            log_sums[here] = sums.where(valid[here], torch.inf)
        ctx.save_for_backward(rows, weight, bias, labels, log_sums)
        ctx.chunk, ctx.dtypes = chunk, (dtype, exact, hidden.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a loss in chunks has no second derivative (create_graph=True); use recipe.loss_chunk=null"
            )
        rows, weight, bias, labels, log_sums = ctx.saved_tensors
        dtype, exact, hidden_dtype = ctx.dtypes
        (grad,) = grads
        with torch.autocast(rows.device.type, enabled=False):
            low = weight.to(dtype)
            to_rows = torch.empty_like(rows, dtype=hidden_dtype) if ctx.needs_input_grad[0] else None
            to_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
            to_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and ctx.needs_input_grad[2] else None
            for start in range(0, len(rows), ctx.chunk):
                here = slice(start, start + ctx.chunk)
                # softmax - one_hot; for an ignored token both are 0: exp(-inf), and not counted.
                slope = _logits(rows[here], low, bias, exact).sub_(log_sums[here, None]).exp_()
                counted = log_sums[here, None].isinf().logical_not_().to(exact)
                slope.scatter_add_(1, labels[here, None], counted.neg_())
                # Apply the loss scale and the token weights before casting to 16 bits.
                slope = slope.mul_(grad)
                if to_bias is not None:
                    to_bias += slope.sum(0)
                slope = slope.to(dtype)
                if to_rows is not None:
                    to_rows[here] = slope @ low
                if to_weight is not None:
                    _add_product(to_weight, slope.t(), rows[here])
        return to_rows, to_weight, to_bias, None, None  # which autograd casts to the dtypes of the inputs


def _logits(rows: Tensor, low: Tensor, bias: Tensor | None, exact: torch.dtype) -> Tensor:
    """A new tensor [n, V] of dtype `exact`: the output of `nn.Linear`, cast."""
    return F.linear(rows, low, None if bias is None else bias.to(low.dtype)).to(exact)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, accumulated in fp32: CUDA's 16-bit matmuls can return fp32 sums, the CPU's round them."""
    if a.dtype is total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total += a @ b
