"""The doctor in programs of other people: any loop, masks, causes that only a rerun in fp32 tells apart."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import importlib
import math
import re
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_core import Amp, Doctor, keep_fp32, master_params
from amp_core.doctor.diagnosis import BY_HAND
from amp_core.doctor.trace import Trace
from amp_core.doctor.values import Range, is_finite

INF = float("inf")
MIN32 = torch.finfo(torch.float32).min


def network(factor=1.0):
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        net[0].weight.mul_(factor)
    return net


def images():
    return torch.randn(6, 8), torch.randint(4, (6,))


def state_of(net, optimizer):
    return copy.deepcopy((net.state_dict(), optimizer.state_dict(), [p.grad for p in net.parameters()]))


def same(a, b):
    flat = [torch.utils._pytree.tree_leaves(each) for each in (a, b)]
    return len(flat[0]) == len(flat[1]) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(*flat, strict=True)
    )


# --- loops that do not know Amp ---------------------------------------------------------------------------------------


def torchs_loop(net, optimizer, batch, *, scaler=None, first=True):
    def step():
        if first:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(net(batch[0]), batch[1])
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if not first:
            optimizer.zero_grad()

    return step


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, lambda p: torch.optim.Adam(p, fused=True)])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_torchs_own_loop_is_diagnosed_and_left_as_it_was(make, scaled, first):
    net, batch = network(1.5e5), images()
    optimizer, scaler = make(net.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
    net(batch[0]).sum().backward()  # gradients of an earlier window, which are not this one's
    before = state_of(net, optimizer)
    diagnosis = Doctor(Amp.named("fp16"), net).locate(
        torchs_loop(net, optimizer, batch, scaler=scaler if scaled else None, first=first), batch
    )
    assert diagnosis is not None and (diagnosis.module, diagnosis.cause) == ("0", "overflow in a product")
    assert same(state_of(net, optimizer), before) and (not scaled or scaler.get_scale() == 8.0)
    change = 'torch.autocast("cpu", dtype=torch.bfloat16)'
    assert change in [fix.python for fix in diagnosis.fixes]
    # Without the doctor the weights are stepped: what is seen above is its doing.
    torchs_loop(net, optimizer, batch)()
    assert not same(state_of(net, optimizer)[0], before[0])


def test_an_overflow_in_the_backward_pass_of_torchs_loop_is_seen():
    """GradScaler does not call the optimizer then."""
    net, batch = network(), images()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    step = torchs_loop(net, optimizer, batch, scaler=scaler)
    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, batch)
    assert diagnosis is not None and diagnosis.phase == "backward" and scaler.get_scale() == 2.0**30
    assert Doctor(Amp.named("fp16"), net).locate(torchs_loop(net, optimizer, batch), batch) is None


def test_what_tells_nothing_is_refused_and_nothing_goes_on_watching():
    net, (x, _) = network(), images()
    with pytest.raises(RuntimeError, match=r"told of no loss.*expected it to call amp\.backward\(loss\)"):
        Doctor(Amp.named("bf16"), net).locate(lambda: net(x).sum())
    assert not isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), Trace)


def test_a_step_that_raises_leaves_everything_as_it_was():
    net, (x, _) = network(), images()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before, random = state_of(net, optimizer), torch.get_rng_state()

    def step():
        loss = F.dropout(net(x)).sum()
        loss.backward()
        raise ArithmeticError("of another kind")

    with pytest.raises(ArithmeticError, match="of another kind") as raised:
        Doctor(Amp.named("bf16"), net).locate(step)
    assert raised.tb is not None  # it holds the frame of locate, and with it the search
    assert not isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), Trace)
    assert torch.Tensor.backward.__module__ == "torch._tensor"
    assert same(state_of(net, optimizer), before) and torch.equal(torch.get_rng_state(), random)


def turns_back(loss):
    return bool(torch.isfinite(loss))


def raises(loss):
    if not math.isfinite(loss.item()):
        raise ArithmeticError("the loss is NaN")
    return True


def asserts(loss):
    assert not loss.isnan(), "NaN"
    return True


class Asserts(nn.Module):
    def forward(self, x):
        assert torch.isfinite(x).all(), "NaN"
        return x


def test_an_assertion_within_a_network_does_not_keep_it_from_a_diagnosis():
    net, batch = network(1.5e5).insert(3, Asserts()), images()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step():
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(net(batch[0]), batch[1])
        loss.backward()
        optimizer.step()

    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, batch)
    assert diagnosis is not None and (diagnosis.module, diagnosis.cause) == ("0", "overflow in a product")


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("guard", [turns_back, raises, asserts])
def test_a_guard_against_a_loss_that_is_nan_does_not_keep_it_from_a_diagnosis(guard, told):
    net, batch = network(1.5e5), images()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = state_of(net, optimizer)

    def step():
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(net(batch[0]), batch[1])
        if told:
            loss.backward()
        if guard(loss):
            if not told:
                loss.backward()
            optimizer.step()

    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, batch)
    assert diagnosis is not None and (diagnosis.module, diagnosis.cause) == ("0", "overflow in a product")
    assert diagnosis.islands == ["0"] and diagnosis.fixes[0].verified and same(state_of(net, optimizer), before)


def test_a_buffer_that_a_step_replaces_is_put_back():
    class Replaces(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.mean = nn.Linear(8, 4), nn.Buffer(torch.zeros(8))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return self.inner(x - self.mean)

    net, (x, _) = Replaces(), images()
    buffer, kept = net.mean, net.mean.clone()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step():
        net(x).sum().backward()
        optimizer.step()

    assert Doctor(Amp.named("fp32"), net).locate(step) is None
    assert net.mean is buffer and torch.equal(buffer, kept)


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("remembers", [True, False])
def test_a_window_is_asked_about_after_it_was_computed(remembers, is_own):
    """One of 64 dropout masks makes it infinite: the random state from before the window decides."""
    net, generators = nn.Linear(4, 1), [torch.Generator()] if is_own else []
    amp = Amp.named("fp32")
    doctor, optimizer = Doctor(amp, net), torch.optim.SGD(net.parameters(), 0.0)

    def step():
        kept = torch.rand(6, generator=generators[0] if is_own else None) < 0.5
        loss = net(torch.ones(1, 4)).sum() * (INF if bool(kept.all()) else 1.0)
        amp.backward(loss)
        report = amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)
        return report

    for _ in range(1000):
        if remembers or is_own:
            doctor.remember(*(generators if remembers else ()))
        if not bool(step().taken):
            break
    states = [each.get_state() for each in generators]
    assert (doctor.locate(step) is not None) == remembers
    assert all(torch.equal(each.get_state(), state) for each, state in zip(generators, states, strict=True))


def test_an_optimizer_with_a_closure_is_refused():
    net, (x, _) = network(), images()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loss():
        loss = net(x).sum()
        loss.backward()
        return loss

    with pytest.raises(TypeError, match="was given a closure"):
        Doctor(Amp.named("fp32"), net).locate(lambda: optimizer.step(loss))
    lbfgs = torch.optim.LBFGS(net.parameters())
    with pytest.raises(TypeError, match="closure"):
        Doctor(Amp.named("fp32"), net).locate(lambda: lbfgs.step(loss))


@pytest.mark.parametrize("factor, scale, floor", [(1.5e5, 1024.0, 1.0), (1.0, 2.0**40, 1.0), (1.0, 2.0**40, 2.0**40)])
def test_a_cure_is_a_line_of_the_program(factor, scale, floor):
    """What is printed is run, and mends the window."""
    model, batch = network(factor), images()
    amp = Amp.named("fp16", init_scale=scale, min_scale=floor, max_scale=2.0**60)

    def diagnose():
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step():
            with amp.autocast():
                loss = F.cross_entropy(model(batch[0]), batch[1])
            amp.backward(loss)
            amp.step(optimizer)
            amp.update()
            amp.zero_grad(optimizer)

        return Doctor(amp, model).locate(step, batch)

    diagnosis = diagnose()
    assert diagnosis is not None
    line = diagnosis.fixes[0].python
    assert (
        diagnosis.fixes[0].verified and f"     {line}\n" in f"{diagnosis}\n" and "amp.keep_fp32" not in str(diagnosis)
    )
    found = {"keep_fp32": keep_fp32, "Amp": Amp, "model": model}
    exec(line if "keep_fp32" in line else f"amp = {line}", found)
    amp = found.get("amp", amp)
    assert diagnose() is None


@pytest.mark.parametrize("mode", ["fp16", "bf16", "fp32"])
def test_bf16_is_no_advice_for_a_loss_that_is_cast_to_fp16_by_hand(mode):
    diagnosis = located(nn.Linear(8, 4), (torch.randn(6, 8),), mode, lambda y: (y.float() * 1e6).half().mean().float())
    assert diagnosis is not None and diagnosis.cause == "overflow in a cast"
    assert [fix.text for fix in diagnosis.fixes] == [BY_HAND.text]


class HalfExp(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float16)
    def forward(ctx, y):
        return (y * 0 + 14).exp()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("kind", ["autocast", "function", "model"])
def test_bf16_is_advised_where_autocast_chose_fp16_and_not_where_the_program_did(kind):
    net, x = nn.Linear(8, 4), torch.full((6, 8), 10.0)
    if kind == "model":
        net, x = net.half(), x.half()
    with torch.no_grad():
        net.weight.fill_(1.0 if kind == "function" else 6e4)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)

    def finds(dtype):
        def step():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=kind != "model"):
                y = net(x)
                loss = (HalfExp.apply(y) if kind == "function" else y).float().mean()
            loss.backward()
            optimizer.step()

        return Doctor(Amp.named("o3" if kind == "model" else "fp16"), net).locate(step, x)

    default = torch.get_autocast_dtype("cpu")
    diagnosis = finds(torch.float16)
    assert torch.get_autocast_dtype("cpu") == default
    assert diagnosis is not None and diagnosis.cause.startswith("overflow")
    assert (finds(torch.bfloat16) is None) is (kind == "autocast")  # what bf16 does
    assert any("bf16" in fix.text for fix in diagnosis.fixes) is (kind == "autocast")
    assert (BY_HAND in diagnosis.fixes) is (kind != "autocast")


# --- conviction -------------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Attention under a causal mask, and a layer behind it."""

    def __init__(self, factor, mask=None):
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        if mask is not None:
            self.register_buffer("mask", mask.clone())
        with torch.no_grad():
            self.last.weight.fill_(factor)

    def forward(self, x, mask=None):
        y = self.inner(x)
        mask = self.mask if mask is None else mask
        return self.last(((y @ y.mT + mask).softmax(-1) @ y).abs() + 1)


def located(net, inputs, mode="fp16", loss=lambda y: y.float().mean(), *, guarded=False, lr=0.1, **fields):
    amp = Amp.named(mode, **fields)
    if guarded:
        amp.guard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr)

    def step():
        with amp.autocast():
            result = loss(net(*inputs))
        amp.backward(result)
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)

    return Doctor(amp, net).locate(step, inputs)


