"""Linear layers that multiply numbers of 8 bits and fewer under autocast (`formats.py` says which).

    left_alone = use_products(net, Products.of("fp8"))  # [(name, reason)]; weights, names, checkpoints do not change
    with torch.autocast("cuda", torch.bfloat16):
        loss = net(inputs)                                # the rest computes in bfloat16

Each of a layer's three products, of the output, of the gradient of the inputs and of that of the weight, quantises both
of its matrices with scales along what is summed over; sums are fp32. Weights stay fp32, so any mode resumes from any.

fp8 with a scale per tensor or row runs on float8 units of compute capability 8.9 and higher (Ada, Hopper). All else is
emulated, on every device: the same numbers multiplied in fp32, slower than bfloat16, which shows the accuracy alone.
"""

from __future__ import annotations

import fnmatch
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core.config.errors import ConfigError
from amp_core.config.schema import AmpConfig
from amp_core.lowp.formats import E2M1, E3M2, E4M3, E5M2, Low, Scaling, quantise
from amp_core.lowp.islands import island_names
from amp_core.torch_private import find

logger = logging.getLogger(__name__)
_scaled_mm, _unsafe_view = find("torch._scaled_mm"), find("torch.ops.aten._unsafe_view", torch.view_copy)

HIGH = ("head", "*.head", "lm_head", "*router*")
"""Layers that stay in bfloat16 unless told otherwise: logits of a vocabulary, choices of experts."""


@dataclass(frozen=True)
class Products:
    """How the three products of a linear layer are computed."""

    inputs: Scaling
    weights: Scaling
    gradients: Scaling
    stochastic: bool = False
    """Gradients are rounded stochastically."""
    hadamard: bool = False
    """The product of the weight gradient mixes 16 rows at a time by a Hadamard matrix with random signs: outliers are
    spread over 16 numbers, and the product does not change."""
    is_weight_gradient_high: bool = False
    """The product of the weight gradient is computed in the dtype of autocast."""

    @classmethod
    def of(
        cls,
        format: str,
        granularity: Literal["tensor", "row", "row_gw_hp", "block"] | None = None,
        rule: Literal["floor", "rceil"] | None = None,
        *,
        stochastic: bool = False,
        hadamard: bool = False,
        square_weights: bool = False,
    ) -> Products:
        """Those of a format: fp8 (by tensor if no granularity is given), mxfp8, mxfp6, mxfp4, nvfp4."""
        if format == "fp8":
            narrow, square = _FP8[granularity or "tensor"]
            # Gradients spread over more powers of two than what is forwarded: range before digits (arXiv:2209.05433).
            inputs, gradients = Scaling(E4M3, narrow), Scaling(E5M2, narrow)
            weights = Scaling(E4M3, square)
        elif format == "nvfp4":
            inputs = gradients = Scaling(E2M1, (1, 16), "nvfp4")
            weights = Scaling(E2M1, (16, 16), "nvfp4") if square_weights else inputs
        else:
            inputs = gradients = Scaling(_MX[format], (1, 32), "e8m0", rule or "rceil")
            weights = replace(inputs, block=(32, 32)) if square_weights else inputs
        return cls(inputs, weights, gradients, stochastic, hadamard, granularity == "row_gw_hp")

    @property
    def has_units(self) -> bool:
        """Whether some GPUs have units for them."""
        return self.inputs.scale == "fp32" and self.inputs.block[1] is None

    @property
    def multiple(self) -> int:
        """Of both sizes of a layer, and of the rows of its inputs."""
        return max(16, *(size or 1 for how in (self.inputs, self.weights) for size in how.block))


_ROWS = ((1, None), (1, None))
_FP8 = {"tensor": ((None, None), (None, None)), "row": _ROWS, "row_gw_hp": _ROWS, "block": ((1, 128), (128, 128))}
_MX = {"mxfp8": E4M3, "mxfp6": E3M2, "mxfp4": E2M1}


def products_of(config: AmpConfig) -> Products:
    """Those of a mode with a format."""
    assert config.format is not None
    how = {"stochastic": config.stochastic_gradients, "hadamard": config.hadamard}
    return Products.of(
        config.format, config.granularity, config.scale_rule, square_weights=config.square_weights, **how
    )


