"""Whatever stands in place of a run folder's files, or of data and weights, no program hangs, ends with a traceback, or
acts on the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shared import script
from test_recipes import arguments

import train
from amp_core.checkpoints import export
from amp_core.checkpoints.checkpoint import Checkpoint
from amp_core.config import files
from amp_core.run.folder import RunFolder
from amp_core.run.lines import LineFile, cut_lines, write_json
from amp_core.run.locks import acquire

SECONDS = 5
SMALL = ["data=synthetic", "data.num_samples=32", "data.image_size=8", "data.num_classes=4", "model.options.width=4"]
SMALL += ["device=cpu", "log.progress=false", "batch_size=8", "save_every=1", "doctor=off"]
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
STEP = "checkpoints/step_00000002"
FILES = (
    *(".hydra/config.yaml", ".hydra/overrides.yaml", "summary.json", "metrics.jsonl", "environment.json", "train.log"),
    *(".lock", "wandb_id", f"{STEP}/manifest.json", f"{STEP}/state.pt"),
)


def a_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may have 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(here)


def huge(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


KINDS = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": a_socket,
    "loop of links": lambda path: path.symlink_to(path.name),
    "folder": os.mkdir,
    "huge": huge,
    "junk": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "bomb": lambda path: path.write_text(BOMB),
    "no permission": lambda path: (path.write_text("x"), path.chmod(0)),
    "numbers": lambda path: path.write_text(
        '{"step": 1e400, "split": "train", "metrics": {"accuracy": 1' + "0" * 400 + '}}\n{"step": 1e400}\n'
    ),
    "escapes": lambda path: path.write_text(
        '{"status": "\x1b[31mred", "error": "\\u001b[2J\\u202e", "seed": "\x1b[5m"}\n'
    ),
}


def resume(folder):
    return train.main([*SMALL, f"run_dir={folder}", "steps=3"])


PROGRAMS = {
    "train.py": (resume, {0, 2, 3, 4}),
    "doctor.py": (
        lambda folder: script("scripts/doctor.py").main(["locate", str(folder), "--step", "2"]),
        {0, 2, 3, 4},
    ),
    "report.py": (lambda folder: script("scripts/report.py").main([str(folder), "--out", f"{folder}.html"]), {0}),
    "runs.py": (lambda folder: script("scripts/runs.py").main([str(folder)]), {0}),
    "export.py": (lambda folder: script("scripts/export.py").main([str(folder), f"{folder}.pt"]), {0, 2, 3, 4}),
}


@pytest.fixture(scope="module")
def ready():
    """A run of two steps, in a folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        assert train.main([*SMALL, f"run_dir={place}/run", "steps=2"]) == 0
        folder = Path(place, "run")
        for name, (main, _) in PROGRAMS.items():  # imports what it needs
            shutil.copytree(folder, Path(place, "sound"))
            assert main(Path(place, "sound")) == 0, name
            shutil.rmtree(Path(place, "sound"))
        for path in folder.parent.glob("sound.*"):
            path.unlink()
        yield folder


class Hangs(BaseException):
    """No program catches it."""


@contextlib.contextmanager
def no_hang():
    """Raises `Hangs` after 5 s of computing, or 5 s of waiting in which nothing is computed; other load does not count."""
    began = last = time.process_time()

    def look(*_):
        nonlocal last
        before, last = last, time.process_time()
        if last - began > SECONDS or last - before < SECONDS / 100:
            raise Hangs(f"computed for {last - began:.1f} s, in the last {SECONDS} s for {last - before:.3f} s")

    handler = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def attempt(ready, program, name, kind, capfd):
    """Run a program on a copy of the folder with something else in place of a file. Returns what is wrong."""
    folder = ready.parent / "hostile"
    shutil.copytree(ready, folder)
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    if kind == "no permission" and os.geteuid() == 0:  # root may read everything
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 65534, 65534)
        os.seteuid(65534)
    main, codes = PROGRAMS[program]
    capfd.readouterr()
    try:
        with no_hang():
            code = main(folder)
    except BaseException as problem:
        code = f"{type(problem).__name__}: {problem}"
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        shutil.rmtree(folder, ignore_errors=True)
        for path in ready.parent.glob("hostile*"):
            path.unlink()
    out, err = capfd.readouterr()
    if code not in codes or "Traceback" in out + err or "\x1b" in out + err or "\u202e" in out + err:
        return f"{program}, {kind} for {name}: {code}; {err[-300:]!r}"
    return None