CAUSAL = torch.full((4, 4), -INF).triu(1)


@pytest.mark.parametrize("place", ["buffer", "batch"])
def test_a_mask_takes_no_blame(place):
    x = torch.randn(2, 4, 8)
    net = Attends(3e4, CAUSAL if place == "buffer" else None)
    inputs = (x,) if place == "buffer" else (x, CAUSAL)
    diagnosis = located(net, inputs)
    assert diagnosis is not None and (diagnosis.module, diagnosis.cause) == ("last", "overflow in a product")
    healthy = Attends(1e-2, CAUSAL if place == "buffer" else None)
    assert located(healthy, inputs, "bf16") is None
    nothing_left = torch.full((4, 4), -INF)
    if place == "buffer":
        healthy.mask.copy_(nothing_left)
    diagnosis = located(healthy, inputs if place == "buffer" else (x, nothing_left), "bf16")
    assert diagnosis is not None and diagnosis.cause == "nothing left by a mask"


@pytest.mark.parametrize("value", [INF, float("nan"), -INF])
def test_a_bad_entry_is_convicted_if_the_window_is_finite_without_it(value):
    x = torch.randn(6, 8)
    x[2, 3] = value
    diagnosis = located(network(), (x,), "bf16")
    assert diagnosis is not None and (diagnosis.cause, diagnosis.samples) == ("bad input", [2])
    # With the fault in the first layer, too, repairing the sample would not do: the layer is named.
    diagnosis = located(network(1.5e5), (x,), "fp16")
    assert diagnosis is not None and (diagnosis.cause, diagnosis.module) == ("overflow in a product", "0")


def test_a_bad_label_is_named_with_its_sample():
    net, weights = nn.Linear(8, 1), torch.ones(6)
    weights[4] = float("nan")
    diagnosis = located(net, (torch.randn(6, 8),), "bf16", lambda y: (y[:, 0] * weights).mean())
    # Nobody said that it is of the batch.
    assert diagnosis is not None and (diagnosis.cause, diagnosis.tensor) == ("poisoned tensor", "variable weights")

    class Weighted(nn.Module):
        def forward(self, x, weights):
            return net(x)[:, 0] * weights

    amp = Amp.named("bf16")
    model, inputs = Weighted(), (torch.randn(6, 8), weights)

    def step():
        with amp.autocast():
            loss = model(*inputs).mean()
        amp.backward(loss)

    diagnosis = Doctor(amp, model).locate(step, inputs)
    assert diagnosis is not None and (diagnosis.cause, diagnosis.samples) == ("bad input", [4])


@dataclasses.dataclass(slots=True)
class Pair:
    x: object
    y: object


CONTAINERS = {
    "dataclass": (Pair, "batch.y"),
    "object": (lambda x, y: types.SimpleNamespace(x=x, y=y), "batch.y"),
    "mapping": (lambda x, y: collections.UserDict(x=x, y=y), "batch[y]"),
    "numpy": (lambda x, y: [x.numpy(), y.numpy()], "batch[1]"),
}


@pytest.mark.parametrize("kind", [*CONTAINERS, "closed over"])
def test_a_bad_label_is_found_in_any_container(kind):
    net, x, labels = nn.Linear(8, 1), torch.randn(6, 8), torch.randn(6)
    labels[4] = float("nan")
    make, name = CONTAINERS.get(kind, (lambda x, y: None, ""))
    diagnosis = Doctor(Amp.named("fp32"), net).locate(
        lambda: F.mse_loss(net(x)[:, 0], labels).backward(), make(x, labels)
    )
    assert diagnosis is not None
    if name:
        assert (diagnosis.cause, diagnosis.tensor, diagnosis.samples) == ("bad input", name, [4])
    else:  # nobody said that it is of the batch
        assert (diagnosis.cause, diagnosis.tensor) == ("poisoned tensor", "variable labels")


# --- causes -----------------------------------------------------------------------------------------------------------


def softmax_and_log(y):
    return -torch.log(torch.softmax(y, -1).to(y.dtype)).mean().float()


def half_softmax_and_log(y):
    return -torch.log((y.float() * 40).half().softmax(-1)).mean().float()


def spread(y):
    y = y + 100.0
    return (y / ((y * y).mean(0) - y.mean(0) ** 2).sqrt()).mean().float()


def too_short(y):
    labels = torch.tensor([[1, 2, 3], [1, 1, 2]])
    return F.ctc_loss(y.float().log_softmax(-1)[:, :2], labels, torch.tensor([3, 3]), torch.tensor([3, 3]))


def half_bce(y):
    with torch.autocast("cpu", enabled=False):
        return F.binary_cross_entropy(torch.sigmoid((y - 200).half()), torch.ones(16, 5).half()).float()


@pytest.mark.parametrize(
    "loss, says, not_said",
    [
        (lambda y: -torch.log(torch.sigmoid(y.float() * 0 - 200)).mean(), "logsigmoid(z)", "binary_cross"),
        (half_bce, "with_logits", "logsigmoid"),
    ],
)
def test_only_a_binary_cross_entropy_is_advised_another_one(loss, says, not_said):
    diagnosis = located(nn.Linear(8, 5), (torch.randn(16, 8),), "fp32", loss)
    text = "" if diagnosis is None else str([fix.text for fix in diagnosis.fixes])
    assert says in text and not_said not in text


def test_a_cure_names_the_network_as_the_doctor_was_given_it():
    torch.manual_seed(0)
    amp = Amp.named("fp16", init_scale=1.0)
    critic, maker = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)
    with torch.no_grad():
        critic[1].weight.fill_(3e4)
    optimizer, x = torch.optim.SGD([*maker.parameters(), *critic.parameters()], 1e-12), torch.randn(16, 8)

    def step():
        with amp.autocast():
            loss = critic(maker(x)).float().mean()
        amp.backward(loss)
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)

    diagnosis = Doctor(amp, [("maker", maker), ("critic", critic)]).locate(step, x)
    assert diagnosis is not None and diagnosis.module == "critic.1"
    assert diagnosis.fixes[0].verified and diagnosis.fixes[0].python == 'keep_fp32(critic, ["1"])'
    keep_fp32(critic, ["1"])  # as it is printed
    assert Doctor(amp, [("maker", maker), ("critic", critic)]).locate(step, x) is None


@pytest.mark.parametrize(
    "loss, mode, cause, says",
    [
        (
            lambda y: -torch.log(1 - torch.sigmoid(30 + y.float())).mean(),
            "bf16",
            "sigmoid before a logarithm",
            "float32",
        ),
        (spread, "bf16", "cancellation in 16 bits", "rounding errors of its two numbers in 16 bits (sub in bfloat16"),
        (spread, "fp16", "cancellation in 16 bits", "rounding errors of its two numbers in 16 bits (sub in float16"),
        (lambda y: torch.log((y * 1e-5) ** 2).mean(), "fp16", "underflow in 16 bits", "not in float64"),
        (lambda y: torch.log(y * 0).mean(), "fp16", "division or logarithm of zero", "window is not finite either"),
        (lambda y: torch.log(F.softplus(y * 0 - 18)).mean(), "fp16", "underflow in 16 bits", "softplus in float16"),
        (
            lambda y: torch.acos((y * 0 + 0.99976) * 1.0005 * 0.9998 * 0.9998).float().mean(),
            "fp16",
            "rounding in 16 bits",
            "acos was given a number at the edge of its domain or beyond",
        ),
        (half_softmax_and_log, "fp16", "underflow in 16 bits", "window is not finite either"),
        (half_softmax_and_log, "fp32", "underflow in 16 bits", "window is not finite either"),
        # The eps is lost, and zeros that it does not guard end in a division.
        (
            lambda y: ((y / (y.norm(dim=1, keepdim=True) + 1e-12)) * 0).sqrt().sum(),
            "fp16",
            "division or logarithm of zero",
            "is not finite either",
        ),
        (lambda y: (y * 0 / ((y * 0).abs() + 1e-12)).sum(), "fp16", "eps lost in 16 bits", "the window is finite"),
        # In float64 exp(-200) is 1e-87, and in fp32 0; a zero that float64 has, too, is none of fp32.
        (
            lambda y: torch.log((y.float() * 0 - 200).exp()).mean(),
            "fp32",
            "underflow in fp32",
            "exp in float32 at tests",
        ),
        (
            lambda y: torch.log((y.float() * 0 - 200).exp()).mean(),
            "bf16",
            "underflow in fp32",
            "is 0 there, not in float64",
        ),
        (
            lambda y: torch.log(torch.det((y.float()[:5] * 0 + torch.eye(5)) * 1e-10)),
            "fp32",
            "underflow in fp32",
            "slogdet",
        ),
        (lambda y: torch.log((y.float() * 0 - 1e4).exp()).mean(), "fp32", "division or logarithm of zero", "a zero"),
        (lambda y: y[:0].mean(), "fp16", "division or logarithm of zero", "leave out what has no elements"),
        (too_short, "bf16", "targets longer than their inputs", "by definition"),
    ],
)
def test_causes_are_told_apart(loss, mode, cause, says):
    torch.manual_seed(0)
    diagnosis = located(
        nn.Linear(8, 5), (torch.randn(3, 4, 8) if loss is too_short else torch.randn(16, 8),), mode, loss
    )
    assert diagnosis is not None and diagnosis.cause == cause and says in str(diagnosis)
    assert "any precision" not in str(diagnosis) and all("bf16" not in fix.python for fix in diagnosis.fixes)


def difference_of_casts(y):
    one = y * 0 + 1.001
    return (1 / (one.bfloat16() - torch.ones(1, dtype=torch.bfloat16)).float()).mean()


def angle_of_casts(y):
    cosine = (y * 0 + 0.9999).bfloat16()
    return torch.acos(cosine).float().mean()


def variance_of_casts(y):
    half = (y / y.detach().std() * 0.05 + 12).half()
    return (half - half.mean(0)).mul(((half * half).mean(0) - half.mean(0) ** 2).rsqrt()).float().mean()


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "loss, cause",
    [
        (difference_of_casts, "cancellation in 16 bits"),
        (angle_of_casts, "rounding in 16 bits"),
        (variance_of_casts, "cancellation in 16 bits"),
        (lambda y: torch.log(y.half().float() * 0).mean(), "division or logarithm of zero"),
        (lambda y: (1 / (1.001 * torch.ones(1)).bfloat16().floor().sub(1).float()).mean() * y.mean(), "division"),
    ],
)
def test_what_casts_of_the_program_round_is_told_from_a_zero(loss, cause, mode):
    torch.manual_seed(0)
    diagnosis = located(nn.Linear(8, 5), (torch.randn(16, 8),), mode, loss)
    assert diagnosis is not None and diagnosis.cause.startswith(cause)
    by_casts = "16 bits" in cause
    assert ("without the casts that the program itself makes it is" in diagnosis.why) is by_casts
    assert "Without autocast the window is not finite either" in diagnosis.why
    assert not any(fix.verified for fix in diagnosis.fixes)  # an island casts, too


