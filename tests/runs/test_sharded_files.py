"""Files of shards: damaged, hostile and exported ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from checkpointing import FILE, FORMATS, Parts
from damaged import damage
from running import differing
from safetensors.torch import load_file
from shared import flip, names, script, seal
from test_checkpoint_damage import Evil
from tiers import rows

from amp_core import Checkpoint
from amp_core.checkpoints import shards
from amp_core.checkpoints.export import export
from amp_core.checkpoints.reading import read
from amp_core.config.errors import CheckpointError

OnRanks = Callable[..., list[Any]]


def save_twice(rank: int, folder: str, format: str) -> None:
    """Two steps of replicas; shards are written by both ranks."""
    for step in (1, 2):
        Parts(float(step)).checkpoint(Path(folder), writer=rank == 0, format=format).save(step)


@pytest.mark.one_in(2)
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


def test_the_metadata_of_distributed_checkpoints_would_run_code_where_our_table_is_refused(tmp_path: Path) -> None:
    """Why shards have a table of their own: torch's is a pickle that its reader trusts."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "executed")))
    with contextlib.suppress(Exception):  # whatever it makes of the result
        torch.distributed.checkpoint.FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "executed").exists()
    folder = Parts(1.0).checkpoint(tmp_path / "c").save(1)
    (folder / "manifest.json").write_bytes(pickle.dumps(Evil(tmp_path / "ours")))
    with pytest.raises(CheckpointError, match="manifest"):
        read(folder)
    assert not (tmp_path / "ours").exists()
