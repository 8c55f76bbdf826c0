"""Tensor helpers shared by the floors below: DTensors and local shards, ranks, wrappers."""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_core.config.schema import WHOLE_MATRICES
from amp_core.torch_private import foreach_mul_, foreach_norm


@dataclass(frozen=True)
class Plan:
    """How a network was wrapped, and its unwrapped outline on the meta device, to make copies from."""

    outline: nn.Module
    dtype: torch.dtype | None
    shard: Callable[[nn.Module], nn.Module]
    """Shards an unwrapped network in the same way."""


plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


def blocks(net: nn.Module) -> Iterator[nn.Module]:
    """The blocks that are gathered one at a time (`wrap_fsdp`) or recomputed (`recompute_blocks`)."""
    users = Counter(p for module in net.modules() for p in module.parameters(recurse=False))

    def alone(block: nn.Module) -> bool:
        here = Counter(p for module in block.modules() for p in module.parameters(recurse=False))
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


# --- copies -----------------------------------------------------------------------------------------------------------


def is_sharded(net: nn.Module) -> bool:
    """Whether `net` is what `wrap_fsdp` returned."""
    return net in plans


def has_16bit(nets: Sequence[tuple[str, nn.Module]]) -> bool:
    """Whether weights are stored or gathered in 16 bits, as of a frozen base: such networks need autocast."""
    gathered = any(net in plans and plans[net].dtype is not None for _, net in nets)
    return gathered or any(p.dtype in HALF for _, net in nets for p in net.parameters())


def tensors_of(net: nn.Module) -> list[Tensor]:
    return [*net.parameters(), *net.buffers()]


