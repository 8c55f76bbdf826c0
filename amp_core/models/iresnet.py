"""Face recognition backbones: images to embeddings, the last layer an fp32 island.

The iresnets are those of insightface's arcface_torch, with the same names of weights, so that its published files
load: ResNets with a first convolution of stride 1, pre-normalised blocks and PReLU (Deng et al., arXiv:1801.07698; Duta
et al., arXiv:2004.04989). All map [B, C, H, W] images to float32 [B, embedding] features, not normalised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from amp_core.lowp.islands import keep_fp32
from amp_core.models.family import Builder, Family, ImageShape, check_count, check_probability


def glyphnet(*, image_shape: ImageShape, embedding: int, width: int = 16, dropout: float = 0.0) -> nn.Module:
    """Three convolutions and an embedding layer, for small gray images. Without BatchNorm.

    Args:
        width: channels of the first layer, doubled in each further one. Multiples of 8 suit Tensor Cores.
        dropout: probability, before the last layer.
    """
    check_count("width", width)
    check_probability("dropout", dropout)
    channels, height, columns = image_shape
    cells = math.ceil(height / 8) * math.ceil(columns / 8)
    net = nn.Sequential()
    for inputs, outputs in ((channels, width), (width, 2 * width), (2 * width, 4 * width)):
        net.append(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1))
        net.append(nn.PReLU(outputs))
    net.append(nn.Flatten())
    net.append(nn.Dropout(dropout))
    net.append(keep_fp32(nn.Linear(4 * width * cells, embedding)))
    return net


class _IResNet(nn.Module):
    def __init__(self, image_shape: ImageShape, embedding: int, blocks: Sequence[int], dropout: float) -> None:
        super().__init__()
        channels, height, columns = image_shape
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.prelu = nn.PReLU(64)
        self.layer1 = _stage(64, 64, blocks[0])
        self.layer2 = _stage(64, 128, blocks[1])
        self.layer3 = _stage(128, 256, blocks[2])
        self.layer4 = _stage(256, 512, blocks[3])
        self.bn2 = nn.BatchNorm2d(512)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(512 * math.ceil(height / 16) * math.ceil(columns / 16), embedding)
        self.features = nn.BatchNorm1d(embedding)
        self.features.weight.requires_grad_(False)  # the head's normalisation would cancel a gain
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.prelu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.dropout(torch.flatten(self.bn2(x), 1))
        return self.features(self.fc(x))


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.prelu = nn.PReLU(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.prelu(self.bn2(self.conv1(self.bn1(x))))
        y = self.bn3(self.conv2(y))
        return y + (x if self.downsample is None else self.downsample(x))


def _stage(inputs: int, outputs: int, num_blocks: int) -> nn.Sequential:
    return nn.Sequential(_Block(inputs, outputs, 2), *(_Block(outputs, outputs, 1) for _ in range(num_blocks - 1)))


def _iresnet(*blocks: int) -> Builder:
    """The builder of a network with so many blocks in each stage, of 64, 128, 256 and 512 channels."""

    def build(*, image_shape: ImageShape, embedding: int, dropout: float = 0.0) -> nn.Module:
        check_probability("dropout", dropout)
        # The last matmul sums 25,088 terms, and its gradient comes first in the backward pass.
        return keep_fp32(_IResNet(image_shape, embedding, blocks, dropout), ["fc", "features"])

    return build


EMBEDDERS = Family(
    what="a face recognition backbone",
    builders={
        "glyphnet": glyphnet,
        "iresnet18": _iresnet(2, 2, 2, 2),
        "iresnet34": _iresnet(3, 4, 6, 3),
        "iresnet50": _iresnet(3, 4, 14, 3),
        "iresnet100": _iresnet(3, 13, 30, 3),
    },
    example={"image_shape": (3, 112, 112), "embedding": 512},
)
