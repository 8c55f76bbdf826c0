"""Where the doctor says that a fault is: checkpoints, hooks, torch.func, labels. And steps that it cannot examine."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from loops import amps_step, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_core import Amp, Doctor

HERE = Path(__file__)
INF, NAN = float("inf"), float("nan")


def examined(net, loss, batch=(), mode="fp32", **fields):
    amp = Amp.named(mode, **fields)
    return Doctor(amp, net).locate(amps_step(amp, torch.optim.SGD(net.parameters(), 0.1), loss), batch)


def line_of(diagnosis):
    """What this file says where the diagnosis points."""
    file, number = diagnosis.source.rsplit(":", 1)
    assert file.endswith(HERE.name)
    return HERE.read_text().splitlines()[int(number) - 1].strip()


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 1e38 * 1e38  # too steep


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass by torch's checkpoint."""

    def __init__(self, behind, *, in_block):
        super().__init__()
        self.first, self.behind, self.in_block = nn.Linear(8, 8), behind, in_block
        self.block = nn.Sequential(nn.Linear(8, 8), Behind(behind) if in_block else nn.Identity())

    def forward(self, x):
        body = self.block if self.in_block else lambda y: self.behind(self.block(y))
        return checkpoint(body, self.first(x), use_reentrant=True)


class Behind(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def root_of_zero(x):
    return (x * 0).square().sum(1, keepdim=True).sqrt()  # its gradient is 0 / 0


@pytest.mark.parametrize("in_block, module", [(True, "block.1"), (False, "")])
@pytest.mark.parametrize(
    "behind, says", [(root_of_zero, "# its gradient is 0 / 0"), (Steep.apply, "# too steep")], ids=["sqrt", "own"]
)
def test_a_fault_in_the_backward_pass_of_a_reentrant_checkpoint_has_its_module(in_block, module, behind, says):
    net = Checkpointed(behind, in_block=in_block)
    x = torch.randn(4, 8)
    diagnosis = examined(net, lambda: net(x).mean())
    assert diagnosis is not None and (diagnosis.module, diagnosis.phase) == (module, "backward")
    assert line_of(diagnosis).endswith(says)


class ByShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad / (grad * 0).sum()  # in its own


@pytest.mark.parametrize("by_hook", [False, True])
def test_the_backward_pass_of_no_other_operation_is_named(by_hook):
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    if by_hook:
        net[1].register_full_backward_hook(lambda module, grads, of_output: (ByShare.backward(None, grads[0]),))
    diagnosis = examined(net, lambda: net(x).mean() if by_hook else ByShare.apply(net(x)).mean())
    assert diagnosis is not None and line_of(diagnosis).endswith("# in its own")
    assert diagnosis.why == "div was given a zero."


def times_a_lot(grad):
    return grad * 1e38 * 1e38  # in the hook


def on_weight(net):
    net[0].weight.register_hook(times_a_lot)


def on_activation(net):
    net[0].register_forward_hook(lambda module, inputs, output: output.register_hook(times_a_lot) and None)


def on_module(net):
    net[1].register_full_backward_hook(lambda module, grads, of_output: (times_a_lot(grads[0]),))


def on_accumulated(net):
    net[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", times_a_lot(p.grad)))


@pytest.mark.parametrize("register", [on_weight, on_activation, on_module, on_accumulated])
def test_a_fault_in_a_gradient_hook_has_the_line_of_the_hook(register):
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    assert examined(net, lambda: net(x).mean()) is None
    register(net)
    diagnosis = examined(net, lambda: net(x).mean())
    assert diagnosis is not None and (diagnosis.phase, line_of(diagnosis)) == (
        "backward",
        "return grad * 1e38 * 1e38  # in the hook",
    )


def test_a_fault_in_a_forward_hook_has_the_module_of_the_hook():
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())), torch.randn(4, 8)
    net[1][0].register_forward_hook(lambda module, inputs, output: output * 1e7)
    diagnosis = examined(net, lambda: net(x).float().mean() / 1e7, mode="fp16", init_scale=4.0)
    assert diagnosis is not None and diagnosis.module == "1.0" and "output * 1e7" in line_of(diagnosis)
    # Hooks of the program are called as before, and none of the doctor's is left.
    assert len(net[1][0]._forward_hooks) == 1 and not net[0]._forward_hooks


