"""An optimizer whose state lies in slices over ranks is the same optimizer: same bits, same skips, same checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from running import same_but
from sharded_training import CPU, Training, same
from tiers import rows
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from amp_core import Amp, Checkpoint, Clip
from amp_core.layouts.ddp import wrap_ddp
from amp_core.layouts.zero import _ALIGN, _Cut, share_state, whole_state
from amp_core.lowp.masters import master_params

OnRanks = Callable[..., list[Any]]
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": functools.partial(SGD, momentum=0.9, fused=False),
    "sgd_fused": functools.partial(SGD, momentum=0.9, fused=True),
    "adamw": functools.partial(AdamW, fused=False),
    "adamw_fused": functools.partial(AdamW, fused=True),
}


def training(layout: str, mode: str = "fp32", kind: str = "adamw_fused", **options: Any) -> Training:
    """`zero` is ddp with the optimizer's state in slices."""
    make = OPTIMIZERS[kind]
    options = {"optimizer": lambda params, lr, **_: make(params, lr=lr), "clip": Clip.norm(0.5), **options}
    made = Training("ddp" if layout == "zero" else layout, mode, **options)
    if layout == "zero":
        share_state(made.net)
    return made


def held(optimizer: Optimizer) -> int:
    """Bytes of state on this rank, counts of steps left out."""
    return sum(v.nbytes for entry in optimizer.state.values() for v in entry.values() if v.ndim)


def values(t: Training) -> list[Any]:
    model = {name.removeprefix("module."): value.clone() for name, value in t.net.state_dict().items()}
    return [model, dict(t.ema.state_dict()), whole_state(t.optimizer)["state"]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [[1000], [64, 64, 64], [5, 3000, 1, 700], [1, 2, 3]])
def test_slices_cover_all_weights_and_a_rank_ends_at_its_share(sizes: list[int], num_ranks: int) -> None:
    """Up to the alignment, by which the last slice of a rank may exceed its share."""
    cut, done = _Cut([torch.zeros(size) for size in sizes], num_ranks, between=False), 0
    covered = dict.fromkeys(range(len(sizes)), 0)
    for rank, slices in enumerate(cut.slices):
        for piece in slices:
            assert covered[piece.number] == piece.start < piece.end
            covered[piece.number] = piece.end
            done += piece.end - piece.start
        assert 0 <= done - sum(sizes) * (rank + 1) // num_ranks < _ALIGN
    assert list(covered.values()) == sizes


def trained(rank: int) -> list[list[Any]]:
    """The same in replicas and in slices."""
    found = []
    for mode, kind in [("fp32", kind) for kind in OPTIMIZERS] + [("bf16", "adamw_fused"), ("fp16", "sgd_fused")]:
        pair = []
        for layout in ("ddp", "zero"):
            t = training(layout, mode, kind)

            def spoil(t: Training = t) -> None:
                if rank == 1:
                    next(t.net.parameters()).grad[0] = torch.nan  # type: ignore[index]

            windows = [list(t.window(spoil if i == 1 else None)) for i in range(3)]
            del windows[1][1]  # the norm on this rank, of a gradient that is its own
            pair.append([windows, *values(t), held(t.optimizer)])
        found.append(pair)
    return found


def test_slices_change_no_bit_and_a_rank_holds_its_share(on_ranks: OnRanks) -> None:
    """The second step is skipped by both ranks, because of a gradient that only one has."""
    for a, b in zip(*on_ranks(trained), strict=True):
        (plain, sliced), (_, of_the_other) = a, b
        assert [window[-1] for window in plain[0]] == [True, False, True]
        assert same(plain[:-1], sliced[:-1]) and same(plain[:-1], of_the_other[:-1])
        assert sliced[-1] == pytest.approx(plain[-1] / 2, rel=0.01)
        assert sliced[-1] + of_the_other[-1] == plain[-1]


# --- other weights, other optimizers

CASES: dict[str, tuple[str, Callable[..., Optimizer]]] = {
    "o2": ("o2", functools.partial(AdamW, lr=0.1, fused=True)),
    "bf16_pure": ("bf16_pure", functools.partial(AdamW, lr=0.1, fused=True)),
    "fp8": ("fp8", functools.partial(SGD, lr=0.1, momentum=0.9, fused=True)),
    "whole matrices": ("fp32", Adafactor),
    "two groups": ("bf16", lambda params: AdamW([{"params": params[:2], "lr": 0.2}, {"params": params[2:]}])),
}
"""In `two groups`, of two optimizers that are stepped together, one owns weights that only this rank has."""


def by_case(rank: int) -> list[dict[str, Any]]:
    return [in_case(rank, shares=False), in_case(rank, shares=True)]


