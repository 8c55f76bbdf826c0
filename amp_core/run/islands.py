"""fp32 islands made during a run: by the doctor, or restored by a resume."""

from __future__ import annotations

import torch
from torch import nn

from amp_core.lowp.islands import keep_fp32, named_modules
from amp_core.run.state import Run
from amp_core.step.amp import Amp
from amp_core.tensors import gathers_16bit


def make_islands(run: Run, names: list[str]) -> None:
    """Keep modules in fp32 from here on, in the networks and in their average."""
    nets = [run.env.nets] if run.ema is None else [run.env.nets, [("", run.ema.model)]]
    for module in (module for each in nets for module, name in named_modules(each).items() if name in set(names)):
        keep_fp32(module)
    if run.graph is not None:
        run.graph.forget()
    run.islands += [name for name in names if name not in run.islands]
    run.env.summary["islands"] = run.islands


def can_make_islands(amp: Amp, nets: list[tuple[str, nn.Module]]) -> bool:
    """Whether modules can become islands now: it takes autocast, and weights in fp32, also where they are gathered."""
    autocasts = amp.dtype in (torch.float16, torch.bfloat16)
    in_16bit = amp.weights or amp.config.float8 or any(gathers_16bit(net) for _, net in nets)
    return autocasts and not in_16bit
