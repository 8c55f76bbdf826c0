"""Chats as token ids: rendered once by the tokenizer's own template, with the tokens that are trained.

A chat is one document. It is cut at the end of an answer where it is too long, and left out where no token would be
trained: a batch of such chats has a loss of 0 / 0, or of 0 that counts as a step.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amp_core.config.errors import ConfigError
from amp_core.config.files import visible, write_file
from amp_core.config.schema import DataConfig
from amp_core.data.packing import IGNORE
from amp_core.data.tokenizers import Tokenizer
from amp_core.data.tokens import at_once, cached, json_lines, stamps

_SECONDS = 10.0
"""For one chat; a common one takes 0.1 ms."""

Messages = list[dict[str, Any]]


class Chats:
    """The chats of a folder of the cache, read as `tokens.Documents`."""

    def __init__(self, folder: Path) -> None:
        self._ids = np.memmap(folder / "ids.bin", "<u4", "r")
        self._is_trained = np.memmap(folder / "trained.bin", "?", "r")
        ends = np.lib.format.open_memmap(folder / "ends.npy", mode="r")
        self._begins = np.concatenate([[0], ends[:-1]])
        self.sizes = ends - self._begins

    def pairs(self, document: int, start: int, count: int) -> tuple[Any, Any]:
        here = slice(first := int(self._begins[document]) + start, first + count + 1)
        ids, is_trained = self._ids[here].astype(np.int64), self._is_trained[here]
        return ids[:-1], np.where(is_trained[1:], ids[1:], IGNORE)


def rendered(files: Sequence[Path], cfg: DataConfig, tokenizer: Tokenizer) -> tuple[Chats, list[str]]:
    """The chats of files, from the cache, and notes. ConfigError: a line is wrong."""
    about = (tokenizer.digest, tokenizer.template, tokenizer.tokens, cfg.text_field, cfg.train_on, cfg.length)
    folder = cached(("chat", 1, *about, stamps(files)), lambda folder: _write(files, cfg, tokenizer, folder))
    notes = json.loads((folder / "notes.json").read_text())
    return Chats(folder), [f"data=chat: {note}" for note in notes]


def _write(files: Sequence[Path], cfg: DataConfig, tokenizer: Tokenizer, folder: Path) -> None:
    assert cfg.text_field and cfg.train_on and cfg.length, "check_data was not asked"
    time = max(file.stat().st_mtime for file in files)
    ends, num_cut, without, total, count = [], 0, [], 0, 0
    with (
        _template(tokenizer, cfg.train_on, time) as render,
        (folder / "ids.bin").open("xb") as to_ids,
        (folder / "trained.bin").open("xb") as to_trained,
    ):
        lines = ((file, each) for file in files for each in enumerate(json_lines(file, cfg.text_field), 1))
        chats = ((f"{file}, line {number}", each) for file, (number, (_, each)) in lines)
        rendered = ((where, each, *render(where, _checked(where, each))) for where, each in chats)
        for part in at_once(rendered, lambda each: len(each[2])):
            encoded = tokenizer.encode_spans([text for *_, text, _ in part])
            for (where, messages, _, spans), (ids, places) in zip(part, encoded, strict=True):
                total += 1
                found: tuple[list[int], list[bool]] | None = ids, _trained(places, spans)
                if len(ids) > cfg.length + 1:
                    found = _cut(where, messages, render, tokenizer, cfg.length)
                    num_cut += found is not None and any(found[1][1:])
                if found is None or not any(found[1][1:]):
                    without.append(where)
                    continue
                to_ids.write(np.array(found[0], "<u4").tobytes())
                to_trained.write(np.array(found[1], "?").tobytes())
                ends.append(count := count + len(found[0]))
    chats, lack = f"{total:,} chats", f"a token to train on within data.length={cfg.length}"
    if not ends:
        expected = "expected answers of the role assistant that end within it, or data.train_on=all"
        raise ConfigError(f"data.path={cfg.path}: none of its {chats} has {lack}; {expected}")
    notes = [f"{num_cut:,} of {chats} are cut at the end of an answer, to data.length={cfg.length}"] if num_cut else []
    if without:
        notes.append(f"{len(without):,} of {chats} are left out, without {lack}; the first is {visible(without[0])}")
    if "strftime_now" in (tokenizer.template or ""):
        notes.append("the template asks for the date, and gets that of the newest file: a resumed run has the same one")
    np.save(folder / "ends.npy", np.array(ends, dtype=np.int64))
    write_file(folder / "notes.json", json.dumps(notes).encode())


def _checked(where: str, messages: Any) -> Messages:
    """What a line has. ConfigError: not messages."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: expected a list of messages, found {json.dumps(messages)[:40]}")
    for number, message in enumerate(messages, 1):
        found = message if isinstance(message, dict) else {}
        for key in ("role", "content"):
            if key == "content" and "tool_calls" in found and found.get(key) is None:
                continue
            if not isinstance(found.get(key), str):
                has = f"is {type(found[key]).__name__}" if key in found else "is missing"
                raise ConfigError(f"{where}: {key!r} of message {number} {has}; expected text")
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError as problem:
        raise ConfigError(f"{where}: holds half of a surrogate pair") from problem
    return messages


