"""Networks of timm and transformers with random weights and small inputs. `pip install timm transformers`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def of_images(size: int) -> Callable[[int], Batch]:
    return lambda count: {"pixel_values": torch.randn(count, 3, size, size), "labels": torch.randint(2, (count,))}


def of_tones(count: int) -> Batch:
    return {"input_values": torch.randn(count, 1600), "labels": torch.randint(1, 20, (count, 3))}


def of_spectra(count: int) -> Batch:
    return {"input_features": torch.randn(count, 16, 32), "labels": tokens(count, 8)}


def hf(name: str, model: str, batch: Callable[[int], Batch], **sizes: Any) -> Foreign:
    """A model class by its configuration; names of sizes are those of the configuration."""

    def build() -> nn.Module:
        import_torchvision()
        import transformers  # pyright: ignore[reportMissingImports]

        transformers.logging.set_verbosity_error()
        cls = getattr(transformers, model)
        return cls(cls.config_class(**sizes))

    return Foreign(name, "transformers", build, batch)


BERT = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
LLAMA = BERT | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEEN = {"image_size": 32, "patch_size": 8} | {k: BERT[k] for k in list(BERT)[1:5]}

TIMM = [
    timm("vit_tiny_patch16_224", img_size=64, depth=4),
    timm("convnext_atto", 32, depths=(1, 1, 3, 1)),
    timm("swin_tiny_patch4_window7_224", img_size=56, size=56, embed_dim=48, depths=(1, 1, 2, 1)),
    timm("efficientnet_b0", 32),
    timm("mobilenetv3_small_100"),
    timm("resnet18", 32),
    timm("regnety_002", 32),
    timm("mixer_s32_224", img_size=64),
    timm("deit_tiny_distilled_patch16_224", img_size=64, depth=4),
    timm("eva02_tiny_patch14_224", img_size=56, size=56, depth=4),
]
"""The doctor's ten."""

TRANSFORMERS = [
    hf("gpt2", "GPT2LMHeadModel", of_words, vocab_size=WORDS, n_embd=64, n_layer=3, n_head=4, n_positions=64),
    hf("llama", "LlamaForCausalLM", of_words, **LLAMA),
    hf(
        "t5",
        "T5ForConditionalGeneration",
        of_two,
        vocab_size=WORDS,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    hf("bert", "BertForSequenceClassification", of_classes, **BERT),
    hf(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        of_tones,
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        conv_dim=(32, 32, 32),
        conv_kernel=(10, 3, 3),
        conv_stride=(5, 4, 2),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        ctc_loss_reduction="mean",
        mask_time_prob=0.0,
    ),
    hf("mixtral", "MixtralForCausalLM", of_words, **LLAMA, num_local_experts=4, num_experts_per_tok=2),
]
"""The doctor's six."""

MORE = [
    timm("resnet10t", 32),
    timm("resnext26ts", 32),
    timm("seresnet18", 32),
    timm("densenet121", 32, block_config=(2, 2, 2, 2)),
    timm("mobilenetv2_100", 32),
    timm("mnasnet_100", 32),
    timm("ghostnet_100", 32),
    timm("repvit_m0_9", 64),
    timm("tf_efficientnetv2_b0", 32),
    timm("nf_regnet_b0", 32),
    timm("convnextv2_atto", 32, depths=(1, 1, 3, 1)),
    timm("edgenext_xx_small", 64),
    timm("coatnet_pico_rw_224", img_size=64, size=64),
    timm("maxvit_pico_rw_256", img_size=64, size=64),
    timm("pit_ti_224", img_size=64),
    timm("xcit_nano_12_p16_224", depth=4),
    timm("cait_xxs24_224", img_size=64, depth=4),
    timm("beit_base_patch16_224", img_size=64, embed_dim=192, depth=4, num_heads=3),
    timm("visformer_tiny", 64, img_size=64),
    timm("resmlp_12_224", img_size=64),
    hf("roberta", "RobertaForSequenceClassification", of_classes, **BERT),
    hf(
        "distilbert", "DistilBertForSequenceClassification", of_classes, vocab_size=WORDS, dim=64, n_layers=3, n_heads=4
    ),
    hf("albert", "AlbertForSequenceClassification", of_classes, **BERT, embedding_size=32),
    hf("electra", "ElectraForSequenceClassification", of_classes, **BERT, embedding_size=32),
    hf("deberta-v2", "DebertaV2ForSequenceClassification", of_classes, **BERT),
    hf(
        "bart", "BartForConditionalGeneration", of_two, vocab_size=WORDS, d_model=64, encoder_layers=2, decoder_layers=2
    ),
    hf("opt", "OPTForCausalLM", of_words, **BERT, ffn_dim=128, word_embed_proj_dim=64),
    hf("gpt-neox", "GPTNeoXForCausalLM", of_words, **BERT),
    hf("bloom", "BloomForCausalLM", of_words, vocab_size=WORDS, hidden_size=64, n_layer=3, n_head=4),
    hf("mistral", "MistralForCausalLM", of_words, **LLAMA),
    hf("qwen2", "Qwen2ForCausalLM", of_words, **LLAMA),
    hf("gemma", "GemmaForCausalLM", of_words, **LLAMA, head_dim=16),
    hf("phi", "PhiForCausalLM", of_words, **LLAMA),
    hf("vit", "ViTForImageClassification", of_images(32), **SEEN),
]
"""With the two lists above the fifty of `conformance_on_models.py`."""
