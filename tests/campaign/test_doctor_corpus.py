"""The doctor finds planted faults in the real recipes, names them rightly, and the fixes that it proposes hold."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import linecache
import math
import re
import shlex
import types
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from planted_faults import FAULTS, QUIET, phases_by_matmul, phases_in_fp32, phases_of_half, with_attention
from planting import INF, NAN, Fault, drawn, in_samples, in_slot
from running import lines, state, summary
from test_doctor_causes import ROWS
from test_doctor_silent import FAULTS as SILENT
from test_recipes import arguments, on_two_ranks, run
from tiers import rows

import train
from amp_core.doctor.diagnosis import Cause
from amp_core.doctor.values import Range
from amp_core.doctor.watch import diagnose_step
from amp_core.models.gpt import position_ids
from amp_core.run.process import in_process
from amp_core.run.replay import replay, rerun_step
from amp_core.step.amp import Amp
from recipes import RECIPES, find
from train import checked

ROOT = Path(__file__).resolve().parents[2]
SAYS = {
    "overflow in a cast": "given to float32",
    "underflow in fp32": "log_softmax",
    "overflow in fp32": "optimizer.lr",
    "division or logarithm of zero": ("away from 0", "leave out what has no elements", "off the ends"),
    "outside the domain of a function": "where the function has a value",
    "nothing left by a mask": "leave one key",
    "infinite constant": "write a finite number",
    "position collision": "positions and their products in fp32",
    "poisoned weight": "earlier checkpoint",
    "poisoned buffer": "reset the buffer",
    "bad input": "repair or remove the samples",
}
"""What the fix asks for, where it is one of code or data: that is what `mended` does."""


pytestmark = pytest.mark.usefixtures("own_folder")


def examine(recipe, settings, step=1):
    """Whether a step of a run is finite, and what the doctor says of it."""
    layout = [] if recipe == "model_parallel" else ["layout=single"]
    job = checked([*arguments(recipe, *settings), *layout, "dry_run=true"])
    finite, found = [], []

    def course(loop, count):
        while loop.step < step - 1:
            with rerun_step(loop) as window:
                yield window
        with replay(loop, step) as (rehearsal, window):
            yield window
        finite.append(rehearsal.is_finite)
        yield from diagnose_step(loop, step, found)

    def visited(cfg, env):
        env.driver = course
        return find(recipe).run(cfg, env)

    outcome = in_process(job, visited)
    assert outcome.exit_code == 0, outcome.error
    return finite[0], found[0]


def with_override(settings, override):
    """Settings of a second run: the override in the place of what it replaces."""
    overrides = shlex.split(override)
    keys = {each.split("=")[0] for each in overrides}
    # Another mode has no loss scale to set.
    dropped = (*(f"{key}=" for key in keys), *(["amp."] if "amp" in keys else []))
    return [*(each for each in settings if not each.startswith(dropped)), *overrides]


def examine_planted(fault, mended, settings):
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(find(fault.recipe), patch.setattr, mended)
        return examine(fault.recipe, settings, fault.step)


@pytest.mark.parametrize("fault", rows(FAULTS, every=30), ids=lambda fault: fault.name)
def test_a_planted_fault_is_located_classified_and_cured(fault: Fault):
    finite, diagnosis = examine_planted(fault, False, fault.settings)
    # Lost positions are numbers like any other; that they are lost is shown below.
    assert finite == (fault.cause == "position collision") and diagnosis is not None
    print(diagnosis)
    check_text(str(diagnosis))
    check_text(str(dataclasses.replace(diagnosis, in_python=True, healed=bool(diagnosis.islands))))
    check_place(fault, diagnosis)
    assert diagnosis.cause == fault.cause
    first = diagnosis.fixes[0]
    assert first.kind == fault.fix and fault.override in ("", first.override)
    if first.kind != "override":
        said = SAYS[fault.cause]
        assert any(text in first.text for text in ([said] if isinstance(said, str) else said))
    if fault.islands is not None:
        assert set(diagnosis.islands) == set(fault.islands) and first.verified
    for fix in diagnosis.fixes:
        assert fix.verified is not False
        mended = fix.kind != "override"
        settings = fault.mended or fault.settings if mended else with_override(fault.settings, fix.override)
        finite, left = examine_planted(fault, mended, settings)
        assert finite, fix
        assert left is None, (fix, str(left))
    if diagnosis.cause == "loss scale too large":
        key, _ = first.override.split("=")  # of all the steps that were tried
        (scale,) = re.findall(r"with (\S+) the window is finite", diagnosis.why)
        finite, _ = examine_planted(fault, False, with_override(fault.settings, f"{key}={2 * float(scale):g}"))
        assert not finite, "twice the scale fits, too"


def check_text(text):
    """No line of a report ends in the middle, or shows an empty value."""
    debris = re.compile(r"\s$|[;:,(]$|: ,|-> or |\bNone\b|\b([a-z]\w*)\b.* \(in \1\)")
    for line in text.splitlines():
        assert line.startswith("  source ") or not debris.search(line), line


def check_place(fault, diagnosis):
    if fault.op or fault.phase == "before":
        assert (diagnosis.op, diagnosis.module) == (fault.op, fault.module)
    assert diagnosis.phase == fault.phase
    if fault.tensor:
        assert diagnosis.output.name == fault.tensor
    if fault.samples is not None:
        assert diagnosis.samples == list(fault.samples)
    function = inspect.unwrap(getattr(fault.plant, "function", None) or check_place)
    if fault.code or function is not check_place:
        file, line = diagnosis.source.rsplit(":", 1)
        expected = fault.code or linecache.getline(function.__code__.co_filename, function.__code__.co_firstlineno)
        assert diagnosis.code == linecache.getline(str(ROOT / file), int(line)).strip() == expected.strip()


@pytest.mark.parametrize(
    "phases, mode", [(phases_by_matmul, "bf16"), (phases_by_matmul, "fp16"), (phases_of_half, "fp16")]
)
def test_the_planted_positions_are_lost(phases, mode):
    with Amp.named(mode).autocast():
        planted, mended = (function(32, 16, torch.zeros(1)) for function in (phases, phases_in_fp32))
    assert len(planted.unique(dim=0)) < len(mended.unique(dim=0)) == 32
    assert len(position_ids(300, dtype=torch.bfloat16).unique()) < 300


WATCHED = ("steps=6", "doctor.after_skips=2")


def reports(folder):
    return [json.loads(path.read_text()) for path in sorted(Path(folder, "doctor").glob("step_*.json"))]


def losses(folder):
    return [line["loss"] for line in lines(folder) if line["split"] == "train"]


def check_report(fault, report):
    report = {**report, "output": Range(**report["output"])} if report["output"] else report
    check_place(fault, types.SimpleNamespace(**report))
    assert report["cause"] == fault.cause


@pytest.mark.parametrize(
    "name",
    rows(
        [
            "a row of attention with no key left",
            "a static loss scale that is too large",
            "a forbidden class under label smoothing",
            "numbers beyond fp32",
            "a poisoned buffer",
            "a convolution before BatchNorm",
        ],
        "a poisoned buffer",
    ),
)
def test_a_watched_run_reports_the_fault_and_goes_on(name, monkeypatch):
    fault = next(fault for fault in FAULTS if fault.name == name)
    fault.plant(find(fault.recipe), monkeypatch.setattr, False)
    # A network that evaluates to NaN has not learned, but it was reported, and the run went on to its end.
    code = train.main(arguments(fault.recipe, "run_dir=a", *fault.settings, *WATCHED))
    assert (code, summary("a")["status"]) in ((0, "finished"), (5, "diverged"))
    assert summary("a")["step"] == 6
    assert losses("a") == [None] * 6 or not any(map(math.isfinite, losses("a")))
    report, *_ = reports("a")
    assert report["step"] == 1 and not report["healed"]
    check_report(fault, report)


def test_a_watched_run_names_the_sample_that_was_bad_once(monkeypatch):
    bad = drawn(2, step=3)
    fault = Fault("", "classification", in_samples({bad: INF}), "bad input", phase="before", samples=(bad,))
    fault.plant(find(fault.recipe), monkeypatch.setattr, False)
    run(fault.recipe, "a", "amp=bf16", *WATCHED)
    (report,) = reports("a")
    check_report(fault, report)
    assert report["step"] == 3
    assert [loss is None for loss in losses("a")] == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    "name",
    rows(
        [
            "a convolution before BatchNorm",
            "two convolutions at once",
            "a linear layer, and the next one that is given its numbers",
            "an outer product of features",
            "a custom function",
            "a factor in the discriminator",
            "a layer of the second stage",
            "a sum of many numbers",
        ],
        "a custom function",
    ),
)
def test_a_healed_run_goes_on_training_with_its_islands(name, monkeypatch):
    fault = next(fault for fault in FAULTS if fault.name == name)
    fault.plant(find(fault.recipe), monkeypatch.setattr, False)
    settings = [*fault.settings, "doctor=heal", "doctor.after_skips=2", "ema.decay=0.9"]
    run(fault.recipe, "a", *settings, "steps=6")
    (report,) = reports("a")
    check_report(fault, report)
    assert report["healed"]
    assert fault.islands is None or set(report["islands"]) == set(fault.islands)
    assert summary("a")["islands"] == state("a")["progress"]["islands"] == report["islands"]
    assert summary("a")["skipped"] == 1
    assert [loss is None for loss in losses("a")] == [True, False, False, False, False, False]
    # The average is evaluated, too: it has the same islands.
    assert all(map(math.isfinite, summary("a")["eval"].values()))
    run(fault.recipe, "a", *settings, "steps=8", "allow_changes=true")
    assert summary("a")["skipped"] == 1 and len(reports("a")) == 1
    assert len(losses("a")) == 8 and None not in losses("a")[1:]


PLANTED = ("classification", "a", "steps=4")


@pytest.mark.slow
def test_a_fault_on_one_rank_is_found_there():
    on_two_ranks(*PLANTED, *QUIET, "doctor=heal", "doctor.after_skips=2", plant=loud_on_rank_1, statistics=True)
    (report,) = reports("a")
    assert (report["rank"], report["ranks"], report["num_ranks"]) == (1, [1], 2)
    assert (report["cause"], report["op"], report["module"]) == ("overflow in a product", "aten.mul", "14")
    assert report["code"] == "return x * (1e6 if dist.get_rank() == 1 else 1.0) / 1e5"
    assert report["islands"] == ["14"] and report["healed"]
    assert [loss is None for loss in losses("a")] == [True, False, False, False]


@pytest.mark.slow
def test_a_bad_sample_on_one_rank_is_named():
    on_two_ranks(*PLANTED, "amp=bf16", plant=bad_on_rank_1, statistics=True)
    (report,) = reports("a")
    assert (report["rank"], report["ranks"], report["cause"]) == (1, [1], "bad input")
    assert report["step"] == 2 and report["samples"] == [drawn(3, step=2, rank=1, num_ranks=2)]
    assert [loss is None for loss in losses("a")] == [False, True, False, False]


def louder_on_rank_1(x):
    return x * (1e6 if dist.get_rank() == 1 else 1.0) / 1e5


def loud_on_rank_1():
    in_slot("14", louder_on_rank_1)(find("classification"), setattr, False)


def bad_on_rank_1():
    in_samples({drawn(3, step=2, rank=1, num_ranks=2): NAN})(find("classification"), setattr, False)


WINDOW = ("accumulation=2", "clip=norm", "clip.max_norm=0.5", "ema.decay=0.9")
HEALTHY = [
    ("segmentation", "amp=fp32"),
    *((recipe, "amp=bf16", *WINDOW) for recipe in sorted(RECIPES)[::5]),
    *((recipe, "amp=fp16") for recipe in sorted(RECIPES)[::2]),
    *((recipe, "amp=fp16", "amp.init_scale=256", *WINDOW) for recipe in sorted(RECIPES)[1::2]),
    ("language_model", "amp=bf16", "model.options.positions=alibi"),
    ("language_model", "amp=fp16", "model.options.positions=learned", "amp.op_policy=cuda"),
    ("segmentation", "amp=fp16", "recipe.loss=fp32", "amp.op_policy=cuda"),
    ("gan", "amp=bf16", "recipe.penalty=r1", "recipe.share_graph=true"),
    ("gan", "amp=fp16", "recipe.penalty=none", "model.options.norm=batch"),
    ("face_recognition", "amp=fp16_capped", "recipe.loss=cosface"),
    ("classification", "amp=o2"),
    ("model_parallel", "amp=bf16", "recipe.pipeline=threads", "recipe.chunks=2"),
]


@pytest.mark.parametrize("case", rows(HEALTHY, ("classification", "amp=o2"), single=True), ids=" ".join)
def test_the_doctor_is_silent_in_a_healthy_run(case):
    recipe, *settings = case
    run(recipe, "a", *settings, "steps=5")  # a scale that settles takes some
    assert summary("a")["status"] == "finished" and not Path("a", "doctor").exists()
    finite, found = examine(recipe, settings, step=3)
    # A scale that still settles is not the doctor's business in a run; asked about such a step, it says so.
    assert found is None if finite else found.cause == "loss scale too large"
    assert finite or settings == ["amp=fp16"]


def test_masks_of_minus_infinity_are_no_fault(monkeypatch):
    with_attention()(find("language_model"), monkeypatch.setattr, False)
    run("language_model", "a", "amp=fp16", "steps=3")
    assert not Path("a", "doctor").exists()
    assert examine("language_model", ["amp=fp16", "amp.init_scale=256"]) == (True, None)


def in_test(file, name):
    """The source of a test with its decorators."""
    source = next((ROOT / "tests").glob(f"*/{file}")).read_text()
    (found,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return "\n".join(
        source.splitlines()[min(each.lineno for each in (found, *found.decorator_list)) - 1 : found.end_lineno]
    )


RUNS, FIXES, SILENTLY, HERE = "test_doctor.py", "test_doctor_fixes.py", "test_doctor_silent.py", Path(__file__).name
PLACES, ORIGINS = "test_doctor_places.py", "test_doctor_origins.py"
ELSEWHERE = {
    "training diverges": (RUNS, "test_training_that_diverges_is_not_healed"),
    "poisoned gradient": (PLACES, "test_gradients_left_by_an_earlier_window_are_to_blame_if_it_adds_to_them"),
    "poisoned moment": (ORIGINS, "test_moments_that_are_not_finite_are_named_with_their_network"),
    "poisoned by the optimizer": (ORIGINS, "test_a_step_that_makes_weights_nan_is_told_from_its_window"),
    "not found": (RUNS, "test_a_window_that_is_finite_in_the_main_process_points_at_the_data_workers"),
}
"""Causes that neither the corpus has nor a row of test_doctor_causes.py: the tests that assert them."""


def test_each_cause_of_the_page_has_a_case():
    page = (ROOT / "docs" / "DOCTOR.md").read_text()
    table = page.partition("## Causes")[2].partition("## When")[0]
    cells = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")][2:]
    named = {re.sub(r"^a(?=n? )", "overflow in a", cause) for cell in cells for cause in cell.split(", ")}
    assert named == set(get_args(Cause))
    planted = {each.cause for each in (*FAULTS, *ROWS)} - {None}
    assert planted.isdisjoint(ELSEWHERE) and planted | set(ELSEWHERE) == named
    for cause, (file, name) in ELSEWHERE.items():
        assert f'"{cause}"' in in_test(file, name), cause


WARNINGS = {
    "gradients of a module": "gradients that are 0, without a loss scale",
    "outputs of a module": "an RMSNorm whose square overflows",
    "weights did not move": "fp16 weights that do not move",
    "running variances": "a channel with an infinite variance",
    "the loss scale is at its floor": "a loss scale at its floor",
    "an evaluation is not finite": "an evaluation that is not finite",
}
"""How the rows of the page's silent faults begin, and the planted fault of each."""


def test_each_silent_fault_of_the_page_has_a_case():
    page = (ROOT / "docs" / "DOCTOR.md").read_text()
    table = page.partition("## What is silent")[2].partition("Dead channels of a ReLU")[0]
    found = [row.removeprefix("| ") for row in table.splitlines() if row.startswith("| ")][2:]
    assert len(found) == len(WARNINGS) and set(WARNINGS.values()) <= {fault.name for fault in SILENT}
    assert all(row.startswith(begins) for row, begins in zip(found, WARNINGS, strict=True))


def test_every_recipe_has_a_fault():
    assert {fault.recipe for fault in FAULTS} == set(RECIPES) and len({fault.name for fault in FAULTS}) == len(FAULTS)
