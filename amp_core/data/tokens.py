"""Token ids in files: shards of nanoGPT, llm.c, Megatron and numpy, texts tokenized once, and mixtures.

Training reads ids with `pread`, a few kB at a time. Ranks and runs share the page cache, as with a memory map, but a
file that shrinks during a run raises an error with its name; a map would kill the process (SIGBUS). The check of ids
before a run, and the ends of documents, do use maps.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import io
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from amp_core.config.errors import ConfigError, RunError
from amp_core.config.files import open_file, read_json, remove, remove_leftovers, sync_folder, write_file
from amp_core.data.base import Dataset, Key, Paths, mixed, unpack
from amp_core.data.columns import rows_of_parquet
from amp_core.data.tokenizers import Tokenizer

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Shard:
    """A file of ids."""

    path: Path
    dtype: str
    """Of numpy, little-endian."""
    count: int
    """Number of ids."""
    offset: int = 0
    """Bytes before the first one."""
    ends: Ints | None = None
    """Of the documents, exclusive; None: they are not known."""


class Documents:
    """Spans of ids, each read on its own: the documents of shards, or whole shards where their ends are not known."""

    def __init__(self, shards: Sequence[Shard], *, vocab_size: int) -> None:
        self._paths, self._vocab_size = Paths(shard.path for shard in shards), vocab_size
        self._dtypes, self._offsets = [shard.dtype for shard in shards], [shard.offset for shard in shards]
        ends = [np.array([shard.count]) if shard.ends is None else shard.ends for shard in shards]
        self._last = np.cumsum([len(each) for each in ends])
        begins = [np.concatenate([[0], each[:-1]]) for each in ends if len(each)]
        self._begins = np.concatenate(begins).astype(np.int64) if begins else np.zeros(0, np.int64)
        self.sizes: Ints = np.concatenate(ends).astype(np.int64) - self._begins if ends else self._begins

    def read(self, document: int, start: int, count: int) -> NDArray[Any]:
        """`count` ids from `start` on. RunError: the file has changed, or an id is beyond the vocabulary."""
        number = int(np.searchsorted(self._last, document, side="right"))
        path, dtype = self._paths[number], np.dtype(self._dtypes[number])
        first = int(self._begins[document]) + start
        try:
            with open(path, "rb", buffering=0) as file:
                content = os.pread(
                    file.fileno(), count * dtype.itemsize, self._offsets[number] + first * dtype.itemsize
                )
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from error
        if len(content) < count * dtype.itemsize:
            raise RunError(f"{path} got shorter since the run began; do not change text while a run uses it")
        ids = np.frombuffer(content, dtype=dtype)
        if problem := _beyond(ids, self._vocab_size, first):
            raise RunError(f"{path}: {problem}; it changed since the run began")
        return ids

    def pairs(self, document: int, start: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(inputs, targets): `count` ids from `start` on, and those that follow them. Raises as `read`."""
        ids = self.read(document, start, count + 1)
        return ids[:-1], ids[1:]


def _beyond(ids: NDArray[Any], vocab_size: int, first: int) -> str | None:
    """What is wrong with the first id outside the vocabulary; None: nothing. `first`: where ids[0] is in its file."""
    if not len(ids) or (ids.max() < vocab_size and ids.min() >= 0):
        return None
    at = int(np.argmax((ids >= vocab_size) | (ids < 0)))
    limit = "ids are 0 or above" if ids[at] < 0 else f"the vocabulary has {vocab_size:,} ids"
    return f"token {first + at:,} is {ids[at]}, and {limit}"


# --- shards -----------------------------------------------------------------------------------------------------------

