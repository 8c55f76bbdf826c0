"""Faults planted into the real recipes, each with what an expert would say of it: the corpus that the doctor is held to.

A fault changes the network, the data or the loss of a recipe, as a mistake in them would. `mended` is the same code with
the change that the doctor asks for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from planting import (
    INF,
    NAN,
    Fault,
    Plant,
    Slot,
    both,
    drawn,
    grown,
    in_function,
    in_functional,
    in_net,
    in_samples,
    in_slot,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recipes.speech import LogMel

bce = functools.partial(F.binary_cross_entropy_with_logits, reduction="none")


def in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:3] *= 1e6
    return x / 1e6


def outer_product(x: Tensor) -> Tensor:
    x = x * 500
    return torch.bmm(x[:, :, None], x[:, None]).mean(2) / 1e4


class Steep(torch.autograd.Function):
    """The identity, with a gradient that is far too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1e4 * 1e6


def mean_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    only_long = torch.where(targets == 300, targets, -100)
    return F.cross_entropy(logits.flatten(0, 1).float(), only_long.flatten())


def divergence_by_hand(logits: Tensor, answers: Tensor, temperature: float) -> Tensor:
    p = F.softmax(answers.float() / temperature, dim=1)
    log_q = F.log_softmax(logits.float() / temperature, dim=1)
    return (p * (p.log() - log_q)).sum(1).mean()


