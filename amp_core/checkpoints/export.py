"""A checkpoint of either format as one plain file, in one process: for other programs, or to resume from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from amp_core.checkpoints import folders, plain_state, reading, shards
from amp_core.checkpoints.shards import Entry, Span
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

    Returns:
        Lines for the user: where it came from, and checkpoints that were rejected.

    Raises:
        ConfigError: a target that is there, or of another kind.
        CheckpointError: no sound checkpoint, or none with this part.
        SaveError: the target cannot be written.
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
    found = reading.find(source, None, _Choice(part, target.suffix).open)
    if found is None:
        raise CheckpointError(f"{source}: there is no checkpoint")
    contents = found.contents if part is None else found.contents[part]
    if target.suffix == ".pt":
        data = plain_state.serialise(contents)
    else:
        head = shards.head((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in contents.items())
        data = [head, *(shards.buffer_of(tensor) for tensor in contents.values())]
    temporary = target.absolute().with_name(f".tmp-{target.name}-{os.getpid()}")
    with folders.saving(target.absolute(), sum(map(len, data))):
        try:
            folders.write_file(temporary, *data)
            os.rename(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        folders.sync_folder(target.absolute().parent)
    what = f"all of step {found.step}" if part is None else f"{part} of step {found.step}"
    return [*found.notes, f"wrote {target} ({os.stat(target).st_size:,} bytes): {what}, {found.path}"]


@dataclass
class _Choice:
    """The part that is taken of a checkpoint; None: all of them."""

    part: str | None
    suffix: str

    def open(self, folder: Path, contents: dict[str, Any]) -> _Choice:
        """Looks at a checkpoint before its shards are read."""
        if self.part is None:
            return self
        state = contents.get(self.part)
        if not isinstance(state, dict) or self.part in ("progress", "config"):
            names = [name for name, state in contents.items() if isinstance(state, dict)]
            raise CheckpointError(f"{folder} has no {self.part}; it has {', '.join(names)}")
        others = [str(name) for name, value in state.items() if not (isinstance(name, str) and _fits(value))]
        if others and self.suffix != ".pt":
            raise CheckpointError(f"{folder}: {self.part} holds more than tensors ({others[0]}): use a .pt file")
        return self

    def span(self, entry: Entry) -> Span | None:
        return (entry.dim, 0, entry.length) if self.part in (None, entry.paths[0][0]) else None

    def value(self, entry: Entry, tensor: Tensor) -> Tensor:
        return tensor


def _fits(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in shards.NAMES