MANIFEST = "manifest.json"
LLMC = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""llm.c: version and dtype by the magic number, the first of the 256 int32 of the header."""
_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def read_shards(pattern: str) -> list[Shard]:
    """The shards of a file, of a folder and its subfolders, or of a glob in the last part; in order of their names.

    ConfigError: there are none, or one is damaged.
    """
    file = path = Path(pattern).expanduser()
    found = path.glob("**/*") if path.is_dir() else path.parent.glob(path.name)
    shards = sorted(f for f in found if f.suffix in (".bin", ".npy") and not f.name.endswith(".ends.npy"))
    if not (files := [path] if path.is_file() else shards):
        raise ConfigError(f"data.path={pattern}: has no *.bin or *.npy; expected token shards")
    try:
        return [_shard(file := each) for each in files]
    except (OSError, ValueError, KeyError, TypeError, EOFError, struct.error) as problem:
        about = "" if file.name in str(problem) else f"{file.name} cannot be read: "
        raise ConfigError(f"data.path={pattern}: {about}{problem}") from problem


def _shard(file: Path) -> Shard:
    size, offset = file.stat().st_size, 0
    if file.suffix == ".bin" and file.with_suffix(".idx").is_file():
        return _megatron(file, size)
    about = _about(file)
    if file.suffix == ".npy":
        array = np.lib.format.open_memmap(file, mode="r")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{file} has {array.dtype} {list(array.shape)}; expected whole numbers in one dimension")
        dtype, count, offset = array.dtype, len(array), array.offset
    else:
        with file.open("rb") as opened:
            head = opened.read(1024)
        magic, version, said = struct.unpack_from("<3i", head) if len(head) == 1024 else (0, 0, 0)
        offset = 1024 if magic in LLMC else 0
        wanted, kind = LLMC[magic] if offset else (version, about[1] if about else _dtype_of(file))
        if version != wanted:
            raise ValueError(f"{file}: an llm.c header of version {version}; expected version {wanted}")
        dtype = np.dtype(kind)
        count, odd = divmod(size - offset, dtype.itemsize)
        if offset and (said != count or odd):
            raise ValueError(f"{file}: its header says {said:,} tokens, the file has {count:,}; copy it again")
        if odd:
            multiple = f"no multiple of the {dtype.itemsize} of {dtype.name}"
            raise ValueError(f"{file} has {size:,} bytes, {multiple}; copy it again")
    if about and count != about[0]:
        raise ValueError(f"{file} has {count:,} tokens, its {MANIFEST} says {about[0]:,}")
    ends = np.lib.format.open_memmap(file.with_suffix(".ends.npy"), mode="r") if about else None
    return Shard(file, dtype.str, count, offset, ends)


def _about(file: Path) -> tuple[int, str] | None:
    """(tokens, dtype) of a shard by the manifest beside it; None: it is in none."""
    manifest = file.with_name(MANIFEST)
    if not manifest.is_file():
        return None
    try:
        about = read_json(manifest)["shards"].get(file.name)
        return None if about is None else (int(about["tokens"]), about["dtype"])
    except (AttributeError, KeyError, TypeError) as problem:
        lacks = f"does not say how many tokens {file.name} has, of what dtype"
        raise ValueError(f"{manifest} {lacks}; write both again") from problem


def _dtype_of(file: Path) -> str:
    """nanoGPT's files have no header: uint32 if every second word is below 4 (ids below 2^18), else uint16."""
    words = np.fromfile(file, "<u2", 1 << 16)
    return "<u4" if len(words) > 1 and (words[1::2] < 4).all() and (words[0::2] >= 4).any() else "<u2"


def _megatron(file: Path, size: int) -> Shard:
    index = file.with_suffix(".idx")
    head = index.read_bytes()
    magic, version, code, num_sizes, num_ends = struct.unpack_from("<9sQBQQ", head.ljust(34, b"\0"))
    is_complete = len(head) >= 34 + 12 * num_sizes + 8 * num_ends
    documents: Ints = np.frombuffer(head, "<i8", num_ends * is_complete, 34 + 12 * num_sizes if is_complete else 0)
    is_sorted = (np.diff(documents, prepend=0, append=num_sizes) >= 0).all()  # hence indices of sequences, too
    if magic != _MEGATRON or version != 1 or code not in _MEGATRON_DTYPES or not is_complete or not is_sorted:
        raise ValueError(f"{index} is damaged, or not a Megatron index of version 1 with integer ids; copy it again")
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    sizes = np.frombuffer(head, "<i4", num_sizes, 34)
    pointers = np.frombuffer(head, "<i8", num_sizes, 34 + 4 * num_sizes)
    ends = np.cumsum(sizes, dtype=np.int64)
    count = int(ends[-1]) if num_sizes else 0
    if count * dtype.itemsize != size or (pointers != (ends - sizes) * dtype.itemsize).any():
        raise ValueError(
            f"{index} says {count:,} tokens of {dtype.name}, {file.name} has {size:,} bytes; copy both again"
        )
    return Shard(file, dtype.str, count, ends=np.concatenate([[0], ends])[documents[1:]])


