"""data.check: read every sample once, and list those that cannot be read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from amp_core.config.errors import ConfigError, Interrupted, SaveError
from amp_core.config.files import read_bytes, visible
from amp_core.config.schema import DataConfig
from amp_core.config.sources import excluded_names
from amp_core.data import build_data
from amp_core.data.base import Dataset, Key
from amp_core.data.loading import Batches, GaveUp
from amp_core.run.environment import Environment
from amp_core.run.lines import write_text
from amp_core.run.stop import TIME_LIMIT, exit_code_of
from amp_core.run.terminal import complain, say

LIST = "bad_samples.txt"
_HEAD = "# Samples that cannot be read, for data.exclude: a name a line; after a tab why.\n"
_BATCH = 16


def check(env: Environment) -> dict[str, float]:
    """data.check=true: the whole of a run. Interrupted: it was asked to stop, and nothing is written."""
    log = env.cfg.log
    try:
        check_samples(env.cfg.data, env.stop.is_asked, progress=log.progress and not log.quiet)
    except GaveUp:
        complain(message := "data.check: interrupted; nothing was written")
        raise Interrupted(message, exit_code_of(env.stop.code), env.stop.code != TIME_LIMIT) from None
    return {}


def check_samples(cfg: DataConfig, is_asked: Callable[[], bool] = lambda: False, *, progress: bool = True) -> None:
    """Read every sample of both parts once, as a run does but without augmentation.

    Prints each sample that cannot be read, and writes `LIST` in the present folder, with the names that
    `data.exclude` holds already.

    Raises:
        ConfigError: some cannot be read; the message has their number.
        SaveError: the list cannot be written.
        RunError: a process died, or waits for longer than `timeout_minutes`; the message names its samples.
        GaveUp: `is_asked` was true between two batches; all processes have ended.
    """
    if cfg.name == "own":
        raise ConfigError("data.check=true: data=own is made by its recipe; it checks the other data sets")
    bad = list[tuple[str, str]]()
    data = build_data(replace(cfg, augment=False, prepare_on="loader"), seed=0)
    for note in data.notes:
        say(note)
    parts = {"training": data.train, "evaluation": data.eval}
    total = sum(map(len, parts.values()))
    with tqdm(total=total, unit=" samples", disable=not (progress and sys.stderr.isatty()), leave=False) as bar:
        for part, dataset in parts.items():
            name_of = getattr(dataset, "name_of", lambda index, part=part: f"{part} sample {index}")
            for found in _read(dataset, max(1, cfg.num_workers)):
                named = [(name_of(index), problem) for index, problem in found if problem]
                if named:
                    bar.clear()
                    say("\n".join(visible(f"{name}: {problem}") for name, problem in named))
                bad += named
                bar.update(len(found))
                if is_asked():
                    raise GaveUp
    if not bad:
        say(f"data={cfg.name}: all {total:,} samples can be read")
        return
    count = f"data={cfg.name}: {len(bad):,} of {total:,} samples cannot be read"
    if not hasattr(data.train, "name_of"):
        raise ConfigError(f"{count}; they are named above")
    _write(cfg.exclude, bad)
    raise ConfigError(f"{count}: their list is {LIST}. Replace them, or leave them out with data.exclude={LIST}")


class _Tried:
    """A data set whose batches are (index, what is wrong) of its samples; None: nothing."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: Sequence[Key]) -> list[tuple[int, str | None]]:
        return [(index, self._problem(index)) for index, _ in keys]

    def _problem(self, index: int) -> str | None:
        try:
            self._dataset.__getitems__([(index, 0)])
        except Exception as problem:  # readers may raise anything; read the other samples, too
            return str(problem) or type(problem).__name__
        return None


def _read(dataset: Dataset, num_workers: int) -> Iterator[list[tuple[int, str | None]]]:
    keys = ([(i, 0) for i in range(k, min(k + _BATCH, len(dataset)))] for k in range(0, len(dataset), _BATCH))
    with Batches(_Tried(dataset), keys, num_workers=num_workers) as batches:
        yield from batches


def _write(exclude: str | None, bad: Sequence[tuple[str, str]]) -> None:
    known = excluded_names(exclude) if exclude is not None else set[str]()
    lines = [f"{_one_line(name)}\n" for name in sorted(known - {name for name, _ in bad})]
    lines += [f"{_one_line(name)}\t{visible(' '.join(problem.split()))}\n" for name, problem in bad]
    try:
        if os.path.lexists(LIST) and not read_bytes(LIST, 1 << 28).startswith(_HEAD.encode()):
            raise SaveError(f"{LIST}: is there already and no list of data.check; move it away")
        write_text(Path(LIST), _HEAD + "".join(lines))
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise SaveError(f"{LIST}: cannot be written: {reason}") from problem


def _one_line(name: str) -> str:
    """As `excluded_names` reads it."""
    return name if name.isprintable() and name[0] not in '"# ' and name == name.strip() else json.dumps(name)
