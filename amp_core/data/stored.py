"""Labelled images in shards: tar files of WebDataset's layout, parquet, and folders of `datasets`, by random access.

Where each image lies is found once and kept in the cache, for all ranks and later runs, named by the paths, sizes and
times of the files. A sample is then read by its place alone: the same for any number of workers and ranks, and after a
resume at any sample. Nothing is extracted, so names in a shard are only names.
"""

from __future__ import annotations

import glob
import importlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from amp_core.config.errors import BadSample, ConfigError
from amp_core.config.files import open_file
from amp_core.config.kinds import named_columns
from amp_core.config.schema import DataConfig
from amp_core.config.sources import IMAGE_ENDINGS
from amp_core.data.base import Chosen, Data, Paths, every_fifth
from amp_core.data.columns import rows_of_parquet
from amp_core.data.images import ImageFiles, data_of
from amp_core.data.prepare import preparation_of
from amp_core.data.tokens import cached, stamps

_MOST_HEADER = 1 << 20
"""Bytes that a header of a tar file may have: a long name, or attributes."""
_MOST_CLASSES = 1_000_000
_MOST_NAME = 512


class Places:
    """Images by file, place and size in a folder of `_Index.save`, which workers read by themselves.

    `files`: by their numbers there, None: its own `images.bin`; `root`: below it `data.exclude` names them.
    """

    def __init__(self, folder: Path, files: Sequence[Path] | None, root: Path) -> None:
        self._files, self._root = Paths([folder / "images.bin"] if files is None else files), root
        self._table = np.lib.format.open_memmap(folder / "places.npy", mode="r")
        self._names = np.lib.format.open_memmap(folder / "names.npy", mode="r")

    def __getitem__(self, row: int) -> str:
        return f"{self._files[int(self._table[row, 0])]}, {os.fsdecode(bytes(self._names[row]))}"

    def name_of(self, row: int) -> str:
        return os.path.relpath(self[row], self._root)

    def opened(self, row: int) -> tuple[Any, str]:
        """The image as an open file, and its name."""
        number, offset, size = self._table[row].tolist()
        file = open_file(self._files[number])
        try:
            content = os.pread(file, size, offset)
        finally:
            os.close(file)
        if len(content) != size:
            raise BadSample(f"cannot read {self[row]}: the file has become shorter; copy it again")
        return io.BytesIO(content), self[row]


class Rows:
    """Images in a folder of `datasets`, memory-mapped by it."""

    def __init__(self, rows: Any, column: str) -> None:
        self._rows, self._column = rows, column

    def name_of(self, row: int) -> str:
        return f"row {row}"

    def opened(self, row: int) -> tuple[Any, str]:
        name = self.name_of(row)
        return io.BytesIO(_bytes_of(self._rows[int(row)][self._column], name)), name


def _bytes_of(value: Any, where: str) -> bytes:
    """The bytes of an image, as they are or as `datasets` stores them. A path is not followed."""
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise BadSample(f"{where}: has no bytes of an image, but {type(content).__name__}; store the images themselves")
    return content


class _Bar(tqdm):
    monitor_interval = 0  # its watching thread would be there when data loaders fork


