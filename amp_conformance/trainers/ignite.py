"""PyTorch Ignite."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EMAHandler
from torch import Tensor, nn

from amp_conformance.task import Batch, Task, View, evaluator, inner_gradient, over_ranks


class Ignite:
    """`create_supervised_trainer`."""

    name = "Ignite"
    package: str | None = "pytorch-ignite"
    configuration = (
        "create_supervised_trainer with gradient_accumulation_steps, EMAHandler, Checkpoint and DiskSaver, "
        "deterministic=True to resume within an epoch, autocast and GradScaler for the CPU"
    )
    documentation = "https://docs.pytorch.org/ignite/engine.html"

    bounded = False

    def scaler(self, task: Task) -> Any:
        """The scaler of a task; None: without one."""
        return task.scaler() if task.mode == "fp16" else None

    def attach(self, scaler: Any, net: nn.Module, *parts: object) -> None:
        """What else is told of steps: nothing."""

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        task.require(self.name, several=False, clip=False, max_scale=self.bounded, weighted=False)
        net = task.net()
        model = over_ranks(task, net)
        (optimizer,) = task.optimizers(net)
        schedule = task.schedule(optimizer) if task.schedule else None
        scaler = self.scaler(task)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            with task.autocast():
                return task.loss(model, batch, inner_gradient(scaler if task.mode == "fp16" else None))

        trainer = create_supervised_trainer(
            model,
            optimizer,
            lambda loss, _: loss,  # the model's function computes it
            gradient_accumulation_steps=task.accumulation,
            prepare_batch=lambda batch, **_: (batch, batch[1]),
            model_fn=loss,
            output_transform=lambda *_: None,
            deterministic=task.every > 0,
            **({} if scaler is None else {"amp_mode": "amp", "scaler": scaler}),  # type: ignore[arg-type]
        )
        parts: dict[str, Any] = {"model": net, "optimizer": optimizer, "trainer": trainer}
        window = Events.ITERATION_COMPLETED(every=task.accumulation)
        if task.mode == "fp16":
            parts["scaler"] = scaler
        if schedule is not None:
            trainer.add_event_handler(window, lambda engine: schedule.step())
            parts["schedule"] = schedule
        ema = None if task.ema is None else EMAHandler(net, momentum=1 - task.ema)
        self.attach(scaler, net, *(each for each in (schedule, ema) if each is not None))
        if ema is not None:
            ema.attach(trainer, event=window)
            parts["ema"] = ema.ema_model
        if task.load is not None:
            newest = max(task.load.glob("*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
            state = torch.load(newest, weights_only=False)
            Checkpoint.load_objects({name: part for name, part in parts.items() if name in state}, state)

        def save(folder: Path) -> None:
            Checkpoint(parts, DiskSaver(folder, require_empty=False), n_saved=None)(trainer)

        def end(engine: Engine) -> None:
            scale = scaler.get_scale() if scaler is not None and task.mode == "fp16" else None
            average = ema and ema.ema_model
            after(View(net, [optimizer], scale, average, evaluator(net, task.autocast), save))

        often = (
            Events.ITERATION_COMPLETED(every=task.accumulation * task.every) if task.every else Events.EPOCH_COMPLETED
        )
        trainer.add_event_handler(often, end)
        for epoch in range(trainer.state.epoch, len(task.epochs)):
            batches: list[Batch] = list(task.epochs[epoch])
            trainer.run(batches, max_epochs=epoch + 1, epoch_length=len(batches))
