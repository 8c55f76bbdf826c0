"""One operation: its inputs by name, its result in float64, and why a result is 0 or not finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_core.checkpoints.plain_state import all_tensors
from amp_core.doctor.places import Location
from amp_core.doctor.values import compared, dense, is_finite, is_plain, storage_key
from amp_core.lowp.islands import changed
from amp_core.tensors import HALF

UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"}
UNWRITTEN |= {"empty_permuted", "_efficientzerotensor"}
"""Their results are uninitialised; that of the last one, of forward-mode differentiation, has no memory at all."""
_UPDATES_STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""They write to their fourth and fifth argument, and their schemas do not say so."""
SUBTRACTS = {"sub", "add", "rsub"}
_FORMAT = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "out"}


@dataclass
class Input:
    """A tensor that an operation reads."""

    name: str
    tensor: Tensor
    key: int


@dataclass(frozen=True)
class Call:
    """An operation, before it is computed."""

    func: Any
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    place: Location
    backward: bool
    inputs: list[Input]
    written: list[Tensor]
    keys: set[int]
    """Of the storages that it writes to."""

    @property
    def base(self) -> str:
        """The name, also of the in-place variant."""
        return self.name.rstrip("_")


@functools.cache  # torch builds a schema on each access
def _arguments(func: Any) -> list[tuple[str, bool]]:
    """Names of an operation's arguments, and whether it writes to them."""
    return [(each.name, each.alias_info is not None and each.alias_info.is_write) for each in func._schema.arguments]


def named_inputs(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The input tensors, by their names in the operation's schema."""
    found = []
    for name, value in [*zip((name for name, _ in _arguments(func)), args, strict=False), *kwargs.items()]:
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, tuple | list):
            tensors = list(all_tensors(value))
            found += [(name if len(tensors) == 1 else f"{name}[{i}]", tensor) for i, tensor in enumerate(tensors)]
    return found


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for i, (name, writes) in enumerate(_arguments(func)):
        if writes:
            yield from all_tensors(args[i] if i < len(args) else kwargs.get(name))
    if func.overloadpacket.__name__ in _UPDATES_STATISTICS:
        yield from all_tensors(args[3:5])


@functools.cache
def is_view(func: Any) -> bool:
    returns = func._schema.returns
    if func.overloadpacket.__name__.startswith("unsafe_split"):  # of a GRU; its schema does not say so
        return True
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def unread_by(call: Call, bad: list[Tensor]) -> set[int]:
    """Inputs that do not contribute to a bad result: a table of a CTC loss, -inf where no alignment is possible.

    Running statistics of a BatchNorm in training, if more than they is bad: it normalises by the batch alone.
    """
    if call.name == "_ctc_loss_backward":
        return {storage_key(call.args[6])}
    trains = 7 if call.name == "native_batch_norm_backward" else 5
    if "batch_norm" not in call.name or len(call.args) <= trains or call.args[trains] is False:
        return set()
    found = {storage_key(tensor) for tensor in call.args[3:5] if isinstance(tensor, Tensor)}
    return found if any(storage_key(tensor) not in found for tensor in bad) else set()


def functional(func: Any) -> Callable[..., Any] | None:
    """The out-of-place variant of an in-place operation."""
    packet = getattr(torch.ops.aten, func.overloadpacket.__name__.rstrip("_"), None)
    return getattr(packet, func._schema.overload_name or "default", None) if packet is not None else None


def in_float64(call: Call, output: Tensor) -> Tensor | None:
    """The result of the operation in float64 on the same inputs; None if it cannot be computed."""
    if call.name in ("_to_copy", "copy_"):
        return _widest(_copied(call))
    func = functional(call.func) if call.func._schema.is_mutable else call.func
    before, given = iter(call.inputs), {name: each for name, each in call.kwargs.items() if name not in _FORMAT}
    try:
        assert func is not None
        args, kwargs = changed((call.args, given), lambda _: True, lambda _: _widest(next(before).tensor))
        results = [t for t in all_tensors(func(*args, **kwargs)) if t.shape == output.shape]
        return min(results, key=is_finite)  # of several with this shape the one that is not finite
    except (AssertionError, IndexError, NotImplementedError, RuntimeError, StopIteration, TypeError):
        return None  # no float64 kernel


