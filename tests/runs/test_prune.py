"""Runs are listed, picked and compared; what may go is pruned, and nothing else."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re

import pytest
from shared import flip, script
from test_report import make_run, sweep

from amp_core.checkpoints import folders as steps
from amp_tools.report import folders, prune
from amp_tools.report.folders import read_run
from amp_tools.report.table import table


def test_settings_that_json_has_no_word_for(tmp_path, capsys):
    for seed, value in ((1, "inf"), (2, "nan")):
        make_run(tmp_path / str(seed), f"debug.inject={{where: batch, step: 3, value: {value}}}", seed=seed)

    def refuse(word):
        raise AssertionError(word)

    for name in ("report", "runs"):
        assert script(f"scripts/{name}.py").main([str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out, parse_constant=refuse)


def test_runs_are_listed_picked_and_compared(tmp_path, capsys):
    sweep(tmp_path, {"fp32": [0.97, 0.99], "bf16": [0.98, 0.96]})
    runs = script("scripts/runs.py")

    def say(*arguments):
        assert runs.main([*arguments]) == 0
        return capsys.readouterr().out

    where = ["--where", "amp=bf*", "status=finished", "eval.accuracy>=0.96", "--sort", "-result", "--json"]
    assert [run["result"] for run in json.loads(say(str(tmp_path), *where))] == [0.98, 0.96]
    lines = say(str(tmp_path), "--columns", "amp,optimizer.lr,model,result", "--sort", "seed").splitlines()
    assert lines[0].split() == ["amp", "optimizer.lr", "model", "result"] and len(lines) == 5
    assert lines[1].split() == ["bf16", "0.002", "cnn", "0.9800"]
    rows = [["finished", "a" * 40 + "/" + "b" * 40]]
    [_, line] = table(["status", "folder"], rows, 40)
    assert len(line) == 40 and re.fullmatch(r"finished  a+…b+", line)
    assert table(["status", "folder"], rows, None)[1][-1] == "b"
    text = say("compare", str(tmp_path / "fp32_1"), str(tmp_path / "bf16_1"))
    assert re.search(r"amp.dtype +float32 +bfloat16", text) and re.search(r"speed +1,002 +2,004 +2.00x", text)
    for bad in (["--where", "amp.nam=bf16"], ["--where", "step>x"], ["--sort", "stepp"], ["nowhere"]):
        arguments = bad if bad == ["nowhere"] else [str(tmp_path), *bad]
        assert runs.main(arguments) == 2 and capsys.readouterr().err.startswith("error: ")


def test_runs_are_found_where_the_readme_puts_them(tmp_path, own_folder, capsys):
    for place in ("outputs", "multirun", "runs", "elsewhere"):
        make_run(tmp_path / place / "a", "amp=bf16")
    assert script("scripts/runs.py").main(["--columns", "folder"]) == 0
    assert capsys.readouterr().out.split() == ["folder", "multirun/a", "outputs/a", "runs/a"]


def test_what_no_two_runs_share_is_not_parsed_again(tmp_path):
    """A YAML parser takes a millisecond for a line; 20,000 runs have 20,000 folders."""
    for name in ("a", "b"):
        folder = make_run(tmp_path / name, "amp=bf16")
        path = folder / ".hydra" / "config.yaml"
        path.write_text(re.sub(r"(?m)^run_dir: .*$", f"run_dir: outputs/{name}", path.read_text()))
    assert read_run(tmp_path / "a").config["run_dir"] == "outputs/a"
    before = folders._parsed.cache_info().misses
    assert read_run(tmp_path / "b").config["run_dir"] == "outputs/b"
    assert folders._parsed.cache_info().misses == before


def old(folder):
    for path in folder.rglob("*"):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    return folder


def snapshot(folder):
    return {str(path): path.stat().st_size if path.is_file() else None for path in folder.rglob("*")}


def checkpoint(folder, step, accuracy):
    place = folder / "checkpoints" / f"step_{step:08d}"
    place.mkdir(parents=True)
    (place / "state.pt").write_bytes(bytes(1000))
    files = {"state.pt": steps.digest_of([bytes(1000)])}
    about = {"format": 1, "step": step, "files": files, "metrics": {"accuracy": accuracy}}
    (place / "manifest.json").write_bytes(steps.encode(about))


def test_prune_takes_old_runs_without_a_result_and_nothing_else(tmp_path, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    root = tmp_path / "runs"
    gone = make_run(root / "failed", "amp=bf16", status="failed")
    (gone / "samples").symlink_to(outside)
    checkpoint(gone, 10, 0.5)
    (gone / "checkpoints" / "step_00000010" / "deep").symlink_to(outside)
    mixed = make_run(root / "diverged_with_notes", "amp=bf16", status="diverged")
    (mixed / "notes.txt").write_text("mine")
    nested = make_run(root / "parent", "amp=bf16", status="failed")
    make_run(nested / "child", "amp=bf16", status="finished")
    make_run(root / "finished", "amp=bf16")
    make_run(root / "going", "amp=bf16", status="running")
    (make_run(root / "damaged", "amp=bf16") / "summary.json").write_text('{"status": "fin')
    no_run = root / "no_run"
    no_run.mkdir()
    (no_run / "summary.json").write_text('{"status": "failed"}')
    (root / "linked").symlink_to(make_run(tmp_path / "elsewhere", "amp=bf16", status="failed"))
    for folder in (root, tmp_path / "elsewhere"):
        old(folder)
    make_run(root / "failed_just_now", "amp=bf16", status="failed")
    runs, before = script("scripts/runs.py"), snapshot(tmp_path)

    with open(root / "going" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(root / "going" / ".lock", (1e9, 1e9))
        before = snapshot(tmp_path)
        assert runs.main(["prune", str(root)]) == 0  # dry
        assert snapshot(tmp_path) == before and "nothing was removed" in capsys.readouterr().out
        assert runs.main(["prune", str(root), "--yes"]) == 0
    assert {path.name for path in root.iterdir()} == {
        *("diverged_with_notes", "parent", "finished", "going", "no_run", "linked", "failed_just_now", "damaged")
    }
    assert [path.name for path in mixed.iterdir()] == ["notes.txt"]
    assert [path.name for path in nested.iterdir()] == ["child"]
    lost = {path for path in before if not os.path.lexists(path)}
    parts = [str(gone), str(mixed), str(nested)]
    assert all(any(path == part or path.startswith(part + "/") for part in parts) for path in lost)
    assert (outside / "precious").exists() and (tmp_path / "elsewhere" / "summary.json").exists()


def newer_format(path):
    about = json.loads((path / "manifest.json").read_text()) | {"format": 2}
    (path / "manifest.json").write_bytes(steps.encode(about))


DAMAGES = {
    "a bit of the state": lambda path: flip(path / "state.pt", 500),
    "a bit of the manifest": lambda path: flip(path / "manifest.json", 20),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "a pipe": lambda path: ((path / "state.pt").unlink(), os.mkfifo(path / "state.pt")),
    "a newer format": newer_format,
}
NO_METRIC = {2: None, 4: None, 6: None}
BY_NUMBER = {99_999_998: 0.8, 99_999_999: 0.9, 10**8: 0.1, 10**8 + 1: 0.2}
KEPT = [
    ("finished", {10: 0.5, 20: 0.9, 30: 0.7}, None, None, [20, 30]),  # the best, and the newest
    ("preempted", {10: 0.5, 20: 0.9, 30: 0.7}, None, None, [20, 30]),
    ("preempted", BY_NUMBER, 99_999_999, "a bit of the state", [99_999_998, 10**8 + 1]),  # the best sound one
    *(("preempted", NO_METRIC, 6, what, [4, 6]) for what in DAMAGES),  # the newest cannot be loaded
]


@pytest.mark.parametrize("status, accuracies, damaged, what, left", KEPT)
def test_prune_of_checkpoints_keeps_the_newest_sound_one_and_the_best(
    status, accuracies, damaged, what, left, tmp_path
):
    run = make_run(tmp_path / "run", "amp=bf16", status=status)
    for step, accuracy in accuracies.items():
        checkpoint(run, step, accuracy)
    (run / "checkpoints" / "mine").mkdir()
    if what:
        DAMAGES[what](run / "checkpoints" / f"step_{damaged:08d}")
    old(run)
    assert script("scripts/runs.py").main(["prune", str(tmp_path), "--checkpoints", "--older", "0", "--yes"]) == 0
    kept = {f"step_{step:08d}" for step in left} | {"mine"}
    assert set(os.listdir(run / "checkpoints")) == kept


def test_a_checkpoint_that_is_damaged_after_the_look_keeps_the_others(tmp_path):
    folder = make_run(tmp_path / "run", "amp=bf16", status="preempted")
    for step in (2, 4):
        checkpoint(folder, step, None)
    plan = prune.plan_checkpoints(read_run(folder), 0)
    assert plan is not None and [path.name for path in plan.paths] == ["step_00000002"]
    flip(folder / "checkpoints" / "step_00000004" / "state.pt", 0)
    assert "step_00000004: is damaged now" in str(prune.carry_out(plan, whole=False))
    assert len(os.listdir(folder / "checkpoints")) == 2


def test_a_run_that_began_after_the_look_is_left_alone(tmp_path):
    folder = old(make_run(tmp_path / "run", "amp=bf16", status="failed"))
    plan = prune.plan_runs(read_run(folder), 1)
    assert plan is not None
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert prune.carry_out(plan, whole=True) == f"{folder}: a run is writing there"
    (folder / "summary.json").write_text((folder / "summary.json").read_text())
    assert prune.carry_out(plan, whole=True) == "has changed since it was looked at"
    assert (folder / "metrics.jsonl").exists()
    assert prune.plan_runs(read_run(folder), 1) is None and math.isfinite(folders.age(read_run(folder)))
