"""The cause of a window that is not finite, and what is said of it: one line of a program per row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import filled, located, said
from torch import nn

from amp_core.doctor.diagnosis import BY_HAND
from amp_core.doctor.values import Range, is_finite

INF, NAN = math.inf, math.nan
MIN32, MIN16 = torch.finfo(torch.float32).min, torch.finfo(torch.float16).min
FORBIDDEN = torch.full((5,), -INF)


@dataclass
class Row:
    """A line behind a linear layer whose output is `y`, 16 x 5."""

    loss: Any
    mode: str
    cause: str | None
    """None: the window is finite."""
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    op: str = ""
    code: str = ""
    phase: str = ""
    tried: bool | None = None
    """Whether a fix was tried; None: not asked."""
    fields: Any = None


def softmax_of_half(y):
    return -torch.log((y.float() * 40).half().softmax(-1)).mean().float()


def deviation(y):
    y = y + 100.0
    return (y / ((y * y).mean(0) - y.mean(0) ** 2).sqrt()).mean().float()


def too_short(y):
    labels, lengths = torch.tensor([[1, 2, 3], [1, 1, 2], [1, 2, 2]]), torch.tensor([3, 3, 3])
    return F.ctc_loss(
        y[:15].view(5, 3, 5).float().log_softmax(-1)[:3], labels, lengths - torch.tensor([1, 0, 0]), lengths
    )


def steep_alignment(y):
    labels, lengths = torch.tensor([[1, 2, 3], [1, 2, 4]]), torch.tensor([3, 3])
    loss = F.ctc_loss((y[:12].view(6, 2, 5) * 1e31).log_softmax(-1), labels, torch.tensor([6, 6]), lengths)
    assert loss.isfinite()  # its table of alignments holds -inf in any step
    return loss


def half_bce(y):
    with torch.autocast("cpu", enabled=False):
        return F.binary_cross_entropy(torch.sigmoid((y - 200).half()), torch.ones(16, 5).half()).float()


def difference_of_casts(y):
    one = y * 0 + 1.001
    return (1 / (one.bfloat16() - torch.ones(1, dtype=torch.bfloat16)).float()).mean()


def angle_of_casts(y):
    return torch.acos((y * 0 + 0.9999).bfloat16()).float().mean()


def variance_of_casts(y):
    half = (y / y.detach().std() * 0.05 + 12).half()
    return (half - half.mean(0)).mul(((half * half).mean(0) - half.mean(0) ** 2).rsqrt()).float().mean()


def over_zero(y):
    p = torch.sigmoid(y * 1e-2).float()
    return ((p - p) / (p - p)).mean()


def grows(y):
    y = y[:5] * 100
    for _ in range(8):  # leaves fp16 at once, and fp32 after some turns
        y = y.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else y
        y = y @ y.T @ y
    return y.float().sum()


def by_temperature(temperature):
    mask = torch.tensor([True, False, False, False, False])

    def loss(y):
        y = y.masked_fill(mask, -INF) / temperature
        return F.cross_entropy(y.clamp(min=-1e4), torch.ones(16, dtype=torch.long))

    return loss


def through_python(y):
    ratio = y.detach().mul(0).sum() / y.detach().mul(0).sum()  # divides
    return torch.add(y, y, alpha=ratio.item()).mean()


def biased(bias, keys):
    return lambda y: (y + torch.where(torch.arange(5) >= keys, torch.tensor(bias), 0.0)).softmax(-1).square().sum()


def two_masks(*columns):
    """The sum of both is beyond fp16, and harmless where a key is left."""
    causal, padding = torch.triu(torch.full((16, 16), MIN16), 1).half(), torch.zeros(16, 16).half()
    padding[:, list(columns)] = MIN16

    def loss(y):
        scores = (y @ y.T) * 0 - 45
        scores = scores + (causal + padding)
        return scores.softmax(-1).float().square().sum() + y.float().mean()

    return loss


weights, labels = torch.tensor([1.0, INF, 1.0, 1.0, 1.0]), torch.tensor([0, 2] * 8)
SINGULAR = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.1, 0.2, 0.3]])
ZERO, DOMAIN = "division or logarithm of zero", "outside the domain of a function"
UNDERFLOW, UNDERFLOW32 = "underflow in 16 bits", "underflow in fp32"
CANCELS, ROUNDS = "cancellation in 16 bits", "rounding in 16 bits"
NOT_IN_FP32 = "Without autocast the window is not finite either"
BY_CASTS = (NOT_IN_FP32, "without the casts that the program itself makes it is")

ROWS = [
    # Numbers that 16 bits or fp32 make 0.
    Row(lambda y: -torch.log(1 - torch.sigmoid(30 + y.float())).mean(), "bf16", "sigmoid before a logarithm", ("float32",)),
    Row(deviation, "bf16", "cancellation in 16 bits", ("rounding errors of its two numbers in 16 bits (sub in bfloat16",)),
    Row(deviation, "fp16", CANCELS, ("rounding errors of its two numbers in 16 bits (sub in float16",)),
    Row(lambda y: torch.log((y * 1e-5) ** 2).mean(), "fp16", "underflow in 16 bits", ("not in float64",)),
    Row(lambda y: torch.log(y * 0).mean(), "fp16", ZERO, ("window is not finite either",)),
    Row(lambda y: torch.log(F.softplus(y * 0 - 18)).mean(), "fp16", UNDERFLOW, ("softplus in float16",)),
    Row(lambda y: torch.acos((y * 0 + 0.99976) * 1.0005 * 0.9998 * 0.9998).float().mean(), "fp16", "rounding in 16 bits",
        ("acos was given a number at the edge of its domain or beyond",)),
    Row(softmax_of_half, "fp16", UNDERFLOW, ("window is not finite either",)),
    Row(softmax_of_half, "fp32", UNDERFLOW, ("window is not finite either",)),
    # The eps is lost, and zeros that it does not guard end in a division.
    Row(lambda y: ((y / (y.norm(dim=1, keepdim=True) + 1e-12)) * 0).sqrt().sum(), "fp16", ZERO, ("is not finite either",)),
    Row(lambda y: (y * 0 / ((y * 0).abs() + 1e-8)).sum(), "fp16", "eps lost in 16 bits", ("the window is finite",)),
    # In float64 exp(-200) is 1e-87, and in fp32 0; a zero that float64 has, too, is none of fp32.
    Row(lambda y: torch.log((y.float() * 0 - 200).exp()).mean(), "fp32", UNDERFLOW32, ("exp in float32 at tests",)),
    Row(lambda y: torch.log((y.float() * 0 - 200).exp()).mean(), "bf16", UNDERFLOW32, ("is 0 there, not in float64",)),
    Row(lambda y: torch.log(torch.det((y[:5] * 0 + torch.eye(5)) * 1e-10)), "fp32", UNDERFLOW32, ("slogdet",)),
    Row(lambda y: torch.log((y.float() * 0 - 1e4).exp()).mean(), "fp32", ZERO, ("a zero",)),
    Row(lambda y: y[:0].mean(), "fp16", ZERO, ("leave out what has no elements",)),
    Row(too_short, "bf16", "targets longer than their inputs", ("by definition",)),
    Row(steep_alignment, "fp32", "overflow in fp32", op="aten._ctc_loss_backward", phase="backward"),
    # Casts of the program, which an island does not end.
    *[row for mode in ("fp32", "fp16") for row in (
        Row(difference_of_casts, mode, CANCELS, BY_CASTS, tried=False),
        Row(angle_of_casts, mode, ROUNDS, BY_CASTS, tried=False),
        Row(variance_of_casts, mode, CANCELS, BY_CASTS, tried=False),
        Row(lambda y: torch.log(y.half().float() * 0).mean(), mode, ZERO, (NOT_IN_FP32,), BY_CASTS[1:], tried=False),
        Row(lambda y: (1 / (1.001 * torch.ones(1)).bfloat16().floor().sub(1).float()).mean() * y.mean(), mode, ZERO,
            (NOT_IN_FP32,), BY_CASTS[1:], tried=False),
    )],
    *[Row(lambda y: (y.float() * 1e6).half().mean().float(), mode, "overflow in a cast", (BY_HAND.text,), ("bf16",))
      for mode in ("fp16", "bf16", "fp32")],
    # What has no value: integers, complex numbers, matrices, nothing.
    Row(lambda y: (1 / torch.tensor([3, 0]) * y.sum()).sum(), "fp32", ZERO, ("reciprocal was given a zero",), op="aten.reciprocal"),
    Row(lambda y: (torch.tensor([4, 0]) ** -0.5 * y.sum()).sum(), "fp32", ZERO, ("pow was given a zero",), op="aten.pow"),
    Row(lambda y: y.sum() / torch.tensor(0), "fp32", ZERO, ("div was given a zero",), op="aten.div"),
    Row(lambda y: torch.log(torch.fft.rfft(y * 0)).real.mean(), "fp32", ZERO, ("log was given a zero",), op="aten.log"),
    Row(lambda y: torch.linalg.solve_triangular(torch.diag(torch.arange(5.0)), y.T, upper=True).mean(), "fp32", ZERO,
        ("was given a singular matrix",), op="aten.linalg_solve_triangular"),
    Row(lambda y: torch.linalg.solve_ex(SINGULAR, y[:3])[0].sum(), "fp32", ZERO,  # which float64 rounds to another
        ("linalg_solve_ex was given a singular matrix", "diagonal")),
    Row(lambda y: F.smooth_l1_loss(y[:0], y[:0] * 2), "fp32", ZERO, ("was given no elements",), ("logits",), "aten.smooth_l1_loss"),
    Row(lambda y: F.binary_cross_entropy_with_logits(y[:0], y[:0]), "fp32", ZERO, ("was given no elements",),
        op="aten.binary_cross_entropy_with_logits"),
    Row(lambda y: F.cross_entropy(y, torch.full((16,), -100)), "fp32", ZERO, ("no targets to average over",)),
    Row(lambda y: y[:1].std(0).sum(), "fp32", ZERO, ("one element, which has no deviation",)),
    Row(lambda y: torch.linalg.svd(torch.eye(5) + 0 * y[:5])[0].sum(), "fp32", ZERO, ("equal singular values",)),
    Row(lambda y: torch.addcdiv(y, torch.ones_like(y), y * 0).mean(), "fp32", ZERO, ("addcdiv was given a zero",)),
    Row(lambda y: torch.lgamma(y * 0).mean(), "fp32", ZERO, ("lgamma was given a zero",)),
    Row(lambda y: torch.logdet(y.T @ y * 0), "fp32", ZERO, ("linalg_slogdet was given a singular matrix",)),
    Row(lambda y: torch.acos(y * 0 + 1).mean(), "fp32", ZERO, ("the slope is infinite: clamp it",), ("eps",)),
    Row(over_zero, "fp16", ZERO, ("div was given a zero",), ("probability",)),
    Row(lambda y: torch.erfinv(2 * torch.sigmoid(y.float() + 60) - 1).mean(), "fp16", ZERO, ("edge of its domain",), ("probability",)),
    # A negative number is no zero.
    Row(lambda y: (-y.abs() - 1).sqrt().mean(), "fp32", DOMAIN, ("sqrt was given a negative number",), ("zero",)),
    Row(lambda y: (-y.abs() - 1).pow(0.45).mean(), "fp32", DOMAIN, ("pow was given a negative number",), ("zero",)),
    Row(lambda y: (y.abs() + 1.5).acos().mean(), "fp32", DOMAIN,
        ("acos was given a number at the edge of its domain or beyond",), ("zero",)),
    Row(lambda y: torch.logdet(-torch.eye(5) * (1 + y.sum() * 0)), "fp32", DOMAIN, ("whose determinant is negative",), ("zero",)),
    # Sigmoids: only a binary cross entropy is advised another one.
    Row(lambda y: -torch.log(torch.sigmoid(y.float() * 0 - 200)).mean(), "fp32", "sigmoid before a logarithm",
        ("logsigmoid(z)",), ("binary_cross",)),
    Row(half_bce, "fp32", "16-bit sigmoid before a logarithm", ("with_logits",), ("logsigmoid",)),
    Row(lambda y: -torch.log(1 - torch.sigmoid(y.float() + 10).bfloat16()).float().mean(), "bf16",
        "16-bit sigmoid before a logarithm"),
    Row(lambda y: -torch.log(1 - torch.sigmoid(y.float() + 5)).mean(), "bf16", None),  # without the cast it is no 1
    # Masks, and infinities that are none.
    Row(lambda y: torch.logaddexp(FORBIDDEN, FORBIDDEN + 0 * y).mean(), "fp32", "nothing left by a mask",
        ("infinities of the same sign",), ("row",)),
    Row(lambda y: torch.softmax(FORBIDDEN + 0 * y, -1).mean(), "fp32", "nothing left by a mask",
        ("got only infinities, as in a row",), ("recursion",)),
    Row(biased(-INF, 0), "fp32", "nothing left by a mask", op="aten._softmax"),
    Row(biased(INF, 3), "fp32", "infinite constant", code="torch.where"),
    Row(by_temperature(1.0), "fp32", None),
    Row(by_temperature(0.0), "fp32", ZERO, ("div was given a zero",), code="/ temperature"),
    Row(through_python, "fp32", ZERO, code="# divides"),
    Row(lambda y: torch.add(y, y, alpha=NAN).mean(), "fp32", "infinite constant"),
    Row(two_masks(-1), "fp16", None, fields={"init_scale": 1.0}),
    Row(two_masks(-1, 0), "fp16", "nothing left by a mask",  # the first row has no other key
        ("Some of them came from add in float16 at tests",), fields={"init_scale": 1.0}),
    Row(lambda y: ((y * 0 - 4e4) + (y * 0 - 4e4)).mean(), "fp16", "overflow in an addition"),
    Row(lambda y: F.cross_entropy(y, labels, weights, label_smoothing=0.1), "fp32", "poisoned tensor", ("was not finite when it got here",)),
    # Overflows: what is true of the numbers, and what fixes them.
    Row(lambda y: (y.half() * 0 - 300).square().mul(-1).mean(), "fp16", "overflow in a product", ("of the size 9e+04",), ("is 9e+04",)),
    Row(lambda y: (y * 0 + 300).square().mean(), "fp16", "overflow in a product", ("the whole network",), ("@keep_fp32",), tried=True),
    Row(lambda y: (y * 0 + 100).exp().mean(), "fp32", "overflow in fp32", (f"{math.exp(100):.4g} in float64",), ("diverges",)),
    Row(lambda y: (y * 0 + 1e3).exp().mean(), "fp32", "overflow in fp32", ("infinite in float64, too",), ("diverges",)),
    Row(lambda y: F.layer_norm(y * 1e21, (5,)).sum(), "fp32", "overflow in fp32", ("native_layer_norm is not finite in float32",),
        ("became NaN",)),
    Row(lambda y: (y + torch.ones_like(y) * MIN32).softmax(-1).sum(), "fp16", "overflow in a product", ("use a smaller number",),
        ("bf16",)),
    Row(grows, "fp16", "overflow in a product", ("Without autocast the window is not finite either.",), ("bf16",)),
    Row(lambda y: y.sum() * 1e30, "fp32", "gradient norm beyond fp32", ("that of bias, the largest",), ("scaled",)),
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_causes_are_told_apart(row):
    torch.manual_seed(0)
    diagnosis = located(nn.Linear(8, 5), (torch.randn(16, 8),), row.mode, row.loss, **(row.fields or {}))
    if row.cause is None:
        assert diagnosis is None, diagnosis
        return
    assert diagnosis is not None and diagnosis.cause == row.cause, diagnosis
    text = said(diagnosis)
    assert all(each in text for each in row.says), text
    assert not any(each in text for each in (*row.never, "any precision", "such as a mean of nothing")), text
    assert row.op in diagnosis.op and row.code in diagnosis.code and row.phase in diagnosis.phase
    assert row.tried is None or any(fix.verified for fix in diagnosis.fixes) == row.tried
    assert row.cause.startswith("overflow") or not any("bf16" in fix.python for fix in diagnosis.fixes)
    if row.op and "was given a zero" in text:
        assert any(each.zeros for each in diagnosis.inputs)  # the report shows it
    if row.cause == "gradient norm beyond fp32":
        assert "module" not in str(diagnosis)


def test_bf16_would_not_hold_what_it_is_not_advised_for():
    assert torch.tensor(MIN32).bfloat16() == -INF


@pytest.mark.parametrize("size, cause", [(1e19, "gradient norm beyond fp32"), (1e20, "overflow in fp32")])
def test_a_norm_beyond_fp32_is_told_from_gradients_that_are_not_finite(size, cause):
    net = filled(nn.Linear(4, 64, bias=False), 0.0)
    diagnosis = located(net, (torch.full((1, 4), size),), "fp32", lambda y: (y * 2e19).sum())
    assert diagnosis is not None and diagnosis.cause == cause
    if cause == "gradient norm beyond fp32":
        assert f"{2e38 * 16:.3g}" in diagnosis.why  # of 256 weights


@pytest.mark.parametrize("cancels", [True, False])
def test_bf16_whose_loss_is_another_is_not_advised(cancels):
    """A sum of products as the square of a sum less the sum of squares: in bf16 nothing is left of it."""

    def loss(y):
        large = 300 + y
        square = large.sum(1) * large.sum(1)
        return (square - 4 * large.square().sum(1)).abs().mean() + y.mean() if cancels else square.mean()

    torch.manual_seed(0)
    diagnosis = located(nn.Linear(8, 4), (torch.randn(16, 8),), "fp16", loss, lr=1e-9, init_scale=1.0)
    assert diagnosis is not None and "overflow" in diagnosis.cause
    assert ("amp=bf16" in [fix.override for fix in diagnosis.fixes if fix.verified]) == (not cancels)
    assert ("far from that in fp32" in diagnosis.why) == cancels


def test_a_loss_scale_below_one_is_tried():
    """Where no island helps: a loss that weighs too much, behind a cast of its own."""

    def heavy(y):
        return y.half().float().mul(1e7).sum()

    batch = (torch.randn(6, 8),)
    diagnosis = located(nn.Linear(8, 4), batch, "fp16", heavy, lr=1e-9)
    assert diagnosis is not None and (diagnosis.cause, diagnosis.phase) == ("overflow in a cast", "backward")
    fits, fix = diagnosis.scale_that_fits, diagnosis.fixes[0]
    assert fits is not None and fits < 1 and fix.verified
    # Other windows may need a smaller one yet: the floor is where fp16 ends.
    assert fix.override == f"amp.init_scale={fits} amp.min_scale={2.0**-24:.17g}"
    assert fix.python == f'Amp.named("fp16", init_scale={fits}, min_scale={2.0**-24:.17g})'
    assert located(nn.Linear(8, 4), batch, "fp16", heavy, init_scale=fits / 4, min_scale=fits / 4) is None


@pytest.mark.parametrize(
    "values, ends",
    [
        (torch.tensor([0.0, 0.0, 1.0, INF]), "50.0% zeros, 1 not finite"),  # of all numbers
        (torch.arange(5000.0), "under 0.1% zeros"),
        (torch.tensor(INF), "[]: none of 1 is finite"),
        (torch.tensor([INF, 0.0]), ": 0, 1 not finite"),
        (torch.zeros(2), ": all 0"),
        (torch.zeros(0), "[0]: empty"),
    ],
)
def test_a_range_says_all_only_of_all(values, ends):
    assert str(Range.of("x", values)).endswith(ends)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_a_number_that_is_not_finite_is_seen_wherever_it_is(dtype):
    for place in range(33):
        values = torch.ones(3, 11, dtype=dtype) * torch.finfo(dtype).max  # whose sum is not finite
        assert is_finite(values) and is_finite(values.t()) and is_finite(values[:, ::2])
        values.view(-1)[place] = (INF, -INF, NAN)[place % 3]
        assert not is_finite(values) and not is_finite(values.t())
    assert is_finite(torch.empty(0, dtype=dtype)) and is_finite(torch.ones((), dtype=dtype))
