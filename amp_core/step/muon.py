"""Muon for hidden matrices and AdamW for all other weights, as one optimizer under one loss scale.

Jordan et al., https://kellerjordan.github.io/posts/muon: the momentum of a matrix is replaced by the nearest orthogonal
one, about, by a few Newton-Schulz iterations in bfloat16. Their polynomial leaves singular values between 0.7 and 1.2,
beside which bfloat16's error is small. With `adjust_lr_fn=match_rms_adamw` (Liu et al., arXiv:2502.16982) updates have
the size of AdamW's, so one learning rate serves both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.lowp.masters import master_params
from amp_core.step.fused import bare_step

logger = logging.getLogger("amp_recipes")


class MuonAdamW(torch.optim.Optimizer):
    """Steps groups that have `ns_steps` by `torch.optim.Muon`, others by `torch.optim.AdamW`. `build` makes them."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None, "a step of one evaluation"
        muon, adamw = torch.optim.Muon([torch.zeros(1, 1)]), torch.optim.AdamW([torch.zeros(1)])
        adamw.param_groups, adamw.state = [g for g in self.param_groups if "ns_steps" not in g], self.state
        bare_step(adamw)
        # Copies of the groups, whose weights are replaced by views as matrices.
        muon.param_groups = [{**g, "params": list(g["params"])} for g in self.param_groups if "ns_steps" in g]
        for group in muon.param_groups:
            for i, param in enumerate(group["params"]):
                group["params"][i] = matrix = _rows(param)
                if param.grad is not None:
                    if "momentum_buffer" not in self.state[param]:
                        self.state[param]["momentum_buffer"] = torch.zeros_like(param)
                    muon.state[matrix]["momentum_buffer"] = _rows(self.state[param]["momentum_buffer"])
                    matrix.grad = _rows(param.grad)
        bare_step(muon)


def build(nets: Iterable[nn.Module], lr: float, weight_decay: float, **options: Any) -> torch.optim.Optimizer:
    """The optimizer of weights that need gradients; AdamW alone, with a warning, where there is no hidden matrix."""
    if options.get("ns_steps", 1) < 1:  # torch takes 0, and steps along a momentum of any length
        raise ValueError(f"ns_steps={options['ns_steps']}, expected at least 1")
    adam = {key: options.pop(key) for key in ("fused", "betas") if key in options}  # the others are Muon's
    hidden = hidden_matrices(nets)
    pairs = [pair for net in nets for pair in zip(net.parameters(), master_params(net), strict=True)]
    matrices = [side for param, side in pairs if side.requires_grad and param in hidden]
    rest = [side for param, side in pairs if side.requires_grad and param not in hidden]
    # Norms and biases have no weight decay.
    groups = [{"params": [p for p in rest if p.ndim >= 2], "weight_decay": weight_decay}]
    groups += [{"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW([group for group in groups if group["params"]] or [torch.zeros(1)], lr=lr, **adam)
    muon = torch.optim.Muon([torch.zeros(1, 1)], lr, weight_decay, **options)  # for its checks and defaults
    if not matrices:
        logger.warning("optimizer.name=Muon: no hidden matrix; AdamW steps all weights")
        return adamw
    return MuonAdamW([{**muon.param_groups[0], "params": matrices}, *(adamw.param_groups if rest else ())])


def hidden_matrices(nets: Iterable[nn.Module]) -> set[Tensor]:
    """Matrices, and kernels as one row per output; not embeddings, nor the last layer of each network."""
    found: set[Tensor] = set()
    for net in nets:
        owners = [(m, p) for m in net.modules() for p in m.parameters(recurse=False) if p.ndim >= 2]
        # Embeddings and heads train better with AdamW (Jordan et al.). A parametrised weight is in a module within.
        aside = {p for m in net.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters()}
        aside |= {p for m, p in owners if m is owners[-1][0]}
        # Rows without gaps between them, which a view as a matrix needs.
        found |= {p for _, p in owners if p not in aside and (p.ndim == 2 or p.stride(0) == p[0].numel())}
    return found


def _rows(tensor: Tensor) -> Tensor:
    """A view as a matrix; a kernel's columns are in memory order, on which orthogonalisation does not depend."""
    shape = (len(tensor), tensor.numel() // max(len(tensor), 1))
    return tensor.detach() if tensor.ndim == 2 else tensor.detach().as_strided(shape, (shape[1], 1))
