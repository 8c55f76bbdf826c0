"""What a caller may get wrong with the step ends in an error that says what to do, or does what was meant."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from torch import Tensor, nn

from amp_core import Amp, Clip, Ema
from amp_core.lowp.masters import master_params
from amp_core.step.scaler import LossScale


def net_and_optimizer(kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    net = nn.Linear(6, 4)
    return net, kind(net.parameters(), lr=0.1, **options)


def window(amp: Amp, net: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    with amp.autocast():
        loss = net(torch.ones(3, 6)).float().square().mean()
    amp.backward(loss)


# --- optimizers ---------------------------------------------------------------------------------------------------------


def test_no_optimizer_and_one_twice_are_refused():
    amp, (net, optimizer) = Amp.named("fp16", init_scale=8.0), net_and_optimizer(fused=True)
    window(amp, net)
    with pytest.raises(ValueError, match="got 0 optimizers, expected at least one"):
        amp.step([])
    with pytest.raises(ValueError, match=r"got 2 optimizers, .* none of them twice"):
        amp.step([optimizer, optimizer])
    assert bool(amp.step(optimizer).taken)


@pytest.mark.parametrize("together", [False, True])
def test_a_weight_of_two_optimizers_is_refused(together):
    """Each would divide its gradient by the scale."""
    amp, (net, first) = Amp.named("fp16", init_scale=8.0), net_and_optimizer(torch.optim.SGD, fused=True)
    second = torch.optim.SGD([net.bias], lr=0.1, fused=True)
    window(amp, net)
    if not together:
        amp.step(first)
    with pytest.raises(ValueError, match=r"1 weight\(s\), the first of shape \[4\], are owned by two optimizers"):
        amp.step([first, second] if together else second)


def test_an_optimizer_is_looked_at_again_when_it_gets_another_group():
    """16-bit weights get no gradients, so they would silently not be trained."""
    amp, (net, _) = Amp.named("o2", init_scale=8.0), net_and_optimizer()
    amp.prepare(net)
    optimizer = torch.optim.SGD(master_params(net), lr=0.1, fused=True)
    for _ in range(2):
        window(amp, net)
        assert bool(amp.step(optimizer).taken)
        amp.update()
        amp.zero_grad(optimizer)
    optimizer.add_param_group({"params": [net.weight]})
    window(amp, net)
    with pytest.raises(TypeError, match="16-bit weights, which get no gradients"):
        amp.step(optimizer)


def test_in_windows_of_their_own_optimizers_may_share_weights():
    amp, (net, first) = Amp.named("fp16", init_scale=8.0), net_and_optimizer(torch.optim.SGD, fused=True)
    for optimizer in (first, torch.optim.SGD([net.bias], lr=0.1, fused=True)):
        window(amp, net)
        assert bool(amp.step(optimizer).taken)
        amp.update()
        first.zero_grad()


# --- gradients ----------------------------------------------------------------------------------------------------------


def expected_step(mode: str, gradient: Tensor, before: Tensor, **options) -> Tensor:
    """AdamW in float64, on the gradient as it reads."""
    weight = nn.Parameter(before.double())
    weight.grad = gradient.double().contiguous()
    torch.optim.AdamW([weight], lr=0.1, **options).step()
    return weight.detach()


STRANGE = {
    "expanded": lambda: torch.tensor([[0.5], [-2.0], [1.0], [4.0]]).expand(4, 6),
    "of one number": lambda: torch.tensor(0.25).expand(4, 6),
    "transposed": lambda: torch.arange(24.0).view(6, 4).t() - 7,
    "every other column": lambda: (torch.arange(48.0).view(4, 12) - 20)[:, ::2],
}


@pytest.mark.parametrize("unscaled_first", [False, True])
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_a_gradient_that_lies_otherwise_in_memory_steps_as_it_reads(mode, kind, unscaled_first):
    """Fused kernels go through weight and gradient in the order of memory, and write into both."""
    weight = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))
    before, amp = weight.detach().clone(), Amp.named(mode, **({"init_scale": 8.0} if mode == "fp16" else {}))
    other = nn.Parameter(torch.zeros(3))  # its gradient lies as it does
    other.grad = torch.zeros(3)
    optimizer = torch.optim.AdamW([weight, other], lr=0.1, eps=1e-2, fused=True)
    weight.grad = STRANGE[kind]() if mode != "fp16" else (STRANGE[kind]().double() * 8).float()
    if kind == "expanded" and mode == "fp16":
        weight.grad = (torch.tensor([[0.5], [-2.0], [1.0], [4.0]]) * 8).expand(4, 6)
    if unscaled_first:
        amp.unscale_(optimizer)
    assert bool(amp.step(optimizer, Clip.norm(1e6)).taken)
    # A step is at most lr; Adam's quotient has a handful of fp32 roundings, and clipping multiplies by 1.
    assert torch.allclose(
        weight.detach().double(), expected_step(mode, STRANGE[kind](), before, eps=1e-2), rtol=0, atol=16 * 2**-24
    )


def test_a_loss_that_is_no_scalar_is_refused_and_one_number_is_not():
    amp, (net, _) = Amp.named("fp16", init_scale=8.0), net_and_optimizer()
    losses = net(torch.ones(3, 6)).square().mean(1)
    with pytest.raises(
        ValueError, match=r"the loss has the shape \[3\], expected a scalar; reduce it, as by loss.mean"
    ):
        amp.backward(losses)
    amp.backward(losses[:1])
    assert net.weight.grad is not None


# --- windows ------------------------------------------------------------------------------------------------------------


def test_a_window_given_up_after_unscale_leaves_the_next_one_alone():
    amp, (net, optimizer) = Amp.named("fp16", init_scale=8.0), net_and_optimizer(torch.optim.SGD, fused=True)
    window(amp, net)
    amp.unscale_(optimizer)
    optimizer.zero_grad()  # the caller did not like what it saw
    window(amp, net)
    gradients = [p.grad.clone() / 8 for p in net.parameters() if p.grad is not None]
    expected = [p.detach().clone() for p in net.parameters()]
    other = torch.optim.SGD(expected, lr=0.1, fused=True)
    for weight, gradient in zip(expected, gradients, strict=True):
        weight.grad = gradient
    other.step()
    assert bool(amp.step(optimizer).taken) and all(map(torch.equal, net.parameters(), expected))
    amp.update()


def test_an_overflow_that_was_seen_and_not_stepped_lowers_the_scale_as_in_torch():
    """Two optimizers; one is unscaled, found infinite and left out."""
    amp, scaler = Amp.named("fp16", init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    for ours in (True, False):
        nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
        good, bad = (torch.optim.SGD(net.parameters(), lr=0.1) for net in nets)
        for net, value in zip(nets, (1.0, torch.inf), strict=True):
            for p in net.parameters():
                p.grad = torch.full_like(p, value)
        if ours:
            amp.unscale_(bad)
            amp.step(good)
            amp.update()
        else:
            scaler.scale(torch.ones(()))
            scaler.unscale_(bad)
            scaler.step(good)
            scaler.update()
    assert amp.scale == scaler.get_scale() == 4.0 and amp.num_skipped == 1


@pytest.mark.parametrize("state", [{"junk": 1}, {"scale": "8"}, {"scale": None}, {"scale": torch.nn.Linear}])
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_a_state_that_is_none_of_a_loss_scale_is_refused(mode, state):
    amp = Amp.named(mode)
    before = amp.scale
    with pytest.raises(ValueError, match=r"was given; expected that of Amp or of torch.amp.GradScaler"):
        amp.load_state_dict(state)
    assert amp.scale == before and isinstance(amp.scaler, LossScale)


# --- casts and statistics -----------------------------------------------------------------------------------------------


class Bypassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_a_guard_that_nobody_passes_is_logged_once(caplog):
    net, amp = Bypassed(), Amp.named("bf16")
    amp.guard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    caplog.set_level(logging.WARNING, "amp_recipes")

    def step(call) -> None:
        with amp.autocast():
            loss = call(torch.randn(5, 6)).float().square().mean()
        amp.backward(loss)
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)

    step(net)
    assert not caplog.messages
    for _ in range(2):
        step(net.body)
    (message,) = caplog.messages
    assert "without a call of the guarded Bypassed" in message and "amp.guard with the module" in message
    assert Ema(net, 0.9).model is not net


@pytest.mark.parametrize("mode", ["o2", "o3", "bf16_pure"])
def test_a_mode_of_16_bit_weights_is_refused_without_them(mode: str) -> None:
    """Autocast does nothing in these modes: it would be fp32 under another name."""
    net = nn.Linear(2, 1)
    amp, optimizer = Amp.named(mode), torch.optim.SGD(net.parameters(), lr=0.1)
    amp.backward(net(torch.ones(3, 2)).sum())
    with pytest.raises(RuntimeError, match=r"no network has b?float16 weights.*amp.prepare"):
        amp.step(optimizer)


# --- optimizers around a fused one --------------------------------------------------------------------------------------


class Around(torch.optim.Optimizer):
    """Shares the groups of another optimizer, shows all that it has, and counts its own steps, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.num_steps = inner, 0

    def __getattr__(self, name: str):
        return getattr(self.__dict__["inner"], name)

    def step(self, closure=None):
        self.inner.step()
        self.num_steps += 1


