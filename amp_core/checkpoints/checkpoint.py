"""Checkpoints: named parts in one file or in one per rank, written whole or not at all, verified before use.

    checkpoint = Checkpoint("run/checkpoints", model=net, optimizer=optimizer, scaler=amp)
    checkpoint.save(step, progress={"samples": seen}, metrics={"accuracy": 0.97}, best=("accuracy", "max"))
    loaded = checkpoint.load()                       # the newest sound one, or None when there is none at all

    checkpoints/step_00000500/state.pt               one entry per part, and scaler, progress, config, format
    checkpoints/step_00000500/manifest.json          sizes, SHA-256, metrics, and a digest of itself

`torch.load(state.pt, weights_only=True)` and `net.load_state_dict(state["model"])` work without this module. With
`format="sharded"` nothing is gathered: `state.pt` has None in place of weights and moments, and each rank writes

    checkpoints/step_00000500/parts_00003.safetensors    its shards of sharded tensors
    checkpoints/step_00000500/whole_00003.safetensors    some of the tensors that all ranks have

with their table in the manifest. `load` takes either format in any layout, on any number of ranks.

A save is written under a temporary name, brought to disk, and renamed; older ones are deleted only after that: a
process that dies, or a full disk, costs at most the save in progress. Nothing is unpickled before its SHA-256 was
compared, and never with code execution allowed.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from amp_core.checkpoints import folders, parts, plain_state, reading
from amp_core.checkpoints.folders import DEFAULTS, FORMAT, RESERVED
from amp_core.checkpoints.parts import AveragedPart, Part, settings_of
from amp_core.checkpoints.reading import NoCheckpoint, Ranks
from amp_core.config.errors import CheckpointError
from amp_core.config.files import remove_leftovers
from amp_core.tensors import several_ranks

_log = logging.getLogger("amp_recipes")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded, with `progress` and `config` as they were saved."""

    step: int  # optimizer steps done
    progress: dict[str, Any]
    config: dict[str, Any]
    path: Path  # the step folder, or the file when it had no manifest
    digest: str  # SHA-256 in hex, of the file, or of the manifest if there are shards: ranks compare it
    notes: tuple[str, ...]  # for the log: rejected checkpoints, ignored or fresh parts, converted dtypes


