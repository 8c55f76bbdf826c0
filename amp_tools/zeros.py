"""Where numbers become 0 in 16 bits: each operation of a window is shadowed by the same operation in float64.

    for zero in find_zeros(Doctor(amp, model), lambda: train_step(window), window):
        print(zero)

A shadow has the inputs that the operation had in 16 bits, but where they have overflowed the largest number of their
dtype: x / inf is 0, and x / 65504 is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from amp_core.doctor.fixes import Replay
from amp_core.doctor.locate import Doctor, doctor_of
from amp_core.doctor.operations import Call, in_float64
from amp_core.doctor.places import Location
from amp_core.doctor.plain_loop import PlainLoop
from amp_core.doctor.trace import Trace
from amp_core.run.loop import Loop
from amp_core.run.replay import replay, rerun_step
from amp_core.tensors import HALF


@dataclass(frozen=True)
class Zero:
    """An operation with results that are 0, and not 0 in float64."""

    place: Location
    op: str
    backward: bool
    has_overflowed: bool
    """An input is infinite because an earlier operation overflowed."""
    share: float
    """Of the results that are not 0 in float64."""

    def __str__(self) -> str:
        why = ", after an overflow" if self.has_overflowed else ""
        in_module = "" if self.place.module is None else "in "
        where = f"{self.op} ({'backward' if self.backward else 'forward'} pass) {in_module}{self.place}"
        return f"{where}: {self.share:.1%} became 0{why}    {self.place.code}".rstrip()


class _Shadowed(Trace):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.zeros: list[Zero] = []

    def _look(self, call: Call, outputs: list[Tensor]) -> None:
        if torch.Tag.nondeterministic_seeded not in call.func.tags:  # a shadow would draw other numbers
            overflowed = any(n >= 0 and self.findings[n].op for i in call.inputs for n in self._origins[i.key])
            for output in outputs:
                if overflowed or output.dtype in HALF or any(each.tensor.dtype in HALF for each in call.inputs):
                    self._compare(call, output, overflowed)
        super()._look(call, outputs)

    def _compare(self, call: Call, output: Tensor, overflowed: bool) -> None:
        zero = output.detach() == 0
        if not bool(zero.any()):
            return
        finite = [replace(each, tensor=_capped(each.tensor)) for each in call.inputs]
        shadow = in_float64(replace(call, inputs=finite) if overflowed else call, output)
        if shadow is not None and (lost := int((zero & (shadow != 0)).sum())):
            op = f"{call.func.namespace}.{call.name}"
            self.zeros.append(Zero(call.place, op, call.backward, overflowed, lost / int((shadow != 0).sum())))


def _capped(tensor: Tensor) -> Tensor:
    return tensor.detach().nan_to_num(nan=torch.nan) if tensor.is_floating_point() else tensor


def find_zeros(doctor: Doctor, step: Callable[[], Any], batch: Any = (), *, least: float = 0.5) -> list[Zero]:
    """Where numbers of a window become 0, in the order of computation. Waits for the device at each operation.

    Args:
        doctor: of the networks. Their state is afterwards as before, as with `Doctor.locate`.
        step: computes the window.
        batch: its tensors, in any nesting.
        least: the smallest share of an operation's results that counts; after an overflow any does.
    """
    loop, found = PlainLoop(doctor.amp, doctor.nets, batch, None), list[Zero]()
    loop.drive(_search(doctor, loop.replay, least, found), step)
    return found


def zeros_of_step(loop: Loop, step: int, least: float, found: list[Zero]) -> Generator[Any, None, None]:
    """A driver (`env.driver`) that trains up to a step of a run and looks for its zeros. Fills `found`."""
    while loop.step < step - 1:
        with rerun_step(loop) as window:
            yield window
    yield from _search(doctor_of(loop), functools.partial(replay, loop, step), least, found)


def _search(doctor: Doctor, around: Replay, least: float, found: list[Zero]) -> Generator[Any, None, None]:
    with around() as (_, window):
        with _Shadowed(doctor.names, doctor.tensors(window)) as trace:
            yield window
    found += [zero for zero in trace.zeros if zero.has_overflowed or zero.share >= least]
