"""Faults that raise nothing are reported at a log line, with the module and the fix; and the fix ends the warning."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planting import Spoilt
from small import COMMON, SMALL
from test_recipes import on_two_ranks
from tiers import rows
from torch import Tensor, nn
from waits import Waits

import recipes.classification
import train
from amp_core import Amp, Doctor
from amp_core.data import Data, build_data
from amp_core.doctor.silent import Silent
from amp_tools.zeros import Zero, find_zeros
from recipes import RECIPES

pytestmark = pytest.mark.usefixtures("own_folder")
SHORT = [*COMMON, *SMALL["classification"][:-1], "steps=8", "log_every=2", "schedule=constant"]


class RMSNorm(nn.Module):
    """As it is written by hand: in fp16 the square of 256 is infinite, and x / inf is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class Steep(nn.Module):
    """Does nothing, but its gradient is a million times larger within."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1e-3 * 1e-3 * 1e3 * 1e3


class Large(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.factor


class LargeInEvaluation(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else super().forward(x * 1e5) * 1e-5


def net(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), *between, nn.Linear(32, 4))


def loud(gain: float) -> nn.Sequential:
    """Its RMSNorm gets numbers that are about `gain`."""
    found = net(RMSNorm())
    with torch.no_grad():
        found[1].weight.mul_(gain)
    return found


@dataclass(frozen=True)
class Fault:
    name: str
    build: Callable[[], nn.Module]
    settings: str
    warning: str
    """A regular expression for the only warning; its group is the fix, as overrides."""
    healthy: Callable[[], nn.Module] | None = None
    """What is fixed by other code."""
    loss: float = 1.0
    """A factor."""
    code: int = 0


FAULTS = [
    Fault(
        "gradients that are 0",
        lambda: net(nn.ReLU()),
        "amp=fp16 amp.init_scale=1",
        r"step 2: .*% of the gradients of [13] are 0 at loss scale 1, .*% with (\S+) \(tried\)",
        loss=2.0**-24,
    ),
    Fault(
        "gradients that are 0, without a loss scale",
        lambda: net(nn.ReLU()),
        "amp=o3",
        r"step 2: .*% of the gradients of [13] are 0 at loss scale 1, .*% with (amp=o2 \S+) \(tried\)",
        loss=2.0**-24,
    ),
    Fault(
        "an RMSNorm whose square overflows",
        lambda: loud(2000),
        "amp=fp16 amp.init_scale=16",
        r"step 2: .*% of the outputs of 2 are 0 in fp16 only; (.*) \(tried\)",
    ),
    Fault(
        "fp16 weights that do not move",
        lambda: net(nn.ReLU()),
        "amp=o3 optimizer.lr=1e-7",
        r"step 4: [13]: most 16-bit weights did not move since the last log line, lost to rounding; (amp=o2)",
    ),
    Fault(
        "bf16 weights that do not move",
        lambda: net(nn.ReLU()),
        "amp=bf16_pure amp.update=nearest optimizer.lr=1e-7",
        r"step 4: [13]: most 16-bit weights did not move .*; (amp.update=stochastic)",
    ),
    Fault(
        "a channel with an infinite variance",
        lambda: net(Large(1e22), nn.BatchNorm1d(32)),
        "amp=bf16",
        r"step 2: running variances of 3 are not finite, its channels are dead in evaluation",
        healthy=lambda: net(Large(1e2), nn.BatchNorm1d(32)),
    ),
    Fault(
        "a loss scale at its floor",
        lambda: net(Steep()),
        "amp=fp16 steps=40 log_every=5 doctor.after_skips=50",
        r"the loss scale is at its floor amp.min_scale=1, small gradients may be 0; (.*) \(tried at .* 65536\)",
    ),
    Fault(
        "an evaluation that is not finite",
        lambda: net(LargeInEvaluation(32, 32)),
        "amp=fp16 eval_every=4",
        r"step 4: loss of the evaluation is not finite: overflow in .* in 2, .* Try: (.*) \(tried\)",
        code=5,
    ),
]


def warnings_of(folder: str, *settings: str, code: int = 0) -> list[str]:
    """The warnings of a run."""
    assert train.main([*settings, f"run_dir={folder}"]) == code
    return re.findall(r"WARNING (.*)", Path(folder, "train.log").read_text())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_silent_fault_is_reported_once_and_its_cure_ends_the_warning(fault: Fault, monkeypatch: Any) -> None:
    def plant(build: Callable[[], nn.Module]) -> None:
        monkeypatch.setattr(recipes.classification, "build_model", lambda *_, **__: build())

    real = F.cross_entropy
    monkeypatch.setattr(recipes.classification.F, "cross_entropy", lambda *a, **k: real(*a, **k) * fault.loss)
    plant(fault.build)
    settings = [*SHORT, *fault.settings.split()]
    (warning,) = warnings_of("faulty", *settings, code=fault.code)
    found = re.search(fault.warning, warning)
    assert found, warning
    if fault.healthy is not None:
        plant(fault.healthy)
    fix = shlex.split(found[1]) if found.groups() else []
    assert warnings_of("fixed", *settings, *fix) == []
    assert warnings_of("unwatched", *settings, "doctor=off", code=fault.code) == []


def test_a_sample_of_the_evaluation_that_is_not_finite_is_named(monkeypatch: Any) -> None:
    def build(*args: Any, **settings: Any) -> Data:
        data = build_data(*args, **settings)
        return dataclasses.replace(data, eval=Spoilt(data.eval, {77: torch.nan}))

    monkeypatch.setattr(recipes.classification, "build_data", build)
    (warning,) = warnings_of("faulty", *SHORT, "data.num_samples=320", "eval_every=4", code=5)
    assert "loss of the evaluation is not finite: samples 77 of the evaluation data" in warning


HEALTHY = [(recipe, "fp16") for recipe in sorted(RECIPES)]
HEALTHY += [(recipe, "bf16") for recipe in sorted(RECIPES)[::3]] + [("contrastive", "fp32")]


@pytest.mark.parametrize("recipe, mode", rows(HEALTHY, *[row for row in HEALTHY if row[1] == "fp16"][::5]))
def test_a_healthy_run_has_no_warning(recipe: str, mode: str, monkeypatch: Any) -> None:
    """ReLUs and unused rows of embeddings have zeros of their own: they are examined, and acquitted."""
    examined, rerun = set[str](), Silent._rerun

    def seen(silent: Silent, step: int, kind: str, scale: float) -> Any:
        examined.add(kind)
        return rerun(silent, step, kind, scale)

    monkeypatch.setattr(Silent, "_rerun", seen)
    settings = [f"recipe={recipe}", f"amp={mode}", *COMMON, *SMALL[recipe], "steps=6", "log_every=2", "eval_every=3"]
    settings += ["amp.init_scale=4096"] if mode == "fp16" else []
    assert warnings_of("healthy", *settings) == []
    expected = {"language_model": {"gradients"}, "classification": {"outputs"}}.get(recipe, examined)
    assert examined == (expected if mode == "fp16" else set())


@pytest.mark.slow
def test_two_ranks_examine_the_same(tmp_path: Path) -> None:
    on_two_ranks("language_model", tmp_path / "run", "amp=fp16", "steps=4", "log_every=2")
    assert "WARNING" not in (tmp_path / "run" / "train.log").read_text()
    stalls = ["amp=bf16_pure", "amp.update=nearest", "optimizer.lr=1e-7", "steps=4", "schedule=constant"]
    on_two_ranks("classification", tmp_path / "stalls", *stalls, "log_every=2")
    assert "WARNING step 4: " in (tmp_path / "stalls" / "train.log").read_text()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", ["fp16", "bf16", "o3"])
def test_the_step_of_a_log_line_waits_no_more_often_when_it_is_watched(mode: str) -> None:
    def more(doctor: str) -> int:
        """Waits of three steps and log lines."""
        nums = []
        for steps in (3, 6):
            settings = [*COMMON, *SMALL["segmentation"], "recipe=segmentation", f"amp={mode}", f"doctor={doctor}"]
            settings += ["amp.init_scale=64"] if mode == "fp16" else []
            with Waits() as waits:
                assert train.main([*settings, f"steps={steps}", "log_every=1", f"run_dir={doctor}{steps}"]) == 0
            nums.append(waits.num)
        return nums[1] - nums[0]

    assert more("watch") == more("off")


def zeros_of(model: nn.Module, mode: str, scale: float = 1.0, least: float = 0.5) -> list[Zero]:
    """Of a window of a plain loop."""
    amp = Amp.named(mode, init_scale=scale) if mode == "fp16" else Amp.named(mode)
    images, labels = torch.randn(8, 192), torch.randint(4, (8,))

    def step() -> None:
        with amp.autocast():
            loss = F.cross_entropy(model(images), labels)
        amp.backward(loss * 2.0**-20)

    found = find_zeros(Doctor(amp, model), step, (images, labels), least=least)
    assert all(p.grad is None for p in model.parameters())
    return found


@pytest.mark.parametrize("mode", ["fp16", "bf16", "fp32"])
def test_the_first_zero_after_an_overflow_is_located(mode: str) -> None:
    zeros = zeros_of(loud(4000), mode, 2.0**16)
    if mode != "fp16":
        assert zeros == []
        return
    first = zeros[0]
    assert (first.op, first.place.module, first.place.kind) == ("aten.rsqrt", "2", "RMSNorm")
    assert first.has_overflowed and not first.backward and first.share == 1.0
    assert first.place.source.startswith("tests/runs/test_doctor_silent.py:") and "torch.rsqrt" in first.place.code
    assert zeros_of(loud(4.0), mode, 2.0**16) == []


def test_a_gradient_that_becomes_0_is_located_and_a_loss_scale_ends_it() -> None:
    first = zeros_of(net(nn.ReLU()), "fp16", 1.0)[0]
    assert first.backward and not first.has_overflowed and first.place.module == "3"
    assert zeros_of(net(nn.ReLU()), "fp16", 2.0**20) == []


def test_a_negative_infinity_in_a_mask_and_a_relu_make_no_zero() -> None:
    """They are 0 in exact arithmetic, too."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.relu((-x.abs() - 1) * 6e4 * 6e4) + x.masked_fill(x < 0, -torch.inf).softmax(-1)

    assert [zero for zero in zeros_of(net(Masked()), "fp16", 2.0**20) if not zero.backward] == []