class Checkpoint:
    """Saves and loads named parts in a folder of checkpoints.

    Names are those of unwrapped nets and full tensors, so a run may resume in any layout, on any number of ranks, and
    in the other format. One folder has one writer at a time.

    Args:
        folder: where the `step_*` folders are; made by the first save.
        keep: how many of the newest to keep, besides the best.
        writer: false for ranks above 0, which make and remove no folders, and in format `single` write nothing; their
            `save` may be collective all the same. A writer begins by removing what dead processes left there.
        format: `single`: one file, written by rank 0, on which sharded tensors are gathered. `sharded`: each rank
            writes its shards, and all ranks must see the same folder.
        background: `save` returns when everything was copied to host memory (a second copy of the state, kept for the
            next save), or from a GPU is queued to be, and a thread does the rest.
        group: of all ranks, for tensors in host memory (gloo), in the same order as by default. With it all ranks agree
            on what is loaded, and `load`, `newest_before` and, if `sharded`, `save` are collective. Nothing else may
            use it with `background`. Default: none if `single`; a new one if `sharded` on several ranks (collective).
        guard: called before anything is written; what it raises ends the save.
        parts: name -> a `Part`; None is left out.

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
        guard: Callable[[], None] | None = None,
        **parts: Part | None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest checkpoint must be kept")
        if format not in ("single", "sharded"):
            raise ValueError(f"format={format!r}: expected 'single' or 'sharded'")
        self.folder = Path(folder).absolute()
        self.keep, self.writer, self.format, self.background = keep, writer, format, background
        self.guard = guard or (lambda: None)
        self.explain: Callable[[Mapping[str, Any]], str] = lambda config: ""
        """The message for a checkpoint that does not fit, from the configuration that it was made with."""
        self.parts: dict[str, Part] = {name: part for name, part in parts.items() if part is not None}
        for name, part in self.parts.items():
            if name in RESERVED:
                raise ValueError(f"a part cannot be named {name!r}: the checkpoint has an entry of its own for it")
            if not isinstance(part, Part):
                raise ValueError(f"{name} is a {type(part).__name__}: it has no state_dict() and load_state_dict()")
            if hasattr(part, "consolidate_state_dict"):  # importing torch's class takes long, and a build may lack it
                raise ValueError(f"{name} is a {type(part).__name__}: shard its state by amp_core.layouts.zero instead")
        self._initial_groups = {name: settings_of(part) for name, part in self.parts.items()}
        if group is None and format == "sharded" and several_ranks():
            group = dist.new_group(backend="gloo")  # type: ignore[assignment] - this rank is in it
        self._ranks = Ranks(group)
        self._copies = plain_state.Copies() if background else None
        # One thread, which lives as long as this: a process that ends waits for it.
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._task: Future[None] | None = None  # the save that it writes
        self._verified: set[Path] = set()  # step folders whose files were read, or written here
        if writer:
            remove_leftovers(self.folder)

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
        and sound is left as it is; a damaged one is replaced. With `background` the step is safe once `wait` returns.

        Args:
            step: optimizer steps done; names the folder, and is added to the progress as `step`.
            progress: where the run stands, returned by `load`. The counts of a `CountingPart` are added.
            config: the configuration, returned by `load`.
            metrics: results of the evaluation at this step, if there was one; a value that is not finite becomes null.
            best: (name of a metric, "max" or "min"): also keep the checkpoint whose manifest has the best value. Pass
                it at every save, or that checkpoint is rotated out like others.

        Raises:
            SaveError: it cannot be written, or with `background` the one before could not. Earlier checkpoints are
                intact. In format `sharded` all ranks raise it.
            CheckpointError: the step exists already, written by a newer version.
            ValueError: something in it is not a tensor, str, int, float, bool, None, list, tuple or dict.
        """
        if step < 0 or (best is not None and best[1] not in ("max", "min")):
            raise ValueError(f'step={step}, best={best}: expected a count and (metric, "max" or "min")')
        target = self.folder / f"step_{step:08d}"
        counted = {**(progress or {}), **parts.counters_of(self.parts), "step": step}
        facts = {"progress": counted, "config": dict(config or {}), "format": FORMAT}
        numbers = {name: math.nan if value is None else float(value) for name, value in (metrics or {}).items()}
        # JSON has no NaN, and no best is found by it.
        finite = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        about = {"format": FORMAT, "step": step, "metrics": finite}
        states = None
        if self.format == "single":
            # First of all, since every rank must take part: only the writer may return early or fail.
            states = self._states(functools.partial(parts.full_state, keep=self.writer))
            if not self.writer:
                return target
        self.wait()
        write = self._prepare(target, states, facts, about)

        def act() -> None:
            # `save` has returned before the GPU has copied.
            if self._copies is not None:
                self._copies.wait()
            if write():
                self._remove_old(target, step, best)
            if self.background:
                _log.info("the checkpoint of step %d is on disk", step)

        if self._thread is None:
            act()
        else:
            self._task = self._thread.submit(act)
        return target

    def wait(self) -> None:
        """Waits for a background `save`. At the end, on every rank: only this and the next `save` raise SaveError."""
        task, self._task = self._task, None
        if task is not None:
            task.result()

    def _states(self, state_of: Callable[[Part], Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        initial, others = self._initial_groups, self.parts.values()
        return {
            name: parts.with_changed(part, state_of(part), initial[name], others) for name, part in self.parts.items()
        }

    def _join(self) -> None:
        """Wait, and leave raising a problem to the next `save` or `wait`."""
        if self._task is not None:
            self._task.exception()

    def _prepare(
        self, target: Path, states: Mapping[str, Any] | None, facts: dict[str, Any], about: dict[str, Any]
    ) -> Callable[[], bool]:
        """Copies what is saved: `states`, or if None this rank's shards. Returns what writes it and tells if it did."""
        from amp_core.checkpoints import sharded

        ranks = self._ranks if states is None else Ranks()
        problem: Exception | None = None
        entries, mine, contents = [], [], {}
        try:
            if states is None:
                states = self._states(parts.local_state)
                entries, mine, states = sharded.assign_shards(self.parts, states, ranks.rank, ranks.num)
                facts = {**facts, "sharded": len(entries)}
            if self.writer:
                contents = {**DEFAULTS, **states, **facts}
            # The very tensors if they are in host memory, or in the background copies that nothing changes.
            to_host = Tensor.cpu if self._copies is None else self._copies.copy
            contents = plain_state.to_plain(contents, to_host=to_host)
            mine = [(number, shard, to_host(tensor)) for number, shard, tensor in mine]
            if self._copies is not None:
                self._copies.end()
        except Exception as error:
            # Raised in `write`, on all ranks: a rank that leaves now would not be there when the others agree.
            problem = error
            if ranks.num == 1:
                raise

        def ready() -> bool:
            if problem is not None:
                raise problem
            if self.writer:
                self.guard()
            return self.writer

        def write() -> bool:
            # Raised on all ranks, so that none waits for another.
            has_writer = ranks.each(ready)[0]
            return has_writer and sharded.write_step(ranks, target, entries, mine, contents, about) and self.writer

        return write

    def _remove_old(self, target: Path, step: int, best: tuple[str, str] | None) -> None:
        try:
            self._verified.add(target)
            folders.remove_old(self.folder, step, self.keep, best, self._verify)
        except OSError as error:  # the new one is safe, and the next save tries again
            _log.warning("cannot remove an old checkpoint: %s. %s itself is safe.", error, target)

    def _verify(self, path: Path) -> bool:
        """Whether a step is sound. Its files are read once, but not if they were written here, or if `sharded`."""
        if path not in self._verified and (self.format == "sharded" or folders.is_sound(path)):
            self._verified.add(path)
        return path in self._verified

    def load(self, path: str | os.PathLike[str] | None = None) -> Loaded | None:
        """Loads all parts from the newest sound checkpoint, or from the one that is named.

        Files, networks and optimizers are checked before the first part is changed; other parts check their state when
        they load it. An optimizer's state comes from the file, also entries of its groups that are no arguments of its
        constructor. The settings of its groups stay, with a note for each that differs, except those that the saved run
        changed after its `Checkpoint` was made, and what a torch scheduler that was saved with it sets (`lr`,
        `momentum`, `betas`). A `Schedule` sets its rates itself. Tensors that hold learning rates are written in place.

        A part that the file lacks is an error, but an `AveragedPart` starts from the weights that were loaded, and a
        scaler gets `{}` (a fresh scale). A part of the file that is not here is ignored with a note. Waits for a save
        in the background. With a `group`, collective: what one rank finds damaged, none uses.

        `path` is a step folder, a `state.pt`, a folder of checkpoints (by default the own one), or a run folder.
        Returns None when no path was given and there is no checkpoint at all, neither sound nor damaged.
        CheckpointError: none is sound, it is refused, or it is of another model, and nothing was changed; or a part
        raised at its state ("does not fit"), after others were loaded.
        """
        self._join()
        try:
            found = reading.find_checkpoint(self.folder if path is None else Path(path), self._ranks, self._select)
        except NoCheckpoint:
            if path is None:
                return None
            raise
        contents, selection = found.contents, found.selection
        for name, state in selection.wanted.items():
            try:
                parts.load_part(self.parts[name], state, exact=not selection.conversions)
                parts.load_counters(name, self.parts[name], contents["progress"])
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(f"{found.path}: {name} does not fit: {error}") from error
        for part in selection.fresh:
            part.reset()  # to the weights that were loaded just now
        notes = (*found.notes, *selection.notes, *selection.conversions)
        return Loaded(found.step, contents["progress"], contents["config"], found.path, found.digest, notes)

    def _select(self, path: Path, contents: dict[str, Any]) -> reading.Selection:
        """What the parts take of a checkpoint, if it fits them. Tensors may be on the device meta."""
        wanted, fresh, notes, problems, conversions = {}, [], [], [], []
        hint = self.explain(contents["config"])
        for name, part in self.parts.items():
            if name in contents:
                misfits, converted = parts.compare(part, contents[name])
                problems += [f"{name} {misfit}" for misfit in misfits]
                if not misfits:
                    wanted[name] = contents[name]
                    notes += [f"{name}: {line}" for line in parts.settings_that_differ(part, contents[name])]
                conversions += [f"dtypes of {name} were converted: {parts.first_few(converted)}"] if converted else []
            elif isinstance(part, AveragedPart):
                fresh.append(part)
                notes.append(f"the checkpoint has no {name}: it starts from the loaded weights")
            else:
                raise CheckpointError(f"{path} has no {name}; it has {', '.join(map(str, contents))}.{hint}")
        if problems:
            raise CheckpointError(f"{path} is of another model: {'; '.join(problems)}. Nothing was loaded.{hint}")
        unused = [name for name, state in contents.items() if state and name not in (*self.parts, *RESERVED)]
        notes += [f"{name} of the checkpoint is not used here" for name in unused]
        return reading.Selection(parts.want_of(self.parts, wanted), wanted, fresh, notes, conversions)

    def newest_before(self, step: int) -> tuple[int, Path] | None:
        """The newest checkpoint of the own folder before `step`, sound or not. Collective with a `group`."""
        self._join()
        found = self._ranks.first(lambda: folders.step_folders(self.folder))
        return max(((number, path) for number, path in found.items() if number < step), default=None)

    def snapshot(self) -> dict[str, Any]:
        """A copy in host memory of what this rank has of all parts, for `restore`. Waits for the device."""
        # As if nothing was there when the run began: all settings count as changed, and are put back.
        states = {name: parts.with_changed(part, parts.local_state(part), ()) for name, part in self.parts.items()}
        return plain_state.copied(states) | {"progress": parts.counters_of(self.parts)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Puts all parts back to a snapshot of this rank, bit by bit. The snapshot may be used again."""
        for name, part in self.parts.items():
            # Optimizers keep the tensors that they are given, without a copy.
            parts.load_part(part, plain_state.copied(snapshot[name]), exact=True)
            parts.load_counters(name, part, snapshot["progress"])
