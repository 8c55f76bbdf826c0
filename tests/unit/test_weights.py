"""16-bit weights: which updates survive, exactly what is saved, and no trace of a skipped step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import rows
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_core import Amp, Checkpoint, Clip, Ema, StepReport, keep_fp32
from amp_core.layouts.memory_model import memory_of
from amp_core.lowp.masters import fp32_copy, fp32_values, master_params
from amp_core.lowp.rounding import halve, noise_16bit, round_stochastically, whole
from amp_core.lowp.weights import LowPrecisionWeights

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")
OnRanks = Callable[..., list[Any]]
MODES: dict[str, tuple[torch.dtype, Any] | None] = {
    "fp32": None,
    "o2": (FP16, "master"),
    "o3": (FP16, "nearest"),
    "bf16_master": (BF16, "master"),
    "bf16_stochastic": (BF16, "stochastic"),
    "bf16_nearest": (BF16, "nearest"),
    "bf16_remainder": (BF16, "remainder"),
}
SIXTEEN = [mode for mode in MODES if mode != "fp32"]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: Adam(p, lr=0.01, fused=True),
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw_unfused": lambda p: AdamW(p, lr=0.01),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


class Run:
    """A plain training loop around 16-bit weights; what `Amp` has to do with them stands in `step`."""

    def __init__(self, mode: str, net: nn.Module | None = None, optimizer: str = "adam", decay: float = 0.5) -> None:
        self.net = net or network()
        self.amp = Amp.named("fp16" if MODES[mode] == MODES["o2"] else "fp32", "cpu")
        self.weights = None if MODES[mode] is None else LowPrecisionWeights(self.net, *MODES[mode])
        self.optimizer = OPTIMIZERS[optimizer](master_params(self.net))
        self.ema = Ema(self.net, decay, warmup=False)

    def step(self, loss: Tensor | None = None, clip: Clip | None = None) -> StepReport:
        if loss is not None:
            self.amp.backward(loss)
        params = [p for p in master_params(self.net) if p.grad is not None]
        if self.weights is not None:
            self.weights.reduce_(params)
            self.weights.begin_step(params)
        report = self.amp.step(self.optimizer, clip)
        if self.weights is not None:
            self.weights.end_step(params, report.taken)
        self.amp.update()
        self.optimizer.zero_grad()
        self.ema.update(report)
        return report

    def train(self, steps: Iterator[int] | range, bad: int | None = None) -> list[bool]:
        return [bool(self.step(self.loss(i) * (INF if i == bad else 1.0)).taken) for i in steps]

    def loss(self, i: int) -> Tensor:
        x = torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(i))
        return F.cross_entropy(self.net(x), torch.arange(8) % 3)

    def everything(self) -> list[Tensor]:
        """All that a run consists of: weights as they lie in memory and as they are saved, moments, averages."""
        sides = [m for m in master_params(self.net) if m.untyped_storage().nbytes() > 4]
        moments = [v for state in self.optimizer.state_dict()["state"].values() for v in state.values()]
        saved = [*self.net.state_dict().values(), *self.ema.state_dict().values()]
        return [t.detach().clone() for t in (*self.net.parameters(), *sides, *moments, *saved)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype is y.dtype and x.equal(y) for x, y in zip(a, b, strict=True))


class Scalar(nn.Module):
    """One weight, which is its output."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((256,), start))

    def forward(self) -> Tensor:
        return self.weight * 1


# --- gradients and weights that a program writes


CLEARS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda net: net.zero_grad(),
    "module, to 0": lambda net: net.zero_grad(set_to_none=False),
    "submodules": lambda net: [net[0].zero_grad(), net[1].zero_grad(), net[4].zero_grad()],  # type: ignore[index]
    "wrapper": lambda net: nn.Sequential(net).zero_grad(),
    "each": lambda net: [setattr(p, "grad", None) for p in net.parameters()],
    "deleted": lambda net: [delattr(p, "grad") for p in net.parameters()],
    "masters": lambda net: [setattr(p, "grad", None) for p in master_params(net)],
}


