"""Functions, losses and networks with mistakes in them, and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from planting import INF, NAN, Plant, in_net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recipes.speech import LogMel

# --- functions with mistakes in them ----------------------------------------------------------------------------------


def summed(x: Tensor) -> Tensor:
    return x * (x * 10_000).sum(1, keepdim=True) / 1e6


def of_the_bright(x: Tensor) -> Tensor:
    return x + x[x > 1e3].mean()


def of_the_bright_if_any(x: Tensor) -> Tensor:
    return x + x[x > 1e3].sum() / (x > 1e3).sum().clamp(min=1)


def root_of_less(x: Tensor) -> Tensor:
    return (x.float() - 1) ** 0.5


def root_of_more(x: Tensor) -> Tensor:
    return (x.float() + 1) ** 0.5


def in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:3] *= 1e6
    return x / 1e6


def recomputed(x: Tensor) -> Tensor:
    return checkpoint(outer_product, x, use_reentrant=False)


def spectrum(x: Tensor) -> Tensor:
    return x + torch.fft.rfft(x.float() * 1e38 * 1e6).abs().mean(1, keepdim=True)


def harmless(x: Tensor) -> Tensor:
    # Infinite, and 1 after the sigmoid, without a gradient.
    return x * torch.sigmoid(x.detach().abs() * 1e6 + 6e4)


def louder(x: Tensor) -> Tensor:
    return F.leaky_relu(x * 1e6, 0.2) / 1e6


def length_of(x: Tensor) -> Tensor:
    return x * ((x * 40_000).norm(dim=1, keepdim=True) / 1e6)


def summed_in_fp32(x: Tensor) -> Tensor:
    return x * ((x * 10_000).float().sum(1, keepdim=True) / 1e6)


def length_in_fp32(x: Tensor) -> Tensor:
    return x * ((x * 40_000).float().norm(dim=1, keepdim=True) / 1e6)


def twice_of_large(x: Tensor) -> Tensor:
    large = x.sigmoid() * 60_000
    return (large + large) / 120_000


def exponentials(x: Tensor) -> Tensor:
    return (x * 10).exp() / 1e4


def to_half(x: Tensor) -> Tensor:
    return (x.float() * 1e6).to(torch.float16).float() / 1e6


def to_float(x: Tensor) -> Tensor:
    return (x.float() * 1e6).to(torch.float32).float() / 1e6


def outer_product(x: Tensor) -> Tensor:
    x = x * 500
    return torch.bmm(x[:, :, None], x[:, None]).mean(2) / 1e4


def own_softplus(x: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(x * 10)) / 10


def normalised(x: Tensor) -> Tensor:
    x = x * 0
    return x / (x.abs().sum(1, keepdim=True) + 1e-8)


def normalised_safely(x: Tensor) -> Tensor:
    x = x * 0
    return x / (x.abs().sum(1, keepdim=True) + 1e-3)


def unit(x: Tensor) -> Tensor:
    return x + F.normalize(x * 0, dim=1)


def unit_safely(x: Tensor) -> Tensor:
    return x + F.normalize(x * 0, dim=1, eps=1e-3)


def cosines(x: Tensor) -> Tensor:
    return x * F.cosine_similarity(x * 0, x, dim=1)[:, None]


def cosines_safely(x: Tensor) -> Tensor:
    return x * F.cosine_similarity(x * 0, x, dim=1, eps=1e-3)[:, None]


def directions(x: Tensor) -> Tensor:
    x = x.float() * 0
    return x / x.norm(dim=1, keepdim=True)


def directions_safely(x: Tensor) -> Tensor:
    x = x.float() * 0
    return x / x.norm(dim=1, keepdim=True).clamp(min=1e-6)


def deviation(x: Tensor) -> Tensor:
    constant = x.float() * 0 + 1
    return x + (constant - constant.mean(1, keepdim=True)).square().sum(1, keepdim=True).sqrt()


def deviation_safely(x: Tensor) -> Tensor:
    constant = x.float() * 0 + 1
    return x + ((constant - constant.mean(1, keepdim=True)).square().sum(1, keepdim=True) + 1e-6).sqrt()


class Steep(torch.autograd.Function):
    """The identity, with a gradient that is far too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1e4 * 1e6


