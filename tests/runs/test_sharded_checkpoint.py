"""Checkpoints in shards: the same promises as in one file, in every layout, on any number of ranks, in both directions."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from damaged import damage
from running import differing
from safetensors.torch import load_file, save_file
from shared import flip, names, script, seal
from test_checkpoint_damage import Evil
from test_fsdp import MODES, Training
from test_recipes import on_two_ranks, run
from tiers import rows
from torch import nn
from torch.optim import AdamW

from amp_core import Checkpoint, Clip
from amp_core.checkpoints import plain_state, sharded, shards
from amp_core.checkpoints.export import export
from amp_core.checkpoints.reading import read
from amp_core.config.errors import CheckpointError, SaveError
from amp_core.heads.partial_fc import PartialFC, RowState
from amp_core.models.gpt import GPT
from amp_core.tensors import local

OnRanks = Callable[..., list[Any]]
LAYOUTS = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4, "fsdp4": 4}
"""Ranks of each; hsdp is two copies of two parts."""
FORMATS = ["single", "sharded"]


def training_in(layout: str, mode: str) -> Training:
    # 31 rows over two and over four ranks: parts of different sizes.
    torch.manual_seed(7)
    net = GPT(vocab_size=31, length=8, width=16, depth=1, heads=2)
    return Training(layout.removesuffix("4"), mode, optimizer=AdamW, clip=Clip.norm(0.5), net=net)


def checkpoint_of(training: Training, folder: str, format: Any, **options: Any) -> Checkpoint:
    return Checkpoint(folder, writer=dist.get_rank() == 0, format=format, **options, **training.parts())


# --- every layout and format to every other one


def saved_in_both(rank: int, layout: str, folder: str) -> None:
    for mode in MODES:
        training = training_in(layout, mode)
        for _ in range(2):
            training.window()
        for format in FORMATS:
            checkpoint_of(training, f"{folder}/{layout}/{mode}/{format}", format).save(2, progress={"samples": 16})


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
        on_ranks(saved_in_both, layout, folder, num_ranks=num_ranks)
        for mode in MODES:
            whole, shards = (read(f"{folder}/{layout}/{mode}/{format}") for format in FORMATS)
            assert not differing(whole, shards)
            orders = ([list(part) for part in each.values() if isinstance(part, dict)] for each in (whole, shards))
            assert next(orders) == next(orders)
            written = sorted(path.name for path in Path(folder, layout, mode, "sharded", "step_00000002").glob("*.s*"))
            kinds = {"fsdp": ["parts"], "hsdp": ["parts"], "fsdp4": ["parts"]}.get(layout, ["whole"])
            assert written == [f"{kind}_{rank:05d}.safetensors" for kind in kinds for rank in range(num_ranks)]
    for layout, num_ranks in LAYOUTS.items():
        for rank in on_ranks(loaded_from_all, layout, folder, num_ranks=num_ranks):
            assert not rank


# --- a head that lies over the ranks


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


# --- ranks agree


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


# --- damage


class Parts:
    """Two networks with their moments, and a part that is no tensor."""

    def __init__(self, value: float = 0.0) -> None:
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        for tensor in self.net.state_dict().values():
            tensor.fill_(value)
        self.net[2].weight = nn.Parameter(torch.full((3, 3), value).bfloat16())
        self.optimizer = AdamW(self.net.parameters())
        for param in self.net.parameters():
            param.grad = torch.full_like(param, value)
        self.optimizer.step()

    def checkpoint(self, folder: Path, **options: Any) -> Checkpoint:
        options = {"format": "sharded"} | options
        return Checkpoint(folder, model=self.net, optimizer=self.optimizer, **options)

    def state(self) -> Any:
        return [self.net.state_dict(), self.optimizer.state_dict()["state"]]


def save_twice(rank: int, folder: str, format: str) -> None:
    """Two steps of replicas; shards are written by both ranks."""
    for step in (1, 2):
        Parts(float(step)).checkpoint(Path(folder), writer=rank == 0, format=format).save(step)


@pytest.mark.parametrize("format", FORMATS)
def test_no_damage_of_any_file_is_accepted_and_the_one_before_is_used(
    format: str, tmp_path: Path, on_ranks: OnRanks
) -> None:
    folder = tmp_path / "checkpoints"
    on_ranks(save_twice, str(folder), format)
    first, newest = (folder / f"step_0000000{step}" for step in (1, 2))
    written = [f"whole_0000{rank}.safetensors" for rank in (0, 1)] if format == "sharded" else []
    assert names(newest) == ["manifest.json", "state.pt", *written]
    sound = shutil.copytree(newest, tmp_path / "sound")
    expected, rng = Parts(1.0).state(), random.Random(0)
    for _ in range(150):
        what = damage(newest, first, rng)
        parts = Parts()
        loaded = parts.checkpoint(folder, writer=False).load()
        assert loaded is not None and loaded.step == 1 and not differing(expected, parts.state()), what
        assert [note.split(":")[0] for note in loaded.notes] == [f"{newest} is damaged and was not used"], what
        with pytest.raises(CheckpointError):
            read(newest)
        shutil.rmtree(newest)
        shutil.copytree(sound, newest)
    parts = Parts()
    assert parts.checkpoint(folder).load().notes == ()  # type: ignore[union-attr]
    assert not differing(Parts(2.0).state(), parts.state())
    for each in (first, newest):
        flip(each / "state.pt")
    with pytest.raises(CheckpointError, match="no checkpoint is sound") as caught:
        parts.checkpoint(folder).load()
    assert caught.value.exit_code == 3


# --- hostile tables and heads


def forged(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The table says something else, and all digests and sizes are right."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    for name, entry in manifest["files"].items():
        path = folder / name
        if path.is_file():
            if path.stat().st_size < 1 << 20:
                entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
            entry["bytes"] = path.stat().st_size
    seal(folder, manifest)


def of(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    """Changes the row of a tensor."""

    def change(manifest: dict[str, Any]) -> None:
        (row,) = [row for row in manifest["tensors"] if row["places"][0][-1] == name]
        row.update(changes)

    return change


def new_head(folder: Path, old: bytes, new: bytes) -> None:
    path = folder / "whole_00000.safetensors"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def paths_of_one_name(count: int) -> list[list[str]]:
    """model.a.a.a..., cut into keys in different places."""
    texts = ("a" + "".join(".|"[bit == "1"] + "a" for bit in f"{n:09b}") for n in range(count))
    return [["model", *text.split("|")] for text in texts]


FILE = "whole_00000.safetensors"
W = "0.weight"
LIES: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "overlap": lambda f, m: of(W, pieces=[[0, 2, FILE], [1, 3, FILE]])(m),
    "gap": lambda f, m: of(W, pieces=[[0, 1, FILE], [2, 3, FILE]])(m),
    "too few": lambda f, m: of(W, pieces=[])(m),
    "backwards": lambda f, m: of(W, pieces=[[0, 3, FILE], [3, 2, FILE]])(m),
    "negative": lambda f, m: of(W, shape=[-3, -4])(m),
    "more places than there are": lambda f, m: of(W, shape=[1 << 50, 4], pieces=[[0, 1 << 50, FILE]])(m),
    "beyond all numbers": lambda f, m: of(W, shape=[1 << 61, 1 << 61, 0], pieces=[])(m),
    "beyond all numbers beside 0": lambda f, m: of(W, shape=[0, 1 << 61, 1 << 61], pieces=[])(m),
    "too many dimensions": lambda f, m: of(W, shape=[3, 4, *[1] * 99])(m),
    "one name for all": lambda f, m: m["tensors"].extend(
        {**m["tensors"][0], "places": [path], "shape": [0], "pieces": []} for path in paths_of_one_name(200)
    ),
    "other shape of the same size": lambda f, m: of(W, shape=[4, 3], pieces=[[0, 4, FILE]])(m),
    "other dtype of the same size": lambda f, m: of(W, dtype="I32")(m),
    "unknown dtype": lambda f, m: of(W, dtype="object")(m),
    "no dimension": lambda f, m: of(W, shape=[], pieces=[])(m),
    "dimension 7": lambda f, m: of(W, dim=7)(m),
    "true": lambda f, m: of(W, dim=False)(m),
    "another folder": lambda f, m: of(W, pieces=[[0, 3, "../../etc/passwd"]])(m),
    "a file of another folder": lambda f, m: m["files"].update({"../x_00000.safetensors": m["files"][FILE]}),
    "a file that no tensor needs": lambda f, m: (
        (f / "parts_00009.safetensors").write_bytes(b"x"),
        m["files"].update({"parts_00009.safetensors": {"bytes": 1, "sha256": ""}}),
    ),
    "a file without digest": lambda f, m: m["files"].pop(FILE),
    "twice": lambda f, m: m["tensors"].append(m["tensors"][0]),
    "in the place of something": lambda f, m: of(W, places=[["model", "1.running_mean"]])(m),
    "in the place of a key": lambda f, m: of(W, places=[["format"]])(m),
    "nowhere": lambda f, m: of(W, places=[["model", "new"]])(m),
    "in two parts": lambda f, m: of(W, places=[["model", W], ["optimizer", "class"]])(m),
    "no place": lambda f, m: of(W, places=[[]])(m),
    "no table": lambda f, m: m.pop("tensors"),
    "a table of text": lambda f, m: m.update(tensors="[]"),
    "rows of numbers": lambda f, m: m.update(tensors=[1, 2]),
    "head: other name": lambda f, m: new_head(f, b'"model.0.weight"', b'"model.9.weight"'),
    "head: other dtype": lambda f, m: new_head(f, b'"F32"', b'"I32"'),
    "head: other shape": lambda f, m: new_head(f, b'"shape":[3,4]', b'"shape":[4,3]'),
    "head: other place": lambda f, m: new_head(f, b'"data_offsets":[0,', b'"data_offsets":[4,'),
    "head: length": lambda f, m: (f / FILE).write_bytes(b"\xff" * 8 + (f / FILE).read_bytes()[8:]),
}


@pytest.mark.parametrize("case", rows(LIES, every=4))
def test_tables_and_heads_that_lie_are_refused(tmp_path: Path, case: str) -> None:
    """With right digests, as who can write the folder can make them."""
    parts = Parts(1.0)
    folder = parts.checkpoint(tmp_path).save(1)
    forged(folder, lambda manifest: LIES[case](folder, manifest))
    live = Parts()
    before = differing(Parts().state(), live.state())
    with pytest.raises(CheckpointError) as caught:
        live.checkpoint(tmp_path).load()
    assert "damaged" in str(caught.value) or "of another model" in str(caught.value) or "refused" in str(caught.value)
    assert differing(Parts().state(), live.state()) == before == []
    if case not in ("other shape of the same size", "other dtype of the same size"):  # nobody knows better there
        with pytest.raises(CheckpointError):
            read(folder)


def test_the_untouched_forgery_is_accepted(tmp_path: Path) -> None:
    """So that the ones above are refused for what was changed."""
    folder = Parts(1.0).checkpoint(tmp_path).save(1)
    forged(folder, lambda manifest: None)
    live = Parts()
    assert live.checkpoint(tmp_path).load() is not None
    assert not differing(Parts(1.0).state(), live.state())


def test_a_giant_tensor_is_refused_by_its_shape_before_a_byte_is_read(tmp_path: Path) -> None:
    folder = Parts(1.0).checkpoint(tmp_path).save(1)
    rows = 1 << 34

    def grow(manifest: dict[str, Any], *place: Any) -> None:
        manifest["tensors"][0].update(places=[list(place)], shape=[rows, 4], pieces=[[0, rows, FILE]])
        table = shards.decode(manifest["tensors"])
        head = shards.head_of(shards.by_file(table)[FILE])
        (folder / FILE).write_bytes(head)
        os.truncate(folder / FILE, shards.size_of(shards.by_file(table)[FILE]))  # 256 GiB without a block on the disk

    try:
        forged(folder, lambda manifest: grow(manifest, "model", W))
    except OSError:
        pytest.skip("this file system has no files of 256 GiB")
    live = Parts()
    with pytest.raises(CheckpointError, match=r"bytes, more than the \d+ that can be read"):
        read(folder)
    with pytest.raises(CheckpointError, match=r"0.weight is \(17179869184, 4\) there and \(3, 4\) here"):
        live.checkpoint(tmp_path).load()
    state = torch.load(folder / "state.pt", weights_only=True)
    state["model"][W], state["optimizer"]["state"][0]["other"] = torch.zeros(3, 4), None
    torch.save(state, folder / "state.pt")
    forged(folder, lambda manifest: grow(manifest, "optimizer", "state", 0, "other"))
    with pytest.raises(CheckpointError, match=r"state.0.other is \(17179869184, 4\) there and \(3, 4\) here"):
        live.checkpoint(tmp_path).load()


def test_code_in_the_state_of_a_sharded_checkpoint_is_not_executed(tmp_path: Path) -> None:
    folder = Parts(1.0).checkpoint(tmp_path / "c").save(1)
    contents = torch.load(folder / "state.pt", weights_only=True)
    contents["model"]["0.weight"] = Evil(tmp_path / "executed")
    torch.save(contents, folder / "state.pt")
    forged(folder, lambda manifest: None)
    for call in (lambda: Parts().checkpoint(tmp_path / "c").load(), lambda: read(folder)):
        with pytest.raises(CheckpointError, match="refused"):
            call()
    assert not (tmp_path / "executed").exists()


def test_one_file_of_shards_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    folder = Parts(1.0).checkpoint(tmp_path / "c").save(1)
    alone = shutil.copy(folder / "state.pt", tmp_path / "alone.pt")
    with pytest.raises(CheckpointError, match="one file of a sharded checkpoint"):
        read(alone)
    assert not differing(read(folder / "state.pt"), read(folder))


# --- what is in the files


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


# --- in the background


class Held:
    """Holds the writing of a save until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        serialise = plain_state.serialise

        def held(contents: dict[str, Any]) -> memoryview:
            self.began.set()
            assert self.go.wait(30)
            return serialise(contents)

        monkeypatch.setattr(plain_state, "serialise", held)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_copied", [True, False], ids=["copied", "not copied"])
