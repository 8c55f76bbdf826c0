"""One path for every mode: what is cast, what is refused, and that a bad step leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared import relative
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from amp_core import Amp, Clip, Ema, Schedule, master_params
from amp_core.config.errors import ConfigError
from amp_core.lowp.through_fp32 import in_use
from amp_core.step import settings

INF, NAN = float("inf"), float("nan")
MODES = ["fp32", "tf32", "bf16", "fp16", "fp16_capped"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16_capped": torch.float16}
every_mode = pytest.mark.parametrize("mode", MODES)


def amp_of(mode: str = "fp16", **fields: Any) -> Amp:
    return Amp.named(mode, samples=8 if mode == "fp16_capped" else None, **fields)


def sgd(net: nn.Module, lr: float = 0.1) -> Optimizer:
    return SGD(net.parameters(), lr=lr)


# --- autocast and backward


@every_mode
def test_only_activations_are_16_bit(mode: str) -> None:
    net, amp = nn.Linear(4, 4), amp_of(mode)
    optimizer = Adam(net.parameters())
    with amp.autocast():
        y = net(torch.randn(8, 4))
        loss = F.mse_loss(y, torch.zeros(8, 4))
    assert y.dtype == DTYPES.get(mode, torch.float32) and loss.dtype == torch.float32
    amp.backward(loss)
    amp.step(optimizer)
    states = [x for state in optimizer.state.values() for x in state.values()]
    assert {x.dtype for p in net.parameters() for x in (p, p.grad, *states)} == {torch.float32}
    with torch.no_grad(), amp.autocast():  # evaluation too
        assert net(torch.randn(8, 4)).dtype == y.dtype


class Probe(torch.autograd.Function):
    """Notes whether autocast is on in the backward pass."""

    seen: bool | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Probe.seen = torch.is_autocast_enabled("cpu")
        return grad


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_backward_runs_outside_of_autocast_even_when_called_inside(mode: str) -> None:
    amp, x = amp_of(mode), torch.randn(3, requires_grad=True)
    with amp.autocast():
        Probe.apply(x).sum().backward()
        assert Probe.seen  # the usual way: an fp32 island's backward would run in 16 bits
        amp.backward(Probe.apply(x).sum())
        assert not Probe.seen
        amp.grad(Probe.apply(x).sum(), x)
        assert not Probe.seen and torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_a_gradient_is_never_a_view_of_the_weight_of_its_micro_batch(mode: str) -> None:
    """The gradient of a single number may be a view of what the backward pass began with, and is written to later."""
    amp = Amp.named(mode, samples=1)
    number, share = nn.Parameter(torch.zeros(1)), torch.tensor(0.25)
    for _ in range(2):
        amp.backward(number.reshape(()), share)
    assert number.grad is not None and share == 0.25
    number.grad.zero_()
    assert share == 0.25 and amp.scale > 0


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_inside_a_region_leaves_no_stale_weights_in_its_cache(fused: bool) -> None:
    net, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    with torch.no_grad():
        net.weight.fill_(1.0)
    with torch.autocast("cpu", torch.float16):
        net(x)
        net.weight.data += 5
        assert net(x).item() == 1.0  # the usual way
    amp, optimizer = amp_of(init_scale=4.0), SGD(net.parameters(), lr=1.0, fused=fused)
    with amp.autocast():
        amp.backward(net(x).sum())
        amp.step(optimizer)
        assert net(x).item() == net.weight.item() == 5.0


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_loss_of_any_dtype_is_scaled_in_fp32(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.full(shape, 3.0, requires_grad=True)
    amp = amp_of(init_scale=2.0**15)  # the largest gradient that an fp16 loss can have; the loss itself would be inf
    amp.backward(weight.to(dtype) * 1.0)
    amp.step(SGD([weight], lr=1.0))
    assert weight.item() == 2.0
    if shape and dtype == torch.float16:  # the usual way: 65536 does not fit
        assert GradScaler("cpu", 2.0**15).scale(weight.half()).isinf().all()


# --- gradients that do not come from a loss


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_external_gradient_equals_the_loss_it_came_from(mode: str) -> None:
    net, x = nn.Linear(8, 4), torch.randn(16, 8)
    outside = torch.randn(16, 4) * 1e-7  # below fp16's smallest number: lost unless it is scaled first
    results = []
    for as_loss in (True, False):
        amp = amp_of(mode)
        net.zero_grad()
        with amp.autocast():
            features = net(x)
            loss = (features.float() * outside).sum()
        amp.backward(loss) if as_loss else amp.backward(features, outside)
        amp.unscale_(sgd(net))
        results.append(net.weight.grad.clone())
    assert torch.equal(*results)
    assert relative(results[0], outside.T @ x) < 1e-2  # 16-bit rounding
    features = net(x).half()
    features.backward(outside.half())
    assert outside.half().count_nonzero() < outside.numel()


# --- a bad window leaves no trace

NO_TRACE: dict[str, Callable[..., Optimizer]] = {
    "sgd_fused": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True),
    "sgd_dampened_fused": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.5, fused=True),
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "adamw_fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adam_amsgrad_fused": lambda p: Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True),
    "adagrad_fused": lambda p: Adagrad(p, lr=0.01, lr_decay=0.1, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "adafactor": lambda p: Adafactor(p, lr=0.01),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, centered=True),
    "adadelta": lambda p: Adadelta(p),
}


def flat(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """Every number of a nest of state dicts, by its path, as a tensor."""
    if isinstance(state, dict):
        return {key: value for name, part in state.items() for key, value in flat(part, f"{prefix}.{name}").items()}
    if isinstance(state, list):
        return flat(dict(enumerate(state)), prefix)
    return {prefix: torch.as_tensor(state)} if isinstance(state, (int, float, Tensor)) else {}


class Statistics(nn.BatchNorm1d):
    """And buffers of every kind, each changed by a forward pass in its own way."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        kinds = {"in_place": torch.zeros(3), "replaced": torch.zeros(2, 2), "number": torch.tensor(0)}
        kinds |= {"narrow": torch.zeros(5, dtype=torch.float16), "with_gaps": torch.zeros(4, 6)[:, ::2]}
        kinds |= {"transposed": torch.zeros(2, 3).t(), "empty": torch.zeros(0)}
        for key, value in kinds.items():
            self.register_buffer(key, value)

    def forward(self, x: Tensor) -> Tensor:
        for key in ("in_place", "number", "narrow", "with_gaps", "transposed"):
            getattr(self, key).add_(1)
        self.replaced = self.replaced + 1
        return super().forward(x)


