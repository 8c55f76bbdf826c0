"""The memory model says what is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from amp_core import Ema
from amp_core.config.rules import amp_config
from amp_core.layouts.memory_model import Weight, lay_out, memory, memory_of, traffic, weights_of
from amp_core.layouts.zero import bucket_size

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


def test_sharded_gradients_are_whole_until_the_last_micro_batch() -> None:
    weights = lay_out([Weight((6, 10)), Weight((8,), moments=None)], "fsdp", 2)
    found = [memory(weights, amp_config("fp32"), accumulation=count).unreduced for count in (1, 2, 3)]
    assert found == [0, 4 * 60, 4 * 60]


def test_averages_and_weights_outside_of_networks_count() -> None:
    net, outside = nn.Linear(8, 4), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*net.parameters(), outside], lr=0.1, momentum=0.9)
    found = memory_of([net], [optimizer], Ema(net, 0.9), amp_config("fp32"))
    assert (found.averages, found.moments) == (4 * 36, 4 * 39)


def test_a_block_is_gathered_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    groups = [weight.group // 2 for weight in weights_of(net, amp_config("bf16"))]
    assert groups == [0, 0, 1, 1, 1, 1]


def test_only_sharded_state_gathers_weights_in_calls_of_32_mib_or_more() -> None:
    amp, weights = amp_config("fp32"), [Weight((1 << 23, 2))]
    for zero, expected in ((False, []), (True, [(4 << 24, 2)])):
        sent = traffic(lay_out(weights, "ddp", 2, zero=zero), amp, 2)
        assert [(each.payload, each.calls) for each in sent if each.kind == "all_gather"] == expected
        assert [(each.payload, each.calls) for each in sent if each.payload == 4] == [(4, 1)]  # one check of finiteness
    assert traffic(weights, amp, 1) == []
    assert [bucket_size(ranks) for ranks in (2, 128, 1024)] == [1 << 23, 1 << 23, 1 << 26]
