"""The contestants: one optimizer step of each, on the same network, with the same clipping and the same AdamW.

Each is written as its own documentation advises, in the fastest form that it permits: AdamW fused, gradients set
to None, no logging, no progress bar, no check that reads back. Where one refuses a fused optimizer it has torch's
default. Only ours checks in fp32 and bf16, guards running statistics, and moves a schedule (here a constant one, so
that all compute the same); these are not switched off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from amp_core import Amp, Clip, Schedule
from amp_core.step.window import MicroBatch
from amp_core.vision import import_torchvision
from benches.work import MODES, Batch, loss_of

Step = Callable[[], None]
Optimize = Callable[[nn.Module, bool], torch.optim.Optimizer]
"""(network, whether fused) -> an optimizer."""
Make = Callable[[nn.Module, list[Batch], str, str, Optimize], Step]
"""(network on its device, micro-batches of a step, mode, device, optimizer) -> a step."""
MAX_NORM = 0.1
"""Small enough that every step is clipped."""


def adamw(net: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """What is timed."""
    return torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused or None)


def sgd(net: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """AdamW does not see the scale of gradients: an error in it shows with SGD alone."""
    return torch.optim.SGD(net.parameters(), lr=0.5, fused=fused or None)


def by_hand(net: nn.Module, batches: list[Batch], mode: str, device: str, optimize: Optimize) -> Step:
    """The loop of the tutorials, in its fused form."""
    optimizer = optimize(net, True)
    scaler = torch.amp.GradScaler(device, enabled=mode == "fp16")  # type: ignore[attr-defined]
    dtype = MODES[mode]

    def step() -> None:
        for inputs, targets in batches:
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                loss = loss_of(net(inputs), targets) / len(batches)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def best(net: nn.Module, batches: list[Batch], mode: str, device: str, optimize: Optimize) -> Step:
    """The least that a correct step has to do, for this network and one of two optimizers.

    Lists are made once, private kernels of torch are called directly, and nothing is counted, checked, scheduled or
    reported but what the update needs: clipping by the global norm of the unscaled gradients, and in fp16 a loss scale
    whose steps are skipped on the device. Unlike ours, a NaN in fp32 or bf16 reaches the weights.
    """
    optimizer, dtype, is_scaled = optimize(net, True), MODES[mode], mode == "fp16"
    (group,) = optimizer.param_groups
    kernel: Any = torch._fused_sgd_
    lists: tuple[Any, ...] = ([],)
    params = list(net.parameters())
    weights = [param.detach() for param in params]  # the same memory; needs no region without gradients
    settings = {key: group[key] for key in ("lr", "weight_decay", "maximize")}
    counts = torch.zeros(len(params), device=device)
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    if isinstance(optimizer, torch.optim.AdamW):
        kernel, lists = torch._fused_adamw_, (first, second, [], list(counts.unbind()))
        settings |= dict(zip(("beta1", "beta2"), group["betas"], strict=True)) | {"eps": group["eps"], "amsgrad": False}
    else:
        settings |= {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
    scale = torch.full((), 2.0**16, device=device)
    tracker = torch.zeros((), dtype=torch.int32, device=device)
    seed, share = torch.full((), 1 / len(batches), device=device), 1 / len(batches)
    autocast = torch.autocast(device, dtype=dtype) if dtype is not None else contextlib.nullcontext()
    shares_casts = dtype is not None and len(batches) > 1
    run_backward = torch.autograd.graph._engine_run_backward

    def step() -> None:
        found_inf = None
        seeds = (scale * share,) if is_scaled else (seed,)
        if shares_casts:
            torch.autocast_increment_nesting()
        for inputs, targets in batches:
            with autocast:
                loss = loss_of(net(inputs), targets)
            run_backward((loss,), seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)
        if shares_casts:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
        grads: Any = [param.grad for param in params]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        divisor = norm / MAX_NORM
        if is_scaled:
            divisor = torch.maximum(divisor, scale)
            found_inf = (norm - norm).ne_(0)
            counts.sub_(found_inf)
            torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2000)
        else:
            divisor.clamp_(min=1.0)
        counts.add_(1)
        kernel(weights, grads, *lists, **settings, grad_scale=divisor, found_inf=found_inf)
        for param in params:
            param.grad = None

    return step


def textbook(net: nn.Module, batches: list[Batch], mode: str, device: str, optimize: Optimize) -> Step:
    """The same as it is usually written: an optimizer without options."""
    return by_hand(net, batches, mode, device, lambda net, fused: optimize(net, False))


def ours(net: nn.Module, batches: list[Batch], mode: str, device: str, optimize: Optimize) -> Step:
    """The step of recipes/classification.py, its window as the loop of a run makes it."""
    amp = Amp.named(mode, device=device)
    amp.guard(net)
    optimizer = optimize(net, True)
    schedule = Schedule(optimizer, lambda o, n: LambdaLR(o, lambda _: 1.0), 100_000)
    clip, share = Clip.norm(MAX_NORM), 1 / len(batches)

    def step() -> None:
        window = [MicroBatch(batch, share, is_last=i == len(batches)) for i, batch in enumerate(batches, 1)]
        with amp.cache_weight_casts(net) if len(batches) > 1 else contextlib.nullcontext():
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


def accelerate(net: nn.Module, batches: list[Batch], mode: str, device: str, optimize: Optimize) -> Step:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]
    from accelerate.state import AcceleratorState  # pyright: ignore[reportMissingImports]

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(
        mixed_precision={"fp32": "no"}.get(mode, mode),
        cpu=device == "cpu",
        gradient_accumulation_steps=len(batches),
    )
    model, optimizer = accelerator.prepare(net, optimize(net, True))

    def step() -> None:
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()

    return step


PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def fabric(net: nn.Module, batches: list[Batch], mode: str, device: str, optimize: Optimize) -> Step:
    """Lightning Fabric. In fp16 it refuses to clip by norm with a fused optimizer."""
    import_torchvision()  # torchmetrics would import it in a way that fails beside a CPU-only torch
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]

    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    runner = Fabric(accelerator=device, devices=1, precision=PRECISIONS[mode])  # type: ignore[arg-type]
    model, optimizer = runner.setup(net, optimize(net, mode != "fp16"))

    def step() -> None:
        for i, (inputs, targets) in enumerate(batches, 1):
            with runner.no_backward_sync(model, enabled=i < len(batches)):
                loss = loss_of(model(inputs), targets) / len(batches)
                runner.backward(loss)
        # By default it reads the norm back, to raise an error: that would be a wait.
        runner.clip_gradients(model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


def timm(net: nn.Module, batches: list[Batch], mode: str, device: str, optimize: Optimize) -> Step:
    """The body of `train_one_epoch` in timm's train.py."""
    import_torchvision()
    from timm.utils import NativeScaler, dispatch_clip_grad  # pyright: ignore[reportMissingImports]

    optimizer = optimize(net, True)
    scaler = NativeScaler(device=device) if mode == "fp16" else None
    dtype = MODES[mode]

    def step() -> None:
        for i, (inputs, targets) in enumerate(batches, 1):
            need_update = i == len(batches)
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                loss = loss_of(net(inputs), targets)
            if len(batches) > 1:
                loss /= len(batches)
            if scaler is not None:
                scaler(loss, optimizer, clip_grad=MAX_NORM, parameters=net.parameters(), need_update=need_update)
            else:
                loss.backward()
                if need_update:
                    dispatch_clip_grad(net.parameters(), value=MAX_NORM, mode="norm")
                    optimizer.step()
        optimizer.zero_grad()

    return step