def run(mode: str, name: str, batches: list[Tensor], where: str = "batch", clip: Any = None, guard: bool = True) -> Any:
    """Everything that training on `batches` leaves behind; in "gradient" an inf in the batch becomes one there."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), Statistics(8), nn.ReLU(), nn.Linear(8, 1))
    # Static: halving the scale is exact only while no fp16 gradient is subnormal.
    amp = amp_of(mode, **({"dynamic": False, "init_scale": 1024.0} if mode.startswith("fp16") else {}))
    optimizer = NO_TRACE[name](net.parameters())
    schedule = Schedule(optimizer, lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n), 20)
    ema = Ema(net, 0.9)
    if guard:
        amp.guard(net)
    for x in batches:
        bad = not bool(x.isfinite().all())
        with amp.autocast():
            loss = net(x.nan_to_num(1.0, 1.0, 1.0) if where == "gradient" else x).float().square().mean()
        amp.backward(loss)
        if bad and where == "gradient":
            net[3].bias.grad.fill_(NAN)
        report = amp.step(optimizer, clip)
        assert bool(report.taken) == (not bad) == bool(report.grad_norm.isfinite())
        assert report.taken_on_host in (None, not bad)
        amp.update()
        optimizer.zero_grad()
        schedule.advance(report)
        ema.update(report)
    parts = {"net": net, "optimizer": optimizer, "schedule": schedule, "ema": ema, "amp": amp}
    state = flat({key: part.state_dict() for key, part in parts.items()} | {"rate": schedule.rate})
    return state, net


@pytest.mark.one_in(6)
@pytest.mark.parametrize("where", ["batch", "gradient"])
@pytest.mark.parametrize("name", NO_TRACE)
@every_mode
def test_a_bad_window_leaves_no_trace(mode: str, name: str, where: str) -> None:
    """Weights, moments, step counts, rate, average and running statistics: bitwise. The very first step included."""
    good = [torch.randn(8, 4) for _ in range(3)]
    bad = torch.full((8, 4), INF)
    for clip in (None, Clip.norm(0.1)):
        seen, _ = run(mode, name, [bad, good[0], bad, good[1], good[2], bad], where, clip)
        never, _ = run(mode, name, good, where, clip)
        assert seen.keys() == never.keys()
        assert not [key for key in seen if not torch.equal(seen[key], never[key])]


@pytest.mark.parametrize("clip", [None, Clip.norm(0.1)], ids=["no clip", "clip"])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["fp16", "o2", "bf16_pure", "bf16", "fp32"])
def test_weights_of_16_bits_are_stepped_by_gradients_that_are_not_scaled(mode, kind, clip):
    """As by hand; where they would be unscaled they are refused. Beside a network with fp32 sides too."""
    amp, net = amp_of(mode, **({"init_scale": 1024.0} if mode in ("fp16", "o2") else {})), nn.Linear(2, 2)
    if mode in ("o2", "bf16_pure"):
        amp.prepare(net)
    main = sgd(nn.ParameterList(master_params(net)))
    ours, theirs = (nn.Parameter(torch.tensor([1.0, 2.0], dtype=kind)) for _ in range(2))
    optimizer, by_hand = (SGD([p], lr=0.5, fused=True) for p in (ours, theirs))
    for value in (3.0, INF, 4.0):
        with amp.autocast():
            loss = net(torch.ones(1, 2)).float().sum()
        amp.backward(loss)
        ours.grad, theirs.grad = (torch.tensor([value, -value], dtype=kind) for _ in range(2))
        if amp.scaler.policy is not None:
            with pytest.raises(TypeError, match="cannot be unscaled without loss"):
                amp.step(optimizer)
        report = amp.step([main, optimizer], clip, unscaled=[optimizer])
        amp.update()
        amp.zero_grad(main, optimizer)
        assert bool(report.taken) == (value != INF)
        if report.taken:
            if clip is not None:
                nn.utils.clip_grad_norm_([theirs], 0.1)
            by_hand.step()
    # A factor of clipping is rounded once to 16 bits: two steps of at most 0.05, each off by half a digit of 2.
    bound = 0.0 if clip is None else 4 * torch.finfo(kind).eps
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=bound)


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value)), "file": through_a_file}
every_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


class Loop:
    """All parts of a loop, to be copied together."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.amp, self.ema = amp_of("fp16", init_scale=1024.0), Ema(self.net, 0.5)
        self.amp.guard(self.net)
        self.optimizer = SGD(self.net.parameters(), lr=0.1, momentum=0.9, fused=True)

    def window(self, x: Tensor) -> None:
        with self.amp.autocast():
            loss = self.net(x).float().square().mean()
        self.amp.backward(loss)
        report = self.amp.step(self.optimizer, Clip.norm(1.0))
        self.amp.update()
        self.amp.zero_grad(self.optimizer)
        self.ema.update(report)

    def state(self) -> list[Tensor]:
        amp = self.amp
        tensors = [*self.net.state_dict().values(), *self.ema.state_dict().values(), self.ema.num_taken]
        return [t.clone() for t in (*tensors, amp.scaler.scale, amp.num_skipped, amp.num_consecutive_skips)]


