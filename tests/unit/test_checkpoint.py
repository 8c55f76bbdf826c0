"""Checkpoints: which parts, which steps, and what the file holds."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import Recorder, bits, forge, must_load, pickled, saved_steps, tiny, whole
from safetensors.torch import load_file
from shared import flip, names
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from amp_core import Ema
from amp_core.checkpoints.checkpoint import Checkpoint
from amp_core.checkpoints.parts import gather_full_state
from amp_core.checkpoints.reading import read
from amp_core.config.errors import CheckpointError
from amp_core.run.teardown import end_process_group


def test_a_file_holds_plain_data_that_plain_pytorch_loads(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters())
    progress = {
        "samples": 2**40,
        "nested": [1, (2.5, None), {"a": True, 3: float("inf")}],
        "rng": torch.get_rng_state(),
    }
    path = Checkpoint(tmp_path, model=net, optimizer=optimizer).save(5, progress=progress, config={"lr": 0.1})
    contents = torch.load(path / "state.pt", weights_only=True)
    assert list(contents) == ["scaler", "model", "optimizer", "progress", "config", "format"]
    assert type(contents["model"]) is dict and contents["scaler"] == {}
    assert type(contents["format"]) is int
    assert bits(contents["progress"]) == bits({**progress, "step": 5})
    other = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    other.load_state_dict(contents["model"])
    torch.optim.AdamW(other.parameters()).load_state_dict(contents["optimizer"])
    assert bits(other.state_dict()) == bits(net.state_dict())


@pytest.mark.parametrize("value, message", [
    (OrderedDict, "config.here is a type"),
    (Path("x"), "config.here is a PosixPath"),
    (random.getstate, "config.here is a"),
    (torch.float16, "config.here is a dtype"),
    ({1, 2}, "config.here is a set"),
    (1 << 2001, "config.here is an integer of 2002 bits"),
    ({(1, 2): 3}, "config.here has a tuple as a key"),
    (torch.eye(2).to_sparse(), "config.here is a Tensor .*sparse"),
    (torch.empty(2, device="meta"), "config.here is a meta"),
])  # fmt: skip
def test_what_a_safe_load_would_refuse_is_not_saved(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path / "c").save(1, config={"here": value})
    assert not (tmp_path / "c").exists()


def test_views_and_shared_tensors_do_not_inflate_the_file_and_memory_format_is_kept(tmp_path: Path) -> None:
    flat = torch.randn(1_000_000)
    tied = nn.ModuleDict({"a": nn.Linear(100, 100, bias=False), "b": nn.Linear(100, 100, bias=False)})
    tied["b"].weight = tied["a"].weight
    views = {"row": flat[:10], "same": flat[:10], "strided": flat[::100_000], "expanded": torch.ones(1).expand(10)}
    views["image"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    path = Checkpoint(tmp_path, model=tied).save(1, progress=views)
    assert (path / "state.pt").stat().st_size < 40_000 + 5_000
    contents = read(path)
    assert bits([contents["progress"][name] for name in views]) == bits(list(views.values()))
    assert contents["model"]["a.weight"].data_ptr() == contents["model"]["b.weight"].data_ptr()
    assert contents["progress"]["row"].data_ptr() == contents["progress"]["same"].data_ptr()
    assert contents["progress"]["image"].is_contiguous(memory_format=torch.channels_last)


def wrapped_nets() -> Iterator[tuple[str, Callable[[nn.Module], nn.Module]]]:
    ddp = nn.parallel.DistributedDataParallel
    yield "ddp", ddp
    yield "data_parallel", nn.DataParallel
    yield "compile", lambda net: torch.compile(net)
    yield "compile(ddp)", lambda net: torch.compile(ddp(net))
    yield "ddp(compile)", lambda net: ddp(torch.compile(net))
    yield "inside", lambda net: nn.ModuleDict({"module": ddp(torch.compile(net)), "b": nn.DataParallel(tiny(2.0))})


# The import of torch's own compiler warns.
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_nets_are_stored_unwrapped_and_load_into_any_wrapping(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for label, wrap in wrapped_nets():
            folder = tmp_path / label
            net = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"module": nn.BatchNorm1d(4)}))
            prefix = "module." if label == "inside" else ""
            expected = {prefix + name: value for name, value in copy.deepcopy(net).state_dict().items()}
            expected |= {"b.weight": torch.full((4, 4), 2.0), "b.bias": torch.full((4,), 2.0)} if prefix else {}
            contents = read(Checkpoint(folder, model=wrap(net)).save(1))
            assert bits(contents["model"]) == bits(expected), label
            fresh = wrap(nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"module": nn.BatchNorm1d(4)})))
            must_load(Checkpoint(folder, model=fresh))
            assert bits(list(fresh.state_dict().values())) == bits(list(expected.values())), label
            if not prefix:
                plain = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"module": nn.BatchNorm1d(4)}))
                must_load(Checkpoint(folder, model=plain))
                assert bits(plain.state_dict()) == bits(expected), label
    finally:
        end_process_group()


class Average(Recorder):
    """Has what an average has."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.model = net

    def reset(self) -> None:
        self.loaded.append(next(self.model.parameters()).mean().item())


