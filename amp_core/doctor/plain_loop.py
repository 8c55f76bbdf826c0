"""A window of any training loop computed without a trace: told of, not stepped, and everything put back."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_core.step.gradients import check_gradients, with_grads
from amp_core.step.report import Rehearsal, require_no_closure


@contextlib.contextmanager
def told(rehearsal: Rehearsal, nets: Iterable[nn.Module]) -> Iterator[None]:
    """Have `loss.backward()` tell the rehearsal, as `Amp` does, while no optimizer steps and no GradScaler updates."""
    params = [p for net in nets for p in net.parameters()]
    backward, update = torch.Tensor.backward, torch.amp.GradScaler.update
    held: dict[torch.optim.Optimizer, list[tuple[Tensor, Tensor]]] = {}

    def told_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        rehearsal.on_loss(loss)
        backward(loss, *args, **kwargs)
        pairs = [(p, p.grad) for p in params if p.grad is not None]
        check_gradients([grad for _, grad in pairs], scaled=False)
        for _, grad in pairs:
            rehearsal.add(~torch.isfinite(grad).all())
        if rehearsal.watcher is not None:
            rehearsal.watcher.on_gradients([p for p, _ in pairs], [grad for _, grad in pairs])

    def take_gradients(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        require_no_closure(optimizer)
        if args[1:] or kwargs:
            raise TypeError(f"{type(optimizer).__name__}.step() was given a closure; expected a step without one")
        held[optimizer] = list(zip(*with_grads(optimizer), strict=True))
        for param, _ in held[optimizer]:
            param.grad = None  # nothing to step

    def give_gradients(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for param, grad in held.pop(optimizer, ()):
            param.grad = grad

    def keep_scale(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
        state = scaler.state_dict()
        update(scaler, *args, **kwargs)
        scaler.load_state_dict(state)

    hooks = [
        register_optimizer_step_pre_hook(take_gradients),
        register_optimizer_step_post_hook(give_gradients),
    ]
    torch.Tensor.backward, torch.amp.GradScaler.update = told_backward, keep_scale  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():  # a compiled model says that it sees the hooks of the trace
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
            yield
    finally:
        torch.Tensor.backward, torch.amp.GradScaler.update = backward, update  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def kept(nets: Iterable[nn.Module]) -> Iterator[None]:
    """Inside there are no gradients. Afterwards gradients and buffers are as before, also those that were replaced."""
    modules = [module for net in nets for module in net.modules()]
    grads = [(p, p.grad) for module in modules for p in module.parameters(recurse=False)]
    buffers = [(m, name, b, b.clone()) for m in modules for name, b in m.named_buffers(recurse=False)]
    for param, _ in grads:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in grads:
            param.grad = grad
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                buffer.copy_(before)
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)


@contextlib.contextmanager
def with_zeros(tensor: Tensor) -> Iterator[None]:
    """Zeros in place of the non-finite numbers of a tensor."""
    kept = tensor.detach().clone()
    with torch.no_grad():
        tensor.nan_to_num_(0.0, 0.0, 0.0)
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(kept)


class RandomState:
    """A snapshot of the random generators that a window may use."""

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._device = device

    def restore(self) -> None:
        """Restore the snapshot."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
