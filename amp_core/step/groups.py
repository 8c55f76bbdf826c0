"""Groups of an optimizer by the names of weights, and by their layer."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from amp_core.config.errors import ConfigError, suggest
from amp_core.config.schema import OptimizerConfig
from amp_core.lowp.masters import master_params
from amp_core.tensors import blocks, unwrap


def weight_groups(cfg: OptimizerConfig, nets: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The groups of `optimizer.groups` and `optimizer.layer_decay`, those with the common rate first.

    A weight has the settings of the first group that matches its name, or a module that it is in. With a layer decay d
    the rate of layer n of N, from the input, is lr * d^(N - n) (Clark et al., arXiv:2003.10555).
    ConfigError: a group matches no weight.
    """
    given, nets = cfg.groups or [], [unwrap(net) for net in nets]
    found: dict[Any, dict[str, Any]] = {}
    used: set[int | None] = set()
    for net in nets:
        layers = {} if cfg.layer_decay is None else layers_of(net)
        last = max(layers.values(), default=0)
        for (name, _), param in zip(net.named_parameters(), master_params(net), strict=True):
            if not param.requires_grad:
                continue
            name = name.replace("_orig_mod.", "")
            number = next((n for n, group in enumerate(given) if _matches(name, str(group["match"]))), None)
            used.add(number)
            own = {} if number is None else {key: value for key, value in given[number].items() if key != "match"}
            # A weight in no layer has the rate of the last one, as a head has.
            rate = own.get("lr", cfg.lr) * (cfg.layer_decay or 1.0) ** (last - layers.get(name, last))
            # Norms and biases are left out: they set scale and shift, which a decay would pull to 0.
            decay = own.get("weight_decay", cfg.weight_decay) if param.ndim >= 2 else 0.0
            settings = {**own, "lr": rate, "weight_decay": decay}
            found.setdefault((number, rate, decay), {**settings, "params": []})["params"].append(param)
    if unused := [str(group["match"]) for number, group in enumerate(given) if number not in used]:
        modules = (name for net in nets for name, _ in net.named_modules() if name)
        hint = suggest(unused[0].removesuffix(".*"), modules)
        raise ConfigError(
            f"optimizer.groups: {unused[0]} matches no weight that is trained and in no earlier group. {hint}"
        )
    return sorted(found.values(), key=lambda group: group["lr"] != cfg.lr)


def _matches(name: str, pattern: str) -> bool:
    parts = name.split(".")
    # a.b.weight matches as a, a.b and a.b.weight.
    return any(fnmatchcase(path, pattern) for path in itertools.accumulate(parts, "{}.{}".format))


def layers_of(net: nn.Module) -> dict[str, int]:
    """The layer of each weight, by name, from 0 at the input.

    For networks of timm what timm says. For others 0 before the first block, n in block n, one more behind the last;
    without blocks a layer is a module with a weight of two or more dimensions, and what follows it up to the next.
    """
    if hasattr(net, "group_matcher"):
        matcher = net.group_matcher(coarse=False)  # type: ignore[operator]
        return importlib.import_module("timm.models").group_parameters(net, matcher, reverse=True)
    names = {id(module): f"{name}." for name, module in net.named_modules()}
    inside = [names[id(block)] for block in blocks(net)]
    layers, layer = {}, 0 if inside else -1
    before: str | None = None
    for name, param in net.named_parameters():
        own = next((number for number, prefix in enumerate(inside, 1) if name.startswith(prefix)), None)
        if own is not None:
            layer = own
        elif inside:
            layer = len(inside) + 1 if layer >= len(inside) else layer
        elif param.ndim >= 2 and name.rpartition(".")[0] != before:
            layer, before = layer + 1, name.rpartition(".")[0]
        layers[name.replace("_orig_mod.", "")] = max(layer, 0)
    return layers


def check_groups(cfg: OptimizerConfig, options: list[str]) -> list[str]:
    """Problems of the settings in `optimizer.groups`, whose class takes `options`."""
    problems, valid = [], ["match", "lr", "weight_decay", *options]
    if cfg.name == "Muon" and (cfg.groups or cfg.layer_decay is not None):
        key = "groups" if cfg.groups else "layer_decay"
        return [f"optimizer.{key}: Muon has two groups of its own; leave it out, or use another optimizer"]
    for number, group in enumerate(cfg.groups or []):
        key = f"optimizer.groups[{number}]"
        if type(group.get("match")) not in (str, int):  # 15 is the name of a layer of an nn.Sequential
            problems.append(f"{key}: has no match; expected the names of its weights, such as {{match: 'head.*'}}")
        unknown = group.keys() - valid
        problems += [f"{key}.{each}: {cfg.name} has no such option. {suggest(each, valid)}" for each in unknown]
        for each in ("lr", "weight_decay"):
            value = group.get(each, 1.0)
            if type(value) not in (int, float) or not (0 < value < 3.4e38 or (value == 0 and each == "weight_decay")):
                least = "above 0" if each == "lr" else "of at least 0"
                problems.append(f"{key}.{each}={value}: expected a number {least}, such as 1.0e-3")
    return problems
