"""data.check reads every sample and lists the bad ones, data.exclude leaves them out, and a run knows what was left out."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from record_files import write_faces
from shared import data_config
from small import SMALL

import train
from amp_core.config.errors import ConfigError, SaveError
from amp_core.config.schema import DataConfig
from amp_core.config.sources import excluded_names
from amp_core.data import build_data
from amp_core.run.check import LIST, check_samples

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("own_folder")
BAD = b"no image"


def image(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def write(path: str, content: bytes) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content)


def image_folder(bad: bool) -> tuple[DataConfig, list[str]]:
    names = [f"{part}/{label}/{number}.png" for part in ("train", "val") for label in "ab" for number in range(20)]
    names += ["val/b/tab\tand é.png", 'train/a/"quoted" # .png', "train/b/deeper/x.png"]
    chosen = ["train/a/3.png", *names[-3:]]
    for seed, name in enumerate(names):
        write(f"data/{name}", BAD if bad and name in chosen else image(seed))
    return data_config("image_folder", path="data", image_size=8, num_workers=1), chosen


def mask_folder(bad: bool) -> tuple[DataConfig, list[str]]:
    """One bad image, one mask with a value that it may not have, one of another size."""
    for part in ("train", "val"):
        for number in range(8):
            write(f"data/{part}/images/{number}.png", BAD if bad and (part, number) == ("val", 2) else image(number))
            values = np.full((20, 24), 77 if bad and (part, number) == ("train", 5) else 255, dtype=np.uint8)
            Image.fromarray(values[: 19 if bad and number == 7 else 20]).save(file := io.BytesIO(), "PNG")
            write(f"data/{part}/masks/{number}.png", file.getvalue())
    bad_ones = ["train/images/5.png", "train/images/7.png", "val/images/2.png", "val/images/7.png"]
    return data_config("mask_folder", path="data", image_size=8, num_workers=1), bad_ones


def identity_folder(bad: bool) -> tuple[DataConfig, list[str]]:
    """The same name is bad in data.path and good in data.eval_path, and the other way round."""
    for place, broken in (("data", "person 3/1.png"), ("probes", "person 2/0.png")):
        for name in [f"person {i}/{j}.png" for i in range(5) for j in range(3)]:
            write(f"{place}/{name}", BAD if bad and name == broken else image(len(name)))
    cfg = data_config("identity_folder", path="data", eval_path="probes", image_size=8, num_workers=1)
    return cfg, ["person 3/1.png", "eval_path:person 2/0.png"]


def records(bad: bool) -> tuple[DataConfig, list[str]]:
    files = [[image(10 * i + j) for j in range(4)] for i in range(12)]
    if bad:
        files[2][1] = files[11][3] = BAD
    write_faces(Path("data"), files)
    return data_config("records", path="data", image_size=8, num_workers=1), ["record 10", "record 48"]


KINDS = [image_folder, mask_folder, identity_folder, records]


@pytest.mark.parametrize("make", KINDS)
def test_all_bad_samples_are_found_at_once_and_the_list_leaves_just_them_out(make: Any, capsys: Any) -> None:
    cfg, expected = make(True)
    total = sum(len(part) for part in (build_data(cfg, seed=0).train, build_data(cfg, seed=0).eval))
    with pytest.raises(ConfigError, match=rf"{len(expected)} of {total} samples cannot be read.* data\.exclude={LIST}"):
        check_samples(cfg, progress=False)
    said = capsys.readouterr().out
    assert excluded_names(LIST) == set(expected) and len(said.splitlines()) == len(expected)
    assert (
        "no image" not in said
        and "data.check" not in said
        and said.count("Replace or remove it") + said.count("expected") >= len(expected)
    )
    without = dataclasses.replace(cfg, exclude=LIST, augment=False)
    check_samples(without, progress=False)
    data = build_data(without, seed=0)
    assert f"leaves {len(expected)} samples out" in data.notes[-1] and data.excluded
    assert f"all {total - len(expected)} samples can be read" in capsys.readouterr().out
    # What is left are the samples of sound data, in their order.
    make(False)
    data = build_data(without, seed=0)
    sound = build_data(dataclasses.replace(cfg, augment=False), seed=0)
    for part in ("train", "eval"):
        left: Any = getattr(data, part)
        whole: Any = getattr(sound, part)
        keys = [(i, 0) for i in range(len(whole)) if whole.name_of(i) not in expected]
        pair = zip(left.__getitems__([(i, 0) for i in range(len(left))]), whole.__getitems__(keys), strict=True)
        assert len(keys) < len(whole) and all(torch.equal(a, b) for a, b in pair)


def test_a_second_check_keeps_what_the_list_had() -> None:
    cfg, bad = image_folder(True)
    Path("mine.txt").write_text("# by hand\n\ntrain/b/3.png\nnowhere.png\tgone\n")
    with pytest.raises(ConfigError, match="4 of 82 samples"):
        check_samples(dataclasses.replace(cfg, exclude="mine.txt"), progress=False)
    assert excluded_names(LIST) == {*bad, "train/b/3.png", "nowhere.png"}
    Path(LIST).write_text("my notes")
    with pytest.raises(SaveError, match=r"no list of data\.check"):
        check_samples(cfg, progress=False)
    assert Path(LIST).read_text() == "my notes"


def test_data_that_are_in_no_files_are_read_too(capsys: Any) -> None:
    check_samples(data_config("synthetic", num_samples=40, image_size=4), progress=False)
    assert "data=synthetic: all 50 samples can be read" in capsys.readouterr().out
    Path("text").write_text("words " * 100)
    check_samples(data_config("text", path="text", length=16), progress=False)
    assert "samples can be read" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="data=own is made by its recipe"):
        check_samples(data_config("own"), progress=False)


def test_names_that_are_not_there_and_files_that_are_not_read_are_counted() -> None:
    cfg, _ = image_folder(False)
    for name in ("train/a/x.gif", "train/b/y.GIF", "val/a/notes.txt", "val/a/.hidden", "train/a/Makefile"):
        write(f"data/{name}", b"")
    Path("list").write_text("train/a/0.png\nval/z/0.png\ntrain/a\n")
    skipped, excluded = build_data(dataclasses.replace(cfg, exclude="list"), seed=0).notes
    expected = "1 of no ending such as data/train/a/Makefile, 2 of .gif such as data/train/a/x.gif, 1 of .txt"
    assert skipped.startswith("data.path=data: files left out, for images end with .jpg, ") and expected in skipped
    assert excluded.startswith("data.exclude=list: leaves 1 samples out; 2 of its 3 names are not in the data, such as")
    assert build_data(data_config("synthetic"), seed=0).notes == ()
    cfg, _ = mask_folder(False)
    write("data/val/masks/0.gif", b"")
    assert "1 of .gif such as data/val/masks/0.gif" in build_data(cfg, seed=0).notes[0]
    cfg, _ = identity_folder(False)
    write("probes/person 2/0.heic", b"")
    assert "1 of .heic such as probes/person 2/0.heic" in build_data(cfg, seed=0).notes[0]


@pytest.mark.parametrize("name, exclude, expected", [
    ("image_folder", "nowhere.txt", "data.exclude=nowhere.txt: cannot be read: No such file or directory"),
    ("image_folder", "data", "data.exclude=data: cannot be read: is not a regular file"),
    ("image_folder", "json.txt", "data.exclude=json.txt: cannot be read: Unterminated string"),
    ("image_folder", "others.txt", "none of its 2 names is in the data, such as 0.png; expected names such as train/"),
    ("synthetic", "x", "data.exclude=x: has no effect"),
    ("image_folder", "all.txt", "train: no images in a, b"),
])  # fmt: skip
def test_a_list_that_cannot_be_used_is_named(name: str, exclude: str, expected: str) -> None:
    image_folder(False)
    Path("json.txt").write_text('"half')
    Path("others.txt").write_text("data/train/a/0.png\n0.png\n")
    Path("all.txt").write_text("\n".join(str(path.relative_to("data")) for path in Path("data/train").rglob("*.png")))
    path = "data" if name == "image_folder" else None
    with pytest.raises(ConfigError, match=re.escape(expected)):
        build_data(data_config(name, path=path, exclude=exclude), seed=0)


def test_a_run_resumes_with_the_samples_that_it_was_begun_with(capsys: Any) -> None:
    image_folder(False)
    Path("list").write_text("train/a/0.png\n")
    settings = [*(each for each in SMALL["classification"] if not each.startswith("data")), "data=image_folder"]
    settings += ["data.path=data", "data.image_size=8", "data.num_workers=0", "batch_size=4", "run_dir=a"]
    assert train.main([*settings, "data.exclude=list", "steps=1"]) == 0
    assert "data.exclude=list: leaves 1 samples out" in capsys.readouterr().out
    assert train.main([*settings, "steps=2"]) == 2  # another setting
    assert "data.exclude: list -> null" in capsys.readouterr().err
    Path("list").write_text("# the same samples\ntrain/a/0.png\tdamaged\n")
    assert train.main([*settings, "data.exclude=list", "steps=2"]) == 0
    Path("list").write_text("train/a/0.png\ntrain/a/1.png\n")  # other samples under the same setting
    capsys.readouterr()
    assert train.main([*settings, "data.exclude=list", "steps=3"]) == 2
    assert "data.exclude: another list of samples -> that of list" in capsys.readouterr().err
    assert train.main([*settings, "data.exclude=list", "steps=3", "allow_changes=true"]) == 0
    assert "settings changed since the checkpoint: data.exclude" in capsys.readouterr().out


def test_the_exit_code_says_whether_all_can_be_read(capsys: Any) -> None:
    def check(*more: str) -> int:
        return train.main(["data=image_folder", "data.path=data", "data.image_size=8", "data.check=true", *more])

    image_folder(True)
    assert check() == 2
    errors = capsys.readouterr().err
    assert errors.count("error: data=image_folder: 4 of 83 samples cannot be read") == 1
    assert " 0/83 [" not in errors  # no progress bar in a pipe
    assert check(f"data.exclude={LIST}") == 0 and check("data.exclude=nowhere") == 2
    assert sorted(path.name for path in Path().iterdir()) == [LIST, "data"]


def test_a_sweep_of_checks_is_refused(capsys: Any) -> None:
    assert train.main(["-m", "data.check=true", "seed=1,2"]) == 2
    assert "leave out -m" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_check_with_all_its_processes(number: int, code: int) -> None:
    """A terminal signals the whole group."""
    image_folder(False)
    for i in range(16):  # the first batch: said at once
        write(f"data/train/a/0{i}.png", BAD)
    Image.new("L", (3000, 3000)).save("data/train/a/large.png")  # for minutes of reading
    for i in range(2000):
        os.link("data/train/a/large.png", f"data/train/a/large{i}.png")
    settings = ["data=image_folder", "data.path=data", "data.num_workers=2", "data.check=true", "device=cpu"]
    command = [sys.executable, str(ROOT / "train.py"), *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and b"train/a/00.png" in process.stdout.readline()
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code, errors
        assert b"error: data.check: interrupted; nothing was written" in errors and b"Traceback" not in errors
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    assert not Path(LIST).exists()
