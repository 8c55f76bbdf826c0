"""What a checkpoint holds of the sums between two log lines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_core import Amp
from amp_core.run.meters import Metrics
from amp_core.step.report import StepReport
from amp_core.step.schedule import Schedule


def metrics(world_size: int) -> Metrics:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    schedule = Schedule(optimizer, lambda o, n: torch.optim.lr_scheduler.ConstantLR(o, 1.0), 10)
    return Metrics(Amp.named("fp32"), {"schedule": schedule}, world_size)


def step(taken: bool = True) -> StepReport:
    return StepReport(torch.tensor(taken), torch.tensor(1.0 if taken else torch.inf))


def _mean_on(rank, num_ranks, before):
    """The mean that a line tells on a rank, resumed from the states of two ranks."""
    own = metrics(num_ranks)
    own.load_states(before, rank, {})
    own.add("", step(), {"loss": torch.tensor(1.0 / num_ranks)})
    own.begin_line(4, (0.0, 0.0), {})
    line = own.finish_line()
    return None if line is None else line.numbers["loss"]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_number_of_ranks_goes_on_with_the_same_mean(num_ranks, on_ranks) -> None:
    """Two ranks' shares of the losses 5, 9 and, after a skipped step and the resume, 1: their mean is 5."""
    before = []
    for shares in ((2.0, 4.0), (3.0, 5.0)):
        rank = metrics(1)
        for share in shares:
            rank.add("", step(), {"loss": torch.tensor(share)})
        rank.add("", step(taken=False), {"loss": torch.tensor(torch.nan)})
        before += rank.states(None)
    found = on_ranks(_mean_on, num_ranks, before, num_ranks=num_ranks)
    told = [loss for loss in found if loss is not None]
    bound = 0 if num_ranks == 1 else 3 * torch.finfo(torch.float32).eps  # a third is rounded
    assert told and told == pytest.approx([5.0] * len(told), rel=bound, abs=0)


def test_the_same_number_of_ranks_restores_every_bit() -> None:
    first, second = metrics(1), metrics(1)
    for share in (0.1, 1e8, 0.3):
        first.add("generator", step(), {"loss": torch.tensor(share)})
    second.load_states(first.states(None), 0, {"generator": 7})
    assert second.states(None) == first.states(None)
    assert int(second.meters["generator"].num_skipped) == 7


def test_a_line_counts_its_own_taken_steps_and_the_skipped_ones_of_all() -> None:
    run = metrics(1)
    for taken in ((True, False, True), (False, True), (True,)):
        for each in taken:
            run.add("generator", step(each), {"loss": torch.tensor(1.0)})
        assert run.states(None)[0]["generator"]["num_taken"] == sum(taken)
        run.begin_line(1, (0.0, 0.0), {})
    line = run.finish_line()
    assert line is not None and line.numbers["skipped_generator"] == 2 and line.numbers["loss"] == 1.0


def test_a_line_without_a_step_has_neither_losses_nor_the_norms_of_the_last_line() -> None:
    run = metrics(1)
    run.begin_line(1, (0.0, 0.0), {})
    assert run.finish_line() is None
    run.add("generator", step(), {"loss": torch.tensor(1.0)})
    for norm in (1.0, None):
        run.begin_line(2, (0.0, 0.0), {})
        line = run.finish_line()
        assert line is not None and ("loss" in line.numbers) == (norm is not None)
        assert line.numbers["grad_norm"] == line.numbers["grad_norm_generator"] == norm
        assert line.numbers["skipped_generator"] == 0
