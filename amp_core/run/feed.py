"""The windows of a run: the samples of each step and rank, loaded, weighted and copied to the device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.random  # which numpy itself imports at its first use, too late to be seeded for it
import torch
from torch import Tensor

from amp_core.data import Data
from amp_core.data.loading import Batches, Sampler, to_device
from amp_core.run.environment import Environment
from amp_core.step.window import MicroBatch, microbatch_weights, window_of


class Feed:
    """Makes windows from training data. Holds no position: a window is a function of its first sample.

    The weights are those of `step.window.windows`. Here all ranks have equally many micro-batches of one size, without
    end, so they need not agree on the length of each window.

    `timed` yields the batches that it gets, and may measure the time spent waiting for them.
    """

    def __init__(self, env: Environment, data: Data, timed: Callable[[Iterable[Any]], Iterator[Any]]) -> None:
        self._env, self._cfg, self.data, self._timed = env, env.cfg, data, timed
        self.accumulation = self._cfg.accumulation
        """Micro-batches per window on each rank."""
        self.count: Callable[[Any], Tensor] | None = None
        """What a batch weighs; None: its samples."""

    def resized(self, batch_size: int) -> Feed:
        """The same data in windows of one micro-batch of another size, weighted by samples."""
        feed = Feed(self._env, self.data, self._timed)
        feed._cfg, feed.accumulation = replace(self._cfg, batch_size=batch_size), 1
        return feed

    @property
    def samples_per_step(self) -> int:
        """Samples of a window, over all micro-batches and ranks."""
        return self._cfg.batch_size * self.accumulation * self._env.world_size

    def ends(self, step: int, samples: int, steps: int, epochs: int) -> bool:
        """Whether the window after `step` others and `samples` ends a period of `steps` or `epochs`; 0: no period."""
        period, after = epochs * len(self.data.train), samples + self.samples_per_step
        return bool((steps and (step + 1) % steps == 0) or (period and after // period > samples // period))

    @contextlib.contextmanager
    def loading(self, start: int, *, num_workers: int | None = None) -> Iterator[Iterator[list[MicroBatch]]]:
        """The windows from sample `start` on, without end, loaded as in training: with workers and perf.prefetch."""
        env, cfg = self._env, self._cfg
        num_workers = cfg.data.num_workers if num_workers is None else num_workers
        on_cuda = env.device.type == "cuda"
        with contextlib.closing(
            Batches(self.data.train, self._sampler(start), num_workers=num_workers, pin_memory=on_cuda)
        ) as loader:
            batches = to_device(
                self._timed(loader),
                env.device,
                ahead=self.accumulation if cfg.perf.prefetch and on_cuda else 0,  # the next window
                finish=self.data.finish,
                channels_last=cfg.perf.channels_last,
            )
            yield (self._next(batches, at) for at in itertools.count(start, self.samples_per_step))

    def window_at(self, start: int) -> list[MicroBatch]:
        """The window that begins with sample `start`, loaded without workers. Call it on every rank."""
        loader = Batches(self.data.train, self._sampler(start), num_workers=0, pin_memory=False)
        with contextlib.closing(loader):
            channels_last = self._cfg.perf.channels_last
            batches = to_device(loader, self._env.device, finish=self.data.finish, channels_last=channels_last)
            return self._next(batches, start)

    def indices_at(self, start: int, rank: int) -> list[list[int]]:
        """The data set's indices of a rank's samples in the window that begins with sample `start`, by micro-batch."""
        keys = itertools.islice(self._sampler(start, rank), self.accumulation)
        return [[index for index, _ in batch] for batch in keys]

    def draw(self, random: Callable[..., Tensor], *shape: int, step: int, stream: int) -> list[Tensor]:
        """Random numbers of a step, for each micro-batch of this rank; see `Loop.draw`."""
        cfg, env = self._cfg, self._env
        entropy = np.random.SeedSequence([cfg.seed, step, stream]).generate_state(1, np.uint64)
        generator = torch.Generator(env.device).manual_seed(int(entropy[0]))
        split = (self.accumulation, env.world_size, cfg.batch_size)
        drawn = random(*split, *shape, generator=generator, device=env.device)
        return list(drawn[:, env.rank])

    def _sampler(self, start: int, rank: int | None = None) -> Sampler:
        env, cfg = self._env, self._cfg
        return Sampler(
            len(self.data.train),
            seed=cfg.seed,
            batch_size=cfg.batch_size,
            accumulation=self.accumulation,
            rank=env.rank if rank is None else rank,
            world_size=env.world_size,
            start_sample=start,
        )

    def _next(self, loaded: Iterator[Any], start: int) -> list[MicroBatch]:
        if self.data.finish is not None:
            self._env.seed_step(-1 - start)  # for what `finish` draws; steps are seeded by numbers above 0
        batches = list(itertools.islice(loaded, self.accumulation))
        weights: list[float | Tensor] = [self._cfg.batch_size / self.samples_per_step] * len(batches)
        if self.count is not None:
            weights = microbatch_weights([self.count(batch) for batch in batches])
        return window_of(batches, weights)
