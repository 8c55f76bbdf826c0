"""Sharded networks are the same networks: one process, replicas and parts compute, skip, save and resume alike."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded_training import CPU, MODES, Collectives, Training, gpt, lay_out, same
from test_recipes import on_two_ranks
from tiers import rows
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.overrides import TorchFunctionMode
from waits import Waits

from amp_core import Amp, Clip, Ema, keep_fp32
from amp_core.checkpoints.parts import gather_full_state
from amp_core.config.errors import ConfigError
from amp_core.layouts.fsdp import build_mesh, wrap_fsdp
from amp_core.lowp.products import is_converted
from amp_core.tensors import full_copy, local

OnRanks = Callable[..., list[Any]]
LAYOUTS = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4}
"""Ranks of each; hsdp is two copies of two parts."""
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 3e-3}
"""Gradients are summed in another order, in numbers of 24, 8 and 11 bits."""


def close(a: Any, b: Any, tolerance: float) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


def trained(rank: int, layout: str, clips: list[Clip | None]) -> list[Any]:
    found = []
    for mode in MODES:
        for clip in clips:
            training = Training(layout, mode, clip=clip)
            windows = [list(training.window()) for _ in range(3)]
            found.append({"windows": windows, "average": training.loss_of_average(), **training.values()})
    return found


@pytest.mark.parametrize("layout", rows(["fsdp", "hsdp"], "fsdp"))
def test_ranks_with_parts_equal_one_process(layout: str, on_ranks: OnRanks) -> None:
    """In every mode, with accumulation, clipping by norm, a schedule and averages."""
    (single,) = on_ranks(trained, "single", [Clip.norm(0.5)], num_ranks=1)
    everywhere = on_ranks(trained, layout, [Clip.norm(0.5)], num_ranks=LAYOUTS[layout])
    for mode, one, *ranks in zip(MODES, single, *everywhere, strict=True):
        assert all(same(rank, ranks[0]) for rank in ranks)
        for kind in ("model", "ema", "moments"):
            close(one[kind], ranks[0][kind], TOLERANCE[mode])
        assert ranks[0]["average"] == pytest.approx(one["average"], rel=TOLERANCE[mode])
        for a, b in zip(one["windows"], ranks[0]["windows"], strict=True):
            assert a == pytest.approx(b, rel=TOLERANCE[mode])


def in_formats(rank: int, layout: str) -> list[Any]:
    found = []
    for mode in ("fp8", "mxfp8", "nvfp4"):
        training = Training(layout, mode)
        assert is_converted(training.net)
        found.append([[training.window()[0] for _ in range(3)], training.values()])
    return found


def test_products_below_16_bits_are_of_whole_weights_gathered_in_fp32(on_ranks: OnRanks) -> None:
    """So scales are those of whole weights, and a step has the bits of two replicas, stochastic rounding included. Without
    clipping: the norm of shards is summed in another order."""
    assert same(on_ranks(in_formats, "ddp"), on_ranks(in_formats, "fsdp"))


class Uneven(nn.Module):
    """A language model with a weight of 3 numbers: on 4 ranks the last has none. 31 rows are 8, 8, 8 and 7."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.few = gpt(), nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens) * self.few.mean()


def uneven(rank: int, layout: str) -> list[Any]:
    found = []
    for mode in ("fp8", "mxfp8", "nvfp4"):
        training = Training(layout, mode, net=Uneven())
        if layout == "fsdp":
            few: Any = training.net.few
            assert local([few])[0].numel() == (0 if rank == 3 else 1)
        found.append([training.window(), training.values()["model"]])
    return found


@pytest.mark.slow
def test_uneven_and_empty_shards_change_nothing_in_formats(on_ranks: OnRanks) -> None:
    """But for the order of the sums over 4 ranks."""
    both = [on_ranks(uneven, layout, num_ranks=4)[0] for layout in ("ddp", "fsdp")]
    for (window, model), (other, theirs) in zip(*both, strict=True):
        assert window == pytest.approx(other, rel=1e-5)
        close(model, theirs, 1e-5)


