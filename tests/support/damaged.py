"""Damages files of a checkpoint, in every way that its bytes can change."""

from __future__ import annotations

import random
import shutil
from pathlib import Path


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _zeros(data: bytearray, rng: random.Random) -> None:
    where, length = rng.randrange(len(data)), rng.choice([1, 64, 512, 4096])
    data[where : where + length] = bytes(len(data[where : where + length]))


def _noise(data: bytearray, rng: random.Random) -> None:
    where, length = rng.randrange(len(data)), rng.choice([1, 64, 512, 4096])
    data[where : where + length] = rng.randbytes(len(data[where : where + length]))


def _moved(data: bytearray, rng: random.Random) -> None:
    """A block of the file stands at the place of another one."""
    size = min(512, len(data) // 4)
    a, b = rng.randrange(len(data) - size), rng.randrange(len(data) - size)
    data[a : a + size] = bytes(data[b : b + size])


def _longer(data: bytearray, rng: random.Random) -> None:
    data += rng.choice([b"\n", b"\0", b"\0" * 512, bytes(data)])


def _lost(data: bytearray, rng: random.Random) -> None:
    del data[(where := rng.randrange(len(data))) : where + rng.choice([1, 4, 512])]


def _empty(data: bytearray, rng: random.Random) -> None:
    data.clear()


CHANGES = (_flip, _flip, _flip, _cut, _zeros, _noise, _moved, _longer, _lost, _empty)


def damage(folder: Path, other: Path, rng: random.Random) -> str:
    """Damage the checkpoint in `folder`, so that not all of its bytes are as they were; `other` is a sound one."""
    name = rng.choice(sorted(entry.name for entry in folder.iterdir()))
    path = folder / name
    kind = rng.choice(
        ["change"] * 20 + ["missing", "both missing", "folder", "other's", "exchanged", "version", "link"]
    )
    if kind == "missing":
        path.unlink()
    elif kind == "both missing":
        for entry in list(folder.iterdir()):
            entry.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "other's":
        if (other / name).read_bytes() == path.read_bytes():  # shards, when all steps between were skipped
            return damage(folder, other, rng)
        shutil.copy(other / name, path)
    elif kind == "exchanged":
        state, manifest = folder / "state.pt", folder / "manifest.json"
        state.rename(folder / "swap")
        manifest.rename(state)
        (folder / "swap").rename(manifest)
    elif kind == "version":  # without the digest that a newer version would have written
        path = folder / "manifest.json"
        path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 2'))
    elif kind == "link":
        is_same = (other / name).read_bytes() == path.read_bytes()
        path.unlink()
        path.symlink_to(rng.choice([Path("/dev/zero"), folder, folder if is_same else other / name]))
    else:
        data = bytearray(path.read_bytes())
        change = rng.choice(CHANGES)
        change(data, rng)
        if data == path.read_bytes():
            return damage(folder, other, rng)
        path.write_bytes(data)
        kind = change.__name__.strip("_")
    return f"{kind} of {name}"
