"""A loss over the whole window and all ranks: cached gradients against the one big batch, and ways to get them wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared import relative
from torch import Tensor, nn
from torch.optim import SGD

from amp_core import Amp
from amp_core.data.base import uniforms, unpack
from amp_core.step.window import MicroBatch
from recipes.contrastive import TwoViews, cached_gradients, embed_window, info_nce, nearest_neighbours, rehearsal

ALONE: Any = SimpleNamespace(rank=0, world_size=1, sum_over_ranks=lambda tensor: tensor)
TEMPERATURE = 0.1


pytestmark = pytest.mark.usefixtures("own_folder")


def network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), *more, nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 16))


def views(num: int = 64, split: int = 4) -> list[MicroBatch]:
    """A window of `split` micro-batches of two views that are alike."""
    torch.manual_seed(1)
    images = torch.randn(num, 1, 12, 12)
    pairs = [(images + 0.3 * torch.randn_like(images)).chunk(split) for _ in range(2)]
    return [MicroBatch(batch, 1 / split, is_last=i == split - 1) for i, batch in enumerate(zip(*pairs, strict=True))]


def big_batch(net: nn.Module, window: list[MicroBatch]) -> tuple[float, Tensor]:
    """The loss over all of the window in one graph, and its gradients, in the dtype of the network."""
    dtype = next(net.parameters()).dtype
    both = [torch.cat([micro.batch[view] for micro in window]).to(dtype) for view in (0, 1)]
    loss = info_nce(net(torch.cat(both)).unflatten(0, (2, -1)), TEMPERATURE)
    loss.backward()
    return loss.item(), flat(net)


def cached(
    mode: str,
    net: nn.Module,
    window: list[MicroBatch],
    scaled: bool = True,
    share: float = 1.0,
    init_scale: float = 2.0**12,
) -> tuple[float, Tensor]:
    """The recipe's step up to the unscaled gradients, and back from a `share` of the loss."""
    amp = Amp.named(mode, init_scale=init_scale, max_scale=2.0**38) if mode == "fp16" else Amp.named(mode)
    loss, gradients = cached_gradients(ALONE, embed_window(amp, net, window), TEMPERATURE)
    for micro, gradient in zip(window, gradients * share, strict=True):
        with amp.autocast():
            embedding = net(torch.cat(micro.batch))
        if scaled:
            amp.backward(embedding, gradient)
        else:
            embedding.backward(gradient.to(embedding.dtype))
    if scaled:
        amp.unscale_(SGD(net.parameters()))
    return loss.item(), flat(net) / share


def flat(net: nn.Module) -> Tensor:
    grads = [p.grad for p in net.parameters()]
    return torch.cat([grad.flatten().double() for grad in grads if grad is not None])


CLOSE = {"fp32": 64 * 2.0**-24, "fp16": 16 * 2.0**-11, "bf16": 16 * 2.0**-8}
"""Some 16 roundings one after another: inputs, weights and products of two layers and an activation, there and back.
16-bit products are summed in fp32; in fp32 the sums round as well, of up to 2,304 terms typically by 48 units."""


@pytest.mark.parametrize("split", [1, 4, 16])
@pytest.mark.parametrize("mode", CLOSE)
def test_cached_gradients_are_those_of_one_graph_over_the_whole_window(mode: str, split: int) -> None:
    loss, gradient = big_batch(network().double(), views())
    ours, our_gradient = cached(mode, network(), views(split=split))
    assert ours == pytest.approx(loss, rel=CLOSE[mode])
    assert relative(our_gradient, gradient) < CLOSE[mode]


def test_info_nce_is_the_formula() -> None:
    torch.manual_seed(0)
    h = torch.randn(2, 5, 3, dtype=torch.float64)
    z = F.normalize(h, dim=2).flatten(0, 1)
    terms = []
    for i in range(10):
        others = [torch.exp(z[i] @ z[j] / TEMPERATURE) for j in range(10) if j != i]
        terms.append(-torch.log(torch.exp(z[i] @ z[(i + 5) % 10] / TEMPERATURE) / sum(others)))
    assert info_nce(h, TEMPERATURE).item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-12)


def test_an_overflow_inside_a_rehearsal_leaves_nothing_behind() -> None:
    net = network(nn.BatchNorm2d(8)).train()
    before = [buffer.clone() for buffer in net.buffers()]
    with rehearsal(net, torch.device("cpu")), torch.no_grad():
        state_inside = torch.get_rng_state()
        net(torch.full((4, 1, 12, 12), torch.inf))
        torch.rand(5)
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state_inside)


