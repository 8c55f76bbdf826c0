"""A loop written out, with everything right: the reference that every check is held against.

It is slow on purpose: it reads the norm of each window back, and holds no private part of torch. Each step of it is a
method, so that a wrong loop can be made by replacing one.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from amp_conformance.task import Batch, Task, View, Window, evaluator, over_ranks, whole


class ByHand:
    """The right loop."""

    name = "by hand"
    package: str | None = None
    configuration = "a loop of 130 lines, every order written out, the loss scale a Python number"
    documentation = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"

    def run(self, task: Task, after: Callable[[View], None]) -> None:
        """See `task.Trainer`."""
        self.task = task
        self.net = task.net()
        self.model = over_ranks(task, self.net)
        self.optimizers = task.optimizers(self.net)
        self.schedules = [task.schedule(each) for each in self.optimizers] if task.schedule else []
        self.ema = copy.deepcopy(self.net) if task.ema is not None else None
        self.scale, self.clean = (task.init_scale if task.mode == "fp16" else 1.0), 0
        self.made = 0  # windows of this epoch
        if task.load is not None:
            self.load(torch.load(task.load / "state.pt", weights_only=True))
        for epoch in range(task.done, len(task.epochs)):
            windows = task.windows(epoch)
            for window in windows[self.made :]:
                self.window(window)
                self.made += 1
                if task.is_due(epoch, self.made):
                    scale = self.scale if task.mode == "fp16" else None
                    after(View(self.net, self.optimizers, scale, self.ema, self.evaluate, self.save))
            self.made = 0

    # --- a window ---------------------------------------------------------------------------------------------------

    def window(self, window: Window) -> None:
        """One optimizer step."""
        buffers = self.snapshot()
        self.losses = torch.zeros(())
        for batch, weight in zip(window, self.weights(window), strict=True):
            self.backward(batch, weight, is_last=batch is window[-1])
        taken = [self.finish(optimizer) for optimizer in self.optimizers]
        self.update(all(taken))
        self.after_step(taken)
        if not all(taken):
            self.restore(buffers)
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def weights(self, window: Window) -> list[float]:
        """The weight of each micro-batch's mean in the window's gradient."""
        counts = [len(batch[0]) if self.task.weighted else 1 for batch in window]
        total = float(sum(counts))
        if self.task.ranks > 1:
            everywhere = torch.tensor(total)
            dist.all_reduce(everywhere)
            total = float(everywhere) / self.task.ranks  # the gradients are averaged over ranks
        return [count / total for count in counts]

    def backward(self, batch: Batch, weight: float, *, is_last: bool) -> None:
        """Add a micro-batch's gradients, times the loss scale."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = is_last
        with self.autocast():
            loss = self.task.loss(self.model, batch, self.grad)
        self.losses = self.losses + loss.detach().float()
        (loss.float() * weight * self.scale).backward()

    def grad(self, output: Tensor, inputs: Tensor) -> Tensor:
        """A gradient within the loss: scaled, so that fp16 can hold it, and unscaled."""
        with torch.autocast("cpu", enabled=False):
            (scaled,) = torch.autograd.grad(output.float().sum() * self.scale, inputs, create_graph=True)
        return scaled.float() / self.scale

    def autocast(self) -> torch.autocast:
        """The context of a forward pass."""
        return self.task.autocast()

    def finish(self, optimizer: Optimizer) -> bool:
        """Unscale, check, clip and step; whether the step was taken."""
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.unscale(params)
        norm = self.norm(params)
        if not self.agree(math.isfinite(norm)):
            return False
        if self.task.clip is not None:
            self.clip(params, norm, self.task.clip)
        optimizer.step()
        return True

    def unscale(self, params: Sequence[Tensor]) -> None:
        """Divide the gradients by the loss scale."""
        for param in params:
            if param.grad is not None:
                param.grad = param.grad / self.scale

    def norm(self, params: Sequence[Tensor]) -> float:
        """The global L2 norm of the gradients; not finite if one of them is not, or a loss of the window."""
        grads = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in params if p.grad is not None]
        norms = [torch.linalg.vector_norm(whole(grad), dtype=torch.float64) for grad in grads]
        return float(torch.linalg.vector_norm(torch.stack(norms)) + 0 * self.losses)  # 0 times inf is NaN

    def agree(self, is_finite: bool) -> bool:
        """Whether the gradients are finite on every rank."""
        if self.task.ranks == 1:
            return is_finite
        verdict = torch.tensor(float(is_finite))
        dist.all_reduce(verdict, dist.ReduceOp.MIN)
        return bool(verdict)

    def clip(self, params: Sequence[Tensor], norm: float, largest: float) -> None:
        """Shorten the gradients to the largest norm."""
        if norm > largest:
            for param in params:
                if param.grad is not None:
                    param.grad = param.grad * (largest / norm)

    def update(self, is_clean: bool) -> None:
        """Move the loss scale, once per window."""
        if self.task.mode != "fp16":
            return
        self.clean = self.clean + 1 if is_clean else 0
        if not is_clean:
            if self.scale <= 1.0:
                raise RuntimeError("gradients are not finite at a loss scale of 1")
            self.scale = max(1.0, self.scale / 2)
        elif self.clean == self.task.growth_interval:
            self.scale, self.clean = min(2 * self.scale, self.task.max_scale or 2.0**24), 0

    def after_step(self, taken: Sequence[bool]) -> None:
        """What follows the steps of the optimizers, of which these were taken."""
        for schedule, is_taken in zip(self.schedules, taken, strict=False):
            if is_taken:
                schedule.step()
        if self.ema is not None and self.task.ema is not None and all(taken):
            self.average(self.ema, self.task.ema)

    def snapshot(self) -> list[Tensor]:
        """Running statistics before a window."""
        return [buffer.clone() for buffer in self.net.buffers()]

    def restore(self, buffers: Sequence[Tensor]) -> None:
        """Take back what the forward passes of a skipped window did to running statistics."""
        with torch.no_grad():
            for buffer, before in zip(self.net.buffers(), buffers, strict=True):
                buffer.copy_(before)

    def average(self, ema: nn.Module, decay: float) -> None:
        """Move the average towards the weights; copy the buffers."""
        with torch.no_grad():
            for mean, param in zip(ema.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(param, 1 - decay)
            for mean, buffer in zip(ema.buffers(), self.net.buffers(), strict=True):
                mean.copy_(buffer)

    # --- between windows --------------------------------------------------------------------------------------------

    def evaluate(self, inputs: Tensor) -> Tensor:
        """The output in evaluation."""
        return evaluator(self.net, self.autocast)(inputs)

    def save(self, folder: Path) -> None:
        """Write everything that the next window depends on."""
        state: dict[str, Any] = {"net": self.net.state_dict(), "mode": self.task.mode}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        state["schedules"] = [schedule.state_dict() for schedule in self.schedules]
        state["ema"] = None if self.ema is None else self.ema.state_dict()
        state["scaler"] = {"scale": self.scale, "clean": self.clean}
        state["made"] = self.made if self.task.every else 0
        self.write(state, folder)

    def write(self, state: dict[str, Any], folder: Path) -> None:
        """Write to another file first: a name never stands for half a state."""
        folder.mkdir(exist_ok=True)
        torch.save(state, folder / "new.pt")
        os.replace(folder / "new.pt", folder / "state.pt")

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `save` wrote. A loss scale is kept only from fp16 to fp16."""
        self.net.load_state_dict(state["net"])
        self.made = state["made"]
        for part, saved in zip(
            [*self.optimizers, *self.schedules], [*state["optimizers"], *state["schedules"]], strict=True
        ):
            part.load_state_dict(saved)
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        if state["mode"] == self.task.mode == "fp16":
            self.scale, self.clean = state["scaler"]["scale"], state["scaler"]["clean"]
