"""Stateless sample order, loaders, and copies of batches to the device.

The order of an epoch is a function of (seed, epoch), augmentation one of (seed, sample, epoch). So the same samples
arrive in the same order for any number of workers, any split of a step over micro-batches and ranks, and after a resume
at any sample. The only state is the number of samples seen.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import itertools
import multiprocessing.util
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from amp_core.config.errors import BadSample, RunError
from amp_core.config.processes import is_stopped
from amp_core.data.base import Dataset, Key, Seeded
from amp_core.torch_private import find

DIED = "Often memory ran out, or /dev/shm is too small. Use a smaller data.num_workers; 0 loads in the training process"
"""What to do when torch says that a worker died."""
_end_workers = find("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers")


# --- order ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Sampler:
    """The endless micro-batches of one rank, from a given sample on: an iterable of lists of keys.

    Epoch p is a permutation seeded by (seed, p). A step takes the next `samples_per_step` of this endless sequence;
    micro-batch m of rank r is the (m * world_size + r)-th chunk of them. So a step has the same samples for any split
    over `accumulation` and `world_size`, and a run may resume with another number of ranks. A micro-batch may hold the
    end of one epoch and the beginning of the next.

    Args:
        batch_size: samples per micro-batch and rank.
        start_sample: number of earlier samples, over all ranks.
        shuffle: False keeps the order of the data set in every epoch.
    """

    num_samples: int
    _: KW_ONLY
    seed: int
    batch_size: int
    accumulation: int = 1
    rank: int = 0
    world_size: int = 1
    start_sample: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        counts = self.num_samples, self.batch_size, self.accumulation, self.world_size, self.start_sample + 1
        if min(counts) < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"{self}: expected counts above 0, a rank below world_size and a start of at least 0")
        self.samples_per_step = self.batch_size * self.accumulation * self.world_size
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
        if not self.shuffle:
            number = 0
        if number not in self._orders:
            if len(self._orders) == 2:  # a cache: a batch needs the order of this epoch and of the next
                self._orders.clear()
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, number])))
            self._orders[number] = rng.permutation(self.num_samples) if self.shuffle else np.arange(self.num_samples)
        return self._orders[number]


def eval_keys(num_samples: int, *, batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[Key]]:
    """The batches of one rank: every sample once over all ranks.

    All ranks have the same number of batches, since gathering sharded weights is collective: what remains after full
    rounds is divided over a last one. If that is less than one sample per rank, it joins the round before, whose
    batches then have up to one sample more. Only with fewer samples than ranks some ranks have none.
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


_check: ContextVar[Callable[[int, slice, Any], None] | None] = ContextVar("check", default=None)


@contextlib.contextmanager
def checking_batches(check: Callable[[int, slice, Any], None]) -> Iterator[None]:
    """Around evaluations: `check` is called with the number of each batch of an `EvalLoader`, its samples in the data
    set and the batch, and may raise to stop it. All ranks have the same number of batches, or at most one.
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


class GaveUp(BaseException):
    """A run that was asked to stop no longer waits for a batch. No `Exception`: what reads data may catch those."""


class _TimedOut(BaseException):
    pass


class _Waits:
    """Looks at a wait for a batch once a second, in a signal handler: the main thread may be in a queue, or in a socket
    to a worker that stands still after it announced its batch. Counts seconds in which this process runs."""

    def __init__(self, seconds: float, is_asked: Callable[[], bool], patience: float) -> None:
        self.seconds, self._is_asked, self._patience = seconds, is_asked, patience

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait. Somebody else's timer is kept, and fires after it at the earliest."""
        began, self._waited, self._asked = time.monotonic(), 0, 0
        handler = signal.signal(signal.SIGALRM, self._on_alarm)
        delay, interval = signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
        try:
            yield
        finally:
            left = delay and max(delay - (time.monotonic() - began), 1e-6)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, left, interval)

    def _on_alarm(self, number: int, frame: object) -> None:
        self._waited += 1
        self._asked += self._is_asked()
        if self._asked >= self._patience:
            raise GaveUp
        if self._waited >= self.seconds:
            raise _TimedOut


