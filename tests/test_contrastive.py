"""A loss over the whole window and all ranks: cached gradients against the one big batch, and ways to get them wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from running import lines, same_but, state, summary
from test_recipes import on_two_ranks, weights
from test_recipes import run as run_recipe
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import Amp
from amp_core.datasets.base import uniforms, unpack
from amp_core.window import Micro
from recipes.contrastive import TwoViews, cached_gradients, embed_window, info_nce, nearest_neighbours, rehearsal

ALONE: Any = SimpleNamespace(rank=0, world_size=1, sum_over_ranks=lambda tensor: tensor)
TEMPERATURE = 0.1


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), *more, nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 16))


def views(num: int = 64, split: int = 4) -> list[Micro]:
    """A window of `split` micro-batches of two views that are alike."""
    torch.manual_seed(1)
    images = torch.randn(num, 1, 12, 12)
    pairs = [(images + 0.3 * torch.randn_like(images)).chunk(split) for _ in range(2)]
    return [Micro(batch, 1 / split, is_last=i == split - 1) for i, batch in enumerate(zip(*pairs, strict=True))]


def big_batch(net: nn.Module, window: list[Micro]) -> tuple[float, Tensor]:
    """The loss over all of the window in one graph, and its gradients, in the dtype of the network."""
    dtype = next(net.parameters()).dtype
    both = [torch.cat([micro.batch[view] for micro in window]).to(dtype) for view in (0, 1)]
    loss = info_nce(net(torch.cat(both)).unflatten(0, (2, -1)), TEMPERATURE)
    loss.backward()
    return loss.item(), flat(net)


def cached(mode: str, net: nn.Module, window: list[Micro], *, scaled: bool = True, **fields: Any) -> tuple[float, Tensor]:
    """The recipe's step up to the unscaled gradients."""
    amp = Amp.named(mode, **fields)
    loss, gradients = cached_gradients(ALONE, embed_window(amp, net, window), TEMPERATURE)
    for micro, gradient in zip(window, gradients, strict=True):
        with amp.autocast():
            embedding = net(torch.cat(micro.batch))
        if scaled:
            amp.backward(embedding, gradient)
        else:
            embedding.backward(gradient.to(embedding.dtype))
    if scaled:
        amp.unscale_(SGD(net.parameters()))
    return loss.item(), flat(net)


def flat(net: nn.Module) -> Tensor:
    grads = [p.grad for p in net.parameters()]
    return torch.cat([grad.flatten().double() for grad in grads if grad is not None])


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


# --- right --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [1, 4, 16])
@pytest.mark.parametrize(
    "mode, close", [("fp32", 1e-6), ("fp16", 1e-3), ("bf16", 1e-2)], ids=lambda value: value if isinstance(value, str) else ""
)
def test_cached_gradients_are_those_of_one_graph_over_the_whole_window(mode: str, close: float, split: int) -> None:
    loss, gradient = big_batch(network().double(), views())
    ours, our_gradient = cached(mode, network(), views(split=split))
    assert ours == pytest.approx(loss, rel=close)
    assert relative(our_gradient, gradient) < close


def test_info_nce_is_the_formula() -> None:
    torch.manual_seed(0)
    h = torch.randn(2, 5, 3, dtype=torch.float64)
    z = F.normalize(h, dim=2).flatten(0, 1)
    terms = []
    for i in range(10):
        others = [torch.exp(z[i] @ z[j] / TEMPERATURE) for j in range(10) if j != i]
        terms.append(-torch.log(torch.exp(z[i] @ z[(i + 5) % 10] / TEMPERATURE) / sum(others)))
    assert info_nce(h, TEMPERATURE).item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-12)


def test_both_passes_draw_the_same_masks_and_statistics_move_once() -> None:
    net, once = (network(nn.BatchNorm2d(8), nn.Dropout(0.5)).train() for _ in range(2))
    window, amp = views(), Amp.named("bf16")
    torch.manual_seed(3)
    first = embed_window(amp, net, window)
    with amp.autocast():
        second = torch.stack([net(torch.cat(micro.batch)).float() for micro in window])
    assert torch.equal(first, second)
    torch.manual_seed(3)
    with amp.autocast():
        third = torch.stack([once(torch.cat(micro.batch)).float() for micro in window])
    assert torch.equal(first, third)
    for a, b in zip(net.buffers(), once.buffers(), strict=True):
        assert torch.equal(a, b)
    assert net[1].num_batches_tracked == len(window)  # type: ignore[index]


def test_an_overflow_inside_a_rehearsal_leaves_nothing_behind() -> None:
    net = network(nn.BatchNorm2d(8)).train()
    before = [buffer.clone() for buffer in net.buffers()]
    with rehearsal(net, torch.device("cpu")), torch.no_grad():
        state_inside = torch.get_rng_state()
        net(torch.full((4, 1, 12, 12), torch.inf))
        torch.rand(5)
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state_inside)


# --- wrong --------------------------------------------------------------------------------------------------------------


def test_a_loss_per_micro_batch_is_another_loss() -> None:
    """With 4 micro-batches of 16 images each is told from 30 others instead of 126: log(127 / 31) = 1.4 less to lose at
    the start, and gradients that point elsewhere."""
    loss, gradient = big_batch(network().double(), views())
    net, window = network(), views()
    losses = [info_nce(net(torch.cat(micro.batch)).unflatten(0, (2, -1)), TEMPERATURE) for micro in window]
    sum(l * m.weight for l, m in zip(losses, window, strict=True)).backward()  # type: ignore[union-attr]
    print(loss, [l.item() for l in losses], relative(flat(net), gradient))


def test_an_unscaled_cached_gradient_underflows() -> None:
    print(relative(cached("fp16", network(), views(), scaled=False)[1], big_batch(network().double(), views())[1]))


def test_statistics_that_move_in_both_passes_and_other_masks() -> None:
    pass
