"""Hugging Face's Trainer."""

# pyright: reportMissingImports=false
from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_utils import get_last_checkpoint

from amp_conformance.task import Task, View, inner_gradient, plain


class _Batches(Dataset[dict[str, Tensor]]):
    """The batches of an epoch."""

    def __init__(self, task: Task) -> None:
        self.task, self.epoch = task, task.done

    def __len__(self) -> int:
        return len(self.task.epochs[self.epoch])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = self.task.epochs[self.epoch][index]
        return {"x": x, "labels": y}


class _Feed(DataLoader[dict[str, Tensor]]):
    def set_epoch(self, epoch: int) -> None:
        self.dataset.epoch = epoch  # type: ignore[attr-defined]


class _Trainer(transformers.Trainer):  # type: ignore[misc]
    task: Task

    def get_train_dataloader(self) -> Any:
        return _Feed(_Batches(self.task), collate_fn=lambda rows: rows[0])

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if return_outputs:
            return torch.zeros(()), {"output": model(inputs["x"])}
        loss = self.task.loss(
            model,
            (inputs["x"], inputs["labels"]),
            inner_gradient(self.accelerator.scaler if self.task.mode == "fp16" else None),
        )
        if self.task.weighted:
            loss = loss * len(inputs["x"]) / num_items_in_batch * self.accelerator.num_processes
        return loss


class _Callback(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, task: Task, end: Callable[[], None]) -> None:
        self.task, self.end = task, end

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.task.every and state.global_step % self.task.every == 0:
            self.end()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        if not self.task.every:
            self.end()


class HuggingFace:
    """transformers.Trainer with a custom loss."""

    name = "HF Trainer"
    package: str | None = "transformers"
    configuration = (
        "compute_loss overridden, loss_is_scaled_for_ga, num_items_in_batch for weights, logging_nan_inf_filter=False, "
        "a GradScaler for the CPU, where it trains fp16 as fp32"
    )
    documentation = "https://huggingface.co/docs/transformers/main_classes/trainer"

    trainer: Any = _Trainer
    bounded = False

    def scale(self, accelerator: Any, task: Task) -> None:
        """Give it a scaler in fp16."""
        if task.mode == "fp16":
            accelerator.scaler = task.scaler()

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        task.require(self.name, max_scale=self.bounded, several=False, ema=False, sharded=False)
        net = task.net()
        (optimizer,) = task.optimizers(net)
        schedule: Any = task.schedule(optimizer) if task.schedule else LambdaLR(optimizer, lambda _: 1.0)
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder,
                use_cpu=True,
                bf16=task.mode != "fp32",
                num_train_epochs=len(task.epochs),
                gradient_accumulation_steps=task.accumulation,
                max_grad_norm=task.clip or 0.0,
                logging_nan_inf_filter=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
                label_names=["labels"],
                seed=torch.initial_seed() % 2**32,
                ddp_backend="gloo" if task.ranks > 1 else None,
            )
            nothing: Any = [0]
            trainer: Any = self.trainer(
                net,
                arguments,
                train_dataset=nothing,
                data_collator=lambda rows: rows[0],
                optimizers=(optimizer, schedule),
            )
            trainer.task = task
            trainer.model_accepts_loss_kwargs = task.weighted
            trainer.loss_is_scaled_for_ga = task.weighted
            if task.mode == "fp16":
                trainer.accelerator.state._mixed_precision = "fp16"
            self.scale(trainer.accelerator, task)

            def evaluate(inputs: Tensor) -> Tensor:
                trainer.model.eval()
                batch = {"x": inputs, "labels": torch.zeros(len(inputs))}
                _, output, _ = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
                trainer.model.train()
                return output

            def save(target: Path) -> None:
                trainer.args.output_dir = str(target)
                trainer._save_checkpoint(trainer.model, trial=None)

            def end() -> None:
                scaler = trainer.accelerator.scaler
                scale = scaler.get_scale() if task.mode == "fp16" else None
                after(View(plain(trainer.model), [optimizer], scale, None, evaluate, save))

            trainer.add_callback(_Callback(task, end))
            trainer.train(resume_from_checkpoint=get_last_checkpoint(str(task.load)) if task.load else None)
