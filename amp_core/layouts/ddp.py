"""Replicas: DistributedDataParallel and nn.DataParallel, wrapped once, unwrapped for checkpoints and EMA."""

# No postponed annotations: DistributedDataParallel checks the annotations of its communication hooks.
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_core.layouts.zero import sendable
from amp_core.lowp.islands import carry_autocast
from amp_core.step.amp import Amp
from amp_core.tensors import all_gather
from amp_core.torch_private import find, is_missing, version_of

Reduction = Callable[[dist.GradBucket], torch.futures.Future[torch.Tensor]]


@dataclass
class _State:
    """What `forward` and the communication hook share, to detect a second reduction within a window."""

    reduction: Reduction
    weight: nn.Parameter
    is_held: bool = False
    summed_at: tuple[int, int] | None = None  # `moment` of the sum over ranks that the gradients are; None: of none
    is_second: bool = False  # the next reduction would sum gradients that are sums over ranks already

    @property
    def moment(self) -> tuple[int, int]:
        """Changes with every step, except a fused one outside of `Amp`, whose kernel does not bump tensor versions."""
        return Amp.num_calls, version_of(self.weight)

    def begin(self, *, is_held: bool) -> None:
        """Called before a forward pass. Syncs only if the gradients were neither stepped nor set to None."""
        grad, self.is_held = self.weight.grad, is_held
        if self.summed_at != self.moment or grad is None or not grad.any():
            self.summed_at = None
        self.is_second = not is_held and self.summed_at is not None


class _Ddp(DistributedDataParallel):
    """Reduces gradients by a communication hook, which `no_sync` can disable also in static graphs.

    DDP records a static graph in its first backward pass, where it needs the reduction hooks; its own `no_sync` has
    none (torch 2.13 fails an internal assertion). The forward pass decides for its backward pass, as in other graphs.
    """

    def __init__(self, net: nn.Module, reduction: Reduction, **options: Any) -> None:
        # Gradients that are views of the buckets need no second copy, and are summed in place.
        super().__init__(net, gradient_as_bucket_view=True, **options)
        self._is_held = False
        # One weight tells for all whether gradients were stepped or cleared since the last sum.
        self._state = _State(reduction, [p for p in net.parameters() if p.requires_grad][-1])
        self.register_comm_hook(self._state, _reduce)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self._hold() if self.static_graph else super().no_sync()

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            # Also without a static graph: a forward pass without a backward pass leaves the reduction switched on.
            self._state.begin(is_held=self._is_held or not self.require_backward_grad_sync)
        return super().forward(*inputs, **kwargs)


def wrap_ddp(
    net: nn.Module,
    device: torch.device | None,
    *,
    exact: bool = False,
    static_graph: bool = False,
    bucket_mb: float | None = None,
    compress: bool = False,
) -> DistributedDataParallel:
    """DistributedDataParallel whose reduction *sums* gradients over ranks.

    Micro-batch weights already sum to 1 over all ranks; a mean would divide twice. With accumulation each forward pass
    must be inside `sync_grads`: a second reduction in a window would sum sums; its backward pass raises RuntimeError.

    Args:
        device: of the network; None for one on several devices that moves its own inputs.
        exact: sum in the same order in every step, also after a resume. DDP otherwise rebuilds its buckets after the
            first step, and with three or more ranks an element's position in a bucket decides the order in which ranks
            are added. The cost: the gradients of the first layers, ready last, are then in the first bucket.
        static_graph: every backward pass reaches the same weights, equally often. Also with accumulation, but not with
            gradients of gradients: torch reduces none after `torch.autograd.grad` of the same graph.
        bucket_mb: MiB of gradients per all-reduce; None: torch's default.
        compress: send bfloat16, half the bytes. Sums are fp32, rounded once: summed in bfloat16, 512 times 1/512 is
            0.5. There is no float16: a gradient of 3 overflows at a loss scale of 65536.
    """
    options: dict[str, Any] = {} if bucket_mb is None else {"bucket_cap_mb": bucket_mb}
    options["device_ids"] = [device] if device is not None and device.type == "cuda" else None
    ddp = _Ddp(net, _sum_compressed if compress else _sum, static_graph=static_graph, **options)
    # Build the buckets now, in parameter order; it happens only once. torch has no public name for it.
    names = ("torch.distributed.Reducer._push_all_rebuilt_params", "torch.distributed.Reducer._rebuild_buckets")
    if exact and not is_missing(*names):
        for name in names:
            find(name)(ddp.reducer)
    return ddp


def _reduce(state: _State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if state.is_held:
        return _done(bucket.buffer())
    if state.is_second:
        raise RuntimeError(
            "gradients that were summed over ranks would be summed once more: forward and backward passes of all "
            "micro-batches but the last of a window belong inside sync_grads(net, when=micro.is_last); a window ends "
            "with a step and zero_grad()"
        )
    state.summed_at = state.moment
    return state.reduction(bucket)


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: Any = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
    future.set_result(tensor)
    return future


def _sum(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _sum_compressed(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """An fp32 sum with the traffic of a bfloat16 all-reduce: each rank sums a part of the bucket, then all gather."""
    if bucket.buffer().is_sparse:
        return _sum(bucket)
    buffer, num_ranks = bucket.buffer(), dist.get_world_size()
    share = -(-buffer.numel() // num_ranks)  # rounded up: all parts have one size, the last is padded with zeros
    sent = torch.zeros(num_ranks * share, dtype=torch.bfloat16, device=buffer.device)
    sent[: buffer.numel()].copy_(buffer)
    received = torch.empty_like(sent)

    def add() -> torch.Tensor:
        mine = received.view(num_ranks, share).sum(0, dtype=torch.float32).bfloat16()
        sums = torch.empty_like(received)
        work: Any = all_gather(sendable(sums), sendable(mine), async_op=True)
        work.get_future().wait()  # on a GPU the stream waits, not the host
        return buffer.copy_(sums[: buffer.numel()])

    work: Any = dist.all_to_all_single(sendable(received), sendable(sent), async_op=True)
    if buffer.is_cuda:
        return work.get_future().then(lambda _: add())
    work.wait()  # gloo runs callbacks in threads, which could start the second halves of two buckets in any order
    return _done(add())


class ReplicaParallel(nn.DataParallel):
    """nn.DataParallel whose replicas compute in the autocast mode of the thread that calls it.

    Each replica runs in its own thread, and autocast is thread-local: torch (2.11 to 2.13) passes on whether it is
    enabled but not the dtype, so float16 outside becomes the default dtype inside.
    """

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        return super().parallel_apply([carry_autocast(replica) for replica in replicas], inputs, kwargs)


def wrap_data_parallel(net: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """A replica of `net` on each GPU, in one process; on a CPU `net` itself, as in nn.DataParallel."""
    return net if devices[0].type == "cpu" else ReplicaParallel(net, devices)
