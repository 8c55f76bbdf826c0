"""Checkpoints in shards: the same promises as in one file, in every layout, on any number of ranks, in both directions."""

from __future__ import annotations

import contextlib
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from checkpointing import FILE, FORMATS, Parts
from running import differing
from safetensors.torch import load_file, save_file
from sharded_training import MODES, Training
from shared import flip, names
from test_recipes import on_two_ranks, run
from tiers import rows
from torch import nn
from torch.optim import AdamW

from amp_core import Checkpoint, Clip
from amp_core.checkpoints import shards
from amp_core.checkpoints.reading import read
from amp_core.config.errors import CheckpointError, SaveError
from amp_core.heads.partial_fc import PartialFC, RowState
from amp_core.models.gpt import GPT
from amp_core.tensors import local

OnRanks = Callable[..., list[Any]]


LAYOUTS = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4, "fsdp4": 4}
"""Ranks of each; hsdp is two copies of two parts."""


def training_in(layout: str, mode: str) -> Training:
    # 31 rows over two and over four ranks: parts of different sizes.
    torch.manual_seed(7)
    net = GPT(vocab_size=31, length=8, width=16, depth=1, heads=2)
    return Training(layout.removesuffix("4"), mode, optimizer=AdamW, clip=Clip.norm(0.5), net=net)


def checkpoint_of(training: Training, folder: str, format: Any, **options: Any) -> Checkpoint:
    return Checkpoint(folder, writer=dist.get_rank() == 0, format=format, **options, **training.parts())


def saved_in_both(rank: int, layout: str, folder: str) -> None:
    for mode in MODES:
        training = training_in(layout, mode)
        for _ in range(2):
            training.window()
        for format in FORMATS:
            checkpoint = checkpoint_of(training, f"{folder}/{layout}/{mode}/{format}", format)
            checkpoint.save(2, progress={"samples": 16})
        snapshot = checkpoint.snapshot()
        once = training.window(), training.loss_of_average(), training.values()
        checkpoint.restore(snapshot)
        training.step, training.ema.num_taken[...] = 2, 2
        assert not differing(once, (training.window(), training.loss_of_average(), training.values()))


def loaded_from_all(rank: int, layout: str, folder: str) -> list[str]:
    """Where what was loaded differs in a bit from what was saved."""
    found = []
    for i, mode in enumerate(MODES):
        training = training_in(layout, mode)
        # A third of the others, and each in all modes over all layouts.
        for source in [one for j, one in enumerate(LAYOUTS) if (i + j + list(LAYOUTS).index(layout)) % 3 == 0]:
            expected = read(f"{folder}/{source}/{mode}/single/step_00000002")
            for format in FORMATS if mode == "bf16" else FORMATS[1:]:
                for param in training.net.parameters():
                    local([param.detach()])[0].zero_()
                training.optimizer.state.clear()
                training.schedule.num_taken.zero_()
                checkpoint = checkpoint_of(training, f"{folder}/{source}/{mode}/{format}", FORMATS[0])
                loaded = checkpoint.load()
                assert loaded is not None and loaded.step == 2 and loaded.notes == ()
                values = training.values()
                moments = {
                    f"{number}.{key}": value
                    for number, entry in expected["optimizer"]["state"].items()
                    for key, value in entry.items()
                }
                wanted = {"model": expected["model"], "ema": expected["ema"], "moments": moments}
                where = f"{source} ({format}) to {layout} in {mode}"
                found += [f"{where}: {name}" for name in differing(wanted, values)]
                others = training.schedule.state_dict(), training.amp.state_dict()
                found += [f"{where}: {x}" for x in differing((expected["schedule"], expected["scaler"]), others)]
    return found


@pytest.mark.slow
def test_every_layout_loads_every_other_one_from_shards_bit_by_bit(tmp_path: Path, on_ranks: OnRanks) -> None:
    folder = str(tmp_path / "checkpoints")
    for layout, num_ranks in LAYOUTS.items():
        on_ranks(saved_in_both, layout, folder, num_ranks=num_ranks, seconds=120)
        for mode in MODES:
            whole, shards = (read(f"{folder}/{layout}/{mode}/{format}") for format in FORMATS)
            assert not differing(whole, shards)
            for part in ("model", "ema"):  # plain tensors with plain names: a network takes them without this project
                GPT(vocab_size=31, length=8, width=16, depth=1, heads=2).load_state_dict(whole[part])
            orders = ([list(part) for part in each.values() if isinstance(part, dict)] for each in (whole, shards))
            assert next(orders) == next(orders)
            written = sorted(path.name for path in Path(folder, layout, mode, "sharded", "step_00000002").glob("*.s*"))
            kinds = {"fsdp": ["parts"], "hsdp": ["parts"], "fsdp4": ["parts"]}.get(layout, ["whole"])
            assert written == [f"{kind}_{rank:05d}.safetensors" for kind in kinds for rank in range(num_ranks)]
    for layout, num_ranks in LAYOUTS.items():
        for rank in on_ranks(loaded_from_all, layout, folder, num_ranks=num_ranks):
            assert not rank


