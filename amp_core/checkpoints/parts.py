"""The parts of a checkpoint: their protocols, and how torch's modules and optimizers are saved, compared and loaded.

A part is any object with `state_dict` and `load_state_dict` (`Part`). A `ShardedPart` shards its tensors over the ranks
in its own way, an `AveragedPart` averages a network, a `CountingPart` counts steps. For an `nn.Module` and an
`Optimizer` this module removes wrappers from names, gathers DTensors and sharded optimizer states, and compares the
state of a file with the part before anything is loaded.
"""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core.checkpoints.plain_state import mapped
from amp_core.checkpoints.shards import Entry, Span, StatePath, Want, want_all
from amp_core.lowp.masters import weights_by_side
from amp_core.step.schedule import Schedule, is_scheduled
from amp_core.tensors import (
    dtensor_like,
    full_tensor,
    inner_optimizers,
    is_dtensor,
    is_state_sharded,
    load_state,
    owner_of_groups,
    slice_of,
    state_layout,
)

# Optimizer states that have the shape of their parameter, in the classes of torch.optim.
LIKE_PARAMETER = {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg"}
LIKE_PARAMETER |= {"grad_avg", "acc_delta", "ax", "prev", "step_size", "variance"}


@runtime_checkable
class Part(Protocol):
    """What can be saved under a name: a net, an optimizer, an `Amp`, a `Schedule`, an `Ema`, ..."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@runtime_checkable
class ShardedPart(Part, Protocol):
    """A part whose tensors are sharded over the ranks, such as `PartialFC`. Its `state_dict` may be collective."""

    def sharded_state_dict(self) -> Mapping[str, Any]:
        """Its state with this rank's `Slice` in place of each full tensor. Not collective."""
        ...

    def span(self, shape: tuple[int, ...], /) -> tuple[int, int]:
        """The rows [start, stop) that this rank holds of a tensor. ValueError: it has none of this shape."""
        ...


@runtime_checkable
class AveragedPart(Part, Protocol):
    """An average of a network, such as `Ema`: the only part that a checkpoint may lack."""

    model: nn.Module  # the averaged network, whose state dict is the part's

    def reset(self) -> None:
        """Restart the average from the current weights of the network that is trained."""


@runtime_checkable
class CountingPart(Part, Protocol):
    """A part with step counts besides its state dict, such as `Amp` and `Ema`; a checkpoint's `progress` has them."""

    def counters(self) -> dict[str, Any]:
        """The counts by their keys in `progress`. Waits for the device."""
        ...

    def load_counters(self, progress: Mapping[str, Any], /) -> None:
        """Restore what `counters` returned; a missing count is 0."""


def counters_of(parts: Mapping[str, Part]) -> dict[str, Any]:
    """The counts of all parts. A key that an earlier part has, too, gets the part's name appended."""
    found: dict[str, Any] = {}
    for name, part in parts.items():
        for key, value in part.counters().items() if isinstance(part, CountingPart) else ():
            found[f"{key}_{name}" if key in found else key] = value  # a second average
    return found


def load_counters(name: str, part: Part, progress: Mapping[str, Any]) -> None:
    """Restore the counts of a part from what `counters_of` returned."""
    if isinstance(part, CountingPart):
        own = {key.removesuffix(f"_{name}"): value for key, value in progress.items() if key.endswith(f"_{name}")}
        part.load_counters({**progress, **own})


def net_of(part: Part) -> nn.Module | None:
    """The network whose state dict a part has: itself, or the averaged one. None: it has another kind of state."""
    if isinstance(part, nn.Module):
        return part
    return part.model if isinstance(part, AveragedPart) else None


def parameters_of(optimizer: Optimizer, saved_groups: list[dict[str, Any]]) -> Iterator[tuple[Any, Tensor]]:
    """(its number in the file, parameter) of all parameters, in the order of the groups."""
    numbers = itertools.chain.from_iterable(group["params"] for group in saved_groups)
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return zip(numbers, parameters, strict=True)


def plain_names(net: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Plain name -> name in `net.state_dict()`, which has a component more for each wrapper (DDP, torch.compile)."""
    wrapped = set()  # paths of the modules that wrappers wrap
    # By class, as networks have a `module` of their own, too; but importing that of torch.compile costs 2 s.
    for path, module in net.named_modules(remove_duplicate=False):
        inner = "module" if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)) else "_orig_mod"
        if inner == "module" or inner in dict(module.named_children()):
            wrapped.add(f"{path}.{inner}" if path else inner)

    def plain(name: str) -> str:
        keys = name.split(".")
        paths = itertools.accumulate(keys, "{}.{}".format)
        return ".".join(key for key, path in zip(keys, paths, strict=True) if path not in wrapped)

    return {plain(name): name for name in names}


def save_only_trainable(net: nn.Module) -> None:
    """Restrict the state dict of a network, and of its later copies, to the weights that are trainable now.

    Buffers are left out, too, and a load may lack all that is left out.
    """
    trained = tuple(f".{name}" for name, param in net.named_parameters() if param.requires_grad)

    def is_left_out(key: str) -> bool:
        # By the end: in a network around it names are longer, and compiled parts add a component. So a frozen
        # `backbone.fc.weight` is saved with a trained `fc.weight`.
        return not f".{key.replace('_orig_mod.', '')}".endswith(trained)

    def leave_out(net: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for key in filter(is_left_out, list(state)):
            del state[key]

    def may_lack(net: nn.Module, found: Any) -> None:
        found.missing_keys[:] = itertools.filterfalse(is_left_out, list(found.missing_keys))

    net.register_state_dict_post_hook(leave_out)
    net.register_load_state_dict_post_hook(may_lack)


def full_state(part: Part, *, keep: bool = True) -> Mapping[str, Any]:
    """The state to save, with full tensors; collective if sharded. `keep`: false on ranks that need no result."""
    if isinstance(part, Optimizer) and (layout := state_layout(part)) is not None:
        state = layout.full_state(part, keep=keep)
    else:
        state = gather_full_state(part.state_dict(), keep=keep)
    return _portable(part, state) if keep else state


def gather_full_state(value: Any, *, keep: bool = True) -> Any:
    """A nested state with DTensors replaced by full tensors in host memory. Collective.

    Without `keep`, on ranks that need no result, they are replaced by None.
    """

    def gather(leaf: Any) -> Any:
        if not is_dtensor(leaf):
            return leaf
        full = full_tensor(leaf)  # one at a time: the device holds a single full tensor
        return full.cpu() if keep else None

    return mapped(value, gather)


def local_state(part: Part) -> Mapping[str, Any]:
    """The state to save, of sharded tensors this rank's slices. Full and collective for an optimizer whose state is
    sharded while its weights are not."""
    if isinstance(part, Optimizer) and is_state_sharded(part):
        return full_state(part)
    return _portable(part, part.sharded_state_dict() if isinstance(part, ShardedPart) else part.state_dict())


def _portable(part: Part, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state as it is written: plain names, learning rates as numbers, and the class of an optimizer."""
    if isinstance(part, nn.Module):
        return {plain: state[name] for plain, name in plain_names(part, state).items()}
    if isinstance(part, Optimizer):
        groups = {"param_groups": _plain_groups(part, state["param_groups"])} if "param_groups" in state else {}
        return {**state, **groups, "class": type(part).__name__}
    return state


def _plain_groups(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    settings = _settings(optimizer)

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.item()
        return str(value) if isinstance(value, torch.dtype | enum.Enum) else value

    return [{k: plain(value) if k in settings else value for k, value in group.items()} for group in groups]


def compare(part: Part, state: Any) -> tuple[list[str], list[str]]:
    """Compare the state of a network or optimizer in a file with the live one. Other parts check theirs at the load.

    Returns what does not fit, and what a load converts to another floating dtype.
    """
    if not isinstance(state, dict):
        return [f"is a {type(state).__name__}, not a state dict"], []
    if isinstance(part, nn.Module):
        return _compare_net(part, state)
    return list(_compare_optimizer(part, state)) if isinstance(part, Optimizer) else [], []


def _compare_net(net: nn.Module, state: dict[str, Any]) -> tuple[list[str], list[str]]:
    live = _portable(net, net.state_dict())
    missing, shapes, types, converted = [key for key in live if key not in state], [], [], []
    # Values that are no tensors come from a module's get_extra_state, and are not compared.
    for key, own in ((k, v) for k, v in live.items() if k in state and isinstance(v, Tensor)):
        saved = state[key]
        if not isinstance(saved, Tensor):
            types.append(f"{key} is a {type(saved).__name__}")
        elif saved.shape != own.shape:
            shapes.append(f"{key} is {tuple(saved.shape)} there and {tuple(own.shape)} here")
        elif saved.dtype != own.dtype:
            # torch casts silently. Between floats this is logged; an integer would lose its meaning, and is refused.
            both_float = saved.is_floating_point() and own.is_floating_point()
            (converted if both_float else types).append(f"{key} is {saved.dtype} there and {own.dtype} here")
    unexpected = [str(key) for key in state if key not in live]
    misfits = {"lacks": missing, "also has": unexpected, "has other shapes:": shapes, "has other types:": types}
    return [f"{what} {first_few(items)}" for what, items in misfits.items() if items], converted


def _compare_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> Iterator[str]:
    own_class, saved_class = type(optimizer).__name__, state.get("class")
    is_wrapper = bool(inner_optimizers(optimizer))
    if is_wrapper and saved_class == own_class and "param_groups" not in state:
        return  # a format of the wrapper's own, which it checks itself
    groups, states = state.get("param_groups"), state.get("state", {} if is_wrapper else None)
    if not (
        isinstance(states, dict)
        and isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and all(type(number) is int for group in groups for number in group["params"])
        and isinstance(moved := state.get("moved", []), list)
        and all(isinstance(keys, list) for keys in moved)
    ):
        yield "is not the state of an optimizer"
        return
    if saved_class not in (None, own_class):
        yield f"is the state of {saved_class}, not of {own_class}"
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in groups]
    if sizes != saved_sizes:
        yield f"has groups of {saved_sizes} parameters there and {sizes} here"
        return
    shapes = []
    # Only these classes: other packages use the names in LIKE_PARAMETER for states of other shapes.
    is_known = type(optimizer).__module__.startswith(("torch.optim.", "amp_core."))
    for number, parameter in parameters_of(optimizer, groups) if is_known else ():
        entry = states.get(number, {})
        for key in LIKE_PARAMETER.intersection(entry if isinstance(entry, dict) else {}):
            if isinstance(entry[key], Tensor) and entry[key].shape != parameter.shape:
                shapes.append(f"{number}.{key} is {tuple(entry[key].shape)} there and {tuple(parameter.shape)} here")
    if shapes:
        yield f"has other shapes: {first_few(shapes)}"


def first_few(items: list[str], count: int = 3) -> str:
    more = len(items) - count
    return ", ".join(items[:count]) + (f" and {more} more" if more > 0 else "")


def want_of(parts: Mapping[str, Part], states: Mapping[str, Any]) -> Want:
    """A function that tells what this rank needs of a tensor in a sharded checkpoint: None, all rows, or its own slice.

    `states` are those of the checkpoint, with meta tensors in place of these. ValueError: the part has no such tensor,
    or one of another shape.
    """
    # Once per part: to name the tensors of a network walks over all its modules.
    lookup = functools.cache(lambda name: _lookup(parts[name], states[name]))

    def want(entry: Entry) -> tuple[Span, bool] | None:
        name, path = str(entry.paths[0][0]), entry.paths[0][1:]
        if name not in states:
            return None
        part = parts[name]
        if isinstance(part, ShardedPart):
            return (0, *part.span(entry.shape)), True
        live = lookup(name)(path)
        if live is None or tuple(live.shape) != entry.shape:
            own_shape = "nothing" if live is None else str(tuple(live.shape))
            raise ValueError(f"{entry.name} is {entry.shape} there and {own_shape} here")
        if not is_dtensor(live):
            return want_all(entry)
        rows = slice_of(live)
        return (rows.dim, rows.start, rows.stop), True

    return want


def _lookup(part: Part, state: Any) -> Callable[[StatePath], Tensor | None]:
    """A function from a path in the state of a part to the live tensor that has the shape and sharding of that one."""
    if isinstance(part, Optimizer):
        live: dict[Any, Tensor] = dict(parameters_of(part, state.get("param_groups", [])))
        return lambda path: live.get(path[1]) if len(path) == 3 and path[0] != "param_groups" else None
    net = net_of(part)
    tensors: Mapping[Any, Tensor] = {} if net is None else _portable(net, net.state_dict())
    return lambda path: tensors.get(path[0]) if len(path) == 1 else None


def load_part(part: Part, state: dict[str, Any], exact: bool) -> None:
    """Load a state that `compare` has passed. `exact`: an optimizer's states keep their saved dtypes."""
    if isinstance(part, nn.Module):
        names = plain_names(part, part.state_dict())
        load_state(part, {names[plain]: value for plain, value in state.items()})
    elif isinstance(part, Optimizer):
        _load_optimizer(part, state, exact)
    # {}: saved without a loss scale. torch's own scaler raises at it, and stays as it is: fresh.
    elif state or not isinstance(part, torch.amp.GradScaler):
        part.load_state_dict(state)


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any], exact: bool) -> None:
    """Load the state, but keep this optimizer's settings and the tensors that hold its learning rates.

    `Optimizer.load_state_dict` alone would also take `fused` from the file, and put a new tensor in place of `lr`. It
    casts states to their parameter's dtype; with `exact`, as nothing was converted, this is undone.
    """
    given = {key: value for key, value in state.items() if key not in ("class", "moved")}
    if "param_groups" not in state:  # a wrapper's own format
        optimizer.load_state_dict(given)
        return
    everyone, groups = [optimizer, *inner_optimizers(optimizer)], optimizer.param_groups
    holders = [each for each in reversed(everyone) if each.param_groups is groups]  # wrappers may share the groups
    taken = _loaded_entries(optimizer, state)
    pairs = zip(groups, taken, state["param_groups"], strict=True)
    saved = [{**group, **new, "params": old["params"]} for group, new, old in pairs]
    numbered = list(parameters_of(optimizer, saved))
    layout, weight_of_side = state_layout(optimizer), weights_by_side()
    per_weight = {key: dict(value) for key, value in given.items() if isinstance(value, dict)}
    for each, states in per_weight.items():  # `state`; wrappers have several
        if layout is not None:
            per_weight[each] = states = layout.local_states(optimizer, states, [number for number, _ in numbered])
        for number, parameter in numbered:
            if isinstance(states.get(number), dict):
                # Not as the fp32 side of a 16-bit weight: between steps it may be one number, expanded.
                own, like = states[number].items(), weight_of_side.get(parameter, parameter)
                states[number] = {key: dtensor_like(_laid_out(value, like), parameter) for key, value in own}
    optimizer.load_state_dict({**given, **per_weight, "param_groups": saved})
    for holder in holders:
        if holder.param_groups is not groups:
            holder.param_groups = groups
    for group, new in zip(groups, taken, strict=True):
        for key, value in new.items():
            live = group.get(key)
            # Into the tensor that is there: a schedule, or a captured graph, holds it.
            if isinstance(live, Tensor):
                live.detach().copy_(torch.as_tensor(value))
            else:
                group[key] = copy.deepcopy(value)
    # torch has cast all but `step` to the parameter's dtype. States of 0 dimensions are always put back, as they have a
    # dtype of their own: NAdam's product of momenta is fp32, also of a bf16 parameter.
    for (number, parameter), holder, states in itertools.product(numbered, everyone, per_weight.values()):
        live = holder.state.get(parameter) or {}  # a defaultdict: an index would give SGD without momentum a state
        for key, value in (states.get(number) or {}).items():
            found = live.get(key) if key != "step" and isinstance(value, Tensor) else None
            if isinstance(found, Tensor) and found.dtype != value.dtype and (exact or value.dim() == 0):
                live[key] = value.to(found.device)


