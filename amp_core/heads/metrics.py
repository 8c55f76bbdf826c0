"""Metrics of all predictions at once, in float64: the same for any number of ranks and any size of batches.

`accuracy`, `balanced_accuracy`, `f1` and `auroc` are of classes, `mae`, `rmse` and `r2` of numbers. With several
classes or labels `f1` and `auroc` are means over them. Other names are functions of torchmetrics, if it is installed.
"""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_core.config.errors import ConfigError, suggest
from amp_core.vision import import_torchvision

OF_CLASSES = ("accuracy", "balanced_accuracy", "f1", "auroc")
OF_NUMBERS = ("mae", "rmse", "r2")


def check_metrics(names: Sequence[str], is_classes: bool) -> list[str]:
    """Problems of names of metrics, one sentence each."""
    ours, others = (OF_CLASSES, OF_NUMBERS) if is_classes else (OF_NUMBERS, OF_CLASSES)
    problems = []
    for name in names:
        if name in others:
            what = "numbers, and the target is classes" if is_classes else "classes, and the target is numbers"
            problems.append(f"recipe.metrics: {name} is of {what}. Valid: {', '.join(ours)}")
        elif name not in ours and _of_torchmetrics(name) is None:
            problems.append(f"recipe.metrics: {name}: {suggest(name, ours)} Others are functions of torchmetrics")
    return problems


def metrics_of(names: Sequence[str], outputs: Tensor, targets: Tensor, *, is_classes: bool) -> dict[str, float]:
    """The metrics of predictions.

    Args:
        names: as above.
        outputs: [N, K]: numbers, or logits: of K classes, or of K labels where `targets` is [N, K].
        targets: numbers [N, K]; classes int64 [N], or [N, K] of 0 and 1.

    ConfigError: a metric is not defined on these targets.
    """
    if not is_classes:
        return {name: _numeric(name, outputs, targets) for name in names}
    if targets.ndim == 1:
        truth, scores = torch.nn.functional.one_hot(targets, outputs.shape[1]), outputs.softmax(1)
        told = torch.nn.functional.one_hot(outputs.argmax(1), outputs.shape[1])
        if outputs.shape[1] == 2:  # the second class is the one that is looked for
            truth, told, scores = truth[:, 1:], told[:, 1:], scores[:, 1:]
    else:
        truth, told, scores = targets, (outputs > 0).long(), outputs.sigmoid()
    found = {}
    for name in names:
        if name == "accuracy":
            hits = outputs.argmax(1) == targets if targets.ndim == 1 else told == truth
            found[name] = hits.double().mean().item()
        elif name == "balanced_accuracy":
            # The share of the positives that are told so; of a single class or label that of the negatives, too.
            is_single = truth.shape[1] == 1 or targets.ndim > 1
            sides = [(truth, told), (1 - truth, 1 - told)] if is_single else [(truth, told)]
            recalls = torch.stack([(one * other).sum(0).double() / one.sum(0) for one, other in sides], dim=1)
            found[name] = _mean(name, recalls[~recalls.isnan()].tolist())  # NaN: there are none of these
        elif name == "f1":
            hits = (truth * told).sum(0).double()
            sizes = (truth + told).sum(0).double()
            found[name] = _mean(name, (2 * hits / sizes)[sizes > 0].tolist())
        elif name == "auroc":
            areas = [area(one, other) for one, other in zip(truth.T, scores.T, strict=True)]
            found[name] = _mean(name, [each for each in areas if each is not None])
        else:
            function = _of_torchmetrics(name)
            if truth.shape[1] == 1:
                found[name] = float(function(scores[:, 0], truth[:, 0], task="binary"))
            elif targets.ndim == 1:
                found[name] = float(function(outputs, targets, task="multiclass", num_classes=outputs.shape[1]))
            else:
                found[name] = float(function(scores, truth, task="multilabel", num_labels=truth.shape[1]))
    return found


def area(truth: Tensor, scores: Tensor) -> float | None:
    """The area under the ROC curve: the share of pairs in which the positive has the larger score, ties by half
    (Mann and Whitney 1947). None without positives or negatives."""
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    # Mean ranks of equal scores, from 1. Those of P positives among themselves, P (P + 1) / 2, are no pairs.
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[places].double()
    positives = int(truth.sum())
    pairs = positives * (len(truth) - positives)
    above = ranks[truth == 1].sum().item() - positives * (positives + 1) / 2
    return above / pairs if pairs else None


def _mean(name: str, values: Sequence[float]) -> float:
    if not values:
        raise ConfigError(f"recipe.metrics: {name} is not defined: the evaluation data holds one class alone")
    return sum(values) / len(values)


def _numeric(name: str, outputs: Tensor, targets: Tensor) -> float:
    errors = outputs - targets
    if name == "mae":
        return errors.abs().mean().item()
    if name == "rmse":
        return errors.square().mean().sqrt().item()
    if name == "r2":
        spread = (targets - targets.mean(0)).square().sum(0)
        if not (spread > 0).all():
            raise ConfigError("recipe.metrics: r2 is not defined: a target is the same in all of the evaluation data")
        return (1 - errors.square().sum(0) / spread).mean().item()
    return float(_of_torchmetrics(name)(outputs, targets))


def _of_torchmetrics(name: str) -> Any:
    """The function, or None, which `check_metrics` refuses."""
    if importlib.util.find_spec("torchmetrics") is None:
        return None
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()  # torchmetrics would import it in a way that fails beside a CPU-only torch
    functions: Any = importlib.import_module("torchmetrics.functional")
    found = getattr(functions, name, None) if not name.startswith("_") else None
    return found if callable(found) else None


def confusion(counts: Tensor, names: Sequence[str]) -> tuple[bytes, bytes]:
    """(JSON, SVG) of a confusion matrix: int64 [K, K], rows are classes, columns what was told."""
    sizes = counts.sum(1)
    shares = (counts.diagonal().double() / sizes.clamp(min=1)).tolist()
    rows = [
        {"class": name, "samples": int(size), "accuracy": share if size else None, "told": row}
        for name, size, share, row in zip(names, sizes, shares, counts.tolist(), strict=True)
    ]
    cell, left = max(4, min(48, 960 // len(names))), 160
    width = left + cell * len(names)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 80}" height="{width + 20}" font-family="sans-serif" '
        f'font-size="{min(12, cell)}"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{left}" y="14">columns: told; rows: class; right: its accuracy</text>'
    ]
    for at, row in enumerate(rows):
        y, name = left + cell * at, html.escape(str(row["class"])[:20])
        parts.append(f'<text x="{left - 6}" y="{y + cell * 0.65}" text-anchor="end">{name}</text>')
        parts.append(f'<text transform="translate({y + cell * 0.65},{left - 6}) rotate(-90)">{name}</text>')
        if row["samples"]:
            parts.append(f'<text x="{width + 6}" y="{y + cell * 0.65}">{row["accuracy"]:.3f}</text>')
        for column, count in enumerate(row["told"]):
            if count:
                share, x = count / row["samples"], left + cell * column
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" fill="#1f4e9c" fill-opacity="{share:.3f}"/>'
                )
                if cell >= 24:
                    text = f'<text x="{x + cell / 2}" y="{y + cell * 0.65}" text-anchor="middle" '
                    parts.append(f'{text}fill="{"white" if share > 0.5 else "black"}">{count}</text>')
    return json.dumps(rows, indent=1).encode(), "\n".join([*parts, "</svg>\n"]).encode()
