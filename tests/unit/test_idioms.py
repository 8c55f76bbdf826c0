"""Training loops as torch's notes and tutorials on mixed precision have them, with `Amp` in place of the scaler.

Each idiom runs by hand in float64 without its bad batches, with `Amp` and them, and in fp16 with torch's own scaler.
Numbers are dyadic and short: no 16-bit operation rounds, so every mode has the bits of float64, up to the counted fp32
roundings of what divides or takes a root.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.autocast_mode import custom_bwd, custom_fwd
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from amp_core import Amp, Clip, Ema, Schedule, StepReport, keep_fp32, sync_grads, windows
from amp_core.tensors import full_tensor

SCALE = {"init_scale": 1024.0, "growth_interval": 2}
MODES = ["fp32", "bf16", "fp16"]
INF = float("inf")
WEIGHTS = [1, -0.5, 0.5, 1], [0.5, 1], [1, -2], [0.5], [1, 0.5, -0.5, 1], [0.5, -1]
INPUTS = [[1.0, 2.0], [2.0, -1.0], [-1.0, 0.5], [0.5, 1.0]]
FACTORS = [[1.0], [-1.0], [2.0], [-2.0]]
Batch = tuple[Tensor, Tensor]


class ByHand:
    """The methods of `Amp` in a few plain lines: without a scaler, or with torch's."""

    def __init__(self, scaler: GradScaler | None = None) -> None:
        self.scaler = scaler or GradScaler("cpu", enabled=False)

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.float16) if self.scaler.is_enabled() else contextlib.nullcontext()

    def backward(self, loss: Tensor, weight: Any = 1.0, **options: Any) -> None:
        self.scaler.scale(loss * weight).backward(**options)

    def grad(self, outputs: Tensor, inputs: Any) -> list[Tensor]:
        grads = torch.autograd.grad(self.scaler.scale(outputs.sum()), inputs, create_graph=True)
        return [g / self.scaler.get_scale() for g in grads]

    def unscale_(self, optimizer: Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, clip: Clip | None = None) -> StepReport:
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        taken = all(bool(torch.isfinite(p.grad).all()) for p in params)
        if clip is not None:
            self.scaler.unscale_(optimizer)
            clip_grad_norm_(params, clip.threshold)
        self.scaler.step(optimizer)
        return StepReport(torch.tensor(taken), torch.zeros(()), taken)

    def update(self) -> None:
        self.scaler.update()

    def zero_grad(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    def guard(self, net: nn.Module) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.scaler.load_state_dict(state)


class Loop:
    """The networks, optimizers and batches of an idiom, and what steps them."""

    def __init__(self, mode: str, fused: bool = True) -> None:
        self.fused, self.exact = fused, mode == "float64"
        self.dtype = torch.float64 if self.exact else torch.float32
        self.mode = mode
        self.amp = self.new_amp()

    def new_amp(self) -> Any:
        if self.mode in ("float64", "torch"):
            return ByHand(GradScaler("cpu", **SCALE) if self.mode == "torch" else None)  # type: ignore[arg-type]
        return Amp.named(self.mode, **(SCALE if self.mode == "fp16" else {}))

    def net(self, kind: Callable[..., nn.Module] = nn.Linear) -> nn.Sequential:
        """[4, 2] to [4, 1], with weights of few bits."""
        net = nn.Sequential(kind(2, 2), nn.ReLU(), nn.Linear(2, 1)).to(self.dtype)
        with torch.no_grad():
            for p, values in zip(net.parameters(), WEIGHTS[:4], strict=True):
                p.copy_(torch.tensor(values).view_as(p))
        return net

    def sgd(self, *nets: nn.Module, lr: float = 0.25) -> Optimizer:
        return SGD([p for net in nets for p in net.parameters()], lr, momentum=0.5, fused=self.fused)

    def batches(self, num: int = 3, bad: int = 1, window: int = 1) -> Iterator[Batch]:
        """Inputs [4, 2] and factors [4, 1]; batch `bad` has an infinity, and by hand its window is left out."""
        for i in range(num):
            if self.exact and i // window == bad // window:
                continue
            x, t = torch.tensor(INPUTS).roll(i, 0), torch.tensor(FACTORS) * (-1) ** i
            x[0, 0] = INF if i == bad else x[0, 0]
            yield x.to(self.dtype), t.to(self.dtype)

    def loss(self, net: nn.Module, x: Tensor, t: Tensor | float = 1.0) -> Tensor:
        with self.amp.autocast():
            y = net(x)
            assert self.exact or self.mode == "fp32" or y.dtype is not torch.float32
            return (y * t).mean()


# --- the notes ------------------------------------------------------------------------------------------------------------


def typical(
    loop: Loop, change: Callable[[nn.Module], Any] | None = None, order: tuple[int, int] = (3, 1), **options: Any
) -> Sequence[Tensor]:
    """`change`: of the unscaled gradients. `order`: the number of batches, and which is bad. `options`: of the step."""
    amp, net = loop.amp, loop.net()
    optimizer = loop.sgd(net)
    for x, t in loop.batches(*order):
        optimizer.zero_grad()
        amp.backward(loop.loss(net, x, t))
        if change is not None:
            amp.unscale_(optimizer)
            change(net)
        amp.step(optimizer, **options)
        amp.update()
    return list(net.parameters())


def changed(net: nn.Module) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.grad = p.grad * 2 if p.ndim == 2 else p.grad.sign_()


def accumulated(loop: Loop, unscaled: bool = False) -> Sequence[Tensor]:
    """A window of two batches, whose losses are halved."""
    amp, net = loop.amp, loop.net()
    optimizer = loop.sgd(net)
    for i, (x, t) in enumerate(loop.batches(6, bad=3, window=2)):
        amp.backward(loop.loss(net, x, t) / 2)
        if i % 2:
            if unscaled:
                amp.unscale_(optimizer)
            amp.step(optimizer)
            amp.update()
            optimizer.zero_grad(set_to_none=False)
    return list(net.parameters())


def in_windows(loop: Loop) -> Sequence[Tensor]:
    """The last window has one micro-batch."""
    amp, net = loop.amp, loop.net()
    optimizer = loop.sgd(net)
    for window in windows(loop.batches(5, bad=2, window=2), accumulation=2):
        for micro in window:
            with sync_grads(net, when=micro.is_last):
                amp.backward(loop.loss(net, *micro.batch), micro.weight)
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)
    return list(net.parameters())