def test_what_is_saved_is_what_was_there_when_save_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, is_copied: bool
) -> None:
    held, parts = Held(monkeypatch), Parts(1.0)
    if not is_copied:
        monkeypatch.setattr(plain_state.Copies, "copy", lambda self, tensor: tensor)
    if format == "sharded":  # its weights are written before its state
        write_shards = sharded._write_shards
        monkeypatch.setattr(
            sharded, "_write_shards", lambda *args: (held.began.set(), held.go.wait(30), write_shards(*args))[-1]
        )
    checkpoint = parts.checkpoint(tmp_path, format=format, background=True)
    for step in (1, 2):  # the second one in the buffers of the first
        held.go.clear(), held.began.clear()
        checkpoint.save(step)
        expected = copy.deepcopy(parts.state())
        assert held.began.wait(30)
        for param in parts.net.parameters():
            param.data.add_(1.0)
        parts.optimizer.step()
        held.go.set()
        checkpoint.wait()
        live = Parts()
        assert live.checkpoint(tmp_path).load().step == step  # type: ignore[union-attr]
        assert bool(differing(expected, live.state())) != is_copied


@pytest.mark.parametrize("format", FORMATS)
def test_a_save_counts_when_it_is_on_disk_and_the_next_one_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    held, parts = Held(monkeypatch), Parts(1.0)
    caplog.set_level("INFO", "amp_recipes")
    checkpoint = parts.checkpoint(tmp_path, format=format, background=True, keep=1)
    held.go.set()
    checkpoint.save(1)
    checkpoint.wait()
    held.go.clear()
    checkpoint.save(2)
    assert held.began.wait(30)
    assert [name for name in names(tmp_path) if not name.startswith(".tmp")] == ["step_00000001"]
    assert caplog.messages == ["the checkpoint of step 1 is on disk"]
    threading.Timer(0.05, held.go.set).start()
    checkpoint.save(3)
    assert (tmp_path / "step_00000002").exists()
    assert checkpoint.load().step == 3  # type: ignore[union-attr] - it waits, too
    assert names(tmp_path) == ["step_00000003"]
    assert checkpoint.newest_before(9) == (3, tmp_path / "step_00000003")
    buffers = [tensor.data_ptr() for tensor in checkpoint._copies._buffers]  # type: ignore[union-attr]
    checkpoint.save(4)
    checkpoint.wait()
    assert buffers == [tensor.data_ptr() for tensor in checkpoint._copies._buffers]  # type: ignore[union-attr]


