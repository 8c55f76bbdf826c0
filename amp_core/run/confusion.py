"""What classifiers take for what: a picture, and the accuracy of each class, in samples/ of the run folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_core.run.environment import Environment
from amp_core.tensors import widest


class Confusion:
    """Counts an evaluation's classes, over all ranks, and writes confusion.svg and confusion.json.

    `names` are those of the classes, or nothing. More than `MOST` classes are no picture, and not counted.
    """

    MOST = 1000

    def __init__(self, env: Environment, num_classes: int, names: Sequence[str] = ()) -> None:
        self._env, self._names = env, names or [str(number) for number in range(num_classes)]
        shape = (num_classes, num_classes) if num_classes <= self.MOST else (0, 0)
        self._counts = torch.zeros(shape, dtype=widest(env.device), device=env.device)

    def add(self, labels: Tensor, logits: Tensor) -> None:
        """Of a batch: int64 [B] and [B, K]. Deterministic, and without a host-device sync."""
        if len(self._counts):
            self._counts.index_put_((labels, logits.argmax(1)), self._counts.new_ones(()), accumulate=True)

    def write(self) -> None:
        """Collective."""
        if len(self._counts):
            from amp_core.heads.metrics import confusion  # once per evaluation; who follows a recipe need not read them
            from amp_core.run.samples import write_sample

            counts = self._env.sum_over_ranks(self._counts).long().cpu()
            for ending, content in zip(("json", "svg"), confusion(counts, self._names), strict=True):
                write_sample(self._env, f"confusion.{ending}", content)
