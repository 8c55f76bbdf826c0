"""Observers: what is called at named moments of training, in this project's loop and in any other."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amp_core.step.gradients import with_grads

if TYPE_CHECKING:
    from amp_core.step.state import OptimizerState


class Observer:
    """Watches training. Each method is one moment, and a no-op unless it is overridden.

        around_run()                                  a loop, from its first window to its last
            around_window(step)                       the computation of one window
                on_loss(loss)                         Amp.backward, for each micro-batch
                on_backward(gradient)
                on_step_begin()                       Amp.step
                on_gradients(params, grads, scaled)   for each optimizer
                on_step_end(taken)

    `Amp` calls the `on_` methods of those in `Amp.observers`; the owner of the loop enters the two contexts. Observers
    do not modify what they receive, and one that watches every step must not wait for the device.
    """

    def around_run(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def around_window(self, step: int) -> contextlib.AbstractContextManager[None]:
        """`step` counts from 1. Not entered for windows that are computed again."""
        return contextlib.nullcontext()

    def on_loss(self, loss: Tensor) -> None:
        """A scalar in at least fp32, without its weight and without the loss scale."""

    def on_backward(self, gradient: Tensor) -> None:
        """The backward pass begins with this gradient: the weight of the loss times the loss scale."""

    def on_step_begin(self) -> None:
        """Operations from here on belong to the step, not to the forward and backward passes."""

    def on_gradients(self, params: Sequence[Tensor], grads: Sequence[Tensor], scaled: bool) -> None:
        """The gradients of one optimizer before they are unscaled or clipped; `scaled`: they hold the loss scale."""

    def on_step_end(self, taken: Tensor) -> None:
        """`taken`: 0-d bool on the device, false for a skipped step."""


@contextlib.contextmanager
def around_window(observers: Sequence[Observer], step: int) -> Iterator[None]:
    """The `around_window` of all observers; the last is innermost."""
    with contextlib.ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer.around_window(step))
        yield


@contextlib.contextmanager
def observing(observers: list[Observer], observer: Observer) -> Iterator[None]:
    """With one more observer."""
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


def show_gradients(
    observers: Sequence[Observer], states: Sequence[OptimizerState], unscaled: Collection[torch.optim.Optimizer]
) -> None:
    """Begin a step for all observers, and show them the gradients of its optimizers as they are before it."""
    shown = [(state, *with_grads(state.optimizer)) for state in states]
    for observer in observers:  # all, before one looks at a gradient: that is an operation of the step
        observer.on_step_begin()
    for observer in observers:
        for state, params, grads in shown:
            observer.on_gradients(params, grads, state.optimizer not in unscaled and not state.unscaled)