@pytest.mark.parametrize("mode", ["bf16_pure", "o2"])
@pytest.mark.parametrize("is_zero", [False, True])
def test_what_16_bits_round_is_told_from_a_zero_also_where_weights_are_in_16_bits(mode, is_zero):
    torch.manual_seed(0)
    net, amp, x = nn.Linear(8, 4), Amp.named(mode), torch.randn(8, 8)
    times = torch.ones(8) if is_zero else torch.linspace(100, 100.2, 8)
    amp.prepare(net)
    optimizer = torch.optim.SGD(list(master_params(net)), 0.1)

    def step():
        with amp.autocast():
            loss = (net(x).float().diff(dim=0).T / times.to(net.weight.dtype).diff()).mean()
        amp.backward(loss)
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)

    diagnosis = Doctor(amp, net).locate(step, (x, times))
    assert diagnosis is not None and diagnosis.op == "aten.div"
    assert diagnosis.cause == ("division or logarithm of zero" if is_zero else "cancellation in 16 bits")
    assert ("in 32 bits, its weights too, it is" in diagnosis.why) is not is_zero
    assert ("clamp" in diagnosis.fixes[0].text) is is_zero


@pytest.mark.parametrize("rate", [1e-12, 1e-2])
def test_bf16_is_advised_beside_islands_where_it_lasts(rate):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4)), torch.randn(8, 16)
    nn.init.normal_(net[1].weight, std=1e4)
    if rate > 1e-3:  # all outputs are the same, and in bf16 the LayerNorm sees nothing but their roundings
        nn.init.constant_(net[1].weight, 3e4)
    optimizer = torch.optim.SGD(net.parameters(), rate)

    def step(dtype=torch.float16):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = net(x * 10).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        return bool(loss.isfinite())

    diagnosis = Doctor(Amp.named("fp16"), net).locate(step)
    assert diagnosis is not None and diagnosis.cause == "overflow in a product"
    tried = {fix.python: fix.steps for fix in diagnosis.fixes if fix.verified}
    lasts = all(step(torch.bfloat16) for _ in range(5)) and all(p.isfinite().all() for p in net.parameters())
    assert lasts == (rate < 1e-3) and tried.get('torch.autocast("cpu", dtype=torch.bfloat16)') == (5 if lasts else None)
    assert any("keep_fp32" in line for line in tried) and len(diagnosis.fixes) == len(tried)


def test_a_constant_beyond_bf16_is_not_mended_by_it():
    diagnosis = located(
        nn.Linear(8, 4), (torch.randn(6, 8),), "fp16", lambda y: (y + torch.ones_like(y) * MIN32).softmax(-1).sum()
    )
    assert diagnosis is not None and diagnosis.cause.startswith("overflow")
    assert diagnosis.fixes[-1].text.startswith("use a smaller number") and "bf16" not in str(diagnosis)
    assert torch.tensor(MIN32).bfloat16() == -INF  # what bf16 would do


def test_a_poisoned_weight_is_found_behind_views_that_do_not_say_so():
    net = nn.GRUCell(8, 4)
    with torch.no_grad():
        net.weight_ih[0, 0] = float("nan")
    diagnosis = located(net, (torch.randn(6, 8),), "fp32")
    assert diagnosis is not None and (diagnosis.cause, diagnosis.tensor) == ("poisoned weight", "weight weight_ih")


def test_moments_that_are_not_finite_are_named():
    net, x = nn.Linear(8, 4), torch.randn(6, 8)
    optimizer = torch.optim.Adam(net.parameters())

    def step():
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert Doctor(Amp.named("fp32"), net).locate(step, x) is None
    optimizer.state[net.bias]["exp_avg"][1] = float("nan")
    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, x)
    assert diagnosis is not None and diagnosis.cause == "poisoned moment"
    assert "exp_avg of bias is not" in diagnosis.why
    step()
    assert not net.bias.isfinite().all()  # it would


def momentum(params):
    return torch.optim.SGD(params, 1e-6, momentum=0.9)


@pytest.mark.parametrize(
    "make, dtype, factor, why, cure",
    [
        (
            lambda p: torch.optim.Adam(p, eps=0.0),
            torch.float32,
            1.0,
            "exp_avg_sq is 0, because eps=0.",
            "eps=1e-08",
        ),
        (lambda p: torch.optim.Adam(p), torch.float16, 1.0, "because eps=1e-08 is 0 in float16", "eps=1e-07"),
        (lambda p: torch.optim.SGD(p, math.nan), torch.float32, 1.0, "the learning rate is nan", ""),
        (momentum, torch.float16, 4e4, "momentum_buffer exceeds float16", ""),
    ],
)
def test_a_step_that_makes_weights_nan_is_told_from_its_window(make, dtype, factor, why, cure):
    torch.manual_seed(0)
    net, x = nn.Linear(8, 4, dtype=dtype), torch.randn(6, 8, dtype=dtype)
    x[:, 3] = 0  # and so is this column's gradient
    x[:, 4] = 1.0
    optimizer = make(net.parameters())

    def step():
        optimizer.zero_grad()
        (net(x).float().sum() * factor / len(x)).backward()
        optimizer.step()

    for _ in range(int(factor > 1)):  # its momentum overflows in the second step
        step()
    before = state_of(net, optimizer)
    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, x)
    assert diagnosis is not None and diagnosis.cause == "poisoned by the optimizer"
    assert "makes weight not finite" in diagnosis.why and why in diagnosis.why
    assert [fix.python for fix in diagnosis.fixes if fix.verified] == [cure] * bool(cure)
    is_moment = why.startswith("momentum_buffer")  # in whose size the learning rate has no part
    assert ("learning rate" in str(diagnosis)) == (not is_moment and not cure)
    assert ("moments in fp32" in str(diagnosis)) == is_moment
    assert same((net.state_dict(), optimizer.state_dict()["state"]), (before[0], before[1]["state"]))
    step()
    assert not net.weight.isfinite().all()
    if cure:  # the user's next attempt
        net.load_state_dict(before[0])
        optimizer = make(net.parameters())
        optimizer.param_groups[0]["eps"] = float(cure.partition("=")[2])
        for _ in range(5):
            step()
        assert net.weight.isfinite().all()


@pytest.mark.parametrize("name", ["o2", "o3", "bf16_pure"])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_in_16_bits_whose_step_is_finite_are_not_convicted(name, bias):
    """Their fp32 sides may be one number in memory, which reads as NaN between steps."""
    amp, net = Amp.named(name), nn.Linear(8, 4, bias=bias)
    amp.prepare(net)
    optimizer, x = torch.optim.SGD(master_params(net), 0.01), torch.randn(16, 8)

    def step():
        amp.backward(net(x.to(net.weight.dtype)).float().square().mean())
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)

    before = copy.deepcopy([*net.parameters()])
    assert Doctor(amp, net).locate(step, x) is None
    assert same([*net.parameters()], before) and all(p.grad is None for p in net.parameters())
    step()
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("exp_avg_sq, why", [(-1.0, "exp_avg_sq is negative, and has no root"), (0.0, None)])
def test_a_negative_moment_of_squares_is_named(exp_avg_sq, why):
    net, x = nn.Linear(8, 4), torch.randn(6, 8)
    optimizer = torch.optim.Adam(net.parameters())

    def step():
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()

    step()
    optimizer.state[net.weight]["exp_avg_sq"].fill_(exp_avg_sq)
    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, x)
    assert (diagnosis and diagnosis.cause) == (why and "poisoned by the optimizer")
    assert diagnosis is None or (why in diagnosis.why and "exceeds" not in diagnosis.why)
    step()
    assert net.weight.isfinite().all() == (why is None)


def test_a_ctc_loss_whose_gradients_alone_are_not_finite_has_no_targets_that_are_too_long():
    """Its table of alignments holds -inf in any step: only an infinite loss tells of targets without one."""
    torch.manual_seed(0)
    net, losses = nn.Linear(4, 5), []
    labels, lengths = torch.tensor([[1, 2, 3], [1, 2, 4]]), torch.tensor([3, 3])

    def loss(y):
        losses.append(F.ctc_loss((y.view(6, 2, 5) * 1e31).log_softmax(-1), labels, torch.tensor([6, 6]), lengths))
        return losses[-1]

    diagnosis = located(net, (torch.randn(12, 4),), "fp32", loss)
    assert losses[0].isfinite() and diagnosis is not None
    assert (diagnosis.op, diagnosis.phase, diagnosis.cause) == (
        "aten._ctc_loss_backward",
        "backward",
        "overflow in fp32",
    )


@pytest.mark.parametrize(
    "loss, op, says",
    [
        (lambda y: (1 / torch.tensor([3, 0]) * y.sum()).sum(), "aten.reciprocal", "reciprocal was given a zero"),
        (lambda y: (torch.tensor([4, 0]) ** -0.5 * y.sum()).sum(), "aten.pow", "pow was given a zero"),
        (lambda y: y.sum() / torch.tensor(0), "aten.div", "div was given a zero"),
        (lambda y: torch.log(torch.fft.rfft(y * 0)).real.mean(), "aten.log", "log was given a zero"),
        (
            lambda y: torch.linalg.solve_triangular(torch.diag(torch.arange(5.0)), y.T, upper=True).mean(),
            "aten.linalg_solve_triangular",
            "was given a singular matrix",
        ),
        (lambda y: F.smooth_l1_loss(y[:0], y[:0] * 2), "aten.smooth_l1_loss", "was given no elements"),
        (
            lambda y: F.binary_cross_entropy_with_logits(y[:0], y[:0]),
            "aten.binary_cross_entropy_with_logits",
            "was given no elements",
        ),
    ],
)
def test_what_has_no_value_is_told_of_integers_complex_numbers_matrices_and_nothing(loss, op, says):
    diagnosis = located(nn.Linear(8, 5), (torch.randn(16, 8),), "fp32", loss)
    assert diagnosis is not None and diagnosis.cause == "division or logarithm of zero"
    assert diagnosis.op == op and says in diagnosis.why
    assert all("logits" not in fix.text for fix in diagnosis.fixes)
    if "zero" in says:
        assert any(each.zeros for each in diagnosis.inputs)  # the report shows it


