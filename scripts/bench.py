"""How much a step costs: this project's against the textbook's, side by side in one run.

    python scripts/bench.py                        # cpu or cuda, whichever is there
    python scripts/bench.py --model mlp --modes fp16 --rounds 20 --json result.json

The textbook's loop is autocast, GradScaler, clip_grad_norm_, a fused AdamW, written by hand and without any of the
guarantees. Ours adds the check in every mode, the guard of the statistics, the schedule and the record of the metrics.
Both take turns in one process; a third that is the textbook's again shows what differences mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import Amp, Clip, Schedule, windows
from amp_core.models import CLASSIFIERS, build_model

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Step = Callable[[], None]


class CountWaits(TorchDispatchMode):
    """Counts `aten::_local_scalar_dense`: each is one wait for the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def textbook(net: nn.Module, batches: list[tuple[Tensor, Tensor]], mode: str, device: str) -> Step:
    """The loop of the tutorials, in its fused form."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=mode == "fp16")  # type: ignore[attr-defined]
    dtype = DTYPES[mode]

    def step() -> None:
        for images, labels in batches:
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(net(images), labels) / len(batches)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(net: nn.Module, batches: list[tuple[Tensor, Tensor]], mode: str, device: str) -> Step:
    """The step of recipes/classification.py."""
    amp = Amp.named(mode, device=device)
    amp.guard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    schedule = Schedule(optimizer, lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n), 1000)
    clip = Clip.norm(1.0)

    def step() -> None:
        for window in windows(batches, len(batches)):
            for micro in window:
                images, labels = micro.batch
                with amp.autocast():
                    loss = F.cross_entropy(net(images), labels)
                amp.backward(loss * micro.weight)
        report = amp.step(optimizer, clip)
        amp.update()
        optimizer.zero_grad(set_to_none=True)
        schedule.advance(report)

    return step


def seconds(step: Step, num_steps: int, device: str) -> float:
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / num_steps


def measure(model: str, mode: str, accumulation: int, device: str, rounds: int, batch_size: int) -> dict[str, object]:
    """Medians of `rounds` turns, as ratios to the textbook's."""
    shape = (1, 28, 28) if model in ("cnn", "mlp") else (3, 32, 32)
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(batch_size, *shape, generator=generator).to(device),
            torch.randint(10, (batch_size,), generator=generator).to(device),
        )
        for _ in range(accumulation)
    ]
    steps: dict[str, Step] = {}
    for name, make in (("textbook", textbook), ("again", textbook), ("ours", ours)):
        torch.manual_seed(0)
        net = build_model(model, CLASSIFIERS, num_classes=10, image_shape=shape, options={}).to(device)
        steps[name] = make(net, batches, mode, device)
        steps[name]()
    waits = {}
    for name in ("textbook", "ours"):
        with CountWaits() as counter:
            steps[name]()
        waits[name] = counter.count
    num_steps = max(1, round(0.05 / max(seconds(steps["textbook"], 3, device), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in sorted(steps, reverse=bool(turn % 2)):
            times[name].append(seconds(steps[name], num_steps, device))
    ratios = {name: [a / b for a, b in zip(times[name], times["textbook"], strict=True)] for name in ("again", "ours")}
    return {
        "model": model,
        "mode": mode,
        "accumulation": accumulation,
        "textbook_ms": 1e3 * statistics.median(times["textbook"]),
        "ours_ms": 1e3 * statistics.median(times["ours"]),
        "ratio": statistics.median(ratios["ours"]),
        "same_again": statistics.median(ratios["again"]),
        "spread": statistics.quantiles(ratios["again"], n=10)[-1] - statistics.quantiles(ratios["again"], n=10)[0],
        "waits_textbook": waits["textbook"],
        "waits_ours": waits["ours"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mlp,cnn")
    parser.add_argument("--modes", default="fp32,bf16,fp16")
    parser.add_argument("--accumulation", default="1,4")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    name = torch.cuda.get_device_name() if flags.device == "cuda" else f"{platform.machine()} cpu"
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, batch {flags.batch_size}")
    print(
        f"{'model':8} {'mode':5} {'acc':>3} {'textbook':>10} {'ours':>10} {'ratio':>6} {'A/A':>6} {'spread':>7}  waits"
    )
    rows = []
    for model in flags.model.split(","):
        for mode in flags.modes.split(","):
            for accumulation in map(int, flags.accumulation.split(",")):
                row = measure(model, mode, accumulation, flags.device, flags.rounds, flags.batch_size)
                rows.append(row)
                print(
                    f"{model:8} {mode:5} {accumulation:3} {row['textbook_ms']:8.2f}ms {row['ours_ms']:8.2f}ms "
                    f"{row['ratio']:6.2f} {row['same_again']:6.2f} {row['spread']:7.2f}  "
                    f"{row['waits_ours']} (textbook {row['waits_textbook']})"
                )
    if flags.json:
        flags.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
