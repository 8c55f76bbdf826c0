"""Text generation by a language model: greedy or sampled, in batches, reproducible by seed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.config.errors import ConfigError
from amp_core.config.files import read_bytes
from amp_core.config.kinds import KINDS
from amp_core.data.base import uniforms
from amp_core.data.chat import rendered_prompts
from amp_core.models.gpt import GPT, Block, KeyCache
from amp_core.models.timm_and_hf import Logits, as_published
from amp_core.run.lines import dumps
from amp_core.step.amp import Amp
from amp_core.tensors import is_sharded, widest

_BATCH = 32
_ASKS_EVERY = 16
"""Tokens between two checks whether all texts have ended; each check waits for the device."""
_MOST_BYTES = 1 << 28


@torch.no_grad()
def generate(
    net: nn.Module,
    amp: Amp,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    length: int,
    temperature: float = 0.0,
    seed: int = 0,
    first: int = 0,
    eos: int | None = None,
) -> list[list[int]]:
    """The ids that continue each prompt.

    Padding is on the right, where causal attention does not see it, and the random number of a token is a function of
    (seed, number of the prompt, number of the token): the others in a batch change no more than a kernel's rounding.

    Args:
        net: tokens int64 [B, L] to logits [B, L, vocab_size], causal.
        prompts: ids, one or more each; `first` is the number of the first one.
        length: tokens that the network sees at most, the last ones; one of transformers sees all it has positions for.
        temperature: divides logits; 0 takes the most likely token.
        eos: ends a text, and is not part of it.
    """
    net.eval()
    if not num_tokens:
        return [[] for _ in prompts]
    lengths, device, rows = [len(prompt) for prompt in prompts], amp.device, range(first, first + len(prompts))
    # Inverse transform sampling: one number per token, whatever the vocabulary.
    drawn = torch.from_numpy(uniforms(seed, rows, [0] * len(rows), num_tokens)).to(device, widest(device))

    def choose(logits: Tensor, step: int) -> Tensor:
        return _choose(logits, temperature, drawn[:, step : step + 1])

    if isinstance(net, Logits):
        return _by_transformers(net, amp, prompts, choose, num_tokens, eos)
    padded = [[*prompt, *[0] * (max(lengths) + num_tokens - len(prompt))] for prompt in prompts]
    tokens, ends = torch.tensor(padded, device=device), torch.tensor(lengths, device=device)[:, None]
    prefill = torch.arange(max(lengths), device=device).expand(len(prompts), -1)
    cache = KeyCache(prefill, max(lengths), min(length, max(lengths) + num_tokens))
    keeps_keys = isinstance(net, GPT) and not is_sharded(net) and type(net.blocks[0]) is Block
    step = 0
    for step in range(num_tokens):
        seen = max(lengths) + step
        with amp.autocast():
            if keeps_keys and seen <= length:
                if step:
                    cache.positions, cache.seen = ends - 1, seen
                last = ends - 1 if step == 0 else torch.zeros_like(ends)
                logits = net.continued(tokens.gather(1, cache.positions), cache, last)  # type: ignore[operator]
            else:  # also where the texts get longer than what the network sees: then all positions change
                starts = (ends - length).clamp(min=0)
                logits = net(tokens.gather(1, starts + torch.arange(min(length, seen), device=device)))
                last = (ends - starts - 1)[:, :, None].expand(-1, -1, logits.shape[-1])
                logits = logits.gather(1, last)[:, 0]
        tokens.scatter_(1, ends, choose(logits, step))
        ends = ends + 1
        if eos is not None and step % _ASKS_EVERY == _ASKS_EVERY - 1:
            is_new = torch.arange(tokens.shape[1], device=device) >= ends - step - 1
            if bool(((tokens == eos) & is_new).any(1).all()):
                break
    return _ended([ids[num : num + step + 1] for ids, num in zip(tokens.tolist(), lengths, strict=True)], eos)


def _ended(texts: list[list[int]], eos: int | None) -> list[list[int]]:
    return [ids[: ids.index(eos)] if eos in ids else ids for ids in texts]


def _by_transformers(
    net: nn.Module,
    amp: Amp,
    prompts: Sequence[Sequence[int]],
    choose: Callable[[Tensor, int], Tensor],
    num_tokens: int,
    eos: int | None,
) -> list[list[int]]:
    """As `generate` by that of the library, with its cache of keys, and its own limit of positions.

    Sampling is ours, so that it does not depend on the batch: a processor of logits leaves the chosen token alone.
    """
    published, device = as_published(net), amp.device
    limit = max(1, getattr(published.config, "max_position_embeddings", 1 << 30) - num_tokens)
    prompts = [prompt[-limit:] for prompt in prompts]
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]

    def chosen(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).scatter(1, choose(scores, ids.shape[1] - longest), 0.0)

    with amp.autocast():
        found = published.generate(
            torch.tensor(rows, device=device), attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=num_tokens, do_sample=False, num_beams=1, use_cache=True, eos_token_id=eos,
            pad_token_id=eos or 0, logits_processor=[chosen],
        )  # fmt: skip
    return _ended(found[:, longest:].tolist(), eos)


def _choose(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Tokens [B, 1]. Those of logits that are not finite are bad, not an error."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    sums = (logits.to(uniform.dtype) / temperature).softmax(-1).cumsum(-1)
    return torch.searchsorted(sums, uniform * sums[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)


def answers(loop: Any, net: nn.Module, file: str) -> Iterator[tuple[int, str, bool]]:
    """(index, line, True) for the lines {"prompt": "def "} or {"messages": [...]} of a file; each rank its share.

    A line without either gets an `error`. ConfigError: the file is empty, or the run not one of text.
    """
    cfg, env, tokenizer = loop.cfg, loop.env, loop.data.tokenizer
    if KINDS.get(cfg.data.name) not in ("text", "tokens", "chat") or tokenizer is None:
        how = "use data.tokenizer=<its folder>" if cfg.data.name == "tokens" else "expected a folder of images"
        raise ConfigError(f"predict_on={file}: data={cfg.data.name} has no tokenizer; {how}")
    found = [_read(number, line) for number, line in enumerate(read_bytes(file, _MOST_BYTES).splitlines(), 1)]
    if not found:
        raise ConfigError(f'predict_on={file}: is empty; expected a line {{"prompt": "def "}} or {{"messages": [...]}}')
    chats = {number: each.messages for number, each in enumerate(found, 1) if each.messages is not None}
    for number, text, problem in rendered_prompts(chats, tokenizer, os.stat(file).st_mtime):
        found[number - 1].text, found[number - 1].problem = text, problem
    texts = [each.text for each in found]
    both = zip(found, tokenizer.encode(texts), tokenizer.encode(texts, special=True), strict=True)
    ids = [plain if each.messages is None else chat for each, plain, chat in both]
    readable = [index for index, each in enumerate(found) if ids[index] and not each.problem]
    errors = [index for index, each in enumerate(found) if each.problem or not ids[index]]
    whole = any(map(is_sharded, loop.nets))  # whose ranks gather weights together
    settings = {"num_tokens": cfg.recipe.get("sample_tokens") or 64, "temperature": cfg.recipe.get("temperature", 0.0)}
    for number, start in enumerate(range(0, len(readable), _BATCH)):
        is_own = number % env.world_size == env.rank
        if not (is_own or whole):
            continue
        rows = readable[start : start + _BATCH]
        new = generate(
            net,
            loop.amp,
            [ids[row] for row in rows],
            length=loop.data.facts["length"],
            seed=cfg.seed,
            first=start,
            eos=tokenizer.eos,
            **settings,
        )
        for row, tokens in zip(rows, new, strict=True) if is_own else ():
            of = found[row]
            asked = {"prompt": of.text} if of.messages is None else {"messages": of.messages}
            line = {"index": row, **asked, "text": tokenizer.decode(tokens), "num_tokens": len(tokens)}
            yield row, dumps(line), True
    for row in errors if env.is_main else ():
        yield row, dumps({"index": row, "error": found[row].problem or f"line {row + 1} has an empty prompt"}), True


@dataclass
class _Asked:
    """A line of a file: a prompt, or a chat, rendered with what begins the assistant's turn."""

    text: str = ""
    messages: list[Any] | None = None
    problem: str | None = None


def _read(number: int, line: bytes) -> _Asked:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as problem:
        return _Asked(problem=f"line {number} is no JSON: {problem}")
    value = value if isinstance(value, dict) else {}
    if isinstance(value.get("messages"), list):
        return _Asked(messages=value["messages"])
    if not isinstance(value.get("prompt"), str):
        return _Asked(problem=f'line {number} has no text "prompt" and no list "messages"')
    try:
        value["prompt"].encode()
    except UnicodeEncodeError:
        return _Asked(problem=f"line {number} holds half of a surrogate pair")
    return _Asked(value["prompt"])
