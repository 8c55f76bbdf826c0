"""The pictures of docs/GALLERY.md, each from its own short runs on one core of a CPU.

    python scripts/gallery.py                     # all, some minutes
    python scripts/gallery.py samples masks       # some
    python scripts/gallery.py --out pictures      # instead of docs/pictures

Runs lie in runs/gallery; those that are finished are not trained again. Needs matplotlib: the extra `data`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from amp_core.checkpoints.reading import read
from amp_core.config.rules import validate
from amp_core.data import build_data
from amp_core.models import build_model
from recipes import segmentation

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "gallery"
BLUE, RED, GRAY, GREEN = "#1d3557", "#c1121f", "#8d99ae", "#2a9d8f"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], metavar="name", help=", ".join(PICTURES))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    for name in flags.names or PICTURES:
        figure = PICTURES[name]()
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=110, facecolor="white")
        # A palette takes a third of the bytes, without a visible difference.
        Image.open(drawn, formats=("PNG",)).convert("RGB").quantize(128).save(flags.out / f"{name}.png", optimize=True)
        print(flags.out / f"{name}.png")


def train(name: str, *overrides: str) -> Path:
    """The folder of a run; it is trained if it is not finished."""
    said = _train([f"run_dir={RUNS / name}", *overrides])
    print(said.splitlines()[-1])
    return RUNS / name


def _train(overrides: list[str]) -> str:
    argv = [sys.executable, str(ROOT / "train.py"), "device=cpu", "log.progress=false", *overrides]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    return subprocess.run(argv, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout


def lines(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def checkpoint(folder: Path) -> dict[str, Any]:
    return read(folder)


def plain(axes: Axes, *, grid: bool = True) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, length=2)
    if grid:
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
    return axes


# --- the pictures -----------------------------------------------------------------------------------------------------


def samples() -> Figure:
    """Images of the generator after 100, 200 and 500 steps, and real ones."""
    from matplotlib.image import imread

    folder = train("gan", "recipe=gan")
    stages = [folder / "samples" / f"step_{step:08}.png" for step in (100, 200, 500)]
    found = {line["step"]: line["ema_sliced_wasserstein"] for line in lines(folder) if line["split"] == "eval"}
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    for panel, file in zip(figure.subplots(1, 3), stages, strict=True):
        step = int(file.stem.removeprefix("step_"))
        panel.imshow(imread(file), cmap="gray")
        panel.set_title(f"step {step}: sliced Wasserstein distance {found[step]:.3f}", fontsize=9)
        panel.axis("off")
    return figure


def masks() -> Figure:
    """Scenes that were held out, with the border of the predicted mask and that of the true one."""
    folder = train("segmentation", "recipe=segmentation", "amp=bf16")
    saved = checkpoint(folder)
    cfg, *_ = validate(saved["config"])
    data = build_data(cfg.data, seed=cfg.seed)
    net = build_model(cfg.model.name, segmentation.MODELS, options=cfg.model.options, **data.facts)
    net.load_state_dict(saved["model"])
    images, true = data.eval.__getitems__([(index, 0) for index in range(12)])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        predicted = net.eval()(images)[:, 0] > 0
    figure = Figure(figsize=(10, 3.55), layout="constrained")
    for panel, image, mask, found in zip(figure.subplots(2, 6).flat, images, true[:, 0], predicted, strict=True):
        low, high = image.amin(), image.amax()
        panel.imshow(((image - low) / (high - low)).permute(1, 2, 0), interpolation="lanczos")
        panel.imshow(tinted(found), interpolation="nearest")
        if mask.any():
            panel.contour(mask.numpy() == 1, [0.5], colors="white", linewidths=0.7)
        panel.axis("off")
    score = lines(folder)[-1]["iou"]
    figure.suptitle(f"red: predicted, white line: true; IoU {score:.3f} over all that were held out", fontsize=9)
    return figure


def tinted(mask: Tensor) -> np.ndarray:
    """RGBA [H, W, 4]: red where the mask is."""
    picture = np.zeros((*mask.shape, 4), dtype=np.float32)
    picture[mask.numpy()] = (0.9, 0.1, 0.15, 0.55)
    return picture


def loss_scale() -> Figure:
    """The loss scale of three policies over a run, with the steps that were skipped."""
    common = ("model=mlp", "model.options.width=64", "batch_size=32", "steps=400", "log_every=1", "eval_every=400")
    policies = {
        "amp=fp16 amp.growth_interval=20": (BLUE, ("amp=fp16", "amp.growth_interval=20")),
        "amp=fp16_capped amp.growth_interval=20": (GREEN, ("amp=fp16_capped", "amp.growth_interval=20")),
        "amp=fp16 amp.init_scale=16777216": (GRAY, ("amp=fp16", "amp.init_scale=16777216")),
    }
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = plain(figure.subplots())
    for number, (label, (color, overrides)) in enumerate(policies.items()):
        course = [line for line in lines(train(f"scale{number}", *common, *overrides)) if line["split"] == "train"]
        steps, scales = [line["step"] for line in course], [line["loss_scale"] for line in course]
        axes.step(steps, scales, where="post", color=color, linewidth=1.6, label=label)
        before = 0
        for line in course:
            if line["skipped"] > before:
                axes.plot(line["step"], line["loss_scale"], "v", color=RED, markersize=5, zorder=3)
            before = line["skipped"]
    axes.plot([], [], "v", color=RED, markersize=5, label="a step was skipped: a gradient beyond 65504")
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel("loss scale", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    return figure


def positions() -> Figure:
    """One language model, the same text further and further down: position ids in three dtypes."""
    small = (
        *("recipe=language_model", "data.length=128", "model.options.width=64", "model.options.heads=1"),
        *("model.options.depth=2", "steps=300"),
    )
    folder = train("language_model", *small)
    offsets = [0, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    figure = Figure(figsize=(10, 3.3), layout="constrained")
    axes = plain(figure.subplots())
    for dtype, color in {"bf16": RED, "fp16": GREEN, "fp32": BLUE}.items():
        losses = []
        for offset in offsets:
            asked = [f"run_dir={folder}", *small, "task=evaluate", "allow_changes=true"]
            said = _train([*asked, f"model.options.positions_dtype={dtype}", f"recipe.eval_offset={offset or 'null'}"])
            found = dict(re.findall(r"(\w+) (\d+\.\d+)", said.splitlines()[-1]))
            losses.append(float(found[f"loss_at_{offset}" if offset else "loss"]))
        axes.plot(range(len(offsets)), losses, "o-", color=color, markersize=4, label=f"position ids in {dtype}")
    axes.set_xticks(range(len(offsets)), [f"{offset:,}" for offset in offsets])
    axes.set_xlabel("position of the first byte", fontsize=9)
    axes.set_ylabel("loss, nats per byte", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    return figure


def exponents() -> Figure:
    """How the exponents of gradients move while a network learns, layer by layer, and where fp16 ends."""
    folder = train("exponents", "recipe=segmentation", "doctor.statistics_every=5", "log_every=5", "amp=bf16", "seed=1")
    sampled = lines(folder, "doctor/statistics.jsonl")
    layers = [name for name, kinds in sampled[0]["layers"].items() if "activation_gradients" in kinds]
    layers.sort(key=lambda name: name == "head")  # computed last
    shown = [layers[index] for index in np.linspace(0, len(layers) - 1, 4).round().astype(int)]
    low, high = -44, -4
    figure = Figure(figsize=(10, 3.3), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    edges = np.append([record["step"] - 2.5 for record in sampled], sampled[-1]["step"] + 2.5)
    mesh = None
    for panel, name in zip(panels, shown, strict=True):
        image = np.full((high - low + 1, len(sampled)), np.nan)
        for column, record in enumerate(sampled):
            numbers = record["layers"][name]["activation_gradients"]["exponents"]
            for exponent, share in numbers.items():
                if low <= int(exponent) <= high:
                    image[int(exponent) - low, column] = share
        grid = np.arange(low, high + 2) - 0.5
        mesh = panel.pcolormesh(edges, grid, image, cmap="YlGnBu", norm=LogNorm(1e-4, 0.3), rasterized=True)
        panel.axhline(-24, color=RED, linewidth=1.2)
        panel.axhline(-40, color=RED, linewidth=1.2, linestyle=":")
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("step", fontsize=9)
        plain(panel, grid=False)
    panels[0].set_ylabel("exponent of the gradient", fontsize=9)
    assert mesh is not None
    bar = figure.colorbar(mesh, ax=list(panels), fraction=0.02, pad=0.01)
    bar.set_label("share of the numbers", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    figure.suptitle(
        "gradients of activations; fp16 keeps what is above the red line, scaled by 65536 what is above the dotted one",
        fontsize=9,
    )
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "samples": samples,
    "masks": masks,
    "loss_scale": loss_scale,
    "positions": positions,
    "exponents": exponents,
}

if __name__ == "__main__":
    main()
