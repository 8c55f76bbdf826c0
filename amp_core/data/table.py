"""Rows of a table, and windows of a series, as a network takes them.

Numbers are standardised by the mean and the deviation of the training part alone, in float64, before anything is 16
bits; a missing number is the mean, and columns that miss some in training have a second input that says so. Categories
are codes from 1; 0 is what training never saw, and a missing cell is a category of its own where training has some.
What a network learned a table as is its `Schema`, a part of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_core.config.checks import SHIPPED, table_file, targets_of
from amp_core.config.errors import ConfigError, suggest
from amp_core.config.files import visible
from amp_core.config.schema import Config, DataConfig
from amp_core.config.sources import package_folder
from amp_core.data.base import Data, Key, every_fifth, mixed, unpack
from amp_core.data.columns import Column, read
from amp_core.data.stored import files_of

Numbers = NDArray[np.float64]


@dataclass
class Schema:
    """What a network learned a table as; a part of the checkpoint."""

    numbers: dict[str, tuple[float, float, bool]]
    """By column: mean, deviation, and whether training misses some."""
    texts: dict[str, list[str]]
    """By column of categories the texts of the codes from 1 on."""
    targets: dict[str, tuple[float, float]]
    """By column: mean and deviation; 0 and 1 for classes."""
    classes: dict[str, list[str]]
    """By target with classes their texts, by code from 0 on."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError: a network with other columns or categories has learned it."""
        for field in fields(self):
            mine, there = getattr(self, field.name), state[field.name]
            if field.name in ("numbers", "targets"):
                mine, there = dict.fromkeys(mine), dict.fromkeys(there)
            if list(mine.items()) != list(there.items()):
                differs = sorted(name for name in {*mine, *there} if mine.get(name, 0) != there.get(name, 0))
                raise ValueError(f"data.path: other columns or categories than in training: {', '.join(differs[:3])}")
        # More rows may have come; the network keeps the scale that it has learned.
        self.numbers, self.targets = dict(state["numbers"]), dict(state["targets"])

    def columns(self, with_targets: bool) -> list[Column]:
        """To read another file as this one was."""
        kinds = [(self.numbers, False), (self.texts, True)]
        kinds += [(self.targets, False), (self.classes, True)] if with_targets else []
        is_text = {name: is_text for names, is_text in kinds for name in names}
        return [Column(name, each, needs_all=name in self.targets) for name, each in is_text.items()]

    def standardised(self, of: str) -> tuple[Numbers, Numbers]:
        """(means, deviations) of `numbers` or `targets`."""
        values = [each[:2] for each in getattr(self, of).values()]
        mean, deviation = np.array(values, dtype=np.float64).reshape(-1, 2).T
        return mean, deviation