_waits: ContextVar[_Waits | None] = ContextVar("waits", default=None)


@contextlib.contextmanager
def bounded_waits(minutes: float, is_asked: Callable[[], bool], patience: float) -> Iterator[None]:
    """Around a run: no batch of a worker is waited for without end. In another thread than the main one without effect.

    Args:
        minutes: after which waiting ends with a `RunError`.
        is_asked: whether the run is to stop; asked once a second of a wait.
        patience: seconds for which it is waited all the same; then `GaveUp` is raised.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    token = _waits.set(_Waits(60.0 * minutes, is_asked, patience))
    try:
        yield
    finally:
        _waits.reset(token)


class EvalLoader:
    """Batches on the CPU: every sample exactly once over all ranks, in order, without padding.

    One evaluation per `iter`, with its own workers. The last batch may be smaller, or larger by one, and differ between
    ranks: reduce sums at the end. `options` are those of `Batches`.
    """

    def __init__(
        self, dataset: Dataset, *, batch_size: int, rank: int = 0, world_size: int = 1, **options: Any
    ) -> None:
        self._keys = eval_keys(len(dataset), batch_size=batch_size, rank=rank, world_size=world_size)
        self._dataset, self._options = dataset, options

    @property
    def rows(self) -> list[slice]:
        """The samples of the data set in each batch."""
        return [slice(batch[0][0], batch[-1][0] + 1) for batch in self._keys]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        with Batches(self._dataset, self._keys, **self._options) as batches:
            for number, (rows, batch) in enumerate(zip(self.rows, batches, strict=True)):
                if (check := _check.get()) is not None:
                    check(number, rows, batch)
                yield batch


class Batches:
    """Batches on the CPU, in the order of `keys`, from workers that start here. A context manager; `close` ends them.

    Workers use one thread each (set by torch) and ignore signals that end a run: Ctrl-C and schedulers signal every
    process of a job, and a run needs its workers to finish the step.

    Args:
        dataset: pickled where Python does not fork.
        keys: the keys of each batch, such as a `Sampler`.
        num_workers: processes; 0 loads in this one.

    Raises:
        RunError: from `next`: a worker died or stands still (`bounded_waits`), or an image cannot be read.
    """

    def __init__(
        self,
        dataset: Dataset,
        keys: Iterable[list[Key]],
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self._ahead: deque[list[Key]] = deque()
        """What the workers were given and have not returned yet."""
        self._number = -1
        leaves_out = "; data.check=true lists all such samples, and data.exclude=<list> leaves them out"
        self._advice = leaves_out if hasattr(dataset, "name_of") else ""
        loader = DataLoader(
            cast(Any, Seeded(dataset, getattr(keys, "seed", 0), puts_back=not num_workers)),
            batch_sampler=cast(Any, _noted(keys, self._ahead)),
            collate_fn=_identity,
            num_workers=num_workers,
            pin_memory=pin_memory,
            worker_init_fn=_begin_worker if num_workers else None,
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
        self._number += 1
        try:
            waits = _waits.get() if self._workers else None
            with waits.waiting() if waits else contextlib.nullcontext():
                batch = next(self._iterator)
            self._ahead.popleft()
            return batch
        except GaveUp:
            self._kill()
            raise
        except _TimedOut:
            raise self._stuck() from None
        except StopIteration:
            self.close()
            raise
        except RunError as error:
            self.close()
            # torch puts the worker's traceback before the message.
            said = str(error).strip().rpartition(f"{type(error).__name__}: ")[2]
            raise RunError(said + self._advice * isinstance(error, BadSample)) from error
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise self._died(str(error).strip()) from error
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            try:
                for worker in self._workers:  # the connection to a killed one ends before it does
                    worker.join(0.2)
            except RuntimeError as told:  # torch's handler of SIGCHLD, while we wait
                raise self._died(str(told).strip()) from error
            if not (dead := [worker.pid for worker in self._workers if not worker.is_alive()]):
                raise
            raise self._died(f"DataLoader worker (pid {dead[0]}) died while it handed over a batch.") from error

    @property
    def _workers(self) -> list[Any]:
        return getattr(self._iterator, "_workers", [])

    def _stuck(self) -> RunError:
        """Writes the stacks of the worker and of this process to stderr."""
        waits = _waits.get()
        assert waits is not None
        # torch gives batches to its workers in turn, and reads them as they come: a later one may be what it waits for.
        order = [(self._number + turn) % len(self._workers) for turn in range(len(self._workers))]
        turns = [(number, self._workers[number], keys) for number, keys in zip(order, self._ahead, strict=False)]
        number, worker, keys = next((turn for turn in turns if is_stopped(turn[1].pid)), turns[0])
        state = "is stopped" if is_stopped(worker.pid) else "is alive" if worker.is_alive() else "has died"
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGUSR2)
        time.sleep(0.5)
        faulthandler.dump_traceback(file=2)
        samples = ", ".join(str(index) for index, _ in keys[:8])
        more = ", ..." if len(keys) > 8 else ""
        found = RunError(
            f"no batch for {waits.seconds:g} s (data.timeout_minutes={waits.seconds / 60:g}): data worker {number} of "
            f"{len(self._workers)} (pid {worker.pid}) {state}; it was to load the samples {samples}{more}. Its stack, "
            f"if it could write one, is above. Check the storage of data.path, or use a larger data.timeout_minutes"
        )
        self._kill()
        return found

    def _died(self, what: str) -> RunError:
        self.close()
        return RunError(f"{what} {DIED}")

    def _kill(self) -> None:
        _kill_workers(self._iterator)
        self.close()

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


def _noted(keys: Iterable[list[Key]], ahead: deque[list[Key]]) -> Iterator[list[Key]]:
    for batch in keys:
        ahead.append(batch)
        yield batch


def _begin_worker(worker: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)  # see `Batches._stuck`


def _shut_down(iterator: Any) -> None:
    workers = getattr(iterator, "_workers", [])
    for worker in workers:
        worker.terminate = worker.kill  # what torch does to a worker that is stuck, and these ignore SIGTERM
    if any(is_stopped(worker.pid) for worker in workers):
        _kill_workers(iterator)
    if workers and _end_workers:
        _end_workers(iterator)


def _kill_workers(iterator: Any) -> None:
    """Before torch waits for them to end, and for its thread, which may wait for one of them."""
    before = None
    with contextlib.suppress(ValueError):  # not in the main thread
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker is killed
    for worker in iterator._workers:
        worker.kill()
        worker.join()
    if before is not None:
        signal.signal(signal.SIGCHLD, before)


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
        ahead: on CUDA, copy this many batches ahead, such as the next window, on a separate stream.
        finish: applied to each batch on the device before it is used.
        channels_last: store 4-d tensors in NHWC order.
    """
    from amp_core.lowp.islands import changed  # data sets need none of it

    device = torch.device(device)

    def ready(batch: Any) -> Any:
        batch = batch if finish is None else finish(batch)
        to_nhwc = functools.partial(Tensor.contiguous, memory_format=torch.channels_last)
        return changed(batch, lambda tensor: tensor.ndim == 4, to_nhwc) if channels_last else batch

    def move(batch: Any) -> Any:
        return changed(batch, lambda _: True, lambda tensor: tensor.to(device, non_blocking=True))

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
        changed(batch, lambda _: True, lambda tensor: tensor.record_stream(current))  # type: ignore[arg-type,return-value]
        return batch if finish is None else ready(batch)

    pending: deque[Any] = deque()
    for batch in batches:
        pending.append(copy(batch))
        if len(pending) > ahead:
            yield hand_over(*pending.popleft())
    while pending:
        yield hand_over(*pending.popleft())
