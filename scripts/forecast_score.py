"""How right the doctor's forecast is: random stress on three recipes, forecast in bf16, then done in fp16.

    python scripts/forecast_score.py                     # precision and recall per recipe
    python scripts/forecast_score.py --cases 40 --seed 7 --json score.json

A case multiplies the weights of one layer, taken at random, by a power of two, taken at random, so that there is
something to forecast: layers that overflow, gradients that vanish, a loss scale that is not the usual one. Networks are
tiny: fp16 is emulated on most CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from doctor import visit

from amp_tools.forecast import Check, Forecast, check_windows, forecast_windows
from recipes import find

COMMON = ["device=cpu", "batch_size=4", "doctor=off"]
IMAGES = ["data=synthetic", "data.num_samples=96", "data.image_size=8", "data.num_classes=4"]
SETTINGS = {
    "classification": [*IMAGES, "model.options.width=8"],
    "segmentation": ["data.num_samples=48", "data.image_size=32", "model.options.width=4", "model.options.depth=2"],
    "language_model": [
        *("data.num_samples=64", "data.length=32", "recipe.sample_bytes=4"),
        *("model.options.depth=1", "model.options.width=32", "model.options.heads=2"),
    ],
}


@contextlib.contextmanager
def planted(recipe: str, draw: random.Random) -> Iterator[list[str]]:
    """The recipe with one layer's weights too large or too small. Gives what was done, once a network was built."""
    module, done = find(recipe), list[str]()
    build = module.build_model
    place, power = draw.random(), draw.randint(-26, 22)

    def changed(*args: Any, **kwargs: Any) -> nn.Module:
        net = build(*args, **kwargs)
        layers = [(name, p) for name, p in net.named_parameters() if p.ndim > 1]
        name, weight = layers[int(place * len(layers))]
        with torch.no_grad():
            weight.mul_(2.0**power)
        done[:] = [f"{name} times 2^{power}"]
        return net

    with patch.object(module, "build_model", changed):
        yield done


def score(recipe: str, draw: random.Random, windows: int) -> tuple[str, Check]:
    """Forecast one case, and do it."""
    told: list[Forecast] = []
    checks: list[Check] = []
    overrides = [f"recipe={recipe}", *COMMON, *SETTINGS[recipe], f"seed={draw.randint(0, 10**6)}"]
    with planted(recipe, draw) as case:
        codes = [visit([*overrides, "amp=bf16"], lambda loop, count: forecast_windows(loop, windows, told))]
        codes.append(visit([*overrides, "amp=fp16"], lambda loop, count: check_windows(loop, told[0], checks)))
    if any(codes):
        raise SystemExit(f"{recipe}, {case}: exit codes {codes}")
    return case[0], checks[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20, help="per recipe")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    draw, rows = random.Random(flags.seed), []
    print(f"{'':16} {'layers to keep in fp32':^30} {'layers that lose gradients':^30} {'largest scale':>22}")
    print(f"{'recipe':16} " + f"{'precision':>9} {'recall':>6} {'(f/m/both)':>13} " * 2)
    for recipe in SETTINGS:
        cases = [score(recipe, draw, flags.windows) for _ in range(flags.cases)]
        texts = []
        for kind in ("islands", "underflow"):
            forecast = [(i, name) for i, (_, check) in enumerate(cases) for name in getattr(check, kind).forecast]
            measured = [(i, name) for i, (_, check) in enumerate(cases) for name in getattr(check, kind).measured]
            both = len(set(forecast) & set(measured))
            rates = [f"{both / len(of):.3f}" if of else "none" for of in (forecast, measured)]
            texts.append(f"{rates[0]:>9} {rates[1]:>6} {f'({len(forecast)}/{len(measured)}/{both})':>13}")
        scales = [(check.scale_forecast, check.scale_measured) for _, check in cases]
        same = sum(a == b for a, b in scales)
        near = sum(a == b or (b > 0 and a > 0 and 0.5 <= a / b <= 2) for a, b in scales)
        print(f"{recipe:16} {texts[0]} {texts[1]} {f'{same} same, {near} within 2x':>22}")
        rows += [{"recipe": recipe, "case": case} | check.to_dict() for case, check in cases]
    print(f"{flags.cases} cases each, seed {flags.seed}; f/m: forecast and measured")
    if flags.json:
        flags.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
