"""Whole runs: resume, faults, signals, bad files. Real processes wherever a process may die."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from chats import chat_settings
from running import Forked, checkpoints, descendants, differing, lines, same_but, state, summary, timeless, wait_until
from test_recipes import arguments, on_two_ranks
from test_recipes import run as run_recipe

import train
from amp_core.models import build_model
from amp_core.models.images import CLASSIFIERS
from amp_core.run import folder as run_folder
from amp_core.run.evaluation import Evaluation
from amp_core.run.lines import write_json
from amp_core.run.stop import Stop

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["data=synthetic", "data.num_samples=96", "data.image_size=8", "data.num_classes=4", "model.options.width=8"]
SMALL += ["device=cpu", "log=default", "log.progress=false", "batch_size=8", "save_every=1000", "eval_every=1000"]
EVERYTHING = ["accumulation=4", "clip=norm", "clip.max_norm=0.5", "ema.decay=0.9", "model.options.dropout=0.2"]


pytestmark = pytest.mark.usefixtures("own_folder")


def run(*overrides, code=0):
    """A run in this process. Returns its folder."""
    arguments = [*SMALL, *overrides]
    assert train.main(arguments) == code
    return Path(next((a.split("=", 1)[1] for a in arguments if a.startswith("run_dir=")), "."))


def command(*overrides):
    return [sys.executable, str(ROOT / "train.py"), *SMALL, *overrides]


def start(*overrides):
    environ, pipe = os.environ | {"OMP_NUM_THREADS": "1"}, subprocess.PIPE
    return subprocess.Popen(command(*overrides), stdout=pipe, stderr=pipe, text=True, env=environ)


def fork(*overrides):
    """The same without the seconds of imports."""
    return Forked(train.main, [*SMALL, *overrides])


def finish(process, code=0, timeout=100):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, (process.returncode, out, err)
    return out + err


@pytest.mark.parametrize("mode", ["bf16", "fp16_capped"])
def test_a_run_leaves_the_promised_folder(mode):
    folder = run("run_dir=a", f"amp={mode}", "steps=6", "log_every=2", "save_every=2", "eval_every=3", *EVERYTHING)
    promised = {".hydra", "environment.json", "train.log", "metrics.jsonl", "summary.json"}
    assert {p.name for p in folder.iterdir()} >= promised
    train_lines = [line for line in lines(folder) if line["split"] == "train"]
    assert [line["step"] for line in train_lines] == [2, 4, 6]
    keys = {"step", "split", "loss", "lr", "loss_scale", "skipped", "grad_norm", "samples_per_second", "data_wait"}
    assert keys <= train_lines[0].keys()
    assert all(0 <= line["data_wait"] <= 1 for line in train_lines) and 0 <= summary(folder)["data_wait"] <= 1
    memory = summary(folder)["memory"]
    assert all(memory[what] > 0 for what in ("weights", "gradients", "moments", "averages", "activations"))
    assert memory["copies"] > 0 or mode != "bf16"
    assert [line["step"] for line in lines(folder) if line["split"] == "eval"] == [3, 6]
    assert {"loss", "accuracy", "ema_loss", "ema_accuracy"} <= lines(folder)[-1].keys()
    assert summary(folder)["status"] == "finished" and summary(folder)["step"] == 6
    assert all(line["loss_scale"] == 1.0 for line in train_lines) or mode.startswith("fp16")
    saved = state(folder)
    assert set(saved) == {"model", "optimizer", "schedule", "ema", "scaler", "progress", "config", "format"}
    assert bool(saved["scaler"]) == mode.startswith("fp16")
    assert [p.name for p in checkpoints(folder)][-2:] == ["step_00000004", "step_00000006"]


def test_a_finished_run_says_so_and_a_longer_one_goes_on(capsys):
    folder = run("run_dir=a", "steps=4")
    before, expected = state(folder), summary(folder)["eval"]
    for steps in (4, 3):
        run("run_dir=a", f"steps={steps}")
        assert "already finished" in capsys.readouterr().out or steps == 3
        assert not differing(before, state(folder))
    run("run_dir=a", "steps=4", "resume=never", code=2)
    assert "a holds a run already" in capsys.readouterr().err
    for steps in (3, 4):
        (folder / "summary.json").unlink()  # killed between the last checkpoint and its summary
        run("run_dir=a", f"steps={steps}")
        assert ("nothing to train: 4 steps are done, 3 were" in capsys.readouterr().out) == (steps == 3)
    assert summary(folder)["status"] == "finished" and summary(folder)["eval"] == expected
    run("run_dir=a", "steps=6")
    assert state(folder)["progress"]["step"] == 6
    assert [line["step"] for line in lines(folder) if line["split"] == "eval"] == [4, 6]


def test_dry_run_tells_the_plan_in_steps_and_creates_nothing(capsys, tmp_path):
    for length, plan in {"steps=7": "7 steps of", "samples=200": "13 steps of", "epochs=2.5": "15 steps of"}.items():
        run("dry_run=true", length, "accumulation=2")
        assert f"{plan} 16 samples" in capsys.readouterr().out and not list(tmp_path.iterdir())


def layers(capsys, recipe, *overrides):
    """The rows of a dry run's table, by layer, as its columns are."""
    assert train.main(arguments(recipe, "dry_run=true", *overrides)) == 0
    head, *rows = capsys.readouterr().out.partition("layers, ")[2].splitlines()[1:]
    starts = [head.index(name) for name in ("layer", "type", "weight", "stored", "output", "island", "bytes")]
    cells = [[row[i:j].strip() for i, j in zip(starts, [*starts[1:], None], strict=True)] for row in rows]
    return {name: tuple(rest) for name, *rest in cells}


