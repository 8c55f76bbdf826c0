"""What each format below 16 bits loses, and what rules for the loss scale cost: the tables and pictures of
docs/FORMATS.md.

    python scripts/formats.py                        # the table of formats
    python scripts/formats.py policies               # that of loss scales
    python scripts/formats.py layouts                # where each mode runs
    python scripts/formats.py training               # that of training
    python scripts/formats.py pictures docs/pictures
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core.cli.compose import compose
from amp_core.config.options import choices
from amp_core.config.rules import validate
from amp_core.lowp.formats import E2M1, E3M2, E4M3, E5M2, Scaling, quantise
from amp_core.models.gpt import GPT
from amp_core.step.amp import Amp

FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "E4M3, scale of a tensor": Scaling(E4M3, (None, None)),
    "E4M3, of a row": Scaling(E4M3, (1, None)),
    "E4M3, of 1 x 128": Scaling(E4M3, (1, 128)),
    "E4M3, of 128 x 128": Scaling(E4M3, (128, 128)),
    "E5M2, of a tensor": Scaling(E5M2, (None, None)),
    "mxfp8 (E4M3)": Scaling(E4M3, (1, 32), "e8m0"),
    "mxfp8, `floor`": Scaling(E4M3, (1, 32), "e8m0", "floor"),
    "mxfp6 (E3M2)": Scaling(E3M2, (1, 32), "e8m0"),
    "mxfp4 (E2M1)": Scaling(E2M1, (1, 32), "e8m0"),
    "nvfp4": Scaling(E2M1, (1, 16), "nvfp4"),
    "nvfp4, 16 x 16": Scaling(E2M1, (16, 16), "nvfp4"),
}


def bits(how: torch.dtype | Scaling, size: int) -> float:
    """Of an element and its part of the scale."""
    if isinstance(how, torch.dtype):
        return 8.0 * how.itemsize
    shared = math.prod(size if side is None else side for side in how.block)
    return 1 + how.element.exponent + how.element.mantissa + {"fp32": 32, "e8m0": 8, "nvfp4": 8}[how.scale] / shared


def show_formats() -> None:
    """Print the table of formats."""
    torch.manual_seed(0)
    x = torch.randn(4096, 256)
    outlier = x.clone()
    outlier[0, 0] = 1e4 * x.abs().max()
    print("| format | bits | error | largest off by over 1/16, % | zeros beside an outlier, % |")
    print("| --- | --- | --- | --- | --- |")
    for name, how in FORMATS.items():
        if isinstance(how, torch.dtype):
            low, beside = x.to(how).float(), outlier.to(how).float()
        else:
            low, beside = quantise(x, how).dense(), quantise(outlier, how).dense()
        error = float((low - x).norm() / x.norm())
        peaks, theirs = x.view(-1, 32).abs().amax(1), low.view(-1, 32).abs().amax(1)
        off = 100 * ((theirs - peaks).abs() / peaks > 1 / 16).float().mean().item()
        zeros = 100 * (beside == 0).float().mean().item()
        print(f"| {name} | {bits(how, 256):.3g} | {error:.4f} | {off:.1f} | {zeros:.1f} |")


POLICIES: dict[str, dict[str, Any]] = {
    "halve at each overflow": {},
    "`amp.hysteresis=2` (Megatron-LM)": {"hysteresis": 2},
    "`amp.hysteresis=2`, consecutive (DeepSpeed)": {"hysteresis": 2, "consecutive_hysteresis": True},
}


def show_policies(steps: int = 20_000) -> None:
    """Print the table of loss scales: gradients drift, and one batch in 500 has some that are up to 64 times larger."""
    print("| rule | skipped per 10,000 steps | bits lost |")
    print("| --- | --- | --- |")
    numbers = {False: torch.tensor(0.0), True: torch.tensor(1.0)}
    for name, fields in POLICIES.items():
        amp, draw = Amp.named("fp16", growth_interval=500, **fields), random.Random(0)
        level, skipped, lost = 0.0, 0, 0.0
        for _ in range(steps):
            level = min(max(level + draw.gauss(0, 0.02), -4), 4)
            size = level + (draw.uniform(0, 6) if draw.random() < 1 / 500 else 0.0)
            limit, scale = 14.0 - size, math.log2(amp.scale)  # the largest that fits in fp16 lies at 2^14 / 2^size
            is_bad = scale > limit
            skipped += is_bad
            lost += max(14.0 - level - scale, 0.0)
            amp.scaler.update(numbers[is_bad])
        per = 10_000 / steps
        print(f"| {name} | {skipped * per:.1f} | {lost / steps:.2f} |")


UPDATES = ("master", "remainder", "nearest")
MODES = [*choices("amp"), *(f"bf16_pure amp.update={update}" for update in UPDATES)]
LAYOUTS = ("single", "ddp", "fsdp", "hsdp", "data_parallel", "model_parallel")


def layouts() -> str:
    """The modes that layouts refuse, those with the same reason in a line; all others run."""
    extra = {"hsdp": ["layout.shard_size=2"], "model_parallel": ["layout.num_stages=2"]}
    nodes = {layout: compose([f"layout={layout}", *extra.get(layout, [])])["layout"] for layout in LAYOUTS}
    refused: dict[str, list[str]] = {}
    for mode in MODES:
        values = compose(f"amp={mode}".split())
        reasons: dict[str, list[str]] = {}
        for layout in LAYOUTS:
            if problems := validate(values | {"layout": nodes[layout]})[1]:
                reason = problems[0].split(": ", 1)[1].split(";")[0].replace(f" (amp={mode.split()[0]})", "")
                reasons.setdefault(reason, []).append(f"`{layout}`")
        for reason, where in reasons.items():
            refused.setdefault(f"{', '.join(where)}: {reason}", []).append(f"`{mode.split()[0]}`")
    return "\n".join(f"- {', '.join(dict.fromkeys(modes))} in {where}" for where, modes in refused.items())


# --- training

STEPS, SEEDS, STUDENT_T = 60, 10, 2.262
"""Steps of a run, runs of a format, and the quantile of 9 degrees of freedom for intervals of 95 %."""
TRAINED: dict[str, dict[str, Any] | None] = {
    "bf16": {"mode": "bf16"},
    "fp8, by tensor": {"mode": "fp8"},
    "fp8, by row": {"mode": "fp8", "granularity": "row"},
    "fp8 without scales": None,
    "mxfp8": {"mode": "mxfp8"},
    "mxfp4": {"mode": "mxfp8", "format": "mxfp4"},
    "nvfp4": {"mode": "nvfp4"},
    "nvfp4 without Hadamard transforms": {"mode": "nvfp4", "hadamard": False},
}


class Bare(torch.autograd.Function):
    """rows times weight, transposed, of numbers cast to float8 without a scale."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(*(low := [each.to(torch.float8_e4m3fn).float() for each in (rows, weight)]))
        return low[0] @ low[1].t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (rows, weight), grad = ctx.saved_tensors, grads[0].to(torch.float8_e5m2).float()
        return grad @ weight, grad.t() @ rows


