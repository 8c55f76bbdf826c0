"""Which pieces of documents share a sample: planned once, indexable, an exact function of lengths.

A document of n tokens has n - 1 pairs of an input and its target; each pair is in one sample, once. A piece starts at
position 0, and attends to itself alone (`models.packed.causal_mask`): no token sees another document.

`chunks` cuts the row of all documents every `length` pairs: no padding but in the last sample, and documents cut where
it falls. `best_fit` cuts only those longer than a sample: best-fit decreasing (Ding et al., arXiv:2404.10830).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Batch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""int64 [B, L]: inputs; targets, the token that follows each or `IGNORE`; if packed, the position in its document"""

IGNORE = -100
"""Target of a position without a token; `cross_entropy` ignores it by default."""

Ints = NDArray[np.int64]
Read = Callable[[int, int, int], tuple[ArrayLike, ArrayLike]]
"""(document, first pair, number of pairs) to (inputs, targets)."""


@dataclass(frozen=True)
class Plan:
    """Samples made of pieces: those of sample i are `ends[i - 1]` to `ends[i]`, exclusive."""

    documents: Ints
    """Of each piece."""
    starts: Ints
    """The first pair of each piece."""
    counts: Ints
    """The pairs of each piece."""
    ends: Ints
    length: int
    """Pairs of a sample."""
    is_packed: bool

    def __len__(self) -> int:
        return len(self.ends)

    def batch(self, samples: Sequence[int] | Ints, read: Read) -> Batch:
        """These samples. Padding is at the end, with 0 as input, and is a document of its own."""
        inputs = np.zeros((len(samples), self.length), dtype=np.int64)
        targets = np.full_like(inputs, IGNORE)
        positions = np.tile(np.arange(self.length), (len(samples), 1))
        for row, sample in enumerate(samples):
            here = 0
            for piece in range(self.ends[sample - 1] if sample else 0, self.ends[sample]):
                end = here + int(self.counts[piece])
                found = read(int(self.documents[piece]), int(self.starts[piece]), end - here)
                inputs[row, here:end], targets[row, here:end] = found
                positions[row, here:end] -= here
                here = end
            positions[row, here:] -= here
        plain = torch.from_numpy(inputs), torch.from_numpy(targets)
        return (*plain, torch.from_numpy(positions)) if self.is_packed else plain


def plan(sizes: ArrayLike, length: int, packing: str) -> Plan:
    """A plan for documents of `sizes` tokens, in samples of `length` pairs; those below 2 tokens have none.

    Takes near-linear time: `none` (one piece each) and `chunks` count, `best_fit` sorts.
    """
    num_pairs = np.maximum(np.asarray(sizes, dtype=np.int64) - 1, 0)
    ends = np.cumsum(num_pairs)  # in the row of all documents
    # Pairs before a document in its first sample.
    before = (ends - num_pairs) % length if packing == "chunks" else np.zeros_like(ends)
    num_pieces = np.where(num_pairs > 0, -(-(before + num_pairs) // length), 0)
    documents = np.repeat(np.arange(len(ends)), num_pieces)
    pieces = np.arange(len(documents)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    starts = np.maximum(pieces * length - before[documents], 0)
    counts = np.minimum((pieces + 1) * length - before[documents], num_pairs[documents]) - starts
    if packing == "none":
        return Plan(documents, starts, counts, np.arange(1, len(documents) + 1), length, False)
    if packing == "chunks":
        is_last = np.cumsum(counts) % length == 0
        is_last[-1:] = True
        return Plan(documents, starts, counts, np.flatnonzero(is_last) + 1, length, True)
    assert packing == "best_fit"
    samples = _best_fit(counts, length)
    order = np.argsort(samples, kind="stable")
    return Plan(documents[order], starts[order], counts[order], np.cumsum(np.bincount(samples)), length, True)


def _best_fit(counts: Ints, length: int) -> Ints:
    """The sample of each piece: longest first, each where it leaves the least room; samples in order of documents.

    Pieces of one size and samples with one room are handled together: steps are counted in sizes, not in pieces.
    """
    order = np.argsort(-counts, kind="stable")
    sizes, firsts, nums = np.unique(-counts[order], return_index=True, return_counts=True)
    samples = np.empty(len(counts), dtype=np.int64)
    num_samples = 0
    open_: dict[int, list[Ints]] = {}  # samples by their room
    rooms: list[int] = []  # the keys, sorted

    def keep(room: int, which: Ints) -> None:
        if room and len(which):
            if room not in open_:
                insort(rooms, room)
                open_[room] = []
            open_[room].append(which)

    for size, first, num in zip((-sizes).tolist(), firsts.tolist(), nums.tolist(), strict=True):
        pieces = order[first : first + num]
        while len(pieces):
            at = bisect_left(rooms, size)
            if at == len(rooms):
                room, which = length, np.arange(num_samples, num_samples - (-len(pieces) // (length // size)))
                num_samples += len(which)
            else:
                room = rooms[at]
                which = open_[room].pop()
                if not open_[room]:
                    del open_[room], rooms[at]
            # What is left of a sample after a piece is its least room, so that the next one goes there, too.
            each = room // size
            used = min(-(-len(pieces) // each), len(which))
            keep(room, which[used:])
            which = which[:used]
            samples[pieces[: used * each]] = np.repeat(which, each)[: len(pieces)]
            is_full = len(pieces) >= used * each
            keep(room - each * size, which if is_full else which[:-1])
            if not is_full:
                keep(room - size * (len(pieces) - (used - 1) * each), which[-1:])
            pieces = pieces[used * each :]
    firsts = np.full(num_samples, len(counts))
    np.minimum.at(firsts, samples, np.arange(len(counts)))
    rank = np.empty(num_samples, dtype=np.int64)
    rank[np.argsort(firsts)] = np.arange(num_samples)
    return rank[samples]
