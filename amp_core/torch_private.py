"""The private names of torch in use, each with its purpose and its fallback.

Such a name may move in any release. So it is looked up here, when a module is imported or an object is made, and never
in a step. Where one is missing the public way is taken, or what needs it is refused, and the log says so once. A test
compares `NAMES` with the sources, and runs what uses a name with that name removed from torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import pkgutil
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.config.errors import ConfigError

logger = logging.getLogger("amp_recipes")

_LOOP = "one operation per tensor, with the same results"
_OWN_STEP = "the optimizer's own step, with the same results and more Python"
_NO_DOCTOR = "doctor=off; scripts/doctor.py is refused"
_NO_POLICY = "amp.op_policy=cuda is refused"
_NO_COMPILE = "perf.compile is refused"
_NO_ABORT = "destroy_process_group, which may wait for a lost rank until layout.timeout_minutes"
_UNORDERED = "with three or more ranks a resumed run may differ by rounding"
_HAS_UNITS, _RESHARDS = "taken to have them, without a warning", "reshard() of all modules"
_ITERATOR = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"

_ROWS = (
    # Steps.
    ("torch._foreach_sub torch._foreach_sub_", "averages of weights", _LOOP),
    ("torch._foreach_clamp_max_ torch._foreach_clamp_min_", "clipping by value", _LOOP),
    ("torch._foreach_copy_ torch._foreach_mul_", "copies and products of lists of tensors", _LOOP),
    ("torch._foreach_norm", "the gradient norm", _LOOP),
    ("torch._amp_update_scale_", "moves the loss scale", "torch.where, with the same results"),
    ("torch._fused_adam_ torch._fused_adamw_ torch._fused_sgd_", "a step of a fused optimizer", _OWN_STEP),
    ("torch.optim.optimizer._global_optimizer_post_hooks", "hooks of a step", _OWN_STEP),
    ("torch.optim.optimizer._global_optimizer_pre_hooks", "hooks of a step", _OWN_STEP),
    ("torch.optim.Optimizer._optimizer_step_post_hooks", "hooks of a step", _OWN_STEP),
    ("torch.optim.Optimizer._optimizer_step_pre_hooks", "hooks of a step", _OWN_STEP),
    ("torch.optim.Optimizer.profile_hook_step", "a step that does not import torch's compiler", _OWN_STEP),
    ("torch.autograd.profiler._is_profiler_enabled", "whether a profiler looks", "each step enters its scope"),
    ("torch.autograd.graph._engine_run_backward", "a backward pass without sympy", "half a second in the first step"),
    (
        "torch.Tensor._version",
        "whether a tensor was written into",
        "perf.recast_weights has no effect, 16-bit networks round the outputs of islands and lose what a program "
        "writes into their weights, and a backward pass into unscaled or summed gradients goes unnoticed",
    ),
    ("torch.Tensor._base", "the tensor of a view", "perf.recast_weights and estimates of memory miss views of copies"),
    # Parts of a network.
    ("torch.nn.Module._buffers", "running statistics of a skipped step", "torch's modules need it, too"),
    ("torch.nn.Module._non_persistent_buffers_set", "which buffers are state", "torch's modules need it, too"),
    ("torch.nn.modules.batchnorm._NormBase", "norms that keep fp32 weights", "the norms of torch.nn alone"),
    ("torch._dynamo.OptimizedModule._orig_mod", "the network in torch.compile(net)", "it is not unwrapped"),
    # Layouts and data.
    ("torch.distributed.Reducer._push_all_rebuilt_params", "one order of sums from the first step on", _UNORDERED),
    ("torch.distributed.Reducer._rebuild_buckets", "one order of sums from the first step on", _UNORDERED),
    ("torch.distributed.distributed_c10d._abort_process_group", "ends NCCL after an error", _NO_ABORT),
    ("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "frees weights after an evaluation", _RESHARDS),
    ("torch.distributed.fsdp.FSDPState._modules_to_run_forward", "frees weights after an evaluation", _RESHARDS),
    (f"{_ITERATOR}._workers", "names a worker that died", "it is not named"),
    (f"{_ITERATOR}._shutdown_workers", "ends workers at once", "they end with the loader"),
    ("torch.utils._pytree", "the tensors of a window", "perf.graph has no effect"),
    # The doctor and its forecasts.
    ("torch.utils._python_dispatch.TorchDispatchMode", "sees every operation", _NO_DOCTOR),
    ("torch._C._current_autograd_node", "tells forward from backward operations", _NO_DOCTOR),
    ("torch._C._autograd._get_sequence_nr torch.autograd.graph.Node._sequence_nr", "origins of gradients", _NO_DOCTOR),
    ("torch.ops.aten.add.Tensor._schema", "names of arguments", f"{_NO_DOCTOR}; {_NO_POLICY}"),
    ("torch.UntypedStorage._cdata", "whether tensors share memory", "data_ptr(); estimates on meta are too high"),
    # CUDA's choice of dtypes on a CPU.
    ("torch._C._dispatch_has_kernel_for_dispatch_key", "which operators autocast knows", _NO_POLICY),
    ("torch._C._dispatch_get_all_op_names", "which operators autocast knows", _NO_POLICY),
    ("torch._C._ExcludeDispatchKeyGuard", "kernels beneath autocast", _NO_POLICY),
    ("torch._C.DispatchKeySet torch._C.DispatchKey", "kernels beneath autocast", _NO_POLICY),
    ("torch._C._are_functorch_transforms_active", "whether a cast may be kept", _NO_POLICY),
    ("torch.library.Library._destroy", "restores torch's kernels", f"{_NO_POLICY}; fp16 on a CPU is slow"),
    ("torch._subclasses.fake_tensor.FakeTensorMode", "what CUDA casts, without a GPU", "no table of operators"),
    # 16 and 8 bits.
    ("torch._scaled_mm", "float8 products", "emulated"),
    ("torch.ops.aten._unsafe_view", "outputs that are no views, of which fully_shard warns", "copies of them"),
    ("torch.Tensor._make_wrapper_subclass", "16-bit shards", "layout=fsdp refuses other amp.update than master"),
    ("torch.ops.mkldnn._is_mkldnn_bf16_supported", "whether a CPU has bfloat16 units", _HAS_UNITS),
    ("torch.ops.mkldnn._is_mkldnn_fp16_supported", "whether a CPU has float16 units", _HAS_UNITS),
    # torch.compile.
    ("__dynamo_disable", "an optimizer that does not import the compiler", "it does: a run starts a second later"),
    ("torch._dynamo", "limits and exceptions of the tracer; backends by name", _NO_COMPILE),
    ("torch._functorch.config", "backward passes outside of autocast", _NO_COMPILE),
    ("torch._inductor.config", "random numbers of eager code", _NO_COMPILE),
    # Tools.
    ("torch.ops.aten._to_copy torch.ops.aten._local_scalar_dense", "scripts/bench.py counts", "scripts/bench.py fails"),
    ("torch._utils._rebuild_tensor_v2", "tests/support/campaign", "the campaign fails"),
)
NAMES = {name: (use, without) for names, use, without in _ROWS for name in names.split()}
"""Name -> (what it is used for, what happens where it is missing)."""

_missing: dict[str, None] = {}
_told: set[str] | None = None


def find(name: str, without: Any = None) -> Any:
    """What torch has under a name of `NAMES`, else `without`; logged once. Imports the module of the name."""
    there, value = _look_up(name)
    return value if there else without


def reader(name: str, without: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that reads an attribute of an object, such as `torch.Tensor._version`, without a call in Python."""
    return attrgetter(name.rpartition(".")[2]) if _look_up(name)[0] else without


