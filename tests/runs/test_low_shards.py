"""16-bit weights in shards: held and gathered in 16 bits, with the bits of replicas and of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_training import Training, lay_out, same
from torch import Tensor, nn
from torch.optim import SGD

from amp_core import Amp
from amp_core.checkpoints.parts import gather_full_state
from amp_core.layouts import low_shards
from amp_core.lowp.formats import E4M3, Scaling, quantise
from amp_core.lowp.masters import master_params
from amp_core.lowp.products import LowLinear
from amp_core.tensors import Slice, dtensor_like

OnRanks = Callable[..., list[Any]]

HELD: list[tuple[str, dict[str, Any]]] = [("o2", {}), ("o3", {})]
HELD += [("bf16_pure", {"update": update}) for update in ("master", "stochastic", "remainder", "nearest")]


def with_masters(rank: int, layout: str) -> list[Any]:
    found = []
    for mode, fields in HELD:
        training = Training(layout, mode, fields=fields)
        windows = [training.window()[0::2] for _ in range(3)]
        values = training.values()
        found.append([windows, values["model"], values["ema"]])
        if layout == "fsdp":
            assert all(p.dtype is torch.float32 for p in training.net.parameters())  # masters, or they read as such
    return found


def test_sharded_masters_of_16_bit_weights_take_the_steps_of_replicas_bit_for_bit(on_ranks: OnRanks) -> None:
    both = [on_ranks(with_masters, layout)[0] for layout in ("ddp", "fsdp")]
    for ours, theirs in zip(*both, strict=True):
        assert ours[0] == theirs[0] and same(ours[1], theirs[1]) and same(ours[2], theirs[2])


def given_gradients(rank: int, layout: str, blind: bool) -> list[Any]:
    """Two steps by the same gradients in any layout. `blind`: the noise does not know where a shard lies."""
    if blind:
        low_shards.slice_of = lambda param: Slice(param, 0, len(param))
    found = []
    for mode, fields in HELD[2:]:
        amp, net = Amp.named(mode, **fields), nn.Sequential(nn.Linear(7, 31), nn.Linear(31, 3))
        for p in net.parameters():
            nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
        amp.prepare(net, gathers=layout == "fsdp")
        net = lay_out(net, layout, amp)
        # Exact products: kernels fuse them with the sum in vectors alone, whose last one ends elsewhere in a shard.
        optimizer = SGD(master_params(net), lr=0.125, fused=True)
        for _ in range(2):
            for number, p in enumerate(optimizer.param_groups[0]["params"]):
                full = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
                p.grad = dtensor_like(full, p) if layout == "fsdp" else full
            amp.step(optimizer)
            amp.update()
        held = [shard for p in net.parameters() if (shard := low_shards.shard_of(p)) is not None]
        if layout == "fsdp" and fields["update"] != "master":
            assert len(held) == 4 and held[2].numel() == (0 if rank == 3 else 31)
            stored = [t for shard in held for t in (shard.low, shard.rest) if t is not None]
            assert sum(t.nbytes for t in stored) == sum(s.numel() for s in held) * BYTES[fields["update"]]
        found.append(gather_full_state(net.state_dict()))
    return found


BYTES = {"stochastic": 2, "remainder": 4, "nearest": 2}


def test_uneven_and_empty_shards_hold_16_bits_and_have_the_bits_of_one_process(on_ranks: OnRanks) -> None:
    """Of 31 rows 4 ranks have 8, 8, 8 and 7, of 3 rows the last has none. Noise that is not of the place in the whole
    weight rounds otherwise."""
    (single,) = on_ranks(given_gradients, "single", False, num_ranks=1)
    ours = on_ranks(given_gradients, "fsdp", False, num_ranks=4)
    assert all(same(each, single) for each in ours)
    blind = on_ranks(given_gradients, "fsdp", True, num_ranks=4)[0]
    assert [same(a, b) for a, b in zip(blind, single, strict=True)] == [True, False, True, True]


def gathered(rank: int, gather: torch.dtype | None) -> list[Any]:
    """The weights of layers of fp8 as the first forward pass has them, and the losses of three windows."""
    training = Training("fsdp", "fp8", gather=gather)
    seen: dict[str, Tensor] = {}

    def look(name: str, module: nn.Module, inputs: Any) -> None:
        seen.setdefault(name, getattr(module, "weight").detach().clone())  # noqa: B009

    for name, module in training.net.named_modules():
        if isinstance(module, LowLinear):
            module.register_forward_pre_hook(functools.partial(look, name))
    windows = [training.window()[0] for _ in range(3)]
    return [seen, windows, training.values()["model"]]


def test_gathers_in_16_and_8_bits_have_the_errors_that_are_stated(on_ranks: OnRanks) -> None:
    """bf16: half of the last of 8 digits, 2^-8. E4M3: none in the codes, for they are those of the whole weight."""
    how = Scaling(E4M3, (None, None))
    full, half, byte = (on_ranks(gathered, dtype)[0] for dtype in (None, torch.bfloat16, torch.float8_e4m3fn))
    assert len(full[0]) == 8
    for name, weight in full[0].items():
        assert torch.equal(half[0][name], weight.bfloat16())
        error = (half[0][name].float() - weight).abs() / weight.abs()
        assert 2**-9 < float(error.max()) <= 2**-8
        exact, sent = quantise(weight, how), quantise(byte[0][name], how)
        assert torch.equal(exact.values.view(torch.uint8), sent.values.view(torch.uint8))
        assert abs(float(sent.scale / exact.scale) - 1) <= 2**-23
        assert not torch.equal(byte[0][name], weight)
    # A scale that is off by its last digit may turn a 16-bit output next to a tie; bf16 also turns codes.
    assert byte[1] == [pytest.approx(loss, rel=2**-10) for loss in full[1]]
    assert not same(half[2], full[2])


def test_aliases_of_the_whole_shard_alone_share_what_is_stepped() -> None:
    shard = low_shards.LowShard.of(torch.randn(4, 3), torch.bfloat16, "remainder")
    found: list[Any] = [shard.view(4, 3), shard[:2], shard.new_zeros(4, 3)]
    shard.high.append(shard.value() + 1)
    assert [len(each.high) for each in found] == [1, 0, 0]
