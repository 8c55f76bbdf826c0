"""Features, log-probabilities and losses of CTC: right in fp32 and wrong in 16 bits; utterances that are too short."""

from __future__ import annotations

import functools
import itertools
import json
import math
import wave
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from running import summary
from shared import UNIT
from test_recipes import runs_of
from torch import Tensor

from amp_core import keep_fp32
from amp_core.config.errors import ConfigError
from amp_core.config.options import read_option
from amp_core.config.parse import parse
from amp_core.config.schema import DataConfig
from amp_core.data import Data, build_data
from amp_core.data import speech as data
from amp_core.data.speech import NUM_CLASSES, RATE, Dialled
from recipes import speech
from recipes.speech import Listener, LogMel, ctc_losses, frames_needed, num_frames
from train import main as train_main

LOW = (torch.float16, torch.bfloat16)
LEAST = math.log(1e-8)

pytestmark = pytest.mark.usefixtures("own_folder")
run = runs_of("speech")


def utterances(num: int = 64, first: int = 0, noise: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    return Dialled(first + num, noise).__getitems__([(i, 0) for i in range(first, first + num)])


def frames_of(lengths: Tensor) -> Tensor:
    return num_frames(lengths, RATE)


def mean_loss(logits: Tensor, frames: Tensor, symbols: Tensor, **options: bool) -> Tensor:
    """torch's loss, as `ctc_losses` divides it; without anything about utterances that are too short."""
    num = (symbols > 0).sum(1)
    log_probs = logits.log_softmax(dim=-1).transpose(0, 1)
    if logits.dtype in LOW:  # its kernel has no 16-bit form, and autocast casts what it is given
        log_probs = log_probs.float()
    return F.ctc_loss(log_probs, symbols, frames, num, reduction="none", **options) / num


def with_a_short_one() -> tuple[Tensor, Tensor, Tensor]:
    """Logits, frames and symbols of three utterances. In the second, "1 1 2 2" has 5 frames and needs 6."""
    torch.manual_seed(0)
    symbols = torch.tensor([[3, 4, 0, 0], [1, 1, 2, 2], [5, 6, 7, 8]])
    return torch.randn(3, 5, NUM_CLASSES), torch.full((3,), 5), symbols


def test_features_are_those_of_float64() -> None:
    """At most as far off as the rounding errors of a Fourier transform, which are relative to the loudest bin."""
    waves, _, _ = utterances()
    net, unit = LogMel(RATE), UNIT[torch.float32]
    exact = LogMel(RATE).double()
    spectrum = torch.stft(waves.double(), 256, 160, window=exact.window, center=False, return_complex=True).abs()
    # Higham, "Accuracy and Stability", theorem 24.2: 8 levels of at most 6.7 units each; and one for the window.
    bins = (8 * 6.7 + 1) * unit * spectrum.norm(dim=1, keepdim=True)
    bands = exact.filters @ (2 * spectrum * bins + bins.square()) + 135 * unit * (exact.filters @ spectrum.square())
    expected, found = exact(waves.double()), net(waves)
    error, bound = (found - expected).abs(), 2 * bands / expected.exp() + 3 * unit * expected.abs()
    sure = bands < expected.exp() / 2  # where a logarithm changes by at most twice the relative change
    assert sure.float().mean() > 0.9 and (error <= bound)[sure].all()
    assert found.isfinite().all() and found.min() == torch.tensor(LEAST)  # of the zeros after the end


def test_without_the_island_autocast_makes_silence_minus_infinity_in_fp16() -> None:
    waves, lengths, symbols = utterances()
    torch.manual_seed(0)
    net = Listener(num_classes=NUM_CLASSES, rate=RATE)
    with torch.autocast("cpu", torch.float16):
        right, wrong = net.features(waves), LogMel(RATE)(waves)
        assert net(waves).isfinite().all()
        net.features = LogMel(RATE)
        loss = ctc_losses(net(waves), frames_of(lengths), symbols)
    assert right.dtype == torch.float32 and right.isfinite().all()
    # 1e-8 is 0 in fp16, as is a power below 2^-25. Rounding can double a smaller one, and lose one of each bin.
    assert torch.tensor(1e-8).half() == 0 and wrong.isneginf()[right.exp() < 2.0**-26].all()
    most = 2.0**-25 * (2 + net.features.filters.sum(1).max())
    assert not wrong.isneginf()[right.exp() > most].any()
    assert wrong.isneginf().float().mean() > 0.5 and loss.isnan().all()


def test_samples_of_16_bits_overflow_in_fp16_and_in_bf16_features_are_coarse() -> None:
    """As whole numbers, a tone of full loudness has a power of up to (32767 * 64)^2 = 4e12."""
    waves, _, _ = utterances()
    net = LogMel(RATE)
    with torch.autocast("cpu", torch.float16):
        assert net(32767 * waves).isposinf().any() and keep_fp32(LogMel(RATE))(32767 * waves).isfinite().all()
    right = net(waves)
    with torch.autocast("cpu", torch.bfloat16):
        error = (net(waves).float() - right).abs()
    # Roundings of power, filters, their product and the sum, of the logarithm, and of 1e-8 itself.
    assert error.max() > 0.03 and (error <= UNIT[torch.bfloat16] * (5.1 + right.abs())).all()


def test_a_run_without_the_island_takes_no_step_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["steps=4", "amp=fp16", "amp.init_scale=256", "doctor=off"]
    assert summary(run("right", *settings))["skipped"] == 0
    monkeypatch.setattr(speech, "keep_fp32", lambda module: module)
    assert summary(run("wrong", *settings, "amp.init_scale=1", code=5))["skipped"] == 4


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_log_probabilities_in_16_bits_are_off_by_the_same_amount_in_every_frame(dtype: torch.dtype) -> None:
    """Of a network that knows nothing each is -log(17) = -2.8332; the loss of 400 frames is off by 400 roundings."""
    num, symbols = 400, torch.tensor([[1, 2, 3]])
    logits = torch.zeros(1, num, NUM_CLASSES)
    exact = mean_loss(logits.double(), torch.tensor([num]), symbols).item()
    right, wrong = (
        found.item()
        for found in (
            ctc_losses(logits, torch.tensor([num]), symbols),
            mean_loss(logits.to(dtype), torch.tensor([num]), symbols),
        )
    )
    # Each frame adds four roundings of sums that grow to the loss.
    bound = 4 * num * UNIT[torch.float32] * exact
    rounding = num * (torch.tensor(math.log(NUM_CLASSES)).to(dtype).item() - math.log(NUM_CLASSES)) / 3
    assert abs(right - exact) < bound < abs(rounding) and wrong - exact == pytest.approx(rounding, abs=bound)


def test_losses_are_sums_over_all_paths_and_an_utterance_without_a_path_is_too_short() -> None:
    torch.manual_seed(0)
    for num in (1, 2, 3, 4):
        logits = torch.randn(1, num, 3)
        log_probs = logits[0].double().log_softmax(dim=-1)
        said: Counter[tuple[int, ...]] = Counter()
        for path in itertools.product(range(3), repeat=num):
            labels = tuple(label for label, _ in itertools.groupby(path) if label)
            said[labels] += math.exp(sum(log_probs[frame, label].item() for frame, label in enumerate(path)))  # type: ignore[assignment]
        for labels in itertools.chain(*(itertools.product((1, 2), repeat=length) for length in (1, 2, 3, 4))):
            symbols = torch.tensor([labels])
            loss = ctc_losses(logits, torch.tensor([num]), symbols).item()
            assert (labels in said) == (num >= frames_needed(symbols).item())
            expected = -math.log(said[labels]) / len(labels) if labels in said else 0
            assert loss == pytest.approx(expected, rel=32 * num * UNIT[torch.float32])


def test_by_lengths_an_utterance_that_is_too_short_costs_nothing_and_changes_nothing() -> None:
    logits, frames, symbols = with_a_short_one()
    others = torch.tensor([0, 2])
    grads = []
    for chosen in (torch.arange(3), others):
        given = logits[chosen].requires_grad_()
        losses = ctc_losses(given, frames[chosen], symbols[chosen])
        grads.append((losses.detach(), torch.autograd.grad(losses.sum(), given)[0]))
    (losses, grad), (expected, expected_grad) = grads
    assert losses[1] == 0 and not grad[1].any()
    assert torch.equal(losses[others], expected) and torch.equal(grad[others], expected_grad)
    zeroed = mean_loss(logits, frames, symbols, zero_infinity=True)
    torch.testing.assert_close(losses, zeroed, rtol=1e-6, atol=0)


def test_zero_infinity_also_drops_an_overflow_and_lengths_do_not() -> None:
    """A logit of -70000 is -inf in fp16, so a symbol that was said has probability 0."""
    logits, frames, symbols = with_a_short_one()
    logits[0, :, 3] = -7e4
    given = logits.half().requires_grad_()
    dropped = mean_loss(given.float(), frames, symbols, zero_infinity=True)
    assert dropped[0] == 0 and not torch.autograd.grad(dropped.sum(), given)[0][0].any()
    kept = ctc_losses(given, frames, symbols)
    assert kept.isinf().tolist() == [True, False, False]
    assert torch.autograd.grad(kept.sum(), given)[0][0].isnan().any()


def test_one_that_is_too_short_costs_the_step_at_any_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["steps=40", "amp=fp16", "doctor=off", "batch_size=16", "data.num_samples=640", "amp.init_scale=1"]
    assert summary(run("right", *settings))["skipped"] == 0
    infinite = []

    def losses(logits: Tensor, *labels: Tensor) -> Tensor:
        found = mean_loss(logits.float(), *labels)
        if not torch.is_grad_enabled():
            return ctc_losses(logits, *labels)
        infinite.append(bool(found.isinf().any()))
        return found

    monkeypatch.setattr(speech, "ctc_losses", losses)
    assert summary(run("wrong", *settings))["skipped"] == sum(infinite) > 0
    _, lengths, symbols = utterances(640)  # all of an epoch, each in one window
    assert sum(infinite) <= (frames_of(lengths) < frames_needed(symbols)).sum() < 10


def test_an_utterance_is_a_function_of_its_number_and_the_epoch() -> None:
    dialled = Dialled(8, 1.0)
    together = dialled.__getitems__([(3, 0), (5, 0), (3, 1)])
    alone = dialled.__getitems__([(5, 0)])
    assert all(torch.equal(a[1:2], b) for a, b in zip(together, alone, strict=True))
    assert not torch.equal(together[0][0], together[0][2])
    held_out = Dialled(8, 1.0, stream=1).__getitems__([(5, 0)])
    assert not torch.equal(held_out[0], alone[0])
    waves, lengths, symbols = together
    for sound, length, row in zip(waves, lengths, symbols, strict=True):
        assert sound[:length].any() and not sound[length:].any()
        num = int((row > 0).sum())
        assert 2 <= num <= 6 and not row[num:].any() and int(row.max()) < NUM_CLASSES


def test_the_tones_of_a_symbol_are_those_of_its_key() -> None:
    """Its row and column of the pad, read where each key sounds: of the eight tones they are the loudest."""
    waves, _, symbols = utterances(noise=0.0)
    pitches = torch.tensor([*data.LOW, *data.HIGH])
    probes = torch.exp(2j * torch.pi / RATE * pitches[:, None] * torch.arange(160))
    for sound, row in zip(waves.double(), symbols, strict=True):
        heard = (sound.unfold(0, 160, 8).to(probes.dtype) @ probes.T).abs()
        sounding = heard[:, :4].amax(1) > 0.5 * heard.max()
        keys = [1 + 4 * int(h[:4].argmax()) + int(h[4:].argmax()) for h in heard[sounding]]
        assert {key for key, num in Counter(keys).items() if num > 2} <= set(row[row > 0].tolist())


@functools.cache
def edits(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The definition."""
    if not a or not b:
        return len(a) + len(b)
    return min(edits(a[1:], b) + 1, edits(a, b[1:]) + 1, edits(a[1:], b[1:]) + (a[0] != b[0]))


def test_errors_are_counted_after_repetitions_and_blanks_are_removed() -> None:
    paths = torch.tensor([[0, 3, 3, 0, 3, 5, 5, 9], [7, 7, 7, 7, 0, 0, 1, 2]])
    logits = F.one_hot(paths, NUM_CLASSES).float()
    assert speech.decode(logits, torch.tensor([7, 6])) == [[3, 3, 5], [7]]
    rows = [row for length in range(4) for row in itertools.product((1, 2, 3), repeat=length)]
    assert all(speech.distance(a, b) == edits(a, b) for a, b in itertools.product(rows, repeat=2))


# --- recordings -------------------------------------------------------------------------------------------------------


def write_wave(path: Path, samples: np.ndarray, *, width: int = 2, channels: int = 1, rate: int = RATE) -> None:
    """Samples in [-1, 1), in every channel."""
    whole = np.repeat(np.round(samples * 2.0 ** (8 * width - 1)).astype("<i4"), channels)
    data = (whole + 128).astype("u1") if width == 1 else whole.view("u1").reshape(-1, 4)[:, :width]
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(data.tobytes())


def record(folder: Path, num: int, layout: str = "txt", *, first: int = 0, rate: int = RATE) -> None:
    """Telephone keys as files, with what was said beside them or in a table."""
    waves, lengths, symbols = utterances(num, first, noise=0.5)
    rows = []
    for i, (sound, length, row) in enumerate(zip(waves.numpy() / 4, lengths.tolist(), symbols.tolist(), strict=True)):
        said = "".join(data.KEYS[symbol - 1] for symbol in row if symbol)
        name = f"wavs/{i:03}.wav" if layout == "ljspeech" else f"{i:03}.wav"
        write_wave(folder / name, sound[:length], rate=rate)
        rows.append((f"{i:03}", name, said))
        if layout == "txt":
            (folder / name).with_suffix(".txt").write_text(said)
    if layout == "ljspeech":
        (folder / "metadata.csv").write_text("".join(f"{key}|raw|{said}\n" for key, _, said in rows))
    if layout == "csv":
        table = "".join(f'{name},"{said}"\n' for _, name, said in rows)
        (folder / "metadata.csv").write_text(f"file_name,transcription\n{table}")


def recordings(folder: Path, **changes: Any) -> Data:
    values = read_option("data", "recordings") | {"path": str(folder)} | changes
    return build_data(parse(DataConfig, values, "data", []), seed=0)


@pytest.mark.parametrize("layout", ["txt", "csv", "ljspeech"])
def test_recordings_are_the_samples_and_characters_of_their_files(layout: str, own_folder: Path) -> None:
    record(own_folder, 32, layout)
    found = recordings(own_folder)
    assert (len(found.train), len(found.eval), found.facts["rate"]) == (30, 2, RATE)
    waves, lengths, symbols = found.train.__getitems__([(3, 0), (0, 5)])
    expected, ends, said = utterances(noise=0.5)
    for row, i in enumerate((3, 0)):
        assert lengths[row] == ends[i] and not waves[row, ends[i] :].any()
        # Half a step of 16 bits, and the rounding of a quotient.
        assert (waves[row, : ends[i]] - expected[i, : ends[i]] / 4).abs().max() <= 2.0**-16 + 2.0**-24
        text = "".join(found.classes[symbol - 1] for symbol in symbols[row] if symbol)
        assert text == "".join(data.KEYS[symbol - 1] for symbol in said[i] if symbol).casefold()
    assert waves.shape[1] == ends[[3, 0]].max() + RATE // 4


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_all_widths_are_the_mean_of_their_channels(width: int, own_folder: Path) -> None:
    samples = np.linspace(-1, 0.99, 100)
    write_wave(own_folder / "x.wav", samples, width=width, channels=2)
    found = data.read_wave("x.wav", 100)
    assert np.abs(found - samples).max() <= 2.0 ** -min(8 * width, 25) + 2.0**-24


def test_what_is_heard_does_not_depend_on_the_batch(own_folder: Path) -> None:
    """Without silence behind the longest one the last frames of an utterance see another padding when it is alone."""
    record(own_folder, 32)
    train = recordings(own_folder).train
    torch.manual_seed(0)
    net = Listener(num_classes=20, rate=RATE).double()
    _, ends, _ = utterances(noise=0.5)
    order = ends[:30].argsort()
    few = [(int(order[0]), 0), (int(order[-1]), 0)]
    waves, lengths, _ = train.__getitems__(few)
    alone, *_ = train.__getitems__(few[:1])
    num = int(frames_of(lengths[:1]))
    together = net(waves.double())[0, :num]
    # Sums of up to 3 x 64 products in another order, four times.
    bound = 4 * 3 * 64 * 2.0**-53 * together.abs().max() * 10
    assert (net(alone.double())[0, :num] - together).abs().max() < bound
    cut = alone[:, : int(lengths[0])]
    assert (net(cut.double())[0, :num] - together).abs().max() > 1e3 * bound


@pytest.mark.slow
def test_a_run_on_recordings_learns_them_and_predicts_their_texts(own_folder: Path) -> None:
    record(own_folder / "train", 96)
    record(own_folder / "val", 8, first=500)
    settings = [
        "data=recordings",
        f"data.path={own_folder}",
        "data.num_workers=0",
        "batch_size=16",
        "optimizer.lr=5e-3",
    ]
    settings += ["model.options.width=48", "steps=150", "eval_every=1000", "doctor=off", "run_dir=r"]
    assert train_main(["recipe=speech", "device=cpu", "log=none", *settings]) == 0
    assert summary("r")["eval"]["symbol_error_rate"] < 0.4  # 1 - 1/16 by chance
    for place, num in ((None, 8), (own_folder / "train", 96)):
        on = [] if place is None else [f"predict_on={place}"]
        assert train_main(["run_dir=r", "task=predict", "device=cpu", "log=none", *on]) == 0
        found = [json.loads(line) for line in Path("r/predictions.jsonl").read_text().splitlines()]
        assert len(found) == num and all(set(each["text"]) <= set("0123456789abcd*#") for each in found)
        assert all(each["log_prob"] <= 0 for each in found)
    assert found[0]["path"].endswith("000.wav")


BAD = {
    "nothing": (lambda at: None, "has no recordings to use"),
    "no text": (lambda at: (at / "000.txt").unlink(), "000.wav: has no 000.txt beside it"),
    "no UTF-8": (lambda at: (at / "000.txt").write_bytes(b"\xff"), "000.txt: cannot be read as UTF-8"),
    "cut": (lambda at: (at / "000.wav").write_bytes(b"RIFF"), "000.wav: is no WAV file of PCM: ."),
    "of floats": (lambda at: as_floats(at / "000.wav"), "000.wav: is no WAV file of PCM: ."),
    "empty": (lambda at: write_wave(at / "000.wav", np.zeros(0)), "000.wav: has 0 samples"),
    "rates": (
        lambda at: write_wave(at / "000.wav", np.zeros(9), rate=16000),
        "has 8000 Hz in .* 16000 Hz in .*000.wav",
    ),
    "slow": (lambda at: write_wave(at / "000.wav", np.zeros(9), rate=1), "000.wav: .* at least 4000 Hz"),
    "lies": (lambda at: says(at / "000.wav", 1 << 30), "000.wav: its header says 536,870,912 samples"),
    "twice": (lambda at: (at / "metadata.csv").write_text("000|a\n000|b\n"), "metadata.csv:2: names .*000.wav again"),
    "one": (lambda at: [path.unlink() for path in at.glob("0[01][1-9].*")], "every 16th is held out"),
    "columns": (lambda at: (at / "metadata.csv").write_text("a,b\n1,2\n"), "metadata.csv: has the columns"),
    "no file": (lambda at: (at / "metadata.csv").write_text("x|y|z\n"), r"metadata.csv:1: there is no .*x\.wav"),
    "short line": (lambda at: (at / "metadata.csv").write_text("000|a\n001\n"), "metadata.csv:2: names no recording"),
}


def as_floats(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[20] = 3
    path.write_bytes(contents)


def says(path: Path, size: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[40:44] = size.to_bytes(4, "little")
    path.write_bytes(contents)


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_cannot_be_used_is_refused_by_file_and_line(name: str, own_folder: Path) -> None:
    if name != "nothing":
        record(own_folder, 17, "txt")
        (own_folder / "wavs").symlink_to(own_folder)
    BAD[name][0](own_folder)
    with pytest.raises(ConfigError, match=BAD[name][1]):
        recordings(own_folder)


def test_recordings_of_which_all_are_too_short_are_refused(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(own_folder / "train", 20)
    for path in (own_folder / "train").glob("*.txt"):
        path.write_text("far more than can be said in a second, in frames of 40 ms")
    assert train_main(["recipe=speech", "data=recordings", "data.path=train", "device=cpu", "steps=1"]) == 2
    assert "and the other 18 recordings of its part, are too short" in capsys.readouterr().err


def test_empty_and_long_recordings_are_counted_out(own_folder: Path) -> None:
    record(own_folder, 20)
    (own_folder / "._1.wav").write_bytes(b"Mac OS X")
    (own_folder / "000.txt").write_bytes(b"\xef\xbb\xbf1")  # as Notepad writes UTF-8
    (own_folder / "004.txt").write_text(" \n")
    write_wave(own_folder / "005.wav", np.zeros(3 * RATE))
    found = recordings(own_folder, options={"longest": 2})
    assert len(found.train) + len(found.eval) == 18 and "\ufeff" not in found.classes
    assert [note.partition(": ")[2] for note in found.notes] == [
        "1 recordings are left out: without a text",
        "1 recordings are left out: longer than 2 s, data.options.longest",
    ]
