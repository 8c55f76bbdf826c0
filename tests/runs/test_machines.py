"""A run that goes on where bits differ says so: another processor, instruction set, number of threads or torch."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from running import checkpoints, lines, same_but, state, summary
from small import RUN

import train
from amp_core.run.machine import _what_matters, changed_machine, describe_cpu, describe_device, describe_versions

ROOT = Path(__file__).resolve().parents[2]
SMALL = [*RUN, "run_dir=a"]
SAID = "from here on bits may differ"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def log_of(folder="a"):
    return [line for line in Path(folder, "train.log").read_text().splitlines() if SAID in line]


def change(**values):
    """environment.json of the run as another machine would have written it."""
    file = Path("a/environment.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_resume_on_another_processor_is_said_once_and_both_are_named():
    for steps in (2, 4):
        assert train.main([*SMALL, f"steps={steps}"]) == 0
    assert state("a")["progress"]["step"] == 4 and not log_of()  # the same machine
    change(cpu="AMD EPYC 7B13", cpu_features=["avx2", "fma"], cpu_capability="AVX9")
    assert train.main([*SMALL, "steps=6"]) == 0
    (line,) = log_of()
    assert "cpu=AMD EPYC 7B13" in line and f"cpu={describe_cpu()['cpu']}" in line and "cpu_capability=AVX9" in line
    assert train.main([*SMALL, "steps=8"]) == 0  # the folder is this machine's by now
    assert log_of() == [line]


def test_a_start_from_the_checkpoint_of_another_folder_is_noticed_too():
    assert train.main([*SMALL, "steps=2"]) == 0
    change(threads=64)
    for number, source in enumerate(["a", *map(str, checkpoints("a")), str(checkpoints("a")[0] / "state.pt")]):
        assert train.main([*SMALL[:-1], f"run_dir=b{number}", f"resume={source}", "steps=4"]) == 0
        (line,) = log_of(f"b{number}")
        assert "threads=64" in line and "threads=1" in line and "cpu_capability" not in line


@pytest.mark.slow
def test_another_instruction_set_in_a_second_process():
    assert train.main([*SMALL, "steps=2"]) == 0
    here = json.loads(Path("a/environment.json").read_text())["cpu_capability"]
    env = os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, "steps=4"]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=100)
    there = json.loads(Path("a/environment.json").read_text())["cpu_capability"]
    if here == there:
        pytest.skip(f"torch has no kernels here but {here}")
    (line,) = log_of()
    assert f"cpu_capability={here}" in line and f"cpu_capability={there}" in line


@pytest.mark.one_in(3)
@pytest.mark.parametrize("by", [-1.0, -1e9, 4e7])
def test_a_clock_that_is_set_changes_neither_results_nor_rates(by, monkeypatch):
    """Set within the second of two parts of a run, of which each writes checkpoints."""
    settings = ["save_every=1", "log_every=1", "schedule.horizon=6", "ema.decay=0.9"]
    assert train.main([*SMALL[:-1], *settings, "run_dir=whole", "steps=6"]) == 0
    assert train.main([*SMALL, *settings, "steps=3"]) == 0
    now, calls = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + by * (next(calls) > 4))
    assert train.main([*SMALL, *settings, "steps=6"]) == 0 and next(calls) > 6
    assert not same_but(state("whole"), state("a")) and checkpoints("a")[-1].name == "step_00000006"
    rates = [line.get("samples_per_second", 1) for line in lines("a")]
    assert min(*rates, summary("a")["seconds"], summary("a")["samples_per_second"]) > 0


def note(before, folder=Path("run")):
    folder.mkdir(exist_ok=True)
    (folder / "environment.json").write_text(before if isinstance(before, str) else json.dumps(before))
    return changed_machine(folder / "checkpoints/step_00000002", CPU)


def this():
    return {"device": describe_device(CPU), "versions": describe_versions(), **describe_cpu()}


NEWER = [*this()["cpu_features"], "avx99"]
GPU = {"type": "cuda", "name": "NVIDIA H100", "cuda": "12.8", "memory_bytes": 1}
RECORDS = {  # environment.json of the checkpoint's run, and what is said of it: nothing, or these words
    "the same": (this(), []),
    "oneDNN held down": (this() | {"onednn_max_cpu_isa": "AVX2"}, ["onednn_max_cpu_isa=AVX2", "onednn_max_cpu_isa=unset"]),
    "only the features that differ": (
        this() | {"cpu_features": NEWER}, ["cpu_features=avx99", "cpu_features=none of these"]
    ),
    "of another torch": (
        this() | {"versions": {"torch": "2.0.0"}}, ["torch=2.0.0", f"torch={describe_versions()['torch']}"]
    ),
    "of a GPU": (this() | {"device": GPU}, ["device=cuda", "device=cpu"]),
} | {
    f"damaged: {text[:20]}": (text, [])
    for text in ("", "{", "[1]", "null", "{}", "[" * 100_000, '{"device": 3, "versions": [], "x": 1}')
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDS)
def test_what_decides_about_bits_is_compared_as_far_as_it_is_known(case):
    before, words = RECORDS[case]
    text = note(before)
    assert text is None if not words else text is not None and all(word in text for word in words)


def test_no_environment_json_is_none(tmp_path):
    assert changed_machine(tmp_path / "checkpoints/step_00000002", CPU) is None


def test_on_a_gpu_the_processor_does_not_count():
    one, other = (_what_matters(this() | {"device": GPU, "threads": threads, "cpu": "x"}) for threads in (1, 2))
    assert one == other and one["gpu"] == "NVIDIA H100"
