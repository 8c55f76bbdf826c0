"""A slice of `conformance_on_models.py`, and what it would not let pass: needs timm and transformers."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
from conformance_on_models import ASKED, MODES, batches, built, examine, in_fp32, ours, same
from foreign_models import MORE, TIMM, TRANSFORMERS

from amp_core import Amp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("timm", "transformers"))), reason="needs timm and transformers"
    ),
]
MODELS = {model.name: model for model in (*TIMM, *TRANSFORMERS, *MORE)}


@pytest.fixture(autouse=True)
def _warnings_of_these_packages():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "gpt2", "bert", "wav2vec2"])
def test_a_network_of_others_trains_as_in_the_textbook_loop(name, mode):
    row = examine(MODELS[name], mode)
    assert all(row[asked] in (True, "tied") for asked in ASKED), row
    assert (int(row["skips"]) > 0) == (mode == "fp16")


def test_another_batch_is_outside_of_the_bound():
    model = MODELS["llama"]
    (loss, bound), (other, _) = (in_fp32(model, built(model), batch, MODES["fp16"]) for batch in batches(model)[:2])
    assert abs(loss - other) > bound


def test_without_a_guard_a_skipped_step_is_seen(monkeypatch):
    monkeypatch.setattr(Amp, "guard", lambda *_: None)
    run = ours(MODELS["mobilenetv3_small_100"], "fp16", cache=True)
    assert not all(run.taken) and not run.is_guarded


def test_other_gradients_are_other_bits(monkeypatch):
    monkeypatch.setattr("conformance_on_models.MAX_NORM", 1.001)
    clipped = ours(MODELS["llama"], "bf16", cache=True)
    monkeypatch.undo()
    assert not same(clipped.weights, ours(MODELS["llama"], "bf16", cache=True).weights)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX units")
def test_a_layer_that_this_cpu_computes_wrongly_is_refused_by_name_and_right_in_fp32(monkeypatch):
    row = examine(MODELS["visformer_tiny"], "bf16")
    assert row["refused"] and all(row[asked] is True for asked in ASKED), row
    monkeypatch.setattr("amp_core.lowp.lint.computed_wrongly", lambda *_: "")
    row = examine(MODELS["visformer_tiny"], "bf16")
    assert not row["refused"] and not row["bounded"], row
