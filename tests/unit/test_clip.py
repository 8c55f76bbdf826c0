"""Clipping sees unscaled gradients, in every mode the same, and cannot smuggle a non-finite number into a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD

from amp_core import Amp, Clip
from amp_core.config.schema import ClipConfig
from amp_core.tensors import full_tensor

INF, NAN = float("inf"), float("nan")
fused_or_not = pytest.mark.parametrize("fused", [True, False])
every_mode = pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16", "fp16", "fp16_capped"])


def amp_of(mode: str = "fp16", **fields: Any) -> Amp:
    return Amp.named(mode, samples=8 if mode == "fp16_capped" else None, **fields)


def weights(*values: list[Any]) -> list[Tensor]:
    return [torch.tensor(value, requires_grad=True) for value in values]


def step(
    grads: Sequence[Tensor], clip: Any, amp: Amp | None = None, fused: bool = False, params: Sequence[Tensor] = ()
) -> tuple[list[Tensor], float, bool]:
    """What a step of SGD at rate 1 subtracts from weights of zero (or `params`) with these true gradients."""
    params = params or [torch.zeros_like(g, requires_grad=True) for g in grads]
    amp, optimizer = amp or amp_of(), SGD(params, lr=1.0, fused=fused)
    before = [p.detach().clone() for p in params]
    amp.backward(torch.stack([(p * g).sum() for p, g in zip(params, grads, strict=True)]).sum())
    report = amp.step(optimizer, clip)
    amp.update()
    moved = [b - p.detach() for p, b in zip(params, before, strict=True)]
    return moved, float(report.grad_norm), bool(report.taken)


def joint(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([t.detach().flatten() for t in tensors]).norm())


GRADS = [torch.tensor([[3.0, 4.0], [0.0, 12.0]]), torch.tensor([84.0])]  # joint norm 85.  Powers of two away: exact.


@pytest.mark.parametrize("settings, expected", [
    (("none", None, None, None), None),
    (("norm", 0.5, None, None), Clip.norm(0.5)),
    (("value", None, 2.0, None), Clip.value(2.0)),
    (("adaptive", None, None, 0.01), Clip.adaptive(0.01)),
])  # fmt: skip
def test_the_settings_of_a_run_are_its_clipping(settings: Any, expected: Clip | None) -> None:
    assert Clip.of(ClipConfig(*settings)) == expected


@fused_or_not
@every_mode
def test_clipping_by_norm_moves_by_max_norm_and_reports_the_norm_before(mode: str, fused: bool) -> None:
    moved, norm, _ = step(GRADS, Clip.norm(1.0), amp_of(mode), fused)
    assert norm == pytest.approx(85, rel=1e-6) and joint(moved) == pytest.approx(1, rel=1e-6)
    for a, g in zip(moved, GRADS, strict=True):
        torch.testing.assert_close(a, g / 85, rtol=2e-6, atol=0)  # rounding, and torch's eps of 1e-6 on the norm
    moved, norm, _ = step(GRADS, Clip.norm(1000.0), amp_of(mode), fused)
    assert norm == pytest.approx(85, rel=1e-6) and all(torch.equal(a, g) for a, g in zip(moved, GRADS, strict=True))


@fused_or_not
@every_mode
def test_clipping_by_value_clamps_each_element_of_the_unscaled_gradient(mode: str, fused: bool) -> None:
    (moved,), norm, _ = step([torch.tensor([0.25, -3.0, 7.0])], Clip.value(1.0), amp_of(mode), fused)
    assert moved.tolist() == [0.25, -1.0, 1.0] and norm == pytest.approx(58.0625**0.5)  # the norm before clipping


def adaptive_reference(weight: Tensor, grad: Tensor, factor: float) -> Tensor:
    """Brock et al., equation 3, one output unit at a time; a vector is one unit."""
    units = [(weight, grad)] if grad.ndim < 2 else zip(weight, grad, strict=True)
    clipped = [g * min(1.0, factor * max(float(w.norm()), 1e-3) / max(float(g.norm()), 1e-30)) for w, g in units]
    return torch.stack(clipped).view_as(grad)


@fused_or_not
@every_mode
@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 2, 2), (3,), ()], ids=str)
def test_adaptive_clipping_limits_each_unit_to_its_weights(shape: tuple[int, ...], mode: str, fused: bool) -> None:
    weight, grad = torch.randn(shape), torch.randn(shape) * 10
    if shape:
        weight[0] = 0.0  # a unit of zero weights can still learn: its norm counts as 1e-3
        grad[1] = 0.0  # 0 / 0
        grad[2] *= 1e-4  # small enough
    (moved,), _, taken = step([grad], Clip.adaptive(0.1), amp_of(mode), fused, [weight.clone().requires_grad_()])
    assert taken
    expected = adaptive_reference(weight, grad, 0.1)
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=2e-7)  # the difference of two weights is rounded


@every_mode
@fused_or_not
def test_a_clip_function_that_returns_nan_is_caught(fused: bool, mode: str) -> None:
    def divides_by_zero(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        assert joint(grads) == pytest.approx(85)  # it sees unscaled gradients
        grads[0].mul_(torch.tensor(0.0) / 0.0)

    amp = amp_of(mode)
    before = amp.scale
    moved, _, taken = step(GRADS, divides_by_zero, amp, fused)
    assert not taken and joint(moved) == 0.0
    assert amp.scale == (before if before == 1.0 else before / 2)


@fused_or_not
@pytest.mark.parametrize("clip", [None, Clip.norm(1.0), Clip.value(1.0), Clip.adaptive(0.1)], ids=str)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_every_clip_leaves_an_overflow_an_overflow(bad: float, clip: Clip | None, fused: bool) -> None:
    amp = amp_of()
    moved, norm, taken = step([torch.tensor([[1.0, bad]]), torch.ones(1)], clip, amp, fused)
    assert not taken and joint(moved) == 0.0 and not torch.tensor(norm).isfinite() and amp.scale == 32768


@every_mode
@fused_or_not
def test_a_norm_beyond_fp32_does_not_become_a_step_of_zero(fused: bool, mode: str) -> None:
    """Finite gradients of 1e20: the usual code divides by an infinite norm and steps by nothing, unseen."""
    amp = amp_of(mode, **({"init_scale": 2.0**10} if mode.startswith("fp16") else {}))
    moved, _, taken = step([torch.full((4,), 1e20)], Clip.norm(1.0), amp, fused)
    assert joint(moved) == pytest.approx(1.0, rel=1e-5) if taken else joint(moved) == 0.0


@fused_or_not
def test_gradients_are_read_unscaled_and_clipped_after_the_step(fused: bool) -> None:
    """As torch leaves them."""
    (weight,), amp = weights([0.0, 0.0]), amp_of()
    amp.backward((weight * torch.tensor([3.0, 4.0])).sum())
    amp.step(SGD([weight], lr=0.0, fused=fused), Clip.norm(1.0))
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("make", [Clip.norm, Clip.value, Clip.adaptive])
@pytest.mark.parametrize("threshold", [0.0, -1.0, NAN])
def test_thresholds_that_are_not_positive_are_refused(make: Callable[[float], Clip], threshold: float) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        make(threshold)


# --- shards


def adaptive(sharded: bool) -> list[Tensor]:
    tensors = [torch.linspace(-1, 2, 12).view(4, 3), torch.linspace(1, 9, 4), torch.ones(4, 3), torch.linspace(3, 1, 4)]
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        tensors = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in tensors]
    Clip.adaptive(0.5)(tensors[:2], tensors[2:])
    return [full_tensor(tensor) for tensor in tensors[2:]]


def adaptive_on_a_rank(rank: int) -> list[Tensor]:
    return adaptive(sharded=True)


def test_adaptive_clipping_of_shards_is_that_of_the_whole(on_ranks: Callable[..., Any]) -> None:
    for found in on_ranks(adaptive_on_a_rank):
        for ours, whole in zip(found, adaptive(sharded=False), strict=True):
            assert not torch.equal(whole, torch.ones_like(whole))
            # Squares of 4 numbers, their sum, a root, for weight and gradient; a quotient and a product.
            torch.testing.assert_close(ours, whole, rtol=16 * 2**-24, atol=0)