class Table:
    """Samples of a table: float32 [B, N] numbers, int64 [B, K] codes, and targets [B, T].

    Targets are int64 codes of classes, or float32 standardised numbers; of a window the columns of its first row, then
    those of its second, and so on. `which` are the rows, or the first rows of windows.
    """

    def __init__(
        self, schema: Schema, cells: tuple[Numbers, Any, Numbers], which: Any, window: int, horizon: int
    ) -> None:
        self._schema, self._which = schema, which
        self._numbers, self._codes, self._targets = cells
        self._inputs = np.arange(window or 1)
        self._outputs = window + np.arange(horizon or 1)

    def __len__(self) -> int:
        return len(self._which)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """int64 [N], where each sample has one class."""
        return self._targets[self._which, 0].astype(np.int64) if len(self._schema.classes) == 1 else None

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor, Tensor]:
        rows = self._which[unpack(keys)[0]]
        mean, deviation = self._schema.standardised("numbers")
        numbers = (self._numbers[rows[:, None] + self._inputs] - mean) / deviation
        lost = np.isnan(numbers)
        marked = np.array([misses for *_, misses in self._schema.numbers.values()], dtype=bool)
        numbers = np.concatenate([np.where(lost, 0.0, numbers), lost[..., marked]], axis=-1).reshape(len(rows), -1)
        mean, deviation = self._schema.standardised("targets")
        targets = ((self._targets[rows[:, None] + self._outputs] - mean) / deviation).reshape(len(rows), -1)
        found = torch.from_numpy(targets.astype(np.int64 if self._schema.classes else np.float32))
        return torch.from_numpy(numbers.astype(np.float32)), torch.from_numpy(self._codes[rows]), found


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(path: str, cfg: DataConfig, like: Schema | None, with_targets: bool = True) -> list[Column]:
    """The columns of a file, a folder, or a table in a package; `like` those of a schema."""
    if (name := path.removeprefix("sklearn:")) != path:
        columns = _shipped(name)
        found = _new(list(columns), path, cfg) if like is None else like.columns(with_targets)
        for column in found:
            cells = columns[column.name]
            column.extend_texts(cells.tolist()) if cells.dtype.kind == "U" else column.extend(cells)
        return found
    pattern = str(table_file(path))

    def choose(names: Sequence[str], file: Path) -> list[Column]:
        if like is None:
            return _new(names, str(file), cfg)
        wanted = like.columns(with_targets)
        if lost := [column.name for column in wanted if column.name not in names]:
            raise ConfigError(f"{file}: has no column {lost[0]}, which the run was trained with")
        return wanted

    return read(files_of(pattern, ".parquet" if any(Path(pattern).glob("*.parquet")) else ".csv"), choose)


def _new(names: Sequence[str], where: str, cfg: DataConfig) -> list[Column]:
    """Inputs, then targets. ConfigError: a column is not there."""
    targets = targets_of(cfg)
    asked = {"target": targets, "columns": cfg.columns or (), "leave_out": cfg.leave_out or ()}
    for key, columns in (asked | {"categorical": cfg.categorical or ()}).items():
        if lost := [name for name in columns if name not in names]:
            raise ConfigError(f"data.{key}: {where} has no column {lost[0]}. {suggest(lost[0], names)}")
    is_input = set(cfg.columns or names) - set(cfg.leave_out or ()) - (set() if cfg.window else set(targets))
    if not (inputs := [name for name in names if name in is_input]):
        raise ConfigError(f"data.columns: {where} has no inputs but its targets; expected a column")
    wanted = [*inputs, *(name for name in targets if name not in is_input)]
    texts = set(cfg.categorical or ())
    return [Column(name, True if name in texts else None, needs_all=name in targets) for name in wanted]


def _shipped(name: str) -> dict[str, NDArray[Any]]:
    """A table of scikit-learn, which is not imported, by column; digits with three labels."""
    folder = Path(package_folder("sklearn") or "", "datasets", "data")
    file = folder / SHIPPED[name]
    cells = np.loadtxt(file, delimiter=None if name == "diabetes" else ",", skiprows=int(name == "breast_cancer"))
    if name == "diabetes":
        return {f"x{n}": column for n, column in enumerate(cells.T)} | {
            "target": np.loadtxt(folder / "diabetes_target.csv.gz")
        }
    columns = {f"x{n}": column for n, column in enumerate(cells[:, :-1].T)} | {"target": (of := cells[:, -1])}
    if name == "breast_cancer":
        return columns | {"target": np.array(["malignant", "benign"])[of.astype(int)]}
    labels = {"even": of % 2 == 0, "above_4": of > 4, "round": np.isin(of, (0, 6, 8, 9))}
    return columns | ({key: each.astype(np.float64) for key, each in labels.items()} if name == "digits" else {})


# --- schema -----------------------------------------------------------------------------------------------------------


