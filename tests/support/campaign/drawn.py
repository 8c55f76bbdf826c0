"""Kinds of runs that are drawn: recipe, mode, optimizer, ranks and layout, checkpoints, averages, accumulation."""

from __future__ import annotations

import random
import sys

import torch

import train
from amp_core.config.errors import ConfigError
from amp_core.config.options import choices
from campaign import Plan
from campaign.harness import SMALL, Kind, arguments

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


def drawn_kind(
    plan: Plan, draw: object, *, steps: int = 12, num_ranks: int | None = None, single_file: bool = False
) -> Kind:
    """A kind of run that the command line takes.

    Args:
        plan: gives the seed.
        draw: what else the randomness depends on.
        steps: of the run.
        num_ranks: instead of a drawn one.
        single_file: the checkpoint is one file.
    """
    rng = random.Random(f"{plan.seed}/kinds/{draw}")
    while True:
        ranks = num_ranks or rng.choice([1, 1, 1, 2, 2, 3])
        recipe = rng.choice(sorted(SMALL))
        settings = [f"steps={steps}", f"amp={rng.choice(choices('amp'))}", f"optimizer.name={rng.choice(OPTIMIZERS)}"]
        settings += [f"accumulation={rng.randint(1, 3)}", f"seed={rng.randrange(1000)}"]
        settings += rng.choice([[], ["clip=norm", "clip.max_norm=0.5"], ["clip=value", "clip.max_value=0.1"]])
        settings += rng.choice([[], ["ema.decay=0.9"]]) + rng.choice(
            [[], [f"schedule={rng.choice(choices('schedule'))}"]]
        )
        settings += [] if single_file else rng.choice([[], ["checkpoint=sharded"]])
        settings += rng.choice([[], ["checkpoint.background=true"]])
        # Python 3.11.7 can hang in a fork beside gloo's threads (gh-112275): see docs/RELIABILITY.md.
        settings += rng.choice([[], ["data.num_workers=1"]]) if ranks == 1 or sys.version_info >= (3, 12) else []
        settings += [f"checkpoint.keep={rng.randint(1, 3)}"]
        settings += [f"layout={rng.choice(['ddp', 'ddp', 'fsdp'])}"] if ranks > 1 else []
        try:
            train.checked(arguments(*settings, recipe=recipe))
        except ConfigError:
            continue
        return Kind(tuple(settings), recipe, ranks)
