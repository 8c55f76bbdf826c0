"""Checkpoints: named parts in one file or in one per rank, written whole or not at all, verified before use.

    checkpoint = Checkpoint("run/checkpoints", model=net, optimizer=optimizer, scaler=amp)
    checkpoint.save(step, progress={"samples": seen}, metrics={"accuracy": 0.97}, best=("accuracy", "max"))
    loaded = checkpoint.load()                       # the newest sound one, or None when there is none at all

    checkpoints/step_00000500/state.pt               one entry per part, and scaler, progress, config, format
    checkpoints/step_00000500/manifest.json          sizes, SHA-256, metrics, and a digest of itself

`torch.load(state.pt, weights_only=True)` and `net.load_state_dict(state["model"])` work without this module.

With `format="sharded"` nothing is gathered: each rank writes what it has, and of what all have its share.

    checkpoints/step_00000500/state.pt               all that is no weight and no moment; None where one belongs
    checkpoints/step_00000500/parts_00003.safetensors    what rank 3 has of tensors that lie over the ranks
    checkpoints/step_00000500/whole_00003.safetensors    its share of those that every rank has
    checkpoints/step_00000500/manifest.json          also the table of the tensors: shapes, dtypes, pieces

`load` takes either, on any number of ranks and in any layout: a rank reads the pieces that it needs.

A save is written under a temporary name, brought to disk, and renamed; what is older is deleted only after that. So
a process that dies at any moment, or a full disk, costs at most the save in progress. Nothing is unpickled before
its SHA-256 was compared, and never with code execution allowed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import logging
import math
import os
import re
import stat
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core import pieces
from amp_core.agreement import Ranks
from amp_core.errors import CheckpointError, SaveError
from amp_core.pieces import Damaged, Entry, Piece, Place, Span
from amp_core.shards import Slice, gathered, is_part, load_state, part_like, replicas, slice_of
from amp_core.zero import is_cut, slices_of, whole_state

FORMAT = 1
_STATE = "state.pt"
_MANIFEST = "manifest.json"
_SHARD = re.compile(r"(parts|whole)_[0-9]{5,}\.safetensors")
_STEP_FOLDER = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")
_TEMPORARY = re.compile(r"\.tmp-(?:old-)?step_[0-9]{8,}-([0-9]+)")
_RESERVED = ("progress", "config", "format", "sharded")
_SCALARS = (str, int, float, bool, type(None))
_LARGE = 1 << 16  # bytes of a tensor from which on it is not copied to be written
_CHUNK = 1 << 26  # macOS refuses to write 2 GiB at once
# Optimizer states that have the shape of their parameter, in the classes of torch.optim.
_LIKE_PARAMETER = {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg"}
_LIKE_PARAMETER |= {"grad_avg", "acc_delta", "ax", "prev", "step_size", "variance"}
_log = logging.getLogger("amp_recipes")


class Part(Protocol):
    """What can be saved under a name: a net, an optimizer, an `Amp`, a `Schedule`, an `Ema`, ..."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True)
class Loaded:
    """What was loaded, and what has to be said about it."""

    step: int
    """Optimizer steps done when it was saved."""
    progress: dict[str, Any]
    config: dict[str, Any]
    path: Path
    """The step folder, or the file when it had no manifest."""
    digest: str
    """In hex, SHA-256 of the file, or of the manifest if there are shards: ranks compare it."""
    notes: tuple[str, ...]
    """For the log: rejected checkpoints, parts that were ignored or start afresh, converted dtypes."""


