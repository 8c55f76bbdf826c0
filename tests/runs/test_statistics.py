"""The sampled ranges of every layer: right, without a wait, without a trace in the run, and gone between samples."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import same_but, state
from shared import script
from test_log import make_log
from test_recipes import on_two_ranks, run
from torch import Tensor, nn
from waits import waits

from amp_core import Amp, master_params
from amp_core.doctor.statistics import KINDS, Statistics, spread

pytestmark = pytest.mark.usefixtures("own_folder")


def sampled(folder):
    return [json.loads(line) for line in Path(folder, "doctor", "statistics.jsonl").read_text().splitlines()]


def by_hand(*tensors: Tensor, lost: float = 2.0**-25) -> dict[str, Any]:
    """Number by number, in Python."""
    values = [abs(x) for tensor in tensors for x in tensor.double().flatten().tolist()]
    not_zero = [x for x in values if x]
    exponents = [math.frexp(x)[1] - 1 for x in not_zero]
    return {
        "amax": max(values),
        "underflow": sum(x <= lost for x in not_zero) / max(len(not_zero), 1),
        "zeros": 1 - len(not_zero) / len(values),
        "exponents": {str(e): exponents.count(e) / len(exponents) for e in sorted(set(exponents))},
    }


def merged(kind: dict[str, Any]) -> dict[str, float]:
    """In one level, as pytest.approx wants it."""
    return {name: value for name, value in kind.items() if name != "exponents"} | kind["exponents"]


class Lines:
    """In place of a log."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def statistics(self, line: Any) -> None:
        self.found.append(line)


class Training:
    """A window of two micro-batches on a tiny network, and all that `Statistics` asks of a loop."""

    def __init__(self, mode: str, every: int = 1, **fields: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 1))
        self.amp = Amp.named(mode, **fields)
        self.amp.prepare(self.net)
        self.amp.guard(self.net)
        self.optimizer = torch.optim.AdamW(master_params(self.net), fused=True)
        self.batches = [torch.randn(8, 4) * 2.0**-8 for _ in range(2)]
        loop: Any = SimpleNamespace(
            cfg=SimpleNamespace(doctor=SimpleNamespace(statistics_every=every)),
            env=SimpleNamespace(nets=[("", self.net)], device=torch.device("cpu"), host_group=None),
            nets=[self.net],
            parts={"model": self.net},
            amp=self.amp,
        )
        self.statistics, self.step = Statistics(loop), 0

    def window(self) -> None:
        self.step += 1
        with self.statistics.around_window(self.step):
            for batch in self.batches:
                with self.amp.autocast():
                    loss = self.net(batch).float().square().mean() / 2
                self.amp.backward(loss)
            self.grads = [p.grad.clone() for p in master_params(self.net)]
            self.amp.step(self.optimizer)
            self.amp.update()
            self.optimizer.zero_grad()

    def read(self) -> dict[str, Any]:
        lines = Lines()
        self.statistics.write(lines)  # type: ignore[arg-type]
        return lines.found[-1]["layers"]


def test_the_numbers_are_those_counted_one_by_one() -> None:
    training = Training("fp16", init_scale=64.0)
    outputs: dict[str, list[Tensor]] = {}
    grads: dict[str, list[Tensor]] = {}

    def keep(name: str, output: Tensor) -> None:
        outputs.setdefault(name, []).append(output.detach().clone())
        output.register_hook(lambda grad: grads.setdefault(name, []).append(grad.clone()))

    for name, module in training.net.named_children():
        module.register_forward_hook(lambda m, i, output, name=name: keep(name, output))
    weights = {name: [p.detach().clone() for p in m.parameters()] for name, m in training.net.named_children()}
    scale = training.amp.scale
    training.window()
    found = training.read()
    assert found.keys() == {"0", "1", "2", "3"}
    for name in outputs:
        assert merged(found[name]["activations"]) == pytest.approx(merged(by_hand(*outputs[name])))
        assert merged(found[name]["activation_gradients"]) == pytest.approx(merged(by_hand(*grads[name])))
    for i, name in enumerate(("0", "1", "3")):
        assert merged(found[name]["weights"]) == pytest.approx(merged(by_hand(*weights[name])))
        unscaled = [grad / scale for grad in training.grads[2 * i : 2 * i + 2]]
        expected = by_hand(*unscaled, lost=2.0**-25 / scale)
        assert merged(found[name]["weight_gradients"]) == pytest.approx(merged(expected))
    assert found["2"].keys() == {"activations", "activation_gradients"}


@pytest.mark.parametrize("number, lost", [(2.0**-25, True), (2.0**-25 * 1.001, False), (2.0**-24, False), (0.0, False)])
def test_lost_is_what_a_cast_to_fp16_loses(number: float, lost: bool) -> None:
    assert (number > 0 and not torch.tensor(number).half()) == lost
    training = Training("fp32")
    with torch.no_grad():
        training.net[3].weight.fill_(number)
        training.net[3].bias.fill_(1.0)
    training.window()
    assert training.read()["3"]["weights"]["underflow"] == pytest.approx(lost * 8 / (9 if number else 1))


def test_what_is_not_finite_has_no_largest_number() -> None:
    training = Training("bf16")
    training.batches[1][0, 0] = math.nan
    training.window()
    found = training.read()
    assert found["0"]["activations"]["amax"] is None
    assert sum(found["0"]["activations"]["exponents"].values()) == pytest.approx(1.0)
    assert found["0"]["weights"]["amax"] > 0


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "o2", "o3", "bf16_pure"])
def test_a_sampled_step_waits_never(mode: str) -> None:
    training = Training(mode)
    assert [waits(training.window) for _ in range(3)] == [0, 0, 0]
    found = training.read()
    assert set(KINDS) == {kind for kinds in found.values() for kind in kinds}
    assert found["0"]["weight_gradients"]["amax"] == pytest.approx(
        max(g.abs().max().item() for g in training.grads[:2]) / training.amp.scale, rel=1e-2 if mode == "o2" else 1e-6
    )


