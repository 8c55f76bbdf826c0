"""Versions of torch and Python: what is refused, what the files promise, and the script that runs the tests in each."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

from amp_core.config.schema import OptimizerConfig
from amp_core.config.versions import ANYWAY, TESTED, untested
from amp_core.step.optimizers import build_optimizer, check_optimizer

ROOT = Path(__file__).resolve().parents[2]


def minors(texts):
    return sorted({tuple(int(number) for number in text.split(".")[:2]) for text in texts})


def test_the_image_takes_the_pinned_torch_and_extras_that_there_are():
    text = (ROOT / "Dockerfile").read_text()
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and set(re.findall(r"pytorch/pytorch:([\d.]+)-cuda", text)) == {pinned[1]}
    extras = re.search(r"'\.\[([\w,]+)\]'", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras and set(extras[1].split(",")) <= set(project["optional-dependencies"])


def test_linters_and_type_checkers_come_with_make_check_alone():
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = re.search(r"^EXTRAS := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert extras
    asked = [text for extra in extras[1].split(",") for text in content["project"]["optional-dependencies"][extra]]
    checkers, others = (
        {re.split(r"\W*[\[>=]", text)[0] for text in texts} for texts in (content["dependency-groups"]["check"], asked)
    )
    assert checkers == {"pre-commit", "pyright", "ruff"} and not checkers & others and {"pytest", "wandb"} <= others


def test_every_promise_of_versions_is_the_range_that_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = dict(
        re.match(r"(\w+)(.*)", text).groups()
        for text in [*project["dependencies"], *project["optional-dependencies"]["vision"]]
    )
    for found, texts in (
        (project["requires-python"], [row[2] for row in TESTED]),
        (ranges["torch"], [row[0] for row in TESTED]),
        (ranges["torchvision"], [row[1] for row in TESTED]),
    ):
        all_minors = minors(texts)
        (major, first), (_, last) = all_minors[0], all_minors[-1]
        assert all_minors == [(major, minor) for minor in range(first, last + 1)]
        assert found == f">={major}.{first},<{major}.{last + 1}"
    pythons = [f"{major}.{minor}" for major, minor in minors(row[2] for row in TESTED)]
    assert [text for text in project["classifiers"] if "Python ::" in text] == [
        f"Programming Language :: Python :: {python}" for python in pythons
    ]
    torches = [f"{major}.{minor}" for major, minor in minors(row[0] for row in TESTED)]
    assert (
        f"Python {pythons[0]} to {pythons[-1]}, torch {torches[0]} to {torches[-1]}" in (ROOT / "README.md").read_text()
    )
    assert f"Python {', '.join(pythons[:-1])} or {pythons[-1]} is needed" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("torch, torchvision, python", TESTED)
def test_tested_versions_are_accepted_with_any_patch_and_build(torch, torchvision, python):
    assert untested(torch, python) is None
    assert untested(f"{torch[:-1]}9+cu130", f"{python}.9") is None


@pytest.mark.parametrize("torch, python", [("2.10.1", "3.12.1"), ("2.16.0a0", "3.12.1"), ("2.13.0", "3.10.4")])
def test_other_versions_are_refused_unless_asked_for(torch, python, monkeypatch):
    monkeypatch.delenv(ANYWAY, raising=False)
    problem = untested(torch, python)
    assert f"torch {torch} with Python {python} is not supported" in problem
    assert all(f"{row[0]} with Python {row[2]}" in problem for row in TESTED)
    monkeypatch.setenv(ANYWAY, "1")
    assert untested(torch, python) is None


def test_a_run_under_another_torch_ends_with_2_and_one_line_before_torch_is_imported(tmp_path, monkeypatch):
    monkeypatch.delenv(ANYWAY, raising=False)
    info = tmp_path / "torch-2.10.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.1\n")
    (tmp_path / "torch.py").write_text("raise AssertionError('imported')\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    for rank in ("0", "1"):  # one of several ranks is enough to tell it
        environ = {**os.environ, "PYTHONPATH": str(tmp_path), "RANK": rank}
        command = [sys.executable, ROOT / "train.py", "steps=1"]
        done = subprocess.run(command, cwd=empty, env=environ, capture_output=True, text=True)
        assert done.returncode == 2
        lines = [f"error: {untested('2.10.1')}"] if rank == "0" else []
        assert done.stderr.splitlines() == lines and not done.stdout and not list(empty.iterdir())


# --- what differs between versions of torch ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.0"])
@pytest.mark.parametrize("name", ["Adagrad", "AdamW"])
def test_the_fused_adagrad_is_left_on_cuda_where_torch_refuses_it(name, version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    is_fused = name != "Adagrad" or torch.__version__ >= "2.12"
    cfg = OptimizerConfig(name, 0.1, 0.0, None, "float32", {})
    with FakeTensorMode():
        nets = {device: nn.ParameterList([torch.empty(3, device=device)]) for device in ("cpu", "cuda")}
        built = {device: build_optimizer(cfg, net) for device, net in nets.items()}
        assert built["cpu"].defaults["fused"] and bool(built["cuda"].defaults["fused"]) == is_fused
    asked = dataclasses.replace(cfg, fused=True)
    assert check_optimizer(asked) == []
    found = check_optimizer(asked, on_cuda=True)
    assert found == [] if is_fused else "Adagrad has no fused form on CUDA in torch 2.11.0+cu130" in found[0]
