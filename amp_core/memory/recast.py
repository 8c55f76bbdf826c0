"""Weight-cast recompute: cast weights to 16 bits again in the backward pass instead of saving the copies.

    recast = Recast(net.parameters())
    with recast.hooks():
        with amp.autocast():
            loss = loss_fn(net(inputs), targets)
        amp.backward(loss)

Autocast casts a weight and the matmul saves the copy for its backward pass: 2 bytes per weight, 162 MiB of GPT-2's 124
million. A cast reads 4 bytes and writes 2, which is little beside the matmul that follows. Results are bit-identical,
since a weight that changed in between is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_core.tensors import HALF
from amp_core.torch_private import base_of, is_missing, version_of


class Recast:
    """Hooks for saved tensors: in place of a 16-bit cast of one of these weights they save the weight."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        # Without a version counter a write cannot be detected.
        self._weights = set() if is_missing("torch.Tensor._version") else set(weights)

    def pack(self, tensor: Tensor) -> Any:
        """What to save in place of `tensor`; often itself."""
        if tensor.dtype not in HALF:
            return tensor
        copy = tensor if base_of(tensor) is None else base_of(tensor)
        weight = cast_weight(copy)
        # A weight that is cast twice has nodes in between, and a copy with other strides is a different tensor.
        if weight is None or weight not in self._weights or weight.stride() != copy.stride():
            return tensor
        version, dtype, view = version_of(weight), copy.dtype, (tensor.size(), tensor.stride(), tensor.storage_offset())

        def again() -> Tensor:
            if version_of(weight) != version:
                raise RuntimeError(
                    f"a weight of {tuple(weight.shape)} was changed between the forward and the backward pass that "
                    f"casts it again; step afterwards, or use perf.recast_weights=false"
                )
            return weight.detach().to(dtype).as_strided(*view)

        return again

    def unpack(self, kept: Any) -> Tensor:
        """The tensor again. RuntimeError: the weight has changed since."""
        return kept if isinstance(kept, Tensor) else kept()

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Around forward passes. Of nested hooks for saved tensors only the innermost act."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


def cast_weight(tensor: Tensor) -> Tensor | None:
    """The leaf of which `tensor` is a cast, or None. Views of the cast do not count."""
    node = tensor.grad_fn
    if node is None or "ToCopy" not in node.name():
        return None
    return getattr(node.next_functions[0][0], "variable", None)
