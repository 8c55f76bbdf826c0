"""Formats below 16 bits: codes and scales are those of a reference written from the specifications in numpy."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np
import pytest
import torch
from tiers import rows
from torch import Tensor

from amp_core.lowp.formats import E2M1, E3M2, E4M3, E5M2, Element, Scaling, quantise, round_to

ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2, "e3m2": E3M2, "e2m3": Element(2, 3, 7.5), "e2m1": E2M1}
BITS = {"e4m3": (4, 3), "e5m2": (5, 2), "e3m2": (3, 2), "e2m3": (2, 3), "e2m1": (2, 1)}
NOT_NUMBERS = {"e4m3": 1, "e5m2": 4, "e3m2": 0, "e2m3": 0, "e2m1": 0}
"""Of the positive codes, the last that are inf or NaN."""


def table(name: str) -> np.ndarray:
    """The values of the positive codes, by the definition of a floating-point number."""
    exponent_bits, mantissa_bits = BITS[name]
    code = np.arange(2 ** (exponent_bits + mantissa_bits) - NOT_NUMBERS[name])
    exponent, mantissa = code >> mantissa_bits, code % 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    fraction = mantissa / 2**mantissa_bits + (exponent > 0)
    return fraction * 2.0 ** (np.maximum(exponent, 1) - bias)


def nearest(quotients: np.ndarray, name: str) -> np.ndarray:
    """Codes of float64 numbers: the nearest, of two the even one; beyond the largest, the largest."""
    values = table(name)
    size = np.minimum(np.abs(quotients), values[-1])
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    to_above, to_below = values[above] - size, size - values[above - 1]
    is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return np.where(is_above, above, above - 1) + np.signbit(quotients) * 2 ** sum(BITS[name])


def codes(values: Tensor, element: Element) -> Tensor:
    """The bits of elements, sign first."""
    name = next(name for name, other in ELEMENTS.items() if other == element)
    return torch.from_numpy(nearest(values.double().numpy(), name))


def shared_exponent(peak: np.ndarray, name: str, rule: str) -> np.ndarray:
    """OCP MX v1.0, 6.3, or with the quotient by the largest element rounded up."""
    largest = table(name)[-1]
    if rule == "floor":
        exponent = np.floor(np.log2(peak)) - np.floor(np.log2(largest))  # exact for an fp32 number in float64
    else:
        fraction, exponent = np.frexp(peak / largest)
        exponent = exponent - (fraction == 0.5)
    return np.clip(np.where(peak > 0, exponent, -127), -127, 127)


def blocks(kind: str, count: int, size: int = 32) -> Tensor:
    """[count, size] fp32."""
    x = torch.randn(count, size)
    neighbours = torch.randint(-2, 3, (count, size))
    if kind == "t":  # with 2 degrees of freedom
        return x / torch.randn(count, size, 2).square().mean(2).sqrt()
    if kind == "sixteenths":
        return torch.randint(-128, 129, (count, size)) / 16.0
    if kind in ("powers", "1.75 powers"):
        powers = torch.exp2(torch.randint(-40, 40, (count, 1)).float()) * (1.75 if kind[1] == "." else 1.0)
        return (
            (powers.view(torch.int32) + neighbours.int()).view(torch.float32) * torch.randint(0, 2, (count, size))
        ).abs()
    if kind in ("exponents", "tiny"):
        bits = torch.randint(0, 2**31 - 2**23 if kind == "exponents" else 12 << 23, (count, size))
        return (bits * 1).to(torch.int32).view(torch.float32) * (1 - 2 * torch.randint(0, 2, (count, size)))
    if kind == "zeros":
        return x * torch.randint(0, 2, (count, 1))
    return x


KINDS = ("normal", "t", "sixteenths", "powers", "1.75 powers", "exponents", "tiny", "zeros")
MX = [(name, rule, 1 << 11) for name in BITS for rule in ("floor", "rceil")]
MILLION = [(name, "rceil", 1_000_000 // len(KINDS)) for name in ("e4m3", "e3m2", "e2m1")]


@pytest.mark.parametrize("name, rule, count", rows([*MX, *MILLION], *MX))
def test_mx_has_the_codes_of_the_specification(name: str, rule: str, count: int) -> None:
    how = Scaling(ELEMENTS[name], (1, 32), "e8m0", rule)  # type: ignore[arg-type]
    for kind in KINDS:
        for start in range(0, count, 1 << 14):
            x = blocks(kind, min(1 << 14, count - start))
            low = quantise(x, how)
            exact = x.double().numpy()
            with np.errstate(divide="ignore"):
                exponent = shared_exponent(np.abs(exact).max(1, keepdims=True), name, rule)
            assert np.array_equal(low.scale.double().view(-1, 1).numpy(), 2.0**exponent), kind
            expected = nearest(exact / 2.0**exponent, name)
            assert np.array_equal(codes(low.values.float(), how.element).numpy(), expected), kind


@pytest.mark.parametrize("count", rows([1 << 11, 1_000_000 // len(KINDS)], 1 << 11))
def test_nvfp4_has_the_codes_of_the_paper_but_for_ties(count: int) -> None:
    """fp32 quotients are rounded four times, each by at most 2^-24: they and the exact ones part at ties alone."""
    values, parted, total = table("e2m1"), 0, 0
    ties = (values[1:] + values[:-1]) / 2
    for kind in KINDS:
        x = blocks(kind, count, 16)
        low = quantise(x, Scaling(E2M1, (1, 16), "nvfp4"))
        exact = x.double().numpy()
        encode = 6 * 448 / np.maximum(np.abs(exact).max(), 1e-30)
        peak = np.abs(exact).max(1, keepdims=True)
        scales = low.scale.double().view(-1, 1).numpy() * encode
        quotient = peak / 6 * encode
        expected = table("e4m3")[nearest(quotient, "e4m3")]
        unlike = np.abs(scales - expected) > 1e-6 * expected
        e4m3 = table("e4m3")
        assert (np.abs((e4m3[1:] + e4m3[:-1]) / 2 - quotient[unlike][:, None]).min(1, initial=1) < 2.0**-21 * 448).all()
        local = np.round(scales * 512) / 512  # multiples of the smallest element of E4M3, as stored
        with np.errstate(divide="ignore", invalid="ignore"):
            quotients = np.where(local > 0, exact * encode / local, 0.0)
        found, wanted = codes(low.values, E2M1).numpy(), nearest(quotients, "e2m1")
        unlike = (found & 7) != (wanted & 7)
        distance = np.abs(np.abs(quotients[unlike])[:, None] - ties)
        assert (distance < 2.0**-21 * ties).any(1).all(), kind
        parted, total = parted + int(unlike.sum()), total + unlike.size
    print(f"{parted} of {total} codes part at a tie")


@pytest.mark.parametrize("name", ELEMENTS)
def test_rounding_to_an_element_is_to_the_nearest_and_stochastically_without_bias(name: str) -> None:
    element = ELEMENTS[name]
    values = torch.tensor(table(name), dtype=torch.float32)
    assert round_to(values, element).equal(values) and len(codes(values, element).unique()) == len(values)
    # Between neighbours: k sixteenths of the way up.
    x = (values[:-1, None] + (values[1:] - values[:-1])[:, None] * torch.arange(17) / 16).flatten()
    assert np.array_equal(codes(round_to(x, element), element).numpy(), nearest(x.double().numpy(), name))
    draws = torch.stack([round_to(x, element, torch.rand_like(x)) for _ in range(4096)]).double()
    gap = (values[1:] - values[:-1]).double().repeat_interleave(17)
    # The deviation of a draw is at most half of the gap. 4.9 deviations: 1 in 10^6, of up to 2,000 numbers.
    assert ((draws.mean(0) - x).abs() <= 4.9 * gap / 2 / 4096**0.5).all()
    assert (draws.std(0) > 0).view(-1, 17)[:, 1:-1].all()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize(
    "how",
    [
        Scaling(E4M3, (None, None)),
        Scaling(E5M2, (1, None)),
        Scaling(E4M3, (16, 16)),
        Scaling(E4M3, (1, 32), "e8m0"),
        Scaling(E2M1, (1, 32), "e8m0", "floor"),
        Scaling(E2M1, (1, 16), "nvfp4"),
    ],
    ids=str,
)
def test_what_is_not_finite_is_not_finite_in_its_block(how: Scaling, bad: float) -> None:
    x = torch.randn(32, 64)
    x[3, 5] = bad
    dense = quantise(x, how).dense()
    assert not dense[3, 5].isfinite()
    alone = torch.ones_like(x, dtype=torch.bool)
    rows, columns = (size or whole for size, whole in zip(how.block, x.shape, strict=True))
    alone[3 // rows * rows : (3 // rows + 1) * rows, 5 // columns * columns : (5 // columns + 1) * columns] = False
    if how.scale != "nvfp4":  # which has a scale of the whole tensor
        assert dense[alone].isfinite().all()


def test_the_wrong_way_a_block_with_inf_that_is_stored_saturated_is_finite_after_a_product() -> None:
    x = torch.ones(1, 32)
    x[0, 7] = float("inf")
    elements = (x / 2.0**120).clamp(max=448.0)  # the largest scale, and inf cast to the largest element
    assert (elements @ torch.full((32, 1), 0.01) * 2.0**120).isfinite().all()
    assert not (quantise(x, Scaling(E4M3, (1, 32), "e8m0")).dense() @ torch.full((32, 1), 0.01)).isfinite().any()


def test_floor_saturates_what_is_just_below_the_next_power_and_rceil_does_not() -> None:
    x = torch.randn(1 << 14, 32)
    peak = x.abs().amax(1)
    worst = {}
    for rule in ("floor", "rceil"):
        dense = quantise(x, Scaling(E4M3, (1, 32), "e8m0", rule)).dense()  # type: ignore[arg-type]
        off = (dense.abs().amax(1) - peak).abs() / peak
        worst[rule] = (off > 1 / 16).float().mean().item(), off.max().item()
    # An element has 4 significant bits: rounding is off by at most 1/17. 448 = 1.75 2^8, and above 1.875 2^8 the
    # largest of a block is off by more: log2(2 / 1.875) = 9.3 % of the peaks, if their logarithms are uniform.
    assert worst["rceil"] == (0.0, pytest.approx(1 / 17, abs=1e-3)) and 0.05 < worst["floor"][0] < 0.15
    assert worst["floor"][1] == pytest.approx(1 / 8, abs=1e-3)


@pytest.mark.parametrize("block, part", [((1, 16), 0.786), ((16, 16), 0.0)])
def test_a_weight_and_its_transpose_have_the_same_codes_in_squares_alone(block: tuple[int, int], part: float) -> None:
    x, how = torch.randn(256, 256), Scaling(E2M1, block, "nvfp4")
    there, back = quantise(x, how).dense(), quantise(x.t().contiguous(), how).dense().t()
    assert (there != back).float().mean().item() == pytest.approx(part, abs=0.02)


def test_ranks_with_noise_of_their_own_average_it_away_and_with_the_same_noise_do_not() -> None:
    x, how = torch.randn(64, 256), Scaling(E2M1, (1, 16), "nvfp4")

    def error(seeds: list[int]) -> float:
        total = torch.zeros_like(x)
        for seed in seeds:
            torch.manual_seed(seed)
            total += quantise(x, how, stochastic=True).dense() / len(seeds)
        return ((total - x).norm() / x.norm()).item()

    one, same, own = error([0]), error([0] * 8), error(list(range(8)))
    assert same == pytest.approx(one, rel=1e-6)
    assert own == pytest.approx(one / 8**0.5, rel=0.05)  # 16,384 independent errors: 1 / 128 of the ratio


def test_sizes_that_are_no_multiple_of_the_block_are_refused() -> None:
    with pytest.raises(ValueError, match="a matrix of 4 x 48 has no blocks of 1 x 32"):
        quantise(torch.randn(4, 48), Scaling(E4M3, (1, 32), "e8m0"))
    how = Scaling(E4M3, (1, 32), "e8m0")
    assert quantise(torch.randn(0, 64), how).values.shape == (0, 64)
    assert how.t().block == (32, 1) and dataclasses.replace(how, block=(32, 32)).is_square


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_a_plain_cast_to_a_scale_rounds_to_nearest_and_is_no_floor(element: Element) -> None:
    """`to(float8_e8m0fnu)` of 1.5 is 2: a floor of log2 must come from the bits."""
    scale = torch.tensor([1.5]).to(torch.float8_e8m0fnu).float()
    assert scale.item() == 2.0
    x = torch.full((1, 32), 1.5 * 2.0 ** math.floor(math.log2(element.largest)))
    assert quantise(x, Scaling(element, (1, 32), "e8m0", "floor")).scale.item() == 1.0


def stored_with(x: torch.Tensor, scale: torch.Tensor, element: Element = E4M3) -> torch.Tensor:
    return round_to((x / scale).clamp(-element.largest, element.largest), element) * scale


def test_the_wrong_way_no_scale_loses_what_the_format_does_not_reach() -> None:
    """E5M2 ends at 2^-16: half of the gradients around 2^-17 are 0, and with a scale one in 100,000."""
    x = torch.randn(256, 256) * 2.0**-17
    plain, ours = x.to(torch.float8_e5m2).float(), quantise(x, Scaling(E5M2, (None, None))).dense()
    lost = [(each == 0).float().mean().item() for each in (plain, ours)]
    assert lost[0] == pytest.approx(0.683, abs=0.01) and lost[1] < 1e-4  # |z| < 1: 2^-17 is half of 2^-16


def test_the_wrong_way_delayed_scaling_stores_half_of_a_jump_and_it_is_finite() -> None:
    """All numbers grow 8 times: with the scale of the step before the norm falls, and no step is skipped."""
    x = torch.randn(512, 256)
    late = stored_with(8 * x, x.abs().max() / E4M3.largest)
    edge = float(x.abs().max()) / 8  # normal numbers are stored up to here, and what is larger as this
    inside = math.erf(edge / 2**0.5)
    square = inside - 2 * edge * math.exp(-(edge**2) / 2) / (2 * math.pi) ** 0.5 + edge**2 * (1 - inside)
    assert late.isfinite().all() and 0.4 < square**0.5 < 0.6
    assert (late.norm() / (8 * x).norm()).item() == pytest.approx(square**0.5, rel=0.01)
    assert quantise(8 * x, Scaling(E4M3, (None, None))).dense().norm() / (8 * x).norm() == pytest.approx(1, abs=0.01)


def test_the_wrong_way_a_scale_of_each_shard_is_another_matrix() -> None:
    x, how = torch.randn(256, 256), Scaling(E4M3, (None, None))
    whole = quantise(x, how).dense()
    shards = torch.cat([quantise(part, how).dense() for part in x.chunk(4)])
    assert (whole != shards).float().mean().item() == pytest.approx(0.75, abs=0.01)  # all but where the largest is
    rows = Scaling(E4M3, (1, None))
    assert torch.cat([quantise(part, rows).dense() for part in x.chunk(4)]).equal(quantise(x, rows).dense())


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["floor", "rceil"])
def test_torchao_has_the_same_codes_and_scales(rule: Literal["floor", "rceil"]) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    torch.manual_seed(0)
    x = torch.randn(4096, 256) * torch.exp2(torch.randint(-20, 20, (4096, 1)).float())
    scale, theirs = mx.to_mx(x, torch.float8_e4m3fn, 32, getattr(mx.ScaleCalculationMode, rule.upper()))
    ours = quantise(x, Scaling(E4M3, (1, 32), "e8m0", rule))
    assert torch.equal(ours.scale.flatten(), scale.view(torch.uint8).float().sub(127).exp2().flatten())
    assert torch.equal(ours.values.view(torch.uint8), theirs.view(torch.uint8).view_as(ours.values))


def test_torchao_has_the_same_nvfp4_codes_where_it_does_not_raise_the_scale_of_a_block() -> None:
    """It knows no scales below 2^-6 of E4M3's 448 (the least normal one): blocks below 2^-15 of the largest lose bits."""
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    torch.manual_seed(0)
    x = torch.randn(4096, 256) * torch.exp2(torch.randint(-20, 20, (4096, 1)).float())
    overall = x.abs().max() / (E2M1.largest * E4M3.largest)
    scale, packed = nv.nvfp4_quantize(x, 16, overall)
    ours = quantise(x, Scaling(E2M1, (1, 16), "nvfp4"))
    mine, theirs = (ours.scale.view(4096, 16) / overall).to(torch.float8_e4m3fn).float(), scale.float().view(4096, 16)
    raised = mine < 2**-6
    assert 0 < raised.sum() < raised.numel() and torch.equal(mine.clamp(min=2**-6), theirs)
    found = torch.stack((packed & 15, packed >> 4), -1).view(4096, 16, 16)
    assert torch.equal(found[~raised], codes(ours.values, E2M1).view(4096, 16, 16)[~raised])
