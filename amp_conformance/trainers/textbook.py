"""The loop of tutorials: autocast, `GradScaler`, and what people add around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from amp_conformance.task import Task, View, evaluator, inner_gradient, over_ranks


class Textbook:
    """torch's own parts, used as its documentation shows."""

    name = "textbook"
    package: str | None = None
    configuration = (
        "torch.amp.GradScaler, clip_grad_norm_ after unscale_, AveragedModel, a scheduler stepped with each window"
    )
    documentation = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"

    bounded = False
    """Whether the scale has a largest value."""

    def scaler(self, task: Task) -> Any:
        """The scaler of a task."""
        return task.scaler()

    def attach(self, scaler: Any, net: nn.Module, *parts: object) -> None:
        """What else is told of steps: nothing."""

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        task.require(self.name, max_scale=self.bounded, weighted=False, every=False)
        net = task.net()
        model = over_ranks(task, net)
        optimizers = task.optimizers(net)
        schedules = [task.schedule(optimizer) for optimizer in optimizers] if task.schedule else []
        ema = None if task.ema is None else AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(task.ema))
        scaler = self.scaler(task)
        self.attach(scaler, net, *schedules, *([] if ema is None else [ema]))
        parts = {"net": net, "scaler": scaler}
        parts |= {f"optimizer{i}": each for i, each in enumerate(optimizers)}
        parts |= {f"schedule{i}": each for i, each in enumerate(schedules)}
        parts |= {} if ema is None else {"ema": ema}
        if task.load is not None:
            state = torch.load(task.load / "state.pt", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(state[name])

        def save(folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "state.pt")

        for epoch in range(task.done, len(task.epochs)):
            for i, batch in enumerate(task.epochs[epoch], 1):
                with task.autocast():
                    loss = task.loss(model, batch, inner_gradient(scaler)) / task.accumulation
                scaler.scale(loss).backward()
                if i % task.accumulation:
                    continue
                for optimizer in optimizers:
                    if task.clip is not None:
                        scaler.unscale_(optimizer)
                        params = [param for group in optimizer.param_groups for param in group["params"]]
                        nn.utils.clip_grad_norm_(params, task.clip)
                    scaler.step(optimizer)
                scaler.update()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                for schedule in schedules:
                    schedule.step()
                if ema is not None:
                    ema.update_parameters(net)
            scale, average = scaler.get_scale() if task.mode == "fp16" else None, None if ema is None else ema.module
            after(View(net, optimizers, scale, average, evaluator(net, task.autocast), save))
