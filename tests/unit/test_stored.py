"""Images in tar shards, parquet and folders of datasets: the bits of a folder of files, by random access, or a sentence."""

from __future__ import annotations

import io
import itertools
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import train
from amp_core.config.errors import ConfigError, RunError
from amp_core.config.options import read_option
from amp_core.config.redact import shown
from amp_core.config.schema import DataConfig
from amp_core.data import build_data
from amp_core.data.loading import Batches, Sampler
from amp_core.data.stored import files_of

PER_CLASS, CLASSES = 6, 3
KINDS = ("shards", "parquet", "hf")


def png(seed: int) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (20 + seed % 3, 24, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def rows(part: str) -> list[tuple[bytes, int]]:
    first = 0 if part == "train" else 100
    return [(png(first + n), n // PER_CLASS) for n in range(PER_CLASS * CLASSES)]


def write_tar(path: Path, entries: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def entries_of(part: str) -> list[tuple[str, bytes]]:
    found = [(f"{n:04d}", content, label) for n, (content, label) in enumerate(rows(part))]
    return [each for key, content, label in found for each in ((f"{key}.png", content), (f"{key}.cls", b"%d" % label))]


def write(folder: Path, kind: str) -> DataConfig:
    """The same images as a data set of a kind."""
    values: dict[str, Any] = {"path": str(folder / kind), "image_size": 16, "num_workers": 0}
    for part in ("train", "val"):
        if kind == "image_folder":
            for n, (content, label) in enumerate(rows(part)):
                (folder / kind / part / str(label)).mkdir(parents=True, exist_ok=True)
                (folder / kind / part / str(label) / f"{n:04d}.png").write_bytes(content)
        elif kind == "shards":
            entries = entries_of(part)
            (folder / kind / part).mkdir(parents=True)
            for number, few in enumerate((entries[:10], entries[10:])):
                write_tar(folder / kind / part / f"a-{number:02d}.tar", few)
            values |= {"path": f"{folder}/shards/train/a-{{00..01}}.tar", "eval_path": f"{folder}/shards/val"}
        elif kind == "parquet":
            arrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
            (folder / kind / part).mkdir(parents=True)
            images, labels = zip(*rows(part), strict=True)
            table = arrow.table({"image": list(images), "label": list(labels)})
            pytest.importorskip("pyarrow.parquet").write_table(table, folder / kind / part / "a.parquet")
            values |= {"path": f"{folder}/parquet/train", "eval_path": f"{folder}/parquet/val/*.parquet"}
    if kind == "hf":
        datasets = pytest.importorskip("datasets", reason="needs datasets")
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=CLASSES)})
        parts = {}
        for part, name in (("train", "train"), ("val", "validation")):
            images, labels = zip(*rows(part), strict=True)
            columns = {"image": [{"bytes": each, "path": None} for each in images], "label": list(labels)}
            parts[name] = datasets.Dataset.from_dict(columns, features=features)
        datasets.DatasetDict(parts).save_to_disk(str(folder / kind))
    return replace(DataConfig(**read_option("data", kind)), **values)


def read(config: DataConfig, *, start: int = 0, workers: int = 0, count: int = 4) -> list[Any]:
    dataset = build_data(config, seed=3).train
    keys = Sampler(len(dataset), seed=3, batch_size=5, start_sample=start)
    with Batches(dataset, itertools.islice(iter(keys), count), num_workers=workers) as batches:
        return list(batches)


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.filterwarnings("ignore")  # of datasets
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_folder_for_any_workers_and_after_a_resume(kind: str, tmp_path: Path) -> None:
    config, folder = write(tmp_path, kind), build_data(write(tmp_path, "image_folder"), seed=3)
    data = build_data(config, seed=3)
    keys = [(index, epoch) for epoch in (0, 2) for index in range(len(data.train))]
    assert data.facts == folder.facts
    assert same([data.train.__getitems__(keys)], [folder.train.__getitems__(keys)])  # 36 keys, augmented
    assert same([data.eval.__getitems__(keys[:18])], [folder.eval.__getitems__(keys[:18])])
    once = read(config)
    assert same(once, read(config, workers=2)) and same(once[2:], read(config, start=10, workers=1, count=2))
    bad = tmp_path / "bad.txt"
    bad.write_text(f"{data.train.name_of(4)}\n")  # type: ignore[attr-defined]
    assert len(build_data(replace(config, exclude=str(bad)), seed=3).train) == len(data.train) - 1


def damaged(path: Path, name: str) -> None:
    """A shard of five images, with a fault."""
    entries = entries_of("train")[:10]
    if name == "twice":
        entries.append(entries[0])
    elif name == "lacks":
        entries = entries[:-1]
    elif name == "label":
        entries[1] = ("0000.cls", b"-1")
    elif name == "large label":
        entries[1] = ("0000.cls", b"7" * 300)
    elif name == "mixed":
        entries[1] = ("0000.cls", b"cat")
    elif name == "nothing":
        entries = []
    write_tar(path, entries)
    content = path.read_bytes()
    if name == "cut":
        path.write_bytes(content[:1200])
    elif name == "header":
        at = content.index(b"0001.cls")
        path.write_bytes(content[:at] + b"\xff" * 512 + content[at + 512 :])
    elif name == "noise":
        path.write_bytes(b"no tar file" * 200)
    elif name == "compressed":
        path.write_bytes(b"\x1f\x8b" + content)
    elif name == "huge header":
        info = tarfile.TarInfo("0001.png")
        info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
        path.write_bytes(content[: content.index(b"0001.png")] + info.tobuf(tarfile.GNU_FORMAT) + b"x" * 4096)
    elif name == "sparse":
        info = tarfile.TarInfo("0009.png")
        info.type = tarfile.GNUTYPE_SPARSE
        path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + content)


