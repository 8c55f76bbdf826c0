"""Adapters (LoRA): found, made, merged. Hu et al., arXiv:2106.09685."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.config.errors import ConfigError, suggest
from amp_core.tensors import blocks


def is_linear(layer: nn.Module) -> bool:
    """Whether it is a linear layer: also GPT-2's `Conv1D` of transformers, whose weight is transposed."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def sizes_of(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else tuple(layer.weight.shape)


class Lora(nn.Module):
    """A frozen linear layer with an adapter: W x + alpha / rank B A x. A and B are fp32, B is 0 at first."""

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer, self.scale = base, alpha / rank
        inputs, outputs = sizes_of(base)
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scale * self.b(self.a(x))

    def get_delta_weight(self, name: str) -> Tensor:  # as it is called in peft
        return self.scale * self.b.weight @ self.a.weight


def find_layers(net: nn.Module, globs: list[str] | None) -> list[str]:
    """The names of the linear layers that get adapters; without globs, all those of the blocks."""
    linear = [name for name, module in net.named_modules() if is_linear(module)]
    if globs is None:
        inside = {module for block in blocks(net) for module in block.modules()}
        globs = [name for name in linear if net.get_submodule(name) in inside]
    if wrong := [glob for glob in globs or [""] if not fnmatch.filter(linear, glob)]:
        kinds = dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in linear)
        raise ConfigError(f"recipe.targets={globs}: {wrong[0]} is no linear layer. {suggest(wrong[0], kinds)}")
    found = [name for name in linear if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]
    users = Counter(id(param) for _, param in net.named_parameters(remove_duplicate=False))
    if tied := [name for name in found if users[id(net.get_submodule(name).weight)] > 1]:
        raise ConfigError(
            f"recipe.targets={globs}: {tied[0]} shares its weight with another layer, which its merged adapter would "
            f"change; leave it out"
        )
    return found


def adapters(net: nn.Module) -> dict[str, Any]:
    """The layers with an adapter, our own or of peft, by the name of the layer."""
    return {name: module for name, module in net.named_modules() if hasattr(module, "get_delta_weight")}


@torch.no_grad()
def merged(net: nn.Module) -> dict[str, Tensor]:
    """The fp32 weights of a network, adapters added to their layers, under the names without them; tied ones once."""
    adapted = adapters(net)
    inside = tuple(f"{name}." for name in adapted)
    found = {name: param.detach().float() for name, param in net.named_parameters() if not name.startswith(inside)}
    for name, adapter in adapted.items():
        layer, delta = adapter.base_layer, adapter.get_delta_weight("default").float()
        weight = layer.weight.float()
        if not layer.weight.is_floating_point():  # the output for an identity is the weight of a quantised layer
            eye = torch.eye(layer.in_features, device=layer.weight.device)
            weight = (layer(eye) - layer(0 * eye[:1])).T.float()
        # peft's is transposed already.
        is_turned = isinstance(adapter, Lora) and type(layer).__name__ == "Conv1D"
        found[f"{name}.weight"] = weight + (delta.T if is_turned else delta)
        if layer.bias is not None:
            found[f"{name}.bias"] = layer.bias.detach().float()
    return found
