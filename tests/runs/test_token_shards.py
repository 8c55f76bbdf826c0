"""scripts/tokens.py: the ids of the tokenizer alone, in every format, by any number of processes, after any kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from chats import write_tokenizer
from shared import data_config

from amp_core.data import build_data
from amp_core.data.tokenizers import read_tokenizer
from amp_core.data.tokens import Documents, read_shards
from amp_tools import tokens
from scripts.tokens import main
from train import main as train_main

pytest.importorskip("tokenizers", reason="needs the extra text")

TEXTS = [f"def f{n}(x):\n    return x ** {n}  # é{'ü' * (n % 7)}\n" * (n % 5 + 1) for n in range(60)]
SCRIPT = str(Path(tokens.__file__).parent.parent / "scripts" / "tokens.py")


def make(*more, out="shards", code=0):
    assert main(["t", "--tokenizer", "tok", "--out", out, *more]) == code


@pytest.fixture(autouse=True)
def texts(own_folder):
    write_tokenizer(Path("tok"))
    Path("t/deep").mkdir(parents=True)
    Path("t/a.txt").write_text(TEXTS[0])
    Path("t/deep/b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:]))


def expected():
    tokenizer = read_tokenizer("tok")
    return [[*ids, tokenizer.eos] for ids in tokenizer.encode(TEXTS)]


def found(pattern):
    shards = read_shards(pattern)
    documents = Documents(shards, vocab_size=1 << 20)
    return [documents.read(i, 0, int(size)).tolist() for i, size in enumerate(documents.sizes)], shards


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form, num", [("nanogpt", 1), ("llmc", 2), ("npy", 2)])
def test_shards_have_the_ids_of_the_tokenizer_alone_and_whole_documents(form, num, monkeypatch):
    monkeypatch.setattr(tokens, "_PART", 700)  # several parts
    make("--format", form, "--num-processes", str(num), "--shard-tokens", "300", "--val-tokens", "100")
    held_out, (val,) = found("shards/val_*")
    train, shards = found("shards/train_*")
    assert held_out + train == expected() and val.count >= 100 > val.count - len(held_out[-1])
    sizes = [shard.count for shard in shards]
    full = [size + len(after) for size, after in zip(sizes, _firsts(shards, train)[1:], strict=False)]
    assert max(sizes) <= 300 < min(full)
    manifest = json.loads(Path("shards/manifest.json").read_text())
    assert manifest["tokenizer"] == read_tokenizer("tok").digest and manifest["format"] == form
    assert sum(each["tokens"] for each in manifest["shards"].values()) == sum(map(len, expected()))
    assert {p.name for p in Path("shards").iterdir()} == {
        "manifest.json", *manifest["shards"], *(f"{Path(name).stem}.ends.npy" for name in manifest["shards"])
    }  # fmt: skip
    make("--format", form, "--shard-tokens", "300", "--val-tokens", "100")  # finished: nothing to do
    make("--format", form, "--shard-tokens", "301", code=2)


def test_another_tokenizer_than_the_one_that_made_the_shards_is_said():
    make("--val-tokens", "100")
    write_tokenizer(Path("other"))
    content = json.loads(Path("other/tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    Path("other/tokenizer.json").write_text(json.dumps(content))
    paths = {"path": "shards/train_*", "eval_path": "shards/val_*", "length": 16}
    for tokenizer, said in (
        ("tok", []),
        ("other", ["data.tokenizer=other: shards/manifest.json has the hash of another"]),
    ):
        notes = build_data(data_config("tokens", tokenizer=tokenizer, **paths), seed=0).notes
        assert [note.partition(";")[0] for note in notes] == said


def _firsts(shards, documents):
    """The first document of each shard."""
    starts = np.cumsum([0] + [len(shard.ends) for shard in shards[:-1]])
    return [documents[start] for start in starts]


@pytest.mark.slow
def test_a_killed_run_resumes_with_what_it_had_finished(monkeypatch):
    for n in range(12):
        Path(f"t/{n:02d}.txt").write_text("x = 1\n" * 20_000)
    command = [sys.executable, SCRIPT, "t", "--tokenizer", "tok", "--out", "killed", "--num-processes", "1"]
    process = subprocess.Popen(command)
    while len(there := list(Path("killed/parts").glob("0*.npz"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    times = {path: path.stat().st_mtime_ns for path in there}
    assert times and not Path("killed/manifest.json").exists()
    kept = []
    join = tokens._join
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_join", lambda *a: kept.append({p: p.stat().st_mtime_ns for p in times}) or join(*a))
        make("--num-processes", "1", out="killed")
    assert kept == [times]
    make("--num-processes", "2", out="whole")
    for path in Path("whole").iterdir():
        assert path.read_bytes() == (Path("killed") / path.name).read_bytes()


GOOD = b'{"text": "a"}\n' * 40


@pytest.mark.parametrize(
    "name, content, problem",
    [
        ("b.txt", b"a" * 9 + b"\xff", "t/b.txt, byte 9: is not UTF-8"),
        ("b.jsonl", GOOD + b"\n" + GOOD, "t/b.jsonl, line 41: is empty"),
        ("b.jsonl", GOOD + b'{"texts": 1}\n', "t/b.jsonl, line 41: has the keys texts, not 'text'"),
        ("b.jsonl", GOOD + b'{"text": 1}\n', "t/b.jsonl, line 41: 'text' is int; expected text"),
        ("b.jsonl", GOOD + b"{\n", "t/b.jsonl, line 41: is not JSON"),
        ("b.jsonl", GOOD + b'{"text": "\\ud800"}\n', "t/b.jsonl, line 41: 'text' holds half of a surrogate pair"),
        ("b.parquet", b"PAR1", "t/b.parquet: cannot be read as parquet"),
        ("b.bin", b"\0\1", "b.bin is a .bin file, no text"),
        ("b.gz", b"\0\1", "b.gz is a .gz file"),
        ("b.exe", b"MZ\0\0", "b.exe is no text: it has zero bytes"),
    ],
)
def test_a_wrong_file_is_refused_by_line(name, content, problem, capsys, monkeypatch):
    monkeypatch.setattr(tokens, "_PART", 100)  # the line is counted from the beginning of the file
    Path("t", name).write_bytes(content)
    make("--num-processes", "1", code=2)
    assert problem in capsys.readouterr().err and not Path("shards/manifest.json").exists()


def test_a_place_or_a_tokenizer_that_will_not_do_is_refused(capsys):
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    for more, said in (
        (["--out", "mine"], "holds notes.txt"),
        (["--tokenizer", "bytes"], "--tokenizer=bytes"),
        (["--tokenizer", "t"], "--tokenizer=t: has no tokenizer.json"),
        (["--format", "megatron"], "--format=megatron: expected nanogpt, llmc, npy"),
        (["--val-tokens", "100000"], "leaves no document to train on"),
    ):
        make(*more, "--num-processes", "1", code=2)
        assert said in capsys.readouterr().err
    assert os.listdir("mine") == ["notes.txt"]


@pytest.mark.parametrize("tokenizer, is_known", [([], False), (["data.tokenizer=tok"], True)])
def test_shards_are_trained_on_with_and_without_their_tokenizer(tokenizer, is_known):
    make("--num-processes", "1", "--val-tokens", "300")
    data = ["data=tokens", "data.path=shards/train_*", "data.eval_path=shards/val_*", "data.length=16", *tokenizer]
    how = ["steps=2", "device=cpu", "log=none", "run_dir=a", "recipe=language_model", "model=gpt_tiny"]
    assert train_main([*how, *data]) == 0
    metrics = json.loads(Path("a/summary.json").read_text())["eval"]
    assert ("bits_per_byte" in metrics) is is_known and metrics["loss"] > 0
    assert Path("a/samples").exists() is is_known
