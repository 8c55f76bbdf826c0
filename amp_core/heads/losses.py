"""The cross entropy of a large vocabulary, without ever holding all of its logits.

    give_loss(net.head, chunk=512)       # before `keep_fp32`, `Amp.prepare` and the layout: the head's class changes
    loss = net.head(hidden, targets)     # summed over the valid tokens; net.head(hidden) are logits as before

A vocabulary of 50,257 makes 300 KB of every token: 16-bit logits, fp32 ones, and their log-softmax, which waits for the
backward pass. Here a chunk of tokens is multiplied, reduced to one fp32 number per token and thrown away. The backward
pass multiplies once more, four products instead of three, and keeps what `hidden` has: 1.5 KB for a width of 768.

The other way, gradients computed in the forward pass (Liger's kernels, torch 2.13's `F.linear_cross_entropy`), saves
that product, and holds the weight's whole fp32 gradient from the forward pass on. Above all the loss scale is not known
there: a probability of 1/50,257 is subnormal in fp16, and a factor of one's own cannot fall after an overflow. Here
16-bit gradients have the numbers that they have without chunks, and overflow when those do.
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

    Products have the dtype of autocast, or without it that of `hidden`; all else is fp32, or float64 for such inputs.
    The gradient of the weight is summed over chunks in fp32. Never waits for the device.

    Args:
        hidden: floating point [..., D].
        weight: [V, D].
        targets: int64 [...], from 0 to V - 1 or `ignore_index`. Tokens without a target cost 0, also all of them.
        bias: [V].
        chunk: tokens whose logits are there at a time, at least 1.
        ignore_index: the target of tokens that do not count.

    Returns:
        A 0-d tensor, float32 or float64.

    Raises:
        RuntimeError: from a backward pass with `create_graph=True`.
    """
    device_type = hidden.device.type
    casts = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if casts else hidden.dtype
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    with torch.autocast(device_type, enabled=False):
        return _Loss.apply(rows, weight, bias, labels, chunk, ignore_index, dtype)  # type: ignore[return-value]


class LossHead(nn.Linear):
    """A last layer that gives logits, or with targets the loss. Made by `give_loss`."""

    chunk: int

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:
        """[..., in_features] to logits [..., out_features]; with int64 targets [...] to their summed cross entropy."""
        if targets is None:
            return super().forward(input)
        return linear_cross_entropy(input, self.weight, targets, self.bias, chunk=self.chunk)


def give_loss(head: nn.Linear, chunk: int) -> None:
    """Let a network's last layer compute the loss of `chunk` tokens at a time, in place: names and weights stay.

    In layout=fsdp its weights are gathered in fp32, and in amp=fp8 it multiplies in bfloat16.

    Raises:
        ValueError: the layer is another class than `nn.Linear` already.
    """
    if type(head) is not nn.Linear:
        raise ValueError(
            f"expected an nn.Linear, found {type(head).__name__}: call give_loss before what changes layers"
        )
    head.__class__ = LossHead
    head.chunk = chunk  # type: ignore[assignment]


class _Loss(torch.autograd.Function):
    """Of rows [N, D] with labels [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        ignore_index: int,
        dtype: torch.dtype,
    ) -> Tensor:
        low, rows = weight.to(dtype), hidden.to(dtype)
        exact = torch.float64 if dtype is torch.float64 else torch.float32
        valid = labels != ignore_index
        labels = labels.where(valid, 0)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        # Of a token that does not count infinity, with which its probabilities below are 0.
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
        ctx.chunk, ctx.dtypes = chunk, (dtype, exact, hidden.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a loss in chunks has no second derivative (create_graph=True); use recipe.loss_chunk=null"
            )
        rows, weight, bias, labels, log_sums = ctx.saved_tensors
        dtype, exact, hidden_dtype, _ = ctx.dtypes
        (grad,) = grads
        with torch.autocast(rows.device.type, enabled=False):
            low = weight.to(dtype)
            to_rows = torch.empty_like(rows, dtype=hidden_dtype) if ctx.needs_input_grad[0] else None
            to_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
            to_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and ctx.needs_input_grad[2] else None
            for start in range(0, len(rows), ctx.chunk):
                here = slice(start, start + ctx.chunk)
                slope = _logits(rows[here], low, bias, exact).sub_(log_sums[here, None]).exp_()
                counted = log_sums[here, None].isinf().logical_not_().to(exact)
                slope.scatter_add_(1, labels[here, None], counted.neg_())
                # The loss scale and the share of the tokens come in before 16 bits do.
                slope = slope.mul_(grad)
                if to_bias is not None:
                    to_bias += slope.sum(0)
                slope = slope.to(dtype)
                if to_rows is not None:
                    to_rows[here] = slope @ low
                if to_weight is not None:
                    _add_product(to_weight, slope.t(), rows[here])
        if to_weight is not None:
            to_weight = to_weight.to(weight.dtype)
        if to_bias is not None:
            to_bias = to_bias.to(ctx.dtypes[3])
        return to_rows, to_weight, to_bias, None, None, None, None


def _logits(rows: Tensor, low: Tensor, bias: Tensor | None, exact: torch.dtype) -> Tensor:
    """A new tensor [n, V] of dtype `exact`, as `nn.Linear` and a cast to it make them."""
    return F.linear(rows, low, None if bias is None else bias.to(low.dtype)).to(exact)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, each sum in fp32: CUDA's 16-bit products can leave theirs as they are, the CPU's round it."""
    if a.dtype is total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total += a @ b
