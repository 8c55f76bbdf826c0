"""Networks with 16-bit weights: what their forward pass casts, their copies and averages, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from test_weights import BF16, FP16, FP32, SIXTEEN, Run, network
from torch import Tensor, nn
from torch.nn.utils import parametrizations as P
from torch.optim import Adam

from amp_core import Amp, keep_fp32
from amp_core.config.errors import ConfigError
from amp_core.lowp.masters import fp32_copy, master_params
from amp_core.lowp.weights import LowPrecisionWeights

# --- the forward pass


class Pair(NamedTuple):
    logits: Tensor
    labels: Tensor


@dataclasses.dataclass(frozen=True)
class Output:
    hidden: Tensor
    more: dict[str, Any]


class Model(nn.Module):
    """Islands between 16-bit layers, and all kinds of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.island = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("table", torch.arange(300, 308).float())
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, extra: dict[str, Tensor]) -> Any:
        h = self.island(self.first(x))
        self.seen = [h.dtype, self.island[1].weight.dtype, self.table.dtype, extra["bias"].dtype]
        h = h @ self.matrix + extra["bias"]  # a product with a weight of its own
        h, state = self.lstm(h)
        return Output(h, {"pairs": [Pair(h, torch.zeros(2, dtype=torch.int64))], "state": state, "none": None})


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_inputs_are_cast_down_and_outputs_are_fp32(dtype: torch.dtype) -> None:
    net = keep_fp32(Model(), ["island"])
    reference = net(x := torch.randn(2, 3, 8), extra={"bias": torch.ones(8)})
    LowPrecisionWeights(net, dtype, "master")
    output = net(x, extra={"bias": torch.ones(8)})
    assert net.seen == [dtype, FP32, FP32, dtype]
    pair = output.more["pairs"][0]
    assert isinstance(output, Output) and isinstance(pair, Pair) and pair.labels.dtype is torch.int64
    assert {t.dtype for t in (output.hidden, pair.logits, *output.more["state"])} == {FP32}
    assert (output.hidden - reference.hidden).norm() < 0.02 * reference.hidden.norm()
    output.hidden.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is FP32 for p in master_params(net))


def test_only_modules_with_16bit_weights_cast_and_load_them_once() -> None:
    """The outermost one has a weight of its own, and its first part none: it gets its input in fp32."""

    class Own(nn.Parameter):
        """A user's class of weights stays."""

    class Outer(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
            self.gain = Own(torch.ones(4) / 3)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.ones(2, 4) / 3) * self.gain

    net, seen = Outer(), list[torch.dtype]()
    net[0][0].register_forward_hook(lambda _, args, output: seen.append(args[0].dtype))
    LowPrecisionWeights(net, BF16, "master")
    state = {name: value + 0.1 for name, value in net.state_dict().items()}
    net.load_state_dict(state)
    assert all(value.equal(state[name]) for name, value in net.state_dict().items() if value.is_floating_point())
    assert net(torch.ones(2, 4)).dtype is FP32 and seen == [FP32] and type(net.gain) is Own


@pytest.mark.parametrize("last", [[], [nn.ReLU(inplace=True)], [nn.ReLU(inplace=True), nn.Linear(16, 16)]])
def test_an_island_at_the_end_returns_all_its_digits(last: list[nn.Module]) -> None:
    head = keep_fp32(nn.Linear(16, 16))
    net = nn.Sequential(nn.Linear(16, 16), head, *last)
    LowPrecisionWeights(net, BF16, "master")
    x = torch.randn(4, 16)
    with torch.no_grad():
        logits, output = head(net[0](x)), net(x)
        whole = head(net[0](x)).whole[0]
    assert logits.dtype is BF16 and output.dtype is FP32
    assert output.equal(output.to(BF16).float()) == bool(last)
    expected = nn.Sequential(*last)(logits.clone()).float() if last else whole
    assert output.equal(expected)
    with torch.inference_mode():
        assert net(x).dtype is FP32


def test_an_island_within_an_island_rounds_nothing() -> None:
    torch.manual_seed(0)
    outer = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    alone = copy.deepcopy(outer)
    net = nn.Sequential(nn.Linear(16, 16), keep_fp32(keep_fp32(outer), ["0"]))
    LowPrecisionWeights(net, BF16, "master")
    x = torch.randn(4, 16)
    with torch.no_grad():
        inner = net[0](x)
        assert outer(inner).whole[0].equal(alone(inner.float()))


