"""What uses a process group is freed before the group ends, whoever still refers to it."""

from __future__ import annotations

import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_core.config.errors import ConfigError, Interrupted
from amp_core.run import teardown
from amp_core.run.teardown import end_process_group
from amp_core.torch_private import find


@pytest.fixture
def alive_at_the_end(tmp_path, monkeypatch):
    """A group of one rank, and modules; filled with whether they have a reducer at the moment when the group ends."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    modules: list[weakref.ref[DistributedDataParallel]] = []
    alive: list[bool] = []
    destroy = dist.destroy_process_group

    def end() -> None:
        alive.extend("reducer" in vars(module) for ref in modules if (module := ref()) is not None)
        if True not in alive:  # which may hang, with the GIL held
            destroy()

    monkeypatch.setattr(dist, "destroy_process_group", end)
    yield modules, alive
    assert not dist.is_initialized()


def train(modules) -> DistributedDataParallel:
    net = DistributedDataParallel(nn.Linear(2, 2))
    modules.append(weakref.ref(net))
    net(torch.ones(1, 2)).sum().backward()
    return net


def test_a_module_in_a_running_function_loses_its_reducer(alive_at_the_end):
    modules, alive = alive_at_the_end
    net = train(modules)
    end_process_group()
    assert alive == [False] and net.module.weight.grad is not None


def test_modules_of_cycles_and_of_failed_calls_are_freed(alive_at_the_end):
    modules, alive = alive_at_the_end

    class Loop:
        pass

    def fail(depth: int) -> None:
        loop = Loop()
        loop.net, loop.itself = train(modules), loop  # type: ignore[attr-defined]
        try:
            if depth:
                fail(depth - 1)
            raise ValueError("on purpose")
        except ValueError as problem:
            raise RuntimeError("on purpose, too") from problem

    try:
        fail(2)
    except RuntimeError:
        end_process_group()
    assert len(modules) == 3
    assert not alive  # freed, and so not asked
    assert not [ref for ref in modules if ref() is not None]


@pytest.mark.parametrize("error", [Interrupted("at step 1", 143, True), ConfigError(["one", "two"])])
def test_errors_survive_the_way_out_of_a_process(error):
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error) and str(found) == str(error) and vars(found) == vars(error)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("interrupted", [False, True])
def test_nccl_is_aborted_after_an_error_that_its_ranks_do_not_share(interrupted, alive_at_the_end, monkeypatch):
    name, aborted = "torch.distributed.distributed_c10d._abort_process_group", []
    abort = find(name)  # gloo can, too
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(teardown, "find", lambda found, _: lambda: (aborted.append(found), abort()))
    try:
        raise (Interrupted("at step 1", 143, True) if interrupted else RuntimeError("a partner is lost"))
    except Exception:
        end_process_group()
    assert aborted == [name] * (not interrupted)
