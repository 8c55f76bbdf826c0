"""A landscape in a network: from a place on the map to its height above sea level.

The lesson: coordinates belong in fp32. A network that draws fine detail gets its coordinates as sines of many
frequencies; a phase of 100 radians is a multiple of 0.5 in bfloat16, so neighbours get the same sine. `keep_fp32` makes
the layer that computes them an fp32 island.

    python train.py recipe=terrain
    python train.py recipe=terrain model.options.island=false       the same without the island

Source: Tancik et al., "Fourier Features Let Networks Learn High Frequency Functions" (arXiv:2006.10739).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.cbook
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, keep_fp32, sync_grads
from amp_core.config.schema import Config, RecipeConfig
from amp_core.data import Data
from amp_core.models import Family
from amp_core.run.recipe import Environment, Loop, build_ema, build_model, build_optimizer, build_schedule

# --- your data ---


class Heights:
    """Places as [B, 2] in (-1, 1), and their heights as [B, 1], both fp32."""

    def __init__(self, places: Tensor, heights: Tensor) -> None:
        self.places, self.heights = places, heights

    def __len__(self) -> int:
        return len(self.places)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor([index for index, _ in keys], dtype=torch.long)  # the other number is the epoch
        return self.places[chosen], self.heights[chosen]


def jacksboro() -> tuple[Data, float]:
    """A map of 344 x 403 heights that matplotlib ships, every fifth held out; and metres per unit of height."""
    with matplotlib.cbook.get_sample_data("jacksboro_fault_dem.npz") as file:
        metres = torch.from_numpy(file["elevation"].astype(np.float32))
    rows, columns = (torch.linspace(-1, 1, size) for size in metres.shape)
    places = torch.cartesian_prod(rows, columns)
    heights = ((metres - metres.mean()) / metres.std()).reshape(-1, 1)
    held_out = torch.arange(len(places)) % 5 == 0
    train, held = Heights(places[~held_out], heights[~held_out]), Heights(places[held_out], heights[held_out])
    return Data(train, held, facts={}), metres.std().item()


# --- your network ---


class Waves(nn.Module):
    """Sines and cosines of a place in fixed random directions: [B, 2] to [B, num]."""

    def __init__(self, num: int, frequency: float) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(2, num // 2) * frequency)

    def forward(self, places: Tensor) -> Tensor:
        phases = math.pi * places @ self.directions
        return torch.cat([phases.sin(), phases.cos()], dim=1)


def terrain_net(*, width: int = 128, frequency: float = 8.0, island: bool = True) -> nn.Module:
    """A place to a height: [B, 2] to [B, 1]."""
    waves = Waves(width, frequency)
    return nn.Sequential(
        keep_fp32(waves) if island else waves,
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, 1),
    )


# --- the recipe ---

DATA = "own"
MODELS = Family(what="a network of places", builders={"own": terrain_net}, example={})


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings: none."""


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: loss, and the root of the mean squared error in metres."""
    data, metres_per_unit = jacksboro()
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    model = env.wrap(build_model(cfg.model.name, MODELS, options=cfg.model.options), amp)
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model)
    clip = Clip.of(cfg.clip)

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        total = torch.zeros((), device=env.device)
        for micro in window:
            places, heights = micro.batch
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    loss = F.mse_loss(model(places), heights)
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
        totals = torch.zeros(2, dtype=torch.float64, device=env.device)  # squared error, places: read back once
        for places, heights in env.eval_batches(data.eval, 4096):
            with amp.autocast():
                error = F.mse_loss(net(places), heights, reduction="sum")
            totals += torch.stack([error, error.new_tensor(len(places))])
        error, num_places = env.sum_over_ranks(totals).tolist()
        return {"loss": error / num_places, "rmse_metres": math.sqrt(error / num_places) * metres_per_unit}

    loop = Loop(env, data, amp=amp, model=model, optimizer=optimizer, schedule=schedule, ema=ema, evaluate=evaluate)
    for window in loop.windows():
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    return loop.eval
