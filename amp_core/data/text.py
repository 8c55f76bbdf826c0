"""Text as bytes: a token is a byte, so any file in any language works without a tokenizer.

A sample is a chunk of one file. The last chunk of a file is short: its targets end with `IGNORE`, so samples,
micro-batches and ranks differ in their number of valid tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from amp_core.config.checks import SOURCES, package_folder, text_files
from amp_core.config.errors import ConfigError, RunError
from amp_core.config.schema import DataConfig
from amp_core.data.base import Data, Key, Paths, unpack
from amp_core.data.packing import IGNORE, Batch
from amp_core.data.tokenizers import BYTES, read_tokenizer

EVAL_SHARE = 16
"""Training samples per evaluation sample, if text is held out or `data.num_samples` is given."""


def num_valid(batch: Batch) -> Tensor:
    """Valid target tokens of a batch, a 0-d int64 tensor."""
    return (batch[1] != IGNORE).sum()


def num_bytes(data: Data, targets: Tensor) -> Tensor:
    """UTF-8 bytes that the valid targets stand for, a 0-d int64 tensor: bits per byte compare tokenizers."""
    assert data.tokenizer is not None
    sizes = data.tokenizer.num_bytes.to(targets.device, non_blocking=True)
    return (sizes[targets.clamp(min=0)] * (targets != IGNORE)).sum()


def outputs_of(net: nn.Module, batch: Batch, **more: Any) -> Tensor:
    """`net(inputs)`, with the positions of a packed batch."""
    inputs, _, *positions = batch
    return net(inputs, **more, **({"positions": positions[0]} if positions else {}))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over valid tokens, in fp32, of logits [B, L, vocab_size]; 0 without any, whose mean would be 0 / 0."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def perplexities(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The perplexity per valid token of each chunk of text."""
    losses = F.cross_entropy(outputs_of(net, batch).flatten(0, 1).float(), batch[1].flatten(), reduction="none")
    return {"perplexity": (losses.view_as(batch[1]).sum(1) / (batch[1] != IGNORE).sum(1).clamp(min=1)).exp()}


class TextPieces:
    """Chunks of files, in file order. Every byte but the first of a file is a target exactly once.

    A file is read when one of its samples is requested; only names and sizes are in memory.

    Args:
        paths: of the files.
        length: tokens of a sample.
        span: first and last (exclusive) chunk to use; None: all.
        num_samples: at most this many of these, evenly spread; None: all.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        length: int,
        *,
        span: tuple[int, int] | None = None,
        num_samples: int | None = None,
    ) -> None:
        self.length = length
        self._paths = Paths(paths)
        self._num_targets = np.array([max(path.stat().st_size - 1, 0) for path in paths], dtype=np.int64)
        num_pieces = -(-self._num_targets // length)
        self._ends = np.cumsum(num_pieces)
        self._begins = self._ends - num_pieces
        first, last = span or (0, int(num_pieces.sum()))
        count = last - first if num_samples is None else min(last - first, num_samples)
        self._pieces = first + np.arange(count) * (last - first) // max(count, 1)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        pieces = self._pieces[unpack(keys)[0]]
        files = np.searchsorted(self._ends, pieces, side="right")
        starts = (pieces - self._begins[files]) * self.length
        counts = np.minimum(self._num_targets[files] - starts, self.length)
        tokens = np.zeros((len(keys), self.length + 1), dtype=np.int64)
        for row, (file, start, count) in enumerate(zip(files, starts, counts, strict=True)):
            tokens[row, : count + 1] = _read(self._paths[file], start, count + 1)
        targets = np.where(np.arange(self.length) < counts[:, None], tokens[:, 1:], IGNORE)
        return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets)


def _read(path: str, start: int, size: int) -> NDArray[np.uint8]:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            found = file.read(size)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    if len(found) < size:
        raise RunError(f"{path} got shorter since the run began; do not change text while a run uses it")
    return np.frombuffer(found, dtype=np.uint8)


# --- builders ---------------------------------------------------------------------------------------------------------


def _parts(cfg: DataConfig, paths: Sequence[Path], eval_paths: Sequence[Path] | None) -> Data:
    """Training on `paths`; evaluation on other files, or on the end of these."""
    assert cfg.length, "check_data was not asked"
    few = None if cfg.num_samples is None else max(1, cfg.num_samples // EVAL_SHARE)
    span = None
    if eval_paths is None:
        num_pieces = len(TextPieces(paths, cfg.length))
        span = (0, num_pieces - max(1, num_pieces // EVAL_SHARE))
        held_out = TextPieces(paths, cfg.length, span=(span[1], num_pieces), num_samples=few)
    else:
        held_out = TextPieces(eval_paths, cfg.length, num_samples=few)
    train = TextPieces(paths, cfg.length, span=span, num_samples=cfg.num_samples)
    if not train or not held_out:
        raise ConfigError(
            f"data={cfg.name}: too little text for one sample to train and one to evaluate; "
            f"use more text, or a data.length below {cfg.length}"
        )
    tokenizer = read_tokenizer(cfg.tokenizer or BYTES)
    facts = {"vocab_size": tokenizer.vocab_size, "length": cfg.length}
    return Data(train, held_out, facts, tokenizer=tokenizer)


def _sources(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    ending, *folders = SOURCES[cfg.name]
    train, held_out = (text_files(folder, ending) for folder in map(package_folder, folders) if folder is not None)
    return _parts(cfg, train, held_out)


def _text(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.path, "check_data was not asked"
    held_out = None if cfg.eval_path is None else text_files(Path(cfg.eval_path).expanduser())
    return _parts(cfg, text_files(Path(cfg.path).expanduser()), held_out)


BUILDERS: dict[str, Callable[[DataConfig, int, int | None], Data]] = {
    "torch_sources": _sources,
    "torch_headers": _sources,
    "text": _text,
}
