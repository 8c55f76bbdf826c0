"""Tokenizers: bytes, or a file tokenizer.json, read by the package tokenizers, which runs no code of its folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amp_core.config.checks import tokenizer_file, why_no_tokenizer
from amp_core.config.errors import ConfigError
from amp_core.config.files import read_bytes, read_json, read_text

BYTES = "bytes"
_MOST = 1 << 28
"""Bytes of a tokenizer.json; those of 250,000 tokens have 34 MB."""
_TEMPLATE = "chat_template.jinja"


class Tokenizer:
    """Texts as ids and back.

    Attributes:
        vocab_size: ids are below it; added tokens count.
        eos: id that ends a document; None: none is known.
        digest: SHA-256 of what decides ids; "bytes".
        num_bytes: UTF-8 bytes that a token stands for, 0 for special ones, int64 [vocab_size].
        template: the chat template; None: there is none.
        tokens: special tokens by the names that templates use, such as bos_token.
        file: tokenizer.json; None for bytes.
    """

    def __init__(self, name: str, file: Path | None = None) -> None:
        self.name, self.file = name, file
        self.eos: int | None = None
        self.template: str | None = None
        self.tokens: dict[str, str] = {}
        if file is None:
            self._inner, self.digest, self.vocab_size = None, BYTES, 256
            self.num_bytes = torch.ones(256, dtype=torch.int64)
            return
        from tokenizers import Tokenizer as Inner

        content = read_bytes(file, _MOST)
        self._inner = Inner.from_str(content.decode())  # type: ignore[attr-defined]  # the package, not this module
        self._inner.no_truncation()  # a file may hold the settings of its last use
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        settings = _settings(file.parent)
        self.eos, self.template = _eos(settings, vocabulary), _template(file.parent, settings)
        named = {key: _content(token) for key, token in settings.items() if key.endswith("_token")}
        self.tokens = {key: token for key, token in named.items() if isinstance(token, str)}
        self.digest = hashlib.sha256(content + repr(self.eos).encode()).hexdigest()
        self.num_bytes = _num_bytes(json.loads(content), vocabulary, self.vocab_size)

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Ids of each text, without a token before or after it.

        `special`: take the names of special tokens in a text for these tokens, as in a rendered chat; else they are
        text, so that a document cannot end itself.
        """
        if self._inner is None:
            return [list(text.encode()) for text in texts]
        self._inner.encode_special_tokens = not special
        return [each.ids for each in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of rendered chats, and the letters [first, end) that each stands for."""
        assert self._inner is not None
        self._inner.encode_special_tokens = False
        return [(each.ids, each.offsets) for each in self._inner.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are left out."""
        if self._inner is None:
            return bytes(ids).decode(errors="replace")
        return self._inner.decode(list(ids), skip_special_tokens=True)


def read_tokenizer(name: str) -> Tokenizer:
    """ "bytes", a folder with tokenizer.json, or such a file. ConfigError: there is none, or it cannot be read."""
    if problem := why_no_tokenizer(name):
        raise ConfigError(problem)
    if name == BYTES:
        return Tokenizer(name)
    try:
        return Tokenizer(name, tokenizer_file(name))
    except Exception as problem:  # the package raises plain Exceptions
        raise ConfigError(f"data.tokenizer={name}: cannot be read: {problem}") from problem


def vocabulary_of(file: Path) -> dict[int, str]:
    """Tokens by their ids, as a tokenizer.json lists them. Raises OSError, ValueError, KeyError: it is no such file."""
    content = json.loads(read_bytes(file, _MOST))
    vocab: Any = content["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: tokens with their scores
        found = {number: token for number, (token, *_) in enumerate(vocab)}
    else:
        found = {number: token for token, number in vocab.items()}
    return found | {each["id"]: each["content"] for each in content.get("added_tokens", ())}


def _settings(folder: Path) -> dict[str, Any]:
    """What transformers keeps beside tokenizer.json; the first file that has a key decides."""
    found: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"):
        if (folder / name).is_file():
            found = {key: value for key, value in read_json(folder / name).items() if value is not None} | found
    return found


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _eos(settings: dict[str, Any], vocabulary: dict[str, int]) -> int | None:
    token = _content(settings.get("eos_token"))
    if isinstance(token, str):
        if token not in vocabulary:
            raise ValueError(f"its eos_token {token!r} is not in its vocabulary")
        return vocabulary[token]
    number = settings.get("eos_token_id")
    number = number[0] if isinstance(number, list) and number else number
    return number if isinstance(number, int) and number in vocabulary.values() else None


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    if (folder / _TEMPLATE).is_file():
        return read_text(folder / _TEMPLATE)
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}.get("default")
    return found if isinstance(found, str) else None


def _num_bytes(content: dict[str, Any], vocabulary: dict[str, int], vocab_size: int) -> Tensor:
    """By the decoder: of ByteLevel a letter is a byte; else `<0x0A>` is one, and the signs of word pieces are none."""
    is_byte_level = '"ByteLevel"' in json.dumps(content.get("decoder"))  # also one of a sequence
    added = {each["id"]: each for each in content.get("added_tokens", ())}
    counts = np.zeros(vocab_size, dtype=np.int64)
    for token, number in vocabulary.items():
        if number in added:
            counts[number] = 0 if added[number].get("special") else len(token.encode())
        elif is_byte_level:
            counts[number] = len(token)
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):
            counts[number] = 1
        else:
            counts[number] = len(token.removeprefix("##").replace("\u2581", " ").encode())
    return torch.from_numpy(counts)