class BareLinear(nn.Linear):
    """A linear layer of them."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.float().reshape(-1, self.in_features)
        return Bare.apply(rows, self.weight).view(*input.shape[:-1], -1).to(input.dtype)  # type: ignore[union-attr]


def loss_of(fields: dict[str, Any] | None, seed: int, text: Tensor, length: int = 32) -> float:
    """The evaluation loss of a GPT of 82,000 parameters after `STEPS` steps on bytes."""
    torch.manual_seed(seed)
    net = GPT(vocab_size=256, length=length, width=64, depth=1, heads=2)
    amp = Amp.named(**fields or {"mode": "bf16"})
    if fields is None:
        for name, module in net.named_modules():
            if type(module) is nn.Linear and name != "head":
                module.__class__ = BareLinear
    amp.prepare(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True)
    split = len(text) * 9 // 10

    def loss(places: Tensor) -> Tensor:
        ids = torch.stack([text[place : place + length + 1] for place in places.tolist()]).long()
        with amp.autocast():
            return F.cross_entropy(net(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    draw = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        torch.manual_seed(1000 * seed + step)
        amp.backward(loss(torch.randint(split - length, (8,), generator=draw)))
        amp.step(optimizer)
        amp.update()
        amp.zero_grad(optimizer)
    net.eval()
    with torch.no_grad():
        return loss(torch.arange(split, len(text) - length - 1, 16 * length)[:64]).item()


def show_training() -> None:
    """Print the table of training: the loss of each format less that of bf16 from the same seed, with its interval."""
    files = sorted(Path(torch.__file__).parent.glob("nn/modules/*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    print("| format | loss | less that of bf16 | verdict |")
    print("| --- | --- | --- | --- |")
    base: Tensor | None = None
    for name, fields in TRAINED.items():
        losses = torch.tensor([loss_of(fields, seed, text) for seed in range(SEEDS)], dtype=torch.float64)
        base = losses if base is None else base
        off = losses - base
        half = float(STUDENT_T * off.std() / SEEDS**0.5)
        verdict = (
            ""
            if name == "bf16"
            else "unresolved"
            if abs(off.mean()) <= half
            else "worse"
            if off.mean() > 0
            else "better"
        )
        print(f"| {name} | {losses.mean():.4f} | {off.mean():+.4f} ± {half:.4f} | {verdict} |", flush=True)


# --- pictures


def draw(folder: Path) -> None:
    """Draw format_*.png."""
    from matplotlib.figure import Figure

    torch.manual_seed(0)
    for what in (magnitudes, outliers, saturation, means):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        what(axes)
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
        figure.savefig(folder / f"format_{what.__name__}.png", dpi=110)


def stored(x: Tensor, how: torch.dtype | Scaling) -> Tensor:
    """`x` as a format holds it, in fp32."""
    return x.to(how).float() if isinstance(how, torch.dtype) else quantise(x, how).dense()


PICTURED = ["bf16", "fp16", "E4M3, scale of a tensor", "E4M3, of a row", "E4M3, of 1 x 128", "E5M2, of a tensor"]
PICTURED += ["mxfp8 (E4M3)", "mxfp6 (E3M2)", "mxfp4 (E2M1)", "nvfp4"]


def magnitudes(axes: Any) -> None:
    """Error against magnitude: each row is a power of two smaller than the one before."""
    exponents = torch.arange(0, 41)
    x = torch.randn(len(exponents), 1024) * torch.exp2(-exponents.float())[:, None]
    for number, name in enumerate(PICTURED):
        low = stored(x, FORMATS[name])
        error = ((low - x).norm(dim=1) / x.norm(dim=1)).clamp(max=1.0)
        axes.plot(-exponents, error, "-" if number < 6 else "--", marker=".", markersize=3, linewidth=1, label=name)
    axes.set(
        yscale="log", xlabel="size of a row of a tensor, as a power of two of the largest", ylabel="relative error"
    )
    axes.set_title("What is small beside the rest of its tensor", fontsize=10)


def outliers(axes: Any) -> None:
    """The part of the numbers that become 0 beside one that is larger than all others."""
    x, factors = torch.randn(1024, 256), [2.0**k for k in range(25)]
    for name in (*PICTURED[2:5], "mxfp8 (E4M3)", "mxfp4 (E2M1)", "nvfp4"):
        zeros = []
        for factor in factors:
            beside = x.clone()
            beside[0, 0] = factor * x.abs().max()
            zeros.append(100 * (stored(beside, FORMATS[name]) == 0).float().mean().item())
        axes.plot(factors, zeros, marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="outlier, in largest numbers", ylabel="zeros (%)")
    axes.set_title("One outlier in 262,144 normal numbers", fontsize=10)


def saturation(axes: Any) -> None:
    """The error of the largest number of a block, by where it lies between two powers of two."""
    places = torch.linspace(1.0, 2.0, 401)[:-1]
    x = places[:, None] * torch.tensor([1.0, *[0.3] * 31])
    normal = torch.randn(32768, 32)
    for rule in ("floor", "rceil"):
        how = Scaling(E4M3, (1, 32), "e8m0", rule)  # type: ignore[arg-type]
        error = (stored(x, how)[:, 0] - places) / places
        peaks = normal.abs().amax(1)
        off = ((stored(normal, how).abs().amax(1) - peaks).abs() / peaks > 1 / 16).float().mean().item()
        axes.plot(places, 100 * error, label=f"{rule}: {100 * off:.1f} % of blocks of normal numbers off by over 1/16")
    axes.set(xlabel="largest number of a block, in powers of two", ylabel="error (%)")
    axes.set_title("MXFP8: the floor rule saturates above 1.75", fontsize=10)


def means(axes: Any) -> None:
    """The error of a mean over draws: nearest, noise of its own for each draw, and the same noise for all."""
    x, how = torch.randn(64, 64), Scaling(E2M1, (1, 16), "nvfp4")
    counts = [2**k for k in range(9)]

    def seeded(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return quantise(x, how, stochastic=True).dense()

    kinds: dict[str, Callable[[int], Tensor]] = {"to nearest": lambda i: quantise(x, how).dense()}
    kinds |= {"one noise on all ranks": lambda i: seeded(0), "noise of its own": seeded}
    for name, one in kinds.items():
        every = torch.stack([one(i) for i in range(counts[-1])]).cumsum(0)
        errors = [float((every[n - 1] / n - x).norm() / x.norm()) for n in counts]
        axes.plot(counts, errors, marker="o", markersize=4, label=f"{name} (8 ranks: {errors[3]:.3f})")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="draws or ranks", ylabel="relative error of the mean")
    axes.set_title("NVFP4: what averages away", fontsize=10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="?", choices=["formats", "policies", "layouts", "training", "pictures"], default="formats"
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/pictures"))
    flags = parser.parse_args()
    if flags.what == "pictures":
        draw(flags.folder)
    elif flags.what == "layouts":
        print(layouts())
    else:
        {"formats": show_formats, "policies": show_policies, "training": show_training}[flags.what]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
