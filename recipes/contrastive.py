"""Contrastive learning over the whole window and all ranks: gradient caching with a loss scale.

The lesson: some losses are not a mean over samples. InfoNCE contrasts every image with all others of the step, so a
loss per micro-batch has fewer negatives, and accumulation does not restore them. Gradient caching does, in the memory
of one micro-batch: embed the whole window without a graph; compute the loss over all embeddings in fp32 and its
gradient with respect to each; then run each micro-batch again with a graph, and start its backward pass from the cached
gradient. That gradient is scaled instead of the loss: it enters the network in 16 bits, and shrinks with the size of
the window. Both forward passes must match: dropout draws the same masks, and BatchNorm's running statistics move only
in the second.

    python train.py recipe=contrastive                      4,000 MNIST digits without labels, 4 x 64 in a step, bf16
    python train.py recipe=contrastive amp=fp16 batch_size=32 accumulation=8       as many negatives, less memory
    python train.py recipe=contrastive layout=ddp layout.nproc_per_node=2 accumulation=2              on two processes
    python train.py recipe=contrastive model=resnet50 data=imagenet data.path=/data/imagenet accumulation=16

Expected: accuracy 0.921 to 0.946 on 1,000 held-out digits over seeds 1 to 3 in bf16 (0.929 and 0.944 in fp32 for the
first two), in 20 s of one core of a server CPU with AVX512-BF16; untrained it is 0.43. Raw pixels, 784 numbers instead
of 64, give 0.95: digits are centred and upright, and these embeddings are trained to ignore that.

Sources: gradient caching: Gao et al., arXiv:2101.06983; the loss and its two views: Chen et al. (SimCLR),
arXiv:2002.05709; evaluation by weighted nearest neighbours: Wu et al., arXiv:1805.01978.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, sync_grads
from amp_core.config.schema import Config, RecipeConfig, expected
from amp_core.data import Dataset, Key
from amp_core.models.images import CLASSIFIERS
from amp_core.run.evaluation import embed
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.tensors import unwrap

DATA = "images"
MODELS = CLASSIFIERS


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    embedding: int
    """Dimension of the embeddings."""
    temperature: float
    """Divides the cosines, which are in [-1, 1]."""
    num_neighbours: int
    """Number of nearest training images that vote on a class in the evaluation."""


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    problems = expected(
        knobs,
        embedding=(knobs.embedding >= 2, "at least 2"),
        num_neighbours=(knobs.num_neighbours >= 1, "at least 1"),
        temperature=(0 < knobs.temperature < math.inf, "a number above 0"),
    )
    if not cfg.data.augment:
        problems.append("data.augment=false: two views of an image would be the same; use data.augment=true")
    if cfg.data.prepare_on == "device":
        problems.append("data.prepare_on=device: the loader makes the two views; use data.prepare_on=loader")
    return problems


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: accuracy, with the prefix `ema_` for EMA weights."""
    knobs = Knobs(**cfg.recipe)
    channels = MODELS.in_channels(cfg.model.name)
    plain = build_data(replace(cfg.data, augment=False), seed=cfg.seed, channels=channels)
    augmented = build_data(cfg.data, seed=cfg.seed, channels=channels)
    data = replace(plain, train=TwoViews(augmented.train), facts=plain.facts | {"num_classes": knobs.embedding})
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    model = env.wrap(build_model(cfg.model.name, MODELS, options=cfg.model.options, **data.facts), amp)
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model)
    clip = Clip.of(cfg.clip)

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        # Steps 1 and 2 of gradient caching: all embeddings without a graph, and the gradient of each.
        embeddings = embed_window(amp, model, window)
        loss, gradients = cached_gradients(env, embeddings, knobs.temperature)
        # Step 3. No micro.weight: the gradients are of the one loss over the windows of all ranks.
        for micro, gradient in zip(window, gradients, strict=True):
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    embedding = model(torch.cat(micro.batch))
                # Scaled as a loss would be: the gradient of a mean over a large window underflows in fp16.
                amp.backward(embedding, gradient)
        report = amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, loss / env.world_size  # every rank has all of it

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        memory, classes = embed(env, amp, net, plain.train, knobs.embedding)
        queries, labels = embed(env, amp, net, env.eval_part(plain.eval), knobs.embedding)
        memory, queries = F.normalize(memory, dim=1), F.normalize(queries, dim=1)
        guesses = [nearest_neighbours(q, memory, classes, knobs.num_neighbours) for q in queries.split(256)]
        return {"accuracy": (torch.cat(guesses) == labels).float().mean().item()}

    def predict(net: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"embedding": F.normalize(net(batch[0]).float(), dim=1)}

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema}
    loop = Loop(env, data, amp=amp, evaluate=evaluate, predict=predict, **parts)
    for window in loop.windows():
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    return loop.eval


