"""Text: bytes, which need no tokenizer, the tokens of one, or token shards.

Without packing a sample is a part of one document. The last part is short: its targets end with `IGNORE`, so samples,
micro-batches and ranks differ in their number of valid tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from amp_core.config.errors import ConfigError
from amp_core.config.schema import DataConfig
from amp_core.config.sources import SOURCES, package_folder, text_files
from amp_core.data.base import Data, Key, unpack
from amp_core.data.chat import Chats, rendered
from amp_core.data.packing import IGNORE, Batch, plan
from amp_core.data.tokenizers import BYTES, read_tokenizer
from amp_core.data.tokens import MANIFEST, Documents, Mixture, Shard, check_ids, read_shards, tokenized

EVAL_SHARE = 16
"""Training samples per evaluation sample, if text is held out or `data.num_samples` is given."""


def num_valid(batch: Batch) -> Tensor:
    """Valid target tokens of a batch, a 0-d int64 tensor."""
    return (batch[1] != IGNORE).sum()


def num_bytes(data: Data, targets: Tensor) -> Tensor:
    """UTF-8 bytes that the valid targets stand for, a 0-d int64 tensor; 0 where no tokenizer is known."""
    if data.tokenizer is None:
        return torch.zeros((), dtype=torch.int64, device=targets.device)
    sizes = data.tokenizer.num_bytes.to(targets.device, non_blocking=True)
    return (sizes[targets.clamp(min=0)] * (targets != IGNORE)).sum()


def bits_per_byte(loss: float, size: float) -> dict[str, float]:
    """A summed loss in bits per byte of text, which compares tokenizers; nothing where no tokenizer is known."""
    return {"bits_per_byte": loss / size / math.log(2)} if size else {}


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
    """Parts of documents, in their order. Every token but the first of a document is a target exactly once.

    Args:
        documents: the documents, or the paths of files, each of which is one, in bytes.
        length: tokens of a sample.
        packing: which parts share a sample, as in `packing.plan`.
        span: first and last (exclusive) sample to use; None: all.
        num_samples: at most this many of these, evenly spread; None: all.
    """

    def __init__(
        self,
        documents: Documents | Sequence[Path],
        length: int,
        *,
        packing: str = "none",
        span: tuple[int, int] | None = None,
        num_samples: int | None = None,
    ) -> None:
        self.documents = documents if isinstance(documents, Documents) else _bytes_of(documents)
        self._plan = plan(self.documents.sizes, length, packing)
        first, last = span or (0, len(self._plan))
        count = last - first if num_samples is None else min(last - first, num_samples)
        self._samples = first + np.arange(count) * (last - first) // max(count, 1)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        return self._plan.batch(self._samples[unpack(keys)[0]], self._pairs)

    def _pairs(self, document: int, start: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        ids = self.documents.read(document, start, count + 1)
        return ids[:-1], ids[1:]


def _bytes_of(paths: Sequence[Path]) -> Documents:
    return Documents([Shard(path, "u1", path.stat().st_size) for path in paths], vocab_size=256)


# --- builders ---------------------------------------------------------------------------------------------------------


def _parts(
    cfg: DataConfig, documents: Documents, eval_documents: Documents | None, few: int | None
) -> list[TextPieces]:
    """Training on `documents`; evaluation on others, or on the end of these. `few`: evaluation samples at most."""
    assert cfg.length, "check_data was not asked"
    pieces, span = partial(TextPieces, length=cfg.length, packing=cfg.packing or "none"), None
    if eval_documents is None:
        num_pieces = len(pieces(documents))
        span = (0, num_pieces - max(1, num_pieces // EVAL_SHARE))
        held_out = pieces(documents, span=(span[1], num_pieces), num_samples=few)
    else:
        held_out = pieces(eval_documents, num_samples=few)
    train = pieces(documents, span=span, num_samples=None if cfg.mix else cfg.num_samples)
    if not len(train) or not len(held_out):
        raise ConfigError(
            f"data={cfg.name}: too little text for one sample to train and one to evaluate; "
            f"use more text, or a data.length below {cfg.length}"
        )
    return [train, held_out]


def _data(
    cfg: DataConfig, seed: int, sources: Sequence[Documents], held_out: Documents | None, vocab_size: int
) -> Data:
    """One source, or the mixture of several."""
    few = None if cfg.num_samples is None else max(1, cfg.num_samples // EVAL_SHARE)
    parts = [_parts(cfg, source, held_out, few and -(-few // len(sources))) for source in sources]
    facts = {"vocab_size": vocab_size, "length": cfg.length}
    tokenizer = read_tokenizer(cfg.tokenizer) if cfg.tokenizer else None
    if cfg.mix is None:
        return Data(parts[0][0], parts[0][1], facts, tokenizer=tokenizer)
    evaluations = [part[1] for part in parts][: 1 if held_out is not None else None]
    mixture = Mixture([part[0] for part in parts], list(cfg.mix.values()), seed, cfg.num_samples)
    return Data(mixture, Joined(evaluations), facts, tokenizer=tokenizer)


class Joined:
    """Data sets one after another."""

    def __init__(self, parts: Sequence[TextPieces]) -> None:
        self._parts, self._ends = parts, np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, ...]:
        found = []
        for index, epoch in keys:
            number = int(np.searchsorted(self._ends, index, side="right"))
            begin = int(self._ends[number]) - len(self._parts[number])
            found.append(self._parts[number].__getitems__([(index - begin, epoch)]))
        return tuple(map(torch.cat, zip(*found, strict=True))) if found else self._parts[0].__getitems__([])


def _sources(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    ending, *folders = SOURCES[cfg.name]
    train, held_out = (text_files(folder, ending) for folder in map(package_folder, folders) if folder is not None)
    data = _data(cfg, seed, [_bytes_of(train)], _bytes_of(held_out), 256)
    return replace(data, tokenizer=read_tokenizer(BYTES))


def _roots(cfg: DataConfig) -> list[Path]:
    """`data.path`, or what `data.mix` names below it."""
    root = Path(cfg.path or "").expanduser()
    return [root] if cfg.mix is None else [root / name for name in cfg.mix]


def _text(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.tokenizer and cfg.text_field, "check_data was not asked"
    tokenizer, key = read_tokenizer(cfg.tokenizer), cfg.text_field

    def documents(root: Path) -> Documents:
        files = text_files(root)
        if tokenizer.file is None:
            return _bytes_of(files)
        return Documents(tokenized(files, tokenizer, key), vocab_size=tokenizer.vocab_size)

    held_out = None if cfg.eval_path is None else documents(Path(cfg.eval_path).expanduser())
    return _data(cfg, seed, [documents(root) for root in _roots(cfg)], held_out, tokenizer.vocab_size)


def _tokens(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    limit = read_tokenizer(cfg.tokenizer).vocab_size if cfg.tokenizer else None
    patterns = [*map(str, _roots(cfg)), *([cfg.eval_path] if cfg.eval_path else [])]
    shards = [read_shards(pattern) for pattern in patterns]
    found = max(check_ids(each, limit) for each in shards)
    vocab_size = limit or found
    if cfg.packing == "none":  # a shard is one row of tokens, as nanoGPT and llm.c read it
        shards = [[replace(shard, ends=None) for shard in each] for each in shards]
    elif endless := [shard.path for each in shards for shard in each if shard.ends is None]:
        raise ConfigError(
            f"data.packing={cfg.packing}: {endless[0]} does not say where its documents end; expected Megatron's .idx "
            f"or a {MANIFEST} beside it, or data.packing=none"
        )
    rows = [Documents(each, vocab_size=vocab_size) for each in shards]
    held_out = rows.pop() if cfg.eval_path else None
    data = _data(cfg, seed, rows, held_out, vocab_size)
    note = f"data=tokens: a vocabulary of {found:,} ids, the largest one in the shards; data.tokenizer gives its own"
    return data if limit else replace(data, notes=(note,))


def _chat(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.tokenizer and cfg.path and cfg.length, "check_data was not asked"
    tokenizer = read_tokenizer(cfg.tokenizer)
    roots = [cfg.path, *([cfg.eval_path] if cfg.eval_path else [])]
    found = [rendered(text_files(Path(root).expanduser(), ".jsonl"), cfg, tokenizer) for root in roots]
    (train, num_train, _), (held_out, num_eval, _) = found[0], found[-1]
    begin = 0
    if cfg.eval_path is None:
        begin = num_train = num_train - max(1, num_train // EVAL_SHARE)
    if not num_train:
        raise ConfigError(f"data.path={cfg.path}: has one chat to train on; expected another to evaluate")
    few = None if cfg.num_samples is None else max(1, cfg.num_samples // EVAL_SHARE)
    chats = [
        Chats(folder, first + np.arange(kept := min(count, most or count)) * count // kept, cfg.length)
        for folder, first, count, most in (
            (train, 0, num_train, cfg.num_samples),
            (held_out, begin, num_eval - begin, few),
        )
    ]
    facts = {"vocab_size": tokenizer.vocab_size, "length": cfg.length}
    notes = tuple(note for _, _, each in found for note in each)
    return Data(chats[0], chats[1], facts, notes=notes, tokenizer=tokenizer)


class _Absent:
    """The data of an export, or of a prediction of prompts: a sample that nobody reads."""

    def __len__(self) -> int:
        return 1

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        raise AssertionError("the data is not there")


def _or_absent(build: Callable[[DataConfig, int, int | None], Data]) -> Callable[[DataConfig, int, int | None], Data]:
    def built(cfg: DataConfig, seed: int, channels: int | None) -> Data:
        if cfg.num_samples != 0:
            return build(cfg, seed, channels)
        tokenizer = read_tokenizer(cfg.tokenizer or BYTES)
        facts = {"vocab_size": tokenizer.vocab_size, "length": cfg.length}
        return Data(_Absent(), _Absent(), facts, tokenizer=tokenizer)

    return built


BUILDERS: dict[str, Callable[[DataConfig, int, int | None], Data]] = {
    "torch_sources": _sources,
    "torch_headers": _sources,
    "text": _or_absent(_text),
    "tokens": _or_absent(_tokens),
    "chat": _or_absent(_chat),
}