def in_case(rank: int, *, shares: bool) -> dict[str, Any]:
    found = {}
    for case, (mode, make) in CASES.items():
        amp = Amp.named(mode, **({"init_scale": 1024.0} if mode == "o2" else {}))  # type: ignore[arg-type]
        torch.manual_seed(3)
        # Half of all elements lie in the first weight: it is cut, across its channels.
        convs = nn.Sequential(nn.Conv2d(4, 40, 3), nn.BatchNorm2d(40)).to(memory_format=torch.channels_last)
        net = nn.Sequential(convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 16), nn.Linear(16, 8))
        amp.prepare(net)
        plain, own = net, torch.zeros(8, requires_grad=True)
        net = net if amp.weights else wrap_ddp(net, CPU)
        if shares:
            share_state(net)
        amp.guard(net)
        optimizers = [make(master_params(net)), SGD([own], lr=1.0, momentum=0.5)]
        for i in range(3):
            torch.manual_seed(2 * i + rank)
            x = torch.full((4, 4, 6, 6), torch.inf) if (i, rank) == (1, 1) else torch.randn(4, 4, 6, 6)
            with amp.autocast():
                loss = (net(x) + own).float().square().mean() / 2
            amp.backward(loss)
            taken = bool(amp.step(optimizers, Clip.norm(0.1), sharded=optimizers[1:]).taken)
            assert taken == (i != 1)
            amp.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
        found[case] = [plain.state_dict(), *(whole_state(each)["state"] for each in optimizers)]
        found[f"bytes of {case}"] = held(optimizers[0])
    return found


@pytest.mark.slow
def test_16bit_weights_channels_last_whole_matrices_and_weights_of_one_rank(on_ranks: OnRanks) -> None:
    plain, shared = zip(*on_ranks(by_case), strict=True)
    for case in CASES:
        assert [same(a[case], b[case]) for a, b in zip(plain, shared, strict=True)] == [True, True], case
        whole = plain[0][f"bytes of {case}"]
        assert sum(each[f"bytes of {case}"] for each in shared) == whole, case
        assert max(each[f"bytes of {case}"] for each in shared) < 0.7 * whole or case == "whole matrices", case
    # What a rank has alone it steps alone.
    assert not same(shared[0]["two groups"][2], shared[1]["two groups"][2])


# --- checkpoints


KINDS = ("sgd", "adamw_fused")


def written(rank: int, folder: str, kind: str) -> list[Any]:
    """Two steps, a checkpoint and a step more in slices; what follows from it in slices and replicas, and vice versa."""
    for layout in ("zero", "ddp"):
        t = training(layout, "fp16", kind)
        t.window()
        t.window()
        checkpoint = Checkpoint(f"{folder}/{layout}/{kind}", writer=rank == 0, **t.parts())
        checkpoint.save(2)
        if layout == "zero":
            shards = {"format": "sharded", "group": dist.group.WORLD}
            Checkpoint(f"{folder}/shards/{kind}", writer=rank == 0, **shards, **t.parts()).save(2)
        snapshot = checkpoint.snapshot()
        following = [t.window(), values(t)]
        checkpoint.restore(snapshot)
        t.step, t.ema.num_taken[...] = 2, 2
        assert same(following, [t.window(), values(t)])
    dist.barrier()
    for layout, source in (("zero", "zero"), ("ddp", "zero"), ("zero", "ddp"), ("zero", "shards"), ("ddp", "shards")):
        assert same(following, go_on(layout, source, kind, folder)), (layout, source)
    return following[0]


def go_on(layout: str, source: str, kind: str, folder: str) -> list[Any]:
    t = training(layout, "fp16", kind)
    for param in t.net.parameters():
        param.detach().zero_()
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    assert Checkpoint(f"{folder}/{source}/{kind}", writer=False, group=group, **t.parts()).load() is not None
    t.step, t.ema.num_taken[...] = 2, 2
    return [t.window(), values(t)]


def elsewhere(rank: int, layout: str, kind: str, folder: str) -> list[Any]:
    return go_on(layout, "zero", kind, folder)[0]


@pytest.mark.parametrize("kind", rows(KINDS, "adamw_fused"))
def test_a_checkpoint_is_whole(kind: str, tmp_path: Path, on_ranks: OnRanks) -> None:
    on_ranks(written, str(tmp_path), kind)
    states = (tmp_path / layout / kind / "step_00000002/state.pt" for layout in ("ddp", "zero"))
    assert not same_but(*(torch.load(state, weights_only=True) for state in states))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_on_alone_and_in_four_slices(kind: str, tmp_path: Path, on_ranks: OnRanks) -> None:
    expected = on_ranks(written, str(tmp_path), kind)[0]
    for layout, num_ranks in (("single", 1), ("zero", 4)):
        for found in on_ranks(elsewhere, layout, kind, str(tmp_path), num_ranks=num_ranks):
            assert found == pytest.approx(expected, rel=3e-3)