@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("mode", SIXTEEN)
def test_gradients_of_fp32_sides_are_cleared_by_whatever_clears_those_of_the_network(mode: str, clear: str) -> None:
    run = Run(mode, optimizer="sgd")
    found = []
    for _ in range(2):
        run.loss(0).backward()
        found.append([p.grad.clone() for p in master_params(run.net)])
        assert all(p.grad.equal(grad) for p, grad in zip(run.net.parameters(), found[-1], strict=True))
        CLEARS[clear](run.net)
        assert not any(p.grad is not None and p.grad.any() for p in master_params(run.net))
    if mode == "o2":  # of which no running statistics are in the gradient
        assert same(*found)


def test_gradients_are_cut_and_set_through_the_network() -> None:
    run = Run("o2")
    run.loss(0).backward()
    norm = torch.nn.utils.clip_grad_norm_(run.net.parameters(), 1e-3)
    assert norm > 1e-3 and torch.nn.utils.get_total_norm([p.grad for p in master_params(run.net)]) <= 1.001e-3
    run.net[4].bias.grad = torch.ones(3, dtype=FP16)
    assert master_params(run.net[4])[1].grad.tolist() == [1.0] * 3
    assert master_params(run.net[4])[1].grad.dtype is FP32


def test_what_is_frozen_or_set_free_is_so_on_the_fp32_side() -> None:
    """Also where it was frozen before, and then its weights are cast."""
    net = network()
    net[0].requires_grad_(False)
    run = Run("o2", net=net)
    assert net[0].weight.dtype is FP16 and not net[0].weight.requires_grad
    assert [p.requires_grad for p in master_params(net)] == [False] * 2 + [True] * 4
    run.loss(0).backward()
    assert [p.grad is None for p in master_params(net)] == [True] * 2 + [False] * 4
    net[0].requires_grad_(True)
    run.step(run.loss(0))
    assert all(p.requires_grad for p in master_params(net))


def write_vector(net: nn.Module, change: Callable[[Tensor], Any]) -> None:
    low = [p for p in net.parameters() if p.dtype is not FP32]
    vector = torch.nn.utils.parameters_to_vector(low).detach()
    torch.nn.utils.vector_to_parameters(change(vector), low)


