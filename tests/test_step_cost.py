"""What a step costs besides its arithmetic: Python calls, casts, waits. Exact counts, no clock."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import Amp, Clip, Schedule, windows
from amp_core.models import CLASSIFIERS, build_model

Batches = list[tuple[Tensor, Tensor]]


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return build_model("mlp", CLASSIFIERS, num_classes=10, image_shape=(1, 28, 28), options={})


def batches(num: int) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 1, 28, 28, generator=generator), torch.randint(10, (8,), generator=generator))
        for _ in range(num)
    ]


class Calls:
    """Counts the Python functions that are called; built-in ones do not count."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._seen)
        return self

    def _seen(self, frame: Any, event: str, arg: Any) -> None:
        self.count += event == "call"

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)


class Casts(TorchDispatchMode):
    """Counts casts to and from 16 bits."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is not None
        return function(*args, **(kwargs or {}))


def textbook(mode: str, num: int) -> Callable[[], None]:
    net, scaler = mlp(), torch.amp.GradScaler("cpu", enabled=mode == "fp16")  # type: ignore[attr-defined]
    optimizer = AdamW(net.parameters(), lr=1e-3, fused=True)
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[mode]
    data = batches(num)

    def step() -> None:
        for images, labels in data:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(net(images), labels) / num
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(mode: str, num: int, *, share: bool = True) -> Callable[[], None]:
    net, amp = mlp(), Amp.named(mode)  # type: ignore[arg-type]
    amp.guard(net)
    optimizer = AdamW(net.parameters(), lr=1e-3, fused=True)
    schedule = Schedule(optimizer, lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n), 100)
    data, clip = batches(num), Clip.norm(1.0)
    context = amp.share_casts if share and num > 1 else None

    def window() -> None:
        for micro in next(windows(data, num)):
            images, labels = micro.batch
            with amp.autocast():
                loss = F.cross_entropy(net(images), labels)
            amp.backward(loss * micro.weight)

    def step() -> None:
        if context is None:
            window()
        else:
            with context(net):
                window()
        report = amp.step(optimizer, clip)
        amp.update()
        optimizer.zero_grad(set_to_none=True)
        schedule.advance(report)

    return step


def calls(step: Callable[[], None]) -> int:
    step(), step()
    with Calls() as counter:
        step()
    return counter.count


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("num, most", [(1, 200), (4, 410)])
def test_a_step_calls_fewer_functions_than_the_textbook_s(mode: str, num: int, most: int) -> None:
    """With a schedule, a check in every mode and weights of windows, which the textbook's has not."""
    found = calls(ours(mode, num))
    assert found <= most
    assert found < calls(textbook(mode, num))


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_a_weight_is_cast_once_per_window(mode: str) -> None:
    counts = []
    for share in (False, True):
        step = ours(mode, 4, share=share)
        step()
        with Casts() as counter:
            step()
        counts.append(counter.count)
    assert counts[1] <= 0.75 * counts[0]


def gradients(mode: str, share: bool) -> Iterator[list[Tensor]]:
    """Of three windows, a step after each."""
    net, amp = mlp(), Amp.named(mode)  # type: ignore[arg-type]
    optimizer = SGD(net.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        with amp.share_casts() if share else torch.enable_grad():
            for images, labels in batches(4):
                with amp.autocast():
                    loss = F.cross_entropy(net(images), labels) / 4
                amp.backward(loss)
                with torch.no_grad(), amp.autocast():  # looks at the network, and must not be remembered
                    net(images)
        yield [p.grad.clone() for p in net.parameters() if p.grad is not None]
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_shared_casts_change_no_bit_of_a_gradient(mode: str) -> None:
    for alone, shared in zip(gradients(mode, False), gradients(mode, True), strict=True):
        assert len(alone) == len(shared) == 6
        assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_a_pass_without_gradients_is_not_remembered() -> None:
    images, labels = batches(1)[0]
    net, amp = mlp(), Amp.named("bf16")
    with amp.share_casts():
        with torch.no_grad(), amp.autocast():
            net(images)
        with amp.autocast():
            loss = F.cross_entropy(net(images), labels)
    amp.backward(loss)
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stale_is_left_behind(fails: bool) -> None:
    """After a window, also one that was broken off, the next pass sees the weights as they are."""
    images, _ = batches(1)[0]
    net, amp = mlp(), Amp.named("bf16")
    try:
        with amp.share_casts():
            with amp.autocast():
                before = net(images)
            if fails:
                raise KeyError
    except KeyError:
        pass
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0)
    with amp.autocast():
        assert bool(before.any())
        assert not bool(net(images).any())


def test_a_step_inside_makes_new_casts() -> None:
    images, labels = batches(1)[0]
    net, amp = mlp(), Amp.named("bf16")
    optimizer = SGD(net.parameters(), lr=0.5, fused=True)
    with amp.share_casts():
        with amp.autocast():
            loss = F.cross_entropy(net(images), labels)
        amp.backward(loss)
        amp.step(optimizer)
        amp.update()
        with amp.autocast():
            after = net(images)
    with amp.autocast():
        assert torch.equal(after, net(images))


def test_hooks_of_an_optimizer_are_called_and_its_scope_is_seen_by_a_profiler() -> None:
    net, amp, seen = mlp(), Amp.named("bf16"), []
    optimizer = SGD(net.parameters(), lr=0.5, fused=True)
    images, labels = batches(1)[0]

    def step() -> None:
        with amp.autocast():
            loss = F.cross_entropy(net(images), labels)
        amp.backward(loss)
        amp.step(optimizer)
        amp.update()

    handle = optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    step()
    handle.remove()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    assert seen == ["post"]
    assert any(event.key == "Optimizer.step#SGD.step" for event in profile.key_averages())
    twin = copy.deepcopy(net)
    own = SGD(twin.parameters(), lr=0.5, fused=True)
    torch.optim.lr_scheduler.ConstantLR(own)  # puts a step of its own into the optimizer
    own.zero_grad()
    F.cross_entropy(twin(images), labels).backward()
    amp.step(own)
    amp.update()
    assert own._opt_called  # type: ignore[attr-defined]
