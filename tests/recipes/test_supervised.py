"""Tables and series: losses against torch's and float64, weights under accumulation, metrics against scikit-learn, a run's folder alone."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from running import same_but, state, summary
from small import COMMON
from test_recipes import on_two_ranks, runs_of
from torch import Tensor

import train
from amp_core.config.errors import ConfigError
from amp_core.config.options import read_option
from amp_core.config.schema import DataConfig
from amp_core.data import build_data
from amp_core.heads.metrics import metrics_of
from amp_core.step.window import windows
from recipes.supervised import Knobs, Loss, with_classes

run = runs_of("supervised")
pytestmark = pytest.mark.usefixtures("own_folder")

DIGITS = {"path": "sklearn:digits", "leave_out": ["target"], "target": ["even", "above_4", "round"]}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cross_entropy": ({"loss": "cross_entropy"}, {}),
    "weights": ({"loss": "cross_entropy", "class_weights": [1.0, 25.0]}, {}),
    "weights, smoothing": ({"class_weights": "balanced", "label_smoothing": 0.2}, {}),
    "bce": ({"loss": "bce"}, DIGITS),
    "bce, weights": ({"loss": "bce", "class_weights": "balanced"}, DIGITS),
    "mse": ({"loss": "mse"}, {"path": "sklearn:diabetes"}),
    "mae": ({"loss": "mae"}, {"path": "sklearn:diabetes"}),
}
"""Settings of the recipe and of the data."""


def loss_of(knobs: dict[str, Any], keys: dict[str, Any]) -> tuple[Loss, Any]:
    settings: Any = {
        "name": "",
        "length": "",
        "best": "",
        "best_is": "",
        "loss": None,
        "label_smoothing": 0.0,
    }
    found = Knobs(**(settings | {"class_weights": None, "metrics": None} | knobs))
    data = build_data(with_classes(DataConfig(**read_option("data", "table") | keys), found.loss), seed=1)
    return Loss(found, data), data


def sample(data: Any, num: int) -> tuple[Tensor, Tensor]:
    numbers, _, targets = data.train.__getitems__([(n, 0) for n in range(num)])
    return numbers.double(), targets if targets.dtype == torch.int64 else targets.double()


def plain(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """torch's own mean of one batch."""
    weights = None if loss.weights is None else loss.weights.double()
    if loss.name == "cross_entropy":
        return F.cross_entropy(outputs, targets[:, 0], weight=weights, label_smoothing=loss.smoothing)
    if loss.name == "bce":
        return F.binary_cross_entropy_with_logits(outputs, targets.double(), pos_weight=weights)
    return {"mse": F.mse_loss, "mae": F.l1_loss}[loss.name](outputs, targets)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [(8, 8, 8), (7, 1, 11), (1, 23)])
