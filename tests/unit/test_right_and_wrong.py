"""The usual way and ours side by side: the usual one fails, by the amount that is asserted."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared import a_weight
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from amp_core import Amp, Clip, keep_fp32, sync_grads, windows
from amp_core.data.loading import Sampler
from amp_core.layouts.ddp import wrap_ddp

INF, NAN = float("inf"), float("nan")
FP16, BF16 = torch.float16, torch.bfloat16
OnRanks = Callable[..., list[Any]]


# --- scaling --------------------------------------------------------------------------------------------------------------


def test_without_a_scale_every_fp16_gradient_is_zero_and_nothing_is_learnt() -> None:
    """A loss weighted by 1e-5, and an Adam whose eps hides nothing."""

    def train(mode: str, scales: bool = True) -> tuple[list[float], float]:
        torch.manual_seed(0)
        widths = [8, 32, 32, 32, 1]
        net = nn.Sequential(*[m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())])
        x = torch.randn(1024, 8)
        y = 0.5 * torch.sin(x.sum(1, keepdim=True))
        amp, optimizer = Amp.named(mode), Adam(net.parameters(), lr=3e-3, eps=1e-15, fused=True)
        losses, zeros = [], 0.0
        for _ in range(60):
            with amp.autocast():
                loss = F.mse_loss(net(x), y)
            if scales:
                amp.backward(loss * 1e-5)
                amp.step(optimizer)
                amp.update()
            else:
                (loss * 1e-5).backward()
                zeros = max(zeros, float(torch.cat([p.grad.flatten() for p in net.parameters()]).count_nonzero()))
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, zeros

    reference, scaled, bf16 = (train(mode)[0] for mode in ("fp32", "fp16", "bf16"))
    unscaled, most_nonzero = train("fp16", scales=False)
    assert most_nonzero == 0 and set(unscaled) == {unscaled[0]}
    assert reference[-1] < 0.9 * reference[0]
    assert scaled[-1] == pytest.approx(reference[-1], rel=0.02) and bf16[-1] == pytest.approx(reference[-1], rel=0.1)


def test_a_power_of_two_scales_without_rounding_and_1000_does_not() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(16, 8)

    def grads(scale: float) -> list[Tensor]:
        net.zero_grad()
        (net(x).square().mean() * scale).backward()
        return [p.grad / scale for p in net.parameters()]

    for scale, is_exact in ((2.0**10, True), (2.0**20, True), (1000.0, False)):
        assert all(torch.equal(a, b) for a, b in zip(grads(scale), grads(1.0), strict=True)) == is_exact


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_a_mode_without_a_scale_writes_nan_into_the_weights_unless_it_is_checked(mode: str, bad: float) -> None:
    for ours in (False, True):
        net, amp = nn.Linear(2, 1), Amp.named(mode)
        before, optimizer = copy.deepcopy(net.state_dict()), SGD(net.parameters(), lr=0.1, fused=True)
        with amp.autocast():
            loss = net(torch.tensor([[1.0, bad]])).sum()
        if ours:
            amp.backward(loss)
            amp.step(optimizer)
            assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
        else:
            loss.backward()
            optimizer.step()
            assert not net.weight.isfinite().all()


def test_clipping_scaled_gradients_moves_sgd_by_a_65536th_and_adam_hides_it() -> None:
    def first_move(kind: type[Optimizer], lr: float, order: str) -> float:
        torch.manual_seed(0)
        net = nn.Linear(8, 4)
        before = torch.cat([p.detach().flatten() for p in net.parameters()])
        optimizer, amp, scaler = kind(net.parameters(), lr=lr), Amp.named("fp16"), GradScaler("cpu")
        with amp.autocast():
            loss = F.mse_loss(net(torch.randn(16, 8)), torch.randn(16, 4))
        if order == "ours":
            amp.backward(loss)
            amp.step(optimizer, Clip.norm(0.1))
        else:
            scaler.scale(loss).backward()
            if order == "right":
                scaler.unscale_(optimizer)
            clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
        return float((torch.cat([p.detach().flatten() for p in net.parameters()]) - before).norm())

    # lr 0.5 times max_norm 0.1; differences of weights near 1 are rounded to 6e-8.
    assert first_move(SGD, 0.5, "ours") == pytest.approx(0.05, rel=1e-4)
    assert first_move(SGD, 0.5, "right") == pytest.approx(0.05, rel=1e-4)
    assert first_move(SGD, 0.5, "wrong") == pytest.approx(0.05 / 65536, rel=0.05)
    assert first_move(Adam, 0.01, "wrong") > 0.9 * first_move(Adam, 0.01, "ours")


def test_the_norm_of_an_overflow_is_no_error_and_the_step_is_skipped() -> None:
    """`error_if_nonfinite` makes a crash of what the scale mends by itself."""
    weight, optimizer = a_weight()
    scaler, amp = GradScaler("cpu"), Amp.named("fp16")
    scaler.scale((weight * INF).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_([weight], 1.0) == INF and weight.grad.isnan()
    scaler.step(optimizer)  # skipped, since the infinity was noted before it became NaN
    optimizer.zero_grad()
    amp.backward((weight * INF).sum())
    report = amp.step(optimizer, Clip.norm(1.0))
    assert not report.taken and not report.grad_norm.isfinite() and weight.item() == 0.0


def test_neither_the_scale_nor_a_hook_tells_whether_a_step_was_taken() -> None:
    def window(bad: bool, fused: bool, update: Callable[[GradScaler], None], interval: int = 2000) -> tuple[Any, ...]:
        (weight, optimizer), (ours, our_optimizer) = a_weight(fused=fused), a_weight(fused=fused)
        called: list[bool] = []
        optimizer.register_step_post_hook(lambda *_: called.append(True))
        scaler, amp = GradScaler("cpu", 4.0, growth_interval=interval), Amp.named("fp16", init_scale=4.0)
        factor = INF if bad else 1.0
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        update(scaler)
        amp.backward((ours * factor).sum())
        assert bool(amp.step(our_optimizer).taken) == (not bad) == (weight.item() != 0.0)
        return scaler.get_scale() != 4.0, bool(called)

    usual, static = GradScaler.update, lambda scaler: scaler.update(4.0)
    assert window(False, True, usual, 1) == (True, True)  # the scale grew: taken for a skip
    assert window(True, True, static) == (False, True)  # a static scale stays, and the hook fires: taken for a step
    assert window(True, False, usual) == (True, False) and window(True, True, usual) == (True, True)


def test_anomaly_detection_takes_the_calibration_of_the_scale_for_a_bug() -> None:
    def net_and_loss(amp: Amp) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        with amp.autocast():
            return net, net(torch.randn(8, 8)).float().sum()

    @contextmanager
    def detection() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                yield

    amp = Amp.named("fp16")
    with detection(), pytest.raises(RuntimeError, match="returned nan values"):
        amp.backward(net_and_loss(amp)[1])
    # Infinite without a NaN: it says nothing.
    amp = Amp.named("fp16", init_scale=2.0**15)
    with detection():
        net, loss = net_and_loss(amp)
        amp.backward(loss)
    assert not all(p.grad.isfinite().all() for p in net.parameters())
    # The step is skipped, the scale falls, and training goes on.
    amp, taken = Amp.named("fp16"), []
    for _ in range(6):
        net, loss = net_and_loss(amp)
        amp.backward(loss)
        taken.append(bool(amp.step(SGD(net.parameters(), lr=0.1)).taken))
        amp.update()
    assert not taken[0] and taken[-1]


# --- accumulation ---------------------------------------------------------------------------------------------------------


def test_without_the_division_sgd_moves_four_times_as_far_and_adam_as_far() -> None:
    moved = {}
    for kind in (SGD, Adam):
        for divides in (True, False):
            weight = torch.zeros(1, requires_grad=True)
            optimizer, amp = kind([weight], lr=0.01), Amp.named("fp32")
            for micro in next(windows([torch.ones(2)] * 4, 4)):
                amp.backward((weight * micro.batch).mean() * (micro.weight if divides else 1.0))
            amp.step(optimizer)
            moved[kind, divides] = -weight.item()
    assert moved[SGD, True] == pytest.approx(0.01) and moved[SGD, False] == pytest.approx(0.04)
    assert moved[Adam, True] == pytest.approx(0.01) and moved[Adam, False] == pytest.approx(0.01)


def test_a_tail_that_is_not_stepped_leaks_into_the_next_epoch() -> None:
    """10 micro-batches an epoch, 4 a window, gradients dropped only after a step: 1.5 times as large."""
    weight, seen = torch.zeros(1, requires_grad=True), []
    for _ in range(2):
        for i in range(10):
            (weight.sum() / 4).backward()
            if (i + 1) % 4 == 0:
                seen.append(weight.grad.item())
                weight.grad = None
    assert seen == [1.0, 1.0, 1.5, 1.0]
    weight.grad, ours = None, []
    for _ in range(2):
        for window in windows([torch.ones(1)] * 10, 4):
            for micro in window:
                (weight.sum() * micro.weight).backward()
            ours.append(weight.grad.item())
            weight.grad = None
    assert ours == [1.0] * 6


# --- autocast -------------------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Notes the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_backward_inside_autocast_takes_an_island_s_products_down_to_16_bit() -> None:
    """On a CPU, whose backward pass runs in the caller's thread. The island's gradients of 2e7 become infinite."""
    for ours in (False, True):
        net, amp = keep_fp32(nn.Linear(4, 4)), Amp.named("fp16", init_scale=1.0)
        with amp.autocast():
            loss = net(torch.ones(2, 4, requires_grad=True)).sum() * 1e7
            with Products() as products:
                amp.backward(loss) if ours else loss.backward()
        assert products.dtypes == {torch.float32 if ours else FP16}
        assert net.weight.grad.isinf().all() if not ours else net.weight.grad.eq(2e7).all()


def test_the_patched_forward_of_tutorials_takes_one_plain_tensor() -> None:
    class Head(nn.Linear):
        def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    def wrapper(forward: Callable[..., Tensor], self: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    x = torch.ones(1, 2)
    patched, island = Head(2, 1), keep_fp32(Head(2, 1))
    patched.forward = MethodType(partial(wrapper, patched.forward), patched)
    with torch.autocast("cpu", FP16):
        for args, kwargs in (((x, x), {}), ((x,), {"scale": 2.0})):
            with pytest.raises(TypeError):
                patched(*args, **kwargs)
            assert island(*args, **kwargs).dtype == torch.float32


# --- small numbers and large ones -----------------------------------------------------------------------------------------


def test_an_eps_of_1e_8_is_nothing_in_fp16() -> None:
    x = torch.zeros((), dtype=FP16)
    assert (x + 1e-8) == 0 and (1 / (x + 1e-8)).isinf() and (x / (x + 1e-8)).isnan()
    assert (x + 1e-5) > 0 and (x / (x + 1e-5)) == 0
    # Kept, and still too small to divide 1 by: the quotient is above 65504.
    assert (1 / (x + 1e-5)).isinf() and (1 / (x + 2e-5)).isfinite()
    assert keep_fp32(lambda x: x / (x + 1e-8))(x) == 0


@pytest.mark.parametrize("dtype, change", [(FP16, 1e-4), (BF16, 1e-3)], ids=str)
def test_small_steps_on_16_bit_weights_are_lost_and_on_fp32_weights_add_up(dtype: torch.dtype, change: float) -> None:
    weights = {}
    for kind in (dtype, torch.float32):
        weight = nn.Parameter(torch.ones((), dtype=kind))
        optimizer = SGD([weight], lr=change)
        for _ in range(1000):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        weights[kind] = weight.item()
    assert weights[dtype] == 1.0 and weights[torch.float32] == pytest.approx(1 - 1000 * change, abs=1e-4)


def test_sums_in_bf16_stop_growing() -> None:
    total, exact = torch.zeros((), dtype=BF16), torch.zeros(())
    for _ in range(512):
        total, exact = total + 1 / 512, exact + 1 / 512
    assert (total.item(), exact.item()) == (0.5, 1.0)
    assert torch.tensor(256.0, dtype=BF16) + 0.5 == 256.0


# --- data on resume -------------------------------------------------------------------------------------------------------


def test_a_sampler_without_set_epoch_repeats_its_first_epoch() -> None:
    usual = DistributedSampler(range(12), num_replicas=1, rank=0, shuffle=True)
    assert list(usual) == list(usual)
    ours = iter(Sampler(12, seed=0, batch_size=12))
    first, second = ([index for index, _ in next(ours)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(12)) and first != second


def test_a_shuffling_loader_made_again_from_the_saved_generator_repeats_samples() -> None:
    """Stopped after 6 of 12 samples: the generator's state is that after the shuffle, and the new loader shuffles anew."""
    data = TensorDataset(torch.arange(12))

    def stopped_and_resumed() -> list[int]:
        torch.manual_seed(0)
        loader = iter(DataLoader(data, batch_size=2, shuffle=True))
        seen = [next(loader)[0] for _ in range(3)]
        # Here the state is saved and put back.
        again = iter(DataLoader(data, batch_size=2, shuffle=True))
        seen += [batch for (batch,) in again][3:]
        return torch.cat(seen).tolist()

    assert len(stopped_and_resumed()) == 12 and len(set(stopped_and_resumed())) == 9
    samples = iter(Sampler(12, seed=0, batch_size=2))
    seen = [key for _ in range(3) for key in next(samples)]
    resumed = iter(Sampler(12, seed=0, batch_size=2, start_sample=6))
    seen += [key for _ in range(3) for key in next(resumed)]
    assert sorted(index for index, _ in seen) == list(range(12))


