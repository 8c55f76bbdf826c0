"""Classification networks: two small ones of our own, and those of torchvision, timm and transformers.

All map [B, C, H, W] images to [B, num_classes] logits.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.models.family import Family, ImageShape, check_count, check_probability


def top_class(logits: Tensor) -> dict[str, Tensor]:
    """The most probable class of each row of logits [B, K] and its probability, and the first five of both, in fp32."""
    # Stable: the first of equal ones, as argmax.
    found = torch.sort(logits.float().softmax(1), dim=1, descending=True, stable=True)
    numbers, probabilities = found.indices[:, :5], found.values[:, :5]
    first = {"class": numbers[:, 0], "probability": probabilities[:, 0]}
    return first | {"top_classes": numbers, "top_probabilities": probabilities}


def cnn(*, num_classes: int, image_shape: ImageShape, width: int = 24, dropout: float = 0.1) -> nn.Module:
    """Four convolutions with batch normalisation, for small images. 137,000 parameters with the defaults.

    Strides instead of pooling: on a CPU half the step time at the same accuracy.

    Args:
        width: channels of the first layer, doubled in the second and the third. Multiples of 8 suit Tensor Cores.
        dropout: probability, before the last layer.
    """
    check_count("width", width)
    check_probability("dropout", dropout)

    def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        return [layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *conv(image_shape[0], width, 5, stride=2),
        *conv(width, 2 * width, 3, stride=2),
        *conv(2 * width, 4 * width, 3),
        *conv(4 * width, 4 * width, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, num_classes),
    )


def mlp(
    *, num_classes: int, image_shape: ImageShape, width: int = 256, depth: int = 2, dropout: float = 0.0
) -> nn.Module:
    """Fully connected layers on the flattened image.

    Args:
        width: units of each hidden layer. Multiples of 8 suit Tensor Cores.
        dropout: after each hidden layer.
    """
    check_count("width", width)
    check_count("depth", depth)
    check_probability("dropout", dropout)
    channels, height, columns = image_shape
    sizes = [channels * height * columns] + [width] * depth
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


OWN: dict[str, Callable[..., nn.Module]] = {"cnn": cnn, "mlp": mlp}

# Without init_weights these two warn about its future default.
_ALWAYS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def _torchvision_names() -> Iterable[str]:
    from amp_core.vision import import_torchvision  # torchvision takes a second to import; other networks need none

    models = import_torchvision().models
    return models.list_models(module=models)  # without detection, segmentation, video and quantized ones


def _torchvision(name: str) -> Callable[..., nn.Module]:
    """The builder of a torchvision model, with the signature of the keywords that its class accepts.

    Some classes silently accept any other keyword.
    """
    from amp_core.vision import import_torchvision

    models = import_torchvision().models
    cls = inspect.signature(models.get_model_builder(name)).return_annotation
    parameters = [
        p.replace(kind=p.KEYWORD_ONLY)
        for p in inspect.signature(cls).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    keys = {p.name for p in parameters}

    def build(*, num_classes: int, image_shape: ImageShape, **options: Any) -> nn.Module:
        sizes = {"image_size": image_shape[1], "input_size": image_shape[1:]}
        given = {key: size for key, size in sizes.items() if key in keys}
        given |= _ALWAYS.get(name, {}) | options
        return models.get_model(name, weights=None, num_classes=num_classes, **given)

    build.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return build


CLASSIFIERS = Family(
    what="an image classification network",
    builders=OWN,
    example={"num_classes": 10, "image_shape": (3, 224, 224)},
    outputs=lambda image_shape, num_classes: (2, num_classes),
    more_names=_torchvision_names,
    more=_torchvision,
    in_channels=lambda name: None if name in OWN else 3,
    libraries={"timm": "timm_classifier", "hf": "hf_classifier"},
)