def test_a_windows_gradient_is_that_of_the_one_big_batch(way: str, sizes: tuple[int, ...]) -> None:
    loss, data = loss_of(*WAYS[way])
    inputs, targets = sample(data, sum(sizes))
    weight = torch.randn(
        inputs.shape[1], loss.num_outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    weight /= inputs.shape[1] ** 0.5
    ends = list(itertools.accumulate(sizes, initial=0))
    batches = [(inputs[a:b], targets[a:b]) for a, b in itertools.pairwise(ends)]

    def gradient(micros: Any, mean: Any) -> Tensor:
        w = weight.clone().requires_grad_()
        total = sum(mean(x @ w, of) * share for x, of, share in micros)
        return torch.autograd.grad(total, w)[0]  # type: ignore[arg-type]

    def ours(outputs: Tensor, of: Tensor) -> Tensor:
        return loss.summed(outputs, of, loss.smoothing) / loss.denominator(of)

    count = None if loss.weights is None else lambda batch: loss.denominator(batch[1]).double()
    (window,) = windows(batches, len(batches), count=count)
    expected = gradient([(inputs, targets, 1.0)], lambda *each: plain(loss, *each))
    found = gradient([(*micro.batch, micro.weight) for micro in window], ours)
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < 1e-6 if way.startswith("weights") else error < 1e-13  # weights of classes are fp32
    wrong = gradient([(*batch, 1 / len(sizes)) for batch in batches], ours)
    if len(set(sizes)) > 1 or way.startswith("weights"):  # a mean of means
        assert (wrong - expected).abs().max() > 1e-3 * expected.abs().max()


def test_weights_by_hand_are_those_of_balanced() -> None:
    loss, data = loss_of({"class_weights": "balanced"}, {})
    counts = np.bincount(data.train.labels)
    assert loss.weights is not None and loss.weights.tolist() == pytest.approx((counts.sum() / (2 * counts)).tolist())
    bce, digits = loss_of({"loss": "bce", "class_weights": "balanced"}, DIGITS)
    ones = sample(digits, len(digits.train))[1].double().mean(0)
    assert bce.weights is not None and torch.allclose(bce.weights.double(), (1 - ones) / ones)


OF_CLASSES = ["accuracy", "balanced_accuracy", "f1", "auroc"]


@pytest.mark.parametrize("case", ["binary", "classes", "labels", "ties", "numbers"])
def test_metrics_are_those_of_scikit_learn(case: str) -> None:
    sk = pytest.importorskip("sklearn.metrics")
    random = torch.Generator().manual_seed(3)
    num = {"binary": 2, "classes": 5, "labels": 3, "ties": 2, "numbers": 2}[case]
    outputs = torch.randn(301, num, dtype=torch.float64, generator=random)
    if case == "numbers":
        targets = outputs + torch.randn(301, num, dtype=torch.float64, generator=random)
        expected = {"mae": sk.mean_absolute_error(targets, outputs), "r2": sk.r2_score(targets, outputs)}
        expected["rmse"] = sk.mean_squared_error(targets, outputs) ** 0.5
    elif case == "labels":
        targets = (torch.rand(301, num, generator=random) < torch.tensor([0.1, 0.5, 0.8])).long()
        told = (outputs > 0).long()
        expected = {
            "accuracy": (told == targets).double().mean().item(),
            "f1": sk.f1_score(targets, told, average="macro"),
        }
        expected["auroc"] = sk.roc_auc_score(targets, outputs)
    else:
        targets = torch.randint(0, num, (301,), generator=random)
        outputs = outputs.round() if case == "ties" else outputs
        outputs[targets == 1] += 0.5
        told, mean = outputs.argmax(1), "macro" if num > 2 else "binary"
        scores = outputs.softmax(1) if num > 2 else outputs.softmax(1)[:, 1]
        expected = {"accuracy": sk.accuracy_score(targets, told), "f1": sk.f1_score(targets, told, average=mean)}
        expected["balanced_accuracy"] = sk.balanced_accuracy_score(targets, told)
        expected["auroc"] = sk.roc_auc_score(targets, scores, multi_class="ovr")
    found = metrics_of(list(expected), outputs, targets, is_classes=case != "numbers")
    assert found == pytest.approx(expected, abs=1e-12)


def test_another_name_is_that_of_torchmetrics() -> None:
    if (
        importlib.util.find_spec("torchmetrics") is None
    ):  # to import it before torchvision fails beside a CPU-only torch
        pytest.skip("needs torchmetrics")
    outputs = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 0.5], [0.0, 3.0, 0.1], [0.0, 0.0, 1.0]], dtype=torch.float64)
    targets = torch.tensor([0, 1, 2, 2])
    found = metrics_of(["cohen_kappa", "matthews_corrcoef"], outputs, targets, is_classes=True)
    assert found["cohen_kappa"] == pytest.approx(7 / 11) and 0 < found["matthews_corrcoef"] < 1
    numbers = metrics_of(["mean_squared_error"], outputs, outputs + 2, is_classes=False)
    assert numbers == {"mean_squared_error": pytest.approx(4)}


