"""Without any one of torch's private names a step is the same, bit for bit, or what needs the name is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from without_name import users, without

from amp_core.torch_private import NAMES, cpu_has

NOT_REMOVED = {
    "__dynamo_disable": "tests/unit/test_structure.py: a run that leaves the compiler alone",
    "torch._dynamo.OptimizedModule._orig_mod": "asked for by name: a network without it is not unwrapped",
    "torch.distributed.fsdp.FSDPState._modules_to_run_forward": "read from what `_get_fsdp_state` returns, see there",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._workers": "getattr with a default; torch needs it",
    "torch.nn.Module._buffers": "torch needs it",
    "torch.nn.Module._non_persistent_buffers_set": "torch needs it",
    "torch._utils._rebuild_tensor_v2": "a tool",
    "torch.ops.aten._to_copy": "a tool",
    "torch.ops.aten._local_scalar_dense": "a tool",
}
REMOVED = [name for name in NAMES if name not in NOT_REMOVED]
GROUPS = [REMOVED[::2], REMOVED[1::2]]  # each has a process that imports torch, and what is usual

POLICY = {"policy": r"refused: amp\.op_policy=cuda: torch .* has no NAME; use another torch"}
DOCTOR = {"doctor": r"refused: the doctor: torch .* has no NAME; use another torch"}
COMPILED = {"compiled": r"refused: perf\.compile: torch .* has no NAME; use another torch"}
CHANGES: dict[str, dict[str, str]] = {
    "torch.Tensor._version": {"unscaled": "unnoticed", "island": "[0-9a-f]{64}"},
    "torch.Tensor._base": {"footprint": "[0-9a-f]{64}"},
    "torch.utils._pytree": {"graph": r"this torch has no torch\.utils\._pytree"},
    "torch.utils._python_dispatch.TorchDispatchMode": DOCTOR,
    "torch._C._current_autograd_node": DOCTOR,
    "torch._C._autograd._get_sequence_nr": DOCTOR,
    "torch.autograd.graph.Node._sequence_nr": DOCTOR,
    "torch.ops.aten.add.Tensor._schema": DOCTOR | POLICY,
    "torch._C._dispatch_has_kernel_for_dispatch_key": POLICY,
    "torch._C._dispatch_get_all_op_names": POLICY,
    "torch._C._ExcludeDispatchKeyGuard": POLICY,
    "torch._C.DispatchKeySet": POLICY,
    "torch._C.DispatchKey": POLICY,
    "torch._C._are_functorch_transforms_active": POLICY,
    "torch.library.Library._destroy": POLICY,
    "torch._subclasses.fake_tensor.FakeTensorMode": {"table": r"refused: CUDA's table of operators: .* no NAME; .*"},
    "torch._dynamo": COMPILED,
    "torch._functorch.config": COMPILED,
    "torch._inductor.config": COMPILED,
}
"""Name -> what differs without it. Everything else is compared bit for bit."""
# A CPU that cannot be asked is taken to have units.
ASKS = {
    "float16": "torch.ops.mkldnn._is_mkldnn_fp16_supported",
    "bfloat16": "torch.ops.mkldnn._is_mkldnn_bf16_supported",
}
CHANGES |= {name: {"units": "[0-9a-f]{64}"} for dtype, name in ASKS.items() if not cpu_has(dtype)}


@pytest.mark.slow
@pytest.mark.parametrize("names", GROUPS, ids=["half", "other half"])
def test_everything_else_stays_as_it_is_and_the_log_says_it_once(names: list[str], tmp_path: Path) -> None:
    answers = without(*names, folder=tmp_path)
    usual = answers.pop("")
    assert not usual["said"]
    assert not [(by, name) for by, names in usual["read"].items() for name in names if by not in users(name)]
    assert not [text for text in usual["found"].values() if "Traceback" in text or text.startswith("refused")]
    for name, answer in answers.items():
        assert len(answer["said"]) == 1 and f" has no {name} (" in answer["said"][0]
        expected = CHANGES.get(name, {})
        for feature, found in answer["found"].items():
            if feature in expected:
                assert re.fullmatch(expected[feature].replace("NAME", re.escape(name)), found), (name, feature)
                assert found != usual["found"][feature], (name, feature)
            else:
                assert found == usual["found"][feature], (name, feature)


def test_every_name_is_removed_or_said_to_be_not() -> None:
    assert set(NOT_REMOVED) <= set(NAMES) and set(CHANGES) <= set(REMOVED)
