"""Folders that transformers and peft load: weights, configuration, tokenizer, template."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.checkpoints import shards
from amp_core.config.errors import ConfigError, SaveError
from amp_core.config.files import read_json, write_file
from amp_core.data.tokenizers import Tokenizer
from amp_core.models.adapters import Lora, adapters, is_linear
from amp_core.models.gpt import GPT
from amp_core.models.timm_and_hf import import_library
from amp_core.run.pretrained import OF_GPT2

_OF_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write(loop: Any, net: nn.Module, state: dict[str, Tensor], folder: Path) -> list[str]:
    """Write a folder for `from_pretrained`, tied weights once. ConfigError: transformers has no such network."""
    transformers = import_library("transformers", loop.cfg.model.name.removeprefix("hf:"), "hf")
    from safetensors import SafetensorError

    transformers.utils.logging.disable_progress_bar()
    tokenizer: Tokenizer | None = loop.data.tokenizer
    if isinstance(net, GPT):
        ids = dict.fromkeys(_IDS) | {"eos_token_id": None if tokenizer is None else tokenizer.eos}
        config, state = _of_gpt(net, state, loop.data.facts["length"], ids, transformers)
    else:
        ids = _ids_of(loop.cfg.model.name, tokenizer)
        config: Any = copy.deepcopy(net.config)
        if loop.classes:
            config.id2label = dict(enumerate(loop.classes))
            config.label2id = {name: number for number, name in enumerate(loop.classes)}
    for key, value in {**ids, "use_cache": True}.items():
        setattr(config, key, value)
    name = str(config.architectures[0]) if isinstance(net, GPT) else type(net).__name__.removeprefix("FSDP")
    with torch.device("meta"):
        twin = getattr(transformers, name)(config)
    twin.load_state_dict(state, strict=False, assign=True)
    twin.tie_weights()
    if lost := [key for key, param in twin.named_parameters() if param.is_meta]:
        raise ConfigError(f"export.to=hf: {name} has {', '.join(lost[:3])}, which this network has not")
    try:
        twin.save_pretrained(folder)
    except SafetensorError as problem:
        raise SaveError(f"cannot write {folder}: {problem}") from problem
    for file in folder.glob("*.safetensors"):  # readable for this user alone, whatever the umask says
        file.chmod((folder / "config.json").stat().st_mode)
    own = Path(loop.cfg.model.name.removeprefix("hf:"), "generation_config.json")
    if not isinstance(net, GPT) and own.is_file():
        shutil.copyfile(own, folder / own.name)
    return _write_tokenizer(tokenizer, folder)


def _ids_of(name: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Ids of special tokens as the folder of a network has them; training knows no padding and drops them."""
    file = Path(name.removeprefix("hf:"), "config.json")
    own = read_json(file) if file.is_file() else {}
    found = {key: own.get(key) for key in _IDS}
    if found["eos_token_id"] is None and tokenizer is not None:
        found["eos_token_id"] = tokenizer.eos
    return found


