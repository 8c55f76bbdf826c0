"""Islands compute in fp32, wherever they are copied, pickled, wrapped, compiled or called from."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections import OrderedDict, namedtuple
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from amp_core.lowp.islands import island_names, keep_fp32
from amp_core.run.teardown import end_process_group

HALF = (torch.float16, torch.bfloat16)
half_types = pytest.mark.parametrize("dtype", HALF, ids=str)
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Batch:
    image: torch.Tensor
    label: Any = 1
    late: torch.Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor


class Output(OrderedDict):
    """A dict class as in transformers: no `update`, constructor of its own."""

    def __init__(self, *, given: dict | None = None) -> None:
        super().__init__(given or {})

    def update(self, *args, **kwargs):
        raise TypeError


class Head(nn.Module):
    """Takes a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, *, scale):
        return self.fc(x) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), Head()

    def forward(self, x):
        return self.head(self.norm(self.body(x)), scale=2.0)


@keep_fp32
class Fp32ByDesign(nn.Linear):
    """Pickle has to find this very class."""


class Spy(nn.Module):
    """Returns its arguments, and records the autocast state."""

    def forward(self, *args, **kwargs):
        self.seen = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
        return args, kwargs


class Renamed(nn.Linear):
    """Copies and pickles itself in its own ways, by name."""

    def __deepcopy__(self, memo):
        twin = Renamed(self.in_features, self.out_features)
        twin.load_state_dict(self.state_dict())
        return twin

    def __reduce__(self):
        return Renamed, (self.in_features, self.out_features), self.__getstate__()


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype=dtype)


def fill(module, value):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def gradients(module):
    return [parameter.grad if parameter.grad is not None else torch.zeros(()) for parameter in module.parameters()]


