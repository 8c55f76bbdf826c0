"""Hugging Face Accelerate."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from amp_conformance.task import Task, View, evaluator, inner_gradient, plain


class _Position:
    made = 0
    """Windows of this epoch."""

    def state_dict(self) -> dict[str, int]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.made = state["made"]


class Accelerate:
    """The loop of Accelerate's documentation."""

    name = "Accelerate"
    package: str | None = "accelerate"
    configuration = (
        "accumulate() with sync_with_dataloader, each loss weighted by its share of the window, unscale_gradients and "
        "torch's clipping, an average updated unless optimizer_step_was_skipped, automatic_checkpoint_naming, "
        "skip_first_batches; a GradScaler and autocast for the CPU, where Accelerate trains fp16 as fp32"
    )
    documentation = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"

    bounded = False

    def scale(self, accelerator: Accelerator, task: Task) -> None:
        """Give it a scaler in fp16."""
        if task.mode == "fp16":
            accelerator.scaler = task.scaler()

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        task.require(self.name, max_scale=self.bounded, sharded=False)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        accelerator = Accelerator(  # pyright: ignore[reportCallIssue]
            mixed_precision={"fp32": "no"}.get(task.mode, "bf16"),
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(task.accumulation, sync_with_dataloader=True),
        )
        if task.mode == "fp16":
            accelerator.state._mixed_precision = "fp16"
        self.scale(accelerator, task)
        net = task.net()
        optimizers = task.optimizers(net)
        schedules = [task.schedule(optimizer) for optimizer in optimizers] if task.schedule else []
        ema = None if task.ema is None else AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(task.ema))
        model, *prepared = accelerator.prepare(net, *optimizers, *schedules)
        wrapped, schedules = prepared[: len(optimizers)], prepared[len(optimizers) :]
        position = _Position()
        accelerator.register_for_checkpointing(position, *([] if ema is None else [ema]))
        accelerator.project_configuration = ProjectConfiguration(automatic_checkpoint_naming=True)
        if task.load is not None:
            accelerator.project_configuration.set_directories(str(task.load))
            accelerator.load_state()

        def save(folder: Path) -> None:
            accelerator.project_configuration.set_directories(str(folder))
            accelerator.save_state()

        for epoch in range(task.done, len(task.epochs)):
            # Each process has its own batches already.
            batches: Any = list(task.epochs[epoch])
            plain_loader = DataLoader(batches, collate_fn=lambda rows: rows[0])
            loader = prepare_data_loader(plain_loader, num_processes=1, process_index=0)
            weights: Any = None
            first, num_windows = position.made * task.accumulation, len(task.windows(epoch))
            for i, batch in enumerate(skip_first_batches(loader, first) if first else loader, first):
                with accelerator.accumulate(model):
                    loss = task.loss(model, batch, inner_gradient(accelerator.scaler if task.mode == "fp16" else None))
                    if i % task.accumulation == 0:
                        window = task.windows(epoch)[i // task.accumulation]
                        counts = torch.tensor([float(len(x)) if task.weighted else 1.0 for x, _ in window])
                        total: Any = accelerator.reduce(counts.sum(), "sum")
                        weights = counts / total * task.accumulation * accelerator.num_processes
                    accelerator.backward(loss * weights[i % task.accumulation])
                    for each in wrapped:
                        if accelerator.sync_gradients and task.clip is not None:
                            accelerator.unscale_gradients(each)
                            clip_grad_norm_([p for group in each.param_groups for p in group["params"]], task.clip)
                        each.step()
                    for each in schedules:
                        each.step()
                    if accelerator.sync_gradients and ema is not None and not accelerator.optimizer_step_was_skipped:
                        ema.update_parameters(plain(model))
                    for each in wrapped:
                        each.zero_grad()
                    if accelerator.sync_gradients and task.is_due(epoch, i // task.accumulation + 1):
                        position.made = (i // task.accumulation + 1) % num_windows
                        scaler: Any = accelerator.scaler
                        scale = scaler.get_scale() if task.mode == "fp16" else None
                        after(View(net, optimizers, scale, None if ema is None else ema.module, evaluator(model), save))