def test_batch_normalisation_stays_fp32_and_its_variance_finite() -> None:
    net = network()
    LowPrecisionWeights(net, FP16, "nearest")
    x = torch.randn(8, 1, 6, 6) * 2000
    net(x)
    assert net[0].weight.dtype is FP16
    assert {t.dtype for t in (net[1].weight, net[1].bias, net[1].running_mean, net[1].running_var)} == {FP32}
    assert net[1].running_var.isfinite().all() and net.eval()(x).isfinite().all()

    wrong = network().half()
    wrong(x.half())
    assert wrong[1].running_var.isinf().any()


# --- copies


@pytest.mark.parametrize("mode", SIXTEEN)
def test_averages_follow_the_fp32_values_in_fp32(mode: str) -> None:
    run = Run(mode, net=nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), decay=0.9)
    expected = {name: value.double() for name, value in run.net.state_dict().items()}
    for i in range(5):
        run.train(range(i, i + 1))
        for name, value in run.net.state_dict().items():
            expected[name] += 0.1 * (value.double() - expected[name])
    for name, value in run.ema.state_dict().items():
        assert value.dtype is FP32 and (value - expected[name]).abs().max() < 1e-7
    x = torch.randn(4, 1, 6, 6)
    assert run.ema.model(x).equal(F.linear(x.flatten(1), *run.ema.model.parameters()))
    assert not run.ema.model[1]._forward_pre_hooks and len(run.net[1]._forward_pre_hooks) == 1


def test_an_fp32_copy_keeps_the_hooks_of_others_and_no_tie_breaks() -> None:
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    net["b"].weight = net["a"].weight
    calls = []
    net["a"].register_forward_hook(lambda *_: calls.append(1))
    LowPrecisionWeights(net, BF16, "remainder")
    assert len(master_params(net)) == 3
    twin = fp32_copy(net)
    assert twin["a"].weight is twin["b"].weight and twin["a"].weight.dtype is FP32
    twin["a"](torch.randn(1, 4))
    assert len(calls) == 1
    state = net.state_dict()
    net.load_state_dict({name: value + 0.25 for name, value in state.items()})
    assert net["a"].weight is net["b"].weight and net.state_dict()["b.weight"].equal(state["a.weight"] + 0.25)


def test_plain_copies_and_pickles_compute_in_16_bits_and_do_not_speak_for_the_original() -> None:
    run = Run("bf16_remainder")
    run.train(range(2))
    run.net.eval()
    x = torch.randn(2, 1, 6, 6)
    file = io.BytesIO()
    torch.save(run.net, file)
    file.seek(0)
    for twin in (copy.deepcopy(run.net), torch.load(file, weights_only=False)):
        assert twin(x).equal(run.net(x)) and twin(x).dtype is FP32
        assert twin.state_dict()["4.weight"].dtype is BF16
        with torch.no_grad():
            twin[4].weight.zero_()
    assert run.net[4].weight.any()


# --- frozen weights, parts, refusals


def test_two_optimizers_own_two_parts() -> None:
    net = network()
    weights = LowPrecisionWeights(net, BF16, "stochastic")
    body, head = master_params(net[0]), master_params(net[4])
    optimizer = Adam(head, lr=0.1, fused=True)
    before = [p.clone() for p in net.parameters()]
    net(torch.randn(2, 1, 6, 6)).square().sum().backward()
    weights.begin_step(head)
    optimizer.step()
    weights.end_step(head, torch.tensor(True))
    changed = [not a.equal(b) for a, b in zip(before, net.parameters(), strict=True)]
    assert changed == [False] * 4 + [True] * 2 and all(p.isnan().all() for p in body)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "16-bit already": (lambda: network().half(), FP16, "master"),
    "BatchNorm1d has no weights that could be": (lambda: nn.BatchNorm1d(3), BF16, "master"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_makes_no_sense_is_refused(message: str) -> None:
    make, dtype, update = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        LowPrecisionWeights(make(), dtype, update)


@pytest.mark.parametrize("add", [P.spectral_norm, P.orthogonal, P.weight_norm, nn.utils.spectral_norm])
def test_reparametrised_weights_train_as_islands(add: Callable[[nn.Module], nn.Module]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), add(nn.Linear(4, 4)))
    if add is not P.weight_norm:
        kind = "orthogonal" if add is P.orthogonal else "spectral_norm"
        with pytest.raises(ConfigError, match=rf'amp=o2: {kind} of 1 .*amp.keep_fp32=\["1"\]'):
            Amp.named("o2").prepare(net)
    run = Run("bf16_remainder", net=net if add is P.weight_norm else keep_fp32(net, "1"))
    before = net[1].weight.clone()
    assert run.step(net(torch.randn(2, 4)).square().sum()).taken
    assert net(torch.randn(2, 4)).isfinite().all() and not net[1].weight.equal(before)
