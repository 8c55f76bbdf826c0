"""Two networks under one loss scale: the gradient penalty, one update for two optimizers, and whole runs of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from running import checkpoints, lines, same_but, state
from shared import UNIT_OF as UNIT
from shared import relative
from test_recipes import runs_of
from torch import Tensor, nn
from torch.optim import SGD, Adam

from amp_core import Amp
from amp_core.models import build_model
from amp_core.run.feed import Feed
from recipes.gan import MODELS, discriminator_loss, generator_loss, gradient_penalty, sliced_wasserstein

SHAPE = (1, 12, 12)


pytestmark = pytest.mark.usefixtures("own_folder")
run = runs_of("gan")


def networks(**options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    nets: Any = build_model("dcgan", MODELS, options={"width": 8, "latent": 8} | options, image_shape=SHAPE)
    return nets["generator"], nets["discriminator"]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Real and fake images, and how they are mixed."""
    torch.manual_seed(1)
    return torch.randn(16, *SHAPE), torch.randn(16, *SHAPE), torch.rand(16, 1, 1, 1)


def flat(params: Sequence[Tensor]) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params]).double()


def of(net: nn.Module) -> list[nn.Parameter]:
    return list(net.parameters())


def fp16() -> Amp:
    return Amp.named("fp16", init_scale=2.0**14)


BOUND = {mode: (102 if mode == "fp32" else 30) * unit for mode, unit in UNIT.items()}
"""Three passes through three layers: 10 roundings one after another in each (inputs, weights, products, activations).
16-bit products are summed in fp32; in fp32 the sums round as well, of 576 terms typically by 24 units, in 3 layers."""


class Times(nn.Module):
    """Scores in fp32 times `factor`, a power of two: this multiplication is exact, and nothing of it is a kernel's."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, scores: Tensor) -> Tensor:
        return scores.to(torch.promote_types(scores.dtype, torch.float32)) * self.factor


def steep(factor: float) -> nn.Module:
    """Slopes of about 70 times `factor`, in convolutions whose numbers fp16 holds in all its digits."""
    torch.manual_seed(0)
    # Smooth: where rounding moves a LeakyReLU across its kink, the slope itself is another one.
    layers: list[Any] = [nn.Conv2d(1, 8, 4, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 4, 2, 1), nn.SiLU(), nn.Flatten()]
    layers += [nn.Linear(16 * 9, 1), nn.Flatten(0), Times(factor)]
    with torch.no_grad():
        for i in (0, 2, 5):
            layers[i].weight *= 10
    return nn.Sequential(*layers)


USUAL, HARDLY_BEGUN = 2.0**-6, 2.0**-26
"""Slopes of 1; and scores so flat that a backward pass begins with less than half of fp16's smallest number, 2**-24."""


def penalised(
    amp: Amp | None, kind: Any, factor: float, *, scaled: bool = True, unscaled: bool = True, eps: float = 1e-12
):
    """The penalty and its unscaled gradients, of `steep(factor)`; without `amp`, float64."""
    D, (real, fake, mix) = steep(factor), batch()
    if amp is not None and scaled and unscaled and eps:
        with amp.autocast():
            penalty = gradient_penalty(kind, amp, D, real, fake, mix)
    else:
        if amp is None:
            amp = Amp.named("fp32")
            D, real, fake, mix = D.double(), real.double(), fake.double(), mix.double()
        x = (torch.lerp(fake, real, mix) if kind == "wgan_gp" else real).requires_grad_()
        with amp.autocast():
            total = D(x).sum(dtype=torch.promote_types(x.dtype, torch.float32)) * (amp.scaler.scale if scaled else 1)
        (gradient,) = torch.autograd.grad(total, x, create_graph=True)
        square = gradient.flatten(1).square().sum(1)
        penalty = square.mean() / 2 if kind == "r1" else ((square + eps).sqrt() - 1).square().mean()
    params = of(D)
    if penalty.dtype is torch.float64:
        penalty.backward()
        return penalty.item(), flat(params)
    amp.backward(penalty)
    amp.unscale_(SGD(params))
    return penalty.item(), flat(params)