# --- settings and state in the groups of an optimizer -----------------------------------------------------------------


@functools.cache
def _arguments(*kinds: type) -> frozenset[str]:
    inits = [vars(each)["__init__"] for kind in kinds for each in kind.__mro__[:-1] if "__init__" in vars(each)]
    return frozenset(itertools.chain.from_iterable(inspect.signature(init).parameters for init in inits))


def _settings(optimizer: Optimizer) -> frozenset[str]:
    """The keys of its groups that are settings: arguments of its constructor, or of torch's usual optimizers.

    The latter are known by name, as a constructor may take groups only. All other keys are state, such as `step` of
    timm's Lamb, and `k` of schedulefree, although it is in that optimizer's `defaults`.
    """
    own = type(owner_of_groups(optimizer))  # a wrapper's arguments, as Lookahead's `k`, are not in the groups
    return _arguments(own, torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon) | {"param_names"}


def settings_of(part: Part) -> list[dict[str, Any]]:
    """A copy of the groups of an optimizer without its weights; [] for other parts. Waits for rates on a device."""
    groups = _plain_groups(part, part.param_groups) if isinstance(part, Optimizer) else []
    return [copy.deepcopy({key: value for key, value in group.items() if key != "params"}) for group in groups]


def with_changed(
    part: Part, state: Mapping[str, Any], initial_groups: Sequence[dict[str, Any]], others: Iterable[Part] = ()
) -> Mapping[str, Any]:
    """The state of an optimizer with `moved`: by group, the names of the settings that its run changed.

    Changed is what differs from `initial_groups`, which `settings_of` returned. A load takes these settings from the
    file, like state. So it does with what a torch scheduler among `others` sets: StepLR multiplies the `lr` of the step
    before. Learning rates of a `Schedule` are excluded: it sets them itself.
    """
    if not isinstance(part, Optimizer):
        return state
    followed = [getattr(other, "optimizer", None) for other in others if not isinstance(other, Schedule | Optimizer)]
    owners = [owner_of_groups(each) for each in followed if isinstance(each, Optimizer)]
    always = ("lr", "momentum", "betas") if owner_of_groups(part) in owners else ()
    keys = _settings(part) - _never_loaded(part)

    def has_changed(key: str, now: dict[str, Any], then: dict[str, Any]) -> bool:
        return key in always or key not in then or not _equal(now[key], then[key])

    pairs = itertools.zip_longest(state.get("param_groups", ()), initial_groups, fillvalue={})
    changed = [sorted(key for key in keys & now.keys() if has_changed(key, now, then)) for now, then in pairs]
    return {**state, "moved": changed} if any(changed) else state


