"""The fixes that a diagnosis prints: lines of a program that are run and hold; bf16 where it would help; compiled code."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from loops import amps_step, classified, filled, images, located, network, sgd, torchs_step
from torch import nn

from amp_core import Amp, Doctor, keep_fp32, master_params
from amp_core.doctor.diagnosis import BY_HAND

BF16 = 'torch.autocast("cpu", dtype=torch.bfloat16)'


@pytest.mark.parametrize("factor, scale, floor", [(1.5e5, 1024.0, 1.0), (1.0, 2.0**40, 1.0), (1.0, 2.0**40, 2.0**40)])
def test_a_fix_is_a_line_of_the_program(factor, scale, floor):
    """What is printed is run, and fixes the window."""
    model, batch = network(factor), images()
    amp = Amp.named("fp16", init_scale=scale, min_scale=floor, max_scale=2.0**60)
    diagnosis = Doctor(amp, model).locate(amps_step(amp, sgd(model), classified(model, batch)), batch)
    assert diagnosis is not None and diagnosis.fixes[0].verified
    line = diagnosis.fixes[0].python
    assert f"     {line}\n" in f"{diagnosis}\n" and "amp.keep_fp32" not in str(diagnosis)
    found = {"keep_fp32": keep_fp32, "Amp": Amp, "model": model}
    exec(line if "keep_fp32" in line else f"amp = {line}", found)
    amp = found.get("amp", amp)
    assert Doctor(amp, model).locate(amps_step(amp, sgd(model), classified(model, batch)), batch) is None


def test_a_fix_names_the_network_as_the_doctor_was_given_it():
    torch.manual_seed(0)
    amp = Amp.named("fp16", init_scale=1.0)
    critic, maker = nn.Sequential(nn.Linear(8, 8), filled(nn.Linear(8, 8), 3e4)), nn.Linear(8, 8)
    optimizer, x = sgd(nn.ModuleList([maker, critic]), 1e-12), torch.randn(16, 8)
    step = amps_step(amp, optimizer, lambda: critic(maker(x)).float().mean())
    nets = [("maker", maker), ("critic", critic)]
    diagnosis = Doctor(amp, nets).locate(step, x)
    assert diagnosis is not None and diagnosis.module == "critic.1"
    assert diagnosis.fixes[0].verified and diagnosis.fixes[0].python == 'keep_fp32(critic, ["1"])'
    keep_fp32(critic, ["1"])  # as it is printed
    assert Doctor(amp, nets).locate(step, x) is None


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
    net, x = filled(nn.Linear(8, 4), 1.0 if kind == "function" else 6e4), torch.full((6, 8), 10.0)
    net, x = (net.half(), x.half()) if kind == "model" else (net, x)

    def loss():
        return (HalfExp.apply(net(x)) if kind == "function" else net(x)).float().mean()

    def finds(dtype):
        step = torchs_step(sgd(net, 0.0), loss, dtype=None if kind == "model" else dtype)
        return Doctor(Amp.named("o3" if kind == "model" else "fp16"), net).locate(step, x)

    default = torch.get_autocast_dtype("cpu")
    diagnosis = finds(torch.float16)
    assert torch.get_autocast_dtype("cpu") == default
    assert diagnosis is not None and diagnosis.cause.startswith("overflow")
    assert (finds(torch.bfloat16) is None) is (kind == "autocast")  # what bf16 does
    assert any("bf16" in fix.text for fix in diagnosis.fixes) is (kind == "autocast")
    assert (BY_HAND in diagnosis.fixes) is (kind != "autocast")


@pytest.mark.parametrize("rate", [1e-12, 1e-2])
def test_bf16_is_advised_beside_islands_where_it_lasts(rate):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4)), torch.randn(8, 16)
    nn.init.normal_(net[1].weight, std=1e4)
    if rate > 1e-3:  # all outputs are the same, and in bf16 the LayerNorm sees nothing but their roundings
        filled(net[1], 3e4)
    optimizer = sgd(net, rate)

    def steps_in(dtype):
        return torchs_step(optimizer, lambda: net(x * 10).float().pow(2).mean(), dtype=dtype)

    diagnosis = Doctor(Amp.named("fp16"), net).locate(steps_in(torch.float16))
    assert diagnosis is not None and diagnosis.cause == "overflow in a product"
    tried = {fix.python: fix.steps for fix in diagnosis.fixes if fix.verified}
    for _ in range(5):
        steps_in(torch.bfloat16)()
    lasts = all(p.isfinite().all() for p in net.parameters())
    assert lasts == (rate < 1e-3) and tried.get(BF16) == (5 if lasts else None)
    assert any("keep_fp32" in line for line in tried) and len(diagnosis.fixes) == len(tried)


@pytest.mark.parametrize("mode", ["bf16_pure", "o2"])
@pytest.mark.parametrize("is_zero", [False, True])
def test_what_16_bits_round_is_told_from_a_zero_also_where_weights_are_in_16_bits(mode, is_zero):
    torch.manual_seed(0)
    net, amp, x = nn.Linear(8, 4), Amp.named(mode), torch.randn(8, 8)
    times = torch.ones(8) if is_zero else torch.linspace(100, 100.2, 8)
    amp.prepare(net)

    def loss():
        return (net(x).float().diff(dim=0).T / times.to(net.weight.dtype).diff()).mean()

    step = amps_step(amp, torch.optim.SGD(list(master_params(net)), 0.1), loss)
    diagnosis = Doctor(amp, net).locate(step, (x, times))
    assert diagnosis is not None and diagnosis.op == "aten.div"
    assert diagnosis.cause == ("division or logarithm of zero" if is_zero else "cancellation in 16 bits")
    assert ("in 32 bits, its weights too, it is" in diagnosis.why) is not is_zero
    assert ("clamp" in diagnosis.fixes[0].text) is is_zero


def deviates(y, dims):
    y = y + 100
    return (y / ((y * y).mean(dims, keepdim=True) - y.mean(dims, keepdim=True) ** 2).sqrt()).float().mean()


class Spread(nn.Module):
    """Behind a convolution: a variance as a difference of squares."""

    def __init__(self, by_matmul):
        super().__init__()
        self.conv, self.by_matmul = filled(nn.Conv2d(1, 4, 1, bias=not by_matmul), 0.5), by_matmul

    def forward(self, x):
        x = x * 1.0  # in 32 bits then
        y = torch.einsum("bihw,oi->bohw", x, self.conv.weight[..., 0, 0]) if self.by_matmul else self.conv(x)
        return deviates(y, (2, 3))


@pytest.mark.parametrize("kind", ["matmul", "convolution", "torch's autocast"])
def test_rounding_is_told_by_a_window_in_32_bits_of_any_loop(kind):
    torch.manual_seed(0)
    is_autocast = kind == "torch's autocast"
    net, x = (
        (nn.Linear(8, 5), torch.randn(16, 8)) if is_autocast else (Spread(kind == "matmul"), torch.randn(4, 1, 6, 6))
    )
    net, x = (net, x) if is_autocast else (net.bfloat16(), x.bfloat16())

    def loss():
        return deviates(net(x), 0) if is_autocast else net(x)

    step = torchs_step(sgd(net, 1e-6), loss, dtype=torch.bfloat16 if is_autocast else None)
    diagnosis = Doctor(Amp.named("bf16" if is_autocast else "fp32"), net).locate(step, x)
    assert diagnosis is not None and diagnosis.cause == "cancellation in 16 bits"
    assert is_autocast or "in 32 bits, its weights too, it is" in diagnosis.why
    assert "optimizer.lr" not in str(diagnosis) and "clip=" not in str(diagnosis)


def test_an_eps_that_lets_the_loss_explode_is_not_advised():
    """A half network in Adam: a row without gradients is 0 / 0, and the next smallest eps makes giant steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)).half()
    optimizer, amp = torch.optim.Adam(net.parameters(), 1e-3), Amp.named("fp32")
    words = torch.randint(0, 25, (64,))
    step = amps_step(amp, optimizer, lambda: F.cross_entropy(net(words).float(), words))
    diagnosis = Doctor(amp, net).locate(step, words)
    assert diagnosis is not None and diagnosis.cause == "poisoned by the optimizer"
    fix = diagnosis.fixes[0]
    assert fix.verified and fix.override is not None
    optimizer.param_groups[0]["eps"] = float(fix.override.rpartition("=")[2])
    losses = [step()[1] for _ in range(6)]
    assert losses[-1] < losses[0]


