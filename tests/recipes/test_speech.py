"""Features, log-probabilities and losses of CTC: right in fp32 and wrong in 16 bits; utterances that are too short."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from running import summary
from shared import UNIT
from test_recipes import runs_of
from torch import Tensor

from amp_core import keep_fp32
from recipes import speech
from recipes.speech import HOP, NUM_CLASSES, WINDOW, Dialled, Listener, LogMel, ctc_losses, frames_needed, num_frames

LOW = (torch.float16, torch.bfloat16)
LEAST = math.log(1e-8)

pytestmark = pytest.mark.usefixtures("own_folder")
run = runs_of("speech")


def utterances(num: int = 64, first: int = 0, noise: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    return Dialled(first + num, noise).__getitems__([(i, 0) for i in range(first, first + num)])


def samples(frames: int) -> Tensor:
    """The length of one utterance with so many frames."""
    return torch.tensor([WINDOW + HOP * 2 * (frames - 1)])


def mean_loss(logits: Tensor, lengths: Tensor, symbols: Tensor, **options: bool) -> Tensor:
    """torch's loss, as `ctc_losses` divides it; without anything about utterances that are too short."""
    num = (symbols > 0).sum(1)
    log_probs = logits.log_softmax(dim=-1).transpose(0, 1)
    if logits.dtype in LOW:  # its kernel has no 16-bit form, and autocast casts what it is given
        log_probs = log_probs.float()
    return F.ctc_loss(log_probs, symbols, num_frames(lengths), num, reduction="none", **options) / num


def with_a_short_one() -> tuple[Tensor, Tensor, Tensor]:
    """Logits, lengths and symbols of three utterances. In the second, "1 1 2 2" has 5 frames and needs 6."""
    torch.manual_seed(0)
    symbols = torch.tensor([[3, 4, 0, 0], [1, 1, 2, 2], [5, 6, 7, 8]])
    return torch.randn(3, 5, NUM_CLASSES), samples(5).expand(3), symbols


def test_features_are_those_of_float64() -> None:
    """At most as far off as the rounding errors of a Fourier transform, which are relative to the loudest bin."""
    waves, _, _ = utterances()
    net, unit = LogMel(), UNIT[torch.float32]
    exact = LogMel().double()
    spectrum = torch.stft(waves.double(), WINDOW, HOP, window=exact.window, center=False, return_complex=True).abs()
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
    net = Listener(num_classes=NUM_CLASSES)
    with torch.autocast("cpu", torch.float16):
        right, wrong = net.features(waves), LogMel()(waves)
        assert net(waves).isfinite().all()
        net.features = LogMel()
        loss = ctc_losses(net(waves), lengths, symbols)
    assert right.dtype == torch.float32 and right.isfinite().all()
    # 1e-8 is 0 in fp16, as is a power below 2^-25. Rounding can double a smaller one, and lose one of each bin.
    assert torch.tensor(1e-8).half() == 0 and wrong.isneginf()[right.exp() < 2.0**-26].all()
    most = 2.0**-25 * (2 + net.features.filters.sum(1).max())
    assert not wrong.isneginf()[right.exp() > most].any()
    assert wrong.isneginf().float().mean() > 0.5 and loss.isnan().all()


def test_samples_of_16_bits_overflow_in_fp16_and_in_bf16_features_are_coarse() -> None:
    """As whole numbers, a tone of full loudness has a power of up to (32767 * 64)^2 = 4e12."""
    waves, _, _ = utterances()
    net = LogMel()
    with torch.autocast("cpu", torch.float16):
        assert net(32767 * waves).isposinf().any() and keep_fp32(LogMel())(32767 * waves).isfinite().all()
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
    exact = mean_loss(logits.double(), samples(num), symbols).item()
    right, wrong = (
        found.item()
        for found in (ctc_losses(logits, samples(num), symbols), mean_loss(logits.to(dtype), samples(num), symbols))
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
            loss = ctc_losses(logits, samples(num), symbols).item()
            assert (labels in said) == (num >= frames_needed(symbols).item())
            expected = -math.log(said[labels]) / len(labels) if labels in said else 0
            assert loss == pytest.approx(expected, rel=32 * num * UNIT[torch.float32])


def test_by_lengths_an_utterance_that_is_too_short_costs_nothing_and_changes_nothing() -> None:
    logits, lengths, symbols = with_a_short_one()
    others = torch.tensor([0, 2])
    grads = []
    for chosen in (torch.arange(3), others):
        given = logits[chosen].requires_grad_()
        losses = ctc_losses(given, lengths[chosen], symbols[chosen])
        grads.append((losses.detach(), torch.autograd.grad(losses.sum(), given)[0]))
    (losses, grad), (expected, expected_grad) = grads
    assert losses[1] == 0 and not grad[1].any()
    assert torch.equal(losses[others], expected) and torch.equal(grad[others], expected_grad)
    zeroed = mean_loss(logits, lengths, symbols, zero_infinity=True)
    torch.testing.assert_close(losses, zeroed, rtol=1e-6, atol=0)


def test_zero_infinity_also_drops_an_overflow_and_lengths_do_not() -> None:
    """A logit of -70000 is -inf in fp16, so a symbol that was said has probability 0."""
    logits, lengths, symbols = with_a_short_one()
    logits[0, :, 3] = -7e4
    given = logits.half().requires_grad_()
    dropped = mean_loss(given.float(), lengths, symbols, zero_infinity=True)
    assert dropped[0] == 0 and not torch.autograd.grad(dropped.sum(), given)[0][0].any()
    kept = ctc_losses(given, lengths, symbols)
    assert kept.isinf().tolist() == [True, False, False]
    assert torch.autograd.grad(kept.sum(), given)[0][0].isnan().any()


def test_one_that_is_too_short_costs_the_step_at_any_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["steps=40", "amp=fp16", "doctor=off", "batch_size=16", "recipe.num_utterances=640", "amp.init_scale=1"]
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
    assert sum(infinite) <= (num_frames(lengths) < frames_needed(symbols)).sum() < 10


def test_an_utterance_is_a_function_of_its_number_and_the_epoch() -> None:
    data = Dialled(8, 1.0)
    together = data.__getitems__([(3, 0), (5, 0), (3, 1)])
    alone = data.__getitems__([(5, 0)])
    assert all(torch.equal(a[1:2], b) for a, b in zip(together, alone, strict=True))
    assert not torch.equal(together[0][0], together[0][2])
    held_out = Dialled(8, 1.0, stream=1).__getitems__([(5, 0)])
    assert not torch.equal(held_out[0], alone[0])
    waves, lengths, symbols = together
    for wave, length, row in zip(waves, lengths, symbols, strict=True):
        assert wave[:length].any() and not wave[length:].any()
        num = int((row > 0).sum())
        assert 2 <= num <= 6 and not row[num:].any() and int(row.max()) < NUM_CLASSES


def test_the_tones_of_a_symbol_are_those_of_its_key() -> None:
    """Its row and column of the pad, read where each key sounds: of the eight tones they are the loudest."""
    waves, _, symbols = utterances(noise=0.0)
    pitches = torch.tensor([*speech.LOW, *speech.HIGH])
    probes = torch.exp(2j * torch.pi / speech.RATE * pitches[:, None] * torch.arange(160))
    for wave, row in zip(waves.double(), symbols, strict=True):
        heard = (wave.unfold(0, 160, 8).to(probes.dtype) @ probes.T).abs()
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
