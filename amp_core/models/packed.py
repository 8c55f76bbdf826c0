"""Packed documents: the mask that keeps them apart, and the check that a network does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amp_core.config.errors import ConfigError


def causal_mask(positions: Tensor) -> Tensor:
    """Which keys a query of packed documents attends to, bool [B, 1, L, L]: those of its document up to itself.

    A document begins where `positions` [B, L] is 0. No host-device sync.
    """
    documents = (positions == 0).cumsum(1)
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


@torch.no_grad()
def check_packing(net: nn.Module, name: str) -> None:
    """Raises ConfigError unless a language model's logits of a packed document are those of the document alone."""
    was_training = net.training
    tokens = torch.tensor([[1, 5, 2, 7, 3, 3, 0, 6, 4, 2, 1, 7, 5]], device=next(net.parameters()).device)
    positions = torch.cat([torch.arange(6), torch.arange(7)])[None].to(tokens.device)
    needs = f"data.packing: model.name={name}"
    try:
        alone, packed = net.eval()(tokens[:, 6:]), net(tokens, positions=positions)[:, 6:]
    except Exception as error:  # theirs raise different types
        raise ConfigError(
            f"{needs} takes no packed documents ({' '.join(str(error).split())}); use data.packing=none"
        ) from error
    finally:
        net.train(was_training)
    # Far above what other shapes round (some eps), far below what a token of another document changes.
    eps = max(torch.finfo(each.dtype).eps for each in (alone, *net.parameters()) if each.is_floating_point())
    if not (packed - alone).abs().max() <= eps**0.5 * alone.abs().max():
        raise ConfigError(f"{needs} lets packed documents see each other; use data.packing=none")
