"""16-bit products and convolutions on a CPU without units for them, computed in fp32 and rounded to 16 bits.

Like a GPU's Tensor Cores: 16-bit inputs, an fp32 sum, a result rounded once. Products of two 16-bit numbers are exact
in fp32, so the only errors are those of the fp32 sum and the final rounding: in fp16 above 65504 is infinite, below
2^-25 is 0, in the forward pass and in gradients.

torch's own kernels are no more exact there, and slow: without units a layer takes 10 to 80 times as long as in fp32, in
fp16 and in bf16 (AMD EPYC with AVX2, torch 2.13). With AVX512-FP16 fp16 products are fast, but oneDNN has only a
reference loop for the weight gradient of a convolution, a hundred times slower than fp32. Nothing is timed, and CPUs of
the same kind do the same, so a resumed run computes the same way.

The kernels are registered below autograd and autocast. Dtypes, graphs, saved tensors, double backward, compiled code
and networks with 16-bit weights are unchanged; other dtypes use torch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.lowp.kernels import Kernels, end_library
from amp_core.lowp.lint import CONVOLUTIONS, in_16_bits
from amp_core.torch_private import cpu_has

_CONVOLUTIONS = ("convolution", "convolution_backward")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_computed: dict[str, set[torch.dtype]] = {}
"""By operator, the dtypes that are computed in fp32."""
_ours = Kernels("CPU")


def compute_in_fp32(dtype: torch.dtype) -> None:
    """Compute products and convolutions of `dtype` on CPUs in fp32, in the whole process. Idempotent."""
    # On a CPU with units for the dtype convolutions of fp16 alone, and nothing of bf16.
    names = _CONVOLUTIONS if dtype is torch.float16 else ()
    if not cpu_has(str(dtype).removeprefix("torch.")):
        names = (*_CONVOLUTIONS, *_PRODUCTS)
    if end_library is None or not names:  # or this torch could not restore its own kernels
        return
    for name in names:
        _computed.setdefault(name, set()).add(dtype)
    theirs = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in names if name not in _ours.names}
    _ours.add({name: _through_fp32(kernel, _computed[name]) for name, kernel in theirs.items()}, with_keyset=True)


def restore_kernels() -> None:
    """Restore torch's own kernels. Idempotent."""
    _ours.remove()
    _computed.clear()


def in_use() -> dict[str, list[str]]:
    """By dtype, the operators that are computed in fp32 on CPUs; empty: torch's kernels compute."""
    dtypes = sorted(set[torch.dtype]().union(*_computed.values()), key=str)
    return {str(dtype)[6:]: [name for name, of in _computed.items() if dtype in of] for dtype in dtypes}


def note(net: nn.Module) -> str | None:
    """The log message for a network with fp16 convolutions on a CPU that has units for products alone; else None."""
    is_told = "mm" in in_use().get("float16", ["mm"])  # that the CPU has no units is said before the start
    if not is_told and any(isinstance(module, CONVOLUTIONS) for _, module in in_16_bits(net, torch.float16)):
        return "fp16 convolutions compute in fp32 on this CPU and round to fp16: torch's own kernels are far slower"
    return None


def _through_fp32(kernel: Any, dtypes: set[torch.dtype]) -> Callable[..., Any]:
    def rounded(keys: Any, *args: Any, **factors: Any) -> Any:
        dtype = args[0].dtype
        # Mixed dtypes are an error of the kernel.
        if dtype not in dtypes or any(isinstance(each, Tensor) and each.dtype is not dtype for each in args):
            return kernel.call_boxed(keys, *args, **factors)
        # Exact: a product of two 11-bit significands has 22 bits, of which fp32 holds 24.
        wide = (value.float() if isinstance(value, Tensor) else value for value in args)
        results = kernel.call_boxed(keys, *wide, **factors)
        if isinstance(results, Tensor):
            return results.to(dtype)
        return tuple(result if result is None else result.to(dtype) for result in results)

    return rounded
