"""The promises of `amp_core` inside other trainers, by one line.

    from amp_plugins import GradScaler                          # in place of torch.amp.GradScaler
    from amp_plugins.accelerate import protect
    from amp_plugins.huggingface import AmpMixin, SafeTrainer
    from amp_plugins.lightning import AmpPrecision, FabricPrecision
    from amp_plugins.timm import NativeScaler

Importing this package imports torch alone; a trainer's library is imported by its module.
"""

from amp_plugins.scaler import GradScaler, TooManySkipsError

__all__ = ["GradScaler", "TooManySkipsError"]
