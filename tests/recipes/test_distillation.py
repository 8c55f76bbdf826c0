"""A teacher in 16 bits and a student under autocast: what a frozen network costs, and runs of two phases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import lines, same_but, state, summary
from test_recipes import on_two_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import train
from amp_core import Amp
from amp_core.models import build_model
from amp_core.models.images import CLASSIFIERS
from amp_core.tensors import share_buffers
from recipes.distillation import divergence, frozen

pytestmark = pytest.mark.usefixtures("own_folder")

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
half_types = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
SHAPE = (1, 28, 28)


def network(name: str = "cnn", **options: Any) -> nn.Module:
    return build_model(name, CLASSIFIERS, options=options, num_classes=10, image_shape=SHAPE)


def num_bytes(net: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in net.parameters())


def test_the_square_of_the_temperature_keeps_the_size_of_the_gradient() -> None:
    answers, logits = torch.randn(64, 10), torch.randn(64, 10, requires_grad=True)
    norms = []
    for temperature in (4.0, 16.0):
        (grad,) = torch.autograd.grad(divergence(logits, answers, temperature), logits)
        norms.append(grad.norm().item())
    assert norms[0] == pytest.approx(norms[1], rel=0.1)  # without the factor: 16 times smaller


class CountCasts(TorchDispatchMode):
    """Counts tensors that are cast to 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            self.count += (kwargs or {}).get("dtype") in (FP16, BF16)
        return function(*args, **(kwargs or {}))


@half_types
def test_a_frozen_teacher_has_half_of_the_bytes_and_answers_as_before(dtype: torch.dtype) -> None:
    net = network()
    low = frozen(net, dtype)
    assert 0.5 <= num_bytes(low) / num_bytes(net) < 0.51
    assert not low.training and not any(p.requires_grad for p in low.parameters()) and net.training
    images = torch.randn(64, *SHAPE)
    right, answers = net.eval()(images).detach(), low(images.to(dtype))
    assert answers.dtype is dtype and not answers.requires_grad
    assert (answers.float() - right).norm() / right.norm() < (0.001 if dtype is FP16 else 0.008)
    assert num_bytes(frozen(net, FP32)) == num_bytes(net)
    assert torch.equal(frozen(net, FP32)(images), right)


@half_types
def test_nothing_of_it_is_cast_at_a_call_where_autocast_casts_every_layer_of_an_fp32_teacher(dtype: Any) -> None:
    net, images, counts = network(dropout=0.0), torch.randn(4, *SHAPE).to(dtype), []
    for teacher in (frozen(net, FP32), frozen(net, dtype)):
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype), CountCasts() as casts:
            teacher(images)
            teacher(images)
        counts.append(casts.count)
    assert counts == [12, 0]  # four kernels, a matrix and its bias; frozen weights are not cached


@half_types
def test_an_fp32_teacher_in_the_graph_gets_gradients_and_a_frozen_one_none(dtype: Any) -> None:
    student, teacher, images = network(width=4), network(width=8), torch.randn(4, *SHAPE)
    amp = Amp.named("fp16" if dtype is FP16 else "bf16")

    def learn_from(net: nn.Module, images_for_it: Tensor) -> None:
        with amp.autocast():
            loss = divergence(student(images), net(images_for_it), 4.0)
        amp.backward(loss)

    learn_from(teacher, images)
    assert all(p.grad is not None for p in teacher.parameters())
    low = frozen(teacher, dtype)
    before = copy.deepcopy(low.state_dict())
    learn_from(low, images.to(dtype))
    assert all(p.grad is None for p in low.parameters())
    assert all(torch.equal(value, before[name]) for name, value in low.state_dict().items())


def test_a_variance_above_65504_survives_in_fp32_statistics_alone() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    nn.init.constant_(net[1].running_var, 1e6)  # type: ignore[arg-type]
    x = 1000 * torch.randn(2, 1, 8, 8).half()
    assert not copy.deepcopy(net).eval().half()(x).any()  # divided by infinity
    assert frozen(net, FP16)(x).any() and frozen(net, FP16)(x).isfinite().all()


def statistics_of(rank: int) -> float:
    net = nn.BatchNorm1d(1)
    net(torch.full((2, 1), 10.0 * (rank + 1)))  # running mean 1 and 2
    share_buffers(net)
    return net.running_mean.item()  # type: ignore[union-attr, operator]


