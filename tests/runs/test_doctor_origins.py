"""What a diagnosis blames: masks, samples, weights, buffers, moments, optimizers, and tensors that a program holds."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import re
import types

import pytest
import torch
import torch.nn.functional as F
from loops import amps_step, classified, filled, images, located, network, same, sgd, state_of, torchs_step
from torch import nn

from amp_core import Amp, Doctor, master_params
from amp_core.doctor.diagnosis import BY_HAND
from amp_core.doctor.trace import Trace

INF, NAN = math.inf, math.nan
PRODUCT, ZERO = "overflow in a product", "division or logarithm of zero"
NAN_AT_1 = torch.tensor([1.0, NAN, 1.0, 1.0])


def spoilt(tensor, index, value=NAN):
    with torch.no_grad():
        tensor[index] = value
    return tensor


class Attends(nn.Module):
    """Attention under a mask, and a layer behind it."""

    def __init__(self, factor, mask=None):
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), filled(nn.Linear(8, 8), factor)
        if mask is not None:
            self.register_buffer("mask", mask.clone())

    def forward(self, x, mask=None):
        y = self.inner(x)
        mask = self.mask if mask is None else mask
        return self.last(((y @ y.mT + mask).softmax(-1) @ y).abs() + 1)


@pytest.mark.parametrize("place", ["buffer", "batch"])
@pytest.mark.parametrize(
    "factor, mode, num_masked, cause",
    [(3e4, "fp16", 1, PRODUCT), (1e-2, "bf16", 1, None), (1e-2, "bf16", 0, "nothing left by a mask")],
)
def test_a_mask_is_not_blamed_unless_it_leaves_nothing(factor, mode, num_masked, cause, place):
    mask, x = torch.full((4, 4), -INF).triu(1) if num_masked else torch.full((4, 4), -INF), torch.randn(2, 4, 8)
    net, inputs = (Attends(factor, mask), (x,)) if place == "buffer" else (Attends(factor), (x, mask))
    diagnosis = located(net, inputs, mode)
    assert (diagnosis and diagnosis.cause) == cause and (cause != PRODUCT or diagnosis.module == "last")


def test_an_infinity_that_is_never_used_is_not_in_the_report():
    inner, distance = network(1.5e5), torch.arange(4.0)

    def loss(y):  # log(0) is left out
        return (y + torch.where(distance > 0, torch.log(distance), distance)).float().mean()

    diagnosis = located(nn.Sequential(inner), images()[:1], loss=loss)
    assert diagnosis is not None and diagnosis.module == "0.0" and "aten.log" not in str(diagnosis)
    assert diagnosis.reached == ["the loss"]


def test_the_last_operation_that_made_a_zero_is_named():
    """Not one of those before it, whose zeros were others."""
    x = torch.tensor([1e-6, 1e-2, 1.0]).half()
    with Trace({}, {}) as trace:
        torch.log((x * 1e-2).square())
    (finding,) = trace.findings
    assert [what.split()[0] for kind, what in finding.marks if kind == "underflow"] == ["pow"]


def test_weights_without_a_name_count_all_in_the_norm():
    """Of no network that the doctor knows: the second's finite gradient does not hide that of the first."""
    trace = Trace({}, {})
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])]
    trace.on_gradients([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))], grads, scaled=False)
    assert trace.grad_norm == 5.0 and trace.largest_gradient == (4.0, "a weight")


@pytest.mark.parametrize(
    "value, rows, factor, mode, cause, samples",
    [
        (INF, [2], 1.0, "bf16", "bad input", [2]),
        (NAN, [2], 1.0, "bf16", "bad input", [2]),
        (-INF, [2], 1.0, "bf16", "bad input", [2]),
        # Also with a fault in the first layer, which is found when the sample is repaired.
        (NAN, [2], 1.5e5, "fp16", "bad input", [2]),
        (1e6, [3], 1.0, "fp16", "bad input", [3]),
        (NAN, [*range(40)], 1.0, "fp32", "bad input", [*range(40)]),
    ],
)
def test_a_bad_sample_is_blamed(value, rows, factor, mode, cause, samples):
    x = spoilt(torch.randn(64, 8), (rows, 3), value)
    diagnosis = located(network(factor), (x,), mode)
    assert diagnosis is not None and (diagnosis.cause, diagnosis.samples) == (cause, samples)
    assert ("normalise them" in str(diagnosis)) == math.isfinite(value)  # which only helps finite numbers
    assert len(rows) == 1 or "7 and 32 more of the batch" in str(diagnosis)