def to_great_power(y):
    y = y * 1e30  # inside
    return (y * 1e30).mean()


def by_grad(net, x):
    grads = torch.func.grad(lambda p: to_great_power(torch.func.functional_call(net, p, (x,))))(
        dict(net.named_parameters())
    )
    return sum(grad.sum() for grad in grads.values())


def by_vmap(net, x):
    return torch.func.vmap(to_great_power)(net(x)).mean()


def by_jvp(net, x):
    return torch.func.jvp(lambda v: to_great_power(net(v)), (x,), (torch.ones_like(x),))[1].sum()


def by_jacfwd(net, x):
    return torch.func.jacfwd(lambda v: to_great_power(net(v)))(x).sum()


# torch.func.jvp compiles a helper with torch.jit.script.
BY_TORCH = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@BY_TORCH
@pytest.mark.parametrize("transformed", [by_grad, by_vmap, by_jvp, by_jacfwd])
def test_a_fault_in_torch_func_has_its_line(transformed):
    """Forward-mode differentiation has tensors without memory: to look at one ends the process."""
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    diagnosis = examined(net, lambda: transformed(net, x) + net(x).mean())
    assert diagnosis is not None and "1e30" in line_of(diagnosis)
    if transformed is by_grad:  # the derivative of the outer product overflows in that of the inner one
        assert line_of(diagnosis) == "y = y * 1e30  # inside"


def test_gradients_that_no_step_takes_are_examined_too():
    net, amp = nn.Linear(8, 8), Amp.named("fp32")
    x = torch.randn(4, 8)
    diagnosis = Doctor(amp, net).locate(lambda: amp.backward(Steep.apply(net(x)).mean()))
    assert diagnosis is not None and diagnosis.phase == "backward"
    assert Doctor(amp, net).locate(lambda: amp.backward(net(x).mean())) is None


