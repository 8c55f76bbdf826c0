"""A finding: where a number became non-finite, or a tensor that was non-finite from the start.

And what is known of a tensor besides its numbers: an eps was rounded to 0 on the way, it is a probability of a 16-bit
sigmoid, or it came from the data set and was only moved since. And positions that collide in 16 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from amp_core.doctor.operations import SUBTRACTS, Call, cancels, small_number, underflows
from amp_core.doctor.places import Location
from amp_core.doctor.values import Range, compared, dtype_name, is_plain
from amp_core.tensors import HALF

T = TypeVar("T")
Search = Generator[Any, None, T]
"""Yields each window that whoever trains has to compute again; returns what was found."""
Marks = frozenset[tuple[str, str]]
"""Pairs of a kind and a description."""


@dataclass
class Finding:
    """An operation with finite inputs and a non-finite output; or a tensor that was non-finite from the start."""

    number: int
    op: str
    """torch's name: `aten.convolution`. Empty for a tensor that was non-finite from the start."""
    place: Location
    backward: bool
    inputs: list[Range]
    output: Range
    has_nan: bool
    wide: float | None
    """Largest absolute value of the same operation in float64; inf or NaN if it is non-finite there too."""
    at_a_pole: str = ""
    """Which argument has no finite result, such as a zero of a logarithm; empty if none is known to have none."""
    only_masks: bool = False
    """The inputs held constant infinities, as in a mask."""
    marks: Marks = frozenset()
    is_constant: bool = False
    """A constant of the program."""
    rows: list[int] = field(default_factory=list)
    """Indices along the first dimension with non-finite elements."""
    operation: int = 0
    """How many operations came before."""
    follows_backward: bool = False
    """It came after the last backward pass of the window, or between two of them and is differentiated by none."""
    tensor: str = ""
    """Name of what was non-finite from the start, or that overflows 16 bits; of a running variance below 0."""

    @property
    def operator(self) -> str:
        """The operation's name, without its namespace."""
        return self.op.split(".")[-1].strip("_")


def batch_sizes(tensors: Mapping[str, Tensor]) -> set[int]:
    """Lengths of the first dimension that may be the number of samples: of most tensors of the batch, or of its labels.

    Weights of classes, and frames, have no sample per row.
    """
    batch = [t for name, t in tensors.items() if name.startswith("batch") and is_plain(t) and t.ndim]
    sizes = Counter(t.shape[0] for t in batch)
    most = {size for size, count in sizes.items() if count == max(sizes.values())}
    labels = {t.shape[0] for t in batch if t.ndim == 1}
    return (len(most) > 1 and most & labels) or most


_SPREADS = {
    "sigmoid": {"_to_copy", "rsub", "sub", "add", "neg", "clamp", "clamp_min", "clamp_max", "index", "where", "mul"},
    "input": {"_to_copy", "clone", "cat", "stack", "index", "index_select", "copy_"},
    "bce": {"_to_copy", "mul", "clone", "sum", "expand", "div", "sigmoid_backward"},
}
"""Kind of mark, also a wide one: operations whose results have those of their inputs."""
_UNDERFLOWS = {"_to_copy", "_softmax", "exp", "exp2", "sigmoid", "mul", "div", "square", "pow", "prod", "reciprocal"}
_UNDERFLOWS |= {"cumprod", "softplus", "silu", "gelu", "mish", "erfc", "_linalg_det"}
_FADING = ("eps", "underflow", "wide underflow", "cancellation")
"""Marks of numbers that are 0 because of their dtype: they end where no zero is left."""
_ADDS_EPS = {"add", "add_", "clamp_min", "clamp_min_", "clamp", "clamp_", "maximum", "sub", "rsub"}
_POSITIONAL = {"mul", "add", "sub", "div", "pow", "rsub"}


