"""float8 linear layers: the documented error, the gradients of float8 units, and no overflow that goes unseen."""

from __future__ import annotations

import copy
import io
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, keep_fp32
from amp_core.lowp.float8 import E4M3, E5M2, Float8Linear, float8_is_emulated, multiply, quantise, use_float8

BF16 = torch.bfloat16


def layer(inputs: int = 64, outputs: int = 48, bias: bool = False) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    assert use_float8(linear) == []
    return linear


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", BF16, enabled=enabled)


def error(value: Tensor, reference: Tensor) -> float:
    return ((value.double() - reference).norm() / reference.norm()).item()


# --- numbers


def test_a_product_is_4_percent_off_and_its_gradients_6_percent() -> None:
    linear, x = layer(256, 128), torch.randn(64, 256, requires_grad=True)
    with autocast():
        y = linear(x)
    grad = torch.randn(64, 128).to(BF16)
    y.backward(grad)
    x64, w64, g64 = x.detach().double(), linear.weight.detach().double(), grad.double()
    assert y.dtype is BF16 and x.grad.dtype is linear.weight.grad.dtype is torch.float32
    assert error(y, x64 @ w64.t()) == pytest.approx(0.037, abs=0.002)  # e4m3 twice
    assert error(x.grad, g64 @ w64) == pytest.approx(0.058, abs=0.003)  # e5m2 and e4m3
    assert error(linear.weight.grad, g64.t() @ x64) == pytest.approx(0.058, abs=0.003)


def whole_numbers(*shape: int) -> Tensor:
    """Integers of 3 bits: float8 holds them, and their products sum up without rounding in any order, so in any kernel."""
    return torch.randint(-8, 9, shape).float()


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # by `flags`, whatever it sets
@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("rows", [32, 7])
def test_the_emulation_computes_what_scaled_mm_computes(dtype: torch.dtype, rows: int, onednn: bool) -> None:
    """Bit for bit, where a kernel is. torch asks the CPU for AMX and then trusts oneDNN, whose float8 kernels need
    AVX512-FP16 as well. Real CPUs have both or neither; ONEDNN_MAX_CPU_ISA hides one, and then `_scaled_mm` raises. Ours
    does not call it on a CPU."""
    known = ("DEFAULT", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10_1_512", "AVX10_1_512_AMX")
    if onednn and os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper() not in known:
        pytest.skip("oneDNN may not use the instructions that its float8 kernels need")
    a, b = whole_numbers(rows, 64), whole_numbers(48, 64)
    a[0, 0], b[0, 1] = torch.finfo(dtype).max, 448  # the largest of each range: the factors are powers of two
    (a, a_factor), (b, b_factor) = quantise(a / 8, dtype), quantise(b / 4, E4M3)
    assert (a_factor, b_factor) == (1 / 8, 1 / 4)
    ours = multiply(a, a_factor, b, b_factor, torch.float32)
    with torch.backends.mkldnn.flags(enabled=onednn):
        torchs = torch._scaled_mm(a, b.t(), scale_a=a_factor, scale_b=b_factor, out_dtype=torch.float32)
    assert ours.equal(torchs) and ours.double().equal(a.double() @ b.double().t() / 32)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available() or float8_is_emulated("cuda"), reason="needs float8 units")
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


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e30])
def test_a_tensor_of_any_size_fills_the_range_and_zeros_stay_zeros(dtype: torch.dtype, size: float) -> None:
    x = torch.randn(64, 64) * size
    x[0] = 0
    low, factor = quantise(x, dtype)
    assert low.float().isfinite().all() and (low[0].float() == 0).all()
    if size > 1e-30:
        assert low.float().abs().max() == torch.finfo(dtype).max
        assert error(low.double() * factor.double(), x.double()) < (0.03 if dtype is E4M3 else 0.06)
    zeros, factor = quantise(torch.zeros(4, 4), dtype)
    assert (zeros.float() * factor == 0).all()


def test_training_in_float8_ends_where_fp32_ends() -> None:
    def train(mode: str) -> float:
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        if mode == "fp8":
            assert use_float8(net) == [("4", "1 outputs: no multiple of 16")]
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
def test_what_is_not_finite_ends_in_a_skipped_step(bad: float, where: str) -> None:
    net, amp = nn.Sequential(layer(32, 16)), Amp.named("bf16")
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    x, weight = torch.randn(8, 32), net[0].weight
    before = weight.detach().clone()
    with torch.no_grad():
        if where != "gradient":
            {"input": x, "weight": weight}[where][1, 2] = bad
    with amp.autocast():
        y = net(x)
    assert y.isfinite().any() == (where == "gradient")
    y.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), bad) if where == "gradient" else None)
    amp.backward(y.float().square().mean())
    assert not amp.step(optimizer).taken and (weight.detach().equal(before) or where == "weight")


SATURATES = torch.__version__ >= "2.13"
"""Whether a plain cast to float8 makes the largest number of what is larger; before, it made a NaN of it."""


def test_the_wrong_way_a_plain_cast_hides_an_overflow() -> None:
    overflow = torch.tensor([[1e4, float("inf")] * 16])
    plain = overflow.to(E4M3).float()
    assert plain.eq(448.0).all() if SATURATES else plain.isnan().all()
    weight = torch.randn(16, 32)
    # With a fixed scale, or that of the last step, it is the cast that decides whether an overflow is seen.
    assert (plain @ weight.t()).isfinite().all() == SATURATES
    low, factor = quantise(overflow, E4M3)
    assert multiply(low, factor, *quantise(weight, E4M3), torch.float32).isnan().all()


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
    use_float8(net)
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
    assert dict(use_float8(net)) == {
        "attention.out_proj": "it is a NonDynamicallyQuantizableLinear, with a forward of its own",
        "island.0": "it is part of an fp32 island",
        "norm": "it is part of an fp32 island",
        "head": "10 outputs: no multiple of 16",
    }
    assert [name for name, module in net.named_modules() if isinstance(module, Float8Linear)] == ["body"]
    assert use_float8(net, ["body"]) == []  # twice changes nothing


def test_patterns_choose_and_must_match() -> None:
    net = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    use_float8(net, ["a"])
    assert isinstance(net["a"], Float8Linear) and not isinstance(net["b"], Float8Linear)
    with pytest.raises(ValueError, match="'c' matches none of the linear layers: a, b"):
        use_float8(net, ["c"])
    with pytest.raises(ValueError, match=r"no linear layer can be converted. 0: 20 inputs and 10 outputs"):
        use_float8(nn.Sequential(nn.Linear(20, 10)))


def test_a_second_derivative_is_refused() -> None:
    linear, x, amp = layer(), torch.randn(2, 64, requires_grad=True), Amp.named("bf16")
    with amp.autocast():
        y = linear(x)
    with pytest.raises(RuntimeError, match="no second derivative"):
        amp.grad(y, x)


def test_a_cpu_emulates() -> None:
    assert float8_is_emulated("cpu")
