"""The doctor around a run: when it is called, that it leaves no trace, what it writes, how it heals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from running import lines, same_but, state, summary
from shared import script
from tiers import rows
from torch import nn
from waits import Waits

import recipes.classification
import train

TINY = ["model=cnn_small", "data=synthetic", "data.num_samples=256", "batch_size=8", "log_every=5", "eval_every=1000"]


@pytest.mark.parametrize("command", ["locate", "zeros"])
def test_a_run_folder_that_is_not_there_is_no_setting(command, capsys):
    assert script("scripts/doctor.py").main([command, "runs/none", "--step", "3"]) == 2
    assert "runs/none: there is no such folder" in capsys.readouterr().err


def start(folder, *overrides):
    return train.main([*TINY, f"run_dir={folder}", *overrides])


def reports(folder):
    return [json.loads(path.read_text()) for path in sorted(Path(folder, "doctor").glob("*.json"))]


def scaled(factor, which=1):
    """The network of the recipe, the weight of one of its layers multiplied."""
    build = recipes.classification.build_model

    def planted(*args, **kwargs):
        net = build(*args, **kwargs)
        layer = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)][which]
        with torch.no_grad():
            layer.weight.mul_(factor)
        return net

    return planted


class Fragile(nn.Module):
    """Infinite for one batch and one state of the weights only: those of a training step that it is told."""

    def __init__(self, net, fatal, seen):
        super().__init__()
        self.net, self.fatal, self.seen = net, fatal, seen

    def forward(self, x):
        if self.training:
            self.seen.append((next(self.net.parameters()).sum().item(), x.sum().item()))
            if self.seen[-1] == self.fatal:
                x = x * 1e30 * 1e30
        return self.net(x)


def test_one_skipped_step_calls_it_without_a_scale_and_not_with_one(tmp_path):
    inject = "debug.inject={where: batch, step: 3, value: nan}"
    assert start(tmp_path / "bf16", "amp=bf16", "steps=10", inject) == 0
    (report,) = reports(tmp_path / "bf16")
    assert (report["step"], report["cause"]) == (3, "bad input")
    assert (tmp_path / "bf16" / "doctor" / "step_00000003.txt").read_text().startswith("step 3: bad input")
    inject = "debug.inject={where: gradient, step: 3, value: inf}"
    assert start(tmp_path / "fp16", "amp=fp16", "steps=10", inject) == 0
    assert summary(tmp_path / "fp16")["skipped"] == 1 and not reports(tmp_path / "fp16")


def test_it_is_off_when_it_is_off(tmp_path):
    assert start(tmp_path, "doctor=off", "steps=5", "debug.inject={where: batch, step: 3, value: nan}") == 0
    assert summary(tmp_path)["skipped"] == 1 and not (tmp_path / "doctor").exists()


def test_a_loss_that_is_not_finite_calls_it_though_the_gradients_are(tmp_path, monkeypatch):
    real = F.cross_entropy
    huge = torch.tensor(float("inf"))
    monkeypatch.setattr(recipes.classification.F, "cross_entropy", lambda *a, **k: real(*a, **k) + huge)
    assert start(tmp_path, "amp=bf16", "steps=5", "log_every=5") == 5  # its last loss is not finite either
    assert summary(tmp_path)["skipped"] == 5
    assert [report["step"] for report in reports(tmp_path)] == [1]


def test_calls_are_limited_and_nothing_is_reported_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(
        recipes.classification, "build_model", lambda *a, **k: nn.Sequential(nn.Flatten(), Alternating())
    )
    assert start(tmp_path, "amp=bf16", "steps=40", "doctor.max_reports=2") == 0
    assert [report["step"] for report in reports(tmp_path)] == [2]  # and not once more for the same finding
    log = (tmp_path / "train.log").read_text()
    assert log.count("the doctor reruns") == 2 and log.count("the same as at step 2") == 1


class Alternating(nn.Linear):
    """Every other batch is too much for it."""

    def __init__(self):
        super().__init__(3 * 32 * 32, 10)
        self.count = 0

    def forward(self, x):
        self.count += 1
        return super().forward(x) * (1.0 if self.count % 2 else float("nan"))


@pytest.mark.slow
def test_watching_never_waits_between_log_lines(tmp_path):
    """A longer run reads back as often more with a doctor as without."""
    counts = {}
    for doctor in ("off", "watch"):
        for steps in (10, 20):
            with Waits() as waits:
                run = [f"doctor={doctor}", "amp=fp16", f"steps={steps}", "ema.decay=0.9"]
                assert start(tmp_path / f"{doctor}{steps}", *run) == 0
            counts[doctor, steps] = waits.num
    assert counts["watch", 20] - counts["watch", 10] == counts["off", 20] - counts["off", 10]


@pytest.mark.parametrize(
    "override", ["doctor.after_skips=0", "doctor.max_reports=-1", "doctor.statistics_every=0", "doctor=wach"]
)
def test_nonsense_is_refused(tmp_path, capsys, override):
    assert start(tmp_path / "run", override) == 2
    assert override.split("=")[0] in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_healing_that_cannot_be_is_said(tmp_path, capsys):
    assert start(tmp_path, "doctor=heal", "amp=fp32", "steps=1") == 0
    assert "doctor=heal only reports in amp=fp32" in capsys.readouterr().out


@pytest.mark.parametrize("mode", rows(["bf16", "fp32"], "bf16"))
def test_a_watched_run_ends_with_the_bits_of_one_that_is_not(tmp_path, mode):
    common = ["steps=20", f"amp={mode}", "ema.decay=0.9", "debug.inject={where: activation, step: 8, value: inf}"]
    assert start(tmp_path / "watched", *common) == 0
    assert start(tmp_path / "alone", "doctor=off", *common) == 0 and reports(tmp_path / "watched")
    assert not same_but(state(tmp_path / "watched"), state(tmp_path / "alone"))
    assert [line["loss"] for line in lines(tmp_path / "watched")] == [
        line["loss"] for line in lines(tmp_path / "alone")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [1000, 4])
def test_a_fault_that_is_gone_is_found_from_the_start_or_the_last_checkpoint(tmp_path, monkeypatch, save_every):
    build, fatal = recipes.classification.build_model, []
    seen = []
    monkeypatch.setattr(
        recipes.classification, "build_model", lambda *a, **k: Fragile(build(*a, **k), fatal and fatal[0], seen)
    )
    common = ["steps=20", "amp=bf16", f"save_every={save_every}", "checkpoint.keep=9", "ema.decay=0.9"]
    assert start(tmp_path / "sound", *common) == 0
    fatal.append(seen[6])
    assert start(tmp_path / "watched", *common) == 0
    assert summary(tmp_path / "watched")["skipped"] == 1
    (report,) = reports(tmp_path / "watched")
    assert (report["step"], report["module"], report["op"]) == (7, "", "aten.mul")
    assert report["weights"].endswith(f"trained again from step {4 if save_every == 4 else 0}")
    assert start(tmp_path / "alone", "doctor=off", *common) == 0
    assert not same_but(state(tmp_path / "watched"), state(tmp_path / "alone"))


@pytest.mark.slow
def test_a_healed_run_goes_on_and_its_checkpoint_remembers(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes.classification, "build_model", scaled(2e5))
    common = ["amp=fp16", "doctor.after_skips=4", "ema.decay=0.9"]
    assert start(tmp_path / "sick", *common, "steps=20") == 5  # all skipped
    assert summary(tmp_path / "sick")["skipped"] == 20
    assert start(tmp_path / "healed", *common, "steps=20", "doctor=heal") == 0
    found = summary(tmp_path / "healed")
    assert found["skipped"] == 5 and found["islands"] == ["3"]
    assert state(tmp_path / "healed")["progress"]["islands"] == ["3"]
    assert state(tmp_path / "healed")["scaler"]["scale"] == 65536.0  # it had fallen for nothing
    (report,) = reports(tmp_path / "healed")
    assert report["healed"] and report["islands"] == ["3"]
    # In two halves, the second without a doctor.
    assert start(tmp_path / "halves", *common, "steps=10", "schedule.horizon=20", "doctor=heal") == 0
    assert start(tmp_path / "halves", *common, "steps=20", "schedule.horizon=20", "doctor=off") == 0
    assert not same_but(state(tmp_path / "healed"), state(tmp_path / "halves"))


def test_a_diverged_run_ends_with_its_diagnosis(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipes.classification, "build_model", scaled(2e5))
    assert start(tmp_path, "amp=fp16", "steps=20", "amp.max_consecutive_skips=8", "doctor.after_skips=20") == 5
    assert "aten.convolution" in capsys.readouterr().err
    assert "overflow in a product" in summary(tmp_path)["error"]
    assert start(tmp_path / "off", "amp=fp16", "steps=20", "amp.max_consecutive_skips=8", "doctor=off") == 5


def test_a_scale_at_its_floor_calls_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipes.classification, "build_model", scaled(2e5))
    assert start(tmp_path, "amp=fp16", "steps=10", "amp.init_scale=4", "doctor.after_skips=100") == 5
    assert len(reports(tmp_path)) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "at its floor" in line)
    assert "steps are still skipped" in line and "forward" not in line  # a root may as well have an infinite derivative


@pytest.mark.one_in(2)
@pytest.mark.parametrize("held", [True, False])
def test_training_that_diverges_is_not_healed(held, tmp_path, monkeypatch):
    """A learning rate of 300: islands would be made again and again."""
    if not held:
        monkeypatch.setattr("amp_core.doctor.watch._GROWN", float("inf"))
    code = start(tmp_path, "amp=fp16", "doctor=heal", "optimizer.lr=300", "steps=70")
    (report, *_), islands = reports(tmp_path), summary(tmp_path).get("islands", [])
    if held:
        assert (report["cause"], report["fixes"][0]["override"], islands, code) == ("training diverges", None, [], 5)
        assert "with the weights of step 0, whose norm has grown from" in report["why"]
    else:
        assert report["cause"].startswith("overflow") and islands


def test_training_that_diverges_in_fp32_is_not_said_to_do_so_without_autocast(tmp_path):
    assert start(tmp_path, "amp=fp32", "optimizer.lr=1e12", "steps=20") == 5
    (report, *_) = reports(tmp_path)
    assert report["cause"] == "training diverges" and "But the loss of this window is" in report["why"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "settings",
    [
        ["recipe=gan", "amp=fp16", "optimizer.lr=1", "steps=10"],  # else a loss scale that is too large, at step 1
        ["recipe=gan", "amp=fp32", "optimizer.lr=30", "steps=10"],  # else a gradient norm beyond fp32
        ["recipe=gan", "amp=fp16", "optimizer.lr=30", "steps=10"],  # else an overflow: its losses cancel
    ],
)
def test_training_that_diverges_is_no_question_of_the_loss_scale_or_of_the_norm(settings, tmp_path):
    data = ["data=synthetic", "data.num_samples=256", "batch_size=16"]
    assert train.main([*settings, *data, "log_every=10", f"run_dir={tmp_path}"]) == 5
    report, *_ = reports(tmp_path)
    assert (report["cause"], len(report["fixes"])) == ("training diverges", 1)


class LoudInEvaluation(nn.Module):
    def forward(self, x):
        return x if self.training else x * 1e9


@pytest.mark.parametrize("task", ["train", "evaluate"])
def test_an_overflow_in_evaluation_alone_is_named_with_its_module(task, tmp_path, monkeypatch, capsys):
    build = recipes.classification.build_model
    if task == "evaluate":  # of weights that were trained without it
        assert start(tmp_path, "amp=fp16", "steps=2") == 0
    monkeypatch.setattr(
        recipes.classification, "build_model", lambda *a, **k: build(*a, **k).append(LoudInEvaluation())
    )
    before = summary(tmp_path) if task == "evaluate" else None
    assert start(tmp_path, "amp=fp16", "steps=2", f"task={task}") == 5
    said = capsys.readouterr().err
    assert "diverged: " in said and "Not finite in evaluation alone: overflow in a product, aten.mul" in said
    assert "in 16, tests/runs/test_doctor.py:" in said and "Try: 'amp.keep_fp32=[\"16\"]' (tried)" in said
    assert task == "train" or summary(tmp_path) == before
    # In fp32 both are finite.
    assert start(tmp_path / "fp32", "amp=fp32", "steps=2") == 0


class BadInOneWorker:
    """A data set that worker 1 of two reads wrongly."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, keys):
        images, *rest = self.dataset.__getitems__(keys)
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.id == 1:
            images[2] = float("nan")
        return images, *rest


