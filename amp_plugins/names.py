"""The private names of trainers in use, in one table, and the check that names a missing one at the start."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil

NAMES = {
    "torch": (
        "torch.amp:GradScaler.__init__ _init_scale _scale _growth_factor _backoff_factor _growth_interval "
        "_growth_tracker _enabled _device",
        "torch.amp:GradScaler._get_growth_tracker",
    ),
    "accelerate": (
        "accelerate:Accelerator.prepare_model",
        "accelerate.optimizer:AcceleratedOptimizer.__setstate__",
        "accelerate.state:GradientState._set_sync_gradients",
        "accelerate:Accelerator.__init__ _optimizers _models",
    ),
    "transformers": (
        "transformers:Trainer.create_accelerator_and_postprocess",
        "transformers:Trainer.training_step",
        "transformers:Trainer._save_scaler",
    ),
    "lightning": (
        "lightning.pytorch.plugins.precision:Precision._after_closure",
        "lightning.pytorch.plugins.precision:Precision.connect",
        "lightning.pytorch.plugins.precision:Precision.train_step_context",
        "lightning.pytorch.callbacks:WeightAveraging.__init__ _average_model",
        "lightning.fabric.plugins.precision:Precision.unscale_gradients",
    ),
    "ignite": ("ignite.handlers:EMAHandler._update_ema_model",),
    "timm": ("timm.utils:NativeScaler.__init__ _scaler",),
}
"""Library -> `module:owner.name`, or a function and names that have to stand in it."""


def missing(library: str) -> list[str]:
    """The names of a library that are not there."""
    found = []
    for entry in NAMES[library]:
        path, *attributes = entry.split()
        try:
            function = pkgutil.resolve_name(path)
            source = inspect.getsource(function) if attributes else ""
        except (ImportError, AttributeError):
            found.append(path)
            continue
        found += [f"{path}: {name}" for name in attributes if f"self.{name}" not in source]
    return found


def require(library: str) -> None:
    """Raise ImportError if a name that is used of a library, or of torch, has moved."""
    if lacking := missing("torch") + missing(library):
        version = importlib.metadata.version({"ignite": "pytorch-ignite"}.get(library, library))
        raise ImportError(
            f"amp_plugins with {library} {version}: there is no {', '.join(lacking)}; use another version"
        )
