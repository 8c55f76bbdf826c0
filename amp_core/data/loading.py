"""Stateless sample order, loaders, and copies of batches to the device.

The order of an epoch is a function of (seed, epoch), augmentation one of (seed, sample, epoch). So the same samples
arrive in the same order for any number of workers, any split of a step over micro-batches and ranks, and after a resume
at any sample. The only state is the number of samples seen.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import multiprocessing.util
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from amp_core.config.errors import RunError
from amp_core.data.base import Dataset, Key
from amp_core.torch_private import find

_end_workers = find("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers")


# --- order ------------------------------------------------------------------------------------------------------------


class Sampler:
    """The endless micro-batches of one rank from any sample on: an iterable of lists of keys.

    Epoch p is a permutation seeded by (seed, p). A step takes the next `samples_per_step` of this endless sequence;
    micro-batch m of rank r is the (m * world_size + r)-th chunk of them. So a step has the same samples for any split
    over `accumulation` and `world_size`, and a run may resume with another number of ranks. A micro-batch may hold the
    end of one epoch and the beginning of the next.

    Args:
        num_samples: length of the data set.
        seed: seed of the order, at least 0.
        batch_size: samples per micro-batch and rank.
        accumulation: micro-batches per step.
        rank: this process.
        world_size: number of processes.
        start_sample: number of earlier samples, over all ranks.
        shuffle: False keeps the order of the data set in every epoch.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        seed: int,
        batch_size: int,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        start_sample: int = 0,
        shuffle: bool = True,
    ) -> None:
        if min(num_samples, batch_size, accumulation, world_size) < 1 or not 0 <= rank < world_size or start_sample < 0:
            raise ValueError(
                f"Sampler({num_samples=}, {batch_size=}, {accumulation=}, {rank=}, {world_size=}, {start_sample=}): "
                f"expected counts above 0, a rank below world_size and a start of at least 0"
            )
        self.num_samples, self.batch_size, self.start_sample = num_samples, batch_size, start_sample
        self.accumulation, self.rank, self.world_size = accumulation, rank, world_size
        self.samples_per_step = batch_size * accumulation * world_size
        self._seed, self._shuffle = seed, shuffle
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __iter__(self) -> Iterator[list[Key]]:
        for piece in itertools.count(self.rank, self.world_size):
            yield self.keys(self.start_sample + piece * self.batch_size, self.batch_size)

    def keys(self, position: int, count: int) -> list[Key]:
        """`count` keys of the endless sequence, from a position on."""
        keys: list[Key] = []
        while len(keys) < count:
            number, offset = divmod(position + len(keys), self.num_samples)
            indices = self._order(number)[offset : offset + count - len(keys)]
            keys += [(index, number) for index in indices.tolist()]
        return keys

    def _order(self, number: int) -> NDArray[np.int64]:
        if not self._shuffle:
            number = 0
        if number not in self._orders:
            if len(self._orders) == 2:  # no more are in use: an epoch starts when the previous one ends
                self._orders.clear()
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, number])))
            self._orders[number] = rng.permutation(self.num_samples) if self._shuffle else np.arange(self.num_samples)
        return self._orders[number]


