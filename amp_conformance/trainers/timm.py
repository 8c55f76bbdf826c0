"""timm's train.py."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from timm.utils import ModelEmaV3, NativeScaler, dispatch_clip_grad
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_conformance.task import Task, View, evaluator


class Timm:
    """The body of `train_one_epoch` in timm's train.py, and what it saves."""

    name = "timm"
    package: str | None = "timm"
    configuration = "NativeScaler, dispatch_clip_grad, ModelEmaV3, the windows and updates of train_one_epoch"
    documentation = "https://github.com/huggingface/pytorch-image-models/blob/main/train.py"

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        task.require(self.name, max_scale=False, several=False, weighted=False)
        if task.ranks > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        net = task.net()
        (optimizer,) = task.optimizers(net)
        schedule = task.schedule(optimizer) if task.schedule else None
        ema = None if task.ema is None else ModelEmaV3(net, decay=task.ema)
        model: nn.Module = DistributedDataParallel(net) if task.ranks > 1 else net
        scaler = NativeScaler(device="cpu") if task.mode == "fp16" else None
        if scaler is not None:
            scaler._scaler = torch.amp.GradScaler(  # type: ignore[attr-defined]
                "cpu", task.init_scale, growth_interval=task.growth_interval
            )
        parts = {"state_dict": net, "optimizer": optimizer, "amp_scaler": scaler, "state_dict_ema": ema and ema.module}
        parts = {name: part for name, part in (parts | {"schedule": schedule}).items() if part is not None}
        if task.load is not None:
            state = torch.load(task.load, weights_only=True)
            for name, part in parts.items():
                if name in state:  # as its resume_checkpoint
                    part.load_state_dict(state[name])  # type: ignore[attr-defined]

        def save(folder: Path) -> None:
            torch.save({name: part.state_dict() for name, part in parts.items()}, folder)  # type: ignore[attr-defined]

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
            scale = None if scaler is None else scaler._scaler.get_scale()
            after(
                View(net, [optimizer], scale, None if ema is None else ema.module, evaluator(net, task.autocast), save)
            )
