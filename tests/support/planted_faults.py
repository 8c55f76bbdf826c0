"""Faults planted into the real recipes, each with what an expert would say of it: the corpus that the doctor is held to.

A fault changes the network, the data or the loss of a recipe, as a mistake in them would. `mended` is the same code with
the change that the doctor asks for.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_core.data.loading import Sampler
from recipes.speech import LogMel

INF, NAN = float("inf"), float("nan")
Patch = Callable[[Any, str, Any], None]
Plant = Callable[[Any, Patch, bool], None]
"""(module of the recipe, setattr that is undone after the test, mended)"""


@dataclass(frozen=True)
class Fault:
    """A fault, and what is to be found."""

    name: str
    recipe: str
    plant: Plant
    cause: str
    op: str = ""
    module: str | None = None
    code: str = ""
    """The line that is to be named, as it stands in its file; not asked for when empty."""
    phase: str = "forward"
    settings: tuple[str, ...] = ("amp=fp16",)
    mended: tuple[str, ...] = ()
    """What mends it, where a setting plants it."""
    step: int = 1
    fix: str = "override"
    """Kind of the first fix."""
    islands: tuple[str, ...] | None = None
    """Exactly these, if not None."""
    override: str = ""
    """The first fix is exactly this one, if not empty."""
    tensor: str = ""
    """What was not finite from the start."""
    samples: tuple[int, ...] | None = None
    """Indices in the data set; not asked for when None."""


# --- where faults are planted -----------------------------------------------------------------------------------------


def in_net(change: Callable[[Any, bool], Any], *, number: int = 0) -> Plant:
    """`change(net, mended)` after the network was built; it may return another one.

    Args:
        number: of the networks that the recipe builds.
    """

    def plant(recipe: Any, patch: Patch, mended: bool) -> None:
        build, built = recipe.build_model, []

        def build_faulty(*args: Any, **kwargs: Any) -> nn.Module:
            net = build(*args, **kwargs)
            built.append(net)
            with torch.no_grad():
                return (change(net, mended) if len(built) == number + 1 else None) or net

        patch(recipe, "build_model", build_faulty)

    return plant


def in_function(name: str, faulty: Any, mended: Any = None) -> Plant:
    """In place of a function, or a table of functions, of the recipe's module."""

    def plant(recipe: Any, patch: Patch, is_mended: bool) -> None:
        if not is_mended:
            patch(recipe, name, faulty)
        elif mended is not None:
            patch(recipe, name, mended)

    return plant


def in_functional(**functions: Callable[..., Any]) -> Plant:
    """In place of functions of `torch.nn.functional`, as this recipe sees it."""

    def plant(recipe: Any, patch: Patch, mended: bool) -> None:
        if not mended:
            patch(recipe, "F", types.SimpleNamespace(**(vars(F) | functions)))

    return plant


def in_samples(bad: dict[int, float]) -> Plant:
    """One number in each of these samples of the data set, by index."""

    def plant(recipe: Any, patch: Patch, mended: bool) -> None:
        build = recipe.build_data

        def build_faulty(*args: Any, **kwargs: Any) -> Any:
            data = build(*args, **kwargs)
            return replace(data, train=Spoilt(data.train, {} if mended else bad))

        patch(recipe, "build_data", build_faulty)

    return plant


class Spoilt:
    """A data set, some of whose samples hold a bad number."""

    def __init__(self, dataset: Any, bad: dict[int, float]) -> None:
        self.dataset, self.bad = dataset, bad

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Any) -> Any:
        batch = self.dataset.__getitems__(keys)
        for row, (index, _) in enumerate(keys):
            if index in self.bad:
                batch[0][row, 0, 1, 1] = self.bad[index]
        return batch


def both(*plants: Plant) -> Plant:
    def plant(recipe: Any, patch: Patch, mended: bool) -> None:
        for each in plants:
            each(recipe, patch, mended)

    return plant


def drawn(row, *, step=1, micro=0, accumulation=1, num_samples=96, rank=0, num_ranks=1) -> int:
    """Index of a sample that is drawn with batches of 4."""
    split = {"batch_size": 4, "accumulation": accumulation, "rank": rank, "world_size": num_ranks}
    batches = iter(Sampler(num_samples, seed=0, start_sample=(step - 1) * accumulation * 4 * num_ranks, **split))
    return [next(batches) for _ in range(accumulation)][micro][row][0]


