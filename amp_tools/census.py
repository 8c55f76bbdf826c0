"""The 16-bit numbers of a window: how large each result is, by operation and module.

`Census` is a dispatch mode. It measures what autocast to bf16 computes and, when asked,
rounds small numbers as fp16 does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amp_core.checkpoints.plain_state import all_tensors
from amp_core.doctor.operations import UNWRITTEN, is_view
from amp_core.doctor.places import Location, current_node, last_node
from amp_core.doctor.trace import Trace
from amp_core.doctor.values import storage_key
from amp_core.memory.recompute import recomputed
from amp_core.step.observer import Observer, observing
from amp_core.tensors import HALF

if TYPE_CHECKING:
    from amp_core.step.amp import Amp

LARGEST = 65504.0
"""In fp16."""
_FLOAT8 = {False: (448.0, 2.0**-10), True: (57344.0, 2.0**-17)}
"""Forward e4m3, backward e5m2: the largest number, and what is rounded to 0."""
_MASK = 2.0**100
"""What is larger stands for infinity, such as bf16's `finfo.min` in an attention mask, and would be fp16's there."""
_WRITES = {"full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "where"}
"""A large number that the program writes down itself, as in an attention mask, is none that it has computed."""
_NORMAL = 2.0**-14
"""What is smaller has fewer digits in fp16, down to none."""
_ZERO, _NOT_FINITE, _BIAS = 1, 510, 127


@dataclass
class Numbers:
    """How large the numbers of one or several tensors are, exactly."""

    counts: Tensor
    """int64 [512] on the CPU: at 2 * (exponent + 127), and one further for the power of two itself; 0 is at 1."""
    amax: float = 0.0
    lost_float8: int = 0
    """How many that are not 0 become 0 in float8, each tensor scaled by its largest."""

    @classmethod
    def none(cls) -> Numbers:
        return cls(torch.zeros(512, dtype=torch.int64))

    @classmethod
    def of(cls, tensor: Tensor, *, backward: bool = False) -> Numbers:
        """Waits for the device."""
        values = tensor.detach().float().abs().flatten()
        bits = values.view(torch.int32)
        counts = torch.bincount(((bits >> 23) << 1) + ((bits & 0x7FFFFF) == 0), minlength=512).cpu()
        amax = torch.where(values < _MASK, values, 0.0).max().item() if len(values) else 0.0
        largest, lost = _FLOAT8[backward]
        return cls(counts, amax, int(((values > 0) & (values <= lost * (amax / largest))).sum()))

    def add(self, other: Numbers) -> None:
        self.counts = self.counts + other.counts
        self.amax = max(self.amax, other.amax)
        self.lost_float8 += other.lost_float8

    @property
    def zeros(self) -> int:
        return int(self.counts[_ZERO])

    @property
    def not_zero(self) -> int:
        return int(self.counts.sum()) - self.zeros

    @property
    def headroom(self) -> float:
        """Bits between the largest number and fp16's."""
        return math.log2(LARGEST / self.amax) if self.amax else math.inf

    def lost(self, limit: float) -> float:
        """The share of the non-zero numbers up to a power of two."""
        at = 2 * (round(math.log2(limit)) + _BIAS)
        lost = int(self.counts[:at].sum()) - self.zeros + int(self.counts[at + 1])
        return lost / max(self.not_zero, 1)

    @property
    def exponents(self) -> dict[int, float]:
        """The share of the non-zero numbers by exponent; -127 holds the subnormal ones of bf16."""
        pairs = self.counts.view(-1, 2).sum(1)
        pairs[0] -= self.zeros
        return {i - _BIAS: n / self.not_zero for i, n in enumerate(pairs[: _NOT_FINITE // 2].tolist()) if n}

    def to_dict(self) -> dict[str, Any]:
        total = int(self.counts.sum())
        return {
            "amax": self.amax,
            "headroom": self.headroom,
            "numbers": total,
            "zeros": self.zeros / max(total, 1),
            "not_finite": int(self.counts[_NOT_FINITE:].sum()),
            "exponents": {str(e): share for e, share in self.exponents.items()},
            "underflow_float8": self.lost_float8 / max(self.not_zero, 1),
            "subnormal_bf16": int(self.counts[0]) / max(self.not_zero, 1),
        }


@dataclass(eq=False)
class _FirstGradients(Observer):
    keys: set[int]

    def on_backward(self, gradient: Tensor) -> None:
        self.keys.add(storage_key(gradient))


@dataclass(eq=False)
class Look:
    """The 16-bit result of one operation."""

    kind: str
    module: str | None
    place: Location
    op: str
    numbers: Numbers
    is_first: bool
    """Too large for fp16, and made of numbers that are not."""
    island: str | None
    """The module that is to compute in fp32 then."""


class Census(Trace):
    """Measures every 16-bit result inside of `with census:`; waits for the device at each.

    Args:
        imitate: a loss scale: small numbers are rounded as in fp16 at this scale, many of them to 0. None: none are.
    """

    def __init__(self, names: Mapping[nn.Module, str], *, imitate: float | None = None) -> None:
        super().__init__(names, {})
        self.looks: list[Look] = []
        self._imitate = imitate
        self._owners = {
            storage_key(p): name for module, name in names.items() for p in module.parameters(recurse=False)
        }
        self._casts: dict[int, str] = {}
        self._beyond: set[int] = set()
        self._last: dict[int, Look] = {}
        self._cast_back: dict[int, Look] = {}
        self._gradients: set[int] = set()

    @contextmanager
    def counting(self, amp: Amp) -> Iterator[None]:
        """`with census:`, and hears from `amp` which tensor is the first gradient."""
        with observing(amp.observers, _FirstGradients(self._gradients)), self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not hasattr(func, "_schema"):  # given functions, as torch.cond is
            return super().__torch_dispatch__(func, types, args, kwargs)
        if self._pauses or "c10d" in func.namespace:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        node = current_node()
        place = self.places.of(node, name)
        inputs = list(all_tensors((args, kwargs)))
        is_cast, owner = name == "_to_copy" and bool(inputs), None  # torch.func casts numbers, too
        if is_cast and node is None:
            owner = self._owners.get(storage_key(inputs[0]))
            if owner is not None and inputs[0].requires_grad and torch.is_grad_enabled():
                self._casts.setdefault(last_node(), owner)
        elif is_cast and node is not None and node._sequence_nr() in self._casts:
            # The gradient of a 16-bit weight on its way back to fp32.
            look = self._last.get(storage_key(inputs[0]))
            if look is not None:
                look.kind, look.module = "weight_gradients", self._casts[node._sequence_nr()]
        for tensor in inputs if node is not None else ():
            # A gradient too large for a cast back to 16 bits: what helps is that the number itself was never cast.
            if storage_key(tensor) in self._cast_back and place.module is not None:
                self._cast_back.pop(storage_key(tensor)).island = place.module
        is_after = any(storage_key(tensor) in self._beyond for tensor in inputs if tensor.dtype in HALF)
        # What a backward pass recomputes is no gradient: a loss scale does not make it larger.
        is_seed = name == "ones_like" and node is None and inputs[0].numel() == 1  # what `autograd.grad` begins with
        is_gradient = is_seed or any(storage_key(tensor) in self._gradients for tensor in inputs)
        result = func(*args, **kwargs)
        if is_view(func):
            return result
        for tensor in all_tensors(result):
            (self._gradients.add if is_gradient else self._gradients.discard)(storage_key(tensor))
        if name in UNWRITTEN:
            return result
        for tensor in all_tensors(result):
            if tensor.dtype in HALF and tensor.numel():
                # What is cast is known more exactly before.
                exact = inputs[0] if is_cast and inputs[0].is_floating_point() else tensor
                self._measure(name, place, tensor, exact, owner, node is not None and is_gradient, is_after)
        return result

    def _measure(
        self,
        name: str,
        place: Location,
        tensor: Tensor,
        exact: Tensor,
        owner: str | None,
        backward: bool,
        is_after: bool,
    ) -> None:
        if self._imitate is not None:
            scaled = exact.detach().float() * (self._imitate if backward else 1.0)
            rounded = scaled.half().float() / (self._imitate if backward else 1.0)
            exact = tensor.copy_(torch.where(scaled.abs() < _NORMAL, rounded, exact))
        is_beyond, key = bool((tensor.abs() > LARGEST).any()), storage_key(tensor)
        (self._beyond.add if is_beyond else self._beyond.discard)(key)
        if recomputed() is not None:  # was looked at in the forward pass
            self._last.pop(key, None)
            return
        numbers = Numbers.of(exact, backward=backward)
        kind = "activation_gradients" if backward else "weights" if owner is not None else "activations"
        is_first = numbers.amax > LARGEST and not is_after and name not in _WRITES
        look = Look(kind, place.module if owner is None else owner, place, name, numbers, is_first, place.module)
        self.looks.append(look)
        self._last[key] = look
        self._cast_back.pop(key, None)
        if is_first and backward and name == "_to_copy":
            self._cast_back[key] = look