def _schema_of(columns: Sequence[Column], train: NDArray[np.int64], cfg: DataConfig) -> Schema:
    """From the rows `train` alone."""
    schema, where, targets = Schema({}, {}, {}, {}), f"data.path={cfg.path}", targets_of(cfg)
    for column in columns:
        cells = np.frombuffer(column.values)[train]
        there = cells[~np.isnan(cells)]
        is_target, said = column.name in targets, f"{where}: column {column.name}"
        if not len(there):
            raise ConfigError(f"{said}: has no values in the training part; use data.leave_out=[{column.name}]")
        if is_target and there.min() == there.max():
            raise ConfigError(f"{said}: holds the same value in all {len(there):,} training rows; nothing to learn")
        if column.is_text:
            texts = list(column.texts)
            found = sorted((texts[int(code)] for code in np.unique(there)), key=_in_order)
            if cfg.window:
                raise ConfigError(f"{said}: holds text, and a window holds numbers; use data.leave_out")
            if not is_target and len(found) > max(100, len(train) // 2) and column.name not in (cfg.categorical or ()):
                what = f"{len(found):,} different texts in {len(train):,} rows are no categories"
                raise ConfigError(f"{said}: {what}; use data.leave_out=[{column.name}], or data.categorical")
            if is_target:
                schema.targets[column.name], schema.classes[column.name] = (0.0, 1.0), found
            else:
                schema.texts[column.name] = [*found, *([""] if len(there) < len(cells) else [])]
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            mean, deviation = float(there.mean()), float(there.std())
        if not (math.isfinite(mean) and math.isfinite(deviation)):
            raise ConfigError(f"{said}: its numbers are too large for a mean; scale them, or leave it out")
        # The rounding of a constant's mean is no deviation.
        is_constant = deviation <= 4 * np.finfo(np.float64).eps * abs(mean)
        scale = mean, 1.0 if is_constant else deviation
        if is_target:
            schema.targets[column.name] = scale
        if not is_target or cfg.window:
            schema.numbers[column.name] = *scale, len(there) < len(cells)
    schema.targets = {name: schema.targets[name] for name in targets}
    if schema.classes and len(schema.classes) < len(targets):
        raise ConfigError(f"data.target: {', '.join(targets)} are numbers and text; expected one of them")
    return schema


def _in_order(text: str) -> tuple[bool, float, str]:
    try:
        return False, float(text), text
    except ValueError:
        return True, 0.0, text


def _cells(columns: Sequence[Column], schema: Schema, where: str) -> tuple[tuple[Numbers, Any, Numbers], list[str]]:
    """(numbers [n, N], codes [n, K], targets [n, T]) of columns, and notes. ConfigError: a target does not fit."""
    of, notes, rows = {column.name: column for column in columns}, list[str](), len(columns[0].values)

    def coded(name: str, known: Sequence[str], first: int) -> NDArray[Any]:
        """Codes from `first` on; the one before it is what training lacks."""
        codes = {text: code for code, text in enumerate(known, first)}
        table = np.array([codes.get(text, first - 1) for text in (*of[name].texts, "")])  # the last one is missing
        cells = np.frombuffer(of[name].values)
        cells = table[np.where(np.isnan(cells), -1, cells).astype(np.int64)]
        unseen, news = int((cells == first - 1).sum()), [text for text in of[name].texts if text not in codes]
        at = f"{where}: column {name}"
        if unseen and not first:
            raise ConfigError(f"{at}: has {_few(news)}, which the training part lacks; expected {_few(known)}")
        if unseen:
            few = _few(news or ["an empty cell"])
            notes.append(visible(f"{at}: {unseen:,} cells hold none of training: {few}"))
        return cells

    def target(name: str) -> NDArray[Any]:
        if name not in of:  # it is to be predicted
            return np.zeros(rows)
        return coded(name, schema.classes[name], 0) if name in schema.classes else np.frombuffer(of[name].values)

    numbers = [np.frombuffer(of[name].values) for name in schema.numbers]
    texts = [coded(name, known, 1) for name, known in schema.texts.items()]
    parts = numbers, texts, [target(name) for name in schema.targets]
    stacked = [np.stack(part, axis=1) if part else np.zeros((rows, 0)) for part in parts]
    return (stacked[0], stacked[1].astype(np.int64), stacked[2]), notes


def _few(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")


# --- builder ----------------------------------------------------------------------------------------------------------


def _parts(columns: Sequence[Column], cfg: DataConfig, seed: int, is_held: bool) -> tuple[Any, Any]:
    """(rows to train on, rows held out, int64): every fifth of each class in an order that the seed gives, or of a
    series the last fifth. Windows lie in one part alone."""
    num = len(columns[0].values)
    labels = next((c for c in columns if c.is_text and [c.name] == targets_of(cfg)), None)
    if cfg.window:
        cut = num - num // 5 if is_held else num
        most = cut - cfg.window - (cfg.horizon or 0) + 1, num - cut - cfg.window - (cfg.horizon or 0) + 1
        if most[0] < 1 or (is_held and most[1] < 1):
            short = f"data.path={cfg.path}: its {num:,} rows are too few for data.window and data.horizon"
            raise ConfigError(f"{short}; expected {5 * (cfg.window + (cfg.horizon or 0)):,}, or data.eval_path")
        return np.arange(most[0]), cut + np.arange(max(0, most[1]))
    order = np.argsort(mixed(seed, np.arange(num)), kind="stable")
    held = np.zeros(num, dtype=bool)
    if is_held:
        of = np.zeros(num) if labels is None else np.nan_to_num(np.frombuffer(labels.values), nan=-1)
        held[order[every_fifth(of[order])]] = True
    if not num - held.sum() or (is_held and not held.any()):
        raise ConfigError(f"data.path={cfg.path}: has {num} rows; expected 5 at least, or data.eval_path")
    return np.flatnonzero(~held), np.flatnonzero(held)


def build_table(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.path is not None, "check_data was not asked"
    window, horizon, told = cfg.window or 0, cfg.horizon or 0, cfg.options or {}
    schema = Schema(**told["schema"]) if "schema" in told else None

    parts, notes = list[Table](), list[str]()
    if schema is None:
        columns = _read(cfg.path, cfg, None)
        which = _parts(columns, cfg, seed, cfg.eval_path is None)
        used = np.arange(which[0][-1] + window + horizon) if window else which[0]
        schema = _schema_of(columns, used, cfg)
        cells, notes = _cells(columns, schema, cfg.path)
        parts = [Table(schema, cells, rows, window, horizon) for rows in which]
    if not parts or cfg.eval_path is not None:
        path, alone = cfg.eval_path or cfg.path, told.get("alone")
        if alone:  # as many rows as a sample has, with nothing in them
            columns = schema.columns(with_targets=False)
            for column in columns:
                column.values.extend([math.nan] * (window + horizon or 1))
        else:
            columns = _read(path, cfg, schema, told.get("with_targets", True))
        num = len(columns[0].values)
        rows = np.arange(max(0, num - window - horizon + 1) if window else num)
        if cfg.eval_path is None and not alone:
            rows = _parts(columns, cfg, seed, True)[1]
        if not len(rows):
            raise ConfigError(f"data.eval_path={path}: its {num} rows hold no sample")
        cells, more = _cells(columns, schema, path)
        notes += [] if alone else more
        parts = [*parts[:1], Table(schema, cells, rows, window, horizon)]
    facts = {
        "num_numbers": (len(schema.numbers) + sum(each[2] for each in schema.numbers.values())) * max(window, 1),
        "cardinalities": [len(texts) + 1 for texts in schema.texts.values()],
        "num_outputs": len(schema.targets) * max(horizon, 1),
    }
    classes = next(iter(schema.classes.values())) if len(schema.classes) == 1 else ()
    return Data(parts[0], parts[-1], facts, notes=tuple(notes), state=schema, classes=classes)


def with_schema(cfg: Config, schema: dict[str, Any]) -> DataConfig:
    """The data of a task with a run that has learned a table: what is predicted on may lack the targets, and an export
    needs no data."""
    alone = cfg.task == "export"
    told = {"schema": schema, "alone": alone, "with_targets": not (alone or cfg.predict_on)}
    return replace(cfg.data, eval_path=cfg.predict_on or cfg.data.eval_path, options=told)
