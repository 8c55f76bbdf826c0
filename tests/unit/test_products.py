"""Linear layers in formats below 16 bits: the error of each, the sums of float8 units, and no overflow that goes unseen."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, keep_fp32
from amp_core.config.errors import ConfigError
from amp_core.lowp.formats import E4M3, E5M2, Element, Scaling, quantise
from amp_core.lowp.products import (
    LowLinear,
    Products,
    is_converted,
    is_emulated,
    mix,
    multiply,
    pays,
    use_products,
    why_none,
)
from amp_core.models.gpt import GPT

BF16 = torch.bfloat16


FP8 = Products.of("fp8")


def layer(inputs: int = 64, outputs: int = 48, bias: bool = False, how: Products = FP8) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    assert use_products(linear, how) == []
    return linear


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", BF16, enabled=enabled)


def error(value: Tensor, reference: Tensor) -> float:
    return ((value.double() - reference).norm() / reference.norm()).item()


# --- numbers


# (output, gradient of the inputs, of the weight), of normal numbers: an element with m bits of mantissa is off by
# 2^-m / sqrt(12) of its power of two, a product by sqrt(2) times that; E5M2 has one bit less.
ERRORS = {
    ("fp8", "tensor"): (0.037, 0.058, 0.058),
    ("fp8", "row"): (0.037, 0.058, 0.055),
    ("fp8", "row_gw_hp"): (0.037, 0.058, 0.002),  # bfloat16
    ("fp8", "block"): (0.036, 0.058, 0.056),
    ("mxfp8",): (0.036, 0.037, 0.038),
    ("mxfp6",): (0.071, 0.070, 0.074),
    ("mxfp4",): (0.151, 0.153, 0.163),
    ("nvfp4",): (0.139, 0.139, 0.133),
}


@pytest.mark.parametrize("which", ERRORS)
def test_a_format_is_off_by_its_digits(which: tuple[Any, ...]) -> None:
    linear, x = layer(256, 128, how=Products.of(*which)), torch.randn(64, 256, requires_grad=True)
    with autocast():
        y = linear(x)
    grad = torch.randn(64, 128).to(BF16)
    y.backward(grad)
    x64, w64, g64 = x.detach().double(), linear.weight.detach().double(), grad.double()
    assert y.dtype is BF16 and x.grad.dtype is linear.weight.grad.dtype is torch.float32
    found = error(y, x64 @ w64.t()), error(x.grad, g64 @ w64), error(linear.weight.grad, g64.t() @ x64)
    assert found == pytest.approx(ERRORS[which], rel=0.06, abs=0.0005)


@pytest.mark.parametrize("which", ERRORS)
def test_a_product_is_within_the_bound_of_its_sums(which: tuple[Any, ...]) -> None:
    how, size = Products.of(*which), 384
    a = quantise(torch.randn(128, size) * torch.exp2(torch.randint(-9, 9, (128, 1)).float()), how.inputs)
    b = quantise(torch.randn(256, size), how.weights)
    a64, b64 = (
        (part.values.double().view(s.shape[0], -1, s.shape[2], size // s.shape[2]) * s).view(part.values.shape)
        for part in (a, b)
        for s in (part.scale.double(),)
    )
    # Two roundings of scales, one of each product, K - 1 of sums.
    bound = (size + 2) * 2.0**-24 * (a64.abs() @ b64.abs().t())
    assert ((multiply(a, b, how, torch.float32).double() - a64 @ b64.t()).abs() <= bound).all()


def test_with_a_scale_of_the_tensor_an_output_depends_on_its_neighbours_and_with_rows_it_does_not() -> None:
    x = torch.randn(16, 64)
    changed = x.clone()
    changed[1] *= 37
    off = {}
    for granularity in ("tensor", "row"):
        linear = layer(how=Products.of("fp8", granularity))
        with torch.no_grad(), autocast():
            off[granularity] = error(linear(changed)[0], linear(x)[0].double())
    assert off["row"] == 0 and 0.02 < off["tensor"] < 0.1


def test_the_hadamard_matrix_spreads_outliers_and_is_orthogonal() -> None:
    x = torch.randn(32, 8)
    x[3] = 1000.0
    assert error(mix(x).t() @ mix(x), (x.t() @ x).double()) < 32 * 2**-23
    assert mix(x)[:16].abs().amax() < 0.27 * 1000 and mix(torch.eye(16)).abs().unique().tolist() == [0.25]


def test_gradients_are_rounded_stochastically_where_asked_and_again_alike_from_the_same_seed() -> None:
    found = []
    for seed, stochastic in ((1, True), (1, True), (2, True), (3, False), (4, False)):
        torch.manual_seed(0)
        linear, x, grad = (
            layer(how=Products.of("nvfp4", stochastic=stochastic)),
            torch.randn(16, 64),
            torch.randn(16, 48),
        )
        with autocast():
            y = linear(x)
        torch.manual_seed(seed)
        y.backward(grad.to(BF16))
        found.append(linear.weight.grad)
    assert found[0].equal(found[1]) and not found[0].equal(found[2]) and found[3].equal(found[4])


def whole_numbers(*shape: int) -> Tensor:
    """Integers of 3 bits: float8 holds them, and their products sum up without rounding in any order, so in any kernel."""
    return torch.randint(-8, 9, shape).float()


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # by `flags`, whatever it sets
@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_the_emulation_computes_what_scaled_mm_computes(element: Element, granularity: str, onednn: bool) -> None:
    """Bit for bit, where a kernel is. torch asks the CPU for AMX and then trusts oneDNN, whose float8 kernels need
    AVX512-FP16 as well. Real CPUs have both or neither; ONEDNN_MAX_CPU_ISA hides one, and then `_scaled_mm` raises. Ours
    does not call it on a CPU."""
    known = ("DEFAULT", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10_1_512", "AVX10_1_512_AMX")
    if onednn and os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper() not in known:
        pytest.skip("oneDNN may not use the instructions that its float8 kernels need")
    how = Products.of("fp8", granularity)  # type: ignore[arg-type]
    a, b = whole_numbers(32, 64), whole_numbers(48, 64)
    a[:, 0], b[:, 1] = element.largest, 448  # the largest of each range: the factors are powers of two
    first = quantise(a / 8, dataclasses.replace(how.inputs, element=element))
    second = quantise(b / 4, how.weights)
    assert first.scale.unique().tolist() == [1 / 8] and second.scale.unique().tolist() == [1 / 4]
    ours = multiply(first, second, how, torch.float32)
    scales = (first.scale.flatten(), second.scale.flatten()) if granularity == "tensor" else (
        first.scale.view(-1, 1), second.scale.view(1, -1)
    )  # fmt: skip
    with torch.backends.mkldnn.flags(enabled=onednn):
        torchs = torch._scaled_mm(
            first.values, second.values.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.float32
        )
    assert ours.equal(torchs) and ours.double().equal(a.double() @ b.double().t() / 32)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available() or is_emulated("cuda", FP8), reason="needs float8 units")
def test_float8_units_compute_what_the_emulation_computes() -> None:
    linear, x = layer(256, 128, bias=True), torch.randn(50, 256)
    grad = torch.randn(50, 128).to(BF16)
    results = []
    for device in ("cpu", "cuda"):
        twin, inputs = copy.deepcopy(linear).to(device), x.to(device).requires_grad_()
        with torch.autocast(device, BF16):
            y = twin(inputs)
        y.backward(grad.to(device))
        results.append([t.detach().cpu().double() for t in (y, inputs.grad, twin.weight.grad, twin.bias.grad)])
    for theirs, ours in zip(*results, strict=True):
        assert error(ours, theirs) < 4e-3  # one digit of bfloat16


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e30])
def test_a_tensor_of_any_size_fills_the_range_and_zeros_stay_zeros(element: Element, size: float) -> None:
    x, how = torch.randn(64, 64) * size, Scaling(element, (None, None))
    x[0] = 0
    low = quantise(x, how)
    assert low.values.float().isfinite().all() and (low.values[0].float() == 0).all()
    if size > 1e-30:
        assert low.values.float().abs().max() == element.largest
        assert error(low.dense(), x.double()) < (0.03 if element is E4M3 else 0.06)
    assert (quantise(torch.zeros(4, 4), how).dense() == 0).all()


def test_training_in_fp8_ends_where_fp32_ends() -> None:
    def train(mode: str) -> float:
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        if mode == "fp8":
            assert use_products(net, FP8) == [("4", "1 outputs: no multiple of 16")]
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, fused=True)
        x = torch.randn(2048, 32)
        with torch.no_grad():
            y = 3 * teacher(3 * x)
        for i in range(300):
            rows = slice(60 * i % 1980, 60 * i % 1980 + 60)
            with autocast(mode != "fp32"):
                loss = F.mse_loss(net(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad(), autocast(mode != "fp32"):
            return (F.mse_loss(net(x), y) / y.var()).item()

    losses = {mode: train(mode) for mode in ("fp32", "bf16", "fp8")}
    print(losses)
    assert losses["fp32"] < 0.2 and losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)
    assert losses["fp8"] == pytest.approx(losses["fp32"], rel=0.03)


# --- overflow


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
@pytest.mark.parametrize("which", [("fp8",), ("fp8", "row_gw_hp"), ("mxfp8",), ("nvfp4",)])
def test_what_is_not_finite_ends_in_a_skipped_step(which: tuple[Any, ...], bad: float, where: str) -> None:
    net, amp = nn.Sequential(layer(32, 32, how=Products.of(*which))), Amp.named("bf16")
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    x, weight = torch.randn(8, 32), net[0].weight
    before = weight.detach().clone()
    with torch.no_grad():
        if where != "gradient":
            {"input": x, "weight": weight}[where][1, 2] = bad
    with amp.autocast():
        y = net(x)
    assert y.isfinite().all() == (where == "gradient")
    y.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), bad) if where == "gradient" else None)
    amp.backward(y.float().square().mean())
    assert not amp.step(optimizer).taken and (weight.detach().equal(before) or where == "weight")


SATURATES = torch.__version__ >= "2.13"
"""Whether a plain cast to float8 makes the largest number of what is larger; before, it made a NaN of it."""


def test_the_wrong_way_a_plain_cast_hides_an_overflow() -> None:
    overflow = torch.tensor([[1e4, float("inf")] * 16])
    plain = overflow.to(torch.float8_e4m3fn).float()
    assert plain.eq(448.0).all() if SATURATES else plain.isnan().all()
    weight = torch.randn(16, 32)
    # With a fixed scale, or that of the last step, it is the cast that decides whether an overflow is seen.
    assert (plain @ weight.t()).isfinite().all() == SATURATES
    low = quantise(overflow, FP8.inputs)
    assert multiply(low, quantise(weight, FP8.weights), FP8, torch.float32).isnan().all()


# --- shapes and places


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (16, 64), (3, 5, 64), (2, 1, 3, 64), (0, 64), (4, 0, 64)])
def test_any_leading_dimensions(shape: tuple[int, ...], bias: bool) -> None:
    linear, x = layer(bias=bias), torch.randn(shape, requires_grad=True)
    with autocast():
        y = linear(x)
    y.float().square().sum().backward()
    assert y.shape == (*shape[:-1], 48) and y.dtype is BF16
    assert x.grad.shape == x.shape and linear.weight.grad.shape == linear.weight.shape
    if x.numel():
        plain = F.linear(x.detach().double(), linear.weight.double(), None if not bias else linear.bias.double())
        assert error(y, plain) < 0.06
        assert linear.bias is None or error(linear.bias.grad, 2 * y.detach().double().reshape(-1, 48).sum(0)) < 0.01


def test_rows_of_padding_change_nothing() -> None:
    linear, x = layer(), torch.randn(16, 64)
    with autocast():
        assert linear(x[:5]).equal(linear(torch.cat([x[:5], torch.zeros(11, 64)]))[:5])


def test_without_autocast_it_is_an_fp32_layer() -> None:
    linear, x = layer(bias=True), torch.randn(4, 64)
    assert linear(x).equal(F.linear(x, linear.weight, linear.bias))
    with torch.no_grad(), autocast():
        assert linear.eval()(x).dtype is BF16 and not linear(x).requires_grad


def test_copies_and_pickles_are_float8_with_the_same_names() -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    names = list(net.state_dict())
    use_products(net, Products.of("mxfp8"))
    twin = copy.deepcopy(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(2, 32)
    with autocast():
        assert net(x).equal(twin(x)) and net(x).equal(loaded(x)) and not net(x).equal(nn.Linear(32, 32)(x))
    with torch.no_grad():
        twin[0].weight.zero_()
    with autocast():
        assert not net(x).equal(twin(x))
    assert list(net.state_dict()) == list(twin.state_dict()) == names


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 64)
        self.attention = nn.MultiheadAttention(32, 2)
        self.island = nn.Sequential(nn.Linear(64, 64))
        self.norm = keep_fp32(nn.Linear(16, 16))
        self.head = nn.Linear(64, 10)


def test_what_stays_as_it_is_is_named_with_its_reason() -> None:
    net = Small()
    keep_fp32(net, ["island"])
    assert dict(use_products(net, FP8)) == {
        "attention.out_proj": "it is a NonDynamicallyQuantizableLinear, with a forward of its own",
        "island.0": "it is part of an fp32 island",
        "norm": "it is part of an fp32 island",
        "head": "amp.keep_bf16 names it",
    }
    assert [name for name, module in net.named_modules() if isinstance(module, LowLinear)] == ["body"]
    assert "body" not in dict(use_products(net, FP8))  # twice changes nothing


def test_globs_choose_what_is_converted_and_what_stays_and_must_match() -> None:
    def net() -> nn.ModuleDict:
        return nn.ModuleDict({"a": nn.Linear(16, 16), "head": nn.Linear(16, 16)})

    def converted(how: Products = FP8, **globs: Any) -> list[str]:
        each = net()
        use_products(each, how, **globs)
        return [name for name, module in each.items() if isinstance(module, LowLinear)]

    assert converted() == ["a"] and converted(high=[]) == ["a", "head"]
    assert converted(high=["a"]) == ["head"]
    with pytest.raises(ValueError, match="'c' matches none of the linear layers: a, head"):
        converted(high=["c"])
    left = use_products(odd := nn.Sequential(nn.Linear(20, 10)), FP8)
    assert not is_converted(odd) and "(0: 20 inputs and 10 outputs: no multiple of 16)" in why_none(left)
    assert converted(Products.of("mxfp8"), high=[]) == []  # 16 is no multiple of 32


def test_a_second_derivative_is_refused() -> None:
    linear, x, amp = layer(), torch.randn(2, 64, requires_grad=True), Amp.named("bf16")
    with amp.autocast():
        y = linear(x)
    with pytest.raises(RuntimeError, match="no second derivative"):
        amp.grad(y, x)


def test_a_cpu_emulates() -> None:
    assert is_emulated("cpu", FP8)


GPTS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "GPT-2 small": ({"width": 768, "depth": 12, "heads": 12}, {"tensor": 25, "row": 0}),
    "width 4096": ({"width": 4096, "depth": 1, "heads": 32}, {"tensor": 5, "row": 5}),
    "the default": ({}, {"tensor": 0, "row": 0}),
}
"""Linear layers that float8 units make faster, with the logits of 50,304 tokens; the default has 17 of 256."""


@pytest.mark.parametrize("name", GPTS)
def test_layers_pay_by_torchaos_thresholds(name: str) -> None:
    options, counts = GPTS[name]
    for granularity, expected in counts.items():
        with torch.device("meta"):
            net = GPT(vocab_size=50_304 if options else 256, length=64, **options)
        how = Products.of("fp8", granularity)  # type: ignore[arg-type]
        use_products(net, how, [])
        found = [why for module in net.modules() if (why := pays(module, how))]
        assert found.count("pays") == expected and len(found) == 4 * len(net.blocks) + 1
    odd, mx = nn.Linear(100, 64), Products.of("mxfp8")
    assert pays(odd, FP8) == "no multiple of 16" and pays(nn.Linear(64, 64), FP8) == "kept"
    assert pays(layer(64, 64, how=mx), mx) == "emulated" and pays(nn.ReLU(), FP8) == ""


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_torchao_agrees_about_what_pays_and_about_the_numbers(granularity: str) -> None:
    """The second implementation: which layers its filter takes, and the codes and scales of its float8 casts."""
    utils = pytest.importorskip("torchao.float8.float8_linear_utils")
    how = Products.of("fp8", granularity)  # type: ignore[arg-type]
    accepts = getattr(utils, f"_auto_filter_for_{granularity}wise")
    for inputs in (768, 1024, 1040, 2048, 2064, 4096, 4112, 8192):
        for outputs in (768, 1024, 1040, 2048, 2064, 4096, 4112, 8192):
            linear = nn.Linear(inputs, outputs, device="meta")
            use_products(linear, how)
            assert (pays(linear, how) == "pays") is accepts(linear, "", []), (inputs, outputs)
    scaling = pytest.importorskip("torchao.float8.float8_scaling_utils")
    config = pytest.importorskip("torchao.float8.config")
    x = torch.randn(64, 96) * torch.exp2(torch.randint(-9, 9, (64, 1)).float())
    kinds, is_row = config.ScalingGranularity, granularity == "row"
    theirs = scaling.hp_tensor_to_float8_dynamic(
        x,
        torch.float8_e4m3fn,
        None,
        scaling_granularity=kinds.AXISWISE if is_row else kinds.TENSORWISE,
        axiswise_dim=-1 if is_row else None,
    )
    ours = quantise(x, how.inputs)
    assert (ours.values.view(torch.uint8) == theirs._data.view(torch.uint8)).float().mean() > 0.999
    torch.testing.assert_close(ours.scale.flatten(), 1 / theirs._scale.flatten(), rtol=2**-22, atol=0)


def test_an_unknown_format_is_one_problem() -> None:
    """Not a second one about each key of the formats."""
    with pytest.raises(ConfigError, match=r"^amp\.format=mxfp5: expected one of [^\n]*$") as raised:
        Amp.named("mxfp8", format="mxfp5")
    assert "scale_rule" not in str(raised.value)
