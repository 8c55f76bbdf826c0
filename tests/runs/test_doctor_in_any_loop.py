"""The doctor in loops of other people: their optimizers, scalers, guards; and everything is left as it was."""

from __future__ import annotations

import contextlib
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from loops import amps_step, classified, filled, images, network, same, sgd, state_of, torchs_step
from torch import nn

from amp_core import Amp, Doctor, master_params

INF, NAN = math.inf, math.nan
PRODUCT = "overflow in a product"


def diagnose(net, step, batch=(), mode="fp32"):
    return Doctor(Amp.named(mode), net).locate(step, batch)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, lambda p: torch.optim.Adam(p, fused=True)])
@pytest.mark.parametrize("scaled, zeroes", [(False, "first"), (True, "first"), (True, "last")])
def test_torchs_own_loop_is_diagnosed_and_left_as_it_was(make, scaled, zeroes):
    net, batch = network(1.5e5), images()
    optimizer, scaler = make(net.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
    net(batch[0]).sum().backward()  # gradients of an earlier window, which are not this one's
    before = state_of(net, optimizer)
    loss = classified(net, batch)
    step = torchs_step(optimizer, loss, scaler=scaler if scaled else None, zeroes=zeroes)
    diagnosis = diagnose(net, step, batch, "fp16")
    assert diagnosis is not None and (diagnosis.module, diagnosis.cause) == ("0", PRODUCT)
    assert same(state_of(net, optimizer), before) and scaler.get_scale() == 8.0
    assert 'torch.autocast("cpu", dtype=torch.bfloat16)' in [fix.python for fix in diagnosis.fixes]
    torchs_step(optimizer, loss)()  # without the doctor weights are stepped
    assert not same(state_of(net, optimizer)[0], before[0])


@pytest.mark.parametrize("changes", ["a buffer", "weights", "the batch", "an array", "a generator"])
def test_what_a_step_changes_by_itself_is_put_back(changes):
    net, (x, _), seen = network(1.5e5), images(), []
    net.mean, batch = nn.Buffer(torch.zeros(8)), [x.numpy() if changes == "an array" else x]
    generator = torch.Generator().manual_seed(5)
    buffer, before, state = net.mean, copy.deepcopy((net.state_dict(), x)), generator.get_state()

    def step():
        seen.append((x.clone(), torch.rand((), generator=generator)))
        if changes in ("the batch", "an array"):
            x.mul_(2)
        if changes == "a buffer":
            net.mean = 0.9 * net.mean + 0.1 * x.detach().mean(0)
        with torch.autocast("cpu", torch.float16):
            loss = net(x - net.mean).float().mean()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters() if changes == "weights" else ():
                p -= 0.1 * p.grad
                p.grad = None

    diagnosis = diagnose(net, step, batch, "fp16")
    assert diagnosis is not None and diagnosis.cause == PRODUCT
    assert net.mean is buffer and same((net.state_dict(), x), before) and torch.equal(generator.get_state(), state)
    assert len(seen) > 1 and all(same(each, (before[1], seen[0][1])) for each in seen)


def turns_back(loss):
    return bool(torch.isfinite(loss))


def raises(loss):
    if not math.isfinite(loss.item()):
        raise ArithmeticError("the loss is NaN")
    return True


def asserts(loss):
    assert not loss.isnan(), "NaN"
    return True


class Asserts(nn.Module):
    def forward(self, x):
        assert torch.isfinite(x).all(), "NaN"
        return x


@pytest.mark.parametrize("backward_first", [False, True])
@pytest.mark.parametrize("guard", [turns_back, raises, asserts, "in the network"])
def test_a_guard_against_a_loss_that_is_nan_does_not_prevent_a_diagnosis(guard, backward_first):
    net, batch = network(1.5e5), images()
    if guard == "in the network":
        net, guard = net.insert(3, Asserts()), turns_back
    optimizer = sgd(net)
    before = state_of(net, optimizer)

    def step():
        with torch.autocast("cpu", torch.float16):
            loss = classified(net, batch)()
        if backward_first:
            loss.backward()
        if guard(loss):
            if not backward_first:
                loss.backward()
            optimizer.step()

    diagnosis = diagnose(net, step, batch, "fp16")
    assert diagnosis is not None and (diagnosis.module, diagnosis.cause) == ("0", PRODUCT)
    assert diagnosis.islands == ["0"] and diagnosis.fixes[0].verified and same(state_of(net, optimizer), before)


@pytest.mark.parametrize("remembers", [True, False])
def test_a_window_is_examined_after_it_was_computed(remembers):
    """One of 64 dropout masks makes it infinite: the random state from before the window decides."""
    net, amp = nn.Linear(4, 1), Amp.named("fp32")
    doctor = Doctor(amp, net)

    def loss():
        kept = torch.rand(6) < 0.5
        return net(torch.ones(1, 4)).sum() * (INF if bool(kept.all()) else 1.0)

    step = amps_step(amp, sgd(net, 0.0), loss)
    for _ in range(1000):
        if remembers:
            doctor.remember()
        if not bool(step()[0].taken):
            break
    assert (doctor.locate(step) is not None) == remembers


def test_a_window_examined_after_its_step_may_have_spoilt_its_weights_itself():
    net, x = nn.Linear(4, 4), torch.randn(6, 4) * torch.tensor([0.0, 1.0, 1.0, 1.0])
    doctor = Doctor(Amp.named("fp32"), net)
    step = torchs_step(torch.optim.Adam(net.parameters(), eps=0.0), lambda: net(x).sum(), dtype=None, zeroes="last")
    doctor.remember()
    step()
    diagnosis = doctor.locate(step, x)
    assert diagnosis is not None and diagnosis.cause == "poisoned weight"
    assert "before the window" not in diagnosis.why and "before its step is taken" in diagnosis.why


def test_gradients_of_autograd_grad_are_seen_at_the_optimizer():
    net, (x, _) = network(1e30), images()
    optimizer = sgd(net)

    def step():
        grads = torch.autograd.grad(net(x * 1e30).square().sum(), [*net.parameters()])
        for p, grad in zip(net.parameters(), grads, strict=True):
            p.grad = grad
        optimizer.step()

    assert diagnose(net, step, (x,)) is not None


@pytest.mark.parametrize("between", [True, False])
def test_an_operation_after_a_backward_pass_is_of_no_forward_pass(between):
    """As in sharpness-aware minimisation, whose first gradient may be 0; or in code that clips by hand."""
    net, x = nn.Linear(4, 2, bias=False), torch.zeros(6, 4)
    optimizer = sgd(net)

    def step():
        optimizer.zero_grad()
        net(x).sum().backward()
        with torch.no_grad():
            grad = net.weight.grad
            (net.weight if between else grad).add_(grad / grad.norm())
        if between:
            net(x + 1).sum().backward()
        optimizer.step()

    diagnosis = diagnose(net, step, x)
    assert diagnosis is not None and "grad / grad.norm()" in diagnosis.code and diagnosis.phase == "step"
    assert "after the backward pass" in str(diagnosis) and "in outside" not in str(diagnosis)


@pytest.mark.parametrize("fails", [False, True])
def test_a_norm_beyond_fp32_within_torchs_own_clipping_is_named(fails):
    """Gradients divided by an infinite norm are 0: no weight moves, and there is no NaN."""
    net, batch = network(), images()
    optimizer = sgd(net)

    def step(factor=1e21):
        optimizer.zero_grad()
        (classified(net, batch)() * factor).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=fails)  # here
        optimizer.step()

    diagnosis = diagnose(net, step, batch)
    assert diagnosis is not None and diagnosis.cause == "gradient norm beyond fp32" and "# here" in diagnosis.code
    assert diagnose(net, lambda: step(1.0), batch) is None
    (advice,) = diagnosis.fixes
    least = float(advice.text.rpartition(" by ")[2].split()[0])  # which is enough, and much less is not
    assert diagnose(net, lambda: step(1e21 / least), batch) is None
    assert diagnose(net, lambda: step(4e21 / least), batch) is not None
    before = copy.deepcopy([*net.parameters()])
    with contextlib.suppress(RuntimeError):
        step()
    assert same([*net.parameters()], before)  # what the loop does by itself