def is_missing(*names: str) -> bool:
    """Whether torch lacks one of these."""
    return not min(_look_up(name)[0] for name in names)


def need(feature: str, *names: str) -> None:
    """Raises ConfigError where torch lacks one of these, which `feature` needs: as the user switches it on."""
    lacking = [name for name in names if is_missing(name)]
    if lacking:
        raise ConfigError(f"{feature}: torch {torch.__version__} has no {', '.join(lacking)}; use another torch")


def log_missing() -> None:
    """Log the names missing so far, and later ones when they are looked up. Called once the log is open."""
    global _told
    _told = _told or set()
    for name in [name for name in _missing if name not in _told]:
        _told.add(name)
        logger.info("torch %s has no %s (%s): %s", torch.__version__, name, *NAMES[name])


@functools.cache
def _look_up(name: str) -> tuple[bool, Any]:
    if name not in NAMES:
        raise KeyError(name)
    owner, _, last = name.rpartition(".")
    with contextlib.suppress(ImportError, AttributeError):
        return True, pkgutil.resolve_name(name)
    with contextlib.suppress(ImportError, AttributeError):
        cls = pkgutil.resolve_name(owner)
        if isinstance(cls, type) and last in cls.__annotations__:  # of its instances
            return True, None
    _missing[name] = None
    if _told is not None:
        log_missing()
    return False, None


