"""Optimizers of other packages by name, groups by names of weights and by layers, schedules of phases."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import bits
from torch import nn

import train
from amp_core import Amp, Checkpoint, Clip
from amp_core.config.errors import ConfigError
from amp_core.config.parse import parse
from amp_core.config.schema import OptimizerConfig, ScheduleConfig
from amp_core.models import build_model
from amp_core.models.gpt import LANGUAGE_MODELS
from amp_core.models.images import CLASSIFIERS
from amp_core.step.foreign import averaged
from amp_core.step.groups import layers_of
from amp_core.step.optimizers import build_optimizer, check_optimizer
from amp_core.step.schedule import build_schedule, check_schedule
from amp_core.vision import import_torchvision

PLAIN = OptimizerConfig("AdamW", 0.01, 0.1, None, "float32", {})
NAMES = [
    *("schedulefree.AdamWScheduleFree", "schedulefree.SGDScheduleFree", "bitsandbytes.optim.Adam8bit"),
    *("bitsandbytes.optim.AdamW8bit", "torchao.optim.AdamW8bit", "timm.optim.Lamb", "timm.optim.Lion"),
]


def net_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 4))


class Run:
    """Steps in fp16, the third of which overflows."""

    def __init__(self, cfg: OptimizerConfig, folder: Path) -> None:
        self.net, self.amp = net_of(), Amp.named("fp16", init_scale=2.0**12, dynamic=False)
        self.amp.guard(self.net)
        self.optimizer = build_optimizer(cfg, self.net)
        self.checkpoint = Checkpoint(folder, model=self.net, optimizer=self.optimizer, scaler=self.amp)

    def train(self, steps: list[int]) -> Any:
        for step in steps:
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
            with self.amp.autocast():
                loss = self.net(x).float().square().mean()
            self.amp.backward(loss * (1e38 if step == 2 else 1.0))
            self.amp.step(self.optimizer, Clip.norm(1.0))
            self.amp.update()
            self.amp.zero_grad(self.optimizer)
        return bits([self.net.state_dict(), self.optimizer.state_dict()])


@pytest.mark.filterwarnings("ignore")  # of other packages
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_of_packages_skip_without_a_trace_and_resume_bit_for_bit(tmp_path: Path, name: str) -> None:
    if name.startswith("timm"):
        import_torchvision()
    pytest.importorskip(name.rpartition(".")[0], reason=f"needs {name.partition('.')[0]}")
    cfg = replace(PLAIN, name=name)
    assert check_optimizer(cfg) == []
    never_saw_it = Run(cfg, tmp_path / "a").train([0, 1, 3, 4])
    run = Run(cfg, tmp_path / "b")
    run.train([0, 1, 2])
    run.checkpoint.save(3)
    assert run.train([3, 4]) == never_saw_it
    again = Run(cfg, tmp_path / "b")
    again.checkpoint.load()
    assert again.train([3, 4]) == never_saw_it


def test_a_schedule_free_optimizer_is_evaluated_at_its_average_and_trains_on_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree", reason="needs schedulefree")
    runs = [Run(replace(PLAIN, name="schedulefree.AdamWScheduleFree"), tmp_path) for _ in range(2)]
    (trained, _), (ours, theirs) = zip(*((run.train([0, 1]), run.optimizer) for run in runs), strict=True)
    with averaged([ours]):
        average = bits(runs[0].net.state_dict())
    theirs.eval()  # type: ignore[attr-defined]
    assert average == bits(runs[1].net.state_dict()) != trained[1][0]
    theirs.train()  # type: ignore[attr-defined]
    there_and_back = bits([runs[1].net.state_dict(), theirs.state_dict()])
    assert bits([runs[0].net.state_dict(), ours.state_dict()]) == trained != there_and_back


PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown package": ({"name": "json.JSONDecoder"}, "add optimizer.package=json"),
    "of Python": ({"name": "json.JSONDecoder", "package": "json"}, "json, which is not installed"),
    "not there": ({"name": "nowhere.Adam", "package": "nowhere"}, "nowhere, which is not installed"),
    "no optimizer": ({"name": "numpy.ndarray", "package": "numpy"}, "numpy has no such optimizer"),
    "no module": ({"name": "numpy.nothing.X", "package": "numpy"}, "numpy.nothing cannot be imported"),
    "abstract": ({"name": "torch.optim.Optimizer", "package": "torch"}, "is abstract"),
    "closure": ({"name": "torch.optim.LBFGS", "package": "torch"}, "needs a closure"),
    "no match": ({"groups": [{"lr": 0.1}]}, "optimizer.groups[0]: has no match"),
    "unknown key": (
        {"groups": [{"match": "*", "bets": 1}]},
        "groups[0].bets: AdamW has no such option. Did you mean betas?",
    ),
    "text": ({"groups": [{"match": "*", "lr": "1e-2"}]}, "groups[0].lr=1e-2: expected a number above 0"),
    "negative": ({"groups": [{"match": "*", "weight_decay": -1}]}, "weight_decay=-1: expected a number of at least 0"),
    "Muon": ({"name": "Muon", "layer_decay": 0.5}, "optimizer.layer_decay: Muon has two groups of its own"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_optimizers_and_groups_that_cannot_be_are_one_sentence(case: str) -> None:
    changes, said = PROBLEMS[case]
    (problem,) = check_optimizer(replace(PLAIN, **changes))
    assert said in problem


def test_a_group_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"hed\.\* matches no weight .* Did you mean head\?"):
        build_optimizer(replace(PLAIN, groups=[{"match": "hed.*"}]), nn.ModuleDict({"head": nn.Linear(2, 2)}))
    with pytest.raises(ConfigError, match=r"1\.weight matches no weight that is trained and in no earlier group"):
        build_optimizer(
            replace(PLAIN, groups=[{"match": 1}, {"match": "1.weight"}]),
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        )


def settings(optimizer: torch.optim.Optimizer, net: nn.Module) -> dict[str, tuple[float, float]]:
    """(rate, weight decay) by the name of a weight."""
    names = {id(p): name for name, p in net.named_parameters()}
    groups = optimizer.param_groups
    return {names[id(p)]: (float(g["lr"]), g["weight_decay"]) for g in groups for p in g["params"]}


def test_groups_have_their_settings_and_the_first_that_matches_holds() -> None:
    net = net_of()
    groups = [{"match": "2.bias", "lr": 1.0}, {"match": "2", "lr": 0.5, "weight_decay": 0.3, "betas": [0.5, 0.6]}]
    optimizer = build_optimizer(replace(PLAIN, groups=groups), net)
    found = settings(optimizer, net)
    assert found == {
        "0.weight": (0.01, 0.1),
        "0.bias": (0.01, 0.0),
        "1.weight": (0.01, 0.0),
        "1.bias": (0.01, 0.0),
        "2.weight": (0.5, 0.3),
        "2.bias": (1.0, 0.0),
    }
    assert [tuple(g["betas"]) for g in optimizer.param_groups if g["lr"] == 0.5] == [(0.5, 0.6)]
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = build_schedule(ScheduleConfig("OneCycleLR", None, {"cycle_momentum": False}), optimizer, 10)
    assert [max(column) for column in schedule._columns] == pytest.approx(peaks)


def test_layer_decay_of_networks_of_timm_is_that_of_timm() -> None:
    import_torchvision()
    timm = pytest.importorskip("timm", reason="needs timm")
    for name in ("test_vit", "test_resnet", "test_convnext"):
        net = timm.create_model(name)
        ours = settings(build_optimizer(replace(PLAIN, layer_decay=0.75), net), net)
        theirs = timm.optim.param_groups_layer_decay(net, 0.1, layer_decay=0.75)
        names = {id(p): key for key, p in net.named_parameters()}
        expected = {names[id(p)]: (0.01 * g["lr_scale"], g["weight_decay"]) for g in theirs for p in g["params"]}
        assert ours == expected


def hf_layers() -> dict[str, int]:
    from transformers import ViTConfig, ViTForImageClassification  # type: ignore[import-not-found]

    small = ViTConfig(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8)
    return layers_of(ViTForImageClassification(small))


LAYERS: dict[str, tuple[Any, dict[str, int]]] = {
    "gpt": (
        lambda: layers_of(build_model("gpt", LANGUAGE_MODELS, options={"depth": 3}, **LANGUAGE_MODELS.example)),
        {"blocks.0": 1, "blocks.2": 3},
    ),
    "resnet18": (
        lambda: layers_of(build_model("resnet18", CLASSIFIERS, options={}, **CLASSIFIERS.example)),
        {"conv1": 0, "bn1": 0, "layer1.0": 1, "layer4.1": 8, "fc": 9},
    ),
    "no blocks": (lambda: layers_of(net_of()), {"0": 0, "1": 0, "2": 1}),
    "transformers": (hf_layers, {"vit.embeddings": 0, "classifier": 4, "vit.layernorm": 4}),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_count_from_the_input(case: str) -> None:
    if case == "transformers":
        pytest.importorskip("transformers", reason="needs transformers")
    find, expected = LAYERS[case]
    layers = find()
    for module, layer in expected.items():
        assert {n for name, n in layers.items() if name.startswith(f"{module}.")} == {layer}, (module, layers)


def rates(name: str, num_steps: int, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    return build_schedule(ScheduleConfig(name, None, options), optimizer, num_steps)._columns[0]


def test_wsd_and_sequential_are_their_phases() -> None:
    found = rates("wsd", 100, warmup=0.1, decay=0.2, final=0.1)
    assert found[:10] == pytest.approx([2 * (n + 1) / 11 for n in range(10)])
    assert found[10:80] == [2.0] * 70
    assert found[80:] == pytest.approx([2 * (1 - 0.9 * math.sqrt(n / 20)) for n in range(20)])
    parts = [{"name": "LinearLR", "share": 0.3, "total_iters": 10}, {"name": "CosineAnnealingLR"}]
    alone = rates("LinearLR", 30, total_iters=10) + rates("CosineAnnealingLR", 70)
    assert rates("sequential", 100, parts=parts) == alone
    for bad, said in (
        ([{"name": "StepLR"}], "step_size"),
        ([*parts, parts[1]], "share"),
        ([{"name": "no"}], "no such"),
    ):
        (problem,) = check_schedule(ScheduleConfig("sequential", None, {"parts": bad}))
        assert said in problem


@pytest.mark.parametrize("name", ["wsd", "warmup_cosine", "warmup_linear"])
@pytest.mark.parametrize(
    "options, said",
    [
        ({"warmup": -0.05}, "are shares of the length, from 0 to 1"),  # a table of 8 steps rounds it to none
        ({"warmup": 1.5}, "are shares of the length, from 0 to 1"),
        ({"final": -0.03}, "final is a share of the peak, at least 0"),
    ],
)
def test_phases_that_only_a_long_run_would_show_to_be_wrong_are_refused(name: str, options: Any, said: str) -> None:
    (problem,) = check_schedule(ScheduleConfig(name, None, options))
    assert said in problem


LINES = {
    "optimizer.name=timm.optim.Lamb layout=fsdp": "may need whole weights; use layout=ddp",
    "optimizer.name=schedulefree.AdamWScheduleFree amp=o2": "16-bit weights do not follow; use amp=bf16",
    "optimizer.layer_decay=1.5": "optimizer.layer_decay=1.5: expected at most 1",
    "optimizer.groups=[a]": "optimizer.groups=['a']: expected a list of groups of keys",
}


@pytest.mark.parametrize("line", LINES)
def test_settings_that_do_not_fit_are_refused_before_the_start(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(line.split()) == 2
    assert LINES[line] in capsys.readouterr().err


def test_an_option_file_of_an_earlier_version_has_the_defaults() -> None:
    problems: list[str] = []
    old = {key: value for key, value in vars(PLAIN).items() if key not in ("package", "groups", "layer_decay")}
    assert parse(OptimizerConfig, old, "optimizer", problems) == PLAIN and problems == []
