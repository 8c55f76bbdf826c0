"""16-bit weights in shards: held and gathered in 16 bits, with the bits of replicas and of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from test_fsdp import Training, lay_out, same
from torch import nn
from torch.optim import SGD

from amp_core import Amp
from amp_core.checkpoints.parts import gather_full_state
from amp_core.layouts import low_shards
from amp_core.lowp.weights import master_params
from amp_core.tensors import dtensor_like

OnRanks = Callable[..., list[Any]]

HELD: list[tuple[str, dict[str, Any]]] = [("o2", {}), ("o3", {})]
HELD += [("bf16_pure", {"update": update}) for update in ("master", "stochastic", "kahan", "remainder", "nearest")]


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
        low_shards.first_of = lambda param: 0
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


BYTES = {"stochastic": 2, "kahan": 4, "remainder": 4, "nearest": 2}


def test_uneven_and_empty_shards_hold_16_bits_and_have_the_bits_of_one_process(on_ranks: OnRanks) -> None:
    """Of 31 rows 4 ranks have 8, 8, 8 and 7, of 3 rows the last has none. Noise that is not of the place in the whole
    weight rounds otherwise."""
    (single,) = on_ranks(given_gradients, "single", False, num_ranks=1)
    ours = on_ranks(given_gradients, "fsdp", False, num_ranks=4)
    assert all(same(each, single) for each in ours)
    blind = on_ranks(given_gradients, "fsdp", True, num_ranks=4)[0]
    assert [same(a, b) for a, b in zip(blind, single, strict=True)] == [True, False, True, True, True]