class TwoViews:
    """Each image twice, augmented differently: a batch is two tensors [B, C, H, W].

    View v in epoch p is the data set's sample of epoch 2 p + v.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        first, second = (self.dataset.__getitems__([(i, 2 * p + view) for i, p in keys])[0] for view in (0, 1))
        return first, second


@torch.no_grad()
def embed_window(amp: Amp, model: nn.Module, window: list[MicroBatch]) -> Tensor:
    """Embeddings of both views of this rank's window, as the training pass will compute them: fp32 [M, 2 B, D].

    Uses the unwrapped network: nothing to reduce, and no buffers from rank 0.
    """
    net, embeddings = unwrap(model), []
    with rehearsal(net, amp.device):
        for micro in window:
            with amp.autocast():
                embeddings.append(net(torch.cat(micro.batch)).float())
    return torch.stack(embeddings)


@contextlib.contextmanager
def rehearsal(net: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore running statistics and random state after forward passes. No host-device sync."""
    buffers = list(net.buffers())
    kept = [buffer.clone() for buffer in buffers]
    # Put back, the generator draws the same dropout masks in the second pass.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for buffer, value in zip(buffers, kept, strict=True):
        buffer.copy_(value)


def cached_gradients(env: Environment, embeddings: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The loss over the windows of all ranks, and its gradient with respect to this rank's embeddings.

    Args:
        env: to gather from the other ranks.
        embeddings: this rank's, fp32 [M, 2 B, D].
        temperature: temperature of the loss.

    Returns:
        The loss, the same on all ranks, and gradients [M, 2 B, D].
    """
    # A sum of zeros and one rank's rows: all ranks get all rows, in the same order and without rounding.
    everywhere = embeddings.new_zeros(env.world_size, *embeddings.shape)
    everywhere[env.rank] = embeddings
    env.sum_over_ranks(everywhere).requires_grad_()
    views = everywhere.unflatten(2, (2, -1)).movedim(2, 0)
    # Both views of all images, of all micro-batches and ranks: [2, ranks * M * B, D].
    loss = info_nce(views.flatten(1, 3), temperature)
    (gradients,) = torch.autograd.grad(loss, everywhere)
    # Each rank keeps its own rows: the reduction over ranks sums what they bring, to the whole gradient.
    return loss.detach(), gradients[env.rank]


def info_nce(embeddings: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of finding the other view of an image among all other embeddings. Call it outside autocast.

    Args:
        embeddings: fp32 [2, N, D], of any norm; row n of both views is the same image.
        temperature: divides the cosines.
    """
    z = F.normalize(embeddings.flatten(0, 1), dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    # Equation 1 of SimCLR. Without itself, whose cosine of 1 would be the largest in every row.
    logits = (z @ z.T / temperature).masked_fill(itself, -torch.inf)
    # Views are stacked: that of row n is row n + N, modulo 2 N.
    other_view = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    return F.cross_entropy(logits, other_view)


def nearest_neighbours(queries: Tensor, memory: Tensor, classes: Tensor, num: int) -> Tensor:
    """Classes [Q] by votes of the `num` nearest, weighted by exp(cosine / 0.1).

    Args:
        queries: unit vectors [Q, D].
        memory: unit vectors [N, D].
        classes: classes of the memory, [N].
        num: number of votes; all if there are fewer.
    """
    cosines, nearest = (queries @ memory.T).topk(min(num, len(memory)))
    votes = queries.new_zeros(len(queries), int(classes.max()) + 1)
    return votes.scatter_add_(1, classes[nearest], (cosines / 0.1).exp()).argmax(1)