@pytest.mark.parametrize(
    "loss, says",
    [
        (lambda y: (-y.abs() - 1).sqrt().mean(), "sqrt was given a negative number"),
        (lambda y: (-y.abs() - 1).pow(0.45).mean(), "pow was given a negative number"),
        (lambda y: (y.abs() + 1.5).acos().mean(), "acos was given a number at the edge of its domain or beyond"),
        (lambda y: torch.logdet(-torch.eye(5) * (1 + y.sum() * 0)), "whose determinant is negative"),
    ],
)
def test_a_negative_number_is_no_zero(loss, says):
    diagnosis = located(nn.Linear(8, 5), (torch.randn(16, 8),), "fp32", loss)
    assert diagnosis is not None and diagnosis.cause == "outside the domain of a function"
    assert says in diagnosis.why and "zero" not in str(diagnosis) and diagnosis.fixes


def root_of_a_zero(y):
    return (y[0] * 0).sqrt().sum()  # finite, unlike its gradient


@pytest.mark.parametrize("what", ["batch", "root", None])
def test_gradients_that_overflow_at_the_loss_scale_hide_nothing(what):
    """The first micro-batch overflows at 65536 and at no smaller scale; the second breaks at any."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    net[1].weight.data.fill_(1.0)
    amp, optimizer = Amp.named("fp16"), torch.optim.SGD(net.parameters(), 1e-6)
    batches = [torch.ones(2, 4), torch.ones(2, 4)]
    if what == "batch":
        batches[1][1, 2] = math.nan

    def step():
        for i, x in enumerate(batches):
            with amp.autocast():
                y = net(x).float()
            amp.backward(root_of_a_zero(y) if i and what == "root" else y.sum() * 2)
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)

    diagnosis = Doctor(amp, net).locate(step, batches)
    assert diagnosis is not None
    if what is None:
        assert diagnosis.cause == "loss scale too large"
        return
    assert "at 65536 gradients overflow as well" in diagnosis.why and not any(fix.verified for fix in diagnosis.fixes)
    if what == "batch":
        assert (diagnosis.cause, diagnosis.tensor, diagnosis.samples) == ("bad input", "batch[1]", [1])
    else:
        assert diagnosis.cause == "division or logarithm of zero" and "root_of_a_zero" not in diagnosis.code


class Steps(torch.optim.Optimizer):
    """By a trust ratio that divides by the norm of the gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad * (p.norm() / p.grad.norm()))  # divides


class Halving(torch.optim.SGD):
    """By gradients that it casts to float16 itself."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_((p.grad * 1e9).half().float())  # casts


def test_bf16_is_no_advice_for_a_cast_of_the_optimizer():
    net, x = nn.Linear(4, 2), torch.randn(6, 4)
    amp, optimizer = Amp.named("bf16"), Halving(net.parameters(), 0.1)

    def step():
        with amp.autocast():
            loss = net(x).float().mean()
        amp.backward(loss)
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)

    diagnosis = Doctor(amp, net).locate(step, x)
    assert diagnosis is not None and diagnosis.cause == "overflow in a cast" and "# casts" in diagnosis.code
    assert [fix.text for fix in diagnosis.fixes] == [BY_HAND.text]


def test_all_that_was_not_finite_is_named():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    net[1].running_mean.fill_(math.nan)
    net[1].running_var.fill_(math.inf)
    diagnosis = located(net, (torch.randn(6, 4),), "fp32")
    assert diagnosis is not None and diagnosis.cause == "poisoned buffer"
    assert (
        "buffer 1.running_mean was not finite before the window began. So were buffer 1.running_var." in diagnosis.why
    )


@pytest.mark.parametrize("by", ["optimizer", "program", "neither"])
def test_what_makes_weights_non_finite_in_a_step_or_after_it_is_named_by_its_line(by):
    net, x = nn.Linear(4, 2), torch.randn(6, 4)
    amp = Amp.named("fp32")
    optimizer = Steps(net.parameters()) if by == "optimizer" else torch.optim.AdamW(net.parameters())
    count = torch.tensor(0.0 if by == "program" else 1.0)

    def step():
        amp.backward(net(x * 0).sum() * (0 if by == "optimizer" else 1))
        amp.step(optimizer)
        amp.update()
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(p * (count / count))  # averages
        amp.zero_grad(optimizer)

    diagnosis = Doctor(amp, net).locate(step, x)
    if by == "neither":
        assert diagnosis is None
        return
    assert diagnosis is not None and diagnosis.cause == "division or logarithm of zero"
    assert diagnosis.code.endswith("# divides" if by == "optimizer" else "# averages") and diagnosis.phase == "step"
    assert "its step makes weight not finite" in diagnosis.why and "learning rate" not in str(diagnosis)
    assert all(p.isfinite().all() for p in net.parameters())


def test_bf16_is_not_advised_where_fp32_is_not_finite_either():
    def grows(y):
        for _ in range(8):  # leaves fp16 at once, and fp32 after some turns
            y = y.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else y
            y = y @ y.T @ y
        return y.float().sum()

    diagnosis = located(nn.Linear(4, 4), (torch.randn(4, 4) * 100,), "fp16", grows)
    assert diagnosis is not None and diagnosis.cause == "overflow in a product"
    assert "Without autocast the window is not finite either." in diagnosis.why
    assert all("bf16" not in fix.text for fix in diagnosis.fixes) and diagnosis.fixes


def test_a_moment_is_named_with_its_network():
    nets = [("generator", nn.Linear(4, 4)), ("critic", nn.Linear(4, 4))]
    optimizers = [torch.optim.Adam(net.parameters()) for _, net in nets]
    amp, x = Amp.named("fp32"), torch.randn(3, 4)

    def step():
        amp.backward(sum(net(x).sum() for _, net in nets))
        amp.step(optimizers)
        amp.update()
        amp.zero_grad(*optimizers)

    step()
    optimizers[1].state[nets[1][1].weight]["exp_avg_sq"][0] = math.nan
    diagnosis = Doctor(amp, nets).locate(step, x)
    assert diagnosis is not None and "exp_avg_sq of critic.weight" in diagnosis.why


def test_a_window_that_ends_between_two_optimizers_of_one_scaler_is_tried_again():
    """The first has stepped when the second's loss is NaN: torch's scaler would not step it again."""
    torch.manual_seed(0)
    critic, generator = nn.Linear(4, 1), nn.Linear(4, 4)
    critic.bias.data.fill_(-25.0)
    of_critic, of_generator = (torch.optim.Adam(net.parameters(), 1e-3) for net in (critic, generator))
    scaler, x = torch.amp.GradScaler("cpu", init_scale=64.0), torch.randn(8, 4)

    def step():
        of_critic.zero_grad()
        with torch.autocast("cpu", torch.float16):
            fake = generator(x)
            loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(x)).mean()
        scaler.scale(loss).backward()
        scaler.step(of_critic)
        of_generator.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = -torch.log(torch.sigmoid(critic(fake))).mean()
        scaler.scale(loss).backward()
        scaler.step(of_generator)
        scaler.update()

    nets = [("critic", critic), ("generator", generator)]
    diagnosis = Doctor(Amp.named("fp16"), nets).locate(step)
    assert diagnosis is not None and diagnosis.cause == "16-bit sigmoid before a logarithm"
    assert (diagnosis.phase, diagnosis.islands) == ("forward", ["critic"]) and diagnosis.fixes[0].verified
    assert "compiled" not in str(diagnosis)
    keep_fp32(critic)
    for _ in range(3):
        step()  # and the program can go on
    assert all(p.isfinite().all() for p in generator.parameters())


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_scalers_the_one_that_is_too_large_is_tried(is_first):
    nets = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    optimizers = {name: torch.optim.SGD(net.parameters(), 0.1) for name, net in nets.items()}
    scalers = {"a": torch.amp.GradScaler("cpu", init_scale=128.0), "b": torch.amp.GradScaler("cpu", init_scale=2.0**40)}

    def step():
        for name in ("b", "a") if is_first else ("a", "b"):
            optimizers[name].zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(nets[name](x), y)
            scalers[name].scale(loss).backward()
            scalers[name].step(optimizers[name])
            scalers[name].update()

    diagnosis = Doctor(Amp.named("fp16"), nets).locate(step, (x, y))
    assert diagnosis is not None and diagnosis.cause == "loss scale too large"
    assert "loss scale of 1.09951e+12" in diagnosis.why and "the gradient of b.weight" in diagnosis.reached
    assert [scaler.get_scale() for scaler in scalers.values()] == [128.0, 2.0**40]
    fits = diagnosis.scale_that_fits
    assert fits is not None
    scalers["b"] = torch.amp.GradScaler("cpu", init_scale=fits)
    step()
    assert scalers["b"].get_scale() == fits  # nothing was skipped


@pytest.mark.parametrize("forgets", [True, False])
def test_a_step_with_scaled_gradients_is_told(forgets):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cpu")
    x, y = torch.randn(16, 8) * (1 if forgets else 1e6), torch.randint(0, 4, (16,))

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        if forgets:
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    if forgets:
        step()
    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, (x, y))
    assert diagnosis is not None
    assert ("that no scaler had unscaled: call scaler.step(optimizer)" in str(diagnosis)) == forgets


def test_the_share_of_zeros_is_of_all_numbers():
    assert "50.0% zeros, 1 not finite" in str(Range.of("x", torch.tensor([0.0, 0.0, 1.0, math.inf])))
    assert "under 0.1% zeros" in str(Range.of("x", torch.arange(5000.0)))


@pytest.mark.parametrize(
    "loss, mode, says, not_said",
    [
        (lambda y: torch.logaddexp(FORBIDDEN, FORBIDDEN + 0 * y).mean(), "fp32", "infinities of the same sign", "row"),
        (
            lambda y: torch.softmax(FORBIDDEN + 0 * y, -1).mean(),
            "fp32",
            "got only infinities, as in a row",
            "recursion",
        ),
        (lambda y: torch.acos(y * 0 + 1).mean(), "fp32", "the slope is infinite: clamp it", "eps"),
        (lambda y: (y.half() * 0 - 300).square().mul(-1).mean(), "fp16", "of the size 9e+04", "is 9e+04"),
    ],
)
def test_what_is_said_of_an_operation_is_true_of_it(loss, mode, says, not_said):
    diagnosis = located(nn.Linear(8, 4), (torch.randn(16, 8),), mode, loss)
    assert diagnosis is not None
    said = " ".join([diagnosis.why, *(fix.text for fix in diagnosis.fixes)])
    assert says in said and not_said not in said


@pytest.mark.parametrize("bad, normalises", [(math.nan, False), (1e6, True)])
def test_only_finite_samples_are_to_be_normalised(bad, normalises):
    x = torch.randn(16, 8)
    x[3, 2] = bad
    diagnosis = located(nn.Linear(8, 4), (x,), "fp16")
    assert diagnosis is not None and diagnosis.cause == "bad input"
    assert ("normalise them" in str(diagnosis)) == normalises


def test_a_cure_of_the_whole_network_says_so():
    diagnosis = located(nn.Linear(8, 4), (torch.randn(16, 8),), "fp16", lambda y: (y * 0 + 300).square().mean())
    assert diagnosis is not None
    assert diagnosis.fixes[0].verified and "the whole network" in diagnosis.fixes[0].text
    assert not any("@keep_fp32" in fix.text for fix in diagnosis.fixes)  # what is not tried is not said beside it


def test_a_singular_matrix_is_named_although_float64_rounds_it_to_another():
    matrix = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.1, 0.2, 0.3]])
    diagnosis = located(
        nn.Linear(8, 3), (torch.randn(3, 8),), "fp32", lambda y: torch.linalg.solve_ex(matrix, y)[0].sum()
    )
    assert diagnosis is not None and diagnosis.cause == "division or logarithm of zero"
    assert "linalg_solve_ex was given a singular matrix" in diagnosis.why and "diagonal" in diagnosis.fixes[-1].text


@pytest.mark.parametrize("cancels", [True, False])
def test_bf16_whose_loss_is_another_is_no_cure(cancels):
    """A sum of products as the square of a sum less the sum of squares: in bf16 nothing is left of it."""

    def loss(y):
        large = 300 + y
        square = large.sum(1) * large.sum(1)
        return (square - 4 * large.square().sum(1)).abs().mean() + y.mean() if cancels else square.mean()

    torch.manual_seed(0)
    diagnosis = located(nn.Linear(8, 4), (torch.randn(16, 8),), "fp16", loss, lr=1e-9, init_scale=1.0)
    assert diagnosis is not None and "overflow" in diagnosis.cause
    tried = [fix.override for fix in diagnosis.fixes if fix.verified]
    assert ("amp=bf16" in tried) == (not cancels)
    assert ("far from that in fp32" in diagnosis.why) == cancels


def test_an_operation_between_two_backward_passes_is_of_no_forward_pass():
    """As in sharpness-aware minimisation, whose first gradient may be 0."""
    net, x = nn.Linear(4, 2), torch.zeros(6, 4)
    net.bias = None
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        net(x).sum().backward()
        with torch.no_grad():
            grad = net.weight.grad
            assert grad is not None
            net.weight.add_(grad / grad.norm())
        net(x + 1).sum().backward()
        optimizer.step()

    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, x)
    assert diagnosis is not None and diagnosis.phase == "step" and "after the backward pass" in str(diagnosis)


def test_numbers_within_an_operation_are_told_from_its_result():
    net, x = nn.LayerNorm(8), torch.randn(4, 8) * 1e21
    diagnosis = Doctor(Amp.named("fp32"), net).locate(lambda: net(x).sum().backward(), x)
    assert diagnosis is not None and diagnosis.cause == "overflow in fp32"
    assert "native_layer_norm is not finite in float32" in diagnosis.why and "became NaN" not in diagnosis.why


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_can_go_on_after_a_step_that_raises(unscales):
    net, x = nn.Linear(4, 1), torch.randn(6, 4)
    optimizer, scaler, is_broken = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cpu"), [True]

    def step():
        optimizer.zero_grad()
        scaler.scale(net(x).sum()).backward()
        scaler.unscale_(optimizer) if unscales else scaler.step(optimizer)
        if is_broken:
            raise ZeroDivisionError("of the program")
        scaler.update()

    with pytest.raises(ZeroDivisionError):
        Doctor(Amp.named("fp16"), net).locate(step, x)
    is_broken.clear()
    step()
    assert scaler.get_scale() == 65536.0


def test_weights_without_a_name_count_all_in_the_norm():
    """Of no network that the doctor knows: the second's finite gradient hides that of the first no more."""
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])]
    trace = Trace({}, {})
    trace.on_gradients(weights, grads, scaled=False)
    assert trace.grad_norm == 5.0 and trace.largest_gradient == (4.0, "a weight")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_new_infinities_are_not_those_of_a_mask(temperature):
    mask = torch.tensor([True, False, False, False])

    def loss(y):
        y = y.masked_fill(mask, -INF) / temperature
        return F.cross_entropy(y.clamp(min=-1e4), torch.ones(6, dtype=torch.long))

    diagnosis = located(nn.Linear(4, 4), (torch.randn(6, 4),), "fp32", loss)
    if temperature:
        assert diagnosis is None
    else:
        assert diagnosis is not None and "/ temperature" in diagnosis.code and "div was given a zero" in diagnosis.why


