"""What is compiled is what runs eagerly: in every mode, with islands, dropout, statistics, accumulation, on ranks.

`aot_eager` traces forward and backward as inductor does and computes with the eager kernels, so that every bit can be
compared. Inductor itself rounds less often.
"""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from typing import Any

import pytest
import torch
from running import lines, refused_before_the_start, same_but, state, timeless
from test_recipes import arguments
from tiers import rows
from torch import Tensor, nn
from torch._dynamo.comptime import comptime

import train
from amp_core import Amp, Clip, Ema, Schedule, keep_fp32, sync_grads
from amp_core.checkpoints.parts import gather_full_state
from amp_core.layouts.ddp import wrap_ddp
from amp_core.layouts.fsdp import build_mesh, wrap_fsdp
from amp_core.lowp.masters import master_params
from amp_core.memory.compiled import Compiler, allow_graphs, compile_parts, eagerly
from amp_core.memory.recompute import recompute_blocks


@pytest.fixture(autouse=True)
def _graphs():
    with allow_graphs():
        yield


# Tracing looks at the gradients of whatever it meets, and inductor uses torch.jit: torch warns of itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.dropout(torch.relu(self.norm(self.first(x))), 0.2, self.training))


def network() -> nn.Module:
    """Three blocks with an island in each. Under autocast the first gets 16-bit numbers, the others fp32."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), Block(16), Block(16), Block(16), nn.Linear(16, 4))
    return keep_fp32(net, ["*.second"])


AMPS: weakref.WeakKeyDictionary[nn.Module, Amp] = weakref.WeakKeyDictionary()
"""Of `prepared` networks, which it has to train: it holds their master weights."""


def amp_of(mode: str) -> Amp:
    return Amp.named(mode, samples=12, **({"growth_interval": 1} if mode == "fp16" else {}))


def trained(
    net: nn.Module,
    mode: str,
    num_steps: int = 3,
    wrap: Any = lambda net: net,
    each: Any = lambda: None,
    evaluates: bool = True,
) -> dict[str, Any]:
    """What steps leave: two micro-batches each, an evaluation with a shorter batch after each, an overflow in the 2nd.

    The scale and the rate are others in every step, after which `each` is called.
    """
    amp = AMPS.get(net) or amp_of(mode)
    wrapped = wrap(net)
    amp.guard(wrapped)
    optimizer = torch.optim.AdamW(master_params(net), lr=1e-2, fused=True)
    schedule = Schedule(optimizer, lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n), 9)
    ema = Ema(wrapped, 0.5)
    generator = torch.Generator().manual_seed(1)
    outputs = []
    for step in range(num_steps):
        torch.manual_seed(step)
        wrapped.train()
        data = torch.randn(2, 12, 8, generator=generator)
        if step == 1:
            data[1, 3] = torch.inf
        with amp.cache_weight_casts(wrapped):
            for i, batch in enumerate(data):
                with sync_grads(wrapped, when=i == 1):
                    with amp.autocast():
                        loss = wrapped(batch).float().square().mean()
                    amp.backward(loss * 0.5)
        report = amp.step(optimizer, Clip.norm(1.0))
        amp.update()
        optimizer.zero_grad(set_to_none=True)
        schedule.advance(report)
        ema.update(report)
        wrapped.eval()
        for batch in (data[0], data[0, :5]) if evaluates else ():
            with torch.no_grad(), amp.autocast():
                outputs += [wrapped(batch).float(), ema.model(batch).float()]
        each()
    return {"net": net.state_dict(), "ema": ema.state_dict(), "outputs": outputs, "skipped": amp.num_skipped}


def prepared(mode: str, compiler: Compiler | None = None, *, again: bool = False, **options: Any) -> nn.Module:
    net = network()
    AMPS[net] = amp_of(mode)
    AMPS[net].prepare(net)
    if compiler is not None:
        compile_parts(net, compiler, **options)
    if again:
        recompute_blocks(net)
    return net


@pytest.mark.parametrize("mode", rows(["fp16", "o2", "fp8"], "fp16"))
def test_compiled_is_eager_bit_for_bit(mode):
    """All is compiled in the first step: nothing for a new scale, a new rate, or a return from evaluation."""
    compiler, num_graphs = Compiler("aot_eager"), []
    expected = trained(prepared(mode), mode)
    net = prepared(mode, compiler)
    found = trained(net, mode, each=lambda: num_graphs.append(compiler.num_graphs))
    assert not same_but(expected, found) and expected["skipped"] == 1
    assert num_graphs == [num_graphs[0]] * 3 and compiler.num_failed == 0
    if mode == "fp16":  # for two dtypes of inputs: training, evaluation, and that of the average, which is frozen
        assert num_graphs[0] == 2 * 3
    assert type(net[1]).__name__ == "Block" and isinstance(net[1], Block)


@pytest.mark.slow
def test_a_backward_pass_is_compiled_outside_of_autocast():
    """torch traces it under the autocast of the forward pass, which makes 16-bit products of those of fp32 islands."""

    def gradients(change):
        net, amp = network(), Amp.named("bf16")
        change(net)
        with amp.autocast():
            loss = net(torch.linspace(-1, 1, 96).view(12, 8)).float().square().mean()
        amp.backward(loss)
        return [param.grad for param in net.parameters()]

    eager, ours = gradients(lambda net: None), gradients(lambda net: compile_parts(net, Compiler("aot_eager")))
    theirs = gradients(lambda net: [net[i].compile(backend="aot_eager") for i in (1, 2, 3)])
    assert all(map(torch.equal, eager, ours)) and not all(map(torch.equal, eager, theirs))


@pytest.mark.parametrize("options", [{"again": True}, {"whole": True}], ids=["recomputed", "as one"])
def test_other_ways_to_compile_are_eager_bit_for_bit(options):
    compiler = Compiler("aot_eager")
    nets = prepared("bf16"), prepared("bf16", compiler, **options)
    assert not same_but(*(trained(net, "bf16", 1, evaluates=False) for net in nets))
    assert compiler.num_graphs > 0 and compiler.num_failed == 0


@pytest.mark.slow
def test_inductor_computes_the_same_up_to_its_roundings(tmp_path, monkeypatch):
    """It keeps fp32 between operations that eager code rounds to bfloat16 one by one: some 2^-8 of a number. What it
    compiled once, another compiler, or another run, takes from the folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # What takes long in a folder that is empty: headers compiled ahead, and trials of the processor's vector units.
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)
    monkeypatch.setattr(torch._inductor.config.cpp, "simdlen", 0)
    net = nn.Sequential(nn.Linear(8, 16), Block(16), nn.Linear(16, 4))
    images = torch.randn(6, 8)

    def loss_and_gradients():
        amp = Amp.named("bf16")
        torch.manual_seed(0)
        net.zero_grad()
        with amp.autocast():
            loss = net(images).float().square().mean()
        amp.backward(loss)
        return [loss.detach(), *(param.grad.clone() for param in net.parameters())]

    plain = copy.deepcopy(net)
    eager = loss_and_gradients()
    assert compile_parts(net, compiler := Compiler()) == 1
    first = loss_and_gradients()
    assert compiler.num_graphs == 1 and compiler.num_failed == 0
    assert all(torch.allclose(a, b, rtol=2**-5, atol=2**-7) for a, b in zip(eager, first, strict=True))

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = plain
    compile_parts(net, Compiler())
    assert all(map(torch.equal, first, loss_and_gradients()))
    found = torch._dynamo.utils.counters["inductor"]
    assert found["fxgraph_cache_hit"] > 0 and not found["fxgraph_cache_miss"]


