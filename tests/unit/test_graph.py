"""A step that is recorded and played is the step, bit for bit; what cannot be captured runs eagerly."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import tape
import torch
import torch.distributed as dist
from running import lines, same_but, state, timeless
from test_recipes import arguments
from tiers import rows
from torch import Tensor, nn

import amp_core.memory.graph
import amp_core.run.loop
import train
from amp_core import Amp, Checkpoint, Clip, Ema, MicroBatch, Schedule, sync_grads
from amp_core.cli.compose import compose
from amp_core.cli.overrides import check_overrides
from amp_core.config.job import Job
from amp_core.config.rules import build
from amp_core.lowp.masters import master_params
from amp_core.memory.graph import CudaGraphStep, unfit, why_not_capturable
from amp_core.run.process import in_process
from recipes import find


@pytest.fixture
def on_tape(monkeypatch):
    """Steps are recorded on a tape instead of a CUDA graph. Gives the recordings: how often each was played.

    One that failed is there, too.
    """
    played: list[int] = []

    def record(call: Any) -> Any:
        number = len(played)
        played.append(0)
        returned, play = tape.record(call)

        def count() -> None:
            played[number] += 1
            play()

        return returned, count

    monkeypatch.setattr(amp_core.memory.graph, "capture_on_cuda", record)
    monkeypatch.setattr(amp_core.memory.graph, "noted_waits", tape.noted_waits)
    return played


class Training:
    """What a recipe and its loop have: accumulation 4, dropout, statistics, clipping, a schedule, an average.

    Args:
        mode: the mode.
        device: where.
        wrap: what is put around the network.
    """

    def __init__(self, mode: str, device: str = "cpu", wrap: Any = lambda net: net) -> None:
        torch.manual_seed(0)
        body = (nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 16))
        self.net = nn.Sequential(*body).to(device)
        self.amp = Amp.named(mode, device, samples=16)
        self.amp.prepare(self.net)
        self.wrapped = wrap(self.net)
        self.amp.guard(self.wrapped)
        self.optimizer = torch.optim.AdamW(master_params(self.net), lr=1e-2, fused=True)
        schedule = Schedule(self.optimizer, lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n), 30)
        self.ema = Ema(self.wrapped, 0.9)
        generator = torch.Generator().manual_seed(1)
        self.data = torch.randn(20, 4, 16, 16, generator=generator).to(device)
        self.schedule, self.step = schedule, 0
        self.extra: Any = lambda loss: loss

    def train_step(self, window: list[MicroBatch]) -> tuple[Any, Tensor]:
        total = torch.zeros((), device=self.data.device)
        for micro in window:
            with sync_grads(self.wrapped, when=micro.is_last):
                with self.amp.autocast():
                    loss = self.extra(self.wrapped(micro.batch).float().square().mean())
                self.amp.backward(loss * micro.weight)
            total += loss.detach() * micro.weight
        report = self.amp.step(self.optimizer, Clip.norm(0.5))
        self.amp.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.advance(report)
        self.ema.update(report)
        return report, total

    def graph(self) -> CudaGraphStep:
        """What captures its steps."""

        def reseed() -> None:
            torch.manual_seed(self.step + 1)

        return CudaGraphStep([self.wrapped], [self.optimizer], [self.schedule], self.amp, reseed)

    def run(self, run: Any, num_steps: int = 20) -> dict[str, Any]:
        """All that the steps leave behind, and what they reported. An overflow at step 11, a short window at 8."""
        reported = []
        for self.step in range(num_steps):
            torch.manual_seed(self.step + 1)
            batches = self.data[self.step]
            if self.step == 11:
                batches = torch.where(torch.arange(16, device=batches.device) == 3, torch.inf, batches)
            if self.step == 8:
                batches = batches[:, :7]
            weights = [0.25, torch.full((), 0.25, device=batches.device), 0.25, 0.25]
            window = [MicroBatch(b, w, i == 3) for i, (b, w) in enumerate(zip(batches, weights, strict=True))]
            with self.amp.cache_weight_casts(self.wrapped):
                report, loss = run(self.train_step, window)
            rate = self.schedule.last_rate()
            reported.append(torch.stack([report.taken.float(), report.grad_norm, loss, rate.to(loss.device)]).clone())
        return {
            "net": self.net.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scale": self.amp.state_dict(),
            "skipped": self.amp.num_skipped,
            "schedule": self.schedule.state_dict(),
            "reported": torch.stack(reported),
        }


def computed(step, window):
    return step(window)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "o2", "bf16_pure", "fp8"])
def test_a_played_step_is_the_step(mode, on_tape):
    """Twenty of them; one overflows, and one has another shape, which is computed between two that are played."""
    plain, recorded = Training(mode), Training(mode)
    expected = plain.run(computed)
    assert not same_but(expected, recorded.run(recorded.graph())) and on_tape == [20 - 3 - 1]
    assert expected["skipped"] == 1 and not expected["reported"][11, 0]


@pytest.mark.parametrize(
    "kind, why, num_recordings",
    [
        # Never tried: a capture that fails in CUDA cannot be undone.
        ("reads back", "a step waits for the device at aten._local_scalar_dense", 0),
        ("raises", "not here (test_graph.py:", 1),
        ("replaces a buffer", "the buffer 1.running_mean of network 0", 1),
        ("makes a state", "of weight 6 in optimizer 0", 1),
    ],
)
def test_what_cannot_be_recorded_is_computed_and_said_once(kind, why, num_recordings, on_tape, caplog):
    def trained(run):
        training = Training("fp16")
        late = nn.Parameter(torch.ones(3))
        training.optimizer.param_groups[0]["params"].append(late)
        whole = training.graph() if run is None else run

        def extra(loss):
            if kind == "reads back":
                return loss * (2.0 if loss.item() > 1e9 else 1.0)
            if kind == "raises" and run is None and whole.is_capturing:
                raise RuntimeError("not here")
            if kind == "makes a state":
                return loss + late.square().sum() if training.step >= 3 else loss
            if kind == "replaces a buffer":
                training.net[1].running_mean = training.net[1].running_mean * 0.5
            return loss

        training.extra = extra
        return training.run(whole, 12)

    with caplog.at_level(logging.INFO, logger="amp_recipes"):
        assert not same_but(trained(computed), trained(None))
    said = [record.message for record in caplog.records if "perf.graph" in record.message]
    assert len(said) == 1 and why in said[0] and on_tape == [0] * num_recordings


def test_a_state_that_is_loaded_is_recorded_anew(on_tape):
    """A loaded optimizer has its moments elsewhere. Without `forget` the old ones would go on."""
    plain, recorded = Training("bf16"), Training("bf16")
    whole = recorded.graph()
    for training, run in ((plain, computed), (recorded, whole)):
        training.run(run, 6)
        training.optimizer.load_state_dict(training.optimizer.state_dict())
        training.step = 0
    assert not same_but(plain.run(computed, 6), recorded.run(whole, 6)) and on_tape == [3, 3]


def test_which_optimizers_ask_the_host():
    weights = [nn.Parameter(torch.zeros(2))]
    assert unfit([torch.optim.AdamW(weights, fused=True), torch.optim.SGD(weights, lr=0.1, fused=True)]) is None
    assert "NAdam is not fused" in (unfit([torch.optim.AdamW(weights, fused=True), torch.optim.NAdam(weights)]) or "")
    dampened = torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.1, fused=True)
    assert "SGD" in (unfit([dampened]) or "")


CUDA = [torch.device("cuda", 0)]


@pytest.mark.parametrize("devices, layout, why", [
    (CUDA, {}, None),
    ([torch.device("cpu")], {}, "this is a cpu"),
    (CUDA, {"name": "fsdp"}, "layout=fsdp"),
    (CUDA, {"shard_optimizer": True}, "layout.shard_optimizer"),
    (CUDA * 2, {"name": "data_parallel"}, "several devices"),
])  # fmt: skip
def test_which_runs_cannot_be_a_graph(devices, layout, why):
    settings: Any = SimpleNamespace(**{"name": "ddp", "shard_optimizer": False} | layout)
    found = why_not_capturable(devices, settings, 2, [])
    assert found is None if why is None else why in (found or "")


SMALL = ["amp=fp16", "amp.growth_interval=1", "accumulation=2", "clip=norm", "ema.decay=0.9", "steps=8"]


def compared(recipe, folder, *overrides):
    """The metrics without their times, and the last checkpoint."""
    assert train.main(arguments(recipe, f"run_dir={folder}", *SMALL, *overrides)) == 0
    return timeless(lines(folder)), state(folder)


@pytest.mark.parametrize("recipe", rows(["face_recognition", "language_model"], "language_model"))
def test_a_recipe_that_is_played_is_the_recipe(recipe, on_tape, tmp_path, monkeypatch):
    """The scale doubles with every step until it overflows. Statistics are sampled in between, by hooks."""
    monkeypatch.chdir(tmp_path)
    expected = compared(recipe, "plain", "doctor.statistics_every=6")
    monkeypatch.setattr(amp_core.memory.graph, "why_not_capturable", lambda *_: None)
    found = compared(recipe, "played", "doctor.statistics_every=6", "perf=graph")
    assert found[0] == expected[0] and not same_but(found[1], expected[1]) and on_tape == [4]
    sampled = [(tmp_path / folder / "doctor/statistics.jsonl").read_text() for folder in ("plain", "played")]
    assert sampled[0] == sampled[1] != ""


@pytest.mark.parametrize("ending", ["done", "failed"])
def test_a_recording_is_dropped_before_its_process_group_ends(ending, tmp_path, monkeypatch):
    """NCCL's end waits for graphs that captured its communicator, and the loop and its graph refer to each other."""
    recordings: list[Any] = []
    alive: list[int] = []
    destroy = dist.destroy_process_group

    def record(call: Any) -> Any:
        returned, play = tape.record(call)
        recordings.append(weakref.WeakMethod(play))
        return returned, play

    def end() -> None:
        alive.append(sum(recording() is not None for recording in recordings))
        destroy()

    def save(self: Any, step: int, **_: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(amp_core.memory.graph, "why_not_capturable", lambda *_: None)
    monkeypatch.setattr(amp_core.memory.graph, "NUM_WARM_UPS_DDP", 3)
    monkeypatch.setattr(amp_core.memory.graph, "capture_on_cuda", record)
    monkeypatch.setattr(amp_core.memory.graph, "noted_waits", tape.noted_waits)
    monkeypatch.setattr(dist, "destroy_process_group", end)
    if ending == "failed":
        monkeypatch.setattr(Checkpoint, "save", save)
    command = arguments("custom_function", "layout=ddp", "layout.nproc_per_node=1", "perf=graph", "steps=6")
    gc.disable()  # no collection happens to help
    try:
        ended = in_process(
            Job(build(compose(check_overrides(command, multirun=False)[0])), str(tmp_path / "run")),
            find("custom_function").run,
        )
    finally:
        gc.enable()
    assert (ended.exit_code, "on purpose" in (ended.error or "")) == ((1, True) if ending == "failed" else (0, False))
    assert recordings and alive == [0]


def test_on_a_cpu_it_is_computed_and_said(tmp_path, own_folder):
    expected = compared("custom_function", "plain")
    assert not same_but(compared("custom_function", "graph", "perf=graph")[1], expected[1])
    assert (tmp_path / "graph/train.log").read_text().count("CUDA graphs are for GPUs, this is a cpu") == 1


def test_a_recipe_with_steps_of_its_own_says_so(on_tape, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(amp_core.memory.graph, "why_not_capturable", lambda *_: None)
    compared("gan", "gan", "perf=graph", "steps=2")
    assert (tmp_path / "gan/train.log").read_text().count("recipe=gan does not use Loop.run") == 1
    assert not on_tape
