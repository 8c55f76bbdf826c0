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

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_core.config.errors import ConfigError
from amp_core.lowp.islands import island_names
from amp_core.tensors import (
    Plan,
    Slice,
    blocks,
    copy_with,
    full_tensor,
    is_dtensor,
    plans,
    split_dimension,
    tensors_of,
)
from amp_core.torch_private import find

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_CAST_WHOLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


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
    for tensor in tensors_of(net):
        dist.broadcast(tensor.detach(), 0)
    return _shard(net, mesh, dtype)


def _shard(net: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> nn.Module:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    plan = Plan(_outline(net), dtype, functools.partial(_shard, mesh=mesh, dtype=dtype))
    full = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
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
            shard(block, mp_policy=low if mine == [block] else full)
    except (NotImplementedError, ValueError) as problem:
        raise ConfigError(f"layout: {type(net).__name__} cannot be sharded: {problem}; use layout=ddp") from problem
    for module in net.modules():
        if isinstance(module, FSDPModule):
            # Sums, since the weights of a window already average. As plain sums: gloo has no scaled ones.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    net.register_forward_hook(_close_groups)
    plans[net] = plan
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


def outline(net: nn.Module) -> nn.Module:
    """What a sharded network was before, without memory."""
    return plans[net].outline


def gathers_16bit(net: nn.Module) -> bool:
    """Whether weights of `net` arrive in 16 bits: these cannot be made islands any more."""
    return net in plans and plans[net].dtype is not None


def _outline(net: nn.Module) -> nn.Module:
    return copy_with(net, {tensor: torch.empty_like(tensor, device="meta") for tensor in tensors_of(net)})


def slice_of(part: Tensor) -> Slice:
    """The `Slice` that a part holds, in the same memory. No collective.

    Raises:
        TypeError: it is split over more than one dimension of its mesh, or in unusual sizes.
    """
    mine, split = part.to_local().detach(), split_dimension(part)  # type: ignore[attr-defined]
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
    mesh, split = part.device_mesh, split_dimension(part)  # type: ignore[attr-defined]
    number, count = 0, 1
    for i in range(mesh.ndim):
        if i != split:
            number, count = number * mesh.size(i) + mesh.get_local_rank(i), count * mesh.size(i)
    return number, count


def gather_full_state(value: Any, *, keep: bool = True) -> Any:
    """A nested state with whole tensors in place of parts, these in host memory. Collective.

    Args:
        value: of the same structure on all ranks.
        keep: false on ranks that need it for nothing: they take part, and get None in place of each.
    """
    if is_dtensor(value):
        full = full_tensor(value)  # one after the other: the device holds a single whole tensor at a time
        return full.cpu() if keep else None
    if isinstance(value, dict):
        return {key: gather_full_state(item, keep=keep) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(gather_full_state(item, keep=keep) for item in value)
    return value
