"""Hugging Face Accelerate."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from amp_conformance.task import Task, View, evaluator, plain


class Accelerate:
    """The loop of Accelerate's documentation."""

    name = "Accelerate"
    package: str | None = "accelerate"
    configuration = (
        "accumulate() with sync_with_dataloader, prepared scheduler, gradients weighted by counts as the guide on "
        "batches of variable size shows, an average updated unless optimizer_step_was_skipped. On a CPU Accelerate "
        "trains fp32 when it is asked for fp16, so the adapter gives it a GradScaler and autocast for the CPU"
    )
    documentation = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        task.require(self.name, max_scale=False)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        accelerator = Accelerator(  # pyright: ignore[reportCallIssue]
            mixed_precision={"fp32": "no"}.get(task.mode, "bf16"),
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(task.accumulation, sync_with_dataloader=True),
        )
        if task.mode == "fp16":
            accelerator.state._mixed_precision = "fp16"
            accelerator.scaler = torch.amp.GradScaler(  # type: ignore[attr-defined]
                "cpu", task.init_scale, growth_interval=task.growth_interval
            )
        net = task.net()
        optimizers = task.optimizers(net)
        schedules = [task.schedule(optimizer) for optimizer in optimizers] if task.schedule else []
        ema = None if task.ema is None else AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(task.ema))
        model, *prepared = accelerator.prepare(net, *optimizers, *schedules)
        wrapped, schedules = prepared[: len(optimizers)], prepared[len(optimizers) :]
        if ema is not None:
            accelerator.register_for_checkpointing(ema)
        if task.load is not None:
            accelerator.load_state(str(task.load))

        def save(folder: Path) -> None:
            accelerator.save_state(str(folder))

        for epoch in range(task.done, len(task.epochs)):
            # Each process has its own batches already.
            batches: Any = list(task.epochs[epoch])
            loader = prepare_data_loader(DataLoader(batches, batch_size=None), num_processes=1, process_index=0)
            left: list[float] = []
            for i, batch in enumerate(loader):
                with accelerator.accumulate(model):
                    loss = task.loss(model, batch)
                    if task.weighted:
                        if not left:
                            window = task.windows(epoch)[i // task.accumulation]
                            counts = torch.tensor([float(len(x)) for x, _ in window])
                            total: Any = accelerator.reduce(counts.sum(), "sum")
                            left = (counts / total * task.accumulation * accelerator.num_processes).tolist()
                        loss = loss * left.pop(0)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and task.clip is not None:
                        accelerator.clip_grad_norm_(model.parameters(), task.clip)
                    for each in [*wrapped, *schedules]:
                        each.step()
                    if accelerator.sync_gradients and ema is not None and not accelerator.optimizer_step_was_skipped:
                        ema.update_parameters(plain(model))
                    for each in wrapped:
                        each.zero_grad()
            scale = None if accelerator.scaler is None else accelerator.scaler.get_scale()
            after(View(net, optimizers, scale, None if ema is None else ema.module, evaluator(model), save))
