"""Lightning and Fabric: a precision plugin.

Trainer(plugins=[AmpPrecision("bf16-mixed")])
Fabric(plugins=[FabricPrecision("16-mixed")])
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from amp_plugins.doctor import LoopDoctor, Terms, loss_of, replaced
from amp_plugins.names import require
from amp_plugins.scaler import GradScaler, scaler_for

TERMS = Terms(
    bf16='AmpPrecision("bf16-mixed")',
    scale='AmpPrecision("16-mixed", {})',
    rate="the lr in configure_optimizers, or Trainer(gradient_clip_val=...)",
    load="trainer.fit(model, ckpt_path=...)",
)
_DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class _Ours:
    """What the precision of a `Trainer` and that of `Fabric` have in common."""

    def __init__(
        self, precision: Any = "bf16-mixed", device: str | None = None, scaler: GradScaler | None = None, **policy: Any
    ) -> None:
        require("lightning")
        if precision not in _DTYPES:
            raise ValueError(f"precision={precision!r}: expected one of {', '.join(_DTYPES)}")
        self.precision, self.device = precision, device or ("cuda" if torch.cuda.is_available() else "cpu")
        what, enabled = f"precision={precision!r}", precision == "16-mixed"
        self._desired_input_dtype = dtype = _DTYPES[precision]
        self.scaler = scaler_for(what, scaler, self.device, dtype, policy, enabled=enabled)

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Guards its buffers."""
        self._guard = self.scaler.guard(module)
        return module

    def autocast_context_manager(self) -> torch.autocast:
        """Of the precision; none in 32-true."""
        is_on = self._desired_input_dtype is not torch.float32
        dtype = self._desired_input_dtype if is_on else None
        return torch.autocast(self.device, dtype=dtype, enabled=is_on, cache_enabled=False)


def _refuse(part: object) -> None:
    if "DeepSpeed" in (name := type(part).__name__):
        raise ValueError(f"{name} scales, clips and steps by itself, and asks no plugin: use precision=")


class AmpPrecision(_Ours, MixedPrecision):  # type: ignore[misc]
    """The precision of a `Trainer`: guards weights and running statistics; schedules and averages follow taken steps.

    Gradients of fused optimizers can be clipped, too.

    Args:
        precision: "32-true", "bf16-mixed" or "16-mixed". Leave out `precision` of the Trainer.
        device: of the network; None: "cuda" if there is one.
        scaler: the one to use; None: a new one.
        **policy: for the new one; see `GradScaler`.
    """

    scaler: GradScaler

    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        """Lets schedules by step and averages follow.

        Raises:
            ValueError: the strategy is DeepSpeed's, which steps by itself.
        """
        trainer = getattr(model, "_trainer", None)
        _refuse(getattr(trainer, "strategy", None))
        parts = [each.scheduler for each in lr_schedulers if each.interval == "step" and not each.reduce_on_plateau]
        callbacks = getattr(trainer, "callbacks", ())
        averages = [each._average_model for each in callbacks if isinstance(each, WeightAveraging)]
        self.scaler.follow(*parts, *[each for each in averages if each is not None])
        return super().connect(model, optimizers, lr_schedulers)

    @contextlib.contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Also begins a window: Lightning calls `training_step`, no forward of the whole."""
        self.scaler.end_window()
        self._guard.arm()
        with super().train_step_context():
            yield

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Backward, unscale, the hooks with clipping, step."""
        result = closure()
        if result is None and model.automatic_optimization:  # training_step has left the batch out
            self._after_closure(model, optimizer)
            return result
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Also of a fused optimizer, whose gradients are unscaled by now."""
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


class FabricPrecision(_Ours, FabricMixedPrecision):  # type: ignore[misc]
    """The precision of `Fabric`. Arguments as those of `AmpPrecision`; `scaler.follow(...)` is the user's to call."""

    scaler: GradScaler

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast, but in 32-true."""
        return contextlib.nullcontext() if self.precision == "32-true" else super().forward_context()

    def backward(self, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Of the scaled loss. ValueError: the network is DeepSpeed's, which steps by itself."""
        _refuse(model)
        super().backward(tensor, model, *args, **kwargs)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Also of a fused optimizer."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class LightningDoctor(Callback):
    """Says where a step that was skipped became NaN: `Trainer(plugins=[AmpPrecision(...)], callbacks=[...])`.

    Args:
        **settings: of `LoopDoctor`, as `after_skips`.
    """

    doctor: LoopDoctor

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the training step.

        Raises:
            ValueError: the trainer has no `AmpPrecision`, which skips the steps to examine.
        """
        precision, strategy = trainer.precision_plugin, trainer.strategy
        if not isinstance(precision, AmpPrecision):
            raise ValueError(
                f"LightningDoctor examines steps that AmpPrecision skips, and the precision plugin is "
                f"{type(precision).__name__}: expected Trainer(plugins=[AmpPrecision(...)])"
            )

        def backward(result: Any) -> None:
            if (loss := loss_of(result)) is not None and pl_module.automatic_optimization:
                precision.scaler.scale(loss / trainer.accumulate_grad_batches).backward()

        self.doctor = LoopDoctor(
            precision.scaler,
            lambda: [strategy.model],
            terms=TERMS,
            backward=backward,
            around=lambda: replaced(pl_module, log=_nothing, log_dict=_nothing),
            steps_itself=lambda: not pl_module.automatic_optimization,
            get_step=lambda: trainer.global_step,
            **self._settings,
        )
        strategy.training_step = self.doctor.watch(strategy.training_step)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Examine."""
        self.doctor.examine()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the training step as it was."""
        vars(trainer.strategy).pop("training_step", None)