class Rotated(nn.Module):
    """Passes a cache of angles on to a block, as RoPE does, and has a buffer in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Angles(), nn.Linear(4, 4)
        self.register_buffer("positions", torch.arange(300.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x, self.positions))


class Angles(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        SEEN.append(positions)
        return super().forward(x)


SEEN: list[Tensor] = []


def at_borders(rank: int) -> list[Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        net, mesh = Rotated(), build_mesh(CPU, dist.get_world_size())
        if ours:
            wrap_fsdp(net, mesh, torch.bfloat16)
        else:
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
            _ = [fully_shard(module, mesh=mesh, mp_policy=policy) for module in (net.block, net)]
        SEEN.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=ours):
            net(torch.randn(2, 4))
        found.append((str(SEEN[0].dtype), len(SEEN[0].unique()), str(net.positions.dtype)))
    return found


@pytest.mark.slow
def test_a_cache_of_positions_is_cast_at_the_border_of_a_block_by_torchs_policy_and_not_by_ours(
    on_ranks: OnRanks,
) -> None:
    """300 positions are 279 in bfloat16: to 256 all, then every second one. The buffer itself stays fp32."""
    theirs, ours = on_ranks(at_borders)[0]
    assert theirs == ("torch.bfloat16", 279, "torch.float32") and ours == ("torch.float32", 300, "torch.float32")


def by_adamw(rank: int, layout: str) -> list[Any]:
    found = []
    for fused, mode, early in ((True, "fp32", False), (False, "fp32", False), (True, "fp16", True)):
        training = Training(layout, mode, optimizer=AdamW, lr=1e-3, eps=1e-2, fused=fused, clip=Clip.norm(0.5))
        unscale = functools.partial(training.amp.unscale_, training.optimizer) if early else None
        windows = [list(training.window(unscale)) for _ in range(3)]
        found.append({"windows": windows, "mode": mode, **training.values()})
    return found


def test_adamw_equals_one_process_fused_plain_and_unscaled_by_hand(on_ranks: OnRanks) -> None:
    """Adam's step lr * g / (|g| + eps) turns the rounding of a gradient near 0, which is the kernels', into a change of
    the weight lr / eps times as large: with eps=1e-8 into whole steps. Here lr / eps is the 0.1 of SGD above, and so
    the same tolerance holds."""
    (single,) = on_ranks(by_adamw, "single", num_ranks=1)
    for one, parts in zip(single, on_ranks(by_adamw, "fsdp")[0], strict=True):
        tolerance = TOLERANCE[one["mode"]]
        assert all(a == pytest.approx(b, rel=tolerance) for a, b in zip(one["windows"], parts["windows"], strict=True))
        for name, value in one["moments"].items():  # squares of gradients are 1e-8: measured by their largest element
            atol = float(2 * tolerance * value.abs().max())
            torch.testing.assert_close(parts["moments"][name], value, rtol=0, atol=atol)


OPTIMIZERS = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def by_name(rank: int, layout: str) -> dict[str, Any]:
    found = {}
    for name in OPTIMIZERS:
        amp = Amp.named("fp32")
        torch.manual_seed(3)
        net = lay_out(nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)), layout, amp)
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.1)
        for i in range(3):
            torch.manual_seed(i)
            mine = torch.randn(4, 5).chunk(dist.get_world_size())[rank]
            amp.backward(net(mine).square().sum())
            amp.step(optimizer)
            amp.update()
            optimizer.zero_grad()
        found[name] = gather_full_state(net.state_dict())
    return found


@pytest.mark.slow
def test_every_optimizer_of_single_elements_steps_on_parts(on_ranks: OnRanks) -> None:
    """Ranks with an empty part included: the last layer has one row."""
    (single,) = on_ranks(by_name, "single", num_ranks=1)
    parts = on_ranks(by_name, "fsdp")[0]
    for name in OPTIMIZERS:
        close(single[name], parts[name], 1e-4)


def by_muon(rank: int) -> str:
    amp, net = Amp.named("fp32"), wrap_fsdp(nn.Linear(4, 4, bias=False), build_mesh(CPU, 2))
    optimizer = torch.optim.Adafactor(net.parameters())
    amp.backward(net(torch.ones(1, 4)).sum())
    with pytest.raises(TypeError) as problem:
        amp.step(optimizer)
    return str(problem.value)


def test_an_optimizer_of_whole_matrices_is_refused(on_ranks: OnRanks) -> None:
    assert all("Adafactor factors the moments of whole matrices" in text for text in on_ranks(by_muon))


def with_a_bad_gradient(rank: int, bad_rank: int | None, mode: str) -> list[Any]:
    found = []
    for fused in (True, False):
        training = Training("fsdp", mode, fused=fused, clip=Clip.norm(0.5))

        def spoil(training: Training = training) -> None:
            if rank == bad_rank:
                weight = next(p for p in training.net.parameters() if local([p])[0].numel())
                local([cast(Tensor, weight.grad)])[0][0] = torch.inf

        taken, scales = [], []
        for i in range(4):
            if i == 1 and bad_rank is None:
                training.step += 1
                continue  # the run that never saw it
            taken.append(training.window(spoil if i == 1 else None)[2])
            scales.append(training.amp.scale)
        found.append({"taken": taken, "scales": scales, **training.values()})
    return found


@pytest.mark.parametrize("mode, bad_rank", rows([("fp16", 0), ("fp16", 1), ("bf16", 1)], ("fp16", 1)))
def test_a_bad_gradient_in_one_part_is_skipped_by_all(mode: str, bad_rank: int, on_ranks: OnRanks) -> None:
    never = on_ranks(with_a_bad_gradient, None, mode)[0]
    for seen in on_ranks(with_a_bad_gradient, bad_rank, mode):
        for a, b in zip(seen, never, strict=True):
            assert a["taken"] == [True, False, True, True]
            assert a["scales"] == ([1024.0, 512.0, 512.0, 512.0] if mode == "fp16" else [1.0] * 4)
            if mode != "fp16":  # after the skip its scale differs, and with it what underflows
                assert same(
                    [a[kind] for kind in ("model", "ema", "moments")], [b[kind] for kind in ("model", "ema", "moments")]
                )


def with_statistics(rank: int, bad_rank: int | None) -> Any:
    amp = Amp.named("bf16")
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    net[2].mask = nn.Parameter(torch.tensor([-torch.inf, torch.inf, 0.5]), requires_grad=False)
    net = lay_out(net, "fsdp", amp)
    optimizer, ema = SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True), Ema(net, 0.9)
    amp.guard(net)
    for i in range(4):
        torch.manual_seed(10 * i + rank)
        x = torch.randn(4, 3)
        if i == 1 and bad_rank is None:
            continue
        if i == 1 and rank == bad_rank:
            x.fill_(torch.inf)
        with amp.autocast():
            loss = net(x).float().square().mean() / 2
        amp.backward(loss)
        report = amp.step(optimizer)
        assert bool(report.taken) == (i != 1)
        amp.update()
        optimizer.zero_grad()
        ema.update(report)
    return gather_full_state(net.state_dict()), gather_full_state(ema.state_dict())


@pytest.mark.parametrize("bad_rank", rows([0, 1], 1))
def test_statistics_are_put_back_on_all_ranks(bad_rank: int, on_ranks: OnRanks) -> None:
    found = on_ranks(with_statistics, bad_rank)
    assert same(found, on_ranks(with_statistics, None))
    for net, ema in found:
        assert net["2.mask"].tolist() == ema["2.mask"].tolist() == [-torch.inf, torch.inf, 0.5]


def costs(rank: int, mode: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for num_micros in (1, 4):
        training = Training("fsdp", mode, num_micros=num_micros, optimizer=AdamW, clip=Clip.norm(1.0))
        training.window()
        with Collectives() as collectives:
            training.window()
        sent = {
            f"{kind} {dtype}": collectives.of(kind, dtype)
            for kind in ("reduce_scatter", "allgather")
            for dtype in ("float32", "float16")
        }
        sent["all_reduce"] = collectives.of("allreduce")
        found[str(num_micros)] = sent
    amp, net, optimizer = training.amp, training.net, training.optimizer
    amp.backward(torch.zeros((), requires_grad=True))
    with Waits() as waits:
        tokens = torch.randint(31, (2, 8))
        with amp.autocast():
            loss = net(tokens).float().mean()
        amp.backward(loss)
        report = amp.step(optimizer, Clip.norm(1.0))
        amp.update()
        optimizer.zero_grad()
        training.schedule.advance(report)
        training.ema.update(report)
    found["waits"] = waits.num
    # Weights, averages and two moments of this rank, in fp32.
    moments = [v for entry in optimizer.state.values() for v in entry.values() if v.ndim]
    held = local([*net.parameters(), *training.ema.model.parameters(), *moments])
    found["bytes"] = sum(t.numel() * t.element_size() for t in held)
    return found


def test_one_reduction_per_window_and_group_and_no_wait(on_ranks: OnRanks) -> None:
    """Groups: per block and for the rest, the weights that are cast and those that are not."""
    for mode, in_16bit in (("fp32", 0), ("fp16", 3)):
        for found in on_ranks(costs, mode):
            groups = 3 + in_16bit
            for num_micros in ("1", "4"):
                assert found[num_micros]["reduce_scatter float32"] == groups
                assert found[num_micros]["reduce_scatter float16"] == 0
            # Forward and backward; each group is gathered in what it computes in.
            assert found["1"]["allgather float16"] == 2 * in_16bit
            # The norm, the agreement, and the loss of the test.
            assert found["4"]["all_reduce"] == 3 and found["waits"] == 0
            whole = 4 * 4 * sum(p.numel() for p in gpt().parameters())
            assert found["bytes"] == pytest.approx(whole / 2, rel=0.05)


def kept(rank: int, gather: torch.dtype | None) -> int:
    """Bytes that a forward pass of one sample in bf16 keeps for the backward pass."""
    amp, saved = Amp.named("bf16"), []
    net = wrap_fsdp(gpt(), build_mesh(CPU, 2), gather)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), amp.autocast():
        logits = net(torch.zeros(1, 1, dtype=torch.int64))
    assert logits.requires_grad
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}.values())


def test_no_16bit_copy_of_the_weights_waits_for_the_backward_pass(on_ranks: OnRanks) -> None:
    """Gathered in fp32 and cast by autocast they would: all of them at a time, on every rank."""
    in_16bit = 2 * sum(p.numel() for m in gpt().modules() if isinstance(m, nn.Linear) for p in m.parameters())
    assert on_ranks(kept, torch.bfloat16)[0] < 0.2 * in_16bit < in_16bit < on_ranks(kept, None)[0]


class Products(TorchFunctionMode):
    """Dtypes of input and weight of the linear layers, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[list[str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            self.dtypes.append([str(t.dtype).removeprefix("torch.") for t in args[:2]])
        return func(*args, **(kwargs or {}))


def with_islands(rank: int, layout: str) -> dict[str, Any]:
    amp = Amp.named("bf16")
    torch.manual_seed(1)
    block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    net = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 8), copy.deepcopy(block))
    keep_fp32(net, ["1.2", "3"])
    plain = copy.deepcopy(net)
    net = lay_out(net, layout, amp)
    x = torch.randn(4, 8)
    with Products() as products, amp.autocast():
        y = net(x)
    amp.backward(y.float().square().mean() / dist.get_world_size())
    with amp.autocast():
        is_same = torch.equal(y, plain(x))
    with pytest.raises(RuntimeError) as raised:
        net(x)
    return {"dtypes": products.dtypes, "same": is_same, "problem": str(raised.value)}


