"""Values of options, and how networks of several contestants are compiled."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

import torch


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """A list with commas, of known names."""

    def parse(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; expected some of {', '.join(known)}")
        return text.split(",")

    return parse


def numbers(text: str) -> list[int]:
    """A list of counts, with commas."""
    return [count(number) for number in text.split(",")]


def count(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a whole number from 1 on")
    return int(text)


def compile_all() -> None:
    """From here on each network is compiled for itself, and none may fall back to running it as it is."""
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined]
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # type: ignore[attr-defined]