def test_dry_run_shows_the_layers_as_a_real_step_computes_them(capsys, tmp_path):
    table = layers(capsys, "language_model", "amp=bf16", 'amp.keep_fp32=["*.norm_mlp"]')
    assert table["blocks.0.qkv"] == ("Linear", "96x32", "fp32", "bf16", "", f"{4 * 96 * 32:,}")
    assert table["blocks.0.norm_mlp"] == ("Fp32LayerNorm", "32", "fp32", "fp32", "yes", "128")
    # The names alone do not tell: CUDA's autocast sends this layer to fp32, a CPU's does not.
    for policy, expected in (("device", "bf16"), ("cuda", "fp32")):
        rows = layers(capsys, "gan", "amp=bf16", f"amp.op_policy={policy}").values()
        assert {output for kind, _, _, output, *_ in rows if kind == "GroupNorm"} == {expected}
    stored = {
        kind: (weight, output) for kind, _, weight, output, *_ in layers(capsys, "classification", "amp=o2").values()
    }
    assert stored["Conv2d"] == ("fp16", "fp16") and stored["BatchNorm2d"][0] == "fp32"
    assert not list(tmp_path.iterdir())


def test_a_dynamic_scale_backs_off_once_and_the_rest_is_the_run_that_never_saw_it():
    common = ["steps=5", "accumulation=2", "ema.decay=0.9", "amp=fp16", "optimizer=sgd"]
    bad = state(run("run_dir=a", "amp.init_scale=512", "debug.inject={where: batch, step: 1}", *common))
    clean = state(run("run_dir=b", "amp.init_scale=256", "debug.inject={where: drop, step: 1}", *common))
    assert bad["scaler"]["scale"] == clean["scaler"]["scale"] == 256.0
    assert not same_but(bad, clean, "progress.skipped")


def test_a_run_that_only_skips_ends_as_diverged_with_the_last_good_weights(capsys):
    settings = ["steps=200", "amp=fp32", "optimizer=sgd", "optimizer.lr=1e30", "amp.max_consecutive_skips=5"]
    folder = run("run_dir=a", *settings, code=5)
    assert summary(folder)["status"] == "diverged"
    assert "amp.max_consecutive_skips=5" in capsys.readouterr().err


def test_a_checkpoint_loads_in_plain_pytorch():
    saved = state(run("run_dir=a", "steps=3", "ema.decay=0.9"))
    shape = (saved["model"]["0.weight"].shape[1], 8, 8)
    net = build_model("cnn", CLASSIFIERS, num_classes=4, image_shape=shape, options={"width": 8})
    assert all("All keys matched" in str(net.load_state_dict(saved[part])) for part in ("model", "ema"))