def test_a_loss_per_micro_batch_is_another_loss() -> None:
    """Each image is told from 30 others instead of 126, and the gradients point elsewhere."""
    loss, gradient = big_batch(network().double(), views())
    net, window = network(), views()
    losses = [
        info_nce(net(torch.cat(micro.batch)).unflatten(0, (2, -1)), TEMPERATURE) * micro.weight for micro in window
    ]
    total = torch.stack(losses).sum()
    total.backward()
    assert (loss, total.item()) == pytest.approx((0.662, 0.216), abs=1e-3)
    assert relative(flat(net), gradient) > 0.5


def test_an_unscaled_cached_gradient_underflows() -> None:
    """A loss whose share of the whole is 2^-26: a large window, or a small weight beside other losses. Gradients of
    embeddings are below 1 here, so the pass begins with less than half of fp16's smallest number: 0 in any kernel."""
    _, gradient = big_batch(network().double(), views())
    _, scaled = cached("fp16", network(), views(), share=2.0**-26, init_scale=2.0**38)
    assert relative(scaled, gradient) < CLOSE["fp16"]
    _, unscaled = cached("fp16", network(), views(), share=2.0**-26, scaled=False)
    assert not unscaled.any()


def in_training(net: nn.Module, window: list[MicroBatch], *, guarded: bool) -> tuple[Tensor, list[Tensor]]:
    """Gradients and buffers after the two passes, with or without putting things back after the first."""
    torch.manual_seed(3)
    amp = Amp.named("fp32")
    if guarded:
        embeddings = embed_window(amp, net, window)
    else:
        with torch.no_grad():
            embeddings = torch.stack([net(torch.cat(micro.batch)) for micro in window])
    _, gradients = cached_gradients(ALONE, embeddings, TEMPERATURE)
    for micro, gradient in zip(window, gradients, strict=True):
        amp.backward(net(torch.cat(micro.batch)), gradient)
    return flat(net), list(net.buffers())


def test_without_a_rehearsal_masks_differ_and_statistics_move_twice() -> None:
    def net() -> nn.Module:
        return network(nn.BatchNorm2d(8), nn.Dropout(0.3)).train()

    reference, window = net(), views()
    torch.manual_seed(3)
    embeddings = torch.stack([reference(torch.cat(micro.batch)) for micro in window])  # all graphs at once
    info_nce(embeddings.unflatten(1, (2, -1)).movedim(1, 0).flatten(1, 2), TEMPERATURE).backward()
    right, right_buffers = in_training(net(), window, guarded=True)
    wrong, wrong_buffers = in_training(net(), window, guarded=False)
    assert relative(right, flat(reference)) < CLOSE["fp32"] and relative(wrong, flat(reference)) > 0.5
    for a, b, c in zip(reference.buffers(), right_buffers, wrong_buffers, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)
    assert [int(buffers[-1]) for buffers in (right_buffers, wrong_buffers)] == [4, 8]  # num_batches_tracked


class Numbers:
    """A data set whose images tell what they were made from."""

    def __len__(self) -> int:
        return 10

    def __getitems__(self, keys: Any) -> tuple[Tensor, Tensor]:
        indices, passes = unpack(keys)
        u = torch.from_numpy(uniforms(0, indices, passes, 1)).float()
        return u[:, :, None, None], torch.from_numpy(indices)


def test_two_views_of_an_image_are_two_passes_of_the_data_set() -> None:
    data = TwoViews(Numbers())
    first, second = data.__getitems__([(3, 4), (7, 4)])
    assert torch.equal(first, Numbers().__getitems__([(3, 8), (7, 8)])[0])
    assert torch.equal(second, Numbers().__getitems__([(3, 9), (7, 9)])[0])
    alone = data.__getitems__([(7, 4)])
    assert torch.equal(alone[0], first[1:]) and torch.equal(alone[1], second[1:]) and len(data) == 10


def test_the_nearest_vote_by_their_cosines() -> None:
    memory = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.2], [1.0, -0.2], [0.0, 1.0]]), dim=1)
    classes = torch.tensor([2, 0, 0, 1])
    query = torch.tensor([[1.0, 0.0]])
    assert nearest_neighbours(query, memory, classes, 1).tolist() == [2]
    assert nearest_neighbours(query, memory, classes, 3).tolist() == [0]  # 2 * exp(-0.2) outweighs 1
    assert nearest_neighbours(query, memory, classes, 99).tolist() == [0]
