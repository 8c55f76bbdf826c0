"""Custom functions under autocast: each kind left alone fails in its own way, and done right it equals float64."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import custom_bwd, custom_fwd
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

from amp_core import Amp
from amp_core.models import build_model
from recipes.custom_function import MODELS, Product, RowNorm, SquaredDistance, on_its_device, squared_distance

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
half_types = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
EPS = {FP16: 2**-11, BF16: 2**-8}
IN_FP32 = 132 * 2**-24
"""The bound of `RowNorm`: the sum of 256 squares in any order, halved by the root, and four more roundings."""
FACTS = {"num_classes": 4, "image_shape": (1, 8, 8)}


def autocast(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


def leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().clone().to(dtype).requires_grad_()


def error(x: Tensor | None, expected: Tensor | None) -> float:
    """Relative, in the L2 norm, measured in float64."""
    assert x is not None and expected is not None
    x, expected = x.detach().double(), expected.detach().double()
    return float((x - expected).norm() / expected.norm())


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("function", [Product, SquaredDistance])
def test_first_and_second_derivatives_are_those_of_finite_differences(function: Any) -> None:
    inputs = numbers(3, 5), numbers(4, 5)
    assert gradcheck(function.apply, inputs) and gradgradcheck(function.apply, inputs)


def test_a_function_that_saves_what_is_no_input_has_a_first_derivative_and_refuses_a_second() -> None:
    def norm(x: Tensor) -> Any:
        return RowNorm.apply(x, 1e-6)

    assert gradcheck(norm, (numbers(3, 5),))
    x = numbers(3, 5)
    (slope,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
    with pytest.raises(GradcheckError, match="Jacobian mismatch"):  # in silence it would be wrong
        gradgradcheck(lambda x: RawNorm.apply(x, 1e-6), (numbers(3, 5),))


class Undecorated(Function):
    """`Product` as it is written without a thought of autocast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad.mm(weight), grad.t().mm(x)


