"""Checkpoints: bit-exact, whole or not at all, verified, never executed."""

from __future__ import annotations

import collections
import copy
import errno
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import tempfile
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import system_calls
import torch
from running import Forked
from safetensors.torch import load_file
from shared import flip, names, seal
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from amp_core import Amp, Ema, Schedule, master_params
from amp_core.checkpoints import folders, plain_state
from amp_core.checkpoints.checkpoint import Checkpoint, Loaded
from amp_core.checkpoints.parts import gather_full_state
from amp_core.checkpoints.reading import read
from amp_core.config.errors import CheckpointError, SaveError
from amp_core.config.schema import OptimizerConfig
from amp_core.lowp.moments import Adam16
from amp_core.run.teardown import end_process_group
from amp_core.step.optimizers import build_optimizer


def bits(value: Any) -> Any:
    """A value that compares equal only when every bit and every type is equal."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().cpu().flatten().contiguous().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    return type(value), repr(value)


def tiny(value: float = 0.0, size: int = 4) -> nn.Linear:
    net = nn.Linear(size, size)
    nn.init.constant_(net.weight, value)
    nn.init.constant_(net.bias, value)
    return net


def must_load(checkpoint: Checkpoint, path: Path | None = None) -> Loaded:
    loaded = checkpoint.load(path)
    assert loaded is not None
    return loaded


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(name.removeprefix("step_")) for name in names(folder))


def forge(folder: Path, data: bytes, step: int = 1, **changes: Any) -> Path:
    """A step folder with a manifest that is right."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.pt").write_bytes(data)
    files = {"state.pt": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    seal(folder, {"format": 1, "step": step, "files": files, "metrics": {}, **changes})
    return folder


def pickled(contents: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(contents, buffer, **options)
    return buffer.getvalue()


def whole(**entries: Any) -> dict[str, Any]:
    return {"scaler": {}, "progress": {}, "config": {}, "format": 1, **entries}


class Run:
    """A small training run in fp16 whose loss scale soon overflows, so that a lost scale would show."""

    def __init__(self, seed: int, optimizer: str, fused: bool) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        options = {"momentum": 0.9} if optimizer == "SGD" else {}
        decay = [p for p in self.net.parameters() if p.dim() > 1]
        others = [p for p in self.net.parameters() if p.dim() == 1]
        groups = [{"params": decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = getattr(torch.optim, optimizer)(groups, lr=0.01, fused=fused, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=16.0, growth_interval=2)
        self.skipped = 0

    def checkpoint(self, folder: Path) -> Checkpoint:
        return Checkpoint(folder, model=self.net, optimizer=self.optimizer, scaler=self.scaler)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            images, labels = torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(self.net(images), labels)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            before = self.scaler.get_scale()
            self.scaler.update()
            self.skipped += self.scaler.get_scale() < before
            self.optimizer.zero_grad()

    def state(self) -> Any:
        return bits([self.net.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict()])


# What is saved is what is loaded.


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_resume_is_bit_exact(tmp_path: Path, optimizer: str, fused: bool) -> None:
    straight, first, second = (Run(seed, optimizer, fused) for seed in (0, 0, 1))
    straight.train(0, 14)
    first.train(0, 7)
    first.checkpoint(tmp_path).save(7)
    loaded = must_load(second.checkpoint(tmp_path))
    assert (loaded.step, loaded.notes) == (7, ()) and second.state() == first.state()
    second.train(7, 14)
    assert second.state() == straight.state() and first.skipped > 0 and second.skipped > 0


@pytest.mark.parametrize("fused", [True, False], ids=["unfused_to_fused", "fused_to_unfused"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_state_crosses_between_fused_and_unfused(tmp_path: Path, optimizer: str, fused: bool) -> None:
    straight, first, second = Run(0, optimizer, not fused), Run(0, optimizer, not fused), Run(1, optimizer, fused)
    straight.train(0, 14)
    first.train(0, 7)
    first.checkpoint(tmp_path).save(7)
    must_load(second.checkpoint(tmp_path))
    assert bits(second.optimizer.state_dict()["state"]) == bits(first.optimizer.state_dict()["state"])
    assert [group["fused"] for group in second.optimizer.param_groups] == [fused, fused]
    second.train(7, 14)
    for name, value in straight.net.state_dict().items():
        torch.testing.assert_close(second.net.state_dict()[name], value, rtol=1e-4, atol=1e-5)  # order of operations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "optimizer",
    "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD Muon NAdam RAdam RMSprop Rprop SGD plainSGD".split(),  # noqa: SIM905
)
def test_every_optimizer_resumes_bit_exactly_in_every_dtype(tmp_path: Path, optimizer: str, dtype: torch.dtype) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = tiny(0.5).to(dtype)
        net.bias = None  # Muon takes matrices only
        options = {"momentum": 0.9} if optimizer in ("SGD", "RMSprop") else {}
        return net, getattr(torch.optim, optimizer.removeprefix("plain"))(net.parameters(), lr=0.01, **options)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            for parameter in net.parameters():
                generator = torch.Generator().manual_seed(step)
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            optimizer.step()

    (net, opt), (net2, opt2) = build(), build()
    train(net, opt, 0, 4)
    Checkpoint(tmp_path, model=net, optimizer=opt).save(4)
    must_load(Checkpoint(tmp_path, model=net2, optimizer=opt2))
    assert bits(opt2.state_dict()) == bits(opt.state_dict())
    train(net, opt, 4, 8)
    train(net2, opt2, 4, 8)
    assert bits([net2.state_dict(), opt2.state_dict()]) == bits([net.state_dict(), opt.state_dict()])


def test_states_keep_a_dtype_that_is_not_their_parameters(tmp_path: Path) -> None:
    net = tiny(1.0).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.weight]["master"] = torch.full((4, 4), 1.0001)
    Checkpoint(tmp_path, model=net, optimizer=optimizer).save(1)
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    must_load(Checkpoint(tmp_path, model=net, optimizer=other))
    assert bits(other.state[net.weight]["master"]) == bits(optimizer.state[net.weight]["master"])


def test_the_live_optimizer_keeps_its_hyperparameters_and_its_very_learning_rate(tmp_path: Path) -> None:
    def build(lr: float, decay: float) -> tuple[nn.Linear, torch.optim.Optimizer, Tensor]:
        net, rate = tiny(1.0), torch.tensor(lr)
        groups = [{"params": [net.weight]}, {"params": [net.bias]}]
        return net, torch.optim.AdamW(groups, lr=rate, weight_decay=decay, betas=(0.9, 1 - decay), fused=True), rate

    net, optimizer, _ = build(0.5, 0.1)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    path = Checkpoint(tmp_path, model=net, optimizer=optimizer).save(1)
    groups = torch.load(path / "state.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [0.5, 0.5] and type(groups[0]["lr"]) is float

    net, optimizer, rate = build(0.25, 0.2)
    live_groups = optimizer.param_groups
    before = [{key: value for key, value in group.items() if key != "params"} for group in live_groups]
    must_load(Checkpoint(tmp_path, model=net, optimizer=optimizer))
    assert optimizer.param_groups is live_groups
    assert all(group["lr"] is rate for group in live_groups) and rate.item() == 0.25
    assert [{key: value for key, value in group.items() if key != "params"} for group in live_groups] == before
    assert [parameter for group in live_groups for parameter in group["params"]] == [net.weight, net.bias]
    assert len(optimizer.state) == 2


S = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: S.StepLR(o, 3, 0.1),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 12),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.8),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, 1.0, 3), S.CosineAnnealingLR(o, 9)], [3]),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, 3), S.ExponentialLR(o, 0.9)]),
    "none, by hand": lambda o: None,
}


