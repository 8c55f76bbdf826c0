"""task=export: the network of a run for other programs, in fp32, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from amp_core.checkpoints import folders
from amp_core.config.errors import SaveError
from amp_core.config.files import remove, remove_leftovers, sync_folder
from amp_core.config.rules import place_of
from amp_core.models.adapters import adapters, merged
from amp_core.run import graph_files, hf_folder
from amp_core.run.terminal import say
from amp_core.tensors import full_copy, is_sharded, unwrap


def export(loop: Any) -> None:
    """The whole of task=export, for the network of a loop, or its average. Collective; rank 0 writes.

    Raises:
        ConfigError: the format has no place for such a network, or the target is there.
        SaveError: it cannot be written; nothing is left.
    """
    env, cfg = loop.env, loop.cfg
    net = unwrap(loop.model) if loop.ema is None else loop.ema.model
    if is_sharded(net):
        net = full_copy(net, "cpu")
    if not env.is_main:
        return
    target = Path(place_of(cfg)).absolute()
    with folders.saving(target):
        folders.make_folder(target.parent)
        remove_leftovers(target.parent)
        temporary = target.parent / f".tmp-{os.getpid()}-{os.urandom(8).hex()}"
        try:
            with loop.evaluation.averaged():
                if cfg.export.to == "peft":
                    more = hf_folder.write_adapter(loop, net, temporary)
                elif cfg.export.to == "safetensors":
                    more = hf_folder.write_safetensors(weights_of(net), temporary)
                else:
                    write = hf_folder.write if cfg.export.to == "hf" else graph_files.write
                    more = write(loop, net, weights_of(net), temporary)
            for path in [*temporary.rglob("*"), temporary]:
                with path.open("rb") if path.is_file() else contextlib.nullcontext() as file:
                    sync_folder(path) if file is None else os.fsync(file.fileno())
            if os.path.lexists(target):  # since the check before the start
                raise SaveError(f"export.path={target}: is there already; choose another name")
            os.rename(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                remove(temporary)
            raise
        sync_folder(target.parent)
    of = "" if loop.ema is None else " of the averages"
    for note in [*more, f"exported step {loop.step}{of}, fp32: {place_of(cfg)}"]:
        say(note)


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    """The weights on the CPU, floating-point ones in fp32, with adapters added to their layers."""
    state = merged(net) if adapters(net) else net.state_dict()
    return {
        name: value.detach().cpu().float().contiguous() if value.is_floating_point() else value.cpu()
        for name, value in state.items()
    }
