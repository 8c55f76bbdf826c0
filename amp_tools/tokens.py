"""Token shards from texts, by several processes: resumable after a kill, with a manifest.

Texts are divided into parts of some MB, each tokenized into a file of its own, written whole or not at all. What a
killed run has finished is kept; the parts become shards at the end, in their order, so that the number of processes
changes no byte.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from amp_core.config.errors import ConfigError, SaveError
from amp_core.config.files import read_json, remove, sync_folder, write_whole
from amp_core.config.sources import text_files, why_no_text
from amp_core.data.tokenizers import Tokenizer, read_tokenizer
from amp_core.data.tokens import LLMC, MANIFEST, stamps, tokens_of

FORMATS = {"nanogpt": ".bin", "llmc": ".bin", "npy": ".npy"}
_PART = 1 << 25
"""Bytes of text in a part: 32 MiB, lost by a kill per process at most."""
_PLAN, _PARTS = "plan.json", "parts"


@dataclass(frozen=True)
class Job:
    """What is asked for.

    Args:
        sources: files and folders of text, *.jsonl or *.parquet.
        tokenizer: a folder with tokenizer.json, or the file.
        form: of `FORMATS`.
        key: of *.jsonl, or the column of *.parquet, that holds the documents.
        shard_tokens: tokens of a shard at most, unless one document has more.
        val_tokens: tokens, at least, of the first documents, which become val_*; 0: none.
    """

    sources: Sequence[str]
    tokenizer: str
    folder: Path
    form: str = "nanogpt"
    key: str = "text"
    shard_tokens: int = 100_000_000
    val_tokens: int = 0
    num_processes: int = 1


def make_shards(job: Job) -> list[str]:
    """Write the shards of a job, or what is left of it. Returns lines for the user.

    Raises:
        ConfigError: a file cannot be read, by its line; parts that were finished stay.
        SaveError: the folder cannot be written.
    """
    files, tokenizer = _check(job)
    units = [unit for file in files for unit in _units(file)]
    about = {
        "tokenizer": tokenizer.digest, "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos, "format": job.form,
        "text_field": job.key, "shard_tokens": job.shard_tokens, "val_tokens": job.val_tokens,
        "files": [[path, size, time] for path, size, time in stamps(files)],
    }  # fmt: skip
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        _begin(job.folder, about)
        if (job.folder / MANIFEST).is_file():
            return [f"{job.folder}: is finished already"]
        (job.folder / _PARTS).mkdir(exist_ok=True)
        began, seconds = _done(job.folder, units), time.monotonic()
        _tokenize(job, units, began)
        seconds = time.monotonic() - seconds
        shards = _join(job, units, tokenizer)
        write_whole(job.folder / MANIFEST, json.dumps(about | {"shards": shards}, indent=1).encode())
        remove(job.folder / _PARTS)
        os.unlink(job.folder / _PLAN)
    except OSError as problem:
        raise SaveError(f"{job.folder}: cannot be written: {problem.strerror or problem}") from problem
    total, documents = (sum(each[key] for each in shards.values()) for key in ("tokens", "documents"))
    read = sum(unit[2] - unit[1] for number, unit in enumerate(units) if number not in began)
    resumed = f", {len(began)} of {len(units)} parts were there" if began else ""
    speed = f"{read / max(seconds, 1e-9) / 1e6:.1f} MB/s by {job.num_processes} process(es){resumed}"
    return [f"{job.folder}: {total:,} tokens of {documents:,} documents in {len(shards)} shards; {speed}"]


def _check(job: Job) -> tuple[list[Path], Tokenizer]:
    problems = []
    if job.form not in FORMATS:
        problems.append(f"--format={job.form}: expected {', '.join(FORMATS)}")
    for key, least in (("shard_tokens", 1), ("val_tokens", 0), ("num_processes", 1)):
        if getattr(job, key) < least:
            problems.append(f"--{key.replace('_', '-')}={getattr(job, key)}: expected at least {least}")
    files: list[Path] = []
    for source in job.sources:
        found = text_files(Path(source).expanduser())
        if not found:
            problems.append(f"{source}: there is no such file, or no file in it; expected text, *.jsonl or *.parquet")
        files += found
    problems += [f"{file}: {why}" for file in files if (why := why_no_text(file, job.tokenizer))][:3]
    if job.tokenizer == "bytes":
        problems.append("--tokenizer=bytes: data=text reads bytes as they are; expected a folder with tokenizer.json")
    if problems:
        raise ConfigError(problems)
    try:
        tokenizer = read_tokenizer(job.tokenizer)
    except ConfigError as problem:
        raise ConfigError([text.replace("data.tokenizer=", "--tokenizer=") for text in problem.problems]) from problem
    if tokenizer.eos is None:
        raise ConfigError(
            f"--tokenizer={job.tokenizer}: names no EOS, which ends documents; write eos_token into "
            f"tokenizer_config.json beside it"
        )
    return files, tokenizer


def _begin(folder: Path, about: dict[str, Any]) -> None:
    """Note what the folder is for. ConfigError: it was begun for something else."""
    for name in (MANIFEST, _PLAN):
        if (folder / name).exists():
            old = read_json(folder / name)
            if changed := [key for key, value in about.items() if old.get(key) != json.loads(json.dumps(value))]:
                raise ConfigError(f"{folder}: was begun with other {', '.join(changed)}; choose another folder")
            return
    if foreign := [name for name in sorted(os.listdir(folder)) if not name.startswith(".tmp-")]:
        raise ConfigError(f"{folder}: holds {foreign[0]}, and no {_PLAN} of an earlier start; choose a new folder")
    write_whole(folder / _PLAN, json.dumps(about, indent=1).encode())


Unit = tuple[Path, int, int]
"""A part of a file: bytes of text, or rows of groups of *.parquet counted by their bytes."""


def _units(file: Path) -> list[Unit]:
    """Parts that end where a line ends; a file of plain text is one document, hence one part."""
    size = file.stat().st_size
    if file.suffix.lower() != ".jsonl" or size <= _PART:
        return [(file, 0, size)]
    ends = []
    with file.open("rb") as opened:
        for at in range(_PART, size, _PART):
            if ends and at <= ends[-1]:
                continue
            opened.seek(at - 1)
            while (line := opened.readline(1 << 20)) and not line.endswith(b"\n"):
                pass
            ends.append(opened.tell())
    ends = sorted({*ends, size})
    return [(file, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _place(folder: Path, number: int) -> Path:
    return folder / _PARTS / f"{number:06d}.npz"


def _done(folder: Path, units: Sequence[Unit]) -> set[int]:
    return {number for number in range(len(units)) if _place(folder, number).is_file()}


def _tokenize(job: Job, units: Sequence[Unit], done: set[int]) -> None:
    """All parts that are not there yet, each by one of several processes."""
    todo = [(number, unit) for number, unit in enumerate(units) if number not in done]
    total = sum(end - begin for _, begin, end in units)
    there = total - sum(end - begin for _, (_, begin, end) in todo)
    num, bar = min(job.num_processes, len(todo)), {"unit": "B", "unit_scale": True, "leave": False}
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(tqdm(total=total, initial=there, disable=not sys.stderr.isatty(), **bar))
        if num > 1:
            context, setup = multiprocessing.get_context("spawn"), (job.tokenizer, job.key, job.folder, os.getpid())
            pool = stack.enter_context(context.Pool(num, _set_up, setup))
            done_ones = pool.imap_unordered(_tokenize_part, todo)
        else:
            _own.update(tokenizer=read_tokenizer(job.tokenizer), key=job.key, folder=job.folder)
            done_ones = map(_tokenize_part, todo)
        for size, problems in done_ones:
            if problems:
                raise ConfigError(problems)
            shown.update(size)


_own: dict[str, Any] = {}


def _set_up(tokenizer: str, key: str, folder: Path, parent: int) -> None:
    """In a process of the pool."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends them
    _own.update(tokenizer=read_tokenizer(tokenizer), key=key, folder=folder)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # it was killed, and nobody else would end this process

    threading.Thread(target=watch, daemon=True).start()