@pytest.mark.parametrize("format", ["single", "sharded"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_continues_from_the_rate_of_the_saved_run(tmp_path: Path, name: str, format: Any) -> None:
    """In either order of the parts, and also where the checkpoint was made just before the save."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        net = tiny(0.5)
        optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1) if format == "single" else 0.1, fused=True)
        return net, optimizer, SCHEDULERS[name](optimizer)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, first: int, last: int) -> None:
        for step in range(first, last):
            net(torch.randn(2, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            elif step == 2:
                optimizer.param_groups[0]["weight_decay"] *= 3.0
                optimizer.param_groups[0]["lr"] *= 0.3

    straight = build()
    train(*straight, 0, 12)
    for late, reverse in itertools.product((False, True) if "hand" not in name else (False,), (False, True)):
        folder, names = tmp_path / f"{late}{reverse}", ("model", "optimizer", "scheduler")
        first, second = build(), build()
        parts = [dict(list(zip(names, run, strict=True))[:: -1 if reverse else 1]) for run in (first, second)]
        checkpoint = None if late else Checkpoint(folder, format=format, **parts[0])
        train(*first, 0, 5)
        (checkpoint or Checkpoint(folder, format=format, **parts[0])).save(5)
        assert must_load(Checkpoint(folder, **parts[1])).notes == ()
        train(*second, 5, 12)
        assert bits(second[0].state_dict()) == bits(straight[0].state_dict())


class Grouped(torch.optim.SGD):
    """Has state in its groups: `k` among its defaults, `step` from its first step on, a tensor, and settings of a kind."""

    def __init__(self, params: Any, lr: float = 0.1, kind: torch.dtype = torch.float32) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group |= {"k": 0, "weight_sum": torch.zeros(()), "kind": kind, "train_mode": True}
        self.defaults |= {"k": 0, "train_mode": False, "weight_sum": 0.0}

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["step"] = group.get("step", 0) + 1
            group["weight_sum"] += 1.0 / group["k"]
            for p in group["params"]:
                self.state[p]["exp_avg_sq"] = p.grad.square().sum()  # one number for each weight
        super().step()


class Around(torch.optim.Optimizer):
    """Shares the groups of another, as Lookahead, and has entries of its own in its state dict."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.num_steps = inner, 0
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state = collections.defaultdict(dict)

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.num_steps += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["slow"] = p.detach().clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        state = self.inner.state_dict()
        slow = {i: dict(each) for i, each in enumerate(self.state.values())}
        return {"fast": state["state"], "slow": slow, "num": self.num_steps, "param_groups": state["param_groups"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict({"state": state["fast"], "param_groups": state["param_groups"]})
        self.num_steps = state["num"]
        params = [p for group in self.param_groups for p in group["params"]]
        self.state.update({p: dict(state["slow"][i]) for i, p in enumerate(params) if i in state["slow"]})


@pytest.mark.parametrize("format", ["single", "sharded"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_state_in_groups_and_beside_them_is_loaded_and_settings_are_not(
    tmp_path: Path, wrapped: bool, format: Any
) -> None:
    def build(**settings: Any) -> tuple[nn.Module, Any]:
        net = tiny(0.5)
        own = Grouped(net.parameters(), **settings)
        return net, Around(own) if wrapped else own

    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            net(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    (net, optimizer), (net2, optimizer2) = build(), build(lr=0.2)
    for each, scale in ((optimizer, 0.5), (optimizer2, 0.8)):
        each.param_groups[0]["lr_scale"] = scale  # of the loop, for whatever it is
    train(net, optimizer)
    Checkpoint(tmp_path, format=format, model=net, optimizer=optimizer).save(3)
    groups = optimizer2.param_groups
    loaded = must_load(Checkpoint(tmp_path, model=net2, optimizer=optimizer2))
    assert loaded.notes == (
        "optimizer: group 0 keeps lr=0.2, not lr=0.1 of the checkpoint",
        "optimizer: group 0 takes lr_scale=0.5 of the checkpoint in place of lr_scale=0.8",
    )
    assert optimizer2.param_groups is groups and (not wrapped or optimizer2.inner.param_groups is groups)
    groups[0]["lr"] = 0.1
    assert groups[0]["k"] == groups[0]["step"] == 3 and groups[0]["kind"] is torch.float32
    train(net, optimizer), train(net2, optimizer2)

    def everything(net: nn.Module, optimizer: Any) -> Any:
        groups = [{key: value for key, value in group.items() if key != "kind"} for group in optimizer.param_groups]
        return bits([net.state_dict(), {**optimizer.state_dict(), "param_groups": groups and None}, groups[0]["k"]])

    assert everything(net2, optimizer2) == everything(net, optimizer)
    assert not wrapped or optimizer2.num_steps == 6


def test_a_snapshot_puts_back_what_is_in_the_groups(tmp_path: Path) -> None:
    net = tiny(0.5)
    optimizer = Grouped(net.parameters())
    checkpoint = Checkpoint(tmp_path, model=net, optimizer=optimizer)
    snapshot = checkpoint.snapshot()
    net(torch.ones(1, 4)).square().sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.7
    checkpoint.restore(snapshot)
    group = optimizer.param_groups[0]
    assert (group["k"], group["lr"], group["weight_sum"].item(), net.weight.mean().item()) == (0, 0.1, 0.0, 0.5)


def test_a_schedule_here_keeps_its_rates_whatever_the_file_has(tmp_path: Path) -> None:
    def build(lr: float) -> dict[str, Any]:
        net = tiny(0.5)
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr, fused=True)
        return {"schedule": Schedule(optimizer, lambda o, n: S.CosineAnnealingLR(o, n), 10), "optimizer": optimizer}

    first, second, amp = build(0.1), build(0.4), Amp.named("fp32")
    checkpoint = Checkpoint(tmp_path, **first)
    for _ in range(4):
        first["optimizer"].param_groups[0]["params"][0].grad = torch.ones(4, 4)
        first["schedule"].advance(amp.step(first["optimizer"]))
        amp.update()
    checkpoint.save(4)
    assert must_load(Checkpoint(tmp_path, **dict(reversed(second.items())))).notes == ()
    rates = [float(parts["optimizer"].param_groups[0]["lr"]) for parts in (first, second)]
    assert rates[1] == pytest.approx(4 * rates[0], rel=1e-6)  # of the new peak; both are rounded to fp32


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_step_counts_lie_where_the_live_optimizer_wants_them(tmp_path: Path, fused: bool) -> None:
    net = tiny(1.0)
    optimizer = torch.optim.AdamW(net.parameters(), fused=not fused)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    Checkpoint(tmp_path, optimizer=optimizer).save(1)
    device = torch.device("meta")  # stands for any device that is not the CPU
    live = torch.optim.AdamW(net.to(device).parameters(), fused=fused)
    must_load(Checkpoint(tmp_path, optimizer=live))
    for state in live.state.values():
        assert state["step"].device == (device if fused else torch.device("cpu"))
        assert state["exp_avg"].device == device


def test_a_file_holds_plain_data_that_plain_pytorch_loads(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters())
    progress = {
        "samples": 2**40,
        "nested": [1, (2.5, None), {"a": True, 3: float("inf")}],
        "rng": torch.get_rng_state(),
    }
    path = Checkpoint(tmp_path, model=net, optimizer=optimizer).save(5, progress=progress, config={"lr": 0.1})
    contents = torch.load(path / "state.pt", weights_only=True)
    assert list(contents) == ["scaler", "model", "optimizer", "progress", "config", "format"]
    assert type(contents["model"]) is dict and contents["scaler"] == {}
    assert type(contents["format"]) is int
    assert bits(contents["progress"]) == bits({**progress, "step": 5})
    other = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    other.load_state_dict(contents["model"])
    torch.optim.AdamW(other.parameters()).load_state_dict(contents["optimizer"])
    assert bits(other.state_dict()) == bits(net.state_dict())


@pytest.mark.parametrize(
    "value, message",
    [
        (OrderedDict, "config.here is a type"),
        (Path("x"), "config.here is a PosixPath"),
        (random.getstate, "config.here is a"),
        (torch.float16, "config.here is a dtype"),
        ({1, 2}, "config.here is a set"),
        (1 << 2001, "config.here is an integer of 2002 bits"),
        ({(1, 2): 3}, "config.here has a tuple as a key"),
        (torch.eye(2).to_sparse(), "config.here is a Tensor .*sparse"),
        (torch.empty(2, device="meta"), "config.here is a meta"),
    ],
)
def test_what_a_safe_load_would_refuse_is_not_saved(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path / "c").save(1, config={"here": value})
    assert not (tmp_path / "c").exists()


def test_views_and_shared_tensors_do_not_inflate_the_file(tmp_path: Path) -> None:
    flat = torch.randn(1_000_000)
    tied = nn.ModuleDict({"a": nn.Linear(100, 100, bias=False), "b": nn.Linear(100, 100, bias=False)})
    tied["b"].weight = tied["a"].weight
    views = {"row": flat[:10], "same": flat[:10], "strided": flat[::100_000], "expanded": torch.ones(1).expand(10)}
    path = Checkpoint(tmp_path, model=tied).save(1, progress=views)
    assert (path / "state.pt").stat().st_size < 40_000 + 5_000
    contents = read(path)
    assert bits([contents["progress"][name] for name in views]) == bits(list(views.values()))
    assert contents["model"]["a.weight"].data_ptr() == contents["model"]["b.weight"].data_ptr()
    assert contents["progress"]["row"].data_ptr() == contents["progress"]["same"].data_ptr()


def test_memory_format_is_kept(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    loaded = read(Checkpoint(tmp_path).save(1, progress={"image": image}))["progress"]["image"]
    assert loaded.is_contiguous(memory_format=torch.channels_last) and torch.equal(loaded, image)


@pytest.mark.parametrize("make", [Adam16, partial(torch.optim.Adam, fused=True), torch.optim.SGD])
def test_moments_follow_weights_into_another_memory_format(tmp_path: Path, make: Any) -> None:
    """A fused step pairs numbers by their place in memory: in the old strides weights would get others' moments."""
    grads = torch.randn(3, 4, 3, 2, 2, generator=torch.Generator().manual_seed(0))

    def begin(memory_format: torch.memory_format) -> tuple[Checkpoint, nn.Module, Any]:
        net = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=memory_format)
        optimizer = make(net.parameters(), lr=0.1) if make is not torch.optim.SGD else make(net.parameters(), 0.1, 0.9)
        return Checkpoint(tmp_path, model=net, optimizer=optimizer), net, optimizer

    def train(net: nn.Module, optimizer: Any, grads: Tensor) -> None:
        for grad in grads:
            net.weight.grad = torch.empty_like(net.weight).copy_(grad)
            optimizer.step()

    checkpoint, net, optimizer = begin(torch.contiguous_format)
    train(net, optimizer, grads[:2])
    checkpoint.save(2)
    train(net, optimizer, grads[2:])
    checkpoint, moved, optimizer = begin(torch.channels_last)
    checkpoint.load()
    train(moved, optimizer, grads[2:])
    # Adam16 rounds by the place in memory.
    torch.testing.assert_close(moved.weight, net.weight, rtol=0, atol=1e-3 if make is Adam16 else 1e-7)
    # What torch itself loads, too.
    saved = optimizer.state_dict()
    _, net, optimizer = begin(torch.contiguous_format)
    optimizer.load_state_dict(saved)
    assert make is not Adam16 or optimizer.state[net.weight]["exp_avg"].stride() == net.weight.stride()


@pytest.mark.parametrize("format", ["single", "sharded"])
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon", "SGD", "Adam16"])
@pytest.mark.parametrize("mode", ["o2", "o3", "bf16_pure"])
def test_moments_of_16_bit_weights_in_channels_last_resume_bit_for_bit(
    mode: str, optimizer: str, format: Any, tmp_path: Path
) -> None:
    """Such fp32 sides are one number, expanded, between steps: without the strides that their moments must have."""

    def begin() -> tuple[Checkpoint, nn.Module, Amp, Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 1)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        amp = Amp.named(mode, device="cpu")
        amp.prepare(net)
        stepper: Any = (
            Adam16(master_params(net), lr=0.01)
            if optimizer == "Adam16"
            else build_optimizer(
                OptimizerConfig(optimizer, 0.01, 0.1, None, "float32", {"momentum": 0.9} if optimizer == "SGD" else {}),
                net,
            )
        )
        folder = Checkpoint(tmp_path, format=format, keep=9, model=net, optimizer=stepper, scaler=amp)
        return folder, net, amp, stepper

    def step(net: nn.Module, amp: Amp, stepper: Any, number: int) -> None:
        images = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(number))
        amp.backward(net(images.to(memory_format=torch.channels_last)).square().mean())
        amp.step(stepper)
        amp.update()
        amp.zero_grad(stepper)

    checkpoint, net, amp, stepper = begin()
    for number in range(2):
        step(net, amp, stepper, number)
    checkpoint.save(2)
    resumed, other, *rest = begin()
    assert resumed.load() is not None
    resumed.save(3)  # with moments as they were laid out here, one of them of one number
    for number in (2, 3):
        step(net, amp, stepper, number)
        step(other, rest[0], rest[1], number)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_crc_setting_of_torch_is_restored(tmp_path: Path) -> None:
    assert torch.serialization.get_crc32_options()
    Checkpoint(tmp_path, model=tiny()).save(1)
    assert torch.serialization.get_crc32_options()


def wrapped_nets() -> Iterator[tuple[str, Callable[[nn.Module], nn.Module]]]:
    ddp = nn.parallel.DistributedDataParallel
    yield "ddp", ddp
    yield "data_parallel", nn.DataParallel
    yield "compile", lambda net: torch.compile(net)
    yield "compile(ddp)", lambda net: torch.compile(ddp(net))
    yield "ddp(compile)", lambda net: ddp(torch.compile(net))
    yield "inside", lambda net: nn.ModuleDict({"module": ddp(torch.compile(net)), "b": nn.DataParallel(tiny(2.0))})


# The import of torch's own compiler warns.
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_nets_are_stored_unwrapped_and_load_into_any_wrapping(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for label, wrap in wrapped_nets():
            folder = tmp_path / label
            net = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"module": nn.BatchNorm1d(4)}))
            prefix = "module." if label == "inside" else ""
            expected = {prefix + name: value for name, value in copy.deepcopy(net).state_dict().items()}
            expected |= {"b.weight": torch.full((4, 4), 2.0), "b.bias": torch.full((4,), 2.0)} if prefix else {}
            contents = read(Checkpoint(folder, model=wrap(net)).save(1))
            assert bits(contents["model"]) == bits(expected), label
            fresh = wrap(nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"module": nn.BatchNorm1d(4)})))
            must_load(Checkpoint(folder, model=fresh))
            assert bits(list(fresh.state_dict().values())) == bits(list(expected.values())), label
            if not prefix:
                plain = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"module": nn.BatchNorm1d(4)}))
                must_load(Checkpoint(folder, model=plain))
                assert bits(plain.state_dict()) == bits(expected), label
    finally:
        end_process_group()


