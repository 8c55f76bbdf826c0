"""Islands compute in fp32, wherever they are copied, pickled, wrapped, compiled or called from."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import threading
import warnings
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from amp_core.lowp.islands import as_islands, carry_autocast, island_names, keep_fp32
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


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


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


def test_the_patched_forward_of_tutorials_runs_the_original_weights_in_a_copy():
    def wrapper(forward, self, x):
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    patched = fill(nn.Linear(2, 1), 1.0)
    patched.forward = MethodType(partial(wrapper, patched.forward), patched)
    assert fill(copy.deepcopy(patched), 0.0)(torch.ones(1, 2)).item() == 3.0  # not 0: the weights of the original


@half_types
def test_switching_autocast_off_without_casting_the_input_raises(dtype):
    body, head, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 4)
    with autocast(dtype):
        features = body(x)
        with torch.autocast("cpu", enabled=False), pytest.raises(RuntimeError, match="dtype"):
            head(features)
        assert keep_fp32(head)(features).dtype is torch.float32


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


def test_an_ema_of_islands_follows_its_own_weights():
    model = keep_fp32(nn.Sequential(fill(nn.Linear(1, 1, bias=False), 1.0)), "0")
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    ema.update_parameters(model)
    fill(model, 3.0)
    ema.update_parameters(model)
    with autocast():
        assert (ema(torch.ones(1)).item(), model(torch.ones(1)).item()) == (2.0, 3.0)


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


def test_repr_shows_islands():
    model = keep_fp32(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "0")
    assert repr(model) == ("Sequential(\n  (0): Fp32Linear(in_features=2, out_features=3, bias=True)\n  (1): ReLU()\n)")


def test_hooks_of_the_module_still_fire():
    island, seen = keep_fp32(nn.Linear(4, 4)), []
    island.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    island.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    island.register_full_backward_hook(lambda *_: seen.append("backward"))
    with autocast():
        y = island(torch.randn(2, 4).bfloat16().requires_grad_())
    y.sum().backward()
    assert seen == [torch.bfloat16, torch.float32, "backward"]


def test_lazy_modules_stay_islands_when_they_become_real():
    model = keep_fp32(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), "0")
    for net in (copy.deepcopy(model), model):
        with autocast():
            assert [net[0](torch.randn(2, 4)).dtype for _ in range(2)] == [torch.float32] * 2
        assert type(net[0]) is type(keep_fp32(nn.Linear(3, 3)))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("add", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_an_island_may_be_reparametrised_before_and_after(add: Any, is_first: bool) -> None:
    """Its keys and values are those of a module that is no island, as are those of copies, until all is removed."""
    module, x = nn.Linear(3, 3).eval(), torch.randn(2, 3)
    plain = copy.deepcopy(module)
    if is_first:
        keep_fp32(module)
    for each in (module, plain):
        torch.manual_seed(1)
        add(each)
    keep_fp32(module)
    for step in range(2):
        for each in (module, copy.deepcopy(module)):
            assert island_names(each) == [""] and isinstance(each, nn.Linear)
            assert each.state_dict().keys() == plain.state_dict().keys()
            with autocast():
                found = each(x.bfloat16())
            assert found.dtype is torch.float32 and torch.equal(found, plain(x.bfloat16().float()))
            each.load_state_dict(plain.state_dict())
        if step == 0:
            for each in (module, plain):
                torch.nn.utils.parametrize.remove_parametrizations(each, "weight")
    assert type(module).__name__ == "Fp32Linear" and type(plain) is nn.Linear


def test_a_class_that_others_derive_from_an_island_is_kept_in_copies():
    island = keep_fp32(nn.Linear(2, 2))
    island.__class__ = type("Sharded", (type(island),), {})  # what fully_shard does
    assert type(copy.deepcopy(island)) is type(island)


def test_fx_traces_around_the_islands_of_a_model_not_into_them():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), keep_fp32(nn.Linear(4, 4))))
    with autocast():
        assert traced(torch.randn(2, 4)).dtype is torch.float32


def test_a_registry_of_the_base_class_does_not_see_islands():
    registry = []

    class Plugin(nn.Linear):
        def __init_subclass__(cls, *, key):  # an argument that only a real subclass gives
            registry.append(key)

    class Mine(Plugin, key="mine"):
        pass

    keep_fp32(Mine(2, 2))
    assert registry == ["mine"]


class Inside(nn.Module):
    """Takes every kind of container."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x, both, *, pair, table, batch=None):
        return self.fc(x + both[0] + pair.second + table["y"][0] + (0 if batch is None else batch.image))


