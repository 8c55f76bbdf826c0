"""The doctor where numbers are not in a plain array, or not where a program shows them: nothing ends a diagnosis."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from amp_core import Amp, Doctor
from amp_core.lowp.islands import named_modules
from amp_tools.census import Census

NAN = float("nan")
# Of torch, about kinds of tensors that it has not settled.
UNSETTLED = ("The PyTorch API of nested", "ComplexHalf support", "torch.quantize_per_tensor", "Sparse (CSR|BSC) tensor")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{begins}:UserWarning") for begins in UNSETTLED]


def network(factor=1.0):
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    with torch.no_grad():
        net[1].weight.fill_(factor)
    return net


def located(net, loss, batch=()):
    """The diagnosis of a window; under the doctor it has the loss and the gradients that it has alone."""
    seen = []

    def step():
        for each in net.parameters():
            each.grad = None
        result = loss()
        result.backward()
        seen.append([result.detach().clone(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])

    step()
    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, batch)
    with_it, alone = seen[1], seen[0]
    for a, b in zip(alone, with_it, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    return diagnosis


def said(caplog):
    return [record for record in caplog.records if record.name == "amp_recipes"]


def per_sample(net, x):
    """Gradients per sample: torch.func casts the number 0.0, which is no tensor."""
    params = {name: p * 1.0 for name, p in net.named_parameters()}

    def loss(params, x):
        return (torch.func.functional_call(net, params, (x,)).sum() + 0.0).sinh()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    return sum(grad.sum() for grad in grads.values())


def conjugated(net, x):
    z = torch.complex(net(x), net(x) * 1e38)
    return (z @ z.conj().mT).abs().sum().log() - z.conj().log().real.sum() * 0


def complex_power(net, x):
    return torch.complex(net(x) * 0, net(x)).pow(-2.0 + 1j).abs().sum()


def compressed(net, x):
    """The gradient of a weight, of a matrix in CSR, is one, too."""
    return torch.sparse.mm(net.csr, net(x)).sum()


def branches(net, x):
    with torch.no_grad():
        (factor,) = torch.cond(x.sum() > 0, lambda a: (a * 0 + 2.0,), lambda a: (a * a,), (x,))
    return (net(x) * factor * 0.5).sum()


def overflows_in_a_branch(net, x):
    with torch.no_grad():
        (factor,) = torch.cond(x.sum() > 0, lambda a: ((a + 1e38) * 1e3,), lambda a: (a * a,), (x,))
    return (net(x) * factor).sum()


def to_csr(value):
    net = network()
    net.csr = nn.Parameter(torch.tensor([[0.0, value, 0.0], [1.0, 0.0, 2.0]]).to_sparse_csr())
    return net


@pytest.mark.parametrize(
    "program, net, finds",
    [
        (per_sample, lambda: network(), None),
        (per_sample, lambda: network(1e4), "aten.cosh"),
        (conjugated, lambda: network(), "aten.mm"),
        (complex_power, lambda: network(0.0), "aten.pow"),
        (compressed, lambda: to_csr(1.0), None),
        (compressed, lambda: to_csr(NAN), "poisoned weight"),
        (branches, lambda: network(), None),
        (overflows_in_a_branch, lambda: network(), "aten.mul"),
    ],
)
def test_a_program_of_any_kind_is_followed(program, net, finds, caplog):
    net, x = net(), torch.ones(3, 2)
    if program is complex_power:
        nn.init.zeros_(net[1].bias)
    diagnosis = located(net, lambda: program(net, x), x)
    found = None if diagnosis is None else diagnosis.op or diagnosis.cause
    assert found == finds and not said(caplog)


@pytest.mark.parametrize("program", [per_sample, branches])
def test_a_forecast_counts_a_program_of_any_kind(program):
    net = network()
    with torch.autocast("cpu", torch.bfloat16), Census(named_modules([("", net)])) as census:
        program(net, torch.ones(3, 2))
    assert {look.module for look in census.looks} >= {"0", "1"}


def test_the_output_of_a_network_within_vmap_tells_of_a_step_that_ends_early():
    net, x = network(1e38), torch.full((3, 2), 1e4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        y = torch.func.vmap(net)(x)
        if not math.isfinite(sum(y.flatten().tolist())):
            raise ArithmeticError("the output is not finite")
        y.mean().backward()
        optimizer.step()

    diagnosis = Doctor(Amp.named("fp32"), net).locate(step, x)
    assert diagnosis is not None and (diagnosis.cause, diagnosis.module) == ("overflow in fp32", "1")


def inference(values):
    with torch.inference_mode():
        return values.clone()


class Own(torch.Tensor):
    pass


KINDS = {
    "COO": lambda t: t.to_sparse(),
    "CSR": lambda t: t.to_sparse_csr(),
    "BSC": lambda t: t.to_sparse_bsc((1, 1)),
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t[0], t.flatten()]),
    "jagged": lambda t: torch.nested.nested_tensor([t[0], t.flatten()], layout=torch.jagged),
    "complex": lambda t: torch.complex(t, t),
    "conj": lambda t: torch.complex(t, t).conj(),
    "neg": lambda t: torch.complex(t, t).conj().imag,
    "complex32": lambda t: torch.complex(t, t).to(torch.complex32),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "expanded": lambda t: t[0, 1].expand(3, 3),
    "overlapping": lambda t: t.flatten().unfold(0, 2, 1),
    "0-d": lambda t: t[0, 1],
    "inference": inference,
    "subclass": lambda t: t.as_subclass(Own),
    "requires grad": lambda t: t.clone().requires_grad_(),
    "meta": lambda t: t.to("meta"),
    "empty": lambda t: t[:0],
    "bool": lambda t: t > 0,
    "integers": lambda t: t.nan_to_num().int(),
    "quantized": lambda t: torch.quantize_per_tensor(t.nan_to_num(), 0.1, 0, torch.quint8),
}
HOLD_NO_NAN = {"meta", "empty", "bool", "integers", "quantized"}


def summed(t):
    """A number of a tensor of any kind, as a program may use it."""
    if t.is_meta:
        return torch.ones(())
    if t.is_nested:
        t = torch.nested.to_padded_tensor(t, 0.0)
    elif t.layout is not torch.strided:
        t = t.to_dense()
    t = t.dequantize() if t.is_quantized else t
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).float().sum()


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_kind_is_looked_at_and_left_as_it_was(kind, is_used, caplog):
    t = KINDS[kind](torch.tensor([[1.0, NAN], [0.0, 3.0]]))
    net, x, before = network(), torch.ones(3, 2), str(t.detach())
    diagnosis = located(net, lambda: net(x).mean() * (summed(t) if is_used else 1.0), (x, t))
    assert str(t.detach()) == before and not said(caplog)
    if kind in HOLD_NO_NAN or not is_used:
        assert diagnosis is None
    else:
        assert diagnosis is not None and diagnosis.cause in ("bad input", "poisoned tensor", "infinite constant")
        assert diagnosis.cause == "bad input" or kind in ("jagged", "mkldnn")


class Sealed(torch.Tensor):
    """A tensor whose numbers nobody may read but the library that made it."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.sealing.open.default:
            return args[0].inner * 1.0
        raise PermissionError(f"{func} of what is sealed")