@every_copy
def test_a_copy_of_a_loop_goes_on_as_the_loop_does(copied: Callable[[Any], Any]) -> None:
    loop, bad = Loop(), torch.full((4, 2), INF)
    batches = [torch.randn(4, 2) for _ in range(3)]
    loop.window(batches[0]), loop.window(bad)
    twin, before = copied(loop), loop.state()
    for x in (batches[1], bad, bad, batches[2], bad):
        twin.window(x)
    assert all(map(torch.equal, loop.state(), before))
    assert [int(twin.amp.num_skipped), int(twin.amp.num_consecutive_skips), twin.amp.scale] == [4, 1, 64.0]
    for x in (batches[1], bad, bad, batches[2], bad):
        loop.window(x)
    assert all(map(torch.equal, loop.state(), twin.state()))


@every_copy
def test_what_is_copied_alone_has_no_guard_and_no_networks(copied: Callable[[Any], Any]) -> None:
    loop = Loop()
    net, amp = copied(loop.net), copied(loop.amp)
    amp.num_skipped.add_(1)
    assert int(loop.amp.num_skipped) == 0
    loop.amp.backward(net(torch.randn(4, 2)).sum())
    loop.window(torch.full((4, 2), INF))
    assert net[1].num_batches_tracked == 1 and loop.net[1].num_batches_tracked == 0
    low, net = amp_of("bf16_pure"), nn.Linear(2, 2)
    low.prepare(net)
    copied(net)
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        copied(low)


def test_written_after_unscaling_is_checked_again() -> None:
    """GradScaler looks once: what becomes NaN after `unscale_` goes into the weights."""
    for stock in (True, False):
        weight = torch.zeros(2, requires_grad=True)
        optimizer, scaler = SGD([weight], lr=1.0), GradScaler("cpu") if stock else amp_of()
        scaler.scale(weight.sum()).backward() if stock else scaler.backward(weight.sum())
        scaler.unscale_(optimizer)
        assert weight.grad.eq(1.0).all()
        weight.grad[0] = NAN
        scaler.step(optimizer)
        scaler.update()
        assert weight.isnan().any() == stock
        assert (scaler.get_scale() if stock else scaler.scale) == (65536 if stock else 32768)


# --- what is refused