@pytest.mark.parametrize("format", FORMATS)
def test_a_save_that_fails_in_the_background_is_an_error_of_the_next_call_once(tmp_path: Path, format: str) -> None:
    folder = tmp_path / "c"
    checkpoint = Parts(1.0).checkpoint(folder, format=format, background=True)
    for act in (checkpoint.wait, lambda: checkpoint.save(2)):
        folder.touch()
        checkpoint.save(1)
        with pytest.raises(SaveError, match=r"cannot save .*c/step_00000001: .*Earlier checkpoints are intact"):
            act()
        checkpoint.wait()
        folder.unlink()
    checkpoint.save(3)
    checkpoint.wait()
    assert names(folder) == ["step_00000003"]
    with pytest.raises(ValueError, match=r"config.here is a type"):
        checkpoint.save(4, config={"here": int})


def train_in_background(rank: int, folder: str) -> list[Any]:
    """Saves in a thread between the collectives of training; the same without a thread."""
    found = []
    for background in (True, False):
        training = training_in("fsdp", "bf16")
        checkpoint = checkpoint_of(training, f"{folder}/{background}", "sharded", background=background, keep=9)
        windows = []
        for step in range(1, 7):
            windows.append(training.window())
            checkpoint.save(step)
        checkpoint.wait()
        found.append([windows, training.values()])
    return found