FAST = [(".hydra/config.yaml", "pipe"), (".hydra/config.yaml", "bomb"), ("summary.json", "escapes"), (".lock", "pipe")]
FAST += [("metrics.jsonl", kind) for kind in ("device", "numbers", "folder")]
FAST += [("train.log", "pipe"), (f"{STEP}/manifest.json", "numbers")]


def cases_of(program, every):
    """In `make test-all` a third of all files and kinds, another one for each of three programs."""
    third = [*PROGRAMS].index(program)
    pairs = product(enumerate(FILES), enumerate(KINDS))
    return [(file, kind) for (i, file), (j, kind) in pairs if (i + j + third) % 3 == 0] if every else FAST


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fast", "all"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_object_of_any_kind_in_place_of_any_file_ends_no_program(program, every, ready, capfd):
    found = [attempt(ready, program, name, kind, capfd) for name, kind in cases_of(program, every)]
    assert not [problem for problem in found if problem], "\n".join(map(str, filter(None, found)))


def test_plain_reading_of_a_pipe_hangs(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 0.2)
    with pytest.raises(Hangs), no_hang():
        (tmp_path / "pipe").read_text()
    with pytest.raises(OSError, match="is not a regular file"):
        files.read_text(tmp_path / "pipe")


@pytest.mark.parametrize("program", PROGRAMS)
def test_settings_of_a_run_do_not_act_on_the_terminal(program, ready, capfd, monkeypatch):
    config = (ready / ".hydra" / "config.yaml").read_text()
    assert "\nbatch_size: 8\n" in config
    text = config.replace("\nbatch_size: 8\n", '\nbatch_size: "\\e[31mred\\u202e"\n').replace("accuracy", '"\\e[5m"')
    monkeypatch.setitem(KINDS, "acting", lambda path: path.write_text(text))
    assert attempt(ready, program, ".hydra/config.yaml", "acting", capfd) is None


def test_names_of_groups_act_on_no_terminal_and_in_no_picture(ready, capfd, tmp_path):
    """Matplotlib warns of letters that its font lacks, and would print them."""
    for number, name in enumerate(["\\e[31mred", "\\e]0;x\\a$\\\\", "\u4e2d"]):
        shutil.copytree(ready, tmp_path / "runs" / str(number))
        config = tmp_path / "runs" / str(number) / ".hydra" / "config.yaml"
        text = config.read_text()
        assert "\n  name: bf16\n" in text
        config.write_text(text.replace("\n  name: bf16\n", f'\n  name: "{name}"\n'))
    command = [str(tmp_path / "runs"), "--by", "amp.name", "--out", str(tmp_path / "r.html"), "--png", str(tmp_path)]
    assert script("scripts/report.py").main(command) == 0
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err + (tmp_path / "r.html").read_text() and "\x07" not in out + err
    assert "Warning" not in err and "\\x1b[31mred" in out


def test_a_pipe_where_a_run_writes_is_named_and_nothing_is_changed(ready, capfd):
    folder = ready.parent / "piped"
    shutil.copytree(ready, folder)
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    before = json.loads((folder / "summary.json").read_text())
    assert resume(folder) == 2
    assert "metrics.jsonl is a pipe, expected a file; remove it" in capfd.readouterr().err
    assert json.loads((folder / "summary.json").read_text()) == before
    shutil.rmtree(folder)