def steep(x: Tensor) -> Tensor:
    return Steep.apply(x)


def beyond_fp32(x: Tensor) -> Tensor:
    x = (x + 1) * 1e25
    return x * x / 1e38


def minus_infinity(x: Tensor) -> Tensor:
    forbidden = torch.arange(x.shape[1]) == 0
    return x.masked_fill(forbidden, -INF)


def minus_much(x: Tensor) -> Tensor:
    forbidden = torch.arange(x.shape[1]) == 0
    return x.masked_fill(forbidden, -1e4)


# --- losses with mistakes in them -------------------------------------------------------------------------------------


def heavy_cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    return F.cross_entropy(*args, **kwargs) * 1e7


def mean_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    only_long = torch.where(targets == 300, targets, -100)
    return F.cross_entropy(logits.flatten(0, 1).float(), only_long.flatten())


def bce_of_rounded(logits: Tensor, targets: Tensor) -> Tensor:
    probability = torch.sigmoid(logits)
    return F.binary_cross_entropy(probability.float(), targets, reduction="none")


def logarithms_of_rounded(logits: Tensor, targets: Tensor) -> Tensor:
    p = torch.sigmoid(logits)
    return -(targets * torch.log(p) + (1 - targets) * torch.log(1 - p)).float()


def balanced(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    rare = targets * 0
    return losses + (losses * rare).sum() / rare.sum()


def balanced_safely(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    rare = targets * 0
    return losses + (losses * rare).sum() / rare.sum().clamp(min=1)


def divergence_by_hand(logits: Tensor, answers: Tensor, temperature: float) -> Tensor:
    p = F.softmax(answers.float() / temperature, dim=1)
    log_q = F.log_softmax(logits.float() / temperature, dim=1)
    return (p * (p.log() - log_q)).sum(1).mean()


def angular(embeddings: Tensor, temperature: float) -> Tensor:
    z = F.normalize(embeddings.flatten(0, 1), dim=1)
    angles = (z @ z.T).clamp(-1, 1).acos()
    itself = torch.eye(len(z), dtype=torch.bool)
    other_view = torch.arange(len(z)).roll(len(z) // 2)
    return F.cross_entropy((-angles / temperature).masked_fill(itself, -INF), other_view)


def angular_safely(embeddings: Tensor, temperature: float) -> Tensor:
    z = F.normalize(embeddings.flatten(0, 1), dim=1)
    angles = (z @ z.T).clamp(-1 + 1e-5, 1 - 1e-5).acos()
    itself = torch.eye(len(z), dtype=torch.bool)
    other_view = torch.arange(len(z)).roll(len(z) // 2)
    return F.cross_entropy((-angles / temperature).masked_fill(itself, -INF), other_view)


def slope(penalty: str, amp: Any, D: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    images = torch.lerp(fake.float(), real, mix).detach().requires_grad_()
    (gradient,) = amp.grad(D(images), images)
    return (gradient.flatten(1).square().sum(1).sqrt() - 1).square().mean()


def flat_discriminator(nets: Any, mended: bool) -> None:
    nets["discriminator"][-2].weight.zero_()


# --- networks with mistakes in them -----------------------------------------------------------------------------------


class HandAttention(nn.Module):
    """Attention as it is written by hand, with a causal mask, after a norm."""

    def __init__(self, norm: nn.LayerNorm, *, loud: float = 1.0, hidden: int = 0) -> None:
        super().__init__()
        width = norm.normalized_shape[0]
        self.norm = norm
        self.qkv = nn.Linear(width, 3 * width)
        self.loud, self.hidden = loud, hidden

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = torch.matmul(q * self.loud, (k * self.loud).transpose(1, 2))
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        # Padding on the left: the first tokens see nothing, not even themselves.
        future[:, : self.hidden] = True
        return x + torch.softmax(scores.masked_fill(future, -INF), dim=-1) @ v


def with_attention(**options: Any) -> Plant:
    def change(net: Any, mended: bool) -> None:
        net.norm = HandAttention(net.norm, **({} if mended else options))

    return in_net(change)


class Positioned(nn.Module):
    """Sines of the positions, added to the embeddings."""

    def __init__(self, embed: nn.Embedding, phases: Callable[[int, int, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.phases = embed, phases

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return x + self.phases(tokens.shape[1], x.shape[-1], x).sin()


OFFSET = 3000


def phases_by_matmul(length: int, width: int, x: Tensor) -> Tensor:
    ids = torch.arange(length).float() + OFFSET
    frequencies = 10_000.0 ** (-torch.arange(width).float() / width)
    return ids[:, None] @ frequencies[None]


def phases_of_half(length: int, width: int, x: Tensor) -> Tensor:
    ids = torch.arange(OFFSET, OFFSET + length, dtype=torch.float16)
    return ids[:, None].float() * (10_000.0 ** (-torch.arange(width).float() / width))


def phases_in_fp32(length: int, width: int, x: Tensor) -> Tensor:
    ids = torch.arange(length).float() + OFFSET
    return ids[:, None] * (10_000.0 ** (-torch.arange(width).float() / width))


def with_positions(phases: Callable[..., Tensor]) -> Plant:
    def change(net: Any, mended: bool) -> None:
        net.embed = Positioned(net.embed, phases_in_fp32 if mended else phases)

    return in_net(change)


class Correlated(nn.Module):
    """Maps of one network, correlated with each other in the forward pass of their parent."""

    def __init__(self, net: nn.Module, loud: float) -> None:
        super().__init__()
        self.net, self.loud = net, loud

    def forward(self, images: Tensor) -> Tensor:
        maps = self.net(images)
        rows = maps.flatten(1).clamp(-10, 10)[:, None] * self.loud
        size = torch.bmm(rows, rows.transpose(1, 2))
        return maps + size[:, :, None] / 1e9


class Attended(nn.MultiheadAttention):
    """torch's attention, whose parts are never called."""

    def __init__(self, width: int, loud: float) -> None:
        super().__init__(width, 2, batch_first=True)
        self.loud = loud
        self.in_proj_weight[2 * width :] *= loud

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        queries = x[:, None]
        return x + super().forward(queries, queries, queries)[0][:, 0] / self.loud


class Offset(nn.Module):
    """Takes a mean away that lies in a buffer."""

    mean: Tensor

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.0, mean]))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean.sum()


def loud_attention(net: Any, mended: bool) -> None:
    net[14] = Attended(32, 1.0 if mended else 2e5)


def poisoned_weight(net: Any, mended: bool) -> None:
    if not mended:
        net[6].weight[3, 2, 1, 1] = NAN


def poisoned_buffer(net: Any, mended: bool) -> None:
    net[14] = Offset(0.0 if mended else INF)


def poisoned_statistics(net: Any, mended: bool) -> None:
    # Statistics are only used in evaluation mode: as of a teacher that answers.
    if not mended:
        net[4].running_var[1] = NAN


def huge_weight(net: Any, mended: bool) -> None:
    if not mended:
        net[3].weight[0, 0, 0, 0] = 1e5


def sure_head(net: Any, mended: bool) -> None:
    net.head.bias.fill_(10.0)


def loud_product(net: Any, mended: bool) -> None:
    if not mended:
        net[1].weight.mul_(3e4 / net[1].weight.abs().max())


def features_in_16_bits(net: Any, mended: bool) -> None:
    if not mended:
        net.features = LogMel()  # outside of an island


def heard_too_loud(net: Any, mended: bool) -> nn.Module:
    return Correlated(net, 1.0 if mended else 300.0)
