"""Binary masks in 16 bits: which losses are right, what the others do, and where the numbers come from."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from shared import data_config
from torch import Tensor, nn

from amp_core import keep_fp32
from amp_core.config.checks import check_data
from amp_core.config.errors import RunError
from amp_core.data import build_data
from amp_core.data.loading import Batches
from amp_core.data.masks import VOID
from amp_core.lowp.lint import find_slow, find_unsafe
from amp_core.models import build_model
from amp_core.models.images import CLASSIFIERS
from recipes.segmentation import LOSSES, MODELS, overlap, pixel_weights, targets

FP16, BF16 = torch.float16, torch.bfloat16
EPS = {FP16: 2.0**-11, BF16: 2.0**-8}
"""Half a unit in the last place, relative."""

HALF = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
REDUCTION = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


def half_fixed(logits: Tensor, y: Tensor, reduction: str = "none") -> Tensor:
    """The fix that is often shown: the sigmoid under autocast, only the loss in fp32."""
    p = torch.sigmoid(logits)
    with torch.autocast("cpu", enabled=False):
        return F.binary_cross_entropy(p.float(), y.float(), reduction=reduction)


def loss_and_grad(loss_fn: Any, z: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Losses of pixels, and the gradient of their sum, of logits that a layer gave out in `dtype`."""
    z = z.clone().requires_grad_()
    with torch.autocast("cpu", dtype) if dtype in EPS else contextlib.nullcontext():
        losses = loss_fn(z.to(dtype), y)
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert z.grad is not None
    return losses.detach(), z.grad


@REDUCTION
def test_the_usual_cure_of_the_loss_is_nan_in_fp16_where_the_network_is_confident_and_wrong(reduction: str) -> None:
    y = torch.zeros(1)
    for logit in (8.5, 9.0, 12.0):
        z = torch.tensor([logit], requires_grad=True)
        with torch.autocast("cpu", FP16):
            loss = half_fixed(z.half(), y, reduction)
        loss.sum().backward()
        assert loss.item() == 100 and F.softplus(z).item() == pytest.approx(logit, rel=1e-3)
        assert z.grad is not None and z.grad.isnan().all()
    loss, grad = loss_and_grad(half_fixed, torch.tensor([8.3]), y, FP16)
    assert loss.item() == pytest.approx(7.62, abs=0.01) and grad.item() == pytest.approx(1, rel=1e-3)


@HALF
@pytest.mark.parametrize("form", LOSSES)
def test_the_two_forms_of_the_recipe_agree_with_float64(form: str, dtype: torch.dtype) -> None:
    z = 2 * torch.randn(4, 2, 16, 16)
    y = (torch.rand_like(z) < 0.5).float()
    losses, grad = loss_and_grad(LOSSES[form], z, y, dtype)
    # Of the logits as the network gave them out: the loss adds no error of its own but that of fp32, in which the
    # probability of a logit of 8 has 1e-4 left of its distance to 1.
    given = z.to(dtype).double().requires_grad_()
    expected = F.binary_cross_entropy_with_logits(given, y.double(), reduction="none")
    expected.sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(losses, expected.float(), rtol=2e-4, atol=1e-6)
    # The gradient goes back to the network in 16 bits, where each element is rounded once.
    error = (grad.double() - given.grad).norm() / given.grad.norm()
    assert error < EPS[dtype] and (grad != 0).all()


def test_the_fp32_form_is_blind_from_a_logit_of_17_and_the_logits_form_never() -> None:
    z = torch.tensor([16.6, 16.7, 17.0, 80.0, 3e4])
    y = torch.zeros_like(z)
    blind, seeing = (loss_and_grad(LOSSES[form], z, y, torch.float32) for form in ("fp32", "logits"))
    assert blind[1].tolist() == [pytest.approx(1), 0, 0, 0, 0] and blind[0][1:].tolist() == [100] * 4
    torch.testing.assert_close(seeing[0], z)
    torch.testing.assert_close(seeing[1], torch.ones_like(z))
    # In bf16 and fp16 the logits are those of a layer, and as many survive.
    assert (loss_and_grad(LOSSES["logits"], z, y, FP16)[1] == 1).all()


