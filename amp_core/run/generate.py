"""Texts that a language model continues: greedy or sampled, in batches, the same for a seed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.config.errors import ConfigError
from amp_core.config.files import read_bytes
from amp_core.config.kinds import KINDS
from amp_core.data.base import uniforms
from amp_core.run.lines import dumps
from amp_core.step.amp import Amp
from amp_core.tensors import is_sharded, widest

_BATCH = 32
_ASKS_EVERY = 16
"""Tokens between two looks whether all texts have ended, which wait for the device."""
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
        amp: the mode.
        prompts: ids, one or more each.
        num_tokens: new ones at most.
        length: tokens that the network sees at most: the last ones.
        temperature: divides logits; 0 takes the most likely token.
        seed: of the random numbers.
        first: number of the first prompt.
        eos: ends a text, and is not part of it.
    """
    net.eval()
    lengths, device, rows = [len(prompt) for prompt in prompts], amp.device, range(first, first + len(prompts))
    padded = [[*prompt, *[0] * (max(lengths) + num_tokens - len(prompt))] for prompt in prompts]
    tokens, ends = torch.tensor(padded, device=device), torch.tensor(lengths, device=device)[:, None]
    # Inverse transform sampling: one number per token, whatever the vocabulary.
    drawn = torch.from_numpy(uniforms(seed, rows, [0] * len(rows), num_tokens)).to(device, widest(device))
    for step in range(num_tokens):
        starts = (ends - length).clamp(min=0)
        seen = starts + torch.arange(min(length, max(lengths) + step), device=device)
        with amp.autocast():
            logits = net(tokens.gather(1, seen))
        last = (ends - starts - 1)[:, :, None].expand(-1, -1, logits.shape[-1])
        tokens.scatter_(1, ends, _choose(logits.gather(1, last)[:, 0], temperature, drawn[:, step : step + 1]))
        ends = ends + 1
        if eos is not None and step % _ASKS_EVERY == _ASKS_EVERY - 1:
            is_new = torch.arange(tokens.shape[1], device=device) >= ends - step - 1
            if bool(((tokens == eos) & is_new).any(1).all()):
                break
    new = [ids[num : num + step + 1] for ids, num in zip(tokens.tolist(), lengths, strict=True)] if num_tokens else []
    return [ids[: ids.index(eos)] if eos in ids else ids for ids in new] or [[] for _ in prompts]


def _choose(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Tokens [B, 1]. Those of logits that are not finite are bad, not an error."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    sums = (logits.to(uniform.dtype) / temperature).softmax(-1).cumsum(-1)
    return torch.searchsorted(sums, uniform * sums[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)


def answers(loop: Any, net: nn.Module, file: str) -> Iterator[tuple[int, str, bool]]:
    """(index, line, True) for the prompts in a file of lines such as {"prompt": "def "}; each rank its share.

    A line that has no prompt gets an `error`. ConfigError: the run is not one of text.
    """
    cfg, env, tokenizer = loop.cfg, loop.env, loop.data.tokenizer
    if KINDS.get(cfg.data.name) not in ("text", "tokens", "chat") or tokenizer is None:
        raise ConfigError(f"predict_on={file}: data={cfg.data.name} has no tokenizer; expected a folder of images")
    found = [_prompt_of(line) for line in read_bytes(Path(file), _MOST_BYTES).splitlines()]
    ids = tokenizer.encode([prompt for prompt, _ in found])
    readable = [index for index, (prompt, _) in enumerate(found) if ids[index]]
    errors = [index for index in range(len(found)) if not ids[index]]
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
            line = {"index": row, "prompt": found[row][0], "text": tokenizer.decode(tokens), "num_tokens": len(tokens)}
            yield row, dumps(line), True
    for row in errors if env.is_main else ():
        yield row, dumps({"index": row, "error": f"line {row + 1} {found[row][1] or 'has an empty prompt'}"}), True


def _prompt_of(line: bytes) -> tuple[str, str | None]:
    """The prompt of a line, or "" and what is wrong."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as problem:
        return "", f"is no JSON: {problem}"
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        return "", 'has no text "prompt"'
    return value["prompt"], None
