"""U-Nets on any encoder (Ronneberger et al., arXiv:1505.04597)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions with batch normalisation."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def way_up(x: Tensor, skips: list[Tensor], narrow: Iterable[nn.Module], up: Iterable[nn.Module]) -> Tensor:
    """From the coarsest feature map to the finest; each step is narrowed, enlarged and joined with the next skip."""
    for convolution, block in zip(narrow, up, strict=True):
        skip = skips.pop()
        # Nearest: its backward pass is deterministic on a GPU, that of bilinear is not.
        x = F.interpolate(convolution(x), size=skip.shape[-2:], mode="nearest")
        x = block(torch.cat([skip, x], dim=1))
    return x


class FeatureUNet(nn.Module):
    """A U-Net whose way down is a network of timm that returns feature maps [B, C, h, w], the finest first."""

    def __init__(self, encoder: Any, num_masks: int) -> None:
        super().__init__()
        channels, self.stride = encoder.feature_info.channels(), encoder.feature_info.reduction()[0]
        pairs = [*itertools.pairwise(channels)][::-1]
        self.encoder = encoder
        self.narrow = nn.ModuleList(nn.Conv2d(coarse, fine, 1) for fine, coarse in pairs)
        self.up = nn.ModuleList(double_convolution(2 * fine, fine) for fine, _ in pairs)
        self.head = nn.Conv2d(channels[0], num_masks * self.stride**2, 1)

    def forward(self, images: Tensor) -> Tensor:
        *skips, x = self.encoder(images)
        masks = self.head(way_up(x, skips, self.narrow, self.up))
        return F.pixel_shuffle(masks, self.stride)[..., : images.shape[-2], : images.shape[-1]]
