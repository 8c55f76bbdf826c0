"""The manifest of a step folder: sizes and SHA-256 of its files, checked without torch and without unpickling."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amp_core.config.errors import CheckpointError

FORMAT = 1
STATE = "state.pt"
MANIFEST = "manifest.json"
SHARD_FILE = re.compile(r"(parts|whole)_[0-9]{5,}\.safetensors")
STEP_FOLDER = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")
RESERVED = ("progress", "config", "format", "sharded")
DEFAULTS: Mapping[str, Any] = {"scaler": {}}
"""Entries that every checkpoint has, also of a run without such a part."""
LARGEST_MANIFEST = 1 << 30
"""Bytes; a run of 1024 ranks and 700 weights with two moments each has a quarter of it."""
_CHUNK = 1 << 24


class CorruptFile(Exception):
    """What a file holds is not what it should hold."""


def encode(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest; its `digest` is the SHA-256 of the compact form of all the rest."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    compact = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(compact.encode()).hexdigest()
    return (json.dumps({**rest, "digest": digest}, sort_keys=True, indent=2, allow_nan=False) + "\n").encode()


def digest_of(data: Sequence[bytes | bytearray | memoryview]) -> dict[str, Any]:
    """The entry of a file in the manifest."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(part)
    return {"bytes": sum(map(len, data)), "sha256": digest.hexdigest()}


def step_folders(folder: Path) -> dict[int, Path]:
    """By number, since names sort wrongly from step 100 million on."""
    try:
        matches = [STEP_FOLDER.fullmatch(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return {}
    return {int(match[1]): folder / match[0] for match in matches if match}


def inspect(folder: Path) -> dict[str, Any]:
    """The manifest, after all checks that need not read the other files.

    Raises:
        CorruptFile: it is damaged.
        CheckpointError: it is sound but written by a newer version.
    """
    raw = read_file(folder / MANIFEST, LARGEST_MANIFEST)
    try:
        manifest = json.loads(raw)
        # Byte for byte, so that no change goes unnoticed, not even of white space.
        if raw != encode(manifest):
            raise CorruptFile(f"{MANIFEST} does not have its own digest")
        if manifest["format"] > FORMAT:
            raise CheckpointError(f"{folder} has format {manifest['format']}, newer than {FORMAT}: update this project")
        step, files = manifest["step"], manifest["files"]
        if type(step) is not int or step < 0 or STATE not in files:
            raise TypeError
        if any(value is not None and type(value) is not float for value in manifest["metrics"].values()):
            raise TypeError
        if STEP_FOLDER.fullmatch(folder.name) and folder.name != f"step_{step:08d}":
            raise CorruptFile(f"it is of step {step}")
        for name, entry in files.items():
            if type(entry["sha256"]) is not str or (name != STATE and not SHARD_FILE.fullmatch(name)):
                raise TypeError
            if (found := _stat(folder / name).st_size) != entry["bytes"]:
                raise CorruptFile(f"{name} has {found} bytes, not {entry['bytes']}")
    except (AttributeError, KeyError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise CorruptFile(f"{MANIFEST} cannot be understood") from error
    return manifest


def is_sound(folder: Path, rank: int = 0, num_ranks: int = 1) -> bool:
    """Whether the files of a step are those of its manifest. Of several ranks each reads some of the shards."""
    try:
        files = inspect(folder)["files"]
        require_memory(STATE, files[STATE]["bytes"])
        shards = sorted(files.keys() - {STATE})
        for name in (STATE, *shards[rank::num_ranks]):
            stream(folder / name, b"", [(files[name]["bytes"], None)], files[name]["sha256"])
    except CorruptFile:
        return False
    return True


def read_file(path: Path, limit: int | None = None) -> bytes:
    """The contents of a regular file that is not larger than `limit`, by default the memory of this machine."""
    require_memory(path.name, _stat(path).st_size, limit)
    try:
        return path.read_bytes()
    except OSError as error:
        raise CorruptFile(f"{path.name}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CorruptFile(f"{path.name} does not fit into memory") from error


def require_memory(name: str, num_bytes: int, limit: int | None = None) -> None:
    """Raises CorruptFile before memory is asked for that is not there: a file without a block on disk has any size."""
    limit = limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > limit:
        raise CorruptFile(f"{name} has {num_bytes} bytes, more than the {limit} that can be read at once")


def _stat(path: Path) -> os.stat_result:
    try:
        found = os.stat(path)
    except OSError as error:
        raise CorruptFile(f"{path.name}: {error.strerror or error}") from error
    if not stat.S_ISREG(found.st_mode):  # reading a pipe or a device could last for ever
        raise CorruptFile(f"{path.name} is not a file")
    return found


def stream(
    path: Path, begin: bytes, parts: Iterable[tuple[int, Callable[[memoryview], None] | None]], sha256: str
) -> None:
    """Reads a file once and compares its SHA-256 at the end.

    Args:
        path: of the file.
        begin: its first bytes.
        parts: size of what follows, one after the other, and who takes it: in memory of its own, before it is verified.
        sha256: of the whole file, in hex.

    Raises:
        CorruptFile: it is not this file; nothing that was read may be used.
    """
    digest = hashlib.sha256()

    def fill(file: Any, data: memoryview) -> memoryview:
        reached = 0
        while reached < len(data):
            count = file.readinto(data[reached : reached + _CHUNK])
            if not count:
                raise CorruptFile(f"{path.name} ends too early")
            reached += count
        digest.update(data)
        return data

    try:
        _stat(path)
        with open(path, "rb", buffering=0) as file:
            if fill(file, memoryview(bytearray(len(begin)))) != begin:
                raise CorruptFile(f"{path.name} does not begin as its table says")
            for num_bytes, take in parts:
                if take is not None:
                    take(fill(file, memoryview(bytearray(num_bytes))))
                    continue
                for rest in range(num_bytes, 0, -_CHUNK):
                    fill(file, memoryview(bytearray(min(rest, _CHUNK))))
            if file.read(1):
                raise CorruptFile(f"{path.name} is too long")
    except OSError as error:
        raise CorruptFile(f"{path.name}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CorruptFile(f"{path.name} does not fit into memory") from error
    if digest.hexdigest() != sha256:
        raise CorruptFile(f"{path.name} does not have the SHA-256 of the manifest")