@pytest.fixture
def sealing():
    library = torch.library.Library("sealing", "DEF")
    library.define("seal(Tensor x) -> Tensor")
    library.define("open(Tensor x) -> Tensor")
    library.impl("seal", lambda x: Sealed(x.detach() * 1e38), "CPU")
    yield torch.ops.sealing
    library._destroy()


@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_what_cannot_be_followed_is_named_and_the_window_goes_on(sealing, factor, caplog):
    net, x = network(), torch.ones(3, 2)

    def loss():
        with torch.no_grad():
            opened = sealing.open(sealing.seal(torch.ones(3) * factor))
        return (net(x)[:, 0] * opened * 1e-38).mean()

    diagnosis = located(net, loss, x)
    told = said(caplog)
    assert "cannot follow sealing.seal.default" in told[0].getMessage() and told[0].exc_info
    assert (diagnosis is None) == (factor == 1.0)


def test_an_error_of_the_program_stays_its_own(sealing):
    net, x = network(), torch.ones(3, 2)

    def loss():
        return net(x).mean() * sealing.seal(x).sum()

    with pytest.raises(PermissionError, match="of what is sealed"):
        located(net, loss, x)
    with pytest.raises(PermissionError, match="of what is sealed"):
        Doctor(Amp.named("fp32"), net).locate(lambda: loss().backward(), x)
    assert len(tree_leaves([p.grad for p in net.parameters()])) == 4  # nothing was taken away
