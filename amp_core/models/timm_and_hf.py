"""Networks of timm and transformers, with initial weights: `model.name=timm:<name>` and `hf:<name or folder>`.

They keep their own names of weights, so their files load here and our checkpoints load there. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.config.errors import ConfigError, suggest
from amp_core.config.files import read_json
from amp_core.models.packed import causal_mask
from amp_core.models.unet import FeatureUNet
from amp_core.vision import import_torchvision

_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 176}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2_tiny": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
    "llama_tiny": {"model_type": "llama", "num_key_value_heads": 2, **_SMALL},
    "qwen3_tiny": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, **_SMALL},
    "vit_tiny": {"model_type": "vit", "patch_size": 4, **_SMALL},
}
"""Small configurations of transformers by name; options override their fields."""
NUM_BYTES = 256
CAUSAL = (
    "gemma", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3",
    "starcoder2",
)  # fmt: skip
"""Types of networks whose attention needs nothing but to be causal, if it has no windows."""
Builder = Callable[..., nn.Module]


def import_library(library: str, name: str, extra: str) -> Any:
    with contextlib.suppress(ConfigError):
        import_torchvision()  # timm needs it, and its own import fails beside a CPU-only torch
    try:
        return importlib.import_module(library)
    except ImportError as missing:
        need = f"needs the package {library}: pip install 'amp-recipes[{extra}]'"
        raise ConfigError(f"model.name={extra}:{name}: {need}") from missing


def _taking(options: Iterable[str], build: Builder) -> Builder:
    """`build` with a signature that lists its options."""
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in options]
    build.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return build


def timm_classifier(name: str) -> Builder:
    """The builder of a network of timm: images [B, C, H, W] to logits [B, num_classes]."""
    timm = import_library("timm", name, "timm")
    if name not in (names := [*timm.list_models(), *timm.list_pretrained()]):  # without and with a tag of weights
        raise ConfigError(f"model.name=timm:{name}: timm {timm.__version__} has no such model. {suggest(name, names)}")
    with torch.device("meta"):
        cls = type(timm.create_model(name, pretrained=False))
    keys = {key for key, p in inspect.signature(cls).parameters.items() if p.kind is not p.VAR_KEYWORD}

    def build(*, image_shape: tuple[int, int, int], **given: Any) -> nn.Module:
        size = {"img_size": image_shape[1:]} if "img_size" in keys else {}
        return timm.create_model(name, pretrained=False, in_chans=image_shape[0], **size, **given)

    return _taking(sorted(keys - {"num_classes", "in_chans", "device", "dtype"}), build)


def timm_segmenter(name: str) -> Builder:
    """The builder of a U-Net with an encoder of timm: images [B, C, H, W] to logits [B, num_masks, H, W]."""
    encoder = timm_classifier(name)

    def build(*, num_masks: int, **given: Any) -> nn.Module:
        # The getter keeps timm's names of weights.
        return FeatureUNet(encoder(features_only=True, feature_cls="getter", **given), num_masks)

    return _taking(inspect.signature(encoder).parameters, build)


class Logits:
    """Precedes the class of a network of transformers: its forward pass returns logits instead of an object."""

    def forward(
        self, inputs: Tensor, offset: int = 0, targets: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        assert offset == 0  # recipes/language_model.py refuses others
        packed: dict[str, Tensor] = {}
        if positions is not None:
            # transformers finds documents in `position_ids` by itself, which reads back from the device: a mask of our
            # own does not. Windows of attention and other implementations than SDPA are left to transformers.
            is_plain = _is_plain(self.config)  # type: ignore[attr-defined]
            packed = {"position_ids": positions} | ({"attention_mask": causal_mask(positions)} if is_plain else {})
        if targets is not None:  # the summed loss, of a head of `heads.losses`
            net: Any = self
            return net.get_output_embeddings()(net.base_model(inputs, **packed)[0], targets)
        return super().forward(inputs, **packed).logits  # type: ignore[misc]

    @property
    def head(self) -> nn.Module:
        """The last layer, from the hidden states to the logits. ConfigError: logits are more than its output."""
        net: Any = self
        inputs = torch.zeros(1, 2, dtype=torch.int64, device=next(net.parameters()).device)
        layer, was_training = net.get_output_embeddings(), net.training
        with torch.no_grad():
            net.eval()
            hidden, logits = net.base_model(inputs)[0], super().forward(inputs).logits  # type: ignore[misc]
            is_all = isinstance(layer, nn.Linear) and torch.equal(layer(hidden), logits)
            net.train(was_training)
        if not is_all:
            raise ConfigError(
                f"recipe.loss_chunk: {type(self).__name__} computes more than a linear layer between its last hidden "
                f"states and its logits; use recipe.loss_chunk=null"
            )
        return layer


def as_published(net: nn.Module) -> Any:
    """The same network, of the same weights, with the forward pass and `generate` of its own class."""
    classes = type(net).__mro__
    found: Any = object.__new__(classes[classes.index(Logits) + 1])
    found.__dict__ = net.__dict__
    if found.config._attn_implementation == _MASKLESS:
        found.config._attn_implementation = "sdpa"  # prompts are padded
    return found


_MASKLESS = "amp_causal"


def attend_without_masks(net: Any) -> None:
    """Keep transformers from looking for packed documents, once per forward pass: that reads back from the device.

    A name that it knows no mask for gets none, and SDPA is then told to be causal: the kernel of one document, the same
    bits. Networks that add to a mask (ALiBi) or have windows are left alone.
    """
    if net.config.model_type in CAUSAL and _is_plain(net.config):
        from transformers import AttentionInterface  # pyright: ignore[reportMissingImports]
        from transformers.integrations.sdpa_attention import (  # pyright: ignore[reportMissingImports]
            sdpa_attention_forward,
        )

        AttentionInterface.register(_MASKLESS, sdpa_attention_forward)
        net.config._attn_implementation = _MASKLESS


def _is_plain(config: Any) -> bool:
    """Whether all layers attend by SDPA to all that came before."""
    has_windows = getattr(config, "sliding_window", None) is not None
    others = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
    is_causal = getattr(config, "is_causal", True) is not False
    return is_causal and not has_windows and not others and config._attn_implementation in ("sdpa", _MASKLESS)


def hf_classifier(name: str) -> Builder:
    """The builder of a network of transformers: images [B, C, H, W] to logits [B, num_classes]."""

    def fields(*, num_classes: int, image_shape: tuple[int, int, int]) -> dict[str, Any]:
        size = image_shape[1] if image_shape[1] == image_shape[2] else list(image_shape[1:])
        return {"num_labels": num_classes, "num_channels": image_shape[0], "image_size": size}

    return _transformers(name, "IMAGE_CLASSIFICATION", fields)


def hf_language_model(name: str) -> Builder:
    """The builder of a causal network of transformers: tokens [B, L] to logits [B, L, vocab_size]."""

    def fields(*, vocab_size: int, length: int) -> dict[str, Any]:
        # A BERT is causal if told so. Data has no padding, and the embedding of a padding token gets no gradient: as in
        # transformers in a network that is loaded, whose folder says which token that is.
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        return {"vocab_size": vocab_size, "is_decoder": True, "use_cache": False, **tokens}

    return _transformers(name, "CAUSAL_LM", fields)


def _transformers(name: str, task: str, fields: Callable[..., dict[str, Any]]) -> Builder:
    """The builder of a network for a task; `fields` of its configuration follow from facts of the data."""
    called, file = f"model.name=hf:{name}", Path(name, "config.json")
    transformers = import_library("transformers", name, "hf")
    try:
        values = dict(CONFIGS.get(name) or read_json(file))
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{called}: {file} cannot be read ({getattr(problem, 'strerror', None) or problem}), and nothing is "
            f"downloaded; expected a folder with a config.json, or a built-in configuration. {suggest(name, CONFIGS)}"
        ) from problem
    kind, networks = values.pop("model_type", None), getattr(transformers, f"MODEL_FOR_{task}_MAPPING")
    config: Any = transformers.CONFIG_MAPPING[kind] if kind in list(transformers.CONFIG_MAPPING) else None
    if config not in networks:
        what = task.lower().replace("_", " ")
        fitting = [each for each in CONFIGS if transformers.CONFIG_MAPPING[CONFIGS[each]["model_type"]] in networks]
        raise ConfigError(
            f"{called}: its type is {kind}, of which transformers has no network for {what}; expected a folder of one "
            f"that has, or model.name={', '.join(fitting)}"
        )
    network = networks[config][0] if isinstance(networks[config], tuple) else networks[config]
    network = type(network.__name__, (Logits, network), {})
    for key in ("auto_map", "dtype", "torch_dtype", "id2label", "label2id"):  # of the folder's code, weights, classes
        values.pop(key, None)
    keys, facts = {*config().to_dict(), *config.attribute_map}, inspect.signature(fields).parameters

    def build(**given: Any) -> nn.Module:
        length, is_loaded, needed = given.get("length", 0), given.pop("is_loaded", False), given.get("vocab_size", 0)
        # Bytes mean nothing to a network of another vocabulary, and its weights are then refused.
        if is_loaded and needed != NUM_BYTES and (own := values.get("vocab_size")) is not None:
            if own < needed:
                raise ConfigError(
                    f"{called}: knows {own:,} tokens, the data has {needed:,}; use the tokenizer of {name}"
                )
            given["vocab_size"] = own
        fixed = fields(**{key: given.pop(key) for key in facts})
        if is_loaded and needed not in (0, NUM_BYTES):
            fixed.pop("pad_token_id", None)
        fixed = {key: value for key, value in fixed.items() if key in keys or key == "num_labels"}
        net = network(config.from_dict({**values, **given, **fixed}))
        attend_without_masks(net)
        if length > (limit := getattr(net.config, "max_position_embeddings", length)):
            raise ConfigError(f"data.length={length}: {called} has {limit} positions; use at most data.length={limit}")
        return net

    return _taking(sorted(keys - {"num_channels", "is_decoder", "use_cache", "dtype"}), build)