class Supporting(torch.optim.Optimizer):
    """Skips by itself, and has no setting `fused`."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        for p in (p for group in self.param_groups for p in group["params"]):
            moved = p - p.grad * (self.defaults["lr"] / (1.0 if scale is None else scale))
            p.copy_(moved if found_inf is None else torch.where(found_inf > 0, p, moved))


def replaced(params):
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    own, optimizer.num_steps = optimizer.step, 0  # type: ignore[attr-defined]

    def step():
        own()
        optimizer.num_steps += 1  # type: ignore[attr-defined]

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


STEPS = {
    "a wrapper": lambda params: Around(torch.optim.AdamW(params, lr=0.1, fused=True)),
    "a replaced step": replaced,
    "a wrapper of one that skips by itself": lambda params: Around(Supporting(params, lr=0.1)),
}


@pytest.mark.parametrize("mode", ["fp32", "fp16", "o2", "bf16_pure"])
@pytest.mark.parametrize("case", STEPS)
def test_what_is_done_around_a_fused_step_is_done_in_taken_steps_alone(case, mode):
    """Neither `fused` of the groups nor the attribute that torch's scaler asks for tells who looks at `found_inf`."""
    kind = Supporting if "by itself" in case else functools.partial(torch.optim.AdamW, fused=True)
    runs = []
    for make in (STEPS[case], lambda params: kind(params, lr=0.1)):
        net, _ = net_and_optimizer()
        amp = Amp.named(mode, **({"init_scale": 8.0} if mode in ("fp16", "o2") else {}))
        amp.prepare(net)
        optimizer, found = make(master_params(net)), []
        for bad in (False, True, False):
            with amp.autocast():
                loss = net(torch.ones(3, 6)).float().square().mean()
            amp.backward(loss * (torch.inf if bad else 1.0))
            assert bool(amp.step(optimizer).taken) != bad
            amp.update()
            optimizer.zero_grad()
            found += [p.detach().clone() for p in net.parameters()]
        runs.append((found, getattr(optimizer, "num_steps", 2)))
    assert all(map(torch.equal, runs[0][0], runs[1][0])) and runs[0][1] == 2


