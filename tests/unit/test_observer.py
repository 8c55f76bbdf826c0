"""An observer sees each moment of a window, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amp_core import Amp
from amp_core.step.observer import Observer, around_window, observing


class Notes(Observer):
    def __init__(self) -> None:
        self.found: list[tuple[str, Any]] = []

    def on_loss(self, loss: torch.Tensor) -> None:
        self.found.append(("loss", loss.item()))

    def on_backward(self, gradient: torch.Tensor) -> None:
        self.found.append(("backward", gradient.item()))

    def on_step_begin(self) -> None:
        self.found.append(("step begins", None))

    def on_gradients(self, params: Any, grads: Any, scaled: bool) -> None:
        self.found.append(("gradients", (len(params), grads[0].sum().item(), scaled)))

    def on_step_end(self, taken: torch.Tensor) -> None:
        self.found.append(("step ends", taken.item()))


@pytest.mark.parametrize("value, taken", [(1.0, True), (float("inf"), False)])
@pytest.mark.parametrize("rehearsed", [False, True])
def test_moments_come_in_their_order(value: float, taken: bool, rehearsed: bool) -> None:
    weight = nn.Parameter(torch.ones(()))
    amp, optimizer, notes = Amp.named("fp16", init_scale=8.0), torch.optim.SGD([weight], lr=0.5, fused=True), Notes()
    with observing(amp.observers, notes), around_window([notes], 1):
        if rehearsed:
            with amp.rehearse() as rehearsal:
                amp.backward(weight * value, 0.5)
                amp.step(optimizer)
            assert rehearsal.is_finite == taken and rehearsal.has_gradients
        else:
            amp.backward(weight * value, 0.5)
            amp.step(optimizer)
    assert notes.found == [
        ("loss", value),
        ("backward", 4.0),
        ("step begins", None),
        ("gradients", (1, 4.0 * value, True)),
        ("step ends", taken and not rehearsed),
    ]
    assert amp.observers == [] and weight.item() == (1.0 - 0.25 if taken and not rehearsed else 1.0)