def _never_loaded(optimizer: Optimizer) -> set[str]:
    """The keys of its groups that a load skips: its parameters, and learning rates that a `Schedule` sets."""
    return {"params", "lr"} if is_scheduled(optimizer) else {"params"}


def _equal(a: Any, b: Any) -> bool:
    """Whether two settings are equal in fp32, to which a learning rate on a device is rounded."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Tensor | float | int) and isinstance(b, Tensor | float | int):
        return torch.equal(torch.as_tensor(a).float().cpu(), torch.as_tensor(b).float().cpu())
    return type(a) is type(b) and a == b


def _loaded_entries(optimizer: Optimizer, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of each group in a file that are loaded: state, and the settings that `moved` names."""
    changed = itertools.chain(state.get("moved", ()), itertools.repeat(()))
    settings, never = _settings(optimizer), _never_loaded(optimizer)
    return [
        {k: v for k, v in group.items() if k not in never and (k not in settings or k in keys)}
        for group, keys in zip(state["param_groups"], changed, strict=False)
    ]


def settings_that_differ(part: Part, state: Mapping[str, Any]) -> list[str]:
    """A line for each setting of an optimizer that differs from the file, with the value that is used.

    Also for each entry that a training loop added to the groups, such as `lr_scale`: it counts as state, and is loaded.
    """
    if not isinstance(part, Optimizer) or "param_groups" not in state:
        return []
    # Not for names and choices of an implementation, nor for what is never loaded.
    found, silent = {}, {"param_names", "foreach", "fused", "capturable", "differentiable"} | _never_loaded(part)
    taken, settings, defaults = _loaded_entries(part, state), _settings(part), owner_of_groups(part).defaults
    live = _plain_groups(part, part.param_groups)
    for number, (group, old, new) in enumerate(zip(live, state["param_groups"], taken, strict=True)):
        for key in (old.keys() & group.keys()) - silent:
            is_of_loop = key in new and key not in settings and key not in defaults
            if (key not in new or is_of_loop) and not _equal(old[key], group[key]):
                own, saved = f"{key}={group[key]}", f"{key}={old[key]} of the checkpoint"
                used = f"takes {saved} in place of {own}" if is_of_loop else f"keeps {own}, not {saved}"
                found.setdefault(key, f"group {number} {used}")
    return [found[key] for key in sorted(found)]


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """A state of an optimizer in the strides of its parameter.

    Fused kernels on a CPU pair weights and moments by memory order: if perf.channels_last is switched at a resume, each
    weight would get another's moments. Those on a GPU raise.
    """
    is_other = not isinstance(value, Tensor) or is_dtensor(parameter) or value.shape != parameter.shape
    if is_other or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
