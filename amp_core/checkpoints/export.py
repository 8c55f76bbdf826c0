"""A checkpoint of either format as one plain file, in one process: for other programs, or to resume from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from amp_core.checkpoints import folders, plain_state, reading, shards
from amp_core.config import files
from amp_core.config.errors import CheckpointError, ConfigError

PARTS = ("model", "ema")
SUFFIXES = (".pt", ".safetensors")


def export(source: Path, target: Path, part: str | None = None) -> list[str]:
    """Writes one file, whole or not at all, after every byte of the checkpoint that it takes was verified.

    Args:
        source: a run folder, a folder of checkpoints (the newest sound one), a step folder, or a `state.pt`.
        target: ends in `.pt` or `.safetensors`, and is not there yet.
        part: `model`, `ema`, or any other network of the checkpoint: its state dict. None: the whole checkpoint as
            `Checkpoint` in format `single` writes it, which `resume=` takes; only as `.pt`.

    Returns lines for the user: where it came from, and checkpoints that were rejected. ConfigError, CheckpointError,
    SaveError: a target of another kind, no such sound checkpoint, no way to write it.
    """
    problems = []
    if target.suffix not in SUFFIXES:
        problems.append(f"{target}: expected a name that ends in {' or '.join(SUFFIXES)}")
    elif part is None and target.suffix != ".pt":
        problems.append(f"{target}: a whole checkpoint is more than tensors; use --part {' or '.join(PARTS)}, or a .pt")
    if os.path.lexists(target):
        problems.append(f"{target}: is there already; choose another name")
    if not source.exists():
        problems.append(f"{source}: there is no such file or folder; expected a run folder or a checkpoint")
    if problems:
        raise ConfigError(problems)

    def select(folder: Path, contents: dict[str, Any]) -> reading.Selection:
        if part is None:
            return reading.Selection(shards.want_all)
        state = contents.get(part)
        if not isinstance(state, dict) or part in folders.RESERVED:
            names = [name for name, state in contents.items() if isinstance(state, dict)]
            raise CheckpointError(f"{folder} has no {part}; it has {', '.join(names)}")
        fits = [isinstance(value, Tensor) and value.dtype in shards.NAMES for value in state.values()]
        if target.suffix != ".pt" and not all(fits):
            other = list(state)[fits.index(False)]
            raise CheckpointError(f"{folder}: {part} holds more than tensors ({other}): use a .pt file")
        return reading.Selection(lambda entry: shards.want_all(entry) if entry.paths[0][0] == part else None)

    found = reading.find_checkpoint(source, None, select)
    contents = found.contents if part is None else found.contents[part]
    if target.suffix == ".pt":
        data = plain_state.serialise(contents)
    else:
        head = shards.head((str(name), tensor.dtype, tuple(tensor.shape)) for name, tensor in contents.items())
        data = [head, *map(shards.buffer_of, contents.values())]
    _write(target, data)
    what = f"all of step {found.step}" if part is None else f"{part} of step {found.step}"
    return [*found.notes, f"wrote {target} ({os.stat(target).st_size:,} bytes): {what}, {found.path}"]


def write_state(target: Path, state: Mapping[str, Any]) -> None:
    """Writes a state dict as torch.save does, whole or not at all. Raises SaveError."""
    _write(target, plain_state.serialise(plain_state.to_plain(state)))


def _write(target: Path, data: Sequence[Any]) -> None:
    """Raises SaveError. The folder is the one that was named, also by a link."""
    with folders.saving(target.absolute(), sum(map(len, data))):
        files.write_whole(target.parent.resolve() / target.name, *data)