@pytest.mark.parametrize("kind", ["wgan_gp", "r1"])
@pytest.mark.parametrize("mode", UNIT)
def test_a_penalty_under_autocast_is_that_of_float64(kind: str, mode: str) -> None:
    expected, gradient = penalised(None, kind, USUAL)
    amp = fp16() if mode == "fp16" else Amp.named(mode)
    ours, our_gradient = penalised(amp, kind, USUAL)
    assert ours == pytest.approx(expected, rel=2 * BOUND[mode])  # a square
    assert relative(our_gradient, gradient) < BOUND[mode]


def test_a_penalty_on_scaled_gradients_is_larger_by_the_square_of_the_scale() -> None:
    expected, _ = penalised(None, "r1", USUAL)
    kept, gradient = penalised(fp16(), "r1", USUAL, unscaled=False)
    assert kept == pytest.approx(2.0**28 * expected, rel=2 * BOUND["fp16"]) and not gradient.isfinite().all()
    # That of WGAN-GP is (slope - 1)**2: the 1 is lost beside a scaled slope, and the gradient overflows as well.
    kept, gradient = penalised(fp16(), "wgan_gp", USUAL, unscaled=False)
    assert kept > 2.0**26 and not gradient.isfinite().all()


def test_an_inner_pass_without_the_scale_underflows() -> None:
    """A discriminator that has hardly begun. That the wrong way computes 0 is arithmetic of the format, exact on any
    machine: the first number of the inner pass becomes 0 in fp16. How far ours is off is the kernels' rounding."""
    expected, _ = penalised(None, "r1", HARDLY_BEGUN)
    ours, wrong = (penalised(fp16(), "r1", HARDLY_BEGUN, scaled=scaled)[0] for scaled in (True, False))
    assert ours == pytest.approx(expected, rel=2 * BOUND["fp16"]) and wrong == 0.0
    _, gradient = penalised(None, "wgan_gp", HARDLY_BEGUN)
    ours, wrong = (penalised(fp16(), "wgan_gp", HARDLY_BEGUN, scaled=scaled)[1] for scaled in (True, False))
    assert relative(ours, gradient) < BOUND["fp16"] and not wrong.any()


def test_the_second_pass_carries_unscaled_slopes_so_r1_ends_where_they_are_tiny() -> None:
    """A limit of the method: what was unscaled comes back unscaled, and the loss scale is off. bf16 has none.

    Slopes of at most 4.4e-7 over 16 images are numbers below 2**-25, which fp16 rounds to 0: exact on any machine."""
    _, gradient = penalised(None, "r1", HARDLY_BEGUN)
    assert not penalised(fp16(), "r1", HARDLY_BEGUN)[1].any()
    assert relative(penalised(Amp.named("bf16"), "r1", HARDLY_BEGUN)[1], gradient) < BOUND["bf16"]


def test_without_an_eps_inside_the_root_a_flat_discriminator_makes_nan() -> None:
    ours, gradient = penalised(Amp.named("fp32"), "wgan_gp", 0.0)
    assert ours == pytest.approx(1.0, abs=1e-5) and gradient.isfinite().all()
    wrong, gradient = penalised(Amp.named("fp32"), "wgan_gp", 0.0, eps=0.0)
    assert wrong == 1.0 and gradient.isnan().any()


def critic(mode: str, **fields: Any) -> tuple[list[int], list[float], float]:
    """Sixty steps of a critic between two clouds: the steps that were skipped, the scales, the last loss."""
    D, amp = networks()[1], Amp.named(mode, **fields)
    optimizer, random = Adam(D.parameters(), lr=1e-3, betas=(0.0, 0.9), fused=True), torch.Generator().manual_seed(5)
    skipped, scales, loss = [], [], torch.zeros(())
    for i in range(60):
        real = torch.randn(16, *SHAPE, generator=random) / 2 + 1
        fake, mix = torch.randn(16, *SHAPE, generator=random), torch.rand(16, 1, 1, 1, generator=random)
        with amp.autocast():
            of_real, of_fake = D(torch.cat([real, fake])).float().chunk(2)
            loss = discriminator_loss("wgan_gp", of_real, of_fake)
            loss = loss + 10 * gradient_penalty("wgan_gp", amp, D, real, fake, mix)
        amp.backward(loss)
        if not amp.step(optimizer).taken:
            skipped.append(i)
        amp.update()
        optimizer.zero_grad()
        scales.append(amp.scale)
    return skipped, scales, loss.item()


