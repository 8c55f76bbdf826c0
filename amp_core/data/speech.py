"""Utterances with what was said: recordings of one's own, and keys of a telephone in noise.

A batch is (waves [B, N] float32, 0 after their end; their lengths in samples [B]; symbols [B, M], padded with 0).
Symbol 0 is CTC's blank. The facts are `num_classes`, with the blank, and `rate`, samples per second.
"""

from __future__ import annotations

import csv
import os
import unicodedata
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_core.config.errors import ConfigError, RunError
from amp_core.config.files import visible
from amp_core.config.schema import DataConfig
from amp_core.data.base import Data, Key, Paths, uniforms, unpack

Batch = tuple[Tensor, Tensor, Tensor]
EVAL_SHARE = 16  # training utterances per held-out one

# --- keys of a telephone ----------------------------------------------------------------------------------------------

RATE, SAMPLES = 8000, 6144
LOW, HIGH = np.array([697.0, 770, 852, 941]), np.array([1209.0, 1336, 1477, 1633])  # Hz; a key is a pair
KEYS = list("123A456B789C*0#D")
NUM_CLASSES = 1 + len(KEYS)
MOST = 6  # symbols of an utterance


class Dialled:
    """Two to six keys of a telephone, at any pace and volume, in noise: a function of number, epoch and stream."""

    def __init__(self, num: int, noise: float, *, stream: int = 0) -> None:
        self._num, self._noise, self._stream = num, noise, stream

    def __len__(self) -> int:
        return self._num

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        drawn = uniforms(self._stream, *unpack(keys), 4 + 3 * MOST + SAMPLES)
        num, pace, volume, noise = drawn[:, :4, None].transpose(1, 0, 2)
        num = 2 + ((MOST - 1) * num).astype(np.int64)
        choices, gaps, tones = (drawn[:, 4 + i * MOST : 4 + (i + 1) * MOST] for i in range(3))
        codes = (len(LOW) * len(HIGH) * choices).astype(np.int64)
        spans = np.stack([0.01 + 0.03 * gaps, 0.04 + 0.04 * tones], axis=2).reshape(len(keys), 2 * MOST)  # seconds
        ends = np.ceil((RATE * (0.6 + 0.4 * pace) * spans).cumsum(axis=1)).astype(np.int64)  # of a gap, a tone, ...
        lengths = np.take_along_axis(ends, 2 * num - 1, axis=1)
        slots = np.zeros((len(keys), SAMPLES), dtype=np.int64)
        np.put_along_axis(slots, ends, 1, axis=1)
        slots = slots.cumsum(axis=1)
        waves, times = np.zeros((len(keys), SAMPLES), dtype=np.float32), np.arange(SAMPLES)
        for pitches in (LOW[codes // len(HIGH)], HIGH[codes % len(HIGH)]):
            pitch = np.take_along_axis(pitches, np.minimum(slots // 2, MOST - 1), axis=1)
            waves += np.sin((2 * np.pi / RATE * times * pitch).astype(np.float32)) * (slots % 2)
        waves += self._noise * noise * (2 * drawn[:, -SAMPLES:] - 1)
        waves *= 10.0 ** (-3 * volume) * (times < lengths)
        symbols = np.where(np.arange(MOST) < num, 1 + codes, 0)
        return torch.from_numpy(waves), torch.from_numpy(lengths[:, 0]), torch.from_numpy(symbols)


def build_telephone(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.num_samples is not None and cfg.options is not None, "check_data was not asked"
    parts = [
        Dialled(num, float(cfg.options["noise"]), stream=stream)
        for stream, num in enumerate((cfg.num_samples, cfg.num_samples // EVAL_SHARE))
    ]
    return Data(*parts, facts={"num_classes": NUM_CLASSES, "rate": RATE}, classes=KEYS)


# --- recordings -------------------------------------------------------------------------------------------------------

SILENCE = 0.25
"""Seconds of it after the longest of a batch: what convolutions see behind the end of an utterance is then the same in
every batch, and so is what they make of it."""
LEAST_RATE = 4000
"""Samples per second: half of telephones'."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Stands for the characters of held-out transcripts that no training transcript has."""
_TEXTS = ("transcription", "transcript", "text", "sentence")
"""Names of the column of a metadata.csv that holds what was said; that of the file is file_name."""


class Recordings:
    """Files *.wav of one rate: (path, text, length in samples) of each.

    Characters are numbered from 1 in the order of `alphabet`, whose last one stands for all others.
    """

    def __init__(self, utterances: Sequence[tuple[str, str, int]], rate: int, alphabet: Sequence[str]) -> None:
        paths, texts, lengths = zip(*utterances, strict=True)
        numbers = {letter: number for number, letter in enumerate(alphabet, 1)}
        self.paths, self.lengths, self._rate = Paths(paths), np.array(lengths), rate
        self.symbols = [np.array([numbers.get(letter, len(alphabet)) for letter in text]) for text in texts]

    def of_folder(self, folder: str) -> Recordings:
        """All recordings in a folder, without what was said. ConfigError: there are none, or of another rate."""
        heads = {path: _head_of(path) for path in sorted(waves_below(folder))}
        if others := [path for path, (rate, _) in heads.items() if rate != self._rate]:
            raise ConfigError(f"{others[0]}: has another rate than the {self._rate} Hz of training; resample it")
        if not heads:
            raise ConfigError(f"predict_on={folder}: has no *.wav; expected recordings")
        return Recordings([(path, "", length) for path, (_, length) in heads.items()], self._rate, [""])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        rows = unpack(keys)[0]
        lengths, symbols = self.lengths[rows], [self.symbols[row] for row in rows]
        waves = np.zeros((len(rows), max(lengths, default=0) + round(SILENCE * self._rate)), dtype=np.float32)
        said = np.zeros((len(rows), max(map(len, symbols), default=0)), dtype=np.int64)
        for i, row in enumerate(rows):
            waves[i, : lengths[i]] = read_wave(self.paths[row], int(lengths[i]))
            said[i, : len(symbols[i])] = symbols[i]
        return torch.from_numpy(waves), torch.from_numpy(lengths), torch.from_numpy(said)


def utterances_in(folder: Path, longest: float) -> tuple[list[tuple[str, str, int]], int, list[str]]:
    """(path, text, length in samples) of the recordings in a folder, by name; their rate; notes on what is left out.

    Texts are without capitals, with single spaces. ConfigError: a file is missing or cannot be read, or rates differ.
    """
    found, rates, num_empty, num_long = list[tuple[str, str, int]](), dict[int, str](), 0, 0
    for path, text in sorted(transcripts_of(folder)):
        rate, length = _head_of(path)
        rates.setdefault(rate, path)
        text = " ".join(unicodedata.normalize("NFC", text).casefold().split())
        num_empty += not text
        num_long += bool(text) and length > longest * rate
        if text and length <= longest * rate:
            found.append((path, text, length))
    if len(rates) > 1:
        which = ", ".join(f"{rate} Hz in {path}" for rate, path in sorted(rates.items())[:2])
        raise ConfigError(f"{folder}: has {which}; expected one rate: resample to the lower one")
    left_out = [(num_empty, "without a text"), (num_long, f"longer than {longest:g} s, data.options.longest")]
    notes = [visible(f"{folder}: {num} recordings are left out: {why}") for num, why in left_out if num]
    if not found:
        raise ConfigError("; ".join([visible(f"{folder}: has no recordings to use"), *notes, EXPECTED]))
    return found, next(iter(rates)), notes


def waves_below(folder: str | Path) -> Iterator[str]:
    """The paths of the recordings in a folder and below, in no order; macOS writes ._x.wav beside x.wav."""
    for place, _, names in os.walk(folder):
        yield from (os.path.join(place, n) for n in names if n.lower().endswith(".wav") and not n.startswith("."))


EXPECTED = (
    "expected *.wav beside *.txt of the same names, or a metadata.csv with the columns file_name and transcription, or "
    "that of LJSpeech"
)


def transcripts_of(folder: Path) -> Iterator[tuple[str, str]]:
    """(path of a recording, what was said) in a folder. ConfigError: a line or a text that cannot be used, by name."""
    read = folder / "metadata.csv"
    try:
        if read.is_file():
            yield from _of_table(read)
            return
        for path in waves_below(folder):
            read = Path(path).with_suffix(".txt")
            if not read.is_file():
                raise ConfigError(f"{Path(path)}: has no {read.name} beside it; {EXPECTED}")
            yield path, read.read_text("utf-8-sig")
    except (OSError, ValueError, csv.Error) as problem:  # a ValueError is text that is no UTF-8
        raise ConfigError(f"{read}: cannot be read as UTF-8: {problem}") from problem


def _of_table(table: Path) -> Iterator[tuple[str, str]]:
    with table.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline()
        file.seek(0)
        # LJSpeech has id|as read|with numbers spelled out, and no line of names.
        if "|" in head and "file_name" not in head:
            parts = (line.rstrip("\r\n").split("|") for line in file)
            first, found = 1, ((part[0], part[-1] if len(part) > 1 else None) for part in parts)
        else:
            rows = csv.DictReader(file)
            names = rows.fieldnames or ()
            column = next((name for name in _TEXTS if name in names), None)
            if "file_name" not in names or column is None:
                raise ConfigError(f"{table}: has the columns {rows.fieldnames}; {EXPECTED}")
            first, found = 2, ((row["file_name"], row[column]) for row in rows)
        seen = set[Path]()
        for number, (name, text) in enumerate(found, first):
            if not name or text is None:
                raise ConfigError(f"{table}:{number}: names no recording, or not what was said; {EXPECTED}")
            places = [table.parent / name, table.parent / "wavs" / f"{name}.wav"]
            path = next((place for place in places if place.is_file()), None)
            if path is None:
                raise ConfigError(f"{table}:{number}: there is no {places[first == 1]}; expected the recording there")
            if path in seen:  # one half might be held out, and be trained on by the other
                raise ConfigError(f"{table}:{number}: names {path} again; expected each recording once")
            seen.add(path)
            yield str(path), text


def _head_of(path: str) -> tuple[int, int]:
    """(samples per second, length in samples) of a file."""
    try:
        with wave.open(path, "rb") as file:
            head = file.getparams()
        size = os.path.getsize(path)
    except (OSError, EOFError, wave.Error) as problem:
        why = str(problem) or "it is cut"
        raise ConfigError(f"{path}: is no WAV file of PCM: {why}; convert it to 16-bit PCM") from problem
    rate, length, width = head.framerate, head.nframes, head.sampwidth
    if length * width * head.nchannels > size:
        raise ConfigError(f"{path}: its header says {length:,} samples, its {size:,} bytes are too few; copy it again")
    if not (rate >= LEAST_RATE and length > 0 and width in _SCALES):
        raise ConfigError(
            f"{path}: has {length} samples of {8 * width} bits at {rate} Hz; expected 8 to 32 bits, and at least "
            f"{LEAST_RATE} Hz"
        )
    return rate, length


_SCALES = {1: 2.0**7, 2: 2.0**15, 3: 2.0**31, 4: 2.0**31}


def read_wave(path: str, length: int) -> NDArray[np.float32]:
    """The samples of a file in [-1, 1), [length], the mean of its channels. RunError: it has another length."""
    try:
        with wave.open(path, "rb") as file:
            width, channels, data = file.getsampwidth(), file.getnchannels(), file.readframes(length)
    except (OSError, EOFError, wave.Error) as problem:
        raise RunError(f"{path}: cannot be read: {str(problem) or 'it is cut'}") from problem
    if len(data) != length * width * channels:
        raise RunError(f"{path}: ends after {len(data)} bytes of samples, expected {length * width * channels}")
    if width == 3:  # the upper three bytes of four
        whole = np.zeros((length * channels, 4), dtype=np.uint8)
        whole[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        numbers = whole.view("<i4")[:, 0]
    else:
        numbers = np.frombuffer(data, {1: "u1", 2: "<i2", 4: "<i4"}[width])
    samples = numbers.astype(np.float64) - (128 if width == 1 else 0)  # 8 bits have no sign
    return (samples.reshape(length, channels).mean(1) / _SCALES[width]).astype(np.float32)


def build_recordings(cfg: DataConfig, seed: int, channels: int | None) -> Data:
    assert cfg.path is not None and cfg.options is not None, "check_data was not asked"
    folder, longest = Path(cfg.path).expanduser(), float(cfg.options["longest"])
    held_out = Path(cfg.eval_path).expanduser() if cfg.eval_path is not None else folder / "val"
    has_parts = cfg.eval_path is None and (folder / "train").is_dir() and held_out.is_dir()
    train, rate, notes = utterances_in(folder / "train" if has_parts else folder, longest)
    if cfg.eval_path is not None or has_parts:
        others, eval_rate, more = utterances_in(held_out, longest)
        notes += more
    else:
        others, eval_rate = train[EVAL_SHARE - 1 :: EVAL_SHARE], rate
        train = [each for i, each in enumerate(train) if i % EVAL_SHARE != EVAL_SHARE - 1]
    if not others:
        raise ConfigError(
            f"data.path={cfg.path}: has {len(train)} recordings, of which every {EVAL_SHARE}th is held out; add "
            f"some, or give data.eval_path"
        )
    if rate != eval_rate:
        raise ConfigError(f"data.path={cfg.path}: has {rate} Hz, what is held out {eval_rate} Hz; expected one rate")
    alphabet = [*sorted({letter for _, text, _ in train for letter in text}), UNKNOWN]
    facts = {"num_classes": 1 + len(alphabet), "rate": rate}
    parts = [Recordings(part, rate, alphabet) for part in (train, others)]
    return Data(*parts, facts=facts, notes=tuple(notes), classes=alphabet)