def test_saving_in_the_background_changes_no_number(tmp_path: Path, on_ranks: OnRanks) -> None:
    for with_thread, without in on_ranks(train_in_background, str(tmp_path / "c")):
        assert not differing(with_thread, without)
    for step in range(1, 7):
        a, b = (read(tmp_path / "c" / way / f"step_0000000{step}") for way in ("True", "False"))
        assert not differing(a, b)


# --- whole runs


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


# --- export


def test_export_writes_what_the_checkpoint_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = Parts(3.0)
    for format in FORMATS:
        folder = tmp_path / format / "checkpoints"
        source = parts.checkpoint(folder, format=format).save(7, progress={"samples": 5}, config={"a": 1})
        target = tmp_path / format
        export(target, target / "all.pt")
        export(source, target / "model.pt", "model")
        export(folder, target / "model.safetensors", "model")
        live = Parts()
        assert Checkpoint(tmp_path / "n", model=live.net, optimizer=live.optimizer).load(target / "all.pt").step == 7  # type: ignore[union-attr]
        assert not differing(parts.state(), live.state())
        assert not differing(read(source), read(target / "all.pt"))
        for state in (torch.load(target / "model.pt", weights_only=True), load_file(target / "model.safetensors")):
            assert not differing(dict(parts.net.state_dict()), {name: state[name] for name in parts.net.state_dict()})
        assert names(target) == ["all.pt", "checkpoints", "model.pt", "model.safetensors"]