class Tour(nn.Module):
    def __init__(self, with_dataclass):
        super().__init__()
        self.with_dataclass = with_dataclass
        self.body, self.island = nn.Linear(4, 4), keep_fp32(Inside())

    def forward(self, x):
        y = self.body(x)
        more = {"batch": Frozen(y)} if self.with_dataclass else {}
        return y, self.island(y, (y, 1), pair=Pair(y, y), table={"y": [y]}, **more)


READS_DICT = torch.__version__ >= "2.12"
"""Whether torch.compile can trace `__dict__` of an object; if not, an island that is given a dataclass runs eagerly."""


@pytest.mark.parametrize("with_dataclass", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_with_islands_compiles_into_one_graph(backend, with_dataclass):
    torch._dynamo.reset()
    model, x = Tour(with_dataclass), torch.randn(2, 4)
    in_one = READS_DICT or not with_dataclass
    if not in_one:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="GetAttrVariable"), autocast():
            torch.compile(model, fullgraph=True, backend=backend)(x)
        torch._dynamo.reset()
        # Looked at by the tracer itself, where the graph ends.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    compiled = torch.compile(model, fullgraph=in_one, backend=backend)
    for dtype in HALF:
        with autocast(dtype):
            y, z = compiled(x)
            assert (y.dtype, z.dtype) == (dtype, torch.float32) and torch.equal(z, model(x)[1])
    z.sum().backward()
    assert all(gradient.any() for gradient in gradients(model))


def test_a_compiled_model_follows_when_a_part_becomes_an_island():
    torch._dynamo.reset()

    class Part(nn.Linear):
        def forward(self, input):
            return super().forward(input) + 0

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Part(4, 4)), torch.randn(2, 4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with autocast():
        assert compiled(x).dtype is torch.bfloat16
        with as_islands([model[2]]):
            assert compiled(x).dtype is torch.float32
        assert compiled(x).dtype is torch.bfloat16
        keep_fp32(model, "2")
        assert compiled(x).dtype is torch.float32
        model[2] = Part(4, 4)
        assert compiled(x).dtype is torch.bfloat16
        keep_fp32(Part)
        assert compiled(x).dtype is torch.float32


def test_islands_in_many_threads_do_not_disturb_each_other():
    model, x = keep_fp32(Net(), "norm"), torch.randn(2, 4)

    def work(dtype):
        got = set()
        for _ in range(50):
            with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
                got.add((model.body(x).dtype, model.norm(x).dtype, model(x).dtype))
        return got

    with ThreadPoolExecutor(4) as pool:
        for dtype, got in zip(HALF * 4, pool.map(work, HALF * 4), strict=True):
            assert got == {(dtype, torch.float32, dtype)}


# --- functions and classes --------------------------------------------------------------------------------------------


def test_functions_and_methods_become_islands():
    @keep_fp32
    def scores(q, k, *, scale: float = 1.0):
        """Documented."""
        return q @ k.T * scale

    class Model(nn.Linear):
        @keep_fp32
        def loss(self, x):
            return self(x).sum()

    q = torch.full((1, 4), 200.0, dtype=torch.float16)
    with autocast(torch.float16):
        assert (q @ q.T).isinf() and scores(q, k=q, scale=0.5).item() == 80000.0
        assert Model(4, 2).loss(q).dtype is torch.float32
    assert (scores.__name__, scores.__doc__) == ("scores", "Documented.") and keep_fp32(scores) is scores
    carried = carry_autocast(scores)
    assert (carried.__name__, carried.__doc__) == ("scores", "Documented.")


def test_a_decorated_class_is_decorated_once():
    module = Fp32ByDesign(2, 2)
    assert keep_fp32(module) is module and type(module) is Fp32ByDesign
    assert keep_fp32(Fp32ByDesign) is Fp32ByDesign and "Fp32ByDesign" in repr(module)


def test_a_subclass_with_its_own_forward_is_no_island_until_it_is_made_one():
    class Plain(Fp32ByDesign):
        def forward(self, x):
            return F.linear(x, self.weight)

    module = Plain(2, 2)
    with autocast():
        assert module(torch.ones(1, 2)).dtype is torch.bfloat16 and island_names(module) == []
        assert keep_fp32(module)(torch.ones(1, 2)).dtype is torch.float32
        assert island_names(module) == [""]


# --- patterns ---------------------------------------------------------------------------------------------------------

NORMS = [f"blocks.{i}.norm{j}" for i in (0, 1) for j in (1, 2)]
LINEARS = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("self_attn", "linear1", "linear2")]
BLOCK = [".self_attn", ".linear1", ".dropout", ".linear2", ".norm1", ".norm2", ".dropout1", ".dropout2"]
CHOICES = {
    "head": ["head"],
    ("head",): ["head"],
    ("blocks.0.norm1", "head"): ["blocks.0.norm1", "head"],
    "*.norm?": NORMS,
    "blocks.0*": [f"blocks.0{part}" for part in ("", *BLOCK)],
    (nn.LayerNorm,): NORMS,
    nn.LayerNorm: NORMS,
    "MultiheadAttention": ["blocks.0.self_attn", "blocks.1.self_attn"],
    "": [""],
    (): [],
    "blocks*": [f"blocks.{i}{part}" for i in (0, 1) for part in ("", *BLOCK)],
    # The inside of attention is ignored beside what is around it.
    ("head", nn.Linear, nn.MultiheadAttention): [*LINEARS, "head"],
    ("*.self_attn", "Linear"): [*LINEARS, "head"],
    ("blocks.?", nn.Linear): ["blocks.0", *LINEARS[1:3], "blocks.1", *LINEARS[4:], "head"],
    "*": ["", *(f"blocks.{i}{part}" for i in (0, 1) for part in ("", *BLOCK)), "head"],
}


