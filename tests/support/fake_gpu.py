"""A GPU without memory or arithmetic, on any machine: torch's fake tensors with device="cuda".

    with fake_gpu() as gpu:
        net = build().cuda()         # fake tensors: shapes, dtypes and devices, no numbers
        with gpu.step():
            ...                      # AssertionError where the host would wait, or tensors of two devices meet

`fake_gpu("mps")` and `fake_gpu("xpu")` are other accelerators; the first has no float64. Reading a number back is an error of torch's fake tensors, too. What they let pass, as real ones do, is a 0-d tensor on the CPU
beside tensors on the GPU: that is an error here, and so is a copy from one to the other, which waits unless the memory
is pinned. Kernels that have no fake form (fused optimizers, the loss scale) do nothing.

A CPU build of torch cannot index a fake tensor of a GPU, nor compute what needs gradients: it ends the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from tape import WAITS
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
IN_PLACE = {aten._fused_sgd_, aten._fused_adam_, aten._fused_adamw_, aten._fused_adagrad_}
"""Return nothing, and change what they are given."""


def _devices(value: Any) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}


class FakeGpu(TorchDispatchMode):
    """Looks at each operator while a step is computed.

    Attributes:
        num: operators of steps, by name.
    """

    def __init__(self, kind: str = "cuda") -> None:
        super().__init__()
        self.kind = kind
        self.num: dict[str, int] = {}
        self._in_step = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in WAITS:
            assert not self._in_step, f"the host waits for the device: {func}"
            # Before the first step: counters are 0, and a network is what it was taken for.
            if func.overloadpacket is aten._local_scalar_dense:
                return 0.0 if args[0].is_floating_point() else 0
            if func.overloadpacket is aten.equal:
                return True
        if func.overloadpacket in IN_PLACE:
            returned = None
        elif func.overloadpacket is aten._amp_update_scale_:
            returned = args[0]
        else:
            returned = func(*args, **kwargs)
        if self.kind == "mps":
            wide = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.dtype == torch.float64]
            assert all(leaf.device.type != "mps" for leaf in wide), f"{func} makes float64, which mps has not"
        if self._in_step:
            self.num[str(func)] = self.num.get(str(func), 0) + 1
            devices = _devices((args, kwargs, returned))
            assert len(devices) < 2, f"tensors of {sorted(devices)} meet in {func}"
        return returned


class _Operators(TorchFunctionMode):
    """Indexing by one number, casts and copies, as operators: torch's methods enter the device first, or look at the memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], int):
            return args[0].select(0, args[1])
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], torch.dtype):
            return aten._to_copy(args[0], dtype=args[1])
        if func is Tensor.to and len(args) > 1 and args[1] in (args[0].device, torch.device(args[0].device.type)):
            return args[0]
        if func is Tensor.copy_:
            return aten.copy_(*args, **(kwargs or {}))
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                twin = tensor.detach().clone()
                is_weight = isinstance(tensor, torch.nn.Parameter)  # which fake ones are not by their type
                memo[id(tensor)] = torch.nn.Parameter(twin, tensor.requires_grad) if is_weight else twin
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_gpu(kind: str = "cuda") -> Iterator[FakeGpu]:
    gpu = FakeGpu(kind)
    with (
        # torch would start the GPU that it is told of.
        mock.patch.object(FakeTensorMode, "avoid_device_init", True),
        mock.patch("torch._subclasses.fake_tensor.init_gpu_context"),
        mock.patch("torch.cuda.is_available", return_value=kind == "cuda"),
        mock.patch("amp_core.step.settings.is_there", return_value=kind != "cuda"),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        FakeTensorMode(allow_non_fake_inputs=True),
        gpu,
        _Operators(),
    ):
        yield gpu


@contextlib.contextmanager
def meta_device() -> Iterator[FakeGpu]:
    """Tensors with device="meta" in the place of a GPU's: with gradients, in every build, and without autocast."""
    gpu = FakeGpu()
    with (
        mock.patch("torch.autocast", side_effect=lambda *_, **__: contextlib.nullcontext()),
        mock.patch("torch.optim.optimizer._get_fused_kernels_supported_devices", return_value=["meta"]),
        mock.patch("torch.is_autocast_enabled", return_value=False),
        gpu,
    ):
        yield gpu