def test_wgan_gp_overflows_at_the_default_scale_by_construction_and_settles() -> None:
    """The inner pass begins with a gradient of 1; times 65536 fp16 cannot hold it."""
    skipped, scales, _ = critic("fp16")
    assert skipped[0] == 0 and scales[0] == 32768 and len(skipped) <= 4
    assert 4096 <= scales[-1] <= 16384 and len(set(scales[-20:])) == 1
    _, _, expected = critic("fp32")
    skipped, _, loss = critic("fp16", init_scale=4096.0)
    assert not skipped and loss == pytest.approx(expected, rel=0.03)


def two_losses(mode: str, forget: bool = False) -> list[Tensor]:
    """The unscaled gradients of two networks under two losses that share both outputs."""
    torch.manual_seed(0)
    nets = [nn.Linear(8, 4).double(), nn.Linear(8, 4).double()]
    x, y = torch.randn(16, 8).double(), torch.randn(16, 4).double()
    if mode != "float64":
        nets, x, y = [net.float() for net in nets], x.float(), y.float()
    amp = Amp.named("fp16", init_scale=256.0) if mode == "fp16" else Amp.named("fp32")
    with amp.autocast():
        out = [net(x) for net in nets]
        losses = [F.mse_loss(2 * out[0] + 3 * out[1], y), F.mse_loss(3 * out[0] - 5 * out[1], y)]
    if mode == "float64":
        sum(losses).backward()  # type: ignore[union-attr]
    elif forget:
        amp.backward(losses[0], retain_graph=True)
        losses[1].backward()
    else:
        amp.backward(losses[0], retain_graph=True)
        amp.backward(losses[1])
    for net in nets if mode != "float64" else ():
        amp.unscale_(SGD(net.parameters()))
    return [flat(of(net)) for net in nets]


def test_two_losses_under_one_scale_and_a_loss_that_was_not_scaled() -> None:
    expected = two_losses("float64")
    right, wrong = two_losses("fp16"), two_losses("fp16", forget=True)
    assert all(relative(a, b) < 1e-3 for a, b in zip(right, expected, strict=True))
    # The loss that was forgotten is divided by 256: what is left are the gradients of the other one.
    assert all(relative(a, b) > 0.5 for a, b in zip(wrong, expected, strict=True))


def both_losses(amp: Amp, *, shared: bool, retain: bool = True) -> tuple[Tensor, Tensor]:
    """Gradients of the generator and of the discriminator, at the same weights."""
    (G, D), (real, _, _) = networks(), batch()
    z = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    with amp.autocast():
        fake = G(z)
        of_real, of_fake = D(torch.cat([real, fake if shared else fake.detach()])).float().chunk(2)
        loss_D = discriminator_loss("r1", of_real, of_fake)
        loss_G = generator_loss("r1", of_fake if shared else D(fake).float())
    amp.backward(loss_D, retain_graph=retain and shared, inputs=of(D))
    amp.backward(loss_G, inputs=of(G))
    for net in (G, D):
        amp.unscale_(SGD(net.parameters()))
    return flat(of(G)), flat(of(D))


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_losses_that_share_a_graph_give_the_gradients_of_two_passes(mode: str) -> None:
    apart, shared = both_losses(Amp.named(mode), shared=False), both_losses(Amp.named(mode), shared=True)
    for a, b in zip(apart, shared, strict=True):
        assert relative(b, a) < (1e-5 if mode == "fp32" else 2e-3)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        both_losses(Amp.named(mode), shared=True, retain=False)


def drawn(step: int, accumulation: int, world_size: int, batch_size: int, stream: int = 0) -> Tensor:
    """The noise of a step in the order of its samples."""
    pieces = []
    for rank in range(world_size):
        cfg = SimpleNamespace(seed=7, batch_size=batch_size, accumulation=accumulation)
        env: Any = SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"), cfg=cfg)
        feed = Feed(env, SimpleNamespace(), iter)  # pyright: ignore[reportArgumentType]
        pieces.append(torch.stack(feed.draw(torch.randn, 3, step=step, stream=stream)))
    return torch.stack(pieces, dim=1).flatten(0, 2)


