"""Tables and series: numbers and categories to classes, labels or numbers, with weights per class.

The lesson has two halves. A mean has a denominator: with class weights that of a batch is the sum of the weights of its
samples, which differs from micro-batch to micro-batch and from rank to rank. A mean of means is then another loss than
that of the one big batch. Here each micro-batch divides by its own denominator, and `windows(count=)` weighs it by that
denominator's share of the window over all ranks; the two cancel.

And 16 bits want numbers around 1. A column of salaries overflows in fp16 (65504), a column of years 1990 to 2024 has 5
values in bf16, and the square of an error of 300 overflows in a loss that is not fp32. So inputs and targets are
standardised in float64 by the loader, with the statistics of the training part, which are a part of the checkpoint;
losses are computed in fp32, and metrics, in the target's own units, in float64 of all predictions at once.

    python train.py recipe=supervised data.path=x.csv data.target=y
    python train.py recipe=supervised                          breast cancer, a table of scikit-learn
    python train.py recipe=supervised data.path=x.csv data.target=label recipe.class_weights=balanced
    python train.py recipe=supervised data.path='statsmodels:datasets/sunspots/sunspots.csv' data.target=SUNACTIVITY \\
        data.leave_out=[YEAR] data.window=24 data.horizon=6

Expected, five seeds, which also choose the held-out rows, with 95 % intervals: area under the ROC curve 0.988 ± 0.008
on breast cancer with recipe.class_weights=balanced in fp32, bf16 and fp16, as a logistic regression on the same rows;
1 to 4 s on one core of a CPU. The sunspots are too few for it: rmse 40.0 ± 1.5, where linear regression has 35.0 (that
run with model.options.dropout=0.2).

Sources: Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740); embeddings of categories: Guo and Berkhahn,
"Entity Embeddings of Categorical Variables" (arXiv:1604.06737).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, sync_grads
from amp_core.config.checks import targets_of
from amp_core.config.errors import ConfigError
from amp_core.config.schema import Config, DataConfig, RecipeConfig, expected
from amp_core.data import Data
from amp_core.data.base import evenly_spread
from amp_core.heads.metrics import check_metrics, metrics_of
from amp_core.models import Family
from amp_core.models.family import check_count, check_probability
from amp_core.models.images import top_class
from amp_core.run.confusion import Confusion
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.tensors import widest

DATA = "table"


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    loss: Literal["mse", "mae", "bce", "cross_entropy"] | None
    """null: what suits the target: cross_entropy of text, bce of several columns of text, mse of numbers."""
    label_smoothing: float
    """cross_entropy: label smoothing, from 0 to below 1."""
    class_weights: Literal["balanced"] | list[float] | None
    """cross_entropy: a weight per class. bce: one per label, of its second class. balanced: all count the same."""
    metrics: list[str] | None
    """Names of metrics, ours or torchmetrics'; null: accuracy, or mae, rmse and r2."""


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    given, of_numbers = knobs.class_weights, knobs.loss in ("mse", "mae")
    problems = expected(knobs, label_smoothing=(0 <= knobs.label_smoothing < 1, "at least 0 and below 1"))
    if isinstance(given, list) and not all(0 < weight < float("inf") for weight in given):
        problems.append(f"recipe.class_weights={given}: expected numbers above 0")
    if knobs.label_smoothing and knobs.loss not in (None, "cross_entropy"):
        problems.append(f"recipe.label_smoothing={knobs.label_smoothing:g}: is for cross_entropy, not {knobs.loss}")
    if of_numbers and (given or cfg.data.sampler):
        key = "recipe.class_weights" if given else "data.sampler"
        problems.append(f"{key}={given or cfg.data.sampler}: recipe.loss={knobs.loss} has no classes; leave it out")
    if knobs.loss == "cross_entropy" and len(targets_of(cfg.data)) > 1:
        problems.append(f"recipe.loss=cross_entropy: takes one target; data.target={cfg.data.target} needs bce")
    if cfg.data.window and (knobs.loss or "mse") not in ("mse", "mae"):
        problems.append(f"recipe.loss={knobs.loss}: windows predict numbers; use mse or mae")
    return problems + (check_metrics(knobs.metrics, not of_numbers) if knobs.metrics and knobs.loss else [])


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: loss and metrics, with the prefix `ema_` for EMA weights."""
    knobs = Knobs(**cfg.recipe)
    data = build_data(with_classes(cfg.data, knobs.loss), seed=cfg.seed)
    loss = Loss(knobs, data)
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    model = env.wrap(build_model(cfg.model.name, MODELS, options=cfg.model.options, **data.facts | loss.facts), amp)
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model)
    clip = Clip.of(cfg.clip)
    if cfg.task == "train":
        loss.check_defined(data)
    loss.to(env.device)

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        total = torch.zeros((), device=env.device)
        for micro in window:
            numbers, codes, targets = micro.batch
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    outputs = model(numbers, codes)
                # fp32, and a mean by the batch's own denominator, which micro.weight cancels.
                mean = loss.summed(outputs.float(), targets, loss.smoothing) / loss.denominator(targets)
                amp.backward(mean, micro.weight)
            total += mean.detach() * micro.weight
        report = amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, total

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        # Ranks fill in their rows of one table, the others' are 0: no metric depends on how batches are cut.
        part = env.eval_part(data.eval)
        loader = env.eval_loader(part, 1024)
        outputs = torch.zeros(len(part), loss.num_outputs, dtype=widest(env.device), device=env.device)
        targets = torch.zeros(len(part), data.facts["num_outputs"], dtype=outputs.dtype, device=env.device)
        confusion = Confusion(env, loss.num_outputs, data.classes)
        for which, (numbers, codes, of) in zip(loader.rows, env.eval_batches(loader), strict=True):
            with amp.autocast():
                outputs[which] = net(numbers, codes).to(outputs.dtype)
            targets[which] = of.to(targets.dtype)
            if loss.name == "cross_entropy":
                confusion.add(of[:, 0], outputs[which])
        outputs, targets = env.sum_over_ranks(outputs).cpu(), loss.typed(env.sum_over_ranks(targets).cpu())
        if loss.name == "cross_entropy":
            confusion.write()
        return loss.metrics(outputs, targets)

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema, "table": data.state}
    loop = Loop(
        env, data, amp=amp, evaluate=evaluate, predict=lambda net, batch: loss.predicted(net(*batch[:2])), **parts
    )
    # Without weights a denominator is a count, the same for each sample.
    for window in loop.windows(count=None if loss.weights is None else lambda batch: loss.denominator(batch[2])):
        report, mean = loop.run(train_step, window)
        loop.log(report, loss=mean)
    return loop.eval


def with_classes(cfg: DataConfig, loss: str | None) -> DataConfig:
    """Targets of losses of classes are categories, also where they are numbers."""
    if loss not in ("bce", "cross_entropy"):
        return cfg
    return replace(cfg, categorical=[*(cfg.categorical or ()), *targets_of(cfg)])


class Loss:
    """A loss by name, as a sum over a batch and its denominator, and what outputs mean in the target's own units.

    Attributes:
        weights: of classes or labels, float32; None: all are 1.
        num_outputs: of the network; `facts` is what it is built from besides those of the data.
    """

    def __init__(self, knobs: Knobs, data: Data) -> None:
        self.schema, of_one = data.state, data.classes
        self.name = knobs.loss or (("cross_entropy" if of_one else "bce") if self.schema.classes else "mse")
        self.is_classes, self.smoothing = self.name in ("bce", "cross_entropy"), knobs.label_smoothing
        self.num_outputs = len(of_one) if self.name == "cross_entropy" else data.facts["num_outputs"]
        self.facts: dict[str, Any] = {"num_outputs": self.num_outputs}
        if self.is_classes is not bool(self.schema.classes):
            raise ConfigError(f"recipe.loss={self.name}: the target holds text; use cross_entropy, or bce")
        if many := [name for name, each in self.schema.classes.items() if len(each) != 2 and self.name == "bce"]:
            what = f"{many[0]} has {len(self.schema.classes[many[0]])} classes"
            raise ConfigError(f"recipe.loss=bce: {what}; expected 2, or use cross_entropy")
        self.names = knobs.metrics or (["accuracy"] if self.is_classes else ["mae", "rmse", "r2"])
        if problems := check_metrics(self.names, self.is_classes):
            raise ConfigError(problems)
        for key, is_given in {"class_weights": knobs.class_weights, "label_smoothing": knobs.label_smoothing}.items():
            if is_given and not (self.is_classes if key == "class_weights" else self.name == "cross_entropy"):
                raise ConfigError(f"recipe.{key}={is_given}: recipe.loss={self.name} has no use for it; leave it out")
        self.weights = self._weights_of(knobs.class_weights, data)

    def check_defined(self, data: Data) -> None:
        """Raises ConfigError: a metric is not defined on the evaluation data. Better now than after an epoch."""
        targets = evenly_spread(data.eval, len(data.eval))[2]
        targets = targets if self.is_classes else targets.double()
        self.metrics(torch.zeros(len(targets), self.num_outputs, dtype=torch.float64), targets)

    def _weights_of(self, given: str | Sequence[float] | None, data: Data) -> Tensor | None:
        if given is None:
            return None
        if given == "balanced":
            targets = evenly_spread(data.train, len(data.train))[2]
            if self.name == "bce":
                # The two classes of a label get the same total weight.
                ones = targets.double().sum(0)
                return ((len(targets) - ones) / ones).float()
            # As in scikit-learn: the weights of all rows have the mean 1.
            counts = torch.bincount(targets[:, 0], minlength=self.num_outputs)
            return (len(targets) / (self.num_outputs * counts.double())).float()
        if len(given) != self.num_outputs:
            raise ConfigError(f"recipe.class_weights: {len(given)} numbers; expected {self.num_outputs}")
        return torch.tensor(given, dtype=torch.float32)

    def to(self, device: torch.device) -> None:
        """Where batches are."""
        self.weights = None if self.weights is None else self.weights.to(device)

    def typed(self, targets: Tensor) -> Tensor:
        """Targets that were summed as floats, as the loader gives them."""
        return targets.long() if self.is_classes else targets

    def summed(self, outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """The sum over a batch, of outputs [B, K] and targets [B, T] as the loader gives them."""
        weights = None if self.weights is None else self.weights.to(outputs)
        if self.name == "cross_entropy":
            of = targets[:, 0]
            return F.cross_entropy(outputs, of, weight=weights, label_smoothing=smoothing, reduction="sum")
        if self.name == "bce":
            of = targets.to(outputs.dtype)
            return F.binary_cross_entropy_with_logits(outputs, of, pos_weight=weights, reduction="sum")
        return {"mse": F.mse_loss, "mae": F.l1_loss}[self.name](outputs, targets, reduction="sum")

    def denominator(self, targets: Tensor) -> Tensor:
        """By what the sum is divided, as torch does: weights of the classes that are there, or a count of targets."""
        if self.weights is None or self.name != "cross_entropy":
            return torch.tensor(float(targets.numel()), device=targets.device)
        return self.weights.to(targets.device)[targets[:, 0]].sum()

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Of all predictions, float64 on the CPU."""
        # Of all predictions at once: r2, an area under a curve or a weighted mean is no mean over batches.
        loss = (self.summed(outputs, targets) / self.denominator(targets)).item()
        if self.is_classes:
            targets = targets[:, 0] if self.name == "cross_entropy" else targets
        else:
            outputs, targets = (self._own_units(each) for each in (outputs, targets))
        return {"loss": loss, **metrics_of(self.names, outputs, targets, is_classes=self.is_classes)}

    def _own_units(self, values: Tensor) -> Tensor:
        mean, deviation = map(torch.from_numpy, self.schema.standardised("targets"))
        shaped = values.double().cpu().view(len(values), -1, len(mean))
        # Back from standardised numbers, in float64, as the loader standardised them.
        return (shaped * deviation + mean).view_as(values)

    def predicted(self, outputs: Tensor) -> dict[str, Tensor]:
        """For task=predict: the class, probabilities of labels, or numbers; of a window each row by its number."""
        if self.name == "cross_entropy":
            return top_class(outputs)
        names = list(self.schema.targets)
        values = outputs.float().sigmoid() if self.name == "bce" else self._own_units(outputs)
        rows = values.shape[1] // len(names)
        keys = names if rows == 1 else [f"{name}_{row + 1}" for row in range(rows) for name in names]
        return dict(zip(keys, values.T, strict=True))