def _of_gpt(
    net: GPT, state: dict[str, Tensor], length: int, ids: dict[str, Any], transformers: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Our GPT as GPT-2 (learned positions) or as GPT-NeoX (RoPE), with biases of 0 where it has none."""
    block: Any = net.blocks[0]
    width, depth, vocab_size = net.embed.embedding_dim, len(net.blocks), net.embed.num_embeddings
    is_tied = net.embed.weight is net.head.weight
    if is_tied:
        state = state | {"embed.weight": state.get("embed.weight", state.get("head.weight")), "head.weight": None}
    state = {name: value for name, value in state.items() if value is not None}
    for name in list(state):
        if name.endswith(".weight") and "embed" not in name and name not in ("table.weight", "head.weight"):
            state.setdefault(name.replace(".weight", ".bias"), torch.zeros(state[name].shape[0]))
    gelu = "gelu" if block.gelu == "none" else "gelu_new"
    common: dict[str, Any] = {"vocab_size": vocab_size, "tie_word_embeddings": is_tied, **ids}
    if net.table is not None:
        names = {ours: theirs for theirs, ours in OF_GPT2.items()}
        sizes = {"n_positions": net.table.num_embeddings, "n_embd": width, "n_layer": depth, "n_head": net.heads}
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), net.dropout)
        config = transformers.GPT2Config(
            **common, **sizes, **drop, activation_function=gelu, architectures=["GPT2LMHeadModel"]
        )
        products = (".qkv.weight", ".out.weight", ".up.weight", ".down.weight")
        turned = {name: value.T.contiguous() if name.endswith(products) else value for name, value in state.items()}
        return config, {_renamed(name, names, "transformer", "lm_head"): value for name, value in turned.items()}
    if net.positions != "rope":
        raise ConfigError(
            f"export.to=hf: transformers has no network like model=gpt with model.options.positions={net.positions}; "
            f"use export.to=safetensors"
        )
    for name in state:
        if ".qkv." in name:  # ours: q, k, v, each with all heads; theirs: heads, each with q, k, v
            parts = state[name].unflatten(0, (3, net.heads, net.head_dim))
            state[name] = parts.transpose(0, 1).flatten(0, 2).contiguous()
    config = transformers.GPTNeoXConfig(
        **common, hidden_size=width, num_hidden_layers=depth, num_attention_heads=net.heads,
        intermediate_size=4 * width, hidden_act=gelu, use_parallel_residual=False, max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        hidden_dropout=net.dropout, attention_dropout=net.dropout, architectures=["GPTNeoXForCausalLM"],
    )  # fmt: skip
    names = {
        "embed": "embed_in", "blocks": "layers", "norm_attention": "input_layernorm", "norm": "final_layer_norm",
        "norm_mlp": "post_attention_layernorm", "qkv": "attention.query_key_value", "out": "attention.dense",
        "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
    }  # fmt: skip
    return config, {_renamed(name, names, "gpt_neox", "lm_head"): value for name, value in state.items()}


def _renamed(name: str, names: dict[str, str], base: str, head: str) -> str:
    parts = name.split(".")
    return ".".join([head, *parts[1:]] if parts[0] == "head" else [base, *(names.get(part, part) for part in parts)])


def write_adapter(loop: Any, net: nn.Module, folder: Path) -> list[str]:
    """Write the adapters alone, as peft loads them onto the base."""
    found, cfg = adapters(net), loop.cfg
    tensors: dict[str, Tensor] = {}
    for name, each in found.items():
        a, b = (each.a, each.b) if isinstance(each, Lora) else (each.lora_A["default"], each.lora_B["default"])
        for half, layer in (("A", a), ("B", b)):
            value = layer.weight.detach().cpu().float().contiguous()
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = value
    linear = [name for name, module in net.named_modules() if is_linear(module) and ".lora_" not in name]
    linear = [name for name in linear if not name.endswith((".a", ".b")) or name.rpartition(".")[0] not in found]
    plain = {name.removesuffix(".base_layer") for name in linear} | found.keys()
    ends = {name.rpartition(".")[2] for name in found}
    is_all = all(name in found for name in plain if name.rpartition(".")[2] in ends)
    weights = cfg.model.name.removeprefix("hf:") if cfg.model.weights in (None, "default") else cfg.model.weights
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(weights).absolute()) if Path(weights).exists() else weights,
        "r": cfg.recipe["rank"],
        "lora_alpha": cfg.recipe["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(type(each.base_layer).__name__ == "Conv1D" for each in found.values()),
        "target_modules": sorted(ends if is_all else found),
        "inference_mode": True,
    }
    folder.mkdir()
    write_file(folder / "adapter_config.json", json.dumps(config, indent=2).encode())
    write_safetensors(tensors, folder / "adapter_model.safetensors")
    return _write_tokenizer(loop.data.tokenizer, folder)


def write_safetensors(weights: dict[str, Tensor], file: Path) -> list[str]:
    head = shards.head((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items())
    write_file(file, head, *map(shards.buffer_of, weights.values()))
    return []


def _write_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> list[str]:
    if tokenizer is None:
        return ["no tokenizer is known: data.tokenizer=<its folder> puts it beside the weights"]
    if tokenizer.file is None:
        write_file(folder / "tokenizer.json", json.dumps(_bytes()).encode())
    else:
        beside = tokenizer.file.parent
        shutil.copyfile(tokenizer.file, folder / "tokenizer.json")
        for name in _OF_TOKENIZER[1:]:
            if (beside / name).is_file():
                shutil.copyfile(beside / name, folder / name)
    if not (folder / "tokenizer_config.json").exists():
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        write_file(folder / "tokenizer_config.json", json.dumps(about | tokenizer.tokens, indent=2).encode())
    return []


def _bytes() -> dict[str, Any]:
    """A tokenizer.json whose ids are bytes: the letters of GPT-2's byte-level pieces, without merges."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = {chr(byte if byte in own else next(others)): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": letters, "merges": [], "dropout": None, "unk_token": None, "fuse_unk": False}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "byte_fallback": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip
