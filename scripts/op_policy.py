"""The page docs/OP_POLICY.md: what autocast casts on a CPU and on CUDA, by calling every operator of a table.

    python scripts/op_policy.py            # prints it, and what is the same on both
    python scripts/op_policy.py --write    # writes it to docs/
    python scripts/op_policy.py --add      # adds the installed torch to docs/op_policy.json, for its table of versions

Needs no GPU and takes about five seconds. The page holds for the version of torch that it names, and its last table for
those of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import textwrap
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_core.lowp.op_policy import KEPT, THROUGH_FP32, cuda_policy
from amp_core.torch_private import find, need

PAGE = Path(__file__).resolve().parent.parent / "docs" / "OP_POLICY.md"
VERSIONS = PAGE.with_name("op_policy.json")
COLUMNS = ("CPU, fp16", "CUDA, fp16", "CPU, bf16", "CUDA, bf16", "explicit, fp16", "explicit, fp16 beside fp32")

TEXT = """\
# What autocast casts, by device

CPU and CUDA autocast differ for {differ} of {ops} operators; with CUDA's decisions on a CPU {left} differ{those}:

    python train.py amp=fp16 amp.op_policy=cuda device=cpu

Made by `python scripts/op_policy.py --write` with torch {version}, which calls each operator under fp16 autocast, for
CUDA with fake tensors (not GRU cells, `grid_sample`, recurrent layers). Without `--write` it also prints what is the
same on both.

| in a cell | the result |
| --- | --- |
| fp16, fp32 | has this dtype, whether the inputs are 16-bit or fp32 |
| as given | has the input's dtype |
| widest | is fp32 if an input is |
| as given, not mixed | has the inputs' dtype, which must be the same |
| raises | is an error |
| one / another | is one for 16-bit inputs, the other for fp32 |

## Different on a CPU and on CUDA

{different}

## What `amp.op_policy=cuda` changes

It also removes casts that only CPU autocast has; `{through}` then computes in fp32 and rounds. These keep their CPU
casts:

{kept}

## Autocast and explicit dtypes

Without autocast on 16-bit weights and inputs, as with FSDP2's `MixedPrecisionPolicy(param_dtype=...)` or weights cast
at each use, an operator computes in its inputs' dtype: losses, norms and sums need `.float()`, and 16-bit beside fp32
inputs a cast. Those of CUDA's fp32 operators that give anything but fp16:

{explicit}

## By version of torch

All else is the same in torch {versions}:

{by_version}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.parent.name}/{PAGE.name} instead")
    parser.add_argument("--add", action="store_true", help=f"add the installed torch to {VERSIONS.name} instead")
    flags = parser.parse_args()
    if flags.add:
        known = {**json.loads(VERSIONS.read_text()), minor_version(): decisions()}
        VERSIONS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    elif flags.write:
        PAGE.write_text(page())
    else:
        print(page(), "## The same on both", same_on_both(), sep="\n")


def columns(dtype: torch.dtype) -> dict[str, tuple[str, str, str]]:
    """By operator: what a CPU makes of it, what CUDA does, and what a CPU does with CUDA's policy."""
    cpu, cuda = observed("cpu", dtype), observed("cuda", dtype)
    with cuda_policy():
        changed = observed("cpu", dtype)
    return {name: (cpu[name], cuda[name], changed[name]) for name in cpu}


def same_on_both() -> str:
    same: dict[tuple[str], list[str]] = {}
    for name, (cpu, cuda, _) in columns(torch.float16).items():
        if cpu == cuda:
            same.setdefault((cpu,), []).append(name)
    return grouped(["both, fp16"], same)


def page() -> str:
    table = columns(torch.float16)
    left = [name for name, (_, cuda, changed) in table.items() if changed != cuda]
    different: dict[tuple[str, str], list[str]] = {}
    for name, (cpu, cuda, _) in table.items():
        if cpu != cuda:
            different.setdefault((cpu, cuda), []).append(name)
    return TEXT.format(
        version=minor_version(),
        ops=len(table),
        differ=sum(map(len, different.values())),
        left=len(left),
        those=f" ({', '.join(left)})" if left else "",
        different=grouped(["CPU, fp16", "CUDA, fp16"], different),
        through=THROUGH_FP32,
        explicit=different_from_explicit(),
        versions=", ".join(json.loads(VERSIONS.read_text())),
        by_version=by_version(),
        kept="\n".join(f"- {result}:\n  {listed(names)}" for result, names in KEPT.items()),
    )


def explicit(dtype: torch.dtype, ops: Mapping[str, Case] | None = None) -> dict[str, tuple[str, str]]:
    """By operator: the dtype of its result without autocast for inputs in `dtype`, and beside fp32 inputs."""
    pairs = ((dtype, dtype), (dtype, torch.float32))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        table = (OPERATORS if ops is None else ops).items()
        return {name: tuple(_result(Inputs("cpu", *pair), case) for pair in pairs) for name, case in table}  # type: ignore[misc]


def different_from_explicit() -> str:
    by_autocast = observed("cuda", torch.float16)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, (low, mixed) in explicit(torch.float16).items():
        if by_autocast[name] == "fp32" != low and (low, mixed) != ("fp16", "fp16"):
            groups.setdefault((low, mixed), []).append(name)
    return grouped(["explicit, fp16", "fp16 beside fp32"], groups)


def decisions() -> dict[str, str]:
    """The results of the installed torch, one per column, and the operators with them."""
    tables = [observed(device, dtype) for dtype in (torch.float16, torch.bfloat16) for device in ("cpu", "cuda")]
    groups: dict[str, list[str]] = {}
    for name, given in explicit(torch.float16).items():
        groups.setdefault(" | ".join([*(table[name] for table in tables), *given]), []).append(name)
    return {results: "; ".join(names) for results, names in groups.items()}


def by_version() -> str:
    """A table of what differs between the versions of the file."""
    known = {
        version: {name: results.split(" | ") for results, names in groups.items() for name in names.split("; ")}
        for version, groups in json.loads(VERSIONS.read_text()).items()
    }
    found: dict[tuple[str, ...], list[str]] = {}
    for name in OPERATORS:
        for i, column in enumerate(COLUMNS):
            row = [table[name][i] for table in known.values()]
            if len(set(row)) > 1:
                found.setdefault((name, *row), []).append(column)
    return grouped(["operator", *known], found, "where")


def grouped(titles: list[str], groups: Mapping[tuple[str, ...], list[str]], last: str = "operators") -> str:
    """A table with a row for each decision, and the operators with it."""
    rows = [[*titles, last], ["---"] * (len(titles) + 1)]
    rows += [[*decision, "; ".join(names)] for decision, names in groups.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def listed(names: str) -> str:
    """Names in backquotes, on as many lines as they take."""
    return textwrap.fill(", ".join(f"`{name}`" for name in names.split()), 115, subsequent_indent="  ")


def minor_version() -> str:
    """The minor version of torch, such as 2.13: lists change between these."""
    return ".".join(torch.__version__.split(".")[:2])


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


if __name__ == "__main__":
    main()
