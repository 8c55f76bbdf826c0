"""Token ids in files: shards, the cache of tokens, mixtures, and what is refused by file and place."""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from shared import data_config

from amp_core.config.checks import check_data
from amp_core.config.errors import ConfigError, RunError
from amp_core.data import build_data
from amp_core.data.text import IGNORE, TextPieces
from amp_core.data.tokenizers import read_tokenizer
from amp_core.data.tokens import Documents, Mixture, cache_folder, check_ids, permuted, read_shards, texts_of

IDS = np.arange(1000, 1400)


def batch_of(part, *indices):
    return part.__getitems__([(index, 0) for index in indices or range(len(part))])


def llmc(dtype="<u2", magic=20240520, version=1, count=400):
    return struct.pack("<256i", magic, version, count, *[0] * 253) + IDS.astype(dtype).tobytes()


def megatron(sizes=(100, 150, 150), code=8, documents=(0, 1, 3)):
    ends = np.cumsum(sizes)
    pointers = (ends - sizes) * 2
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sizes), 3)
    return (
        head
        + np.array(sizes, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )


@pytest.mark.parametrize("kind", ["nanogpt16", "nanogpt32", "llmc16", "llmc32", "megatron", "npy"])
def test_shards_of_every_format_hold_the_same_ids(tmp_path, kind):
    file = tmp_path / "a.bin"
    if kind == "npy":
        np.save(tmp_path / "a.npy", IDS)
    elif kind == "llmc32":
        file.write_bytes(llmc("<u4", 20240801, 7))
    else:
        file.write_bytes(llmc() if kind == "llmc16" else IDS.astype("<u4" if "32" in kind else "<u2").tobytes())
    if kind == "megatron":
        (tmp_path / "a.idx").write_bytes(megatron())
    shards = read_shards(str(tmp_path))
    assert check_ids(shards, None) == 1400
    documents = Documents(shards, vocab_size=1400)
    assert documents.sizes.tolist() == ([100, 300] if kind == "megatron" else [400])
    assert np.concatenate([documents.read(i, 0, n) for i, n in enumerate(documents.sizes)]).tolist() == IDS.tolist()
    data = build_data(data_config("tokens", path=str(tmp_path), length=16), seed=0)
    assert data.facts == {"vocab_size": 1400, "length": 16} and len(data.train) + len(data.eval) == 25
    inputs, targets = batch_of(data.train, 3)
    assert inputs[0].tolist() == list(range(1048, 1064)) and targets[0].tolist() == list(range(1049, 1065))


@pytest.mark.parametrize(
    "files, problem",
    [
        ({"a.bin": b"abc"}, "a.bin has 3 bytes, no multiple of the 2 of uint16"),
        ({"a.bin": llmc(count=401)}, "its header says 401 tokens, the file has 400; copy"),
        ({"a.bin": llmc(count=123_456_789)}, "its header says 123,456,789 tokens, the file has 400; copy"),
        ({"a.bin": llmc() + b"a"}, "its header says 400 tokens, the file has 400; copy"),
        ({"a.bin": llmc(version=2)}, "an llm.c header of version 2; expected version 1"),
        ({"a.bin": b"ab", "a.idx": megatron()}, "says 400 tokens of uint16, a.bin has 2 bytes"),
        ({"a.bin": b"ab", "a.idx": b"x"}, "a.idx is damaged, or not a Megatron index"),
        ({"a.bin": b"ab", "a.idx": megatron()[:-1]}, "a.idx is damaged, or not a Megatron index"),
        ({"a.bin": IDS.astype("<u2").tobytes(), "a.idx": megatron(documents=(0, 1, 4))}, "a.idx is damaged"),
        ({"a.bin": IDS.astype("<u2").tobytes(), "a.idx": megatron(documents=(0, -1, 3))}, "a.idx is damaged"),
        ({"a.bin": IDS.astype("<u2").tobytes(), "a.idx": megatron(documents=(2, 1, 3))}, "a.idx is damaged"),
        ({"a.npy": b"abc"}, "a.npy|magic"),
        ({"a.txt": b"abc"}, "has no *.bin or *.npy"),
        ({"a.bin": llmc(), "manifest.json": b'{"shards": {}}', "b.bin": b"a"}, "b.bin has 1 bytes"),
        ({"a.bin": b"a" * 8, "manifest.json": b'{"shards": {"a.bin": {"dtype": "uint16"}}}'}, "does not say how many tokens"),
        ({"a.bin": b"a" * 8, "manifest.json": b'{"shards": []}'}, "does not say how many tokens"),
        ({"a.bin": b"a" * 8, "manifest.json": b"[]"}, "manifest.json: is not a JSON object"),
    ],
)  # fmt: skip
def test_damaged_shards_are_refused_by_name(tmp_path, files, problem):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_shards(str(tmp_path))
    assert any(text in str(error.value) for text in problem.split("|")), error.value


def test_ids_beyond_the_vocabulary_are_named_by_file_and_position(tmp_path):
    (tmp_path / "a.bin").write_bytes(IDS.astype("<u2").tobytes())
    with pytest.raises(ConfigError, match=r"a\.bin: token 200 is 1200, and the vocabulary has 1,200 ids"):
        check_ids(read_shards(str(tmp_path)), 1200)
    pieces = TextPieces(Documents(read_shards(str(tmp_path)), vocab_size=1400), 16)
    (tmp_path / "a.bin").write_bytes((IDS + 5).astype("<u2").tobytes())
    with pytest.raises(RunError, match=r"a\.bin: token 395 is 1400"):
        batch_of(pieces, 24)
    (tmp_path / "a.bin").write_bytes(b"ab")
    with pytest.raises(RunError, match=r"a\.bin got shorter"):
        batch_of(pieces, 3)
    np.save(tmp_path / "b.npy", -IDS)
    with pytest.raises(ConfigError, match=r"b\.npy: token 0 is -1000, and ids are 0 or above"):
        check_ids(read_shards(str(tmp_path / "b.npy")), None)


@pytest.mark.parametrize("length", [1, 2, 5, 64, 1000])
def test_a_permutation_without_a_table_takes_each_place_once(length):
    places = np.arange(length)
    first, second = (permuted(3, np.full(length, number), places, length) for number in (0, 1))
    assert sorted(first) == sorted(second) == places.tolist()
    assert length < 64 or (first != second).any()


def test_a_mixture_keeps_its_shares_and_each_source_its_permutations(tmp_path):
    files = [tmp_path / f"{letter}.txt" for letter in "ab"]
    for file, size in zip(files, (33, 129), strict=True):
        file.write_bytes(bytes(range(size)))
    sources = [TextPieces([file], 4) for file in files]
    mixture = Mixture(sources, [3, 1], seed=5)
    assert (len(sources[0]), len(sources[1]), len(mixture)) == (8, 32, 40)
    keys = [(index, epoch) for epoch in range(4) for index in range(40)]
    inputs, targets = mixture.__getitems__(keys)
    assert all(torch.equal(mixture.__getitems__([key])[0][0], row) for key, row in zip(keys, inputs, strict=True))
    first = inputs.view(4, 40, 4)[:, :30, 0]  # 30 of 40 are of the first source: 15 epochs of it in 4
    assert Counter(first.flatten().tolist()) == dict.fromkeys(range(0, 32, 4), 15)
    assert sorted(inputs.view(4, 40, 4)[:, 30:, 0].flatten().tolist()[:32]) == list(range(0, 128, 4))
    assert (targets == inputs + 1).all()
    assert not torch.equal(Mixture(sources, [3, 1], seed=6).__getitems__(keys)[0], inputs)


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """A byte-level BPE of 300 ids with an EOS, as transformers saves it."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra text")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    inner = tokenizers.ByteLevelBPETokenizer()
    inner.train_from_iterator(["def the return self " * 50], vocab_size=300, special_tokens=["<eos>"])
    (tmp_path / "tokenizer").mkdir()
    inner.save(str(tmp_path / "tokenizer/tokenizer.json"))
    (tmp_path / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return str(tmp_path / "tokenizer")


TEXTS = ["def the return <eos> wörld", "the self", "日本\n" * 40]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_documents_end_with_eos_and_are_tokenized_once(tmp_path, tokenizer, kind):
    folder = tmp_path / "texts"
    folder.mkdir()
    if kind == "txt":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text)
    elif kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="needs the extra text")
        import pyarrow.parquet as parquet

        parquet.write_table(pyarrow.table({"body": TEXTS}), folder / "a.parquet")
    cfg = data_config("text", path=str(folder), tokenizer=tokenizer, text_field="body", length=8)
    assert check_data(cfg) == []
    data, ids = build_data(cfg, seed=0), read_tokenizer(tokenizer)
    assert data.tokenizer is not None and data.facts["vocab_size"] == ids.vocab_size and ids.eos == 0
    documents = data.train.documents
    found = [documents.read(number, 0, size).tolist() for number, size in enumerate(documents.sizes)]
    assert [ids.decode(each) for each in found] == TEXTS and all(each[-1] == 0 not in each[:-1] for each in found)
    assert [int(ids.num_bytes[each].sum()) for each in found] == [len(text.encode()) for text in TEXTS]
    shard = next(cache_folder().glob("*/tokens.bin"))
    made = shard.stat().st_mtime_ns
    assert torch.equal(batch_of(build_data(cfg, seed=0).train)[1], batch_of(data.train)[1])
    assert shard.stat().st_mtime_ns == made and len(list(cache_folder().glob("*/tokens.bin"))) == 1
    assert (batch_of(data.train)[1] != IGNORE).any()


@pytest.mark.parametrize(
    "content, problem",
    [
        (b'{"text": "a"}\n\n', "line 2: is empty"),
        (b'{"text": "a"}\n{"body": "a"}\n', "line 2: has the keys body, not 'text'"),
        (b'{"text": "a"}\n[1]\n', "line 2: is not an object"),
        (b'{"text": 3}\n', "line 1: 'text' is int; expected text"),
        (b'{"text": "\xff"}\n', "line 1: is not UTF-8 (byte 10 of the line)"),
        (b'{"text": "\\ud800"}\n', "line 1: 'text' holds half of a surrogate pair"),
        (b"nonsense\n", "line 1: is not JSON"),
        (b'{"text": "' + b"a" * 4096 + b'"}', "line 1: has more than 0 MiB"),
    ],
)  # fmt: skip
def test_bad_lines_are_named_and_leave_nothing_in_the_cache(tmp_path, tokenizer, monkeypatch, content, problem):
    monkeypatch.setattr("amp_core.data.tokens._MOST_LINE", 1024)
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        build_data(data_config("text", path=str(tmp_path / "a.jsonl"), tokenizer=tokenizer), seed=0)
    assert problem in str(error.value) and "a.jsonl" in str(error.value)
    assert [path.suffix for path in cache_folder().iterdir()] == [".lock"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts bytes by /proc/self/io")
def test_a_part_of_a_file_of_lines_reads_no_other_part_and_names_its_lines_by_the_file(tmp_path):
    file, before = tmp_path / "a.jsonl", 1 << 26
    with file.open("wb") as output:
        output.write(b"\n" * 40)
        output.truncate(before)  # a hole, without disk space
        output.seek(before)
        output.write(b'\n{"text": "a"}\n{"text": 1}\n')

    def num_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    first, start = before + 1, num_read()
    assert list(texts_of(file, "text", (first, first + 14))) == [("a", True)]
    assert num_read() - start < 1 << 20
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 43: 'text' is int"):
        list(texts_of(file, "text", (first, file.stat().st_size)))


def test_a_damaged_file_beside_a_tokenizer_is_named(tmp_path, tokenizer):
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"cannot be read: tokenizer_config\.json: is not a JSON object"):
        read_tokenizer(tokenizer)


def test_long_texts_are_tokenized_in_parts_with_the_ids_of_the_whole(tmp_path, tokenizer, monkeypatch):
    for name in ("_PART_CHARS", "_READ_BYTES"):
        monkeypatch.setattr(f"amp_core.data.tokens.{name}", 64)
    text = "the self return\n  wörld, 日本!\n\n" * 40
    (tmp_path / "a.txt").write_text(text)
    data = build_data(data_config("text", path=str(tmp_path / "a.txt"), tokenizer=tokenizer, length=4), seed=0)
    documents = data.train.documents
    assert documents.read(0, 0, int(documents.sizes[0])).tolist() == [*read_tokenizer(tokenizer).encode([text])[0], 0]
    (tmp_path / "a.txt").write_bytes(text.encode() + b"\xff")
    with pytest.raises(ConfigError, match=rf"a\.txt, byte {len(text.encode()):,}: is not UTF-8"):
        build_data(data_config("text", path=str(tmp_path / "a.txt"), tokenizer=tokenizer), seed=0)
