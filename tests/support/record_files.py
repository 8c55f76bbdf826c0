"""Writes what `amp_core.data.records` reads: `train.rec` with `train.idx`."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from amp_core.data.records import _BEGIN, _END, _HEADER, _LENGTH, _MAGIC, _MIDDLE, _WHOLE


def write_records(folder: Path, records: Iterable[tuple[int, float | Sequence[float], bytes]]) -> None:
    """Write `train.rec` and `train.idx`.

    Args:
        folder: the target; created if missing.
        records: (key, label or labels, image file) each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "train.rec", "wb") as file, open(folder / "train.idx", "w", encoding="ascii") as index:
        for key, labels, image in records:
            index.write(f"{key}\t{file.tell()}\n")
            _write_record(file, _pack(key, labels, image))


def write_faces(folder: Path, identities: Sequence[Sequence[bytes]]) -> None:
    """Write the image files of each identity in insightface's layout, see `amp_core.data.records`."""
    records: list[tuple[int, float | Sequence[float], bytes]] = []
    ranges = []
    key = 1
    for number, images in enumerate(identities):
        ranges.append((key, key + len(images)))
        for image in images:
            records.append((key, float(number), image))
            key += 1
    records += [(key + number, pair, b"") for number, pair in enumerate(ranges)]
    write_records(folder, [(0, (key, key + len(ranges)), b""), *records])


def _write_record(file: BinaryIO, data: bytes) -> None:
    parts, start, found = [], 0, data.find(_MAGIC)
    while found >= 0:
        if found % 4:
            found = data.find(_MAGIC, found + 1)
            continue
        parts.append(data[start:found])
        start = found + 4
        found = data.find(_MAGIC, start)
    parts.append(data[start:])
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        flag = _WHOLE if len(parts) == 1 else _END if last else _MIDDLE if number else _BEGIN
        if len(part) > _LENGTH:
            raise ValueError(f"a record of {len(part)} bytes: expected less than 512 MiB")
        file.write(_MAGIC + struct.pack("<I", flag << 29 | len(part)) + part + bytes(-len(part) % 4))


def _pack(key: int, labels: float | Sequence[float], image: bytes) -> bytes:
    if isinstance(labels, Sequence):
        return _HEADER.pack(len(labels), 0.0, key, 0) + np.array(labels, dtype="<f4").tobytes() + image
    return _HEADER.pack(0, labels, key, 0) + image
