"""Segmentation networks. They map [B, C, H, W] images to [B, num_masks, H, W] logits, one binary mask per channel."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core.models.family import Family, ImageShape, check_count, check_probability


def unet(*, num_masks: int, image_shape: ImageShape, width: int = 8, depth: int = 3, dropout: float = 0.0) -> nn.Module:
    """A small U-Net with batch normalisation. 113,000 parameters with the defaults; any height and width.

    Source: Ronneberger, Fischer, Brox, "U-Net" (arXiv:1505.04597); here with padded convolutions.

    Args:
        width: channels at full resolution, doubled with each halving of it. Multiples of 8 suit Tensor Cores.
        depth: how often the resolution is halved.
        dropout: probability, for whole channels at the lowest resolution.
    """
    check_count("width", width)
    check_count("depth", depth)
    check_probability("dropout", dropout)
    return UNet(image_shape[0], num_masks, width, depth, dropout)


class UNet(nn.Module):
    """Two convolutions per resolution, down and up again, with a skip connection at each but the lowest."""

    def __init__(self, channels: int, num_masks: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _block(inputs, outputs) for inputs, outputs in zip([channels, *widths], widths, strict=False)
        )
        self.dropout = nn.Dropout2d(dropout)
        self.narrow = nn.ModuleList(nn.Conv2d(2 * outputs, outputs, 1) for outputs in reversed(widths[:-1]))
        self.up = nn.ModuleList(_block(2 * outputs, outputs) for outputs in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, num_masks, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, skips = images, []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2, ceil_mode=True) if level else x)
            skips.append(x)
        x = self.dropout(skips.pop())
        for narrow, block in zip(self.narrow, self.up, strict=True):
            skip = skips.pop()
            # Nearest: its backward pass is deterministic on a GPU, that of bilinear is not.
            x = F.interpolate(narrow(x), size=skip.shape[-2:], mode="nearest")
            x = block(torch.cat([skip, x], dim=1))
        return self.head(x)


class FeatureUNet(nn.Module):
    """A U-Net whose way down is a network of timm that returns feature maps [B, C, h, w], the finest first."""

    def __init__(self, encoder: Any, num_masks: int) -> None:
        super().__init__()
        channels, self.stride = encoder.feature_info.channels(), encoder.feature_info.reduction()[0]
        pairs = [*itertools.pairwise(channels)][::-1]
        self.encoder = encoder
        self.narrow = nn.ModuleList(nn.Conv2d(coarse, fine, 1) for fine, coarse in pairs)
        self.up = nn.ModuleList(_block(2 * fine, fine) for fine, _ in pairs)
        self.head = nn.Conv2d(channels[0], num_masks * self.stride**2, 1)

    def forward(self, images: Tensor) -> Tensor:
        *skips, x = self.encoder(images)
        for narrow, block in zip(self.narrow, self.up, strict=True):
            skip = skips.pop()
            x = F.interpolate(narrow(x), size=skip.shape[-2:], mode="nearest")
            x = block(torch.cat([skip, x], dim=1))
        return F.pixel_shuffle(self.head(x), self.stride)[..., : images.shape[-2], : images.shape[-1]]


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


SEGMENTERS = Family(
    what="a segmentation network",
    builders={"unet": unet},
    example={"num_masks": 1, "image_shape": (3, 64, 64)},
    outputs=lambda image_shape, num_masks: (2, num_masks, *image_shape[1:]),
    in_channels=lambda name: 3 if ":" in name else None,
    libraries={"timm": "timm_segmenter"},
)