def test_weights_that_an_optimizer_copied_before_they_had_values_are_refused():
    amp, (net, _) = Amp.named("bf16_pure"), net_and_optimizer()
    amp.prepare(net)
    optimizer = torch.optim.SGD(master_params(net), lr=0.1)
    for p in master_params(net):
        optimizer.state[p]["x0"] = p.detach().clone()
    window(amp, net)
    with pytest.raises(TypeError, match=r"amp=bf16_pure: SGD copied the weights \(x0\) .* use amp=o2"):
        amp.step(optimizer)


class Duck:
    """What a library may hand out in place of an optimizer."""

    def __init__(self, inner):
        self.param_groups, self.step, self.zero_grad = inner.param_groups, inner.step, inner.zero_grad


@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_what_only_looks_like_an_optimizer_is_refused(call):
    amp, (net, optimizer) = Amp.named("fp16", init_scale=8.0), net_and_optimizer()
    window(amp, net)
    with pytest.raises(TypeError, match=r"got a Duck, expected a torch.optim.Optimizer; pass the optimizer inside it"):
        getattr(amp, call)(Duck(optimizer))


def test_an_optimizer_with_a_closure_or_in_a_wrapper_is_refused_and_so_are_other_arguments():
    class Needy(torch.optim.SGD):
        def step(self, loss, closure=None):
            pass

    amp, (net, lbfgs) = Amp.named("bf16"), net_and_optimizer(torch.optim.LBFGS)
    window(amp, net)
    for optimizer in (lbfgs, Around(lbfgs)):
        with pytest.raises(TypeError, match=r"LBFGS.step\(\) needs a closure .* use an optimizer without a closure"):
            amp.step(optimizer)
    with pytest.raises(TypeError, match=r"Needy.step\(\) needs loss, which amp.step does not have"):
        amp.step(Needy(net.parameters()))