@pytest.mark.parametrize(
    "scale, offset, says", [(30, 0, "gradients exceed"), (40, 0, ""), (127, 10, "the loss exceeds float32")]
)
def test_the_scale_of_a_gradscaler_is_named_and_a_smaller_one_fits(scale, offset, says):
    """GradScaler skips the optimizer's step then."""
    net, batch = network(), images()
    optimizer, scaler, amp = sgd(net), torch.amp.GradScaler("cpu", init_scale=2.0**scale), Amp.named("fp16")

    def loss():
        return classified(net, batch)() + offset

    diagnosis = Doctor(amp, net).locate(torchs_step(optimizer, loss, scaler=scaler), batch)
    assert diagnosis is not None and (diagnosis.cause, diagnosis.phase) == (
        "loss scale too large",
        "forward" if offset else "backward",
    )
    assert diagnosis.loss_scale == 2.0**scale and says in diagnosis.why
    assert diagnosis.fixes[0].text.startswith("begin with a smaller loss scale")  # a GradScaler has no cap
    fixed = eval(diagnosis.fixes[0].python, {"torch": torch})
    assert Doctor(amp, net).locate(torchs_step(optimizer, loss, scaler=fixed), batch) is None
    assert Doctor(amp, net).locate(torchs_step(optimizer, loss), batch) is None
    assert scaler.get_scale() == 2.0**scale and amp.scale == 65536.0


