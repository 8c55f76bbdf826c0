"""Checkpoints that are damaged or hostile, and saves that fail or are cut short."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import resource
import signal
import subprocess
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import system_calls
import torch
from checkpointing import Recorder, forge, must_load, pickled, saved_steps, tiny, whole
from shared import flip, names, seal

from amp_core.checkpoints import folders
from amp_core.checkpoints.checkpoint import Checkpoint
from amp_core.checkpoints.reading import read
from amp_core.config.errors import CheckpointError, SaveError


def test_unfinished_saves_of_dead_processes_are_removed_by_the_writer(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid in (dead.pid, os.getpid(), os.getppid(), 10**30):
        (tmp_path / f".tmp-step_00000001-{pid}" / "deep").mkdir(parents=True)
        (tmp_path / f".tmp-step_00000001-{pid}" / "state.pt").touch()
    foreign = {".tmp-other", "notes.txt", "step_1", "tmp-step_00000001-1"}
    for name in foreign:
        (tmp_path / name).touch()
    Checkpoint(tmp_path, writer=False)
    assert len(names(tmp_path)) == 8
    Checkpoint(tmp_path)
    alive = {f".tmp-step_00000001-{pid}" for pid in (os.getpid(), os.getppid())}
    assert set(names(tmp_path)) == alive | foreign
    Checkpoint(tmp_path).save(1)  # over what a dead process with our number left
    assert f".tmp-step_00000001-{os.getpid()}" not in names(tmp_path)
    assert read(tmp_path)["format"] == 1


def test_when_none_is_sound_the_run_stops(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path, model=tiny(1.0))
    for step, file in ((1, "state.pt"), (2, "manifest.json")):
        flip(writer.save(step) / file)
    (tmp_path / "step_00000003").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint is sound: .*00000003.*00000002.*00000001") as caught:
        writer.load()
    assert caught.value.exit_code == 3


def _pipe(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "manifest.json")


def _nested(folder: Path) -> None:
    forge(folder, b"x", step=2)
    (folder / "manifest.json").write_text("[" * 100_000)


def _sparse(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        forge(folder, b"x", step=2)
        try:
            os.truncate(folder / name, 1 << 40)
        except OSError:
            pytest.skip("this file system has no files of a terabyte")
        if name == "state.pt":  # it is what the manifest says
            files = {"state.pt": {"bytes": 1 << 40, "sha256": "0"}}
            seal(folder, {"format": 1, "step": 2, "files": files, "metrics": {}})
            assert folders.inspect(folder)["files"] == files

    return make


STRANGE: dict[str, Callable[[Path], Any]] = {
    "a file": lambda folder: folder.write_text("a file"),
    "an empty folder": lambda folder: folder.mkdir(),
    "a path": lambda folder: forge(folder, b"x", step=2, files={"../state.pt": {"bytes": 1, "sha256": "0"}}),
    "no files": lambda folder: forge(folder, b"x", step=2, files=[]),
    "no state": lambda folder: forge(folder, b"x", step=2, files={}),
    "a step that is true": lambda folder: forge(folder, pickled(whole()), step=True),
    "no metrics": lambda folder: forge(folder, b"x", step=2, metrics=None),
    "a pipe": _pipe,
    "a nested manifest": _nested,
    "a terabyte of state": _sparse("state.pt"),
    "a terabyte of manifest": _sparse("manifest.json"),
    **{  # compared at the next save, which they would end
        f"the metric {value!r:.9}": lambda folder, value=value: forge(
            folder, pickled(whole()), step=2, metrics={"accuracy": value}
        )
        for value in (10**400, "best", [1], True, "1e400")
    },
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_checkpoint_is_rejected_and_ends_neither_a_load_nor_a_save(tmp_path: Path, kind: str) -> None:
    writer = Checkpoint(tmp_path, model=tiny())
    writer.save(1, metrics={"accuracy": 0.5})
    (tmp_path / "step_abc").mkdir()
    STRANGE[kind](tmp_path / "step_00000002")
    loaded = must_load(writer)
    assert loaded.step == 1 and len(loaded.notes) == 1
    assert ("more than the" in loaded.notes[0]) == ("terabyte" in kind)
    assert not folders.is_sound(tmp_path / "step_00000002")
    writer.save(3, metrics={"accuracy": 0.25}, best=("accuracy", "max"))
    assert must_load(writer).step == 3


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def compressed(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    return out.getvalue()


class PairsInCall:
    def __reduce__(self) -> Any:
        return OrderedDict, ([("a", 1)],)


def doubled(times: int) -> list[Any]:
    """A list that holds another one twice, and so on: 2^times paths lead to its end."""
    value: list[Any] = []
    for _ in range(times):
        value = [value, value]
    return value


def keyed_by(pickled_key: bytes) -> bytes:
    """A file whose config has a key that is made by these operations; torch.save itself would not come to its end."""
    contents = pickle.dumps(whole(config={"a": 1}), 2)
    assert contents.count(b"X\x01\x00\x00\x00aq") == 1
    before, after = contents.split(b"X\x01\x00\x00\x00aq")
    with zipfile.ZipFile(io.BytesIO(pickled({}))) as archive:
        names = {entry.filename: archive.read(entry) for entry in archive.infolist() if "data" not in entry.filename}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in {"archive/data.pkl": before + pickled_key + b"q" + after, **names}.items():
            archive.writestr(name, data)
    return out.getvalue()


DOUBLED_TUPLES = b"N\x85q\x80" + b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(0x80, 0x80 + 60))


SAME_HASH = [n * (2**61 - 1) * 2**64 for n in range(1, 20)]


def hostile_files(marker: Path) -> dict[str, bytes]:
    evil, loop = Evil(marker), []
    loop.append(loop)
    honest = pickled(whole(model={"weight": torch.ones(300)}))
    return {
        "code in a part": pickled(whole(model={"weight": evil})),
        "code on top": pickled(evil),
        "code as a key": pickled(whole(config={"a": [evil]})),
        "legacy format": pickled(whole(), _use_new_zipfile_serialization=False),
        "legacy format with code": pickled(evil, _use_new_zipfile_serialization=False),
        "raw pickle": pickle.dumps(evil),
        "a set": pickled(whole(config={"a": {1, 2}})),
        "a dtype": pickled(whole(config={"a": torch.float16})),
        "a sparse tensor": pickled(whole(model={"weight": torch.eye(4).to_sparse()})),
        "a tensor larger than its data": pickled(whole(model={"weight": torch.ones(1).expand(2**40)})),
        "a tensor longer than its data": honest.replace(b"M\x2c\x01", b"M\xff\xff"),  # 300 and 65535, pickled
        "a meta tensor": pickled(whole(model={"weight": torch.empty(2**40, device="meta")})),
        "compressed": compressed(pickled(whole(model={"weight": torch.zeros(1_000_000)}))),
        "endless": pickled(whole(config=loop)),
        "lists of lists": pickled(whole(config={"a": doubled(60)})),
        "a key of tuples of tuples": keyed_by(DOUBLED_TUPLES),
        "a tuple as a key": keyed_by(b"N\x85"),
        "keys with the same hash": pickled(whole(config=dict.fromkeys(SAME_HASH))),
        "counted tuples": pickled(whole(config={"a": Counter({(1, 2): 3})})),
        "a dictionary made of pairs": pickled(whole(config={"a": PairsInCall()})),
        "an integer of a million bits": pickled(whole(progress={"step": 1 << 1_000_000})),
        "no format": pickled(tiny().state_dict()),
        "not a dict": pickled([1, 2]),
        "no progress": pickled(whole(progress=3)),
        "empty": b"",
        "text": b"hello",
    }


@pytest.mark.parametrize("case", hostile_files(Path("x")))
def test_a_hostile_file_is_refused_and_nothing_is_executed(tmp_path: Path, case: str) -> None:
    data = hostile_files(tmp_path / "executed")[case]
    forge(tmp_path / "c" / "step_00000002", data, step=2)
    (tmp_path / "alone.pt").write_bytes(data)
    for path in (tmp_path / "c", tmp_path / "alone.pt"):
        net = tiny()
        with pytest.raises(CheckpointError, match=r"refused: \w"):
            Checkpoint(tmp_path / "own", model=net).load(path)
        assert net.weight.count_nonzero() == 0
    Checkpoint(tmp_path / "c", model=tiny(1.0)).save(1)
    loaded = must_load(Checkpoint(tmp_path / "c", model=tiny()))  # a whole run does not end of it
    assert loaded.step == 1 and "step_00000002 is damaged and was not used: state.pt: refused:" in loaded.notes[0]
    assert not (tmp_path / "executed").exists()


def test_tensors_of_a_file_from_another_device_come_to_the_cpu(tmp_path: Path) -> None:
    data = pickled(whole(model=tiny(2.0).state_dict()))
    elsewhere = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x03\x00\x00\x00mps")
    assert elsewhere != data
    assert read(forge(tmp_path / "step_00000001", elsewhere))["model"]["weight"].device.type == "cpu"


def test_a_part_that_refuses_its_state_is_a_clear_error(tmp_path: Path) -> None:
    class Strict(Recorder):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("num_taken")

    Checkpoint(tmp_path, schedule=Recorder()).save(1)
    with pytest.raises(CheckpointError, match="schedule does not fit: 'num_taken'"):
        Checkpoint(tmp_path, schedule=Strict()).load()


def test_an_odd_state_of_a_part_is_refused_before_anything_changes(tmp_path: Path) -> None:
    odd: list[Any] = [3, [], {}, {"state": {}, "param_groups": [3]}, {"state": {}, "param_groups": [{"params": [[]]}]}]
    odd += [{"state": {}, "param_groups": [{"params": [0, 1]}], "moved": moved} for moved in (3, [3])]
    for number, state in enumerate(odd):
        folder = forge(
            tmp_path / f"{number}" / "step_00000001", pickled(whole(model=tiny(1.0).state_dict(), optimizer=state))
        )
        net = tiny()
        with pytest.raises(CheckpointError, match="optimizer is "):
            Checkpoint(tmp_path, model=net, optimizer=torch.optim.SGD(net.parameters())).load(folder)
        assert net.weight.count_nonzero() == 0


def test_a_newer_format_stops_and_is_neither_replaced_nor_pruned(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path, model=tiny())
    writer.save(1)
    folder = tmp_path / "step_00000002"
    forge(folder, pickled(whole(format=2)), step=2)
    with pytest.raises(CheckpointError, match="format 2, newer than 1"):
        writer.load()
    forge(folder, b"of another kind", step=2, format=2)
    for call in (writer.load, lambda: read(folder), lambda: writer.save(2)):
        with pytest.raises(CheckpointError, match="format 2, newer than 1"):
            call()
    for step in (3, 4, 5):
        writer.save(step)
    assert saved_steps(tmp_path) == [2, 4, 5]


Mount = Callable[[Path], None]


@pytest.fixture
def mount_small_disk() -> Iterator[Mount]:
    """Mounts a real file system of 1 MB at a folder."""
    mounted = []

    def mount(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        try:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs the right to mount a tmpfs")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,size=64k", folder], check=True)
    yield


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    yield


@contextlib.contextmanager
def limited(folder: Path) -> Iterator[None]:
    """The limit is real: a write is cut short, and the next one fails."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@contextlib.contextmanager