def cut_by_columns(folder: Path) -> None:
    """A matrix whose pieces are columns, and lie in two files."""
    weight = torch.arange(12.0).view(3, 4)
    halves = [weight[:, :1], weight[:, 1:]]
    places = (("model", "w"),)
    rows = [shards.Shard(0, 1, "parts_00000.safetensors"), shards.Shard(1, 4, "parts_00001.safetensors")]
    entry = shards.Entry(places, torch.float32, (3, 4), 1, tuple(rows))
    state = {"model": {"w": None}, "scaler": {}, "progress": {"step": 1}, "config": {}, "format": 1, "sharded": 1}
    folder.mkdir(parents=True)
    torch.save(state, folder / "state.pt")
    for piece, half in zip(rows, halves, strict=True):
        (folder / piece.file).write_bytes(shards.head_of([(entry, piece)]) + shards.buffer_of(half))
    files: dict[str, Any] = {name: {} for name in names(folder)}
    manifest = {"format": 1, "step": 1, "metrics": {}, "files": files, "tensors": shards.encode([entry])}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    forged(folder, lambda manifest: None)


def test_pieces_along_another_dimension_are_put_together(tmp_path: Path) -> None:
    folder = tmp_path / "c" / "step_00000001"
    cut_by_columns(folder)
    weight = torch.arange(12.0).view(3, 4)
    assert torch.equal(read(folder)["model"]["w"], weight)
    export(folder, tmp_path / "w.safetensors", "model")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], weight)
    table = shards.decode(json.loads((folder / "manifest.json").read_text())["tensors"])
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    for span in [(0, 0, 1), (0, 1, 3), (1, 0, 2), (1, 1, 4), (1, 2, 3), (0, 2, 2)]:
        dim, start, stop = span
        found = shards.read(folder, table, digests, lambda entry, span=span: (span, False))[0]
        assert torch.equal(found, weight.narrow(dim, start, stop - start)), span