class Checkpoint:
    """Saves and loads named parts in a folder of checkpoints.

    Nets are stored unwrapped (DDP, DataParallel and torch.compile leave no trace in the names), all tensors on the CPU.
    Whatever lies over ranks is stored under the name of the whole, so a run may go on in any layout, on any number of
    ranks, and in the other format. One folder has one writer at a time.

    Args:
        folder: where the `step_*` folders are; made by the first save.
        keep: how many of the newest to keep, besides the best.
        writer: false for ranks above 0: they make and remove no folders. In format `single` they write nothing: `save`
            collects the states of the parts, which may be collective. A writer removes here what dead processes left
            unfinished.
        format: `single`: all in one file, written by rank 0, on which sharded parts are gathered. `sharded`: each rank
            writes what it has, and all ranks must see the same folder.
        background: `save` returns when everything was copied to host memory (a second copy of the state, kept for the
            next save), and a thread does the rest; see `prepare` and `wait`. The copies of what is on a GPU are ordered
            before what training does next there, and not waited for.
        group: of all ranks, for tensors in host memory (gloo), in the same order as by default. With it all ranks agree
            on what is loaded, and `load`, `newest_before` and, in format `sharded`, `save` are collective. Nothing else
            may use the group of a sharded checkpoint with `background`. Default: none in format `single`, where every
            rank finds out by itself; a new one in format `sharded` on several ranks, which makes this collective.
        parts: name -> anything with `state_dict` and `load_state_dict`; None is left out. `scaler` and `ema` have
            rules of their own in `load`.

    Raises:
        ValueError: a reserved name, something that is not a part, another format, or `keep` below 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        /,
        *,
        keep: int = 2,
        writer: bool = True,
        format: Literal["single", "sharded"] = "single",
        background: bool = False,
        group: dist.ProcessGroup | None = None,
        **parts: Part | None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest checkpoint must be kept")
        if format not in ("single", "sharded"):
            raise ValueError(f"format={format!r}: expected 'single' or 'sharded'")
        self.folder = Path(folder).absolute()
        self.keep = keep
        self.writer = writer
        self.format = format
        self.background = background
        self.parts: dict[str, Part] = {name: part for name, part in parts.items() if part is not None}
        for name, part in self.parts.items():
            if name in _RESERVED:
                raise ValueError(f"a part cannot be named {name!r}: the checkpoint has an entry of its own for it")
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise ValueError(f"{name} is a {_type_name(part)}: it has no state_dict() and load_state_dict()")
        if group is None and format == "sharded" and _several_ranks():
            group = dist.new_group(backend="gloo")  # type: ignore[assignment] - this rank is in it
        self._ranks = Ranks(group)
        self._copies = _Copies() if background else None
        # One thread, which lives as long as this: a process that ends waits for it.
        self._writer = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._task: Future[None] | None = None
        self._preparation: Future[None] | None = None
        if writer:
            _remove_leftovers(self.folder)

    def save(
        self,
        step: int,
        *,
        progress: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        best: tuple[str, Literal["max", "min"]] | None = None,
    ) -> Path:
        """Writes the step folder and, when it is safe on disk, removes the old ones that need not be kept.

        Waits for the device. Call it between steps, after `amp.update()`, on every rank. A step that is already there
        and sound is left as it is; a damaged one is replaced. With `background` the step is safe when `wait` says so.

        Args:
            step: optimizer steps done; names the folder, and is added to the progress as `step`.
            progress: where the run stands, returned by `load`.
            config: the configuration, returned by `load`.
            metrics: results of the evaluation at this step, if there was one; a value that is not finite becomes null.
            best: (name of a metric, "max" or "min"): also keep the checkpoint whose manifest has the best value. To be
                given at every save, or that one is removed in its turn.

        Returns:
            The step folder.

        Raises:
            SaveError: it cannot be written, or with `background` the one before could not. Earlier checkpoints are
                intact. In format `sharded` all ranks raise it.
            CheckpointError: the step is there already, written by a newer version.
            ValueError: something in it is not a tensor, str, int, float, bool, None, list, tuple or dict.
        """
        if step < 0 or (best is not None and best[1] not in ("max", "min")):
            raise ValueError(f'step={step}, best={best}: expected a count and (metric, "max" or "min")')
        target = self.folder / f"step_{step:08d}"
        facts = {"progress": {**(progress or {}), "step": step}, "config": dict(config or {}), "format": FORMAT}
        about = {"format": FORMAT, "step": step, "metrics": {k: _finite(v) for k, v in (metrics or {}).items()}}
        if self.format == "sharded":
            self.wait()
            act = self._prepare_sharded(target, facts, about, best)
        else:
            # First of all, since every rank must take part: only the writer may return early or fail.
            states = {name: _state(part, keep=self.writer) for name, part in self.parts.items()}
            if not self.writer:
                return target
            self.wait()
            if _is_sound(target):
                return target
            act = self._prepare_single(target, states, facts, about, best)
        if self._writer is None:
            act()
        else:
            self._task = self._writer.submit(self._act, act, step)
        return target

    def _act(self, act: Callable[[], None], step: int) -> None:
        assert self._copies is not None
        self._copies.wait()
        act()
        _log.info("the checkpoint of step %d is on disk", step)

    def prepare(self) -> None:
        """Makes the memory for the copies of a save in the background ahead of the first one, in the thread.

        New memory takes several times as long to write as memory that was written before. To be called once the
        optimizers have their states, after the first step. What has to be gathered first is left to the first save.
        Does nothing without `background`. Does not wait for the device.
        """
        if self._writer is None or self._copies is None or not (self.writer or self.format == "sharded"):
            return
        parts = {name: part for name, part in self.parts.items() if not self._gathers(part)}
        states: dict[str, Any] = {name: _own_state(part) for name, part in parts.items()}
        if self.format == "sharded":
            _, mine, rest = _share_out(parts, states, self._ranks.rank, self._ranks.num)
            states = {"": [tensor for *_, tensor in mine]} | (rest if self.writer else {})
        wanted: dict[Any, Tensor] = {}
        for tensor in _all_tensors(states):
            if is_part(tensor):  # of which the whole is copied
                wanted[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            else:
                wanted[_same(tensor)] = tensor
        self._preparation = self._writer.submit(self._copies.prepare, list(wanted.values()))

    def _gathers(self, part: Part) -> bool:
        """Whether the ranks must meet for the state of a part, other than for weights in parts."""
        if isinstance(part, Optimizer):
            return is_cut(part)
        return self.format == "single" and hasattr(part, "sharded_state_dict")

    def wait(self) -> None:
        """Waits until what `save` does in the background is done. Returns at once where nothing is.

        To be called at the end, on every rank: a problem is not raised anywhere else than here and in the next `save`.

        Raises:
            SaveError: it could not be written. Earlier checkpoints are intact.
        """
        task, self._task = self._task, None
        if task is not None:
            task.result()

    def _join(self) -> None:
        """Waits, and leaves a problem to the next `save` or `wait`."""
        if self._task is not None:
            self._task.exception()

    def _prepare_single(
        self, target: Path, states: dict[str, Any], facts: dict[str, Any], about: dict[str, Any], best: Any
    ) -> Callable[[], None]:
        contents = {"scaler": {}} | {name: _portable(part, states[name]) for name, part in self.parts.items()} | facts
        (contents,) = self._on_host(contents)

        def act() -> None:
            data = _serialise(contents)
            files = {_STATE: _digest(data)}
            manifest = _encode(about | {"files": files})
            with _saving(target, files[_STATE]["bytes"] + len(manifest)):
                self._write(target, {_STATE: data, _MANIFEST: [manifest]})
            self._prune_after(target, about["step"], best)

        return act

    def _prepare_sharded(
        self, target: Path, facts: dict[str, Any], about: dict[str, Any], best: Any
    ) -> Callable[[], None]:
        ranks = self._ranks
        problem: Exception | None = None
        entries, mine, contents = [], [], {}
        try:
            states = {name: _portable(part, _own_state(part)) for name, part in self.parts.items()}
            entries, mine, rest = _share_out(self.parts, states, ranks.rank, ranks.num)
            if self.writer:
                contents = {"scaler": {}} | rest | facts | {"sharded": len(entries)}
            contents, tensors = self._on_host(contents, [tensor for *_, tensor in mine])
            mine = [(*place, tensor) for (*place, _), tensor in zip(mine, tensors, strict=True)]
        except Exception as error:
            problem = error
            if ranks.num == 1:
                raise

        def ready() -> None:
            if problem is not None:
                raise problem

        def act() -> None:
            ranks.each(ready)
            if not ranks.first(lambda: self.writer):
                return
            if ranks.first(lambda: os.path.lexists(target)) and all(ranks.each(lambda: self._has_sound_share(target))):
                return
            temporary = Path(ranks.first(lambda: self._begin(target)))
            try:
                written = ranks.each(lambda: self._write_pieces(temporary, target, entries, mine))
                ranks.first(lambda: self._complete(temporary, target, contents, entries, written, about))
            finally:
                if self.writer:
                    self._abandon(temporary)
            if self.writer:
                self._prune_after(target, about["step"], best)

        return act

    def _on_host(self, *values: Any) -> list[Any]:
        """The same in plain containers and tensors in host memory: the very ones, or copies that nothing changes."""
        if self._copies is None:
            return [_plain(value, "", {}) for value in values]
        if self._preparation is not None:
            self._preparation.exception()  # without memory the copies will say so
            self._preparation = None
        self._copies.begin()
        copied = [_plain(value, "", {}, self._copies.copy) for value in values]
        self._copies.end()
        return copied

    def _begin(self, target: Path) -> str:
        with _saving(target):
            return str(self._make_temporary(target))

    def _write_pieces(self, temporary: Path, target: Path, entries: list[Entry], mine: list[Any]) -> dict[str, Any]:
        """What this rank has, in its files."""
        files: dict[str, Any] = {}
        for kind in ("parts", "whole"):
            name = f"{kind}_{self._ranks.rank:05d}.safetensors"
            own = [
                (entries[i], Piece(start, stop, name), tensor)
                for i, start, stop, where, tensor in mine
                if where == kind
            ]
            if not own:
                continue
            data = [memoryview(pieces.head((entry, piece) for entry, piece, _ in own))]
            data += [pieces.buffer_of(tensor) for *_, tensor in own]
            files[name] = _digest(data)
            with _saving(target, files[name]["bytes"]):
                _write_file(temporary / name, *data)
        written = [(i, start, stop, f"{kind}_{self._ranks.rank:05d}.safetensors") for i, start, stop, kind, _ in mine]
        table = json.dumps(pieces.encode(entries), sort_keys=True)
        return {"files": files, "pieces": written, "table": hashlib.sha256(table.encode()).hexdigest()}

    def _complete(
        self,
        temporary: Path,
        target: Path,
        contents: dict[str, Any],
        entries: list[Entry],
        written: list[dict[str, Any]],
        about: dict[str, Any],
    ) -> None:
        """Adds the state and, when all else is on disk, the manifest, and gives the folder its name. Rank 0."""
        if any(one["table"] != written[0]["table"] for one in written):
            raise ValueError(
                "the ranks have states of different names, shapes or dtypes, which are no parts of a whole"
            )
        found: list[list[Piece]] = [[] for _ in entries]
        for one in written:
            for i, *piece in one["pieces"]:
                found[i].append(Piece(*piece))
        entries = [replace(entry, pieces=tuple(sorted(own))) for entry, own in zip(entries, found, strict=True)]
        for entry in entries:
            pieces.check(entry)
        files = {name: entry for one in written for name, entry in one["files"].items()}
        data = _serialise(contents)
        files[_STATE] = _digest(data)
        manifest = _encode(about | {"files": files, "tensors": pieces.encode(entries)})
        with _saving(target, files[_STATE]["bytes"] + len(manifest)):
            for name, entry in files.items():
                if name != _STATE and os.stat(temporary / name).st_size != entry["bytes"]:
                    raise SaveError(
                        f"cannot save {target}: rank 0 does not see all of {name}. Earlier checkpoints are intact."
                    )
            _write_file(temporary / _STATE, *data)
            _write_file(temporary / _MANIFEST, manifest)
            self._publish(temporary, target)

    def _has_sound_share(self, folder: Path) -> bool:
        """Whether those files of a step are sound that this rank is to look at."""
        return _is_sound(folder, self._ranks.rank, self._ranks.num)

    def _prune_after(self, target: Path, step: int, best: tuple[str, str] | None) -> None:
        try:
            self._prune(step, best)
        except OSError as error:
            _log.warning("cannot remove an old checkpoint: %s. %s itself is safe.", error, target)

    def load(self, path: str | os.PathLike[str] | None = None) -> Loaded | None:
        """Loads all parts from the newest sound checkpoint, or from the one that is named.

        Everything is checked before the first part is changed. Of an optimizer only the state comes from the file: the
        hyperparameters of its groups, and the very tensors that hold learning rates, stay. Copies to the device.

        A part that the file lacks is an error, but for two: `scaler` gets `{}` (a fresh scale), and `ema` starts from
        the weights that were loaded (its `reset()`, if it has one). A part of the file that is not here is ignored
        with a note. Waits for a save in the background. With a `group`, collective: what one rank finds damaged, none
        uses.

        Args:
            path: a step folder, a `state.pt`, a folder of checkpoints, or a run folder. Default: the own folder.

        Returns:
            None when no path was given and there is no checkpoint at all, neither sound nor damaged.

        Raises:
            CheckpointError: none is sound, it is refused, or it is of another model; nothing was changed.
        """
        self._join()
        found = _find(self.folder if path is None else Path(path), self._ranks, self._select)
        if found is None:
            if path is not None:
                raise CheckpointError(f"{path}: there is no checkpoint")
            return None
        contents, selection = found.contents, found.selection
        for name, state in selection.wanted.items():
            try:
                _load_part(self.parts[name], state, exact=not selection.conversions)
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(f"{found.path}: {name} does not fit: {error}") from error
        for reset in selection.fresh:
            reset()
        notes = (*found.notes, *selection.notes, *selection.conversions)
        return Loaded(found.step, contents["progress"], contents["config"], found.path, found.digest, notes)

    def _select(self, path: Path, contents: dict[str, Any]) -> _Selection:
        """What the parts take of a checkpoint, if it fits them. Tensors may be on the device meta."""
        notes: list[str] = []
        wanted, fresh = {}, []
        for name, part in self.parts.items():
            if name == "scaler":
                wanted[name] = contents.get(name) or {}
            elif name in contents:
                wanted[name] = contents[name]
            elif name == "ema":
                reset = getattr(part, "reset", None)
                fresh += [reset] if reset else []
                start = "it starts from the loaded weights" if reset else "it has no reset() and stays as it is"
                notes.append(f"the checkpoint has no ema: {start}")
            else:
                raise CheckpointError(f"{path} has no {name}; it has {', '.join(map(str, contents))}")
        notes += [
            f"{name} of the checkpoint is not used here"
            for name, state in contents.items()
            if name not in self.parts and name not in _RESERVED and not (name == "scaler" and not state)
        ]
        return _Selection(path, self.parts, wanted, fresh, notes, self._check(path, wanted))

    def newest_before(self, step: int) -> tuple[int, Path] | None:
        """The newest checkpoint of the own folder with fewer steps than `step`, whether it is sound or not.

        Waits for a save in the background. Collective with a `group`.
        """
        self._join()
        found = self._ranks.first(lambda: {n: path for n, path in _step_folders(self.folder).items() if n < step})
        return max(found.items()) if found else None

    def snapshot(self) -> dict[str, Any]:
        """A copy in host memory of what this rank has of all parts, for `restore`. Waits for the device."""
        return {name: _copied(_portable(part, _own_state(part))) for name, part in self.parts.items()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Puts all parts back to a snapshot of this rank, bit by bit. The snapshot may be used again."""
        for name, state in snapshot.items():
            # Optimizers keep the very tensors that they are given.
            _load_part(self.parts[name], _copied(state), exact=True)

    def _check(self, path: Path, wanted: dict[str, Any]) -> list[str]:
        """Raises CheckpointError unless nets and optimizers fit; returns notes about dtypes that will be converted."""
        problems, conversions = [], []
        for name, state in wanted.items():
            part = self.parts[name]
            if not isinstance(state, dict):
                problems.append(f"{name} is a {_type_name(state)}, not a state dict")
            elif isinstance(part, nn.Module):
                misfits, converted = _compare_net(part, state)
                problems += [f"{name} {misfit}" for misfit in misfits]
                conversions += [f"dtypes of {name} were converted: {_first(converted)}"] if converted else []
            elif isinstance(part, Optimizer):
                problems += [f"{name} {misfit}" for misfit in _compare_optimizer(part, state)]
        if problems:
            raise CheckpointError(f"{path} is of another model: {'; '.join(problems)}. Nothing was loaded.")
        return conversions

    def _write(self, target: Path, files: Mapping[str, Data]) -> None:
        """Every step of it must leave a folder from which the newest acknowledged checkpoint loads."""
        temporary = self._make_temporary(target)
        try:
            for name, data in files.items():
                _write_file(temporary / name, *data)
            self._publish(temporary, target)
        finally:
            self._abandon(temporary)

    def _make_temporary(self, target: Path) -> Path:
        temporary = _temporary(target)
        _make_folder(self.folder)
        if os.path.lexists(temporary):  # of a dead process with our number, as containers give the same ones out
            _remove(temporary)
        os.mkdir(temporary)
        return temporary

    def _publish(self, temporary: Path, target: Path) -> None:
        """Gives a folder its name when its files are on disk."""
        _sync_folder(temporary)
        damaged = self._set_aside(target) if os.path.lexists(target) else None
        os.rename(temporary, target)
        _sync_folder(self.folder)
        if damaged:
            with contextlib.suppress(OSError):  # the new one is safe, and the next run tries again
                _remove(damaged)

    def _abandon(self, temporary: Path) -> None:
        """Removes what was not published."""
        with contextlib.suppress(OSError):
            if os.path.lexists(temporary):
                _remove(temporary)

    def _prune(self, current: int, best: tuple[str, str] | None) -> None:
        """Removes what is neither among the newest nor the best. Damaged ones do not count, and stay."""
        metrics: dict[int, dict[str, Any]] = {}
        folders = _step_folders(self.folder)
        for step, folder in folders.items():
            with contextlib.suppress(Damaged, CheckpointError):
                metrics[step] = _inspect(folder)["metrics"]
        kept = {current, *sorted(metrics)[-self.keep :]}
        if best is not None:
            name, mode = best
            scores = {step: _finite(values.get(name)) for step, values in metrics.items()}
            ranked = [(score if mode == "max" else -score, step) for step, score in scores.items() if score is not None]
            kept |= {step for _, step in sorted(ranked)[-1:]}
        for step in sorted(metrics.keys() - kept):
            _remove(self._set_aside(folders[step]))

    def _set_aside(self, folder: Path) -> Path:
        """Renames what is to be removed, so that no step folder is ever seen half deleted."""
        trash = _temporary(folder, "old-")
        if os.path.lexists(trash):
            _remove(trash)
        os.rename(folder, trash)
        _sync_folder(self.folder)
        return trash