# --- several ranks. What a rank does stands here because it is sent by name. ------------------------------------------------


def local_gradients(rank: int) -> list[float]:
    """Rank 0's gradient is 1, rank 1's is 2: after an inner micro-batch in which nothing should be reduced."""
    grads = []
    for way in ("both", "forward", "backward", "ours"):
        plain = nn.Linear(1, 1, bias=False)
        net = wrap_ddp(plain, torch.device("cpu")) if way == "ours" else DistributedDataParallel(plain)
        x = torch.full((1, 1), rank + 1.0)
        if way == "backward":
            loss = net(x).sum()
            with net.no_sync():
                loss.backward()
        elif way == "forward":
            with net.no_sync():
                loss = net(x).sum()
            loss.backward()
        else:
            with sync_grads(net, when=False):
                net(x).sum().backward()
        grads.append(plain.weight.grad.item())
    return grads


def test_no_sync_around_the_backward_pass_alone_reduces_all_the_same(on_ranks: OnRanks) -> None:
    assert on_ranks(local_gradients) == [[1.0, 1.0, 1.5, 1.0], [2.0, 2.0, 1.5, 2.0]]


def skipping(rank: int, kind: type[Optimizer], fused: bool, unscales: bool, ours: bool) -> tuple[float, float, str]:
    """Rank 0's gradient is infinite. The weight after a step at rate 0.1, the scale, and what was raised."""
    weight = torch.ones(1, requires_grad=True)
    optimizer = kind([weight], lr=0.1, fused=fused)
    scaler: Any = Amp.named("fp16") if ours else ShardedGradScaler("cpu")
    loss, raised = (weight * (INF if rank == 0 else 1.0)).sum(), ""
    scaler.backward(loss) if ours else scaler.scale(loss).backward()
    try:
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    except RuntimeError as error:
        raised = str(error)
    return round(weight.item(), 6), scaler.scale if ours else scaler.get_scale(), raised


