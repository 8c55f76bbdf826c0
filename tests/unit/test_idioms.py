"""Training loops as torch's notes and tutorials on mixed precision have them, with `Amp` in place of the scaler.

Each idiom runs by hand in float64 without its bad batches, with `Amp` and them, in fp16 with torch's own scaler, and in
fp16 with that of `amp_plugins` in its place, which has to have torch's bits where nothing overflows, with any numbers.
Elsewhere numbers are dyadic and short: no 16-bit operation rounds, so every mode has the bits of float64, up to the counted fp32
roundings of what divides or takes a root.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiers import rows
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import amp_plugins
from amp_core import Amp, Clip, Ema, Schedule, StepReport, master_params, sync_grads, windows

SCALE = {"init_scale": 1024.0, "growth_interval": 2}
MODES = ["fp32", "bf16", "fp16", "o2"]
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "torch": torch.float16, "plugin": torch.float16}
INF = float("inf")
# Found by search: of few bits, and after two steps still.
WEIGHTS = [-2, 0.5, -1, 0.5], [-1, -0.5], [-1, -2], [2], [-1, -0.5, 0.5, -0.5], [-1, 0.5]
INPUTS, FACTORS = [[-2.0, -1.0], [2.0, -1.0]], [[-2.0], [1.0]]
Tensors = list[Tensor]


class Lines:
    """The methods of `Amp` in a few plain lines: without a scaler, or with one."""

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.float16) if self.is_enabled() else contextlib.nullcontext()

    def backward(self, loss: Tensor, weight: Any = 1.0, **options: Any) -> None:
        self.scale(loss * weight).backward(**options)

    def grad(self, outputs: Tensor, inputs: Any) -> Tensors:
        grads = torch.autograd.grad(self.scale(outputs.sum()), inputs, create_graph=True)
        return [g / self.get_scale() for g in grads]

    def step(self, optimizer: Optimizer, clip: Clip | None = None) -> StepReport:  # type: ignore[override]
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        taken = all(bool(torch.isfinite(p.grad).all()) for p in params)
        if clip is not None:
            self.unscale_(optimizer)
            clip_grad_norm_(params, clip.threshold)
        super().step(optimizer)
        return StepReport(torch.tensor(taken), torch.zeros(()), taken)

    def zero_grad(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()


class ByHand(Lines, GradScaler):
    def guard(self, net: nn.Module) -> None: ...


class Plugin(Lines, amp_plugins.GradScaler): ...


class Loop:
    """The networks, optimizers and batches of an idiom, and what steps them."""

    def __init__(
        self, mode: str, fused: bool = True, wrap: Callable[..., Any] | None = None, *, healthy: bool = False
    ) -> None:
        self.fused, self.exact, self.wrap = fused, mode == "float64", wrap
        self.healthy = healthy
        """No bad batch, and numbers of many bits."""
        self.dtype = torch.float64 if self.exact else torch.float32
        self.mode = mode
        self.amp = self.new_amp()

    def new_amp(self) -> Any:
        policy: Any = SCALE | ({"init_scale": 1000.0} if self.healthy else {})  # whose reciprocal is rounded
        if self.mode in ("float64", "torch"):
            return ByHand("cpu", **policy, enabled=not self.exact)
        if self.mode == "plugin":
            return Plugin("cpu", **policy)
        return Amp.named(self.mode, **(SCALE if self.mode in ("fp16", "o2") else {}))

    def net(self, kind: Callable[..., nn.Module] = nn.Linear) -> nn.Sequential:
        """[2, 2] to [2, 1], with weights of few bits."""
        net = nn.Sequential(kind(2, 2), nn.ReLU(), nn.Linear(2, 1)).to(self.dtype)
        with torch.no_grad():
            for p, values in zip(net.parameters(), WEIGHTS[:4], strict=True):
                p.copy_(torch.tensor(values).view_as(p) / (3 if self.healthy else 1))
        return self.prepared(net)

    def prepared(self, net: Any) -> Any:
        if self.mode == "o2":
            self.amp.prepare(net)
        return self.wrap(net) if self.wrap else net

    def sgd(self, *nets: nn.Module, lr: float = 0.25) -> Optimizer:
        return SGD([p for net in nets for p in master_params(net)], lr, momentum=0.5, fused=self.fused)

    def batches(self, num: int = 3, bad: int = 1, window: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs [2, 2] and factors [2, 1]; batch `bad` has an infinity, and by hand its window is left out."""
        for i in range(num):
            if self.exact and i // window == bad // window:
                continue
            x, t = torch.tensor(INPUTS).roll(i, 0), torch.tensor(FACTORS) * (-1) ** i
            x, t = x.to(self.dtype), t.to(self.dtype)
            if self.healthy:
                x, bad = x / 3, -1
            if dist.is_initialized():  # a sample for each of two ranks, of which the second has the infinity
                x, t = (tensor[dist.get_rank()].unsqueeze(0) for tensor in (x, t))
            yield x * INF if i == bad and (not dist.is_initialized() or dist.get_rank()) else x, t

    def loss(self, net: nn.Module, x: Tensor, t: Tensor | float = 1.0) -> Tensor:
        with self.amp.autocast():
            y = net(x)
            assert y.dtype is LOW.get(self.mode, self.dtype)
            return (y * t).mean()

    def training(self, net: nn.Module) -> Callable[[Tensor, Tensor], None]:
        """The backward pass of a batch."""
        return lambda x, t: self.amp.backward(self.loss(net, x, t))


