"""Lightning's Trainer."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from amp_conformance.task import Batch, Task, View, evaluator, inner_gradient
from amp_conformance.trainers.fabric import precision_of

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class _Feed(DataLoader[Batch]):
    """A loader with a state, which Lightning saves."""

    first = given = 0

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        for self.given in range(self.first + 1, len(self) + 1):  # noqa: B020
            yield self.dataset[self.given - 1]
        self.first = self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["given"] % len(self)


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
        return _Feed(list(self.task.epochs[self.trainer.current_epoch]), batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Batch, index: int) -> Tensor | None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        loss = self.task.loss(self.net, batch, inner_gradient(scaler if self.task.mode == "fp16" else None))
        if self.automatic_optimization:
            return loss
        wrapped = self.optimizers()
        for each in wrapped:  # type: ignore[union-attr]
            each.zero_grad()
        self.manual_backward(loss)
        for each in wrapped:  # type: ignore[union-attr]
            each.step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.task.clip is not None and not self.automatic_optimization:
            self.clip_gradients(optimizer, gradient_clip_val=self.task.clip, gradient_clip_algorithm="norm")


class _End(Callback):
    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        task, made = module.task, -(-(index + 1) // module.task.accumulation)
        if task.every and trainer.fit_loop._should_accumulate() is False and task.is_due(trainer.current_epoch, made):
            self.end()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if not module.task.every:
            self.end()


class Lightning:
    """A LightningModule."""

    name = "Lightning"
    package: str | None = "lightning"
    configuration = (
        "accumulate_grad_batches and gradient_clip_val; several optimizers manually, clipped in "
        "on_before_optimizer_step; EMAWeightAveraging, schedulers by step, a loader with a state, MixedPrecision with "
        "a GradScaler for the CPU"
    )
    documentation = "https://lightning.ai/docs/pytorch/stable/common/trainer.html"

    bounded = False

    def plugin(self, task: Task) -> Any:
        """The precision of a task; None: fp32."""
        return precision_of(task, MixedPrecision)

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        task.require(self.name, max_scale=self.bounded, weighted=False, sharded=False)
        plugin = self.plugin(task)
        plugins = [] if plugin is None else [plugin]
        module = _Module(task)
        is_manual = not module.automatic_optimization
        averaging = None if task.ema is None else EMAWeightAveraging(decay=task.ema)
        callbacks: list[Callback] = [] if averaging is None else [averaging]

        def end() -> None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            ema: Any = None if averaging is None else averaging._average_model.module.net  # type: ignore[union-attr]
            scale = scaler.get_scale() if scaler is not None and task.mode == "fp16" else None
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