def use_mode(net: nn.Module, config: AmpConfig) -> None:
    """`use_products` of a mode; logs what is not converted. ConfigError: a glob of `keep_bf16` matches nothing."""
    try:
        left_alone = use_products(net, products_of(config), config.keep_bf16)
    except ValueError as problem:
        raise ConfigError(f"amp.keep_bf16={config.keep_bf16}: {problem}") from problem
    for name, reason in left_alone:
        logger.info("%s stays in %s: %s", name or "the network", config.dtype, reason)
    if not is_converted(net):
        logger.warning("amp=%s: %s; it is autocast to bfloat16", config.name, why_none(left_alone))


def is_converted(net: nn.Module) -> bool:
    return any(isinstance(module, LowLinear) for module in net.modules())


def pays(layer: nn.Module, how: Products) -> str:
    """Whether float8 units make a linear layer faster than bfloat16: "pays", or why not; "" for other layers."""
    if not isinstance(layer, nn.Linear):
        return ""
    inputs, outputs = layer.in_features, layer.out_features
    if inputs % how.multiple or outputs % how.multiple:
        return f"no multiple of {how.multiple}"
    if not isinstance(layer, LowLinear):
        return "kept"
    if not how.has_units:
        return "emulated"
    # Of torchao 0.18 (float8/float8_linear_utils.py), from its measurements on an H100 with compiled casts.
    is_small = outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)
    if how.inputs.block[0] is None:
        is_small = inputs <= 4096 and outputs <= 1024
    return "too small" if is_small else "pays"


def why_none(left_alone: list[tuple[str, str]]) -> str:
    """Why no layer is converted, in a sentence without its end."""
    reasons = "; ".join(f"{name or 'the network'}: {reason}" for name, reason in left_alone[:4])
    return f"no linear layer can be converted ({reasons})" if left_alone else "the network has no linear layer"