def test_a_loss_scale_is_tried_with_the_growth_of_the_users_scaler():
    """One that doubles after each step leaves the scale that fits this window in the next one."""
    net, batch = network(), images()
    optimizer = sgd(net, 0.0)

    def skips(scaler, steps=5):
        skipped = []
        for _ in range(steps):
            before = scaler.get_scale()
            torchs_step(optimizer, classified(net, batch), scaler=scaler)()
            skipped.append(scaler.get_scale() < before)
        return skipped

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1)
    state = scaler.state_dict()
    diagnosis = diagnose(net, torchs_step(optimizer, classified(net, batch), scaler=scaler), batch, "fp16")
    assert diagnosis is not None and diagnosis.cause == "loss scale too large" and scaler.state_dict() == state
    fix = diagnosis.fixes[0]
    assert fix.verified and fix.steps == 5 and "growth_interval=1" in fix.python
    fixed = eval(fix.python, {"torch": torch})
    larger = torch.amp.GradScaler("cpu", init_scale=fixed.get_scale() * 2, growth_interval=1)
    assert not any(skips(fixed)) and any(skips(larger))


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_scalers_the_one_that_is_too_large_is_tried(is_first):
    nets = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})
    batch, scales = images(), {"a": 128.0, "b": 2.0**40}
    optimizers = {name: sgd(net) for name, net in nets.items()}
    scalers = {name: torch.amp.GradScaler("cpu", init_scale=scale) for name, scale in scales.items()}

    def step():
        for name in ("b", "a") if is_first else ("a", "b"):
            torchs_step(optimizers[name], classified(nets[name], batch), scaler=scalers[name])()

    diagnosis = diagnose(nets, step, batch, "fp16")
    assert diagnosis is not None and diagnosis.cause == "loss scale too large"
    assert "loss scale of 1.09951e+12" in diagnosis.why and "the gradient of b.weight" in diagnosis.reached
    assert {name: scaler.get_scale() for name, scaler in scalers.items()} == scales
    fits = diagnosis.scale_that_fits
    assert fits is not None
    scalers["b"] = torch.amp.GradScaler("cpu", init_scale=fits)
    step()
    assert scalers["b"].get_scale() == fits  # nothing was skipped