WRITES: dict[str, Callable[[nn.Module, Callable[[Tensor], Any]], Any]] = {
    "data": lambda net, change: [change(p.data) for p in net.parameters()],
    "each": torch.no_grad()(lambda net, change: [change(p) for p in net.parameters()]),
    "views": torch.no_grad()(lambda net, change: [change(p.detach().view(-1)) for p in net.parameters()]),
    "replaced": lambda net, change: [setattr(p, "data", change(p.data.clone())) for p in net.parameters()],
    "vector": write_vector,
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda p: p.clamp_(-0.05, 0.05),
    "prune": lambda p: p.masked_fill_(p > 0, 0.0),
    "constant": lambda p: p.fill_(0.3),
    "nothing": lambda p: p.mul_(1.0),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", SIXTEEN)
def test_what_a_program_writes_into_weights_is_not_lost(mode: str, write: str, change: str) -> None:
    """What it left keeps its fp32 value, bit for bit; the rest is what it wrote, also after a step that moves nothing."""
    run = Run(mode, optimizer="sgd")
    low = [p for p in run.net.parameters() if p.dtype is not FP32]
    values, before = [v.clone() for v in fp32_values(low)], [p.detach().clone() for p in low]
    WRITES[write](run.net, CHANGES[change])
    written = [p.detach().clone() for p in low]
    assert same(written, before) == (change == "nothing")
    report = run.step(run.loss(0) * 0.0)
    assert report.taken and same([p.detach() for p in low], written)
    for p, value, old, new in zip(low, values, before, written, strict=True):
        (now,) = fp32_values([p])
        assert now[old == new].equal(value[old == new]) and now.to(p.dtype).equal(new)
        if run.weights.update == "master":
            assert now[old != new].equal(new[old != new].float())


# --- which updates survive


@pytest.mark.parametrize("mode", MODES)
def test_a_thousand_small_steps(mode: str) -> None:
    """1 - 1000 * 1e-3. A thousandth is less than half of the last digit of 1.0 in bfloat16."""
    net = Scalar(1.0)
    weights = None if MODES[mode] is None else LowPrecisionWeights(net, *MODES[mode])
    (param,) = master_params(net)
    optimizer = SGD([param], lr=1e-3, fused=True)
    for _ in range(1000):
        param.grad = torch.ones(256)
        if weights:
            weights.begin_step([param])
        optimizer.step()
        if weights:
            weights.end_step([param], torch.tensor(True))
    value = net.state_dict()["weight"].mean().item()
    expected = {"o3": 0.022, "bf16_nearest": 1.0}.get(mode, 0.0)
    # In fp32 a thousand roundings of at most 2^-25, and that of the learning rate.
    in_fp32 = 1000 * 2.0**-24
    tolerance = {"bf16_nearest": 0.0, "o3": 1e-3, "bf16_stochastic": 0.01}.get(mode, in_fp32)
    assert value == pytest.approx(expected, abs=tolerance)


# --- rounding


def test_stochastic_rounding_has_no_bias_and_takes_only_the_two_neighbours() -> None:
    values = torch.tensor([1.0017, -1.0017, 3.1e-20, -2.7e8, 1.5e-39, 0.1, 1 + 2**-8]).repeat_interleave(1 << 16)
    down = (values.view(torch.int32) & -0x10000).view(FP32)
    up = ((values.view(torch.int32) & -0x10000) + 0x10000).view(FP32)
    rounded = round_stochastically(values, noise_16bit(len(values), torch.tensor(3))).float()
    assert ((rounded == down) | (rounded == up)).all()
    share = ((values - down) / (up - down)).view(7, -1).double().mean(1)
    found = (rounded == up).view(7, -1).double().mean(1)
    deviation = (share * (1 - share) / (1 << 16)).sqrt()
    assert ((found - share).abs() < 4 * deviation).all()
    nearest = (values.to(BF16).float() - values).view(7, -1).double().mean(1)
    assert (nearest[0] / 1.0017).abs() > 1e-3  # always to the same side


def test_stochastic_rounding_leaves_alone_what_bfloat16_can_hold() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BF16).float()
    values = torch.cat([every, torch.tensor([INF, -INF]), torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(FP32)])
    rounded = round_stochastically(values, noise_16bit(len(values), torch.tensor(1)))
    assert torch.equal(rounded.isnan(), values.isnan())
    assert rounded.float().nan_to_num(7.0).equal(values.nan_to_num(7.0))


# --- a skipped step, resuming, other modes


@pytest.mark.parametrize("optimizer", rows(OPTIMIZERS, "adam"))
@pytest.mark.parametrize("mode", SIXTEEN)
def test_a_skipped_step_leaves_every_bit(mode: str, optimizer: str) -> None:
    run, twin = Run(mode, optimizer=optimizer), Run(mode, optimizer=optimizer)
    taken = run.train(range(6), bad=3)
    assert taken == [True, True, True, False, True, True]
    twin.train(range(3))
    before = twin.everything()
    assert not twin.step(twin.net[4](torch.full((2, 64), INF)).sum()).taken  # no forward pass of the statistics
    assert same(twin.everything(), before)


def save(run: Run, folder: Path) -> dict[str, Any]:
    Checkpoint(folder, model=run.net, optimizer=run.optimizer, ema=run.ema, scaler=run.amp).save(1)
    return {"num_taken": 0 if run.weights is None else int(run.weights.num_taken)}


