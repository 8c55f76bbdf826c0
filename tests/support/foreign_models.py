"""Networks of timm and transformers with random weights and small inputs. `pip install timm transformers`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core.vision import import_torchvision

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Batch = dict[str, Tensor]
CLASSES, WORDS, LENGTH = 10, 96, 12


@dataclass(frozen=True)
class Foreign:
    """A network that nobody here wrote."""

    name: str
    package: str
    build: Callable[[], nn.Module]
    """With dropout, if the network has it by default."""
    batch: Callable[[int], Batch]
    """Random samples, by their number."""

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        if self.package == "transformers":
            return net(**batch).loss
        return F.cross_entropy(net(batch["x"]), batch["labels"])


def timm(name: str, size: int = 64, **sizes: Any) -> Foreign:
    def build() -> nn.Module:
        import_torchvision()
        import timm  # pyright: ignore[reportMissingImports]

        return timm.create_model(name, num_classes=CLASSES, **sizes)

    def batch(count: int) -> Batch:
        return {"x": torch.randn(count, 3, size, size), "labels": torch.randint(CLASSES, (count,))}

    return Foreign(name, "timm", build, batch)


def tokens(count: int, length: int = LENGTH) -> Tensor:
    return torch.randint(5, WORDS, (count, length))


def of_words(count: int) -> Batch:
    ids = tokens(count)
    return {"input_ids": ids, "labels": ids.clone()}


def of_two(count: int) -> Batch:
    return {"input_ids": tokens(count), "labels": tokens(count, 8)}


def of_classes(count: int) -> Batch:
    return {"input_ids": tokens(count), "labels": torch.randint(2, (count,))}


def of_tones(count: int) -> Batch:
    return {"input_values": torch.randn(count, 1600), "labels": torch.randint(1, 20, (count, 3))}


def hf(name: str, model: str, batch: Callable[[int], Batch], **sizes: Any) -> Foreign:
    """A model class by its configuration; names of sizes are those of the configuration."""

    def build() -> nn.Module:
        import_torchvision()
        import transformers  # pyright: ignore[reportMissingImports]

        transformers.logging.set_verbosity_error()
        cls = getattr(transformers, model)
        return cls(cls.config_class(**sizes))

    return Foreign(name, "transformers", build, batch)


BERT: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
BERT |= {"intermediate_size": 128, "max_position_embeddings": 64}
LLAMA = BERT | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5: dict[str, Any] = {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
WAV2VEC2: dict[str, Any] = {"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WAV2VEC2 |= {"intermediate_size": 128, "conv_dim": (32, 32, 32), "conv_kernel": (10, 3, 3), "conv_stride": (5, 4, 2)}
WAV2VEC2 |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "ctc_loss_reduction": "mean"}
WAV2VEC2 |= {"mask_time_prob": 0.0}

MODELS = {
    model.name: model
    for model in (
        timm("vit_tiny_patch16_224", img_size=64, depth=4),
        timm("mobilenetv3_small_100"),
        timm("visformer_tiny", 64, img_size=64),  # has a convolution that oneDNN computes wrongly on AMX units
        hf("gpt2", "GPT2LMHeadModel", of_words, vocab_size=WORDS, n_embd=64, n_layer=3, n_head=4, n_positions=64),
        hf("llama", "LlamaForCausalLM", of_words, **LLAMA),
        hf("t5", "T5ForConditionalGeneration", of_two, **T5),
        hf("bert", "BertForSequenceClassification", of_classes, **BERT),
        hf("wav2vec2", "Wav2Vec2ForCTC", of_tones, **WAV2VEC2),
    )
}

NEEDED = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("timm", "transformers"))), reason="needs timm and transformers"
    ),
]