def weights(*nets: nn.Module) -> Tensors:
    """And buffers: full ones of shards, and of 16-bit weights in fp32, as they are saved."""
    values: list[Any] = [value for net in nets for value in net.state_dict().values()]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]


def steps(
    loop: Loop,
    optimizers: list[Optimizer],
    backward: Callable[[Tensor, Tensor], Any],
    order: tuple[int, int] = (3, 1),
    before: Callable[[], Any] | None = None,
    **options: Any,
) -> Iterator[StepReport]:
    """The plain loop. `order`: the number of batches, and which is bad. `before` the step; `options` of it."""
    for x, t in loop.batches(*order):
        loop.amp.zero_grad(*optimizers)
        backward(x, t)
        if before is not None:
            before()
        reports = [loop.amp.step(optimizer, **options) for optimizer in optimizers]
        loop.amp.update()
        yield reports[0]


# --- the notes ------------------------------------------------------------------------------------------------------------


def typical(loop: Loop, change: Callable[[nn.Module], Any] | None = None, **options: Any) -> Tensors:
    """`change`: of the unscaled gradients."""
    net = loop.net()
    optimizer = loop.sgd(net)

    def before() -> None:
        if change is not None:
            loop.amp.unscale_(optimizer)
            change(net)

    list(steps(loop, [optimizer], loop.training(net), before=before, **options))
    return weights(net)


def changed(net: nn.Module) -> None:
    for p in master_params(net):
        assert p.grad is not None
        p.grad = p.grad * 2 if p.ndim == 2 else p.grad.sign_()


def accumulated(loop: Loop, unscaled: bool = False) -> Tensors:
    """A window of two batches, whose losses are halved."""
    amp, net = loop.amp, loop.net()
    optimizer = loop.sgd(net)
    for i, (x, t) in enumerate(loop.batches(6, bad=3, window=2)):
        with sync_grads(net, when=i % 2 == 1):
            amp.backward(loop.loss(net, x, t) / 2)
        if i % 2:
            if unscaled:
                amp.unscale_(optimizer)
            amp.step(optimizer)
            amp.update()
            optimizer.zero_grad(set_to_none=False)
    return weights(net)


def in_windows(loop: Loop) -> Tensors:
    """The last window has one micro-batch."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    amp, net = loop.amp, loop.net()
    optimizer = loop.sgd(net)
    for window in windows(loop.batches(5, bad=2, window=2), 2, world_size=num_ranks):
        for micro in window:
            with sync_grads(net, when=micro.is_last):
                amp.backward(loop.loss(net, *micro.batch), micro.weight)
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)
    return weights(net)


def penalty_on_weights(loop: Loop) -> Tensors:
    """The norm of the gradient of the weights is a part of the loss. Of one weight it is exact."""
    net = nn.Linear(1, 1, bias=False).to(loop.dtype)
    nn.init.constant_(net.weight, 2.0)
    loop.prepared(net)

    def backward(x: Tensor, t: Tensor) -> None:
        with loop.amp.autocast():
            loss = (net(x[:, :1]).to(loop.dtype).square() * t.abs()).mean() / 4
        (gradient,) = loop.amp.grad(loss, list(net.parameters()))
        loop.amp.backward(loss + gradient.square().sum().sqrt() / 2)

    list(steps(loop, [loop.sgd(net)], backward))
    return weights(net)


def several_losses(loop: Loop) -> Tensors:
    """Two networks, losses and optimizers share a graph; one of the optimizers is unscaled in advance."""
    nets = [loop.net(), loop.net()]
    optimizers = [loop.sgd(nets[0]), loop.sgd(nets[1], lr=0.125)]

    def backward(x: Tensor, t: Tensor) -> None:
        with loop.amp.autocast():
            a, b = nets[0](x), nets[1](x.flip(0))
            losses = ((2 * a + b) * t).mean(), ((a - b) * t.flip(0)).mean()
        loop.amp.backward(losses[0], retain_graph=True)
        loop.amp.backward(losses[1])
        loop.amp.unscale_(optimizers[0])
        clip_grad_value_(master_params(nets[0]), 0.5)

    list(steps(loop, optimizers, backward))
    return weights(*nets)


# --- tutorials: saving, averages, rates -----------------------------------------------------------------------------------


def averaged(loop: Loop, ours: bool) -> Tensors:
    """An average with decay 0.5 of the steps taken, by torch or by `Ema`."""
    net = loop.net()
    ema = Ema(net, 0.5, warmup=False)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(net)  # the first copies
    for report in steps(loop, [loop.sgd(net)], loop.training(net)):
        if ours and loop.mode in MODES:
            ema.update(report)
        elif bool(report.taken):
            average.update_parameters(net)
    return weights(net, ema.model if ours and loop.mode in MODES else average.module)


def rates(loop: Loop, ours: bool) -> Tensors:
    """A rate that is halved after each step taken: torch's scheduler after a look at the step, or `Schedule`."""
    net = loop.net()
    optimizer = loop.sgd(net)
    mine = Schedule(optimizer, lambda o, n: StepLR(o, 1, 0.5), 4) if ours and loop.mode in MODES else None
    theirs = None if mine else StepLR(optimizer, 1, 0.5)
    for report in steps(loop, [optimizer], loop.training(net)):
        if mine:
            mine.advance(report)
        elif theirs and bool(report.taken):
            theirs.step()
    return weights(net)


