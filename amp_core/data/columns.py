"""Columns of CSV and parquet files: numbers as they are, texts as codes. What cannot be read is named by its place.

A column holds what its first cell holds that is not missing. Memory is 8 bytes per cell of the columns that are read,
and each text once; lines, cells, columns and texts are bounded, so that a damaged file cannot take more.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_core.config.errors import ConfigError
from amp_core.config.files import open_file

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none"))
"""Cells that hold nothing, in small letters."""
MOST_COLUMNS = 1 << 14
_MOST_LINE = 1 << 24
_MOST_TEXT, _MOST_TEXTS = 256, 100_000
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}([T ].*)?")


class Column:
    """A column while it is read.

    Attributes:
        values: float64, NaN where missing: numbers, or codes of texts.
        texts: of a column of texts the code of each.
        is_text: None until it is known.
        needs_all: a missing cell is an error.
    """

    def __init__(self, name: str, is_text: bool | None = None, *, needs_all: bool = False) -> None:
        self.name, self.is_text, self._is_told, self.needs_all = name, is_text, is_text is not None, needs_all
        self.values, self.texts = array("d"), dict[str, int]()

    def add(self, cell: str) -> None:
        """Raises ValueError: what is wrong with the cell."""
        number = _number(cell)
        if number is None and cell.strip().lower() in MISSING:
            if self.needs_all:
                raise ValueError("is missing, and a target must not be; leave the row out of the file")
            self.values.append(math.nan)
        elif self.is_text or (self.is_text is None and number is None):
            self._add_text(cell.strip(), number)
        elif number is None:
            raise ValueError(f"{_short(cell)} is no number, {self._why('numbers')}")
        elif math.isinf(number):
            raise ValueError(f"{_short(cell)} is not finite; expected a number, or an empty cell")
        else:
            self.is_text = False
            self.values.append(number)

    def _add_text(self, text: str, number: float | None) -> None:
        if not self._is_told:
            if number is not None:
                raise ValueError(f"{_short(text)} is a number, {self._why('text')}")
            if _DATE.fullmatch(text):
                raise ValueError(f"{_short(text)} is a date; write numbers, or data.leave_out=[{self.name}]")
            if re.fullmatch(r"[+-]?\d+,\d+", text):
                raise ValueError(f"{_short(text)} has a decimal comma; expected a number such as 1.5")
        if number is not None and number == (whole := round(number) if math.isfinite(number) else None):
            text = str(whole)  # 1 and 1.0 are one category
        if len(text) > _MOST_TEXT:
            raise ValueError(f"holds a text of {len(text):,} characters; expected a category, at most {_MOST_TEXT}")
        self.is_text = True
        self.values.append(self.texts.setdefault(text, len(self.texts)))
        if len(self.texts) > _MOST_TEXTS:
            raise ValueError(f"holds more than {_MOST_TEXTS:,} different texts; use data.leave_out=[{self.name}]")

    def _why(self, what: str) -> str:
        if self._is_told:
            return f"and the run was trained on {what} here; correct it"
        return f"and the cells before it hold {what}; correct it, or data.categorical=[{self.name}] takes all as texts"

    def extend(self, numbers: NDArray[Any], first: int = 0) -> None:
        """Add numbers, NaN where missing. Raises _Bad for the first that does not fit."""
        if self.is_text or (self.needs_all and np.isnan(numbers).any()):
            self.extend_texts(map(repr, numbers.tolist()), first)
            return
        if len(bad := np.flatnonzero(np.isinf(numbers))):
            raise _Bad(first + int(bad[0]), "holds a number that is not finite; expected a number, or null")
        self.is_text = False
        self.values.frombytes(np.ascontiguousarray(numbers, dtype=np.float64).tobytes())

    def extend_texts(self, cells: Iterable[str | None], first: int = 0) -> None:
        """Add cells. Raises _Bad for the first that does not fit."""
        for row, cell in enumerate(cells, first):
            try:
                self.add(cell or "")
            except ValueError as problem:
                raise _Bad(row, str(problem)) from problem


class _Bad(ValueError):
    """(row, what is wrong with it)"""


def _number(cell: str) -> float | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return None if math.isnan(number) or "_" in cell else number


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


Choose = Callable[[Sequence[str], Path], list[Column]]
"""(names of the columns of a file, the file) -> those that are to be read, or ConfigError"""


def read(files: Sequence[Path], choose: Choose) -> list[Column]:
    """The chosen columns of files one after another. ConfigError names what does not fit by file, line and column."""
    columns: list[Column] = []
    first: list[str] = []
    for path in files:
        rows = _parquet(path) if path.suffix == ".parquet" else _csv(path)
        names = next(rows)
        if len(names) > MOST_COLUMNS:
            raise ConfigError(f"{path}: has {len(names):,} columns; expected at most {MOST_COLUMNS:,}")
        name, count = Counter(names).most_common(1)[0] if names else ("", 0)
        if count > 1:
            raise ConfigError(f"{path}: has {count} columns {_short(name)}; rename them")
        if first and names != first:
            raise ConfigError(f"{path}: has other columns than {files[0].name}: {', '.join(names[:8])}")
        columns, first = columns or choose(names, path), names
        rows.send([(names.index(column.name), column) for column in columns])
    return columns


Rows = Any
"""A generator: gives the names of the columns, is sent (place, column) pairs, and fills them."""


def _csv(path: Path) -> Rows:
    separator = ","

    def texts(lines: Iterable[bytes]) -> Iterator[str]:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            if len(line) > _MOST_LINE:
                raise ConfigError(f"{where}: is longer than {_MOST_LINE >> 20} MiB; expected a line per row")
            try:
                text = line.decode()
            except UnicodeDecodeError as problem:
                cell = line[: problem.start].count(separator.encode()) + 1
                said = f"byte {line[problem.start]:#04x} is not UTF-8; save the file as CSV in UTF-8, or as parquet"
                raise ConfigError(f"{where}, cell {cell}: {said}") from None
            yield text.removeprefix("\ufeff") if number == 1 else text

    with os.fdopen(open_file(path), "rb") as file:
        lines = texts(iter(lambda: file.readline(_MOST_LINE + 1), b""))
        if (head := next(lines, None)) is None:
            raise ConfigError(f"{path}: is empty; expected a line of names of columns, then a line per row")
        separator = max(",;\t|", key=re.sub('"[^"]*"', "", head).count)
        rows = csv.reader(itertools.chain([head], lines), delimiter=separator, skipinitialspace=True, strict=True)
        try:
            names = [name.strip() for name in next(rows)]
            if all(_number(name) is not None for name in names):
                raise ConfigError(f"{path}, line 1: holds numbers; expected the names of the columns")
            wanted = yield names
            for row in rows:
                if not row:
                    continue
                if len(row) != len(names):
                    raise ConfigError(f"{path}, line {rows.line_num}: has {len(row)} cells; expected {len(names)}")
                for place, column in wanted:
                    try:
                        column.add(row[place])
                    except ValueError as problem:
                        where = f"{path}, line {rows.line_num}, column {column.name}"
                        raise ConfigError(f"{where}: {problem}") from problem
        except csv.Error as problem:
            raise ConfigError(f"{path}, line {rows.line_num}: {problem}; is a quote not closed?") from problem
    yield


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import pyarrow  # type: ignore[import-not-found]
    import pyarrow.parquet as parquet  # type: ignore[import-not-found]

    try:
        with parquet.ParquetFile(path) as table:
            yield table
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: cannot be read as parquet: {problem}") from problem


def rows_of_parquet(path: Path, names: Sequence[str], hint: str) -> Iterator[tuple[Any, ...]]:
    """Python's values of these columns, row by row. ConfigError: it cannot be read, or one is missing, with a hint."""
    with _opened(path) as table:
        known = table.schema_arrow.names
        if lost := [name for name in names if name not in known]:
            raise ConfigError(f"{path}: has the columns {', '.join(known[:8])}, not {lost[0]!r}; {hint}")
        for batch in table.iter_batches(batch_size=128, columns=list(names)):
            yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)


def _parquet(path: Path) -> Rows:
    with _opened(path) as table:
        wanted = yield list(table.schema_arrow.names)
        row = 0
        for batch in table.iter_batches(batch_size=1 << 14, columns=[column.name for _, column in wanted]):
            for _, column in wanted:
                try:
                    _add_arrow(column, batch.column(column.name), row)
                except _Bad as problem:
                    at, said = problem.args
                    raise ConfigError(f"{path}, row {at}, column {column.name}: " + said) from problem
            row += len(batch)
    yield


def _add_arrow(column: Column, values: Any, first: int) -> None:
    import pyarrow.types as types  # type: ignore[import-not-found]

    kind = values.type
    if types.is_dictionary(kind):
        values = values.dictionary_decode()
        kind = values.type
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        column.extend(values.cast("float64", safe=False).to_numpy(zero_copy_only=False), first)
    elif types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind):
        column.extend_texts(values.to_pylist(), first)
    elif types.is_temporal(kind):
        raise _Bad(first, f"holds dates or times ({kind}); write numbers, or data.leave_out=[{column.name}]")
    else:
        raise _Bad(first, f"holds {kind}; expected numbers or text, or data.leave_out=[{column.name}]")