@dataclasses.dataclass(slots=True)
class Pair:
    x: object
    y: object


@pytest.mark.parametrize(
    "contain, name",
    [
        (Pair, "batch.y"),
        (lambda x, y: types.SimpleNamespace(x=x, y=y), "batch.y"),
        (lambda x, y: collections.UserDict(x=x, y=y), "batch[y]"),
        (lambda x, y: [x.numpy(), y.numpy()], "batch[1]"),
        (lambda x, y: None, "argument target"),  # nobody said that it is of the batch
    ],
)
def test_a_bad_label_is_found_in_any_container(contain, name):
    net, x, labels = nn.Linear(8, 1), torch.randn(6, 8), spoilt(torch.randn(6), 4)
    step = torchs_step(sgd(net), lambda: F.mse_loss(net(x)[:, 0], labels), dtype=None)
    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, contain(x, labels))
    cause = "bad input" if name.startswith("batch") else "poisoned tensor"
    assert diagnosis is not None and (diagnosis.cause, diagnosis.tensor, diagnosis.samples) == (
        cause,
        name,
        [4] * (cause == "bad input"),
    )


@pytest.mark.parametrize("shape, samples", [((9, 6, 8), []), ((6, 9, 8), [4])])
def test_frames_are_no_samples_where_labels_tell_their_number(shape, samples):
    """Frames come first, so that the row of a bad entry is a frame; with as many labels as rows it is a sample."""

    class Reads(nn.Linear):
        def forward(self, x, labels):
            return super().forward(x)

    inputs = spoilt(torch.randn(shape), (4, 2, 1))
    diagnosis = located(Reads(8, 4), [inputs, torch.randint(4, (6,))], "bf16")
    assert diagnosis is not None and (diagnosis.cause, diagnosis.samples) == ("bad input", samples)


def test_rows_of_a_tensor_of_the_program_are_no_samples():
    norms = spoilt(torch.ones(6, 1), 4)
    diagnosis = located(nn.Linear(4, 2), (torch.randn(6, 4),), "fp32", lambda y: (y * norms).mean())
    assert diagnosis is not None and diagnosis.cause == "poisoned tensor" and not diagnosis.samples


def test_a_bad_batch_that_was_seen_before_is_blamed_and_not_the_statistics_that_it_spoilt():
    """The loop skipped its step, and BatchNorm has kept the NaN: training does not read it."""
    net, batch = network(), images()
    spoilt(batch[0], (2, 3))
    step = torchs_step(sgd(net), classified(net, batch), scaler=torch.amp.GradScaler("cpu"))
    step()
    assert net[1].running_mean.isnan().any()
    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, batch)
    assert diagnosis is not None and (diagnosis.cause, diagnosis.samples) == ("bad input", [2])
    assert "rows       2 of the batch" in str(diagnosis) and "data set" not in str(diagnosis)
    net.eval()  # now it is read
    diagnosis = Doctor(Amp.named("fp16"), net).locate(step, batch)
    assert diagnosis is not None and diagnosis.tensor == "buffer 1.running_mean"


class Halves(nn.Module):
    def forward(self, x):
        return x.half()


@pytest.mark.parametrize("by_hand", [False, True])
def test_finite_input_beyond_fp16_is_also_fixed_by_fp32(by_hand):
    """Where the program casts to float16 itself, the samples are sound."""
    net, x = nn.Sequential(Halves() if by_hand else nn.Identity(), nn.Linear(8, 8), nn.Linear(8, 4)), images()[0] * 1e5
    diagnosis = located(net, (x,), loss=lambda y: y.float().mean() * 1e-6)
    assert diagnosis is not None and not diagnosis.islands
    if by_hand:
        assert (diagnosis.cause, diagnosis.fixes) == ("overflow in a cast", [BY_HAND])
        return
    assert diagnosis.cause == "bad input" and diagnosis.fixes[0].kind == "data"
    assert [fix.python for fix in diagnosis.fixes[1:]] == ['keep_fp32(model, ["1", "2"])']


def frozen(mean=0.0, variance=1.0):
    """A network whose BatchNorm is not trained, with these statistics of one channel."""
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).eval()
    net[1].running_mean[2], net[1].running_var[2] = mean, variance
    return net


