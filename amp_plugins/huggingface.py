"""The HF Trainer: `SafeTrainer`, or `AmpMixin` before any class that is derived from `transformers.Trainer`.

trainer = SafeTrainer(model, args, train_dataset=...)

class MySFTTrainer(AmpMixin, SFTTrainer): ...
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import transformers

from amp_plugins.accelerate import protect
from amp_plugins.names import require


class AmpMixin:
    """Gives the accelerator of a Trainer a `GradScaler` of ours; see `protect`."""

    amp_policy: dict[str, Any] = {}  # noqa: RUF012  # a user's subclass replaces it
    """Arguments of the scaler, as `max_consecutive_skips`."""

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's."""
        require("transformers")
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        protect(self.accelerator, **self.amp_policy)  # type: ignore[attr-defined]


class SafeTrainer(AmpMixin, transformers.Trainer):
    """`transformers.Trainer` whose weights, schedule and running statistics a bad batch does not reach."""