def a_mask_with_void() -> Tensor:
    masks = torch.randint(0, 2, (6, 2, 8, 8), dtype=torch.uint8)
    masks[0, :, :, :6] = VOID
    masks[1] = VOID
    return masks


def window_grad(net: nn.Module, images: Tensor, masks: Tensor, sizes: list[int], *, by_weight: bool) -> Tensor:
    """The gradient of a window in micro-batches, each weighted by its pixels or, the usual way, by its samples."""
    net.zero_grad()
    total = pixel_weights(masks, 3.0).sum()
    for x, m in zip(images.split(sizes), masks.split(sizes), strict=True):
        weights = pixel_weights(m, 3.0)
        loss = (LOSSES["logits"](net(x), targets(m)) * weights).sum() / weights.sum().clamp(min=1)
        (loss * (weights.sum() / total if by_weight else len(x) / len(images))).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def test_weights_of_pixels_are_exact_over_micro_batches_and_a_mean_of_means_is_not() -> None:
    net, images, masks = nn.Conv2d(1, 2, 3, padding=1).double(), torch.randn(6, 1, 8, 8).double(), a_mask_with_void()
    y, weights = targets(masks).double(), pixel_weights(masks, 3.0).double()
    net.zero_grad()
    F.binary_cross_entropy_with_logits(net(images), y, weight=weights, reduction="sum").div(weights.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    def error(sizes: list[int], *, by_weight: bool) -> float:
        found = window_grad(net, images, masks, sizes, by_weight=by_weight)
        return ((found - expected).norm() / expected.norm()).item()

    for sizes in ([6], [1, 1, 1, 3], [2, 4], [1] * 6):
        assert error(sizes, by_weight=True) < 1e-6, sizes  # the losses are fp64, the weights fp32
    assert error([1] * 6, by_weight=False) > 0.1


def test_a_micro_batch_of_nothing_but_void_weighs_nothing_and_a_mean_over_it_is_nan() -> None:
    masks = torch.full((1, 1, 4, 4), VOID, dtype=torch.uint8)
    weights, losses = pixel_weights(masks, 2.0), LOSSES["logits"](torch.randn(1, 1, 4, 4), targets(masks))
    assert (losses * weights).sum() / weights.sum().clamp(min=1) == 0
    assert losses[masks != VOID].mean().isnan()


def test_pixels_in_both_predicted_and_true_are_counted_without_void() -> None:
    logits = torch.tensor([[[[1.0, 2.0, -1.0, 5.0, 0.0]]], [[[3.0, -3.0, -3.0, 3.0, 3.0]]]])
    masks = torch.tensor([[[[1, 0, 1, VOID, 0]]], [[[1, 1, 0, 0, VOID]]]], dtype=torch.uint8)
    assert overlap(logits, masks).tolist() == [[2], [4], [4]]


def unet(image_shape: tuple[int, int, int] = (3, 16, 16), num_masks: int = 1, **options: Any) -> nn.Module:
    return build_model(
        "unet", MODELS, image_shape=image_shape, num_masks=num_masks, options={"width": 4, "depth": 2} | options
    )


class RootMeanSquare(nn.Module):
    """A norm as it is written by hand."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def test_a_bce_loss_under_autocast_is_found() -> None:
    net = nn.ModuleDict({"unet": unet(), "criterion": nn.BCELoss(), "right": nn.BCEWithLogitsLoss()})
    for dtype in (FP16, BF16):
        ((name, reason),) = find_unsafe(net, dtype)
        assert name == "criterion" and "BCEWithLogitsLoss" in reason
    assert find_unsafe(net, torch.float32) == []
    assert find_unsafe(keep_fp32(net["criterion"])) == find_unsafe(keep_fp32(nn.Sequential(nn.BCELoss()))) == []


@pytest.mark.parametrize("eps, is_found", [(1e-8, True), (2.0**-25, True), (2.0**-24, False), (1e-5, False)])
def test_an_eps_that_is_0_in_fp16_is_found_where_it_is_added_in_fp16(eps: float, is_found: bool) -> None:
    net = nn.Sequential(nn.Linear(8, 8), RootMeanSquare(eps))
    assert [name for name, _ in find_unsafe(net)] == ["1"] * is_found
    assert find_unsafe(net, BF16) == find_unsafe(keep_fp32(RootMeanSquare(eps))) == []
    # And it is what happens.
    zeros = torch.zeros(2, 8, dtype=FP16)
    with torch.autocast("cpu", FP16):
        assert bool(net[1](zeros).isnan().all()) == is_found
        assert net[1](zeros.bfloat16()).isfinite().all()


def test_the_norms_of_torch_add_their_eps_in_fp32_and_cosine_similarity_does_not() -> None:
    small = torch.full((4, 8), 6e-5)
    small[:, ::2] = -6e-5
    norms = [nn.LayerNorm(8, eps=1e-8), nn.GroupNorm(2, 8, eps=1e-8), nn.BatchNorm1d(8, eps=1e-8)]
    norms += [nn.InstanceNorm1d(4, eps=1e-8)]
    for norm in norms:
        expected = norm(small.half().float())
        with torch.autocast("cpu", FP16):
            # With an eps of 0 it would be larger by the root of 1 + 1e-8 / 6e-5^2, which is 1.9.
            torch.testing.assert_close(norm(small.half()).float(), expected, rtol=2e-3, atol=1e-5)
        assert find_unsafe(norm) == []
    similarity, zeros = nn.CosineSimilarity(), torch.zeros(1, 8, dtype=FP16)
    with torch.autocast("cpu", FP16):
        assert similarity(zeros, zeros).isnan() and not similarity(zeros.bfloat16(), zeros.bfloat16()).isnan()
    assert len(find_unsafe(similarity)) == 1


def test_sizes_that_are_no_multiples_of_8_are_found_where_they_matter() -> None:
    net = nn.Sequential(nn.Conv2d(3, 100, 3), nn.Conv2d(100, 104, 3), nn.Linear(104, 10), nn.Linear(64, 50257))
    assert [(name, reason.split()[0]) for name, reason in find_slow(net)] == [
        ("0", "out_channels=100"),
        ("1", "in_channels=100"),
        ("3", "out_features=50257"),
    ]
    assert "50264 suits" in find_slow(net)[-1][1]
    assert find_slow(net, torch.float32) == find_slow(nn.Conv2d(100, 100, 3, groups=100)) == []


def test_the_networks_of_this_project_are_safe_and_fast() -> None:
    with torch.device("meta"):
        nets = [unet(width=8, depth=3)]
        nets += [build_model(n, CLASSIFIERS, options={}, **CLASSIFIERS.example) for n in ("cnn", "mlp", "resnet18")]
    for net in nets:
        assert find_unsafe(net) == find_slow(net) == []


def sample(dataset: Any, *keys: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return dataset.__getitems__(list(keys))


def test_shapes_and_values_are_what_the_facts_say() -> None:
    data = build_data(data_config("digit_scenes", augment=True), seed=0)
    assert (len(data.train), len(data.eval)) == (1600, 400)
    for part in (data.train, data.eval):
        x, m = sample(part, *((i, 0) for i in range(8, 24)))
        assert x.shape == (16, *data.facts["image_shape"]) and x.dtype == torch.float32
        assert m.shape == (16, 1, *data.facts["image_shape"][1:]) and m.dtype == torch.uint8
        assert set(m.unique().tolist()) <= {0, 1} and x.abs().max() <= 2.5
        assert 0.02 < (m == 1).float().mean() < 0.3


def test_scenes_for_evaluation_have_photographs_and_digits_of_their_own() -> None:
    data = build_data(data_config("digit_scenes"), seed=0)
    parts: Any = data.train, data.eval
    columns = [{column.tobytes() for photo in part.photos for column in photo.swapaxes(0, 1)} for part in parts]
    assert len(columns[0]) == 2 * 448 and len(columns[1]) == 2 * 160 and not columns[0] & columns[1]
    digits = [{digit.tobytes() for digit in part.digits} for part in parts]
    assert [len(part.digits) for part in parts] == [4000, 1000] and not digits[0] & digits[1]


def folder_of_masks(root: Path, mode: str = "L") -> Path:
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for kind in ("images", "masks"):
            (root / part / kind).mkdir(parents=True)
        for number in range(4):
            values = np.zeros((20, 40), dtype=np.uint8)
            values[5:15, 10:30] = 255 if mode == "L" else 1
            values[0] = 128
            mask = Image.fromarray(values)
            if mode == "P":
                mask.putpalette([0, 0, 0, 90, 30, 10] + [7] * 750)
            mask.save(root / part / "masks" / f"{number}.png")
            pixels = rng.integers(0, 100, (20, 40, 3), dtype=np.uint8)
            pixels[values == values[10, 20]] += 150
            Image.fromarray(pixels).save(root / part / "images" / f"{number}.jpg", quality=95)
    return root


@pytest.mark.parametrize("mode", ["L", "P"])
def test_a_folder_of_masks_is_read_whole_for_evaluation_and_in_parts_for_training(tmp_path: Path, mode: str) -> None:
    data = build_data(data_config("mask_folder", path=str(folder_of_masks(tmp_path, mode)), image_size=40), seed=0)
    x, m = sample(data.eval, (0, 0), (1, 0))
    assert x.shape == (2, 3, 40, 40) and m.shape == (2, 1, 40, 40)
    assert (m[0, 0, :10] == VOID).all() and (m[0, 0, 30:] == VOID).all()  # above and below a wide image
    assert (m[0, 0, 10] == VOID).all()  # 128 in the file
    assert m[0, 0, 15:25, 10:30].eq(1).all() and m[0].eq(1).sum() == 200
    inside, outside = (x[0].mean(0)[m[0, 0] == value].mean() for value in (1, 0))
    assert inside > outside + 1  # mask and image lie on each other
    x, m = sample(data.train, *((i % 4, i) for i in range(32)))
    assert x.mean(1)[m[:, 0] == 1].mean() > x.mean(1)[m[:, 0] == 0].mean() + 1
    batches = [next(iter(Batches(data.train, [[(0, 3), (2, 5)]], num_workers=n))) for n in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))


def test_a_bad_folder_of_masks_is_named(tmp_path: Path) -> None:
    def problems() -> str:
        return " ".join(check_data(data_config("mask_folder", path=str(tmp_path)), "masks"))

    assert "has no train/images" in problems()
    folder_of_masks(tmp_path)
    assert not problems()
    (tmp_path / "val/masks/2.png").rename(tmp_path / "val/masks/two.png")
    assert "val has images without a mask: 2, and masks without an image: two;" in problems()
    (tmp_path / "val/masks/two.png").rename(tmp_path / "val/masks/2.png")
    data = build_data(data_config("mask_folder", path=str(tmp_path), image_size=16), seed=0)
    Image.fromarray(np.full((20, 40), 77, dtype=np.uint8)).save(tmp_path / "val/masks/0.png")
    with pytest.raises(RunError, match=r"0\.png has a pixel of 77; expected 0, 255"):
        sample(data.eval, (0, 0))
    Image.fromarray(np.zeros((20, 41), dtype=np.uint8)).save(tmp_path / "val/masks/1.png")
    with pytest.raises(RunError, match=r"1\.png has 41x20 pixels, its image 40x20"):
        sample(data.eval, (1, 0))
