"""The loss scale: dynamic, static or capped, with a floor, on the device.

The rule is that of Micikevicius et al., "Mixed Precision Training" (https://arxiv.org/abs/1710.03740), as in
`torch.amp.GradScaler`: halve after an overflow, double after `growth_interval` steps without one. Three additions: a
cap, since without overflows the scale reaches 2^127; a floor, since at 2^-128 its reciprocal is infinite and writes NaN
into the weights; and a static scale that still skips bad steps. With `hysteresis` it falls at the overflow of that
number since it grew, as in Megatron-LM, or since a step without one (`consecutive_hysteresis`), as in DeepSpeed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from amp_core.config.errors import ConfigError
from amp_core.config.schema import AmpConfig, scale_cap
from amp_core.torch_private import update_scale_

logger = logging.getLogger("amp_recipes")


@dataclasses.dataclass(frozen=True)
class ScalePolicy:
    """How the loss scale changes. `growth_interval` counts steps."""

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    max_scale: float
    min_scale: float
    dynamic: bool = True
    hysteresis: int = 1
    consecutive_hysteresis: bool = False


def policy_of(config: AmpConfig, samples: int | None) -> ScalePolicy | None:
    """The policy of a mode, or None where it does not scale. ConfigError: its cap needs `samples`, which is None."""
    if not config.scaling:
        return None
    if config.max_scale_per_sample is not None and samples is None:
        raise ConfigError(
            f"amp={config.name}: caps the scale at {config.max_scale_per_sample:g} times the samples of a micro-batch; "
            f"pass samples= to Amp"
        )
    cap = scale_cap(config, samples)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(ScalePolicy)}
    # A cap below the floor is the floor, too: whether a scale is at its floor is found by comparing with `min_scale`.
    return ScalePolicy(**values | {"max_scale": cap, "min_scale": min(values["min_scale"], cap)})


class Numbers(dict[float, Tensor]):
    """0-d float32 tensors by value, only to be read: an operator takes three times as long with a Python number."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __missing__(self, value: float) -> Tensor:
        made = torch.full((), value, dtype=torch.float32, device=self.device)
        return self.setdefault(value, made) if len(self) < 64 else made  # a loop may weigh each loss in its own way


class LossScale:
    """The loss scale of one run, 0-d float32 on the device, or 1 in a mode that does not scale (`policy` is None)."""

    def __init__(self, policy: ScalePolicy | None, device: torch.device) -> None:
        self.policy = policy
        start = min(policy.init_scale, policy.max_scale) if policy else 1.0
        self.scale = torch.full((), start, dtype=torch.float32, device=device)
        self._tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._patience = torch.full((), policy.hysteresis if policy else 1, dtype=torch.int32, device=device)
        """Overflows until the scale falls, also those that did."""
        self.kept: dict[str, Any] = {}
        """The scale of an earlier mode, where this one does not scale."""
        self.numbers = Numbers(device)

    @property
    def inverse(self) -> Tensor:
        """1 / scale, 0-d float32: exact where the scale is a power of two, as with the default factors."""
        return self.scale.reciprocal()

    def update(self, found_inf: Tensor) -> None:
        """Update the scale after a window; `found_inf` is 0-d float32, above 0 for an overflow. No host-device sync."""
        policy = self.policy
        if policy is None or not policy.dynamic:
            return
        before = self.scale.clone() if policy.hysteresis > 1 else None
        factors = policy.growth_factor, policy.backoff_factor
        # After an overflow times backoff; after `interval` steps without one, which the tracker counts, times growth.
        update_scale_(self.scale, self._tracker, found_inf, *factors, policy.growth_interval)
        if before is not None:
            self._be_patient(policy, before, found_inf > 0)
        # Clamped here and not at use, so that no step sees and no checkpoint holds a scale out of bounds.
        self.scale.clamp_(self.numbers[policy.min_scale], self.numbers[policy.max_scale])

    def _be_patient(self, policy: ScalePolicy, before: Tensor, bad: Tensor) -> None:
        """Keep the scale at the first overflows."""
        self._patience.sub_(bad.int())
        self.scale.copy_(torch.where(bad & (self._patience > 0), before, self.scale))
        # The tracker is 0 after a step without overflow if the scale grew.
        refill = ~bad if policy.consecutive_hysteresis else ~bad & (self._tracker == 0)
        self._patience.copy_(torch.where(refill, policy.hysteresis, self._patience.clamp(min=0)))

    @contextlib.contextmanager
    def held_at(self, scale: float) -> Iterator[None]:
        """Use another scale inside the context."""
        before = self.scale.clone()
        self.set(scale)
        try:
            yield
        finally:
            self.set(before)

    def set(self, scale: float | Tensor) -> None:
        self.scale.fill_(scale)

    def state_dict(self) -> dict[str, Any]:
        """The state in the layout of `torch.amp.GradScaler`, which can load it; {} without scaling. Waits."""
        if self.policy is None:
            return {}
        return {
            "scale": self.scale.item(),
            "growth_factor": self.policy.growth_factor,
            "backoff_factor": self.policy.backoff_factor,
            "growth_interval": self.policy.growth_interval,
            "_growth_tracker": int(self._tracker.item()),
            **({"_hysteresis_tracker": int(self._patience.item())} if self.policy.hysteresis > 1 else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved scale, of this class or of `torch.amp.GradScaler`. The policy stays; differences are logged.

        {} (from a mode without scaling) starts fresh. ValueError: it holds no scale that is a positive finite number.
        """
        if state and not isinstance(state.get("scale"), int | float):
            raise ValueError(
                f"a loss scale's state with the keys {sorted(map(str, state))} was given; expected that of Amp or of "
                f"torch.amp.GradScaler, with a number as scale"
            )
        if self.policy is None:
            self.kept = dict(state)
            return
        policy, scale = self.policy, float(state.get("scale", self.policy.init_scale))
        if not 0.0 < scale < float("inf"):
            raise ValueError(f"the saved loss scale is {scale}; expected a positive finite number")
        for key in ("growth_factor", "backoff_factor", "growth_interval"):
            if key in state and state[key] != getattr(policy, key):
                logger.info("amp.%s: %s in the checkpoint, %s now", key, state[key], getattr(policy, key))
        if state and not policy.dynamic:
            if scale != self.scale.item():
                logger.info("the checkpoint's loss scale %g is ignored: amp.dynamic=false", scale)
            return
        self.scale.fill_(min(max(scale, policy.min_scale), policy.max_scale))
        # The kernel grows the scale at equality: a count beyond a shorter interval would never meet it.
        self._tracker.fill_(int(state.get("_growth_tracker", 0)) % policy.growth_interval)
        self._patience.fill_(min(int(state.get("_hysteresis_tracker", policy.hysteresis)), policy.hysteresis))
        if not state:
            logger.info("the checkpoint has no loss scale: starting with %g", self.scale.item())