def read(path: str | os.PathLike[str], *, notes: list[str] | None = None) -> dict[str, Any]:
    """Reads a checkpoint with no parts at hand: verified as in `Checkpoint.load`, tensors whole and on the CPU.

    Args:
        path: a step folder, a `state.pt`, a folder of checkpoints, or a run folder (the newest sound one of it).
        notes: what has to be said is appended here.

    Raises:
        CheckpointError: there is none, none is sound, or it is refused.
    """
    found = _find(Path(path))
    if found is None:
        raise CheckpointError(f"{path}: there is no checkpoint")
    if notes is not None:
        notes += found.notes
    return found.contents


# Finding, verifying, unpickling.


@dataclass(frozen=True)
class _Selection:
    """What is taken of a checkpoint."""

    path: Path
    parts: Mapping[str, Part]
    wanted: dict[str, Any]
    """Name of a part -> its state."""
    fresh: list[Callable[[], Any]]
    notes: list[str]
    conversions: list[str]
    sink: None = None
    _known: dict[str, dict[Any, Tensor]] = field(default_factory=dict)

    def span(self, entry: Entry) -> Span | None:
        """What this rank needs of a tensor. CheckpointError: no part has such a tensor."""
        name, *rest = entry.places[0]
        if name not in self.wanted:
            return None
        part = self.parts[str(name)]
        if hasattr(part, "span"):
            try:
                return 0, *part.span(tuple(rest), entry.shape)  # type: ignore[attr-defined]
            except ValueError as problem:
                raise CheckpointError(f"{self.path}: {name} does not fit: {problem}") from problem
        live = self._live(entry)
        if live is None or tuple(live.shape) != entry.shape:
            here = "nothing" if live is None else str(tuple(live.shape))
            raise CheckpointError(
                f"{self.path} is of another model: {entry.name} is {entry.shape} there and {here} here. "
                f"Nothing was loaded."
            )
        if not is_part(live):
            return entry.dim, 0, entry.length
        mine = slice_of(live)
        return mine.dim, mine.start, mine.stop

    def value(self, entry: Entry, tensor: Tensor) -> Tensor | Slice:
        """What was read, as the part wants it."""
        span = self.span(entry)
        assert span is not None
        is_split = hasattr(self.parts[str(entry.places[0][0])], "span") or is_part(self._live(entry))
        return Slice(tensor, span[1], entry.shape[span[0]], span[0]) if is_split else tensor

    def _live(self, entry: Entry) -> Tensor | None:
        name, *rest = entry.places[0]
        part = self.parts[str(name)]
        if isinstance(part, Optimizer):
            if str(name) not in self._known:
                self._known[str(name)] = dict(_parameters(part, self.wanted[str(name)]["param_groups"]))
            return self._known[str(name)].get(rest[1]) if len(rest) == 3 and rest[0] == "state" else None
        return self._tensors(str(name)).get(rest[0]) if len(rest) == 1 else None

    def _tensors(self, name: str) -> dict[Any, Tensor]:
        """Of a network or its average, by plain names."""
        if name not in self._known:
            net = _net_of(self.parts[name])
            live = {} if net is None else net.state_dict()
            self._known[name] = {} if net is None else {k: live[v] for k, v in _plain_names(net, live).items()}
        return self._known[name]