def new_marks(call: Call, outputs: list[Tensor], inherited: Marks) -> Marks:
    """The marks of a result, from those of the inputs."""
    name, place, dtype = call.name, call.place, outputs[0].dtype
    what = f"in {dtype_name(dtype)} at {place.source}"
    plain = [compared(each) for each in outputs if is_plain(each) and not each.is_complex()]
    marks = set[tuple[str, str]]()
    for kind, text in inherited:
        by = call.base if kind.endswith("sigmoid") else name
        marks |= {(kind, text)} if by in _SPREADS.get(kind.removeprefix("wide "), ()) else set()
    is_cast = name == "_to_copy" and any(kind == "probability" for kind, _ in inherited)
    if (name in ("sigmoid", "sigmoid_") or is_cast) and plain:
        kind = "sigmoid" if dtype in HALF else "wide sigmoid"
        kind = kind if bool(((outputs[0] == 0) | (outputs[0] == 1)).any()) else "probability"
        marks |= {(kind, f"sigmoid {what}")} | {mark for mark in inherited if mark[0] == "probability"}
    if name == "binary_cross_entropy_backward":
        probabilities = [each.tensor for each in call.inputs if each.name == "self"]
        if any(bool(((each == 0) | (each == 1)).any()) for each in probabilities):
            kind = "bce" if any(kind == "sigmoid" for kind, _ in inherited) else "wide bce"
            marks.add((kind, f"binary_cross_entropy at {place.source}"))
    is_low = dtype in HALF
    if (is_low or dtype is torch.float32) and plain and not call.backward:
        if call.base in _UNDERFLOWS and underflows(call, outputs[0]):
            marks.add(("underflow" if is_low else "wide underflow", f"{name.strip('_')} {what}"))
        if is_low and call.base in SUBTRACTS and cancels(call, outputs[0]):
            marks.add(("cancellation", f"{name.strip('_')} {what}"))
    if name in _ADDS_EPS:
        eps = small_number(call.args)
        if eps is not None and any(t.dtype in HALF and not torch.tensor(eps).to(t.dtype) for t in outputs):
            marks.add(("eps", f"{eps:g} {what}"))
    fresh = {kind for kind, _ in marks}  # a zero of this operation hides those before it
    fading = {mark for mark in inherited if mark[0] in _FADING and mark[0] not in fresh}
    if fading and any(bool((tensor <= 0).any()) for tensor in plain):
        marks |= fading
    return frozenset(marks)


@dataclass(frozen=True)
class Collision:
    """Integers, such as positions, that collide in 16 bits."""

    place: Location
    op: str
    why: str
    """As a sentence."""


def collision_of(call: Call, output: Tensor) -> Collision | None:
    """The collision, if an operation casts integers to 16 bits and some become equal there."""
    if output.dtype not in HALF:
        return None
    numbers = [output] if call.name == "arange" else [_positions(call, each.tensor) for each in call.inputs]
    for each in (each for each in numbers if each is not None):
        distinct = each.numel()
        if (kept := len(each.to(output.dtype).unique())) < distinct:
            why = (
                f"{distinct} integers up to {each.abs().max().item():g} were cast to {dtype_name(output.dtype)}, where "
                f"only {kept} of them differ: from {2048 if output.dtype is torch.float16 else 256} on neighbouring "
                f"positions are the same."
            )
            return Collision(call.place, f"aten.{call.name}", why)
    return None


def _positions(call: Call, source: Tensor) -> Tensor | None:
    """The distinct numbers of an input that is cast, if they are integers without gaps."""
    source = source.detach()
    is_cast = call.name == "_to_copy" or (call.name in _POSITIONAL and not source.is_floating_point())
    is_cast = is_cast and is_plain(source) and not source.is_complex()
    if not is_cast or source.dtype in (*HALF, torch.bool) or not 2 < source.numel() <= 2**22:
        return None
    values = source.flatten().double()
    if not all(bool((part == part.round()).all()) for part in (values[:64], values)):
        return None
    # Integers with gaps are a table of something; positions have none.
    distinct = values.unique()
    return distinct if len(distinct) > 2 and bool((distinct.diff() == 1).all()) else None
