"""CUDA's autocast decisions on a CPU, to reproduce a GPU's fp16 problems without one.

Each device has its own lists of operators that autocast runs in 16 bits or in fp32, and the lists differ: on a CPU
softmax, layer norms, sums, powers and exponentials stay in 16 bits, on CUDA they compute in fp32. `use_cuda_policy`
registers CPU autocast kernels that follow CUDA's lists, with real arithmetic, gradients included. Operators on which
both devices agree keep torch's kernels. Where possible the installed torch's dispatcher is queried.
`scripts/op_policy.py` calls every operator and makes `docs/OP_POLICY.md` of the result.

Each of our kernels adds 5 to 10 microseconds to its operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from amp_core.lowp.kernels import Kernels
from amp_core.torch_private import base_of, find, need

# --- what CUDA decides ------------------------------------------------------------------------------------------------

# The lists are those of `ATen/autocast_mode.h`, which torch installs, without operators that torch's CPU kernels treat
# the same, and without overloads for named dimensions, which only older versions have.
LOWER = """
    _convolution convolution addmv addr mv einsum chain_matmul linalg_multi_dot
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""
"""All floating inputs in 16 bits."""

FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan softplus
    pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
    layer_norm native_layer_norm group_norm rms_norm renorm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity dist pdist logsumexp
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
"""All floating inputs in fp32."""

FP32_RESULT = """
    softmax.int log_softmax.int sum sum.dim_IntList prod prod.dim_int cumsum cumprod
    linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
"""
"""`dtype=torch.float32`, unless the caller gave a dtype."""

FP32_APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""As `FP32_RESULT`, through another overload, since this one takes no dtype."""

WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
"""fp32 if any floating input is, else 16 bits."""

BANNED = "binary_cross_entropy"
"""An error."""

THROUGH_FP32 = "avg_pool3d" if torch.__version__ >= "2.13" else "avg_pool3d trace"
"""Not cast by CUDA, but without a 16-bit kernel on a CPU: computed in fp32, and the result rounded."""

KEPT = {
    "complex64, since there are no 16-bit complex kernels": """
        fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft fft_irfft2
        fft_irfftn fft_hfft fft_ihfft stft stft.center polar
    """,
    "16 bits, as CUDA does for the convolution inside": "conv1d.padding conv2d.padding conv3d.padding",
    "16 bits, in layers unlike those of CUDA": "mkldnn_rnn_layer _native_multi_head_attention _addmm_activation",
}
"""Autocast kernels that only a CPU has, and that stay. The others are removed: CUDA does not cast these operators."""


# --- the switch -------------------------------------------------------------------------------------------------------

_NEEDED = (
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._are_functorch_transforms_active",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C.DispatchKeySet",
    "torch._C.DispatchKey",
)
_has_kernel, _all_names, _transforms_active, _excluded, _key_set, _key = map(find, _NEEDED)
_ours = Kernels("AutocastCPU")


def use_cuda_policy() -> None:
    """Make CPU autocast follow CUDA's lists, in the whole process and all its threads. Idempotent."""
    if not _ours.names:
        need("amp.op_policy=cuda", *_NEEDED, "torch.ops.aten.add.Tensor._schema", "torch.library.Library._destroy")
        _ours.add(dict(_kernels()))
        torch.clear_autocast_cache = _clear_cache  # of one cache more, until `restore_policy`


def restore_policy() -> None:
    """Restore torch's own CPU autocast kernels. Idempotent."""
    if _ours.names:
        torch.clear_autocast_cache = _clear_cache_of_torch
    _ours.remove()
    _copies.clear()


@contextlib.contextmanager
def cuda_policy() -> Iterator[None]:
    """`use_cuda_policy` inside the context, for all threads."""
    use_cuda_policy()
    try:
        yield
    finally:
        restore_policy()


def kernels_of(key: Literal["AutocastCPU", "AutocastCUDA"]) -> set[str]:
    """The operators of the installed torch, such as `softmax.int`, that have an autocast kernel for a device."""
    names = (name for name in _all_names() if name.startswith("aten::"))
    return {name.removeprefix("aten::") for name in names if _has_kernel(name, key)}


