"""How a model lies over processes: wrapped once at the start, unwrapped for checkpoints and averages."""

# No postponed annotations here: DistributedDataParallel looks at those of its communication hooks.

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_core.islands import carry_autocast
from amp_core.shards import local


def wrap_ddp(net: nn.Module, device: torch.device | None, *, exact: bool = False) -> DistributedDataParallel:
    """DistributedDataParallel whose reduction *sums* gradients over ranks.

    The weights of a window already sum to 1 over all ranks, so a mean on top would divide twice.

    Args:
        net: on `device`.
        device: None for a network that lies on several devices and moves its inputs by itself.
        exact: sum in the same order in every step, whenever the run was begun or resumed. DDP otherwise arranges its
            buckets anew after its first step, and with three or more ranks an element's place in a bucket decides in
            which order the ranks are added. The gradients of the first layers, the last to be ready, then go first.
    """
    on_one_gpu = device is not None and device.type == "cuda"
    ddp = DistributedDataParallel(net, device_ids=[device] if on_one_gpu else None, gradient_as_bucket_view=True)
    if exact:
        # Arranges them now, in the order of the parameters; it does so only once. torch has no public name for it.
        ddp.reducer._push_all_rebuilt_params()
        ddp.reducer._rebuild_buckets()
    ddp.register_comm_hook(None, _sum)
    return ddp


def _sum(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class ReplicaParallel(nn.DataParallel):
    """nn.DataParallel whose replicas compute in the autocast mode of the thread that calls it.

    Each replica runs in a thread of its own, and autocast is thread-local: torch (2.11 to 2.13) hands on whether it is
    enabled and forgets the dtype, so that float16 outside is the default dtype inside.
    """

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        return super().parallel_apply([carry_autocast(replica) for replica in replicas], inputs, kwargs)


def wrap_data_parallel(net: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """A replica of `net` on each GPU, for one process; on a CPU `net` itself, as nn.DataParallel would do."""
    return net if devices[0].type == "cpu" else ReplicaParallel(net, devices)


def multiply_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply by a 0-d tensor in place, on whatever devices they lie. Does not wait for any."""
    tensors = local(tensors)
    for device in {tensor.device for tensor in tensors}:
        here = [tensor for tensor in tensors if tensor.device == device]
        torch._foreach_mul_(here, factor.to(device, non_blocking=True))


def share_buffers(*nets: nn.Module) -> None:
    """Put rank 0's buffers on all ranks: running statistics differ between them. Collective."""
    if several_ranks():
        for buffer in (buffer for net in nets for buffer in net.buffers()):
            dist.broadcast(buffer, 0)


_HAS_DISTRIBUTED = dist.is_available()


def several_ranks() -> bool:
    """Whether this process trains together with others."""
    return _HAS_DISTRIBUTED and dist.is_initialized() and dist.get_world_size() > 1


def unwrap(net: nn.Module) -> nn.Module:
    """The network inside wrappers of data parallelism and of torch.compile, nested in any order."""
    while True:
        if hasattr(net, "_orig_mod"):
            net = net._orig_mod  # type: ignore[assignment]
        elif isinstance(net, DistributedDataParallel | nn.DataParallel):
            net = net.module
        else:
            return net
