"""Tokens per second and MFU: FLOPs by the stated formula, peaks by the names of GPUs."""

from __future__ import annotations

import pytest
import torch
from running import lines, summary
from test_recipes import run
from torch.utils.flop_counter import FlopCounterMode

from amp_core.config.rules import amp_config
from amp_core.models import build_model
from amp_core.models.gpt import LANGUAGE_MODELS
from amp_core.run.throughput import flops_per_token, peak_of

pytestmark = pytest.mark.usefixtures("own_folder")
SIZES = {"width": 64, "depth": 3, "heads": 2}


def test_flops_are_those_that_torch_counts_but_for_the_attention_that_it_does_not():
    net = build_model("gpt", LANGUAGE_MODELS, options=SIZES | {"tied": True}, vocab_size=96, length=32)
    matrices, attention = 3 * 12 * 64**2 + 96 * 64, 12 * 3 * 2 * 32 * 32
    assert flops_per_token(net, 32) == 6 * matrices + attention
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counted, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        net(tokens).sum().backward()
    # The first layer needs no gradient of its input where the embedding is frozen; here it is trained.
    assert counted.get_total_flops() == 32 * (6 * matrices + attention)


def test_frozen_matrices_have_no_gradient_and_unknown_ones_no_flops():
    net = build_model("gpt", LANGUAGE_MODELS, options=SIZES, vocab_size=96, length=32)
    whole = flops_per_token(net, 32)
    net.blocks[0].up.weight.requires_grad_(False)
    assert whole - flops_per_token(net, 32) == 2 * 4 * 64**2
    net.extra = torch.nn.Parameter(torch.zeros(2, 2))
    assert flops_per_token(net, 32) is None


@pytest.mark.parametrize("name, mode, peak", [
    ("NVIDIA H200", "bf16", 989.5e12),
    ("NVIDIA H200 NVL", "bf16", 835.5e12),
    ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
    ("NVIDIA A100 80GB PCIe", "fp32", 19.5e12),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
    ("NVIDIA L40S", "fp16", 362e12),
    ("Tesla V100-SXM2-16GB", "fp16", 125e12),
    ("NVIDIA H200", "fp8", None),
])  # fmt: skip
def test_a_peak_is_one_of_a_data_sheet_or_not_known(name, mode, peak):
    assert peak_of(name, amp_config(mode)) == peak


@pytest.mark.parametrize("recipe, is_text", [("language_model", True), ("classification", False)])
def test_lines_and_summary_have_tokens_per_second_of_text(recipe, is_text):
    run(recipe, "a", "steps=2")
    for line in [*(line for line in lines("a") if line["split"] == "train"), summary("a")]:
        assert ("tokens_per_second" in line) == ("mfu" in line) == is_text
        if is_text:  # both are rounded
            assert line["tokens_per_second"] == pytest.approx(32 * line["samples_per_second"], abs=0.1)
            assert line["mfu"] is None  # of a CPU
