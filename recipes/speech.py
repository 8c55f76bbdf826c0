"""Speech recognition with CTC: features, log-softmax and loss in fp32 around a 16-bit network; utterances too short.

The lesson, in three parts. Power spectra exceed fp16: silence plus the usual 1e-8 is 0, and its logarithm -inf.
Autocast does that unasked, since the mel filters are a matrix product, so the features are an fp32 island. CTC adds a
log-probability per frame: where a network is unsure, 16 bits round all of them by the same amount, so the log-softmax
is in the island of the loss (a CPU's autocast leaves it in 16 bits). And an utterance with fewer frames than its
symbols need has an infinite loss and NaN gradients in any precision: the step is skipped at any loss scale.
`zero_infinity=True` drops such an utterance, but also one that overflowed, unnoticed; here the lengths decide.

    python train.py recipe=speech                                    telephone keys in noise, bf16
    python train.py recipe=speech amp=fp16 accumulation=2 batch_size=32
    python train.py recipe=speech data.options.noise=6 model.options.width=128 steps=1000
    python train.py recipe=speech data=recordings data.path=LJSpeech-1.1 model.options.width=256 epochs=50

Expected: 0.048 to 0.051 of the symbols wrong in bf16, 0.048 to 0.052 in fp32, 0.049 to 0.051 in fp16 (seeds 1 to 3), in
16 s of one core of a server CPU. `F.ctc_loss` reads the lengths on the host: on a GPU a wait per micro-batch.

Sources: Graves et al., "Connectionist Temporal Classification" (ICML 2006); the tones: ITU-T recommendation Q.23.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, keep_fp32, sync_grads
from amp_core.config.errors import ConfigError
from amp_core.config.schema import Config, RecipeConfig
from amp_core.data import Data
from amp_core.data.speech import Recordings
from amp_core.models import Family
from amp_core.models.family import check_count
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.tensors import widest

DATA = "speech"
WINDOW, HOP, BANDS = 0.032, 0.02, 32  # seconds, seconds; mel bands


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: loss, symbol_error_rate, and the share that is too_short."""
    data = build_data(cfg.data, seed=cfg.seed)
    rate = data.facts["rate"]
    check_lengths(data, rate)
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
                    loss = ctc_losses(model(waves), num_frames(lengths, rate), symbols).mean()
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
            frames, said = num_frames(lengths, rate), [[symbol for symbol in row if symbol] for row in symbols.tolist()]
            with amp.autocast():
                logits = net(waves)
                losses = ctc_losses(logits, frames, symbols)
            wrong = sum(map(distance, decode(logits, frames), said))
            too_short = (frames < frames_needed(symbols)).sum().item()
            counts = [losses.sum().item(), wrong, sum(map(len, said)), too_short, len(said)]
            totals += torch.tensor(counts, device=env.device)
        loss, wrong, num, too_short, num_said = env.sum_over_ranks(totals).tolist()
        return {"loss": loss / num_said, "symbol_error_rate": wrong / num, "too_short": too_short / num_said}

    def predict(net: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Any]:
        logits, frames = net(batch[0]), num_frames(batch[1], rate)
        said = ["".join(data.classes[symbol - 1] for symbol in row) for row in decode(logits, frames)]
        inside = torch.arange(logits.size(1), device=frames.device) < frames[:, None]
        best = logits.float().log_softmax(dim=-1).amax(dim=-1)
        return {"text": said, "log_prob": (best * inside).sum(1) / frames.clamp(min=1)}

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema}
    loop = Loop(env, data, amp=amp, evaluate=evaluate, predict=predict, **parts)
    for window in loop.windows():
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    return loop.eval


@keep_fp32
def ctc_losses(logits: Tensor, frames: Tensor, symbols: Tensor) -> Tensor:
    """The loss per symbol of each utterance, fp32 [B]; 0 for one that is too short. Waits for a GPU."""
    num_symbols = (symbols > 0).sum(1)
    possible = frames >= frames_needed(symbols)
    # Without symbols any number of frames has a finite loss. An infinite one times 0 would be NaN.
    # In fp32, since the island casts: a rounding of one frame's log-probability comes once per frame.
    log_probs = logits.log_softmax(dim=-1).transpose(0, 1)
    losses = F.ctc_loss(log_probs, symbols, frames, num_symbols * possible, reduction="none")
    return losses * possible / num_symbols