def test_export_refuses_in_the_way_of_the_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = script("scripts/export.py").main
    folder = tmp_path / "c"
    newest = Parts(1.0).checkpoint(folder).save(1)
    (tmp_path / "there.pt").touch()
    nothing = tmp_path / "nothing"
    wrong = {
        (folder, tmp_path / "x.bin"): (2, "expected a name that ends in .pt or .safetensors"),
        (folder, tmp_path / "x.safetensors"): (2, "use --part model or ema"),
        (folder, tmp_path / "there.pt"): (2, "is there already"),
        (nothing, tmp_path / "x.pt"): (2, "there is no such file or folder"),
        (tmp_path, tmp_path / "x.pt"): (3, "holds neither a run nor a checkpoint"),
        (folder, tmp_path / "x.pt", "--part", "ema"): (3, "has no ema; it has scaler, model, optimizer"),
        (folder, tmp_path / "x.safetensors", "--part", "optimizer"): (3, "holds more than tensors"),
        (folder, nothing / "x.pt"): (4, "cannot save"),
        (folder, nothing / "x.safetensors", "--part", "model"): (4, "cannot save"),
    }
    for arguments, (code, message) in wrong.items():
        assert main([str(argument) for argument in arguments]) == code, arguments
        text = capsys.readouterr().err
        assert message in text and text.startswith("error: ") and "Traceback" not in text
    second = Parts(2.0).checkpoint(folder).save(2)
    flip(second / FILE)
    assert main([str(folder), str(tmp_path / "one.safetensors"), "--part", "model"]) == 0
    text = capsys.readouterr().out
    assert "step_00000002 is damaged and was not used" in text and "model of step 1" in text
    assert load_file(tmp_path / "one.safetensors")["0.weight"][0, 0].round() == 1.0
    flip(newest / FILE)
    assert main([str(folder), str(tmp_path / "two.safetensors"), "--part", "model"]) == 3
    assert names(tmp_path) == ["c", "one.safetensors", "there.pt"]
