"""Weights, gradients and moments of which every rank holds a part (FSDP2): wrapping, and what lies on which rank.

How 16 bits and sharding fit together. The shards are fp32, and so are the optimizer's moments, the gradients that are
summed over ranks, and averages. Before a block computes, its weights are gathered from all ranks, in one of two groups:

- Weights that autocast casts as a whole, those of linear layers and convolutions, are cast shard by shard and gathered
  in 16 bits: half the bytes. Autocast would make the very same 16-bit numbers after gathering in fp32, and then keep
  them from the forward to the backward pass, which is what sharding is to avoid; gathered ones are freed in between.
- All other weights are gathered in fp32: those of norms and embeddings, which autocast leaves alone; those of islands,
  which have to be fp32; and whatever a module of another kind does with its own.

So a network computes what it computes in one process, and a mode is still a matter of `amp.autocast`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_core.config import WHOLE_MATRICES
from amp_core.errors import ConfigError
from amp_core.islands import island_names
from amp_core.torch_private import find, foreach_norm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_CAST_WHOLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class _Plan:
    """How a network was wrapped, and an unwrapped twin of it without memory, to make copies from."""

    outline: nn.Module
    mesh: DeviceMesh
    dtype: torch.dtype | None


_plans: weakref.WeakKeyDictionary[nn.Module, _Plan] = weakref.WeakKeyDictionary()


# --- wrapping ---------------------------------------------------------------------------------------------------------


def build_mesh(device: torch.device, world_size: int, shard_size: int | None = None) -> DeviceMesh:
    """All ranks as one group that shards (fsdp), or as replicas of groups of `shard_size` that do (hsdp). Collective.

    Ranks of a group are neighbours, so that a group lies on one machine where the sizes allow it.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if shard_size is None:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    if world_size % shard_size:
        raise ConfigError(
            f"layout.shard_size={shard_size}: does not divide {world_size} ranks; choose a divisor, or layout=fsdp"
        )
    shape = (world_size // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def wrap_fsdp(net: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> nn.Module:
    """Shard the weights of `net` over the ranks of `mesh`, in place, by `fully_shard`. Gradients are *summed*.

    One group of weights lies whole on a device at a time: that of a block. Blocks are the elements of every
    `nn.ModuleList` and `nn.Sequential` that have weights and parts of their own, the outermost ones; what is in none,
    or has weights in common with what is outside, belongs to the network itself, the last group.

    All ranks begin with the weights and buffers of rank 0. Collective.

    Args:
        net: whole, after `keep_fp32`, on the device, or on the CPU if the process group has a backend for it. Its
            weights move to the device block by block, and become DTensors. Names stay, and `isinstance`.
        mesh: from `build_mesh`.
        dtype: of autocast in the mode that trains, or None if it casts nothing. Forward passes must then run inside it.

    Raises:
        ConfigError: torch cannot shard a weight of it, such as one without dimensions.
    """
    for tensor in _tensors(net):
        dist.broadcast(tensor.detach(), 0)
    return _shard(net, mesh, dtype)


def _shard(net: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> nn.Module:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    plan = _Plan(_outline(net), mesh, dtype)
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    low = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Also the root, which torch would leave whole after a forward pass: an evaluation is not followed by a backward
    # pass, and would leave weights that a later step, average or checkpoint does not reach.
    shard = functools.partial(fully_shard, mesh=mesh, reshard_after_forward=True)
    in_16bit = {} if dtype is None else cast_whole(net)
    for module, name in in_16bit.items():
        module.register_forward_pre_hook(functools.partial(_require_autocast, dtype, name))
    try:
        for block in (*blocks(net), net):
            mine = [m for m in block.modules() if m in in_16bit and not isinstance(m, FSDPModule)]
            if mine and mine != [block]:
                shard(mine if len(mine) > 1 else mine[0], mp_policy=low)
            shard(block, mp_policy=low if mine == [block] else whole)
    except (NotImplementedError, ValueError) as problem:
        raise ConfigError(f"layout: {type(net).__name__} cannot be sharded: {problem}; use layout=ddp") from problem
    for module in net.modules():
        if isinstance(module, FSDPModule):
            # Sums, since the weights of a window already average. As plain sums: gloo has no scaled ones.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    net.register_forward_hook(_close_groups)
    _plans[net] = plan
    return net


def _close_groups(net: nn.Module, inputs: Any, output: Any) -> None:
    """Free the weights of groups of which a module did not run, such as a head that only training has.

    Before torch 2.13 the next backward pass does that, and an evaluation has none: its weights would stay, and a later
    step or average would not reach them.
    """
    from torch.distributed.fsdp import FSDPModule

    state_of = find("torch.distributed.fsdp.FSDPModule._get_fsdp_state", lambda module: None)
    for module in () if torch.is_grad_enabled() else net.modules():
        if isinstance(module, FSDPModule):
            state = state_of(module)
            pending = getattr(state, "_modules_to_run_forward", None)
            if pending is None:  # it cannot be told
                module.reshard()
            elif pending:
                pending.clear()
                module.reshard()


def blocks(net: nn.Module) -> Iterator[nn.Module]:
    """What is gathered by itself, see `wrap_fsdp`, or computed once more, see `recompute_blocks`."""
    users: dict[nn.Parameter, int] = {}
    for module in net.modules():
        for param in module.parameters(recurse=False):
            users[param] = users.get(param, 0) + 1

    def alone(block: nn.Module) -> bool:
        here: dict[nn.Parameter, int] = {}
        for module in block.modules():
            for param in module.parameters(recurse=False):
                here[param] = here.get(param, 0) + 1
        return bool(here) and all(users[param] == count for param, count in here.items())

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        holds_blocks = isinstance(module, nn.ModuleList | nn.Sequential)
        for child in module.children():
            called = type(child).forward is not nn.Module.forward
            if holds_blocks and called and any(True for _ in child.children()) and alone(child):
                yield child
            else:
                yield from walk(child)

    return walk(net)


def cast_whole(net: nn.Module) -> dict[nn.Module, str]:
    """The modules all of whose weights autocast casts, and their names."""
    islands = [net.get_submodule(name) for name in island_names(net)]
    in_islands = {module for island in islands for module in island.modules()}
    named = [
        (name, module)
        for name, module in net.named_modules()
        # The very class: one that was derived may do other things with its weights.
        if type(module) in _CAST_WHOLE and module not in in_islands
    ]
    found = {module: name for name, module in named}
    elsewhere = {p for module in net.modules() if module not in found for p in module.parameters(recurse=False)}
    return {
        module: name
        for module, name in found.items()
        if all(p.dtype is torch.float32 and p not in elsewhere for p in module.parameters())
    }


def _require_autocast(dtype: torch.dtype | None, name: str, module: nn.Module, inputs: Any) -> None:
    device_type = next(module.parameters()).device.type
    if torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is dtype:
        return
    short = str(dtype).removeprefix("torch.")
    raise RuntimeError(
        f"{name or type(module).__name__} runs outside of autocast to {short}, and its sharded weights are gathered in "
        f"{short}: call the network inside amp.autocast(), or keep this part in fp32: "
        f"amp.keep_fp32=['{name}'], keep_fp32(net, '{name}') before it is wrapped"
    )


# --- copies -----------------------------------------------------------------------------------------------------------


def is_sharded(net: nn.Module) -> bool:
    """Whether `net` is what `wrap_fsdp` returned."""
    return net in _plans


def outline(net: nn.Module) -> nn.Module:
    """What a sharded network was before, without memory."""
    return _plans[net].outline


def gathers_16bit(net: nn.Module) -> bool:
    """Whether weights of `net` arrive in 16 bits: these cannot be made islands any more."""
    return net in _plans and _plans[net].dtype is not None


def _outline(net: nn.Module) -> nn.Module:
    return _copy_with(net, {tensor: torch.empty_like(tensor, device="meta") for tensor in _tensors(net)})


def _tensors(net: nn.Module) -> list[Tensor]:
    return [*net.parameters(), *net.buffers()]


def _copy_with(net: nn.Module, tensors: dict[Tensor, Tensor]) -> nn.Module:
    """A deep copy that holds other tensors, tied where the original's are."""
    memo: dict[int, Any] = {}
    for old, new in tensors.items():
        memo[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    return copy.deepcopy(net, memo)


@torch.no_grad()
def whole_copy(net: nn.Module, device: str | torch.device | None = None) -> nn.Module:
    """A copy of a sharded network that is whole on every rank, on `device` or that of the network. Collective."""
    plan = _plans[net]
    values = [whole(tensor).to(device or tensor.device, copy=True) for tensor in _tensors(net)]
    return _copy_with(plan.outline, dict(zip(_tensors(plan.outline), values, strict=True)))


def sharded_copy(net: nn.Module) -> nn.Module:
    """A copy of a sharded network that is sharded in the same way. Collective; whole for a moment, in host memory."""
    plan = _plans[net]
    return _shard(whole_copy(net, "cpu"), plan.mesh, plan.dtype)


# --- tensors ----------------------------------------------------------------------------------------------------------


def is_part(tensor: Any) -> bool:
    """Whether a tensor is this rank's part of one that lies over several, a DTensor."""
    # Where the module is not loaded nobody has made one, and loading it takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank holds, in the same memory: of parts the plain tensors in them. Empty ones remain, too.

    What is no tensor is left as it is.
    """
    with torch.no_grad():
        return [tensor.to_local() if is_part(tensor) else tensor for tensor in tensors]  # type: ignore[operator]


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which this is a part, on the same device; anything else itself. Collective."""
    return tensor.detach().full_tensor() if is_part(tensor) else tensor.detach()  # type: ignore[operator]


@dataclass(frozen=True)
class Slice:
    """Of a tensor that lies over ranks, what this rank has of it: a plain tensor, and where it belongs."""

    tensor: Tensor
    start: int
    """Its first place along `dim`; it ends `tensor.shape[dim]` places later."""
    total: int
    """Size of the whole along `dim`."""
    dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return *self.tensor.shape[: self.dim], self.total, *self.tensor.shape[self.dim + 1 :]

    @property
    def stop(self) -> int:
        return self.start + self.tensor.shape[self.dim]


def slice_of(part: Tensor) -> Slice:
    """The `Slice` that a part holds, in the same memory. No collective.

    Raises:
        TypeError: it is split over more than one dimension of its mesh, or in unusual sizes.
    """
    mine, split = part.to_local().detach(), _split_dimension(part)  # type: ignore[attr-defined]
    if split is None:
        return Slice(mine, 0, part.shape[0])
    mesh, dim = part.device_mesh, part.placements[split].dim  # type: ignore[attr-defined]
    each = -(-part.shape[dim] // mesh.size(split))  # as torch.chunk cuts
    start = min(mesh.get_local_rank(split) * each, part.shape[dim])
    if mine.shape[dim] != min(each, part.shape[dim] - start):
        raise TypeError(f"a part of {tuple(part.shape)} has {mine.shape[dim]} of {each} places along dimension {dim}")
    return Slice(mine, start, part.shape[dim], dim)


def replicas(part: Tensor) -> tuple[int, int]:
    """(which copy of the same part this rank holds, how many there are)."""
    mesh, split = part.device_mesh, _split_dimension(part)  # type: ignore[attr-defined]
    number, count = 0, 1
    for i in range(mesh.ndim):
        if i != split:
            number, count = number * mesh.size(i) + mesh.get_local_rank(i), count * mesh.size(i)
    return number, count


def part_like(value: Any, live: Any) -> Any:
    """This rank's part of `value`, which all ranks have, where `live` is such a part; else `value`. No collective.

    Args:
        value: a whole tensor, or the `Slice` that this rank holds; anything else stays what it is.
        live: what it is to be laid out like.
    """
    if isinstance(value, Slice) and is_part(live) and value.shape == tuple(live.shape):
        from torch.distributed.tensor import DTensor

        layout = {"shape": live.shape, "stride": live.stride()}
        mine = value.tensor.detach().to(live.device)
        return DTensor.from_local(mine, live.device_mesh, live.placements, run_check=False, **layout)
    if not is_part(live) or not isinstance(value, Tensor) or is_part(value) or value.shape != live.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.detach().to(live.device)
    # Not from rank 0: every rank has read the same file.
    return distribute_tensor(value, live.device_mesh, live.placements, src_data_rank=None)


def load_state(net: nn.Module, state: dict[str, Any]) -> None:
    """`net.load_state_dict(state)` of whole tensors, of which a sharded network takes its parts."""
    live = net.state_dict()
    net.load_state_dict({name: part_like(value, live.get(name)) for name, value in state.items()})


def gathered(value: Any, *, keep: bool = True) -> Any:
    """A nested state with whole tensors in place of parts, these in host memory. Collective.

    Args:
        value: of the same structure on all ranks.
        keep: false on ranks that need it for nothing: they take part, and get None in place of each.
    """
    if is_part(value):
        full = whole(value)  # one after the other: the device holds a single whole tensor at a time
        return full.cpu() if keep else None
    if isinstance(value, dict):
        return {key: gathered(item, keep=keep) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(gathered(item, keep=keep) for item in value)
    return value


def shard_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """The ranks whose parts make up the whole `tensor`; None if this rank holds all of it.

    Raises:
        TypeError: it is not only split over one dimension of its mesh, and copied over the others.
    """
    split = _split_dimension(tensor) if is_part(tensor) else None
    return None if split is None else tensor.device_mesh.get_group(split)  # type: ignore[attr-defined]


def _split_dimension(part: Tensor) -> int | None:
    """The dimension of the mesh over which a part is split; None if each rank holds all of it."""
    placements = part.placements  # type: ignore[attr-defined]
    split = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if not split:
        return None
    if len(split) > 1 or not placements[split[0]].is_shard():
        raise TypeError(f"a tensor is laid out as {placements}; expected one dimension that shards")
    return split[0]


def joint_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """L2 norm of whole tensors of which these are parts, 0-d float32 on `device`, the same on all ranks of a mesh."""
    groups: dict[dist.ProcessGroup | None, list[Tensor]] = {}
    for tensor, mine in zip(tensors, local(tensors), strict=True):
        groups.setdefault(shard_group(tensor), []).append(mine)
    total = torch.zeros((), device=device)
    for group, mine in groups.items():
        norms = [norm.to(device, non_blocking=True) for norm in foreach_norm(mine)]
        square = torch.linalg.vector_norm(torch.stack(norms)).float().square()
        if group is not None:
            dist.all_reduce(square, group=group)
        total = total + square
    return total.sqrt()


# --- a step -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around a step: the optimizer sees the plain tensors of this rank in place of DTensors, its moments included.

    Most optimizers compute element by element, so that each rank can by itself. Torch's DTensors lack some of their
    operations, such as those of fused SGD with a learning rate on the device, and cost more than the step.

    Raises:
        TypeError: the optimizer is known to look at whole matrices.
    """
    owned = [p for group in optimizer.param_groups for p in group["params"] if is_part(p) and p.grad is not None]
    if not owned:
        yield
        return
    kind = type(optimizer).__name__
    if kind in WHOLE_MATRICES:
        raise TypeError(f"{kind} {WHOLE_MATRICES[kind]}, and these are sharded; use another optimizer, or replicas")
    plain: dict[Tensor, Tensor] = {}
    entries: dict[Tensor, dict[str, Any]] = {}
    for param, mine, grad in zip(owned, local(owned), local(p.grad for p in owned), strict=True):
        plain[param] = mine.detach()
        plain[param].grad = grad
        entries[param] = optimizer.state.pop(param, {})
        values = dict(zip(entries[param], local(entries[param].values()), strict=True))
        if values:
            optimizer.state[plain[param]] = values
    lists = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [plain.get(param, param) for param in group["params"]]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params
        for param in owned:
            values = optimizer.state.pop(plain[param], {})
            if values:
                optimizer.state[param] = {key: _as_part(v, entries[param].get(key), param) for key, v in values.items()}


def _as_part(value: Any, before: Any, param: Any) -> Any:
    """An optimizer's plain `value` as a part of a whole, like `param`; `before` if that is still what it stands for."""
    if is_part(before) and before.to_local() is value:
        return before
    if not isinstance(value, Tensor) or not value.ndim or value.shape != param.to_local().shape:
        return value
    from torch.distributed.tensor import DTensor

    layout = {"shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(value, param.device_mesh, param.placements, run_check=False, **layout)