def penalty_on_weights(loop: Loop) -> Sequence[Tensor]:
    """The norm of the gradient of the weights is a part of the loss. Of one weight it is exact."""
    amp, net = loop.amp, nn.Linear(1, 1, bias=False).to(loop.dtype)
    nn.init.constant_(net.weight, 2.0)
    optimizer = loop.sgd(net)
    for x, t in loop.batches():
        optimizer.zero_grad()
        with amp.autocast():
            loss = (net(x[:, :1]).float().to(loop.dtype).square() * t.abs()).mean() / 4
        grads = amp.grad(loss, list(net.parameters()))
        with amp.autocast():
            loss = loss + sum(g.square().sum() for g in grads).sqrt() / 2  # type: ignore[union-attr]
        amp.backward(loss)
        amp.step(optimizer)
        amp.update()
    return list(net.parameters())


def several_losses(loop: Loop, first: bool = True) -> Sequence[Tensor]:
    """Two networks, losses and optimizers share a graph; one of the optimizers is unscaled in advance."""
    amp, nets = loop.amp, [loop.net(), loop.net()]
    optimizers = [loop.sgd(nets[0]), loop.sgd(nets[1], lr=0.125)]
    for x, t in loop.batches():
        amp.zero_grad(*optimizers)
        with amp.autocast():
            a, b = nets[0](x), nets[1](x.flip(0))
            losses = ((2 * a + b) * t).mean(), ((a - b) * t.flip(0)).mean()
        amp.backward(losses[0], retain_graph=True)
        amp.backward(losses[1])
        if first:
            amp.unscale_(optimizers[0])
            clip_grad_value_(nets[0].parameters(), 0.5)
        for optimizer in optimizers:
            amp.step(optimizer)
        amp.update()
    return [p for net in nets for p in net.parameters()]