def head_and_state(num_steps: int) -> tuple[PartialFC, RowState]:
    head = PartialFC(7, 4, sample_rate=0.5, seed=len(dist.get_process_group_ranks(None)))
    optimizer = torch.optim.SGD([head.active], lr=0.1, momentum=0.9)
    state = head.carry(optimizer)
    for step in range(num_steps):
        torch.manual_seed(step)
        features, labels = torch.randn(2, 4), torch.randint(7, (2,))
        head.sample(labels)
        head(features, labels, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        head.write_back()
    return head, state


def save_head(rank: int, folder: str) -> None:
    head, state = head_and_state(5)
    for format in FORMATS:
        Checkpoint(f"{folder}/{format}", writer=rank == 0, format=format, head=head, rows=state).save(1)


def load_head(rank: int, folder: str) -> list[Any]:
    found = []
    for format in FORMATS:
        head, state = head_and_state(1)
        assert Checkpoint(f"{folder}/{format}", writer=rank == 0, head=head, rows=state).load() is not None
        found.append([head.state_dict(), state.state_dict()])
    return found


@pytest.mark.parametrize("num_ranks", rows([1, 3], 3))
def test_a_head_in_slices_moves_to_other_numbers_of_ranks(num_ranks: int, tmp_path: Path, on_ranks: OnRanks) -> None:
    folder = str(tmp_path / "checkpoints")
    on_ranks(save_head, folder)
    whole, shards = (read(f"{folder}/{format}") for format in FORMATS)
    assert not differing(whole, shards)
    assert whole["head"]["weight"].shape == whole["rows"]["rows"]["momentum_buffer"].shape == (7, 4)
    assert len(list(Path(folder, "sharded", "step_00000001").glob("parts_*"))) == 2
    for head, sampled in on_ranks(load_head, folder, num_ranks=num_ranks)[0]:
        assert not differing([whole["head"], whole["rows"]], [head, sampled])


def agree(rank: int, folder: str) -> list[Any]:
    training = training_in("fsdp", "fp32")
    checkpoint = checkpoint_of(training, folder, "sharded", keep=3)
    path = {}
    for step in (1, 2, 3):
        training.window()
        path[step] = checkpoint.save(step)
    dist.barrier()
    if rank == 1:  # one rank is told of the damage of the last, the other one of that before
        flip(path[3] / "parts_00001.safetensors")
        flip(path[2] / "parts_00000.safetensors")
    dist.barrier()
    loaded = checkpoint.load()
    assert loaded is not None
    # A limit that only one rank has: its files are cut short, and both must say so.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    problems = []
    for background in (False, True):
        checkpoint = checkpoint_of(training, folder, "sharded", keep=3, background=background)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            checkpoint.save(4)
            checkpoint.wait()
        except SaveError as problem:
            problems.append(str(problem))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()
        problems.append(names(Path(folder)))
        checkpoint.save(5 + background)
        checkpoint.wait()
    again = checkpoint.load()
    assert again is not None
    dist.barrier()
    # A part that only one rank cannot save.
    checkpoint = checkpoint_of(training, folder, "sharded", keep=3)
    with pytest.raises(ValueError, match=r"config.here is a type"):
        checkpoint.save(9, config={"here": int if rank == 0 else 0})
    # A path that leads to another folder on each rank: all find a sound checkpoint, of other weights.
    Path(f"{folder}{rank}").mkdir()
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, rank)
    with contextlib.chdir(f"{folder}{rank}"):
        Checkpoint("here", model=net).save(1)
        assert Checkpoint("here", model=net).load("here") is not None
        with pytest.raises(CheckpointError, match=r"the ranks read different ones: .*; do all see the same folder\?"):
            Checkpoint("here", model=net, group=dist.group.WORLD).load("here")
    return [loaded.step, loaded.notes, problems, again.step, checkpoint.newest_before(7)[0]]  # type: ignore[index]