@pytest.mark.parametrize(
    "knobs, keys, message",
    [
        ({"loss": "mse"}, {}, "recipe.loss=mse: the target holds text"),
        ({"loss": "bce"}, {"path": "sklearn:digits"}, "recipe.loss=bce: target has 10 classes; expected 2"),
        ({"metrics": ["r2"]}, {}, "recipe.metrics: r2 is of numbers, and the target is classes"),
        ({"metrics": ["acuracy"]}, {}, "recipe.metrics: acuracy: Did you mean accuracy?"),
        ({"class_weights": [1.0]}, {}, "recipe.class_weights: 1 numbers; expected 2"),
        ({"class_weights": "balanced"}, {"path": "sklearn:diabetes"}, "recipe.loss=mse has no use for it"),
    ],
)
def test_what_does_not_fit_the_target_is_refused(knobs: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss_of(knobs, keys)


TABLE = "size,colour,price,kind\n" + "".join(
    f"{n * 37 % 101},{'red' if n % 3 else 'blue'},{(n * 37 % 101) * 2 + n % 3},{'big' if n * 37 % 101 > 80 else 'small'}\n"
    for n in range(120)
)
UNBALANCED = ["data.path=x.csv", "data.target=kind", "data.leave_out=[price]", "data.sampler=balanced"]
UNBALANCED += ["recipe.class_weights=balanced", "recipe.metrics=[accuracy,f1,auroc]", "recipe.label_smoothing=0.1"]
SERIES = ["data.path=x.csv", "data.target=price", "data.leave_out=[colour,kind]", "data.window=5", "data.horizon=2"]


@pytest.mark.parametrize(
    "settings", [UNBALANCED, pytest.param(SERIES, marks=pytest.mark.slow)], ids=["unbalanced", "series"]
)
def test_a_run_that_stops_in_an_epoch_resumes_bit_exactly_with_any_workers(settings: list[str]) -> None:
    Path("x.csv").write_text(TABLE)
    whole = run("whole", "steps=40", "schedule.horizon=40", *settings)
    run("parts", "steps=13", "schedule.horizon=40", *settings, "data.num_workers=2")
    parts = run("parts", "steps=40", "schedule.horizon=40", *settings, "data.num_workers=0")
    assert not same_but(state(whole), state(parts)) and summary(whole)["eval"] == summary(parts)["eval"]


def test_two_ranks_and_accumulation_make_the_same_run_with_weights_of_classes() -> None:
    Path("x.csv").write_text(TABLE)
    common = ["steps=4", "amp=fp32", "optimizer.options.eps=1e-2", *UNBALANCED]
    one = run("one", "batch_size=16", *common)
    ranks = on_two_ranks("supervised", "ranks", "batch_size=4", "accumulation=2", *common)
    for key, value in summary(one)["eval"].items():
        assert summary(ranks)["eval"][key] == pytest.approx(value, rel=1e-4), key
    weights = [torch.cat([each.flatten() for each in state(folder)["model"].values()]) for folder in (one, ranks)]
    assert torch.allclose(*weights, rtol=1e-4, atol=1e-5)


def test_a_run_is_evaluated_and_predicts_from_its_folder_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.csv").write_text(TABLE)
    lines = TABLE.splitlines(keepends=True)
    Path("new.csv").write_text("".join([lines[0], *lines[3:9]]))
    names, *rows = "".join(lines[:1] + lines[3:9]).split()
    Path("untold.csv").write_text("\n".join(row.rpartition(",")[0] for row in (names, *rows)))
    run("a", "steps=60", "batch_size=16", *UNBALANCED)
    assert train.main(["task=predict", "run_dir=a", "predict_on=new.csv"]) == 0
    before = Path("a/predictions.jsonl").read_text()
    matrix = json.loads(Path("a/samples/confusion.json").read_text())
    assert [each["class"] for each in matrix] == ["big", "small"]
    assert "<svg" in Path("a/samples/confusion.svg").read_text()
    hits = sum(each["told"][number] for number, each in enumerate(matrix))
    assert hits / sum(each["samples"] for each in matrix) == pytest.approx(summary("a")["eval"]["accuracy"])
    Path("x.csv").unlink()
    for file in ("new.csv", "untold.csv"):
        assert train.main(["task=predict", "run_dir=a", f"predict_on={file}"]) == 0
        assert Path("a/predictions.jsonl").read_text() == before
    assert train.main(["task=export", "run_dir=a", "export.to=safetensors"]) == 0
    told = [json.loads(line) for line in before.splitlines()]
    hits = sum(each["name"] == row.rpartition(",")[2] for each, row in zip(told, rows, strict=True))
    capsys.readouterr()
    assert train.main(["task=evaluate", "run_dir=a", "data.eval_path=new.csv"]) == 0
    assert f"accuracy {hits / 6:.4f}" in capsys.readouterr().out
    assert train.main(["task=evaluate", "run_dir=a"]) == 2
    assert "data.path=x.csv: there is no such file" in capsys.readouterr().err


def test_classifiers_of_images_count_what_they_confuse_and_draw_balanced() -> None:
    argv = ["recipe=classification", *COMMON, "model.options.width=8", "data.sampler=balanced", "steps=3", "run_dir=a"]
    assert train.main([*argv, "ema.decay=0.5", "eval.samples=200"]) == 0
    matrix = json.loads(Path("a/samples/confusion.json").read_text())
    hits, total = (
        sum(each["told"][number] for number, each in enumerate(matrix)),
        sum(each["samples"] for each in matrix),
    )
    assert len(matrix) == 10 and total == 200 and hits / total == pytest.approx(summary("a")["eval"]["ema_accuracy"])
    assert Path("a/samples/confusion.svg").read_text().count("<rect") == 1 + sum(
        n > 0 for each in matrix for n in each["told"]
    )