SKIPPING = {
    "unfused": (SGD, False, False, False),
    "fused": (SGD, True, False, False),
    "fused, unscaled": (SGD, True, True, False),
    "fused Adam, unscaled": (Adam, True, True, False),
    "ours": (Adam, True, False, True),
    "ours, unscaled": (Adam, True, True, True),
}


def every_way_of_skipping(rank: int) -> list[tuple[float, float, str]]:
    return [skipping(rank, *way) for way in SKIPPING.values()]


def test_the_sharded_scaler_agrees_between_ranks_in_unscale_which_fused_optimizers_skip(on_ranks: OnRanks) -> None:
    seen = dict(zip(SKIPPING, zip(*on_ranks(every_way_of_skipping), strict=True), strict=True))
    agree = ((1.0, 32768.0, ""), (1.0, 32768.0, ""))
    assert {seen[way] for way in ("unfused", "fused, unscaled", "ours", "ours, unscaled")} == {agree}
    assert seen["fused"] == ((1.0, 32768.0, ""), (0.9, 65536.0, ""))
    # Its found_inf has the shape (1,), and the step counts of Adam have none.
    for _, _, raised in seen["fused Adam, unscaled"]:
        assert "output with shape [] doesn't match the broadcast shape [1]" in raised


def scaled_fp16_losses(rank: int) -> list[bool]:
    weight = torch.ones((), requires_grad=True)
    return [bool(scaler.scale(weight.half()).isinf()) for scaler in (GradScaler("cpu"), ShardedGradScaler("cpu"))]


def test_the_sharded_scaler_makes_an_fp16_loss_of_1_infinite(on_ranks: OnRanks) -> None:
    assert on_ranks(scaled_fp16_losses) == [[False, True]] * 2
