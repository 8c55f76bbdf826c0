"""Convolutions of fp16 tensors on a CPU, computed in fp32 and rounded to fp16; products, too, if it has no fp16 units.

Like a GPU's Tensor Cores: fp16 inputs, an fp32 sum, a result rounded once. Products of two fp16 numbers are exact in
fp32, so the only errors are those of the fp32 sum and the final rounding: above 65504 is infinite, below 2^-25 is 0,
in the forward pass and in gradients.

torch's own kernels are no more exact, and slow. On a CPU with AVX512-FP16 oneDNN has only a reference loop for the
weight gradient, a hundred times slower than fp32; without fp16 units the forward pass is slow too, and a product of two
matrices of 1024 x 1024 takes 80 times as long as in fp32 (AMD EPYC, torch 2.13). Nothing is timed, and CPUs of the same
kind do the same, so a resumed run computes the same way.

The kernels are registered below autograd and autocast. Dtypes, graphs, saved tensors, double backward, compiled code
and networks with fp16 weights are unchanged; convolutions of other dtypes use torch's kernels.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.lowp.lint import CONVOLUTIONS, in_16_bits
from amp_core.torch_private import cpu_has, find

_CONVOLUTIONS = ("convolution", "convolution_backward")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_library: torch.library.Library | None = None
_switching = threading.Lock()
_end = find("torch.library.Library._destroy")


def use_fp32_convolutions() -> None:
    """Compute fp16 convolutions on CPUs in fp32, in the whole process and all its threads. Idempotent.

    And products of fp16 matrices, on a CPU without fp16 units.

    Does nothing if this torch cannot restore its own kernels.
    """
    global _library
    with _switching:
        if _library is not None or _end is None:
            return
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?s).*[Oo]verriding a previously registered kernel", UserWarning)
            for name in (*_CONVOLUTIONS, *(() if cpu_has("float16") else _PRODUCTS)):
                library.impl(
                    name, _through_fp32(torch.library.get_kernel(f"aten::{name}", "CPU")), "CPU", with_keyset=True
                )
        _library = library


def restore_convolutions() -> None:
    """Restore torch's own convolution kernels. Idempotent."""
    global _library
    with _switching:
        if _library is not None:
            _end(_library)
        _library = None


def in_use() -> bool:
    """Whether fp16 convolutions on CPUs are computed in fp32."""
    return _library is not None


@contextlib.contextmanager
def kept_convolutions() -> Iterator[None]:
    """Restore the current kernels at the end of the context."""
    before = in_use()
    try:
        yield
    finally:
        (use_fp32_convolutions if before else restore_convolutions)()


def note(net: nn.Module) -> str | None:
    """The log message for a network when they are in use; None if it has no fp16 convolutions."""
    if in_use() and any(isinstance(module, CONVOLUTIONS) for _, module in in_16_bits(net, torch.float16)):
        return "fp16 convolutions compute in fp32 on this CPU and round to fp16: torch's own kernels are far slower"
    return None


def _through_fp32(kernel: Any) -> Callable[..., Any]:
    def rounded(keys: Any, *args: Any, **factors: Any) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor)]
        if any(tensor.dtype is not torch.float16 for tensor in tensors):  # or mixed dtypes, an error
            return kernel.call_boxed(keys, *args, **factors)
        wide = (value.float() if isinstance(value, Tensor) else value for value in args)
        results = kernel.call_boxed(keys, *wide, **factors)
        if isinstance(results, Tensor):
            return results.half()
        return tuple(result if result is None else result.half() for result in results)

    return rounded