def copy_with(net: nn.Module, tensors: dict[Tensor, Tensor]) -> nn.Module:
    """A deep copy with new tensors, tied like the original's."""
    memo: dict[int, Any] = {}
    for old, new in tensors.items():
        memo[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    return copy.deepcopy(net, memo)


@torch.no_grad()
def full_copy(net: nn.Module, device: str | torch.device | None = None) -> nn.Module:
    """An unsharded copy of a sharded network on every rank, on `device` or the network's. Collective."""
    plan = plans[net]
    values = [full_tensor(tensor).to(device or tensor.device, copy=True) for tensor in tensors_of(net)]
    return copy_with(plan.outline, dict(zip(tensors_of(plan.outline), values, strict=True)))


def sharded_copy(net: nn.Module) -> nn.Module:
    """A copy of a sharded network, sharded in the same way. Collective; briefly unsharded in host memory."""
    return plans[net].shard(full_copy(net, "cpu"))


# --- tensors ----------------------------------------------------------------------------------------------------------


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, this rank's shard of a full tensor."""
    # If the module is not loaded there are no DTensors, and loading it takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's shards of DTensors, in the same memory, empty ones included; anything else as it is."""
    if "torch.distributed.tensor" not in sys.modules:  # there are no DTensors
        return list(tensors)
    with torch.no_grad():
        return [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]  # type: ignore[operator]


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, on the same device; other tensors unchanged. Collective."""
    return tensor.detach().full_tensor() if is_dtensor(tensor) else tensor.detach()  # type: ignore[operator]


@dataclass(frozen=True)
class Slice:
    """This rank's shard of a tensor: a plain tensor and its position."""

    tensor: Tensor
    start: int
    """Its first index along `dim`; it ends `tensor.shape[dim]` indices later."""
    total: int
    """Size of the full tensor along `dim`."""
    dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return *self.tensor.shape[: self.dim], self.total, *self.tensor.shape[self.dim + 1 :]

    @property
    def stop(self) -> int:
        return self.start + self.tensor.shape[self.dim]


def dtensor_like(value: Any, live: Any) -> Any:
    """This rank's shard of `value` (full, or a `Slice`), laid out like `live` if that is a DTensor; else `value`."""
    is_other = not isinstance(value, Tensor | Slice) or is_dtensor(value)
    if is_other or not is_dtensor(live) or tuple(value.shape) != tuple(live.shape):
        return value
    if isinstance(value, Slice):
        return from_local(value.tensor.detach().to(live.device), live)
    from torch.distributed.tensor import distribute_tensor

    # Not from rank 0: every rank has read the same file.
    return distribute_tensor(value.detach().to(live.device), live.device_mesh, live.placements, src_data_rank=None)


def load_state(net: nn.Module, state: dict[str, Any]) -> None:
    """`net.load_state_dict(state)` of full tensors; a sharded network takes its shards."""
    live = net.state_dict()
    net.load_state_dict({name: dtensor_like(value, live.get(name)) for name, value in state.items()})


def shard_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """The ranks whose shards make up the full `tensor`; None if this rank holds all of it. TypeError as below."""
    split = split_dimension(tensor) if is_dtensor(tensor) else None
    return None if split is None else tensor.device_mesh.get_group(split)  # type: ignore[attr-defined]


def split_dimension(part: Tensor) -> int | None:
    """The mesh dimension over which a DTensor is sharded; None if each rank holds all of it. TypeError: several do."""
    placements = part.placements  # type: ignore[attr-defined]
    split = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if not split:
        return None
    if len(split) > 1 or not placements[split[0]].is_shard():
        raise TypeError(f"a tensor is laid out as {placements}; expected one dimension that shards")
    return split[0]


def slice_of(part: Any) -> Slice:
    """The `Slice` of a DTensor's local shard, in the same memory. No collective. TypeError: it has unusual sizes."""
    mine, split = local([part])[0].detach(), split_dimension(part)
    if split is None:
        return Slice(mine, 0, part.shape[0])
    mesh, dim = part.device_mesh, part.placements[split].dim
    each = -(-part.shape[dim] // mesh.size(split))  # as torch.chunk cuts
    start = min(mesh.get_coordinate()[split] * each, part.shape[dim])  # which the mesh holds, unlike a local rank
    if mine.shape[dim] != min(each, part.shape[dim] - start):
        raise TypeError(f"a shard of {tuple(part.shape)} has {mine.shape[dim]} of {each} indices along dimension {dim}")
    return Slice(mine, start, part.shape[dim], dim)


def global_grad_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The global L2 norm of sharded tensors, 0-d float32 on `device`, the same on all ranks of a mesh."""
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


class StateLayout(NamedTuple):
    """How a layout shards the state of optimizers whose weights and gradients are replicated (ZeRO stage 1)."""

    applies: Callable[[torch.optim.Optimizer], bool]
    view: Callable[[torch.optim.Optimizer], contextlib.AbstractContextManager[None]]
    """Around a step: the optimizer sees this rank's slices. Collective."""
    full_state: Callable[..., dict[str, Any]]
    """(optimizer, keep=) -> its state dict as in one process. Collective."""
    local_states: Callable[[torch.optim.Optimizer, dict[Any, Any], Sequence[Any]], dict[Any, Any]]
    """(optimizer, full states by number of the weight, numbers of its weights) -> this rank's slices."""


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that a wrapper, such as Lookahead, has as attributes; the outermost first."""
    found = [optimizer]
    for each in found:
        found += [v for v in vars(each).values() if isinstance(v, torch.optim.Optimizer) and v not in found]
    return found[1:]


def owner_of_groups(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The innermost optimizer with the very groups of `optimizer`: of a wrapper and its inner the one that steps."""
    # It may get others by `load_state_dict`, which a wrapper does not notice.
    found = [each for each in inner_optimizers(optimizer) if each.param_groups is optimizer.param_groups]
    return found[-1] if found else optimizer


state_layouts: list[StateLayout] = []
"""A layout adds its own."""


def state_layout(optimizer: torch.optim.Optimizer) -> StateLayout | None:
    """The layout of the optimizer's state; None if each rank holds the state of its weights."""
    return next((each for each in state_layouts if each.applies(optimizer)), None) if several_ranks() else None


def is_state_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's state is sharded while weights and gradients are replicated."""
    return state_layout(optimizer) is not None


@contextlib.contextmanager
def step_on_local_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around a step: the optimizer sees this rank's shards. Collective. TypeError: it looks at whole matrices."""
    layout = state_layout(optimizer)
    with _on_plain_tensors(optimizer), contextlib.nullcontext() if layout is None else layout.view(optimizer):
        yield


@contextlib.contextmanager
def _on_plain_tensors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around a step: the optimizer sees local shards in place of DTensors, also of its moments."""
    # Most optimizers are elementwise, so each rank can step its own shards. DTensors lack some operators, such as fused
    # SGD with a learning rate on the device, and cost more time than the step.
    owned = [p for group in optimizer.param_groups for p in group["params"] if is_dtensor(p) and p.grad is not None]
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
        if values := dict(zip(entries[param], local(entries[param].values()), strict=True)):
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
            if values := optimizer.state.pop(plain[param], {}):
                optimizer.state[param] = {key: _as_part(v, entries[param].get(key), param) for key, v in values.items()}


def _as_part(value: Any, before: Any, param: Any) -> Any:
    """An optimizer's local `value` as a DTensor like `param`; `before` if it still holds that value."""
    if is_dtensor(before) and before.to_local() is value:
        return before
    is_shard = isinstance(value, Tensor) and value.ndim and value.shape == param.to_local().shape
    return from_local(value, param) if is_shard else value


def from_local(shard: Tensor, like: Any) -> Tensor:
    """A DTensor laid out like the DTensor `like`, of which `shard` is this rank's."""
    from torch.distributed.tensor import DTensor

    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(shard, like.device_mesh, like.placements, run_check=False, **layout)


def multiply_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply by a 0-d tensor in place, on any devices. No host-device sync."""
    tensors = local(tensors)
    for device in {tensor.device for tensor in tensors}:
        foreach_mul_([t for t in tensors if t.device == device], factor.to(device, non_blocking=True))


def share_buffers(*nets: nn.Module) -> None:
    """Broadcast rank 0's buffers: running statistics differ between ranks. Collective."""
    if several_ranks():
        for buffer in (buffer for net in nets for buffer in net.buffers()):
            dist.broadcast(buffer, 0)


_HAS_DISTRIBUTED = dist.is_available()
# One function: torch 2.13 renamed it and deprecates the old name. Builds without torch.distributed have neither.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

HALF = (torch.float16, torch.bfloat16)
UNTESTED_DEVICES = ("mps", "xpu")
"""Accelerators that are tested with fake tensors only."""


def is_there(device_type: str) -> bool:
    """Whether this machine has an accelerator of this type, and this build of torch is for it."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == device_type


def widest(device: torch.device) -> torch.dtype:
    """float64 for counts and sums; float32 on mps, which has none and counts to 2^24 exactly."""
    return torch.float32 if device.type == "mps" else torch.float64


def several_ranks() -> bool:
    """Whether there is a process group of more than one rank."""
    return _HAS_DISTRIBUTED and dist.is_initialized() and dist.get_world_size() > 1


def unwrap(net: nn.Module) -> nn.Module:
    """The network inside wrappers of data parallelism and of torch.compile, nested in any order."""
    while hasattr(net, "_orig_mod") or isinstance(net, DistributedDataParallel | nn.DataParallel):
        net = net._orig_mod if hasattr(net, "_orig_mod") else net.module  # type: ignore[assignment]
    return net