def test_a_window_that_is_finite_in_the_main_process_points_at_the_data_workers(tmp_path, monkeypatch):
    settings = ["amp=bf16", "log_every=1", "data.num_workers=2"]
    build = recipes.classification.build_data

    def build_faulty(*args, **kwargs):
        data = build(*args, **kwargs)
        return dataclasses.replace(data, train=BadInOneWorker(data.train))

    monkeypatch.setattr(recipes.classification, "build_data", build_faulty)
    assert start(tmp_path, *settings, "steps=4", "doctor.max_reports=1") == 0
    assert [line["step"] for line in lines(tmp_path) if line["loss"] is None] == [2, 4]
    (report,) = reports(tmp_path)
    assert (report["step"], report["cause"]) == (2, "not found")
    assert "compare with data.num_workers=0" in report["why"]


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.usefixtures("own_folder")
def test_a_gate_ends_the_run_at_the_first_bad_step_and_names_the_module(mode, capsys):
    """Without the settings the same run skips the step, reports it, and goes on."""
    faulty = ["debug.inject={where:activation,step:3,rank:0,value:inf}", "steps=8", "log_every=1", f"amp={mode}"]
    gate = ["amp.max_consecutive_skips=1"]
    assert start("open", *faulty) == 0 and summary("open")["step"] == 8
    assert start("gate", *faulty, *gate) == 5 and summary("gate")["step"] == 3
    (report,) = reports("gate")
    said = summary("gate")["error"]
    assert (
        report["step"] == 3
        and "1 steps in a row up to step 3" in said
        and "aten.add in 0, amp_core/run/inject.py" in said
    ), said