def test_changed_settings_are_refused_with_the_list_unless_allowed_and_touch_nothing(capsys):
    folder = run("run_dir=a", "steps=3")
    run("run_dir=b", "steps=2")

    def everything():
        return {p: p.read_bytes() for p in sorted(Path().rglob("*")) if p.is_file() and p.name != ".lock"}

    before = everything()
    run("run_dir=a", "steps=6", "optimizer.lr=0.5", "seed=9", code=2)
    err = capsys.readouterr().err
    assert "optimizer.lr: 0.002 -> 0.5" in err and "seed: 0 -> 9" in err and "allow_changes" in err
    run("run_dir=a", "steps=6", "batch_size=16", code=2)
    assert "16 samples per step, the checkpoint has 8" in capsys.readouterr().err
    run("resume=a", "steps=6", "optimizer.lr=0.5", code=2)
    assert everything() == before and summary(folder)["status"] == "finished"
    assert not list(Path().glob("outputs/classification/*"))
    run("run_dir=a", "steps=6", "optimizer.lr=0.5", "seed=9", "allow_changes=true")
    assert summary(folder)["step"] == 6


def test_epochs_count_samples_when_the_samples_per_step_change():
    run("run_dir=a", "epochs=1", "schedule.horizon=50")  # 96 samples: 12 steps of 8
    folder = run("run_dir=a", "epochs=2", "schedule.horizon=50", "batch_size=16", "allow_changes=true")
    assert state(folder)["progress"]["samples"] == 192
    assert state(folder)["progress"]["step"] == 12 + 6


def test_resume_last_finds_the_newest_unfinished_run_of_the_same_settings():
    run("steps=500000", "max_minutes=0.01", code=75)
    (first,) = Path("outputs/classification").iterdir()
    assert summary(first)["status"] == "preempted" and summary(first)["exit_code"] == 75
    run("seed=5", "steps=2")
    reached = summary(first)["step"]
    run("resume=last", f"steps={reached + 3}")
    assert summary(first)["step"] == reached + 3
    run("resume=last", f"steps={reached + 3}", code=2)


def test_another_run_can_be_the_start_of_a_new_one():
    first = run("run_dir=a", "steps=3")
    second = run("run_dir=b", "resume=a", "steps=5")
    assert state(second)["progress"]["step"] == 5 and state(first)["progress"]["step"] == 3
    assert not same_but(state(run("run_dir=c", "steps=5", "schedule.horizon=3")), state(second))


def test_a_killed_run_continues_bit_exactly(capsys):
    """The fault campaign kills more, of more kinds."""
    settings = ["steps=60", "save_every=7", "log_every=5", "amp=fp16", "amp.init_scale=16777216", *EVERYTHING]
    settings += ["debug.inject={where: batch, step: 5}"]  # and a scale that overflows at first
    broken = fork("run_dir=broken", *settings)
    wait_until(lambda: len(checkpoints("broken")) >= 2, broken)
    time.sleep(random.uniform(0.0, 0.2))
    kill_all(broken)
    run("run_dir=whole", *settings)
    unfinished = summary("broken")["status"] == "running"
    capsys.readouterr()
    run("run_dir=broken", *settings)
    assert not unfinished or "continuing from step" in capsys.readouterr().out
    assert not same_but(state("whole"), state("broken"))
    assert state("whole")["progress"]["skipped"] >= 1
    assert timeless(lines("whole")) == timeless(lines("broken")) and unfinished


class Killed(BaseException):
    """In place of SIGKILL: nothing more is saved or logged."""


@pytest.mark.parametrize(
    "steps, note", [(2, "keeps its 4 steps: this run ends"), (6, "beyond the schedule's 4"), (4, "")]
)
def test_another_length_than_that_of_the_schedule_is_said(steps, note, capsys):
    settings = ["schedule=warmup_cosine", "save_every=1", "checkpoint.keep=4"]
    run_recipe("classification", "a", "steps=4", *settings)
    Path("a/summary.json").unlink()
    for step in checkpoints("a")[1:]:
        shutil.rmtree(step)
    capsys.readouterr()
    run_recipe("classification", "a", f"steps={steps}", *settings)
    out = capsys.readouterr().out
    assert note in out and ("schedule's" in out or "the schedule keeps" in out) is bool(note)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", ["classification", "gan"])