def test_what_cannot_be_compiled_runs_eagerly_and_says_so_once(caplog):
    compiler = Compiler("relu_compile_error_TESTING_ONLY")
    with caplog.at_level(logging.WARNING, logger="amp_recipes"):
        nets = prepared("bf16"), prepared("bf16", compiler)
        assert not same_but(*(trained(net, "bf16", 1, evaluates=False) for net in nets))
    said = [record.message for record in caplog.records if "perf.backend" in record.message]
    assert compiler.num_failed > 1 and len(said) == 1 and "ReluCompileError" in said[0]


class Untraceable(Block):
    def forward(self, x: Tensor) -> Tensor:
        comptime(lambda context: 1 / 0)  # called by the tracer alone
        return super().forward(x)


@pytest.mark.slow
def test_what_cannot_be_traced_runs_eagerly_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setitem(globals(), "Block", Untraceable)
    expected, compiler = trained(prepared("bf16"), "bf16", 1), Compiler("aot_eager")
    with caplog.at_level(logging.WARNING):
        assert not same_but(expected, trained(prepared("bf16", compiler), "bf16", 1))
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "cannot trace a block, running it eagerly" in said[0]


def test_an_island_made_later_and_hooks_are_seen():
    """A doctor that heals changes the class of a module in a compiled block; statistics put hooks into it."""
    net, amp, images = network(), Amp.named("bf16"), torch.randn(4, 8)
    compile_parts(net, Compiler("aot_eager"))
    net.eval()

    def output():
        with torch.no_grad(), amp.autocast():
            return net(images)

    before, seen = output(), []
    keep_fp32(net, ["1.first"])
    after = output()
    with eagerly():
        handle = net[1].first.register_forward_hook(lambda *_: seen.append(1))
        expected = output()
        handle.remove()
    assert torch.equal(after, expected) and not torch.equal(before, after) and seen == [1]


