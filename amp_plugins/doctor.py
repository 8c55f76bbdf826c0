"""The doctor inside another's loop: it keeps what a window was given, and reruns the window if it was skipped.

    scaler = GradScaler("cuda")
    doctor = LoopDoctor(scaler, model)

    @doctor.watch
    def compute_loss(model, batch): ...

A skip leaves the weights as they were, so the rerun is exact. Without a loss scale each skip is examined, with one a
loss that is not finite, `after_skips` skips in a row, and a skip at the smallest scale.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_core import sync_grads
from amp_core.doctor.diagnosis import BF16, Diagnosis, Fix
from amp_core.doctor.locate import Doctor
from amp_core.doctor.values import is_finite
from amp_core.tensors import local, several_ranks
from amp_plugins.scaler import GradScaler

logger = logging.getLogger("amp_plugins")

_MOST_CALLS = 1024
"""Micro-batches that are kept of a window, which may never end in a step."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """How a trainer spells what the doctor advises."""

    bf16: str = "torch.autocast(device, dtype=torch.bfloat16); GradScaler(device, enabled=False)"
    scale: str = "GradScaler(device, {})"
    rate: str = "the lr of the optimizer"
    load: str = "load an earlier checkpoint"


LOOP = Terms()


class LoopDoctor:
    """Examines skipped windows of a loop that a `GradScaler` of ours steps.

    Args:
        scaler: of the loop.
        nets: the network, or networks, as they are called; or a function that returns them.
        terms: of the trainer.
        backward: computes gradients from what the watched function returned; None: of the scaled loss, in equal parts.
        around: entered around reruns, to hold back what the watched function tells its trainer.
        steps_itself: the watched function steps the optimizers.
        get_step: the number of the last step; None: windows are counted.
        after_skips: skipped steps in a row that are examined where there is a loss scale.
        max_reports: of one process.

    Attributes:
        reports: the diagnoses so far.
    """

    def __init__(
        self,
        scaler: GradScaler,
        nets: nn.Module | Sequence[nn.Module] | Callable[[], Sequence[nn.Module]],
        *,
        terms: Terms = LOOP,
        backward: Callable[[Any], None] | None = None,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        steps_itself: Callable[[], bool] = bool,
        get_step: Callable[[], int] | None = None,
        after_skips: int = 8,
        max_reports: int = 3,
    ) -> None:
        self.scaler, self.terms, self._nets = scaler, terms, [nets] if isinstance(nets, nn.Module) else nets
        self._backward, self._around, self._steps_itself = backward, around, steps_itself
        self._get_step = get_step or (lambda: scaler.num_updates)
        self.after_skips, self.max_reports, self.reports = after_skips, max_reports, list[Diagnosis]()
        self._calls: collections.deque[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = collections.deque(
            maxlen=_MOST_CALLS
        )
        self._losses, self._optimizers = list[Tensor](), list[torch.optim.Optimizer]()
        self._doctor: Doctor | None = None
        self._is_ended, self._is_due, self._is_rerun, self._was_examined = True, False, False, False
        self._micro: int | None = None
        self.is_decorating = False
        scaler.doctor = self

    def __reduce__(self) -> Any:
        raise TypeError("a LoopDoctor cannot be copied: make a new one for a copy of its scaler")

    def watch(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate what computes the loss of a micro-batch from its arguments, called once per micro-batch."""
        self.is_decorating = True

        @functools.wraps(compute)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self.note(compute, args, kwargs)
            return compute(*args, **kwargs)

        return watched

    def note_loss(self, loss: Tensor) -> None:
        """Keep a loss of the window; its scaler calls this."""
        if not self._is_rerun:
            self._losses.append(loss)

    def note(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what a micro-batch is computed from, before it is. The first of a window examines the one before it."""
        if self._is_rerun:
            return
        self.examine()  # nothing, within a window
        if self._is_ended:
            self._calls.clear()
            self._losses.clear()
            self._is_ended = False
            if self._doctor is None:
                nets = self._wrapped()
                named = [("" if len(nets) == 1 else f"network{i}", net) for i, net in enumerate(nets)]
                self._doctor = Doctor(self.scaler.amp, named, agree=agree)
            self._doctor.remember()
        self._calls.append((compute, args, kwargs))

    def _wrapped(self) -> Sequence[nn.Module]:
        return self._nets() if callable(self._nets) else self._nets

    def after_window(self, streak: int) -> None:
        """A window has ended, skipped if it is the first or a later one in a streak; its scaler calls this."""
        self._is_ended, self._was_examined = True, self._was_examined and streak > 0
        if not streak or self._was_examined or not self._calls or len(self.reports) >= self.max_reports:
            return
        policy = self.scaler.amp.scaler.policy
        self._is_due = policy is None or streak >= min(self.after_skips, self.scaler.max_consecutive_skips)
        if not self._is_due and policy is not None:
            self._is_due = any(agree(not all(map(is_finite, self._losses))))
            self._is_due |= self.scaler.amp.scale <= policy.min_scale
        self._optimizers = list(self.scaler.reports)

    def examine(self) -> None:
        """Rerun the last window if it was skipped and should not have been; report. All ranks call it together."""
        self.scaler.end_window()
        if not self._is_due or self._doctor is None:
            return
        self._is_due, self._was_examined = False, True
        scaler, scale, step = self.scaler, self.scaler.amp.scale, self._get_step()
        kept = {name: getattr(scaler, name) for name in ("reports", "_begun", "_is_pending", "_is_ended", "_streak")}
        self._micro, self._is_rerun, self._is_first = None, True, True
        try:
            with torch.inference_mode(False), torch.enable_grad(), self._around():
                found = self._doctor.locate(self._rerun, [_named(*call) for call in self._calls])
        except Exception as error:  # a report is not worth a run
            logger.warning("the doctor could not rerun step %d: %s: %s", step, type(error).__name__, error)
            return
        finally:
            self._is_rerun = False
            vars(scaler).update(kept)
        if found is None:
            found = Diagnosis("not found", "The step was skipped when it was trained, and is finite now.")
        found.step, found.in_python, found.amp, found.loss_scale = step, True, scaler.amp.config.name, scale
        self._in_terms(found)
        scaler.finding = f"The doctor has found:\n{found}"
        is_first_rank = not several_ranks() or dist.get_rank() == 0
        if is_first_rank and not any(_same(found) == _same(each) for each in self.reports):
            logger.warning("the doctor's report\n%s", found)
        self.reports.append(found)

    def _rerun(self) -> None:
        scaler, nets = self.scaler, self._wrapped()
        is_first, self._is_first = self._is_first, False
        for i, (compute, args, kwargs) in enumerate(self._calls):
            with sync_grads(*nets, when=i + 1 == len(self._calls)):
                result = compute(*args, **kwargs)
                loss = loss_of(result)
                if self._backward is not None:
                    self._backward(result)
                elif loss is not None and not self._steps_itself():
                    scaler.scale(loss / len(self._calls)).backward()
            if is_first and self._micro is None:
                grads = local([p.grad for net in nets for p in net.parameters() if p.grad is not None])
                is_bad = loss is not None and not is_finite(loss)
                self._micro = i if is_bad or not all(map(is_finite, grads)) else None
        if self._steps_itself():
            scaler.end_window()
            return
        for optimizer in self._optimizers:
            scaler.amp.step(optimizer)
        scaler.amp.update()

    def _in_terms(self, found: Diagnosis) -> None:
        """Name the micro-batch and the argument, and spell fixes as the trainer does."""
        micros, count = agree((self._micro, len(self._calls))), len(self._calls)
        micro, count = micros[found.rank]
        if named := re.match(r"batch\[(\d+)\](.*)", found.tensor):
            micro, argument = int(named[1]), re.sub(r"^\[(\w+)\]", r"\1", named[2])
            found.why += f" It is {argument or 'the batch'} of micro-batch {micro + 1} of {count} in this step."
        elif micro is not None:
            found.why += f" It happened in micro-batch {micro + 1} of {count} in this step."
        found.fixes = [dataclasses.replace(fix, python=self._python(fix)) for fix in found.fixes]

    def _python(self, fix: Fix) -> str:
        if fix.override == BF16.override:
            return self.terms.bf16
        if "optimizer.lr" in fix.text:
            return self.terms.rate
        if "resume=" in fix.text:
            return self.terms.load
        scaler = r'(?:Amp\.named|torch\.amp\.GradScaler)\("\w+", (.*?)\)'
        return re.sub(scaler, lambda found: self.terms.scale.format(found[1]), fix.python)


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Other attributes of an object inside the context."""
    before = dict(vars(owner))
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update({name: before[name] for name in attributes if name in before})


def agree(value: Any) -> list[Any]:
    """The value of each rank."""
    if not several_ranks():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def loss_of(result: Any) -> Tensor | None:
    """The loss in what a function or a network returned."""
    if isinstance(result, Tensor):
        return result if result.ndim == 0 else None
    if isinstance(result, tuple | list):
        return loss_of(result[0]) if result else None
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def _named(compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; those of one batch, which other trainers pass, by its own names."""
    try:
        arguments = inspect.signature(compute).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        arguments = {**{str(i): each for i, each in enumerate(args)}, **kwargs}
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in ("inputs", "kwargs") and isinstance(value, dict):
            found |= value
        elif name == "args":  # of Lightning's strategy: the batch, and its number
            found["batch"] = value[0]
        elif not isinstance(value, nn.Module):
            found[name] = value
    return found


def _same(found: Diagnosis) -> tuple[Any, ...]:
    return found.cause, found.op, found.module, found.source