def test_all_ranks_freeze_the_teacher_of_rank_0(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(statistics_of) == [1.0, 1.0]


COMMON = ["device=cpu", "log.progress=false", "save_every=1000", "eval_every=1000", "log_every=1", "batch_size=8"]
COMMON += ["data=synthetic", "data.num_samples=96", "data.image_size=8", "data.num_classes=4"]
SMALL = ["recipe=distillation", *COMMON, "recipe.teacher_steps=4", "recipe.teacher_options.width=8"]
EVERYTHING = ["accumulation=2", "clip=norm", "clip.max_norm=0.5", "ema.decay=0.9"]
KEEP = "keep its last learning rate"


def run(folder: str, *overrides: str, code: int = 0) -> str:
    assert train.main([*SMALL, f"run_dir={folder}", *overrides]) == code
    return folder


def test_the_teacher_is_saved_in_fp32_and_stands_still_while_the_student_learns() -> None:
    first = state(run("a", "steps=4", "amp=bf16", "schedule.horizon=8", *EVERYTHING))
    last = state(run("a", "steps=8", "amp=bf16", "schedule.horizon=8", *EVERYTHING))
    for part in ("teacher", "teacher_optimizer", "teacher_schedule"):
        assert not same_but({part: first[part]}, {part: last[part]})
    assert {value.dtype for value in last["teacher"].values()} == {FP32, torch.int64}
    assert same_but({"model": first["model"]}, {"model": last["model"]})
    fresh = state(run("fresh", "steps=1", "amp=bf16", *EVERYTHING))  # the student has not begun
    assert not same_but({"model": first["model"]}, {"model": fresh["model"]})


def test_each_phase_logs_its_own_numbers_and_has_a_schedule_of_its_own() -> None:
    settings = ["steps=12", "schedule=warmup_linear", "schedule.options.warmup=0", "optimizer.lr=0.008"]
    found = [line for line in lines(run("a", *settings)) if line["split"] == "train"]
    assert [line["lr_teacher"] for line in found[:4]] == pytest.approx([0.008, 0.006, 0.004, 0.002])
    assert [line["lr"] for line in found[4:]] == pytest.approx([0.008 - 0.001 * n for n in range(8)])
    assert all("grad_norm_teacher" in line and "soft" not in line for line in found[:4])
    assert all("grad_norm_teacher" not in line and {"soft", "hard"} <= line.keys() for line in found[4:])
    weighted = [0.9 * line["soft"] + 0.1 * line["hard"] for line in found[4:]]
    assert [line["loss"] for line in found[4:]] == pytest.approx(weighted, rel=1e-5)


def test_a_resume_warns_of_the_end_of_the_schedule_only_when_the_run_became_longer(capsys: Any) -> None:
    run("a", "steps=8", "max_minutes=0.000001", code=75)
    run("a", "steps=8")
    assert KEEP not in capsys.readouterr().out
    run("a", "steps=9")
    assert KEEP in capsys.readouterr().out


def test_a_run_that_ends_before_the_student_begins_says_so(capsys: Any) -> None:
    run("a", "steps=4", "schedule.horizon=8")
    assert "this run ends before the student begins" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_stop_at_the_switch_and_go_on_bit_exactly() -> None:
    """Their running statistics differ; a teacher frozen by each rank alone would, after a resume, be another one."""
    settings = ["schedule.horizon=6", "recipe.teacher_steps=4", *EVERYTHING]

    def on_ranks(folder: str, steps: int) -> Any:
        return state(on_two_ranks("distillation", folder, f"steps={steps}", *settings, statistics=True))

    whole = on_ranks("whole", 6)
    on_ranks("parts", 4)
    assert not same_but(whole, on_ranks("parts", 6))
    assert summary("whole")["eval"] == summary("parts")["eval"]


def classify(folder: str, *overrides: str) -> str:
    assert train.main([*COMMON, f"run_dir={folder}", "model.options.width=8", "steps=20", *overrides]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("averaged", [[], ["ema.decay=0.9"]], ids=["weights", "averaged weights"])
def test_the_network_of_another_run_teaches_as_it_was_saved(averaged: list[str]) -> None:
    classify("other", "amp=fp32", "optimizer.lr=0.01", *averaged)
    run("a", "recipe.teacher=other", "steps=3", "amp=fp32")
    saved, name = state("a"), "ema" if averaged else "model"
    assert not same_but({"net": saved["teacher"]}, {"net": state("other")[name]})
    assert "teacher_optimizer" not in saved
    accuracy = summary("other")["eval"]["ema_accuracy" if averaged else "accuracy"]
    assert summary("a")["eval"]["teacher_accuracy"] == accuracy
    assert {"soft", "hard"} <= lines("a")[0].keys()  # the student begins at once
    settings = ["recipe.teacher=other", "amp=fp32", "schedule.horizon=3"]
    run("b", "steps=2", *settings)
    assert not same_but(state("a"), state(run("b", "steps=3", *settings)))


def test_a_teacher_that_cannot_teach_is_refused_before_anything_is_written(capsys: Any) -> None:
    classify("other", "data.num_classes=5")
    torch.save({"weights": torch.zeros(3)}, "foreign.pt")
    Path("empty").mkdir()
    refused = {
        "recipe.teacher=nowhere: there is no such file or folder": ("nowhere", 2),
        "recipe.teacher=other: was trained on other images or classes": ("other", 2),
        "foreign.pt: refused: it is not a checkpoint of this project": ("foreign.pt", 3),
        "recipe.teacher=empty: holds neither a run nor a checkpoint": ("empty", 3),
    }
    capsys.readouterr()
    for message, (path, code) in refused.items():
        run("a", f"recipe.teacher={path}", code=code)
        assert message in capsys.readouterr().err and (code == 3 or not Path("a").exists())
