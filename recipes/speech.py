"""Speech recognition with CTC: features, log-softmax and loss in fp32 around a 16-bit network; utterances too short.

The lesson, in three parts. Power spectra exceed fp16: silence plus the usual 1e-8 is 0, and its logarithm -inf.
Autocast does that unasked, since the mel filters are a matrix product, so the features are an fp32 island. CTC adds a
log-probability per frame: where a network is unsure, 16 bits round all of them by the same amount, so the log-softmax
is in the island of the loss (a CPU's autocast leaves it in 16 bits). And an utterance with fewer frames than its
symbols need has an infinite loss and NaN gradients in any precision: the step is skipped at any loss scale.
`zero_infinity=True` drops such an utterance, but also one that overflowed, unnoticed; here the lengths decide.

    python train.py recipe=speech                                    telephone keys in noise, bf16
    python train.py recipe=speech amp=fp16 accumulation=2 batch_size=32
    python train.py recipe=speech recipe.noise=6 model.options.width=128 steps=1000

Expected: 0.048 to 0.051 of the symbols wrong in bf16, 0.048 to 0.052 in fp32, 0.049 to 0.051 in fp16 (seeds 1 to 3), in
16 s of one core of a server CPU. `F.ctc_loss` reads the lengths on the host: on a GPU a wait per micro-batch.

Sources: Graves et al., "Connectionist Temporal Classification" (ICML 2006); the tones: ITU-T recommendation Q.23.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, keep_fp32, sync_grads
from amp_core.config.schema import Config, RecipeConfig, expected
from amp_core.data import Data, Key
from amp_core.data.base import uniforms, unpack
from amp_core.models import Family
from amp_core.models.family import check_count
from amp_core.run.recipe import Environment, Loop, build_ema, build_model, build_optimizer, build_schedule
from amp_core.tensors import widest

DATA = "own"
Batch = tuple[Tensor, Tensor, Tensor]
"""(waves [B, SAMPLES], 0 after their end; their lengths in samples, [B]; symbols [B, MOST], padded with 0)"""
RATE, SAMPLES = 8000, 6144
LOW, HIGH = np.array([697.0, 770, 852, 941]), np.array([1209.0, 1336, 1477, 1633])  # Hz; a key is a pair
NUM_CLASSES = 1 + len(LOW) * len(HIGH)  # 0 is CTC's blank
MOST = 6  # symbols of an utterance
WINDOW, HOP, BANDS = 256, 160, 32
EVAL_SHARE = 16  # training utterances per held-out one


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    num_utterances: int
    """Utterances of an epoch. The next epoch has others; a sixteenth as many are held out."""
    noise: float
    """Largest sample of the loudest noise; a key's two tones have amplitude 1."""


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    return expected(
        knobs,
        num_utterances=(knobs.num_utterances >= EVAL_SHARE, f"at least {EVAL_SHARE}"),
        noise=(0 <= knobs.noise < math.inf, "a number of at least 0"),
    )


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: loss, symbol_error_rate, and the share that is too_short."""
    knobs = Knobs(**cfg.recipe)
    held_out = Dialled(knobs.num_utterances // EVAL_SHARE, knobs.noise, stream=1)
    data = Data(Dialled(knobs.num_utterances, knobs.noise), held_out, facts={"num_classes": NUM_CLASSES})
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    model = env.wrap(build_model(cfg.model.name, MODELS, options=cfg.model.options, **data.facts), amp)
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model)
    clip = Clip.of(cfg.clip)

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        total = torch.zeros((), device=env.device)
        for micro in window:
            waves, lengths, symbols = micro.batch
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    loss = ctc_losses(model(waves), lengths, symbols).mean()
                amp.backward(loss, micro.weight)
            total += loss.detach() * micro.weight
        report = amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, total

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        # Loss, wrong symbols, symbols, utterances that are too short, utterances.
        totals = torch.zeros(5, dtype=widest(env.device), device=env.device)
        for waves, lengths, symbols in env.eval_batches(data.eval):
            with amp.autocast():
                logits = net(waves)
                losses = ctc_losses(logits, lengths, symbols)
            frames, said = num_frames(lengths), [[symbol for symbol in row if symbol] for row in symbols.tolist()]
            wrong = sum(map(distance, decode(logits, frames), said))
            too_short = (frames < frames_needed(symbols)).sum().item()
            counts = [losses.sum().item(), wrong, sum(map(len, said)), too_short, len(said)]
            totals += torch.tensor(counts, device=env.device)
        loss, wrong, num, too_short, num_said = env.sum_over_ranks(totals).tolist()
        return {"loss": loss / num_said, "symbol_error_rate": wrong / num, "too_short": too_short / num_said}

    loop = Loop(env, data, amp=amp, model=model, optimizer=optimizer, schedule=schedule, ema=ema, evaluate=evaluate)
    for window in loop.windows():
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    return loop.eval


@keep_fp32
def ctc_losses(logits: Tensor, lengths: Tensor, symbols: Tensor) -> Tensor:
    """The loss per symbol of each utterance, fp32 [B]; 0 for one that is too short. Waits for a GPU."""
    frames, num_symbols = num_frames(lengths), (symbols > 0).sum(1)
    possible = frames >= frames_needed(symbols)
    # Without symbols any number of frames has a finite loss. An infinite one times 0 would be NaN.
    # In fp32, since the island casts: a rounding of one frame's log-probability comes once per frame.
    log_probs = logits.log_softmax(dim=-1).transpose(0, 1)
    losses = F.ctc_loss(log_probs, symbols, frames, num_symbols * possible, reduction="none")
    return losses * possible / num_symbols


def num_frames(lengths: Tensor) -> Tensor:
    """Frames of the network's output for so many samples: every second of the spectrum's."""
    return ((lengths - WINDOW) // HOP + 2) // 2


def frames_needed(symbols: Tensor) -> Tensor:
    """The fewest frames that can say the symbols: one each, and a blank between equal neighbours."""
    return (symbols > 0).sum(1) + ((symbols[:, 1:] == symbols[:, :-1]) & (symbols[:, 1:] > 0)).sum(1)


def decode(logits: Tensor, frames: Tensor) -> list[list[int]]:
    """The most likely class of each frame, without repetitions, then without blanks. Waits for the device."""
    best = zip(logits.argmax(dim=-1).tolist(), frames.tolist(), strict=True)
    return [[symbol for symbol, _ in itertools.groupby(row[:num]) if symbol] for row, num in best]


def distance(heard: Sequence[int], said: Sequence[int]) -> int:
    """Insertions, deletions and substitutions between two sequences (Levenshtein)."""
    row = list(range(len(said) + 1))
    for symbol in heard:
        others = (min(up + 1, left + (symbol != one)) for up, left, one in zip(row[1:], row, said, strict=False))
        row = list(itertools.accumulate(others, lambda left, other: min(left + 1, other), initial=row[0] + 1))
    return row[-1]


# --- the data ---------------------------------------------------------------------------------------------------------


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


# --- the network ------------------------------------------------------------------------------------------------------


class LogMel(nn.Module):
    """The logarithm of the power in `BANDS` mel bands: waves [B, N] to [B, BANDS, T]. To be kept in fp32."""

    def __init__(self) -> None:
        super().__init__()
        edges = 700 * ((1 + RATE / 2 / 700) ** torch.linspace(0, 1, BANDS + 2) - 1)  # equal steps of the mel scale
        slopes = torch.linspace(0, RATE / 2, WINDOW // 2 + 1) - edges[:, None]
        widths = edges.diff()[:, None]
        triangles = torch.minimum(slopes[:-2] / widths[:-1], -slopes[2:] / widths[1:]).clamp(min=0)
        self.window = nn.Buffer(torch.hann_window(WINDOW), persistent=False)
        self.filters = nn.Buffer(triangles, persistent=False)

    def forward(self, waves: Tensor) -> Tensor:
        spectrum = torch.stft(waves, WINDOW, HOP, window=self.window, center=False, return_complex=True)
        return (self.filters @ spectrum.abs().square() + 1e-8).log()


class Listener(nn.Module):
    """Convolutions over log-mel features: waves [B, N] to logits [B, T, num_classes], T as of `num_frames`."""

    def __init__(self, *, num_classes: int, width: int = 64) -> None:
        super().__init__()
        check_count("width", width)
        self.features = keep_fp32(LogMel())
        self.norm = nn.LayerNorm(BANDS)  # over the bands, so that the volume does not matter
        self.stem = nn.Conv1d(BANDS, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(width, num_classes)

    def forward(self, waves: Tensor) -> Tensor:
        x = self.stem(self.norm(self.features(waves).mT).mT)
        for block in self.blocks:
            x = x + block(F.gelu(x))
        return self.head(F.gelu(x).mT)


MODELS = Family(what="a speech recogniser", builders={"listener": Listener}, example={"num_classes": NUM_CLASSES})