def through_bytes(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# --- what an island computes ------------------------------------------------------------------------------------------


def test_an_island_has_to_be_where_the_infinity_is_born():
    def net():
        torch.manual_seed(0)
        return nn.Sequential(OrderedDict(conv=nn.Conv2d(8, 4, 3), norm=nn.BatchNorm2d(4)))

    x = 3e4 * torch.randn(2, 8, 6, 6)
    with autocast(torch.float16):
        assert not net()(x).isfinite().all()
        assert not keep_fp32(net(), nn.BatchNorm2d)(x).isfinite().all()
        fixed = keep_fp32(net(), "conv")(x)
    assert fixed.equal(net()(x))  # the norm computes in fp32 by itself


@half_types
def test_an_island_equals_fp32_arithmetic_on_its_inputs(dtype):
    linear = keep_fp32(nn.Linear(64, 64))
    x = torch.randn(8, 64).to(dtype)
    expected = F.linear(x.float(), linear.weight, linear.bias)
    with autocast(dtype):
        assert linear(x).equal(expected)
        with pytest.raises(RuntimeError, match="shapes"):
            linear(torch.ones(2, 3))
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is dtype  # also after an exception


@half_types
def test_gradients_flow_through_an_island(dtype):
    model, seen = keep_fp32(Net(), "head"), []

    def watch(_, args):
        args[0].register_hook(lambda gradient: seen.append(gradient.dtype))

    model.norm.register_forward_pre_hook(watch)
    model.head.fc.register_forward_pre_hook(watch)
    with autocast(dtype):
        loss = model(torch.randn(5, 4)).square().sum()
    loss.backward()
    assert seen == [torch.float32, dtype]  # the head's input, then the norm's, which lies outside
    assert all(p.grad is not None and p.grad.dtype is torch.float32 and p.grad.any() for p in model.parameters())


CONTAINERS = {
    "tensor": (lambda x: x, lambda v: v),
    "list": (lambda x: [x, 1], lambda v: v[0]),
    "tuple in list": (lambda x: [(x, "text")], lambda v: v[0][0]),
    "dict of dicts": (lambda x: {"deep": {"er": [x]}, "none": None}, lambda v: v["deep"]["er"][0]),
    "ordered dict": (lambda x: OrderedDict(a=x), lambda v: v["a"]),
    "a dict of transformers": (lambda x: Output(given={"a": x, "b": None}), lambda v: v["a"]),
    "named tuple": (lambda x: Pair(x, "text"), lambda v: v.first),
    "dataclass": (lambda x: Batch(x), lambda v: v.image),  # `late` is not set
    "frozen dataclass with slots": (lambda x: Frozen(x), lambda v: v.image),
    "packed sequence": (lambda x: pack_sequence([x]), lambda v: v.data),
}


@half_types
@pytest.mark.parametrize("kind", CONTAINERS)
def test_16bit_tensors_in_a_container_arrive_as_fp32_and_nothing_else_changes(kind, dtype):
    make, read = CONTAINERS[kind]
    given = make(torch.tensor([1.5], dtype=dtype))
    for (got, *_), kwargs in (keep_fp32(Spy())(given), keep_fp32(Spy())(0, named=given)):
        got = kwargs.get("named", got)
        assert type(got) is type(given) and read(got).dtype is torch.float32 and read(got).item() == 1.5
        assert read(given).dtype is dtype  # the caller's container is not changed
    for other in (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64):
        given = make(torch.ones(1, dtype=other))
        assert keep_fp32(Spy())(given)[0][0] is given


def test_the_rest_of_a_container_is_kept():
    other, batch = [torch.ones(1)], Batch(torch.ones(1).half())
    batch.label, batch.note = other, "mine"  # pyright: ignore[reportAttributeAccessIssue]
    (got, size, text), _ = keep_fp32(Spy())(batch, torch.Size([1]), "text")
    assert got.label is other and got.note == "mine" and (size, text) == (torch.Size([1]), "text")


def test_a_tensor_passed_several_times_stays_one_tensor():
    x = torch.randn(1, 3, 8).bfloat16()
    (query, (key, _)), kwargs = keep_fp32(Spy())(x, (x, x[0]), value=x)
    assert query is key is kwargs["value"]


def test_attention_and_recurrent_nets_can_be_islands():
    attention, lstm = keep_fp32(nn.MultiheadAttention(8, 2)), keep_fp32(nn.LSTM(4, 4))
    x = torch.randn(3, 1, 8)
    with autocast():
        y, _ = attention(x, x, x)
        z, _ = copy.deepcopy(lstm)(pack_sequence([torch.randn(3, 4).bfloat16(), torch.randn(2, 4).bfloat16()]))
    assert y.dtype is z.data.dtype is torch.float32 and y.equal(attention(x, x, x)[0])


def test_autocast_is_off_inside_for_every_device_type_and_back_on_afterwards():
    spy = keep_fp32(Spy())
    torch.set_autocast_enabled("cuda", True)
    try:
        with autocast():
            spy()
            assert torch.is_autocast_enabled("cpu") and torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert spy.seen == {"cpu": False, "cuda": False}


# --- what a module keeps ----------------------------------------------------------------------------------------------

COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "old pickle": lambda m: pickle.loads(pickle.dumps(m, protocol=0)),
    "torch.save": through_bytes,
    "EMA": lambda m: AveragedModel(m).module,
    "copy of a copy": lambda m: through_bytes(copy.deepcopy(m)),
}
COPIED = {
    "parts": lambda: keep_fp32(Net(), ["head", "*norm"]),
    "whole": lambda: keep_fp32(nn.Sequential(Renamed(4, 4))),
    "a module that copies itself by name": lambda: keep_fp32(nn.Sequential(Renamed(4, 4)), "0"),
    "a decorated class": lambda: nn.Sequential(Fp32ByDesign(4, 4)),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("make", COPIED)
def test_copies_are_islands_with_their_own_weights(make, kind):
    model, x = COPIED[make](), torch.randn(2, 4)
    twin = COPIES[kind](model)
    assert island_names(twin) == island_names(model) != []
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    for dtype in HALF:
        with autocast(dtype):
            y = twin(x)
            assert y.dtype is torch.float32 and y.equal(model(x))
    if kind != "copy":
        fill(twin, 0.0)
        with autocast():
            assert not twin(x).any() and model(x).any()


def test_replicas_of_data_parallel_run_their_own_weights():
    replica = keep_fp32(nn.Linear(2, 1))._replicate_for_data_parallel()
    replica._parameters.update(weight=nn.Parameter(torch.zeros(1, 2)), bias=nn.Parameter(torch.zeros(1)))
    with autocast():
        y = replica(torch.ones(1, 2))
    assert y.dtype is torch.float32 and y.item() == 0.0


def train(model, run):
    torch.manual_seed(0)
    model.zero_grad()
    with autocast():
        y = run(torch.randn(5, 4))
    y.square().sum().backward()
    assert y.dtype is torch.float32
    return gradients(model)


def test_wrapped_and_recomputed_islands_have_the_same_gradients(tmp_path):
    model = keep_fp32(Net(), ["head", "norm"])
    plain = train(model, model)
    assert all(map(torch.equal, plain, train(model, partial(checkpoint, model, use_reentrant=False))))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        assert all(map(torch.equal, plain, train(wrapped, wrapped)))
    finally:
        end_process_group()


def test_identity_state_and_class_of_the_module_are_kept():
    model = Net()
    head, keys, types = model.head, list(model.state_dict()), [type(m) for m in model.modules()]
    assert keep_fp32(model, "*") is model and model.head is head and list(model.state_dict()) == keys
    assert all(isinstance(m, kind) for m, kind in zip(model.modules(), types, strict=True))
    Net().load_state_dict(model.state_dict())


def test_hooks_of_the_module_still_fire():
    island, seen = keep_fp32(nn.Linear(4, 4)), []
    island.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    island.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    island.register_full_backward_hook(lambda *_: seen.append("backward"))
    with autocast():
        y = island(torch.randn(2, 4).bfloat16().requires_grad_())
    y.sum().backward()
    assert seen == [torch.bfloat16, torch.float32, "backward"]


def test_a_class_that_others_derive_from_an_island_is_kept_in_copies():
    island = keep_fp32(nn.Linear(2, 2))
    island.__class__ = type("Sharded", (type(island),), {})  # what fully_shard does
    assert type(copy.deepcopy(island)) is type(island)


def test_fx_traces_around_the_islands_of_a_model_not_into_them():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), keep_fp32(nn.Linear(4, 4))))
    with autocast():
        assert traced(torch.randn(2, 4)).dtype is torch.float32