class Slot(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def in_slot(name: str, faulty: Callable[[Tensor], Tensor], mended: Callable[[Tensor], Tensor] | None = None) -> Plant:
    """In place of a module of this name."""

    def change(net: nn.Module, is_mended: bool) -> None:
        net.set_submodule(name, Slot((mended or nn.Identity()) if is_mended else faulty))

    return in_net(change)


def grown(*names: str, largest: float = 3e4, number: int = 0) -> Plant:
    """Layers whose weights are so large that their products overflow fp16, but not the weights."""

    def change(net: nn.Module, mended: bool) -> None:
        for name in () if mended else names:
            weight = net.get_parameter(f"{name}.weight")
            weight.mul_(largest / weight.abs().max())

    return in_net(change, number=number)


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
          "overflow in a product", "aten.mm", "blocks.0.up", "return x + F.dropout(self.down(F.gelu(self.up(self.norm_mlp(x)))), dropout)",
          islands=("blocks.0.up", "blocks.0.down")),
    Fault("a weight that fp16 does not hold", "classification", in_net(huge_weight),
          "overflow in a cast", "aten._to_copy", "3", OF_STEP["classification"], islands=("3",), samples=()),
    Fault("an attention product", "language_model", with_attention(loud=200.0),
          "overflow in a product", "aten.bmm", "norm", "scores = torch.matmul(q * self.loud, (k * self.loud).transpose(1, 2))",
          settings=QUIET, islands=("norm",)),
    Fault("a product in the forward pass of the whole network", "segmentation", in_net(heard_too_loud),
          "overflow in a product", "aten.bmm", "", "size = torch.bmm(rows, rows.transpose(1, 2))",
          settings=QUIET, islands=("",)),
    Fault("an outer product of features", "contrastive", in_slot("14", outer_product),
          "overflow in a product", "aten.bmm", "14", "return torch.bmm(x[:, :, None], x[:, None]).mean(2) / 1e4",
          settings=QUIET, islands=("14",)),
    Fault("a custom function", "custom_function", in_net(loud_product),
          "overflow in a product", "aten.mm", "1", "return x.mm(weight.t())", islands=("1",)),
    Fault("a layer of the discriminator", "gan", grown("discriminator.2"),
          "overflow in a product", "aten.convolution", "discriminator.2", OF_STEP["gan"], settings=QUIET),
    Fault("a factor in the discriminator", "gan", in_slot("discriminator.3", louder),
          "overflow in a product", "aten.mul", "discriminator.3", "return F.leaky_relu(x * 1e6, 0.2) / 1e6",
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
    Fault("a sum of many numbers", "classification", in_slot("14", summed, summed_in_fp32),
          "overflow in a reduction", "aten.sum", "14", "return x * (x * 10_000).sum(1, keepdim=True) / 1e6",
          islands=("14",)),
    Fault("a norm of many numbers", "classification", in_slot("14", length_of, length_in_fp32),
          "overflow in a reduction", "aten.linalg_vector_norm", "14", "return x * ((x * 40_000).norm(dim=1, keepdim=True) / 1e6)",
          islands=("14",), settings=QUIET),
    Fault("a cast that stands in the code", "classification", in_slot("14", to_half, to_float),
          "overflow in a cast", "aten._to_copy", "14", "return (x.float() * 1e6).to(torch.float16).float() / 1e6",
          fix="code"),
    Fault("a residual of large numbers", "classification", in_slot("14", twice_of_large),
          "overflow in an addition", "aten.add", "14", "return (large + large) / 120_000", islands=("14",), settings=QUIET),
    Fault("an exponential", "classification", in_slot("14", exponentials),
          "overflow in a function", "aten.exp", "14", "return (x * 10).exp() / 1e4", islands=("14",), settings=QUIET),
    Fault("a softplus by hand", "segmentation", in_slot("dropout", own_softplus),
          "overflow in a function", "aten.exp", "dropout", "return torch.log(1 + torch.exp(x * 10)) / 10",
          islands=("dropout",)),
    Fault("attention of torch's own", "classification", in_net(loud_attention),
          "overflow in a product", "aten.addmm", "14", "return x + super().forward(queries, queries, queries)[0][:, 0] / self.loud",
          settings=QUIET, islands=("14",)),
    Fault("a part of a tensor, in place", "face_recognition", in_slot("7", in_place),
          "overflow in a product", "aten.mul_", "7", "x[:, 1:3] *= 1e6", settings=QUIET, islands=("7",)),
    Fault("a function that is computed again in the backward pass", "model_parallel", in_slot("14", recomputed),
          "overflow in a product", "aten.bmm", "14", "return torch.bmm(x[:, :, None], x[:, None]).mean(2) / 1e4",
          settings=QUIET, islands=("14",)),
    Fault("an infinity that does no harm, and one that does", "classification", both(in_slot("8", harmless), grown("9")),
          "overflow in a product", "aten.convolution", "9", OF_STEP["classification"], settings=QUIET, islands=("9",)),
    Fault("16-bit weights", "classification", grown("3"),
          "overflow in a product", "aten.convolution", "3", OF_STEP["classification"],
          settings=("amp=o2",), override="amp=bf16"),
    Fault("a convolution of a loud sample in the second micro-batch", "classification", both(grown("0", largest=10.0), in_samples({drawn(1, micro=1, accumulation=2): 6e4})),
          "overflow in a product", "aten.convolution", "0", OF_STEP["classification"],
          settings=(*QUIET, "accumulation=2"), islands=("0",)),
    # Beyond fp32.
    Fault("a spectrum of numbers beyond fp32", "classification", in_slot("14", spectrum),
          "overflow in fp32", "aten.mul", "14", "return x + torch.fft.rfft(x.float() * 1e38 * 1e6).abs().mean(1, keepdim=True)",
          settings=BF16, fix="code"),
    Fault("numbers beyond fp32", "classification", in_slot("14", beyond_fp32),
          "overflow in fp32", "aten.mul", "14", "return x * x / 1e38", settings=("amp=fp32",), fix="code"),
    Fault("numbers beyond fp32 in bf16", "contrastive", in_slot("14", beyond_fp32),
          "overflow in fp32", "aten.mul", "14", "return x * x / 1e38", settings=BF16, fix="code"),
    # The backward pass, and the scale.
    Fault("a loss that weighs too much", "classification", in_functional(cross_entropy=heavy_cross_entropy),
          "overflow in a cast", "aten._to_copy", None, "return F.cross_entropy(*args, **kwargs) * 1e7",
          phase="backward"),
    Fault("a custom backward", "classification", in_slot("14", steep, nn.Identity()),
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
    Fault("a root at zero", "classification", in_slot("14", deviation, deviation_safely),
          "division or logarithm of zero", "aten.div", "14", "return x + (constant - constant.mean(1, keepdim=True)).square().sum(1, keepdim=True).sqrt()",
          phase="backward", fix="code"),
    Fault("the root in a gradient penalty, of a flat discriminator", "gan", both(in_net(flat_discriminator), in_function("gradient_penalty", slope)),
          "division or logarithm of zero", "aten.div", None, "return (gradient.flatten(1).square().sum(1).sqrt() - 1).square().mean()",
          phase="backward", settings=("amp=fp32",), fix="code"),
    Fault("an arc cosine at 1", "contrastive", in_function("info_nce", angular, angular_safely),
          "division or logarithm of zero", "aten.rsqrt", None, "angles = (z @ z.T).clamp(-1, 1).acos()",
          phase="backward", settings=BF16, fix="code"),
    # Zeros.
    Fault("a direction of nothing", "contrastive", in_slot("14", directions, directions_safely),
          "division or logarithm of zero", "aten.div", "14", "return x / x.norm(dim=1, keepdim=True)",
          settings=BF16, fix="code"),
    Fault("the logarithm of a probability of 0", "distillation", in_function("divergence", divergence_by_hand),
          "underflow in fp32", "aten.log", None, "return (p * (p.log() - log_q)).sum(1).mean()",
          settings=("amp=fp32", "recipe.temperature=0.001"), step=2, fix="code"),
    Fault("a mean over nothing", "segmentation", in_function("LOSSES", {"logits": balanced}, {"logits": balanced_safely}),
          "division or logarithm of zero", "aten.div", None, "return losses + (losses * rare).sum() / rare.sum()",
          settings=BF16, fix="code"),
    Fault("a mean of no features", "classification", in_slot("14", of_the_bright, of_the_bright_if_any),
          "division or logarithm of zero", "aten.mean", "14", "return x + x[x > 1e3].mean()",
          settings=QUIET, fix="code"),
    Fault("a loss of no tokens", "language_model", in_function("token_loss", mean_of_tokens),
          "division or logarithm of zero", "aten.nll_loss_forward", None, "return F.cross_entropy(logits.flatten(0, 1).float(), only_long.flatten())",
          settings=QUIET, fix="code"),
    Fault("a loss of no tokens above a frozen base", "finetuning", in_function("token_loss", mean_of_tokens),
          "division or logarithm of zero", "aten.nll_loss_forward", None, "return F.cross_entropy(logits.flatten(0, 1).float(), only_long.flatten())",
          settings=QUIET, fix="code"),
    Fault("a root of negative numbers", "distillation", in_slot("14", root_of_less, root_of_more),
          "outside the domain of a function", "aten.pow", "14", "return (x.float() - 1) ** 0.5",
          settings=QUIET, step=2, fix="code"),
    Fault("an eps that fp16 does not hold", "classification", in_slot("14", normalised, normalised_safely),
          "eps lost in 16 bits", "aten.div", "14", "return x / (x.abs().sum(1, keepdim=True) + 1e-8)",
          islands=("14",), settings=QUIET),
    Fault("mel filters under autocast", "speech", in_net(features_in_16_bits),
          "eps lost in 16 bits", "aten.log", "features", "return (self.filters @ spectrum.abs().square() + 1e-8).log()",
          islands=("features",)),
    Fault("F.normalize of zeros", "face_recognition", in_slot("7", unit, unit_safely),
          "eps lost in 16 bits", "aten.div", "7", "return x + F.normalize(x * 0, dim=1)",
          settings=("amp=fp16", "amp.init_scale=4"), islands=("7",)),
    Fault("cosine similarity of zeros", "distillation", in_slot("14", cosines, cosines_safely),
          "eps lost in 16 bits", "aten.div", "14", "return x * F.cosine_similarity(x * 0, x, dim=1)[:, None]",
          step=2, islands=("14",), settings=QUIET),
    Fault("a sigmoid in fp16 before the loss", "segmentation", both(in_net(sure_head), in_function("LOSSES", {"logits": bce_of_rounded})),
          "16-bit sigmoid before a logarithm", "aten._to_copy", None, 'return F.binary_cross_entropy(probability.float(), targets, reduction="none")',
          phase="backward", settings=QUIET),
    Fault("a sigmoid in fp16 before a logarithm by hand", "segmentation", both(in_net(sure_head), in_function("LOSSES", {"logits": logarithms_of_rounded})),
          "16-bit sigmoid before a logarithm", "aten.log", None, "return -(targets * torch.log(p) + (1 - targets) * torch.log(1 - p)).float()",
          settings=QUIET),
    # Infinities that the program writes.
    Fault("a row of attention with no key left", "language_model", with_attention(hidden=2),
          "nothing left by a mask", "aten._softmax", "norm", "return x + torch.softmax(scores.masked_fill(future, -INF), dim=-1) @ v",
          settings=BF16, fix="code"),
    Fault("a forbidden class under label smoothing", "classification", in_net(lambda net, mended: net.append(Slot(minus_much if mended else minus_infinity))),
          "infinite constant", "aten.masked_fill", "16", "return x.masked_fill(forbidden, -INF)",
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
    Fault("a poisoned weight", "classification", in_net(poisoned_weight),
          "poisoned weight", phase="before", settings=BF16, tensor="weight 6.weight", fix="data"),
    Fault("a poisoned weight of one of two networks with the same names", "distillation", in_net(poisoned_weight),
          "poisoned weight", phase="before", settings=BF16, step=2, tensor="weight 6.weight", fix="data"),
    Fault("a poisoned buffer", "classification", in_net(poisoned_buffer),
          "poisoned buffer", phase="before", settings=BF16, tensor="buffer 14.mean", fix="data"),
    Fault("poisoned statistics of a teacher", "distillation", in_net(poisoned_statistics, number=1),
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
