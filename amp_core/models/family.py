"""Families of networks that are built from the same facts of the data and have the same inputs and outputs.

Names are looked up in an explicit table, so that a configuration can choose but never run code.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from amp_core.config.errors import ConfigError, suggest

ImageShape = tuple[int, int, int]
"""(channels, height, width)"""
Builder = Callable[..., nn.Module]
"""Takes the facts of the data and its own options by keyword; returns a network with initial weights on the CPU."""


@dataclass(frozen=True)
class Family:
    """The networks that a recipe accepts.

    Attributes:
        what: "a language model", for messages.
        example: facts of an example data set, to check options before there is one.
        more_names: further names, found when needed.
        more: the builder of a further name.
        libraries: names of functions in `timm_and_hf` that return the builder of `<library>:<name>`, by library.
        outputs: shape of the output for two images, from the facts, to try a network that is not our own. Our own take
            images of any size.
        in_channels: colour channels that a network takes, by name; None: any number.
    """

    what: str
    builders: Mapping[str, Builder]
    example: Mapping[str, Any]
    more_names: Callable[[], Iterable[str]] | None = None
    more: Callable[[str], Builder] | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    outputs: Callable[..., tuple[int, ...]] | None = None
    in_channels: Callable[[str], int | None] = lambda name: None

    def names(self) -> list[str]:
        """All names, our own first."""
        return [*self.builders, *(self.more_names() if self.more_names else ())]

    def builder(self, name: str) -> Builder:
        """The builder of a name in the family."""
        if name in self.builders:
            return self.builders[name]
        library, colon, rest = name.partition(":")
        if colon:
            from amp_core.models import timm_and_hf

            return getattr(timm_and_hf, self.libraries[library])(rest)
        assert self.more is not None
        return self.more(name)


RESERVED = {
    **dict.fromkeys(("image_size", "input_size", "img_size"), "follows data.image_size; leave it out"),
    "weights": "use model.weights=<file>, or model.weights=default for torchvision's own",
    "progress": "has no effect without a download; leave it out",
    "aux_logits": "a recipe takes one output from a model; leave it out",
    "transform_input": "is for pretrained weights; leave it out",
}
"""Options that a configuration may not give, besides the facts of the data."""


def check_model(name: str, options: Mapping[str, Any], family: Family) -> list[str]:
    """Problems of a model's name and options, one sentence each. Allocates no weights and draws no random numbers."""
    is_theirs = ":" in name and name.partition(":")[0] in family.libraries
    if not is_theirs and name not in family.builders and name not in (names := family.names()):
        valid = [*names, *(f"{library}:<name>" for library in family.libraries)]
        return [f"model.name={name}: is not {family.what}. {suggest(name, valid)}"]
    try:
        builder = family.builder(name)
    except ConfigError as problem:
        return problem.problems
    refused = RESERVED | dict.fromkeys(family.example, "follows the data set; leave it out")
    accepted = [key for key in inspect.signature(builder).parameters if key not in refused]
    problems = [
        f"model.options.{option}: {refused.get(option) or f'{name} has no such option. {suggest(option, accepted)}'}"
        for option in options
        if option not in accepted
    ]
    if (options or is_theirs) and not problems:
        try:
            with torch.device("meta"):
                builder(**family.example, **options)
        except NotImplementedError:
            pass  # RegNet computes its widths with tensors: it cannot be built without data
        except Exception as error:  # constructors raise different types for bad options
            given = ", ".join(f"{key}={value}" for key, value in options.items())
            what = f"options: {name} cannot be built with {given}" if given else f"name={name}: cannot be built"
            problems.append(f"model.{what}: {_one_line(error)}")
    return problems


def build_model(
    name: str, family: Family, *, options: Mapping[str, Any], is_loaded: bool = False, **facts: Any
) -> nn.Module:
    """A network of the family with initial weights, on the CPU. ConfigError: unknown, or it cannot take such data.

    `facts` are those of the data (`Data.facts`); `is_loaded`: weights follow, and a folder of transformers keeps its
    vocabulary.
    """
    problems = check_model(name, options, family)
    if problems:
        raise ConfigError(problems)
    facts = {key: value for key, value in facts.items() if key in family.example}
    needed, shape = family.in_channels(name), facts.get("image_shape")
    if shape is not None and needed not in (None, shape[0]):
        raise ConfigError(f"model.name={name}: takes images with {needed} channels; these have {shape[0]}")
    builder = family.builder(name)
    # Trying a network imports torch's compiler, which takes as long as importing torch. Torchvision's all take 224x224.
    if name not in family.builders and family.outputs and shape and (":" in name or shape[1:] != (224, 224)):
        try:
            with torch.device("meta"):
                found = builder(**facts, **options).eval()(torch.empty(2, *shape))
        except NotImplementedError:
            found = None
        except Exception as error:
            what = f"does not take images of {shape[1]}x{shape[2]} pixels ({_one_line(error)})"
            raise ConfigError(f"model.name={name}: {what}; expected a larger data.image_size") from error
        output, expected = getattr(found, "shape", type(found)), family.outputs(**facts)
        if found is not None and output != expected:
            raise ConfigError(
                f"model.name={name}: returns {output}, expected logits {expected}; use another model.name"
            )
    # The vocabulary of a folder may be padded beyond the tokens of the data; that of the data is the least.
    keeps = {"is_loaded": True} if is_loaded and name.startswith("hf:") and "vocab_size" in facts else {}
    make = functools.partial(builder, **facts, **options, **keeps)
    net = make()
    _BUILT[net] = make
    for part, module in net.items() if isinstance(net, nn.ModuleDict) else ():
        _BUILT[module] = functools.partial(lambda part: cast(Any, make())[part], part)
    return net


_BUILT: weakref.WeakKeyDictionary[nn.Module, Callable[[], nn.Module]] = weakref.WeakKeyDictionary()


def built_again(net: nn.Module) -> nn.Module | None:
    """What `build_model` returned for it, before a mode or a layout changed it, with initial weights; None: unknown."""
    make = _BUILT.get(net)
    return None if make is None else make()


def stands_for(net: nn.Module, other: nn.Module) -> None:
    """Note that `other` is made of the modules of `net`, under their names."""
    _BUILT[other] = _BUILT[net]


def check_count(key: str, value: Any) -> None:
    """Raises ValueError unless `value` is a whole number above 0."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={value}, expected a whole number above 0")


def check_probability(key: str, value: Any) -> None:
    """Raises ValueError unless `value` is at least 0 and below 1."""
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ValueError(f"{key}={value}, expected at least 0 and below 1")


def check_choice(key: str, value: Any, valid: Iterable[str]) -> None:
    """Raises ValueError unless `value` is one of `valid`."""
    if value not in (valid := list(valid)):
        raise ValueError(f"{key}={value}, expected one of {', '.join(valid)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
