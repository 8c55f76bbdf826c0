"""Masks of COCO's json, one per category: polygons and run lengths, crowds void.

https://cocodataset.org/#format-data. `pycocotools` draws them. All are kept as compressed run lengths in three arrays:
forked workers would copy a million lists page by page.
"""

from __future__ import annotations

import importlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_core.config.errors import ConfigError
from amp_core.config.schema import DataConfig
from amp_core.data.base import Chosen, Data
from amp_core.data.masks import VOID, MaskFiles

_MOST_PIXELS = 2**27


class Annotations:
    """The annotations of a file. ConfigError: it is none of COCO's, or an annotation is wrong.

    Attributes:
        names: of the categories, by their ids.
        pairs: (path of the image, its row in `sizes`) of each image.
    """

    def __init__(self, path: str) -> None:
        self._path, self._mask = path, importlib.import_module("pycocotools.mask")
        try:
            contents = json.loads(Path(path).expanduser().read_bytes())
            images, given = contents["images"], contents["annotations"]
            categories = {each["id"]: str(each["name"]) for each in contents["categories"]}
            rows = {each["id"]: row for row, each in enumerate(images)}
            self._sizes = np.array([(each["height"], each["width"]) for each in images], dtype=np.int64).reshape(-1, 2)
            files = [str(each["file_name"]) for each in images]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            what = f"{type(problem).__name__}: {problem}"
            raise ConfigError(f"{path}: is no json of COCO's instances: {what}") from problem
        if not images or not categories:
            found = f"{len(images)} images and {len(categories)} categories"
            raise ConfigError(f"{path}: has {found}; expected some of both")
        if (self._sizes < 1).any() or (self._sizes.prod(1) > _MOST_PIXELS).any():
            raise ConfigError(f"{path}: has an image of no sane size; expected at most {_MOST_PIXELS:,} pixels")
        if len(rows) < len(images):
            raise ConfigError(f"{path}: has two images of one id; expected ids of their own")
        self.names = [categories[number] for number in sorted(categories)]
        numbers = {number: place for place, number in enumerate(sorted(categories))}
        parts: list[list[tuple[int, bool, bytes]]] = [[] for _ in images]
        for number, each in enumerate(given):
            try:
                row, category = rows[each["image_id"]], numbers[each["category_id"]]
                runs = self._runs(each["segmentation"], *map(int, self._sizes[row]))
            except Exception as problem:  # pycocotools raises many kinds
                what = f"annotation {number} (id {each.get('id') if isinstance(each, dict) else each})"
                raise ConfigError(f"{path}: {what}: {type(problem).__name__}: {problem}") from problem
            parts[row].append((category, bool(each.get("iscrowd")), runs))
        flat = [part for row in parts for part in row]
        self._ends = np.cumsum([0, *map(len, parts)])
        self._categories = np.array([(category, crowd) for category, crowd, _ in flat], dtype=np.int32).reshape(-1, 2)
        self._places = np.cumsum([0, *(len(runs) for *_, runs in flat)])
        self._bytes = np.frombuffer(b"".join(runs for *_, runs in flat), dtype=np.uint8)
        root = _root(Path(path).expanduser(), files)
        self.pairs = [(str(root / file), str(row)) for row, file in enumerate(files)]
        self.root = str(root)

    def _runs(self, segmentation: Any, height: int, width: int) -> bytes:
        """Polygons, or run lengths as a list or compressed, as compressed ones."""
        if isinstance(segmentation, dict):
            if list(segmentation["size"]) != [height, width]:
                raise ValueError(f"its size is {segmentation['size']}, that of its image {[height, width]}")
            given = segmentation["counts"]
            counts = given if isinstance(given, list) else _numbers(given.encode())
            if any(type(each) is not int or each < 0 for each in counts) or sum(counts) != height * width:
                raise ValueError(f"its runs have {sum(counts)} pixels, its image {height * width}")
            found = self._mask.frPyObjects(segmentation, height, width) if counts is given else segmentation
            return found["counts"] if isinstance(found["counts"], bytes) else found["counts"].encode()
        if any(len(polygon) < 6 or len(polygon) % 2 for polygon in segmentation):
            raise ValueError("has a polygon without three points, x and y each")
        if not np.isfinite(np.concatenate([np.zeros(1), *segmentation])).all():
            raise ValueError("has a point that is no number")
        if not segmentation:
            raise ValueError("has no polygon")
        return bytes(self._mask.merge(self._mask.frPyObjects(segmentation, height, width))["counts"])

    def masks(self, row: str) -> NDArray[np.uint8]:
        """[categories, H, W] of 0, 1 and VOID of an image."""
        number = int(row)
        height, width = map(int, self._sizes[number])
        found = np.zeros((len(self.names), height, width), dtype=np.uint8)
        own = range(self._ends[number], self._ends[number + 1])
        for at in sorted(own, key=lambda at: not self._categories[at, 1]):  # a crowd is void where no object is
            category, is_crowd = self._categories[at].tolist()
            runs = self._bytes[self._places[at] : self._places[at + 1]].tobytes()
            with warnings.catch_warnings(action="ignore"):  # of numpy 2 about an array of pycocotools
                drawn = self._mask.decode({"size": [height, width], "counts": runs}) > 0
            found[category][drawn] = VOID if is_crowd else 1
        return found


def _numbers(runs: bytes) -> list[int]:
    """The lengths in compressed runs, by rleFrString of COCO's maskApi.c, which does not check them."""
    found: list[int] = []
    at = 0
    while at < len(runs):
        number = shift = 0
        is_more = True
        while is_more:
            bits = runs[at] - 48
            number |= (bits & 31) << shift
            at, shift, is_more = at + 1, shift + 5, bool(bits & 32)
        number |= -1 << shift if bits & 16 else 0
        found.append(number + found[-2] if len(found) > 2 else number)
    return found


def _root(path: Path, files: list[str]) -> Path:
    """The folder of the images: COCO's, train2017 beside annotations, or one near the file."""
    named = path.stem.partition("_")[2]
    tried = [path.parent.parent / named, path.parent / named, path.parent / "images", path.parent, path.parent.parent]
    if bad := [file for file in files if os.path.isabs(file) or ".." in Path(file).parts]:
        raise ConfigError(f"{path}: names the image {bad[0]}; expected a name below a folder")
    found = next((folder for folder in tried if (folder / files[0]).is_file()), None)
    if found is None:
        raise ConfigError(f"{path}: {files[0]} is in none of {', '.join(map(str, dict.fromkeys(tried)))}")
    return found


def build_coco(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.path and cfg.image_size, "check_data was not asked"
    size, chosen, train = cfg.image_size, Chosen(cfg), Annotations(cfg.path)
    other = train if cfg.eval_path is None else Annotations(cfg.eval_path)
    if other.names != train.names:
        raise ConfigError(f"data.eval_path={cfg.eval_path}: has other categories than data.path={cfg.path}")

    def part(of: Annotations, rows: Any, augment: bool) -> MaskFiles:
        files = MaskFiles(of.pairs, size, augment, seed, of.root, of.masks, len(of.names)).taken(rows)
        files = chosen.of(files)
        if not len(files):
            raise ConfigError(f"data.path={of._path}: no images are left; expected two or more")
        return files

    held = np.arange(len(train.pairs)) % 5 == 4
    rows = (~held, held) if cfg.eval_path is None else (slice(None), slice(None))
    parts = part(train, rows[0], bool(cfg.augment)), part(other, rows[1], False)
    facts = {"image_shape": (3, size, size), "num_masks": len(train.names)}
    return chosen.finish(Data(*parts, facts, classes=train.names))
