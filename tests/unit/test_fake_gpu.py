"""On a GPU a step never reads anything back, and no tensor of the CPU gets into it: shown without a GPU, by fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import fake_gpu
from torch import Tensor, nn

from amp_core import Amp, Clip, Ema, Schedule, StepReport
from amp_core.cli.compose import compose
from amp_core.config.errors import ConfigError
from amp_core.config.rules import amp_config, build
from amp_core.lowp.islands import keep_fp32
from amp_core.run.meters import Metrics
from amp_core.run.preflight import preflight
from amp_core.run.process import resolve_device
from recipes import classification

MODES = ["fp32", "tf32", "bf16", "fp16", "fp16_capped", "o0", "o1", "fp8"]
OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW]
CLIPS = {
    "none": None,
    "norm": Clip.norm(1.0),
    "value": Clip.value(0.1),
    "adaptive": Clip.adaptive(0.01),
}


class Net(nn.Module):
    """Weights and statistics. A CPU build of torch computes no product or batch norm of fake tensors on a GPU."""

    def __init__(self, kind: str = "cuda") -> None:
        super().__init__()
        self.kind = kind
        shapes = [(4, 3), (4,), (7,)]
        # Gradients are put there by hand: autograd needs streams of a real device.
        weights = [nn.Parameter(torch.empty(shape, device=kind), requires_grad=False) for shape in shapes]
        self.weights = nn.ParameterList(weights)
        self.register_buffer("mean", torch.zeros(4, device=kind))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=kind))

    def forward(self, x: Tensor) -> None:
        self.mean.mul_(0.9).add_(x)
        self.count += 1


class Training:
    """All that a step of a recipe has besides its forward and backward passes."""

    def __init__(self, mode: str, cls: Any, clip: Clip | None, kind: str = "cuda") -> None:
        self.net, self.clip = Net(kind), clip
        self.amp = Amp.named(mode, kind, samples=8)
        self.amp.guard(self.net)
        options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
        params = list(self.net.parameters())
        groups = [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:]}]
        self.optimizer = cls(groups, lr=0.1, fused=True, **options)
        self.schedule = Schedule(
            self.optimizer, lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n), num_steps=9
        )
        self.ema = Ema(self.net, 0.9)

    def step(self, fault: Callable[[StepReport], Any] | None = None) -> StepReport:
        with torch.no_grad():
            self.net(torch.empty(4, device=self.net.kind))
        for param in self.net.parameters():
            param.grad = torch.empty_like(param)
        report = self.amp.step(self.optimizer, self.clip)
        self.amp.update()
        self.amp.zero_grad(self.optimizer)
        self.schedule.advance(report)
        self.ema.update(report)
        if fault is not None:
            fault(report)
        return report


@pytest.mark.one_in(7)
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_stays_on_the_gpu(mode: str, cls: Any, clip: Clip | None) -> None:
    """The first by torch's own step, the next by lists that were made once."""
    with fake_gpu() as gpu:
        training = Training(mode, cls, clip)
        for _ in range(3):
            with gpu.step():
                training.step()
        assert {buffer.device.type for buffer in training.ema.model.buffers()} == {"cuda"}
        assert {group["lr"].device.type for group in training.optimizer.param_groups} == {"cuda"}
    # The kernels were asked, in each step and for each group.
    kernel = f"aten._fused_{cls.__name__.lower()}_.tensor_lr"
    assert gpu.num[kernel] == 6
    assert gpu.num.get("aten._amp_update_scale_.default", 0) == (3 if amp_config(mode).scaling else 0)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", ["mps", "xpu"])
@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_a_step_stays_on_other_accelerators(mode: str, cls: Any, kind: str) -> None:
    """With nothing of float64 on mps, which has none: neither counters nor the numbers of a log line."""
    with fake_gpu(kind) as gpu:
        training = Training(mode, cls, Clip.norm(1.0), kind)
        metrics = Metrics(training.amp, {"schedule": training.schedule}, 1)
        for _ in range(3):
            with gpu.step():
                metrics.add("", training.step(), {"loss": torch.zeros((), device=kind)})
        metrics.begin_line(3, (1.0, 0.0), {})
    assert gpu.num[f"aten._fused_{cls.__name__.lower()}_.tensor_lr"] == 6


def test_float64_on_mps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = lambda device: torch.zeros((), dtype=torch.float64, device=device)  # noqa: E731
    monkeypatch.setattr("amp_core.step.scaler.Numbers", wide)
    with fake_gpu("mps"), pytest.raises(AssertionError, match="makes float64, which mps has not"):
        Training("fp16", torch.optim.AdamW, None, "mps")


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_an_accelerator_that_is_not_there_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"device={kind}: torch finds no such accelerator on this machine"):
        Amp.named("fp16", kind)


@pytest.mark.parametrize("arguments, message", [
    ([], ""),
    (["layout=ddp"], "device=mps: runs in one process on one device; use layout=single"),
    (["doctor=watch"], "device=mps: has no float64, which the doctor computes in; use doctor=off"),
])  # fmt: skip
def test_what_does_not_run_on_mps_is_refused(arguments: list[str], message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("amp_core.run.preflight.is_there", lambda kind: kind == "mps")
    cfg = build(compose(["device=mps", "doctor=off", *arguments]))
    problems, warnings = preflight(cfg, classification, set())
    assert problems == ([message] if arguments else []) and resolve_device(cfg.device) == torch.device("mps", 0)
    assert [text for text in warnings if "not tested" in text] == (
        [] if arguments else ["device=mps: is not tested; please compare a short run with device=cpu"]
    )


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a number is read": (lambda report: report.grad_norm.item(), "waits for the device: aten._local_scalar_dense"),
    "a condition": (lambda report: 1 if report.taken else 0, "waits for the device: aten._local_scalar_dense"),
    "a 0-d tensor of the CPU": (lambda report: report.grad_norm * torch.ones(()), "['cpu', 'cuda'] meet in aten.mul"),
    "a tensor of the CPU": (lambda report: report.grad_norm + torch.ones(2), "device"),
    "a copy to the CPU": (lambda report: report.grad_norm.cpu(), "['cpu', 'cuda'] meet in aten._to_copy"),
    "a copy from the CPU": (lambda report: torch.tensor(1.0, device="cuda"), "['cpu', 'cuda'] meet in aten._to_copy"),
}


@pytest.mark.parametrize("fault, message", FAULTS.values(), ids=FAULTS)
def test_a_fault_in_a_step_is_found(fault: Callable[[StepReport], Any], message: str) -> None:
    with fake_gpu() as gpu:
        training = Training("fp16", torch.optim.AdamW, Clip.norm(1.0))
        with gpu.step():
            training.step()
        with pytest.raises((AssertionError, RuntimeError)) as raised, gpu.step():
            training.step(fault)
    assert message in str(raised.value)


@pytest.mark.parametrize("types, stays_on", [(("cpu", "mps"), False), (("cpu", "cuda"), True)])
def test_an_island_leaves_autocast_of_the_accelerator(types: tuple[str, str], stays_on: bool, monkeypatch: Any) -> None:
    """On a build of torch for mps; an island that only knows cuda would compute in 16 bits there."""
    monkeypatch.setattr("amp_core.lowp.islands._DEVICE_TYPES", types)
    inside = keep_fp32(lambda: torch.is_autocast_enabled("mps"))
    with torch.autocast("mps", dtype=torch.float16):
        assert inside() is stays_on
