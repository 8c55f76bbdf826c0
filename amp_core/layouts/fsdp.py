"""Sharded weights, gradients and moments (FSDP2).

Shards, optimizer moments, EMA and the gradients summed over ranks are fp32. Before a block computes, its weights are
gathered from all ranks, in one of two groups:

- Weights that autocast casts, those of linear layers and convolutions, are cast shard by shard and gathered in 16 bits:
  half the bytes. Autocast would make the same 16-bit values after an fp32 gather, and then cache them from the forward
  to the backward pass, which sharding is meant to avoid; gathered ones are freed in between.
- All other weights are gathered in fp32: norms and embeddings, which autocast does not cast, islands, and any others.

So a network computes the same as in one process, and `amp.autocast` still sets the mode.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from amp_core.config.errors import ConfigError
from amp_core.layouts.low_shards import ShardedLowWeights, hold_low, send_float8
from amp_core.lowp.islands import island_names
from amp_core.lowp.lint import CONVOLUTIONS
from amp_core.lowp.products import LowLinear
from amp_core.lowp.weights import Update, low_weights
from amp_core.tensors import Plan, blocks, copy_with, plans, tensors_of
from amp_core.torch_private import find

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from amp_core.step.amp import Amp

_CAST_WHOLE = (nn.Linear, *CONVOLUTIONS)


# --- wrapping ---------------------------------------------------------------------------------------------------------


def build_mesh(device: torch.device, world_size: int, shard_size: int | None = None) -> DeviceMesh:
    """A mesh of one sharding group (fsdp), or of replicated sharding groups of `shard_size` ranks (hsdp). Collective.

    Ranks of a group are consecutive, so that a group is on one machine if the sizes allow.
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


def wrap_fsdp(
    net: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype | None = None,
    *,
    update: Update | None = None,
    gather: torch.dtype | None = None,
) -> nn.Module:
    """Shard the weights of `net` over the ranks of `mesh`, in place, by `fully_shard`. Gradients are *summed*.

    One group of weights is gathered at a time: that of a block. Blocks are the outermost elements of `nn.ModuleList`
    and `nn.Sequential` that have weights and submodules; weights in no block, or shared with something outside it, form
    the last group, that of the network. All ranks start with the weights and buffers of rank 0. Collective.

    Args:
        net: unsharded, after `keep_fp32`, on the device, or on the CPU if the process group has a backend for it. Its
            weights move to the device block by block, and become DTensors. Names stay, and `isinstance`.
        dtype: the autocast dtype of training, or None without autocast. Forward passes must then run inside autocast.
        update: weights are 16-bit (`dtype`) where they are gathered, after `Amp.prepare(net, gathers=True)`; without
            autocast. Shards are fp32 masters, or for other updates than "master" `ShardedLowWeights`.
        gather: how layers of a format below 16 bits gather their weights: in bfloat16 (`dtype`), which adds an error of
            at most 2^-8 of a weight, or in float8_e4m3fn, the codes of `amp=fp8`. None: in fp32.

    ConfigError: torch cannot shard a weight of it, such as one without dimensions, or its gradient is sparse.
    """
    for name, module in net.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"layout: {name}: sparse gradients cannot be sharded; use sparse=False, or layout=ddp")
    for tensor in tensors_of(net):
        dist.broadcast(tensor.detach(), 0)
    if update not in (None, "master"):
        assert dtype is not None
        hold_low(net, dtype, update, mesh.device_type)
    if gather is torch.float8_e4m3fn:
        send_float8([module for module in net.modules() if isinstance(module, LowLinear)], mesh.device_type)
    return _shard(net, mesh, dtype, masters=update is not None, also=gather is torch.bfloat16)


def shard_for(amp: Amp, net: nn.Module, mesh: DeviceMesh, gather: torch.dtype | None = None) -> nn.Module:
    """`wrap_fsdp` as a mode needs it, after `amp.prepare(net, gathers=True)`; its 16-bit shards join `amp.weights`."""
    update = amp.config.update
    dtype = getattr(torch, amp.config.dtype if update is None else amp.config.weights)
    net = wrap_fsdp(net, mesh, None if dtype is torch.float32 else dtype, update=update, gather=gather)
    if update not in (None, "master"):
        amp.weights.append(ShardedLowWeights(net, update))
    return net


