"""Restore running statistics after a skipped step.

A batch that overflows in the forward pass puts inf into `running_mean` and NaN into `running_var` of every BatchNorm
behind it. Skipping the step protects the weights but not the statistics, and every later evaluation returns NaN. An
overflow only in the backward pass leaves the statistics of a batch that was not trained on.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amp_core.lowp.masters import master_params
from amp_core.step.gradients import same, weights_of
from amp_core.torch_private import buffers_of, foreach_copy_, passing_buffers_of

if TYPE_CHECKING:
    from amp_core.step.state import OptimizerState

logger = logging.getLogger("amp_recipes")

_Place = tuple[nn.Module, str]


class BufferGuard:
    """Snapshots a network's buffers at the first forward of a window and restores them after a skipped step.

    A window of the network begins with its first training forward that records a graph, or with the first of all where
    none does, as a generator's in its critic's window. What forwards under `torch.no_grad()` write before that, such as
    those of `torch.optim.swa_utils.update_bn`, is kept where it is finite, as is what `load_state_dict` loads.

    All buffers of the network's state are copied: BatchNorm writes its statistics without a trace in their version
    counters, so which ones change is not known. Left alone are buffers with `persistent=False`, such as masks and
    caches, those that a caller gives to `torch.func.functional_call`, and modules that have none when the guard is
    made. A buffer that a program replaces is guarded from the next window on. No host-device sync.

    Copies and pickles of the network are not guarded; those of `Amp` guard the copy of the network.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = weakref.ref(net)
        self._buffers: dict[_Place, Tensor] = {}
        """Those of the snapshot, which are flat in the groups."""
        self._groups: list[_Group] = []
        self._began: bool | None = None
        """Whether the forward pass that began the window recorded a graph; None: the window has not begun."""
        self._is_lent = self._is_noted = False
        self.was_called = False
        """In the present window."""
        self._modules = [m for m in net.modules() if buffers_of(m).keys() - passing_buffers_of(m)]
        self.has_buffers = bool(self._modules)
        if self.has_buffers:
            net.register_forward_pre_hook(CopySafeHook(self.arm))
        for module in self._modules:
            module.register_load_state_dict_post_hook(CopySafeHook(self._after_load))
        self._own = self._found()
        """The buffers between two forward passes."""
        self.parameters = frozenset(master_params(net))

    def __reduce__(self) -> Any:
        net = self._net()
        return BufferGuard, (nn.Identity() if net is None else net,)

    def _found(self) -> dict[_Place, Tensor]:
        return {
            (module, name): buffer
            for module in self._modules
            for name, buffer in buffers_of(module).items()
            if buffer is not None and name not in passing_buffers_of(module)
        }

    def _is_foreign(self, place: _Place, buffer: Tensor) -> bool:
        """Whether a buffer is a caller's, for one forward pass: another one of the same kind, not moved or cast."""
        own = self._own.get(place, buffer)
        return own is not buffer and (own.device, own.dtype) == (buffer.device, buffer.dtype)

    def arm(self, *_: Any) -> None:
        """Begin a window with a snapshot, unless one has begun. Called before each forward pass of the network."""
        began, records = self._began, torch.is_grad_enabled()
        # A window that began without a graph begins anew at the first forward pass with one.
        if (began is not None and began >= records) or not any(module.training for module in self._modules):
            return
        found = self._found()
        self.was_called, is_new = True, not same(found.values(), self._buffers.values())
        if is_new and any(self._is_foreign(*item) for item in found.items()):
            self._is_lent = True
            return
        self._began = records
        if is_new:
            self._buffers, self._own = found, self._own | found
            self._groups = [_Group(parts) for (parts,) in flat_groups((buffer,) for buffer in found.values())]
        for group in self._groups:
            if began is None or is_new:
                torch.cat(group.parts, out=group.kept)
            else:  # what forwards without a graph have spoilt comes from the batch that is trained on next
                now = torch.cat(group.parts, out=group.kept.new_empty(0))
                group.kept.copy_(torch.where(now.isfinite(), now, group.kept))

    def _after_load(self, module: nn.Module, keys: Any) -> None:
        self._began, self._own = None, self._found()

    @torch.no_grad()
    def settle(self, taken: Tensor | None, after: OptimizerState | None = None) -> None:
        """Keep what forward passes wrote if `taken` (0-d bool) or None, else restore the snapshot.

        `after` the step of an optimizer, if it owns weights of the network; None: at the end of the window.
        """
        # A discriminator's skipped step says nothing about the statistics of the generator.
        if after is not None and self.parameters.isdisjoint(weights_of(after.optimizer)):
            return
        if after is not None and not self.was_called and after.grads:
            self._note_bypass()
        began, self._began = self._began, None
        if began is None or taken is None:
            if began is not None or self._is_lent:
                self._own, self._is_lent = self._found(), False
            return
        for group in self._groups:
            moves = taken.to(group.kept.device, non_blocking=True)
            # where, not lerp: 0 * NaN is NaN.
            chosen = torch.where(moves, torch.cat(group.parts, out=group.kept.new_empty(0)), group.kept)
            foreach_copy_(group.parts, list(chosen.split(group.sizes)))
        for (module, name), buffer in self._buffers.items():
            now = buffers_of(module)[name]
            if now is not buffer and now is not None:  # a forward pass put a new tensor in its place
                moves = taken.to(now.device, non_blocking=True)
                self._own[module, name] = buffers_of(module)[name] = torch.where(moves, now, buffer.detach())

    def _note_bypass(self) -> None:
        """Log once that statistics are not guarded, since the module that was given is not the one that is called."""
        if not self._is_noted and any(module.training for module in self._modules):
            self._is_noted = True
            logger.warning(
                "a step was taken without a call of the guarded %s, so a skipped step does not restore its buffers; "
                "call amp.guard with the module that the training loop calls",
                type(self._net()).__name__,
            )


class CopySafeHook(functools.partial[None]):
    """Calls a function. In a copy or a pickle of the network it does nothing."""

    def __reduce__(self) -> Any:
        return CopySafeHook, (_ignore,)


def _ignore(*_: Any, **__: Any) -> None:
    pass


class _Group:
    """Flat buffers of one kind, and their snapshot."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts
        self.sizes = [len(part) for part in parts]
        self.kept = torch.cat(parts, out=parts[0].new_empty(0))  # autocast casts no `out`: bf16 refuses fp16 parts


def flat_groups(rows: Iterable[Sequence[Tensor]]) -> list[tuple[list[Tensor], ...]]:
    """The columns of rows of tensors, such as a buffer and its average, flat and for each kind together."""
    # A ResNet-50 has 159 buffers, each of which costs kernels. A row that is not contiguous is alone, in its shape.
    found: dict[Any, list[list[Tensor]]] = {}
    for i, row in enumerate(rows):
        flat = all(tensor.is_contiguous() for tensor in row)
        kind = (*((tensor.device, tensor.dtype) for tensor in row), None if flat else i)
        found.setdefault(kind, []).append([tensor.detach().view(-1) if flat else tensor.detach() for tensor in row])
    return [tuple(map(list, zip(*same_kind, strict=True))) for same_kind in found.values()]
