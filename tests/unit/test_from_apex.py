"""A checkpoint of apex continues in torch.amp and in `Amp` with the bits of the run that was not interrupted."""

from __future__ import annotations

import copy

import pytest
import torch
from running import differing
from shared import script
from torch import nn
from torch.amp.grad_scaler import GradScaler

from amp_core import Amp

CONVERTER = script("scripts/from_apex.py")


def made(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=2000)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2), scaler


def steps(net, optimizer, scaler, numbers):
    """Step 7 overflows."""
    for number in numbers:
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        loss = net(inputs).square().mean() * (torch.inf if number == 7 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def apex_of(net, optimizer, scaler):
    """The state as apex.amp with FusedAdam writes it: steps in the group, and another layout of the scale."""
    state = copy.deepcopy(optimizer.state_dict())
    (number,) = {values.pop("step").item() for values in state["state"].values()}
    group = {key: state["param_groups"][0][key] for key in ("lr", "betas", "eps", "weight_decay", "params")}
    amp = {"loss_scaler0": {"loss_scale": scaler.get_scale(), "unskipped": scaler._get_growth_tracker()}}
    model = {f"module.{name}": value.clone() for name, value in net.state_dict().items()}
    return {
        "model": model,
        "optimizer": {
            "state": state["state"],
            "param_groups": [group | {"bias_correction": True, "step": int(number)}],
        },
        "amp": amp,
    }


def test_a_converted_run_goes_on_bit_exactly_and_the_unconverted_one_does_not(tmp_path, capsys):
    whole, half = made(), made()
    steps(*whole, range(10))
    steps(*half, range(5))
    torch.save(found := apex_of(*half), tmp_path / "apex.pt")
    assert CONVERTER.main([str(tmp_path / "apex.pt"), str(tmp_path / "new.pt")]) == 0
    assert "amp.init_scale=16384" in capsys.readouterr().out
    new = torch.load(tmp_path / "new.pt", weights_only=True)

    net, optimizer, scaler = resumed = made(seed=1)
    net.load_state_dict(new["model"])
    optimizer.load_state_dict(new["optimizer"])
    scaler.load_state_dict(new["scaler"])
    steps(*resumed, range(5, 10))
    assert not differing(whole[0].state_dict(), net.state_dict())
    assert not differing(whole[1].state_dict()["state"], optimizer.state_dict()["state"])
    assert scaler.state_dict() == whole[2].state_dict() and scaler.get_scale() == 2.0**13

    with pytest.raises(KeyError):
        made()[2].load_state_dict(found["amp"])
    with pytest.raises(KeyError, match="step"):
        made()[1].load_state_dict(found["optimizer"])


def test_the_scale_loads_into_amp_and_of_several_the_smallest_is_taken():
    scalers = {f"loss_scaler{i}": {"loss_scale": scale, "unskipped": 40 + i} for i, scale in enumerate([512.0, 64.0])}
    new, lines = CONVERTER.convert({"model": {}, "amp": scalers})
    amp = Amp.named("fp16")
    amp.load_state_dict({**amp.state_dict(), **new["scaler"]})
    assert amp.scale == 64.0 and new["scaler"]["_growth_tracker"] == 41 and "512, 64" in lines[1]


SCALER = {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}}


@pytest.mark.parametrize("found, says", [
    ({"state_dict": {}}, "expected model, optimizer and amp"),
    ([], "found list"),
    ({"model": {}, "amp": {}}, "expected loss_scaler0"),
    ({"model": {}, "amp": 3}, "not as apex writes it"),
    ({"model": 3, "amp": SCALER}, "not as apex writes it"),
    ({"model": {}, "amp": SCALER, "optimizer": []}, "not as apex writes it"),
    ({"model": {}, "amp": {"loss_scaler0": {"loss_scale": "large"}}}, "not as apex writes it"),
    ({"model": {}, "amp": {"loss_scaler0": 3}}, "not as apex writes it"),
    ({"model": {}, "amp": {"loss_scaler0": {"loss_scale": float("inf"), "unskipped": 0}}}, "expected loss_scaler0"),
])  # fmt: skip
def test_what_apex_did_not_write_is_refused_by_what_it_holds(found, says, tmp_path, capsys):
    torch.save(found, tmp_path / "apex.pt")
    assert CONVERTER.main([str(tmp_path / "apex.pt"), str(tmp_path / "new.pt")]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "new.pt").exists()


def test_a_pickle_that_could_run_code_is_refused(tmp_path, capsys):
    torch.save({"model": nn.Linear(2, 2), "amp": {}}, tmp_path / "apex.pt")
    assert CONVERTER.main([str(tmp_path / "apex.pt"), str(tmp_path / "new.pt")]) == 2
    said = capsys.readouterr().err
    assert "holds an object of the class torch.nn.modules.linear.Linear, which could run code" in said
    assert "weights_only" not in said