def _trained(places: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens reach into a trained range.

    Tokenizers trim spaces from the places of tokens, so that indentation would have none: a token begins where the one
    before it ended at the latest.
    """
    found, before, todo = [], 0, list(spans)
    for first, end in places:
        first, before = min(first, before), max(before, end)
        while todo and todo[0][1] <= first:
            todo.pop(0)
        found.append(bool(todo) and end > todo[0][0] and end > first)
    return found


def _cut(
    where: str, messages: Messages, render: Render, tokenizer: Tokenizer, length: int
) -> tuple[list[int], list[bool]] | None:
    """The longest beginning of a chat that ends with an answer and fits; None: there is none."""
    borders = [turn for turn, message in enumerate(messages[:-1], 1) if message["role"] == "assistant"]

    def until(border: int) -> tuple[list[int], list[bool]]:
        text, spans = render(where, messages[:border])
        ids, places = tokenizer.encode_spans([text])[0]
        return ids, _trained(places, spans)

    fitting = bisect.bisect_right(borders, length + 1, key=lambda border: len(until(border)[0]))
    return until(borders[fitting - 1]) if fitting else None


def rendered_prompts(
    chats: Mapping[int, Any], tokenizer: Tokenizer, time: float
) -> Iterator[tuple[int, str, str | None]]:
    """(number, text with what begins the answer, None) of chats by their numbers, or ("", what is wrong)."""
    todo = list(chats)
    while todo:
        try:
            with _template(tokenizer, "all", time) as render:  # one that was too slow is dead
                while todo:
                    where = f"line {todo[0]}"
                    text, _ = render(where, _checked(where, chats[todo[0]]), prompt=True)
                    yield todo.pop(0), text, None
        except ConfigError as problem:
            yield todo.pop(0), "", str(problem)


Render = Callable[..., tuple[str, list[tuple[int, int]]]]
"""(where, messages) to the text of a chat, and which letters of it are trained. ConfigError: the template refuses it.

With `prompt`: with what begins the assistant's next turn, none of it trained.
"""


@contextlib.contextmanager
def _template(tokenizer: Tokenizer, train_on: str, time: float) -> Iterator[Render]:
    """The process that renders (`amp_core.data.templates`). ConfigError: there is no template."""
    if tokenizer.template is None:
        raise ConfigError(
            f"data.tokenizer={tokenizer.name}: has no chat template; expected chat_template.jinja beside it, or "
            f"chat_template in tokenizer_config.json: use the tokenizer of a chat model"
        )
    # No key or password of the environment; packages are found where this process finds them.
    env = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ}
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("templates.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    setup = {"template": tokenizer.template, "tokens": tokenizer.tokens, "time": time, "train_on": train_on}
    unsent: list[dict[str, Any]] = [setup | {"seconds": _SECONDS}]

    def render(where: str, messages: Messages, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        unsent.append({"messages": messages, "prompt": prompt})
        line = b""
        with contextlib.suppress(BrokenPipeError):  # how it ended says more
            stdin.writelines(json.dumps(each).encode() + b"\n" for each in unsent)
            stdin.flush()
            line = stdout.readline()
        unsent.clear()
        whose = f"{where}: the chat template of {tokenizer.name}"
        if not line.endswith(b"\n"):
            code = process.wait()
            how = f"takes more than {_SECONDS:g} s" if code == -signal.SIGALRM else f"ended with {code}"
            raise ConfigError(f"{whose} {how}; correct the template or the chat")
        answer = json.loads(line)
        if "problem" in answer:
            raise ConfigError(f"{whose} refuses it: {' '.join(answer['problem'].split())}")
        return answer["text"], answer["spans"]

    try:
        yield render
    finally:
        process.kill()
        process.communicate()
