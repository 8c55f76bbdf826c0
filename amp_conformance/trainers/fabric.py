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

from amp_conformance.task import Task, View, evaluator

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


class Fabric:
    """Fabric in a loop of one's own."""

    name = "Fabric"
    package: str | None = "lightning"
    configuration = (
        "the loss divided by the number of micro-batches that a window really has, no_backward_sync, clip_gradients "
        "with error_if_nonfinite=False, MixedPrecision with a GradScaler for the CPU, which is put into the saved state"
    )
    documentation = "https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html"

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        task.require(self.name, max_scale=False, schedule=False, ema=False)
        plugins, scaler = [], None
        if task.mode != "fp32":
            scaler = torch.amp.GradScaler("cpu", task.init_scale, growth_interval=task.growth_interval)  # type: ignore[attr-defined]
            names = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
            plugins.append(MixedPrecision(names[task.mode], "cpu", scaler if task.mode == "fp16" else None))  # type: ignore[arg-type]
        many = {"strategy": "ddp"} if task.ranks > 1 else {}
        fabric = Runner(accelerator="cpu", devices=task.ranks, plugins=plugins, **many)  # type: ignore[arg-type]
        fabric.launch()
        net = task.net()
        optimizers = task.optimizers(net)
        model, *wrapped = fabric.setup(net, *optimizers)
        state = {"model": model} | {f"optimizer{i}": each for i, each in enumerate(wrapped)}
        if task.mode == "fp16":
            state["scaler"] = scaler
        if task.load is not None:
            fabric.load(task.load, state, strict=False)

        def save(folder: Path) -> None:
            fabric.save(folder, state)

        for epoch in range(task.done, len(task.epochs)):
            for window in task.windows(epoch):
                counts = torch.tensor([float(len(x)) if task.weighted else 1.0 for x, _ in window])
                total: Any = counts.sum()
                if task.weighted:
                    total = fabric.all_reduce(total, reduce_op="mean")
                for i, batch in enumerate(window):
                    with fabric.no_backward_sync(model, enabled=i < len(window) - 1):
                        fabric.backward(task.loss(model, batch) * (counts[i] / total))
                for each in wrapped:
                    if task.clip is not None:
                        params = {"max_norm": task.clip, "error_if_nonfinite": False}
                        fabric.clip_gradients(model, each, **params)  # type: ignore[arg-type]
                    each.step()
                for each in wrapped:
                    each.zero_grad()
            scale = scaler.get_scale() if task.mode == "fp16" and scaler is not None else None
            after(View(net, optimizers, scale, None, evaluator(model), save))
