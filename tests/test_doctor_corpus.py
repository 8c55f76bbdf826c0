"""The doctor finds planted faults in the real recipes, names them rightly, and what it proposes cures them."""

from __future__ import annotations

import dataclasses
import json
import linecache
from pathlib import Path

import pytest
import torch
from faults import FAULTS, Fault
from test_recipes import arguments

from amp_core.doctor.watch import diagnose_step
from amp_core.environment import Job
from amp_core.launch import in_process
from recipes import RECIPES, find
from train import checked

ROOT = Path(__file__).resolve().parent.parent
SCORE: dict[str, set[str]] = {"located": set(), "classified": set(), "cured": set(), "silent": set()}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def examine(recipe, settings, step=1):
    """Whether a step of a run is finite, and what the doctor says of it."""
    layout = [] if recipe == "model_parallel" else ["layout=single"]
    values, _, notes = checked([*arguments(recipe, *settings), *layout, "dry_run=true"])
    finite, found = [], []

    def course(loop, count):
        while loop.step < step - 1:
            with loop.training_again() as window:
                yield window
        with loop.replay(step) as (rehearsal, window):
            yield window
        finite.append(rehearsal.is_finite)
        yield from diagnose_step(loop, step, found)

    def visited(cfg, env):
        env.course = course
        return find(recipe).run(cfg, env)

    outcome = in_process(Job(values, None, [], [], notes), visited)
    assert outcome.exit_code == 0, outcome.error
    return finite[0], found[0]


def with_override(settings, override):
    """Settings of a second run: the override in the place of what it replaces."""
    override = override.strip("'")
    key = override.split("=")[0]
    kept = [each for each in settings if each.split("=")[0] != key]
    if key == "amp":  # another mode has no loss scale to set
        kept = [each for each in kept if not each.startswith("amp.")]
    return [*kept, override]


def planted(fault, mended, settings):
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(find(fault.recipe), patch.setattr, mended)
        return examine(fault.recipe, settings, fault.step)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_located_classified_and_cured(fault: Fault):
    finite, diagnosis = planted(fault, False, fault.settings)
    assert finite == (fault.cause == "position collision")
    assert diagnosis is not None
    print(diagnosis)
    check_place(fault, diagnosis)
    SCORE["located"].add(fault.name)
    assert diagnosis.cause == fault.cause
    SCORE["classified"].add(fault.name)
    first = diagnosis.fixes[0]
    assert first.kind == fault.fix
    assert fault.override in ("", first.override)
    if fault.islands is not None:
        assert set(diagnosis.islands) == set(fault.islands)
        assert first.verified
    for fix in diagnosis.fixes:
        assert fix.verified is not False
        mended = fix.kind != "override"
        settings = fault.settings if mended else with_override(fault.settings, fix.override)
        finite, left = planted(fault, mended, settings)
        assert finite, fix
        assert left is None, (fix, str(left))
    SCORE["cured"].add(fault.name)


def check_place(fault, diagnosis):
    if fault.op or fault.phase == "before":
        assert (diagnosis.op, diagnosis.module) == (fault.op, fault.module)
    assert diagnosis.phase == fault.phase
    if fault.tensor:
        assert diagnosis.output.name == fault.tensor
    if fault.samples:
        assert diagnosis.samples == list(fault.samples)
    if fault.code:
        assert diagnosis.code == fault.code
        file, line = diagnosis.source.rsplit(":", 1)
        assert linecache.getline(str(ROOT / file), int(line)).strip() == fault.code
