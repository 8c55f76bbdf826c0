"""Check of a data set of somebody's own, before a network is built from what it says."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from amp_core.config.errors import ConfigError
from amp_core.data.base import Data, Seeded

_FACTS: dict[str, dict[str, int]] = {"images": {"num_classes": 1, "image_shape": 3}}
_FACTS |= {"text": {"vocab_size": 1, "length": 1}}
_FACTS |= {"table": {"num_numbers": 0, "cardinalities": 0, "num_outputs": 0}}
"""By kind of data the facts that its networks are built from, each with how many sizes it has; 0: it is none."""
_LOOKED_AT = 8


def check_own(data: Any, file: str, kind: str, seed: int) -> None:
    """Raise ConfigError: facts are missing or no sizes, a part is empty, or a few samples are not what they say."""
    if not isinstance(data, Data):
        raise ConfigError(f"{file}: build returns {type(data).__name__}; expected amp_core.data.Data")
    for fact, num in _FACTS.get(kind, {}).items():
        if fact not in data.facts:
            raise ConfigError(f"{file}: its facts have no {fact}, which networks are built from")
        value = data.facts[fact]
        sizes = value if isinstance(value, tuple | list | torch.Size) and num == 3 else [value]
        if num and (len(sizes) != num or any(not isinstance(size, Integral) or size < 1 for size in sizes)):
            expected = "(channels, height, width)" if num == 3 else "a whole number above 0"
            raise ConfigError(f"{file}: its facts have {fact}={value}; expected {expected}")
    for name, part in (("train", data.train), ("eval", data.eval)):
        num = len(part)
        if num == 0:
            raise ConfigError(f"{file}: its part {name} has no samples; expected at least one")
        keys = [(index * (num - 1) // _LOOKED_AT, 0) for index in range(_LOOKED_AT + 1)]
        if kind == "images" and (name == "eval" or data.finish is None):
            wrong = _wrong(Seeded(part, seed, puts_back=True).__getitems__(keys), data.facts)
            if wrong is not None:
                raise ConfigError(f"{file}: samples of its part {name} are {wrong}")


def _wrong(batch: Any, facts: dict[str, Any]) -> str | None:
    if not (isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(x, torch.Tensor) for x in batch)):
        return f"a {type(batch).__name__}; expected (images, labels), two tensors"
    (images, labels), shape = batch, tuple(facts["image_shape"])
    if tuple(images.shape[1:]) != shape:
        return f"images {tuple(images.shape[1:])}; its facts have image_shape={shape}"
    if labels.dtype == torch.int64 and not 0 <= labels.min() <= labels.max() < facts["num_classes"]:
        return f"of class {labels.min()} to {labels.max()}; its facts have num_classes={facts['num_classes']}"
    return None