def losses_of_their_own_weights(loop: Loop) -> Sequence[Tensor]:
    amp, net = loop.amp, loop.net()
    head, body = loop.sgd(net[2]), loop.sgd(net[0])
    for x, t in loop.batches():
        amp.backward(loop.loss(net, x, t), inputs=list(net[2].parameters()))
        amp.backward(loop.loss(net, x, 2.0), inputs=list(net[0].parameters()))
        amp.step(head)
        amp.step(body)
        amp.update()
        amp.zero_grad(head, body)
    return list(net.parameters())


class Product(torch.autograd.Function):
    """x W^T + b, of several inputs of several dtypes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight.t()) + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad.mm(weight), grad.t().mm(x), grad.sum(0)


class InFp32(torch.autograd.Function):
    """The same for kernels that take one dtype alone."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cpu") and len({t.dtype for t in inputs}) == 1
        return Product.forward(ctx, *inputs)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        assert grad.dtype is ctx.saved_tensors[0].dtype
        return Product.backward(ctx, grad)


class Decorated(torch.autograd.Function):
    forward = staticmethod(custom_fwd(Product.forward, device_type="cpu"))  # type: ignore[assignment]
    backward = staticmethod(custom_bwd(Product.backward, device_type="cpu"))  # type: ignore[assignment]


def custom(loop: Loop, function: type[torch.autograd.Function]) -> Sequence[Tensor]:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return function.apply(x, self.weight, self.bias)

    amp, net = loop.amp, loop.net(Layer)
    optimizer = loop.sgd(net)
    for x, t in loop.batches():
        amp.backward(loop.loss(net, x, t))
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)
    return list(net.parameters())


# --- tutorials: saving, averages, rates -----------------------------------------------------------------------------------


def saved_and_resumed(loop: Loop) -> Sequence[Tensor]:
    """After each window everything moves to new objects, by plain `state_dict`s."""
    amp, net = loop.amp, loop.net()
    optimizer = loop.sgd(net)
    for x, t in loop.batches(4):
        amp.backward(loop.loss(net, x, t))
        amp.step(optimizer)
        amp.update()
        saved = copy.deepcopy([net.state_dict(), optimizer.state_dict(), amp.state_dict()])
        amp, net = loop.new_amp(), loop.net()
        loop.amp, optimizer = amp, loop.sgd(net)
        for part, state in zip((net, optimizer, amp), saved, strict=True):
            part.load_state_dict(state)
    return list(net.parameters())


def averaged(loop: Loop, ours: bool) -> Sequence[Tensor]:
    """An average with decay 0.5 of the steps taken, by torch or by `Ema`."""
    amp, net = loop.amp, loop.net()
    optimizer = loop.sgd(net)
    kind = Ema(net, 0.5, warmup=False) if ours and loop.mode in MODES else None
    model = kind.model if kind else AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5)).module
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(net)  # torch's first update copies
    for x, t in loop.batches():
        amp.backward(loop.loss(net, x, t))
        report = amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
        if kind:
            kind.update(report)
        elif bool(report.taken):
            average.update_parameters(net)
    return [*net.parameters(), *(model if kind else average.module).parameters()]


class Watched(nn.Module):
    """Running statistics beside the path, so that no 16-bit number is divided by a root."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.net, self.norm = loop.net(), nn.BatchNorm1d(1, momentum=0.5).to(loop.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        self.norm(y)
        return y


def stochastic_weight_averages(loop: Loop, live: bool = False) -> Sequence[Tensor]:
    """Rates by SWALR, an average from the second epoch on, and its statistics by `update_bn`; `live`: the network's too."""
    amp, net = loop.amp, Watched(loop)
    amp.guard(net)
    optimizer = loop.sgd(net.net)
    average, rates = AveragedModel(net), SWALR(optimizer, swa_lr=0.125, anneal_epochs=2, anneal_strategy="linear")
    for epoch in range(2):
        for x, t in loop.batches(2, bad=1 - epoch):
            amp.backward(loop.loss(net, x, t))
            amp.step(optimizer)
            amp.update()
            optimizer.zero_grad()
            if live:
                update_bn([batch for batch in loop.batches(3, bad=9)], net)
        average.update_parameters(net)
        rates.step()
    update_bn([x for x, _ in loop.batches(3, bad=9)], average)
    return [*net.parameters(), *net.buffers(), *average.parameters(), *average.buffers()]