# --- tutorials: two networks against each other ---------------------------------------------------------------------------


def adversaries(loop: Loop) -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
    D, G = loop.net(), nn.Linear(2, 2).to(loop.dtype)
    with torch.no_grad():
        G.weight.copy_(torch.tensor(WEIGHTS[4]).view(2, 2))
        G.bias.copy_(torch.tensor(WEIGHTS[5]))
    return D, loop.prepared(G), loop.sgd(D), loop.sgd(G, lr=0.125)


def dcgan(loop: Loop, between: str = "") -> Tensors:
    """Two backward passes for D, one for G through D; `between`: what happens to D before the pass of G."""
    amp, (D, G, of_D, of_G) = loop.amp, adversaries(loop)
    for x, t in loop.batches():
        D.zero_grad()
        with amp.autocast():
            fake = G(x.flip(1))
        amp.backward(loop.loss(D, x, t))
        amp.backward(loop.loss(D, fake.detach(), -1.0))
        if "unscaled" in between:
            amp.unscale_(of_D)
        amp.step(of_D)
        if "updated" in between:
            amp.update()
        if "cleared" in between:
            of_D.zero_grad()
        D.requires_grad_("frozen" not in between)
        G.zero_grad()
        amp.backward(loop.loss(D, fake, 1.0))
        D.requires_grad_(True)
        amp.step(of_G)
        amp.update()
    return weights(D, G)


def wgan_gp(loop: Loop) -> Tensors:
    """A penalty on the norm of D's gradient at a point between; the second input is 0, so that norms are exact."""
    D, G, of_D, of_G = adversaries(loop)
    state = D.state_dict()
    state["0.weight"][:, 1] = 0
    D.load_state_dict(state)
    for x, t in loop.batches():
        x = x * torch.tensor([1.0, 0.0]).to(x)
        mix = (x / 2 + x.flip(0) / 2).requires_grad_()
        with loop.amp.autocast():
            out = D(mix)
        (gradient,) = loop.amp.grad(out, mix)
        penalty = (gradient.norm(2, dim=1) - 1).square().mean()
        loop.amp.zero_grad(of_D)
        loop.amp.backward(loop.loss(D, x, t) + penalty / 4)
        loop.amp.step(of_D)
        loop.amp.zero_grad(of_G)
        loop.amp.backward(-loop.loss(D, G(x)))
        loop.amp.step(of_G)
        loop.amp.update()
    return weights(D, G)


BETWEEN = ["as it is", "frozen", "cleared", "updated and cleared", "unscaled", "unscaled and cleared"]


def by(clip: Callable[..., Any]) -> Callable[[nn.Module], Any]:
    return lambda net: clip(master_params(net), 0.25)


