"""A tokenizer with a chat template, small enough to be made in a test."""

from __future__ import annotations

import functools
import json
from pathlib import Path

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Of SmolLM2-135M-Instruct."""


@functools.cache
def _vocabulary() -> str:
    """A byte-level BPE, as transformers saves it; its places of tokens are trimmed, as GPT-2's are."""
    from tokenizers import ByteLevelBPETokenizer

    inner = ByteLevelBPETokenizer(trim_offsets=True)
    special = ["<|im_start|>", "<|im_end|>", "<s>"]
    inner.train_from_iterator(["def f(x):\n    return x The self returns. " * 50], 400, special_tokens=special)
    return inner.to_str()


def write_tokenizer(folder: Path, template: str = SMOLLM2) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(_vocabulary())
    tokens = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": template}))


def chat_settings(folder: Path) -> list[str]:
    """Overrides for 40 short chats, written into a folder."""
    write_tokenizer(folder / "tokenizer")
    system = {"role": "system", "content": "x"}
    chats = [
        [system, {"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "return x" * (1 + n % 4)}]
        for n in range(40)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats))
    return [
        *("data=chat", f"data.path={folder / 'chat.jsonl'}", f"data.tokenizer={folder / 'tokenizer'}"),
        *("data.length=64", "data.num_samples=32"),
    ]
