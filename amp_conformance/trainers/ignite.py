"""PyTorch Ignite."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from ignite.engine import Engine, Events, create_supervised_trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_conformance.task import Batch, NotOffered, Task, View, evaluator


class Ignite:
    """`create_supervised_trainer`."""

    name = "Ignite"
    package: str | None = "pytorch-ignite"
    configuration = (
        "create_supervised_trainer with gradient_accumulation_steps; its autocast is for CUDA alone, so only fp32 is "
        "checked on a CPU"
    )
    documentation = "https://docs.pytorch.org/ignite/engine.html"

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        if task.mode != "fp32":
            raise NotOffered("Ignite: autocast on a CPU")
        task.require(self.name, several=False, clip=False, ema=False, max_scale=False, weighted=False)
        if task.ranks > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        net = task.net()
        (optimizer,) = task.optimizers(net)
        schedule = task.schedule(optimizer) if task.schedule else None
        model: nn.Module = DistributedDataParallel(net) if task.ranks > 1 else net
        trainer = create_supervised_trainer(
            model,
            optimizer,
            lambda loss, _: loss,  # the model's function computes it
            gradient_accumulation_steps=task.accumulation,
            prepare_batch=lambda batch, **_: (batch, batch[1]),
            model_fn=lambda model, batch: task.loss(model, batch),
            output_transform=lambda *_: None,
        )
        parts = {"model": net, "optimizer": optimizer, "trainer": trainer, "schedule": schedule}
        parts = {name: part for name, part in parts.items() if part is not None}
        if schedule is not None:
            trainer.add_event_handler(
                Events.ITERATION_COMPLETED(every=task.accumulation), lambda engine: schedule.step()
            )
        if task.load is not None:
            state = torch.load(task.load, weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(state[name])

        def save(folder: Path) -> None:
            torch.save({name: part.state_dict() for name, part in parts.items()}, folder)

        def end(engine: Engine) -> None:
            after(View(net, [optimizer], None, None, evaluator(net), save))

        trainer.add_event_handler(Events.EPOCH_COMPLETED, end)
        for epoch in range(task.done, len(task.epochs)):
            batches: list[Batch] = list(task.epochs[epoch])
            trainer.run(batches, max_epochs=epoch + 1, epoch_length=len(batches))
