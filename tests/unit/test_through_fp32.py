"""16-bit products and convolutions on a CPU without units: sums in fp32, rounded once, by no 16-bit kernel of torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from running import state

import train
from amp_core import Amp
from amp_core.config.rules import amp_config
from amp_core.lowp import through_fp32 as ours
from amp_core.torch_private import cpu_has

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALF_A_STEP = {FP16: (2**-11, 2**-25), BF16: (2**-8, 2**-134)}
"""Of a rounding to it: relative, and where the result is subnormal."""
COARSER = {FP16: BF16, BF16: torch.float8_e5m2}
both = pytest.mark.parametrize("dtype", [FP16, BF16])


@pytest.fixture(autouse=True)
def _torchs_own_kernels():
    ours.restore_kernels()
    torch.manual_seed(0)
    yield
    ours.restore_kernels()


@pytest.fixture
def _no_units(monkeypatch):
    monkeypatch.setattr(ours, "cpu_has", lambda dtype: False)


def conv(name, **options):
    return lambda x, w, b=None: getattr(F, name)(x, w, b, **options)


# name: (function, shape of the input, shape of the weight, channels of the result)
CASES = {
    "1d": (conv("conv1d", padding=1), (3, 5, 11), (7, 5, 3), 7),
    "2d": (conv("conv2d", padding=1), (3, 5, 9, 8), (6, 5, 3, 3), 6),
    "3d": (conv("conv3d", padding=1), (2, 3, 5, 4, 6), (4, 3, 3, 3, 3), 4),
    "1x1": (conv("conv2d"), (3, 16, 6, 6), (8, 16, 1, 1), 8),
    "strided": (conv("conv2d", stride=2, padding=1), (3, 5, 9, 8), (6, 5, 4, 4), 6),
    "dilated": (conv("conv2d", dilation=2, padding=2), (3, 5, 9, 8), (6, 5, 3, 3), 6),
    "same": (conv("conv2d", padding="same"), (3, 5, 9, 8), (6, 5, 3, 3), 6),
    "groups": (conv("conv2d", groups=2, padding=1), (3, 4, 9, 8), (6, 2, 3, 3), 6),
    "depthwise": (conv("conv2d", groups=8, padding=1), (3, 8, 9, 8), (8, 1, 3, 3), 8),
    "transposed": (conv("conv_transpose2d", stride=2, padding=1), (3, 5, 5, 6), (5, 4, 4, 4), 4),
    "transposed groups": (conv("conv_transpose2d", groups=2), (3, 4, 5, 6), (4, 3, 3, 3), 6),
    "unbatched": (conv("conv2d"), (5, 9, 8), (6, 5, 3, 3), 6),
}


def products(case, dtype=FP16):
    """Input, weight and bias in 16 bits, and the gradient of the result."""
    f, x, w, channels = CASES[case]
    x, w, b = (torch.randn(shape).to(dtype) for shape in (x, w, (channels,)))
    return x, w, b, torch.randn(f(x.double(), w.double(), b.double()).shape).to(dtype)


def computed(f, x, w, b, g, dtype=None):
    """The result and the gradients of input, weight and bias."""
    x, w, b = (each.detach().to(dtype or each.dtype).requires_grad_() for each in (x, w, b))
    y = f(x, w, b)
    return y.detach(), *torch.autograd.grad(y, (x, w, b), g.to(y.dtype))


def bounds(f, x, w, b, g):
    """How far from the true result each of `computed` may be.

    A sum of n products that are exact in fp32 errs by n u / (1 - n u) times the sum of their absolute values, in any
    order, with u = 2^-24. Rounding adds half of a step of the dtype.
    """
    relative, least = HALF_A_STEP[x.dtype]
    exact = computed(f, x, w, b, g, FP64)
    sizes = computed(f, *(each.abs() for each in (x, w, b, g)), FP64)
    counts = computed(f, *(torch.ones_like(each) for each in (x, w, b, g)), FP64)
    for value, size, n in zip(exact, sizes, counts, strict=True):
        of_sum = n * 2**-24 / (1 - n * 2**-24) * size
        yield value, of_sum + torch.clamp((value.abs() + of_sum) * relative, min=least)


@both
@pytest.mark.usefixtures("_no_units")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_true_but_for_an_fp32_sum_and_one_rounding(case, layout, dtype):
    f, *given = CASES[case][0], *products(case, dtype)
    if given[0].ndim == 4:
        given[0] = given[0].contiguous(memory_format=layout)
    torchs = computed(f, *given)
    ours.compute_in_fp32(dtype)
    for result, plain, (exact, bound) in zip(computed(f, *given), torchs, bounds(f, *given), strict=True):
        assert result.dtype is plain.dtype is dtype
        assert result.shape == plain.shape and result.is_contiguous() == plain.is_contiguous()
        assert ((result.double() - exact).abs() <= bound).all()
    rough = (each.to(COARSER[dtype]).double() for each in computed(f, *given))  # what the bound is there to tell apart
    assert all(((r - exact).abs() > bound).any() for r, (exact, bound) in zip(rough, bounds(f, *given), strict=True))


@both
@pytest.mark.usefixtures("_no_units")
@pytest.mark.parametrize("case", CASES)
def test_they_are_the_bits_of_fp32_rounded_once(case, dtype):
    f, *given = CASES[case][0], *products(case, dtype)
    fp32 = computed(f, *given, FP32)
    ours.compute_in_fp32(dtype)
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(computed(f, *given), fp32, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(computed(f, *given, FP32), fp32, strict=True))  # fp32 stays torch's


PRODUCTS = {
    "mm": lambda x, w, b: torch.mm(x, w.T),
    "linear of a sequence": lambda x, w, b: F.linear(x.view(4, 3, 40), w, b),
    "bmm": lambda x, w, b: torch.bmm(x.view(3, 4, 40), w.view(1, 8, 40).mT.expand(3, 40, 8)),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.T, beta=0.5, alpha=2.0),
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x.view(3, 4, 40), w.T.expand(3, 40, 8), beta=2.0, alpha=0.25),
}


@both
@pytest.mark.usefixtures("_no_units")
@pytest.mark.parametrize("case", PRODUCTS)
def test_products_are_those_of_fp32_rounded_once_where_there_are_no_units(case, dtype):
    f, given = PRODUCTS[case], [torch.randn(shape).to(dtype) for shape in ((12, 40), (8, 40), (8,))]
    fp32, exact = f(*(each.float() for each in given)), f(*(each.double() for each in given))
    ours.compute_in_fp32(dtype)
    assert torch.equal(f(*given), fp32.to(dtype)) and torch.equal(f(*(each.float() for each in given)), fp32)
    # Factors are powers of 2: as of a sum of 41 products.
    sizes = f(*(each.double().abs() for each in given))
    of_sum = 41 * 2**-24 / (1 - 41 * 2**-24) * sizes
    relative, least = HALF_A_STEP[dtype]
    bound = of_sum + torch.clamp((exact.abs() + of_sum) * relative, min=least)
    assert ((f(*given).double() - exact).abs() <= bound).all()
    assert ((f(*given).to(COARSER[dtype]).double() - exact).abs() > bound).any()


@pytest.mark.usefixtures("_no_units")
def test_gradients_of_products_are_those_of_fp32_rounded_once():
    given = [torch.randn(12, 40).half(), torch.randn(8, 40).half(), torch.randn(8).half(), torch.randn(12, 8).half()]
    fp32 = computed(F.linear, *given, FP32)
    ours.compute_in_fp32(FP16)
    found = computed(F.linear, *given)
    assert all(torch.equal(a, b.half()) for a, b in zip(found[:3], fp32[:3], strict=True))  # a bias has a sum
    one, other = torch.full((2, 64), 256.0).half(), torch.full((64, 3), 256.0).half()
    other[32:] *= -1
    assert torch.equal(one @ other, torch.zeros(2, 3).half())  # beyond 65504 on the way
    assert (one @ other.abs()).isposinf().all()
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(one, other.float())


def test_a_result_above_65504_is_infinite_and_a_sum_on_the_way_is_not():
    ours.compute_in_fp32(FP16)
    x, w = torch.full((1, 2, 1, 1), 256.0).half(), torch.full((3, 2, 1, 1), 128.0).half()
    w[1, 1] = -128.0
    w[2] = -128.0
    assert F.conv2d(x, w).flatten().tolist() == [torch.inf, 0.0, -torch.inf]  # 65536, 32768 - 32768, -65536
    x = torch.tensor([60000.0, 60000.0, -60000.0]).half().view(1, 3, 1, 1)
    assert F.conv2d(x, torch.ones(1, 3, 1, 1).half()).item() == torch.tensor(60000.0).half().item()
    edge = torch.tensor([65504.0, 15.0]).half().view(1, 2, 1, 1)  # 65519 rounds down, 65520 is half-way to 65536
    assert F.conv2d(edge, torch.ones(1, 2, 1, 1).half()).item() == 65504.0
    edge[0, 1] = 16.0
    assert F.conv2d(edge, torch.ones(1, 2, 1, 1).half()).item() == torch.inf


def test_double_backward_is_rounded_once_per_operator():
    """A penalty on the gradient: d/dw of <dy/dx(w), v> is a gradient of weights with v for the input."""
    x, w, _, g = products("2d")
    v = torch.randn(x.shape).half()
    f = CASES["2d"][0]

    def penalty(dtype):
        weight, given = w.to(dtype).requires_grad_(), x.to(dtype).requires_grad_()
        (grad,) = torch.autograd.grad(f(given, weight), given, g.to(dtype), create_graph=True)
        return torch.autograd.grad(grad, weight, v.to(dtype))[0]

    ours.compute_in_fp32(FP16)
    exact, bound = list(bounds(f, v, w, torch.zeros(6).half(), g))[2]
    assert torch.equal(penalty(FP64), exact)
    result = penalty(FP16)
    assert result.dtype is FP16 and ((result.double() - exact).abs() <= bound).all()


# --- when -------------------------------------------------------------------------------------------------------------


MODES = ["fp32", "tf32", "bf16", "fp16", "fp16_capped", "o0", "o1", "o2", "o3", "bf16_pure", "fp8"]


@pytest.mark.parametrize("has_units", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_modes_use_it_for_their_own_dtype_where_the_cpu_has_no_units(mode, has_units, monkeypatch):
    monkeypatch.setattr(ours, "cpu_has", lambda dtype: has_units)
    Amp.named(mode, samples=1)
    config, found = amp_config(mode), ours.in_use()
    expected = {dtype for dtype in (config.dtype, config.weights) if dtype != "float32"}
    assert found.keys() == expected - ({"bfloat16"} if has_units else set())
    for operators in found.values():
        assert {"convolution", "convolution_backward"} <= {*operators} and ("mm" in operators) is not has_units


def test_it_goes_as_it_came():
    given = CASES["2d"][0], *products("2d")
    before = computed(*given)
    ours.compute_in_fp32(FP16)
    ours.compute_in_fp32(FP16)
    assert ours.in_use()
    ours.restore_kernels()
    ours.restore_kernels()
    assert not ours.in_use()
    assert all(torch.equal(a, b) for a, b in zip(computed(*given), before, strict=True))


SMALL = ["data=synthetic", "data.num_samples=96", "data.image_size=8", "data.num_classes=4", "model.options.width=8"]
SMALL += ["device=cpu", "log.progress=false", "batch_size=8"]


@pytest.mark.parametrize("mode", ["fp16", "o2", "bf16"])
def test_a_run_says_it_once_and_puts_torchs_kernels_back(mode, own_folder):
    assert train.main([*SMALL, f"amp={mode}", "steps=2", "run_dir=a"]) == 0 and not ours.in_use()
    dtype = "bfloat16" if mode == "bf16" else "float16"
    said, has_units = Path("a/train.log").read_text(), cpu_has(dtype)
    assert said.count("fp16 convolutions compute in fp32") == (has_units and dtype == "float16")
    assert said.count(f"no fast {dtype} units") == (not has_units)
    recorded = json.loads(Path("a/environment.json").read_text())["through_fp32"]
    assert [*recorded] == [dtype] * (dtype == "float16" or not has_units)
    assert state("a")["progress"]["step"] == 2
