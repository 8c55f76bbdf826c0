"""Time and memory of every mode and recipe, in whole runs of train.py; and its share of the device's matrix peak.

Each run is its own process, with logging, schedule and the doctor as by default, on data that is made up or ships
with a dependency. Samples per second are those of its metrics.jsonl, line by line, after the first few steps.
Memory is the allocator's peak on a GPU; on a CPU by how much the process grew at its peak. Floating-point operations
are counted, forward and backward, in another run of the same settings in fp32; the peak is that of square matrix
products, the best of several sizes, taken in this run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import io
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from amp_core.checkpoints.reading import read
from amp_core.config.rules import amp_config
from benches.result import Number, Picture, Result
from benches.values import count
from recipes import RECIPES

FULL: list[str] = []
SHORT = ["--recipes", "classification,gan", "--modes", "fp32,bf16", "--steps", "6"]

MODES = ("fp32", "tf32", "bf16", "fp16", "fp16_capped", "o0", "o1", "o2", "o3", "bf16_pure", "fp8")
IMAGES = ["data=synthetic", "data.num_samples=512", "data.image_size=16", "data.num_classes=10"]
SMALL = {
    "classification": [*IMAGES, "model.options.width=8"],
    "contrastive": [*IMAGES, "model.options.width=8", "accumulation=2"],
    "custom_function": [*IMAGES, "model.options.width=16"],
    "diffusion": [*IMAGES, "model.options.width=8"],
    "distillation": [*IMAGES, "recipe.teacher_options.width=8", "recipe.teacher_steps=1"],
    "experts": [*IMAGES, "model.options.width=16"],
    "face_recognition": [
        *("data=synthetic_identities", "data.num_classes=2000", "data.num_samples=512", "data.image_size=16"),
        "recipe.embedding=32",
    ],
    "finetuning": [
        *("data.num_samples=512", "data.length=64", "recipe.base_steps=1"),
        *("model.options.depth=2", "model.options.width=64", "model.options.heads=2"),
    ],
    "gan": [*IMAGES, "model.options.width=8"],
    "language_model": [
        *("data.num_samples=512", "data.length=64", "recipe.sample_tokens=4"),
        *("model.options.depth=2", "model.options.width=64", "model.options.heads=2"),
    ],
    "model_parallel": [*IMAGES, "model.options.width=8"],
    "policy_gradient": ["batch_size=8"],
    "segmentation": ["data.num_samples=96", "data.image_size=32", "model.options.width=8", "model.options.depth=2"],
    "speech": ["model.options.width=16"],
    "supervised": [],
}
"""A step takes a few hundredths of a second. With --size full recipes keep their own settings."""
QUIET = ["log.progress=false", "save_every=1000000", "eval_every=1000000", "recipe.length=1000 epochs"]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipes", default=",".join(sorted(RECIPES)), help="with commas")
    parser.add_argument("--modes", default=",".join(MODES), help="with commas; those a recipe refuses are left out")
    parser.add_argument("--size", default="small", choices=["small", "full"], help="of networks, data and batches")
    parser.add_argument("--batch-size", type=count, help="default: 16 when small, else the recipe's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every run; may be repeated")
    parser.add_argument("--vary", metavar="KEY=A,B,...", help="runs with each of these values, too: perf=default,graph")
    parser.add_argument("--steps", type=count, default=16, help="that are timed")
    parser.add_argument("--warm", type=count, default=4, help="steps before")
    parser.add_argument("--rounds", type=count, default=1, help="runs of each")
    parser.add_argument("--longest", type=float, default=60.0, help="seconds of a run, above which it is given up")
    parser.add_argument("--no-flops", action="store_true", help="neither operations nor the matrix peak")


def measure(flags: argparse.Namespace) -> Result:
    result = Result(
        "modes",
        flags.command,
        flags.device,
        Picture(
            {"samples/s": "samples per second", "peak MB": "memory at the peak, MB"},
            lines="mode",
            panels=("recipe",),
            series="with" if flags.vary else None,
            shared=False,
        ),
    )
    peaks: dict[str, float] = {}
    key, _, values = (flags.vary or "").partition("=")
    variants = [f"{key}={value}" for value in values.split(",")] if key else [""]
    with runs(flags.longest) as start:
        for recipe in flags.recipes.split(","):
            base = [f"recipe={recipe}", f"device={flags.device}", *QUIET]
            base += SMALL[recipe] if flags.size == "small" else []
            size = flags.batch_size or (16 if flags.size == "small" else None)
            base += [f"batch_size={size}"] if size else []
            base += flags.set
            flops = None if flags.no_flops else start(count_flops, base)
            jobs = [(mode, variant) for mode in flags.modes.split(",") for variant in variants]
            found: dict[tuple[str, str], list[dict[str, Any]]] = {job: [] for job in jobs}
            for turn in range(flags.rounds):
                for mode, variant in random.Random(turn).sample(jobs, len(jobs)) if turn else jobs:
                    overrides = [*base, f"amp={mode}", *([variant] if variant else [])]
                    # A mode that the recipe refuses, or one that takes too long, is not tried again.
                    if len(found[mode, variant]) < turn:
                        continue
                    one = start(one_run, overrides, flags.steps, flags.warm)
                    name = f"{recipe}, {mode}{', ' if variant else ''}{variant}"
                    if one is None:
                        result.notes.append(f"Given up after {flags.longest:g} s: {name}.")
                    elif isinstance(one, str):
                        result.notes.append(f"Refused: {name}. {one}")
                    else:
                        found[mode, variant].append(one)
            for (mode, variant), parts in found.items():
                if parts:
                    add(result, flags, recipe, mode, variant, parts, flops, peaks)
    if peaks:
        text = ", ".join(f"{name} {peak / 1e9:,.4g} GFLOP/s" for name, peak in peaks.items())
        result.notes.append(f"Matrix peak of one process, the best of several sizes: {text}.")
    for note in result.notes:
        print(note)
    if not result.rows:
        raise SystemExit("error: nothing was measured, see above")
    return result


def add(
    result: Result,
    flags: argparse.Namespace,
    recipe: str,
    mode: str,
    variant: str,
    parts: list[dict[str, Any]],
    flops: tuple[float, float] | None,
    peaks: dict[str, float],
) -> None:
    rate = Number.of([rate for part in parts for rate in part["rates"]])
    row: dict[str, Any] = {"recipe": recipe, "mode": mode} | ({"with": variant} if variant else {})
    row |= {"samples/s": rate, "peak MB": round(max(part["peak"] for part in parts) / 2**20, 1)}
    if flops is not None:
        dtype = computed_in(mode, flags.device)
        for name in ("float32", dtype):
            if name not in peaks:
                peaks[name] = max(matrix_peak(name, flags.device) for _ in range(3))
        per_sample = flops[0] / flops[1]
        # Slower than fp32: without units for it, products are emulated and say nothing about the device.
        share = None if peaks[dtype] < 0.5 * peaks["float32"] else rate.median * per_sample / peaks[dtype]
        row |= {"MFLOP/sample": per_sample / 1e6, "of": dtype, "share of peak": share}
    result.add(**row)


def computed_in(mode: str, device: str) -> str:
    """The format of a mode's matrix products, as far as peaks are measured: float8 counts as bfloat16."""
    if mode == "tf32" and device == "cuda":
        return "tf32"
    config = amp_config(mode)
    return config.dtype if config.update is None else config.weights


