"""Static checks of a network for 16 bits: numerically unsafe modules, and sizes that waste Tensor Cores.

Only modules are checked, not the functions that their `forward` calls. Islands (`keep_fp32`) are left out. Works on
the meta device, without host-device sync.
"""

from __future__ import annotations

import torch
from torch import nn

from amp_core.lowp.islands import island_names
from amp_core.tensors import HALF

_EPS = ("eps", "epsilon", "variance_epsilon", "layer_norm_eps")
_NATIVE_NORMS = {
    norm.forward
    for norm in (nn.BatchNorm1d, nn.InstanceNorm1d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
}
"""Their kernels add eps in fp32, whatever the dtype of the input."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SMALLEST = 64
"""Narrower matmuls are memory-bound; Tensor Cores do not speed them up."""


def find_unsafe(model: nn.Module, dtype: torch.dtype = torch.float16) -> list[tuple[str, str]]:
    """Modules of a network that are unsafe under autocast to `dtype`: (name, reason with what to do), in their order.

    - `nn.BCELoss`. Its gradient at a probability p is about 1/p, up to 1e12: a 16-bit sigmoid before it has already
      rounded p to 0 or 1. Autocast refuses it on CUDA and allows it on a CPU.
    - fp16: an `eps` that rounds to 0, as all up to 2^-25 do, half of the smallest subnormal number. `x * rsqrt(mean +
      eps)` of zeros is then NaN; `nn.CosineSimilarity` has 1e-8 by default. The norms of `torch.nn` add theirs in fp32
      and are safe; a norm written in Python may be, too, if it casts its input to fp32 itself.
    """
    found = []
    for name, module in in_16_bits(model, dtype):
        if isinstance(module, nn.BCELoss):
            found.append(
                (name, "BCELoss is unsafe under autocast; use BCEWithLogitsLoss, or an island with the sigmoid in it")
            )
        if dtype is not torch.float16 or type(module).forward in _NATIVE_NORMS:
            continue
        for key in _EPS:
            value = getattr(module, key, None)
            if isinstance(value, float) and value > 0 and not torch.tensor(value).half():  # rounds to 0
                reason = f"{type(module).__name__}.{key}={value:g} is 0 in float16; use 1e-7 or more, or an fp32 island"
                found.append((name, reason))
    return found


def trained_in_16_bits(model: nn.Module) -> str:
    """What is wrong with weights that are trained and stored in 16 bits; "" without such weights."""
    low = [name for name, param in model.named_parameters() if param.requires_grad and param.dtype in HALF]
    problem = (
        f"{', '.join(low[:3])}{', ...' if low[3:] else ''} are trained and stored in 16 bits: updates below half of "
        f"their spacing are lost, and no loss scale can be used (torch: 'Attempting to unscale FP16 gradients'). Store "
        f"them in fp32 (param.data = param.data.float()) and freeze the rest (param.requires_grad_(False))"
    )
    return problem if low else ""


def needs_fp32_weights(model: nn.Module) -> str:
    """Which reparametrisation multiplies weights with fp32 buffers, which torch refuses in 16 bits; "" if none does."""
    refused = {"_SpectralNorm": "spectral_norm", "SpectralNorm": "spectral_norm", "_Orthogonal": "orthogonal"}
    for path, module in in_16_bits(model, torch.float16):
        for each in (each for table in vars(module).values() if isinstance(table, dict) for each in table.values()):
            if kind := refused.get(type(each).__name__):  # a module in a list of parametrizations, or a hook
                name = path.partition(".parametrizations")[0]
                return (
                    f"{kind} of {name or 'the network'} computes with fp32 buffers and takes no 16-bit weights; keep "
                    f'it in fp32: amp.keep_fp32=["{name}"]'
                )
    return ""


def computed_wrongly(model: nn.Module, dtype: torch.dtype) -> str:
    """Which convolution this CPU computes wrongly in `dtype`; "" if there is none."""
    # On AMX units oneDNN of torch 2.13 returns wrong sums for some bf16 convolutions of few channels and large kernels,
    # such as one of patches. Each of that kind is tried on noise: results are rounded once, to 2^-8 of them.
    if dtype is not torch.bfloat16:
        return ""
    noise, tried = torch.Generator().manual_seed(0), set[str]()
    for name, module in in_16_bits(model, dtype):
        if not isinstance(module, nn.Conv2d) or module.weight.device.type != "cpu" or repr(module) in tried:
            continue
        if max(module.kernel_size) < 4 or module.in_channels // module.groups < 4:  # none of these was wrong
            continue
        tried.add(repr(module))
        size = [max(32, 1 + 2 * module.dilation[axis] * (module.kernel_size[axis] - 1)) for axis in (0, 1)]
        inputs = torch.randn(2, module.in_channels, *size, generator=noise).bfloat16()
        weight = torch.randn(module.weight.shape, generator=noise).bfloat16()
        how = module.stride, 0, module.dilation, module.groups
        exact = nn.functional.conv2d(inputs.float(), weight.float(), None, *how)
        error = (nn.functional.conv2d(inputs, weight, None, *how) - exact).norm() / exact.norm()
        if error > 2**-7:
            return (
                f"torch computes the bf16 convolution {name or 'of the network'} wrongly on this CPU: noise comes out "
                f"off by {error:.0%}. Start with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, or keep it in "
                f'fp32: amp.keep_fp32=["{name}"]'
            )
    return ""


def find_slow(model: nn.Module, dtype: torch.dtype = torch.float16) -> list[tuple[str, str]]:
    """Layers whose sizes are no multiples of 8, which Tensor Cores prefer: (name, reason with what to do), in order."""
    # NVIDIA, "Matrix Multiplication Background User's Guide", Tensor Core requirements. Sizes below 64, such as image
    # channels and few classes, are ignored.
    found = []
    for name, module in in_16_bits(model, dtype):
        keys = ("in_features", "out_features") if isinstance(module, nn.Linear) else ()
        keys = ("in_channels", "out_channels") if isinstance(module, CONVOLUTIONS) else keys
        for key in keys:
            size = getattr(module, key) // getattr(module, "groups", 1)  # that of the matmul
            if size >= _SMALLEST and size % 8:
                padded = size + -size % 8
                found.append((name, f"{key}={size} is no multiple of 8; {padded} suits Tensor Cores better"))
    return found


def in_16_bits(model: nn.Module, dtype: torch.dtype) -> list[tuple[str, nn.Module]]:
    """The modules with their names, without islands and their insides."""
    islands = island_names(model)
    if dtype not in HALF or "" in islands:
        return []
    inside = tuple(f"{name}." for name in islands)
    return [(name, m) for name, m in model.named_modules() if name not in islands and not name.startswith(inside)]