ODD = {"value": torch.tensor(3.0, dtype=torch.bfloat16), "table": [1.5, 2.5], "note": "x"}
NOT_USED = "{} of the checkpoint is not used here"
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...], list[Any]]] = {
    "any object is a part": ({"part": Recorder(**ODD), "nothing": None}, {"part": Recorder()}, (), [ODD]),
    "no scale is a fresh one": ({"model": tiny()}, {"model": tiny(), "part": Recorder()}, (), [{}]),
    "an empty scale is a fresh one": (
        {"model": tiny(), "scaler": Recorder()},
        {"model": tiny(), "part": Recorder()},
        (),
        [{}],
    ),
    "an average starts from the loaded weights": (
        {"model": tiny(3.0)},
        {"part": Average(net := tiny()), "model": net},
        ("the checkpoint has no part: it starts from the loaded weights",),
        [3.0],
    ),
    "what is not wanted is ignored": (
        {"model": tiny(), "ema": tiny(), "scaler": Recorder(scale=2.0)},
        {"model": tiny()},
        (NOT_USED.format("scaler"), NOT_USED.format("ema")),
        [],
    ),
}
"""What is saved, what is loaded, the notes, and what the part `part` got; the name of a scale is `scaler`."""


@pytest.mark.parametrize("case", PARTS)
def test_a_part_gets_its_state_or_starts_afresh_and_notes_say_so(tmp_path: Path, case: str) -> None:
    saved, loaded, notes, got = PARTS[case]
    if "scale is" in case:
        loaded = {"scaler" if name == "part" else name: part for name, part in loaded.items()}
    Checkpoint(tmp_path, **saved).save(1)
    assert must_load(Checkpoint(tmp_path, **loaded)).notes == notes
    part = loaded.get("part", loaded.get("scaler", Recorder()))
    assert bits(part.loaded) == bits(got)


def test_a_file_without_a_scale_gives_a_fresh_one_also_to_the_scaler_of_torch(tmp_path: Path) -> None:
    absent = whole(model=tiny().state_dict())
    del absent["scaler"]
    forge(tmp_path / "step_00000001", pickled(absent))
    ours, of_torch = Recorder(), torch.amp.GradScaler("cpu", init_scale=8.0)
    for scaler in (ours, of_torch):
        must_load(Checkpoint(tmp_path, model=tiny(), scaler=scaler))
    assert ours.loaded == [{}] and of_torch.get_scale() == 8.0


@pytest.mark.parametrize("name, part", [("schedule", Recorder()), ("ema", tiny())])
def test_a_wanted_part_that_is_not_in_the_file_is_an_error(tmp_path: Path, name: str, part: Any) -> None:
    """Also a network that is only called as an average."""
    Checkpoint(tmp_path, model=tiny(1.0)).save(1)
    net = tiny()
    with pytest.raises(CheckpointError, match=f"has no {name}; it has scaler, model, progress, config, format"):
        Checkpoint(tmp_path, model=net, **{name: part}).load()
    assert net.weight.count_nonzero() == 0


