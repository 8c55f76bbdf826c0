"""One thread for bit-exact comparisons, and a harness for tests of several ranks."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from warm import begin, server

from amp_core.config.options import CONFIG_DIR
from amp_core.run.teardown import end_process_group

_stderr = 2
os.environ.pop("FORCE_COLOR", None)  # tests compare what is printed
# Else pytest rewrites every test file in each worker, and the processes that tests start compile all that they import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_options() -> Generator[None]:
    """Put back the folder of own options: `train.main` leaves that of --config-dir to the processes that it starts."""
    before = os.environ.get(CONFIG_DIR)
    yield
    os.environ.pop(CONFIG_DIR, None)
    if before is not None:
        os.environ[CONFIG_DIR] = before


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the present one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pytest_configure(config: pytest.Config) -> None:
    global _stderr
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        _stderr = os.dup(2)  # what the watchdog writes is not captured: it would be lost


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`one_in(n)`: of a test's rows every n-th is in `make test`, the first of them too; the others become slow."""
    seen = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark and not item.get_closest_marker("slow"):
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process of a test that pytest-timeout cannot interrupt, since it holds the GIL in C++.

    The watchdog is a thread that needs no GIL. It prints all stacks first. Under xdist the test is reported as crashed,
    by its name, and the others run on in a new worker.
    """
    mark = item.get_closest_marker("timeout")
    seconds = mark.args[0] if mark else item.config.getoption("timeout") or float(item.config.getini("timeout") or 0)
    if seconds:
        faulthandler.dump_traceback_later(1.1 * seconds, exit=True, file=_stderr)  # after pytest-timeout
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _rank_main(rank: int, fn: Callable[..., Any], args: tuple[Any, ...], num_ranks: int, folder: str) -> None:
    faulthandler.enable()
    begin()
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=50))
    try:
        torch.save(fn(rank, *args), f"{folder}/{rank}.tmp")
        os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}.pt")
    finally:
        end_process_group()


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """`on_ranks(fn, *args, num_ranks=2)`: what fn(rank, *args) returns on each gloo rank; `fn` is a module's function.

    Ranks are forked from the server of `warm`. A rank that hangs is killed and fails the test.
    """

    def run(fn: Callable[..., Any], *args: Any, num_ranks: int = 2, seconds: float = 60) -> list[Any]:
        server()
        folder = tmp_path / f"ranks{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        _run_ranks(fn, args, num_ranks, folder, seconds)
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(num_ranks)]

    return run


def _run_ranks(fn: Callable[..., Any], args: tuple[Any, ...], num_ranks: int, folder: Path, seconds: float) -> None:
    context = mp.start_processes(
        _rank_main, (fn, args, num_ranks, str(folder)), num_ranks, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + seconds
    while not context.join(timeout=max(deadline - time.monotonic(), 0.01)):  # raises a rank's exception
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail(f"{fn.__name__}: the ranks still hang after {seconds:g} s")