def use_products(net: nn.Module, how: Products, high: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """Make the linear layers of `net` multiply as `how` says, in place.

    Call it after `keep_fp32`. Only the class of a layer changes: weights and names stay, copies and pickles work.
    Layers that match a glob of `high` stay in the dtype of autocast; None: those of `HIGH`. Returns (name, reason) of
    the linear layers that are not converted. ValueError: a glob matches no linear layer.
    """
    linears = {name: module for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    matching = {pattern: fnmatch.filter(linears, pattern) for pattern in (HIGH if high is None else high)}
    for pattern in [pattern for pattern, names in matching.items() if high is not None and not names]:
        raise ValueError(f"{pattern!r} matches none of the linear layers: {', '.join(linears) or 'none'}")
    kept, islands, left_alone = set(itertools.chain(*matching.values())), island_names(net), []
    for name, layer in linears.items():
        reason = "amp.keep_bf16 names it" if name in kept else _obstacle(name, layer, islands, how.multiple)
        if reason:
            left_alone.append((name, reason))
        else:
            layer.__class__ = LowLinear
            setattr(layer, "products", how)  # noqa: B010 - a plain nn.Linear has none
    return left_alone


def _obstacle(name: str, layer: nn.Linear, islands: list[str], multiple: int) -> str | None:
    if any(island in ("", name) or name.startswith(f"{island}.") for island in islands):
        return "it is part of an fp32 island"
    if type(layer) is not nn.Linear:
        return None if type(layer) is LowLinear else f"it is a {type(layer).__name__}, with a forward of its own"
    sizes = {"inputs": layer.in_features, "outputs": layer.out_features}
    odd = [f"{size} {what}" for what, size in sizes.items() if size % multiple]
    return f"{' and '.join(odd)}: no multiple of {multiple}" if odd else None


def is_emulated(device: str | torch.device, how: Products) -> bool:
    """Whether `device` has no units for the products, and they are emulated in fp32."""
    is_cuda = torch.device(device).type == "cuda" and _scaled_mm is not None  # 8.9: Ada, 9.0: Hopper
    return not (how.has_units and is_cuda and torch.cuda.get_device_capability(device) >= (8, 9))


class LowLinear(nn.Linear):
    """An `nn.Linear` that multiplies in a low format under autocast and in fp32 without. Made by `use_products`."""

    products: Products

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the dtype of autocast."""
        device_type = input.device.type
        if not torch.is_autocast_enabled(device_type) or not input.numel():  # an empty tensor has no maximum
            return super().forward(input)
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            rows = input.reshape(-1, self.in_features)
            # The weight gradient sums over rows, which must be a multiple too.
            missing = -len(rows) % self.products.multiple
            padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
            output: Tensor = _Product.apply(padded, self.weight, dtype, self.products)  # type: ignore[assignment]
            output = _unsafe_view(output[: len(rows)], (*input.shape[:-1], self.out_features))
            return output if self.bias is None else output + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    """rows [M, K] times weight [N, K], transposed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, dtype: torch.dtype, how: Products) -> Tensor:
        x, w = quantise(rows, how.inputs), quantise(weight, how.weights)
        # A scale that is the same along both sides serves the backward pass, too: a byte per number is kept.
        ctx.is_kept = how.inputs.is_square and how.weights.is_square and not how.hadamard
        ctx.save_for_backward(*(*x, *w) if ctx.is_kept else (rows, weight))
        ctx.dtypes, ctx.low, ctx.how = (rows.dtype, weight.dtype), dtype, how
        return multiply(x, w, how, dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "layers in fp8 and below have no second derivative (create_graph=True); use amp=bf16 here"
            )
        grad, how, kept = grads[0], ctx.how, ctx.saved_tensors
        g = quantise(grad, how.gradients, stochastic=how.stochastic)
        to_rows = to_weight = None
        # Both products sum along another dimension than that of the forward pass. Where scales are not the same along
        # both, the matrices are quantised again, from what they were before.
        if ctx.needs_input_grad[0]:
            columns = Low(*kept[2:]).t() if ctx.is_kept else quantise(kept[1].t(), how.weights)
            to_rows = multiply(g, columns, how, ctx.dtypes[0])
        if ctx.needs_input_grad[1] and how.is_weight_gradient_high:
            to_weight = (grad.t().to(ctx.low) @ kept[0].to(ctx.low)).to(ctx.dtypes[1])
        elif ctx.needs_input_grad[1]:
            if ctx.is_kept:
                pair = g.t(), Low(*kept[:2]).t()
            else:
                # (H grad)^T (H rows) = grad^T rows, H orthogonal.
                turned = [(mix(m) if how.hadamard else m).t() for m in (grad, kept[0])]
                pair = quantise(turned[0], how.gradients, stochastic=how.stochastic), quantise(turned[1], how.inputs)
            to_weight = multiply(*pair, how, ctx.dtypes[1])
        return to_rows, to_weight, None, None


def multiply(a: Low, b: Low, how: Products, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """a [M, K] times b [N, K], transposed. Within (K + 2) 2^-24 |a| |b|^T of the exact product, before the cast."""
    # `fast` lets Hopper accumulate with fewer bits, enough for the forward pass but not for gradients.
    if how.inputs.block[1] is not None:  # scales differ along what is summed over
        return (a.dense() @ b.dense().t()).to(dtype)
    factors = a.scale.view(-1, 1), b.scale.view(1, -1)
    if is_emulated(a.values.device, how):
        # TF32 suffices: float8 has fewer digits.
        return (a.values.float() @ b.values.float().t() * (factors[0] * factors[1])).to(dtype)
    is_whole = how.inputs.block[0] is None
    scales = [factor.view(()) if is_whole else factor.contiguous() for factor in factors]
    out = dtype if is_whole else torch.bfloat16  # the kernel of rows has no other
    product = _scaled_mm(
        a.values, b.values.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=out, use_fast_accum=fast
    )
    return product.to(dtype)


def mix(x: Tensor) -> Tensor:
    """16 rows of x [M, C] at a time, times an orthogonal Hadamard matrix [16, 16] with fixed random signs; fp32."""
    signs = torch.tensor([1 - 2 * (0x9A35 >> place & 1) for place in range(16)], device=x.device)
    places = torch.arange(16, device=x.device)
    # Sylvester's: the sign of (i, j) is the parity of the bits that both have.
    both = places[:, None] & places
    for shift in (2, 1):
        both = both ^ both >> shift
    matrix = (1 - 2 * (both & 1)) * signs / 4.0
    return (matrix @ x.float().view(-1, 16, x.shape[1])).view_as(x)