def test_a_class_made_an_island_later_is_compiled_again():
    """No guard of torch sees that a class has another forward."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight)

    net, x = torch.compile(nn.Sequential(Scaled(4, 4)), backend="eager"), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype is torch.bfloat16
        keep_fp32(Scaled)
        assert net(x).dtype is torch.float32


def _on_a_rank(rank: int) -> list[bool]:
    def wrap_sharded(net: nn.Module) -> nn.Module:
        return wrap_fsdp(net, build_mesh(torch.device("cpu"), 2, None), torch.bfloat16)

    same = []
    for wrap in (lambda net: wrap_ddp(net, torch.device("cpu")), wrap_sharded):
        with allow_graphs(), warnings.catch_warnings():
            compiler = Compiler("aot_eager")
            nets = (prepared("bf16"), prepared("bf16", compiler))
            found = [trained(net, "bf16", 1, wrap, evaluates=False) for net in nets]
        for each in found:
            each |= {"net": {name: gather_full_state(value) for name, value in each["net"].items()}, "ema": None}
        same.append(not same_but(*found) and compiler.num_graphs > 0 and compiler.num_failed == 0)
    return same


@pytest.mark.slow
def test_compiled_is_eager_on_ranks(on_ranks):
    """In replicas and in parts, whose groups of weights are gathered by hooks within a block."""
    assert on_ranks(_on_a_rank) == [[True, True]] * 2


COMPILE = ["perf=compile", "perf.backend=aot_eager"]
RUN = ["steps=6", "schedule.horizon=6", "accumulation=2", "amp=fp16", "amp.growth_interval=1", "recipe.sample_tokens=0"]
RUN += ["doctor.statistics_every=4"]


def compared(folder, *overrides):
    assert train.main(arguments("language_model", f"run_dir={folder}", *RUN, *overrides)) == 0
    return timeless(line for line in lines(folder) if line["split"] == "train"), state(folder)


@pytest.mark.slow
def test_a_compiled_run_is_the_run_and_continues_bit_exactly(tmp_path, own_folder):
    """Stopped in the middle, with statistics in one step, in the same names of weights."""
    expected = compared("eager")
    assert train.main(arguments("language_model", "run_dir=compiled", *RUN, *COMPILE, "steps=3")) == 0
    found = compared("compiled", *COMPILE)
    assert found[0] == expected[0] and not same_but(expected[1], found[1])
    assert (tmp_path / "compiled/train.log").read_text().count("compiled by aot_eager") == 2
    assert (tmp_path / "compiled/train.log").read_text().count("compiling by aot_eager: usually 30 to 150 s") >= 2


def test_a_machine_without_a_compiler_is_refused(own_folder, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused_before_the_start(["perf=compile"], "found no no-such-compiler", capsys)
