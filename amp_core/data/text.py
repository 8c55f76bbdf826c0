"""Text: bytes, which need no tokenizer, the tokens of one, or token shards.

Without packing a sample is a part of one document. The last part is short: its targets end with `IGNORE`, so samples,
micro-batches and ranks differ in their number of valid tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core.config.errors import ConfigError
from amp_core.config.files import read_json
from amp_core.config.schema import DataConfig
from amp_core.config.sources import SOURCES, first_few, package_folder, text_files
from amp_core.data.base import Data, Key, unpack
from amp_core.data.chat import Chats, rendered
from amp_core.data.packing import IGNORE, Batch, plan
from amp_core.data.tokenizers import BYTES, Tokenizer, read_tokenizer
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

    `documents` may be the paths of files, each of which is one, in bytes; `packing` is that of `packing.plan`.
    """

    def __init__(self, documents: Documents | Chats | Sequence[Path], length: int, packing: str = "none") -> None:
        self.documents: Any = documents if isinstance(documents, Documents | Chats) else _bytes_of(documents)
        self._plan = plan(self.documents.sizes, length, packing)
        self._samples = np.arange(len(self._plan))

    def spread(self, first: int, last: int, num: int | None) -> TextPieces:
        """The samples from `first` to `last` (exclusive), at most `num` of them, evenly spread; None: all."""
        count = last - first if num is None else min(last - first, num)
        part = copy.copy(self)
        part._samples = first + np.arange(count) * (last - first) // max(count, 1)
        return part

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        return self._plan.batch(self._samples[unpack(keys)[0]], self.documents.pairs)


def _bytes_of(paths: Sequence[Path]) -> Documents:
    return Documents([Shard(path, "u1", path.stat().st_size) for path in paths], vocab_size=256)


# --- builders ---------------------------------------------------------------------------------------------------------


Source = Documents | Chats


def _parts(cfg: DataConfig, documents: Source, others: Source | None, few: int | None) -> list[TextPieces]:
    """Training on `documents`; evaluation on others, or on the end of these. `few`: evaluation samples at most."""
    assert cfg.length, "check_data was not asked"
    whole = TextPieces(documents, cfg.length, cfg.packing or "none")
    end = num = len(whole)
    if others is None:
        num = max(0, end - max(1, end // EVAL_SHARE))
        held_out = whole.spread(num, end, few)
    else:
        held_out = TextPieces(others, cfg.length, cfg.packing or "none")
        held_out = held_out.spread(0, len(held_out), few)
    train = whole.spread(0, num, None if cfg.mix else cfg.num_samples)
    if not len(train) or not len(held_out):
        raise ConfigError(
            f"data={cfg.name}: too little text for one sample to train and one to evaluate; "
            f"use more text, or a data.length below {cfg.length}"
        )
    return [train, held_out]


def _data(cfg: DataConfig, seed: int, sources: list[Source], tokenizer: Tokenizer | None, vocab_size: int) -> Data:
    """One source, or the mixture of several. `sources` are those of `_places`."""
    num = len(cfg.mix or [None])
    held_out, sources = sources[num] if len(sources) > num else None, sources[:num]
    few = None if cfg.num_samples is None else max(1, cfg.num_samples // EVAL_SHARE)
    parts = [_parts(cfg, source, held_out, few and -(-few // num)) for source in sources]
    facts = {"vocab_size": vocab_size, "length": cfg.length}
    if cfg.mix is None:
        return Data(parts[0][0], parts[0][1], facts, tokenizer=tokenizer)
    evaluations = [part[1] for part in parts][: 1 if held_out is not None else None]
    mixture = Mixture([part[0] for part in parts], list(cfg.mix.values()), seed, cfg.num_samples)
    return Data(mixture, Mixture(evaluations, [*map(len, evaluations)], None), facts, tokenizer=tokenizer)


def build_sources(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    ending, *folders = SOURCES[cfg.name]
    files = [text_files(folder, ending) for folder in map(package_folder, folders) if folder is not None]
    return _data(cfg, seed, [*map(_bytes_of, files)], read_tokenizer(BYTES), 256)


def _places(cfg: DataConfig) -> list[Path]:
    """`data.path`, or what `data.mix` names below it, then `data.eval_path` if there is one."""
    root = Path(cfg.path or "").expanduser()
    places = [root] if cfg.mix is None else [root / name for name in cfg.mix]
    return [*places, Path(cfg.eval_path).expanduser()] if cfg.eval_path else places


def build_text(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.tokenizer and cfg.text_field, "check_data was not asked"
    tokenizer, key = read_tokenizer(cfg.tokenizer), cfg.text_field

    def documents(root: Path) -> Documents:
        files = text_files(root)
        if tokenizer.file is None:
            return _bytes_of(files)
        return Documents(tokenized(files, tokenizer, key), vocab_size=tokenizer.vocab_size)

    return _data(cfg, seed, [*map(documents, _places(cfg))], tokenizer, tokenizer.vocab_size)


def build_tokens(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    tokenizer = read_tokenizer(cfg.tokenizer) if cfg.tokenizer else None
    limit = tokenizer and tokenizer.vocab_size
    shards = [read_shards(str(place)) for place in _places(cfg)]
    found = max(check_ids(each, limit) for each in shards)
    vocab_size = limit or found
    if cfg.packing == "none":  # a shard is one row of tokens, as nanoGPT and llm.c read it
        shards = [[replace(shard, ends=None) for shard in each] for each in shards]
    elif endless := [shard.path for each in shards for shard in each if shard.ends is None]:
        raise ConfigError(
            f"data.packing={cfg.packing}: {endless[0]} does not say where its documents end; expected Megatron's .idx "
            f"or a {MANIFEST} beside it, or data.packing=none"
        )
    data = _data(cfg, seed, [Documents(each, vocab_size=vocab_size) for each in shards], tokenizer, vocab_size)
    if tokenizer is None:
        of = f"a vocabulary of {found:,} ids, the largest one in the shards"
        return replace(data, notes=(f"data=tokens: {of}; data.tokenizer gives its own",))
    places = {shard.path.with_name(MANIFEST) for each in shards for shard in each}
    made = {str(place): read_json(place).get("tokenizer") for place in sorted(places) if place.is_file()}
    others = [place for place, digest in made.items() if digest not in (None, tokenizer.digest)]
    warning = f"data.tokenizer={cfg.tokenizer}: {first_few(others)} has the hash of another; its ids may mean others"
    return replace(data, notes=(warning,) if others else ())


def build_chat(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.tokenizer and cfg.path and cfg.length, "check_data was not asked"
    tokenizer = read_tokenizer(cfg.tokenizer)
    found = [rendered(text_files(place, ".jsonl"), cfg, tokenizer) for place in _places(cfg)]
    if len(found) == 1 and len(found[0][0].sizes) < 2:
        raise ConfigError(f"data.path={cfg.path}: has one chat to train on; expected another to evaluate")
    data = _data(cfg, seed, [chats for chats, _ in found], tokenizer, tokenizer.vocab_size)
    return replace(data, notes=tuple(note for _, notes in found for note in notes))


def absent(cfg: DataConfig) -> Data:
    """The data of an export, or of a prediction of prompts."""
    tokenizer, nobody_reads_it = read_tokenizer(cfg.tokenizer or BYTES), cast(Any, [None])
    facts = {"vocab_size": tokenizer.vocab_size, "length": cfg.length}
    return Data(nobody_reads_it, nobody_reads_it, facts, tokenizer=tokenizer)