_Select = Callable[[Path, dict[str, Any]], Any]
"""(folder, contents) -> a `_Selection`, or what has its `span`, `value` and `sink`."""


@dataclass(frozen=True)
class _Found:
    contents: dict[str, Any]
    step: int
    path: Path
    digest: str
    notes: list[str]
    selection: Any
    """What `select` returned."""


def _find(path: Path, ranks: Ranks | None = None, select: _Select | None = None) -> _Found | None:
    """The checkpoint that `path` means: the named one, or the newest sound one of a folder; None if that has none.

    Args:
        path: see `read`.
        ranks: that are to find the same one.
        select: what is taken of the tensors in shards; all, if it is None.
    """
    ranks = ranks or Ranks()
    is_named, candidates = ranks.first(lambda: _candidates(path))
    notes: list[str] = []
    for candidate in candidates:
        opened: list[_Found] = []

        def attempt(candidate: Path = candidate, opened: list[_Found] = opened) -> tuple[int, str]:
            opened.append((_open if is_named != "file" else _open_file)(candidate, select))
            return opened[0].step, opened[0].digest

        try:
            told = ranks.each(attempt)
        except Damaged as rejected:
            if is_named:
                raise CheckpointError(f"{path} is damaged: {rejected}") from rejected
            notes.append(f"{candidate} is damaged and was not used: {rejected}")
            continue
        if any(one != told[0] for one in told):
            raise CheckpointError(f"{candidate}: the ranks read different ones: {told}; do all see the same folder?")
        opened[0].notes.extend(notes)
        return opened[0]
    if notes:
        raise CheckpointError("no checkpoint is sound: " + "; ".join(notes))
    return None


