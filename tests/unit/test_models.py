"""Networks by name: what can be built, and what is refused with a sentence that helps."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_core.config.errors import ConfigError
from amp_core.config.options import choices, read_option
from amp_core.models import Family, build_model, check_model
from amp_core.models.family import ImageShape
from amp_core.models.gpt import LANGUAGE_MODELS
from amp_core.models.images import CLASSIFIERS, OWN
from amp_core.vision import import_torchvision
from recipes import RECIPES, diffusion, face_recognition, find, gan, segmentation

ROOT = Path(__file__).resolve().parents[2]
GRAY, COLOUR = (1, 28, 28), (3, 64, 64)


def num_parameters(net: torch.nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


# --- building ---------------------------------------------------------------------------------------------------------


NETS: dict[str, tuple[Family, dict[str, Any], Any, Any]] = {
    # Name: its family, further facts, its inputs but for the image, and the outputs for images of a shape.
    **{name: (CLASSIFIERS, {"num_classes": 7}, (), lambda shape: [(2, 7)]) for name in OWN},
    "unet": (segmentation.MODELS, {"num_masks": 2}, (), lambda shape: [(2, 2, *shape[1:])]),
    "denoiser": (diffusion.MODELS, {}, (torch.zeros(2),), lambda shape: [(2, *shape)]),
    "glyphnet": (face_recognition.MODELS, {"embedding": 8}, (), lambda shape: [(2, 8)]),
    "dcgan": (gan.MODELS, {}, (), lambda shape: [(2, *shape), (2,)]),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("shape", [GRAY, (3, 32, 32), (4, 17, 23), (1, 8, 8), (4, 9, 5), (1, 96, 80)], ids=str)
@pytest.mark.parametrize(
    "name, options",
    [
        (name, options)
        for name, (family, *_) in NETS.items()
        for options in ({}, {"width": 8}, {"depth": 1}, {"norm": "batch"})
        if options.keys() <= inspect.signature(family.builder(name)).parameters.keys()
    ],
)
def test_our_own_models_take_images_of_any_size(name: str, shape: ImageShape, options: dict[str, Any]) -> None:
    family, facts, inputs, outputs = NETS[name]
    net: Any = build_model(name, family, options=options, image_shape=shape, **facts)
    found = [net["generator"](torch.randn(2, 64))] if name == "dcgan" else [net(torch.randn(2, *shape), *inputs)]
    found += [net["discriminator"](found[0])] if name == "dcgan" else []
    assert [tuple(each.shape) for each in found] == outputs(shape)
    assert name != "denoiser" or not found[0].any()  # untrained it says 0
    assert family.in_channels(name) is None
    if name == "unet":
        assert net.to(memory_format=torch.channels_last)(torch.randn(2, *shape)).shape == found[0].shape
    if name == "dcgan":  # a penalty on each sample would depend on the rest of the batch
        assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in net["discriminator"].modules())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name, shape", [
    ("resnet18", GRAY),
    ("mobilenet_v3_small", COLOUR),
    ("vit_b_32", (3, 32, 32)),
    ("googlenet", COLOUR),
    ("regnet_y_400mf", COLOUR),
])  # fmt: skip
def test_torchvision_models_give_plain_logits_of_the_classes_of_the_data(name, shape):
    shape = (CLASSIFIERS.in_channels(name) or 0, *shape[1:])
    net = build_model(name, CLASSIFIERS, num_classes=7, image_shape=shape, options={}).train()
    logits = net(torch.randn(2, *shape))
    assert isinstance(logits, torch.Tensor) and logits.shape == (2, 7)


@pytest.mark.parametrize("name", sorted(OWN))
def test_hidden_layers_suit_tensor_cores(name: str) -> None:
    net = build_model(name, CLASSIFIERS, num_classes=10, image_shape=GRAY, options={})
    layers = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    outputs = [m.out_channels if isinstance(m, torch.nn.Conv2d) else m.out_features for m in layers]
    assert all(count % 8 == 0 for count in outputs[:-1])


def test_options_reach_the_model() -> None:
    small, large = (
        build_model("cnn", CLASSIFIERS, num_classes=10, image_shape=GRAY, options={"width": width}) for width in (8, 32)
    )
    assert num_parameters(small) < 20_000 < 100_000 < num_parameters(large) < 300_000
    deep = build_model(
        "mlp", CLASSIFIERS, num_classes=10, image_shape=GRAY, options={"depth": 5, "width": 16, "dropout": 0.25}
    )
    assert sum(isinstance(m, torch.nn.Linear) for m in deep.modules()) == 6
    assert next(m for m in deep.modules() if isinstance(m, torch.nn.Dropout)).p == 0.25
    wide = build_model(
        "resnet18", CLASSIFIERS, num_classes=10, image_shape=COLOUR, options={"zero_init_residual": True}
    )
    assert not wide.get_parameter("layer1.0.bn2.weight").any()


def test_the_same_seed_gives_the_same_weights_and_checks_draw_no_random_numbers() -> None:
    expected = OWN["cnn"](num_classes=10, image_shape=GRAY)
    torch.manual_seed(0)
    assert check_model("resnet18", {"zero_init_residual": True}, CLASSIFIERS) == []
    net = build_model("cnn", CLASSIFIERS, num_classes=10, image_shape=GRAY, options={})
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# --- refusing ---------------------------------------------------------------------------------------------------------


def test_every_classification_model_of_torchvision_is_accepted_and_nothing_else() -> None:
    models = import_torchvision().models
    for name in ("resnet50", "efficientnet_b0", "swin_t"):
        assert check_model(name, {}, CLASSIFIERS) == []
    for name in models.list_models():
        is_classifier = models.get_model_builder(name).__module__.count(".") == 2
        assert bool(check_model(name, {}, CLASSIFIERS)) != is_classifier, name


@pytest.mark.parametrize("name, options, expected", [
    ("resnt18", {}, ["model.name=resnt18: is not an image classification network. Did you mean resnet18?"]),
    ("CNN", {}, ["model.name=CNN: is not an image classification network. Did you mean cnn?"]),
    ("cnn", {"widht": 8}, ["model.options.widht: cnn has no such option. Did you mean width?"]),
    ("resnet18", {"weights": "DEFAULT"}, ["model.options.weights: use model.weights=<file>, or model.weights=default"]),
    ("cnn", {"num_classes": 3}, ["model.options.num_classes: follows the data set"]),
    ("vit_b_16", {"image_size": 32}, ["model.options.image_size: follows data.image_size"]),
    ("inception_v3", {"aux_logits": True}, ["model.options.aux_logits: a recipe takes one output"]),
    ("mobilenet_v3_small", {"widht": 1}, ["model.options.widht: mobilenet_v3_small has no such option"]),
    ("resnet18", {"depth": 1, "width_per_grup": 64}, ["model.options.depth: resnet18", "model.options.width_per_grup: resnet18"]),
    ("cnn", {"width": 0}, ["model.options: cnn cannot be built with width=0: width=0, expected a whole number"]),
    ("cnn", {"width": "wide"}, ["model.options: cnn cannot be built with width=wide"]),
    ("mlp", {"dropout": 1.5}, ["model.options: mlp cannot be built with dropout=1.5"]),
    ("resnet18", {"groups": 2}, ["model.options: resnet18 cannot be built with groups=2: BasicBlock only"]),
])  # fmt: skip
def test_problems_name_the_key_and_the_way_out(name: str, options: dict[str, object], expected: list[str]) -> None:
    problems = check_model(name, options, CLASSIFIERS)
    assert len(problems) == len(expected)
    for problem, beginning in zip(problems, expected, strict=True):
        assert problem.startswith(beginning), problem
    with pytest.raises(ConfigError, match=r"^model\."):
        build_model(name, CLASSIFIERS, num_classes=10, image_shape=COLOUR, options=options)


@pytest.mark.parametrize("family, name, options, expected", [
    (LANGUAGE_MODELS, "gpt", {"width": 100, "heads": 3}, "width=100, expected a multiple of 2 * heads = 6"),
    (LANGUAGE_MODELS, "gpt", {"depth": 0}, "depth=0, expected a whole number"),
    (LANGUAGE_MODELS, "gpt", {"positions": "sinus"}, "positions=sinus, expected one of learned, rope, alibi"),
    (LANGUAGE_MODELS, "gpt", {"positions_dtype": "fp8"}, "positions_dtype=fp8, expected one of fp32, bf16, fp16"),
    (LANGUAGE_MODELS, "gpt", {"dropout": 1.0}, "dropout=1.0, expected at least 0 and below 1"),
    (LANGUAGE_MODELS, "gpt", {"length": 8}, "model.options.length: follows the data set"),
    (LANGUAGE_MODELS, "gpt", {"widht": 8}, "Did you mean width?"),
    (segmentation.MODELS, "unet", {"width": 0}, "width=0, expected a whole number"),
    (segmentation.MODELS, "unet", {"depth": 0}, "depth=0, expected a whole number"),
    (segmentation.MODELS, "unet", {"dropout": 1.0}, "dropout=1.0, expected at least 0 and below 1"),
    (segmentation.MODELS, "unet", {"num_masks": 3}, "model.options.num_masks: follows the data set"),
    (segmentation.MODELS, "unet", {"deep": 1}, "model.options.deep: unet has no such option"),
    (face_recognition.MODELS, "iresnet18", {"dropout": 2}, "dropout=2"),
    (face_recognition.MODELS, "glyphnet", {"width": 0}, "width=0"),
    (face_recognition.MODELS, "iresnet18", {"blocks": [1, 1, 1, 1]}, "no such option"),
])  # fmt: skip
def test_options_of_every_family_are_checked(family: Family, name: str, options: Any, expected: str) -> None:
    (problem,) = check_model(name, options, family)
    assert expected in problem


@pytest.mark.parametrize("name", ["vgg11", "vit_b_16", "maxvit_t", "inception_v3"])
def test_images_that_are_too_small_for_a_model_are_refused_before_it_trains(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model.name={name}: does not take images of 28x28 .* data.image_size"):
        build_model(name, CLASSIFIERS, num_classes=10, image_shape=(3, 28, 28), options={})


def test_channels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes images with 3 channels; these have 1"):
        build_model("resnet18", CLASSIFIERS, num_classes=10, image_shape=GRAY, options={})


@pytest.mark.parametrize("option", choices("model"))
def test_every_option_of_the_model_group_can_be_built(option: str) -> None:
    values = read_option("model", option)
    assert set(values) == {"name", "options"}
    families = {module.MODELS.what: module.MODELS for module in map(find, RECIPES)}
    takers = [family for family in families.values() if values["name"] in family.names()]
    library, colon, _ = values["name"].partition(":")
    if colon:
        if not find_spec({"hf": "transformers"}.get(library, library)):
            pytest.skip(f"{library} is not installed")
        takers = [CLASSIFIERS if library == "timm" else LANGUAGE_MODELS]
    assert len(takers) == 1 or values["name"] == "own"  # other names are unique over all families
    assert not [found for taker in takers for found in check_model(values["name"], values["options"], taker)]
