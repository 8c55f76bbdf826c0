"""Change a network for the modes beyond autocast, and say what of it is unsafe or slow in 16 bits."""

from __future__ import annotations

import logging

import torch
from torch import nn

from amp_core.config.errors import ConfigError
from amp_core.config.schema import AmpConfig
from amp_core.lowp import lint
from amp_core.lowp.weights import LowPrecisionWeights, compute_in, low_weights

logger = logging.getLogger("amp_recipes")


def prepare(
    net: nn.Module, config: AmpConfig, low: torch.dtype, *, on_gpu: bool, gathers: bool = False
) -> LowPrecisionWeights | None:
    """Float8 layers and 16-bit weights in place, as `Amp.prepare`; returns the latter. `low`: dtype of activations."""
    mode = f"amp={config.name}"
    if config.update is None and (problem := lint.trained_in_16_bits(net)):
        if config.scaling:
            raise ConfigError(f"{mode}: {problem}")
        logger.warning("%s: %s", mode, problem)
    if problem := lint.computed_wrongly(net, low) or (config.update and lint.needs_fp32_weights(net)):
        raise ConfigError(f"{mode}: {problem}")
    for name, reason in lint.find_unsafe(net, low):
        logger.warning("%s: %s: %s", mode, name or "the network", reason)
    for name, reason in lint.find_slow(net, low) if on_gpu else ():
        logger.info("%s: %s: %s", mode, name or "the network", reason)
    if config.format is not None:
        from amp_core.lowp.products import use_mode

        use_mode(net, config)
    if gathers and config.update is not None:
        return compute_in(net, low, low_weights(net))
    return None if config.update is None else LowPrecisionWeights(net, low, config.update)
