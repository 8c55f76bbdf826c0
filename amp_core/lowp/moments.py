"""Adam and AdamW whose moments are bfloat16: 4 bytes of state per weight in place of 8.

    optimizer = Adam16(net.parameters(), lr=1e-3, decoupled_weight_decay=True)     # AdamW; False: Adam

With betas of 0.9 and 0.999 a step changes the second moment by a thousandth, but bfloat16 only resolves 1/256: rounded
to nearest, a moment never moves, however small the gradients become. So a step is computed in fp32 by torch's fused
kernel, and its result is stochastically rounded, without bias. A skipped step leaves bfloat16 values, which rounding
does not change.

The 8-bit optimizers of torchao and bitsandbytes need half of this memory. They take neither `found_inf` nor
`grad_scale` as tensors, so each step would sync, and bitsandbytes reads the learning rate on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from amp_core.lowp.masters import buckets, weights_by_side
from amp_core.lowp.rounding import noise_16bit, round_stochastically
from amp_core.torch_private import foreach_copy_

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam16(torch.optim.Optimizer):
    """Adam with bfloat16 moments. A step never syncs and is skipped by `found_inf`, like fused ones.

    Its state dict is that of `torch.optim.Adam`, in bfloat16. The rounding noise is a function of the step count and
    the position of a weight: the same after a resume, on every replica and on any device.

    Args:
        params: as for any optimizer: dense fp32 weights.
        lr: a number or a 0-d tensor.
        betas, eps, weight_decay: as in `torch.optim.Adam`.
        decoupled_weight_decay: AdamW's weight decay, which bypasses the moments.
        fused: must be True.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        fused: bool = True,
    ) -> None:
        if not fused:
            raise ValueError("fused=False: bfloat16 moments need torch's fused step")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True}
        # `fused` in the groups: by it `Amp`, schedules and torch know that a step is skipped on the device.
        super().__init__(params, defaults | {"decoupled_weight_decay": decoupled_weight_decay})

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One step, a bucket of weights at a time, whose moments are in fp32."""
        assert closure is None, "a step of one evaluation"
        number = 0
        for group in self.param_groups:
            for params in buckets(p for p in group["params"] if p.grad is not None):
                self._step(params, group, number)
                number += 1

    @torch.no_grad()
    def _step(self, params: list[Tensor], group: dict[str, Any], number: int) -> None:
        states = [self.state[p] or self._begin(p) for p in params]
        lows = [flat(state[key]) for key in _MOMENTS for state in states]
        sizes = [low.numel() for low in lows]
        whole = torch.cat(lows).float()  # exact
        moments = [part.as_strided(p.shape, p.stride()) for part, p in zip(whole.split(sizes), params * 2, strict=True)]
        steps = [state["step"] for state in states]
        settings = {key: group[key] for key in ("fused", "lr", "eps", "weight_decay", "decoupled_weight_decay")}
        # Set by `Amp.step` and by torch's GradScaler.
        settings |= {key: getattr(self, key, None) for key in ("grad_scale", "found_inf")}
        settings |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "amsgrad": False, "maximize": False}
        grads, num = [p.grad for p in params], len(params)
        adam(params, grads, moments[:num], moments[num:], [], steps, **settings)  # type: ignore[arg-type]
        # Each of up to 4096 buckets has its own noise; with the same one, rounding errors would be correlated.
        noise = noise_16bit(whole.numel(), steps[0].to(torch.int64) * 4096 + number)
        foreach_copy_(lows, list(round_stochastically(whole, noise).split(sizes)))

    def _begin(self, param: Tensor) -> dict[str, Any]:
        if not torch.ops.aten.is_non_overlapping_and_dense(param):
            raise ValueError(
                f"a weight of {tuple(param.shape)} has gaps in its memory; use optimizer.state_dtype=float32"
            )
        state = self.state[param]
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for key in _MOMENTS:
            state[key] = torch.zeros_like(param, dtype=torch.bfloat16)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As for any optimizer; moments become bfloat16 with the strides of their weights."""
        super().load_state_dict(state_dict)  # casts all floating-point state to the dtype of the weights
        weights = weights_by_side()
        for param, state in self.state.items():
            like = weights.get(param, param)
            for key in _MOMENTS:
                if key in state:
                    state[key] = torch.empty_like(like, dtype=torch.bfloat16).copy_(state[key])


def flat(tensor: Tensor) -> Tensor:
    """A view of the elements in memory order."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    assert tensor.numel() == 0 or last == tensor.numel() - 1, "a tensor with gaps in its memory"
    return tensor.detach().as_strided((tensor.numel(),), (1,))