def load(run: Run, folder: Path, num_taken: int) -> tuple[str, ...]:
    loaded = Checkpoint(folder, model=run.net, optimizer=run.optimizer, ema=run.ema, scaler=run.amp).load()
    assert loaded is not None
    if run.weights is not None:
        run.weights.num_taken.fill_(num_taken)
    return loaded.notes


@pytest.mark.parametrize("optimizer", rows(OPTIMIZERS, "adam"))
@pytest.mark.parametrize("mode", MODES)
def test_resume_is_bit_exact(mode: str, optimizer: str, tmp_path: Path) -> None:
    run = Run(mode, optimizer=optimizer)
    run.train(range(4))
    progress = save(run, tmp_path)
    run.train(range(4, 8))
    resumed = Run(mode, optimizer=optimizer)
    resumed.train(range(20, 22))  # whatever it was before
    assert load(resumed, tmp_path, **progress) == ()
    resumed.train(range(4, 8))
    assert same(run.everything(), resumed.everything())


@pytest.mark.parametrize("there, here", rows(itertools.permutations(MODES, 2), every=8))
def test_each_mode_continues_each_other_s_checkpoint(there: str, here: str, tmp_path: Path) -> None:
    run, other = Run(there), Run(here)
    run.train(range(3))
    progress = save(run, tmp_path)
    load(other, tmp_path, **progress)
    saved, loaded = run.net.state_dict(), other.net.state_dict()
    assert [v.dtype for v in saved.values()] == [v.dtype for v in loaded.values()]
    exact = {"fp32": 0, "o2": 0, "bf16_master": 0, "bf16_remainder": 0, "o3": 2.0**-11}.get(here, 2.0**-8)
    for name, value in saved.items():
        assert torch.allclose(loaded[name].double(), value.double(), rtol=exact, atol=1e-7 if exact else 0)
    for a, b in zip(run.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert a["exp_avg"].equal(b["exp_avg"]) and b["exp_avg_sq"].dtype is FP32
    assert other.train(range(3, 5)) == [True, True]


def test_a_checkpoint_is_one_of_fp32(tmp_path: Path) -> None:
    run, plain = Run("bf16_remainder"), Run("fp32")
    run.train(range(3))
    state = run.net.state_dict()
    assert {name: (v.dtype, v.shape) for name, v in state.items()} == {
        name: (v.dtype, v.shape) for name, v in plain.net.state_dict().items()
    }
    plain.net.load_state_dict(state)
    assert run.net[4].state_dict()["weight"].equal(state["4.weight"])  # also of a part
    assert not state["4.weight"].equal(run.net[4].weight.float())
    with pytest.raises(ValueError, match="assign=False"):
        run.net.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        run.net.load_state_dict(state | {"4.weight": torch.zeros(1)})


# --- gradients


def test_gradients_are_summed_in_fp32() -> None:
    net = Scalar(1.0)
    LowPrecisionWeights(net, BF16, "master")
    naive = nn.Parameter(torch.ones(256, dtype=BF16))
    for _ in range(512):
        (net().float().sum() / 512).backward()
        (naive.float().sum() / 512).backward()
    (param,) = master_params(net)
    assert (param.grad == 1.0).all() and param.grad.dtype is FP32 and net.weight.grad is param.grad
    assert (naive.grad == 0.5).all()


def test_a_loss_scale_of_65536_keeps_gradients_that_fp16_would_lose() -> None:
    run = Run("o2", net=nn.Sequential(nn.Linear(36, 16), nn.Linear(16, 3)))
    x = torch.randn(4, 36)
    F.mse_loss(run.net(x), torch.zeros(4, 3)).mul(1e-8).backward()
    assert all((p.grad == 0).all() for p in master_params(run.net)[:2])
    run.optimizer.zero_grad()
    run.amp.backward(F.mse_loss(run.net(x), torch.zeros(4, 3)) * 1e-8)
    assert all((p.grad != 0).any() for p in master_params(run.net))
    assert run.step(clip=Clip.norm(1.0)).taken


@pytest.mark.parametrize("mode", MODES)
def test_adaptive_clipping_sees_the_weights(mode: str) -> None:
    run = Run(mode, optimizer="sgd")
    before = fp32_copy(run.net)[4]
    assert run.step(run.loss(0), clip=Clip.adaptive(0.05)).taken
    units = before.weight.norm(dim=1)
    moved = (run.net.state_dict()["4.weight"] - before.weight).norm(dim=1)
    assert moved.tolist() == pytest.approx((0.1 * 0.05 * units).tolist(), rel=0.3)  # lr times factor times norm


# --- memory


def test_bytes_per_weight_between_steps() -> None:
    """What a weight needs besides its gradient, which is fp32 in all modes, and Adam's moments: 8 bytes."""
    expected = {"fp32": 4, "o2": 6, "o3": 2, "bf16_master": 6, "bf16_stochastic": 2, "bf16_nearest": 2}
    expected["bf16_remainder"] = 4
    for mode, num_bytes in expected.items():
        run = Run(mode, net=nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)))
        x = torch.randn(4, 100)
        run.step(run.net(x).square().mean())
        config = replace(run.amp.config, update=None if run.weights is None else MODES[mode][1])
        weights = memory_of([run.net], [run.optimizer], None, config).weights
        assert weights == num_bytes * 2 * 10_100
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in (*run.net.parameters(), *master_params(run.net))
        }
        rest = 2 * 2 * 10_100 if mode == "bf16_remainder" else 0
        assert sum(storages.values()) + rest - weights in (0, 4)
        moments = [v for state in run.optimizer.state.values() for k, v in state.items() if k != "step"]
        assert sum(v.numel() * v.element_size() for v in moments) == 8 * 2 * 10_100


