"""timm's train.py."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from timm.models import load_checkpoint, resume_checkpoint
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler, dispatch_clip_grad
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_conformance.task import Task, View, evaluator, over_ranks


class Timm:
    """The body of `train_one_epoch` in timm's train.py, and what it saves."""

    name = "timm"
    package: str | None = "timm"
    configuration = (
        "NativeScaler, dispatch_clip_grad, ModelEmaV3, CheckpointSaver, the windows and updates of train_one_epoch"
    )
    documentation = "https://github.com/huggingface/pytorch-image-models/blob/main/train.py"

    bounded = False

    def scaler(self, task: Task) -> Any:
        """The scaler of a task; None: without one."""
        if task.mode != "fp16":
            return None
        scaler = NativeScaler(device="cpu")
        scaler._scaler = task.scaler()
        return scaler

    def attach(self, scaler: Any, net: nn.Module, *parts: object) -> None:
        """What else is told of steps: nothing."""

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        task.require(self.name, max_scale=self.bounded, several=False, weighted=False, penalty=False, every=False)
        net = task.net()
        model = over_ranks(task, net)
        (optimizer,) = task.optimizers(net)
        schedule = task.schedule(optimizer) if task.schedule else None
        ema = None if task.ema is None else ModelEmaV3(net, decay=task.ema)
        scaler = self.scaler(task)
        self.attach(scaler, net, *(each for each in (schedule, ema) if each is not None))
        saver = CheckpointSaver(net, optimizer, model_ema=ema, amp_scaler=scaler)
        if task.load is not None:
            files = [task.load / "last.pth.tar", *sorted(task.load.glob("checkpoint-*"), reverse=True)]
            found = str(next(file for file in files if file.exists()))
            resume_checkpoint(net, found, optimizer, scaler)
            if ema is not None:
                load_checkpoint(ema.module, found, use_ema=True)
            if schedule is not None:  # as train.py: by the number of updates that were made
                schedule.step(sum(len(task.windows(i)) for i in range(task.done)))

        def save(folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            saver.checkpoint_dir = str(folder)
            saver.save_checkpoint(epoch)

        for epoch in range(task.done, len(task.epochs)):
            batches = task.epochs[epoch]
            last = len(batches) - len(batches) % task.accumulation
            for i, batch in enumerate(batches):
                steps = len(batches) - last if i >= last else task.accumulation
                need_update = i == len(batches) - 1 or (i + 1) % task.accumulation == 0
                if isinstance(model, DistributedDataParallel):
                    model.require_backward_grad_sync = need_update
                with task.autocast():
                    loss = task.loss(model, batch)
                    if task.accumulation > 1:
                        loss = loss / steps
                if scaler is not None:
                    scaler(
                        loss, optimizer, clip_grad=task.clip, parameters=list(net.parameters()), need_update=need_update
                    )
                else:
                    loss.backward()
                    if need_update:
                        if task.clip is not None:
                            dispatch_clip_grad(net.parameters(), value=task.clip, mode="norm")
                        optimizer.step()
                if not need_update:
                    continue
                optimizer.zero_grad()
                if ema is not None:
                    ema.update(net)
                if schedule is not None:
                    schedule.step()
            scale = scaler._scaler.get_scale() if scaler is not None and task.mode == "fp16" else None
            after(
                View(net, [optimizer], scale, None if ema is None else ema.module, evaluator(net, task.autocast), save)
            )