def _kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """A name and a kernel for each operator that CPU and CUDA treat differently."""
    on_cuda, on_cpu = kernels_of("AutocastCUDA"), kernels_of("AutocastCPU")
    for names, kernel in (
        (LOWER, _lower),
        (FP32, _fp32),
        (FP32_RESULT, _fp32_result),
        (" ".join(FP32_APPENDED), _fp32_appended),
        (WIDEST, _widest),
        (BANNED, _as_cuda_answers),
    ):
        for name in names.split():
            if name in on_cuda:  # other versions of torch may have shorter lists
                yield name, kernel(aten(name))
    kept = " ".join(KEPT.values()).split()
    for name in sorted(on_cpu - on_cuda):
        if name in THROUGH_FP32.split():
            yield name, _through_fp32(aten(name))
        elif name not in kept:
            yield name, torch.library.fallthrough_kernel


def aten(name: str) -> Any:
    """The overload of `torch.ops.aten` called `name`, such as `softmax.int` or `mv`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


# --- kernels ----------------------------------------------------------------------------------------------------------


def _beneath_autocast(op: Any, args: Any, kwargs: Any, dtype: torch.dtype | None = None) -> Any:
    """What an operator returns; with a `dtype` for inputs in it."""
    with _excluded(_key_set(_key.AutocastCPU)):
        return op(*args, **kwargs) if dtype is None else op(*_cast(args, dtype), **_cast(kwargs, dtype))


def _lower(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _beneath_autocast(op, args, kwargs, torch.get_autocast_dtype("cpu"))


def _fp32(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _beneath_autocast(op, args, kwargs, torch.float32)


def _fp32_result(op: Any) -> Callable[..., Any]:
    place = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("dtype")
        if given is None and _is_eligible(args[0]):
            args, kwargs = args[:place], kwargs | {"dtype": torch.float32}
        return _beneath_autocast(op, args, kwargs)

    return kernel


def _fp32_appended(op: Any) -> Callable[..., Any]:
    schema = op._schema
    with_dtype = aten(FP32_APPENDED[f"{schema.name.removeprefix('aten::')}.{schema.overload_name}"])
    defaults = [argument.default_value for argument in schema.arguments]

    def kernel(*args: Any) -> Any:
        # The dispatcher omits trailing default arguments; the other overload needs them.
        dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
        return _beneath_autocast(with_dtype, (*args, *defaults[len(args) :]), {"dtype": dtype})

    return kernel


def _widest(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype("cpu")
        widest = low
        for tensor in filter(_is_eligible, _leaves([*args, *kwargs.values()])):
            if torch.float32 in (widest, tensor.dtype):
                widest = torch.float32
            elif tensor.dtype is not low:
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")  # as CUDA says it
        return _beneath_autocast(op, args, kwargs, widest)

    return kernel


def _through_fp32(op: Any) -> Callable[..., Any]:
    kernel = _fp32(op)
    return lambda *args, **kwargs: kernel(*args, **kwargs).to(args[0].dtype)


def _as_cuda_answers(op: Any) -> Callable[..., Any]:
    cuda = _key_set(_key.AutocastCUDA)
    return lambda *args, **kwargs: op.redispatch(cuda, *args, **kwargs)  # raises before it looks at a tensor


# --- casts ------------------------------------------------------------------------------------------------------------


def _is_eligible(value: Any) -> bool:
    """Whether autocast would cast it: float64 and integers stay what they are."""
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return is_floating and value.dtype is not torch.float64 and value.device.type == "cpu"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


_copies: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
"""16-bit copies of weights, each stored with its weight, so that the id stays unique.

One copy per region also matters numerically: the gradients of all its uses are summed in 16 bits, as on CUDA.
"""

_clear_cache_of_torch = torch.clear_autocast_cache


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: _cast(each, dtype) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cast(each, dtype) for each in value)
    if not _is_eligible(value) or value.dtype is dtype:
        return value
    is_weight = value.dtype is torch.float32 and value.requires_grad and value.is_leaf and base_of(value) is None
    is_kept = dtype is torch.get_autocast_dtype("cpu") and torch.is_autocast_cache_enabled() and torch.is_grad_enabled()
    if not (is_weight and is_kept) or _transforms_active():
        return value.to(dtype)
    _, copy = _copies.get((id(value), dtype)) or (value, value.to(dtype))
    _copies[id(value), dtype] = (value, copy)
    return copy


def _clear_cache() -> None:
    """Replaces `torch.clear_autocast_cache`, which regions call at their end, to clear our copies too."""
    _copies.clear()
    _clear_cache_of_torch()
