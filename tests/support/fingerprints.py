"""SHA-256 of what training computes: nine recipes x fp32, bf16, fp16, to be compared before and after a change of the code.

    python tests/support/fingerprints.py > before.txt          # about two minutes
    python tests/support/fingerprints.py gan language_model    # these recipes

Each run takes 30 steps with accumulation 2, clipping by norm and an average of the weights; the gradients of step 5 are
not finite, and after step 18 the run is resumed. A line gives the digests of the weights, the optimizers' moments, the
metrics without times, the layout of the checkpoint (paths, shapes, dtypes, keys of the manifest), and the bytes of its
`state.pt`. They depend on the machine and on torch's version, so both sides of a comparison come from one machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("support", "recipes"))]

import torch
from running import CLOCKS, checkpoints, lines, state
from test_recipes import FAULT, SMALL, WINDOW

import train
from recipes import RECIPES

MODES = ("fp32", "bf16", "fp16")


def digest(value: Any) -> str:
    """A digest of nested containers: keys, plain values, and each tensor's dtype, shape and bytes."""
    total = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            total.update(f"{value.dtype}{tuple(value.shape)}".encode())
            total.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                total.update(repr(key).encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                feed(item)
        else:
            total.update(repr(value).encode())

    feed(value)
    return total.hexdigest()[:16]


def layout(value: Any) -> Any:
    """The shape of a checkpoint: tensors become their dtype and shape, plain values their type."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, dict):
        return {key: layout(inner) for key, inner in value.items()}
    return [layout(item) for item in value] if isinstance(value, list | tuple) else type(value).__name__


def fingerprint(recipe: str, mode: str) -> str:
    overrides = [
        *("device=cpu", "log.progress=false", "save_every=10", "eval_every=10", "log_every=5", "batch_size=4"),
        *(f"recipe={recipe}", f"amp={mode}", "run_dir=run", "schedule.horizon=30", *SMALL[recipe], *WINDOW),
        f"debug.inject={{where: {FAULT.get(recipe, 'gradient')}, step: 5}}",
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for steps in (18, 30):
            code = train.main([*overrides, f"steps={steps}"])
            assert code == 0, f"{recipe} in {mode} ended with {code}"
        last = checkpoints("run")[-1]
        saved, manifest = state("run"), json.loads((last / "manifest.json").read_text())
        moments = {name: part for name, part in saved.items() if name.endswith("optimizer")}
        others = {
            name: part for name, part in saved.items() if name not in moments and name not in ("config", "progress")
        }
        found = {
            "weights": digest(others),
            "moments": digest(moments),
            "metrics": digest([{k: v for k, v in line.items() if k not in CLOCKS} for line in lines("run")]),
            "layout": digest([layout(saved), layout(manifest)]),
            "bytes": hashlib.sha256((last / "state.pt").read_bytes()).hexdigest()[:16],
        }
    return f"{recipe:18}{mode:6}" + "  ".join(f"{name} {value}" for name, value in found.items())


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    for recipe in sys.argv[1:] or sorted(RECIPES):
        for mode in MODES:
            print(fingerprint(recipe, mode), flush=True)


if __name__ == "__main__":
    main()
