"""What torch and the core do, fact by fact, where no other test shows it; docs/BEHAVIOURS.md is the table of contents."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import pickle
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared import a_weight
from test_recipes import RECIPE
from test_recipes import run as run_recipe
from tiers import rows
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import SGD, Optimizer

import train
from amp_core import Amp, Clip, keep_fp32
from amp_core.cli import compose
from amp_core.config.errors import ConfigError
from amp_core.config.rules import build
from amp_core.config.schema import OptimizerConfig
from amp_core.run.environment import Job
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


@pytest.mark.parametrize(
    "mode, dtype, smallest, largest",
    [
        ("fp32", torch.float32, 2.0**-149, 3.4028234663852886e38),
        ("bf16", torch.bfloat16, 2.0**-133, 3.3895313892515355e38),
        ("fp16", torch.float16, 2.0**-24, 65504.0),
        ("o3", torch.float16, 2.0**-24, 65504.0),
    ],
)
def test_the_numbers_that_a_mode_can_hold(
    mode: str, dtype: torch.dtype, smallest: float, largest: float, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    assert Amp.named(mode).limits == (smallest, largest)
    low, high = torch.tensor([smallest, largest], dtype=torch.float64)
    assert low.to(dtype) == low and (low / 2).to(dtype) == 0
    assert high.to(dtype) == high and (high * 1.01).to(dtype).isinf()
    monkeypatch.chdir(tmp_path)
    assert train.main(["dry_run=true", "data=synthetic", f"amp={mode}"]) == 0
    shown = f"numbers from {smallest:.1e} to {largest:.1e}" in capsys.readouterr().out
    assert shown == (mode == "fp16")  # where a loss scale moves gradients into this range


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_grad_scaler_goes_quiet_without_a_gpu_or_stays_on_for_what_is_none() -> None:
    for device in ((), ("cuda",)):
        with pytest.warns(UserWarning, match="not available"):
            scaler = GradScaler(*device)
        assert not scaler.is_enabled() and scaler.state_dict() == {} and scaler.get_scale() == 1.0
    assert GradScaler("bogus").is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about the CPU")
@pytest.mark.parametrize("mode, dtype", [("fp16", "float16"), ("bf16", "bfloat16")])
def test_slow_16_bit_units_of_this_cpu_are_said_before_the_start(mode: str, dtype: str) -> None:
    is_fast = {"fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported, "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported}
    warnings = " ".join(train.checked([f"amp={mode}", "device=cpu"])[1])
    assert (f"no fast {dtype} units" in warnings) != is_fast[mode]()


GPUS = {"P100": (6, 0), "V100": (7, 0), "A100": (8, 0), "H100": (9, 0)}
"""Compute capabilities, as in NVIDIA's list of its GPUs."""


