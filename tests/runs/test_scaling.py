"""The memory model says what is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from amp_core.config.rules import amp_config
from amp_core.layouts.memory_model import Weight, lay_out, memory, memory_of, traffic

ROOT = Path(__file__).resolve().parents[2]


def test_the_model_is_what_is_measured() -> None:
    """And what a run says of itself is the model: 4 cases of one process and 11 of two, where both ranks are looked at."""
    done = subprocess.run([sys.executable, "scripts/scaling.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 4 + 2 * 11


def test_rows_are_not_cut() -> None:
    """With 5 rows on 2 ranks one holds 3, and both gather 6."""
    weights = lay_out([Weight((5, 10))], "fsdp", 2)
    amp = amp_config("fp32")
    assert memory(weights, amp).weights == 4 * 30
    gathered = next(each for each in traffic(weights, amp, 2) if each.kind == "all_gather")
    assert (gathered.payload, gathered.sent) == (2 * 4 * 60, 4 * 60)


def test_two_neighbouring_groups_are_whole_at_a_time() -> None:
    """The next is gathered while one is used: of 8, 8, 16 and 4 numbers the last two."""
    weights = [Weight((rows, 4), group=group, parts=2) for group, rows in enumerate((2, 2, 4, 1))]
    assert memory(weights, amp_config("fp32")).gathered == 4 * (16 + 4)


def test_a_frozen_base_in_8_bits_counts_as_it_is_stored() -> None:
    net = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 4, bias=False)).requires_grad_(False)
    net[0].weight = nn.Parameter(torch.zeros(32, 64, dtype=torch.int8), requires_grad=False)
    net[1].requires_grad_()
    optimizer = torch.optim.AdamW(net[1].parameters())
    found = memory_of([net], [optimizer], None, amp_config("bf16"))
    held = sum(param.nbytes for param in net.parameters())
    assert (found.weights, found.gradients, found.moments) == (held, 4 * 128, 8 * 128)
    assert found.copies == 2 * 128  # autocast casts what is floating point
