"""Resumes every mode from every mode, in every layout: the matrix of docs/FORMATS.md, from real checkpoints.

    python scripts/resumes.py                                # all: some minutes on 2 cores
    python scripts/resumes.py --modes bf16 fp8 --layouts single fsdp

Four processes on a CPU. Each mode trains two steps of a small GPT in each layout (hsdp: two replicas of two shards) and
saves; then each loads what every mode saved, in turns from all layouts, and takes two steps. What it saved itself it
loads from all layouts.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from formats import MODES
from torch import Tensor, nn

from amp_core.checkpoints.checkpoint import Checkpoint
from amp_core.checkpoints.parts import gather_full_state
from amp_core.layouts.ddp import wrap_ddp
from amp_core.layouts.fsdp import build_mesh, shard_for
from amp_core.lowp.masters import master_params
from amp_core.models.gpt import GPT
from amp_core.step.amp import Amp

RANKS, SHARDS = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4}, {"fsdp": None, "hsdp": 2}
WITHIN = 2**-8
"""How far a weight may be from the one that was saved: half of the last of 8 digits of bfloat16."""


class Training:
    """A small GPT in a mode and a layout; the gradients of a step are those of the same 8 sequences in all layouts."""

    def __init__(self, mode: str, layout: str, mesh: Any, folder: str) -> None:
        name, *update = mode.split(" amp.update=")
        self.amp = Amp.named(name, device="cpu", samples=8, **({"update": update[0]} if update else {}))
        torch.manual_seed(0)
        net: nn.Module = GPT(vocab_size=32, length=8, width=32, depth=1, heads=2)
        self.amp.prepare(net, gathers=mesh is not None)
        if mesh is not None:
            net = shard_for(self.amp, net, mesh)
        elif layout == "ddp" and self.amp.config.update is None:
            net = wrap_ddp(net, torch.device("cpu"))
        self.net, self.layout = net, layout
        self.optimizer = torch.optim.AdamW(master_params(net), lr=0.01, fused=True)
        parts: dict[str, Any] = {"model": net, "optimizer": self.optimizer, "scaler": self.amp}
        self.checkpoint = Checkpoint(folder, writer=not dist.get_rank(), **parts)

    def step(self, number: int) -> float:
        """The loss, summed over ranks, of a step that is taken."""
        tokens = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(number)).chunk(RANKS[self.layout])
        mine = tokens[dist.get_rank()]
        torch.manual_seed(number)
        with self.amp.autocast():
            logits = self.net(mine[:, :-1]).float().flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, mine[:, 1:].flatten())
        self.amp.backward(loss, 1 / RANKS[self.layout])
        assert bool(self.amp.step(self.optimizer).taken), "a step was skipped"
        self.amp.update()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    def weights(self) -> dict[str, Tensor]:
        """Whole, in fp32."""
        state = gather_full_state(self.net.state_dict())
        return {name.removeprefix("module."): value.clone() for name, value in state.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--layouts", nargs="+", default=[*RANKS], choices=[*RANKS])
    flags = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (flags.modes, flags.layouts, folder), nprocs=max(RANKS[layout] for layout in flags.layouts))
        found = {layout: torch.load(f"{folder}/{layout}.pt", weights_only=True) for layout in flags.layouts}
    print(table(flags.modes, found))
    return 0


def work(rank: int, modes: list[str], layouts: list[str], folder: str) -> None:
    """Save in each layout, then load in each: a process group of its ranks for each."""
    torch.set_num_threads(1)
    num = max(RANKS[layout] for layout in layouts)
    for phase in (save_all, load_all):
        for layout in layouts:
            if rank < RANKS[layout]:
                place = f"file://{folder}/{phase.__name__}.{layout}"
                dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS[layout])
                # One for all networks: each has groups of processes of its own, with threads.
                mesh = build_mesh(torch.device("cpu"), RANKS[layout], SHARDS[layout]) if layout in SHARDS else None
                phase(layout, mesh, modes, layouts, folder)
                dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{phase.__name__}", rank=rank, world_size=num)
        dist.barrier()  # what is loaded has been saved
        dist.destroy_process_group()


def save_all(layout: str, mesh: Any, modes: list[str], layouts: list[str], folder: str) -> None:
    """Two steps, a checkpoint, and what the next two steps are."""
    for mode in modes:
        training = Training(mode, layout, mesh, f"{folder}/{layout}/{mode}")
        for number in range(2):
            training.step(number)
        training.checkpoint.save(2)
        after = training.weights(), [training.step(number) for number in (2, 3)], training.weights()
        if not dist.get_rank():
            torch.save(after, f"{folder}/{layout}/{mode}/after.pt")


def load_all(layout: str, mesh: Any, modes: list[str], layouts: list[str], folder: str) -> None:
    """Resume each mode from each, and tell how far weights moved."""
    found: dict[tuple[str, str], list[float]] = {}
    for i, mode in enumerate(modes):
        for j, other in enumerate(modes):
            turn = [layouts[(i + j + layouts.index(layout)) % len(layouts)]]
            for source in layouts if other == mode else turn:
                training = Training(mode, layout, mesh, f"{folder}/to")
                training.checkpoint.load(f"{folder}/{source}/{other}")
                saved, losses, then = torch.load(f"{folder}/{source}/{other}/after.pt", weights_only=True)
                loaded, ours = training.weights(), [training.step(number) for number in (2, 3)]
                far = max(float(((loaded[n] - v).abs() / v.abs().clamp(min=1e-4)).max()) for n, v in saved.items())
                assert far <= WITHIN and torch.tensor(ours).isfinite().all(), (mode, layout, other, source, far, ours)
                found.setdefault((other, mode), []).append(far)
                if other == mode and source == layout:
                    same = ours == losses and all(torch.equal(v, then[n]) for n, v in training.weights().items())
                    assert same, f"{mode} in {layout} does not continue bit for bit: {ours}, {losses}"
    if not dist.get_rank():
        torch.save(found, f"{folder}/{layout}.pt")


def table(modes: list[str], found: dict[str, dict[tuple[str, str], list[float]]]) -> str:
    """Rows: what was saved; columns: what resumes. "=": weights have the same bits; else the largest change, 2^-n."""
    far = {
        pair: [each for layout in found.values() for each in layout[pair]] for pair in itertools.product(modes, modes)
    }
    exponents = {pair: torch.tensor(max(each)).log2().ceil().item() for pair, each in far.items()}
    shown = {pair: f"2^{exponent:.0f}" if math.isfinite(exponent) else "=" for pair, exponent in exponents.items()}
    count = sum(map(len, far.values()))
    return "\n".join([*grouped(modes, shown), "", f"{count} resumes in {', '.join(found)}; none failed."])


def grouped(modes: list[str], shown: dict[tuple[str, str], str]) -> list[str]:
    """The lines of a table, with modes of the same row or of the same column together."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    columns: dict[tuple[str, ...], dict[str, str]] = {}
    for mode in modes:
        short = mode.removeprefix("bf16_pure amp.update=")
        rows.setdefault(tuple(shown[mode, other] for other in modes), {})[mode] = short
        columns.setdefault(tuple(shown[other, mode] for other in modes), {})[mode] = short
    table = [
        ["saved by, resumed in", *(", ".join(to.values()) for to in columns.values())],
        ["---"] * (1 + len(columns)),
    ]
    table += [[", ".join(of.values()), *(shown[min(of), min(to)] for to in columns.values())] for of in rows.values()]
    return [f"| {' | '.join(cells)} |" for cells in table]


if __name__ == "__main__":
    sys.exit(main())
