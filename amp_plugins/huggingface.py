"""The HF Trainer: `SafeTrainer`, or `AmpMixin` before any class that is derived from `transformers.Trainer`.

trainer = SafeTrainer(model, args, train_dataset=...)

class MySFTTrainer(AmpMixin, SFTTrainer): ...

trainer.add_callback(HfDoctor(trainer))
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import copy
from typing import Any

import transformers

from amp_plugins.accelerate import protect
from amp_plugins.doctor import LoopDoctor, Terms, replaced
from amp_plugins.names import require

TERMS = Terms(
    bf16="TrainingArguments(bf16=True)",
    scale="SafeTrainer.amp_policy = dict({})",
    rate="TrainingArguments(learning_rate=...), or max_grad_norm=...",
    load="trainer.train(resume_from_checkpoint=...)",
)


class AmpMixin:
    """Gives the accelerator of a Trainer a `GradScaler` of ours; see `protect`."""

    amp_policy: dict[str, Any] = {}  # noqa: RUF012  # a user's subclass replaces it
    """Arguments of the scaler, as `max_consecutive_skips`."""

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's.

        Raises:
            ValueError: the optimizer steps in the backward pass, or DeepSpeed does.
        """
        require("transformers")
        name = str(getattr(self.args.optim, "value", self.args.optim))  # type: ignore[attr-defined]
        if name.endswith(("layerwise", "lomo")):
            raise ValueError(f"optim={name!r} steps in the backward pass, where no step can be skipped: use another")
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        protect(self.accelerator, **self.amp_policy)  # type: ignore[attr-defined]

    def _save_scaler(self, output_dir: str) -> None:
        """As the Trainer's. Without a scale no file: a Trainer that has no scaler could not load it."""
        if self.accelerator.scaler.is_enabled():  # type: ignore[attr-defined]
            super()._save_scaler(output_dir)  # type: ignore[misc]


class SafeTrainer(AmpMixin, transformers.Trainer):
    """`transformers.Trainer` whose weights, schedule and running statistics a bad batch does not reach."""


class HfDoctor(transformers.TrainerCallback):
    """Says where a step that was skipped became NaN. Protects the accelerator of a Trainer that is not yet.

    Args:
        trainer: before it trains.
        **settings: of `LoopDoctor`, as `after_skips`.
    """

    def __init__(self, trainer: transformers.Trainer, **settings: Any) -> None:
        require("transformers")
        scaler = protect(trainer.accelerator)

        def silent() -> Any:
            metrics = copy.deepcopy(getattr(trainer, "_metrics", None))  # of TRL, which adds to them in compute_loss
            return contextlib.nullcontext() if metrics is None else replaced(trainer, _metrics=metrics)

        self.doctor = LoopDoctor(
            scaler,
            lambda: [trainer.model_wrapped],
            terms=TERMS,
            backward=lambda loss: None,  # training_step has done it
            around=silent,
            get_step=lambda: trainer.state.global_step,
            **settings,
        )
        trainer.training_step = self.doctor.watch(trainer.training_step)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Examine."""
        self.doctor.examine()
