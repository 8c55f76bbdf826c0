"""A `GradScaler` with the promises of `Amp`: for loops and trainers that are written for torch's."""

from __future__ import annotations

import copyreg
import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_core import Amp, Ema, Schedule, StepReport
from amp_core.step.buffers import BufferGuard, CopySafeHook
from amp_core.step.gradients import with_grads
from amp_core.step.steppable import arguments_without_default
from amp_core.tensors import several_ranks

_MODES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_MOVES = ("update_parameters", "step", "update", "_update_ema_model")
"""What moves an average or a schedule; the first of them that a part has."""
_RULE = ("growth_factor", "backoff_factor", "growth_interval")


class _Amp(Amp):
    sets_process = False


class TooManySkipsError(RuntimeError):
    """So many steps in a row were skipped that nothing is learned."""


class GradScaler(torch.amp.GradScaler):  # type: ignore[name-defined]
    """`torch.amp.GradScaler`, and what it leaves to the user. State dicts load both ways.

    With `enabled=False` the scale is 1 and gradients are checked all the same: fp32 and bf16 need it, too. A loss or a
    gradient that is not finite skips the step on all ranks of the default process group, whose ranks all have to step.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's.
        min_scale: the scale never falls below it.
        max_scale: the scale never grows beyond it.
        max_consecutive_skips: after so many skipped steps in a row `update` raises. With fused optimizers on a GPU,
            which do not tell the host, it looks once in so many windows.
        dtype: of autocast, for the doctor; None: float16 if enabled, else float32.

    Attributes:
        is_trainers: set by `scaler_for`, for trainers that call `update` after each of several optimizers (Accelerate,
            Fabric, Lightning): the scale moves once, before the next forward pass of a guarded network or the next
            loss. An empty state, saved in a mode without a scale, loads as a fresh scale.
        finding: what a doctor has found, for the error.
        doctor: a `LoopDoctor`, told of each window; copies have none.
        nets: what is guarded, as it is called.
        reports: of each optimizer its step in the last window.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        max_consecutive_skips: int = 50,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._amp: Amp | None = None
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._bounds = {"min_scale": min(min_scale, init_scale), "max_scale": max(max_scale, init_scale)}
        self.dtype = dtype or (torch.float16 if enabled else torch.float32)
        self.max_consecutive_skips, self.is_trainers = max_consecutive_skips, False
        self.reports: dict[torch.optim.Optimizer, StepReport] = {}
        self.finding = ""
        self.doctor: Any = None
        self.num_updates = 0
        self._begun = set[torch.optim.Optimizer]()
        self._is_pending = self._is_ended = self._is_never_updated = False
        self._streak = 0
        self._ours: list[Schedule | Ema] = []
        self.nets = weakref.WeakKeyDictionary[nn.Module, BufferGuard]()

    @property
    def amp(self) -> Amp:
        """What checks, skips and scales."""
        return self._amp or self._start(torch.device(self._device if torch.cuda.is_available() else "cpu"))

    def _start(self, device: torch.device) -> Amp:
        if self._amp is None:
            mode = _MODES[str(self.dtype).removeprefix("torch.")]
            policy: dict[str, Any] = {}
            if self._enabled:
                mode = "fp16"
                policy = self._bounds | {name: getattr(self, f"_{name}") for name in ("init_scale", *_RULE)}
            elif mode == "fp16":  # computed in fp16 and not scaled
                mode = "bf16"
            self._amp = _Amp.named(mode, device, **policy)
        return self._amp

    def guard(self, net: nn.Module) -> BufferGuard:
        """Restore running statistics of `net` after a skipped step; see `Amp.guard`."""
        if net not in self.nets:
            weight = next(net.parameters(), None)
            net.register_forward_pre_hook(CopySafeHook(self.end_window))
            self.nets[net] = (self.amp if weight is None else self._start(weight.device)).guard(net)
        return self.nets[net]

    def follow(self, *parts: Any) -> None:
        """Let schedules and averages move with taken steps only.

        `Schedule` and `Ema` of amp_core are moved by `update`. Of any other the `update_parameters`, `step` or `update`
        does nothing after a skipped step: call it as before, or give it before it is attached (an EMAHandler of
        Ignite). A copy or a pickle of it follows nothing. After a fused step on a GPU the call waits for the device.

        Raises:
            TypeError: it has no such method, or needs a metric.
        """
        for part in parts:
            if isinstance(part, Schedule | Ema):
                self._ours.append(part)
                continue
            name = next((name for name in _MOVES if callable(getattr(type(part), name, None))), None)
            kind = type(part).__name__
            if name is None:
                raise TypeError(
                    f"follow: {kind} has no step(), update_parameters() or update(), so nothing to hold back"
                )
            if name == "step" and (needs := arguments_without_default(type(part).step)):
                raise TypeError(f"follow: {kind}.step() needs {needs[0]}; it moves by that, not by steps: leave it out")
            if part not in _followed:
                part.__class__ = _following(type(part), name)
            _followed[part] = self

    def was_taken(self, optimizer: object = None) -> bool:
        """Whether the last step was taken: of an optimizer, or of all that stepped. May wait for the device."""
        mine = self.reports.get(optimizer)  # type: ignore[call-overload]
        reports = self.reports.values() if mine is None else [mine]
        if not self.reports and self.num_updates:
            return False
        return all(bool(r.taken) if r.taken_on_host is None else r.taken_on_host for r in reports)

    @property
    def skipped(self) -> int:
        """Windows with a skipped step so far. Waits for the device."""
        self.end_window()
        return int(self.amp.num_skipped)

    # --- torch's methods ----------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Losses times the scale, as they are with `enabled=False`."""
        if not isinstance(outputs, Tensor):
            if not isinstance(outputs, Iterable):
                raise ValueError("outputs must be a Tensor or an iterable of Tensors")
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled  # type: ignore[call-arg]
        self.end_window()
        amp, loss = self._start(outputs.device), outputs.detach()
        loss = (loss - loss).sum() if loss.ndim else loss
        amp.note_loss(loss := loss if loss.dtype is torch.float64 else loss.float())
        if self.doctor is not None:
            self.doctor.note_loss(loss)
        return outputs * amp.scaler.scale.to(outputs.device, non_blocking=True) if self._enabled else outputs

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimizer, once per window."""
        if optimizer in self._begun and not self._enabled and not self._is_pending:
            return  # torch's does nothing at all
        self._begin(optimizer)
        self.amp.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Step unless a loss or a gradient is not finite, on any rank.

        Raises:
            RuntimeError: it was given a closure.
            AssertionError: as torch's, with a scale, on one rank: no weight has a gradient.
        """
        if any(each is not None for each in (*args, *kwargs.values())):
            raise RuntimeError(
                "a step that may be skipped takes no closure, and no other arguments; call step(optimizer)"
            )
        if self._enabled and not several_ranks() and not with_grads(optimizer)[0]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        self._begin(optimizer)
        if self._is_ended:
            self.reports, self._is_ended = {}, False
        self.reports[optimizer] = self.amp.step(optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        has_stepped = optimizer in self._begun and optimizer in self.reports and not self._is_ended
        if has_stepped and (self._is_pending or not self._enabled):  # else a second step, which `Amp` refuses
            # A disabled scaler that a loop never updates: from now on each window ends where the next one begins.
            self._is_never_updated |= not self._is_pending
            window = self.amp._window
            loss = None if window.is_stepping else window.loss
            self.end_window()
            if loss is not None:
                self.amp.note_loss(loss)
        self._begun.add(optimizer)
        if self._amp is None:
            self._start(next((p.device for g in optimizer.param_groups for p in g["params"]), torch.device("cpu")))

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the window.

        Raises:
            TooManySkipsError: `max_consecutive_skips` steps in a row were skipped.
        """
        if self._begun:
            self._is_pending = True
            if new_scale is not None or not self.is_trainers:
                self.end_window()
        elif new_scale is None and self._enabled:
            raise AssertionError("No inf checks were recorded prior to update.")
        if new_scale is not None and self._enabled:
            self.amp.scaler.set(new_scale)

    def end_window(self, *_: Any) -> None:
        """Do what `update` has put off in a trainer."""
        if not self._is_pending and not (self._is_never_updated and self.reports and not self._is_ended):
            return
        if self._is_ended:  # the window was unscaled, and not stepped
            self.reports = {}
        self._begun, self._is_pending, self._is_ended = set(), False, True
        amp, reports = self.amp, list(self.reports.values())
        self._keep_to_rule()
        amp.update()
        for part in self._ours if reports else ():
            if isinstance(part, Schedule):
                part.advance(self.reports.get(part.optimizer, reports[0]))
            else:
                taken = torch.stack([each.taken for each in reports]).all()
                part.update(dataclasses.replace(reports[0], taken=taken))
        if any(each.is_rehearsal for each in reports):
            return
        self.num_updates += 1
        known = [each.taken_on_host for each in reports]
        if amp.device.type == "cpu":
            self._streak = int(amp.num_consecutive_skips.numpy())  # in host memory
        elif reports and None not in known:
            self._streak = 0 if all(known) else self._streak + 1
        elif self.doctor is not None or self.num_updates % self.max_consecutive_skips == 0:
            self._streak = int(amp.num_consecutive_skips)
        if self.doctor is not None:
            self.doctor.after_window(self._streak)
            if not self.is_trainers or self._streak >= self.max_consecutive_skips:
                self.doctor.examine()  # else the step of another's optimizer may not be over
        if self._streak >= self.max_consecutive_skips:
            found = self.finding or "Doctor(amp, model).locate(step, batch) of amp_core names the operation"
            scale = f", the loss scale is {amp.scale:g}" if self._enabled else ""
            raise TooManySkipsError(
                f"{self._streak} steps in a row were skipped, since losses or gradients are not finite{scale}. {found}"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a state of this class or of torch's.

        Raises:
            RuntimeError: as torch's, it is empty, saved with `enabled=False`, unless a trainer loads it.
        """
        self.end_window()
        if not self._enabled:
            return
        if not state_dict and not self.is_trainers:
            raise RuntimeError("the state is empty, saved with enabled=False: leave it out to begin a fresh scale")
        vars(self).update({f"_{name}": state_dict[name] for name in _RULE if name in state_dict})
        self._keep_to_rule()
        self.amp.load_state_dict(state_dict)

    def _keep_to_rule(self) -> None:
        """Let the scale move as torch's setters and states say, which set attributes."""
        if (policy := self.amp.scaler.policy) is not None:
            rule = {name: getattr(self, f"_{name}") for name in _RULE}
            if not rule.items() <= vars(policy).items():
                self.amp.scaler.policy = dataclasses.replace(policy, **rule)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._start(torch.device(dev))

    @property
    def _scale(self) -> Tensor | None:
        """The scale of the next loss, 0-d, once there is a device; torch's methods read and write it."""
        self.end_window()
        return None if self._amp is None else self._amp.scaler.scale

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        if value is not None:
            self.amp.scaler.set(value)

    @property
    def _growth_tracker(self) -> Tensor | None:
        return None if self._amp is None else self._amp.scaler._tracker

    @_growth_tracker.setter
    def _growth_tracker(self, value: Tensor | None) -> None:
        if value is not None and self._amp is not None:
            self._amp.scaler._tracker.copy_(value)

    def __getstate__(self) -> dict[str, Any]:
        self.end_window()
        return vars(self) | {"reports": {}, "_begun": set(), "_ours": [], "doctor": None, "nets": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, nets=weakref.WeakKeyDictionary())


def scaler_for(
    what: str, scaler: GradScaler | None, device: str, dtype: torch.dtype, policy: dict[str, Any], *, enabled: bool
) -> GradScaler:
    """The scaler of a trainer: the one that its user gives, or a new one.

    Raises:
        ValueError: it is made for another precision than the trainer's, which `what` tells, or is another trainer's.
    """
    if scaler is None:
        scaler = GradScaler(device, enabled=enabled, dtype=dtype, **policy)
    elif scaler.is_enabled() != enabled:
        raise ValueError(
            f"the scaler has enabled={scaler.is_enabled()}, and {what}: expected enabled={enabled}, or leave it out"
        )
    elif scaler in _taken:
        raise ValueError("the scaler is another trainer's: give each its own; a copy.deepcopy of it keeps the scale")
    scaler.is_trainers = True
    _taken.add(scaler)
    return scaler


_taken: weakref.WeakSet[GradScaler] = weakref.WeakSet()
_followed: weakref.WeakKeyDictionary[Any, GradScaler] = weakref.WeakKeyDictionary()


class _Follows:
    """Mixed into the class of a followed part. Copies and pickles are of the class itself."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = object.__new__(type(self).__mro__[2])
        vars(plain).update(vars(self))
        make, *rest = plain.__reduce_ex__(protocol)
        return (_new if make is copyreg.__newobj__ else make, *rest)  # type: ignore[attr-defined]


def _new(kind: type, *arguments: Any) -> Any:
    """As `copyreg.__newobj__`, of which pickle asks that the object is of this class."""
    return kind.__new__(kind, *arguments)


def _following(kind: type, name: str) -> type:
    method: Callable[..., Any] = getattr(kind, name)

    def moves(part: Any, *args: Any, **kwargs: Any) -> Any:
        if _followed[part].was_taken(getattr(part, "optimizer", None)):
            return method(part, *args, **kwargs)
        return None

    return type(kind.__name__, (_Follows, kind), {name: moves, "__module__": kind.__module__})