def test_what_one_rank_cannot_read_or_write_counts_for_all(tmp_path: Path, on_ranks: OnRanks) -> None:
    folder = tmp_path / "checkpoints"
    for step, notes, problems, again, newest in on_ranks(agree, str(folder)):
        assert step == 1
        assert "step_00000003 is damaged" in notes[0] and "parts_00001.safetensors does not have" in notes[0]
        assert "step_00000002 is damaged" in notes[1] and "parts_00000.safetensors does not have" in notes[1]
        for problem in problems[::2]:
            assert "step_00000004: File too large" in problem and "Earlier checkpoints are intact" in problem
        assert problems[1] == [f"step_0000000{i}" for i in (1, 2, 3)]
        assert not any("step_00000004" in name for name in problems[3])
        assert (again, newest) == (6, 6)


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    dtypes = [dtype for dtype in shards.NAMES if dtype is not torch.bool]
    values = {f"in {str(dtype)[6:]}": torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    values["mask"] = torch.tensor([True, False, True])
    net = nn.ParameterDict({name: nn.Parameter(value, requires_grad=False) for name, value in values.items()})
    folder = Checkpoint(tmp_path, format="sharded", model=net).save(1)
    found = load_file(folder / "whole_00000.safetensors")
    assert not differing({f"model.{k}": v.data for k, v in net.items()}, dict(found))
    assert not differing({k: v.data for k, v in net.items()}, read(folder)["model"])
    # The other way round, byte for byte, for a file of the same order.
    save_file({"model.w": torch.ones(3, 2)}, tmp_path / "theirs", metadata={"format": "pt"})
    entry = shards.Entry((("model", "w"),), torch.float32, (3, 2), 0, (shards.Shard(0, 3, "x"),))
    assert (tmp_path / "theirs").read_bytes().startswith(shards.head_of([(entry, entry.shards[0])]))


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    """Tied weights once, buffers and counts in the state, empty and strange tensors too."""
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    net[2].weight = net[0].weight
    net.register_parameter("empty", nn.Parameter(torch.empty(0, 5)))
    net.register_parameter("scalar", nn.Parameter(torch.tensor(2.5)))
    net.register_parameter("complex", nn.Parameter(torch.ones(2, dtype=torch.complex128)))
    net.register_parameter("image", nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)))
    whole = read(Checkpoint(tmp_path / "a", model=net).save(1, progress={"rng": torch.get_rng_state()}))
    folder = Checkpoint(tmp_path / "b", format="sharded", model=net).save(1, progress=whole["progress"])
    shards = read(folder)
    assert not differing(whole, shards)
    assert shards["model"]["0.weight"].data_ptr() == shards["model"]["2.weight"].data_ptr()
    state = torch.load(folder / "state.pt", weights_only=True)
    kept = [name for name, value in state["model"].items() if value is not None]
    assert kept == ["scalar", "complex", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    live = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    live[2].weight = live[0].weight
    for name, value in list(net.named_parameters(recurse=False)):
        live.register_parameter(name, nn.Parameter(torch.zeros_like(value)))
    assert Checkpoint(tmp_path / "b", model=live).load() is not None
    assert not differing(net.state_dict(), live.state_dict())


def test_a_step_of_the_other_format_is_sound_too(tmp_path: Path) -> None:
    first = Parts(1.0).checkpoint(tmp_path, format="single").save(1)
    assert Parts(2.0).checkpoint(tmp_path).save(1) == first
    assert names(first) == ["manifest.json", "state.pt"]
    flip(first / "state.pt")
    Parts(2.0).checkpoint(tmp_path).save(1)
    assert names(first) == ["manifest.json", "state.pt", FILE]
    for step in (2, 3):
        Parts(3.0).checkpoint(tmp_path, format=FORMATS[step % 2]).save(step)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]


def test_a_snapshot_may_be_used_twice(tmp_path: Path) -> None:
    parts = Parts(1.0)
    checkpoint = parts.checkpoint(tmp_path)
    snapshot = checkpoint.snapshot()
    for _ in range(2):
        checkpoint.restore(snapshot)
        assert not differing(Parts(1.0).state(), parts.state())
        parts.optimizer.step()
        assert differing(Parts(1.0).state(), parts.state())


def test_a_run_in_shards_and_in_the_background_is_the_same_run(own_folder: Path) -> None:
    # A large eps: with a small one AdamW turns the rounding of a gradient near 0 into a step of the size of lr.
    settings = ["optimizer.options.eps=1e-2", "amp=fp16", "schedule.horizon=6", "ema.decay=0.9", "save_every=1"]
    settings += ["accumulation=2"]
    both = ["checkpoint=sharded", "checkpoint.background=true"]
    run("language_model", "whole", "steps=4", *settings)
    on_two_ranks("language_model", "shards", "steps=2", "accumulation=1", *settings[:-1], *both, layout="fsdp")
    assert sorted(path.name for path in Path("shards/checkpoints").iterdir()) == ["step_00000001", "step_00000002"]
    log = Path("shards/train.log").read_text()
    assert [f"step {step} is on disk" in log for step in (1, 2)] == [True, True]
    shutil.copytree("shards", "alone")
    run("language_model", "alone", "steps=4", *settings)
    assert names(Path("alone/checkpoints/step_00000004")) == ["manifest.json", "state.pt"]
    whole, alone = (read(name) for name in ("whole", "alone"))
    for part in ("model", "ema"):
        for name, value in whole[part].items():
            torch.testing.assert_close(alone[part][name], value, rtol=3e-3, atol=3e-3)