IDIOMS: dict[str, tuple[Callable[..., Tensors], dict[str, Any], int]] = {
    "typical": (typical, {}, 0),
    "the first batch is bad": (typical, {"order": (2, 0)}, 0),
    "clipped by torch": (typical, {"change": by(clip_grad_norm_), "order": (2, 1)}, 16),
    "clipped by value": (typical, {"change": by(clip_grad_value_)}, 0),
    "clipped by the step": (typical, {"clip": Clip.norm(0.25), "order": (2, 1)}, 16),
    "gradients changed": (typical, {"change": changed}, 0),
    "accumulated": (accumulated, {}, 0),
    "accumulated and unscaled": (accumulated, {"unscaled": True}, 0),
    "in windows": (in_windows, {}, 0),
    "penalty on weights": (penalty_on_weights, {}, 0),
    "several losses": (several_losses, {}, 0),
    "averaged by torch": (averaged, {"ours": False}, 0),
    "averaged by Ema": (averaged, {"ours": True}, 0),
    "rates by torch": (rates, {"ours": False}, 0),
    "rates by Schedule": (rates, {"ours": True}, 0),
    **{f"dcgan, D {between}": (dcgan, {"between": between}, 0) for between in BETWEEN},
    "wgan-gp": (wgan_gp, {}, 0),
}
"""An idiom, its arguments, and how often fp32 rounds. A norm: 6 squares, their sums, a root, a quotient, 2 products."""
NOT_BY_TORCH = [("the first batch is bad", "torch")]


def compare(found: Tensors, name: str) -> None:
    idiom, options, num_roundings = IDIOMS[name]
    for a, b in zip(found, idiom(Loop("float64"), **options), strict=True):
        bound = num_roundings * 2**-24 * max(1.0, float(b.abs().max()))
        assert float((a - b).abs().max()) <= bound, (a, b)


TRIED = [(name, mode) for name in IDIOMS for mode in (*MODES, "torch", "plugin") if (name, mode) not in NOT_BY_TORCH]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name, mode", TRIED)
def test_an_idiom_is_plain_torch_in_float64(name: str, mode: str, fused: bool) -> None:
    loop = Loop(mode, fused)
    idiom, options, _ = IDIOMS[name]
    found = idiom(loop, **options)
    compare(found, name)
    for by in ("torch", "plugin") if mode == "fp16" else ():
        if (name, by) in TRIED:
            other = Loop(by, fused)
            got = idiom(other, **options)
            assert loop.amp.scale == other.amp.get_scale() != 1.0
            assert by == "torch" or "clip" in options or all(map(torch.equal, found, got))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", IDIOMS)
def test_the_plugin_has_the_bits_of_torchs_scaler_where_nothing_overflows(name: str, fused: bool) -> None:
    idiom, options, _ = IDIOMS[name]
    loops = [Loop(by, fused, healthy=True) for by in ("torch", "plugin")]
    right, found = (idiom(loop, **options) for loop in loops)
    assert all(map(torch.equal, right, found))
    assert loops[0].amp.state_dict() == loops[1].amp.state_dict()


# --- two ranks ------------------------------------------------------------------------------------------------------------


def sharded(net: nn.Sequential, dtype: torch.dtype | None = None) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in (net[0], net[2], net):
        fully_shard(layer, mp_policy=policy)
    return net


WRAPPERS: dict[str, Callable[..., Any]] = {
    "DDP": DistributedDataParallel,
    "DDP, gradients in its buckets": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "FSDP2": sharded,
    "FSDP2, gathered in 16 bits": sharded,
}
SHARED = ["typical", "clipped by torch", "clipped by the step", "accumulated", "accumulated and unscaled", "in windows"]


def scale_of(loop: Loop) -> float:
    return float(loop.amp.scale if isinstance(loop.amp, Amp) else loop.amp.get_scale())


def on_a_rank(rank: int, wrapper: str) -> dict[str, list[Tensor]]:
    found = {}
    for mode in ("fp32", "bf16", "fp16", "plugin"):
        wrap = partial(sharded, dtype=LOW.get(mode)) if "gathered" in wrapper else WRAPPERS[wrapper]
        for name in SHARED:
            loop, (idiom, options, _) = Loop(mode, wrap=wrap), IDIOMS[name]
            found[f"{mode}, {name}"] = [*idiom(loop, **options), torch.tensor(scale_of(loop))]
            if mode == "plugin":
                fused = "FSDP2" not in wrapper  # torch has no fused SGD of shards
                twins = [Loop(by, fused, wrap, healthy=True) for by in ("torch", "plugin")]
                right, got = ([*idiom(twin, **options), torch.tensor(scale_of(twin))] for twin in twins)
                assert all(map(torch.equal, right, got)), name
    return found


@pytest.mark.parametrize("wrapper", rows(WRAPPERS, "DDP", "FSDP2, gathered in 16 bits"))
def test_an_idiom_on_two_ranks_is_plain_torch_in_one_process(wrapper: str, on_ranks: Callable[..., Any]) -> None:
    one, other = on_ranks(on_a_rank, wrapper)
    for key, (*found, scale) in one.items():
        mode, name = key.split(", ", 1)
        compare(found, name)
        assert all(map(torch.equal, other[key], [*found, scale])) and (scale == 1.0) == (mode in ("fp32", "bf16"))
