"""Tokens per second, and MFU: the share of the device's stated peak that the FLOPs of the model make up.

Model FLOPs per token are 6 N + 12 L H Q T (Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B): N numbers in the
matrices that multiply, L layers of H heads of Q features, T tokens of a sample. A matrix multiplies once in the forward
and twice in the backward pass; of a frozen one, for which there is no gradient of the weight, 4 N. Embeddings do not
multiply; the last layer does, also where it has their weights. Activation checkpointing is no work of the model. Scores
of future tokens count, as in PaLM, whether a kernel computes them or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_core.config.kinds import KINDS
from amp_core.config.schema import AmpConfig
from amp_core.tensors import unwrap

if TYPE_CHECKING:
    from amp_core.run.loop import Loop

_KINDS = ("bfloat16", "float16", "tf32", "float32")
PEAKS = {
    "Tesla V100-SXM2": (None, 125, None, 15.7),
    "Tesla V100-PCIE": (None, 112, None, 14),
    "Tesla T4": (None, 65, None, 8.1),
    "NVIDIA A10": (125, 125, 62.5, 31.2),
    "NVIDIA A100": (312, 312, 156, 19.5),
    "NVIDIA L4": (121, 121, 60, 30.3),
    "NVIDIA L40S": (362, 362, 183, 91.6),
    "NVIDIA H100 80GB HBM3": (989.5, 989.5, 494.5, 67),
    "NVIDIA H100 PCIe": (756, 756, 378, 51),
    "NVIDIA H100 NVL": (835.5, 835.5, 417.5, 60),
    "NVIDIA H200": (989.5, 989.5, 494.5, 67),
    "NVIDIA H200 NVL": (835.5, 835.5, 417.5, 60),
}
"""TFLOP/s of dense products by the dtypes above, from NVIDIA's data sheets, by the names that torch gives the GPUs."""


def peak_of(name: str, amp: AmpConfig) -> float | None:
    """The stated FLOP/s of a GPU in a mode; None: not known here, as of a part of one (MIG), and of float8."""
    kind = amp.weights if amp.weights != "float32" else amp.dtype
    if kind == "float32" and amp.matmul_precision == "high":
        kind = "tf32"
    fitting = [each for each in PEAKS if name == each or name.startswith((f"{each} ", f"{each}-"))]
    if not fitting or "MIG" in name or amp.format:
        return None
    peak = PEAKS[max(fitting, key=len)][_KINDS.index(kind)]
    return None if peak is None else peak * 1e12


def flops_per_token(net: nn.Module, length: int) -> int | None:
    """Model FLOPs per token of a training step, by the formula above; None for a network that it does not describe."""
    total, known = 0, set[int]()
    for module in net.modules():
        matrix: Any = getattr(module, "weight", None)
        if isinstance(module, nn.Linear):  # also in 4 bits, whose tensor has another shape
            size = module.in_features * module.out_features
        elif type(module).__name__ == "Conv1D" and matrix.ndim == 2:  # GPT-2's linear layer in transformers
            size = matrix.numel()
        elif isinstance(module, nn.Embedding):
            size = 0
        else:
            continue
        total += (6 if matrix.requires_grad else 4) * size
        known.add(id(matrix))
    config: Any = getattr(net, "config", None)
    if config is None:
        layers, heads, features = (getattr(net, key, None) for key in ("blocks", "heads", "head_dim"))
        layers = None if layers is None else len(layers)  # type: ignore[arg-type]
    else:
        layers, heads = (getattr(config, key, None) for key in ("num_hidden_layers", "num_attention_heads"))
        features = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    others = any(param.ndim >= 2 and id(param) not in known for param in net.parameters())
    if others or None in (layers, heads, features):
        return None
    return total + 12 * layers * heads * features * length  # type: ignore[operator]


def throughput(loop: Loop) -> Callable[[float], dict[str, Any]]:
    """The numbers of a log line from samples per second over all ranks: for text also tokens per second, and MFU.

    Tokens are those that the network reads, padding too. MFU is null where the FLOPs or the peak are not known.
    """
    cfg, env = loop.cfg, loop.env
    if KINDS.get(cfg.data.name) not in ("text", "tokens", "chat"):
        return lambda rate: {}
    length = loop.data.facts["length"]
    flops = flops_per_token(unwrap(loop.model), length)
    peak = peak_of(torch.cuda.get_device_name(env.device), cfg.amp) if env.device.type == "cuda" else None

    def facts(rate: float) -> dict[str, Any]:
        tokens = rate * length
        mfu = None if flops is None or peak is None else round(tokens * flops / (peak * env.world_size), 4)
        return {"tokens_per_second": round(tokens, 1), "mfu": mfu}

    return facts
