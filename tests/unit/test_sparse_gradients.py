"""Sparse gradients step as with `torch.amp.GradScaler`; what takes none of them says so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_core import sync_grads
from amp_core.config.errors import ConfigError
from amp_core.layouts.ddp import wrap_ddp
from amp_core.layouts.fsdp import wrap_fsdp
from amp_core.layouts.zero import share_state
from amp_core.lowp.masters import master_params
from amp_core.step.amp import Amp
from amp_core.step.clip import Clip

ROWS, WIDTH, STEPS, OVERFLOW, SCALE = 40, 8, 20, 6, 2.0**12


@pytest.fixture(autouse=True)
def choose_checks() -> Iterator[None]:
    """torch warns when Adagrad makes a sparse tensor and nobody chose whether to check it."""
    with torch.sparse.check_sparse_tensor_invariants(True):
        yield


class Net(nn.Module):
    """An embedding whose gradient is sparse, unless `sparse` is false, below a linear layer."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(ROWS, WIDTH, sparse=sparse), nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).relu())


def net_of(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def micro_batches(step: int) -> list[tuple[Tensor, float]]:
    """Two of them, with rows that repeat within one and from one to the other, and their factors of the loss."""
    numbers = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, ROWS // 2, (16,), generator=numbers) for _ in range(2)]
    return [(each, 1e38 if step == OVERFLOW else 0.5) for each in ids]


def loss_of(net: nn.Module, ids: Tensor, factor: float) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        out = net(ids)
    return out.float().square().mean() * factor


OPTIMIZERS = {
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.05),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, foreach=False),
}


def optimizers_of(net: Net, name: str) -> list[torch.optim.Optimizer]:
    return [OPTIMIZERS[name]([net.embedding.weight]), torch.optim.SGD(net.head.parameters(), lr=0.5, fused=True)]


def clip_by_norm(values: list[Tensor], max_norm: float) -> None:
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in values]))
    for value in values:
        value.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


def train_with_grad_scaler(net: Net, name: str, max_norm: float | None) -> list[float]:
    """The loop of torch's documentation; the norm of a sparse gradient by hand, which `clip_grad_norm_` lacks."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=5)
    optimizers, scales = optimizers_of(net, name), []
    for step in range(STEPS):
        for ids, factor in micro_batches(step):
            scaler.scale(loss_of(net, ids, factor)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            if max_norm is not None or name == "SGD":  # the others sum repeated rows first in their step
                for param in optimizer.param_groups[0]["params"]:
                    param.grad = param.grad.coalesce() if param.grad.is_sparse else param.grad
                grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            if max_norm is not None:
                values = [grad.values() if grad.is_sparse else grad for grad in grads]
                clip_by_norm(values, max_norm)
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        net.zero_grad()
    return scales


def train_with_amp(net: Net, name: str, clip: Any, *, first_unscale: bool = False) -> list[float]:
    amp = Amp.named("fp16", init_scale=SCALE, growth_interval=5)
    optimizers, scales = optimizers_of(net, name), []
    for step in range(STEPS):
        for ids, factor in micro_batches(step):
            amp.backward(loss_of(net, ids, factor))
        for optimizer in optimizers:
            amp.unscale_(optimizer) if first_unscale else None
            amp.step(optimizer, clip)
        amp.update()
        scales.append(amp.scale)
        amp.zero_grad(*optimizers)
    assert int(amp.num_skipped) == 1
    return scales


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.parametrize("first_unscale", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_is_that_of_grad_scaler(name: str, max_norm: float | None, first_unscale: bool) -> None:
    """20 steps of two micro-batches, one of which overflows."""
    ours, theirs = net_of(), net_of()
    clip = None if max_norm is None else lambda _, grads: clip_by_norm(grads, max_norm)
    scales = train_with_amp(ours, name, clip, first_unscale=first_unscale)
    assert scales == train_with_grad_scaler(theirs, name, max_norm)
    assert scales[OVERFLOW] < scales[OVERFLOW - 1]
    assert same_bits(ours, theirs) and not same_bits(ours, net_of())


def test_the_norm_is_that_of_the_dense_gradient() -> None:
    """The norm of values that are not added up first, as they come from the backward pass, is another one."""
    norms = []
    for sparse in (True, False):
        net, amp = net_of(sparse=sparse), Amp.named("fp16", init_scale=SCALE)
        amp.backward(loss_of(net, torch.tensor([3, 3, 3, 5]), 1.0))
        if sparse:
            raw = net.embedding.weight.grad._values().norm() / SCALE  # type: ignore[union-attr]
        norms.append(amp.step(torch.optim.SGD([net.embedding.weight], lr=0.1)).grad_norm)
    # Both sum the same squares of four rows in some order: at most one rounding for each of the 16 terms and the root.
    assert abs(norms[0] / norms[1] - 1) <= 17 * torch.finfo(torch.float32).eps < abs(raw / norms[1] - 1)


def stepped(case: str, sparse: bool) -> Tensor:
    """The weight after a step of SGD with a row that repeats."""
    torch.manual_seed(0)
    clips: dict[str, Any] = {
        "value": Clip.value(1e-3),
        "function": lambda params, grads: [g.clamp_(-1e-3, 1e-3) for g in grads],
    }
    net, amp = nn.Embedding(ROWS, WIDTH, sparse=sparse), Amp.named("o2" if case == "o2" else "fp16", init_scale=SCALE)
    if case == "rows that are not contiguous":
        net = nn.Embedding.from_pretrained(torch.randn(WIDTH, ROWS).t(), freeze=False, sparse=sparse)
    amp.prepare(net)
    optimizer = torch.optim.SGD(master_params(net), lr=0.5)
    for ids in ([3, 3, 7], [1, 3, 7]):
        amp.backward(net(torch.tensor(ids)).square().sum())
        amp.step(optimizer, clips.get(case))
        amp.update()
        amp.zero_grad(optimizer)
    return net.weight.detach()


@pytest.mark.parametrize("case", ["value", "function", "rows that are not contiguous", "o2"])
def test_a_step_is_that_of_the_dense_gradient(case: str) -> None:
    """Clipping sees the values; they have no layout of the weight; an fp32 side gets them in fp32."""
    assert torch.equal(stepped(case, True), stepped(case, False))


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [Amp.unscale_, Amp.step])
def test_a_fused_step_is_refused(act: Any) -> None:
    net, amp = net_of(), Amp.named("fp16", init_scale=8.0)
    before = copy.deepcopy(net)
    amp.backward(loss_of(net, torch.tensor([1, 2]), 1.0))
    with pytest.raises(TypeError, match="do not fit the fused step of SGD; use fused=False, or use sparse=False"):
        act(amp, torch.optim.SGD([net.embedding.weight], lr=0.1, fused=True))
    assert same_bits(net, before)


def test_sharded_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="embedding: sparse gradients cannot be sharded; use sparse=False, or layout"):
        wrap_fsdp(net_of(), mesh=None)  # type: ignore[arg-type]


def test_adaptive_clipping_is_refused() -> None:
    net, amp = net_of(), Amp.named("fp16", init_scale=8.0)
    amp.backward(loss_of(net, torch.tensor([1, 2]), 1.0))
    with pytest.raises(TypeError, match=r"which is sparse; use Clip\.norm"):
        amp.step(torch.optim.SparseAdam([net.embedding.weight]), Clip.adaptive(0.1))


def in_two_processes(rank: int) -> list[Any]:
    found: list[Any] = []
    for compress in (False, True):
        sums = []
        for sparse in (True, False):
            net = net_of(sparse=sparse)
            ddp = wrap_ddp(net, torch.device("cpu"), exact=True, compress=compress)
            for ids in ([3, 3, rank], [5, 6 * rank, 7]):
                with sync_grads(ddp, when=ids[0] == 5):
                    ddp(torch.tensor(ids)).square().sum().backward()
            sums.append(net.embedding.weight.grad.to_dense())  # type: ignore[union-attr]
        found.append((sums[0] - sums[1]).norm().div(sums[1].norm()).item())
    share_state(net := net_of())
    amp = Amp.named("fp32")
    amp.backward(net(torch.tensor([1])).sum())
    with pytest.raises(TypeError, match=r"do not fit layout\.shard_optimizer=true"):
        amp.step(torch.optim.SparseAdam([net.embedding.weight]))
    return [*found, net.embedding.weight.grad.is_sparse]  # type: ignore[union-attr]


def test_replicas_sum_sparse_gradients_and_slices_refuse_them(on_ranks: Callable[..., list[Any]]) -> None:
    """Sent uncompressed in both cases: only the dense ones are rounded to bfloat16, before and after they are summed."""
    for exact, compressed, is_sparse in on_ranks(in_two_processes, num_ranks=2):
        assert exact <= 4 * torch.finfo(torch.float32).eps  # of each element four terms are summed, in any order
        assert 0 < compressed <= 2.01 * 2**-9 and is_sparse