def test_the_lines_of_an_interrupted_run_are_those_of_one_that_was_not(recipe, monkeypatch):
    """Killed or stopped between log lines, where an evaluation is due, and in one; the cadences are coprime."""
    settings = ["steps=29", "log_every=5", "save_every=7", "eval_every=3", "amp=fp16", "amp.init_scale=16777216"]
    poll, interruptions = Stop.poll, {}
    step = 0

    def polled(self):
        nonlocal step
        step += 1
        what = interruptions.pop(step, None)
        if what is Killed:
            raise Killed
        self.code = what or self.code
        return poll(self)

    def polled_in_evaluation(self, *_, check=Evaluation._check_stop):
        nonlocal step
        step -= 0.5  # polls count steps
        try:
            check(self, 1)  # its only batch, as if there were several
        finally:
            step -= 0.5

    run_recipe(recipe, "whole", *settings)
    monkeypatch.setattr(Stop, "poll", polled)
    monkeypatch.setattr(Evaluation, "_check_stop", polled_in_evaluation)
    interruptions |= {8: Killed, 9: 143, 13: 130, 17: Killed, 20: 75, 24: 143, 29: Killed}
    interruptions |= {12.5: 143} if recipe == "classification" else {}  # a GAN's has no batches
    while interruptions:
        at, what = min(interruptions.items())
        if what is Killed:
            with pytest.raises(Killed):
                run_recipe(recipe, "torn", *settings)
        else:
            run_recipe(recipe, "torn", *settings, code=what)
            assert state("torn")["progress"]["step"] == int(at)
        found = state("torn")["progress"]
        step = found["step"] - (not found["is_evaluated"] and found["step"] % 3 == 0)  # which is evaluated first
    run_recipe(recipe, "torn", *settings)
    assert timeless(lines("torn")) == timeless(lines("whole"))
    assert [line["step"] for line in lines("torn") if line["split"] == "eval"] == [*range(3, 28, 3), 29]
    assert not same_but(state("whole"), state("torn"), "config")
    assert state("whole")["progress"]["meters"][0]


def test_a_longer_run_goes_on_with_the_mean_of_a_line():
    """The line at the end of a run that is made longer takes nothing from the next one."""
    run("run_dir=a", "steps=13", "log_every=5", "schedule.horizon=13")
    run("run_dir=a", "steps=20", "log_every=5", "schedule.horizon=13")
    run("run_dir=b", "steps=20", "log_every=5", "schedule.horizon=13")
    whole, longer = timeless(lines("b")), timeless(lines("a"))
    assert [line for line in longer if line["step"] != 13] == whole
    assert [line["split"] for line in longer if line["step"] == 13] == ["train", "eval"]


def kill_all(process):
    for pid in descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def test_a_run_moves_to_another_number_of_ranks_with_the_same_samples_per_step(capsys):
    settings = ["amp=bf16", "batch_size=8", "accumulation=2"]
    on_two_ranks("classification", "a", *settings, "steps=4")
    run_recipe("classification", "a", *settings, "steps=8")
    assert "accumulation=4 instead of 2" in capsys.readouterr().out
    assert state("a")["progress"]["samples"] == 8 * 32


TEXT = ["data=text", f"data.path={ROOT / 'conf'}", "data.num_samples=32"]
DOCUMENTS = {
    "packed": ("language_model", [*TEXT, "data.packing=best_fit"]),
    "cut": ("language_model", [*TEXT, "data.packing=chunks"]),
    "mixed": ("language_model", [*TEXT, "data.mix={amp:0.3,clip:0.7}"]),
    "chat": ("finetuning", []),
}
"""Of 11 to 34 samples, of which six steps draw 48: the run moves in the middle of an epoch."""
MOVES = "packed-ddp-norm packed-fsdp-norm cut-fsdp-none mixed-ddp-none chat-fsdp-none"