def _candidates(path: Path) -> tuple[str, list[Path]]:
    """("file" or "folder" if it is one checkpoint, else "", what to try in this order)."""
    try:
        if path.is_file():
            is_state = path.name == _STATE and (path.parent / _MANIFEST).exists()
            return ("folder", [path.parent]) if is_state else ("file", [path])
        if _STEP_FOLDER.fullmatch(path.name) or (path / _MANIFEST).exists() or (path / _STATE).exists():
            return "folder", [path]
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        return "", [candidate for _, candidate in sorted(_step_folders(folder).items(), reverse=True)]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _open_file(path: Path, select: _Select | None) -> _Found:
    """A state without a manifest."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    contents = _unpickle(data, path)
    if "sharded" in contents:
        raise CheckpointError(f"{path} is one file of a sharded checkpoint: name its folder, with the {_MANIFEST}")
    step = contents["progress"].get("step")
    note = f"{path} has no {_MANIFEST}: it was not verified"
    selection = select(path, contents) if select else None
    digest = hashlib.sha256(data).hexdigest()
    return _Found(contents, step if type(step) is int else 0, path, digest, [note], selection)


def _open(folder: Path, select: _Select | None = None) -> _Found:
    manifest, data = _verify(folder)
    contents = _unpickle(data, folder / _STATE)
    count = contents.pop("sharded", None)
    digest = manifest["files"][_STATE]["sha256"]
    if count is None and "tensors" not in manifest:
        return _Found(contents, manifest["step"], folder, digest, [], select(folder, contents) if select else None)
    entries = _table(manifest)
    if count != len(entries):
        raise Damaged(f"{_STATE} and {_MANIFEST} do not belong together")
    for entry in entries:
        for place in entry.places:
            _put(contents, place, torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
    selection = select(folder, contents) if select else None
    digests = {name: about["sha256"] for name, about in manifest["files"].items()}
    span = selection.span if selection else lambda entry: (entry.dim, 0, entry.length)
    found = pieces.read(folder, entries, digests, span, selection.sink if selection else None)
    for i, tensor in found.items():
        for place in entries[i].places:
            _put(contents, place, selection.value(entries[i], tensor) if selection else tensor)
    return _Found(contents, manifest["step"], folder, manifest["digest"], [], selection)


def _put(contents: dict[str, Any], place: Place, value: Any) -> None:
    """Puts a tensor where the state has None, or what was put there before."""
    inside: Any = contents
    try:
        for key in place[:-1]:
            inside = inside[key]
        before = inside[place[-1]]
    except (KeyError, IndexError, TypeError) as error:
        raise Damaged(f"{_STATE} has no place for {'.'.join(map(str, place))}") from error
    if type(inside) not in (dict, list) or not (before is None or (isinstance(before, Tensor) and before.is_meta)):
        raise Damaged(f"{_STATE} has something else in the place of {'.'.join(map(str, place))}")
    inside[place[-1]] = value


def _verify(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The manifest, and the bytes of the state: those that were hashed, so that they cannot change before use."""
    manifest = _inspect(folder)
    data = _read_file(folder / _STATE)
    if hashlib.sha256(data).hexdigest() != manifest["files"][_STATE]["sha256"]:
        raise Damaged(f"{_STATE} does not have the SHA-256 of the manifest")
    return manifest, data


def _inspect(folder: Path) -> dict[str, Any]:
    """The manifest, after all checks that need not read the files.

    Raises:
        Damaged: it is damaged.
        CheckpointError: it is sound but written by a newer version.
    """
    raw = _read_file(folder / _MANIFEST)
    try:
        manifest = json.loads(raw)
        # Byte for byte, so that no change goes unnoticed, not even of white space.
        if raw != _encode(manifest):
            raise Damaged(f"{_MANIFEST} does not have its own digest")
        if manifest["format"] > FORMAT:
            raise CheckpointError(f"{folder} has format {manifest['format']}, newer than {FORMAT}: update this project")
        step, files = manifest["step"], manifest["files"]
        if type(step) is not int or not isinstance(manifest["metrics"], dict) or _STATE not in files:
            raise TypeError
        if _STEP_FOLDER.fullmatch(folder.name) and folder.name != f"step_{step:08d}":
            raise Damaged(f"it is of step {step}")
        for name, entry in files.items():
            if type(entry["sha256"]) is not str or (name != _STATE and not _SHARD.fullmatch(name)):
                raise TypeError
            _require_size(folder / name, entry["bytes"])
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise Damaged(f"{_MANIFEST} cannot be understood") from error
    return manifest


def _require_size(path: Path, num_bytes: int) -> None:
    try:
        found = os.stat(path)
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror or error}") from error
    if found.st_size != num_bytes:
        raise Damaged(f"{path.name} has {found.st_size} bytes, not {num_bytes}")
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{path.name} is not a file")


def _table(manifest: dict[str, Any]) -> list[Entry]:
    """The table of tensors, if it and the files belong together."""
    try:
        entries = pieces.decode(manifest.get("tensors"))
    except ValueError as error:
        raise Damaged(f"{_MANIFEST}: {error}") from error
    contents = pieces.by_file(entries)
    files = {name: entry["bytes"] for name, entry in manifest["files"].items() if name != _STATE}
    if files != {name: pieces.size_of(items) for name, items in contents.items()}:
        raise Damaged(f"{_MANIFEST}: the files are not those that its table needs")
    return entries


