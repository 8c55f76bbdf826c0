"""The page on scaling says what the model says, and the model what is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import script
from torch import nn

from amp_core.config.rules import amp_config
from amp_core.layouts.memory_model import Weight, lay_out, memory, memory_of, traffic

ROOT = Path(__file__).resolve().parents[2]
OnRanks = Callable[..., list[Any]]


scaling = script("scripts/scaling.py")
PAGE = (ROOT / "docs" / "SCALING.md").read_text()


def test_the_page_is_up_to_date() -> None:
    for text in (scaling.per_weight(), scaling.sent_per_weight(), scaling.projection(), scaling.biggest()):
        assert text in PAGE, "run python scripts/scaling.py --write"


def test_the_page_compares_all_cases_with_the_present_model() -> None:
    _, rest = PAGE.split("| layout | mode | ranks |")
    rows = rest.splitlines()[2 : 2 + len(scaling.CASES)]
    for case, line in zip(scaling.CASES, rows, strict=True):
        now = scaling.row(case, scaling.Memory(), {})
        assert line.split(" | ")[:7] == now.split(" | ")[:7], "run python scripts/scaling.py --write"
    differences = scaling.differences("\n".join(["", "", *rows]))
    assert len(differences) == len(rows) and max(differences) < scaling.TOLERANCE


def measured(rank: int, cases: list[int]) -> list[Any]:
    found = []
    for number in cases:
        held, payload, said = scaling.measure(scaling.CASES[number])
        found.append([vars(held), payload, vars(said)])
    return found


def test_the_model_is_what_is_measured(on_ranks: OnRanks) -> None:
    """On 1 and 2 processes; the page has 4, too. And what a run says of itself is the model."""
    for num_ranks in (1, 2):
        numbers = [i for i, case in enumerate(scaling.CASES) if case.num_ranks == num_ranks]
        ranks = [measured(0, numbers)] if num_ranks == 1 else on_ranks(measured, numbers)
        for number, *found in zip(numbers, *ranks, strict=True):
            case = scaling.CASES[number]
            model, exchanged = scaling.modelled(case)
            for held, payload, said in found:
                for key in ("weights", "gradients", "moments", "averages", "copies", "unreduced"):
                    assert held[key] == pytest.approx(getattr(model, key), rel=scaling.TOLERANCE), (case, key)
                assert said == vars(model), case
                sent = scaling.sent(scaling.by_kind(exchanged), case)
                assert scaling.sent(payload, case) == pytest.approx(sent, rel=scaling.TOLERANCE), case


def test_rows_are_not_cut() -> None:
    """With 5 rows on 2 ranks one holds 3, and both gather 6."""
    weights = lay_out([Weight((5, 10))], "fsdp", 2)
    amp = amp_config("fp32")
    assert memory(weights, amp).weights == 4 * 30
    gathered = next(each for each in traffic(weights, amp, 2) if each.kind == "all_gather")
    assert (gathered.payload, gathered.sent) == (2 * 4 * 60, 4 * 60)


def test_a_frozen_base_in_8_bits_counts_as_it_is_stored() -> None:
    net = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 4, bias=False)).requires_grad_(False)
    net[0].weight = nn.Parameter(torch.zeros(32, 64, dtype=torch.int8), requires_grad=False)
    net[1].requires_grad_()
    optimizer = torch.optim.AdamW(net[1].parameters())
    found = memory_of([net], [optimizer], None, amp_config("bf16"))
    held = sum(param.nbytes for param in net.parameters())
    assert (found.weights, found.gradients, found.moments) == (held, 4 * 128, 8 * 128)
    assert found.copies == 2 * 128  # autocast casts what is floating point
