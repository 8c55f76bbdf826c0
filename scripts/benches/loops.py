"""The contestants: one optimizer step of each, on the same network, with the same clipping and the same AdamW.

Each is written as its own documentation advises, in the fastest form that it permits: AdamW fused, gradients set
to None, no logging, no progress bar. Only ours checks in fp32 and bf16, guards running statistics, and moves a
schedule; these are not switched off.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from amp_core import Amp, Clip, Schedule
from amp_core.vision import import_torchvision
from amp_core.window import Micro
from benches.work import MODES, Batch, loss_of

Step = Callable[[], None]
Make = Callable[[nn.Module, list[Batch], str, str], Step]
"""(network on its device, micro-batches of a step, mode, device) -> a step."""


def _adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)


def by_hand(net: nn.Module, batches: list[Batch], mode: str, device: str) -> Step:
    """The loop of the tutorials, in its fused form."""
    optimizer = _adamw(net)
    scaler = torch.amp.GradScaler(device, enabled=mode == "fp16")  # type: ignore[attr-defined]
    dtype = MODES[mode]

    def step() -> None:
        for inputs, targets in batches:
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                loss = loss_of(net(inputs), targets) / len(batches)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(net: nn.Module, batches: list[Batch], mode: str, device: str) -> Step:
    """The step of recipes/classification.py, its window as the loop of a run makes it."""
    amp = Amp.named(mode, device=device)
    amp.guard(net)
    optimizer = _adamw(net)
    schedule = Schedule(optimizer, lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n), 100_000)
    clip, share = Clip.norm(1.0), 1 / len(batches)

    def step() -> None:
        window = [Micro(batch, share, is_last=i == len(batches)) for i, batch in enumerate(batches, 1)]
        with amp.share_casts(net) if len(batches) > 1 else contextlib.nullcontext():
            for micro in window:
                inputs, targets = micro.batch
                with amp.autocast():
                    loss = loss_of(net(inputs), targets)
                amp.backward(loss, micro.weight)
        report = amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)

    return step


def accelerate(net: nn.Module, batches: list[Batch], mode: str, device: str) -> Step:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]
    from accelerate.state import AcceleratorState  # pyright: ignore[reportMissingImports]

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(
        mixed_precision={"fp32": "no"}.get(mode, mode),
        cpu=device == "cpu",
        gradient_accumulation_steps=len(batches),
    )
    model, optimizer = accelerator.prepare(net, _adamw(net))

    def step() -> None:
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return step


PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def fabric(net: nn.Module, batches: list[Batch], mode: str, device: str) -> Step:
    """Lightning Fabric."""
    import_torchvision()  # torchmetrics would import it in a way that fails beside a CPU-only torch
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]

    runner = Fabric(accelerator=device, devices=1, precision=PRECISIONS[mode])  # type: ignore[arg-type]
    model, optimizer = runner.setup(net, _adamw(net))

    def step() -> None:
        for i, (inputs, targets) in enumerate(batches, 1):
            with runner.no_backward_sync(model, enabled=i < len(batches)):
                loss = loss_of(model(inputs), targets) / len(batches)
                runner.backward(loss)
        runner.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Timed:
    """A number of steps, timed by the clock around them."""

    def __init__(self, step: Step, device: str) -> None:
        self.step, self.device = step, device

    def __call__(self, num_steps: int) -> float:
        """Seconds per step."""
        began = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / num_steps


class _Feed:
    """The batches of a step, again and again: lists mean several loaders to the Trainer."""

    def __init__(self, batches: list[Batch], repeats: int) -> None:
        self.batches, self.repeats = batches, repeats

    def __iter__(self) -> Iterator[Batch]:
        return itertools.chain.from_iterable(itertools.repeat(self.batches, self.repeats))

    def __len__(self) -> int:
        return len(self.batches) * self.repeats


class TimedTrainer:
    """Lightning's Trainer, which cannot be stepped from outside: its own steps, after the first few of a fit."""

    SETTLE = 3

    def __init__(self, net: nn.Module, batches: list[Batch], mode: str, device: str) -> None:
        import_torchvision()
        import lightning as L  # pyright: ignore[reportMissingImports]

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        outer = self

        class Module(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def training_step(self, batch: Batch, index: int) -> Any:
                if index == outer.SETTLE * len(batches):
                    if device == "cuda":
                        torch.cuda.synchronize()
                    outer.began = time.perf_counter()
                inputs, targets = batch
                return loss_of(self.net(inputs), targets)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                # It refuses to clip by norm with a fused optimizer in 16 bits.
                return torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=mode == "fp32")

        self.module, self.batches, self.mode, self.device, self.lightning = Module(), batches, mode, device, L
        self.began = 0.0

    def __call__(self, num_steps: int) -> float:
        """Seconds per step."""
        data = _Feed(self.batches, num_steps + self.SETTLE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = self.lightning.Trainer(
                accelerator=self.device,
                devices=1,
                precision=PRECISIONS[self.mode],
                max_epochs=1,
                accumulate_grad_batches=len(self.batches),
                gradient_clip_val=1.0,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                barebones=False,
            )
            trainer.fit(self.module, data)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - self.began) / num_steps


STEPS: dict[str, Make] = {"by hand": by_hand, "ours": ours, "accelerate": accelerate, "fabric": fabric}
