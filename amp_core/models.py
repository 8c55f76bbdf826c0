"""Networks by name: two small ones of our own, and every classification model of `torchvision.models`.

Names are looked up in an explicit table, so that a configuration can choose but never run code.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from amp_core.config import nearest
from amp_core.errors import ConfigError
from amp_core.vision import import_torchvision

ImageShape = tuple[int, int, int]


def cnn(*, num_classes: int, image_shape: ImageShape, width: int = 24, dropout: float = 0.1) -> nn.Module:
    """Four convolutions with batch normalisation, for small images. 137,000 parameters with the defaults.

    Strides instead of pooling: on a CPU, half the time of a step for the same accuracy.

    Args:
        width: channels of the first layer, doubled in the second and the third. Multiples of 8 suit Tensor Cores.
        dropout: probability, before the last layer.
    """
    _check_count("width", width)
    _check_probability("dropout", dropout)

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
        depth: number of hidden layers.
        dropout: probability, after each hidden layer.
    """
    _check_count("width", width)
    _check_count("depth", depth)
    _check_probability("dropout", dropout)
    channels, height, columns = image_shape
    sizes = [channels * height * columns] + [width] * depth
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


OWN: dict[str, Callable[..., nn.Module]] = {"cnn": cnn, "mlp": mlp}

RESERVED = {
    "num_classes": "follows the data set; leave it out",
    "image_shape": "follows the data set; leave it out",
    "image_size": "follows data.image_size; leave it out",
    "input_size": "follows data.image_size; leave it out",
    "weights": "recipes train from scratch and download nothing; leave it out",
    "progress": "has no effect without a download; leave it out",
    "aux_logits": "a recipe takes one output from a model; leave it out",
    "transform_input": "is for pretrained weights; leave it out",
}
"""Options that a configuration may not give."""

# Without init_weights these two warn that its default will change.
_ALWAYS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def in_channels(name: str) -> int | None:
    """Colour channels that a model takes; None: any number."""
    return None if name in OWN else 3


def check_model(name: str, options: Mapping[str, Any]) -> list[str]:
    """Problems of a model's name and options, one sentence each. Allocates no weights and draws no random numbers."""
    valid = list(OWN)
    if name not in OWN:
        valid += _torchvision_names()
    if name not in valid:
        return [f"model.name={name}: there is no such model. {nearest(name, valid)}"]
    accepted = _options_of(name)
    problems = []
    for option in options:
        if option in RESERVED:
            problems.append(f"model.options.{option}: {RESERVED[option]}")
        elif option not in accepted:
            problems.append(f"model.options.{option}: {name} has no such option. {nearest(option, accepted)}")
    if options and not problems:
        try:
            _build_on_meta(name, num_classes=10, image_shape=(3, 224, 224), options=options)
        except NotImplementedError:
            pass  # RegNet computes its widths with tensors: it cannot be built without data
        except Exception as error:  # a constructor's complaint about its options has no common type
            given = ", ".join(f"{key}={value}" for key, value in options.items())
            problems.append(f"model.options: {name} cannot be built with {given}: {_one_line(error)}")
    return problems


def build_model(name: str, *, num_classes: int, image_shape: ImageShape, options: Mapping[str, Any]) -> nn.Module:
    """A network with fresh weights, on the CPU, that maps [B, C, H, W] images to [B, num_classes] logits.

    Args:
        name: a key of `OWN` or a classification model of `torchvision.models`.
        num_classes: number of logits.
        image_shape: (C, H, W) of the images it will see.
        options: keyword arguments of the constructor.

    Raises:
        ConfigError: unknown name or option, or a network that cannot take such images.
    """
    problems = check_model(name, options)
    if problems:
        raise ConfigError(problems)
    channels, height, width = image_shape
    needed = in_channels(name)
    if needed not in (None, channels):
        raise ConfigError(f"model.name={name}: takes images with {needed} channels; these have {channels}")
    try:
        shadow = _build_on_meta(name, num_classes=num_classes, image_shape=image_shape, options=options)
        shadow.eval()(torch.empty(2, *image_shape, device="meta"))
    except NotImplementedError:
        pass
    except Exception as error:
        raise ConfigError(
            f"model.name={name}: does not take images of {height}x{width} pixels ({_one_line(error)}); "
            f"expected a larger data.image_size, such as 224"
        ) from error
    return _build(name, num_classes=num_classes, image_shape=image_shape, options=options)


def _build(name: str, *, num_classes: int, image_shape: ImageShape, options: Mapping[str, Any]) -> nn.Module:
    if name in OWN:
        return OWN[name](num_classes=num_classes, image_shape=image_shape, **options)
    sizes = {"image_size": image_shape[1], "input_size": image_shape[1:]}
    given = {key: size for key, size in sizes.items() if key in _constructor_keys(name)}
    given |= _ALWAYS.get(name, {}) | dict(options)
    return import_torchvision().models.get_model(name, weights=None, num_classes=num_classes, **given)


def _build_on_meta(name: str, **arguments: Any) -> nn.Module:
    with torch.device("meta"):
        return _build(name, **arguments)


def _torchvision_names() -> list[str]:
    models = import_torchvision().models
    return models.list_models(module=models)  # without detection, segmentation, video and quantized ones


def _options_of(name: str) -> list[str]:
    keys = inspect.signature(OWN[name]).parameters if name in OWN else _constructor_keys(name)
    return [key for key in keys if key not in RESERVED]


def _constructor_keys(name: str) -> list[str]:
    """What the class of a torchvision model accepts by name. Some would swallow any other keyword in silence."""
    builder = import_torchvision().models.get_model_builder(name)
    parameters = inspect.signature(inspect.signature(builder).return_annotation).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _check_count(key: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={value}, expected a whole number above 0")


def _check_probability(key: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ValueError(f"{key}={value}, expected at least 0 and below 1")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