def test_the_noise_of_a_sample_does_not_depend_on_the_split() -> None:
    whole = drawn(4, 1, 1, 12)
    assert all(torch.equal(drawn(4, *split), whole) for split in [(3, 1, 4), (1, 3, 4), (2, 2, 3), (12, 1, 1)])
    others = [drawn(5, 1, 1, 12), drawn(4, 1, 1, 12, stream=1)]
    assert not any(torch.isclose(other, whole).any() for other in others)


def test_the_distance_of_a_set_to_itself_is_0_and_grows_with_a_shift() -> None:
    images = torch.randn(200, 1, 4, 4)
    assert sliced_wasserstein(images, images[torch.randperm(200)]) == 0.0
    # A shift of every pixel by s moves a projection on a unit vector d by s * sum(d): root mean square s.
    assert sliced_wasserstein(images, images + 0.5) == pytest.approx(0.5, rel=0.1)


BOTH = ["recipe.num_critic_steps=1"]


def test_a_generator_skips_alone_while_the_discriminator_steps() -> None:
    settings = ["steps=2", "amp=fp16", "amp.init_scale=1024", *BOTH]
    bad = state(run("bad", "debug.inject={where: gradient, step: 2}", *settings))
    good = state(run("good", *settings))
    none = state(run("none", "debug.inject={where: drop, step: 2}", *settings))
    same = {"discriminator": good, "discriminator_optimizer": good, "generator": none, "generator_optimizer": none}
    for name, other in {**same, "generator_schedule": none, "discriminator_schedule": good, "ema": none}.items():
        assert not same_but({name: bad[name]}, {name: other[name]})
    assert same_but({"generator": bad["generator"]}, {"generator": good["generator"]})
    assert bad["scaler"]["scale"] == 512.0  # halved once
    line = next(line for line in lines("bad") if line["step"] == 2)
    assert (line["skipped"], line["skipped_generator"], line["skipped_discriminator"]) == (1, 1, 0)
    assert line["loss_generator"] is None and line["loss"] is not None


def test_the_generator_steps_in_every_third_window() -> None:
    folder = run("a", "steps=7", "recipe.num_critic_steps=3")
    given = [line.get("loss_generator") is not None for line in lines(folder)[:7]]
    assert given == [False, False, True, False, False, True, False]
    saved = state(folder)
    optimizers = saved["generator_optimizer"], saved["discriminator_optimizer"]
    assert [{int(s["step"]) for s in optimizer["state"].values()} for optimizer in optimizers] == [{2}, {7}]


def test_samples_are_written_at_each_evaluation_and_nowhere_else() -> None:
    folder = run("a", "steps=4", "eval_every=2")
    samples = sorted((folder / "samples").iterdir())
    assert [path.name for path in samples] == ["step_00000002.png", "step_00000004.png"]
    with Image.open(samples[0]) as image:  # 24 held-out images, 8 in a row, with a border of 2 pixels
        assert image.size == (8 * 10 + 2, 3 * 10 + 2)
    assert samples[0].read_bytes() != samples[1].read_bytes()
    # The same noise every time: a run that goes on draws what the whole run drew.
    again = run("b", "steps=4", "eval_every=2")
    assert [p.read_bytes() for p in sorted((again / "samples").iterdir())] == [p.read_bytes() for p in samples]


def test_islands_are_named_by_network() -> None:
    run("a", "steps=1", 'amp.keep_fp32=["discriminator.0","generator.layers.0"]')
    run("b", "steps=1", 'amp.keep_fp32=["layers.0"]', code=2)


def test_the_best_checkpoint_has_the_smallest_distance() -> None:
    folder = run("a", "steps=6", "eval_every=1", "save_every=1", "checkpoint.keep=1", "optimizer.lr=0.02", *BOTH)
    found = {line["step"]: line["ema_sliced_wasserstein"] for line in lines(folder) if line["split"] == "eval"}
    best = min(found, key=lambda step: found[step])
    assert {f"step_{best:08}", "step_00000006"} == {path.name for path in checkpoints(folder)}