def test_constructor_refuses_what_cannot_be_saved(tmp_path: Path) -> None:
    for parts in ({"config": tiny()}, {"model": 3}, {"keep": 0}):
        with pytest.raises(ValueError, match=r"config|model|keep"):
            Checkpoint(tmp_path, **parts)
    with pytest.raises(ValueError, match="max"):
        Checkpoint(tmp_path).save(1, best=("loss", "smallest"))


def foreign_parts() -> dict[str, tuple[str, nn.Module, Callable[[nn.Module], torch.optim.Optimizer]]]:
    def adamw(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters())

    class Integers(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("extra", torch.zeros(2, dtype=torch.int64))

    long = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return {
        "missing and unexpected": (r"model lacks 0.weight, 0.bias, 1.weight and 5 more; model also has", long, adamw),
        "shape": (r"weight is \(4, 4\) there and \(5, 5\) here", tiny(size=5), adamw),
        "dtype": ("extra is torch.float32 there and torch.int64 here", Integers(), adamw),
        "groups": (
            r"optimizer has groups of \[2\] parameters there and \[1, 1\] here",
            tiny(),
            lambda net: torch.optim.AdamW([{"params": [parameter]} for parameter in net.parameters()]),
        ),
        "class": ("optimizer is the state of AdamW, not of SGD", tiny(), lambda net: torch.optim.SGD(net.parameters())),
        "order": (
            r"0.exp_avg(_sq)? is \(4, 4\) there and \(4,\) here",
            tiny(),
            lambda net: torch.optim.AdamW(list(net.parameters())[::-1]),
        ),
    }


@pytest.mark.parametrize("case", foreign_parts())
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path, case: str) -> None:
    message, net, build = foreign_parts()[case]
    saved = tiny(1.0)
    if case == "dtype":
        saved.register_buffer("extra", torch.zeros(2))
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    Checkpoint(tmp_path, first=tiny(1.0), other=Recorder(), model=saved, optimizer=optimizer).save(1)

    first, other, live = tiny(), Recorder(), build(net)
    before = bits([first.state_dict(), net.state_dict(), live.state_dict()])
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(tmp_path, first=first, other=other, model=net, optimizer=live).load()
    assert "is of another model" in str(caught.value) and caught.value.exit_code == 3
    assert bits([first.state_dict(), net.state_dict(), live.state_dict()]) == before
    assert other.loaded == []