def table_mlp(
    *, num_numbers: int, cardinalities: Sequence[int], num_outputs: int, width: int = 64, depth: int = 2,
    dropout: float = 0.0,
) -> nn.Module:  # fmt: skip
    """Fully connected layers on the numbers and an embedding of each category.

    Args:
        width: units of each hidden layer. Multiples of 8 suit Tensor Cores.
        depth: number of hidden layers; 0 is a linear model.
        dropout: probability, after each hidden layer.
    """
    check_count("width", width)
    check_count("depth", depth + 1)
    check_probability("dropout", dropout)
    return Mlp(num_numbers, cardinalities, num_outputs, width, depth, dropout)


class Mlp(nn.Module):
    """float32 [B, num_numbers] and int64 [B, K] to [B, num_outputs]. Code 0, never seen in training, is a 0 vector."""

    def __init__(
        self, num_numbers: int, cardinalities: Sequence[int], num_outputs: int, width: int, depth: int, dropout: float
    ) -> None:
        super().__init__()
        sizes = [min(32, (num + 1) // 2) for num in cardinalities]
        self.embeddings = nn.ModuleList(
            nn.Embedding(num, size, padding_idx=0) for num, size in zip(cardinalities, sizes, strict=True)
        )
        layers: list[nn.Module] = []
        widths = [num_numbers + sum(sizes), *[width] * depth]
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_outputs))

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        found = [embedding(codes[:, at]) for at, embedding in enumerate(self.embeddings)]
        return self.layers(torch.cat([numbers, *found], dim=1))


MODELS = Family(
    what="a network for tables",
    builders={"table_mlp": table_mlp},
    example={"num_numbers": 4, "cardinalities": (3,), "num_outputs": 2},
)
"""Numbers [B, N] and codes [B, K] to [B, num_outputs]."""
