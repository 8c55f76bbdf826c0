"""A checkpoint of apex.amp as one that PyTorch's own mixed precision loads: {"model", "optimizer", "scaler"}.

    python scripts/from_apex.py amp_checkpoint.pt converted.pt
    python train.py model.weights=converted.pt amp=fp16 amp.init_scale=<what this prints>

The source has the layout that apex's README asks for: `{"model": ..., "optimizer": ..., "amp": amp.state_dict()}`. The
parts load into a network, into the optimizer of torch.optim with the same rule (FusedAdam is AdamW, or Adam with
adam_w_mode=False; FusedSGD is SGD), and into torch.amp.GradScaler or `amp_core.Amp`. apex's loss scale follows the rule
of GradScaler with its defaults: doubled after 2000 steps, halved after an overflow.

Nothing that is read can execute code. Exit codes: 2 wrong arguments or no such checkpoint, 4 cannot write.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amp_core.cli.command import answering
from amp_core.config.errors import ConfigError, SaveError
from amp_core.run.pretrained import why_unreadable


def convert(found: Any) -> tuple[dict[str, Any], list[str]]:
    """The converted checkpoint, and lines for the user.

    Raises:
        ConfigError: `found` does not have the layout of apex.
    """
    if not isinstance(found, Mapping) or not {"model", "amp"} <= found.keys():
        keys = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        raise ConfigError(f"found {keys}; expected model, optimizer and amp, where amp is the amp.state_dict() of apex")
    scalers = found["amp"]
    states = [scalers[name] for name in sorted(scalers) if name.startswith("loss_scaler")]
    if not states or not all(0 < state.get("loss_scale", 0) < math.inf for state in states):
        raise ConfigError(f"amp is {scalers!r}; expected loss_scaler0 with a loss_scale above 0 and unskipped")
    # One scale serves all losses here; with the smallest none of them overflows.
    state = min(states, key=lambda each: each["loss_scale"])
    scaler = {"scale": float(state["loss_scale"]), "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    scaler["_growth_tracker"] = int(state.get("unskipped", 0)) % 2000
    lines = [f"loss scale: amp.init_scale={scaler['scale']:g}"]
    if len(states) > 1:
        lines.append(f"the smallest of {', '.join(format(each['loss_scale'], 'g') for each in states)}")
    model = found["model"]
    if all(name.startswith("module.") for name in model):  # of apex's DistributedDataParallel
        model = {name.removeprefix("module."): value for name, value in model.items()}
    result = {"model": model, "scaler": scaler}
    if "optimizer" in found:
        result["optimizer"] = _with_step_of_each_weight(found["optimizer"])
    return result, lines


def _with_step_of_each_weight(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """apex's fused optimizers count steps in the group, torch's in the state of each weight."""
    state = {number: dict(values) for number, values in optimizer["state"].items()}
    groups = [{key: value for key, value in group.items() if key != "step"} for group in optimizer["param_groups"]]
    for group in optimizer["param_groups"]:
        for number in group["params"] if "step" in group else ():
            if number in state:
                state[number].setdefault("step", torch.tensor(float(group["step"])))
    return {"state": state, "param_groups": groups}


@answering
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a file that was written with torch.save")
    parser.add_argument("target", type=Path, help="a new file")
    flags = parser.parse_args(arguments)
    if flags.target.exists():
        raise ConfigError(f"{flags.target}: is there already; choose another name")
    try:
        found = torch.load(flags.source, map_location="cpu", weights_only=True)
    except Exception as problem:  # torch.load raises a dozen kinds for bytes that are no checkpoint
        raise ConfigError(f"{flags.source}: {why_unreadable(problem)}") from problem
    try:
        result, lines = convert(found)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        what = f"{type(problem).__name__}: {problem}"
        raise ConfigError(f"{flags.source}: model, optimizer or amp is not as apex writes it ({what})") from problem
    try:
        torch.save(result, flags.target)
    except (OSError, RuntimeError) as problem:
        raise SaveError(f"{flags.target}: cannot be written: {problem}") from problem
    print("\n".join([f"{flags.target}: {', '.join(result)}", *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
