"""CUDA's autocast decisions on a CPU, to reproduce a GPU's fp16 problems without one.

Each device has its own lists of operators that autocast runs in 16 bits or in fp32, and the lists differ: on a CPU
softmax, layer norms, sums, powers and exponentials stay in 16 bits, on CUDA they compute in fp32. `use_cuda_policy`
registers CPU autocast kernels that follow CUDA's lists, with real arithmetic, gradients included. Operators on which
both devices agree keep torch's kernels. Where possible the installed torch's dispatcher is queried;
`docs/OP_POLICY.md` is the result, made by `scripts/op_policy.py`.

Each of our kernels adds 5 to 10 microseconds to its operator.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

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

GPU_ONLY = """
    cudnn_convolution cudnn_convolution_transpose _thnn_fused_lstm_cell _thnn_fused_gru_cell
    _scaled_dot_product_flash_attention _cudnn_rnn miopen_rnn
"""
"""CUDA's decisions about kernels that a CPU does not have."""

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

_library: torch.library.Library | None = None
_switching = threading.Lock()

_NEEDED = (
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._are_functorch_transforms_active",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C.DispatchKeySet",
    "torch._C.DispatchKey",
    "torch.library.Library._destroy",
)
_has_kernel, _all_names, _transforms_active, _excluded, _key_set, _key, _end = map(find, _NEEDED)


def use_cuda_policy() -> None:
    """Make CPU autocast follow CUDA's lists, in the whole process and all its threads. Idempotent.

    Until `restore_policy`, `torch.clear_autocast_cache` is replaced too, to clear one more cache.
    """
    global _library
    with _switching:
        if _library is not None:
            return
        need("amp.op_policy=cuda", *_NEEDED, "torch.ops.aten.add.Tensor._schema")
        kernels = dict(_kernels())
        library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"(?s).*[Oo]verriding a previously registered kernel", UserWarning)
                for name, kernel in kernels.items():
                    library.impl(name, kernel, "AutocastCPU")
        except BaseException:
            _end(library)
            raise
        _library = library
        torch.clear_autocast_cache = _clear_cache


def restore_policy() -> None:
    """Restore torch's own CPU autocast kernels. Idempotent."""
    global _library
    with _switching:
        if _library is not None:
            _end(_library)
            torch.clear_autocast_cache = _clear_cache_of_torch
            _copies.clear()
        _library = None


def policy_in_use() -> Literal["device", "cuda"]:
    """`device`: each device uses its own lists, as in torch; `cuda`: a CPU uses CUDA's."""
    return "device" if _library is None else "cuda"


@contextlib.contextmanager
def kept_policy() -> Iterator[None]:
    """Restore the current policy at the end of the context."""
    before = policy_in_use()
    try:
        yield
    finally:
        (restore_policy if before == "device" else use_cuda_policy)()


@contextlib.contextmanager
def cuda_policy() -> Iterator[None]:
    """`use_cuda_policy` inside the context, for all threads."""
    with kept_policy():
        use_cuda_policy()
        yield


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


def _beneath_autocast() -> contextlib.AbstractContextManager[Any]:
    return _excluded(_key_set(_key.AutocastCPU))