DAMAGED = {
    "twice": "has two parts of 0000 for its image",
    "lacks": "0004: has no label; expected parts cls and one of jpg",
    "label": "has the label -1; expected from 0",
    "large label": "0000: its cls has 300 bytes; expected a class",
    "mixed": "has labels that are numbers and labels that are text",
    "nothing": "has no images with labels",
    "cut": "is cut off in 0000.png",
    "header": "damaged",
    "noise": "is no tar file, or damaged",
    "compressed": "is compressed, which has no random access",
    "huge header": "damaged",
    "sparse": "is stored with holes",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_shard_is_a_sentence_that_names_it(name: str, tmp_path: Path) -> None:
    damaged(tmp_path / "a.tar", name)
    config = replace(DataConfig(**read_option("data", "shards")), path=str(tmp_path / "a.tar"), image_size=16)
    with pytest.raises(ConfigError) as error:
        build_data(config, seed=0)
    assert str(tmp_path) in str(error.value) and DAMAGED[name] in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_hostile_names_are_only_names_and_a_shorter_shard_is_noticed(tmp_path: Path) -> None:
    entries = [
        (f"../../{n}/\x1b[2J.{part}", png(n) if part == "png" else b"%d" % (n % 2))
        for n in range(10)
        for part in ("png", "cls")
    ]
    write_tar(tmp_path / "a.tar", entries)
    config = replace(DataConfig(**read_option("data", "shards")), path=str(tmp_path / "*.tar"), image_size=16)
    data = build_data(config, seed=0)
    assert (
        data.train.__getitems__([(0, 0)])[0].shape == (1, 3, 16, 16) and sorted(tmp_path.iterdir())[0].name == "a.tar"
    )
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:600])
    with pytest.raises(RunError, match="has become shorter") as error:
        data.train.__getitems__([(0, 0)])
    assert "\x1b" not in shown(str(error.value))


@pytest.mark.parametrize(
    "pattern, said",
    [
        ("a-{0..3}.tar", "3 of 4 files are not there"),
        ("b-*.tar", "has no files"),
        ("a-{3..1}.tar", "the second one larger"),
    ],
)
def test_files_that_are_not_there_are_named(pattern: str, said: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "a-1.tar", [])
    with pytest.raises(ConfigError, match=said):
        files_of(str(tmp_path / pattern), ".tar")


@pytest.mark.parametrize(
    "columns, said",
    [
        ({"label": "y"}, "image, label, not 'y'; name it by data.columns"),
        ({"image": "label"}, "no bytes of an image, but int"),
    ],
)
def test_columns_that_do_not_fit_are_named(columns: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        build_data(replace(write(tmp_path, "parquet"), columns=columns), seed=0)
    assert said in str(error.value) and "a.parquet" in str(error.value)


OWN = """
import torch
from amp_core.data import Data

KIND = "images"

class Noise:
    def __len__(self):
        return 40
    def __getitems__(self, keys):
        labels = torch.tensor([index % 4 for index, _ in keys])
        return labels[:, None, None, None].expand(-1, 1, 8, 8) / 4, labels

def build(cfg, seed, channels):
    return Data(Noise(), Noise(), {"num_classes": 4, "image_shape": (1, 8, 8)})

def check(cfg):
    return [] if cfg.options else ["data.options=null: expected {sound: true}"]
"""
SAID = {
    "": (OWN, "data.options=null: expected {sound: true}"),
    "data.options.sound=true": (OWN, ""),
    "dry_run=true": (OWN.replace('"images"', '"pictures"'), "mine.py: KIND=pictures: Valid: identities, images"),
    "seed=1": (OWN.replace("def build", "def built"), "mine.py: is no data set: AttributeError: it has no build"),
    "data.options.sound=false": (OWN.replace('"num_classes": 4, ', ""), "its facts have no num_classes"),
    "seed=2": (OWN.replace('"num_classes": 4', '"num_classes": 3'), "of class 0 to 3; its facts have num_classes=3"),
    "seed=3": (OWN.replace("(1, 8, 8)}", "(3, 8, 8)}"), "images (1, 8, 8); its facts have image_shape=(3, 8, 8)"),
    "seed=4": (OWN.replace("Noise(), {", "[], {"), "mine.py: its part eval has no samples"),
    "seed=5": (OWN.replace("(1, 8, 8)}", "64}"), "image_shape=64; expected (channels, height, width)"),
    "recipe=language_model": (OWN, "data=mine: holds images, the recipe takes text"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("line", SAID)
def test_a_data_set_of_ones_own_is_a_file_beside_its_yaml(line: str, own_folder: Path, capsys: Any) -> None:
    text, said = SAID[line]
    (own_folder / "conf" / "data").mkdir(parents=True)
    (own_folder / "conf" / "data" / "mine.py").write_text(text)
    (own_folder / "conf" / "data" / "mine.yaml").write_text("# Mine, of noise.\ndefaults: [own]\nname: mine\n")
    small = ["device=cpu", "steps=2", "batch_size=4", "model.options.width=8", "run_dir=a"]
    flags = small if "language_model" not in line else []
    flags += ["data.options.sound=true"] * line.startswith("seed=")
    assert train.main(["--config-dir=conf", "data=mine", *flags, *line.split()]) == (2 if said else 0)
    assert said in capsys.readouterr().err
    assert train.main(["--config-dir=conf", "--help", "data"]) == 0 and "Mine, of noise." in capsys.readouterr().out