def test_islands_have_fp32_weights_and_all_else_what_autocast_gives_it(on_ranks: OnRanks) -> None:
    low, full = "bfloat16", "float32"
    for found in on_ranks(with_islands, "fsdp"):
        assert found["same"]
        assert found["dtypes"] == [[full, low], [low, low], [full, full], [full, low], [full, full], [full, full]]
        assert "outside of autocast to bfloat16" in found["problem"] and "amp.keep_fp32=['0']" in found["problem"]


def tied(rank: int, layout: str) -> list[Any]:
    training = Training(layout, "bf16", net=gpt(tied=True))
    windows = [training.window() for _ in range(3)]
    twin: Any = full_copy(training.net) if layout == "fsdp" else training.net
    assert twin.embed.weight is twin.head.weight
    return [windows, training.loss_of_average(), gather_full_state(training.net.state_dict())]


def test_weights_in_common_stay_so(on_ranks: OnRanks) -> None:
    (single,) = on_ranks(tied, "single", num_ranks=1)
    parts = on_ranks(tied, "fsdp")[0]
    assert parts[1] == pytest.approx(single[1], rel=TOLERANCE["bf16"])
    close(single[2], parts[2], TOLERANCE["bf16"])


class WithAuxiliaryHead(nn.Module):
    """One head is only trained, the other one runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        y = self.head(self.head(x))
        return y + self.aux(x) if self.training else y


def with_a_part_that_does_not_run(rank: int, layout: str) -> list[Tensor]:
    amp = Amp.named("bf16")
    torch.manual_seed(1)
    net = lay_out(WithAuxiliaryHead(), layout, amp)
    optimizer, ema, found = SGD(net.parameters(), lr=0.1, fused=True), Ema(net, 0.5), []
    x = torch.randn(4, 4)
    for _ in range(3):
        net.train()
        with amp.autocast():
            loss = net(x).float().square().mean() / dist.get_world_size()
        amp.backward(loss)
        report = amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
        ema.update(report)
        net.eval()
        with amp.autocast(), torch.no_grad():
            found += [net(x).float(), ema.model(x).float()]
    return found


def test_evaluation_sees_the_weights_of_the_last_step(on_ranks: OnRanks) -> None:
    (single,) = on_ranks(with_a_part_that_does_not_run, "single", num_ranks=1)
    for parts in on_ranks(with_a_part_that_does_not_run, "fsdp"):
        torch.testing.assert_close(single, parts, rtol=2e-2, atol=2e-2)
        assert len({float(each.sum()) for each in parts}) == 6


@pytest.mark.slow
def test_the_doctor_finds_the_fault_of_one_rank(own_folder: Path) -> None:
    sharded = functools.partial(on_two_ranks, "language_model", layout="fsdp")
    sharded("forward", "steps=2", "amp=bf16", "debug.inject={where: activation, step: 2, rank: 1}")
    sharded(
        "backward", "steps=12", "amp=fp16", "amp.init_scale=16777216", "doctor.after_skips=1", "doctor.max_reports=1"
    )
    forward, backward = (
        json.loads(next(Path(run, "doctor").glob("*.json")).read_text()) for run in ("forward", "backward")
    )
    assert (forward["op"], forward["phase"], forward["rank"], forward["ranks"]) == ("aten.add", "forward", 1, [1])
    assert forward["module_class"] == "Embedding"  # whose hook it is
    assert (backward["cause"], backward["phase"]) == ("loss scale too large", "backward")
    assert backward["scale_that_fits"] < 2**24


def on_scalars(rank: int) -> str:
    net = nn.Linear(2, 2)
    net.gain = nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError) as problem:
        wrap_fsdp(net, build_mesh(CPU, 2))
    with pytest.raises(ConfigError, match=r"layout.shard_size=3: does not divide 2 ranks"):
        build_mesh(CPU, 2, 3)
    return str(problem.value)


def test_a_weight_without_dimensions_is_refused(on_ranks: OnRanks) -> None:
    assert all("cannot be sharded" in text and "scalar" in text for text in on_ranks(on_scalars))
