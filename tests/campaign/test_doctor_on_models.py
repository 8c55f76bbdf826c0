"""A slice of `doctor_on_models.py`: needs timm and transformers."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
from doctor_on_models import diagnose, examine
from foreign_faults import FAULTS, Case, seeded
from foreign_models import TIMM, TRANSFORMERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("timm", "transformers"))), reason="needs timm and transformers"
    ),
]
SLICE = [
    m for m in (*TIMM, *TRANSFORMERS) if m.name in ("vit_tiny_patch16_224", "mobilenetv3_small_100", "llama", "t5")
]


@pytest.mark.parametrize("model", SLICE, ids=lambda model: model.name)
def test_faults_in_networks_of_others_are_found_and_cured(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of these packages
        net, batch = seeded(model)
        assert diagnose(Case(model, "", net, batch))[0] is None
        for fault in FAULTS[model.name]:
            row = examine(model, fault)
            assert row.located and row.cause and row.right == row.tried and row.mended, row.report
