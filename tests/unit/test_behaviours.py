"""What torch and the core do, fact by fact, where no other test shows it; docs/BEHAVIOURS.md is the table of contents."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared import a_weight
from test_recipes import RECIPE
from test_recipes import run as run_recipe
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import register_module_forward_hook

import train
from amp_core import Amp, keep_fp32
from amp_core.cli import compose
from amp_core.config.errors import ConfigError
from amp_core.config.job import Job
from amp_core.config.rules import amp_config, build
from amp_core.config.schema import OptimizerConfig
from amp_core.run.preflight import units_lacking
from amp_core.run.process import environment
from amp_core.step.optimizers import check_optimizer

ROOT = Path(__file__).resolve().parents[2]
INF, NAN = float("inf"), float("nan")
FP16, FP32 = torch.float16, torch.float32


PATCHES = """
import torch, torch.nn.functional as F
torch.manual_seed(0)
x, w = torch.randn(2, 16, 32, 32).bfloat16(), (torch.randn(32, 16, 4, 4) / 16).bfloat16()
exact = F.conv2d(x.double(), w.double(), stride=4)
print(((F.conv2d(x, w, stride=4).double() - exact).norm() / exact.norm()).item())
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX units")
def test_a_bf16_convolution_of_patches_is_wrong_on_amx_units_alone() -> None:
    """The result is rounded once, to 8 bits: by 2^-8 of it, and the fp32 sum of 256 products adds less than that."""

    def error(**isa: str) -> float:
        done = subprocess.run([sys.executable, "-c", PATCHES], env=os.environ | isa, capture_output=True, text=True)
        return float(done.stdout)

    assert error(ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16") < 2**-7
    assert error(ONEDNN_MAX_CPU_ISA="DEFAULT") > 0.5  # if torch computes it right now, delete the row and this test


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX units")
def test_a_network_with_a_convolution_that_is_wrong_here_is_refused(tmp_path) -> None:
    def prepare(net: nn.Module, **options: Any) -> None:
        Amp.named("bf16", device="cpu", **options).prepare(net)

    for right in (
        nn.Conv2d(16, 32, 3),
        nn.Conv2d(3, 32, 16, 16),
        nn.Conv2d(3, 32, 7, 2),
        keep_fp32(nn.Conv2d(16, 32, 4, 4)),
    ):
        prepare(nn.Sequential(right))
    wrong, state = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 4, 4)), torch.get_rng_state()
    with pytest.raises(ConfigError, match=r'wrongly on this CPU.*ONEDNN_MAX_CPU_ISA.*amp.keep_fp32=\["1"\]'):
        prepare(wrong)
    assert torch.equal(torch.get_rng_state(), state)


# --- modes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, dtype, smallest, largest", [
    ("fp32", torch.float32, 2.0**-149, 3.4028234663852886e38),
    ("bf16", torch.bfloat16, 2.0**-133, 3.3895313892515355e38),
    ("fp16", torch.float16, 2.0**-24, 65504.0),
    ("o3", torch.float16, 2.0**-24, 65504.0),
])  # fmt: skip
def test_the_numbers_that_a_mode_can_hold(mode, dtype, smallest, largest, tmp_path, capsys, monkeypatch):
    assert Amp.named(mode).limits == (smallest, largest)
    low, high = torch.tensor([smallest, largest], dtype=torch.float64)
    assert low.to(dtype) == low and (low / 2).to(dtype) == 0
    assert high.to(dtype) == high and (high * 1.01).to(dtype).isinf()
    monkeypatch.chdir(tmp_path)
    assert train.main(["dry_run=true", "data=synthetic", f"amp={mode}"]) == 0
    shown = f"numbers from {smallest:.1e} to {largest:.1e}" in capsys.readouterr().out
    assert shown == (mode == "fp16")  # where a loss scale moves gradients into this range


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about the CPU")
@pytest.mark.parametrize("mode, dtype", [("fp16", "float16"), ("bf16", "bfloat16")])
def test_slow_16_bit_units_of_this_cpu_are_said_before_the_start(mode: str, dtype: str) -> None:
    is_fast = {"fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported, "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported}
    warnings = " ".join(train.checked([f"amp={mode}", "device=cpu"]).notes)
    assert (f"no fast {dtype} units" in warnings) != is_fast[mode]()


GPUS = {"P100": (6, 0), "V100": (7, 0), "A100": (8, 0), "H100": (9, 0)}
"""Compute capabilities, as in NVIDIA's list of its GPUs."""


@pytest.mark.parametrize("gpu", GPUS)
def test_what_a_gpu_lacks_is_said_before_the_start(gpu: str) -> None:
    """Tensor Cores are in GPUs since 7.0, those of bfloat16 and TF32 since 8.0."""
    expected = {
        "fp16": (7, 0, f"amp=fp16: {gpu} has no Tensor Cores"),
        "bf16": (8, 0, f"amp=bf16: {gpu} only emulates bfloat16, which is slow; use amp=fp16"),
        "tf32": (8, 0, f"amp=tf32: {gpu} has no TF32 units; this is plain fp32"),
        "fp32": (0, 0, ""),
    }
    for mode, (major, minor, warning) in expected.items():
        found = units_lacking(amp_config(mode), gpu, GPUS[gpu])
        assert found == ([warning] if GPUS[gpu] < (major, minor) else []), mode
    assert "amp=fp8: no float8 units here" in " ".join(train.checked(["amp=fp8", "device=cpu"]).notes)