def angular(largest: float) -> Callable[..., Tensor]:
    def loss(embeddings: Tensor, temperature: float) -> Tensor:
        z = F.normalize(embeddings.flatten(0, 1), dim=1)
        angles = (z @ z.T).clamp(-largest, largest).acos()
        other_view = torch.arange(len(z)).roll(len(z) // 2)
        return F.cross_entropy((-angles / temperature).masked_fill(torch.eye(len(z)).bool(), -INF), other_view)

    return loss


def slope(penalty: str, amp: Any, D: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    images = torch.lerp(fake.float(), real, mix).detach().requires_grad_()
    (gradient,) = amp.grad(D(images), images)
    return (gradient.flatten(1).square().sum(1).sqrt() - 1).square().mean()


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


OF_STEP = {
    "classification": "loss = F.cross_entropy(model(images), labels, label_smoothing=knobs.label_smoothing)",
    "contrastive": "embeddings.append(net(torch.cat(micro.batch)).float())",
    "face_recognition": "features = model(images)",
    "distillation": "logits = student(images)",
    "gan": "of_real, of_fake = D(torch.cat([real, fake])).float().chunk(2)",
    "language_model": "loss = token_loss(model(inputs), targets) / num_valid(micro.batch).clamp(min=1)",
}
"""Lines of the recipes in which layers of torch's own containers are called."""

QUIET = ("amp=fp16", "amp.init_scale=256")
"""A scale at which nothing else overflows."""
BF16 = ("amp=bf16",)
nothing = both()
"""What plants a fault is a setting."""

FAULTS = [
    # Overflows of the forward pass.
    Fault("a convolution before BatchNorm", "classification", grown("3"),
          "overflow in a product", "aten.convolution", "3", OF_STEP["classification"], islands=("3",)),
    Fault("two convolutions at once", "classification", grown("3", "9"),
          "overflow in a product", "aten.convolution", "3", OF_STEP["classification"], islands=("3", "9")),
    Fault("a linear layer, and the next one that is given its numbers", "language_model", grown("blocks.0.up"),
          "overflow in a product", "aten.mm", "blocks.0.up", "return x + F.dropout(self.down(F.gelu(self.up(self.norm_mlp(x)), approximate=self.gelu)), dropout)",
          islands=("blocks.0.up", "blocks.0.down")),
    Fault("a weight that fp16 does not hold", "classification", in_net(lambda net, mended: mended or net[3].weight[0, 0, 0, 0].fill_(1e5)),
          "overflow in a cast", "aten._to_copy", "3", OF_STEP["classification"], islands=("3",), samples=()),
    Fault("an attention product", "language_model", with_attention(loud=200.0),
          "overflow in a product", "aten.bmm", "norm", "scores = torch.matmul(q * self.loud, (k * self.loud).transpose(1, 2))",
          settings=QUIET, islands=("norm",)),
    Fault("a product in the forward pass of the whole network", "segmentation", in_net(lambda net, mended: Correlated(net, 1.0 if mended else 300.0)),
          "overflow in a product", "aten.bmm", "", "size = torch.bmm(rows, rows.transpose(1, 2))",
          settings=QUIET, islands=("",)),
    Fault("an outer product of features", "contrastive", in_slot("14", outer_product),
          "overflow in a product", "aten.bmm", "14", "return torch.bmm(x[:, :, None], x[:, None]).mean(2) / 1e4",
          settings=QUIET, islands=("14",)),
    Fault("a custom function", "custom_function", grown("1"),
          "overflow in a product", "aten.mm", "1", "return x.mm(weight.t())", islands=("1",)),
    Fault("a layer of the discriminator", "gan", grown("discriminator.2"),
          "overflow in a product", "aten.convolution", "discriminator.2", OF_STEP["gan"], settings=QUIET),
    Fault("a factor in the discriminator", "gan", in_slot("discriminator.3", lambda x: F.leaky_relu(x * 1e6, 0.2) / 1e6),
          "overflow in a product", "aten.mul", "discriminator.3",
          settings=QUIET, islands=("discriminator.3",)),
    Fault("a layer of the second stage", "model_parallel", grown("9"),
          "overflow in a product", "aten.convolution", "9", "logits = model(images)", islands=("9",)),
    Fault("a layer of a stage in a thread of its own", "model_parallel", grown("9"),
          "overflow in a product", "aten.convolution", "9", "logits = model(images)",
          settings=("amp=fp16", "recipe.pipeline=threads", "recipe.chunks=2"), islands=("9",)),
    Fault("the embedding of patches", "experts", grown("embed"),
          "overflow in a product", "aten.convolution", "embed", "x = self.embed(images).flatten(2).mT + self.places",
          islands=("embed",)),
    Fault("the stem of a denoiser", "diffusion", grown("stem"),
          "overflow in a product", "aten.convolution", "stem", "skip = self.blocks[0](self.stem(x), level)", settings=QUIET),
    Fault("a layer of a policy", "policy_gradient", grown("blocks.0.up"),
          "overflow in a product", "aten.mm", "blocks.0.up", settings=QUIET),
    Fault("a layer of a backbone", "face_recognition", grown("2"),
          "overflow in a product", "aten.convolution", "2", OF_STEP["face_recognition"], settings=QUIET),
    Fault("a teacher that answers in fp16", "distillation", grown("3", number=1),
          "overflow in a product", "aten.convolution", None, "answers = teacher(images.to(dtype))",
          step=2, override="amp=bf16"),
    Fault("a sum of many numbers", "classification", in_slot("14", lambda x: x * (x * 10_000).sum(1, keepdim=True) / 1e6, lambda x: x * ((x * 10_000).float().sum(1, keepdim=True) / 1e6)),
          "overflow in a reduction", "aten.sum", "14",
          islands=("14",)),
    Fault("a norm of many numbers", "classification", in_slot("14", lambda x: x * ((x * 40_000).norm(dim=1, keepdim=True) / 1e6), lambda x: x * ((x * 40_000).float().norm(dim=1, keepdim=True) / 1e6)),
          "overflow in a reduction", "aten.linalg_vector_norm", "14",
          islands=("14",), settings=QUIET),
    Fault("a cast that stands in the code", "classification", in_slot("14", lambda x: (x.float() * 1e6).to(torch.float16).float() / 1e6, lambda x: x.float() * 1e6 / 1e6),
          "overflow in a cast", "aten._to_copy", "14",
          fix="code"),
    Fault("a residual of large numbers", "classification", in_slot("14", lambda x: (x.sigmoid() * 60_000 + x.sigmoid() * 60_000) / 120_000),
          "overflow in an addition", "aten.add", "14", islands=("14",), settings=QUIET),
    Fault("an exponential", "classification", in_slot("14", lambda x: (x * 10).exp() / 1e4),
          "overflow in a function", "aten.exp", "14", islands=("14",), settings=QUIET),
    Fault("a softplus by hand", "segmentation", in_slot("dropout", lambda x: torch.log(1 + torch.exp(x * 10)) / 10),
          "overflow in a function", "aten.exp", "dropout",
          islands=("dropout",)),
    Fault("attention of torch's own", "classification", in_net(lambda net, mended: net.set_submodule("14", Attended(32, 1.0 if mended else 2e5))),
          "overflow in a product", "aten.addmm", "14", "return x + super().forward(queries, queries, queries)[0][:, 0] / self.loud",
          settings=QUIET, islands=("14",)),
    Fault("a part of a tensor, in place", "face_recognition", in_slot("7", in_place),
          "overflow in a product", "aten.mul_", "7", "x[:, 1:3] *= 1e6", settings=QUIET, islands=("7",)),
    Fault("a function that is computed again in the backward pass", "model_parallel", in_slot("14", lambda x: checkpoint(outer_product, x, use_reentrant=False)),
          "overflow in a product", "aten.bmm", "14", "return torch.bmm(x[:, :, None], x[:, None]).mean(2) / 1e4",
          settings=QUIET, islands=("14",)),
    Fault("an infinity that does no harm, and one that does", "classification", both(in_slot("8", lambda x: x * torch.sigmoid(x.detach().abs() * 1e6 + 6e4)), grown("9")),
          "overflow in a product", "aten.convolution", "9", OF_STEP["classification"], settings=QUIET, islands=("9",)),
    Fault("16-bit weights", "classification", grown("3"),
          "overflow in a product", "aten.convolution", "3", OF_STEP["classification"],
          settings=("amp=o2",), override="amp=bf16"),
    Fault("a convolution of a loud sample in the second micro-batch", "classification", both(grown("0", largest=10.0), in_samples({drawn(1, micro=1, accumulation=2): 6e4})),
          "overflow in a product", "aten.convolution", "0", OF_STEP["classification"],
          settings=(*QUIET, "accumulation=2"), islands=("0",)),
    # Beyond fp32.
    Fault("a spectrum of numbers beyond fp32", "classification", in_slot("14", lambda x: x + torch.fft.rfft(x.float() * 1e38 * 1e6).abs().mean(1, keepdim=True)),
          "overflow in fp32", "aten.mul", "14",
          settings=BF16, fix="code"),
    Fault("numbers beyond fp32", "classification", in_slot("14", lambda x: (x + 1) * 1e25 * ((x + 1) * 1e25) / 1e38),
          "overflow in fp32", "aten.mul", "14", settings=("amp=fp32",), fix="code"),
    Fault("numbers beyond fp32 in bf16", "contrastive", in_slot("14", lambda x: (x + 1) * 1e25 * ((x + 1) * 1e25) / 1e38),
          "overflow in fp32", "aten.mul", "14", settings=BF16, fix="code"),
    # The backward pass, and the scale.
    Fault("a loss that weighs too much", "classification", in_functional(cross_entropy=lambda *args, **kwargs: F.cross_entropy(*args, **kwargs) * 1e7),
          "overflow in a cast", "aten._to_copy", None,
          phase="backward"),
    Fault("a custom backward", "classification", in_slot("14", Steep.apply),
          "overflow in a product", "aten.mul", "14", "return grad * 1e4 * 1e6", phase="backward", settings=QUIET),
    Fault("a static loss scale that is too large", "classification", nothing,
          "loss scale too large", "aten._to_copy", None, OF_STEP["classification"],
          phase="backward", settings=("amp=fp16", "amp.dynamic=false", "amp.max_scale=1e9", "amp.init_scale=268435456")),
    Fault("a static loss scale that is too large for a language model", "language_model", nothing,
          "loss scale too large", "aten._to_copy", None, 'return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")',
          phase="backward", settings=("amp=fp16", "amp.dynamic=false", "amp.max_scale=1e9", "amp.init_scale=268435456")),
    Fault("a loss scale that has grown too large", "custom_function", nothing,
          "loss scale too large", "aten.mm", "3", "return grad.mm(weight), grad.t().mm(x)",
          phase="backward", settings=("amp=fp16", "amp.init_scale=65536", "amp.growth_interval=1", "amp.max_scale=1e12"), step=3),
    Fault("the scale of a penalty", "gan", nothing,
          "loss scale too large", "aten._to_copy", None, "(gradient,) = amp.grad(D(images), images)", phase="backward"),
    Fault("a root at zero", "classification", in_slot("14", lambda x: x + (x.float() * 0).square().sum(1, keepdim=True).sqrt(), lambda x: x + ((x.float() * 0).square().sum(1, keepdim=True) + 1e-6).sqrt()),
          "division or logarithm of zero", "aten.div", "14",
          phase="backward", fix="code"),
    Fault("the root in a gradient penalty, of a flat discriminator", "gan", both(in_net(lambda nets, mended: nets["discriminator"][-2].weight.zero_()), in_function("gradient_penalty", slope)),
          "division or logarithm of zero", "aten.div", None, "return (gradient.flatten(1).square().sum(1).sqrt() - 1).square().mean()",
          phase="backward", settings=("amp=fp32",), fix="code"),
    Fault("an arc cosine at 1", "contrastive", in_function("info_nce", angular(1.0), angular(1 - 1e-5)),
          "division or logarithm of zero", "aten.rsqrt", None, "angles = (z @ z.T).clamp(-largest, largest).acos()",
          phase="backward", settings=BF16, fix="code"),
    # Zeros.
    Fault("a direction of nothing", "contrastive", in_slot("14", lambda x: x.float() * 0 / (x.float() * 0).norm(dim=1, keepdim=True), lambda x: x.float() * 0 / (x.float() * 0).norm(dim=1, keepdim=True).clamp(min=1e-6)),
          "division or logarithm of zero", "aten.div", "14",
          settings=BF16, fix="code"),
    Fault("the logarithm of a probability of 0", "distillation", in_function("divergence", divergence_by_hand),
          "underflow in fp32", "aten.log", None, "return (p * (p.log() - log_q)).sum(1).mean()",
          settings=("amp=fp32", "recipe.temperature=0.001"), step=2, fix="code"),
    Fault("a mean over nothing", "segmentation", in_function("LOSSES", {"logits": lambda z, t: bce(z, t) + (bce(z, t) * (t * 0)).sum() / (t * 0).sum()}, {"logits": lambda z, t: bce(z, t) + (bce(z, t) * (t * 0)).sum() / (t * 0).sum().clamp(min=1)}),
          "division or logarithm of zero", "aten.div", None,
          settings=BF16, fix="code"),
    Fault("a mean of no features", "classification", in_slot("14", lambda x: x + x[x > 1e3].mean(), lambda x: x + x[x > 1e3].sum() / (x > 1e3).sum().clamp(min=1)),
          "division or logarithm of zero", "aten.mean", "14",
          settings=QUIET, fix="code"),
    Fault("a loss of no tokens", "language_model", in_function("token_loss", mean_of_tokens),
          "division or logarithm of zero", "aten.nll_loss_forward", None, "return F.cross_entropy(logits.flatten(0, 1).float(), only_long.flatten())",
          settings=QUIET, fix="code"),
    Fault("a loss of no tokens above a frozen base", "finetuning", in_function("token_loss", mean_of_tokens),
          "division or logarithm of zero", "aten.nll_loss_forward", None, "return F.cross_entropy(logits.flatten(0, 1).float(), only_long.flatten())",
          settings=QUIET, fix="code"),
    Fault("a root of negative numbers", "distillation", in_slot("14", lambda x: (x.float() - 1) ** 0.5, lambda x: (x.float() + 1) ** 0.5),
          "outside the domain of a function", "aten.pow", "14",
          settings=QUIET, step=2, fix="code"),
    Fault("an eps that fp16 does not hold", "classification", in_slot("14", lambda x: x * 0 / ((x * 0).abs().sum(1, keepdim=True) + 1e-8), lambda x: x * 0 / ((x * 0).abs().sum(1, keepdim=True) + 1e-3)),
          "eps lost in 16 bits", "aten.div", "14",
          islands=("14",), settings=QUIET),
    Fault("mel filters under autocast", "speech", in_net(lambda net, mended: mended or setattr(net, "features", LogMel(8000))),
          "eps lost in 16 bits", "aten.log", "features",
          islands=("features",)),
    Fault("F.normalize of zeros", "face_recognition", in_slot("7", lambda x: x + F.normalize(x * 0, dim=1), lambda x: x + F.normalize(x * 0, dim=1, eps=1e-3)),
          "eps lost in 16 bits", "aten.div", "7",
          settings=("amp=fp16", "amp.init_scale=4"), islands=("7",)),
    Fault("cosine similarity of zeros", "distillation", in_slot("14", lambda x: x * F.cosine_similarity(x * 0, x, dim=1)[:, None], lambda x: x * F.cosine_similarity(x * 0, x, dim=1, eps=1e-3)[:, None]),
          "eps lost in 16 bits", "aten.div", "14",
          step=2, islands=("14",), settings=QUIET),
    Fault("a sigmoid in fp16 before the loss", "segmentation", both(in_net(lambda net, mended: net.head.bias.fill_(10.0)), in_function("LOSSES", {"logits": lambda z, t: F.binary_cross_entropy(torch.sigmoid(z).float(), t, reduction="none")})),
          "16-bit sigmoid before a logarithm", "aten._to_copy", None,
          phase="backward", settings=QUIET),
    Fault("a sigmoid in fp16 before a logarithm by hand", "segmentation", both(in_net(lambda net, mended: net.head.bias.fill_(10.0)), in_function("LOSSES", {"logits": lambda z, t: -(t * torch.log(torch.sigmoid(z)) + (1 - t) * torch.log(1 - torch.sigmoid(z))).float()})),
          "16-bit sigmoid before a logarithm", "aten.log", None,
          settings=QUIET),
    # Infinities that the program writes.
    Fault("a row of attention with no key left", "language_model", with_attention(hidden=2),
          "nothing left by a mask", "aten._softmax", "norm", "return x + torch.softmax(scores.masked_fill(future, -INF), dim=-1) @ v",
          settings=BF16, fix="code"),
    Fault("a forbidden class under label smoothing", "classification", in_net(lambda net, mended: net.append(Slot(lambda x: x.masked_fill(torch.arange(x.shape[1]) == 0, -1e4 if mended else -INF)))),
          "infinite constant", "aten.masked_fill", "16",
          settings=("amp=bf16", "recipe.label_smoothing=0.1"), fix="code"),
    Fault("an infinity that is added", "face_recognition", nothing,
          "infinite constant", "aten.add", "0",
          settings=("amp=bf16", "debug.inject={where: activation, step: 1}"), mended=BF16, fix="code"),
    # Positions.
    Fault("positions in bf16", "language_model", nothing,
          "position collision", "aten._to_copy", "", "return (torch.arange(length, device=device) + offset).to(dtype)",
          settings=("amp=bf16", "data.length=300", "model.options.positions_dtype=bf16"), mended=("amp=bf16", "data.length=300", "model.options.positions_dtype=fp32"), fix="code"),
    Fault("fp32 positions in a product under autocast to bf16", "language_model", with_positions(phases_by_matmul),
          "position collision", "aten._to_copy", "embed", "return ids[:, None] @ frequencies[None]",
          settings=BF16, islands=("embed",)),
    Fault("fp32 positions in a product under autocast to fp16", "language_model", with_positions(phases_by_matmul),
          "position collision", "aten._to_copy", "embed", "return ids[:, None] @ frequencies[None]",
          islands=("embed",)),
    Fault("positions counted in fp16", "language_model", with_positions(phases_of_half),
          "position collision", "aten.arange", "embed", "ids = torch.arange(OFFSET, OFFSET + length, dtype=torch.float16)",
          fix="code"),
    # What was bad before.
    Fault("a poisoned weight", "classification", in_net(lambda net, mended: mended or net[6].weight[3, 2, 1, 1].fill_(NAN)),
          "poisoned weight", phase="before", settings=BF16, tensor="weight 6.weight", fix="data"),
    Fault("a poisoned weight of one of two networks with the same names", "distillation", in_net(lambda net, mended: mended or net[6].weight[3, 2, 1, 1].fill_(NAN)),
          "poisoned weight", phase="before", settings=BF16, step=2, tensor="weight 6.weight", fix="data"),
    Fault("a poisoned weight of a network of tables", "supervised", in_net(lambda net, mended: mended or net.layers[0].weight[0, 0].fill_(NAN)),
          "poisoned weight", phase="before", settings=BF16, tensor="weight layers.0.weight", fix="data"),
    Fault("a poisoned buffer", "classification", in_net(lambda net, mended: net.set_submodule("14", Offset(0.0 if mended else INF))),
          "poisoned buffer", phase="before", settings=BF16, tensor="buffer 14.mean", fix="data"),
    Fault("poisoned statistics of a teacher", "distillation", in_net(lambda net, mended: mended or net[4].running_var[1].fill_(NAN), number=1),
          "poisoned buffer",
          phase="before", settings=BF16, step=2, tensor="buffer BatchNorm2d.running_var", fix="data"),
    Fault("a sample that is not a number", "classification", in_samples({drawn(2): NAN}),
          "bad input", phase="before", settings=BF16, tensor="batch[0][0]", samples=(drawn(2),), fix="data"),
    Fault("an infinite sample", "segmentation", in_samples({drawn(1, num_samples=48): INF}),
          "bad input", phase="before", tensor="batch[0][0]", samples=(drawn(1, num_samples=48),), fix="data"),
    Fault("a sample of enormous numbers", "classification", in_samples({drawn(3): 1e30}),
          "bad input", "aten._to_copy", "0", OF_STEP["classification"], samples=(drawn(3),), fix="data"),
    Fault("a sample of enormous numbers among generated ones", "gan", in_samples({drawn(3): 1e30}),
          "bad input", "aten._to_copy", "discriminator.0", OF_STEP["gan"], settings=QUIET, fix="data"),
    Fault("a bad sample in the second micro-batch", "gan", in_samples({drawn(1, micro=1, accumulation=2): INF}),
          "bad input",
          phase="before", settings=("amp=bf16", "accumulation=2"), tensor="batch[1][0]", samples=(drawn(1, micro=1, accumulation=2),), fix="data"),
]  # fmt: skip
