"""Python calls, operators, casts and waits of a step, of every loop: exact counts, no clock."""

from __future__ import annotations

import argparse

from benches.counts import count
from benches.loops import STEPS, adamw, takes_part
from benches.result import Result
from benches.step import add_choices
from benches.work import WORKS

FULL = ["--work", "mlp,cnn,resnet18,gpt"]
SHORT = ["--modes", "fp32"]


def options(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "mlp")


def measure(flags: argparse.Namespace) -> Result:
    result = Result("cost", flags.command, flags.device)
    result.notes.append(
        "Counts of one step: Python calls, operators dispatched, casts to and from 16 bits, host-device syncs; the "
        "same on every machine with one version of torch. `textbook` is `by hand` with an optimizer that is not fused. "
        "The Trainer cannot be stepped from outside."
    )
    for work in flags.work:
        for mode in flags.modes:
            for accumulation in flags.accumulation:
                for who in ["by hand", *(who for who in flags.against if who in STEPS and who != "by hand")]:
                    if not takes_part(who, mode, flags.device):
                        continue
                    batches = WORKS[work].batches(accumulation, flags.device, flags.batch_size)
                    found = count(STEPS[who](WORKS[work].net(flags.device), batches, mode, flags.device, adamw))
                    result.add(work=work, accumulation=accumulation, mode=mode, loop=who, **vars(found))
    return result