class OfCurvature(torch.optim.Optimizer):
    """Computes with gradients before its step, as AdaHessian does."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        params = [p for group in self.param_groups for p in group["params"]]
        seconds = torch.autograd.grad([p.grad for p in params], params, [torch.ones_like(p) for p in params])
        with torch.no_grad():
            for p, second in zip(params, seconds, strict=True):
                p -= 0.1 * p.grad / (second.abs() + 1)


# torch warns once in a process, in whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")


def by_backward(net, optimizer, x):
    optimizer.zero_grad()
    net(x).square().mean().backward(create_graph=True)
    optimizer.step()


def by_closure(net, optimizer, x):
    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def by_amp(net, optimizer, x):
    amp = Amp.named("fp32")
    amp.backward(net(x).square().mean())
    amp.step(optimizer)


def without_gradients(net, optimizer, x):
    with torch.no_grad():
        net(x).sum()
    optimizer.step()


def frozen(net, optimizer, x):
    net(x).detach().sum().backward()


def raising(net, optimizer, x):
    by_backward(net, optimizer, x)
    raise LookupError("no such batch")


def dense():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))


def sparse():
    return nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1))


def meta():
    net = dense()
    net[1].to("meta")
    return net


SGD, LBFGS = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.optim.LBFGS


def everything(net, optimizer):
    """What a step may change, but for numbers on the meta device, which has none."""
    tensors = [*net.state_dict().values(), *(p.grad for p in net.parameters())]
    kept = [t.to_dense() if t.is_sparse else t for t in tensors if t is not None and not t.is_meta]
    return copy.deepcopy(([t.detach() for t in kept], optimizer.state_dict(), torch.get_rng_state()))


# torch says that create_graph=True makes a cycle of references.
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize(
    "make, optim, step, error, says",
    [
        (dense, LBFGS, by_closure, TypeError, "LBFGS.step() needs a closure"),
        (dense, SGD, by_closure, TypeError, "SGD.step() was given a closure; expected a step without one"),
        (dense, LBFGS, by_amp, TypeError, "LBFGS.step() needs a closure"),
        (dense, OfCurvature, by_backward, TypeError, "expected a step that ends before OfCurvature.step()"),
        (dense, SGD, without_gradients, RuntimeError, "reported no loss and no gradients; expected it to call"),
        (dense, SGD, frozen, RuntimeError, "does not require grad"),
        (dense, SGD, raising, LookupError, "no such batch"),
        (meta, SGD, by_backward, RuntimeError, "on device meta"),
    ],
)
def test_a_step_that_cannot_be_examined_is_one_error_and_leaves_the_state(make, optim, step, error, says):
    net = make()
    x = torch.randn(6, 8)
    optimizer = optim(net.parameters())
    for p in net.parameters():
        p.grad = torch.full_like(p, INF)  # of an earlier window
    backward, before = torch.Tensor.backward, everything(net, optimizer)
    with pytest.raises(error) as raised:
        Doctor(Amp.named("fp32"), net).locate(lambda: step(net, optimizer, x), x)
    assert says in str(raised.value)
    assert same(everything(net, optimizer), before)
    assert torch.Tensor.backward is backward and not net[0]._forward_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("step", [by_backward, by_amp])
@pytest.mark.parametrize("factor, cause", [(1.0, None), (INF, "poisoned weight")])
def test_sparse_gradients_are_no_obstacle(factor, cause, step):
    net, x = sparse(), torch.tensor([1, 2, 5])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with torch.no_grad():
        net[0].weight[2] *= factor
    before = everything(net, optimizer)
    diagnosis = Doctor(Amp.named("fp32"), net).locate(lambda: step(net, optimizer, x), x)
    assert (diagnosis and diagnosis.cause) == cause
    assert same(everything(net, optimizer), before)


@pytest.mark.parametrize("factor, cause", [(1.0, None), (1e38, "overflow in fp32")])
def test_a_graph_of_the_gradients_is_no_obstacle(factor, cause):
    net, x = nn.Linear(8, 1), torch.randn(6, 8)
    optimizer = SGD(net.parameters())
    before = everything(net, optimizer)
    diagnosis = Doctor(Amp.named("fp32"), net).locate(lambda: by_backward(net, optimizer, x * factor), x)
    assert (diagnosis and diagnosis.cause) == cause
    assert same(everything(net, optimizer), before)


@pytest.mark.parametrize("zeroes", [True, False])
def test_gradients_left_by_an_earlier_window_are_to_blame_if_it_adds_to_them(zeroes):
    net, x = nn.Linear(8, 1), torch.randn(6, 8)
    optimizer = SGD(net.parameters())
    net.weight.grad = torch.full_like(net.weight, NAN)
    before = everything(net, optimizer)

    def step():
        if zeroes:
            optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, x)
    after = everything(net, optimizer)
    assert same(*([part.nan_to_num(7.0) for part in each[0]] for each in (before, after)))
    if zeroes:
        assert diagnosis is None
    else:
        assert diagnosis is not None and diagnosis.cause == "poisoned gradient" and "zero_grad()" in str(diagnosis)
        net.weight.grad = torch.zeros_like(net.weight)
        assert Doctor(Amp.named("fp32"), net).locate(step, x) is None


@pytest.mark.parametrize("number", [torch.tensor(INF), torch.tensor(NAN), -torch.tensor(INF)])
@pytest.mark.parametrize("where", ["before", "within"])
def test_a_number_that_the_program_writes_is_an_infinite_constant(number, where):
    net, x = nn.Linear(8, 1), torch.randn(6, 8)
    value = number.item()

    def loss():
        return (net(x) + (number if where == "before" else torch.tensor(value))).mean()  # written here

    diagnosis = examined(net, loss, (x,))
    assert diagnosis is not None and diagnosis.cause == "infinite constant"
    assert line_of(diagnosis).endswith("# written here")
    # One that goes nowhere is none.
    assert examined(net, lambda: torch.where(x[:, :1] < INF, net(x), number).mean(), (x,)) is None