@pytest.mark.parametrize("patterns", CHOICES, ids=str)
def test_patterns_choose_modules_by_name_glob_class_and_class_name(patterns):
    model = Transformer()
    given = list(patterns) if isinstance(patterns, tuple) else patterns
    for _ in range(2):  # twice is once
        assert island_names(keep_fp32(model, given)) == CHOICES[patterns]
    with autocast():
        model(torch.randn(1, 3, 8))
    assert all(type(m).__name__.count("Fp32") < 2 for m in model.modules())


def test_patterns_may_come_in_several_calls():
    assert "head" in island_names(keep_fp32(keep_fp32(Transformer(), "*.self_attn"), nn.Linear))


def test_classes_include_their_subclasses():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.ReLU())
    for pattern in (nn.modules.batchnorm._BatchNorm, "_BatchNorm"):
        assert island_names(keep_fp32(copy.deepcopy(model), pattern)) == ["0", "1"]


def test_a_module_shared_under_two_names_is_found_under_both():
    shared = nn.Linear(4, 4)
    for patterns in ("second", ["first", "second"]):
        model = nn.ModuleDict({"first": shared, "second": shared})
        assert isinstance(keep_fp32(model, patterns)["first"], nn.Linear)
        assert model["first"] is model["second"] is shared and island_names(model) == ["first"]


def test_an_island_inside_attention_has_no_effect():
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 1, 8)
    with autocast():
        plain = attention(x, x, x)[0]
        keep_fp32(attention.out_proj)  # on its own it cannot be known to lie inside
        assert torch.equal(plain, attention(x, x, x)[0]) and plain.dtype is torch.bfloat16


# --- refusals ---------------------------------------------------------------------------------------------------------


def generator():
    yield 1


async def coroutine(): ...


async def asynchronous():
    yield 1


def patched():
    linear = nn.Linear(2, 2)
    linear.forward = MethodType(lambda self, x: x, linear)
    return nn.Sequential(linear)


def low_head(dtype):
    net = Net()
    net.head.to(dtype)
    return net


def near():
    return nn.ModuleDict({"head": nn.Bilinear(2, 2, 2), "norm": nn.LayerNorm(2)})