# Which parts.


class Recorder:
    """A part that is not a net and not an optimizer."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.loaded: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)

    def reset(self) -> None:
        self.loaded.append("reset")


def test_any_object_with_a_state_dict_is_a_part(tmp_path: Path) -> None:
    part = Recorder(value=torch.tensor(3.0, dtype=torch.bfloat16), table=[1.5, 2.5], note="x")
    Checkpoint(tmp_path, schedule=part, nothing=None).save(1)
    must_load(Checkpoint(tmp_path, schedule=part))
    assert bits(part.loaded) == bits([part.state])


def test_a_checkpoint_without_scale_gives_a_fresh_one(tmp_path: Path) -> None:
    Checkpoint(tmp_path / "none", model=tiny()).save(1)
    Checkpoint(tmp_path / "empty", model=tiny(), scaler=Recorder()).save(1)
    absent = whole(model=tiny().state_dict())
    del absent["scaler"]
    forge(tmp_path / "absent" / "step_00000001", pickled(absent))
    for name in ("none", "empty", "absent"):
        amp, torch_scaler = Recorder(), torch.amp.GradScaler("cpu", init_scale=8.0)
        assert must_load(Checkpoint(tmp_path / name, model=tiny(), scaler=amp)).notes == ()
        must_load(Checkpoint(tmp_path / name, model=tiny(), scaler=torch_scaler))
        assert amp.loaded == [{}] and torch_scaler.get_scale() == 8.0


def test_an_ema_that_is_not_in_the_file_starts_from_the_loaded_weights(tmp_path: Path) -> None:
    Checkpoint(tmp_path, model=tiny(3.0)).save(1)
    net = tiny()

    class Ema(Recorder):
        model = net

        def reset(self) -> None:
            self.loaded.append(net.weight.mean().item())

    ema = Ema()
    loaded = must_load(Checkpoint(tmp_path, ema=ema, model=net))
    assert ema.loaded == [3.0]
    assert loaded.notes == ("the checkpoint has no ema: it starts from the loaded weights",)
    with pytest.raises(CheckpointError, match="has no ema"):  # a network that is only called so is not an average
        Checkpoint(tmp_path, model=net, ema=tiny()).load()


def test_a_part_of_the_file_that_is_not_wanted_is_ignored_and_said(tmp_path: Path) -> None:
    Checkpoint(tmp_path, model=tiny(), ema=tiny(), scaler=Recorder(scale=2.0)).save(1)
    assert must_load(Checkpoint(tmp_path, model=tiny())).notes == (
        "scaler of the checkpoint is not used here",
        "ema of the checkpoint is not used here",
    )


def test_a_wanted_part_that_is_not_in_the_file_is_an_error(tmp_path: Path) -> None:
    Checkpoint(tmp_path, model=tiny(1.0)).save(1)
    net = tiny()
    with pytest.raises(CheckpointError, match="has no schedule; it has scaler, model, progress, config, format"):
        Checkpoint(tmp_path, model=net, schedule=Recorder()).load()
    assert net.weight.count_nonzero() == 0


def test_constructor_refuses_what_cannot_be_saved(tmp_path: Path) -> None:
    for parts in ({"config": tiny()}, {"model": 3}, {"keep": 0}):
        with pytest.raises(ValueError, match=r"config|model|keep"):
            Checkpoint(tmp_path, **parts)
    with pytest.raises(ValueError, match="max"):
        Checkpoint(tmp_path).save(1, best=("loss", "smallest"))


def foreign_parts() -> dict[str, tuple[str, nn.Module, Callable[[nn.Module], torch.optim.Optimizer]]]:
    def adamw(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters())

    class Integers(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("extra", torch.zeros(2, dtype=torch.int64))

    long = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return {
        "missing and unexpected": (r"model lacks 0.weight, 0.bias, 1.weight and 5 more; model also has", long, adamw),
        "shape": (r"weight is \(4, 4\) there and \(5, 5\) here", tiny(size=5), adamw),
        "dtype": ("extra is torch.float32 there and torch.int64 here", Integers(), adamw),
        "groups": (
            r"optimizer has groups of \[2\] parameters there and \[1, 1\] here",
            tiny(),
            lambda net: torch.optim.AdamW([{"params": [parameter]} for parameter in net.parameters()]),
        ),
        "class": ("optimizer is the state of AdamW, not of SGD", tiny(), lambda net: torch.optim.SGD(net.parameters())),
        "order": (
            r"0.exp_avg(_sq)? is \(4, 4\) there and \(4,\) here",
            tiny(),
            lambda net: torch.optim.AdamW(list(net.parameters())[::-1]),
        ),
    }


@pytest.mark.parametrize("case", foreign_parts())
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path, case: str) -> None:
    message, net, build = foreign_parts()[case]
    saved = tiny(1.0)
    if case == "dtype":
        saved.register_buffer("extra", torch.zeros(2))
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    Checkpoint(tmp_path, first=tiny(1.0), other=Recorder(), model=saved, optimizer=optimizer).save(1)

    first, other, live = tiny(), Recorder(), build(net)
    before = bits([first.state_dict(), net.state_dict(), live.state_dict()])
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(tmp_path, first=first, other=other, model=net, optimizer=live).load()
    assert "is of another model" in str(caught.value) and caught.value.exit_code == 3
    assert bits([first.state_dict(), net.state_dict(), live.state_dict()]) == before
    assert other.loaded == []


def test_a_net_of_another_floating_dtype_is_converted_and_said(tmp_path: Path) -> None:
    def build(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = tiny(1.5).to(dtype)
        optimizer = torch.optim.NAdam(net.parameters())
        net(torch.ones(1, 4, dtype=dtype)).sum().backward()
        optimizer.step()
        return net, optimizer

    net, optimizer = build(torch.float32)
    Checkpoint(tmp_path, model=net, optimizer=optimizer).save(1)
    half, half_optimizer = build(torch.bfloat16)
    loaded = must_load(Checkpoint(tmp_path, model=half, optimizer=half_optimizer))
    assert loaded.notes == (
        "dtypes of model were converted: weight is torch.float32 there and torch.bfloat16 here, "
        "bias is torch.float32 there and torch.bfloat16 here",
    )
    state = half_optimizer.state[next(half.parameters())]
    assert state["exp_avg"].dtype == torch.bfloat16 and state["mu_product"].dtype == torch.float32


# Which checkpoint.


def test_no_checkpoint_at_all_is_none_but_a_named_one_must_be_there(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "c", model=tiny())
    assert checkpoint.load() is None and not (tmp_path / "c").exists()
    for call in (checkpoint.load, read):
        for path in (tmp_path, tmp_path / "c", tmp_path / "c" / "step_00000001"):
            with pytest.raises(CheckpointError):
                call(path)


def test_a_checkpoint_can_be_named_in_four_ways(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    writer = Checkpoint(folder, model=tiny(1.0))
    first, second = writer.save(1, config={"a": 1}), writer.save(2)
    for path, expected in [(first, first), (first / "state.pt", first), (folder, second), (tmp_path / "run", second)]:
        loaded = must_load(Checkpoint(tmp_path / "elsewhere", model=tiny()), path)
        assert (loaded.path, loaded.notes) == (expected, ())
        assert loaded.digest == hashlib.sha256((expected / "state.pt").read_bytes()).hexdigest()
        assert read(path)["progress"]["step"] == loaded.step == int(expected.name[5:])
    with pytest.raises(CheckpointError, match="step 1"):
        read(first.rename(folder / "step_00000009"))


def test_a_file_without_manifest_is_loaded_and_called_unverified(tmp_path: Path) -> None:
    path = Checkpoint(tmp_path / "c", model=tiny(1.0)).save(7)
    shutil.copy(path / "state.pt", tmp_path / "copy.pt")
    net = tiny()
    loaded = must_load(Checkpoint(tmp_path / "d", model=net), tmp_path / "copy.pt")
    assert loaded.step == 7 and "not verified" in loaded.notes[0] and net.weight.mean() == 1.0
    assert loaded.path == tmp_path / "copy.pt"


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path, model=tiny())
    for step in (99_999_998, 99_999_999, 100_000_000):
        writer.save(step)
    assert must_load(writer).step == 100_000_000
    assert saved_steps(tmp_path) == [99_999_999, 100_000_000]


def test_the_newest_two_and_the_best_are_kept(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path, model=tiny())
    scores = [math.nan, 0.5, 0.9, None, math.inf, 0.9, 0.1, 0.2]
    kept = []
    for step, score in enumerate(scores):
        metrics = {"accuracy": score} if step != 3 else {}
        writer.save(step, metrics=metrics, best=("accuracy", "max"))
        kept.append(saved_steps(tmp_path))
    assert kept[2:] == [[1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7]]
    assert json.loads((tmp_path / "step_00000005" / "manifest.json").read_text())["metrics"] == {"accuracy": 0.9}
    writer.save(8, metrics={"accuracy": torch.tensor(0.05)}, best=("accuracy", "min"))
    assert saved_steps(tmp_path) == [7, 8]  # 6 would have been the best, had it been asked for in time
    writer.save(9)
    Checkpoint(tmp_path, model=tiny(), keep=1).save(4)  # older than what is there, but just written
    assert saved_steps(tmp_path) == [4, 9]


@pytest.mark.parametrize("file", ["manifest.json", "state.pt"])
def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path, file: str) -> None:
    writer = Checkpoint(tmp_path, model=tiny())
    for step in (1, 2):
        writer.save(step)
    os.truncate(tmp_path / "step_00000002" / file, 100)
    writer.save(3)
    assert saved_steps(tmp_path) == [1, 2, 3]
    writer.save(4)
    assert saved_steps(tmp_path) == [2, 3, 4]


@pytest.mark.parametrize("verify", [True, False])
def test_a_flipped_bit_does_not_count_among_the_newest_nor_as_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    """When only sizes were compared, two damaged ones took the places of two sound ones."""
    if not verify:
        monkeypatch.setattr(Checkpoint, "_verify", lambda self, path: True)
    for step, accuracy in enumerate((0.7, 0.9, 0.6, 0.5, 0.1)):
        Checkpoint(tmp_path, model=tiny(), keep=9).save(step, metrics={"accuracy": accuracy})
    for step in (1, 4):
        path = tmp_path / f"step_{step:08d}" / "state.pt"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    writer = Checkpoint(tmp_path, model=tiny())  # as after a resume
    writer.save(5, metrics={"accuracy": 0.2}, best=("accuracy", "max"))
    assert saved_steps(tmp_path) == ([0, 1, 3, 4, 5] if verify else [1, 4, 5])


def test_what_was_verified_once_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        Checkpoint(tmp_path, model=tiny(), keep=9).save(step)
    read_steps, is_sound = [], folders.is_sound
    monkeypatch.setattr(
        folders,
        "is_sound",
        lambda path: (read_steps.append(path.name[-1]) if path.exists() else None, is_sound(path))[1],
    )
    writer = Checkpoint(tmp_path, model=tiny())
    for step in (4, 5, 6):
        writer.save(step)
    assert read_steps == ["3"] and saved_steps(tmp_path) == [5, 6]


def test_a_sound_step_is_never_written_again_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path, model=tiny(1.0))
    path = writer.save(1)
    before = (path / "state.pt").stat()
    assert Checkpoint(tmp_path, model=tiny(2.0)).save(1) == path
    after = (path / "state.pt").stat()
    # Verifying a checkpoint reads it, which may move its access time.
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    (path / "state.pt").write_bytes(b"damaged")
    assert Checkpoint(tmp_path, model=tiny(2.0)).save(1) == path
    assert read(path)["model"]["weight"].mean() == 2.0 and names(tmp_path) == ["step_00000001"]


def test_ranks_above_0_collect_states_and_write_nothing(tmp_path: Path) -> None:
    class Collective(Recorder):
        collected = 0

        def state_dict(self) -> dict[str, Any]:
            Collective.collected += 1
            return {}

    for writer in (True, False):
        for _ in range(2):  # the second save of a step returns early, but not before all ranks took part
            path = Checkpoint(tmp_path / str(writer), writer=writer, part=Collective()).save(1)
            assert path.name == "step_00000001" and path.exists() == writer
    assert Collective.collected == 4 and names(tmp_path) == ["True"]


def test_unfinished_saves_of_dead_processes_are_removed_by_the_writer(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid in (dead.pid, os.getpid(), os.getppid(), 10**30):
        (tmp_path / f".tmp-step_00000001-{pid}" / "deep").mkdir(parents=True)
        (tmp_path / f".tmp-step_00000001-{pid}" / "state.pt").touch()
    (tmp_path / ".tmp-other").touch()
    Checkpoint(tmp_path, writer=False)
    assert len(names(tmp_path)) == 5
    Checkpoint(tmp_path)
    alive = {f".tmp-step_00000001-{pid}" for pid in (os.getpid(), os.getppid())}
    assert set(names(tmp_path)) == alive | {".tmp-other"}
    Checkpoint(tmp_path).save(1)  # over what a dead process with our number left
    assert f".tmp-step_00000001-{os.getpid()}" not in names(tmp_path)
    assert read(tmp_path)["format"] == 1


# Damage.


def test_when_none_is_sound_the_run_stops(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path, model=tiny(1.0))
    for step, file in ((1, "state.pt"), (2, "manifest.json")):
        flip(writer.save(step) / file)
    (tmp_path / "step_00000003").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint is sound: .*00000003.*00000002.*00000001") as caught:
        writer.load()
    assert caught.value.exit_code == 3


def test_strange_entries_are_rejected_and_not_followed(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path, model=tiny())
    writer.save(1)
    (tmp_path / "step_00000002").write_text("a file")
    forge(tmp_path / "step_00000003", b"x", step=3, files={"../state.pt": {"bytes": 1, "sha256": "0"}})
    forge(tmp_path / "step_00000004", b"x", step=4, files=[])
    forge(tmp_path / "step_00000005", b"x", step=5, metrics=None)
    (tmp_path / "step_00000006").mkdir()
    os.mkfifo(tmp_path / "step_00000006" / "manifest.json")
    forge(tmp_path / "step_00000007", b"x", step=7)
    (tmp_path / "step_00000007" / "manifest.json").write_text("[" * 100_000)
    (tmp_path / "step_abc").mkdir()
    loaded = must_load(writer)
    assert loaded.step == 1 and len(loaded.notes) == 6


@pytest.mark.parametrize("value", [10**400, "best", [1], True, "1e400"])
def test_a_metric_that_is_no_number_is_damage(tmp_path: Path, value: Any) -> None:
    """As a number it would be compared at the next save, which would end the run."""
    writer = Checkpoint(tmp_path, model=tiny())
    writer.save(1, metrics={"accuracy": 0.5})
    forge(tmp_path / "step_00000002", pickled(whole()), step=2, metrics={"accuracy": value})
    assert not folders.is_sound(tmp_path / "step_00000002")
    writer.save(3, metrics={"accuracy": 0.25}, best=("accuracy", "max"))
    assert must_load(writer).step == 3


# Hostile files.


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def compressed(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    return out.getvalue()


class PairsInCall:
    def __reduce__(self) -> Any:
        return OrderedDict, ([("a", 1)],)


def doubled(times: int) -> list[Any]:
    """A list that holds another one twice, and so on: 2^times paths lead to its end."""
    value: list[Any] = []
    for _ in range(times):
        value = [value, value]
    return value


def keyed_by(pickled_key: bytes) -> bytes:
    """A file whose config has a key that is made by these operations; torch.save itself would not come to its end."""
    contents = pickle.dumps(whole(config={"a": 1}), 2)
    assert contents.count(b"X\x01\x00\x00\x00aq") == 1
    before, after = contents.split(b"X\x01\x00\x00\x00aq")
    with zipfile.ZipFile(io.BytesIO(pickled({}))) as archive:
        names = {entry.filename: archive.read(entry) for entry in archive.infolist() if "data" not in entry.filename}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in {"archive/data.pkl": before + pickled_key + b"q" + after, **names}.items():
            archive.writestr(name, data)
    return out.getvalue()


DOUBLED_TUPLES = b"N\x85q\x80" + b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(0x80, 0x80 + 60))
SAME_HASH = [n * (2**61 - 1) * 2**64 for n in range(1, 20)]


def hostile_files(marker: Path) -> dict[str, bytes]:
    evil, loop = Evil(marker), []
    loop.append(loop)
    honest = pickled(whole(model={"weight": torch.ones(300)}))
    return {
        "code in a part": pickled(whole(model={"weight": evil})),
        "code on top": pickled(evil),
        "code as a key": pickled(whole(config={"a": [evil]})),
        "legacy format": pickled(whole(), _use_new_zipfile_serialization=False),
        "legacy format with code": pickled(evil, _use_new_zipfile_serialization=False),
        "raw pickle": pickle.dumps(evil),
        "a set": pickled(whole(config={"a": {1, 2}})),
        "a dtype": pickled(whole(config={"a": torch.float16})),
        "a sparse tensor": pickled(whole(model={"weight": torch.eye(4).to_sparse()})),
        "a tensor larger than its data": pickled(whole(model={"weight": torch.ones(1).expand(2**40)})),
        "a tensor longer than its data": honest.replace(b"M\x2c\x01", b"M\xff\xff"),  # 300 and 65535, pickled
        "a meta tensor": pickled(whole(model={"weight": torch.empty(2**40, device="meta")})),
        "compressed": compressed(pickled(whole(model={"weight": torch.zeros(1_000_000)}))),
        "endless": pickled(whole(config=loop)),
        "lists of lists": pickled(whole(config={"a": doubled(60)})),
        "a key of tuples of tuples": keyed_by(DOUBLED_TUPLES),
        "a tuple as a key": keyed_by(b"N\x85"),
        "keys with the same hash": pickled(whole(config=dict.fromkeys(SAME_HASH))),
        "counted tuples": pickled(whole(config={"a": Counter({(1, 2): 3})})),
        "a dictionary made of pairs": pickled(whole(config={"a": PairsInCall()})),
        "an integer of a million bits": pickled(whole(progress={"step": 1 << 1_000_000})),
        "no format": pickled(tiny().state_dict()),
        "not a dict": pickled([1, 2]),
        "no progress": pickled(whole(progress=3)),
        "empty": b"",
        "text": b"hello",
    }


@pytest.mark.parametrize("case", hostile_files(Path("x")))
def test_a_hostile_file_is_refused_and_nothing_is_executed(tmp_path: Path, case: str) -> None:
    data = hostile_files(tmp_path / "executed")[case]
    forge(tmp_path / "c" / "step_00000002", data, step=2)
    (tmp_path / "alone.pt").write_bytes(data)
    for path in (tmp_path / "c", tmp_path / "alone.pt"):
        net = tiny()
        with pytest.raises(CheckpointError, match=r"refused: \w"):
            Checkpoint(tmp_path / "own", model=net).load(path)
        assert net.weight.count_nonzero() == 0
    Checkpoint(tmp_path / "c", model=tiny(1.0)).save(1)
    loaded = must_load(Checkpoint(tmp_path / "c", model=tiny()))  # a whole run does not end of it
    assert loaded.step == 1 and "step_00000002 is damaged and was not used: state.pt: refused:" in loaded.notes[0]
    assert not (tmp_path / "executed").exists()


def test_containers_that_hold_each_other_are_as_many_as_their_paths() -> None:
    """What the bound is for: looking at all of them takes the double time for each level more."""
    counts = [sum(1 for _ in plain_state._leaves(doubled(times))) for times in (12, 13)]
    assert counts[1] == 2 * counts[0] + 1 > 1 << 13
    data = pickled(whole(config={"a": doubled(13)}))
    assert plain_state.scan(io.BytesIO(data)) < 1 << 10
    with pytest.raises(folders.CorruptFile, match="hold each other more often than the file has bytes"):
        plain_state.unpickle(data, Path("state.pt"))


@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
def test_a_file_of_a_terabyte_without_a_block_is_damaged(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint(tmp_path, model=tiny(1.0))
    checkpoint.save(1)
    folder = checkpoint.save(2)
    try:
        os.truncate(folder / name, 1 << 40)
    except OSError:
        pytest.skip("this file system has no files of a terabyte")
    about = json.loads((tmp_path / "step_00000001" / "manifest.json").read_text()) | {"step": 2}
    about["files"]["state.pt"]["bytes"] = 1 << 40
    if name == "state.pt":
        (folder / "manifest.json").write_bytes(folders.encode(about))
        assert folders.inspect(folder)["files"]["state.pt"]["bytes"] == 1 << 40  # it is what the manifest says
    loaded = must_load(checkpoint)
    assert loaded.step == 1 and "more than the" in loaded.notes[0]


def test_tensors_of_a_file_from_another_device_come_to_the_cpu(tmp_path: Path) -> None:
    data = pickled(whole(model=tiny(2.0).state_dict()))
    elsewhere = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x03\x00\x00\x00mps")
    assert elsewhere != data
    assert read(forge(tmp_path / "step_00000001", elsewhere))["model"]["weight"].device.type == "cpu"


def test_a_part_that_refuses_its_state_is_a_clear_error(tmp_path: Path) -> None:
    class Strict(Recorder):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("num_taken")

    Checkpoint(tmp_path, schedule=Recorder()).save(1)
    with pytest.raises(CheckpointError, match="schedule does not fit: 'num_taken'"):
        Checkpoint(tmp_path, schedule=Strict()).load()


def test_an_odd_state_of_a_part_is_refused_before_anything_changes(tmp_path: Path) -> None:
    odd: list[Any] = [3, [], {}, {"state": {}, "param_groups": [3]}, {"state": {}, "param_groups": [{"params": [[]]}]}]
    odd += [{"state": {}, "param_groups": [{"params": [0, 1]}], "moved": moved} for moved in (3, [3])]
    for number, state in enumerate(odd):
        folder = forge(
            tmp_path / f"{number}" / "step_00000001", pickled(whole(model=tiny(1.0).state_dict(), optimizer=state))
        )
        net = tiny()
        with pytest.raises(CheckpointError, match="optimizer is "):
            Checkpoint(tmp_path, model=net, optimizer=torch.optim.SGD(net.parameters())).load(folder)
        assert net.weight.count_nonzero() == 0


def test_a_newer_format_stops_and_is_neither_replaced_nor_pruned(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path, model=tiny())
    writer.save(1)
    folder = tmp_path / "step_00000002"
    forge(folder, pickled(whole(format=2)), step=2)
    with pytest.raises(CheckpointError, match="format 2, newer than 1"):
        writer.load()
    forge(folder, b"of another kind", step=2, format=2)
    for call in (writer.load, lambda: read(folder), lambda: writer.save(2)):
        with pytest.raises(CheckpointError, match="format 2, newer than 1"):
            call()
    for step in (3, 4, 5):
        writer.save(step)
    assert saved_steps(tmp_path) == [2, 4, 5]


# Where it cannot be written.


Mount = Callable[[Path], None]


@pytest.fixture
def mount_small_disk() -> Iterator[Mount]:
    """Mounts a real file system of 1 MB at a folder."""
    mounted = []

    def mount(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        try:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs the right to mount a tmpfs")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


def check_save_error(caught: SaveError, reason: int, folder: Path) -> None:
    message = str(caught)
    assert caught.exit_code == 4 and str(folder) in message and os.strerror(reason) in message
    assert "bytes needed" in message and "free" in message
    assert "Earlier checkpoints are intact" in message


def test_a_full_disk_is_a_clear_error_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, mount_small_disk: Mount
) -> None:
    disk = tmp_path / "disk"
    mount_small_disk(disk)
    folder = disk / "c"
    Checkpoint(folder, model=tiny(1.0, size=64)).save(1)
    before = os.statvfs(disk).f_bavail
    with pytest.raises(SaveError) as caught:
        Checkpoint(folder, model=tiny(2.0, size=600)).save(2)
    check_save_error(caught.value, errno.ENOSPC, folder)
    assert names(folder) == ["step_00000001"] and os.statvfs(disk).f_bavail == before
    assert read(folder)["model"]["weight"].mean() == 1.0


def test_a_read_only_disk_is_a_clear_error(tmp_path: Path, mount_small_disk: Mount) -> None:
    disk = tmp_path / "disk"
    mount_small_disk(disk)
    folder = disk / "c"
    writer = Checkpoint(folder, model=tiny(1.0))
    writer.save(1)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for target in (folder, disk / "new"):
        with pytest.raises(SaveError) as caught:
            Checkpoint(target, model=tiny(1.0)).save(2)
        check_save_error(caught.value, errno.EROFS, target)
    assert must_load(writer).step == 1


def test_a_file_size_limit_is_a_clear_error(tmp_path: Path) -> None:
    import resource  # the limit is real: a write is cut short, and the next one fails

    writer = Checkpoint(tmp_path, model=tiny(1.0))
    writer.save(1)
    writer.parts["model"] = tiny(2.0, size=1200)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, limits[1]))
    try:
        with pytest.raises(SaveError) as caught:
            writer.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    check_save_error(caught.value, errno.EFBIG, tmp_path)
    assert names(tmp_path) == ["step_00000001"]
    writer.parts["model"] = tiny(2.0)
    writer.save(2)
    assert must_load(writer).step == 2


def test_a_folder_without_permission_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("root may write everywhere")
        with pytest.raises(SaveError) as caught:
            Checkpoint(tmp_path / "c").save(1)
    finally:
        tmp_path.chmod(0o700)
    check_save_error(caught.value, errno.EACCES, tmp_path / "c")


def test_a_file_in_the_place_of_the_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    with pytest.raises(SaveError, match=str(tmp_path / "c")):
        Checkpoint(tmp_path / "c").save(1)


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, mount_small_disk: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Checkpoint(tmp_path / "c", model=tiny(), keep=1)
    path = writer.save(1)
    shutil.copytree(path, tmp_path / "copy")
    mount_small_disk(path)  # a mount point can be neither renamed nor removed
    shutil.copytree(tmp_path / "copy", path, dirs_exist_ok=True)
    assert must_load(writer, writer.save(2)).step == 2 and saved_steps(tmp_path / "c") == [1, 2]
    assert "cannot remove an old checkpoint" in caplog.text


# Death at any moment.


def changes_of_save(writer: Checkpoint, step: int) -> list[tuple[str, str]]:
    """The calls of a save with the path that each was about, C being the folder of checkpoints."""
    calls = system_calls.Calls()
    system_calls.use(calls)
    try:
        writer.save(step)
    finally:
        system_calls.use()
    opened: dict[int, str] = {}
    changes = []
    for name, args, result in calls.trace:
        if name == "open":
            opened[result] = str(args[0])
        elif name != "close":
            path = opened[args[0]] if name in ("write", "fsync") else str(args[0])
            changes.append((name, path.replace(str(os.getpid()), "PID").replace(str(writer.folder), "C")))
    return changes


def durable_write(folder: str) -> list[tuple[str, str]]:
    files = [(act, f"{folder}/{name}") for name in ("state.pt", "manifest.json") for act in ("write", "fsync")]
    return [("mkdir", folder), *files, ("fsync", folder)]


def test_nothing_is_renamed_before_it_is_on_disk_nor_deleted_before_the_new_one_is(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path / "checkpoints", keep=1, model=tiny())
    writer.save(1)
    changes = changes_of_save(writer, 2)
    new, old = "C/.tmp-step_00000002-PID", "C/.tmp-old-step_00000001-PID"
    publish = [("rename", new), ("fsync", "C")]
    assert changes[:10] == [*durable_write(new), *publish, ("rename", "C/step_00000001"), ("fsync", "C")]
    assert sorted(changes[10:12]) == [("unlink", f"{old}/manifest.json"), ("unlink", f"{old}/state.pt")]
    assert changes[12:] == [("rmdir", old)]

    (tmp_path / "checkpoints" / "step_00000002" / "state.pt").unlink()
    changes = changes_of_save(writer, 2)
    old = "C/.tmp-old-step_00000002-PID"
    assert changes[:10] == [*durable_write(new), ("rename", "C/step_00000002"), ("fsync", "C"), *publish]
    assert changes[10:] == [("unlink", f"{old}/manifest.json"), ("rmdir", old)]


def test_new_folders_are_made_durable_too(tmp_path: Path) -> None:
    calls = system_calls.Calls()
    system_calls.use(calls)
    try:
        Checkpoint(tmp_path / "run" / "checkpoints").save(1)
    finally:
        system_calls.use()
    changes = [(name, args[0]) for name, args, _ in calls.trace if name in ("mkdir", "open")]
    assert changes[:4] == [
        ("mkdir", tmp_path / "run"),
        ("open", tmp_path),
        ("mkdir", tmp_path / "run" / "checkpoints"),
        ("open", tmp_path / "run"),
    ]


def write_in_place(target: Path, files: dict[str, Any]) -> None:
    folders.make_folder(target)
    for name, data in files.items():
        folders.write_file(target / name, *data)


CARELESS = {
    "delete in place": ("pruning", "set_aside", lambda folder: folder),
    "write in place": ("the next save", "write_step", write_in_place),
}
"""The tempting ways: (scene, function of `folders`, what it becomes)."""


def die_everywhere(work: Path) -> int:
    """Print, for each way to save, how often it died and what was wrong afterwards."""
    from campaign import Result
    from campaign.saves import SCENES, Stage, deaths

    results = {}
    # The first of these changes no file; what dies in the others dies in those that are left, too.
    covered = ("the same step again", "the next save, in shards", "pruning, in shards, in the background")
    for name in [*(scene for scene in SCENES if scene not in covered), *CARELESS]:
        scene, function, careless = CARELESS.get(name, (name, "set_aside", folders.set_aside))
        right = getattr(folders, function)
        setattr(folders, function, careless)
        stage, result = Stage(work / name, SCENES[scene]), Result()
        deaths(stage, SCENES[scene], stage.trace(SCENES[scene]), name, result)
        setattr(folders, function, right)
        results[name] = result.tries, result.violations
    print(json.dumps(results))
    return 0


def test_death_at_any_call_of_a_save_loses_nothing_acknowledged_and_careless_saves_do(own_folder: Path) -> None:
    # What a killed process leaves is the same in memory, and fsync costs nothing.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else own_folder) as work:
        process = Forked(die_everywhere, Path(work))
        results = json.loads(process.communicate(240)[0].splitlines()[-1])
    for name, (num_deaths, wrong) in results.items():
        assert len(wrong) >= 2 if name in CARELESS else num_deaths >= 40 and wrong == [], name


# --- speed ------------------------------------------------------------------------------------------------------------


def test_a_file_is_made_without_a_copy_of_its_large_tensors_and_is_the_one_of_torch_save() -> None:
    weight = torch.randn(200, 300)
    contents = plain_state.to_plain({"a": weight, "tied": weight, "t": torch.randn(300, 200).t(), "b": torch.ones(3)})
    data = plain_state.serialise(contents)
    views = [torch.frombuffer(part, dtype=torch.uint8).data_ptr() for part in data if isinstance(part, memoryview)]
    assert views == [weight.data_ptr(), contents["t"].data_ptr()]
    buffer, crc = io.BytesIO(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    torch.save(contents, buffer)
    torch.serialization.set_crc32_options(crc)
    assert b"".join(data) == buffer.getvalue()


@pytest.mark.parametrize("format", ["single", "sharded"])
def test_memory_that_was_prepared_is_what_a_save_copies_to(tmp_path: Path, format: Any) -> None:
    net = tiny()
    optimizer = torch.optim.AdamW(net.parameters())
    net.weight.grad = torch.ones_like(net.weight)
    optimizer.step()
    parts: dict[str, Any] = {"model": net, "optimizer": optimizer}
    found = []
    for prepared in (True, False):
        checkpoint = Checkpoint(tmp_path / str(prepared), format=format, background=True, **parts)
        copies = checkpoint._copies
        assert copies is not None
        if prepared:
            checkpoint.prepare()
        assert (checkpoint._preparation is not None) == prepared
        if checkpoint._preparation is not None:
            checkpoint._preparation.result()
        before = {buffer.data_ptr() for buffer in copies._buffers}
        checkpoint.save(1)
        checkpoint.wait()
        found.append(before == {buffer.data_ptr() for buffer in copies._buffers} != set())
        assert torch.equal(read(tmp_path / str(prepared))["model"]["weight"], net.weight)
    assert found == [True, False]


# Counts of steps.


class Plain:
    """A training loop without `Loop`, in which the gradients of some steps are not finite."""

    def __init__(self, mode: str) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.amp = Amp.named(mode)
        self.amp.prepare(self.net)
        self.optimizer = torch.optim.AdamW(master_params(self.net), lr=0.01, fused=True)
        self.ema, self.slow = Ema(self.net, 0.9), Ema(self.net, 0.99)

    def checkpoint(self, folder: Path, **way: Any) -> Checkpoint:
        parts: dict[str, Any] = {"model": self.net, "optimizer": self.optimizer, "ema": self.ema, "slow": self.slow}
        return Checkpoint(folder, scaler=self.amp, **parts, **way)

    def train(self, steps: range, bad: tuple[int, ...] = (1, 3)) -> None:
        for i in steps:
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(i))
            with self.amp.autocast():
                loss = self.net(x).float().square().mean()
            self.amp.backward(loss * (math.inf if i in bad else 1.0))
            report = self.amp.step(self.optimizer)
            self.amp.update()
            self.amp.zero_grad(self.optimizer)
            self.ema.update(report)
            if i > 1:  # this average begins later
                self.slow.update(report)

    def everything(self) -> Any:
        parts = (self.net, self.optimizer, self.ema, self.slow, self.amp)
        counts = [int(self.amp.num_skipped), int(self.amp.num_consecutive_skips), int(self.ema.num_taken)]
        counts += [int(self.slow.num_taken), *(int(weights.num_taken) for weights in self.amp.weights)]
        return bits([part.state_dict() for part in parts]), counts


@pytest.mark.parametrize("way", [{}, {"format": "sharded"}, {"background": True}], ids=str)
@pytest.mark.parametrize("mode", ["fp16", "bf16_pure"])
def test_a_plain_loop_resumes_with_its_counts(tmp_path: Path, mode: str, way: dict[str, Any]) -> None:
    run, resumed = Plain(mode), Plain(mode)
    run.train(range(4))
    checkpoint = run.checkpoint(tmp_path, **way)
    checkpoint.save(4, progress={"samples": 32})
    checkpoint.wait()
    assert run.everything()[1] == [2, 1, 2, 1, *[2] * (mode == "bf16_pure")]
    resumed.train(range(20, 23), bad=(21, 22))  # whatever it was before
    loaded = must_load(resumed.checkpoint(tmp_path))
    counted = {"skipped": 2, "consecutive_skips": 1, "rounded": [2] * (mode == "bf16_pure")}
    assert loaded.progress == counted | {"averaged": 2, "averaged_slow": 1, "samples": 32, "step": 4}
    assert resumed.everything() == run.everything()
    run.train(range(4, 7)), resumed.train(range(4, 7))
    assert resumed.everything() == run.everything()


def test_counts_of_another_order_of_parts_find_their_part(tmp_path: Path) -> None:
    run, resumed = Plain("fp16"), Plain("fp16")
    run.train(range(4))
    run.checkpoint(tmp_path).save(4)
    must_load(Checkpoint(tmp_path, slow=resumed.slow, ema=resumed.ema))
    assert (int(resumed.slow.num_taken), int(resumed.ema.num_taken)) == (1, 2)


def test_counts_are_put_back_with_a_snapshot_and_are_0_where_a_checkpoint_has_none(tmp_path: Path) -> None:
    run = Plain("bf16_pure")
    run.train(range(4))
    checkpoint, before = run.checkpoint(tmp_path), run.everything()
    snapshot = checkpoint.snapshot()
    run.train(range(4, 6))
    checkpoint.restore(snapshot)
    assert run.everything() == before
    contents = torch.load(checkpoint.save(4) / "state.pt", weights_only=True)
    # As `Loop` saved them in version 0.1, which knew one average; and as a plain loop did, which saved no counts.
    old = {"samples": 32, "skipped": 7, "consecutive_skips": 3, "skipped_of": {}, "averaged": 5, "rounded": [4]}
    for name, progress, counts in (("loop", old, [7, 3, 5, 5, 4]), ("plain", {}, [0] * 5)):
        data = pickled(contents | {"progress": progress | {"step": 4}})
        must_load(checkpoint, forge(tmp_path / name / "step_00000004", data, step=4))
        assert run.everything() == (before[0], counts)


# The format.


BEFORE = Path(__file__).parents[1] / "support" / "checkpoints_of_0_1"
"""Written by version 0.1: by one process in format `single`, by two with layout fsdp in format `sharded`."""


class Averaged:
    """The parts of the checkpoints of version 0.1, with other values."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.5)
        self.ema = Ema(self.net, 0.5)
        self.scaler = torch.amp.GradScaler("cpu")

    def checkpoint(self, folder: Path, **way: Any) -> Checkpoint:
        parts: dict[str, Any] = {"model": self.net, "optimizer": self.optimizer, "ema": self.ema}
        return Checkpoint(folder, **way, **parts, scaler=self.scaler)


