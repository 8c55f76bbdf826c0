"""Batches: the same samples in the same order for any workers, split and start; workers that die, hang or are stopped."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from shared import data_config
from torch import Tensor

from amp_core.config.errors import RunError
from amp_core.config.processes import is_stopped
from amp_core.data import Data, build_data
from amp_core.data.base import Spread, evenly_spread
from amp_core.data.loading import Batches, EvalLoader, GaveUp, Sampler, bounded_waits, eval_keys, to_device

START_METHODS = [m for m in ("fork", "spawn") if m in multiprocessing.get_all_start_methods()]


def synthetic(num_samples: int = 50, **values: Any) -> Data:
    return build_data(data_config("synthetic", num_samples=num_samples, image_size=8, **values), seed=0)


def take(batches: Iterable[Any], count: int) -> list[Any]:
    return list(itertools.islice(batches, count))


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- the order --------------------------------------------------------------------------------------------------------


def flat(sampler: Sampler, num_micro: int) -> list[tuple[int, int]]:
    return [key for keys in take(sampler, num_micro) for key in keys]


def test_every_pass_is_a_permutation_and_no_two_are_alike() -> None:
    keys = flat(Sampler(30, seed=0, batch_size=4), 30)  # four passes; batches straddle them
    passes = [[index for index, number in keys if number == wanted] for wanted in range(4)]
    assert all(sorted(order) == list(range(30)) for order in passes)
    assert len({tuple(order) for order in passes}) == 4
    assert [number for _, number in keys] == sorted(number for _, number in keys)


def test_the_order_is_decided_by_the_seed_and_not_by_a_global_generator() -> None:
    first = flat(Sampler(30, seed=1, batch_size=5), 12)
    np.random.seed(7)
    torch.manual_seed(7)
    assert flat(Sampler(30, seed=1, batch_size=5), 12) == first
    assert flat(Sampler(30, seed=2, batch_size=5), 12) != first


def test_an_order_can_be_entered_at_any_sample() -> None:
    """Batches may hold many epochs; a start after a billion samples costs nothing."""
    whole = flat(Sampler(30, seed=0, batch_size=1), 150)
    for start in (0, 1, 7, 30, 31, 89):
        assert flat(Sampler(30, seed=0, batch_size=7, start_sample=start), 8) == whole[start : start + 56]
    begin = time.process_time()
    keys = next(iter(Sampler(1000, seed=0, batch_size=8, start_sample=10**9 + 3)))
    assert time.process_time() - begin < 0.1 and {number for _, number in keys} == {10**6}
    keys = next(iter(Sampler(3, seed=0, batch_size=10)))
    assert Counter(number for _, number in keys) == {0: 3, 1: 3, 2: 3, 3: 1}
    assert flat(Sampler(3, seed=0, batch_size=4, shuffle=False), 1) == [(0, 0), (1, 0), (2, 0), (0, 1)]


@pytest.mark.parametrize("start", [0, 12, 37])
@pytest.mark.parametrize("world_size, accumulation", [(1, 4), (2, 2), (4, 1), (1, 1), (2, 1), (1, 2)])
def test_a_step_has_the_same_samples_however_it_is_split(start: int, world_size: int, accumulation: int) -> None:
    samples_per_step, num_steps = 12, 9
    sampler, micro_batch = (
        partial(Sampler, 30, seed=3, start_sample=start),
        samples_per_step // world_size // accumulation,
    )
    split = {"batch_size": micro_batch, "accumulation": accumulation, "world_size": world_size}
    samplers = [sampler(rank=rank, **split) for rank in range(world_size)]
    whole = sampler(batch_size=samples_per_step)
    ranks = [take(sampler, num_steps * accumulation) for sampler in samplers]
    for step, expected in enumerate(take(whole, num_steps)):
        window = slice(step * accumulation, (step + 1) * accumulation)
        # In this order the pieces of a step put together are the step of one process.
        pieces = [keys for micro in zip(*(micros[window] for micros in ranks), strict=True) for keys in micro]
        assert [key for keys in pieces for key in keys] == expected


def test_a_sampler_refuses_what_makes_no_sense() -> None:
    for wrong in ({"rank": 1}, {"batch_size": 0}, {"start_sample": -1}, {"accumulation": 0}):
        with pytest.raises(ValueError, match="expected counts above 0"):
            Sampler(10, **{"seed": 0, "batch_size": 2, **wrong})


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [1, 7, 40, 41])
def test_evaluation_sees_each_sample_once_over_all_ranks(world_size: int, num_samples: int) -> None:
    data = synthetic(4 * num_samples).eval
    assert len(data) == num_samples
    loaders = [EvalLoader(data, batch_size=4, rank=rank, world_size=world_size) for rank in range(world_size)]
    seen = [images for loader in loaders for images, _ in loader]
    assert sum(len(images) for images in seen) == num_samples
    assert len({image.numpy().tobytes() for images in seen for image in images}) == num_samples
    lengths = [len(loader) for loader in loaders]
    if num_samples >= world_size:  # sharded networks are called by all ranks at a time
        assert len(set(lengths)) == 1
    assert lengths == [len(list(loader)) for loader in loaders]  # also: it can be started again
    rows = sorted(i for loader in loaders for part in loader.rows for i in range(part.start, part.stop))
    assert rows == list(range(num_samples))


def test_batches_of_an_evaluation_are_of_the_size_that_was_asked_for() -> None:
    """Whole rounds are; what is left is shared out, and too little for that makes the last batches one larger."""
    assert [len(batch) for batch in eval_keys(10, batch_size=4)] == [4, 4, 2]
    ranks = [(n, rank) for n in (12, 14, 17) for rank in range(3)]
    sizes = [[len(batch) for batch in eval_keys(n, batch_size=4, rank=rank, world_size=3)] for n, rank in ranks]
    assert sizes == [[4], [4], [4], [4], [5], [5], [4, 1], [4, 2], [4, 2]]


# --- loaders ----------------------------------------------------------------------------------------------------------


class Slow:
    """Numbers as images; takes its time, or sticks."""

    num_classes, image_shape = 2, (1, 1, 1)

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1000

    def __getitems__(self, keys: Any) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        numbers = torch.tensor([index for index, _ in keys])
        return numbers.float()[:, None, None, None], torch.tensor([torch.get_num_threads()])


def test_a_few_samples_are_spread_evenly_over_a_set_that_is_sorted_by_class() -> None:
    assert evenly_spread(Slow(), 4)[0].flatten().tolist() == [0, 250, 500, 750]
    assert len(evenly_spread(Slow(), 5000)[0]) == 1000
    pairs = Spread(Slow(), 5, together=2)
    assert evenly_spread(pairs, 5)[0].flatten().tolist() == [0, 1, 400, 401, 800]


def workers_of(batches: Batches) -> list[Any]:
    return list(batches._iterator._workers)  # type: ignore[attr-defined]


def test_batches_are_the_same_for_any_number_of_workers() -> None:
    data = build_data(data_config("mnist_subset"), seed=0)
    found = []
    for num_workers in (0, 1, 2):
        sampler = Sampler(4000, seed=0, batch_size=8, start_sample=3996)
        with Batches(data.train, sampler, num_workers=num_workers) as batches:
            found.append(take(batches, 6))
    for left, *others in zip(*found, strict=True):
        assert all(same(left, right) for right in others)


@pytest.mark.slow
@pytest.mark.parametrize("start_method", START_METHODS)
def test_workers_start_in_any_way_with_one_thread_each(start_method: str, monkeypatch: Any) -> None:
    context, sampler = multiprocessing.get_context(start_method), Sampler(1000, seed=0, batch_size=2)
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", context)
    with Batches(Slow(), sampler, num_workers=1) as batches:
        for (images, threads), keys in zip(take(batches, 3), sampler, strict=False):
            assert images.flatten().tolist() == [index for index, _ in keys] and threads.item() == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_draws_no_global_random_numbers(num_workers: int) -> None:
    data = synthetic()
    states = torch.get_rng_state(), str(np.random.get_state(legacy=False)), random.getstate()
    with Batches(data.train, Sampler(50, seed=0, batch_size=4), num_workers=num_workers) as batches:
        take(batches, 3)
    with Batches(Drawn(), Sampler(50, seed=0, batch_size=4), num_workers=num_workers) as batches:
        take(batches, 3)
    list(EvalLoader(data.eval, batch_size=4, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (str(np.random.get_state(legacy=False)), random.getstate()) == states[1:]


class Drawn(Slow):
    """Draws from the global generators, as transforms of other packages do."""

    def __getitems__(self, keys: Any) -> list[float]:
        return [number for _ in keys for number in (random.random(), np.random.rand(), torch.rand(()).item())]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", [0, 2**40])
@pytest.mark.parametrize("start", [0, 12, 990])
def test_what_loading_draws_from_global_generators_is_decided_by_seed_and_samples(start: int, seed: int) -> None:
    def loaded(first: int, num: int, num_workers: int, seed: int = seed) -> list[list[float]]:
        sampler = Sampler(1000, seed=seed, batch_size=3, start_sample=first)
        with Batches(Drawn(), sampler, num_workers=num_workers) as batches:
            return take(batches, num)

    whole = loaded(start, 8, 0)
    for num_workers in (0, 1, 2):
        assert loaded(start, 4, num_workers) + loaded(start + 12, 4, num_workers) == whole
    numbers = [number for batch in (*whole, *loaded(start, 8, 0, seed + 1)) for number in batch]
    assert len(set(numbers)) == len(numbers)


def test_closing_ends_the_workers_at_once_and_the_iterator() -> None:
    batches = Batches(Slow(), Sampler(1000, seed=0, batch_size=2), num_workers=2)
    next(batches)
    workers = workers_of(batches)
    begin = time.perf_counter()
    batches.close()
    assert time.perf_counter() - begin < 2 and not any(worker.is_alive() for worker in workers)
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


def forget_to_close() -> None:
    batches = Batches(Slow(), Sampler(1000, seed=0, batch_size=2), num_workers=1)
    next(batches)
    raise SystemExit(3)  # its traceback holds the loader until the process has ended


@pytest.mark.skipif("fork" not in START_METHODS, reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
def test_a_child_process_that_forgets_to_close_still_ends() -> None:
    process = multiprocessing.get_context("fork").Process(target=forget_to_close)
    process.start()
    process.join(10)
    code = process.exitcode
    process.kill()
    process.join()
    assert code == 3


def test_a_killed_worker_is_an_error_and_not_a_wait() -> None:
    with Batches(Slow(), Sampler(1000, seed=0, batch_size=2), num_workers=2) as batches:
        next(batches)
        pid = workers_of(batches)[0].pid

        def kill_and_go_on() -> None:
            os.kill(pid, signal.SIGKILL)
            time.sleep(1)
            take(batches, 100)

        begin = time.perf_counter()
        # torch raises its own error from a signal handler, wherever the program is, or at the next batch.
        with pytest.raises((RunError, RuntimeError), match=r"DataLoader worker \(pid"):
            kill_and_go_on()
        assert time.perf_counter() - begin < 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_survive_the_signals_that_ask_a_run_to_stop(number: signal.Signals) -> None:
    with Batches(Slow(), Sampler(1000, seed=0, batch_size=2), num_workers=1) as batches:
        next(batches)
        (worker,) = workers_of(batches)
        os.kill(worker.pid, number)
        assert len(take(batches, 5)) == 5 and worker.is_alive()


# --- to the device ----------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    images: Tensor
    rest: Any


def test_batches_of_any_nesting_reach_the_device_in_order() -> None:
    batches = [
        Pair(torch.full((2, 3, 4, 4), float(i)), ([torch.tensor(i)], {"n": torch.tensor([i])}, "text", i))
        for i in range(3)
    ]
    for ahead in (0, 2):
        moved = list(to_device(batches, "cpu", ahead=ahead, channels_last=True))
        for i, (images, (listed, mapping, text, number)) in enumerate(moved):
            assert isinstance(moved[i], Pair)
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(images, batches[i].images)
            assert (listed[0].item(), mapping["n"].item(), text, number) == (i, i, "text", i)


def test_on_a_cpu_nothing_is_copied_or_fetched_ahead() -> None:
    fetched: list[int] = []

    def source() -> Iterable[Tensor]:
        for i in range(3):
            fetched.append(i)
            yield torch.tensor(i)

    moved = to_device(source(), "cpu", ahead=2)
    next(iter(moved))
    assert fetched == [0]
    tensor = torch.rand(2, 3, 4, 4)
    assert next(iter(to_device([tensor], torch.device("cpu")))).data_ptr() == tensor.data_ptr()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_copies_ahead_are_whole_when_they_are_used(ahead: int) -> None:
    expected = [torch.randn(64, 3, 128, 128) for _ in range(8)]
    batches = ((tensor.pin_memory(), torch.tensor([i]).pin_memory()) for i, tensor in enumerate(expected * 4))
    sums = []
    for images, number in to_device(batches, "cuda", ahead=ahead, channels_last=True):
        assert images.is_contiguous(memory_format=torch.channels_last)
        busy = torch.randn(2048, 2048, device="cuda")
        for _ in range(20):  # the reader is behind: memory that came back too early would be overwritten
            busy = (busy @ busy).tanh()
        sums.append((images.double().sum() + 0 * busy.sum(), number))
        del images
    for i, (total, number) in enumerate(sums):
        assert number.item() == i
        assert total.item() == pytest.approx(expected[i % 8].double().sum().item(), abs=1e-6)


class Eight:
    """What its function gives."""

    def __init__(self, get: Callable[[], Any]) -> None:
        self.get = get

    def __len__(self) -> int:
        return 8

    def __getitems__(self, keys: Any) -> Any:
        return self.get()


class _Stops:
    """Stops its worker while the batch is read here, before the memory of the tensor behind it was handed over."""

    def __reduce__(self):
        return os.kill, (os.getpid(), signal.SIGSTOP)


def _half_arrives() -> Any:
    return _Stops(), torch.zeros(3)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("data", [Slow(), Eight(_half_arrives)], ids=["computing", "handing over"])
def test_a_worker_that_stands_still_is_named_with_its_samples(data, capfd) -> None:
    with (
        bounded_waits(2 / 60, lambda: False, 1),
        Batches(data, [[(number, 0)] for number in range(100)], num_workers=2) as batches,
    ):
        workers = workers_of(batches)
        if isinstance(data, Slow):
            take(batches, 2)
            os.kill(workers[0].pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(RunError, match=r"data\.timeout_minutes=.*data worker \d of 2 .* is stopped") as found:
            take(batches, 100)
        assert time.monotonic() - begin < 5 and not any(worker.is_alive() for worker in workers)
    text = str(found.value)
    ((number, pid, sample),) = re.findall(r"worker (\d) of 2 \(pid (\d+)\).* the samples (\d+)\.", text)
    assert workers[int(number)].pid == int(pid) and int(sample) % 2 == int(number)  # they take turns
    assert number == "0" or not isinstance(data, Slow)
    assert "most recent call first" in capfd.readouterr().err


def _read_a_hung_file() -> None:
    time.sleep(1000)


def test_a_worker_that_hangs_writes_its_stack(capfd) -> None:
    with (
        bounded_waits(1 / 60, lambda: False, 1),
        Batches(Eight(_read_a_hung_file), [[(5, 0)]], num_workers=1) as batches,
    ):
        with pytest.raises(RunError, match=r"is alive; it was to load the samples 5\. "):
            next(batches)
    assert "_read_a_hung_file" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_worker_does_not_delay_the_end() -> None:
    """Whether or not its batch was waited for. Somebody else's timer is left as it was."""
    handler, (delay, _) = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 500.0)
    begin = time.monotonic()
    for is_asked in (True, False):
        with bounded_waits(10, lambda: True, 1), Batches(Slow(), [[(0, 0)]] * 100, num_workers=2) as batches:
            next(batches)
            for worker in workers_of(batches):
                os.kill(worker.pid, signal.SIGSTOP)
                while not is_stopped(worker.pid):
                    time.sleep(0.01)
            if is_asked:
                with pytest.raises(GaveUp):
                    take(batches, 100)
    took = time.monotonic() - begin
    assert took < 20  # torch alone waits 5 s for each of the four workers
    assert signal.getsignal(signal.SIGALRM) is handler
    assert 500.0 - took - 0.1 < signal.setitimer(signal.ITIMER_REAL, delay)[0] <= 500.0 - took + 0.1