ATTENTION = r"name the attention module, 'blocks\.0\.self_attn'"
LATER, TAKES, IS = "runs after the call", "keep_fp32 takes", "a pattern is"
CALLED = r"'blocks' \(ModuleList\) is never called.*'blocks\.\*'"
BOTH = r"(?s)'hed' matches no module.*'Conv2d' matches no module"
REFUSALS = [
    *((target, (), TypeError, LATER) for target in (generator, coroutine, asynchronous)),
    *((target, (), TypeError, TAKES) for target in (3, int, type("NoForward", (nn.Module,), {}), [nn.Linear(1, 1)])),
    (len, ("head",), TypeError, "patterns choose modules of a module"),
    *((Net(), ([pattern],), TypeError, IS) for pattern in (None, 3, torch.relu, nn.Linear(1, 1), int)),
    (Net(), (None,), TypeError, "not iterable"),  # null does not mean everything
    (near(), ("haed",), ValueError, "'haed' matches no module.*nearest are.*head"),
    (near(), (["decoder.head"],), ValueError, "'decoder.head' matches no module.*nearest are.*head"),
    (near(), ("Layernorm",), ValueError, "'Layernorm' matches no module.*nearest are.*LayerNorm"),
    (near(), (nn.Linear,), ValueError, "'Linear' matches no module.*nearest are.*Bilinear"),
    (Net(), (["head", "hed", nn.Conv2d],), ValueError, BOTH),  # all at once
    *((Transformer(), (inside,), ValueError, ATTENTION) for inside in ("blocks.0.self_attn.out_proj", "*.out_proj")),
    *((Transformer(), (inside,), ValueError, ATTENTION) for inside in (nn.Linear, "Linear")),
    *((Transformer(), (pattern,), ValueError, CALLED) for pattern in ("blocks", nn.ModuleList)),
    *(
        (low_head(dtype), (["norm", "head"],), ValueError, rf"weights of 'head' \(Head\) are {name}; an fp32 island")
        for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16"))
    ),
    (patched(), ("0",), ValueError, r"'0' .* has a forward of its own in the instance"),
    (torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))), (), ValueError, "is traced code"),
]


@pytest.mark.parametrize("target, patterns, error, message", REFUSALS)
def test_what_cannot_become_an_island_is_refused_and_nothing_is_changed(target, patterns, error, message):
    with pytest.raises(error, match=message):
        keep_fp32(target, *patterns)
    assert not isinstance(target, nn.Module) or island_names(target) == []
    if message == LATER:
        with pytest.raises(error, match=message):
            carry_autocast(target)


def test_weights_that_become_16bit_later_are_named_by_the_forward_pass():
    island = keep_fp32(Head()).half()
    with pytest.raises(ValueError, match="the weights of Fp32Head are float16"), autocast():
        island(torch.ones(1, 4), scale=1.0)


# --- other threads ----------------------------------------------------------------------------------------------------


def in_thread(fn, *args):
    box = []
    thread = threading.Thread(target=lambda: box.append(fn(*args)))
    thread.start()
    thread.join()
    return box[0]


def state():
    of_devices = [
        get(device) for device in ("cpu", "cuda") for get in (torch.is_autocast_enabled, torch.get_autocast_dtype)
    ]
    return *of_devices, torch.is_autocast_cache_enabled()


def test_a_plain_thread_loses_autocast_and_carry_autocast_keeps_it():
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    with autocast(torch.float16):
        here, carried = linear(x), carry_autocast(linear)
        assert in_thread(linear, x).dtype is torch.float32
        assert in_thread(torch.get_autocast_dtype, "cpu") is torch.bfloat16
    with ThreadPoolExecutor(4) as pool:
        assert all(y.dtype is torch.float16 and y.equal(here) for y in pool.map(carried, [x] * 100))
        assert set(pool.map(lambda _: state()[0], range(8))) == {False}
    before = state()
    with pytest.raises(RuntimeError, match="shapes"):
        carried(torch.ones(2, 3))
    assert state() == before


def test_carry_autocast_restores_the_whole_captured_state_wherever_it_is_called():
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        expected, carried = state(), carry_autocast(state)
    off = carry_autocast(state)
    assert expected[:2] == (True, torch.float16) and expected[-1] is False and carried() == expected
    assert in_thread(carried) == expected
    before = state()
    with autocast():
        assert carried() == expected and off() == before
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16 and torch.is_autocast_enabled("cpu")
    assert state() == before


def test_threads_that_share_weights_have_to_agree_on_the_dtype_or_do_without_the_cache():
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)

    def other_dtype(cache_enabled):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
            try:
                return linear(x).dtype
            except RuntimeError as error:
                return str(error)

    with autocast(torch.float16):
        linear(x)  # leaves a float16 copy of the weight in the cache
        assert "same dtype" in in_thread(other_dtype, True)
        assert in_thread(other_dtype, False) is torch.bfloat16