PURE = [["amp=bf16_pure", f"amp.update={update}"] for update in ("stochastic", "remainder", "nearest")]
MODES = [["amp=fp32"], ["amp=bf16"], ["amp=fp16", "amp.init_scale=64"], ["amp=o2"], ["amp=o3"], ["amp=fp8"], *PURE]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_nothing_is_found_in_a_healthy_step_of_any_mode(mode, tmp_path, monkeypatch, capsys):
    """Also the fp32 sides of 16-bit weights, which have no memory between steps, and results in float8."""
    monkeypatch.chdir(tmp_path)
    settings = ["data=synthetic", "data.num_samples=256", "model=mlp", "batch_size=16"]
    assert script("scripts/doctor.py").main(["locate", *settings, *mode]) == 0
    assert "nothing found" in capsys.readouterr().out


@pytest.mark.parametrize("mode", [["amp=fp32"], ["amp=o2"], PURE[0], PURE[1]], ids=" ".join)
def test_weights_that_the_optimizer_makes_nan_are_named_in_any_mode(mode, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = ["data=synthetic", "data.num_samples=256", "model=mlp", "batch_size=16", "optimizer.weight_decay=0"]
    settings += ["optimizer.name=Adam", "optimizer.options={eps:0}"]
    assert script("scripts/doctor.py").main(["locate", *settings, *mode]) == 0
    report = capsys.readouterr().out
    assert "poisoned by the optimizer" in report and "weight not finite: it divides by 0" in report
    assert "because eps=0." in report
