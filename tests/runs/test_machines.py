"""A run that goes on where bits differ says so: another processor, instruction set, number of threads or torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import checkpoints, state

import train
from amp_core.run.machine import describe_cpu, describe_device, describe_versions, moved

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["data=synthetic", "data.num_samples=96", "data.image_size=8", "data.num_classes=4", "model.options.width=8"]
SMALL += ["device=cpu", "log.progress=false", "batch_size=8", "run_dir=a"]
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


def test_a_resume_on_the_same_machine_says_nothing():
    assert train.main([*SMALL, "steps=2"]) == 0 and train.main([*SMALL, "steps=4"]) == 0
    assert state("a")["progress"]["step"] == 4 and not log_of()


def test_a_resume_on_another_processor_is_said_once_and_both_are_named():
    assert train.main([*SMALL, "steps=2"]) == 0
    change(cpu="AMD EPYC 7B13", cpu_features=["avx2", "fma"], cpu_capability="AVX2")
    assert train.main([*SMALL, "steps=4"]) == 0
    (line,) = log_of()
    assert "cpu=AMD EPYC 7B13" in line and f"cpu={describe_cpu()['cpu']}" in line and "cpu_capability=AVX2" in line
    assert train.main([*SMALL, "steps=6"]) == 0  # the folder is this machine's by now
    assert log_of() == [line]


def test_a_start_from_the_checkpoint_of_another_folder_is_noticed_too():
    assert train.main([*SMALL, "steps=2"]) == 0
    change(threads=64)
    for number, source in enumerate(["a", *map(str, checkpoints("a")), str(checkpoints("a")[0] / "state.pt")]):
        assert train.main([*SMALL[:-1], f"run_dir=b{number}", f"resume={source}", "steps=4"]) == 0
        (line,) = log_of(f"b{number}")
        assert "threads=64" in line and "threads=1" in line and "cpu_capability" not in line


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


def test_oneDNN_held_down_is_another_instruction_set(monkeypatch):
    assert train.main([*SMALL, "steps=2"]) == 0
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert train.main([*SMALL, "steps=4"]) == 0
    (line,) = log_of()
    assert "onednn_max_cpu_isa=unset" in line and "onednn_max_cpu_isa=AVX2" in line


# --- what is compared -------------------------------------------------------------------------------------------------


def note(before, folder=Path("run")):
    folder.mkdir(exist_ok=True)
    (folder / "environment.json").write_text(before if isinstance(before, str) else json.dumps(before))
    return moved(folder / "checkpoints/step_00000002", CPU)


def this():
    return {"device": describe_device(CPU), "versions": describe_versions(), **describe_cpu()}


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "{}", "[" * 100_000, '{"device": 3, "versions": [], "x": 1}'])
def test_a_damaged_environment_json_is_none(text):
    assert note(text) is None


def test_no_environment_json_is_none(tmp_path):
    assert moved(tmp_path / "checkpoints/step_00000002", CPU) is None


def test_an_older_record_is_compared_in_what_it_has():
    older = {key: value for key, value in this().items() if not key.startswith(("cpu", "onednn"))}
    assert note(older) is None
    text = note(older | {"versions": {"torch": "2.0.0"}})
    assert text is not None and "torch=2.0.0" in text and f"torch={describe_versions()['torch']}" in text


def test_only_the_features_that_differ_are_listed():
    features = this()["cpu_features"]
    text = note(this() | {"cpu_features": [*features, "avx99"]})
    assert text is not None and "cpu_features=avx99" in text and "cpu_features=none of these" in text


def test_on_a_gpu_the_processor_does_not_count():
    from amp_core.run.machine import _what_matters

    gpu = {"type": "cuda", "name": "NVIDIA H100", "cuda": "12.8", "memory_bytes": 1}
    one, other = (_what_matters(this() | {"device": gpu, "threads": threads, "cpu": "x"}) for threads in (1, 2))
    assert one == other and one["gpu"] == "NVIDIA H100"
    text = note(this() | {"device": gpu})
    assert text is not None and "device=cuda" in text and "device=cpu" in text