def cell():
    """Behind views that do not say so."""
    net = nn.GRUCell(8, 4)
    spoilt(net.weight_ih, (0, 0))
    return net


def embedding():
    net = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 1))
    spoilt(net[0].weight, 2)
    return net


X = torch.linspace(-1, 1, 48).view(6, 8)
BEFORE = "was not finite before the window began."


@pytest.mark.parametrize(
    "make, x, tensor, why",
    [
        (cell, X, "weight weight_ih", f"weight weight_ih {BEFORE}"),
        (embedding, torch.tensor([0, 2, 3]), "weight 0.weight", f"weight 0.weight {BEFORE}"),
        (embedding, torch.tensor([0, 1, 3]), "", None),  # a window that does not use these numbers is finite
        (lambda: frozen(variance=NAN), X, "buffer 1.running_var", f"buffer 1.running_var {BEFORE}"),
        (lambda: frozen(NAN, INF), X, "buffer 1.running_mean", f"{BEFORE} So were buffer 1.running_var."),
        (lambda: frozen(variance=-1.0), X, "buffer 1.running_var", "holds a number below 0"),
        (frozen, X, "", None),
    ],
)
def test_a_poisoned_weight_or_buffer_is_named_and_no_more_is_said(make, x, tensor, why):
    diagnosis = located(make(), (x,), "fp32")
    if why is None:
        assert diagnosis is None
        return
    assert diagnosis is not None and (diagnosis.cause, diagnosis.tensor) == (f"poisoned {tensor.split()[0]}", tensor)
    assert diagnosis.why.endswith(why) or "below 0" in diagnosis.why
    assert not diagnosis.samples  # its rows are none
    if "buffer" in tensor:
        assert "if an earlier batch left it there, amp.guard(net)" in str(diagnosis)
        guarded = located(make(), (x,), "fp32", guarded=True)
        assert guarded is not None and "guard" not in str(guarded) and "lower the learning rate" in str(guarded)


@pytest.mark.parametrize("of_numpy", [False, True])
def test_a_nan_that_the_program_holds_has_the_line_that_uses_it(of_numpy):
    """And bf16 is no advice: it holds a NaN as well as fp16 does."""

    def loss(y):
        factor = torch.from_numpy(NAN_AT_1.numpy().copy()) if of_numpy else NAN_AT_1
        return (y * factor).float().mean()

    diagnosis = located(nn.Linear(8, 4), [torch.randn(6, 8)], loss=loss)
    assert diagnosis is not None and (diagnosis.cause, diagnosis.tensor) == ("poisoned tensor", "argument other")
    assert "y * factor" in diagnosis.code and "argument other was not finite when it got here" in diagnosis.why
    assert not any("bf16" in fix.text for fix in diagnosis.fixes)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_moments_that_are_not_finite_are_named_with_their_network(key):
    nets = [("generator", nn.Linear(8, 4)), ("critic", nn.Linear(8, 4))]
    optimizers = [torch.optim.Adam(net.parameters()) for _, net in nets]
    amp, x = Amp.named("fp32"), torch.randn(6, 8)
    step = amps_step(amp, optimizers, lambda: sum(net(x).sum() for _, net in nets))
    step()
    assert Doctor(amp, nets).locate(step, x) is None
    spoilt(optimizers[1].state[nets[1][1].bias][key], 1)
    diagnosis = Doctor(amp, nets).locate(step, x)
    assert diagnosis is not None and diagnosis.cause == "poisoned moment"
    assert f"{key} of critic.bias is not" in diagnosis.why
    step()
    assert not nets[1][1].bias.isfinite().all()  # it would


