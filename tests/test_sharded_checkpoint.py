"""Checkpoints in shards: the same promises as in one file, in every layout, on any number of ranks, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from running import differing
from test_fsdp import MODES, Training, gpt
from torch.optim import AdamW

from amp_core import Checkpoint, Clip
from amp_core.checkpoint import read
from amp_core.shards import local

OnRanks = Callable[..., list[Any]]
LAYOUTS = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4, "fsdp4": 4}
"""Ranks of each; hsdp is two copies of two parts."""
FORMATS = ["single", "sharded"]


def training_in(layout: str, mode: str) -> Training:
    # Three rows over two ranks, and five over four: parts of different sizes, and empty ones.
    return Training(layout.removesuffix("4"), mode, optimizer=AdamW, clip=Clip.norm(0.5), net=gpt())


def checkpoint_of(training: Training, folder: str, format: Any, **options: Any) -> Checkpoint:
    return Checkpoint(folder, writer=dist.get_rank() == 0, format=format, **options, **training.parts())


# --- every layout and format to every other one


def saved_in_both(rank: int, layout: str, folder: str) -> None:
    for mode in MODES:
        training = training_in(layout, mode)
        for _ in range(2):
            training.window()
        for format in FORMATS:
            checkpoint_of(training, f"{folder}/{layout}/{mode}/{format}", format).save(2, progress={"samples": 16})


def loaded_from_all(rank: int, layout: str, folder: str) -> list[str]:
    """Where what was loaded differs in a bit from what was saved."""
    found = []
    for mode in MODES:
        training = training_in(layout, mode)
        for source in LAYOUTS:
            expected = read(f"{folder}/{source}/{mode}/single/step_00000002")
            for format in FORMATS if mode == "bf16" else FORMATS[1:]:
                for param in training.net.parameters():
                    local([param.detach()])[0].zero_()
                training.optimizer.state.clear()
                training.schedule.num_taken.zero_()
                checkpoint = checkpoint_of(training, f"{folder}/{source}/{mode}/{format}", FORMATS[0])
                loaded = checkpoint.load()
                assert loaded is not None and loaded.step == 2 and loaded.notes == ()
                values = training.values()
                moments = {
                    f"{number}.{key}": value
                    for number, entry in expected["optimizer"]["state"].items()
                    for key, value in entry.items()
                }
                wanted = {"model": expected["model"], "ema": expected["ema"], "moments": moments}
                where = f"{source} ({format}) to {layout} in {mode}"
                found += [f"{where}: {name}" for name in differing(wanted, values)]
                others = training.schedule.state_dict(), training.amp.state_dict()
                found += [f"{where}: {x}" for x in differing((expected["schedule"], expected["scaler"]), others)]
    return found


def test_every_layout_loads_every_other_one_from_shards_bit_by_bit(tmp_path: Path, on_ranks: OnRanks) -> None:
    folder = str(tmp_path / "checkpoints")
    for layout, num_ranks in LAYOUTS.items():
        on_ranks(saved_in_both, layout, folder, num_ranks=num_ranks)
        for mode in MODES:
            whole, shards = (read(f"{folder}/{layout}/{mode}/{format}") for format in FORMATS)
            assert not differing(whole, shards)
            assert [list(part) for part in whole.values() if isinstance(part, dict)] == [
                list(part) for part in shards.values() if isinstance(part, dict)
            ]
            written = sorted(path.name for path in Path(folder, layout, mode, "sharded", "step_00000002").glob("*.s*"))
            kinds = {"fsdp": ["parts"], "hsdp": ["parts"], "fsdp4": ["parts"]}.get(layout, ["whole"])
            assert written == [f"{kind}_{rank:05d}.safetensors" for kind in kinds for rank in range(num_ranks)]
    for layout, num_ranks in LAYOUTS.items():
        for rank in on_ranks(loaded_from_all, layout, folder, num_ranks=num_ranks):
            assert not rank