def _shard(
    net: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None, masters: bool = False, also: bool = False
) -> nn.Module:
    """`also`: layers of formats below 16 bits gather in `dtype`."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # Without memory: full shapes and copies of a sharded network (`sharded_copy`) start from it.
    on_meta = copy_with(net, {tensor: torch.empty_like(tensor, device="meta") for tensor in tensors_of(net)})
    plan = Plan(on_meta, dtype, functools.partial(_shard, mesh=mesh, dtype=dtype, masters=masters, also=also))
    full = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    low = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Also the root, which torch would keep gathered after a forward pass: no backward pass follows an evaluation, and
    # its gathered weights would miss later steps, EMA updates and checkpoints.
    shard = functools.partial(fully_shard, mesh=mesh, reshard_after_forward=True)
    in_16bit = {} if dtype is None else _low_whole(net) if masters else cast_whole(net, also=also)
    for module, name in in_16bit.items() if not masters else ():
        module.register_forward_pre_hook(functools.partial(_require_autocast, dtype, name))
    try:
        # Inner groups first: what a block has left when it is wrapped itself is gathered with the block.
        for block in (*blocks(net), net):
            mine = [m for m in block.modules() if m in in_16bit and not isinstance(m, FSDPModule)]
            if mine and mine != [block]:
                shard(mine if len(mine) > 1 else mine[0], mp_policy=low)
            shard(block, mp_policy=low if mine == [block] else full)
    except (NotImplementedError, ValueError) as problem:
        raise ConfigError(f"layout: {type(net).__name__} cannot be sharded: {problem}; use layout=ddp") from problem
    for module in net.modules():
        if isinstance(module, FSDPModule):
            # Sums: micro-batch weights already make them means. Not scaled sums, which gloo lacks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    net.register_forward_hook(_close_groups)
    plans[net] = plan
    return net


def _close_groups(net: nn.Module, inputs: Any, output: Any) -> None:
    """Free gathered weights of groups with a module that did not run, such as a training-only head.

    Before torch 2.13 only the next backward pass does so. Without one the weights would miss later steps and averages.
    """
    from torch.distributed.fsdp import FSDPModule

    state_of = find("torch.distributed.fsdp.FSDPModule._get_fsdp_state", lambda module: None)
    for module in () if torch.is_grad_enabled() else net.modules():
        if isinstance(module, FSDPModule):
            getattr(state_of(module), "_modules_to_run_forward", set()).clear()  # else it waits for the rest of them
            module.reshard()  # does nothing where a forward pass has freed them already


def cast_whole(net: nn.Module, *, also: bool = False) -> dict[nn.Module, str]:
    """The modules, by name, of which autocast casts every weight; `also` those of formats below 16 bits."""
    islands = [net.get_submodule(name) for name in island_names(net)]
    in_islands = {module for island in islands for module in island.modules()}
    # Exactly these classes: a subclass may use its weights in operations that autocast does not cast.
    kinds = {*_CAST_WHOLE, *([LowLinear] if also else [])}
    found = {m: name for name, m in net.named_modules() if type(m) in kinds and m not in in_islands}
    elsewhere = {p for module in net.modules() if module not in found for p in module.parameters(recurse=False)}
    return {
        module: name
        for module, name in found.items()
        if all(p.dtype is torch.float32 and p not in elsewhere for p in module.parameters())
    }


def _low_whole(net: nn.Module) -> dict[nn.Module, str]:
    """The modules with weights that are 16-bit in a mode with masters, and their names."""
    lows, found = set(low_weights(net)), {}
    for name, module in net.named_modules():
        own = list(module.parameters(recurse=False))
        if not any(p in lows for p in own):
            continue
        if len(own) < len(list(module.parameters())):
            raise ConfigError(
                f"layout: {name or type(net).__name__} has weights beside those of its submodules, which cannot be "
                f"gathered in 16 bits alone; use layout=ddp, or amp=bf16"
            )
        found[module] = name
    return found


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
