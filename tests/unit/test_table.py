"""Tables: what a network gets of CSV and parquet, bit for bit and against numpy in float64, or a sentence that names the place."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from amp_core.config.checks import check_data
from amp_core.config.errors import ConfigError
from amp_core.config.options import read_option
from amp_core.config.schema import DataConfig
from amp_core.data import Data, build_data
from amp_core.data.balanced import Balanced
from amp_core.data.loading import Batches, Sampler
from amp_core.data.table import Schema

HEAD = "a,b,c,y\n"
ROWS = "".join(f"{n},{n % 3},{'uvw'[n % 3]},{n / 7}\n" for n in range(40))
SERIES = "t,x,y\n" + "".join(f"{n},{np.sin(n)},{n**2}\n" for n in range(60))

pytestmark = pytest.mark.usefixtures("own_folder")


def config(path: str = "x.csv", **keys: Any) -> DataConfig:
    return replace(DataConfig(**read_option("data", "table")), **{"path": path, "target": "y"} | keys)


def built(content: str | bytes = HEAD + ROWS, *, seed: int = 1, **keys: Any) -> Data:
    Path("x.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    return build_data(config(**keys), seed=seed)


def everything(data: Any, epochs: int = 1) -> list[torch.Tensor]:
    return list(data.__getitems__([(n, epoch) for epoch in range(epochs) for n in range(len(data))]))


def same(one: Data, other: Data) -> bool:
    parts = ((a, b) for part in ("train", "eval") for a, b in
             zip(everything(getattr(one, part)), everything(getattr(other, part)), strict=True))  # fmt: skip
    return one.facts == other.facts and all(torch.equal(a, b) for a, b in parts)


CONSTANT = "".join(f"{n},1,u,same\n" for n in range(20))
BAD: dict[str, tuple[str | bytes, dict[str, Any], str]] = {
    "a text among numbers": (HEAD + ROWS + "x,1,u,2\n", {}, "x.csv, line 42, column a: 'x' is no number, and the cells"),
    "a number among texts": (HEAD + ROWS + "1,1,5,2\n", {}, "line 42, column c: '5' is a number, and the cells before"),
    "no target": (HEAD.replace("y", "z") + ROWS, {}, "data.target: x.csv has no column y. Valid: a, b, c, z."),
    "unknown input": (HEAD + ROWS, {"columns": ["bb"]}, "data.columns: x.csv has no column bb. Did you mean b?"),
    "unknown, left out": (HEAD + ROWS, {"leave_out": ["q"]}, "data.leave_out: x.csv has no column q"),
    "unknown category": (HEAD + ROWS, {"categorical": ["q"]}, "data.categorical: x.csv has no column q"),
    "no inputs": ("y\n1\n2\n", {}, "has no inputs but its targets"),
    "empty": ("", {}, "x.csv: is empty; expected a line of names"),
    "names alone": (HEAD, {}, "has 0 rows; expected 5 at least"),
    "NaN in the target": (HEAD + ROWS + "1,1,u,NaN\n", {}, "line 42, column y: is missing, and a target must not be"),
    "one class": (HEAD + CONSTANT, {}, "column y: holds the same value in all 16 training rows"),
    "a huge cell": (HEAD + ROWS + f"1,2,{'z' * 200_000},4\n", {}, "line 42: field larger than field limit"),
    "a long text": (HEAD + ROWS + f"1,2,{'z' * 300},4\n", {}, "line 42, column c: holds a text of 300 characters"),
    "a long line": ("a,y\n" + "1" * (1 << 24) + "1\n", {}, "line 2: is longer than 16 MiB"),
    "a million columns": (",".join(map(str, range(10**6))) + ",y\n1\n", {}, "has 1,000,001 columns; expected at most 16"),
    "dates": ("d,y\n2020-01-01,3\n", {}, "line 2, column d: '2020-01-01' is a date; write numbers, or data.leave_out=[d]"),
    "Latin-1": ((HEAD + ROWS).encode() + b"1,2,\xe9,4\n", {}, "line 42, cell 3: byte 0xe9 is not UTF-8"),
    "UTF-16": ((HEAD + ROWS).encode("utf-16"), {}, "x.csv, line 1, cell 1: byte 0xff is not UTF-8"),
    "an open quote": (HEAD + ROWS + '1,2,"u,4\n' + ROWS, {}, "line 82: unexpected end of data; is a quote not closed?"),
    "a short row": (HEAD + ROWS + "1,2,u\n", {}, "x.csv, line 42: has 3 cells; expected 4"),
    "infinity": (HEAD + ROWS + "inf,2,u,3\n", {}, "line 42, column a: 'inf' is not finite"),
    "no names": ("1,2\n3,4\n", {}, "x.csv, line 1: holds numbers; expected the names of the columns"),
    "a name twice": ("a,a,y\n1,2,3\n", {}, "x.csv: has 2 columns 'a'"),
    "decimal commas": ("a;y\n1,5;3\n", {}, "line 2, column a: '1,5' has a decimal comma"),
    "names of rows": ("a;y\n" + "".join(f"n{n};{n}\n" for n in range(400)), {}, "320 different texts in 320 rows"),
    "beyond float64": (HEAD + ROWS + "1e308,1,u,1\n-1e308,1,u,1\n" * 9, {}, "column a: its numbers are too large"),
    "nothing in a column": ("a,y\n" + "".join(f",{n}\n" for n in range(9)), {}, "column a: has no values in the training"),
    "a short series": (SERIES, {"window": 50, "horizon": 5}, "its 60 rows are too few for data.window and data.horizon"),
    "text in windows": (HEAD + ROWS, {"window": 3, "horizon": 2}, "column c: holds text, and a window holds numbers"),
    "balanced numbers": (HEAD + ROWS, {"sampler": "balanced"}, "data.sampler=balanced: this data has no classes"),
    "text and numbers": (HEAD + ROWS, {"target": ["c", "y"]}, "c, y are numbers and text"),
    "old Mac": ((HEAD + ROWS).replace("\n", "\r"), {}, "new-line character seen in unquoted field"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_a_sentence_with_their_place(case: str) -> None:
    content, keys, message = BAD[case]
    with pytest.raises(ConfigError) as raised:
        built(content, **keys)
    assert message in str(raised.value) and len(raised.value.problems) == 1 and "\n" not in str(raised.value)


OF_EVAL = {
    "a,b,y\n1,1,2\n": "e.csv: has no column c, which the run was trained with",
    "a,b,c,y\n1,q,u,2\n": "e.csv, line 2, column b: 'q' is no number, and the run was trained on numbers",
    "a,b,c,y\n": "its 0 rows hold no sample",
}


@pytest.mark.parametrize("content", OF_EVAL)
def test_a_file_to_evaluate_on_must_be_like_the_first(content: str) -> None:
    Path("e.csv").write_text(content)
    with pytest.raises(ConfigError, match=OF_EVAL[content]):
        built(eval_path="e.csv")
    Path("e.csv").write_text("a,b,c,y\n1,2,new,3\n")
    with pytest.raises(ConfigError, match="column c: has new, which the training part lacks; expected u, v, w"):
        built(target="c", eval_path="e.csv")


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"target": None}, "data.target=null: expected the name of the column"),
        ({"window": 5}, "data.horizon=null: data.window=5 needs it"),
        ({"path": "lost.csv"}, "data.path=lost.csv: there is no such file or folder"),
        ({"path": "sklearn:diabetis"}, "data.path=sklearn:diabetis: there is no such table. Did you mean diabetes?"),
        ({"options": {"sep": ";"}}, "data.options.sep: has no effect"),
        ({"num_samples": 5}, "data.num_samples=5: has no effect"),
        ({"sampler": "balanced", "target": ["a", "b"]}, "data.sampler=balanced: needs one target"),
    ],
)
def test_settings_are_checked_before_a_file_is_read(keys: dict[str, Any], message: str) -> None:
    Path("x.csv").write_text(HEAD)
    assert any(problem.startswith(message) for problem in check_data(config(**keys)))


WRITTEN: dict[str, str | bytes] = {
    "BOM": b"\xef\xbb\xbf" + (HEAD + ROWS).encode(), "semicolons": (HEAD + ROWS).replace(",", ";"),
    "tabs": (HEAD + ROWS).replace(",", "\t"), "Windows": (HEAD + ROWS).replace("\n", "\r\n"), "no last end": (HEAD + ROWS)[:-1],
    "quotes": HEAD + ROWS.replace("u", '"u"'), "spaces, empty lines": (HEAD + ROWS).replace(",", ", ").replace("\n", "\n\n"),
    "a name with a comma": ('"a",b,c,y\n' + ROWS),
}  # fmt: skip


@pytest.mark.parametrize("way", [*WRITTEN, "parquet", "parts"])
def test_however_it_is_written_the_samples_are_the_same(way: str) -> None:
    expected = built()
    if way == "parquet":
        arrow = pytest.importorskip("pyarrow")
        cells = [row.split(",") for row in ROWS.split()]
        columns = {
            "a": [int(row[0]) for row in cells],
            "b": [float(row[1]) for row in cells],
            "c": [row[2] for row in cells],
        }
        table = arrow.table(columns | {"y": [float(row[3]) for row in cells]})
        pytest.importorskip("pyarrow.parquet").write_table(table, "x.parquet", row_group_size=7)
        found = build_data(config("x.parquet"), seed=1)
    elif way == "parts":
        lines = ROWS.splitlines(keepends=True)
        Path("parts").mkdir()
        for number, few in enumerate((lines[:11], lines[11:])):
            Path(f"parts/{number}.csv").write_text(HEAD + "".join(few))
        found = build_data(config("parts"), seed=1)
    else:
        found = built(WRITTEN[way])
    assert same(found, expected)


def test_numbers_are_those_of_float64_with_statistics_of_the_training_part() -> None:
    random = np.random.default_rng(0)
    table = random.normal(1e6, 3, (200, 2)) * [1, 1e-9] + [0, 2000]
    lines = [f"{a!r},{'' if n % 7 == 3 else repr(b)},{a * 2!r}" for n, (a, b) in enumerate(table.tolist())]
    data = built("a,b,y\n" + "\n".join(lines))
    seen = {n for n in range(200) if any(abs(2 * table[n, 0] - y) < 1e-6 for y in units(data, data.train))}
    assert len(seen) == 160 and len(data.eval) == 40
    a, b = (np.array([table[n, column] for n in sorted(seen) if column == 0 or n % 7 != 3]) for column in (0, 1))
    numbers = everything(data.train)[0].double().numpy()
    expected = [((table[n, 0] - a.mean()) / a.std(), 0 if n % 7 == 3 else (table[n, 1] - b.mean()) / b.std(), n % 7 == 3)
                for n in sorted(seen)]  # fmt: skip
    assert np.abs(numbers - np.array(expected, dtype=float)).max() < 4 * 2.0**-23  # rounded to fp32 once, below 4
    # As fp32 first, the second column would have 24 bits for 2000 and its deviation of 3e-9 would be 0.
    assert len(np.unique(table[:, 1].astype(np.float32))) < 3 < len(np.unique(numbers[:, 1]))


def units(data: Data, part: Any) -> list[float]:
    """Targets of a part in their own units."""
    mean, deviation = data.state.standardised("targets")
    return (everything(part)[2].double().numpy()[:, 0] * deviation + mean).tolist()


def test_the_held_out_part_is_a_function_of_the_seed_and_changes_no_statistic() -> None:
    one, again, other = built(seed=1), built(seed=1), built(seed=2)
    assert same(one, again) and not torch.equal(everything(one.eval)[2], everything(other.eval)[2])
    held = {round(value * 7) for value in units(one, one.eval)}
    rows = [f"{n * 1000 if n in held else n},{n % 3},{'uvw'[n % 3]},{n / 7}\n" for n in range(40)]
    changed = built(HEAD + "".join(rows))
    assert changed.state == one.state and torch.equal(everything(changed.train)[0], everything(one.train)[0])
    assert not torch.equal(everything(changed.eval)[0], everything(one.eval)[0])
    classes = built(HEAD + ROWS, target="c")
    assert Counter(everything(classes.eval)[2][:, 0].tolist()) == {0: 2, 1: 2, 2: 2}  # every fifth of 14, 13, 13


def test_categories_that_training_never_saw_are_code_0_and_a_missing_one_is_known_where_training_has_some() -> None:
    Path("e.csv").write_text("a,b,c,y\n1,2,v,3\n1,,new,3\n1,2,,3\n")
    data = built(HEAD + ROWS, eval_path="e.csv", categorical=["b"])
    assert data.state.texts == {"b": ["0", "1", "2"], "c": ["u", "v", "w"]} and data.facts["cardinalities"] == [4, 4]
    assert everything(data.eval)[1].tolist() == [[3, 2], [0, 0], [3, 0]]
    assert [note.partition(":")[2] for note in data.notes] == [
        " column b: 1 cells hold none of training: an empty cell", " column c: 2 cells hold none of training: new"
    ]  # fmt: skip
    known = built(HEAD + ROWS + "1.0,2,,3\n" * 5, eval_path="e.csv", categorical=["b"])
    assert everything(known.eval)[1].tolist() == [[3, 2], [0, 0], [3, 4]]


def test_windows_of_a_series_lie_in_one_part_and_its_statistics_are_of_the_first() -> None:
    data = built(SERIES, leave_out=["t"], window=4, horizon=3)
    rows = np.array([line.split(",")[1:] for line in SERIES.split()[1:]], dtype=float)
    cut = 48  # the last fifth is held out
    mean, deviation = rows[:cut].mean(0), rows[:cut].std(0)
    for part, first, end in ((data.train, 0, cut), (data.eval, cut, 60)):
        numbers, codes, targets = everything(part)
        assert len(part) == end - first - 4 - 3 + 1 and codes.shape == (len(part), 0)
        for at in range(len(part)):
            window = (rows[first + at : first + at + 7] - mean) / deviation
            assert torch.equal(numbers[at], torch.tensor(window[:4].reshape(-1), dtype=torch.float32))
            assert torch.equal(targets[at], torch.tensor(window[4:, 1], dtype=torch.float32))
    assert data.facts["num_numbers"] == 8 and data.facts["num_outputs"] == 3


def test_a_schema_from_a_checkpoint_gives_the_same_numbers_and_refuses_other_columns() -> None:
    data, more = built(), built(HEAD + ROWS + "500,1,u,9\n")
    state = data.state.state_dict()
    more.state.load_state_dict(state)
    assert more.state == data.state == Schema(**state)
    for key in ("leave_out", "categorical"):
        with pytest.raises(ValueError, match="other columns or categories than in training: b"):
            build_data(replace(config(), **{key: ["b"]}), seed=1).state.load_state_dict(state)


# --- balanced draws ---------------------------------------------------------------------------------------------------

UNBALANCED = "a,y\n" + "".join(f"{n},{'rare' if n % 20 == 0 else 'often' if n % 3 else 'some'}\n" for n in range(150))


def test_balanced_draws_have_equal_counts_and_go_through_all_samples() -> None:
    data = built(UNBALANCED, target="y", sampler="balanced")
    draws, inner = data.train, data.train._dataset  # type: ignore[attr-defined]
    per_class = Counter(inner.labels.tolist())
    assert isinstance(draws, Balanced) and min(per_class.values()) * 10 < max(per_class.values())
    seen: Counter[int] = Counter()
    for epoch in range(12):
        drawn = [draws.drawn(n, epoch)[0] for n in range(len(draws))]
        counts = Counter(inner.labels[drawn].tolist()).values()
        assert sum(counts) == len(draws) and max(counts) - min(counts) <= 1 and len(counts) == 3
        seen.update(drawn)
    for label in per_class:
        of = [seen[n] for n in range(len(draws)) if inner.labels[n] == label]
        assert max(of) - min(of) <= 1  # none again before each other one
    other = Balanced(inner, 2)
    assert [other.drawn(n, 0) for n in range(50)] != [draws.drawn(n, 0) for n in range(50)]


def test_balanced_draws_are_the_same_for_any_workers_ranks_and_start() -> None:
    dataset = built(UNBALANCED, target="y", sampler="balanced").train

    def read(workers: int, world: int, start: int = 0) -> torch.Tensor:
        """Of 40 steps of 12 samples, over several epochs, what is left from `start` on."""
        parts = []
        for rank in range(world):
            keys = Sampler(
                len(dataset), seed=3, batch_size=12 // world, rank=rank, world_size=world, start_sample=start
            )
            with Batches(dataset, itertools.islice(iter(keys), 40 - start // 12), num_workers=workers) as batches:
                parts.append([batch[0] for batch in batches])
        return torch.cat([batch for step in zip(*parts, strict=True) for batch in step])

    once = read(0, 1)
    assert (
        torch.equal(once, read(2, 1))
        and torch.equal(once, read(0, 2))
        and torch.equal(once[12 * 17 :], read(0, 1, 12 * 17))
    )
