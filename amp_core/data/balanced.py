"""data.sampler=balanced: each class is drawn equally often in an epoch, up to one sample.

An epoch has as many draws as the data set has samples. Draw p of an epoch is of class p mod K, so that the counts of
classes differ by at most 1; the draws of a class go through random orders of its samples, one after another over all
epochs, so that none is drawn again before every other one was. All of it is a function of (seed, epoch, draw).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_core.config.errors import ConfigError
from amp_core.data.base import Dataset, Key, mixed


class Balanced:
    """The training part of a data set with `labels`, int64 [N], drawn by class. ConfigError: it has no classes."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        labels = getattr(dataset, "labels", None)
        if labels is None:
            raise ConfigError("data.sampler=balanced: this data has no classes; leave it out")
        self._dataset, self._seed = dataset, seed
        self._samples = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        self._orders: dict[tuple[int, int], NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        return self._dataset.__getitems__([self.drawn(*key) for key in keys])

    @property
    def name_of(self) -> Callable[[int], str]:
        name_of = self._dataset.name_of  # type: ignore[attr-defined]  # AttributeError where samples have no names
        return lambda index: name_of(self.drawn(index, 0)[0])

    def drawn(self, index: int, epoch: int) -> Key:
        """(sample, how often it was drawn before): a sample is augmented anew whenever it is drawn."""
        of, number = index % len(self._samples), index // len(self._samples)
        samples = self._samples[of]
        per_epoch = len(range(of, len(self), len(self._samples)))
        turn, place = divmod(epoch * per_epoch + number, len(samples))
        if (of, turn) not in self._orders:
            if len(self._orders) > 4 * len(self._samples):  # a cache
                self._orders.clear()
            numbers = np.arange(len(samples))
            order = np.argsort(mixed(self._seed, numbers, np.full_like(numbers, turn), np.full_like(numbers, of)))
            self._orders[of, turn] = samples[order]
        return int(self._orders[of, turn][place]), turn