class _Index:
    """What is found of each image: its place, name and label."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.places: list[tuple[int, int, int]] = []
        self.names: list[bytes] = []
        self.labels: list[int | str] = []

    def add(self, place: tuple[int, int, int], name: str, label: Any, where: str) -> None:
        if isinstance(label, bool) or not isinstance(label, int | str):
            raise ConfigError(f"{where}: its label is {type(label).__name__}; expected a whole number or text")
        self.places.append(place)
        self.names.append(os.fsencode(name)[:_MOST_NAME])
        self.labels.append(label)

    def counted(self, files: Sequence[Path]) -> Iterator[tuple[int, Path]]:
        """Files with their numbers, and a progress bar where they take more than 5 seconds."""
        return enumerate(_Bar(files, f"{self._what}: index", leave=False, unit="file", mininterval=5, delay=5))

    def save(self, folder: Path) -> None:
        if not self.places:
            raise ConfigError(f"{self._what}: has no images with labels")
        labels, classes = _numbered(self.labels, self._what)
        np.save(folder / "places.npy", np.array(self.places, dtype=np.int64))
        np.save(folder / "names.npy", np.array(self.names))
        np.save(folder / "labels.npy", labels)
        (folder / "classes.json").write_text(json.dumps(classes))


def _numbered(labels: Sequence[Any], what: str) -> tuple[NDArray[np.int64], list[str]]:
    """Labels as numbers from 0, and the names of the classes; text in its order."""
    kinds = {type(label) for label in labels}
    if kinds == {int}:
        if bad := [label for label in (min(labels), max(labels)) if not 0 <= label < _MOST_CLASSES]:
            raise ConfigError(f"{what}: has the label {bad[0]}; expected from 0 to below {_MOST_CLASSES:,}")
        return np.array(labels, dtype=np.int64), list(map(str, range(max(labels) + 1)))
    if kinds != {str}:
        expected = f"expected whole numbers below {_MOST_CLASSES:,} in all samples, or text"
        raise ConfigError(f"{what}: has labels that are numbers and labels that are text; {expected}")
    names = sorted(set(labels))
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[label] for label in labels], dtype=np.int64), names


# --- tar --------------------------------------------------------------------------------------------------------------


class _Headers:
    """A tar file of which headers alone are read: `tarfile` reads as much as a header claims."""

    def __init__(self, file: Any) -> None:
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > _MOST_HEADER:
            raise tarfile.HeaderError(f"a header of {size:,} bytes")
        return self._file.read(size)


def members(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, first byte, size) of the files in a tar file. ConfigError: it is damaged, cut off, or has holes."""
    size = path.stat().st_size
    with os.fdopen(open_file(path), "rb") as file:
        if file.read(2) == b"\x1f\x8b":
            raise ConfigError(f"{path}: is compressed, which has no random access; expected a plain tar: gunzip it")
        file.seek(0)
        try:
            with tarfile.TarFile(fileobj=_Headers(file), encoding="utf-8", errors="surrogateescape") as tar:  # type: ignore[arg-type]
                while (member := tar.next()) is not None:
                    vars(tar)["members"].clear()  # else all of them are kept
                    if member.issparse():
                        raise ConfigError(f"{path}: {member.name} is stored with holes; expected plain files")
                    if not member.isfile():
                        continue  # folders and links hold nothing
                    if member.size < 0 or member.offset_data + member.size > size:
                        raise ConfigError(f"{path}: is cut off in {member.name}; copy it again")
                    yield member.name, member.offset_data, member.size
                end = tar.offset
        except (tarfile.TarError, ValueError, OverflowError) as problem:
            raise ConfigError(f"{path}: is no tar file, or damaged: {problem}; copy it again") from problem
        # `tarfile` takes a damaged header for the end.
        file.seek(min(end, size))
        if file.read(512).strip(b"\0") or end > size:
            raise ConfigError(f"{path}: is damaged or cut off at byte {min(end, size):,}; copy it again")


def _key(name: str) -> tuple[str, str]:
    """(sample, part) of a name: WebDataset cuts at the first dot after the last slash."""
    folder, _, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return f"{folder}/{stem}" if folder else stem, ending.lower()


def _index_tars(files: Sequence[Path], cfg: DataConfig, folder: Path) -> None:
    columns = named_columns(cfg)
    label_part = columns.get("label", "cls")
    images = (columns["image"],) if "image" in columns else tuple(ending[1:] for ending in IMAGE_ENDINGS)
    index = _Index(f"data.path={cfg.path}")
    for number, path in index.counted(files):
        found: dict[str, dict[str, Any]] = {}
        with os.fdopen(open_file(path), "rb") as file:
            for name, offset, size in members(path):
                sample, part = _key(name)
                kind = "label" if part == label_part else "image" if part in images else None
                if kind is None:
                    continue
                parts = found.setdefault(sample, {})
                if kind in parts:
                    raise ConfigError(f"{path}: has two parts of {sample} for its {kind}; pack it again")
                parts[kind] = (name, offset, size)
                if kind == "label":
                    parts["text"] = os.pread(file.fileno(), min(size, 256), offset) if size <= 256 else b""
        for sample, parts in found.items():
            where = f"{path}, {sample}"
            if lacks := {"image", "label"} - parts.keys():
                expected = f"{label_part} and one of {', '.join(images)}; name others by data.columns"
                raise ConfigError(f"{where}: has no {lacks.pop()}; expected parts {expected}")
            name, offset, size = parts["image"]
            text = parts["text"].decode("utf-8", "replace").strip()
            if not text:
                raise ConfigError(f"{where}: its {label_part} has {parts['label'][2]:,} bytes; expected a class")
            index.add((number, offset, size), name, int(text) if re.fullmatch(r"-?\d{1,18}", text) else text, where)
    index.save(folder)


# --- parquet ----------------------------------------------------------------------------------------------------------


def _index_parquet(files: Sequence[Path], cfg: DataConfig, folder: Path) -> None:
    """Images one after another in one file: rows of parquet lie in groups that are read as a whole."""
    index = _Index(f"data.path={cfg.path}")
    with (folder / "images.bin").open("xb") as output:
        for _, path in index.counted(files):
            for row, (image, label) in enumerate(rows_of_parquet(path, _columns(cfg), "name it by data.columns")):
                try:
                    content = _bytes_of(image, f"{path}, row {row}")
                except BadSample as problem:
                    raise ConfigError(str(problem)) from problem
                place = 0, output.tell(), len(content)
                output.write(content)
                index.add(place, f"{path.name}, row {row}", label, f"{path}, row {row}")
    index.save(folder)


