"""Lightning's Trainer."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from amp_conformance.task import Batch, Task, View, evaluator

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class _Module(LightningModule):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.net = task, task.net()
        self.made = list(task.optimizers(self.net))
        self.automatic_optimization = len(self.made) == 1
        own = getattr(self.net, "_ddp_params_and_buffers_to_ignore", ())
        self._ddp_params_and_buffers_to_ignore = [f"net.{name}" for name in own]

    def configure_optimizers(self) -> Any:
        if self.task.schedule is None:
            return self.made
        schedules = [{"scheduler": self.task.schedule(each), "interval": "step"} for each in self.made]
        return self.made, schedules

    def train_dataloader(self) -> Any:
        return DataLoader(list(self.task.epochs[self.trainer.current_epoch]), batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Batch, index: int) -> Tensor | None:
        loss = self.task.loss(self.net, batch)
        if self.automatic_optimization:
            return loss
        wrapped = self.optimizers()
        for each in wrapped:  # type: ignore[union-attr]
            each.zero_grad()
        self.manual_backward(loss)
        for each in wrapped:  # type: ignore[union-attr]
            if self.task.clip is not None:
                self.clip_gradients(each, gradient_clip_val=self.task.clip, gradient_clip_algorithm="norm")
            each.step()
        return None


class _End(Callback):
    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def on_train_epoch_end(self, *args: Any) -> None:
        self.end()


class Lightning:
    """A LightningModule."""

    name = "Lightning"
    package: str | None = "lightning"
    configuration = (
        "automatic optimization (manual with several optimizers), accumulate_grad_batches, gradient_clip_val, "
        "EMAWeightAveraging, schedulers by step, MixedPrecision with a GradScaler for the CPU"
    )
    documentation = "https://lightning.ai/docs/pytorch/stable/common/trainer.html"

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        task.require(self.name, max_scale=False, weighted=False)
        plugins = []
        if task.mode != "fp32":
            scaler = torch.amp.GradScaler("cpu", task.init_scale, growth_interval=task.growth_interval)  # type: ignore[attr-defined]
            names = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
            plugins.append(MixedPrecision(names[task.mode], "cpu", scaler if task.mode == "fp16" else None))  # type: ignore[arg-type]
        module = _Module(task)
        is_manual = not module.automatic_optimization
        averaging = None if task.ema is None else EMAWeightAveraging(decay=task.ema)
        callbacks: list[Callback] = [] if averaging is None else [averaging]

        def end() -> None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            ema: Any = None if averaging is None else averaging._average_model.module.net  # type: ignore[union-attr]
            scale = None if scaler is None else scaler.get_scale()
            after(
                View(
                    module.net,
                    module.made,
                    scale,
                    ema,
                    evaluator(module.net, trainer.precision_plugin.val_step_context),
                    lambda path: trainer.save_checkpoint(path),
                )
            )

        trainer = Trainer(
            accelerator="cpu",
            devices=task.ranks,
            strategy="ddp" if task.ranks > 1 else "auto",
            plugins=plugins,
            max_epochs=len(task.epochs),
            accumulate_grad_batches=task.accumulation,
            gradient_clip_val=None if is_manual else task.clip,
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            callbacks=[*callbacks, _End(end)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, ckpt_path=task.load)