@pytest.mark.parametrize("forgets", [True, False])
def test_a_step_with_scaled_gradients_is_named(forgets):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu")
    x, y = torch.randn(16, 8) * (1 if forgets else 1e6), torch.randint(0, 4, (16,))

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        if forgets:
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    if forgets:
        step()
    diagnosis = diagnose(net, step, (x, y), "fp16")
    assert diagnosis is not None
    assert ("that no scaler had unscaled: call scaler.step(optimizer)" in str(diagnosis)) == forgets


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_can_go_on_after_a_step_that_raises(unscales):
    net, x = nn.Linear(4, 1), torch.randn(6, 4)
    optimizer, scaler, is_broken = sgd(net), torch.amp.GradScaler("cpu"), [True]

    def step():
        optimizer.zero_grad()
        scaler.scale(net(x).sum()).backward()
        scaler.unscale_(optimizer) if unscales else scaler.step(optimizer)
        if is_broken:
            raise ZeroDivisionError("of the program")
        scaler.update()

    with pytest.raises(ZeroDivisionError):
        diagnose(net, step, x, "fp16")
    is_broken.clear()
    step()
    assert scaler.get_scale() == 65536.0


def test_no_loss_scale_is_named_of_a_loop_that_has_its_own():
    torch.manual_seed(0)
    net, x, scale = nn.Linear(8, 8), torch.randn(16, 8) * 100, [2.0**22]
    optimizer = sgd(net, 1e-3)

    def step():
        with torch.autocast("cpu", torch.float16):
            loss = net(x).float().square().mean()
        (loss * scale[0]).backward()
        for p in net.parameters():
            p.grad /= scale[0]
        optimizer.step()
        optimizer.zero_grad()

    diagnosis = diagnose(net, step, x, "fp16")
    assert diagnosis is not None and diagnosis.phase == "backward"
    assert "mode       amp=fp16\n" in str(diagnosis) and "loss scale" not in str(diagnosis)
    assert all("Amp.named" not in fix.python for fix in diagnosis.fixes)
    scale[0] = 1.0
    assert diagnose(net, step, x, "fp16") is None


@pytest.mark.parametrize("what", ["root", None])
def test_gradients_that_overflow_at_the_loss_scale_hide_nothing(what):
    """The first micro-batch overflows at 65536 and at no smaller scale; the second breaks at any."""
    net = nn.Sequential(nn.Linear(4, 4), filled(nn.Linear(4, 1), 1.0))
    amp, optimizer = Amp.named("fp16"), sgd(net, 1e-6)
    batches = [torch.ones(2, 4), torch.ones(2, 4)]

    def step():
        for i, x in enumerate(batches):
            with amp.autocast():
                y = net(x).float()
            # A root of 0 is finite, unlike its gradient.
            amp.backward((y[0] * 0).sqrt().sum() if i and what == "root" else y.sum() * 2)
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)

    diagnosis = Doctor(amp, net).locate(step, batches)
    assert diagnosis is not None
    if what is None:
        assert diagnosis.cause == "loss scale too large"
        return
    assert "at 65536 gradients overflow as well" in diagnosis.why and not any(fix.verified for fix in diagnosis.fixes)
    assert (diagnosis.cause, diagnosis.tensor) == ("division or logarithm of zero", "")


def test_what_gradients_exceed_is_the_dtype_of_the_line_that_casts_them():
    """Weights in fp16 take gradients that fp32 holds."""
    net, x = nn.Linear(8, 4), torch.randn(6, 8)
    amp = Amp.named("o2", init_scale=2.0**24)
    amp.prepare(net)

    def loss():
        return net(x).float().square().mean() * 1e3  # in the program

    diagnosis = Doctor(amp, net).locate(amps_step(amp, torch.optim.SGD(list(master_params(net)), 0.1), loss), x)
    assert diagnosis is not None and diagnosis.cause == "loss scale too large" and diagnosis.output is not None
    assert diagnosis.output.dtype == "float16" and "gradients exceed float16" in diagnosis.why
    assert diagnosis.code.endswith("# in the program")  # not the hook that casts
