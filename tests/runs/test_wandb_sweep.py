"""conf/wandb_sweep.yaml, with the arguments that an agent of wandb makes of a trial."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from running import lines, summary
from test_recipes import SMALL

import train
from amp_core.config.options import conf_dir

SWEEP = yaml.safe_load((conf_dir() / "wandb_sweep.yaml").read_text())
pytestmark = pytest.mark.usefixtures("own_folder")


def arguments(values):
    """What an agent puts in place of ${args_no_hyphens}, by wandb's own function, and what the file adds."""
    pytest.importorskip("wandb")
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    typed = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    assert SWEEP["command"][:4] == ["${env}", "${interpreter}", "${program}", "${args_no_hyphens}"]
    assert SWEEP["program"] == "train.py"
    return [*typed["args_no_hyphens"], *SWEEP["command"][4:]]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("end", ["min", "max"])
def test_what_an_agent_types_is_taken_at_both_ends_of_every_parameter(end):
    values = {
        key: space[end] if end in space else space["values"][0 if end == "min" else -1]
        for key, space in SWEEP["parameters"].items()
    }
    cfg = train.checked(arguments(values)).cfg
    assert cfg.log.wandb and cfg.optimizer.lr == values["optimizer.lr"] and cfg.amp.name == values["amp"]
    split, _, metric = SWEEP["metric"]["name"].partition("/")
    assert (split, metric, SWEEP["metric"]["goal"]) == ("eval", cfg.recipe["best"], f"{cfg.recipe['best_is']}imize")


@pytest.mark.slow
def test_a_trial_is_a_run_that_measures_the_metric_of_the_search(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    trial = arguments({"optimizer.lr": 0.003, "accumulation": 2, "amp": "fp16"})
    named = ["log.wandb_group=g", "log.wandb_tags=[first,second]", "log.wandb_name=mine", "log.progress=false"]
    assert train.main([*trial, *SMALL["classification"], *named, "device=cpu", "run_dir=a", "epochs=1"]) == 0
    assert (summary("a")["status"], summary("a")["amp"]) == ("finished", "fp16") and list(Path("a").glob("wandb/*run*"))
    assert yaml.safe_load(Path("a/.hydra/overrides.yaml").read_text())[:3] == trial[:3]
    split, _, metric = SWEEP["metric"]["name"].partition("/")
    assert [line for line in lines("a") if line["split"] == split][-1][metric] == summary("a")["eval"][metric]