class Stubborn(nn.Module):
    """In an island the line is given fp32 beside its own fp16."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.b(F.layer_norm((self.a(x) * 5e5).half(), (8,)))


class Grows(nn.Module):
    """A number that fp16 does not hold and that each call of the network multiplies: fp32 holds it for two steps."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.register_buffer("factor", torch.tensor(1e9))

    def forward(self, x):
        y = self.linear(x) * self.factor
        self.factor = self.factor * 1e10
        return y


def test_a_trial_that_does_not_fit_the_program_is_not_printed_as_tried():
    diagnosis = located(Stubborn(), (torch.randn(6, 8),), "fp16")
    assert diagnosis is not None and not any(fix.verified for fix in diagnosis.fixes)


def test_a_fix_that_only_delays_is_advised_with_the_other_half():
    diagnosis = located(nn.Sequential(Grows()), [torch.randn(6, 8)], loss=torch.mean, lr=1e-30, init_scale=1.0)
    text = " ".join(fix.text for fix in diagnosis.fixes)
    assert "in fp32, which alone is not enough; and" in text and "learning rate" in text


def test_a_program_that_cannot_leave_its_casts_has_no_loss_in_fp32_to_differ_from():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), filled(nn.Linear(8, 4), 3e4)), torch.randn(6, 8)
    # Without autocast it raises.
    step = torchs_step(sgd(net, 1e-12), lambda: net(x.half() + 1).float().mean() * 1e-3)
    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, x)
    assert diagnosis is not None and diagnosis.fixes[0].verified and diagnosis.fixes[0].steps == 5, str(diagnosis)


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


