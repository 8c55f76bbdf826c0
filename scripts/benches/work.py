"""Networks and batches that every contestant trains: the same weights, the same samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core.models import build_model
from amp_core.models.gpt import GPT
from amp_core.models.images import CLASSIFIERS

Batch = tuple[Tensor, Tensor]
MODES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Work:
    """What is trained."""

    title: str
    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    """(samples, randomness) -> inputs and targets on the CPU."""
    batch_size: int
    tokens: int = 0
    """Tokens of a sample, where there are any."""

    def net(self, device: str, *, channels_last: bool = False) -> nn.Module:
        """The same weights at every call, in training."""
        torch.manual_seed(0)
        net = self.build().to(device).train()
        return net.to(memory_format=torch.channels_last) if channels_last else net  # type: ignore[call-overload]

    def batches(
        self, num: int, device: str, batch_size: int | None = None, *, channels_last: bool = False
    ) -> list[Batch]:
        """The same samples at every call."""
        generator = torch.Generator().manual_seed(0)
        drawn = [self.draw(batch_size or self.batch_size, generator) for _ in range(num)]
        moved = [(inputs.to(device), targets.to(device)) for inputs, targets in drawn]
        if channels_last:
            moved = [(inputs.to(memory_format=torch.channels_last), targets) for inputs, targets in moved]
        return moved


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of [B, C] or [B, L, C] logits."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _images(name: str, shape: tuple[int, int, int], title: str, batch_size: int, **options: float) -> Work:
    def draw(num: int, generator: torch.Generator) -> Batch:
        return torch.randn(num, *shape, generator=generator), torch.randint(10, (num,), generator=generator)

    def build() -> nn.Module:
        return build_model(name, CLASSIFIERS, num_classes=10, image_shape=shape, options=options)

    return Work(title, build, draw, batch_size)


def _gpt(vocab: int, length: int, width: int, depth: int, heads: int, title: str, batch_size: int) -> Work:
    def draw(num: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(vocab, (num, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def build() -> nn.Module:
        return GPT(vocab_size=vocab, length=length, width=width, depth=depth, heads=heads)

    return Work(title, build, draw, batch_size, length)


WORKS: dict[str, Work] = {
    "mlp": _images("mlp", (1, 14, 14), "MLP, 59k parameters", 32, width=160),
    # Without dropout: its masks would depend on which loop runs first.
    "cnn": _images("cnn", (1, 28, 28), "small CNN", 32, dropout=0.0),
    "resnet18": _images("resnet18", (3, 32, 32), "ResNet-18 at 32", 16),
    "gpt": _gpt(256, 64, 64, 4, 4, "GPT, 4 layers of 64", 8),
    # For GPUs.
    "resnet50": _images("resnet50", (3, 224, 224), "ResNet-50 at 224", 256),
    "gpt2": _gpt(50304, 1024, 768, 12, 12, "GPT-2 124M", 16),
}