def without_permission(folder: Path) -> Iterator[None]:
    (folder / "c").chmod(0o500)
    try:
        if os.access(folder / "c", os.W_OK):
            pytest.skip("root may write everywhere")
        yield
    finally:
        (folder / "c").chmod(0o700)


PLACES = {full: errno.ENOSPC, read_only: errno.EROFS, limited: errno.EFBIG, without_permission: errno.EACCES}


@pytest.mark.parametrize("place", PLACES)
def test_where_nothing_can_be_written_the_error_is_clear_and_the_earlier_checkpoint_intact(
    tmp_path: Path, mount_small_disk: Mount, place: Any
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if place in (full, read_only):
        mount_small_disk(disk)
    writer = Checkpoint(disk / "c", model=tiny(1.0))
    writer.save(1)
    writer.parts["model"] = tiny(2.0, size=300)
    with place(disk):
        before = os.statvfs(disk).f_bavail
        with pytest.raises(SaveError) as caught:
            writer.save(2)
        assert place is limited or os.statvfs(disk).f_bavail == before
    message = str(caught.value)
    assert caught.value.exit_code == 4 and str(disk / "c") in message and os.strerror(PLACES[place]) in message
    assert ("bytes needed" in message) == (place in (full, limited))  # others fail at the folder
    assert "bytes free" in message and "Earlier checkpoints are intact" in message
    assert names(disk / "c") == ["step_00000001"] and read(disk / "c")["model"]["weight"].mean() == 1.0
    if place is limited:
        writer.save(2)
        assert read(disk / "c")["model"]["weight"].mean() == 2.0


def test_a_file_in_the_place_of_the_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    with pytest.raises(SaveError, match=str(tmp_path / "c")):
        Checkpoint(tmp_path / "c").save(1)


def changes_of_save(writer: Checkpoint, step: int) -> list[tuple[str, str]]:
    """The calls of a save with the path that each was about, C being the folder of checkpoints."""
    calls = system_calls.Calls()
    system_calls.use(calls)
    try:
        writer.save(step)
    finally:
        system_calls.use()
    opened: dict[int, str] = {}
    changes = []
    for name, args, result in calls.trace:
        if name == "open":
            opened[result] = str(args[0])
        elif name != "close":
            path = opened[args[0]] if name in ("write", "fsync") else str(args[0])
            changes.append((name, path.replace(str(os.getpid()), "PID").replace(str(writer.folder), "C")))
    return changes


def durable_write(folder: str) -> list[tuple[str, str]]:
    files = [(act, f"{folder}/{name}") for name in ("state.pt", "manifest.json") for act in ("write", "fsync")]
    return [("mkdir", folder), *files, ("fsync", folder)]


def test_nothing_is_renamed_before_it_is_on_disk_nor_deleted_before_the_new_one_is(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path / "checkpoints", keep=1, model=tiny())
    writer.save(1)
    changes = changes_of_save(writer, 2)
    new, old = "C/.tmp-step_00000002-PID", "C/.tmp-old-step_00000001-PID"
    publish = [("rename", new), ("fsync", "C")]
    assert changes[:10] == [*durable_write(new), *publish, ("rename", "C/step_00000001"), ("fsync", "C")]
    assert sorted(changes[10:12]) == [("unlink", f"{old}/manifest.json"), ("unlink", f"{old}/state.pt")]
    assert changes[12:] == [("rmdir", old)]

    (tmp_path / "checkpoints" / "step_00000002" / "state.pt").unlink()
    changes = changes_of_save(writer, 2)
    old = "C/.tmp-old-step_00000002-PID"
    assert changes[:10] == [*durable_write(new), ("rename", "C/step_00000002"), ("fsync", "C"), *publish]
    assert changes[10:] == [("unlink", f"{old}/manifest.json"), ("rmdir", old)]


def test_new_folders_are_made_durable_too(tmp_path: Path) -> None:
    calls = system_calls.Calls()
    system_calls.use(calls)
    try:
        Checkpoint(tmp_path / "run" / "checkpoints").save(1)
    finally:
        system_calls.use()
    changes = [(name, args[0]) for name, args, _ in calls.trace if name in ("mkdir", "open")]
    assert changes[:4] == [
        ("mkdir", tmp_path / "run"),
        ("open", tmp_path),
        ("mkdir", tmp_path / "run" / "checkpoints"),
        ("open", tmp_path / "run"),
    ]