def rates(loop: Loop, ours: bool) -> Sequence[Tensor]:
    """A rate that is halved after each step taken: torch's scheduler after a look at the step, or `Schedule`."""
    amp, net = loop.amp, loop.net()
    optimizer = loop.sgd(net)
    mine = Schedule(optimizer, lambda o, n: StepLR(o, 1, 0.5), 4) if ours and loop.mode in MODES else None
    theirs = None if mine else StepLR(optimizer, 1, 0.5)
    for x, t in loop.batches():
        amp.backward(loop.loss(net, x, t))
        report = amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
        if mine:
            mine.advance(report)
        elif theirs and bool(report.taken):
            theirs.step()
    return list(net.parameters())


def unfrozen(loop: Loop) -> Sequence[Tensor]:
    """The head alone, then with the rest of the network, which gets a group of its own."""
    amp, net = loop.amp, loop.net()
    net[0].requires_grad_(False)
    optimizer = SGD(net[2].parameters(), 0.25, momentum=0.5, fused=loop.fused)
    for i, (x, t) in enumerate(loop.batches(3, bad=2)):
        if i == 1:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.125})
        amp.backward(loop.loss(net, x, t))
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)
    return list(net.parameters())


# --- tutorials: two networks against each other ---------------------------------------------------------------------------


def adversaries(loop: Loop) -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
    D, G = loop.net(), nn.Linear(2, 2).to(loop.dtype)
    with torch.no_grad():
        G.weight.copy_(torch.tensor(WEIGHTS[4]).view(2, 2))
        G.bias.copy_(torch.tensor(WEIGHTS[5]))
    return D, G, loop.sgd(D), loop.sgd(G, lr=0.125)


def dcgan(loop: Loop, between: str = "") -> Sequence[Tensor]:
    """Two backward passes for D, one for G through D; `between`: what happens to D before the pass of G."""
    amp, (D, G, of_D, of_G) = loop.amp, adversaries(loop)
    for x, t in loop.batches():
        D.zero_grad()
        with amp.autocast():
            fake = G(x.flip(1))
        amp.backward(loop.loss(D, x, t))
        amp.backward(loop.loss(D, fake.detach(), -1.0))
        if "unscale" in between:
            amp.unscale_(of_D)
        amp.step(of_D)
        if "update" in between:
            amp.update()
        if "zero" in between:
            of_D.zero_grad()
        if "frozen" in between:
            D.requires_grad_(False)
        G.zero_grad()
        amp.backward(loop.loss(D, fake, 1.0))
        D.requires_grad_(True)
        amp.step(of_G)
        amp.update()
    return [*D.parameters(), *G.parameters()]


def wgan(loop: Loop) -> Sequence[Tensor]:
    """Two steps of the critic, whose weights are clamped, for one of the generator."""
    amp, (D, G, of_D, of_G) = loop.amp, adversaries(loop)
    for i, (x, t) in enumerate(loop.batches(4, bad=1, window=2)):
        of_D.zero_grad()
        amp.backward(loop.loss(D, x, t) - loop.loss(D, G(x.flip(1)).detach()))
        amp.step(of_D)
        amp.update()
        for p in D.parameters():
            p.data.clamp_(-1.0, 1.0)
        if i % 2:
            of_G.zero_grad()
            amp.backward(-loop.loss(D, G(x.flip(1))))
            amp.step(of_G)
            amp.update()
    return [*D.parameters(), *G.parameters()]


