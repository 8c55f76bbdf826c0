"""A finding: where a number became non-finite, or a tensor that was non-finite from the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from amp_core.doctor.marks import Marks
from amp_core.doctor.places import Location
from amp_core.doctor.values import Range

T = TypeVar("T")
Search = Generator[Any, None, T]
"""Yields each window that whoever trains has to compute again; returns what was found."""


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


def is_among(finding: Finding, findings: Iterable[Finding]) -> bool:
    """Whether the same operation is among others, at the same place and in the same dtype."""
    same = ((each.op, each.place, each.output.dtype) for each in findings)
    return (finding.op, finding.place, finding.output.dtype) in same


def batch_sizes(batch: Mapping[str, Tensor]) -> set[int]:
    """Lengths of the first dimension that may be the number of samples: of most tensors of the batch, or of its labels.

    Weights of classes, and frames, have no sample per row.
    """
    sizes = Counter(t.shape[0] for t in batch.values() if t.ndim)
    most = {size for size, count in sizes.items() if count == max(sizes.values())}
    labels = {t.shape[0] for t in batch.values() if t.ndim == 1}
    return (len(most) > 1 and most & labels) or most
