"""How a model lies over processes: wrapped once at the start, unwrapped for checkpoints and averages."""

# No postponed annotations here: DistributedDataParallel looks at those of its communication hooks.

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wrap_ddp(net: nn.Module, device: torch.device) -> DistributedDataParallel:
    """DistributedDataParallel whose reduction *sums* gradients over ranks.

    The weights of a window already sum to 1 over all ranks, so a mean on top would divide twice.
    """
    ddp = DistributedDataParallel(
        net, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    ddp.register_comm_hook(None, _sum)
    return ddp


def _sum(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def several_ranks() -> bool:
    """Whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def unwrap(net: nn.Module) -> nn.Module:
    """The network inside wrappers of data parallelism and of torch.compile, nested in any order."""
    while True:
        if hasattr(net, "_orig_mod"):
            net = net._orig_mod  # type: ignore[assignment]
        elif isinstance(net, DistributedDataParallel | nn.DataParallel):
            net = net.module
        else:
            return net