def wgan_gp(loop: Loop) -> Sequence[Tensor]:
    """A penalty on the norm of D's gradient at a point between; the second input is 0, so that norms are exact."""
    amp, (D, G, of_D, of_G) = loop.amp, adversaries(loop)
    with torch.no_grad():
        D[0].weight[:, 1].zero_()  # type: ignore[index, operator, union-attr]
    for x, t in loop.batches():
        x, t = x * torch.tensor([1.0, 0.0]).to(x), t
        of_D.zero_grad()
        mix = (x / 2 + x.flip(0) / 2).requires_grad_()
        with amp.autocast():
            out = D(mix)
        (gradient,) = amp.grad(out, mix)
        penalty = (gradient.norm(2, dim=1) - 1).square().mean()
        amp.backward(loop.loss(D, x, t) + penalty / 4)
        amp.step(of_D)
        of_G.zero_grad()
        amp.backward(-loop.loss(D, G(x)))
        amp.step(of_G)
        amp.update()
    return [*D.parameters(), *G.parameters()]


def r1_every_other_step(loop: Loop) -> Sequence[Tensor]:
    """A lazy penalty, in a backward pass of its own that adds to the gradients."""
    amp, (D, _, of_D, _) = loop.amp, adversaries(loop)
    for i, (x, t) in enumerate(loop.batches(3, bad=2)):
        of_D.zero_grad()
        amp.backward(loop.loss(D, x, t))
        if i % 2 == 0:
            x = x.clone().requires_grad_()
            with amp.autocast():
                out = D(x)
            amp.backward(amp.grad(out, x)[0].square().sum() / 16)
        amp.step(of_D)
        amp.update()
    return list(D.parameters())


BY_NORM = partial(typical, change=lambda net: clip_grad_norm_(net.parameters(), 0.25), order=(2, 0))
IDIOMS: dict[str, tuple[Callable[[Loop], Sequence[Tensor]], int]] = {
    "typical": (typical, 0),
    "clipped by torch": (BY_NORM, 16),
    "clipped by value": (partial(typical, change=lambda net: clip_grad_value_(net.parameters(), 0.25)), 0),
    "clipped by the step": (partial(typical, clip=Clip.norm(0.25), order=(2, 0)), 16),
    "gradients changed": (partial(typical, change=changed), 0),
    "accumulated": (accumulated, 0),
    "accumulated and unscaled": (partial(accumulated, unscaled=True), 0),
    "in windows": (in_windows, 0),
    "penalty on weights": (penalty_on_weights, 0),
    "several losses": (several_losses, 0),
    "losses of their own weights": (losses_of_their_own_weights, 0),
    "a custom function": (partial(custom, function=Decorated), 0),
    "a custom function in fp32": (partial(custom, function=InFp32), 0),
    "saved and resumed": (saved_and_resumed, 0),
    "averaged by torch": (partial(averaged, ours=False), 0),
    "averaged by Ema": (partial(averaged, ours=True), 0),
    "rates by torch": (partial(rates, ours=False), 0),
    "rates by Schedule": (partial(rates, ours=True), 0),
    "unfrozen": (unfrozen, 0),
    "swa": (stochastic_weight_averages, 8),
    "swa of the live network": (partial(stochastic_weight_averages, live=True), 8),
    "dcgan": (dcgan, 0),
    "dcgan, D frozen": (partial(dcgan, between="frozen"), 0),
    "dcgan, D cleared": (partial(dcgan, between="zero"), 0),
    "dcgan, two windows": (partial(dcgan, between="update, zero"), 0),
    "dcgan, D unscaled": (partial(dcgan, between="unscale"), 0),
    "dcgan, D unscaled and cleared": (partial(dcgan, between="unscale, zero"), 0),
    "wgan": (wgan, 0),
    "wgan-gp": (wgan_gp, 0),
    "r1": (r1_every_other_step, 0),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", [*MODES, "torch"])
@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom_is_plain_torch_in_float64(name: str, mode: str, fused: bool) -> None:
    idiom, num_roundings = IDIOMS[name]
    loop = Loop(mode, fused)
    with contextlib.suppress(Exception) if False else contextlib.nullcontext():
        found, expected = idiom(loop), idiom(Loop("float64"))
    assert any(bool(e.any()) for e in expected)
    for a, b in zip(found, expected, strict=True):
        bound = num_roundings * 2**-24 * max(1.0, float(b.abs().max()))
        assert float((a.double() - b.double()).abs().max()) <= bound, (a, b)
