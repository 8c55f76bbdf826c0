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

from amp_core.lowp.weights import master_params
from amp_core.step.fused import bare_step

logger = logging.getLogger("amp_recipes")


class MuonAdamW(torch.optim.Optimizer):
    """Steps groups that have `ns_steps` by `torch.optim.Muon`, the others by `torch.optim.AdamW`. One sync per step.

    Args:
        params: groups with all settings of the one or the other; see `build`.
    """

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None, "a step of one evaluation"
        muon, adamw = torch.optim.Muon([torch.zeros(1, 1)]), torch.optim.AdamW([torch.zeros(1)])
        adamw.param_groups, adamw.state = [g for g in self.param_groups if "ns_steps" not in g], self.state
        bare_step(adamw)
        muon.param_groups = []
        for group in (g for g in self.param_groups if "ns_steps" in g):
            muon.param_groups.append({**group, "params": []})
            for param in (p for p in group["params"] if p.grad is not None):
                state, matrix = self.state[param], _rows(param)
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                matrix.grad = _rows(param.grad)
                muon.state[matrix] = {"momentum_buffer": _rows(state["momentum_buffer"])}
                muon.param_groups[-1]["params"].append(matrix)
        bare_step(muon)


def build(nets: Iterable[nn.Module], lr: float, weight_decay: float, **options: Any) -> torch.optim.Optimizer:
    """Muon over the hidden matrices of networks; AdamW alone, with a warning, where there are none.

    Args:
        nets: their weights that need gradients.
        lr: of both.
        weight_decay: not applied to norms and biases.
        **options: `fused` and `betas` of AdamW; the others of Muon.
    """
    adam = {key: options.pop(key) for key in ("fused", "betas") if key in options}
    sides = [zip(net.parameters(), master_params(net), strict=True) for net in nets]
    ours = hidden_matrices(nets)
    params = [(param in ours, side) for pairs in sides for param, side in pairs if side.requires_grad]
    matrices = [p for is_matrix, p in params if is_matrix]
    rest = [p for is_matrix, p in params if not is_matrix]
    groups = [{"params": [p for p in rest if p.ndim >= 2], "weight_decay": weight_decay}]
    groups += [{"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    # Checks the values, and adds the defaults to the groups; of kernels by their rows.
    muon = torch.optim.Muon([_rows(p) for p in matrices or [torch.zeros(1, 1)]], lr, weight_decay, **options)
    rest_of = torch.optim.AdamW(groups or [torch.zeros(1)], lr=lr, **adam)
    if not matrices:
        logger.warning("optimizer.name=Muon: no hidden matrix; AdamW steps all weights")
        return rest_of
    logger.info("Muon steps %d matrices, AdamW %d other weights", len(matrices), len(rest))
    return MuonAdamW([{**muon.param_groups[0], "params": matrices}, *(rest_of.param_groups if groups else ())])


def hidden_matrices(nets: Iterable[nn.Module]) -> set[Tensor]:
    """Matrices, and kernels as one row per output; not embeddings, nor the last layer of each network."""
    found: set[Tensor] = set()
    for net in nets:
        owners = [(m, p) for m in net.modules() for p in m.parameters(recurse=False) if p.ndim >= 2]
        aside = {p for m, p in owners if isinstance(m, nn.Embedding | nn.EmbeddingBag) or m is owners[-1][0]}
        found |= {p for _, p in owners if p not in aside and (p.ndim == 2 or p.stride(0) == p[0].numel())}
    return found


def _rows(tensor: Tensor) -> Tensor:
    """A view as a matrix. The columns of a kernel are in memory order, on which orthogonalisation does not depend."""
    if tensor.ndim == 2:
        return tensor.detach()
    width = tensor[0].numel()
    return tensor.detach().as_strided((len(tensor), width), (width, 1))