def check_ids(shards: Sequence[Shard], vocab_size: int | None) -> int:
    """One more than the largest id: the smallest vocabulary with all. ConfigError: one is not below `vocab_size`."""
    num_ids = 0
    for shard in shards:
        ids = np.memmap(shard.path, shard.dtype, "r", shard.offset, shard.count) if shard.count else np.zeros(0, int)
        for first in range(0, shard.count, 1 << 24):
            part = np.asarray(ids[first : first + (1 << 24)])
            num_ids = max(num_ids, int(part.max()) + 1)
            if problem := _beyond(part, 1 << 62 if vocab_size is None else vocab_size, first):
                raise ConfigError(f"{shard.path}: {problem}; use the tokenizer that made it")
    return num_ids


# --- texts ------------------------------------------------------------------------------------------------------------

_HOW = "set data.text_field, or --field of scripts/tokens.py"
_MOST_LINE = 1 << 28
_PART_CHARS, _READ_BYTES = 1 << 20, 1 << 20
_CUT = re.compile(r"[^\W_](?=\n)")
"""Longer documents are tokenized in parts, cut between a letter or digit and a newline. Pre-tokenizers like GPT-2's
split there, so ids do not change. Other tokenizers, and texts without such a place, may get other ids at a cut."""


def texts_of(file: Path, key: str, span: tuple[int, int] | None = None) -> Iterator[tuple[str, bool]]:
    """Parts of the documents of a file, and whether each ends one. ConfigError names the file and the line.

    `span`: the first byte and the last (exclusive) of the lines of *.jsonl.
    """
    kind, where, at = file.suffix.lower(), "row {}".format, 0
    try:
        if kind == ".jsonl":
            where, rows = functools.partial(_line_at, file), json_lines(file, key, span)
        elif kind == ".parquet":
            rows = enumerate((text for (text,) in rows_of_parquet(file, [key], _HOW)), 1)
        else:
            yield from _plain(file)
            return
        for at, text in rows:
            if not isinstance(text, str):
                raise ConfigError(f"{file}, {where(at)}: {key!r} is {type(text).__name__}; expected text")
            text.encode()  # only to raise UnicodeEncodeError: JSON may hold half of a surrogate pair
            yield from _parts(text)
    except UnicodeEncodeError as problem:
        raise ConfigError(f"{file}, {where(at)}: {key!r} holds half of a surrogate pair") from problem
    except OSError as problem:
        raise ConfigError(f"{file} cannot be read: {problem.strerror or problem}") from problem


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    while len(text) > _PART_CHARS:
        at = max((place.end() for place in _CUT.finditer(text, _PART_CHARS // 2, _PART_CHARS)), default=_PART_CHARS)
        yield text[:at], False
        text = text[at:]
    yield text, True


def _plain(file: Path) -> Iterator[tuple[str, bool]]:
    rest = ""
    with file.open("rb") as binary, io.TextIOWrapper(binary, "utf-8", newline="\n") as opened:
        try:
            while content := opened.read(_PART_CHARS):
                *parts, (rest, _) = _parts(rest + content)  # the last one is completed by what is read next
                yield from parts
        except UnicodeDecodeError as problem:
            at = binary.tell() - len(problem.object) + problem.start
            raise ConfigError(f"{file}, byte {at:,}: is not UTF-8") from problem
    yield rest, True


def _line_at(file: Path, place: int) -> str:
    """ "line 7" of a byte. What lies before it is read, for an error alone."""
    with file.open("rb") as opened:
        before = iter(lambda: opened.read(min(_READ_BYTES, place - opened.tell())), b"")
        number = 1 + sum(part.count(b"\n") for part in before)
    return f"line {number}"


def json_lines(file: Path, key: str, span: tuple[int, int] | None = None) -> Iterator[tuple[int, Any]]:
    """(first byte, what it has by `key`) of each line, or of those in a span. ConfigError names file and line."""
    begin, end = span or (0, -1)  # -1 is never reached: to the end of the file
    with file.open("rb") as opened:
        opened.seek(begin)
        while (at := opened.tell()) != end and (line := opened.readline(_MOST_LINE + 1)):
            try:
                value = _value(line, key)
            except ValueError as problem:
                raise ConfigError(f"{file}, {_line_at(file, at)}: {problem}") from problem
            yield at, value


def _value(line: bytes, key: str) -> Any:
    """Raises ValueError: what is wrong with the line."""
    if len(line) > _MOST_LINE:
        raise ValueError(f"has more than {_MOST_LINE >> 20} MiB; expected one document a line")
    if not line.strip():
        raise ValueError(f"is empty; expected an object with {key!r}")
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as problem:
        raise ValueError(f"is not UTF-8 (byte {problem.start} of the line)") from problem
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"is not JSON: {problem}") from problem
    if not isinstance(record, dict):
        raise ValueError(f"is not an object, expected one with the key {key!r}")
    if key not in record:
        raise ValueError(f"has the keys {', '.join(list(record)[:8])}, not {key!r}; {_HOW}")
    return record[key]


def tokens_of(
    files: Sequence[Path], tokenizer: Tokenizer, key: str, span: tuple[int, int] | None = None
) -> tuple[NDArray[np.uint32], Ints]:
    """Ids of the documents of files, each with an EOS, and where they end. `span`: bytes of lines, only of *.jsonl."""
    arrays, ends, count = [], [], 0
    for ids, is_end in _encoded(files, tokenizer, key, span):
        arrays.append(np.array(ids, dtype=np.uint32))
        count += len(ids)
        ends += [count] * is_end
    return np.concatenate(arrays or [np.zeros(0, np.uint32)]), np.array(ends, dtype=np.int64)


def _encoded(
    files: Sequence[Path], tokenizer: Tokenizer, key: str, span: tuple[int, int] | None
) -> Iterator[tuple[list[int], bool]]:
    texts = (part for file in files for part in texts_of(file, key, span))
    for parts in at_once(texts, lambda part: len(part[0])):
        for ids, (_, is_end) in zip(tokenizer.encode([text for text, _ in parts]), parts, strict=True):
            yield ids + [tokenizer.eos] * is_end, is_end  # type: ignore[operator]


def at_once(parts: Iterable[Any], length: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Enough text at a time for all cores."""
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += length(part)
        if size >= 4 * _PART_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "amp-recipes" / "tokens"


def tokenized(files: Sequence[Path], tokenizer: Tokenizer, key: str) -> list[Shard]:
    """The tokens of texts, from the cache: a shard with a manifest, made by the first process that asks.

    Named by the paths, sizes and times of the files, and by the tokenizer: a run starts without reading them again.
    """
    if tokenizer.eos is None:
        how = "write eos_token into tokenizer_config.json beside it"
        raise ConfigError(f"data.tokenizer={tokenizer.name}: names no EOS, which ends documents; {how}")
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")

    def write(folder: Path) -> None:
        ends, count = [], 0
        with (folder / "tokens.bin").open("xb") as output:
            for ids, is_end in _encoded(files, tokenizer, key, None):
                output.write(np.array(ids, dtype=dtype).tobytes())
                count += len(ids)
                ends += [count] * is_end
            output.flush()
            os.fsync(output.fileno())
        np.save(folder / "tokens.ends.npy", np.array(ends, dtype=np.int64))
        about = {"dtype": dtype.name, "tokens": count, "documents": len(ends)}
        facts = {"tokenizer": tokenizer.digest, "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos}
        write_file(folder / MANIFEST, json.dumps(facts | {"shards": {"tokens.bin": about}}, indent=1).encode())

    return read_shards(str(cached((1, tokenizer.digest, key, stamps(files)), write)))  # 1: the version of this cache


def stamps(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """What identifies the content of files without reading them: paths, sizes and times."""
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def cached(about: object, write: Callable[[Path], None]) -> Path:
    """The folder of the cache that is named by `about`; `write` fills a new one, which is there whole or not at all."""
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:32]
    root = cache_folder()
    folder = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_file(root / f"{name}.lock", os.O_RDWR | os.O_CREAT), "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it when a process dies
            if not folder.is_dir():
                remove_leftovers(root)
                temporary = root / f".tmp-{os.getpid()}-{os.urandom(8).hex()}"
                temporary.mkdir()
                try:
                    write(temporary)
                    os.rename(temporary, folder)
                except BaseException:
                    remove(temporary)
                    raise
                sync_folder(root)
    except OSError as problem:
        raise ConfigError(f"{root}: tokens cannot be kept there: {problem}; set XDG_CACHE_HOME") from problem
    return folder


# --- mixtures ---------------------------------------------------------------------------------------------------------


class Mixture:
    """Sources by weight: an exact function of (seed, index, epoch), hence of the step.

    Each source gives an epoch its share of the samples, and continues in its own sequence of permutations where the
    epoch before stopped. So a sample of a source comes again only when all others of it have come. Weights need not sum
    to 1; without a seed samples are in their order, and an epoch has `num_samples`, or as many as the sources.
    """

    def __init__(
        self, sources: Sequence[Dataset], weights: Sequence[float], seed: int | None, num_samples: int | None = None
    ) -> None:
        self._sources, self._seed = sources, seed
        self._lengths = np.array([len(source) for source in sources])
        shares = np.cumsum(np.array(weights) / np.sum(weights))
        shares[-1] = 1.0  # not 0.999...: the sum of rounded shares
        self._ends = np.round(shares * (num_samples or self._lengths.sum())).astype(np.int64)
        self._counts = np.diff(self._ends, prepend=0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        indices, epochs = unpack(keys)
        # Neighbouring indices belong to one source; the sampler shuffles them.
        which = np.searchsorted(self._ends, indices, side="right")
        draws = epochs * self._counts[which] + indices - (self._ends - self._counts)[which]
        passes, places = np.divmod(draws, self._lengths[which])
        rows, batches = [], []
        for number in np.unique(which) if len(keys) else [0]:
            here = np.flatnonzero(which == number)
            drawn = places[here]
            if self._seed is not None:  # 7919: another permutation for each source
                seed, length = self._seed + 7919 * int(number), int(self._lengths[number])
                drawn = permuted(seed, passes[here], drawn, length)
            rows.append(here)
            batches.append(
                self._sources[number].__getitems__(list(zip(drawn.tolist(), passes[here].tolist(), strict=True)))
            )
        order = torch.from_numpy(np.argsort(np.concatenate(rows)))
        return tuple(torch.cat(parts)[order] for parts in zip(*batches, strict=True))


def permuted(seed: int, passes: Ints, places: Ints, length: int) -> Ints:
    """The permutation of range(length) given by (seed, pass), at single places: without a table of the length.

    A Feistel network over the least 4^k >= length, applied again while the result is beyond the length (Black and
    Rogaway 2002, cycle walking): at most 4 times on average. 4 rounds of random functions give a permutation that is
    pseudorandom in both directions (Luby and Rackoff 1988); 6 leave a margin, as the hash is not random.
    """
    half = max(1, (max(length - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    values, todo = places.astype(np.uint64), np.arange(len(places))
    while len(todo):
        left, right = values[todo] >> np.uint64(half), values[todo] & mask
        for round_ in range(6):
            key = mixed(seed + round_ * 104729, passes[todo], right)
            left, right = right, left ^ (key & mask)
        values[todo] = (left << np.uint64(half)) | right
        todo = todo[values[todo] >= np.uint64(length)]
    return values.astype(np.int64)
