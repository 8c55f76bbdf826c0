"""Which modules, functions and classes become islands, what is refused, and autocast in other threads."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from test_islands import Fp32ByDesign, Head, Net, autocast
from torch import nn

from amp_core.lowp.islands import carry_autocast, island_names, keep_fp32


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


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