def ready(mode: str = "fp16") -> tuple[Amp, Optimizer]:
    weight, amp = torch.zeros(2, requires_grad=True), amp_of(mode)
    amp.backward(weight.sum())
    return amp, SGD([weight], lr=1.0)


MISUSES: dict[str, Callable[[Amp, Optimizer], object]] = {
    "a second step": lambda amp, opt: (amp.step(opt), amp.step(opt)),
    "update without a step": lambda amp, opt: amp.update(),
    "a second update": lambda amp, opt: (amp.step(opt), amp.update(), amp.update()),
    "a second unscale": lambda amp, opt: (amp.unscale_(opt), amp.unscale_(opt)),
    "unscale after the step": lambda amp, opt: (amp.step(opt), amp.unscale_(opt)),
    "state between step and update": lambda amp, opt: (amp.step(opt), amp.state_dict()),
    "backward after unscale": lambda amp, opt: (amp.unscale_(opt), amp.backward(opt.param_groups[0]["params"][0].sum())),
}  # fmt: skip


@pytest.mark.parametrize("misuse", MISUSES)
@every_mode
def test_misuse_is_refused_in_every_mode(mode: str, misuse: str) -> None:
    with pytest.raises(RuntimeError):
        MISUSES[misuse](*ready(mode))


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_grad_is_unscaled_and_none_for_an_unused_input(mode: str) -> None:
    used, unused = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    found, nothing = Amp.named(mode).grad(2 * used, [used, unused], allow_unused=True)
    assert found.eq(2).all() and nothing is None


def test_prepare_names_trained_16_bit_weights_and_draws_no_random_number() -> None:
    net = nn.Sequential(nn.Conv2d(16, 32, 4, 4), nn.Linear(2, 2).half())
    state = torch.get_rng_state()
    with pytest.raises(ConfigError, match=r"1\.weight, 1\.bias are trained and stored in 16 bits"):
        Amp.named("fp16").prepare(net)
    wrong = [ConfigError] if torch.cpu._is_amx_tile_supported() else []
    with contextlib.suppress(*wrong):  # the convolution, which is tried on noise
        Amp.named("bf16").prepare(net[:1])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("fused", [True, False])
@every_mode
def test_no_gradient_at_all_is_a_recorded_no_op(mode: str, fused: bool) -> None:
    weight = torch.ones(2, requires_grad=True)
    amp, optimizer = amp_of(mode), AdamW([weight], fused=fused)
    before = amp.state_dict()
    report = amp.step(optimizer, Clip.norm(1.0))
    amp.update()
    assert not report.taken and weight.eq(1.0).all() and amp.state_dict() == before
    amp.backward(weight.sum())  # and training goes on
    assert amp.step(optimizer).taken


@pytest.mark.parametrize("fused", [True, False])
def test_a_finite_scaled_gradient_that_unscales_to_inf_is_skipped(fused: bool) -> None:
    """A scale of 2^-20 and a gradient of 1e41: GradScaler looks before it divides."""
    for stock in (True, False):
        weight = torch.zeros(1, requires_grad=True)
        scale = {"init_scale": 2.0**-20}
        scaler: Any = GradScaler("cpu", **scale) if stock else amp_of(min_scale=2.0**-30, **scale)
        loss = (weight * 1e20 * 1e21).sum()
        scaler.scale(loss).backward() if stock else scaler.backward(loss)
        scaler.step(SGD([weight], lr=1.0, fused=fused))
        assert (not weight.isfinite()) == stock


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_where_grad_scaler_switches_itself_off() -> None:
    with pytest.raises(ConfigError, match="cuda"):
        Amp.named("fp16", device="cuda")
    with pytest.warns(UserWarning, match="not available"):
        assert not GradScaler("cuda").is_enabled()


def test_what_is_set_for_the_process_can_be_undone() -> None:
    """TF32, CUDA's op policy and fp32 sums in fp16 convolutions."""

    def in_force() -> tuple[Any, ...]:
        precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        with torch.autocast("cpu", dtype=torch.float16):
            return (
                precision,
                tf32,
                torch.ones(2).softmax(0).dtype,
                torch.ones(2).half().softmax(0).dtype,
                bool(in_use()),
            )

    settings.restore()
    before = in_force()
    settings.set_tf32("high")
    settings.set_tf32("highest")
    Amp.named("fp16", op_policy="cuda")
    assert in_force() == ("highest", False, torch.float32, torch.float32, True) != before
    Amp.restore_process()
    Amp.restore_process()
    assert in_force() == before


def test_an_unknown_mode_or_field_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="fp16"):
        amp_of("fp61")
    with pytest.raises(ConfigError, match="init_scale"):
        amp_of(init_scael=1.0)