@pytest.mark.slow
@pytest.mark.parametrize("kind, layout, clip", [row.split("-") for row in MOVES.split()])
def test_documents_and_chats_move_to_another_number_of_ranks(kind, layout, clip, monkeypatch):
    """Two micro-batches or two ranks: gradients are the same sum of two numbers, so that weights have the same bits.

    A global norm of shards is a sum in another order, of at most 2^15 numbers: it is off by 2^15 units at most, and a
    step with it by as much of a weight's path, which is 6 steps of 0.003; eps keeps Adam from dividing by roundings.
    """
    recipe, settings = DOCUMENTS[kind]
    if kind == "chat":
        for package in ("tokenizers", "jinja2"):
            pytest.importorskip(package, reason="needs the extra text")
        monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").absolute()))
        settings = chat_settings(Path().absolute())
    settings = [*settings, "amp=fp32", "schedule.horizon=6", f"clip={clip}", "ema.decay=0.9"]
    settings += ["optimizer.options.eps=1e-2", "optimizer.lr=0.003"] + ["clip.max_norm=0.5"] * (clip == "norm")
    one, two = ["accumulation=2"], ["accumulation=1"]
    run_recipe(recipe, "whole", "steps=6", *one, *settings)
    run_recipe(recipe, "onward", "steps=3", *one, *settings)
    on_two_ranks(recipe, "onward", "steps=6", *two, *settings, layout=layout)
    on_two_ranks(recipe, "back", "steps=3", *two, *settings, layout=layout)
    run_recipe(recipe, "back", "steps=6", *one, *settings)
    expected = state("whole")
    for folder in ("onward", "back"):
        found = state(folder)
        whole, moved = (each["progress"] for each in (expected, found))
        assert [whole[key] for key in ("step", "samples")] == [moved[key] for key in ("step", "samples")]
        if (layout, clip) != ("fsdp", "norm"):
            assert not differing(
                *({key: each[key] for key in each.keys() - {"config", "progress"}} for each in (expected, found))
            )
        for name, tensor in expected["model"].items():
            assert (found["model"][name] - tensor).abs().max() <= 2**15 * 2**-24 * 6 * 0.003, name


def test_ranks_evaluate_the_model_that_is_saved(capsys):
    settings = ["steps=6", "ema.decay=0.5", "amp=fp32", "optimizer.lr=0.05"]
    on_two_ranks("classification", "a", *settings, statistics=True)
    expected = summary("a")["eval"]
    capsys.readouterr()
    run_recipe("classification", "a", "task=evaluate", *settings)
    printed = capsys.readouterr().out
    for name, value in expected.items():
        assert f"{name} {value:.4f}" in printed


@pytest.mark.slow
def test_a_failing_rank_is_started_again_as_often_as_allowed_and_then_named_once():
    settings = ["layout=ddp", "layout.nproc_per_node=2", "layout.max_restarts=1", "data.num_workers=0"]
    process = start("run_dir=a", *settings, "steps=1000000", "save_every=5")
    killed, reached = set(), ""

    def is_rank(pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            return pid not in killed and b"recipes" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    def trained_on():
        """The ranks, if they have written a checkpoint since the last of them was killed."""
        ranks = [pid for pid in descendants(process.pid)[1:] if is_rank(pid)]
        return len(ranks) == 2 and checkpoints("a") and checkpoints("a")[-1].name > reached and ranks

    for _ in range(2):
        wait_until(trained_on, process)
        ranks = trained_on()
        reached = checkpoints("a")[-1].name
        killed |= set(ranks)
        os.kill(ranks[-1], signal.SIGKILL)
    out = finish(process, code=1)
    assert "was killed by SIGKILL" in out and out.count("error:") == 1
    assert summary("a")["status"] == "failed" and summary("a")["exit_code"] == 1
    assert not [pid for pid in killed if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_a_sweep_goes_on_past_a_failed_job_and_completes_what_is_missing(capsys):
    sweep = ["-m", "hydra.sweep.dir=s", "amp=fp32,bf16", "steps=3"]
    # lr=1e30 diverges within the job: the other jobs run all the same.
    bad = [*sweep, "optimizer=sgd", "optimizer.lr=1e30,0.01", "amp.max_consecutive_skips=1", "steps=8"]
    assert train.main([*SMALL, *bad]) == 1
    states = [summary(p.parent)["status"] for p in sorted(Path("s").glob("*/summary.json"))]
    assert sorted(states) == ["diverged", "diverged", "finished", "finished"]
    assert train.main([*SMALL, *sweep]) == 0
    folders = {p.parent for p in Path("s").glob("*/summary.json")}
    assert len(folders) == 6 and all(len(f.name) < 130 for f in folders)
    (Path("s") / min(f.name for f in folders) / "summary.json").write_text('{"status": "finished"}')  # damaged
    capsys.readouterr()
    assert train.main([*SMALL, *sweep]) == 0
    assert capsys.readouterr().out.count("already finished") == 2


@pytest.mark.slow
def test_torchrun_makes_one_folder():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(ROOT / "train.py"), *SMALL]
    torchrun += ["layout=ddp"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, "steps=3"], capture_output=True, text=True, env=environ, timeout=100)
    assert done.returncode == 0, done.stderr
    (folder,) = Path("outputs/classification").iterdir()
    assert summary(folder)["world_size"] == 2


