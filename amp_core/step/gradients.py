"""The gradients of an optimizer: found, checked, measured; and the backward pass that makes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter, eq, is_

import torch
from torch import Tensor

from amp_core.tensors import HALF, global_grad_norm, is_dtensor, is_state_sharded, local
from amp_core.torch_private import find, foreach_norm

_run_backward = find("torch.autograd.graph._engine_run_backward")
_device, _traits = attrgetter("device"), attrgetter("__class__", "dtype", "layout")


def weights_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All weights of an optimizer."""
    return (param for group in optimizer.param_groups for param in group["params"])


def with_grads(optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """The weights that have gradients, and the gradients."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    return params, [param.grad for param in params]


def same(some: Collection[object], others: Collection[object]) -> bool:
    """Whether both hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def norm_of(grads: list[Tensor], zero: Tensor, *, sharded: bool) -> Tensor:
    """The global L2 norm: 0-d float32 on the device of `zero`, the result without gradients. `sharded`: collective."""
    if not grads:
        return zero.clone()
    if sharded:
        return global_grad_norm(grads, zero.device)
    # The norm of the norms is that of all: not finite exactly when a gradient is not, up to 1.8e19, whose square is
    # beyond fp32.
    norms = foreach_norm(grads)
    if set(map(_device, norms)) != {zero.device}:
        norms = [norm.to(zero.device, non_blocking=True) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms)).float()


def check_gradients(grads: list[Tensor], *, scaled: bool, optimizer: torch.optim.Optimizer | None = None) -> bool:
    """Raise TypeError for unsupported gradients; return whether they are sharded. Sparse ones: `take_values`."""
    # A set: most networks have one kind, and the loop below runs once, whatever the number of weights.
    kinds = set(map(_traits, grads))
    for _, dtype, layout in kinds:
        if dtype in HALF and scaled:
            raise TypeError(
                f"the weights are {dtype}, whose gradients cannot be unscaled without loss; keep them in float32 and "
                f"let amp.autocast() cast: do not call model.half(). amp.prepare(model) names them"
            )
        if layout is not torch.strided:
            take_values(optimizer, grads)
    return any(kind is not Tensor for kind, _, _ in kinds) and any(map(is_dtensor, grads))


def take_values(optimizer: torch.optim.Optimizer | None, grads: list[Tensor]) -> None:
    """Coalesce sparse gradients, and replace them in `grads` by their values. TypeError: they cannot be stepped."""
    if optimizer is None or any(grad.layout not in (torch.strided, torch.sparse_coo) for grad in grads):
        raise TypeError("sparse gradients are not supported here; use sparse=False in the embedding")
    what = "layout.shard_optimizer=true" if is_state_sharded(optimizer) else ""
    if any(group.get("fused") for group in optimizer.param_groups):
        what = f"the fused step of {type(optimizer).__name__}; use fused=False"
    if what:
        raise TypeError(f"sparse gradients do not fit {what}, or use sparse=False in the embedding")
    for i, param in enumerate(with_grads(optimizer)[0]):
        if grads[i].layout is torch.sparse_coo:
            # The norm is that of the gradient only once values with the same index are summed. In the weight, too,
            # which the optimizer reads; values are dense, in the same memory.
            param.grad = grads[i].coalesce()
            grads[i] = param.grad.values()


def lay_out_gradients(params: Sequence[Tensor], grads: list[Tensor]) -> None:
    """Give gradients that a program has set the strides of their weights: fused kernels go through memory in order."""
    if not all(map(eq, map(Tensor.stride, params), map(Tensor.stride, grads))):
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if param.grad is grad and param.stride() != grad.stride():  # else the values of a sparse one
                param.grad = grads[i] = torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def run_backward(loss: Tensor, initial: Tensor, retain_graph: bool, inputs: Sequence[Tensor] | None) -> None:
    """`torch.autograd.backward`, which imports sympy to compare two shapes: half a second before the first step."""
    no_inputs = inputs is not None and not inputs
    if _run_backward is None or type(loss) is not Tensor or loss.shape != initial.shape or no_inputs:
        torch.autograd.backward(loss, initial, retain_graph, inputs=inputs)
    else:
        inputs = tuple(inputs or ())
        _run_backward((loss,), (initial,), retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=True)


def not_finite(norm: Tensor, zero: Tensor) -> Tensor:
    """0-d float32: 1 where `norm` is inf or NaN, else 0, as fused optimizers take it."""
    return (norm - norm).ne_(zero)  # 0, or NaN for inf and NaN; fewer operators than isfinite and a cast


def at_least_fp32(tensor: Tensor) -> Tensor:
    """In float32 or complex64, unless it is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def as_scalar(loss: Tensor) -> Tensor:
    """A loss of one element as a 0-d tensor. ValueError: it has more."""
    if loss.numel() == 1:
        return loss.reshape(())
    expected = "expected a scalar; reduce it, as by loss.mean(), or pass a gradient of its shape"
    raise ValueError(f"amp.backward: the loss has the shape {list(loss.shape)}, {expected}")


def zero_or_nan(loss: Tensor, like: Tensor) -> Tensor:
    """0 of a finite loss, else NaN, with the dtype and device of `like`."""
    mine = local([loss])[0]
    return (mine - mine).to(like, non_blocking=True)
