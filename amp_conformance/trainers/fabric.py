"""Lightning Fabric."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric as Runner
from lightning.fabric.plugins import MixedPrecision

from amp_conformance.task import Task, View, evaluator, inner_gradient

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


NAMES = {"fp32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}


def precision_of(task: Task, kind: Any) -> Any:
    """The precision of a task, from Fabric's class or Lightning's; None: fp32."""
    scaler = task.scaler() if task.mode == "fp16" else None
    return None if task.mode == "fp32" else kind(NAMES[task.mode], "cpu", scaler)


class Fabric:
    """Fabric in a custom loop."""

    name = "Fabric"
    package: str | None = "lightning"
    configuration = (
        "the loss divided by the micro-batches of the window, no_backward_sync, clip_gradients with "
        "error_if_nonfinite=False in fp16, MixedPrecision with a GradScaler for the CPU, fabric.autocast() around "
        "gradients within a loss"
    )
    documentation = "https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html"

    bounded = False

    def plugin(self, task: Task) -> Any:
        """The precision of a task; None: fp32."""
        return precision_of(task, MixedPrecision)

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        task.require(self.name, max_scale=self.bounded, schedule=False, ema=False, sharded=False)
        plugin = self.plugin(task)
        plugins, scaler = [] if plugin is None else [plugin], getattr(plugin, "scaler", None)
        many = {"strategy": "ddp"} if task.ranks > 1 else {}
        fabric = Runner(accelerator="cpu", devices=task.ranks, plugins=plugins, **many)  # type: ignore[arg-type]
        fabric.launch()
        net = task.net()
        optimizers = task.optimizers(net)
        model, *wrapped = fabric.setup(net, *optimizers)
        state: dict[str, Any] = {"model": model, "made": 0} | {f"optimizer{i}": each for i, each in enumerate(wrapped)}
        if scaler is not None:
            state["scaler"] = scaler
        if task.load is not None:
            fabric.load(task.load, state, strict=False)
        made = state["made"]  # windows of this epoch

        def save(folder: Path) -> None:
            fabric.save(folder, state | {"made": made % len(task.windows(epoch))})

        for epoch in range(task.done, len(task.epochs)):
            for window in task.windows(epoch)[made:]:
                counts = torch.tensor([float(len(x)) if task.weighted else 1.0 for x, _ in window])
                total: Any = counts.sum()
                if task.weighted:
                    total = fabric.all_reduce(total, reduce_op="mean")
                for i, batch in enumerate(window):
                    with fabric.no_backward_sync(model, enabled=i < len(window) - 1):
                        if task.penalty:  # the wrapped module forbids autograd.grad
                            with fabric.autocast():
                                loss = task.loss(net, batch, inner_gradient(scaler if task.mode == "fp16" else None))
                        else:
                            loss = task.loss(model, batch)
                        fabric.backward(loss * (counts[i] / total))
                for each in wrapped:
                    if task.clip is not None:
                        params = {"max_norm": task.clip, "error_if_nonfinite": scaler is None}
                        fabric.clip_gradients(model, each, **params)  # type: ignore[arg-type]
                    each.step()
                for each in wrapped:
                    each.zero_grad()
                made += 1
                if task.is_due(epoch, made):
                    scale = scaler.get_scale() if scaler is not None and task.mode == "fp16" else None
                    after(View(net, optimizers, scale, None, evaluator(model), save))
            made = 0
