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
from torch.nn.utils.rnn import PackedSequence, pack_sequence
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
    label: torch.Tensor
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


class Net(nn.Module):
    """body -> norm -> head, where the head takes more than one plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = Head()

    def forward(self, x):
        return self.head(self.norm(self.body(x)), scale=2.0)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x, *, scale):
        return self.fc(x) * scale


@keep_fp32
class Fp32ByDesign(nn.Linear):
    """Pickle has to find this very class."""


class Spy(nn.Module):
    """Returns what it is given, and has seen the autocast state."""

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


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "old pickle": lambda m: pickle.loads(pickle.dumps(m, protocol=0)),
    "torch.save": through_bytes,
    "EMA": lambda m: AveragedModel(m).module,
    "copy of a copy": lambda m: through_bytes(copy.deepcopy(m)),
}
copies = pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES.keys())


# --- what tutorials show, and why it does not do ----------------------------------------------------------------------


def test_the_patched_forward_of_tutorials_runs_the_original_weights_in_a_copy():
    def wrapper(forward, self, x):
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    patched = fill(nn.Linear(2, 1), 1.0)
    patched.forward = MethodType(partial(wrapper, patched.forward), patched)
    island = keep_fp32(fill(nn.Linear(2, 1), 1.0))
    x = torch.ones(1, 2)
    assert fill(copy.deepcopy(patched), 0.0)(x).item() == 3.0  # not 0: the weights of the original
    assert fill(copy.deepcopy(island), 0.0)(x).item() == 0.0


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
        mended = keep_fp32(net(), "conv")(x)
    torch.testing.assert_close(mended, net()(x), rtol=0, atol=0)  # the norm computes in fp32 by itself


# --- what an island computes ------------------------------------------------------------------------------------------


@half_types
def test_an_island_equals_fp32_arithmetic_on_its_inputs(dtype):
    linear = keep_fp32(nn.Linear(64, 64))
    x = torch.randn(8, 64).to(dtype)
    with autocast(dtype):
        y = linear(x)
    assert torch.equal(y, F.linear(x.float(), linear.weight, linear.bias))


def test_an_island_does_not_overflow():
    linear = fill(nn.Linear(1, 1, bias=False), 300.0)
    with autocast(torch.float16):
        assert linear(torch.tensor([300.0])).isinf()
        assert keep_fp32(linear)(torch.tensor([300.0])).item() == 90000.0


@half_types
def test_gradients_flow_through_an_island(dtype):
    model, x = keep_fp32(Net(), "head"), torch.randn(5, 4)
    seen = []

    def watch(_, args):
        args[0].register_hook(lambda gradient: seen.append(gradient.dtype))

    model.norm.register_forward_pre_hook(watch)
    model.head.fc.register_forward_pre_hook(watch)
    with autocast(dtype):
        loss = model(x).square().sum()
    loss.backward()
    assert seen == [torch.float32, dtype]  # the head's input, then the norm's, which lies outside
    assert all(p.grad is not None and p.grad.dtype is torch.float32 and p.grad.any() for p in model.parameters())


@half_types
def test_all_16bit_tensors_in_any_container_arrive_as_fp32_and_nothing_else_changes(dtype):
    x = torch.tensor([1.5], dtype=dtype)
    others = [torch.ones(1, dtype=d) for d in (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)]
    batch = Batch(x, torch.ones(1, dtype=torch.int64))  # `late` is not set
    containers = Pair(x, "text"), Frozen(x), batch, OrderedDict(a=x), Output(given={"a": x, "b": None})
    named = {"deep": {"er": [x]}, "none": None}
    (tensor, listed, pair, *rest), kwargs = keep_fp32(Spy())(
        x, [x, (x, others)], *containers, pack_sequence([x]), named=named
    )
    frozen, seen_batch, ordered, output, packed = rest
    arrived = [tensor, listed[0], listed[1][0], pair.first, frozen.image, seen_batch.image, ordered["a"], output["a"]]
    for got in (*arrived, packed.data, kwargs["named"]["deep"]["er"][0]):
        assert got.dtype is torch.float32 and got.item() == 1.5
    assert listed[1][1] is others and seen_batch.label is batch.label and pair.second == "text"
    kinds = [Pair, Frozen, Batch, OrderedDict, Output, PackedSequence]
    assert [type(c) for c in (pair, frozen, seen_batch, ordered, output, packed)] == kinds
    assert batch.image is x  # what the caller holds is left alone


def test_a_dataclass_keeps_what_is_no_field():
    batch = Batch(torch.ones(1).half(), torch.ones(1))
    batch.note = "mine"  # pyright: ignore[reportAttributeAccessIssue]
    (got,), _ = keep_fp32(Spy())(batch)
    assert (got.note, got.image.dtype, batch.image.dtype) == ("mine", torch.float32, torch.float16)


def test_a_container_without_16bit_tensors_is_passed_on_itself():
    x = torch.ones(1)
    given = [[x], (x, 1), {"a": x}, Pair(x, x), Batch(x, x), Frozen(x), torch.Size([1]), "text", None]
    got, _ = keep_fp32(Spy())(*given)
    assert all(a is b for a, b in zip(got, given, strict=True))


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
    assert y.dtype is z.data.dtype is torch.float32
    torch.testing.assert_close(y, attention(x, x, x)[0], rtol=0, atol=0)


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


def test_an_exception_inside_an_island_restores_autocast():
    island = keep_fp32(nn.Linear(4, 4))
    with autocast(torch.float16):
        with pytest.raises(RuntimeError, match="shapes"):
            island(torch.ones(2, 3))
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16


def test_islands_inside_islands_are_fine():
    model = keep_fp32(Net(), ["head", "head.fc", ""])
    x = torch.randn(2, 4)
    with autocast():
        y = model(x)
    assert island_names(model) == ["", "head", "head.fc"] and torch.equal(y, model(x))


# --- what a module keeps ----------------------------------------------------------------------------------------------


@copies
@half_types
def test_copies_are_islands_too(make_copy, dtype):
    model = keep_fp32(Net(), ["head", "*norm"])
    twin, x = make_copy(model), torch.randn(2, 4)
    assert island_names(twin) == ["norm", "head"] and type(twin.head) is type(model.head)
    with autocast(dtype):
        y = twin(x)
        assert y.dtype is torch.float32 and torch.equal(y, model(x))


@pytest.mark.parametrize("kind", [c for c in COPIES if c != "copy"])
def test_copies_run_their_own_weights(kind):
    model = keep_fp32(Net(), ["head", "norm"])
    twin = fill(COPIES[kind](model), 0.0)
    with autocast():
        assert not twin(torch.randn(2, 4)).any() and model(torch.randn(2, 4)).any()


@copies
def test_a_module_that_copies_or_pickles_itself_by_name_stays_an_island(make_copy):
    twin = make_copy(keep_fp32(nn.Sequential(Renamed(2, 2))))
    assert island_names(twin) == [""]
    twin = make_copy(keep_fp32(nn.Sequential(Renamed(2, 2)), "0"))
    assert island_names(twin) == ["0"]


def test_an_ema_of_islands_follows_its_own_weights():
    model = keep_fp32(nn.Sequential(fill(nn.Linear(1, 1, bias=False), 1.0)), "0")
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    ema.update_parameters(model)
    fill(model, 3.0)
    ema.update_parameters(model)
    with autocast():
        assert (ema(torch.ones(1)).item(), model(torch.ones(1)).item()) == (2.0, 3.0)


def test_replicas_of_data_parallel_run_their_own_weights():
    island = keep_fp32(nn.Linear(2, 1))
    replica = island._replicate_for_data_parallel()
    replica._parameters.update(weight=nn.Parameter(torch.zeros(1, 2)), bias=nn.Parameter(torch.zeros(1)))
    with autocast():
        y = replica(torch.ones(1, 2))
    assert y.dtype is torch.float32 and y.item() == 0.0


def test_ddp_trains_a_model_with_islands(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain = keep_fp32(Net(), ["head", "norm"])
        wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
        x = torch.randn(5, 4)
        for model in (plain, wrapped):
            with autocast():
                y = model(x)
            assert y.dtype is torch.float32
            y.sum().backward()
        assert all(torch.equal(p, q) for p, q in zip(gradients(plain), gradients(wrapped), strict=True))
    finally:
        end_process_group()


def test_identity_state_and_class_of_the_module_are_kept():
    model = Net()
    head, keys, types = model.head, list(model.state_dict()), [type(m) for m in model.modules()]
    assert keep_fp32(model, "*") is model and model.head is head
    assert list(model.state_dict()) == keys
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


def test_activation_checkpointing_recomputes_an_island_in_fp32():
    model, x = keep_fp32(Net(), "head"), torch.randn(5, 4)

    def train(run):
        model.zero_grad()
        with autocast():
            loss = run(x).square().sum()
        loss.backward()
        return gradients(model)

    plain = train(model)
    again = train(partial(checkpoint, model, use_reentrant=False))
    assert all(map(torch.equal, plain, again))


def test_lazy_modules_stay_islands_when_they_become_real():
    model = keep_fp32(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), "0")
    for net in (copy.deepcopy(model), model):
        with autocast():
            assert [net[0](torch.randn(2, 4)).dtype for _ in range(2)] == [torch.float32] * 2
        assert type(net[0]) is type(keep_fp32(nn.Linear(3, 3)))


def test_parametrized_modules_can_be_islands_before_and_after():
    for module in (
        keep_fp32(parametrizations.weight_norm(nn.Linear(4, 4))),
        parametrizations.weight_norm(keep_fp32(nn.Linear(4, 4))),
    ):
        with autocast():
            assert fill(copy.deepcopy(module), 1.0)(torch.ones(1, 4)).dtype is torch.float32


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


def test_a_function_becomes_an_island():
    @keep_fp32
    def scores(q, k, *, scale: float = 1.0):
        """Documented."""
        return q @ k.T * scale

    q = torch.full((1, 4), 200.0, dtype=torch.float16)
    with autocast(torch.float16):
        assert (q @ q.T).isinf() and scores(q, k=q, scale=0.5).item() == 80000.0
    assert scores.__name__ == "scores" and scores.__doc__ == "Documented."
    assert keep_fp32(scores) is scores


def test_a_method_becomes_an_island():
    class Model(nn.Linear):
        @keep_fp32
        def loss(self, x):
            return self(x).sum()

    with autocast():
        assert Model(2, 2).loss(torch.ones(1, 2).bfloat16()).dtype is torch.float32


@copies
def test_a_decorated_class_makes_islands_that_copy_by_name(make_copy):
    module = Fp32ByDesign(2, 2)
    assert type(make_copy(nn.Sequential(module))[0]) is Fp32ByDesign
    with autocast():
        assert make_copy(nn.Sequential(module))(torch.ones(1, 2).bfloat16()).dtype is torch.float32
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


@pytest.mark.parametrize("wrap", [keep_fp32, carry_autocast])
def test_what_runs_after_the_call_is_refused(wrap):
    def generator():
        yield 1

    async def coroutine(): ...

    for fn in (generator, coroutine):
        with pytest.raises(TypeError, match="runs after the call"):
            wrap(fn)


def test_other_targets_are_refused():
    class NoForward(nn.Module):
        pass

    for target in (3, int, NoForward, [nn.Linear(1, 1)]):
        with pytest.raises(TypeError, match="keep_fp32 takes"):
            keep_fp32(target)
    with pytest.raises(TypeError, match="patterns choose modules of a module"):
        keep_fp32(len, "head")


# --- patterns ---------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    "patterns, expected",
    [
        ("head", ["head"]),
        (["head"], ["head"]),
        (("blocks.0.norm1", "head"), ["blocks.0.norm1", "head"]),
        ("*.norm?", ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2"]),
        ("blocks.0*", [f"blocks.0{part}" for part in ("", ".self_attn", ".linear1", ".dropout", ".linear2", ".norm1",
                                                      ".norm2", ".dropout1", ".dropout2")]),
        ([nn.LayerNorm], ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2"]),
        (nn.LayerNorm, ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2"]),
        ("MultiheadAttention", ["blocks.0.self_attn", "blocks.1.self_attn"]),
        (["head", nn.Linear, nn.MultiheadAttention], ["blocks.0.self_attn", "blocks.0.linear1", "blocks.0.linear2",
                                                      "blocks.1.self_attn", "blocks.1.linear1", "blocks.1.linear2",
                                                      "head"]),
        ("", [""]),
        ([], []),
    ],
)  # fmt: skip
def test_patterns_choose_modules_by_name_glob_class_and_class_name(patterns, expected):
    model = Transformer()
    assert island_names(keep_fp32(model, patterns)) == expected
    with autocast():
        model(torch.randn(1, 3, 8))


def test_classes_include_their_subclasses():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.ReLU())
    for pattern in (nn.modules.batchnorm._BatchNorm, "_BatchNorm"):
        assert island_names(keep_fp32(copy.deepcopy(model), pattern)) == ["0", "1"]


def test_twice_is_once():
    once, twice = keep_fp32(Net(), ["head", "LayerNorm"]), keep_fp32(Net(), ["head", "LayerNorm"])
    assert keep_fp32(twice, ["head", "LayerNorm"]) is twice and repr(once) == repr(twice)
    assert [type(m) for m in once.modules()] == [type(m) for m in twice.modules()]


def test_a_module_shared_under_two_names_is_found_under_both():
    shared = nn.Linear(4, 4)
    for patterns in ("second", ["first", "second"]):
        model = nn.ModuleDict({"first": shared, "second": shared})
        assert isinstance(keep_fp32(model, patterns)["first"], nn.Linear)
        assert model["first"] is model["second"] is shared and island_names(model) == ["first"]


@pytest.mark.parametrize(
    "pattern, nearest",
    [("haed", "head"), ("decoder.head", "head"), ("Layernorm", "LayerNorm"), (nn.Linear, "Bilinear")],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_names(pattern, nearest):
    model = nn.ModuleDict({"head": nn.Bilinear(2, 2, 2), "norm": nn.LayerNorm(2)})
    word = pattern if isinstance(pattern, str) else "Linear"
    with pytest.raises(ValueError, match=f"'{word}' matches no module.*nearest are.*{nearest}"):
        keep_fp32(model, [pattern])


def test_all_bad_patterns_are_told_at_once_and_nothing_is_changed():
    model = Net()
    with pytest.raises(ValueError, match="'hed' matches no module") as error:
        keep_fp32(model, ["head", "hed", nn.Conv2d])
    assert "'Conv2d' matches no module" in str(error.value) and island_names(model) == []


@pytest.mark.parametrize("pattern", [None, 3, torch.relu, nn.Linear(1, 1), int])
def test_other_patterns_are_refused(pattern):
    with pytest.raises(TypeError, match="a pattern is"):
        keep_fp32(Net(), [pattern])


def test_null_does_not_mean_everything():
    null: Any = None
    with pytest.raises(TypeError):
        keep_fp32(Net(), null)


@pytest.mark.parametrize("patterns", ["blocks.0.self_attn.out_proj", "*.out_proj", nn.Linear, "Linear"])
def test_the_inside_of_attention_is_refused_because_it_is_never_called(patterns):
    model = Transformer()
    with pytest.raises(ValueError, match=r"name the attention module, 'blocks\.0\.self_attn'"):
        keep_fp32(model, patterns)
    assert island_names(model) == []


def test_an_island_inside_attention_would_indeed_have_no_effect():
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 1, 8)
    with autocast():
        plain = attention(x, x, x)[0]
        keep_fp32(attention.out_proj)  # on its own it cannot be known to lie inside
        assert torch.equal(plain, attention(x, x, x)[0]) and plain.dtype is torch.bfloat16


def test_the_inside_of_attention_may_be_named_along_with_what_is_around():
    for patterns in (["*.self_attn", "Linear"], ["blocks.?", nn.Linear], "*"):
        names = island_names(keep_fp32(Transformer(), patterns))
        assert "head" in names and not any("out_proj" in name for name in names)
    model = keep_fp32(Transformer(), "*.self_attn")
    assert "head" in island_names(keep_fp32(model, nn.Linear))


def test_a_list_of_modules_is_refused_because_it_is_never_called():
    for patterns in ("blocks", nn.ModuleList):
        with pytest.raises(ValueError, match=r"'blocks' \(ModuleList\) is never called.*'blocks\.\*'"):
            keep_fp32(Transformer(), patterns)
    assert "blocks.0" in island_names(keep_fp32(Transformer(), "blocks*"))


@half_types
def test_16bit_weights_are_refused(dtype):
    model = Net()
    model.head.to(dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"the weights of 'head' \(Head\) are {name}; an fp32 island needs fp32"):
        keep_fp32(model, ["norm", "head"])
    assert island_names(model) == []


def test_weights_that_become_16bit_later_are_named_by_the_forward_pass():
    island = keep_fp32(Head()).half()
    with pytest.raises(ValueError, match="the weights of Fp32Head are float16"), autocast():
        island(torch.ones(1, 4), scale=1.0)


def test_a_module_with_a_patched_or_traced_forward_is_refused():
    patched = nn.Linear(2, 2)
    patched.forward = MethodType(lambda self, x: x, patched)
    with pytest.raises(ValueError, match=r"'0' .* has a forward of its own in the instance"):
        keep_fp32(nn.Sequential(patched), "0")
    with pytest.raises(ValueError, match="is traced code"):
        keep_fp32(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))))


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
        here = linear(x)
        assert in_thread(linear, x).dtype is torch.float32
        assert in_thread(torch.get_autocast_dtype, "cpu") is torch.bfloat16
        there = in_thread(carry_autocast(linear), x)
    assert there.dtype is torch.float16 and torch.equal(here, there)


def test_carry_autocast_restores_the_whole_state_of_its_birth_wherever_it_is_called():
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        expected, carried = state(), carry_autocast(state)
    off = carry_autocast(state)
    assert expected[:2] == (True, torch.float16) and expected[-1] is False and carried() == expected
    assert in_thread(carried) == expected
    before = state()
    with autocast():
        assert carried() == expected and off() == before
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert state() == before


def test_carry_autocast_serves_many_threads_at_once_and_survives_exceptions():
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    with autocast(torch.float16):
        carried = carry_autocast(linear)
    with ThreadPoolExecutor(4) as pool:
        assert {y.dtype for y in pool.map(carried, [x] * 100)} == {torch.float16}
        assert set(pool.map(lambda _: state()[0], range(8))) == {False}
    before = state()
    with pytest.raises(RuntimeError, match="shapes"):
        carried(torch.ones(2, 3))
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


def test_carry_autocast_keeps_the_name_of_the_function():
    def named() -> None:
        """Documented."""

    assert (carry_autocast(named).__name__, carry_autocast(named).__doc__) == ("named", "Documented.")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("add", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_an_island_may_be_reparametrised_before_and_after(add: Any, is_first: bool) -> None:
    """Its keys and values are those of a module that is no island, as are those of copies, until all is removed."""
    torch.manual_seed(0)
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
            with torch.autocast("cpu", torch.bfloat16):
                found = each(x.bfloat16())
            assert found.dtype is torch.float32 and torch.equal(found, plain(x.bfloat16().float()))
            each.load_state_dict(plain.state_dict())
        if step == 0:
            for each in (module, plain):
                torch.nn.utils.parametrize.remove_parametrizations(each, "weight")
    assert type(module).__name__ == "Fp32Linear" and type(plain) is nn.Linear