# --- every recipe ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(5)
@RECIPE
def test_a_recipe_keeps_the_order_of_a_step_and_evaluates_in_the_dtypes_of_training(recipe, own_folder, monkeypatch):
    events: list[str] = []
    kept: list[Tensor | None] = []  # by zero_grad
    # By module and whether it trains: the dtypes that came out, and whether autocast was on.
    seen: dict[nn.Module, dict[bool, set[tuple[torch.dtype, bool]]]] = defaultdict(lambda: {True: set(), False: set()})

    def spy(owner: type, method: str, letter: str) -> None:
        original = getattr(owner, method)

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            events.append(letter)
            if letter == "z":
                kept.extend(p.grad for o in args for group in o.param_groups for p in group["params"])
            return result

        monkeypatch.setattr(owner, method, called)

    def probe(module: nn.Module, inputs: Any, output: Any) -> None:
        # What runs before the first backward pass may be a trial of shapes.
        if events and isinstance(output, Tensor) and any(True for _ in module.parameters(recurse=False)):
            seen[module][module.training].add((output.dtype, torch.is_autocast_enabled("cpu")))

    for owner, method, letter in (
        (Amp, "backward", "b"),
        (Amp, "step", "s"),
        (Amp, "update", "u"),
        (Amp, "zero_grad", "z"),
    ):
        spy(owner, method, letter)
    handle = register_module_forward_hook(probe)
    try:
        run_recipe(recipe, "a", "steps=3", "amp=bf16", "accumulation=2")
    finally:
        handle.remove()
    # Gradients are dropped after a step or before the next window, never between its micro-batches.
    assert re.fullmatch(r"(z*(b+z*s)+u)+z+", "".join(events)), "".join(events)
    assert kept and all(gradient is None for gradient in kept)
    assert events.count("u") == 3 + 2 * (recipe == "finetuning")  # the steps of its base
    both = [found for found in seen.values() if found[True] and found[False]]
    assert both and all(found[True] == found[False] for found in both)
    assert any(casts for found in both for _, casts in found[False])


def test_no_process_group_outlives_a_run() -> None:
    """Jobs of a sweep may share a process, and one of them may fail."""
    job = Job(build(compose.compose(["layout=ddp", "device=cpu", "data=synthetic"])), run_dir=None)
    for fails in (False, True):
        with contextlib.suppress(ZeroDivisionError), environment(job):
            assert dist.is_initialized() and 1 / (not fails)
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    "overrides, is_on",
    [([], True), (["perf=graph"], True), (["perf.cudnn_benchmark=false"], False), (["deterministic=true"], False)],
)
def test_cudnn_times_its_algorithms_unless_bits_must_repeat(overrides: list[str], is_on: bool) -> None:
    """For the run alone: a job of a sweep leaves the setting as it found it, also when it fails."""
    job = Job(build(compose.compose([*overrides, "device=cpu", "data=synthetic"])), run_dir=None)
    for before in (False, True):
        with torch.backends.cudnn.flags(benchmark=before):
            with contextlib.suppress(ZeroDivisionError), environment(job):
                assert torch.backends.cudnn.benchmark is is_on and 1 / before
            assert torch.backends.cudnn.benchmark is before


# --- the loss scale -------------------------------------------------------------------------------------------------------


def test_a_scale_is_not_loaded_into_the_middle_of_a_window() -> None:
    weight, optimizer = a_weight()
    amp = Amp.named("fp16")
    state = amp.state_dict()
    amp.backward(weight.sum())
    with pytest.raises(RuntimeError, match="middle of a window"):
        amp.load_state_dict(state)
    amp.step(optimizer)
    amp.update()
    amp.load_state_dict(state)


def test_gradients_are_unscaled_before_any_loss_was_scaled() -> None:
    """The first window of a resumed run may have gradients that came from elsewhere; GradScaler raises there."""
    weight, optimizer = a_weight()
    weight.grad = torch.full((1,), 65536.0)
    amp = Amp.named("fp16")
    amp.load_state_dict(GradScaler("cpu").state_dict())
    amp.unscale_(optimizer)
    assert amp.step(optimizer).taken and weight.item() == -1.0


KNOBS: dict[str, Any] = {
    "init_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3, "max_scale": 70000.0,
    "min_scale": 50000.0, "dynamic": False, "max_scale_per_sample": 16.0, "hysteresis": 2,
}  # fmt: skip


ELSEWHERE = {"consecutive_hysteresis", "skip_above"}
"""Those of test_skips.py."""


def trace(amp: Amp) -> list[float]:
    weight, optimizer = a_weight()
    seen = []
    for bad in (True, False, False, False, False, True):
        seen.append(amp.scale)
        amp.backward((weight * (INF if bad else 1.0)).sum())
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("knob", KNOBS)
def test_every_knob_of_the_loss_scale_changes_what_happens(knob: str) -> None:
    usual, changed = ({"growth_interval": 2} | knobs for knobs in ({}, {knob: KNOBS[knob]}))
    assert trace(Amp.named("fp16", samples=8, **changed)) != trace(Amp.named("fp16", samples=8, **usual))


def test_the_knobs_above_are_all_that_a_mode_without_a_loss_scale_lacks() -> None:
    lacks = {name for name, value in vars(Amp.named("bf16").config).items() if value is None}
    assert lacks - {"update", "format", "granularity", "keep_bf16", "scale_rule", *ELSEWHERE} == KNOBS.keys()


def test_closures_are_refused_before_the_start() -> None:
    (problem,) = check_optimizer(OptimizerConfig("LBFGS", 0.1, 0.0, None, "float32", {}))
    assert "closure" in problem