def test_a_nan_that_was_a_python_number_in_between_is_traced_to_its_line():
    def loss(y):
        ratio = y.detach().mul(0).sum() / y.detach().mul(0).sum()  # divides
        return torch.add(y, y, alpha=ratio.item()).mean()

    diagnosis = located(nn.Linear(4, 4), (torch.randn(6, 4),), "fp32", loss)
    assert diagnosis is not None and diagnosis.code.endswith("# divides")
    # A number of the program's own.
    diagnosis = located(nn.Linear(4, 4), (torch.randn(6, 4),), "fp32", lambda y: torch.add(y, y, alpha=math.nan).mean())
    assert diagnosis is not None and diagnosis.cause == "infinite constant"


def test_an_eps_is_no_cure_that_lets_the_loss_explode():
    """A half network in Adam: a row without gradients is 0 / 0, and the next smallest eps makes giant steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)).half()
    optimizer, amp = torch.optim.Adam(net.parameters(), 1e-3), Amp.named("fp32")
    words = torch.randint(0, 25, (64,))

    def step():
        amp.backward(F.cross_entropy(net(words).float(), words))
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)

    diagnosis = Doctor(amp, net).locate(step, words)
    assert diagnosis is not None and diagnosis.cause == "poisoned by the optimizer"
    fix = diagnosis.fixes[0]
    assert fix.verified and fix.override is not None
    optimizer.param_groups[0]["eps"] = float(fix.override.rpartition("=")[2])
    before = F.cross_entropy(net(words).float(), words)
    for _ in range(5):
        step()
    assert F.cross_entropy(net(words).float(), words) < before


def test_a_norm_beyond_fp32_names_the_largest_gradient_and_no_place():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    diagnosis = located(net, (torch.ones(2, 4),), "fp32", lambda y: y.sum() * 1e30)
    assert diagnosis is not None and diagnosis.cause == "gradient norm beyond fp32"
    assert re.search(r"that of [01]\.\w+, the largest", diagnosis.why) and "scaled" not in diagnosis.why
    assert "module" not in str(diagnosis)


def test_a_variable_is_shown_as_the_program_holds_it():
    weights, labels = torch.tensor([1.0, math.inf, 1.0]), torch.tensor([0, 2, 0])
    diagnosis = located(
        nn.Linear(4, 3),
        (torch.randn(3, 4),),
        "fp32",
        lambda y: F.cross_entropy(y, labels, weights, label_smoothing=0.1),
    )
    assert diagnosis is not None and "variable weights float32[3]" in str(diagnosis)


def test_code_after_the_backward_pass_is_no_forward_pass():
    net, x = nn.Linear(4, 4), torch.zeros(6, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step():
        net(x).sum().mul(0.0).backward()
        norm = sum(p.grad.norm() for p in net.parameters() if p.grad is not None)
        for p in net.parameters():
            assert p.grad is not None
            p.grad.mul_(1.0 / norm)
        optimizer.step()
        optimizer.zero_grad()

    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, x)
    assert diagnosis is not None and "1.0 / norm" in diagnosis.code and diagnosis.phase == "step"
    assert "after the backward pass" in str(diagnosis) and "in outside" not in str(diagnosis)


def test_a_window_examined_after_its_step_may_have_spoilt_its_weights_itself():
    net, x = nn.Linear(4, 4), torch.randn(6, 4) * torch.tensor([0.0, 1.0, 1.0, 1.0])
    optimizer = torch.optim.Adam(net.parameters(), eps=0.0)
    doctor = Doctor(Amp.named("fp32"), net)

    def step():
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    doctor.remember()
    step()
    diagnosis = doctor.locate(step, x)
    assert diagnosis is not None and diagnosis.cause == "poisoned weight"
    assert "before the window" not in diagnosis.why and "before its step is taken" in diagnosis.why


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize(
    "loss, says",
    [
        (lambda y: F.cross_entropy(y, torch.full((6,), -100)), "no targets to average over"),
        (lambda y: y[:1].std(0).sum(), "one element, which has no deviation"),
        (lambda y: torch.linalg.svd(torch.eye(4) + 0 * y[:4])[0].sum(), "equal singular values"),
    ],
)
def test_what_has_no_value_is_told_by_its_operation(loss, says):
    diagnosis = located(nn.Linear(4, 4), (torch.randn(6, 4),), "fp32", loss)
    assert diagnosis is not None and says in diagnosis.why and "such as a mean of nothing" not in diagnosis.why


def test_rows_of_a_tensor_of_the_program_are_no_samples():
    norms, x = torch.ones(6, 1), torch.randn(6, 4)
    norms[4] = math.nan
    diagnosis = located(nn.Linear(4, 2), (x,), "fp32", lambda y: (y * norms).mean())
    assert diagnosis is not None and diagnosis.cause == "poisoned tensor"
    assert "rows       4 of the tensor" in str(diagnosis) and "samples" not in str(diagnosis)


def test_a_running_variance_below_0_is_a_poisoned_buffer():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(8, 4)
    buffer = net[1].running_var
    assert isinstance(buffer, torch.Tensor)
    buffer[2] = -1.0
    diagnosis = located(net, (x,), "fp32")
    assert diagnosis is not None and (diagnosis.cause, diagnosis.tensor) == ("poisoned buffer", "buffer 1.running_var")
    assert "below 0" in diagnosis.why
    buffer[2] = 1.0
    assert located(net, (x,), "fp32") is None


@pytest.mark.parametrize("bias, cause", [(math.inf, "infinite constant"), (-math.inf, "nothing left by a mask")])
def test_a_softmax_of_numbers_and_plus_infinity_is_none_of_a_mask(bias, cause):
    distance = torch.arange(4)

    def loss(y):
        at = distance > 2 if bias > 0 else distance >= 0  # one key; all of them, for the other
        return (y + torch.where(at, torch.tensor(bias), 0.0)).softmax(-1).square().sum()

    diagnosis = located(nn.Linear(4, 4), (torch.randn(3, 4),), "fp32", loss)
    assert diagnosis is not None and diagnosis.cause == cause
    assert "torch.where" in diagnosis.code if bias > 0 else "softmax" in diagnosis.op


def test_a_norm_beyond_fp32_is_told_from_gradients_that_are_not_finite():
    net = nn.Linear(4, 64, bias=False)
    nn.init.zeros_(net.weight)
    diagnosis = located(net, (torch.full((1, 4), 1e19),), "fp32", lambda y: (y * 2e19).sum())
    assert diagnosis is not None and diagnosis.cause == "gradient norm beyond fp32"
    assert f"{2e38 * 16:.3g}" in diagnosis.why  # of 256 weights
    diagnosis = located(net, (torch.full((1, 4), 1e20),), "fp32", lambda y: (y * 2e19).sum())
    assert diagnosis is not None and diagnosis.cause == "overflow in fp32"


@pytest.mark.parametrize("raises", [False, True])
def test_a_norm_beyond_fp32_within_torchs_own_clipping_is_named(raises):
    """Gradients divided by an infinite norm are 0: no weight moves, and no NaN tells of it."""
    net, batch = network(), images()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(factor=1e21):
        optimizer.zero_grad()
        (F.cross_entropy(net(batch[0]), batch[1]) * factor).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=raises)  # here
        optimizer.step()

    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, batch)
    assert diagnosis is not None and diagnosis.cause == "gradient norm beyond fp32" and "# here" in diagnosis.code
    assert Doctor(Amp.named("fp32"), net).locate(lambda: step(1.0), batch) is None
    (advice,) = diagnosis.fixes
    least = float(advice.text.rpartition(" by ")[2].split()[0])  # which is enough, and much less is not
    assert Doctor(Amp.named("fp32"), net).locate(lambda: step(1e21 / least), batch) is None
    assert Doctor(Amp.named("fp32"), net).locate(lambda: step(4e21 / least), batch) is not None
    before = copy.deepcopy([*net.parameters()])
    with contextlib.suppress(RuntimeError):
        step()
    assert same([*net.parameters()], before)  # what the loop does by itself


def test_a_loss_scale_below_one_is_tried():
    """Where no island helps: a loss that weighs too much, behind a cast of its own."""

    def heavy(y):
        return y.half().float().mul(1e7).sum()

    diagnosis = located(nn.Linear(8, 4), (torch.randn(6, 8),), "fp16", heavy, lr=1e-9)
    assert diagnosis is not None and diagnosis.cause == "overflow in a cast" and diagnosis.phase == "backward"
    fits, fix = diagnosis.scale_that_fits, diagnosis.fixes[0]
    assert fits is not None and fits < 1 and fix.verified
    # Other windows may need a smaller one yet: the floor is where fp16 ends.
    assert fix.override == f"amp.init_scale={fits} amp.min_scale={2.0**-24:.17g}"
    assert fix.python == f'Amp.named("fp16", init_scale={fits}, min_scale={2.0**-24:.17g})'
    net, batch = nn.Linear(8, 4), (torch.randn(6, 8),)
    assert located(net, batch, "fp16", heavy, init_scale=fits / 4, min_scale=fits / 4) is None


# --- compiled code ----------------------------------------------------------------------------------------------------


def wide_again(graph, inputs):
    """A compiler that is right."""
    return graph.forward


def in_half(graph, inputs):
    """A compiler that computes islands in 16 bits."""

    def run(*args):
        return tuple(out.half().to(out.dtype) if isinstance(out, torch.Tensor) else out for out in graph(*args))

    return run


@pytest.fixture
def as_torch_compiles():
    torch.compiler.reset()
    with importlib.import_module("torch._functorch.config").patch(backward_pass_autocast="same_as_forward"):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize("backend, cure", [(wide_again, "keep"), (in_half, None), ("aot_eager", "torch._functorch")])
def test_a_cure_is_tried_in_compiled_code(backend, cure, as_torch_compiles):
    """aot_eager, as inductor, computes the backward pass of an island in 16 bits if nobody says otherwise."""
    net, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), images()
    with torch.no_grad():
        net[2].weight.mul_(1e6)
    amp, model = Amp.named("fp16", init_scale=1.0), torch.compile(net, backend=backend)
    optimizer, taken = torch.optim.SGD(net.parameters(), 0.0), []

    def step():
        with amp.autocast():
            loss = F.cross_entropy(model(batch[0]).float() * 1e-6, batch[1])
        amp.backward(loss)
        taken.append(amp.step(optimizer).taken & loss.isfinite())
        amp.update()
        amp.zero_grad(optimizer)

    diagnosis = Doctor(amp, model).locate(step, batch)
    assert diagnosis is not None and diagnosis.module == "2"
    fix = diagnosis.fixes[0]
    assert fix.verified is (cure is not None) and fix.python.startswith(cure or "keep")
    assert ("not as it is compiled here (tried: not enough)" in str(diagnosis)) is (cure is None)
    *lines, island = fix.python.split("; ")
    exec(island, {"keep_fp32": keep_fp32, "model": model})  # names of a compiled model
    step()
    assert bool(taken[-1]) is (cure == "keep")
    if cure == "keep":
        return
    diagnosis = Doctor(amp, model).locate(step, batch)
    assert diagnosis is not None and "finite in eager code, and not as it is compiled" in diagnosis.why
    if lines:
        exec(lines[0], {"torch": torch})
        torch.compiler.reset()
        step()
        assert bool(taken[-1]) and Doctor(amp, model).locate(step, batch) is None


@pytest.mark.parametrize("kind", ["compiled", "scaled"])
def test_of_a_cure_that_does_not_last_everything_is_said_that_it_took(kind, as_torch_compiles):
    """The second layer breaks a later step also in fp32, so that no cure is printed, only how far one gets."""
    torch.manual_seed(0)
    net, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), images()
    with torch.no_grad():
        net[2].weight.mul_(1e6)
    scale = 1.0 if kind == "compiled" else 2.0**40
    model = torch.compile(net, backend="aot_eager") if kind == "compiled" else net

    def steps(scale):
        amp = Amp.named("fp16", init_scale=scale, max_scale=2.0**60)
        optimizer, taken = torch.optim.SGD(net.parameters(), 1e30), []

        def step():
            with amp.autocast():
                loss = model(batch[0]).float().square().mean() * 1e-12
            amp.backward(loss)
            taken.append(bool(amp.step(optimizer).taken & loss.isfinite()))
            amp.update()
            amp.zero_grad(optimizer)

        return amp, step, taken

    amp, step, _ = steps(scale)
    diagnosis = Doctor(amp, model).locate(step, batch)
    assert diagnosis is not None and diagnosis.loss_scale == scale and "learning rate" in diagnosis.fixes[0].text
    found = re.search(r"With (.*) in fp32( at loss scale (\S+))?( and with (.*))? the window is finite", diagnosis.why)
    assert found is not None and diagnosis.cause == "training diverges"
    for name in found[1].split(", "):
        keep_fp32(net, [name])
    weights = copy.deepcopy(net.state_dict())
    _, step, taken = steps(scale)
    step()  # only the islands
    net.load_state_dict(weights)
    _, again, with_all = steps(float(found[3] or scale))
    exec(found[5] or "", {"torch": torch})
    torch.compiler.reset()
    again()
    assert (taken, with_all) == ([False], [True])


# --- what an attack found ---------------------------------------------------------------------------------------------


def test_what_gradients_exceed_is_the_dtype_of_the_line_that_casts_them():
    """Weights in fp16 take gradients that fp32 holds."""
    net = nn.Linear(8, 4)
    amp, x = Amp.named("o2", init_scale=2.0**24), torch.randn(6, 8)
    amp.prepare(net)
    optimizer = torch.optim.SGD(list(master_params(net)), 0.1)

    def step():
        with amp.autocast():
            loss = net(x).float().square().mean()
        amp.backward(loss * 1e3)
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)

    diagnosis = Doctor(amp, net).locate(step, x)
    assert diagnosis is not None and diagnosis.cause == "loss scale too large" and diagnosis.output is not None
    assert diagnosis.output.dtype == "float16" and "gradients exceed float16" in diagnosis.why
    assert diagnosis.code == "loss = net(x).float().square().mean()"  # not the hook that casts


def test_a_gradscaler_of_torch_is_told_its_scale():
    net, batch = network(), images()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler, amp = torch.amp.GradScaler("cpu", init_scale=2.0**30), Amp.named("fp16")
    diagnosis = Doctor(amp, net).locate(torchs_loop(net, optimizer, batch, scaler=scaler), batch)
    assert diagnosis is not None and (diagnosis.cause, diagnosis.loss_scale) == ("loss scale too large", 2.0**30)
    cured = eval(diagnosis.fixes[0].python, {"torch": torch})
    assert Doctor(amp, net).locate(torchs_loop(net, optimizer, batch, scaler=cured), batch) is None
    assert scaler.get_scale() == 2.0**30 and amp.scale == 65536.0


def test_a_loss_scale_is_tried_with_the_growth_of_the_users_scaler():
    """One that doubles after each step leaves the scale that fits this window in the next one."""
    net, batch = network(), images()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)

    def skips(scaler, steps=5):
        skipped = []
        for _ in range(steps):
            before = scaler.get_scale()
            torchs_loop(net, optimizer, batch, scaler=scaler)()
            skipped.append(scaler.get_scale() < before)
        return skipped

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1)
    state = scaler.state_dict()
    diagnosis = Doctor(Amp.named("fp16"), net).locate(torchs_loop(net, optimizer, batch, scaler=scaler), batch)
    assert diagnosis is not None and diagnosis.cause == "loss scale too large" and scaler.state_dict() == state
    fix = diagnosis.fixes[0]
    assert fix.verified and fix.steps == 5 and "growth_interval=1" in fix.python
    cured = eval(fix.python, {"torch": torch})
    larger = torch.amp.GradScaler("cpu", init_scale=cured.get_scale() * 2, growth_interval=1)
    assert not any(skips(cured)) and any(skips(larger))


@pytest.mark.parametrize("is_array", [False, True])
def test_a_batch_that_a_step_changes_is_put_back(is_array):
    net, x = network(1e4), torch.randn(6, 8)
    batch, before = [x.numpy() if is_array else x], x.clone()
    seen = []

    def step():
        seen.append(x.clone())
        x.mul_(50)
        with torch.autocast("cpu", torch.float16):
            loss = net(x).float().sum()
        loss.backward()

    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, batch)
    assert diagnosis is not None and diagnosis.cause == "overflow in a product" and diagnosis.fixes[0].verified
    assert "The step changes its batch in place" in diagnosis.why
    assert torch.equal(x, before) and len(seen) > 1 and all(torch.equal(each, before) for each in seen)


def test_a_generator_of_the_program_is_put_back():
    generator, net, x = torch.Generator().manual_seed(5), nn.Linear(8, 4), torch.randn(6, 8)
    before, drawn = generator.get_state(), []

    def step():
        drawn.append(torch.rand((), generator=generator).item())
        with torch.autocast("cpu", torch.float16):
            net(x * 1e5).float().mean().backward()

    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, x)
    assert diagnosis is not None and len(drawn) > 1 and len(set(drawn)) == 1
    assert torch.equal(generator.get_state(), before)


def test_torchs_own_autocast_is_switched_off_to_see_what_fp32_does():
    torch.manual_seed(0)
    net, x = nn.Linear(8, 5), torch.randn(16, 8)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = spread(net(x))
        loss.backward()

    diagnosis = Doctor(Amp.named("bf16"), net).locate(step)
    assert diagnosis is not None and diagnosis.cause == "cancellation in 16 bits"
    assert "optimizer.lr" not in str(diagnosis) and "clip=" not in str(diagnosis)


def test_weights_that_a_loop_changes_by_hand_are_put_back():
    net, (x, _) = network(), images()
    x[0, 0] = float("nan")
    before = copy.deepcopy(net.state_dict())

    def step():
        net(x).sum().backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
                p.grad = None

    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, (x,))
    assert diagnosis is not None and diagnosis.cause == "bad input" and same(net.state_dict(), before)


def test_gradients_of_autograd_grad_are_told_by_the_optimizer():
    net, (x, _) = network(1e30), images()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step():
        grads = torch.autograd.grad(net(x * 1e30).square().sum(), [*net.parameters()])
        for p, grad in zip(net.parameters(), grads, strict=True):
            p.grad = grad
        optimizer.step()

    assert Doctor(Amp.named("fp32"), net).locate(step, (x,)) is not None


def test_a_trial_that_does_not_fit_the_program_is_no_cure():
    """In an island the line is given fp32 beside its own fp16."""

    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.b(F.layer_norm((self.a(x) * 5e5).half(), (8,)))

    diagnosis = located(Stubborn(), (torch.randn(6, 8),), "fp16")
    assert diagnosis is not None and not any(fix.verified for fix in diagnosis.fixes)


def test_rows_of_weights_are_no_samples():
    net = network()
    with torch.no_grad():
        net[1].running_var[3] = float("nan")
    net.eval()
    diagnosis = located(net, images()[:1], "fp32")
    assert diagnosis is not None and diagnosis.cause == "poisoned buffer" and not diagnosis.samples
    assert "if an earlier batch left it there, amp.guard(net)" in str(diagnosis)
    assert diagnosis.why == "buffer 1.running_var was not finite before the window began."
    diagnosis = located(net, images()[:1], "fp32", guarded=True)
    assert diagnosis is not None and "guard" not in str(diagnosis) and "lower the learning rate" in str(diagnosis)


def test_frames_are_no_samples_where_labels_tell_their_number():
    """Frames come first, so that the row of a bad entry is a frame; with as many labels as rows it is a sample."""

    class Reads(nn.Linear):
        def forward(self, x, labels):
            return super().forward(x)

    found = []
    for shape in ((9, 6, 8), (6, 9, 8)):
        inputs = torch.randn(shape)
        inputs[4, 2, 1] = math.nan
        diagnosis = located(Reads(8, 4), [inputs, torch.randint(4, (6,))], "bf16")
        assert diagnosis.cause == "bad input"
        found.append(diagnosis.samples)
    assert found == [[], [4]]


def test_a_cure_that_only_delays_is_advised_with_the_other_half():
    """A number that fp16 does not hold and that each call of the network multiplies: fp32 holds it for two steps."""

    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 1)
            self.register_buffer("factor", torch.tensor(1e9))

        def forward(self, x):
            y = self.linear(x) * self.factor
            self.factor = self.factor * 1e10
            return y

    diagnosis = located(nn.Sequential(Grows()), [torch.randn(6, 8)], loss=torch.mean, lr=1e-30, init_scale=1.0)
    text = " ".join(fix.text for fix in diagnosis.fixes)
    assert "in fp32, which alone is not enough; and" in text
    assert "learning rate" in text


NAN_AT_1 = torch.tensor([1.0, math.nan, 1.0, 1.0])
FORBIDDEN = torch.full((4,), -math.inf)


def of_numpy(y):
    frequency = torch.from_numpy(NAN_AT_1.numpy().copy())
    return y * frequency


class Scales(nn.Linear):
    """By a tensor that is no buffer."""

    def __init__(self, place):
        super().__init__(8, 4)
        if place == "attribute":
            self.factor = NAN_AT_1.clone()
        elif place == "attribute of the class":
            type(self).shared = NAN_AT_1.clone()
        factors = [NAN_AT_1.clone(), NAN_AT_1.clone()]
        self.scaled = {
            "attribute": lambda y: y * self.factor,
            "attribute of the class": lambda y: y * self.shared,
            "variable": lambda y: y * factors[1],
            "global": lambda y: y * NAN_AT_1,
            "local": of_numpy,
            "unknown": lambda y: y * torch.from_numpy(NAN_AT_1.numpy().copy()),
        }[place]

    def forward(self, x):
        return self.scaled(super().forward(x))


@pytest.mark.parametrize(
    "place, tensor",
    [
        ("attribute", "attribute 0.factor"),
        ("attribute of the class", "attribute 0.shared"),
        ("variable", "variable factors"),
        ("global", "variable NAN_AT_1"),
        ("local", "local frequency"),
        ("unknown", "unseen other"),
    ],
)
def test_a_nan_that_the_program_holds_is_named(place, tensor):
    """And bf16 is no advice: it holds a NaN as well as fp16 does."""
    diagnosis = located(nn.Sequential(Scales(place)), [torch.randn(6, 8)])
    assert diagnosis is not None and diagnosis.tensor == tensor and " y * " in diagnosis.code
    assert diagnosis.cause == ("not found" if place == "unknown" else "poisoned tensor")
    assert f"{tensor.removeprefix('unseen ')} was not finite when it got here" in diagnosis.why
    assert not any("bf16" in fix.text for fix in diagnosis.fixes) and "unseen" not in str(diagnosis)
    assert ("as from numpy" in diagnosis.why) == (place == "local")


class Remembers(nn.Module):
    def __init__(net):
        super().__init__()
        net.rnn, net.state = nn.GRU(8, 4, batch_first=True), torch.zeros(1, 6, 4)

    def forward(net, x):
        return net.rnn(x, net.state)[0]


@pytest.mark.parametrize("tensor", ["attribute temperature", "attribute 0.inner", "attribute 0.state"])
def test_a_nan_in_an_attribute_is_named_wherever_it_is_used(tensor):
    """In the loss, or in a module of torch that the attribute is not of."""
    net = nn.Sequential(Remembers())
    net.temperature, net[0].inner = torch.ones(4), torch.ones(4)
    owner = net if "0" not in tensor else net[0]
    getattr(owner, tensor.split()[-1].split(".")[-1])[..., 1] = math.nan
    diagnosis = located(net, [torch.randn(6, 5, 8)], "fp32", lambda y: (y / net.temperature * net[0].inner).mean())
    assert diagnosis is not None and (diagnosis.cause, diagnosis.tensor) == ("poisoned tensor", tensor)


def test_meta_weights_are_refused_by_name():
    with pytest.raises(ValueError, match="meta device"):
        Doctor(Amp.named("fp32"), nn.Linear(2, 2, device="meta")).locate(lambda: None)


# --- what models of others showed ---------------------------------------------------------------------------------------


def test_all_samples_that_are_not_finite_are_counted():
    batch = (torch.randn(64, 8),)
    batch[0][:40, 0] = float("nan")
    diagnosis = located(nn.Linear(8, 4), batch, "fp32", lambda y: y.mean())
    assert diagnosis is not None and diagnosis.samples == list(range(40))
    assert "7 and 32 more of the batch" in str(diagnosis)


def test_a_bad_batch_that_was_seen_before_is_not_blamed_on_the_statistics_that_it_spoilt():
    """The loop skipped its step, and BatchNorm has kept the NaN: training does not read it."""
    net, batch = network(), images()
    batch[0][2, 3] = float("nan")
    step = torchs_loop(net, torch.optim.SGD(net.parameters(), 0.1), batch, scaler=torch.amp.GradScaler("cpu"))
    step()
    assert net[1].running_mean.isnan().any()
    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, batch)
    assert diagnosis is not None and (diagnosis.cause, diagnosis.samples) == ("bad input", [2])
    assert "rows       2 of the batch" in str(diagnosis) and "data set" not in str(diagnosis)
    net.eval()  # now it is read
    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, batch)
    assert diagnosis is not None and diagnosis.tensor == "buffer 1.running_mean"


def test_an_infinity_that_is_never_used_is_not_in_the_report():
    class Buckets(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network(1.5e5)

        def forward(self, x):
            distance = torch.arange(4.0)
            return self.inner(x) + torch.where(distance > 0, torch.log(distance), distance)  # log(0) is left out

    diagnosis = located(Buckets(), images()[:1])
    assert diagnosis is not None and diagnosis.module == "inner.0" and "aten.log" not in str(diagnosis)
    assert diagnosis.reached == ["the loss"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_a_number_that_is_not_finite_is_seen_wherever_it_is(dtype):
    largest = torch.finfo(dtype).max
    for place in range(33):
        values = torch.ones(3, 11, dtype=dtype) * largest  # whose sum is not finite
        assert is_finite(values) and is_finite(values.t()) and is_finite(values[:, ::2])
        values.view(-1)[place] = (INF, -INF, float("nan"))[place % 3]
        assert not is_finite(values) and not is_finite(values.t())
    assert is_finite(torch.empty(0, dtype=dtype)) and is_finite(torch.ones((), dtype=dtype))


def steepen(gradient):
    return gradient * 1e5


def test_the_hook_of_a_tensor_is_named_with_its_own_line():
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            y = self.inner(x).view(-1, 8)
            y.register_hook(steepen)
            return self.last(y)

    torch.manual_seed(0)
    diagnosis = located(Hooked(), images()[:1], init_scale=2.0**16)
    assert diagnosis is not None and diagnosis.code == "return gradient * 1e5" and diagnosis.phase == "backward"
    diagnosis = located(Hooked(), images()[:1], loss=lambda y: y.float().mean() * 1e5)
    assert diagnosis is not None and "backward pass of view" not in str(diagnosis)


def test_the_last_operation_that_made_a_zero_is_named():
    """Not one of those before it, whose zeros were others."""
    x = torch.tensor([1e-6, 1e-2, 1.0]).half()
    with Trace({}, {}) as trace:
        torch.log((x * 1e-2).square())
    (finding,) = trace.findings
    assert [what.split()[0] for kind, what in finding.marks if kind == "underflow"] == ["pow"]


def test_a_scale_of_torchs_scaler_is_not_called_a_cap():
    net, batch = network(), images()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    step = torchs_loop(net, torch.optim.SGD(net.parameters(), 0.1), batch, scaler=scaler)
    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, batch)
    assert diagnosis is not None and diagnosis.fixes[0].text.startswith("begin with a smaller loss scale")


def test_a_range_says_all_only_of_all():
    inf = torch.tensor(INF)
    assert str(Range.of("x", inf)).endswith("[]: none of 1 is finite")
    assert str(Range.of("x", torch.stack([inf, inf * 0 + 0]).nan_to_num(0, INF))).endswith(": 0, 1 not finite")
    assert str(Range.of("x", torch.zeros(2))).endswith(": all 0")
    assert str(Range.of("x", torch.zeros(0))).endswith("[0]: empty")


def test_a_gate_of_zero_over_zero_is_no_sigmoid_before_a_logarithm():
    def over_zero(y):
        p = torch.sigmoid(y * 1e-2).float()
        return ((p - p) / (p - p)).mean()

    for loss, says in [
        (over_zero, "div was given a zero"),
        (lambda y: torch.erfinv(2 * torch.sigmoid(y.float() + 60) - 1).mean(), "edge of its domain"),
    ]:
        diagnosis = located(nn.Linear(8, 5), (torch.randn(16, 8),), "fp16", loss)
        assert diagnosis is not None and diagnosis.cause == "division or logarithm of zero", diagnosis
        assert says in diagnosis.why and "probability" not in str(diagnosis)


def test_a_probability_that_only_a_cast_rounds_is_one_of_16_bits():
    diagnosis = located(
        nn.Linear(8, 5),
        (torch.randn(16, 8),),
        "bf16",
        lambda y: -torch.log(1 - torch.sigmoid(y.float() + 10).bfloat16()).float().mean(),
    )
    assert diagnosis is not None and diagnosis.cause == "16-bit sigmoid before a logarithm"
    # Without the cast the probability is no 1.
    loss = located(
        nn.Linear(8, 5), (torch.randn(16, 8),), "bf16", lambda y: -torch.log(1 - torch.sigmoid(y.float() + 5)).mean()
    )
    assert loss is None


@pytest.mark.parametrize(
    "loss, says",
    [
        (lambda y: torch.addcdiv(y, torch.ones_like(y), y * 0).mean(), "addcdiv was given a zero"),
        (lambda y: torch.lgamma(y * 0).mean(), "lgamma was given a zero"),
        (lambda y: torch.logdet(y.T @ y * 0), "linalg_slogdet was given a singular matrix"),
    ],
)
def test_a_pole_is_no_overflow(loss, says):
    diagnosis = located(nn.Linear(8, 5), (torch.randn(16, 8),), "fp32", loss)
    assert diagnosis is not None and diagnosis.cause == "division or logarithm of zero" and says in diagnosis.why


def test_an_overflow_in_fp32_says_no_more_than_its_numbers():
    for loss, says in [
        (lambda y: (y * 0 + 100).exp().mean(), f"{torch.tensor(100.0).double().exp().item():.4g} in float64"),
        (lambda y: (y * 0 + 1e3).exp().mean(), "infinite in float64, too"),
    ]:
        diagnosis = located(nn.Linear(8, 5), (torch.randn(16, 8),), "fp32", loss)
        assert diagnosis is not None and diagnosis.cause == "overflow in fp32"
        assert says in diagnosis.why and "diverges" not in str(diagnosis)


def test_a_loss_scale_that_takes_the_loss_beyond_fp32_is_too_large():
    net, batch, scale = nn.Linear(8, 4), images(), 2.0**127
    optimizer, amp = torch.optim.SGD(net.parameters(), 0.1), Amp.named("fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step():
        with amp.autocast():
            loss = F.cross_entropy(net(batch[0]), batch[1]) + 10
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    diagnosis = Doctor(amp, net).locate(step, batch)
    assert diagnosis is not None and diagnosis.cause == "loss scale too large"
    assert "the loss exceeds float32" in diagnosis.why and (diagnosis.scale_that_fits or scale) < scale


def test_of_a_poisoned_weight_no_more_is_said_than_where_it_is():
    """A window that does not use these numbers is finite."""
    net = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 1))
    with torch.no_grad():
        net[0].weight[2] = float("nan")
    assert located(net, (torch.tensor([0, 1, 3]),), "fp32") is None
    diagnosis = located(net, (torch.tensor([0, 2, 3]),), "fp32")
    assert diagnosis is not None and diagnosis.why == "weight 0.weight was not finite before the window began."


@pytest.mark.parametrize("by_hand", [False, True])
def test_finite_input_beyond_fp16_is_also_mended_by_fp32(by_hand):
    """Where the program casts to float16 itself, the samples are sound."""
    net, x = nn.Sequential(Halves() if by_hand else nn.Identity(), nn.Linear(8, 8), nn.Linear(8, 4)), images()[0] * 1e5
    diagnosis = located(net, (x,), loss=lambda y: y.float().mean() * 1e-6)
    assert diagnosis is not None and not diagnosis.islands
    if by_hand:
        assert (diagnosis.cause, diagnosis.fixes) == ("overflow in a cast", [BY_HAND])
        return
    assert diagnosis.cause == "bad input" and diagnosis.fixes[0].kind == "data"
    assert [fix.python for fix in diagnosis.fixes[1:]] == ['keep_fp32(model, ["1", "2"])']


class Halves(nn.Module):
    def forward(self, x):
        return x.half()


def by_own_scale(net, x, scale=2.0**22, *, by_amp=False):
    optimizer, amp = torch.optim.SGD(net.parameters(), 1e-3), Amp.named("fp16")

    def step():
        with torch.autocast("cpu", torch.float16):
            loss = net(x).float().square().mean()
        (loss * scale).backward()
        for p in net.parameters():
            p.grad /= scale
        optimizer.step()
        optimizer.zero_grad()

    return Doctor(amp, net).locate(step, x)


def test_no_loss_scale_is_told_of_a_loop_that_has_its_own():
    torch.manual_seed(0)
    diagnosis = by_own_scale(nn.Linear(8, 8), torch.randn(16, 8) * 100)
    assert diagnosis is not None and diagnosis.phase == "backward"
    assert "mode       amp=fp16\n" in str(diagnosis) and "loss scale" not in str(diagnosis)
    assert all("Amp.named" not in fix.python for fix in diagnosis.fixes)
    assert by_own_scale(nn.Linear(8, 8), torch.randn(16, 8) * 100, 1.0) is None


def test_a_program_that_cannot_leave_its_casts_has_no_loss_in_fp32_to_differ_from():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(6, 8)
    with torch.no_grad():
        net[1].weight.fill_(3e4)
    optimizer = torch.optim.SGD(net.parameters(), 1e-12)

    def step():
        with torch.autocast("cpu", torch.float16):
            loss = net(x.half() + 1).float().mean()  # without autocast it raises
        (loss * 1e-3).backward()
        optimizer.step()
        optimizer.zero_grad()

    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, x)
    assert diagnosis is not None and diagnosis.fixes[0].verified and diagnosis.fixes[0].steps == 5, str(diagnosis)


def attends_with(mask, padding):
    def loss(y):
        scores = (y @ y.T) * 0 - 45
        scores = scores + (mask + padding)  # both lines exceed float16
        return scores.softmax(-1).float().square().sum() + y.float().mean()

    return loss


def test_sums_of_masks_beyond_fp16_are_masks():
    """The infinities of two masks are harmless where a key is left; where scores are added, none is."""
    lowest = torch.finfo(torch.float16).min
    causal = torch.triu(torch.full((6, 6), lowest), 1).half()
    padding = torch.zeros(6, 6).half()
    padding[:, -1] = lowest
    assert located(nn.Linear(8, 4), (torch.randn(6, 8),), loss=attends_with(causal, padding), init_scale=1.0) is None
    padding[:, 0] = lowest  # the first row has no other key
    diagnosis = located(nn.Linear(8, 4), (torch.randn(6, 8),), loss=attends_with(causal, padding), init_scale=1.0)
    assert diagnosis is not None and diagnosis.cause == "nothing left by a mask" and "softmax" in diagnosis.op
    assert "Some of them came from add in float16 at tests" in diagnosis.why
    # A sum that nothing masks is an overflow, as it was.
    diagnosis = located(nn.Linear(8, 4), (torch.randn(6, 8),), loss=lambda y: ((y * 0 - 4e4) + (y * 0 - 4e4)).mean())
    assert diagnosis is not None and diagnosis.cause == "overflow in an addition"


class Spread(nn.Module):
    """Behind a convolution of 16-bit weights: a variance as a difference of squares."""

    def __init__(self, by_matmul=False):
        super().__init__()
        self.conv, self.by_matmul = nn.Conv2d(1, 4, 1, bias=not by_matmul), by_matmul
        nn.init.constant_(self.conv.weight, 0.5)

    def forward(self, x):
        x = x * 1.0  # in 32 bits then
        y = torch.einsum("bihw,oi->bohw", x, self.conv.weight[..., 0, 0]) if self.by_matmul else self.conv(x)
        y = y + 100
        return (y / ((y * y).mean((2, 3), keepdim=True) - y.mean((2, 3), keepdim=True) ** 2).sqrt()).float().mean()


@pytest.mark.parametrize("by_matmul", [True, False])
def test_a_convolution_of_16_bit_weights_is_computed_in_32_bits_to_tell_rounding(by_matmul):
    torch.manual_seed(0)
    net, x = Spread(by_matmul).bfloat16(), torch.randn(4, 1, 6, 6).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)

    def step():
        net(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, x)
    assert diagnosis is not None and diagnosis.cause == "cancellation in 16 bits"
    assert "in 32 bits, its weights too, it is" in diagnosis.why


# --- what it costs ----------------------------------------------------------------------------------------------------


def mean(net, x):
    return net(x).mean()


def root_of_zero(net, x):
    return torch.sqrt(net(x).relu() * 0).sum()  # finite, unlike its gradient


@pytest.mark.parametrize(
    "loss, forwards, backwards, is_watched",
    [
        (mean, 2, 2, False),  # watched; with a finite number in place of a weight that is NaN
        (lambda net, x: torch.log(net(x).relu()).mean(), 2, 1, False),  # watched; without autocast, up to the loss
        (lambda net, x: -torch.log(torch.sigmoid(net(x) - 1e3)).mean(), 3, 1, False),  # watched; two sets of islands
        (root_of_zero, 2, 2, True),
    ],
)
def test_a_diagnosis_computes_few_passes(loss, forwards, backwards, is_watched, monkeypatch):
    torch.manual_seed(0)
    net, seen, looked = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), collections.Counter(), []
    with torch.no_grad():
        net[0].weight[0, 0] = math.nan if loss is mean else 0.0
    net[0].weight.register_hook(lambda grad: seen.update(["backward"]))
    look = Trace._look
    monkeypatch.setattr(
        Trace, "_look", lambda self, call, *more: (looked.append(call.backward), look(self, call, *more))
    )

    def step():
        seen.update(["forward"])
        with torch.autocast("cpu", torch.float16):
            value = loss(net, images()[0])
        value.backward()

    diagnosis = Doctor(Amp.named("fp16"), net).locate(step)
    assert diagnosis is not None and seen == {"forward": forwards, "backward": backwards}
    # The backward pass of a loss that is not finite need not be watched.
    assert any(looked) == is_watched and not all(looked)