def _tokenize_part(job: tuple[int, Unit]) -> tuple[int, list[str]]:
    number, (file, begin, end) = job
    tokenizer, target = _own["tokenizer"], _place(_own["folder"], number)
    try:
        ids, ends = tokens_of([file], tokenizer, _own["key"], span=(begin, end))
        np.savez(content := io.BytesIO(), ids=ids, ends=ends)
        write_whole(target, content.getbuffer())
    except ConfigError as problem:
        return 0, problem.problems
    except OSError as problem:
        return 0, [f"{target}: cannot be written: {problem.strerror or problem}"]
    return end - begin, []


def _join(job: Job, units: Sequence[Unit], tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Shards of whole documents, in the order of the parts."""
    dtype, found, pending, ends = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"), {}, [], []
    count, part, room = 0, "val" if job.val_tokens else "train", job.val_tokens or job.shard_tokens

    def close() -> None:
        nonlocal count, part, room, pending, ends
        if pending:
            number = sum(name.startswith(part) for name in found)
            name = f"{part}_{number:06d}{FORMATS[job.form]}"
            _write_shard(job, name, dtype, pending, ends)
            found[name] = {"dtype": dtype.name, "tokens": count, "documents": len(ends)}
        count, pending, ends = 0, [], []
        part, room = "train", job.shard_tokens

    for number in range(len(units)):
        with np.load(_place(job.folder, number), allow_pickle=False) as content:
            ids, limits = content["ids"].astype(dtype), content["ends"]
        begin = 0
        while begin < len(limits):
            first = int(limits[begin - 1]) if begin else 0
            # As many documents as have room; one at least. The first of `val` ends with the document that fills it.
            fit = int(np.searchsorted(limits, first + room - count, side="left" if part == "val" else "right"))
            upto = min(len(limits), fit + 1) if part == "val" else max(fit, begin)
            if upto == begin and not count:
                upto = begin + 1
            if upto > begin:
                last = int(limits[upto - 1])
                pending.append(ids[first:last])
                ends += (limits[begin:upto] - first + count).tolist()
                count += last - first
            if count >= room or upto < len(limits):
                close()
            begin = upto
    close()
    if not any(name.startswith("train") for name in found):
        raise ConfigError(
            f"--val-tokens={job.val_tokens}: leaves no document to train on; expected fewer, or more texts"
            if job.val_tokens
            else "the sources hold no document; expected texts"
        )
    sync_folder(job.folder)
    return found


def _write_shard(job: Job, name: str, dtype: np.dtype[Any], parts: Sequence[Any], ends: list[int]) -> None:
    target, count, head = job.folder / name, sum(map(len, parts)), io.BytesIO()
    if job.form == "llmc":
        magic, version = next((magic, version) for magic, (version, kind) in LLMC.items() if kind == dtype.str)
        head.write(struct.pack("<256i", magic, version, count, *[0] * 253))
    elif job.form == "npy":
        np.lib.format.write_array_header_1_0(head, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
    write_whole(target, head.getbuffer(), *(each.view(np.uint8).data for each in parts))
    np.save(target.with_suffix(".ends.npy"), np.array(ends, dtype=np.int64))
