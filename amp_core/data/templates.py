"""Renders chats by the template of a tokenizer, as a program of its own: the template comes with a model, from anybody.

Jinja's sandbox takes its code away, a process bounds its time and memory: SIGALRM ends a template that loops, in
whichever thread the caller runs. Reads lines of JSON, a setup, then chats; answers each chat. Imports no torch.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import resource
import signal
import sys
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What transformers' templates put before the tokens that a model learns."""
_MOST_MEMORY = 4 << 30
_REASONING = "reasoning_content", "thinking", "reasoning"

Spans = list[tuple[int, int]]


class Chat:
    """A compiled template, in an environment as that of transformers.

    `time`: seconds since 1970, what the template takes for now: a resumed run gets the same tokens.
    """

    def __init__(self, template: str, tokens: dict[str, str], time: float) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        now = datetime.datetime.fromtimestamp(time, datetime.UTC)
        env.filters["tojson"] = _to_json
        env.globals.update(raise_exception=_raise_exception, strftime_now=now.strftime)
        self._blocks: list[tuple[int, str]] = []
        self._done = 0
        env.extend(generated=lambda text: self._blocks.append((self._done, text)))
        self._template, self._tokens = env.from_string(template), tokens
        self._has_marks = MARKS.search(template) is not None

    def render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """The text; `prompt`: with what begins the assistant's next turn."""
        self._blocks, self._done = [], 0
        parts, about = [], {"tools": None, "documents": None, "add_generation_prompt": prompt}
        for part in self._template.generate(messages=list(map(_with_reasoning, messages)), **about, **self._tokens):
            parts.append(part)
            self._done += len(part)
        return "".join(parts)

    def render_trained(self, messages: list[dict[str, Any]], prompt: bool, train_on: str) -> tuple[str, Spans]:
        """The text, and the ranges of its letters that are trained. ValueError: they cannot be known."""
        text = self.render(messages, prompt)
        if train_on == "all":
            return text, [(0, len(text))]
        if self._has_marks:
            if any(not text.startswith(part, at) for at, part in self._blocks):
                raise ValueError("has {% generation %} inside of a macro or block, where its place is not known")
            return text, [(at, at + len(part)) for at, part in self._blocks]
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                before, upto = self.render(messages[:turn], prompt=True), self.render(messages[: turn + 1])
                if not (text.startswith(upto) and upto.startswith(before)):
                    raise ValueError(
                        f"renders the messages up to number {turn + 1} other than in the whole chat, so that its "
                        f"tokens are not known; use one with {{% generation %}}, or data.train_on=all"
                    )
                spans.append((len(before), len(upto)))
        return text, spans


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what it renders is kept with its place."""

    tags = {"generation"}  # noqa: RUF012  # as jinja declares it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_keep"), [], [], body).set_lineno(line)

    def _keep(self, caller: Any) -> str:
        text = caller()
        self.environment.generated(text)  # type: ignore[attr-defined]  # `extend` made it
        return text


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers' filter, with its order of arguments; Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under the names by which templates ask for it."""
    found = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _main() -> None:
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it may be ignored or blocked by who started this
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    setup, chat = json.loads(sys.stdin.readline()), None
    seconds, train_on = setup.pop("seconds"), setup.pop("train_on")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            chat = chat or Chat(**setup)
            text, spans = chat.render_trained(**json.loads(line), train_on=train_on)
            answer = {"text": text, "spans": spans}
        except Exception as problem:  # whatever a template may raise
            answer = {"problem": str(problem) or type(problem).__name__}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        _main()
