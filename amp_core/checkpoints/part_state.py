"""The state of a part, compared with what was saved and loaded into it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core.checkpoints.plain_state import LIKE_PARAMETER, Part, plain_names, type_name
from amp_core.layouts.fsdp import gather_full_state
from amp_core.layouts.zero import is_state_sharded, slices_of, whole_state
from amp_core.tensors import dtensor_like, is_dtensor, load_state

# From parts to bytes.


def state_of(part: Part, *, keep: bool = True) -> Any:
    """Its state dict, whole where ranks hold parts; then collective."""
    if isinstance(part, Optimizer) and is_state_sharded(part):
        return whole_state(part, keep=keep)
    return gather_full_state(part.state_dict(), keep=keep)


def own_state(part: Part) -> Mapping[str, Any]:
    """What this rank has of a part; of an optimizer whose state lies in slices all of it. Collective for those only."""
    if isinstance(part, Optimizer) and is_state_sharded(part):
        return whole_state(part)
    own = getattr(part, "sharded_state_dict", None)
    return part.state_dict() if own is None else own()


def net_of(part: Part) -> nn.Module | None:
    """The network whose state dict that of a part is: itself, or an average."""
    net = part if isinstance(part, nn.Module) else getattr(part, "model", None)
    return net if isinstance(net, nn.Module) else None


# From the file to parts.


def compare_net(net: nn.Module, state: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What does not fit; and what will be converted, because it is floating point here and there but not the same."""
    live = net.state_dict()
    here = {plain: live[name] for plain, name in plain_names(net, live).items()}
    missing, shapes, types, converted = [], [], [], []
    for key, new in here.items():
        old = state.get(key)
        if key not in state:
            missing.append(key)
        elif not isinstance(new, Tensor):  # what a module's get_extra_state returned
            continue
        elif not isinstance(old, Tensor):
            types.append(f"{key} is a {type_name(old)}")
        elif old.shape != new.shape:
            shapes.append(f"{key} is {tuple(old.shape)} there and {tuple(new.shape)} here")
        elif old.dtype != new.dtype:
            both_float = old.is_floating_point() and new.is_floating_point()
            (converted if both_float else types).append(f"{key} is {old.dtype} there and {new.dtype} here")
    unexpected = [str(key) for key in state if key not in here]
    misfits = {"lacks": missing, "also has": unexpected, "has other shapes:": shapes, "has other types:": types}
    return [f"{what} {first_line(items)}" for what, items in misfits.items() if items], converted


def compare_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> Iterator[str]:
    """What does not fit."""
    groups, states = state.get("param_groups"), state.get("state")
    if not (
        isinstance(states, dict)
        and isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and all(type(number) is int for group in groups for number in group["params"])
    ):
        yield "is not the state of an optimizer"
        return
    here, there = type(optimizer).__name__, state.get("class")
    if there not in (None, here):
        yield f"is the state of {there}, not of {here}"
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in groups]
    if sizes != saved_sizes:
        yield f"has groups of {saved_sizes} parameters there and {sizes} here"
        return
    shapes = []
    for number, parameter in parameters_of(optimizer, groups):
        entry = states.get(number, {})
        for key in LIKE_PARAMETER.intersection(entry if isinstance(entry, dict) else {}):
            if isinstance(entry[key], Tensor) and entry[key].shape != parameter.shape:
                shapes.append(f"{number}.{key} is {tuple(entry[key].shape)} there and {tuple(parameter.shape)} here")
    if shapes:
        yield f"has other shapes: {first_line(shapes)}"


def load_part(part: Part, state: dict[str, Any], exact: bool) -> None:
    if isinstance(part, nn.Module):
        names = plain_names(part, part.state_dict())
        load_state(part, {names[plain]: value for plain, value in state.items()})
    elif isinstance(part, Optimizer):
        _load_optimizer(part, state, exact)
    elif state or not isinstance(part, torch.amp.GradScaler):  # torch's own scaler raises at {}; it is fresh already
        part.load_state_dict(state)


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any], exact: bool) -> None:
    """Takes the state only: a group's `fused` of the file would switch it on or off here, and its `lr` be a new tensor.

    Args:
        optimizer: keeps its very groups.
        state: of the same number of parameters per group.
        exact: the parameters have the dtypes of the file, and so must their states.
    """
    groups = optimizer.param_groups
    saved = [{**group, "params": old["params"]} for group, old in zip(groups, state["param_groups"], strict=True)]
    numbers = [number for number, _ in parameters_of(optimizer, saved)]
    states = slices_of(optimizer, dict(state["state"]), numbers)
    for number, parameter in parameters_of(optimizer, saved):
        if number in states:
            laid_out = {key: _laid_out(value, parameter) for key, value in states[number].items()}
            states[number] = {key: dtensor_like(value, parameter) for key, value in laid_out.items()}
    optimizer.load_state_dict({"state": states, "param_groups": saved})
    optimizer.param_groups = groups
    # torch casts all but `step` to the parameter's dtype: NAdam's fp32 product of momenta to bf16, for example.
    for number, parameter in parameters_of(optimizer, saved):
        live = optimizer.state[parameter]
        for key, value in states.get(number, {}).items():
            was_cast = key != "step" and isinstance(value, Tensor) and live[key].dtype != value.dtype
            if was_cast and (exact or value.dim() == 0):
                live[key] = value.to(live[key].device)


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """A state of an optimizer with the strides of its parameter.

    Fused kernels on a CPU pair the numbers by their place in memory: perf.channels_last, switched at a resume, would
    give each weight the moments of another one. Those on a GPU refuse.
    """
    if not isinstance(value, Tensor) or is_dtensor(parameter) or value.shape != parameter.shape:
        return value
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def parameters_of(optimizer: Optimizer, saved_groups: list[dict[str, Any]]) -> Iterator[tuple[Any, Tensor]]:
    """Pairs of a parameter's number in the file and the parameter."""
    numbers = itertools.chain.from_iterable(group["params"] for group in saved_groups)
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return zip(numbers, parameters, strict=True)


def first_line(items: list[str], count: int = 3) -> str:
    more = len(items) - count
    return ", ".join(items[:count]) + (f" and {more} more" if more > 0 else "")
