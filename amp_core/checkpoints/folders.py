"""Step folders: their manifest, the check of their files, writing them whole or not at all, removing old ones.

Nothing here needs torch or unpickles. What changes the file system goes through `os` and config/files.py, call by call.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amp_core.config.errors import CheckpointError, SaveError
from amp_core.config.files import opened, remove, sync_folder, write_file

FORMAT = 1
STATE = "state.pt"
MANIFEST = "manifest.json"
SHARD_FILE = re.compile(r"(parts|whole)_[0-9]{5,}\.safetensors")
STEP_FOLDER = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")  # one name for each step
RESERVED = ("progress", "config", "format", "sharded")
DEFAULTS: Mapping[str, Any] = {"scaler": {}}  # what every checkpoint has, also of a run without such a part
LARGEST_MANIFEST = 1 << 30  # bytes; that of 1024 ranks and 700 weights with two moments each has a quarter of it
_READ_AT_ONCE = 1 << 24  # bytes of what nobody takes


class CorruptFile(Exception):
    """The content of a file is not what it should be."""


def encode(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest; its `digest` is the SHA-256 of the compact form of all the rest."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    # Sorted, so that equal contents have equal bytes: `inspect` compares them.
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
    """The manifest, after all checks that need not read the other files. CheckpointError: it is of a newer version."""
    raw = read_file(folder / MANIFEST, LARGEST_MANIFEST)
    try:
        manifest = json.loads(raw)
        # Byte for byte, so that no change goes unnoticed, not even of white space.
        if raw != encode(manifest):
            raise CorruptFile(f"{MANIFEST} does not have its own digest")
        if manifest["format"] > FORMAT:
            raise CheckpointError(f"{folder} has format {manifest['format']}, newer than {FORMAT}: update this project")
        step, files = manifest["step"], manifest["files"]
        are_numbers = all(value is None or type(value) is float for value in manifest["metrics"].values())
        if type(step) is not int or step < 0 or STATE not in files or not are_numbers:
            raise TypeError
        if STEP_FOLDER.fullmatch(folder.name) and folder.name != f"step_{step:08d}":
            raise CorruptFile(f"it is of step {step}")
        for name, entry in files.items():
            if type(entry["sha256"]) is not str or (name != STATE and not SHARD_FILE.fullmatch(name)):
                raise TypeError
            if (found := _size_of(folder / name)) != entry["bytes"]:
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
    require_memory(path.name, _size_of(path), limit)
    with _reading(path):
        return path.read_bytes()


def require_memory(name: str, num_bytes: int, limit: int | None = None) -> None:
    """Raise CorruptFile before allocating more than there is: a sparse file may claim any size."""
    limit = limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > limit:
        raise CorruptFile(f"{name} has {num_bytes} bytes, more than the {limit} that can be read at once")


def _size_of(path: Path) -> int:
    with _reading(path):
        found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):  # reading a pipe or a device could block forever
        raise CorruptFile(f"{path.name} is not a file")
    return found.st_size


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorruptFile(f"{path.name}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CorruptFile(f"{path.name} does not fit into memory") from error


def stream(path: Path, begin: bytes, parts: Iterable[tuple[int, Any]], sha256: str) -> None:
    """Reads a file once: it has to begin with `begin`, and to have this SHA-256 in hex, which is known at the end.

    `parts` are the sizes of what follows, and who takes it: into separate memory, before it is verified.
    """
    digest = hashlib.sha256()

    def read(num_bytes: int) -> memoryview:
        data, reached = memoryview(bytearray(num_bytes)), 0
        while reached < num_bytes:
            count = file.readinto(data[reached : reached + _READ_AT_ONCE])
            if not count:
                raise CorruptFile(f"{path.name} ends too early")
            reached += count
        digest.update(data)
        return data

    # Unbuffered: each byte is read once, into the memory where it stays.
    _size_of(path)
    with _reading(path), open(path, "rb", buffering=0) as file:
        if read(len(begin)) != begin:
            raise CorruptFile(f"{path.name} does not begin as its table says")
        for num_bytes, take in parts:
            if take is not None:
                take(read(num_bytes))
            else:
                for rest in range(num_bytes, 0, -_READ_AT_ONCE):
                    read(min(rest, _READ_AT_ONCE))
        if file.read(1):
            raise CorruptFile(f"{path.name} is too long")
    if digest.hexdigest() != sha256:
        raise CorruptFile(f"{path.name} does not have the SHA-256 of the manifest")


def complete(temporary: Path, target: Path, files: Mapping[str, Sequence[Any]]) -> None:
    """Writes the last files of a step folder, and gives it its name when they are on disk."""
    # Contents, then their names, then the rename: after a power cut a step folder has all its files, or is not there.
    for name, data in files.items():
        write_file(temporary / name, *data)
    sync_folder(temporary)
    damaged = set_aside(target) if os.path.lexists(target) else None
    _rename(temporary, target)
    if damaged:
        abandon(damaged)  # the new one is safe, and the next run tries again


def make_temporary(target: Path) -> Path:
    """The empty folder in which a step is written before it gets its name."""
    temporary = _temporary_folder(target)
    make_folder(target.parent)
    abandon(temporary)  # of a dead process with our number, as containers give the same ones out
    with opened(target.parent) as folder:
        os.mkdir(temporary.name, dir_fd=folder)
    return temporary


def abandon(temporary: Path) -> None:
    """Remove a folder if it exists and can be removed."""
    with contextlib.suppress(OSError):
        if os.path.lexists(temporary):
            remove(temporary)


def remove_old(
    folder: Path, current: int, keep: int, best: tuple[str, str] | None, verify: Callable[[Path], bool]
) -> None:
    """Removes what is neither among the newest nor the best. Damaged ones do not count, and stay.

    The step `current` was just written, and stays. `verify` says whether the files of a step are sound; it is called
    for those that are to stay.
    """
    metrics: dict[int, dict[str, Any]] = {}
    paths = step_folders(folder)
    for step, path in paths.items():
        with contextlib.suppress(CorruptFile, CheckpointError):
            metrics[step] = inspect(path)["metrics"]
    damaged: set[int] = set()

    def sound(steps: Iterable[int]) -> Iterator[int]:
        for step in steps:
            if step not in damaged and verify(paths[step]):
                yield step
            else:
                damaged.add(step)

    # Those that stay are verified before others go: a damaged newest one must not cost the last sound one.
    if len(metrics) > keep:
        newest = itertools.islice(sound(sorted(metrics, reverse=True)), keep)
        kept = {current, *newest, *itertools.islice(sound(ranking(metrics, best)), 1)}
        for step in sorted(metrics.keys() - kept - damaged):
            remove(set_aside(paths[step]))


def ranking(metrics: Mapping[int, Mapping[str, float | None]], best: tuple[str, str] | None) -> list[int]:
    """Steps with a value of the metric, the best first, the later one of equals before the other."""
    if best is None:
        return []
    name, mode = best
    values = {step: value for step, of in metrics.items() if (value := of.get(name)) is not None}
    return sorted(values, key=lambda step: (values[step] if mode == "max" else -values[step], step), reverse=True)


def set_aside(folder: Path) -> Path:
    """Renames what is to be removed, so that no step folder is ever seen half deleted."""
    trash = _temporary_folder(folder, "old-")
    if os.path.lexists(trash):
        remove(trash)
    _rename(folder, trash)
    return trash


def _rename(path: Path, to: Path) -> None:
    """Within a folder, and on disk when this returns."""
    with opened(path.parent) as folder:
        os.rename(path.name, to.name, src_dir_fd=folder, dst_dir_fd=folder)
    sync_folder(path.parent)


@contextlib.contextmanager
def saving(target: Path, num_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError into a SaveError."""
    try:
        yield
    except OSError as error:
        free: int | str = "an unknown number of"
        needed = f"{num_bytes} bytes needed, " if num_bytes else ""
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(next(path for path in target.parents if path.exists())).free
        raise SaveError(
            f"cannot save {target}: {error.strerror or error} ({needed}{free} bytes free). "
            "Earlier checkpoints are intact."
        ) from error


def _temporary_folder(folder: Path, prefix: str = "") -> Path:
    # Beside it: a rename is atomic only within one file system.
    return folder.parent / f".tmp-{prefix}{folder.name}-{os.getpid()}"


def make_folder(folder: Path) -> None:
    if not folder.is_dir():
        make_folder(folder.parent)
        os.mkdir(folder)
        # Level by level: after a power cut a folder whose name is not on disk takes all that is in it along.
        sync_folder(folder.parent)
