"""The gradients of an optimizer: found, checked, measured; and the backward pass that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq

import torch
from torch import Tensor

from amp_core.tensors import global_grad_norm, is_dtensor
from amp_core.torch_private import find, foreach_norm, version_of

_run_backward = find("torch.autograd.graph._engine_run_backward")


def with_grads(optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """The weights that have gradients, and the gradients."""
    params: list[Tensor] = []
    grads: list[Tensor] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            if grad is not None:
                params.append(param)
                grads.append(grad)
    return params, grads


def norm_of(grads: list[Tensor], zero: Tensor, *, sharded: bool) -> Tensor:
    """The global L2 norm, also of sharded gradients: 0-d float32.

    Not finite exactly when a gradient is not, up to 1e19. Sharded gradients need a reduction over ranks.

    Args:
        grads: on any devices.
        zero: 0-d, on the device of the result, and the result without gradients.
        sharded: whether there are DTensors among them.
    """
    if not grads:
        return zero.clone()
    if sharded:
        return global_grad_norm(grads, zero.device)
    norms = foreach_norm(grads)
    if {norm.device for norm in norms} != {zero.device}:
        norms = [norm.to(zero.device, non_blocking=True) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms)).float()


def check_gradients(grads: Sequence[Tensor], *, scaled: bool) -> bool:
    """Raise TypeError for unsupported gradients; return whether they are sharded."""
    for dtype in {grad.dtype for grad in grads}:
        if dtype in (torch.float16, torch.bfloat16) and scaled:
            raise TypeError(
                f"the weights are {dtype}, whose gradients cannot be unscaled without loss; keep them in "
                "float32 and let amp.autocast() cast: do not call model.half()"
            )
    if {grad.layout for grad in grads} - {torch.strided}:
        raise TypeError("sparse gradients are not supported; use sparse=False in the embedding")
    return {type(grad) for grad in grads} != {Tensor} and any(map(is_dtensor, grads))  # one call, if all are plain


def lay_out_gradients(params: Sequence[Tensor], grads: list[Tensor]) -> None:
    """Replace gradients that lie in memory in another way than their weights, in `grads` and in the weights.

    Fused kernels go through both in the order of memory. autograd makes no such gradient; a program that sets `.grad`
    may.
    """
    if not all(map(eq, map(Tensor.stride, params), map(Tensor.stride, grads))):
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if param.stride() != grad.stride():
                param.grad = grads[i] = torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def run_backward(loss: Tensor, seed: Tensor, retain_graph: bool, inputs: Sequence[Tensor] | None) -> None:
    """`torch.autograd.backward(loss, seed, ...)` of plain tensors.

    torch's function imports sympy to compare two shapes when it gets a gradient: half a second before the first step.
    """
    if (
        _run_backward is None
        or type(loss) is not Tensor
        or loss.shape != seed.shape
        or (inputs is not None and not inputs)
    ):
        torch.autograd.backward(loss, seed, retain_graph, inputs=inputs)
        return
    _run_backward(
        (loss,), (seed,), retain_graph, False, tuple(inputs or ()), allow_unreachable=True, accumulate_grad=True
    )


def grad_versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """A key that changes whenever a gradient of this optimizer is created or written."""
    return [(id(grad), version_of(grad)) for grad in with_grads(optimizer)[1]]


def not_finite(norm: Tensor) -> Tensor:
    """0-d float32: 1 where `norm` is inf or NaN, else 0, as fused optimizers take it."""
    return (norm - norm).ne_(0)  # 0 but for inf and NaN; fewer operators than isfinite and a cast
