"""Bytes that autograd keeps from the forward to the backward pass, in bf16 against fp32, counted without arithmetic."""

from __future__ import annotations

import argparse
import contextlib

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_core import Amp
from amp_core.heads.losses import give_loss
from amp_core.layouts.memory_model import Saved, saved_for_backward
from amp_core.memory.recast import Recast
from amp_core.memory.recompute import recompute_blocks
from amp_core.models.gpt import GPT
from amp_core.vision import import_torchvision
from benches.result import Result
from benches.values import numbers

GPT2 = {"vocab_size": 50257, "length": 1024, "width": 768, "depth": 12, "heads": 12}
FULL = ["--samples", "1,8"]
SHORT = ["--samples", "1"]
NETWORKS = ("resnet50", "gpt2")
WAYS = {"resnet50": ("plain", "recast"), "gpt2": ("plain", "chunks", "recast", "recompute")}
"""plain; the loss in chunks of 512 tokens; that and weights cast once more; that and blocks computed once more."""


def kept(network: str, mode: str, way: str, batch_size: int, *, fake: bool = True, **sizes: int) -> Saved:
    """What a training step's forward pass and loss keep.

    Args:
        network: of NETWORKS.
        mode: of conf/amp.
        way: of WAYS.
        batch_size: samples.
        fake: nothing is computed, and no memory is needed. The bytes are the same, but for the statistics of batch
            norms, which are fp32 and counted as bfloat16: 0.1 MiB of ResNet-50.
        **sizes: in place of those of `GPT2`.
    """
    amp = Amp.named(mode)  # type: ignore[arg-type]
    with FakeTensorMode() if fake else contextlib.nullcontext():
        if network == "resnet50":
            net = import_torchvision().models.resnet50(weights=None)
            inputs = torch.zeros(batch_size, 3, 224, 224)
            targets = torch.zeros(batch_size, dtype=torch.int64)
        else:
            facts = GPT2 | sizes
            net = GPT(**facts, positions="learned", tied=True)  # type: ignore[arg-type]
            if way != "plain":
                give_loss(net.head, 512)
            if way == "recompute":
                recompute_blocks(net)
            inputs = targets = torch.zeros(batch_size, facts["length"], dtype=torch.int64)
        recast = Recast(net.parameters()) if way in ("recast", "recompute") else None
        with saved_for_backward([*net.parameters(), *net.buffers()], recast) as saved, amp.autocast():
            if way == "plain" or network == "resnet50":
                loss = F.cross_entropy(net(inputs).flatten(0, -2).float(), targets.flatten())
            else:
                loss = net(inputs, targets=targets)
        assert loss.requires_grad
    return saved


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", default="1,2,8,32", type=numbers, help="of a batch, with commas")


def measure(flags: argparse.Namespace) -> Result:
    result = Result("activations", flags.command, flags.device)
    result.notes.append(
        "MiB that a forward pass and its loss keep for the backward pass, without weights, shared memory counted once. "
        "Ratios: activations and copies, to fp32 with the same settings and to fp32 without any."
    )
    for network in NETWORKS:
        for batch_size in flags.samples:
            totals: dict[tuple[str, str], int] = {}
            for way in WAYS[network]:
                for mode in ("fp32", "bf16"):
                    saved = kept(network, mode, way, batch_size)
                    totals[way, mode] = saved.total
                    result.add(
                        network=network,
                        samples=batch_size,
                        settings=way,
                        mode=mode,
                        activations=round(saved.activations / 2**20, 1),
                        copies=round(saved.copies / 2**20, 1),
                        to_same=round(saved.total / totals[way, "fp32"], 3),
                        to_plain=round(saved.total / totals["plain", "fp32"], 3),
                    )
    return result