def test_a_weight_that_has_no_memory_reads_as_nan_and_not_as_something_old() -> None:
    run = Run("bf16_stochastic")
    run.train(range(2))
    for param, low in zip(master_params(run.net), run.net.parameters(), strict=True):
        assert param.shape == low.shape and (param is low or param.isnan().all())
    assert not any(v.isnan().any() for v in fp32_values(run.net.parameters()))


# --- several ranks


def two_ranks(rank: int, mode: str) -> dict[str, Any]:
    torch.manual_seed(rank)  # begins differently on each
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), keep_fp32(nn.Linear(16, 16)), nn.Linear(16, 3))
    run = Run(mode, net=net, optimizer="sgd")  # Adam makes whole steps of what is rounding in a gradient near 0
    start = [v.clone() for v in run.net.state_dict().values()]
    for i in range(5):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(i))[4 * rank : 4 * rank + 4]
        run.step(run.net(x).square().mean() / 2)
    return {"start": start, "end": [v.clone() for v in run.net.state_dict().values()]}


def sum_of_buckets(rank: int) -> list[Tensor]:
    import amp_core.lowp.masters

    amp_core.lowp.masters._BUCKET = 50
    net = nn.Sequential(nn.Linear(4, 10), nn.Linear(10, 4), nn.BatchNorm1d(4))
    weights = LowPrecisionWeights(net, BF16, "master")
    params = master_params(net)
    for index, param in enumerate(params):
        param.grad = torch.full_like(param, float(10**index + rank))
    foreign = nn.Parameter(torch.zeros(2))
    foreign.grad = torch.ones(2)
    weights.reduce_([*params, foreign])
    return [p.grad for p in (*params, foreign)]


@pytest.mark.slow
def test_gradients_of_a_network_are_summed_over_ranks_in_pieces(on_ranks: OnRanks) -> None:
    for grads in on_ranks(sum_of_buckets):
        assert [grad.unique().tolist() for grad in grads] == [[2.0 * 10**i + 1] for i in range(6)] + [[1.0]]