@pytest.mark.parametrize("gpu", GPUS)
def test_what_a_gpu_lacks_is_said_before_the_start(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor Cores are in GPUs since 7.0, those of bfloat16 and TF32 since 8.0, of float8 since 8.9."""
    capability = GPUS[gpu]
    stubs = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: gpu,
        # As torch answers: emulation counts unless it is told not to.
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    expected = {
        "fp16": (7, 0, f"amp=fp16: {gpu} has no Tensor Cores"),
        "bf16": (8, 0, f"amp=bf16: {gpu} only emulates bfloat16, which is slow; use amp=fp16"),
        "tf32": (8, 0, f"amp=tf32: {gpu} has no TF32 units"),
        "fp8": (8, 9, "amp=fp8: no float8 units here"),
        "fp32": (0, 0, "amp=fp32"),
    }
    for mode, (major, minor, warning) in expected.items():
        warnings = " ".join(train.checked([f"amp={mode}", "device=cuda"])[1])
        assert (warning in warnings) == (capability < (major, minor)), (mode, warnings)
        assert gpu not in " ".join(train.checked([f"amp={mode}", "device=cpu"])[1])
    with pytest.raises(ConfigError, match=r"needs 2 GPUs; this machine has 1. Use layout.nproc_per_node=1, or device"):
        train.checked(["layout=ddp", "layout.nproc_per_node=2", "device=cuda"])


def test_is_bf16_supported_counts_emulation_unless_told_not_to() -> None:
    parameter = inspect.signature(torch.cuda.is_bf16_supported).parameters["including_emulation"]
    assert parameter.default is True
    calls = [
        node
        for path in (ROOT / "amp_core").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "is_bf16_supported"
    ]
    assert calls and all(ast.unparse(call.keywords[0]) == "including_emulation=False" for call in calls)


# --- what autocast does to each operation ---------------------------------------------------------------------------------

OUT_OF_FP32 = {
    "linear": lambda f: F.linear(f, f), "matmul": lambda f: f @ f, "addmm": lambda f: torch.addmm(f, f, f),
    "einsum": lambda f: torch.einsum("ij,jk->ik", f, f), "conv2d": lambda f: F.conv2d(f.view(1, 1, 4, 4), f.view(1, 1, 4, 4)),
    "conv_transpose2d": lambda f: F.conv_transpose2d(f.view(1, 1, 4, 4), f.view(1, 1, 4, 4)),
    "attention": lambda f: F.scaled_dot_product_attention(f.view(1, 1, 2, 8), f.view(1, 1, 2, 8), f.view(1, 1, 2, 8)),
    "prelu": lambda f: F.prelu(f, torch.ones(1, device=f.device)),
}  # fmt: skip
OUT_OF_FP16 = {
    "softmax": lambda h: h.softmax(1), "log_softmax": lambda h: h.log_softmax(1), "layer_norm": lambda h: F.layer_norm(h, (4,)),
    "group_norm": lambda h: F.group_norm(h, 2), "rms_norm": lambda h: F.rms_norm(h, (4,)),
    "sum": lambda h: h.sum(), "cumsum": lambda h: h.cumsum(0), "norm": lambda h: h.norm(), "normalize": lambda h: F.normalize(h),
    "cosine_similarity": lambda h: F.cosine_similarity(h, h), "exp": lambda h: h.exp(), "log": lambda h: h.log(),
    "pow": lambda h: h.pow(2), "rsqrt": lambda h: h.rsqrt(), "reciprocal": lambda h: h.reciprocal(),
    "softplus": lambda h: F.softplus(h), "tan": lambda h: h.tan(),
    "interpolate": lambda h: F.interpolate(h.view(1, 1, 4, 4), scale_factor=2.0, mode="bilinear"),
    "prod": lambda h: h.prod(), "mse_loss": lambda h: F.mse_loss(h, h), "l1_loss": lambda h: F.l1_loss(h, h),
    "smooth_l1_loss": lambda h: F.smooth_l1_loss(h, h), "kl_div": lambda h: F.kl_div(h, h, reduction="sum"),
    "bce_with_logits": lambda h: F.binary_cross_entropy_with_logits(h, h),
    "cross_entropy": lambda h: F.cross_entropy(h, h.softmax(1)), "cosine_embedding_loss": lambda h: F.cosine_embedding_loss(h, h, torch.ones(4, device=h.device)),
    "mean": lambda h: h.mean(), "var": lambda h: h.var(), "sqrt": lambda h: h.sqrt(), "sigmoid": lambda h: h.sigmoid(),
    "relu": lambda h: h.relu(), "gelu": lambda h: F.gelu(h), "tanh": lambda h: h.tanh(),
    "batch_norm": lambda h: F.batch_norm(h, torch.zeros(4, device=h.device), torch.ones(4, device=h.device)),
    "avg_pool2d": lambda h: F.avg_pool2d(h.view(1, 1, 4, 4), 2), "avg_pool3d": lambda h: F.avg_pool3d(h.view(1, 1, 1, 4, 4), 1),
}  # fmt: skip
OUT_OF_BOTH = {
    "add": lambda h, f: h + f, "mul": lambda h, f: h * f, "cat": lambda h, f: torch.cat([h, f]),
    "stack": lambda h, f: torch.stack([h, f]), "addcdiv": lambda h, f: torch.addcdiv(h, f, f),
    "addcmul": lambda h, f: torch.addcmul(h, f, f), "atan2": lambda h, f: torch.atan2(h, f),
}  # fmt: skip
RAISES_ON_CPU = {
    "bilinear": lambda h, f: F.bilinear(h, f, f.view(1, 4, 4)), "tensordot": lambda h, f: torch.tensordot(h, f, 1),
    "index_put": lambda h, f: f.index_put((torch.zeros(4, dtype=torch.int64, device=f.device),), h),
}  # fmt: skip
STAYS_16_BIT_ON_CPU = {
    "softmax", "log_softmax", "layer_norm", "group_norm", "rms_norm", "sum", "cumsum", "norm", "normalize",
    "cosine_similarity", "exp", "log", "pow", "rsqrt", "reciprocal", "softplus", "tan", "interpolate",
}  # fmt: skip
IN_FP32_EVERYWHERE = {
    "prod", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "bce_with_logits", "cross_entropy", "cosine_embedding_loss",
}  # fmt: skip
UNTOUCHED = {"mean", "var", "sqrt", "sigmoid", "relu", "gelu", "tanh", "batch_norm", "avg_pool2d"}


def dtypes(device: str) -> dict[str, torch.dtype]:
    """The dtype that comes out of each operation under fp16 autocast."""
    f = torch.ones(4, 4, device=device)
    h = f.half()
    return {
        **{name: op(f).dtype for name, op in OUT_OF_FP32.items()},
        **{name: op(h).dtype for name, op in OUT_OF_FP16.items()},
        **{name: op(h, f).dtype for name, op in OUT_OF_BOTH.items()},
    }


def expected_dtypes(*, on_cpu: bool) -> dict[str, torch.dtype]:
    table = dict.fromkeys(OUT_OF_FP32, FP16) | dict.fromkeys(IN_FP32_EVERYWHERE, FP32) | dict.fromkeys(UNTOUCHED, FP16)
    table |= dict.fromkeys(STAYS_16_BIT_ON_CPU, FP16 if on_cpu else FP32) | dict.fromkeys(OUT_OF_BOTH, FP32)
    table["rms_norm"] = FP16 if on_cpu or torch.__version__ < "2.12" else FP32  # 2.12 put it into CUDA's list
    return table | {"avg_pool3d": FP32 if on_cpu else FP16}


def test_operations_on_a_cpu_stay_16_bit_more_often_than_the_tutorials_say() -> None:
    with torch.autocast("cpu", FP16):
        assert dtypes("cpu") == expected_dtypes(on_cpu=True)
        h, f = torch.ones(4, 4, dtype=FP16), torch.ones(4, 4)
        for op in RAISES_ON_CPU.values():
            with pytest.raises(RuntimeError, match="dtype"):
                op(h, f)


class OnCuda:
    """Autocast as on a GPU: a real one, or its rules without arithmetic. No gradients: a fake tensor's abort torch."""

    def __enter__(self) -> OnCuda:
        self.fake = None if torch.cuda.is_available() else FakeTensorMode()
        if self.fake:
            self.fake.__enter__()
        # torch.autocast("cuda") switches itself off where there is no GPU.
        self.before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", FP16)
        return self

    def __exit__(self, *problem: Any) -> None:
        torch.set_autocast_enabled("cuda", self.before[0])
        torch.set_autocast_dtype("cuda", self.before[1])
        if self.fake:
            self.fake.__exit__(*problem)


def test_operations_on_a_gpu_follow_the_lists_of_the_documentation() -> None:
    with OnCuda():
        assert dtypes("cuda") == expected_dtypes(on_cpu=False)
        h, f = torch.ones(4, 4, device="cuda").half(), torch.ones(4, 4, device="cuda")
        assert {op(h, f).dtype for op in RAISES_ON_CPU.values()} == {FP32}
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_binary_cross_entropy_raises_on_a_gpu_and_not_on_a_cpu(reduction: str) -> None:
    with OnCuda():
        p = torch.full((4,), 0.5, device="cuda")
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(p, p, reduction=reduction)
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.BCELoss(reduction=reduction)(p.half(), p)
        assert F.binary_cross_entropy_with_logits(p.half(), p, reduction=reduction).dtype == FP32
    with torch.autocast("cpu", FP16):
        p = torch.full((4,), 0.5)
        assert F.binary_cross_entropy(p, p, reduction=reduction).dtype == FP32


def test_sums_of_70000_ones_are_infinite_in_fp16_and_their_mean_is_not() -> None:
    ones = torch.ones(70000, dtype=FP16)
    assert ones.sum().isinf() and ones.mean() == 1.0 and ones.sum(dtype=FP32) == 70000
    with torch.autocast("cpu", FP16):
        assert ones.sum().isinf() and keep_fp32(torch.sum)(ones) == 70000


# --- every recipe ---------------------------------------------------------------------------------------------------------


@RECIPE
def test_a_recipe_keeps_the_order_of_a_step_and_evaluates_in_the_dtypes_of_training(
    recipe: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def stock() -> tuple[GradScaler, Optimizer]:
    weight, optimizer = a_weight()
    scaler = GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    return scaler, optimizer


STOCK_ERRORS: dict[str, Callable[[GradScaler, Optimizer], object]] = {
    "already been called on this optimizer": lambda s, o: (s.unscale_(o), s.unscale_(o)),
    "called after step": lambda s, o: (s.step(o), s.unscale_(o)),
    "step\\(\\) has already been called": lambda s, o: (s.step(o), s.step(o)),
    "No inf checks were recorded prior to update": lambda s, o: s.update(),
    "No inf checks were recorded for this optimizer": lambda s, o: (o.zero_grad(), s.step(o)),
    "only be pickled at the beginning": lambda s, o: (s.step(o), pickle.dumps(s)),
    "Attempted unscale_ but _scale is None": lambda s, o: GradScaler("cpu").unscale_(o),
    "Closure use is not currently supported": lambda s, o: s.step(o, closure=lambda: 0.0),
    "The growth factor must be > 1": lambda s, o: GradScaler("cpu", growth_factor=1.0),
    "source state dict is empty": lambda s, o: s.load_state_dict({}),
}


@pytest.mark.parametrize("message", STOCK_ERRORS)
def test_what_grad_scaler_answers_to_misuse(message: str) -> None:
    with pytest.raises((RuntimeError, AssertionError), match=message):
        STOCK_ERRORS[message](*stock())


def test_a_factor_that_grad_scaler_refuses_it_loads_and_never_grows_again() -> None:
    scaler = GradScaler("cpu", growth_interval=1)
    scaler.load_state_dict(scaler.state_dict() | {"growth_factor": 1.0})
    weight, optimizer = a_weight()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536.0 and scaler.get_growth_factor() == 1.0
    amp = Amp.named("fp16")
    amp.load_state_dict(scaler.state_dict())
    assert amp.scaler.policy.growth_factor == 2.0


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
    "min_scale": 50000.0, "dynamic": False, "max_scale_per_sample": 16.0,
}  # fmt: skip


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
    assert {name for name, value in vars(Amp.named("bf16").config).items() if value is None} - {
        "update"
    } == KNOBS.keys()


def test_closures_are_refused_before_the_start() -> None:
    (problem,) = check_optimizer(OptimizerConfig("LBFGS", 0.1, 0.0, None, "float32", {}))
    assert "closure" in problem


def norm_of_parts(rank: int, clip: Clip | None) -> tuple[float, list[float]]:
    """Each rank holds two of four weights, whose gradients are 1, 2, 4 and 10."""
    weight = torch.zeros(2, requires_grad=True)
    amp, optimizer = Amp.named("fp16"), SGD([weight], lr=1.0)
    amp.backward((weight * torch.tensor([[1.0, 2.0], [4.0, 10.0]])[rank]).sum())
    report = amp.step(optimizer, clip, sharded=[optimizer])
    amp.update()
    return float(report.grad_norm), weight.tolist()


@pytest.mark.parametrize("clip", rows([None, Clip.norm(1.1)], Clip.norm(1.1)), ids=str)
def test_the_norm_of_a_sharded_gradient_is_that_of_the_whole(clip: Clip | None, on_ranks: Callable[..., Any]) -> None:
    (norm_a, a), (norm_b, b) = on_ranks(norm_of_parts, clip)
    assert norm_a == norm_b == pytest.approx(11.0)  # sqrt(1 + 4 + 16 + 100)
    factor = 1.0 if clip is None else 0.1
    assert a + b == pytest.approx([-1.0 * factor, -2.0 * factor, -4.0 * factor, -10.0 * factor], rel=1e-5)