def test_a_net_of_another_floating_dtype_is_converted_and_said(tmp_path: Path) -> None:
    def build(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = tiny(1.5).to(dtype)
        optimizer = torch.optim.NAdam(net.parameters())
        net(torch.ones(1, 4, dtype=dtype)).sum().backward()
        optimizer.step()
        return net, optimizer

    net, optimizer = build(torch.float32)
    Checkpoint(tmp_path, model=net, optimizer=optimizer).save(1)
    half, half_optimizer = build(torch.bfloat16)
    loaded = must_load(Checkpoint(tmp_path, model=half, optimizer=half_optimizer))
    assert loaded.notes == (
        "dtypes of model were converted: weight is torch.float32 there and torch.bfloat16 here, "
        "bias is torch.float32 there and torch.bfloat16 here",
    )
    state = half_optimizer.state[next(half.parameters())]
    assert state["exp_avg"].dtype == torch.bfloat16 and state["mu_product"].dtype == torch.float32


def test_no_checkpoint_at_all_is_none_but_a_named_one_must_be_there(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "c", model=tiny())
    assert checkpoint.load() is None and not (tmp_path / "c").exists()
    for call in (checkpoint.load, read):
        for path in (tmp_path, tmp_path / "c", tmp_path / "c" / "step_00000001"):
            with pytest.raises(CheckpointError):
                call(path)


def test_a_checkpoint_can_be_named_in_four_ways_and_a_file_without_manifest_is_called_unverified(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    writer = Checkpoint(folder, model=tiny(1.0))
    first, second = writer.save(1, config={"a": 1}), writer.save(2)
    alone = Path(shutil.copy(second / "state.pt", tmp_path / "copy.pt"))
    ways = [(first, first), (first / "state.pt", first), (folder, second), (tmp_path / "run", second), (alone, alone)]
    for path, expected in ways:
        net = tiny()
        loaded = must_load(Checkpoint(tmp_path / "elsewhere", model=net), path)
        assert loaded.path == expected and net.weight.mean() == 1.0
        assert loaded.notes == ((f"{alone} has no manifest.json: it was not verified",) if path == alone else ())
        file = alone if path == alone else expected / "state.pt"
        assert loaded.digest == hashlib.sha256(file.read_bytes()).hexdigest()
        assert read(path)["progress"]["step"] == loaded.step == (1 if expected == first else 2)
    with pytest.raises(CheckpointError, match="step 1"):
        read(first.rename(folder / "step_00000009"))


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path, model=tiny())
    for step in (99_999_998, 99_999_999, 100_000_000):
        writer.save(step)
    assert must_load(writer).step == 100_000_000
    assert saved_steps(tmp_path) == [99_999_999, 100_000_000]


def test_the_newest_two_and_the_best_are_kept(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path, model=tiny())
    scores = [math.nan, 0.5, 0.9, None, math.inf, 0.9, 0.1, 0.2]
    kept = []
    for step, score in enumerate(scores):
        metrics = {"accuracy": score} if step != 3 else {}
        writer.save(step, metrics=metrics, best=("accuracy", "max"))
        kept.append(saved_steps(tmp_path))
    assert kept[2:] == [[1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7]]
    assert json.loads((tmp_path / "step_00000005" / "manifest.json").read_text())["metrics"] == {"accuracy": 0.9}
    writer.save(8, metrics={"accuracy": torch.tensor(0.05)}, best=("accuracy", "min"))
    assert saved_steps(tmp_path) == [7, 8]  # 6 would have been the best, had it been asked for in time
    writer.save(9)
    Checkpoint(tmp_path, model=tiny(), keep=1).save(4)  # older than what is there, but just written
    assert saved_steps(tmp_path) == [4, 9]


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut manifest": lambda step: os.truncate(step / "manifest.json", 100),
    "cut state": lambda step: os.truncate(step / "state.pt", 100),
    "flipped bit": lambda step: flip(step / "state.pt"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_count_neither_among_the_newest_nor_as_the_best(tmp_path: Path, damage: str) -> None:
    """When only sizes were compared, two damaged ones took the places of two sound ones."""
    for step, accuracy in enumerate((0.7, 0.9, 0.6, 0.5, 0.1)):
        Checkpoint(tmp_path, model=tiny(), keep=9).save(step, metrics={"accuracy": accuracy})
    for step in (1, 4):
        DAMAGE[damage](tmp_path / f"step_{step:08d}")
    writer = Checkpoint(tmp_path, model=tiny())  # as after a resume
    writer.save(5, metrics={"accuracy": 0.2}, best=("accuracy", "max"))
    assert saved_steps(tmp_path) == [0, 1, 3, 4, 5]


def test_a_sound_step_is_never_written_again_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path, model=tiny(1.0))
    path = writer.save(1)
    before = (path / "state.pt").stat()
    assert Checkpoint(tmp_path, model=tiny(2.0)).save(1) == path
    after = (path / "state.pt").stat()
    # Verifying a checkpoint reads it, which may move its access time.
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    (path / "state.pt").write_bytes(b"damaged")
    assert Checkpoint(tmp_path, model=tiny(2.0)).save(1) == path
    assert read(path)["model"]["weight"].mean() == 2.0 and names(tmp_path) == ["step_00000001"]


def test_ranks_above_0_collect_states_and_write_nothing(tmp_path: Path) -> None:
    class Collective(Recorder):
        collected = 0

        def state_dict(self) -> dict[str, Any]:
            Collective.collected += 1
            return {}

    for writer in (True, False):
        for _ in range(2):  # the second save of a step returns early, but not before all ranks took part
            path = Checkpoint(tmp_path / str(writer), writer=writer, part=Collective()).save(1)
            assert path.name == "step_00000001" and path.exists() == writer
    assert Collective.collected == 4 and names(tmp_path) == ["True"]


BEFORE = Path(__file__).parents[1] / "support" / "checkpoints_of_0_1"
"""Written by version 0.1: by one process in format `single`, by two with layout fsdp in format `sharded`."""


class Averaged:
    """The parts of the checkpoints of version 0.1, with other values."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.5)
        self.ema = Ema(self.net, 0.5)
        self.scaler = torch.amp.GradScaler("cpu")

    def checkpoint(self, folder: Path, **way: Any) -> Checkpoint:
        parts: dict[str, Any] = {"model": self.net, "optimizer": self.optimizer, "ema": self.ema}
        return Checkpoint(folder, **way, **parts, scaler=self.scaler)


@pytest.mark.parametrize("format", ["single", "sharded"])
def test_checkpoints_of_version_0_1_load_and_are_written_in_the_same_way(tmp_path: Path, format: Any) -> None:
    folder = BEFORE / format / "step_00000002"
    expected = torch.load(folder / "state.pt", weights_only=True)
    for path in sorted(folder.glob("parts_*.safetensors")):  # read by another program
        for name, rows in load_file(path).items():
            *inside, last = name.split(".", 1 if name[0] in "me" else 3)
            state = expected
            for key in inside:
                state = state[int(key) if key.isdigit() else key]
            state[last] = rows if state[last] is None else torch.cat([state[last], rows])
    run = Averaged()
    loaded = must_load(run.checkpoint(tmp_path), folder)
    assert (loaded.step, *loaded.notes) == (2, "optimizer: group 0 keeps lr=0.5, not lr=0.01 of the checkpoint")
    assert loaded.progress == {"samples": 16, "text": "ä", "step": 2}
    assert loaded.config == {"recipe": {"name": "x"}, "lr": 0.01}
    assert bits(run.net.state_dict()) == bits(expected["model"])
    assert bits(run.ema.state_dict()) == bits(expected["ema"])
    assert bits(run.optimizer.state_dict()["state"]) == bits(expected["optimizer"]["state"])
    assert run.scaler.get_scale() == 1024.0

    # Names, keys and layout of what is written now; the bytes of a weight are the same, as was just shown.
    for group in run.optimizer.param_groups:
        group["lr"] = 0.01
    metrics = {"accuracy": 0.5, "loss": math.nan}
    again = run.checkpoint(tmp_path, format=format).save(
        2, progress={"samples": 16, "text": "ä"}, config=loaded.config, metrics=metrics
    )
    old, new = (json.loads((path / "manifest.json").read_text()) for path in (folder, again))
    if format == "single":
        expected["progress"] = {"samples": 16, "text": "ä", "averaged": 0, "step": 2}  # the count of `run.ema`
        assert repr(bits(torch.load(again / "state.pt", weights_only=True))) == repr(bits(expected))  # also in order
        assert new.keys() == old.keys() and new["metrics"] == old["metrics"]
    else:
        assert list(torch.load(again / "state.pt", weights_only=True)) == list(expected)
        for row in old["tensors"]:  # two ranks wrote half of each, one process writes all
            row["pieces"] = [[0, row["shape"][0], "whole_00000.safetensors"]]
        found = {str(row["places"]): row for row in new["tensors"]}
        assert [found[str(row["places"])] for row in old["tensors"]] == old["tensors"]
        assert names(again) == ["manifest.json", "state.pt", "whole_00000.safetensors"]


def gathered(rank: int, keep: bool) -> Any:
    shards = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    return gather_full_state({"moments": {"mean": shards, "step": 3}, "list": [shards], "pair": (1, shards)}, keep=keep)


@pytest.mark.parametrize("keep", [True, False])
def test_a_rank_that_keeps_nothing_holds_no_full_tensor(keep: bool, on_ranks: Callable[..., list[Any]]) -> None:
    for found in on_ranks(gathered, keep):
        found = [found["moments"]["mean"], *found["list"], found["pair"][1]]
        assert all(torch.equal(x, torch.arange(4.0)) if keep else x is None for x in found)
