"""What every recipe promises. A new one is enrolled by existing: it needs its small settings here, or these tests fail."""

from __future__ import annotations

import math
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from running import lines, same_but, state, summary
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import train
from amp_core.preflight import LAYOUTS
from recipes import RECIPES, find

COMMON = ["device=cpu", "log.progress=false", "save_every=1000", "eval_every=1000", "log_every=1", "batch_size=4"]
IMAGES = ["data=synthetic", "data.num_samples=96", "data.image_size=8", "data.num_classes=4"]
SMALL = {
    "classification": [*IMAGES, "model.options.width=8"],
    "contrastive": [*IMAGES, "model.options.width=8", "recipe.embedding=8", "recipe.num_neighbours=3"],
    "custom_function": [*IMAGES, "model.options.width=16", "model.options.features=8"],
    "distillation": [*IMAGES, "recipe.teacher_options.width=8", "recipe.teacher_steps=1"],
    "face_recognition": [
        *("data=synthetic_identities", "data.num_classes=24", "data.num_samples=96", "data.image_size=16"),
        *("recipe.embedding=16", "recipe.sample_rate=0.5"),
    ],
    "gan": [*IMAGES, "model.options.width=8", "recipe.num_critic_steps=3"],
    "language_model": [
        *("data.num_samples=64", "data.length=32", "recipe.sample_bytes=4"),
        *("model.options.depth=1", "model.options.width=32", "model.options.heads=2"),
    ],
    "model_parallel": [*IMAGES, "model.options.width=8"],
    "segmentation": ["data.num_samples=48", "data.image_size=32", "model.options.width=4", "model.options.depth=2"],
}
"""Settings with which a step takes milliseconds."""

NO_DROPOUT = {
    "classification": ["model.options.dropout=0"],
    "contrastive": ["model.options.dropout=0"],
    "distillation": ["model.options.dropout=0", "recipe.teacher_options.dropout=0"],
    "face_recognition": ["recipe.sample_rate=1.0"],
    "model_parallel": ["model.options.dropout=0"],
    "segmentation": ["model.options.dropout=0"],
}
"""Settings without randomness that belongs to the micro-batch, for recipes that have some."""

FAULT = {
    "distillation": "batch",  # the teacher steps in this window, the student is the first of the networks
    "gan": "batch",  # the discriminator steps, the generator is the first
}
"""Where a fault hits whatever steps in window 2, if that is not the gradient of the first network."""

WINDOW = ["accumulation=2", "clip=norm", "clip.max_norm=0.5", "ema.decay=0.9"]
STATIC = {"fp16": ["amp.dynamic=false", "amp.init_scale=256"]}
RECIPE = pytest.mark.parametrize("recipe", sorted(RECIPES))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def arguments(recipe, *overrides):
    return [f"recipe={recipe}", *COMMON, *SMALL[recipe], *overrides]


def run(recipe, folder, *overrides, code=0):
    assert train.main(arguments(recipe, f"run_dir={folder}", *overrides)) == code
    return folder


def losses(folder):
    return [line["loss"] for line in lines(folder) if line["split"] == "train"]