@pytest.mark.parametrize("format", ["single", "sharded"])
def test_checkpoints_of_version_0_1_load_and_are_written_in_the_same_way(tmp_path: Path, format: Any) -> None:
    folder = BEFORE / format / "step_00000002"
    expected = torch.load(folder / "state.pt", weights_only=True)
    for path in sorted(folder.glob("parts_*.safetensors")):  # read by another program
        for name, rows in load_file(path).items():
            *inside, last = name.split(".", 1 if name[0] in "me" else 3)
            state = expected
            for key in inside:
                state = state[int(key) if key.isdigit() else key]
            state[last] = rows if state[last] is None else torch.cat([state[last], rows])
    run = Averaged()
    loaded = must_load(run.checkpoint(tmp_path), folder)
    assert (loaded.step, *loaded.notes) == (2, "optimizer: group 0 keeps lr=0.5, not lr=0.01 of the checkpoint")
    assert loaded.progress == {"samples": 16, "text": "ä", "step": 2}
    assert loaded.config == {"recipe": {"name": "x"}, "lr": 0.01}
    assert bits(run.net.state_dict()) == bits(expected["model"])
    assert bits(run.ema.state_dict()) == bits(expected["ema"])
    assert bits(run.optimizer.state_dict()["state"]) == bits(expected["optimizer"]["state"])
    assert run.scaler.get_scale() == 1024.0

    # Names, keys and layout of what is written now; the bytes of a weight are the same, as was just shown.
    for group in run.optimizer.param_groups:
        group["lr"] = 0.01
    metrics = {"accuracy": 0.5, "loss": math.nan}
    again = run.checkpoint(tmp_path, format=format).save(
        2, progress={"samples": 16, "text": "ä"}, config=loaded.config, metrics=metrics
    )
    old, new = (json.loads((path / "manifest.json").read_text()) for path in (folder, again))
    if format == "single":
        expected["progress"] = {"samples": 16, "text": "ä", "averaged": 0, "step": 2}  # the count of `run.ema`
        assert repr(bits(torch.load(again / "state.pt", weights_only=True))) == repr(bits(expected))  # also in order
        assert new.keys() == old.keys() and new["metrics"] == old["metrics"]
    else:
        assert list(torch.load(again / "state.pt", weights_only=True)) == list(expected)
        for row in old["tensors"]:  # two ranks wrote half of each, one process writes all
            row["pieces"] = [[0, row["shape"][0], "whole_00000.safetensors"]]
        found = {str(row["places"]): row for row in new["tensors"]}
        assert [found[str(row["places"])] for row in old["tensors"]] == old["tensors"]
        assert names(again) == ["manifest.json", "state.pt", "whole_00000.safetensors"]


# --- sharded tensors


def gathered(rank: int, keep: bool) -> Any:
    shards = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    return gather_full_state({"moments": {"mean": shards, "step": 3}, "list": [shards], "pair": (1, shards)}, keep=keep)


@pytest.mark.parametrize("keep", [True, False])
def test_a_rank_that_keeps_nothing_holds_no_full_tensor(keep: bool, on_ranks: Callable[..., list[Any]]) -> None:
    for found in on_ranks(gathered, keep):
        found = [found["moments"]["mean"], *found["list"], found["pair"][1]]
        assert all(torch.equal(x, torch.arange(4.0)) if keep else x is None for x in found)