Turn = tuple[float, float]
"""Seconds of a step by the clock, and of CPU time of this process."""


class Timed:
    """A number of steps, timed by the clocks around them."""

    def __init__(self, step: Step, device: str) -> None:
        self.step, self.device = step, device

    def __call__(self, num_steps: int) -> Turn:
        began = now()
        for _ in range(num_steps):
            self.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return per_step(began, now(), num_steps)


def now() -> Turn:
    return time.perf_counter(), time.process_time()


def per_step(began: Turn, ended: Turn, num_steps: int) -> Turn:
    return (ended[0] - began[0]) / num_steps, (ended[1] - began[1]) / num_steps


class _Feed:
    """The batches of a step, again and again: lists mean several loaders to the Trainer."""

    def __init__(self, batches: list[Batch], repeats: int) -> None:
        self.batches, self.repeats = batches, repeats

    def __iter__(self) -> Iterator[Batch]:
        return itertools.chain.from_iterable(itertools.repeat(self.batches, self.repeats))

    def __len__(self) -> int:
        return len(self.batches) * self.repeats


class TimedTrainer:
    """Lightning's Trainer, which cannot be stepped from outside: steps in the middle of a fit.

    From the beginning of a step to the beginning of a later one, so that neither the start nor the end of a fit counts.
    """

    SETTLE = 3

    def __init__(self, net: nn.Module, batches: list[Batch], mode: str, device: str, optimize: Optimize) -> None:
        import_torchvision()
        import lightning as L  # pyright: ignore[reportMissingImports]

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        outer = self

        class Module(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def training_step(self, batch: Batch, index: int) -> Any:
                if index in outer.times:
                    if device == "cuda":
                        torch.cuda.synchronize()
                    outer.times[index] = now()
                inputs, targets = batch
                return loss_of(self.net(inputs), targets)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                # It refuses to clip by norm with a fused optimizer in 16 bits. In bf16, where nothing is unscaled,
                # its hook for clipping permits it all the same.
                return optimize(self.net, mode != "fp16")

            def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
                if mode == "bf16":
                    torch.nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
                else:
                    super().configure_gradient_clipping(optimizer, *args, **kwargs)

        self.module, self.batches, self.mode, self.device, self.lightning = Module(), batches, mode, device, L
        self.times: dict[int, Turn] = {}

    def fit(self, num_steps: int) -> None:
        """From the present weights, with a new optimizer."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = self.lightning.Trainer(
                accelerator=self.device,
                devices=1,
                precision=PRECISIONS[self.mode],
                max_epochs=1,
                accumulate_grad_batches=len(self.batches),
                gradient_clip_val=MAX_NORM,
                use_distributed_sampler=False,
                # No logger, no checkpoints, no progress bar, no summary, no detection of anomalies.
                barebones=True,
            )
            trainer.fit(self.module, _Feed(self.batches, num_steps))

    def __call__(self, num_steps: int) -> Turn:
        first, last = (steps * len(self.batches) for steps in (self.SETTLE, self.SETTLE + num_steps))
        self.times = {first: now(), last: now()}
        self.fit(self.SETTLE + num_steps + 1)
        return per_step(self.times[first], self.times[last], num_steps)


STEPS: dict[str, Make] = {
    "by hand": by_hand,
    "best": best,
    "textbook": textbook,
    "ours": ours,
    "accelerate": accelerate,
    "fabric": fabric,
    "timm": timm,
}
LOOPS = [*STEPS, "trainer"]
"""Whatever can be compared; the Trainer is no step."""
NEEDS = {"accelerate": "accelerate", "fabric": "lightning", "trainer": "lightning", "timm": "timm"}
ONLY_ON_GPUS = {("accelerate", "fp16"), ("fabric", "fp16"), ("trainer", "fp16")}
"""These refuse fp16 on a CPU."""


def takes_part(who: str, mode: str, device: str) -> bool:
    """Whether it is installed, and permits this."""
    if who in NEEDS and importlib.util.find_spec(NEEDS[who]) is None:
        return False
    return device != "cpu" or (who, mode) not in ONLY_ON_GPUS


def final(
    who: str, net: nn.Module, batches: list[Batch], mode: str, device: str, optimize: Optimize, num_steps: int
) -> torch.Tensor:
    """The weights after `num_steps` steps, as one tensor on the CPU."""
    if who == "trainer":
        TimedTrainer(net, batches, mode, device, optimize).fit(num_steps)
    else:
        step = STEPS[who](net, batches, mode, device, optimize)
        for _ in range(num_steps):
            step()
    return torch.cat([p.detach().double().flatten().cpu() for p in net.parameters()])
