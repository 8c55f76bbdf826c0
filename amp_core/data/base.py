"""The data set protocol, and randomness as a function of (seed, sample, epoch).

Augmentation is a function of (seed, sample, epoch) only, without a global generator: the number of workers, the batch
size and the sample at which a run resumed make no difference.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from amp_core.config.errors import ConfigError
from amp_core.config.files import visible
from amp_core.config.schema import DataConfig
from amp_core.config.sources import Skipped, excluded_names, skipped_note

if TYPE_CHECKING:
    from amp_core.data.tokenizers import Tokenizer

Key = tuple[int, int]
"""(sample index, epoch)"""


class Dataset(Protocol):
    """A data set for the loaders. torch's DataLoader calls `__getitems__`, which returns a whole batch.

    A batch is a tensor, or tuples, lists and dicts of tensors, with samples along the first dimension. The global
    generators of `random`, numpy and torch are seeded for each batch, as a function of the seed and its first key.
    """

    def __len__(self) -> int: ...

    def __getitems__(self, keys: Sequence[Key]) -> Any: ...


@dataclass(frozen=True)
class Data:
    """The training and evaluation parts of a data set, and the facts that a network needs."""

    train: Dataset
    eval: Dataset
    facts: dict[str, Any]
    """Facts that networks are built from, for example `num_classes` and `image_shape`, (C, H, W)."""
    finish: Callable[[Any], Any] | None = None
    """Applied to a batch of `train` on the device; None: nothing."""
    notes: tuple[str, ...] = ()
    """For the log: files that are not read, names in `data.exclude` that are not there."""
    excluded: str = ""
    """A digest of the samples that `data.exclude` leaves out."""
    tokenizer: Tokenizer | None = None
    """What its ids mean; None: it has none, or they are not known."""
    classes: Sequence[str] = ()
    """Names of the classes by number, if they have names."""
    state: Any = None
    """A part of the checkpoint, such as statistics of the training part; None: there is none."""


class Spread:
    """At most `num` samples of a data set, evenly spread over it in runs of `together`: it may be sorted by class."""

    def __init__(self, dataset: Dataset, num: int, together: int = 1) -> None:
        self._dataset, self._num, self._together = dataset, min(num, len(dataset)), together

    def __len__(self) -> int:
        return self._num

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        places = [(index, index % self._together, epoch) for index, epoch in keys]
        share = len(self._dataset), self._num
        return self._dataset.__getitems__([((i - at) * share[0] // share[1] + at, epoch) for i, at, epoch in places])


def evenly_spread(dataset: Dataset, num: int) -> Any:
    """A batch of at most `num` samples, evenly spread over a data set."""
    few = Spread(dataset, num)
    return few.__getitems__([(index, 0) for index in range(len(few))])


class Paths:
    """Paths of files in one array: forked workers would copy a list of a million strings page by page in use.

    `root`: the folder below which `data.exclude` names them.
    """

    def __init__(self, paths: Iterable[str | Path], root: str | Path = "") -> None:
        self._names, self._root = np.array([os.fsencode(path) for path in paths]), root

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(bytes(self._names[index]))

    def opened(self, index: int) -> tuple[Any, str]:
        """(what `decode.read_image` takes, the name)."""
        return self[index], self[index]

    def name_of(self, index: int) -> str:
        return os.path.relpath(self[index], self._root)


class Chosen:
    """The samples of a data set of files that `data.exclude` does not name, and notes about the files."""

    def __init__(self, cfg: DataConfig) -> None:
        self._cfg, self.skipped = cfg, Skipped()
        self._names = excluded_names(cfg.exclude) if cfg.exclude is not None else set[str]()
        self._found: set[str] = set()

    def of(self, files: Any) -> Any:
        """A data set without the samples that the list names."""
        if not self._names:
            return files
        names = [files.name_of(index) for index in range(len(files))]
        self._found |= self._names.intersection(names)
        return files.taken(np.array([name not in self._names for name in names], dtype=bool))

    def finish(self, data: Data) -> Data:
        """With the notes and the digest. ConfigError: `data.exclude` has names, and none of them is in the data."""
        if self._names and not self._found:
            which = f"data.exclude={self._cfg.exclude}: none of its {len(self._names)} names is in the data, such as "
            expected = f"expected names such as {cast(Any, data.train).name_of(0)}, as data.check=true writes them"
            raise ConfigError(f"{which}{min(self._names)}; {expected}; correct the list, or leave it out")
        notes = skipped_note(f"data.path={self._cfg.path}", self.skipped)
        if self._names:
            notes.append(f"data.exclude={self._cfg.exclude}: leaves {len(self._found)} samples out")
        if unknown := sorted(self._names - self._found):
            notes[-1] += visible(
                f"; {len(unknown)} of its {len(self._names)} names are not in the data, such as {unknown[0]}"
            )
        digest = hashlib.sha256("\n".join(sorted(self._found)).encode("utf-8", "surrogateescape")).hexdigest()
        return replace(data, notes=tuple(notes), excluded=digest if self._found else "")


def every_fifth(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """True for every fifth sample of each class: a stratified evaluation part."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in set(labels.tolist()):  # np.unique would import numpy.ma, for a hundredth of the start of a run
        chosen[np.flatnonzero(labels == label)[4::5]] = True
    return chosen


# --- randomness -------------------------------------------------------------------------------------------------------

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64 (Steele, Lea, Flood 2014). Arrays only: numpy warns if scalars wrap."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mixed(seed: int, *columns: ArrayLike) -> NDArray[np.uint64]:
    """64 bits [B], a function of the seed and row i of each column."""
    state = _mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
    for values in columns:
        state = _mix(state + np.asarray(values).astype(np.uint64) + _GOLDEN)
    return state


def uniforms(seed: int, indices: ArrayLike, passes: ArrayLike, num: int) -> NDArray[np.float64]:
    """Random numbers in [0, 1), float64 [B, num]: row i is a function of (seed, indices[i], passes[i])."""
    state = mixed(seed, indices, passes)
    bits = _mix(state[:, None] + np.arange(1, num + 1, dtype=np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def unpack(keys: Sequence[Key]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(sample indices, epochs) of a batch of keys."""
    pairs = np.array(keys, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


class Seeded:
    """A data set for whose batches global generators are seeded: transforms draw from them, and many cannot do else.

    `puts_back`: the generators are also those of training steps, and are put back after each batch.
    """

    def __init__(self, dataset: Dataset, seed: int, *, puts_back: bool) -> None:
        self.dataset, self.seed, self.puts_back = dataset, seed, puts_back

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        before = (random.getstate(), np.random.get_state(), torch.get_rng_state()) if self.puts_back else None
        index, epoch = keys[0]
        # Odd constants as in `Environment.seed_step`, and another one: a step has other numbers than its batches.
        mixed = self.seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9 + epoch * 0x94D049BB133111EB
        seed = (mixed ^ 0xD6E8FEB86659FD93) % 2**63
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            return self.dataset.__getitems__(keys)
        finally:
            if before is not None:
                random.setstate(before[0])
                np.random.set_state(before[1])
                torch.set_rng_state(before[2])