def loud():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        net[2].weight.mul_(1e6)
    return net


def is_taken(step):
    report, loss = step()
    return bool(report.taken & loss.isfinite())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend, holds", [(wide_again, True), (in_half, False), ("aot_eager", False)])
def test_a_fix_is_tried_in_compiled_code(backend, holds, as_torch_compiles):
    """aot_eager, as inductor, computes the backward pass of an island in 16 bits if nobody says otherwise."""
    net, batch = loud(), images()
    amp, model = Amp.named("fp16", init_scale=1.0), torch.compile(net, backend=backend)
    step = amps_step(amp, sgd(net, 0.0), lambda: F.cross_entropy(model(batch[0]).float() * 1e-6, batch[1]))
    diagnosis = Doctor(amp, model).locate(step, batch)
    assert diagnosis is not None and diagnosis.module == "2"
    first, *more = diagnosis.fixes
    assert first.verified is holds and first.python.startswith("keep_fp32")
    assert ("not as it is compiled here (tried: not enough)" in str(diagnosis)) is not holds
    exec(first.python, {"keep_fp32": keep_fp32, "model": model})  # names of a compiled model
    assert is_taken(step) is holds
    if holds:
        return
    diagnosis = Doctor(amp, model).locate(step, batch)
    assert diagnosis is not None and "finite in eager code, and not as it is compiled" in diagnosis.why
    if backend == "aot_eager":
        exec(more[0].python, {"torch": torch})
        torch.compiler.reset()
        assert is_taken(step) and Doctor(amp, model).locate(step, batch) is None