@pytest.mark.parametrize("mode", rows(["o2", "bf16_stochastic", "bf16_remainder"], "bf16_stochastic"))
def test_two_ranks_stay_alike_and_equal_one(mode: str, on_ranks: OnRanks) -> None:
    first, second = on_ranks(two_ranks, mode)
    assert same(first["start"], second["start"]) and same(first["end"], second["end"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), keep_fp32(nn.Linear(16, 16)), nn.Linear(16, 3))
    run = Run(mode, net=net, optimizer="sgd")  # Adam makes whole steps of what is rounding in a gradient near 0
    for i in range(5):
        run.step(run.net(torch.randn(8, 8, generator=torch.Generator().manual_seed(i))).square().mean())
    for alone, together, start in zip(run.net.state_dict().values(), first["end"], first["start"], strict=True):
        # 16-bit gradients of 5 steps, after some 4 roundings each, and weights of up to 1 at the other neighbour.
        assert (alone - together).abs().max() < 20 * 2**-8 * (together - start).abs().max() + 2**-8


# --- a bfloat16 weight and the 16 bits that it lacks


def test_a_weight_and_its_remainder_are_the_fp32_number_bit_for_bit() -> None:
    """A million bit patterns, with infinities and subnormal numbers; the weight is the nearest bfloat16, but for ties."""
    bits = torch.randint(-(2**31), 2**31, (10**6,), generator=torch.Generator().manual_seed(0)).int()
    bits[:65536] = torch.arange(-32768, 32768).int() << 16 | 0x8000  # ties
    value = torch.cat([bits.view(FP32), torch.tensor([INF, -INF, 0.0, -0.0, 3.4028235e38, 1e-45])])
    value = value[~value.isnan()]
    low, rest = halve(value)
    assert whole(low, rest).view(torch.int32).equal(value.view(torch.int32))
    off = low.view(torch.int16) != value.to(BF16).view(torch.int16)
    ties = value.view(torch.int32) & 0xFFFF == 0x8000
    assert off.any() and not (off & ~ties).any() and abs(off.sum() / ties.sum() - 0.5) < 0.01


def test_a_run_with_remainders_has_every_bit_of_one_with_fp32_masters() -> None:
    """Of masters beside bfloat16 copies of the same rounding always; of `master`, whose copies round ties to even, until a
    weight is a tie: one in 2^17 steps of a weight."""

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))

    def loss(net: nn.Module, x: Tensor, i: int) -> Tensor:
        return F.cross_entropy(net(x).float(), torch.arange(8) % 3) * (INF if i == 3 else 1.0)

    inputs = torch.randn(60, 8, 16)
    ours, masters, low = Run("bf16_remainder", network()), network(), network().bfloat16()
    by_hand = OPTIMIZERS["adam"](masters.parameters())
    for i, x in enumerate(inputs):
        for p, master in zip(low.parameters(), masters.parameters(), strict=True):
            p.data.copy_(halve(master.detach())[0])
        low.zero_grad()
        loss(low, x.bfloat16(), i).backward()
        for p, master in zip(low.parameters(), masters.parameters(), strict=True):
            master.grad = p.grad.float()  # type: ignore[union-attr]
        if i != 3:
            by_hand.step()
        ours.step(loss(ours.net, x, i))
    assert same(fp32_values(ours.net.parameters()), [p.detach() for p in masters.parameters()])

    with_masters, ours, nearest = Run("bf16_master"), Run("bf16_remainder"), Run("bf16_nearest")
    for i in range(30):
        values = fp32_values(ours.net.parameters())
        if any(bool((value.view(torch.int32) & 0xFFFF == 0x8000).any()) for value in values):
            break
        assert same(fp32_values(with_masters.net.parameters()), values)
        _ = [run.train([i]) for run in (with_masters, ours, nearest)]  # type: ignore[list-item]
    assert i >= 10 and not same(fp32_values(nearest.net.parameters()), values)