def _columns(cfg: DataConfig) -> tuple[str, str]:
    columns = named_columns(cfg)
    return columns.get("image", "image"), columns.get("label", "label")


# --- builders ---------------------------------------------------------------------------------------------------------

_ENDINGS = {"shards": ".tar", "parquet": ".parquet"}


def files_of(pattern: str, ending: str) -> list[Path]:
    """The files of a folder, a glob, or names with {0000..0099}, sorted. ConfigError: one is lost, or all."""
    place = os.path.expanduser(pattern)
    if (numbers := re.search(r"\{(\d+)\.\.(\d+)\}", place)) is not None:
        low, high = numbers.groups()
        if int(high) < int(low) or int(high) - int(low) > 1_000_000:
            raise ConfigError(f"{pattern}: expected numbers such as {{0000..0099}}, the second one larger")
        texts = (str(n).zfill(len(low)) for n in range(int(low), int(high) + 1))
        found = [Path(place[: numbers.start()] + text + place[numbers.end() :]) for text in texts]
    elif Path(place).is_dir():
        found = sorted(Path(place).glob(f"*{ending}"))
    else:
        found = [Path(place)] if Path(place).is_file() else sorted(map(Path, glob.glob(place)))
    if lost := [file for file in found if not file.is_file()]:
        raise ConfigError(f"{pattern}: {len(lost)} of {len(found)} files are not there, such as {lost[0]}")
    if not found:
        raise ConfigError(f"{pattern}: has no files; expected a folder with *{ending}, a glob, or name-{{0000..0099}}")
    return found


def build_stored(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    ending, root = _ENDINGS[cfg.name], Path(cfg.path or "").expanduser().parent

    def read(path: str) -> tuple[Places, NDArray[np.int64], list[str]]:
        files, own = files_of(path, ending), replace(cfg, path=path)
        index = _index_tars if cfg.name == "shards" else _index_parquet
        about = (cfg.name, 1, sorted(named_columns(cfg).items()), stamps(files))
        folder = cached(about, lambda folder: index(files, own, folder))
        labels = np.array(np.lib.format.open_memmap(folder / "labels.npy", mode="r"))
        classes = json.loads((folder / "classes.json").read_text())
        return Places(folder, files if cfg.name == "shards" else None, root), labels, classes

    return _data(cfg, seed, read)


def build_hf(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    datasets: Any = importlib.import_module("datasets")
    image, label = _columns(cfg)
    assert cfg.path, "check_data was not asked"
    try:
        stored = datasets.load_from_disk(os.path.expanduser(cfg.path))
    except Exception as problem:  # whatever a damaged folder raises
        raise ConfigError(f"data.path={cfg.path}: is no folder of save_to_disk: {problem}") from problem
    parts = stored if isinstance(stored, dict) else {"train": stored}
    held = next((name for name in ("validation", "val", "test") if name in parts), None)
    if "train" not in parts:
        raise ConfigError(f"data.path={cfg.path}: has the parts {', '.join(parts)}; expected train, and validation")

    def read(part: str) -> tuple[Rows, NDArray[np.int64], list[str]]:
        rows = parts[part]
        if lost := [name for name in (image, label) if name not in rows.column_names]:
            has = ", ".join(rows.column_names[:8])
            raise ConfigError(f"data.path={cfg.path}: has the columns {has}, not {lost[0]!r}; name it by data.columns")
        if isinstance(rows.features[image], datasets.Image):
            rows = rows.cast_column(image, datasets.Image(decode=False))
        names = getattr(rows.features[label], "names", None)
        labels, found = _numbered(rows[label][:], f"data.path={cfg.path}")
        return Rows(rows, image), labels, names or found

    return _data(replace(cfg, path="train", eval_path=held), seed, read)


def _data(cfg: DataConfig, seed: int, read: Callable[[str], Any]) -> Data:
    assert cfg.path and cfg.image_size, "check_data was not asked"
    chosen, prepared = Chosen(cfg), preparation_of(cfg.like)
    images, labels, classes = read(cfg.path)
    options: Any = {"num_classes": len(classes), "size": cfg.image_size, "seed": seed, "prepared": prepared}
    train = ImageFiles(images, labels, augment=cfg.augment, **options)
    if cfg.eval_path is None:
        held = every_fifth(labels)
        train, evaluation = train.taken(~held), replace(train, augment=False).taken(held)
    else:
        images, labels, names = read(cfg.eval_path)
        if new := sorted(set(names) - set(classes)):
            few = ", ".join(new[:3])
            raise ConfigError(f"data.eval_path={cfg.eval_path}: has classes that data.path={cfg.path} lacks: {few}")
        labels = np.array([classes.index(name) for name in names])[labels]
        evaluation = ImageFiles(images, labels, augment=False, **options)
    return replace(chosen.finish(data_of(chosen.of(train), chosen.of(evaluation))), classes=classes)