def eval_keys(num_samples: int, *, batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[Key]]:
    """The batches of one rank: every sample once over all ranks.

    All ranks have the same number of batches, since gathering sharded weights is collective: the rest is distributed
    evenly over the last round. Less than one sample per rank goes to the round before, whose batches grow by one. Only
    with fewer samples than ranks some ranks have none.
    """
    num_rounds, rest = divmod(num_samples, world_size * batch_size)
    sizes = [world_size * batch_size] * num_rounds
    if rest < world_size and sizes:
        sizes[-1] += rest
    elif rest:
        sizes.append(rest)
    batches, first = [], 0
    for size in sizes:
        start, end = (first + size * r // world_size for r in (rank, rank + 1))
        batches += [[(i, 0) for i in range(start, end)]] if end > start else []
        first += size
    return batches


# --- loaders ----------------------------------------------------------------------------------------------------------


def train_loader(
    dataset: Dataset,
    sampler: Iterable[list[Key]],
    *,
    num_workers: int,
    pin_memory: bool = False,
    prefetch: int = 2,
    start_method: str | None = None,
) -> Batches:
    """Micro-batches on the CPU, in the sampler's order. Workers start here and live until `close`.

    Args:
        dataset: the data set; pickled with a `start_method` other than fork.
        sampler: yields the keys of each micro-batch.
        num_workers: processes; 0 loads in this one.
        pin_memory: return pinned memory, for asynchronous copies to CUDA.
        prefetch: micro-batches that each worker loads ahead.
        start_method: fork, spawn or forkserver; None: Python's default.
    """
    return Batches(
        dataset,
        sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch=prefetch,
        start_method=start_method,
    )


def eval_loader(
    dataset: Dataset,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
    start_method: str | None = None,
) -> EvalLoader:
    """Batches on the CPU: every sample exactly once over all ranks, in order, without padding.

    The last batch may be smaller, or larger by one, and differ between ranks: reduce sums at the end.
    """
    keys = eval_keys(len(dataset), batch_size=batch_size, rank=rank, world_size=world_size)
    return EvalLoader(dataset, keys, num_workers=num_workers, pin_memory=pin_memory, start_method=start_method)


_check: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


@contextlib.contextmanager
def interruptible(check: Callable[[], None]) -> Iterator[None]:
    """Around evaluations: `check` is called between batches of an `eval_loader`, and may raise to stop it.

    Every rank calls it equally often, since all have the same number of batches or at most one.
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


class EvalLoader:
    """One evaluation per `iter`, with its own workers."""

    def __init__(self, dataset: Dataset, keys: list[list[Key]], **options: Any) -> None:
        self._dataset, self._keys, self._options = dataset, keys, options

    @property
    def rows(self) -> list[slice]:
        """The samples of the data set in each batch."""
        return [slice(batch[0][0], batch[-1][0] + 1) for batch in self._keys]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        with Batches(self._dataset, self._keys, **self._options) as batches:
            for number, batch in enumerate(batches):
                check = _check.get()
                if number and check is not None:
                    check()
                yield batch


class Batches:
    """An iterator of batches that owns its worker processes. A context manager; `close` ends the workers at once.

    Workers use one thread each (set by torch) and ignore signals that end a run: Ctrl-C and schedulers signal every
    process of a job, and a run needs its workers to finish the step.

    Raises:
        RunError: in `next`: a worker died, or an image cannot be read.
    """

    def __init__(
        self,
        dataset: Dataset,
        keys: Iterable[list[Key]],
        *,
        num_workers: int,
        pin_memory: bool = False,
        prefetch: int = 2,
        start_method: str | None = None,
    ) -> None:
        loader = DataLoader(
            cast(Any, dataset),
            batch_sampler=cast(Any, keys),
            collate_fn=_identity,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch if num_workers else None,
            worker_init_fn=_ignore_signals if num_workers else None,
            multiprocessing_context=start_method if num_workers else None,
            generator=torch.Generator(),  # else it uses the global one
        )
        with warnings.catch_warnings():
            # Python 3.12 warns about any fork beside other threads. torch forks by default; its workers take no lock of
            # the parent's thread pools.
            warnings.filterwarnings(
                "ignore", message=".*use of fork.*may lead to deadlocks", category=DeprecationWarning
            )
            self._iterator: Iterator[Any] = iter(loader)
        # For a child of multiprocessing, which runs no atexit; above 10, where queues end their threads.
        self._end = multiprocessing.util.Finalize(self, _shut_down, args=(self._iterator,), exitpriority=20)
        # For other processes: multiprocessing's own handler runs after torch has released its workers, and would hang.
        atexit.register(self._end)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self.close()
            raise
        except RunError as error:
            self.close()
            # torch puts the worker's traceback before the message.
            raise RunError(str(error).strip().rpartition("RunError: ")[2]) from error
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise self._died(str(error).strip()) from error
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            try:
                dead = self._dead_workers()
            except RuntimeError as told:  # torch's handler of SIGCHLD, while we wait
                raise self._died(str(told).strip()) from error
            if not dead:
                raise
            raise self._died(f"DataLoader worker (pid {dead[0]}) died while it handed over a batch.") from error

    def _died(self, what: str) -> RunError:
        self.close()
        return RunError(
            f"{what} Often memory ran out, or /dev/shm is too small. Use a smaller data.num_workers; 0 loads in the "
            f"training process"
        )

    def _dead_workers(self) -> list[int]:
        """Process ids of dead workers. Waits briefly, since a killed worker's connection closes before it ends."""
        workers = getattr(self._iterator, "_workers", [])
        for worker in workers:
            worker.join(0.2)
        return [worker.pid for worker in workers if not worker.is_alive()]

    def close(self) -> None:
        """End the workers and exhaust the iterator. Idempotent."""
        self._end()
        atexit.unregister(self._end)
        self._iterator = iter(())

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _identity(batch: Any) -> Any:
    return batch


def _ignore_signals(worker: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _shut_down(iterator: Any) -> None:
    workers = getattr(iterator, "_workers", [])
    for worker in workers:
        worker.terminate = worker.kill  # torch terminates stuck workers, and these ignore SIGTERM
    if workers and _end_workers:
        _end_workers(iterator)


# --- to the device ----------------------------------------------------------------------------------------------------


def to_device(
    batches: Iterable[Any],
    device: torch.device | str,
    *,
    ahead: int = 0,
    finish: Callable[[Any], Any] | None = None,
    channels_last: bool = False,
) -> Iterator[Any]:
    """Copy batches to the device. No host-device sync with pinned memory.

    Args:
        batches: tensors in any nesting of tuples, lists and dicts; other values pass through.
        device: the target.
        ahead: on CUDA, copy this many batches ahead, such as the next window, on a separate stream.
        finish: applied to each batch on the device before it is used.
        channels_last: store 4-d tensors in NHWC order.
    """
    device = torch.device(device)

    def ready(batch: Any) -> Any:
        batch = batch if finish is None else finish(batch)
        return _map_tensors(batch, _to_channels_last) if channels_last else batch

    move = functools.partial(_map_tensors, function=lambda tensor: tensor.to(device, non_blocking=True))
    if device.type != "cuda" or not ahead:
        yield from map(ready, map(move, batches))
        return
    side = torch.cuda.Stream(device)

    def copy(batch: Any) -> tuple[Any, Any]:
        with torch.cuda.stream(side):
            # Batches without `finish` get their memory format here.
            return (move(batch) if finish is not None else ready(move(batch))), side.record_event()

    def hand_over(batch: Any, copied: Any) -> Any:
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        # The memory belongs to the side stream: it must not be reused there before this stream has read it.
        _map_tensors(batch, lambda tensor: tensor.record_stream(current))
        return batch if finish is None else ready(batch)

    pending: deque[Any] = deque()
    for batch in batches:
        pending.append(copy(batch))
        if len(pending) > ahead:
            yield hand_over(*pending.popleft())
    while pending:
        yield hand_over(*pending.popleft())


def _to_channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
