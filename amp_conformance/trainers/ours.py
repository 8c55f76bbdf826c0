"""This project's parts in a plain loop."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

from amp_conformance.task import Task, View, evaluator, over_ranks
from amp_core import Amp, Checkpoint, Clip, Ema, Schedule, sync_grads, windows


class Ours:
    """`amp_core` in the loop of its README."""

    name = "amp_core"
    package: str | None = "amp-recipes"
    configuration = "Amp, Clip, Schedule, Ema and Checkpoint, amp.guard(net), in the plain loop of the README"
    documentation = "../README.md#the-core-without-the-rest"

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        policy = {"init_scale": task.init_scale, "growth_interval": task.growth_interval}
        if task.max_scale is not None:
            policy["max_scale"] = task.max_scale
        amp = Amp.named(task.mode, **(policy if task.mode == "fp16" else {}))
        net = task.net()
        amp.guard(net)
        model = over_ranks(task, net)
        optimizers = list(task.optimizers(net))
        make = task.schedule
        schedules = [Schedule(each, lambda o, _: make(o), 100) for each in optimizers] if make else []  # type: ignore[misc]
        ema = None if task.ema is None else Ema(net, task.ema, warmup=False)
        parts = {"model": net, "scaler": amp, "ema": ema}
        parts |= {f"optimizer{i}": each for i, each in enumerate(optimizers)}
        parts |= {f"schedule{i}": each for i, each in enumerate(schedules)}
        count = None if task.weighted else lambda batch: 1
        made = 0  # windows of this epoch
        if task.load is not None:
            found = Checkpoint(task.load, **parts).load()  # type: ignore[arg-type]
            made = 0 if found is None else found.progress["made"]

        def save(folder: Path) -> None:
            progress = {"made": made % len(task.windows(epoch))}
            Checkpoint(folder, **parts).save(1000 * epoch + made, progress=progress)  # type: ignore[arg-type]

        for epoch in range(task.done, len(task.epochs)):
            batches = itertools.islice(task.epochs[epoch], made * task.accumulation, None)
            for window in windows(batches, task.accumulation, count=count, world_size=task.ranks):
                with amp.cache_weight_casts(net) if len(window) > 1 else contextlib.nullcontext():
                    for micro in window:
                        with sync_grads(model, when=micro.is_last):
                            with amp.autocast():
                                loss = task.loss(model, micro.batch, lambda *pair: amp.grad(*pair)[0])
                            amp.backward(loss, micro.weight)
                report = amp.step(optimizers, clip=None if task.clip is None else Clip.norm(task.clip))
                amp.update()
                amp.zero_grad(*optimizers)
                for schedule in schedules:
                    schedule.advance(report)
                if ema is not None:
                    ema.update(report)
                made += 1
                if task.is_due(epoch, made):
                    scale, average = amp.scale if task.mode == "fp16" else None, None if ema is None else ema.model
                    after(View(net, optimizers, scale, average, evaluator(net, amp.autocast), save))
            made = 0