def test_steps_between_carry_no_hooks() -> None:
    training = Training("bf16", every=3)
    during: list[int] = []
    training.net[2].register_forward_pre_hook(lambda m, i: during.append(num_hooks()))  # type: ignore[func-returns-value]

    def num_hooks() -> int:
        return sum(len(m._forward_hooks) for m in training.net.modules()) + len(training.amp.observers)

    for _ in range(3):
        training.window()
    assert during == [0, 0, 0, 0, 5, 5] and num_hooks() == 0


def test_a_sample_is_from_all_over_a_tensor_and_copies_nothing() -> None:
    images = torch.arange(2 * 64 * 48 * 48).view(2, 64, 48, 48).contiguous(memory_format=torch.channels_last)
    part = spread(images, 2**10)
    assert 2**9 < len(part) <= 2**10
    assert part.untyped_storage()._cdata == images.untyped_storage()._cdata
    assert len({(i // 48**2) % 64 for i in part.tolist()}) == 64  # all channels
    assert len(spread(torch.zeros(()), 4)) == 1


def test_a_run_with_statistics_keeps_every_bit() -> None:
    settings = ["steps=5", "amp=bf16", "accumulation=2", "ema.decay=0.9", "deterministic=true"]
    without = run("classification", "without", *settings, "log_every=3")
    sampling = run("classification", "with", *settings, "doctor.statistics_every=2", "log_every=3")
    assert not same_but(state(without), state(sampling)) and not Path(without, "doctor").exists()
    assert [line["step"] for line in sampled(sampling)] == [2, 4]
    line = sampled(sampling)[0]
    assert line.keys() == {"step", "loss_scale", "layers"}
    assert set(KINDS) == line["layers"]["0"].keys()
    for kinds in line["layers"].values():
        for kind in kinds.values():
            assert kind.keys() == {"amax", "underflow", "zeros", "exponents"}
            assert sum(kind["exponents"].values()) == pytest.approx(1.0) or kind["zeros"] == 1.0


def test_a_resumed_run_goes_on_in_the_same_file() -> None:
    settings = ["amp=bf16", "schedule.horizon=6", "doctor.statistics_every=1", "log_every=4"]
    whole = run("classification", "whole", "steps=6", *settings)
    run("classification", "parts", "steps=3", *settings)
    with open("parts/doctor/statistics.jsonl", "a") as file:  # of steps beyond the checkpoint, as after a crash
        file.write(json.dumps(sampled("whole")[4]) + "\n" + '{"step": 6, "lay')
    parts = run("classification", "parts", "steps=6", *settings)
    assert sampled(parts) == sampled(whole)
    assert [line["step"] for line in sampled(parts)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gan", "face_recognition", "language_model", "segmentation"])
def test_other_recipes(recipe: str) -> None:
    folder = run(recipe, "a", "steps=3", "amp=bf16", "accumulation=2", "doctor.statistics_every=3")
    (line,) = sampled(folder)
    kinds = {kind for kinds in line["layers"].values() for kind in kinds}
    assert kinds == set(KINDS)
    if recipe == "gan":
        found = {name.split(".")[0] for name, kinds in line["layers"].items() if "weight_gradients" in kinds}
        assert found == {"generator", "discriminator"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bf16", "bf16_pure"])
def test_ranks(mode: str) -> None:
    """Rank 0 alone measures: no rank waits for another one, and the weights stay the same."""
    settings = ["steps=2", f"amp={mode}"]
    plain = on_two_ranks("classification", "plain", *settings)
    folder = on_two_ranks("classification", "sampled", *settings, "doctor.statistics_every=1")
    assert not same_but(state(plain), state(folder))
    assert [line["step"] for line in sampled(folder)] == [1, 2]
    assert set(KINDS) == sampled(folder)[1]["layers"]["0"].keys()


def test_a_replay_is_not_sampled() -> None:
    """The doctor computes windows again; they are no steps of the run."""
    settings = ["steps=3", "amp=bf16", "doctor.statistics_every=1", "debug.inject={where: batch, step: 2}"]
    folder = run("classification", "a", *settings)
    lines = sampled(folder)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[1]["layers"]["0"]["activations"]["amax"] is None
    assert list(Path(folder, "doctor").glob("step_*.json"))


def test_trackers_are_told(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    told: list[Any] = []
    log._trackers["own"] = SimpleNamespace(add=lambda *line: told.append(line), close=lambda summary: None)
    kind = {"amax": 2.0, "underflow": 0.5, "zeros": 0.0, "exponents": {"1": 1.0}}
    log.statistics({"step": 7, "layers": {"a.0": {"weights": kind, "activations": kind | {"amax": None}}}})
    log.close({})
    assert told == [(7, {"weights_amax/a.0": 2.0, "weights_underflow/a.0": 0.5, "activations_underflow/a.0": 0.5})]


def test_the_cost_of_sampling_is_that_of_sampling(monkeypatch):
    """The tool visits a recipe without what watches a run, so it makes its own."""
    found = []
    original = Statistics.around_window
    monkeypatch.setattr(Statistics, "around_window", lambda self, step: found.append(step) or original(self, step))
    settings = ["recipe=classification", "model=cnn_small", "batch_size=4", "device=cpu"]
    assert script("scripts/doctor.py").main(["cost", *settings, "--steps", "2"]) == 0
    assert len(found) == 2