# --- one run ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def runs(longest: float):
    """`start(function, ...)` in a new process, forked from one that has imported everything and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benches.modes", "train", "torch._dynamo", *RECIPES.values()])

    def start(function: Any, *arguments: Any) -> Any:
        """Its result; None when it takes too long."""
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            future = pool.submit(function, *arguments)
            try:
                return future.result(longest)
            except concurrent.futures.TimeoutError:
                for process in list(pool._processes.values()):
                    process.kill()
                return None

    yield start


class RunFailed(Exception):
    """A run ended with something else than 0 or a refusal."""


def go(overrides: list[str], folder: str) -> str:
    """A run in this process. Returns why the settings were refused, or nothing."""
    import train

    torch.set_num_threads(1)
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
        code = train.main([*overrides, f"run_dir={folder}"])
    if code not in (0, 2):
        typed = f"python train.py {' '.join(overrides)}"
        raise RunFailed(f"{typed} ended with {code}:\n{said.getvalue()}\n{told.getvalue()}")
    return told.getvalue().partition("error: ")[2].strip() or "no reason" if code else ""


def one_run(overrides: list[str], steps: int, warm: int) -> dict[str, Any] | str:
    """Samples per second of each line after the warm-up, and bytes at the peak; or why it was refused."""
    every = max(1, steps // 8)
    before = _most()
    with tempfile.TemporaryDirectory() as folder:
        if why := go([*overrides, f"steps={warm + steps}", f"log_every={every}"], folder):
            return why
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        peak = json.loads(Path(folder, "summary.json").read_text())["peak_memory_bytes"]
    rates = [line["samples_per_second"] for line in lines if line["split"] == "train" and line["step"] >= warm + every]
    return {"rates": rates, "peak": peak if torch.cuda.is_initialized() else _most() - before}


def _most() -> int:
    """Bytes that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Flops(TorchDispatchMode):
    """With the formulas of FlopCounterMode, which itself follows modules by hooks that a gradient penalty forbids."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def count_flops(overrides: list[str]) -> tuple[float, float]:
    """Floating-point operations and samples of some steps in the middle. The same in every mode."""
    totals, samples = [], []
    for steps in (2, 4):
        with tempfile.TemporaryDirectory() as folder, _Flops() as counter:
            if why := go([*overrides, "amp=fp32", f"steps={steps}", "doctor=off", "log_every=1"], folder):
                raise RunFailed(why)
            state = read(folder)
        totals.append(counter.total)
        samples.append(state["progress"]["samples"])
    return totals[1] - totals[0], samples[1] - samples[0]


def matrix_peak(dtype: str, device: str, seconds: float = 0.2) -> float:
    """Floating-point operations per second of n x n products, the best of some n."""
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    best = 0.0
    try:
        for size in (256, 512, 1024, 2048) if device == "cpu" else (2048, 4096, 8192):
            a = torch.randn(size, size, device=device).to(getattr(torch, "float32" if dtype == "tf32" else dtype))
            once = _seconds(a, 1, device)
            repeats = max(1, round(seconds / _seconds(a, 1, device)))
            best = max(best, 2 * size**3 / min(once, _seconds(a, repeats, device)))
            if once > 2 * seconds:  # a larger one would take 8 times as long
                break
    finally:
        torch.set_float32_matmul_precision(kept)
    return best


def _seconds(a: torch.Tensor, repeats: int, device: str) -> float:
    """Seconds of one matmul."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(repeats):
        torch.mm(a, a)
    wait()
    return (time.perf_counter() - began) / repeats
