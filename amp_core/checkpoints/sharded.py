"""Saving in shards: which rank writes what, its files, and the table of all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_core.checkpoints import folders, plain_state, shards
from amp_core.checkpoints.folders import MANIFEST, STATE, digest_of, encode, is_sound
from amp_core.checkpoints.parts import Part, net_of, parameters_of, plain_names
from amp_core.checkpoints.reading import Ranks
from amp_core.checkpoints.shards import Entry, Shard, StatePath
from amp_core.config.errors import SaveError
from amp_core.tensors import Slice, is_dtensor, slice_of

OwnShard = tuple[int, Shard, Tensor]  # that this rank writes, after the number of its entry in the table


@torch.no_grad()
def assign_shards(
    parts: Mapping[str, Part], states: Mapping[str, Any], rank: int, num_ranks: int
) -> tuple[list[Entry], list[OwnShard], dict[str, Any]]:
    """Decides which rank writes what. Every rank computes the same table by itself, apart from the tensors.

    A sharded tensor is written by the ranks that hold it, copies of a shard in turns. Weights and moments that every
    rank has are divided among the ranks by size. The rest, as running statistics, is what rank 0 has. Returns the table
    without its shards, what this rank writes, and the states with None in place of the tensors of the table.
    """
    entries: list[Entry] = []
    mine: list[OwnShard] = []
    numbers: dict[Any, int] = {}
    num_bytes = [0] * num_ranks

    def assign(path: StatePath, value: Any, same_as: Any, is_replica: bool) -> bool:
        """Adds a tensor to the table, or its path to the one that it shares memory with; False: it is not one."""
        if is_dtensor(value):
            own, (copy, num_copies) = slice_of(value), shards.replicas(value)
        elif isinstance(value, Slice):
            own, copy, num_copies = value, 0, 1
        elif is_replica and value.ndim and value.dtype in shards.NAMES:
            own, copy, num_copies = Slice(value, 0, len(value)), 0, 0
        else:
            return False
        if same_as in numbers:
            i = numbers[same_as]
            entries[i] = replace(entries[i], paths=(*entries[i].paths, path))
            return True
        if own.tensor.dtype not in shards.NAMES:
            raise ValueError(f"{'.'.join(map(str, path))} has the dtype {own.tensor.dtype}, which has no shards")
        i = numbers[same_as] = len(entries)
        entries.append(Entry((path,), own.tensor.dtype, own.shape, own.dim))
        if num_copies:
            # Replicas take turns: each writes its share, and none needs to be asked.
            writes = i % num_copies == copy
        else:
            # List scheduling (Graham, 1966): the fullest rank writes less than twice the least possible.
            writer = num_bytes.index(min(num_bytes))
            num_bytes[writer] += own.tensor.nbytes
            writes = writer == rank
        if writes and own.tensor.numel():
            kind = "parts" if isinstance(value, Slice) or own.stop - own.start < own.total else "whole"
            mine.append((i, Shard(own.start, own.stop, f"{kind}_{rank:05d}.safetensors"), own.tensor))
        return True

    rest = {}
    for name, part in parts.items():
        weights = {} if (net := net_of(part)) is None else dict(net.named_parameters(remove_duplicate=False))
        tied = {} if net is None else {plain: id(weights[name]) for plain, name in plain_names(net, weights).items()}
        sizes = {}
        if isinstance(part, Optimizer):
            groups = states[name].get("param_groups", [])
            sizes = {number: parameter.shape for number, parameter in parameters_of(part, groups)} if groups else {}

        def walk(value: Any, path: StatePath, tied: Any = tied, sizes: Any = sizes) -> Any:
            if isinstance(value, Tensor | Slice):
                # Within a part (name,) is the path of a weight, ("state", number, name) that of an optimizer's tensor.
                inside = path[1:]
                is_moment = len(inside) == 3 and inside[0] != "param_groups" and value.shape == sizes.get(inside[1])
                is_weight = len(inside) == 1 and inside[0] in tied
                same_as = (path[0], tied.get(inside[0], inside)) if len(inside) == 1 else path
                return None if assign(path, value, same_as, is_moment or is_weight) else value
            if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
                return {key: walk(item, (*path, key)) for key, item in value.items()}
            return [walk(item, (*path, i)) for i, item in enumerate(value)] if isinstance(value, list) else value

        rest[name] = walk(states[name], (name,))
    return entries, mine, rest


def write_step(
    ranks: Ranks, target: Path, entries: list[Entry], mine: list[OwnShard], contents: dict[str, Any], about: Any
) -> bool:
    """Writes a step folder; False if a sound one is there already. Any call may be the last: the one before loads.

    `contents` are those of `state.pt`, on rank 0; `about` is the manifest without files and tensors. Collective.
    """
    is_there = ranks.first(lambda: os.path.lexists(target))
    if is_there and all(ranks.each(lambda: is_sound(target, ranks.rank, ranks.num))):
        return False

    temporary = ranks.first(lambda: folders.saving(target)(folders.make_temporary)(target))
    try:
        written = ranks.each(lambda: _write_shards(temporary, target, entries, mine))
        ranks.first(lambda: _complete(temporary, target, contents, entries, written, about))
    finally:
        if ranks.rank == 0:
            folders.abandon(temporary)
    return True


def _write_shards(temporary: Path, target: Path, entries: list[Entry], mine: list[OwnShard]) -> dict[str, Any]:
    """Writes the files of this rank."""
    files: dict[str, Any] = {}
    for name in sorted({shard.file for _, shard, _ in mine}):
        own = [each for each in mine if each[1].file == name]
        head = shards.head_of((entries[number], shard) for number, shard, _ in own)
        data = [memoryview(head), *(shards.buffer_of(tensor) for _, _, tensor in own)]
        files[name] = digest_of(data)
        with folders.saving(target, files[name]["bytes"]):
            folders.write_file(temporary / name, *data)
    # Ranks compare a digest: the table itself is as long as the model has tensors, times the ranks.
    table = json.dumps(shards.encode(entries), sort_keys=True)
    written = [(number, shard) for number, shard, _ in mine]
    return {"files": files, "shards": written, "table": hashlib.sha256(table.encode()).hexdigest()}


def _complete(
    temporary: Path, target: Path, contents: dict[str, Any], entries: list[Entry], written: list[Any], about: Any
) -> None:
    """Adds the state and, when all else is on disk, the manifest, and gives the folder its name. Rank 0."""
    if any(one["table"] != written[0]["table"] for one in written):
        raise ValueError("the states of the ranks have different names, shapes or dtypes: they are no shards of one")
    found: list[list[Shard]] = [[] for _ in entries]
    for one in written:
        for number, shard in one["shards"]:
            found[number].append(shard)
    entries = [replace(entry, shards=tuple(sorted(own))) for entry, own in zip(entries, found, strict=True)]
    for entry in entries:
        shards.check(entry)
    files = {name: entry for one in written for name, entry in one["files"].items()}
    data = plain_state.serialise(contents)
    files[STATE] = digest_of(data)
    tensors = {"tensors": shards.encode(entries)} if "sharded" in contents else {}
    manifest = encode(about | {"files": files} | tensors)
    with folders.saving(target, files[STATE]["bytes"] + len(manifest)):
        for name, entry in files.items():
            if name != STATE and os.stat(temporary / name).st_size != entry["bytes"]:
                raise SaveError(f"cannot save {target}: rank 0 does not see all of {name}. Earlier ones are intact.")
        folders.complete(temporary, target, {STATE: data, MANIFEST: [manifest]})