def _is_sound(folder: Path, share: int = 0, num_shares: int = 1) -> bool:
    """Whether a step can be loaded, as far as a share of its files tells."""
    try:
        manifest, _ = _verify(folder)
        if "tensors" in manifest:
            _table(manifest)
        shards = sorted(name for name in manifest["files"] if name != _STATE)
        for name in shards[share::num_shares]:
            pieces.verify(folder / name, manifest["files"][name]["bytes"], manifest["files"][name]["sha256"])
    except Damaged:
        return False
    return True


def _read_file(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device could last for ever
            raise Damaged(f"{path.name} is not a file")
        return path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror or error}") from error


def _encode(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest; its `digest` is the SHA-256 of the compact form of all the rest."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    compact = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(compact.encode()).hexdigest()
    return (json.dumps({**rest, "digest": digest}, sort_keys=True, indent=2, allow_nan=False) + "\n").encode()


def _unpickle(data: bytes, path: Path) -> dict[str, Any]:
    """Plain data from the bytes of a `state.pt`, or CheckpointError."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > len(data):
                raise ValueError("it is compressed")
        contents = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True, mmap=False)
        _require_plain(contents, len(data))
    except Exception as error:  # a hostile file can make the readers raise anything
        reason = str(error).split("WeightsUnpickler error: ")[-1].strip() or _type_name(error)
        raise CheckpointError(f"{path}: refused: {reason.splitlines()[0]}") from error
    if not isinstance(contents, dict) or type(contents.get("format")) is not int:
        raise CheckpointError(f"{path}: refused: it is not a checkpoint of this project (it has no `format`)")
    if contents["format"] > FORMAT:
        raise CheckpointError(f"{path} has format {contents['format']}, newer than {FORMAT}: update this project")
    if not (isinstance(contents.get("progress"), dict) and isinstance(contents.get("config"), dict)):
        raise CheckpointError(f"{path}: refused: progress and config are not dictionaries")
    return contents


def _require_plain(contents: object, num_bytes: int) -> None:
    """Raises ValueError at any other type, and at tensors that claim more memory than the file has."""
    storages: dict[int, int] = {}
    for where, tensor in _tensors(contents):
        _require_dense(tensor, where)
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        if tensor.numel() * tensor.element_size() > storage.nbytes():
            raise ValueError(f"{where} is larger than its data")
    if sum(storages.values()) > num_bytes:
        raise ValueError("its tensors are larger than the file")


def _tensors(value: object, where: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(key, f"a key of {where or 'it'}")
            yield from _tensors(item, _join(where, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, _join(where, index))
    elif type(value) not in _SCALARS:
        raise ValueError(f"{where} is a {_type_name(value)}")


# From parts to bytes.


def _state(part: Part, *, keep: bool = True) -> Any:
    """Its state dict, whole where ranks hold parts; then collective."""
    if isinstance(part, Optimizer) and is_cut(part):
        return whole_state(part, keep=keep)
    return gathered(part.state_dict(), keep=keep)


def _own_state(part: Part) -> Mapping[str, Any]:
    """What this rank has of a part; of an optimizer whose state lies in slices all of it. Collective for those only."""
    if isinstance(part, Optimizer) and is_cut(part):
        return whole_state(part)
    own = getattr(part, "sharded_state_dict", None)
    return part.state_dict() if own is None else own()


def _net_of(part: Part) -> nn.Module | None:
    """The network whose state dict that of a part is: itself, or an average."""
    net = part if isinstance(part, nn.Module) else getattr(part, "model", None)
    return net if isinstance(net, nn.Module) else None


def _share_out(
    parts: Mapping[str, Part], states: Mapping[str, Any], rank: int, num_ranks: int
) -> tuple[list[Entry], list[tuple[int, int, int, str, Tensor]], dict[str, Any]]:
    """Which rank writes what. Every rank comes to the same result by itself, but for the tensors.

    What lies over ranks is written by those who have it, copies of it in turns. Weights and their moments that every
    rank has are shared out. All else is what it is on rank 0: small, or not the same everywhere, as running statistics.

    Returns:
        The table without its pieces; (number, start, stop, "parts" or "whole", tensor) for each piece that this rank
        writes; the states with None in place of the tensors of the table.
    """
    entries: list[Entry] = []
    mine: list[tuple[int, int, int, str, Tensor]] = []
    numbers: dict[Any, int] = {}
    num_bytes = [0] * num_ranks

    def share(place: Place, value: Any, same_as: Any, is_replica: bool) -> bool:
        if not (
            isinstance(value, Slice) or is_part(value) or (is_replica and value.ndim and value.dtype in pieces.NAMES)
        ):
            return False
        if same_as in numbers:
            i = numbers[same_as]
            entries[i] = replace(entries[i], places=(*entries[i].places, place))
            return True
        own = value if isinstance(value, Slice) else slice_of(value) if is_part(value) else Slice(value, 0, len(value))
        if own.tensor.dtype not in pieces.NAMES:
            raise ValueError(
                f"{'.'.join(map(str, place))} has the dtype {own.tensor.dtype}, which cannot be saved in pieces"
            )
        i = numbers[same_as] = len(entries)
        entries.append(Entry((place,), own.tensor.dtype, own.shape, own.dim))
        if isinstance(value, Slice):
            writes = True
        elif is_part(value):
            number, count = replicas(value)
            writes = i % count == number
        else:
            writer = num_bytes.index(min(num_bytes))
            num_bytes[writer] += value.numel() * value.element_size()
            writes = writer == rank
        if writes and own.tensor.numel():
            is_cut = isinstance(value, Slice) or own.stop - own.start < own.total
            mine.append((i, own.start, own.stop, "parts" if is_cut else "whole", own.tensor))
        return True

    rest = {}
    for name, part in parts.items():
        shared = _shared_names(part)
        sizes = {}
        if isinstance(part, Optimizer):
            sizes = {number: parameter.shape for number, parameter in _parameters(part, states[name]["param_groups"])}

        def walk(value: Any, place: Place, shared: Any = shared, sizes: Any = sizes) -> Any:
            if isinstance(value, Tensor | Slice):
                inside = place[1:]
                is_moment = len(inside) == 3 and inside[0] == "state" and value.shape == sizes.get(inside[1])
                is_weight = len(inside) == 1 and inside[0] in shared
                same_as = (place[0], shared.get(inside[0], inside)) if len(inside) == 1 else place
                return None if share(place, value, same_as, is_moment or is_weight) else value
            if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
                return {key: walk(item, (*place, key)) for key, item in value.items()}
            return [walk(item, (*place, i)) for i, item in enumerate(value)] if isinstance(value, list) else value

        rest[name] = walk(states[name], (name,))
    return entries, mine, rest


def _shared_names(part: Part) -> dict[str, int]:
    """Plain names of the weights of a network or of its average, and what tied ones have in common."""
    net = _net_of(part)
    if net is None:
        return {}
    weights = dict(net.named_parameters(remove_duplicate=False))
    return {plain: id(weights[name]) for plain, name in _plain_names(net, weights).items()}


class _Copies:
    """Copies of tensors in host memory that the next save uses again; pinned for what comes from a GPU."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        """In the order of their use."""
        self._free: dict[Any, deque[Tensor]] = {}
        self._devices: set[torch.device] = set()
        self._on_their_way: list[torch.cuda.Event] = []

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Makes and writes memory for copies of such tensors; they may be on the device meta."""
        self._buffers += [_host_memory(tensor).zero_() for tensor in tensors]

    def begin(self) -> None:
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            self._free.setdefault(_kind(buffer, buffer.is_pinned()), deque()).append(buffer)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy that is there after `wait`."""
        free = self._free.get(_kind(tensor, tensor.is_cuda))
        buffer = free.popleft() if free else _host_memory(tensor)
        self._buffers.append(buffer.copy_(tensor, non_blocking=tensor.is_cuda))
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return buffer

    def end(self) -> None:
        """From here on the tensors may change, by what their device does next. Forgets buffers that nothing used."""
        self._free.clear()
        for device in self._devices:
            self._on_their_way.append(torch.cuda.Event(blocking=True))
            self._on_their_way[-1].record(torch.cuda.current_stream(device))
        self._devices.clear()

    def wait(self) -> None:
        """Waits for what is on its way."""
        while self._on_their_way:
            self._on_their_way.pop().synchronize()


def _kind(tensor: Tensor, pinned: bool) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride(), pinned


def _host_memory(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


@contextlib.contextmanager
def _saving(target: Path, num_bytes: int = 0) -> Iterator[None]:
    """An error of the system inside becomes a SaveError."""
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"cannot save {target}: {error.strerror or error} ({num_bytes} bytes needed, "
            f"{_free_bytes(target.parent)} free). Earlier checkpoints are intact."
        ) from error


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _portable(part: Part, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state as it goes to the file: plain names, learning rates as numbers, and the class of an optimizer."""
    if isinstance(part, nn.Module):
        return {plain: state[name] for plain, name in _plain_names(part, state).items()}
    if isinstance(part, Optimizer):
        groups = [
            {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
            for group in state["param_groups"]
        ]
        return {**state, "param_groups": groups, "class": type(part).__name__}
    return state


def _plain_names(net: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Plain name -> the name in `net.state_dict()`, which has a component more for every wrapper on the way."""
    wrappers = []
    for path, module in net.named_modules(remove_duplicate=False):
        inner = None
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = "module"
        elif "_orig_mod" in dict(module.named_children()):  # torch.compile; importing its class would cost 2 s
            inner = "_orig_mod"
        if inner:
            prefix = f"{path}." if path else ""
            wrappers.append((f"{prefix}{inner}.", prefix))
    plain_names = {}
    for name in names:
        plain = name
        for wrapped, prefix in reversed(wrappers):  # innermost first: its path has the outer ones in it
            if plain.startswith(wrapped):
                plain = prefix + plain[len(wrapped) :]
        plain_names[plain] = name
    return plain_names


Data = Sequence[bytes | bytearray | memoryview]
"""The contents of a file, in order."""


def _serialise(contents: dict[str, Any]) -> Data:
    """What `_plain` returned as the contents of a file, which look into its large tensors and copy the rest.

    torch.save to a full disk raises "unexpected pos" instead of the reason, and to memory would copy all once more,
    holding the interpreter's lock.
    """
    file = _Collector(tensor for _, tensor in _tensors(contents))
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # four times as fast, and the SHA-256 is stronger
    try:
        torch.save(contents, cast(Any, file))
    finally:
        torch.serialization.set_crc32_options(crc)
    return file.data


class _Collector:
    """A file for torch.save."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.data: list[bytearray | memoryview] = [bytearray()]
        self._large: dict[int, memoryview] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() >= _LARGE:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
                self._large[storage.data_ptr()] = whole.numpy().data

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        known = None
        if len(view) >= _LARGE:  # torch hands over the memory of the tensor itself
            known = self._large.get(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        if known is not None and len(known) == len(view):
            self.data += [known, bytearray()]
        else:
            last = self.data[-1]
            assert isinstance(last, bytearray)
            last += view
        return len(view)

    def flush(self) -> None:
        pass


def _digest(data: Data) -> dict[str, Any]:
    """The entry of a file in the manifest."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(part)
    return {"bytes": sum(map(len, data)), "sha256": digest.hexdigest()}


def _plain(
    value: Any, where: str, copies: dict[tuple[Any, ...], Tensor], to_host: Callable[[Tensor], Tensor] = Tensor.cpu
) -> Any:
    """The same in plain containers and plain CPU tensors that own exactly their data; what was shared stays shared."""
    if isinstance(value, Tensor):
        _require_dense(value, where)
        tensor = value.detach()
        key = _same(tensor)
        if key not in copies:
            copy = to_host(tensor.resolve_conj().resolve_neg())
            is_view = copy.untyped_storage().nbytes() != copy.numel() * copy.element_size()
            copies[key] = copy.clone() if is_view else copy  # torch.save would write all that a view looks into
        return copies[key]
    if isinstance(value, dict):
        for key in value:
            if type(key) not in _SCALARS:
                raise ValueError(f"{where} has a {_type_name(key)} as a key; a checkpoint takes str, int, float, bool")
        return {key: _plain(item, _join(where, key), copies, to_host) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, _join(where, index), copies, to_host) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value) not in _SCALARS:
        raise ValueError(
            f"{where} is a {_type_name(value)}; a checkpoint takes tensors, str, int, float, bool, None, list, tuple"
            " and dict"
        )
    if type(value) is int and value.bit_length() > 2000:  # pickle has a code for longer ones that a safe load lacks
        raise ValueError(f"{where} is an integer of {value.bit_length()} bits")
    return value


def _same(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors that show the same memory in the same way."""
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _all_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _all_tensors(item)


def _copied(value: Any) -> Any:
    if is_part(value):
        value = slice_of(value)
    if isinstance(value, Slice):
        return replace(value, tensor=_copied(value.tensor))
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, list | tuple) else value


def _require_dense(tensor: Tensor, where: str) -> None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise ValueError(f"{where} is a {_type_name(tensor)} ({tensor.layout}); gather it into a plain dense tensor")
    if tensor.is_meta or tensor.is_quantized:
        raise ValueError(f"{where} is a meta or quantized tensor")


def _finite(value: Any) -> float | None:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None


# From the file to parts.


def _compare_net(net: nn.Module, state: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What does not fit; and what will be converted, because it is floating point here and there but not the same."""
    live = net.state_dict()
    here = {plain: live[name] for plain, name in _plain_names(net, live).items()}
    missing, shapes, types, converted = [], [], [], []
    for key, new in here.items():
        old = state.get(key)
        if key not in state:
            missing.append(key)
        elif not isinstance(new, Tensor):  # what a module's get_extra_state returned
            continue
        elif not isinstance(old, Tensor):
            types.append(f"{key} is a {_type_name(old)}")
        elif old.shape != new.shape:
            shapes.append(f"{key} is {tuple(old.shape)} there and {tuple(new.shape)} here")
        elif old.dtype != new.dtype:
            both_float = old.is_floating_point() and new.is_floating_point()
            (converted if both_float else types).append(f"{key} is {old.dtype} there and {new.dtype} here")
    unexpected = [str(key) for key in state if key not in here]
    misfits = {"lacks": missing, "also has": unexpected, "has other shapes:": shapes, "has other types:": types}
    return [f"{what} {_first(items)}" for what, items in misfits.items() if items], converted


def _compare_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> Iterator[str]:
    """What does not fit."""
    groups, states = state.get("param_groups"), state.get("state")
    if not (
        isinstance(states, dict)
        and isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and all(type(number) is int for group in groups for number in group["params"])
    ):
        yield "is not the state of an optimizer"
        return
    here, there = type(optimizer).__name__, state.get("class")
    if there not in (None, here):
        yield f"is the state of {there}, not of {here}"
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in groups]
    if sizes != saved_sizes:
        yield f"has groups of {saved_sizes} parameters there and {sizes} here"
        return
    shapes = []
    for number, parameter in _parameters(optimizer, groups):
        entry = states.get(number, {})
        for key in _LIKE_PARAMETER.intersection(entry if isinstance(entry, dict) else {}):
            if isinstance(entry[key], Tensor) and entry[key].shape != parameter.shape:
                shapes.append(f"{number}.{key} is {tuple(entry[key].shape)} there and {tuple(parameter.shape)} here")
    if shapes:
        yield f"has other shapes: {_first(shapes)}"


def _load_part(part: Part, state: dict[str, Any], exact: bool) -> None:
    if isinstance(part, nn.Module):
        names = _plain_names(part, part.state_dict())
        load_state(part, {names[plain]: value for plain, value in state.items()})
    elif isinstance(part, Optimizer):
        _load_optimizer(part, state, exact)
    elif state or not isinstance(part, torch.amp.GradScaler):  # torch's own scaler raises at {}; it is fresh already
        part.load_state_dict(state)


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any], exact: bool) -> None:
    """Takes the state only: a group's `fused` of the file would switch it on or off here, and its `lr` be a new tensor.

    Args:
        optimizer: keeps its very groups.
        state: of the same number of parameters per group.
        exact: the parameters have the dtypes of the file, and so must their states.
    """
    groups = optimizer.param_groups
    saved = [{**group, "params": old["params"]} for group, old in zip(groups, state["param_groups"], strict=True)]
    numbers = [number for number, _ in _parameters(optimizer, saved)]
    states = slices_of(optimizer, dict(state["state"]), numbers)
    for number, parameter in _parameters(optimizer, saved):
        if number in states:
            laid_out = {key: _laid_out(value, parameter) for key, value in states[number].items()}
            states[number] = {key: part_like(value, parameter) for key, value in laid_out.items()}
    optimizer.load_state_dict({"state": states, "param_groups": saved})
    optimizer.param_groups = groups
    # torch casts all but `step` to the parameter's dtype: NAdam's fp32 product of momenta to bf16, for example.
    for number, parameter in _parameters(optimizer, saved):
        live = optimizer.state[parameter]
        for key, value in states.get(number, {}).items():
            was_cast = key != "step" and isinstance(value, Tensor) and live[key].dtype != value.dtype
            if was_cast and (exact or value.dim() == 0):
                live[key] = value.to(live[key].device)


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """A state of an optimizer with the strides of its parameter.

    Fused kernels on a CPU pair the numbers by their place in memory: perf.channels_last, switched at a resume, would
    give each weight the moments of another one. Those on a GPU refuse.
    """
    if not isinstance(value, Tensor) or is_part(parameter) or value.shape != parameter.shape:
        return value
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _parameters(optimizer: Optimizer, saved_groups: list[dict[str, Any]]) -> Iterator[tuple[Any, Tensor]]:
    """Pairs of a parameter's number in the file and the parameter."""
    numbers = itertools.chain.from_iterable(group["params"] for group in saved_groups)
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return zip(numbers, parameters, strict=True)


def _first(items: list[str], count: int = 3) -> str:
    more = len(items) - count
    return ", ".join(items[:count]) + (f" and {more} more" if more > 0 else "")


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _type_name(value: object) -> str:
    return type(value).__name__


# The file system. Whatever changes it goes through `os`, call by call, so that a test can stop between any two.


def _step_folders(folder: Path) -> dict[int, Path]:
    """By number, since names sort wrongly from step 100 million on."""
    try:
        matches = [_STEP_FOLDER.fullmatch(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return {}
    return {int(match[1]): folder / match[0] for match in matches if match}


def _temporary(folder: Path, prefix: str = "") -> Path:
    return folder.parent / f".tmp-{prefix}{folder.name}-{os.getpid()}"


def _remove_leftovers(folder: Path) -> None:
    """Removes temporary folders of processes that no longer live; a failure costs space and nothing else."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            match = _TEMPORARY.fullmatch(name)
            if match and not _is_alive(int(match[1])):
                _remove(folder / name)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        os.mkdir(folder)
        _sync_folder(folder.parent)


def _write_file(path: Path, *data: bytes | bytearray | memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for rest in map(memoryview, data):
            while rest:
                rest = rest[os.write(descriptor, rest[:_CHUNK]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot do it for a folder
            raise
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for name in os.listdir(path):
            _remove(path / name)
        os.rmdir(path)
    else:
        os.unlink(path)


def _free_bytes(folder: Path) -> int | str:
    """Free space where `folder` is or would be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        space = os.statvfs(folder)
    except OSError:
        return "an unknown number"
    return space.f_bavail * space.f_frsize