def _lower(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype("cpu")
        args, kwargs = _cast(args, low), _cast(kwargs, low)
        with _beneath_autocast():
            return op(*args, **kwargs)

    return kernel


def _fp32(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _beneath_autocast():
            return op(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))

    return kernel


def _fp32_result(op: Any) -> Callable[..., Any]:
    place = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("dtype")
        if given is None and _is_eligible(args[0]):
            args, kwargs = args[:place], kwargs | {"dtype": torch.float32}
        with _beneath_autocast():
            return op(*args, **kwargs)

    return kernel


def _fp32_appended(op: Any) -> Callable[..., Any]:
    schema = op._schema
    with_dtype = aten(FP32_APPENDED[f"{schema.name.removeprefix('aten::')}.{schema.overload_name}"])
    defaults = [argument.default_value for argument in schema.arguments]

    def kernel(*args: Any) -> Any:
        # The dispatcher omits trailing default arguments; the other overload needs them.
        args = (*args, *defaults[len(args) :])
        with _beneath_autocast():
            return with_dtype(*args, dtype=torch.float32 if _is_eligible(args[0]) else args[0].dtype)

    return kernel


def _widest(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype("cpu")
        widest = low
        for tensor in filter(_is_eligible, _tensors([*args, *kwargs.values()])):
            if torch.float32 in (widest, tensor.dtype):
                widest = torch.float32
            elif tensor.dtype is not low:
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")  # as CUDA says it
        args, kwargs = _cast(args, widest), _cast(kwargs, widest)
        with _beneath_autocast():
            return op(*args, **kwargs)

    return kernel


def _through_fp32(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _beneath_autocast():
            return op(*_cast(args, torch.float32), **_cast(kwargs, torch.float32)).to(args[0].dtype)

    return kernel


def _as_cuda_answers(op: Any) -> Callable[..., Any]:
    cuda = _key_set(_key.AutocastCUDA)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(cuda, *args, **kwargs)  # raises before it looks at a tensor

    return kernel


# --- casts ------------------------------------------------------------------------------------------------------------


def _is_eligible(value: Any) -> bool:
    """Whether autocast would cast it: float64 and integers stay what they are."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == "cpu"
    )


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
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


# --- what the installed torch does ------------------------------------------------------------------------------------


class Inputs:
    """Makes the tensors on which an operator of `OPERATORS` is called.

    A call returns an operator's first tensor, `second` its others, `fp32` statistics that are never 16-bit.
    """

    def __init__(self, device: str, first: torch.dtype, second: torch.dtype) -> None:
        self.device, self.dtypes = device, (first, second)

    def __call__(self, *shape: int) -> Tensor:
        return torch.full(shape, 0.5, device=self.device, dtype=self.dtypes[0])

    def second(self, *shape: int) -> Tensor:
        return torch.full(shape, 0.5, device=self.device, dtype=self.dtypes[1])

    def fp32(self, *shape: int) -> Tensor:
        return torch.full(shape, 0.5, device=self.device)

    def index(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=torch.int64)


Case = Callable[[Inputs], Any]


def _unary(names: str) -> dict[str, Case]:
    return {name: lambda x, name=name: getattr(torch, name)(x(2, 3)) for name in names.split()}


def _losses(names: str) -> dict[str, Case]:
    return {name: lambda x, name=name: getattr(F, name)(x(2, 3), x.second(2, 3)) for name in names.split()}


def _resized(names: str) -> dict[str, Case]:
    """Interpolation modes, each with an input of the right number of dimensions."""
    dims = {"linear": 1, "trilinear": 3}
    return {
        f"interpolate {mode}": lambda x, mode=mode: F.interpolate(
            x(1, 1, *[2] * dims.get(mode, 2)), scale_factor=2.0, mode=mode
        )
        for mode in names.split()
    }


def _padded(mode: str) -> dict[str, Case]:
    return {
        f"pad {mode} {dims}d": lambda x, dims=dims: F.pad(x(1, 1, *[3] * dims), [1] * 2 * dims, mode=mode)
        for dims in (1, 2, 3)
    }


def _cell(name: str, gates: int) -> Case:
    def case(x: Inputs) -> Tensor:
        state = (x.second(2, 3), x.second(2, 3)) if name == "lstm_cell" else x.second(2, 3)
        weights = x.second(3 * gates, 4), x.second(3 * gates, 3), x.second(3 * gates), x.second(3 * gates)
        result = getattr(torch, name)(x(2, 4), state, *weights)
        return result[0] if isinstance(result, tuple) else result

    return case


OPERATORS: Mapping[str, Case] = {
    # Matrix products.
    "linear": lambda x: F.linear(x(2, 3), x.second(4, 3)),
    "matmul": lambda x: torch.matmul(x(2, 3), x.second(3, 2)),
    "mm": lambda x: torch.mm(x(2, 3), x.second(3, 2)),
    "bmm": lambda x: torch.bmm(x(1, 2, 3), x.second(1, 3, 2)),
    "mv": lambda x: torch.mv(x(2, 3), x.second(3)),
    "dot": lambda x: torch.dot(x(3), x.second(3)),
    "vdot": lambda x: torch.vdot(x(3), x.second(3)),
    "addmm": lambda x: torch.addmm(x(2, 2), x.second(2, 3), x.second(3, 2)),
    "addmv": lambda x: torch.addmv(x(2), x.second(2, 3), x.second(3)),
    "addr": lambda x: torch.addr(x(2, 3), x.second(2), x.second(3)),
    "addbmm": lambda x: torch.addbmm(x(2, 2), x.second(1, 2, 3), x.second(1, 3, 2)),
    "baddbmm": lambda x: torch.baddbmm(x(1, 2, 2), x.second(1, 2, 3), x.second(1, 3, 2)),
    "chain_matmul": lambda x: torch.chain_matmul(x(2, 3), x.second(3, 2)),
    "linalg.multi_dot": lambda x: torch.linalg.multi_dot([x(2, 3), x.second(3, 2)]),
    "linalg.vecdot": lambda x: torch.linalg.vecdot(x(2, 3), x.second(2, 3)),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x(2, 3), x.second(3, 2)),
    "tensordot": lambda x: torch.tensordot(x(2, 3), x.second(3, 2), dims=1),
    "bilinear": lambda x: F.bilinear(x(2, 3), x.second(2, 3), x.second(1, 3, 3)),
    "cross": lambda x: torch.cross(x(2, 3), x.second(2, 3), dim=1),
    "conv1d": lambda x: F.conv1d(x(1, 1, 4), x.second(1, 1, 3)),
    "conv2d": lambda x: F.conv2d(x(1, 1, 4, 4), x.second(1, 1, 3, 3)),
    "conv2d same": lambda x: F.conv2d(x(1, 1, 4, 4), x.second(1, 1, 3, 3), padding="same"),
    "conv3d": lambda x: F.conv3d(x(1, 1, 4, 4, 4), x.second(1, 1, 3, 3, 3)),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x(1, 1, 4), x.second(1, 1, 3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x(1, 1, 4, 4), x.second(1, 1, 3, 3)),
    "conv_transpose3d": lambda x: F.conv_transpose3d(x(1, 1, 4, 4, 4), x.second(1, 1, 3, 3, 3)),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        x(1, 1, 2, 4), x.second(1, 1, 2, 4), x.second(1, 1, 2, 4)
    ),
    "lstm_cell": _cell("lstm_cell", 4),
    "rnn_tanh_cell": _cell("rnn_tanh_cell", 1),
    "rnn_relu_cell": _cell("rnn_relu_cell", 1),
    # Elementwise.
    **_unary("acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan square"),
    **_unary("sigmoid tanh relu erf sin cos sqrt abs"),
    "pow": lambda x: x(3) ** 2,
    "pow of tensors": lambda x: x(3) ** x.second(3),
    "pow of a number": lambda x: 2.0 ** x(3),
    "softplus": lambda x: F.softplus(x(3)),
    "gelu": lambda x: F.gelu(x(3)),
    "silu": lambda x: F.silu(x(3)),
    "prelu": lambda x: F.prelu(x(2, 3), x.second(1)),
    "add": lambda x: x(3) + x.second(3),
    "mul": lambda x: x(3) * x.second(3),
    "addcdiv": lambda x: torch.addcdiv(x(3), x.second(3), x.second(3)),
    "addcmul": lambda x: torch.addcmul(x(3), x.second(3), x.second(3)),
    "atan2": lambda x: torch.atan2(x(3), x.second(3)),
    # Sums, norms, normalization.
    **_unary("sum prod mean var std amax"),
    "sum over a dimension": lambda x: x(2, 3).sum(1),
    "prod over a dimension": lambda x: x(2, 3).prod(1),
    "cumsum": lambda x: x(3).cumsum(0),
    "cumprod": lambda x: x(3).cumprod(0),
    "softmax": lambda x: x(2, 3).softmax(1),
    "log_softmax": lambda x: x(2, 3).log_softmax(1),
    "logsumexp": lambda x: x(2, 3).logsumexp(1),
    "norm": lambda x: x(2, 3).norm(),
    "norm over a dimension": lambda x: x(2, 3).norm(dim=1),
    "norm, aten": lambda x: torch.ops.aten.norm.Scalar(x(2, 3)),
    "norm over a dimension, aten": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x(2, 3), 2, [1]),
    "frobenius_norm": lambda x: torch.frobenius_norm(x(2, 3), (0, 1)),
    "linalg.vector_norm": lambda x: torch.linalg.vector_norm(x(3)),
    "linalg.matrix_norm": lambda x: torch.linalg.matrix_norm(x(2, 3)),
    "dist": lambda x: torch.dist(x(3), x.second(3)),
    "cdist": lambda x: torch.cdist(x(2, 3), x.second(2, 3)),
    "pdist": lambda x: F.pdist(x(2, 3)),
    "renorm": lambda x: torch.renorm(x(2, 3), 2, 0, 1.0),
    "normalize": lambda x: F.normalize(x(2, 3)),
    "cosine_similarity": lambda x: F.cosine_similarity(x(2, 3), x.second(2, 3)),
    "layer_norm": lambda x: F.layer_norm(x(2, 3), (3,)),
    "native_layer_norm": lambda x: torch.native_layer_norm(x(2, 3), (3,), None, None, 1e-5)[0],
    "rms_norm": lambda x: F.rms_norm(x(2, 3), (3,)),
    "group_norm": lambda x: F.group_norm(x(2, 4, 3), 2),
    "batch_norm": lambda x: F.batch_norm(x(2, 3, 4), x.fp32(3), x.fp32(3)),
    # Losses.
    **_losses("mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss soft_margin_loss"),
    **_losses("hinge_embedding_loss binary_cross_entropy binary_cross_entropy_with_logits"),
    "cross_entropy": lambda x: F.cross_entropy(x(2, 3), x.index(2)),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(x(2, 3), x.index(2), label_smoothing=0.1),
    "nll_loss": lambda x: F.nll_loss(x(2, 3), x.index(2)),
    "nll_loss 2d": lambda x: F.nll_loss(x(1, 2, 3, 3), x.index(1, 3, 3)),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x(2, 3), x.index(2)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x(2, 3), x.index(2, 3)),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x(3), x.second(3), x.second(3)),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x(2, 3), x.second(2, 3), x.second(2, 3)),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x(2, 3), x.second(2, 3), x.second(2)),
    # Images.
    "max_pool2d": lambda x: F.max_pool2d(x(1, 1, 4, 4), 2),
    "max_pool3d": lambda x: F.max_pool3d(x(1, 1, 4, 4, 4), 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x(1, 1, 4, 4), 2),
    "avg_pool3d": lambda x: F.avg_pool3d(x(1, 1, 4, 4, 4), 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x(1, 1, 4, 4), 2),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x(1, 1, 4, 4, 4), 2),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x(1, 1, 4, 4, 4), 2),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x(1, 1, 8, 8), 2, output_size=3),
    "max_unpool2d": lambda x: F.max_unpool2d(x(1, 1, 2, 2), x.index(1, 1, 2, 2), [2, 2]),
    **_padded("reflect"),
    **_padded("replicate"),
    **_resized("nearest nearest-exact linear bilinear bicubic trilinear"),
    "interpolate bilinear, antialiased": lambda x: F.interpolate(
        x(1, 1, 4, 4), size=2, mode="bilinear", antialias=True
    ),
    # Reshaping, and others.
    "cat": lambda x: torch.cat([x(3), x.second(3)]),
    "stack": lambda x: torch.stack([x(3), x.second(3)]),
    "index_put": lambda x: x(3).index_put((x.index(2),), x.second(2)),
    "scatter_add": lambda x: x(3).scatter_add(0, x.index(2), x.second(2)),
    "where": lambda x: torch.where(x.index(3) == 0, x(3), x.second(3)),
    "trace": lambda x: x(3, 3).trace(),
    "quantile": lambda x: torch.quantile(x(3), 0.5),
    "fft": lambda x: torch.fft.fft(x(4)),
    "polar": lambda x: torch.polar(x(3), x.second(3)),
    "exp_": lambda x: x(3).exp_(),
    "softmax, dtype given": lambda x: torch.softmax(x(2, 3), 1, dtype=x.dtypes[0]),
}
"""Operators by name, each as a function that calls it on tiny tensors."""

SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def observed(
    device_type: Literal["cpu", "cuda"], dtype: torch.dtype = torch.float16, ops: Mapping[str, Case] = OPERATORS
) -> dict[str, str]:
    """The dtypes that autocast to `dtype` gives each operator in the installed torch, found by calling it.

    `cuda` needs no GPU: fake tensors go through CUDA's real dispatch.

    Returns:
        By operator: the dtype of its result if it is the same for 16-bit and for fp32 inputs (`fp16`, `fp32`); `as
        given`, or the `widest` of several inputs; `as given, not mixed` if 16-bit and fp32 inputs cannot be mixed;
        `raises`; otherwise the results for 16-bit and fp32 inputs, with a slash.
    """
    fakes = "torch._subclasses.fake_tensor.FakeTensorMode"  # only the table needs it
    if device_type != "cpu":
        need("CUDA's table of operators", fakes)
    no_data = contextlib.nullcontext() if device_type == "cpu" else find(fakes)()
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    with warnings.catch_warnings(), torch.no_grad(), no_data:
        warnings.simplefilter("ignore")  # some operators are deprecated
        # Not torch.autocast: without a GPU it warns and disables CUDA autocast.
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, dtype)
        try:
            return {name: _answer(device_type, dtype, case) for name, case in ops.items()}
        finally:
            torch.set_autocast_enabled(device_type, before[0])
            torch.set_autocast_dtype(device_type, before[1])
            torch.clear_autocast_cache()


def _answer(device_type: str, dtype: torch.dtype, case: Case) -> str:
    low, full, mixed = (
        _result(Inputs(device_type, first, second), case)
        for first, second in ((dtype, dtype), (torch.float32, torch.float32), (dtype, torch.float32))
    )
    if low == full:
        return low
    if (low, full) != (SHORT[dtype], "fp32"):
        return f"{low} / {full}"
    return {low: "as given", full: "widest"}.get(mixed, "as given, not mixed")


def _result(inputs: Inputs, case: Case) -> str:
    try:
        result = case(inputs).dtype
    except (RuntimeError, NotImplementedError) as error:
        if "not linked with" in str(error):
            raise
        return "raises"
    return SHORT.get(result, str(result).removeprefix("torch."))