OTHER = 65534
"""Another user."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes links of another user")


def plant(link, to, owner=OTHER):
    link.symlink_to(to)
    os.chown(link, owner, owner, follow_symlinks=False)


def everything(folder):
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def fail(message):
    raise OSError(message)


WRITERS = {
    "whole": lambda place: files.write_whole(place, b"x"),
    "new file": lambda place: files.write_file(place, b"x"),
    "lines": lambda place: LineFile(place, fail).append("x"),
    "cut lines": lambda place: cut_lines(place, 0),
    "lock": lambda place: acquire(place.parent),
    "removal": files.remove,
}


@needs_root
@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_changed_behind_a_link_of_another_user(writer, tmp_path):
    mine, name = tmp_path / "mine", ".lock" if writer == "lock" else "x"
    mine.mkdir()
    (mine / name).write_text('{"step": 3, "split": "train"}\n')
    before = everything(mine)
    plant(tmp_path / "link", mine)
    with pytest.raises(OSError, match="is a link that another user made"):
        WRITERS[writer](tmp_path / "link" / name)
    plant(tmp_path / name, mine / name)
    is_replaced = writer in ("whole", "removal")
    with contextlib.nullcontext() if is_replaced else pytest.raises(OSError, match=r"symbolic links|File exists"):
        WRITERS[writer](tmp_path / name)
    assert everything(mine) == before


@needs_root
def test_a_temporary_file_has_a_name_that_nobody_can_guess(tmp_path):
    (tmp_path / "mine").write_text("kept")
    for name in (f".summary.json.{os.getpid()}.tmp", f".tmp-summary.json-{os.getpid()}"):
        plant(tmp_path / name, tmp_path / "mine")
    write_json(tmp_path / "summary.json", {})
    export.write_state(tmp_path / "x.pt", {})
    assert (tmp_path / "mine").read_text() == "kept"


class Swapping:
    """`os`, and a folder becomes a link when it was looked at."""

    def __init__(self, folder, to):
        self.folder, self.to = folder, to

    def __getattr__(self, name):
        real = getattr(os, name)
        return (lambda *args, **at: self._swap(real(*args, **at))) if name in ("stat", "listdir") else real

    def _swap(self, found):
        if self.folder.is_dir() and not self.folder.is_symlink():
            self.folder.rename(self.folder.with_name("gone"))
            plant(self.folder, self.to)
        return found


@needs_root
def test_a_folder_that_becomes_a_link_while_it_is_removed_is_not_emptied(tmp_path, monkeypatch):
    mine, folder = tmp_path / "mine", tmp_path / "old"
    mine.mkdir()
    (mine / "precious").write_text("kept")
    folder.mkdir()
    monkeypatch.setattr(files, "os", Swapping(folder, mine))
    with pytest.raises(OSError, match="symbolic link"):
        files.remove(folder)
    assert everything(mine) == {str(mine / "precious"): b"kept"}


@needs_root
@pytest.mark.parametrize("name", ["checkpoints", "doctor", "tensorboard", "wandb", ".hydra"])
def test_a_link_in_the_run_folder_is_named_before_the_start(name, tmp_path, capfd):
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").mkdir()
    plant(tmp_path / "run" / name, tmp_path / "mine")
    assert train.main([*SMALL, "steps=1", f"run_dir={tmp_path / 'run'}"]) == 2
    said = capfd.readouterr().err
    assert f"{name} is a link" in said and "remove" in said and not list((tmp_path / "mine").iterdir())


@needs_root
@pytest.mark.parametrize("format", ["single", "sharded"])
def test_checkpoints_that_become_a_link_during_the_run_are_not_followed(format, tmp_path, capfd, monkeypatch):
    """It leads to those of another run of the same user, where old ones would be removed."""
    run, mine = tmp_path / "run", tmp_path / "other"
    command = [*SMALL, f"checkpoint={format}"]
    assert train.main([*command, "steps=4", f"run_dir={mine}"]) == 0
    before, save = everything(mine), Checkpoint.save

    def swap(self, step, **more):
        if step == 5:
            (run / "checkpoints").rename(run / "moved")
            plant(run / "checkpoints", mine / "checkpoints")
        return save(self, step, **more)

    monkeypatch.setattr(Checkpoint, "save", swap)
    assert train.main([*command, "steps=6", f"run_dir={run}"]) == 4
    assert "is a link that another user made" in capfd.readouterr().err and everything(mine) == before


@needs_root
@pytest.mark.parametrize(
    "recipe, name",
    [
        ("language_model", "samples"),
        pytest.param("diffusion", "samples", marks=pytest.mark.slow),
        pytest.param("gan", "samples", marks=pytest.mark.slow),
        ("segmentation", "predictions"),
    ],
)
def test_samples_and_predictions_are_not_written_behind_a_link_of_another_user(recipe, name, tmp_path, monkeypatch):
    """It is made when the run has begun."""
    run, mine, hydra = tmp_path / "run", tmp_path / "mine", RunFolder.begin
    mine.mkdir()
    (mine / "00000000.npz").write_text("kept")
    command = [*arguments(recipe, "steps=2"), f"run_dir={run}"]
    if name == "predictions":
        assert train.main(command) == 0
        plant(run / name, mine)
        monkeypatch.setattr("amp_core.cli.run_folders._check_names", lambda folder: iter(()))
        command += ["task=predict"]

    def begin(self):
        hydra(self)
        plant(run / name, mine)

    monkeypatch.setattr(RunFolder, "begin", begin)
    assert train.main(command) == 4 and everything(mine) == {str(mine / "00000000.npz"): b"kept"}


IMAGES = ["data.image_size=8", "batch_size=4", "steps=4", "device=cpu", "log=none", "model.options.width=4"]


def images(*folders):
    rng = np.random.default_rng(0)
    for folder in folders:
        folder.mkdir(parents=True)
        for number in range(4):
            Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(folder / f"{number}.png")


def class_folders(root):
    images(*(root / part / label for part in ("train", "val") for label in "ab"))
    return [*IMAGES, "data=image_folder", f"data.path={root}", f"run_dir={root.parent / 'run'}"]


def identities(root):
    images(*(root / name for name in "abcdef"))
    return [*IMAGES, "recipe=face_recognition", "data=identity_folder", f"data.path={root}"]


def masks(root):
    images(root / "train" / "images", root / "val" / "images")
    for part in ("train", "val"):
        (root / part / "masks").mkdir()
        for number in range(4):
            Image.new("L", (12, 12)).save(root / part / "masks" / f"{number}.png")
    return [*IMAGES, "recipe=segmentation", "data=mask_folder", f"data.path={root}"]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("make, place", [(class_folders, "val/a"), (identities, "a"), (masks, "val/masks")])
@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "loop of links"])
def test_what_is_no_file_among_images_is_named_or_left_out(make, place, kind, tmp_path, capfd):
    command = make(tmp_path / "data")
    path = tmp_path / "data" / place / "1.png"
    path.unlink()
    KINDS[kind](path)
    with no_hang():
        code = train.main(command)
    said = capfd.readouterr().err
    assert code in (1, 2) and re.search(r"1\.png|images without a mask: 1;", said) and "Traceback" not in said


@pytest.mark.parametrize("make, place", [(class_folders, "train/a"), (identities, "a")])
def test_loops_of_links_among_folders_of_images_end(make, place, tmp_path):
    """Three links to their own folder are 3^40 ways into it."""
    command = make(tmp_path / "data")
    for name in "xyz":
        (tmp_path / "data" / place / name).symlink_to(".")
    with no_hang():
        assert train.main([*command, "data.num_workers=0"]) == 0


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "folder/model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_weights_that_are_no_file_are_refused(name, kind, tmp_path, capfd):
    (tmp_path / "folder").mkdir()
    KINDS[kind](tmp_path / name)
    with no_hang():
        code = train.main(
            [*SMALL, "steps=1", f"model.weights={(tmp_path / name).parent if '/' in name else tmp_path / name}"]
        )
    said = capfd.readouterr().err
    assert code == 2 and "cannot be read as tensors" in said and "Traceback" not in said


def test_images_to_predict_are_found_as_those_of_a_data_set(tmp_path):
    """Behind links, which may go in circles; a folder is no image, whatever its name, and a pipe has an error."""
    command, new = class_folders(tmp_path / "data"), tmp_path / "new"
    assert train.main([*command, "data.num_workers=0"]) == 0
    images(tmp_path / "elsewhere", new / "folder.png")
    (new / "linked").symlink_to(tmp_path / "elsewhere")
    for name in "xyz":
        (new / name).symlink_to(".")
    os.mkfifo(new / "pipe.png")
    with no_hang():
        assert train.main([*command, "data.num_workers=0", "task=predict", f"predict_on={new}"]) == 0
    lines = map(json.loads, (tmp_path / "run/predictions.jsonl").read_text().splitlines())
    found = {os.path.relpath(line["path"], new): "error" in line for line in lines}
    assert found == {f"{name}/{i}.png": False for name in ("folder.png", "linked") for i in range(4)} | {
        "pipe.png": True
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_stands_in_place_of_a_prediction_is_replaced(kind, tmp_path):
    command = [*masks(tmp_path / "data"), f"run_dir={tmp_path / 'run'}"]
    place = tmp_path / "run" / "predictions" / "00000000.npz"
    assert train.main(command) == 0
    place.parent.mkdir()
    (tmp_path / "elsewhere").write_text("kept")
    os.mkfifo(place) if kind == "pipe" else place.symlink_to(tmp_path / "elsewhere")
    with no_hang():
        assert train.main([*command, "task=predict"]) == 0
    assert np.load(place)["masks"].dtype == bool and (tmp_path / "elsewhere").read_text() == "kept"