def _widest(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _copied(call: Call) -> Tensor:
    """The source of a copy, under torch.func also a Python number."""
    return call.inputs[-1].tensor if call.inputs else torch.as_tensor(call.args[call.name == "copy_"])


def underflows(call: Call, output: Tensor) -> bool:
    """Whether a result is 0 that is another number in float64, on the same inputs."""
    zero = output == 0
    if not bool(zero.any()):
        return False
    if call.name == "_to_copy":
        given = _copied(call)
        return is_plain(given) and bool((zero & (given.detach() != 0)).any())
    wide = in_float64(call, output)
    return wide is not None and wide.shape == zero.shape and bool((wide[zero] != 0).any())


def cancels(call: Call, output: Tensor) -> bool:
    """Whether a sum of two 16-bit tensors is no larger than the rounding error of its larger term.

    Each term carries an error of up to eps/2 times its size, so both together up to eps times the larger one.
    """
    tensors = [each.tensor for each in call.inputs if each.tensor.dtype in HALF]
    if len(tensors) != 2 or not all(map(is_plain, tensors)):
        return False
    largest = torch.maximum(*(tensor.detach().abs().float() for tensor in tensors))
    lost = output.detach().abs().float() <= torch.finfo(output.dtype).eps * largest
    return bool((lost & (largest > 0)).any())


def has_infinite_scalar(args: Sequence[Any]) -> bool:
    numbers = [a for a in args if isinstance(a, int | float)]
    tensors = [a for a in args if isinstance(a, Tensor) and a.numel() == 1]
    return not (all(map(math.isfinite, numbers)) and all(map(is_finite, tensors)))


def small_number(args: Sequence[Any]) -> float | None:
    """An argument that looks like an eps."""
    for a in args[1:]:
        value = a.item() if isinstance(a, Tensor) and a.numel() == 1 and a.is_floating_point() else a
        if isinstance(value, float) and 0 < value < 1e-3:
            return value
    return None


def _has_zero(x: Tensor) -> bool:
    return bool((x == 0).any())


def _is_below_0(x: Tensor) -> bool:
    return not x.is_complex() and bool((x < 0).any())


SINGULAR, NO_ELEMENTS, ONE_ELEMENT = "a singular matrix", "no elements", "one element, which has no deviation"
NO_TARGETS = "no targets to average over: all are ignored, or of classes of weight 0"
EQUAL_VALUES = "equal singular values or eigenvalues, whose vectors have no derivative"
_DECOMPOSITIONS = {"linalg_svd", "linalg_eigh", "linalg_eig"}
_POLES: list[tuple[str, str, Callable[[Tensor, Tensor], bool]]] = [
    ("div true_divide fmod remainder addcdiv _weight_norm_interface", "a zero", lambda a, b: _has_zero(b)),
    ("log log2 log10 xlogy rsqrt sqrt", "a negative number", lambda a, b: _is_below_0(b)),
    ("log log2 log10 xlogy rsqrt reciprocal", "a zero", lambda a, b: _has_zero(b)),
    ("pow", "a zero", lambda a, b: _has_zero(a) and _is_below_0(b)),
    ("pow", "a negative number", lambda a, b: _is_below_0(a) and not b.is_complex() and bool((b != b.round()).any())),
    ("lgamma digamma", "a zero or a negative number", lambda a, b: _has_zero(a) or _is_below_0(a)),
    ("log1p", "-1 or a number below it", lambda a, b: not a.is_complex() and bool((a <= -1).any())),
    ("logdet _linalg_slogdet linalg_slogdet", SINGULAR, lambda a, b: True),
    ("linalg_solve_ex _linalg_solve_ex", SINGULAR, lambda a, b: bool(torch.linalg.lu_factor_ex(a).info.any())),
    ("linalg_solve_triangular", SINGULAR, lambda a, b: _has_zero(a.diagonal(0, -2, -1))),
    ("acos asin acosh atanh logit erfinv", "a number at the edge of its domain or beyond", lambda a, b: True),
    ("std var std_mean var_mean", ONE_ELEMENT, lambda a, b: True),
    ("nll_loss_forward nll_loss2d_forward", NO_TARGETS, lambda a, b: True),
]
"""Operations, and what has no finite result as their first or last argument."""


def pole(call: Call) -> str:
    """The argument at which an operation has no finite result, in words; empty if none is known."""
    if any(not each.tensor.numel() for each in call.inputs):
        return NO_ELEMENTS
    if call.backward and call.place.forward.strip("_") in _DECOMPOSITIONS:
        return EQUAL_VALUES
    divisor = [call.inputs[-1].tensor] if call.base in ("addcdiv", "_weight_norm_interface") else []
    given = [each for each in (*call.args[:2], *divisor) if isinstance(each, Tensor | int | float | complex)]
    of = [compared(dense(torch.as_tensor(each))) for each in given] or [torch.ones(())]
    return next((what for ops, what, is_one in _POLES if call.base in ops.split() and is_one(of[0], of[-1])), "")