def weights(folder):
    """All floating-point numbers of the networks, in order."""
    found = []

    def walk(value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found.append(value.double().flatten())
        elif isinstance(value, dict):
            for inner in value.values():
                walk(inner)

    for name, part in state(folder).items():
        if name != "config" and not name.endswith(("optimizer", "schedule")):
            walk(part)
    return torch.cat(found)


def without_statistics():
    """BatchNorm as in evaluation: what it normalises with otherwise is the micro-batch, by definition."""
    _BatchNorm.train = lambda self, mode=True: nn.Module.train(self, False)


@pytest.fixture
def _no_statistics():
    kept = _BatchNorm.__dict__.get("train")
    without_statistics()
    yield
    del _BatchNorm.train
    if kept is not None:
        _BatchNorm.train = kept


def _rank(rank, port, argv):
    """One rank of a run that was started as by torchrun."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    without_statistics()
    sys.exit(train.main(argv))


def on_two_ranks(recipe, folder, *overrides, layout="ddp"):
    """The same run on two gloo processes, forked from a server that has imported torch and run nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    preload = ["torch._dynamo", "torch.distributed.fsdp", "amp_core.preflight"]
    mp.get_context("forkserver").set_forkserver_preload(preload)
    layout = "model_parallel" if recipe == "model_parallel" else layout
    argv = arguments(recipe, f"run_dir={folder}", f"layout={layout}", *overrides)
    context = mp.start_processes(_rank, (port, argv), 2, join=False, start_method="forkserver")
    while not context.join(timeout=60):
        pass
    assert all(process.exitcode == 0 for process in context.processes)
    return folder


@RECIPE
def test_it_says_what_it_needs_to_be_found(recipe):
    module = find(recipe)
    assert (module.__doc__ and f"recipe={recipe}" in module.__doc__) or recipe == "classification"
    assert module.DATA and module.MODELS.names()
    fields = module.Knobs.__dataclass_fields__
    assert {"name", "length", "best", "best_is"} <= fields.keys()


@RECIPE
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_it_runs_and_learns_finite_weights(recipe, mode):
    folder = run(recipe, "a", "steps=6", f"amp={mode}", *WINDOW)
    assert summary(folder)["status"] == "finished"
    assert torch.isfinite(weights(folder)).all()
    assert find(recipe).Knobs(**state(folder)["config"]["recipe"]).best in summary(folder)["eval"]
    assert all(math.isfinite(value) for value in summary(folder)["eval"].values())
    train_lines = [line for line in lines(folder) if line["split"] == "train"]
    assert [line["step"] for line in train_lines] == list(range(1, 7))
    keys = {"loss", "lr", "loss_scale", "skipped", "grad_norm", "samples_per_second"}
    assert all(keys <= line.keys() for line in train_lines)


@RECIPE
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_resume_is_bit_exact(recipe, mode):
    settings = [f"amp={mode}", "schedule.horizon=6", *WINDOW]
    whole = run(recipe, "whole", "steps=6", *settings)
    run(recipe, "parts", "steps=3", *settings)
    parts = run(recipe, "parts", "steps=6", *settings)
    assert not same_but(state(whole), state(parts))
    assert summary(whole)["eval"] == summary(parts)["eval"]


@RECIPE
@pytest.mark.usefixtures("_no_statistics")
def test_accumulation_and_ranks_do_not_change_the_run(recipe):
    settings = ["steps=3", "amp=fp32", "clip=norm", "ema.decay=0.9", *NO_DROPOUT.get(recipe, [])]
    if recipe != "face_recognition":  # which uses SGD; Adam turns the rounding of a gradient near 0 into whole steps
        settings.append("optimizer.options.eps=1e-2")
    one = run(recipe, "one", "batch_size=16", "accumulation=1", *settings)
    accumulated = run(recipe, "accumulated", "accumulation=4", *settings)
    others = [accumulated, on_two_ranks(recipe, "ranks", "accumulation=2", *settings)]
    if "fsdp" in getattr(find(recipe), "LAYOUTS", LAYOUTS):
        others.append(on_two_ranks(recipe, "sharded", "accumulation=2", *settings, layout="fsdp"))
    for other in others:
        # Sums in fp32 in another order, over three steps.
        assert losses(one) == pytest.approx(losses(other), rel=2e-4), other
        difference = (weights(one) - weights(other)).abs().max().item()
        assert difference < 1e-3 * weights(one).abs().max().item(), (other, difference)


@RECIPE
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_a_bad_window_leaves_no_trace(recipe, mode):
    settings = ["steps=4", f"amp={mode}", *STATIC.get(mode, []), *WINDOW]
    clean = run(recipe, "clean", "debug.inject={where: drop, step: 2}", *settings)
    bad = run(recipe, "bad", f"debug.inject={{where: {FAULT.get(recipe, 'gradient')}, step: 2}}", *settings)
    assert not same_but(state(clean), state(bad), "progress.skipped")
    assert summary(bad)["skipped"] == 1


@RECIPE
def test_a_checkpoint_is_evaluated_alone(recipe, capsys):
    folder = run(recipe, "a", "steps=2")
    expected = summary(folder)["eval"]
    before = sorted(p.stat().st_mtime_ns for p in Path().rglob("*"))
    capsys.readouterr()
    run(recipe, "a", "task=evaluate")
    printed = capsys.readouterr().out
    assert all(f"{name} {value:.4f}" in printed for name, value in expected.items())
    assert sorted(p.stat().st_mtime_ns for p in Path().rglob("*")) == before