@pytest.mark.parametrize(
    "make, dtype, factor, why, fix",
    [
        (lambda p: torch.optim.Adam(p, eps=0.0), torch.float32, 1.0, "exp_avg_sq is 0, because eps=0.", "eps=1e-08"),
        (lambda p: torch.optim.Adam(p), torch.float16, 1.0, "because eps=1e-08 is 0 in float16", "eps=1e-07"),
        (lambda p: torch.optim.SGD(p, NAN), torch.float32, 1.0, "the learning rate is nan", ""),
        (lambda p: torch.optim.SGD(p, 1e-6, momentum=0.9), torch.float16, 4e4, "momentum_buffer exceeds float16", ""),
    ],
)
def test_a_step_that_makes_weights_nan_is_told_from_its_window(make, dtype, factor, why, fix):
    torch.manual_seed(0)
    net, x = nn.Linear(8, 4, dtype=dtype), torch.randn(6, 8, dtype=dtype)
    x[:, 3], x[:, 4] = 0, 1.0  # and so is one column's gradient

    def steps_with(optimizer):
        return torchs_step(optimizer, lambda: net(x).float().sum() * factor / len(x), dtype=None)

    step = steps_with(optimizer := make(net.parameters()))
    for _ in range(int(factor > 1)):  # its momentum overflows in the second step
        step()
    before = state_of(net, optimizer)
    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, x)
    assert diagnosis is not None and diagnosis.cause == "poisoned by the optimizer"
    assert "makes weight not finite" in diagnosis.why and why in diagnosis.why
    assert [each.python for each in diagnosis.fixes if each.verified] == [fix] * bool(fix)
    is_moment = why.startswith("momentum_buffer")  # in whose size the learning rate has no part
    assert ("learning rate" in str(diagnosis)) == (not is_moment and not fix)
    assert ("moments in fp32" in str(diagnosis)) == is_moment
    assert same((net.state_dict(), optimizer.state_dict()["state"]), (before[0], before[1]["state"]))
    step()
    assert not net.weight.isfinite().all()
    if fix:  # the user's next attempt
        net.load_state_dict(before[0])
        optimizer = make(net.parameters())
        optimizer.param_groups[0]["eps"] = float(fix.partition("=")[2])
        for _ in range(5):
            steps_with(optimizer)()
        assert net.weight.isfinite().all()


@pytest.mark.parametrize("name", ["o2", "o3", "bf16_pure"])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_in_16_bits_whose_step_is_finite_are_not_blamed(name, bias):
    """Their fp32 sides may be one number in memory, which reads as NaN between steps."""
    amp, net, x = Amp.named(name), nn.Linear(8, 4, bias=bias), torch.randn(16, 8)
    amp.prepare(net)
    optimizer = torch.optim.SGD(master_params(net), 0.01)
    step = amps_step(amp, optimizer, lambda: net(x.to(net.weight.dtype)).float().square().mean())
    before = copy.deepcopy([*net.parameters()])
    assert Doctor(amp, net).locate(step, x) is None
    assert same([*net.parameters()], before) and all(p.grad is None for p in net.parameters())
    step()
    assert all(p.isfinite().all() for p in net.parameters())


class Steps(torch.optim.Optimizer):
    """By a trust ratio that divides by the norm of the gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad * (p.norm() / p.grad.norm()))  # in the optimizer


class Halving(torch.optim.SGD):
    """By gradients that it casts to float16 itself."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_((p.grad * 1e9).half().float())  # in the optimizer


@pytest.mark.parametrize(
    "make, gradient, count, cause, line",
    [
        (lambda p: Steps(p), 0, 1.0, ZERO, "# in the optimizer"),
        (lambda p: Halving(p, 0.1), 1, 1.0, "overflow in a cast", "# in the optimizer"),
        (torch.optim.AdamW, 1, 0.0, ZERO, "# in the program"),
        (torch.optim.AdamW, 1, 1.0, None, ""),
    ],
)
def test_what_makes_weights_non_finite_in_a_step_or_after_it_is_named_by_its_line(make, gradient, count, cause, line):
    net, x, amp, count = nn.Linear(4, 2), torch.randn(6, 4), Amp.named("fp32"), torch.tensor(count)
    optimizer = make(net.parameters())

    def step():
        amp.backward(net(x * 0).sum() * gradient)
        amp.step(optimizer)
        amp.update()
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(p * (count / count))  # in the program
        amp.zero_grad(optimizer)

    diagnosis = Doctor(amp, net).locate(step, x)
    assert (diagnosis and diagnosis.cause) == cause
    if diagnosis is not None:
        assert diagnosis.code.endswith(line) and diagnosis.phase == "step"
        assert re.search("its step makes (weight|bias) not finite", diagnosis.why)
        assert "learning rate" not in str(diagnosis)
        assert cause == ZERO or [fix.text for fix in diagnosis.fixes] == [BY_HAND.text]  # bf16 is no advice
    assert all(p.isfinite().all() for p in net.parameters())