def test_a_rank_of_torchrun_refuses_a_sweep(monkeypatch, capsys):
    for rank in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        monkeypatch.setenv("RANK", rank)
        assert train.main([*SMALL, "layout=ddp", "-m", "seed=1,2"]) == 2
        assert capsys.readouterr().err.count("error: -m under torchrun") == (rank == "0")
    assert not list(Path().iterdir())


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(capsys):
    folder = run("run_dir=a", "steps=6", "save_every=2")
    newest = checkpoints(folder)[-1] / "state.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    run("run_dir=a", "steps=8", "save_every=2")
    out = capsys.readouterr().out
    assert "step_00000006" in out and "continuing from step 4" in out
    for checkpoint in checkpoints(folder):
        (checkpoint / "state.pt").write_bytes(b"rubbish")
    run("run_dir=a", "steps=10", code=3)
    assert len(checkpoints(folder)) >= 2


def test_a_foreign_checkpoint_is_refused_and_nothing_is_lost(capsys):
    torch.save({"weights": torch.zeros(3)}, "foreign.pt")
    run("resume=foreign.pt", "steps=3", code=3)
    run("run_dir=other", "steps=2", "model=mlp")
    run("run_dir=b", "resume=other", "steps=3", "allow_changes=true", code=3)
    assert capsys.readouterr().err.count("error:") == 2 and len(checkpoints("other")) == 1


def test_two_runs_cannot_write_to_one_folder(capsys):
    process = fork("run_dir=a", "steps=1000000")
    wait_until(lambda: Path("a/metrics.jsonl").exists(), process)
    run("run_dir=a", "steps=3", code=2)
    assert "another process is writing there" in capsys.readouterr().err
    kill_all(process)
    assert train.main([*SMALL, "run_dir=a", "steps=3"]) == 0  # the lock died with its owner


def on_a_full_disk(argv):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    return train.main(argv)


def test_a_file_system_that_is_full_ends_with_4_and_keeps_the_last_checkpoint():
    run("run_dir=a", "save_every=2", "steps=4")
    out = finish(Forked(on_a_full_disk, [*SMALL, "run_dir=a", "save_every=2", "steps=8"]), code=4)
    assert "error: cannot save" in out and "Traceback" not in out
    assert [p.name for p in checkpoints("a")] == ["step_00000002", "step_00000004"]
    assert not math.isnan(state("a")["progress"]["samples"])


def test_a_last_summary_that_cannot_be_written_ends_with_4(monkeypatch, capfd):
    def on_a_full_disk(path, content):
        if Path(path).name == "summary.json" and content["status"] == "finished":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_json(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_json", on_a_full_disk)
        run("run_dir=a", "steps=2", code=4)
    assert "a/summary.json: cannot be written: No space left on device" in capfd.readouterr().err
    assert summary("a")["status"] == "failed" and len(checkpoints("a")) == 1
    run("run_dir=a", "steps=2")
    assert summary("a")["status"] == "finished"