def num_frames(lengths: Tensor, rate: int) -> Tensor:
    """Frames of the network's output for so many samples: every second of the spectrum's."""
    # F = (n - window) // hop + 1 spectra, of which a convolution of size 3, stride 2 and padding 1 leaves (F + 1) // 2.
    return ((lengths - round(WINDOW * rate)) // round(HOP * rate) + 2).clamp(min=0) // 2


def check_lengths(data: Data, rate: int) -> None:
    """Raise ConfigError if all recordings of a part are too short for what is said: it would be a loss of 0."""
    for part in (data.train, data.eval):
        if isinstance(part, Recordings):
            frames = num_frames(torch.from_numpy(part.lengths), rate).tolist()
            # Ends at the first that fits: a set may have a million.
            if all(f < frames_needed(torch.from_numpy(s)[None]) for f, s in zip(frames, part.symbols, strict=True)):
                raise ConfigError(
                    f"{part.paths[0]}, and the other {len(frames) - 1} recordings of its part, are too short for what "
                    f"is said: a character needs a frame of {2000 * HOP:g} ms"
                )


def frames_needed(symbols: Tensor) -> Tensor:
    """The fewest frames that can say the symbols: one each, and a blank between equal neighbours."""
    return (symbols > 0).sum(1) + ((symbols[:, 1:] == symbols[:, :-1]) & (symbols[:, 1:] > 0)).sum(1)


def decode(logits: Tensor, frames: Tensor) -> list[list[int]]:
    """The most likely class of each frame, without repetitions, then without blanks. Waits for the device."""
    best = zip(logits.argmax(dim=-1).tolist(), frames.tolist(), strict=True)
    return [[symbol for symbol, _ in itertools.groupby(row[:num]) if symbol] for row, num in best]


def distance(heard: Sequence[int], said: Sequence[int]) -> int:
    """Insertions, deletions and substitutions between two sequences (Levenshtein)."""
    # row[j]: the distance of what was heard so far to said[:j].
    row = list(range(len(said) + 1))
    for symbol in heard:
        others = (min(up + 1, left + (symbol != one)) for up, left, one in zip(row[1:], row, said, strict=False))
        row = list(itertools.accumulate(others, lambda left, other: min(left + 1, other), initial=row[0] + 1))
    return row[-1]


# --- the network ------------------------------------------------------------------------------------------------------


class LogMel(nn.Module):
    """The logarithm of the power in `BANDS` mel bands: waves [B, N] to [B, BANDS, T]. To be kept in fp32."""

    def __init__(self, rate: int) -> None:
        super().__init__()
        window, self.hop = round(WINDOW * rate), round(HOP * rate)
        edges = 700 * ((1 + rate / 2 / 700) ** torch.linspace(0, 1, BANDS + 2) - 1)  # equal steps of the mel scale
        slopes = torch.linspace(0, rate / 2, window // 2 + 1) - edges[:, None]
        widths = edges.diff()[:, None]
        triangles = torch.minimum(slopes[:-2] / widths[:-1], -slopes[2:] / widths[1:]).clamp(min=0)
        self.window = nn.Buffer(torch.hann_window(window), persistent=False)
        self.filters = nn.Buffer(triangles, persistent=False)

    def forward(self, waves: Tensor) -> Tensor:
        size = len(self.window)
        spectrum = torch.stft(waves, size, self.hop, window=self.window, center=False, return_complex=True)
        # 1e-8 is below 2^-24 = 6e-8, the smallest number of fp16.
        return (self.filters @ spectrum.abs().square() + 1e-8).log()


class Listener(nn.Module):
    """Convolutions over log-mel features: waves [B, N] to logits [B, T, num_classes], T as of `num_frames`."""

    def __init__(self, *, num_classes: int, rate: int, width: int = 64) -> None:
        super().__init__()
        check_count("width", width)
        self.features = keep_fp32(LogMel(rate))
        self.norm = nn.LayerNorm(BANDS)  # over the bands, so that the volume does not matter
        self.stem = nn.Conv1d(BANDS, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(width, num_classes)

    def forward(self, waves: Tensor) -> Tensor:
        x = self.stem(self.norm(self.features(waves).mT).mT)
        for block in self.blocks:
            x = x + block(F.gelu(x))
        return self.head(F.gelu(x).mT)


MODELS = Family(what="a speech recogniser", builders={"listener": Listener}, example={"num_classes": 17, "rate": 8000})
