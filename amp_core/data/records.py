"""insightface's face data sets, `train.rec` with `train.idx`, read without mxnet.

The file is RecordIO: each record is the number 0xced7230a, a word with 3 bits of flag and 29 bits of length, the data,
and zeros up to a multiple of 4 bytes. Where the data holds that number at a multiple of 4 bytes, the record is
split there without the number, and the flags mark begin, middle and end. All numbers are little-endian.

The data begins with a header: `flag` (uint32), `label` (float32), `id` and `id2` (uint64); with a flag above 0 that
many float32 labels follow. The rest is an image file. `train.idx` has a line "key<tab>offset" per record. In
insightface's layout the images have the keys 1 to N, further records have labels [first, beyond], the keys of the
images of one identity, and record 0 has labels [N + 1, key beyond the last identity].

Sources: dmlc-core's recordio.h, mxnet's recordio.py (IRHeader), insightface's face2rec2.py and image_iter.py.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from amp_core.config.errors import ConfigError, RunError

_MAGIC = struct.pack("<I", 0xCED7230A)
_LENGTH = (1 << 29) - 1
_WHOLE, _BEGIN, _MIDDLE, _END = range(4)
_HEADER = struct.Struct("<IfQQ")
_EXACT = 2**24  # float32 holds whole numbers up to here


class Records:
    """The records of a folder with `train.rec` and `train.idx`, by their sorted keys, int64 [N].

    Can be pickled and shared by forked workers. ConfigError: the index does not fit the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "train.rec"
        index = folder / "train.idx"
        try:
            table = np.loadtxt(index, dtype=np.int64, ndmin=2)
            size = self.path.stat().st_size
        except (OSError, ValueError) as error:
            raise ConfigError(f"data.path={folder}: {index.name} cannot be read: {error}") from error
        if table.shape[1:] != (2,) or not len(table) or table[:, 1].min() < 0 or table[:, 1].max() + 8 > size:
            raise ConfigError(f"data.path={folder}: {index.name} does not belong to {self.path.name}; copy both again")
        table = table[np.argsort(table[:, 0], kind="stable")]
        self.keys, self._offsets = table[:, 0].copy(), table[:, 1].copy()

    def read(self, key: int) -> tuple[NDArray[np.float32], bytes]:
        """(labels, at least one; image file) of a record. RunError: the record is missing or damaged."""
        row = int(np.searchsorted(self.keys, key))
        if row == len(self.keys) or self.keys[row] != key:
            raise RunError(f"{self.path}: has no record {key}; copy {self.path.name} and train.idx again")
        try:
            # Opened for each record: a file shared by workers has one position.
            with open(self.path, "rb") as file:
                file.seek(self._offsets[row])
                return _unpack(_read_record(file))
        except (OSError, ValueError, struct.error) as error:
            raise RunError(f"{self.path}: record {key} cannot be read: {error}; copy the file again") from error

    def identities(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(keys of the images, an identity's number for each), both [number of images].

        From the identities' own records where there are any, which is quick; else from the header of each image.
        ConfigError: a label is no number of an identity or of a record.
        """
        labels, image = self.read(int(self.keys[0]))
        if image or len(labels) < 2:
            return self.keys, self._first_labels(self.keys)
        beyond, last = self._whole(labels[:2], self.keys[0]).tolist()
        if last <= beyond or last > _EXACT:
            keys = self.keys[(self.keys > 0) & (self.keys < beyond)] if beyond < _EXACT else self.keys[1:]
            return keys, self._first_labels(keys)
        ranges = []  # [first, beyond]: the keys of the images of each identity
        for key in range(beyond, last):
            labels = self.read(key)[0]
            ranges.append(pair := self._whole(labels[:2], key))
            if len(pair) < 2 or pair[0] > pair[1]:
                what = f"has the labels {labels.tolist()}: expected [first, beyond]"
                raise ConfigError(f"{self.path}: record {key} {what}")
        keys = np.concatenate([np.arange(*pair) for pair in ranges])
        return keys, np.repeat(np.arange(len(ranges)), [second - first for first, second in ranges])

    def _whole(self, labels: NDArray[np.float32], keys: ArrayLike) -> NDArray[np.int64]:
        """Labels as whole numbers, of the record with this key or of those with these."""
        bad = ~((labels >= 0) & (labels < 2.0**63))  # also NaN
        if bad.any():
            key, label = np.broadcast_to(keys, bad.shape)[bad.argmax()], labels[bad.argmax()]
            expected = "expected a finite number of at least 0; make the file again from labels that count from 0"
            raise ConfigError(f"{self.path}: record {key} has the label {label:g}: {expected}")
        return labels.astype(np.int64)

    def _first_labels(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first label of each record, without its image."""
        data = np.memmap(self.path, dtype=np.uint8, mode="r")
        offsets = self._offsets[np.searchsorted(self.keys, keys)]
        labels = np.empty(len(keys), dtype=np.int64)
        step = 1 << 16  # 8 bytes of framing, 24 of header, and the first label after it
        for first in range(0, len(keys), step):
            places = offsets[first : first + step, None] + np.arange(36)
            heads = np.ascontiguousarray(data[np.minimum(places, len(data) - 1)])
            if (heads[:, :4] != np.frombuffer(_MAGIC, dtype=np.uint8)).any():
                raise ConfigError(f"{self.path}: does not match train.idx; copy both again")
            numbers = heads.view("<f4")
            several = heads.view("<u4")[:, 2] > 0
            found = np.where(several, numbers[:, 8], numbers[:, 3])
            labels[first : first + step] = self._whole(found, keys[first : first + step])
        return labels


# --- framing ----------------------------------------------------------------------------------------------------------


def _read_record(file: BinaryIO) -> bytes:
    parts = []
    while True:
        magic, word = file.read(4), file.read(4)
        if magic != _MAGIC or len(word) < 4:
            raise ValueError("it does not begin with the number of a record")
        flag, length = divmod(int.from_bytes(word, "little"), _LENGTH + 1)
        if flag not in ((_WHOLE, _BEGIN) if not parts else (_MIDDLE, _END)):
            raise ValueError(f"its part {len(parts)} has the flag {flag}")
        parts.append(file.read(length))
        if len(parts[-1]) < length:
            raise ValueError("the file ends within it")
        if flag in (_WHOLE, _END):
            return _MAGIC.join(parts)
        file.seek(-length % 4, io.SEEK_CUR)


def _unpack(data: bytes) -> tuple[NDArray[np.float32], bytes]:
    flag, label, _, _ = _HEADER.unpack_from(data)
    if not flag:
        return np.array([label], dtype=np.float32), data[_HEADER.size :]
    start = _HEADER.size + 4 * flag
    if start > len(data):
        raise ValueError(f"it is shorter than its {flag} labels")
    return np.frombuffer(data, "<f4", count=flag, offset=_HEADER.size).astype(np.float32), data[start:]