# --- with the public way ----------------------------------------------------------------------------------------------


def _each(method: Callable[..., Any]) -> Callable[..., list[Any]]:
    """What `torch._foreach_*` does, by a method of tensors: the second argument is a list, or the same for all."""

    def run(tensors: Sequence[Tensor], *other: Any) -> list[Any]:
        columns = [each if isinstance(each, list | tuple) else itertools.repeat(each) for each in other]
        return [method(*row) for row in zip(tensors, *columns, strict=False)]

    return run


foreach_clamp_max_ = find("torch._foreach_clamp_max_", _each(Tensor.clamp_max_))
foreach_clamp_min_ = find("torch._foreach_clamp_min_", _each(Tensor.clamp_min_))
foreach_copy_ = find("torch._foreach_copy_", _each(Tensor.copy_))
foreach_mul_ = find("torch._foreach_mul_", _each(Tensor.mul_))
foreach_norm = find("torch._foreach_norm", _each(torch.linalg.vector_norm))
foreach_sub = find("torch._foreach_sub", _each(torch.sub))
foreach_sub_ = find("torch._foreach_sub_", _each(Tensor.sub_))


def _update_scale_(
    scale: Tensor, tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> None:
    bad, due = found_inf != 0, tracker + 1 == interval
    less, more = ((scale.double() * factor).float() for factor in (backoff, growth))
    scale.copy_(torch.where(bad, less, torch.where(due & more.isfinite(), more, scale)))
    tracker.copy_(torch.where(bad | due, 0, tracker + 1))


update_scale_ = find("torch._amp_update_scale_", _update_scale_)

version_of = reader("torch.Tensor._version", lambda tensor: 0)
base_of = reader("torch.Tensor._base", lambda tensor: None)


buffers_of = attrgetter("_buffers")
passing_buffers_of = attrgetter("_non_persistent_buffers_set")
"""The names of those buffers that are no part of the state dict."""

_INSTANCE_NORMS = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *_INSTANCE_NORMS
NormBase = find("torch.nn.modules.batchnorm._NormBase", _NORMS)
"""For `isinstance`: norms with running statistics."""

_identity_of = reader("torch.UntypedStorage._cdata", lambda storage: storage.data_ptr())


def storage_of(tensor: Tensor) -> int:
    """A number that tensors of the same memory share, also on meta. NotImplementedError, RuntimeError: no storage."""
    return _identity_of(tensor.untyped_storage()) or id(tensor)


def cpu_has(dtype: str) -> bool:
    """Whether this CPU has fast units for `float16` or `bfloat16`: what torch's own convolutions ask."""
    name = {"float16": "_is_mkldnn_fp16_supported", "bfloat16": "_is_mkldnn_bf16_supported"}[dtype]
    return torch.backends.mkldnn.is_available() and bool(find(f"torch.ops.mkldnn.{name}", lambda: True)())