def product(function: Any, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        y = function(x, weight)
    (0.5 * y.to(torch.promote_types(y.dtype, FP32)).square().sum()).backward()
    return y


@half_types
@pytest.mark.parametrize("inputs", ["fp32", "16-bit"])
def test_undecorated_it_fails_in_the_backward_pass_where_gradients_meet_fp32_weights(dtype: Any, inputs: str) -> None:
    x, weight = torch.randn(32, 64), torch.randn(16, 64)
    kind = FP32 if inputs == "fp32" else dtype
    with pytest.raises(RuntimeError, match="same dtype"):
        product(Undecorated.apply, leaf(x, kind), leaf(weight, FP32), dtype)
    a, b, right_a, right_b = leaf(x, kind), leaf(weight, FP32), leaf(x, torch.float64), leaf(weight, torch.float64)
    y, right = product(Product.apply, a, b, dtype), product(Product.apply, right_a, right_b)
    assert y.dtype is dtype and error(y, right) < EPS[dtype]
    assert error(a.grad, right_a.grad) < 2 * EPS[dtype] and error(b.grad, right_b.grad) < 2 * EPS[dtype]
    assert a.grad is not None and b.grad is not None and (a.grad.dtype, b.grad.dtype) == (kind, FP32)


def seen_by(forward_decorator: Any, backward_decorator: Any, dtype: torch.dtype) -> list[tuple[torch.dtype, bool]]:
    """Dtype of the tensor and autocast, in the forward and in the backward of an fp16 or bf16 input."""
    seen = []

    class Spy(Function):
        @staticmethod
        @forward_decorator
        def forward(ctx: Any, x: Tensor, number: Tensor) -> Tensor:
            assert number.dtype is torch.int64
            seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
            return 2 * x

        @staticmethod
        @backward_decorator
        def backward(ctx: Any, grad: Tensor) -> Any:
            seen.append((grad.dtype, torch.is_autocast_enabled("cpu")))
            return 2 * grad, None

    x = leaf(torch.ones(3), dtype)
    with autocast(dtype):
        y = Spy.apply(x, torch.ones(3, dtype=torch.int64))
    y.sum().backward()  # type: ignore[union-attr]
    assert x.grad is not None and x.grad.dtype is dtype and bool((x.grad == 2).all())
    return seen


def nested(decorate: Any, inner: str, outer: str) -> Any:
    return lambda function: decorate(decorate(function, device_type=inner), device_type=outer)


@half_types
def test_the_backward_sees_the_autocast_of_the_forward_if_the_decorators_are_those_of_the_device(dtype: Any) -> None:
    ours = on_its_device(custom_fwd), on_its_device(custom_bwd)
    assert seen_by(*ours, dtype) == [(dtype, True), (dtype, True)]
    bare = [(dtype, True), (dtype, False)]
    assert seen_by(lambda f: f, lambda f: f, dtype) == bare
    assert seen_by(nested(custom_fwd, "cuda", "cpu"), nested(custom_bwd, "cuda", "cpu"), dtype) == bare
    with pytest.warns(FutureWarning):
        assert seen_by(torch.cuda.amp.custom_fwd, torch.cuda.amp.custom_bwd, dtype) == bare


def test_the_same_function_follows_tensors_to_a_gpu() -> None:
    """CUDA's policy without a GPU: fake tensors know dtypes and hold no numbers."""
    ctx = types.SimpleNamespace(save_for_backward=lambda *tensors: None)
    with FakeTensorMode():
        x = torch.empty(3, 4, device="cuda", dtype=FP16)
        torch.set_autocast_enabled("cuda", True)
        try:
            assert RowNorm.forward(ctx, x, 1e-6).dtype is FP32
            assert Product.forward(ctx, x, torch.empty(2, 4, device="cuda")).dtype is FP16
        finally:
            torch.set_autocast_enabled("cuda", False)
    assert ctx._fwd_used_autocast


class RawNorm(Function):
    """`RowNorm` without its decorators."""

    forward = staticmethod(inspect.unwrap(RowNorm.forward))
    backward = staticmethod(inspect.unwrap(RowNorm.backward))


def normalised(function: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and gradient of an activation of that dtype."""
    x = leaf(x, dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float64):
        y = function(x, 1e-6)
    y.backward(torch.ones_like(y).cumsum(1) / 1000)
    assert x.grad is not None
    return y.detach(), x.grad


def test_a_square_in_fp16_is_infinite_from_256_on_and_the_gradient_is_zero() -> None:
    x = 300 * torch.randn(8, 256)
    right, right_grad = normalised(RowNorm.apply, x.half(), torch.float64)
    y, grad = normalised(RawNorm.apply, x, FP16)
    assert x.half().square().isinf().any() and not y.any() and not grad.any()
    y, grad = normalised(RowNorm.apply, x, FP16)
    assert y.dtype is FP32 and error(y, right) < IN_FP32
    assert grad.dtype is FP16 and error(grad, right_grad) < EPS[FP16]


def test_in_bf16_the_raw_norm_is_finite_and_as_coarse_as_bf16() -> None:
    x = 300 * torch.randn(8, 256)
    right, _ = normalised(RowNorm.apply, x.bfloat16(), torch.float64)
    raw, ours = (error(normalised(f, x, BF16)[0], right) for f in (RawNorm.apply, RowNorm.apply))
    # Of one rounding to bf16, up to 2^-8, the root mean square is more than a quarter.
    assert raw > 2**-10 and ours < IN_FP32


@half_types
def test_cast_inputs_gives_fp32_with_autocast_off_in_both_passes_and_leaves_integers_alone(dtype: Any) -> None:
    decorators = on_its_device(custom_fwd, cast_inputs=FP32), on_its_device(custom_bwd)
    assert seen_by(*decorators, dtype) == [(FP32, False), (FP32, False)]


@half_types
def test_cast_inputs_casts_nothing_outside_of_autocast(dtype: Any) -> None:
    assert RowNorm.apply(torch.ones(2, 4, dtype=dtype), 1e-6).dtype is dtype  # type: ignore[union-attr]
    assert RowNorm.apply(torch.ones(2, 4, dtype=torch.float64), 1e-6).dtype is torch.float64  # type: ignore[union-attr]


@half_types
@pytest.mark.parametrize("inputs", ["fp32", "16-bit"])
def test_an_imported_function_is_right_in_an_fp32_island_alone(dtype: Any, inputs: str) -> None:
    """Distances between near points: small differences of large numbers."""
    centres, labels = torch.randn(10, 64), torch.arange(320) % 10
    x = (centres[labels] + 0.05 * torch.randn(320, 64)).to(FP32 if inputs == "fp32" else dtype)
    own = torch.arange(320), labels
    right = (x.double()[:, None] - centres.double()).square().sum(2)[own]

    def worst(distance: Any) -> tuple[float, int, Tensor]:
        with autocast(dtype):
            found = distance(leaf(x, x.dtype), leaf(centres, FP32))
        near = found.detach()[own].double()
        return float(((near - right).abs() / right).max()), int((near < 0).sum()), found

    off, negative, raw = worst(SquaredDistance.apply)
    assert off > 0.3 if dtype is FP16 else (off > 3 and negative > 0)  # a squared distance below 0
    if inputs == "16-bit":
        with pytest.raises(RuntimeError, match="same dtype"):
            raw.sum().backward()
    off, negative, island = worst(squared_distance)
    # Three sums of 64 terms, each rounded by at most 2^-24 of the largest sum of squares, beside a small distance.
    size = (x.double().norm(dim=1) + centres.double().norm(dim=1)[labels]).square().max()
    assert off < 64 * 2**-24 * float(size / right.min()) and not negative and island.dtype is FP32
    island.sum().backward()


@pytest.mark.parametrize("mode, tolerance", [("fp32", 1e-5), ("fp16", 1e-2), ("bf16", 8e-2)])
def test_custom_functions_and_torch_s_own_make_the_same_network(mode: str, tolerance: float) -> None:
    images, labels, amp = torch.randn(32, 1, 8, 8), torch.arange(32) % 4, Amp.named(mode)
    outputs, grads = [], []
    for functions in ("custom", "torch"):
        torch.manual_seed(1)
        net = build_model("prototype_net", MODELS, options={"width": 32, "functions": functions}, **FACTS)
        with amp.autocast():
            logits = net(images)
            loss = F.cross_entropy(logits, labels)
        amp.backward(loss)
        assert logits.dtype is FP32
        outputs.append(logits.detach())
        grads.append(torch.cat([p.grad.flatten() * amp.scaler.inverse for p in net.parameters()]))
    assert error(*outputs) < tolerance and error(*grads) < tolerance
