"""Whole runs: resume, faults, signals, bad files. Real processes wherever a process may die."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from running import checkpoints, differing, lines, same_but, state, summary
from torch.utils._python_dispatch import TorchDispatchMode

import train

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["data=synthetic", "data.num_samples=96", "data.image_size=8", "data.num_classes=4", "model.options.width=8"]
SMALL += ["device=cpu", "log=default", "log.progress=false", "batch_size=8", "save_every=1000", "eval_every=1000"]
EVERYTHING = ["accumulation=4", "clip=norm", "clip.max_norm=0.5", "ema.decay=0.9", "model.options.dropout=0.2"]
MODES = ["fp32", "tf32", "bf16", "fp16", "fp16_capped"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def run(*overrides, code=0):
    """A run in this process. Returns its folder."""
    arguments = [*SMALL, *overrides]
    assert train.main(arguments) == code
    return Path(next((a.split("=", 1)[1] for a in arguments if a.startswith("run_dir=")), "."))


def command(*overrides):
    return [sys.executable, str(ROOT / "train.py"), *SMALL, *overrides]


def start(*overrides):
    return subprocess.Popen(
        command(*overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def finish(process, code=0, timeout=100):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, (process.returncode, out, err)
    return out + err


# --- the course of a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_run_leaves_the_promised_folder(mode):
    folder = run("run_dir=a", f"amp={mode}", "steps=6", "log_every=2", "save_every=2", "eval_every=3", *EVERYTHING)
    assert {p.name for p in folder.iterdir()} >= {
        ".hydra",
        "environment.json",
        "train.log",
        "metrics.jsonl",
        "summary.json",
    }
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
    assert summary(folder)["status"] == "finished"
    assert summary(folder)["step"] == 6
    assert all(line["loss_scale"] == 1.0 for line in train_lines) or mode.startswith("fp16")
    saved = state(folder)
    assert set(saved) == {"model", "optimizer", "schedule", "ema", "scaler", "progress", "config", "format"}
    assert bool(saved["scaler"]) == mode.startswith("fp16")
    assert [p.name for p in checkpoints(folder)][-2:] == ["step_00000004", "step_00000006"]


def test_it_learns_and_the_modes_agree():
    accuracy = {}
    for mode in ("fp32", "bf16", "fp16"):
        folder = run(f"run_dir={mode}", f"amp={mode}", "steps=60", "seed=3", "optimizer.lr=0.01")
        accuracy[mode] = summary(folder)["eval"]["accuracy"]
    assert min(accuracy.values()) > 0.9, accuracy


def test_a_finished_run_says_so_and_a_longer_one_goes_on(capsys):
    folder = run("run_dir=a", "steps=4")
    before = state(folder)
    run("run_dir=a", "steps=4")
    assert "already finished" in capsys.readouterr().out
    assert not differing(before, state(folder))
    run("run_dir=a", "steps=6")
    assert state(folder)["progress"]["step"] == 6
    assert [line["step"] for line in lines(folder) if line["split"] == "eval"] == [4, 6]


def test_evaluate_changes_nothing(capsys):
    folder = run("run_dir=a", "steps=4", "ema.decay=0.5")
    expected = summary(folder)["eval"]
    before = {p: p.stat().st_mtime_ns for p in sorted(Path().rglob("*"))}
    capsys.readouterr()
    run("run_dir=a", "task=evaluate", "ema.decay=0.5")
    assert f"accuracy {expected['accuracy']:.4f}" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in sorted(Path().rglob("*"))} == before


def test_dry_run_tells_the_plan_and_creates_nothing(capsys, tmp_path):
    run("dry_run=true", "steps=7", "accumulation=2")
    assert "7 steps of 16 samples" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_samples_and_epochs_are_turned_into_steps(capsys):
    run("dry_run=true", "samples=100")
    run("dry_run=true", "epochs=2.5", "accumulation=2")
    out = capsys.readouterr().out
    assert "13 steps of 8 samples" in out
    assert "15 steps of 16 samples" in out


# --- one bad window leaves no trace -----------------------------------------------------------------------------------

FAULTS = ["{where: batch, step: %d, value: inf}", "{where: activation, step: %d, value: nan}"]
FAULTS += ["{where: gradient, step: %d, value: -inf}"]


@pytest.mark.parametrize(
    "optimizer", [["optimizer=sgd"], ["optimizer=adamw"], ["optimizer=sgd", "optimizer.fused=false"]]
)
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_window_leaves_the_state_of_the_run_that_never_saw_it(mode, optimizer):
    # A static scale: a backed-off one may round what follows differently, which is not what is asked here.
    fixed = ["amp.dynamic=false", "amp.init_scale=256"] if mode.startswith("fp16") else []
    common = [
        "steps=5",
        "log_every=1",
        "accumulation=2",
        "clip=norm",
        "ema.decay=0.9",
        *optimizer,
        *fixed,
        f"amp={mode}",
    ]
    for step in (1, 3):
        clean = state(run(f"run_dir=drop{step}", f"debug.inject={{where: drop, step: {step}}}", *common))
        for number, fault in enumerate(FAULTS):
            folder = run(f"run_dir=bad{step}{number}", f"debug.inject={fault % step}", *common)
            assert not same_but(clean, state(folder), "progress.skipped")
            assert summary(folder)["skipped"] == 1
            bad, good = (next(li for li in lines(f) if li["step"] == 5) for f in (folder, f"drop{step}"))
            assert (bad["loss"], bad["lr"]) == (good["loss"], good["lr"])
            at_fault = next(line for line in lines(folder) if line["step"] == step)
            assert at_fault["loss"] is None and at_fault["grad_norm"] is None


def test_a_dynamic_scale_backs_off_once_and_the_rest_is_the_run_that_never_saw_it():
    common = ["steps=5", "accumulation=2", "ema.decay=0.9", "amp=fp16", "optimizer=sgd"]
    bad = state(run("run_dir=a", "amp.init_scale=512", "debug.inject={where: batch, step: 1}", *common))
    clean = state(run("run_dir=b", "amp.init_scale=256", "debug.inject={where: drop, step: 1}", *common))
    assert bad["scaler"]["scale"] == clean["scaler"]["scale"] == 256.0
    assert not same_but(bad, clean, "progress.skipped")


def test_a_run_that_only_skips_ends_as_diverged_with_the_last_good_weights(capsys):
    folder = run(
        "run_dir=a",
        "steps=200",
        "amp=fp32",
        "optimizer=sgd",
        "optimizer.lr=1e30",
        "amp.max_consecutive_skips=5",
        code=5,
    )
    assert summary(folder)["status"] == "diverged"
    assert "amp.max_consecutive_skips=5" in capsys.readouterr().err


# --- going on -----------------------------------------------------------------------------------------------------------


def test_modes_may_change_at_every_resume(capsys):
    for number, mode in enumerate(["fp16", "bf16", "fp32", "fp16"], 1):
        folder = run("run_dir=a", f"steps={4 * number}", f"amp={mode}", "ema.decay=0.9")
        saved = state(folder)
        assert saved["progress"]["step"] == 4 * number
        assert all(torch.isfinite(t).all() for t in saved["model"].values())
        assert all(t.dtype is not torch.float16 for t in saved["model"].values())
    assert state(folder)["scaler"]["scale"] == 65536.0
    assert capsys.readouterr().out.count("the checkpoint was made with amp=") == 3


def test_a_checkpoint_loads_in_plain_pytorch():
    run("run_dir=a", "steps=3", "ema.decay=0.9")
    script = (
        "import torch, glob, sys; sys.path.insert(0, sys.argv[1])\n"
        "from amp_core.models import CLASSIFIERS, build_model\n"
        "saved = torch.load(glob.glob('a/checkpoints/*/state.pt')[0], weights_only=True)\n"
        "net = build_model('cnn', CLASSIFIERS, num_classes=4, image_shape=(3, 8, 8), options={'width': 8})\n"
        "channels = saved['model']['0.weight'].shape[1]\n"
        "net = build_model('cnn', CLASSIFIERS, num_classes=4, image_shape=(channels, 8, 8), options={'width': 8})\n"
        "print(net.load_state_dict(saved['model']), net.load_state_dict(saved['ema']))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(ROOT)], capture_output=True, text=True)
    assert done.stdout.count("All keys matched") == 2, done.stderr


def test_changed_settings_are_refused_with_the_list_unless_allowed(capsys):
    folder = run("run_dir=a", "steps=3")
    before = (folder / ".hydra" / "config.yaml").read_text()
    run("run_dir=a", "steps=6", "optimizer.lr=0.5", "seed=9", code=2)
    err = capsys.readouterr().err
    assert "optimizer.lr: 0.002 -> 0.5" in err and "seed: 0 -> 9" in err and "allow_changes" in err
    assert (folder / ".hydra" / "config.yaml").read_text() == before
    run("run_dir=a", "steps=6", "optimizer.lr=0.5", "seed=9", "allow_changes=true")
    assert summary(folder)["step"] == 6


def test_a_refused_resume_touches_nothing(capsys):
    folder = run("run_dir=a", "steps=3")
    run("run_dir=b", "steps=2")

    def everything():
        return {p: p.read_bytes() for p in sorted(Path().rglob("*")) if p.is_file() and p.name != ".lock"}

    before = everything()
    run("run_dir=a", "steps=6", "batch_size=16", code=2)
    assert "16 samples per step, the checkpoint has 8" in capsys.readouterr().err
    run("resume=a", "steps=6", "optimizer.lr=0.5", code=2)
    assert everything() == before
    assert summary(folder)["status"] == "finished"
    assert not list(Path().glob("outputs/classification/*"))


def test_a_run_past_its_end_is_finished_even_without_its_summary():
    folder = run("run_dir=a", "steps=5")
    expected = summary(folder)["eval"]
    run("run_dir=a", "steps=3")
    (folder / "summary.json").unlink()  # killed between the last checkpoint and its summary
    run("run_dir=a", "steps=5")
    assert summary(folder)["status"] == "finished" and summary(folder)["eval"] == expected


def test_epochs_count_samples_when_the_samples_per_step_change():
    run("run_dir=a", "epochs=1", "schedule.horizon=50")  # 96 samples: 12 steps of 8
    folder = run("run_dir=a", "epochs=2", "schedule.horizon=50", "batch_size=16", "allow_changes=true")
    assert state(folder)["progress"]["samples"] == 192
    assert state(folder)["progress"]["step"] == 12 + 6


def test_a_line_holds_the_learning_rate_of_its_step():
    folder = run(
        "run_dir=a",
        "steps=4",
        "log_every=1",
        "schedule=warmup_linear",
        "optimizer.lr=0.004",
        "schedule.options.warmup=0",
    )
    assert [line["lr"] for line in lines(folder) if line["split"] == "train"] == pytest.approx(
        [0.004, 0.003, 0.002, 0.001]
    )


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
    assert state(second)["progress"]["step"] == 5
    assert state(first)["progress"]["step"] == 3
    assert not same_but(state(run("run_dir=c", "steps=5", "schedule.horizon=3")), state(second))


@pytest.mark.parametrize("mode, workers", [("bf16", 0), ("fp16", 2)])
def test_a_killed_run_continues_bit_exactly(mode, workers, capsys):
    """As a user would see it; the fault campaign kills more, of more kinds, in forked processes."""
    settings = ["steps=150", "save_every=7", "log_every=5", f"amp={mode}", f"data.num_workers={workers}", *EVERYTHING]
    settings += ["amp.init_scale=16777216"] if mode == "fp16" else []  # overflows at first
    settings += ["debug.inject={where: batch, step: 5}"]

    def here(*overrides):
        run(*overrides)
        return capsys.readouterr().out

    kill_and_compare(settings, here)


def test_a_killed_run_on_two_processes_continues_bit_exactly():
    settings = ["steps=150", "save_every=7", "log_every=5", "amp=bf16", *EVERYTHING]
    settings += ["layout=ddp", "layout.nproc_per_node=2", "debug.inject={where: gradient, step: 5, rank: 1}"]
    kill_and_compare(settings, lambda *overrides: finish(start(*overrides)))


def kill_and_compare(settings, complete):
    """Kill a process that trains; what is compared is trained by `complete`, which returns what it printed."""
    broken = start("run_dir=broken", *settings)
    wait_for(lambda: len(checkpoints("broken")) >= 2, broken)
    time.sleep(random.uniform(0.0, 0.6))
    kill_all(broken)
    complete("run_dir=whole", *settings)
    unfinished = summary("broken")["status"] == "running"
    out = complete("run_dir=broken", *settings)
    assert not unfinished or "continuing from step" in out
    assert not same_but(state("whole"), state("broken"))
    assert state("whole")["progress"]["skipped"] >= 1
    numbers = [
        [(li["step"], li["split"], li["loss"], li["lr"], li["loss_scale"]) for li in lines(f) if li["split"] == "train"]
        for f in ("whole", "broken")
    ]
    assert [n[:2] for n in numbers[0]] == [n[:2] for n in numbers[1]]
    assert unfinished


def wait_for(condition, process, timeout=90):
    end = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


def descendants(pid):
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(pid), *(grandchild for child in children for grandchild in descendants(child))]


def kill_all(process):
    for pid in descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


TWO = ["layout=ddp", "layout.nproc_per_node=2"]


@pytest.mark.parametrize("number, layout", [(signal.SIGTERM, []), (signal.SIGINT, TWO), (signal.SIGUSR1, TWO)])
def test_a_signal_finishes_the_step_and_writes_a_checkpoint(number, layout):
    settings = ["steps=1000000", "run_dir=a", "save_every=1000000", "eval_every=1000000", *layout]
    process = start(*settings)
    wait_for(lambda: Path("a/metrics.jsonl").exists() and len(lines("a")) > 1, process)
    everyone = descendants(process.pid)
    process.send_signal(number)
    code = 75 if number == signal.SIGUSR1 else 128 + number
    out = finish(process, code=code, timeout=40)
    assert "Traceback" not in out
    assert summary("a")["status"] == "preempted" and summary("a")["exit_code"] == code
    assert state("a")["progress"]["step"] == summary("a")["step"]
    assert not [pid for pid in everyone if Path(f"/proc/{pid}").exists()]
    assert [line["step"] for line in lines("a")] == sorted({line["step"] for line in lines("a")})


# --- many processes -----------------------------------------------------------------------------------------------------


def weights(folder):
    return torch.cat([t.flatten() for t in state(folder)["model"].values()])


def test_accumulation_and_ranks_do_not_change_the_run():
    # No BatchNorm and no dropout: their statistics and masks belong to the micro-batch.
    # A large eps: with a small one AdamW turns the rounding of a gradient near 0 into a step of the size of lr.
    settings = ["steps=12", "model=mlp", "amp=fp32", "clip=norm", "model.options.depth=1", "optimizer.options.eps=1e-2"]
    plain = [s for s in settings if "width" not in s]
    two = start("run_dir=c", *plain, "accumulation=2", "layout=ddp", "layout.nproc_per_node=2")
    run("run_dir=a", *plain, "batch_size=32")
    run("run_dir=b", *plain, "accumulation=4")
    finish(two)
    for other in ("b", "c"):
        difference = (weights("a") - weights(other)).abs().max().item()
        assert difference < 1e-5, (other, difference)  # fp32 sums in another order, over 12 steps of AdamW
    losses = [[line["loss"] for line in lines(f) if line["split"] == "train"] for f in "abc"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)


def test_a_run_moves_to_another_number_of_ranks_with_the_same_samples_per_step():
    settings = ["model=mlp", "amp=bf16", "accumulation=2"]
    finish(start("run_dir=a", *settings, "steps=4", "layout=ddp", "layout.nproc_per_node=2"))
    out = finish(start("run_dir=a", *settings, "steps=8"))
    assert "accumulation=4 instead of 2" in out
    assert state("a")["progress"]["samples"] == 8 * 32


def test_ranks_evaluate_the_model_that_is_saved(capsys):
    settings = ["steps=6", "ema.decay=0.5", "amp=fp32", "optimizer.lr=0.05"]
    finish(start("run_dir=a", *settings, "layout=ddp", "layout.nproc_per_node=2"))
    expected = summary("a")["eval"]
    capsys.readouterr()
    run("run_dir=a", "task=evaluate", *settings)
    printed = capsys.readouterr().out
    for name, value in expected.items():
        assert f"{name} {value:.4f}" in printed


def test_workers_do_not_outlive_a_killed_launcher():
    settings = ["run_dir=a", "layout=ddp", "layout.nproc_per_node=2"]
    process = start(*settings, "steps=1000000")
    wait_for(lambda: Path("a/metrics.jsonl").exists() and len(lines("a")) > 1, process)
    workers = descendants(process.pid)[1:]
    process.kill()
    process.communicate()
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < end
        time.sleep(0.1)
    reached = state("a")["progress"]["step"]
    finish(start(*settings, f"steps={reached + 2}"))
    assert summary("a")["step"] == reached + 2


def test_a_failing_rank_is_named_once_with_its_traceback():
    process = start("run_dir=a", "layout=ddp", "layout.nproc_per_node=2", "steps=1000000", "data.num_workers=0")
    wait_for(lambda: Path("a/metrics.jsonl").exists() and len(lines("a")) > 1, process)
    workers = [pid for pid in descendants(process.pid)[1:] if b"recipes" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(workers[-1], signal.SIGKILL)
    out = finish(process, code=1)
    assert "was killed by SIGKILL" in out and out.count("error:") == 1
    assert summary("a")["status"] == "failed" and summary("a")["exit_code"] == 1
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


# --- sweeps -------------------------------------------------------------------------------------------------------------


def test_a_sweep_goes_on_past_a_failed_job_and_completes_what_is_missing(capsys):
    sweep = ["-m", "hydra.sweep.dir=s", "amp=fp32,bf16", "steps=3"]
    # lr=1e30 diverges within the job: the other jobs run all the same.
    bad = [*sweep, "optimizer=sgd", "optimizer.lr=1e30,0.01", "amp.max_consecutive_skips=1", "steps=40"]
    assert train.main([*SMALL, *bad]) == 1
    states = [summary(p.parent)["status"] for p in sorted(Path("s").glob("*/summary.json"))]
    assert sorted(states) == ["diverged", "diverged", "finished", "finished"]
    assert train.main([*SMALL, *sweep]) == 0
    folders = {p.parent for p in Path("s").glob("*/summary.json")}
    assert len(folders) == 6 and all(len(f.name) < 130 for f in folders)
    capsys.readouterr()
    assert train.main([*SMALL, *sweep]) == 0
    assert capsys.readouterr().out.count("already finished") == 2


def test_torchrun_makes_one_folder_and_refuses_a_sweep():
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        str(ROOT / "train.py"),
        *SMALL,
        "layout=ddp",
    ]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, "steps=3"], capture_output=True, text=True, env=environ, timeout=100)
    assert done.returncode == 0, done.stderr
    (folder,) = Path("outputs/classification").iterdir()
    assert summary(folder)["world_size"] == 2
    done = subprocess.run([*torchrun, "-m", "seed=1,2"], capture_output=True, text=True, env=environ, timeout=100)
    assert done.returncode == 1 and done.stderr.count("error: -m under torchrun") == 1
    assert len(list(Path("outputs/classification").iterdir())) == 1


# --- bad files ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("text", ["null", "[]", "{}", '{"status": "finished", "eval": 3}', "[" * 100_000])
def test_damaged_reports_of_a_run_do_not_keep_it_from_going_on(text):
    folder = run("run_dir=a", "steps=4")
    expected = summary(folder)["eval"]
    (folder / "summary.json").write_text(text)
    run("run_dir=a", "steps=4", "log_every=5")
    # One that still says "finished" is believed.
    assert text.startswith('{"status"') or summary(folder)["eval"] == expected
    for name in ("summary.json", "metrics.jsonl"):
        (folder / name).write_text(text)
    run("run_dir=a", "steps=6")
    assert summary(folder)["status"] == "finished" and [line["step"] for line in lines(folder)] == [6, 6]


def test_a_sweep_goes_on_beside_a_damaged_summary():
    sweep = [*SMALL, "-m", "hydra.sweep.dir=s", "seed=1,2", "steps=2"]
    assert train.main(sweep) == 0
    for path in Path("s").glob("*/summary.json"):
        path.write_text('{"status": "finished"}')
    assert train.main(sweep) == 0


def test_a_foreign_checkpoint_is_refused_and_nothing_is_lost(capsys):
    torch.save({"weights": torch.zeros(3)}, "foreign.pt")
    run("resume=foreign.pt", "steps=3", code=3)
    run("run_dir=other", "steps=2", "model=mlp")
    run("run_dir=b", "resume=other", "steps=3", "allow_changes=true", code=3)
    assert capsys.readouterr().err.count("error:") == 2
    assert len(checkpoints("other")) == 1


def test_two_runs_cannot_write_to_one_folder(capsys):
    process = start("run_dir=a", "steps=1000000")
    wait_for(lambda: Path("a/metrics.jsonl").exists(), process)
    run("run_dir=a", "steps=3", code=2)
    assert "another process is writing there" in capsys.readouterr().err
    kill_all(process)
    assert train.main([*SMALL, "run_dir=a", "steps=3"]) == 0  # the lock died with its owner


def test_a_file_system_that_is_full_ends_with_4_and_keeps_the_last_checkpoint():
    script = (
        "import resource, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "import train\n"
        f"settings = {SMALL!r} + ['run_dir=a', 'save_every=2']\n"
        "assert train.main(settings + ['steps=4']) == 0\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "sys.exit(train.main(settings + ['steps=8']))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    assert "error: cannot save" in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in checkpoints("a")] == ["step_00000002", "step_00000004"]
    assert not math.isnan(state("a")["progress"]["samples"])


# --- speed ----------------------------------------------------------------------------------------------------------------


class CountWaits(TorchDispatchMode):
    """Counts `aten::_local_scalar_dense`: each is one wait for the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
def test_thirty_more_steps_wait_zero_times_more(mode):
    counts = []
    for steps in (10, 40):
        with CountWaits() as waits:
            run(f"run_dir={steps}", f"steps={steps}", f"amp={mode}", "log_every=1000", "schedule=constant", *EVERYTHING)
        counts.append(waits.count)
    assert counts[1] == counts[0]
