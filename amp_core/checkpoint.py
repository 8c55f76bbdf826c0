"""Checkpoints: named parts in one file, written whole or not at all, verified before use.

    checkpoint = Checkpoint("run/checkpoints", model=net, optimizer=optimizer, scaler=amp)
    checkpoint.save(step, progress={"samples": seen}, metrics={"accuracy": 0.97}, best=("accuracy", "max"))
    loaded = checkpoint.load()                       # the newest sound one, or None when there is none at all

    checkpoints/step_00000500/state.pt               one entry per part, and scaler, progress, config, format
    checkpoints/step_00000500/manifest.json          sizes, SHA-256, metrics, and a digest of itself

`torch.load(state.pt, weights_only=True)` and `net.load_state_dict(state["model"])` work without this module.

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
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core.errors import CheckpointError, SaveError
from amp_core.shards import gathered, load_state, part_like
from amp_core.zero import is_cut, slices_of, whole_state

FORMAT = 1
_STATE = "state.pt"
_MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")
_TEMPORARY = re.compile(r"\.tmp-(?:old-)?step_[0-9]{8,}-([0-9]+)")
_RESERVED = ("progress", "config", "format")
_SCALARS = (str, int, float, bool, type(None))
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
    """SHA-256 of the file, in hex: ranks compare it."""
    notes: tuple[str, ...]
    """For the log: rejected checkpoints, parts that were ignored or start afresh, converted dtypes."""


class Checkpoint:
    """Saves and loads named parts in a folder of checkpoints.

    Nets are stored unwrapped (DDP, DataParallel and torch.compile leave no trace in the names), all tensors on the CPU.
    Sharded ones, their optimizers and averages are stored whole, and each rank takes its parts of what it loads: so a
    run may go on in any layout. One folder has one writer at a time. Only `save` and `snapshot` of sharded parts
    communicate between ranks.

    Args:
        folder: where the `step_*` folders are; made by the first save.
        keep: how many of the newest to keep, besides the best.
        writer: false for ranks above 0: `save` collects the states of the parts, which may be collective, and writes
            nothing. A writer removes here what dead processes left unfinished.
        parts: name -> anything with `state_dict` and `load_state_dict`; None is left out. `scaler` and `ema` have
            rules of their own in `load`.

    Raises:
        ValueError: a reserved name, something that is not a part, or `keep` below 1.
    """

    def __init__(
        self, folder: str | os.PathLike[str], /, *, keep: int = 2, writer: bool = True, **parts: Part | None
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest checkpoint must be kept")
        self.folder = Path(folder).absolute()
        self.keep = keep
        self.writer = writer
        self.parts: dict[str, Part] = {name: part for name, part in parts.items() if part is not None}
        for name, part in self.parts.items():
            if name in _RESERVED:
                raise ValueError(f"a part cannot be named {name!r}: the checkpoint has an entry of its own for it")
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise ValueError(f"{name} is a {_type_name(part)}: it has no state_dict() and load_state_dict()")
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
        and sound is left as it is; a damaged one is replaced.

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
            SaveError: it cannot be written. Earlier checkpoints are intact.
            CheckpointError: the step is there already, written by a newer version.
            ValueError: something in it is not a tensor, str, int, float, bool, None, list, tuple or dict.
        """
        if step < 0 or (best is not None and best[1] not in ("max", "min")):
            raise ValueError(f'step={step}, best={best}: expected a count and (metric, "max" or "min")')
        target = self.folder / f"step_{step:08d}"
        # First of all, since every rank must take part: only the writer may return early or fail.
        states = {name: _state(part, keep=self.writer) for name, part in self.parts.items()}
        if not self.writer or _is_sound(target):
            return target
        contents = {"scaler": {}}
        contents |= {name: _portable(part, states[name]) for name, part in self.parts.items()}
        contents |= {"progress": {**(progress or {}), "step": step}, "config": dict(config or {}), "format": FORMAT}
        data = _serialise(contents)
        manifest = _encode(
            {
                "format": FORMAT,
                "step": step,
                "files": {_STATE: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}},
                "metrics": {name: _finite(value) for name, value in (metrics or {}).items()},
            }
        )
        try:
            self._write(target, {_STATE: data, _MANIFEST: manifest})
        except OSError as error:
            raise SaveError(
                f"cannot save {target}: {error.strerror or error} ({len(data) + len(manifest)} bytes needed, "
                f"{_free_bytes(self.folder)} free). Earlier checkpoints are intact."
            ) from error
        try:
            self._prune(step, best)
        except OSError as error:
            _log.warning("cannot remove an old checkpoint: %s. %s itself is safe.", error, target)
        return target

    def load(self, path: str | os.PathLike[str] | None = None) -> Loaded | None:
        """Loads all parts from the newest sound checkpoint, or from the one that is named.

        Everything is checked before the first part is changed. Of an optimizer only the state comes from the file: the
        hyperparameters of its groups, and the very tensors that hold learning rates, stay. Copies to the device.

        A part that the file lacks is an error, but for two: `scaler` gets `{}` (a fresh scale), and `ema` starts from
        the weights that were loaded (its `reset()`, if it has one). A part of the file that is not here is ignored
        with a note.

        Args:
            path: a step folder, a `state.pt`, a folder of checkpoints, or a run folder. Default: the own folder.

        Returns:
            None when no path was given and there is no checkpoint at all, neither sound nor damaged.

        Raises:
            CheckpointError: none is sound, it is refused, or it is of another model; nothing was changed.
        """
        found = _find(self.folder if path is None else Path(path))
        if found is None:
            if path is not None:
                raise CheckpointError(f"{path}: there is no checkpoint")
            return None
        contents, notes = found.contents, list(found.notes)
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
                raise CheckpointError(f"{found.path} has no {name}; it has {', '.join(map(str, contents))}")
        notes += [
            f"{name} of the checkpoint is not used here"
            for name, state in contents.items()
            if name not in self.parts and name not in _RESERVED and not (name == "scaler" and not state)
        ]
        conversions = self._check(found.path, wanted)
        for name, state in wanted.items():
            try:
                _load_part(self.parts[name], state, exact=not conversions)
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(f"{found.path}: {name} does not fit: {error}") from error
        for reset in fresh:
            reset()
        return Loaded(
            found.step, contents["progress"], contents["config"], found.path, found.digest, (*notes, *conversions)
        )

    def newest_before(self, step: int) -> tuple[int, Path] | None:
        """The newest checkpoint of the own folder with fewer steps than `step`, whether it is sound or not."""
        found = {number: path for number, path in _step_folders(self.folder).items() if number < step}
        return max(found.items()) if found else None

    def snapshot(self) -> dict[str, Any]:
        """A copy of all parts in host memory, for `restore`; of sharded ones whole. Waits for the device."""
        return {name: _copied(_portable(part, _state(part))) for name, part in self.parts.items()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Puts all parts back to a snapshot, bit by bit."""
        for name, state in snapshot.items():
            _load_part(self.parts[name], state, exact=True)

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

    def _write(self, target: Path, files: Mapping[str, bytes | memoryview]) -> None:
        """Every step of it must leave a folder from which the newest acknowledged checkpoint loads."""
        temporary = _temporary(target)
        try:
            _make_folder(self.folder)
            if os.path.lexists(temporary):  # of a dead process with our number, as containers give the same ones out
                _remove(temporary)
            os.mkdir(temporary)
            for name, data in files.items():
                _write_file(temporary / name, data)
            _sync_folder(temporary)
            damaged = self._set_aside(target) if os.path.lexists(target) else None
            os.rename(temporary, target)
            _sync_folder(self.folder)
            if damaged:
                with contextlib.suppress(OSError):  # the new one is safe, and the next run tries again
                    _remove(damaged)
        finally:
            with contextlib.suppress(OSError):
                if os.path.lexists(temporary):
                    _remove(temporary)

    def _prune(self, current: int, best: tuple[str, str] | None) -> None:
        """Removes what is neither among the newest nor the best. Damaged ones do not count, and stay."""
        metrics: dict[int, dict[str, Any]] = {}
        folders = _step_folders(self.folder)
        for step, folder in folders.items():
            with contextlib.suppress(_Rejected, CheckpointError):
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
    """Reads a checkpoint with no parts at hand: verified as in `Checkpoint.load`, tensors on the CPU.

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


class _Rejected(Exception):
    """Damaged: the one before is used."""


@dataclass(frozen=True)
class _Found:
    contents: dict[str, Any]
    step: int
    path: Path
    digest: str
    notes: list[str]


def _find(path: Path) -> _Found | None:
    """The checkpoint that `path` means: the named one, or the newest sound one of a folder; None if that has none."""
    try:
        if path.is_file():
            if path.name == _STATE and (path.parent / _MANIFEST).exists():
                return _open(path.parent)
            data = path.read_bytes()
            contents = _unpickle(data, path)
            step = contents["progress"].get("step")
            note = f"{path} has no {_MANIFEST}: it was not verified"
            return _Found(contents, step if type(step) is int else 0, path, hashlib.sha256(data).hexdigest(), [note])
        if _STEP_FOLDER.fullmatch(path.name) or (path / _MANIFEST).exists() or (path / _STATE).exists():
            return _open(path)
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        candidates = _step_folders(folder)
    except _Rejected as rejected:
        raise CheckpointError(f"{path} is damaged: {rejected}") from rejected
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    notes: list[str] = []
    for _, candidate in sorted(candidates.items(), reverse=True):
        try:
            found = _open(candidate)
        except _Rejected as rejected:
            notes.append(f"{candidate} is damaged and was not used: {rejected}")
        else:
            found.notes.extend(notes)
            return found
    if notes:
        raise CheckpointError("no checkpoint is sound: " + "; ".join(notes))
    return None


def _open(folder: Path) -> _Found:
    manifest, data = _verify(folder)
    contents = _unpickle(data, folder / _STATE)
    return _Found(contents, manifest["step"], folder, manifest["files"][_STATE]["sha256"], [])


def _verify(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The manifest, and the bytes of the state: those that were hashed, so that they cannot change before use."""
    manifest = _inspect(folder)
    data = _read_file(folder / _STATE)
    if hashlib.sha256(data).hexdigest() != manifest["files"][_STATE]["sha256"]:
        raise _Rejected(f"{_STATE} does not have the SHA-256 of the manifest")
    return manifest, data


def _inspect(folder: Path) -> dict[str, Any]:
    """The manifest, after all checks that need not read the state.

    Raises:
        _Rejected: it is damaged.
        CheckpointError: it is sound but written by a newer version.
    """
    raw = _read_file(folder / _MANIFEST)
    try:
        manifest = json.loads(raw)
        # Byte for byte, so that no change goes unnoticed, not even of white space.
        if raw != _encode(manifest):
            raise _Rejected(f"{_MANIFEST} does not have its own digest")
        if manifest["format"] > FORMAT:
            raise CheckpointError(f"{folder} has format {manifest['format']}, newer than {FORMAT}: update this project")
        step, entry = manifest["step"], manifest["files"][_STATE]
        size = os.stat(folder / _STATE).st_size
        if type(step) is not int or type(entry["sha256"]) is not str or not isinstance(manifest["metrics"], dict):
            raise TypeError
        if _STEP_FOLDER.fullmatch(folder.name) and folder.name != f"step_{step:08d}":
            raise _Rejected(f"it is of step {step}")
        if size != entry["bytes"]:
            raise _Rejected(f"{_STATE} has {size} bytes, not {entry['bytes']}")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise _Rejected(f"{_MANIFEST} cannot be understood") from error
    except OSError as error:
        raise _Rejected(f"{_STATE}: {error.strerror or error}") from error
    return manifest


def _is_sound(folder: Path) -> bool:
    try:
        _verify(folder)
    except _Rejected:
        return False
    return True


def _read_file(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device could last for ever
            raise _Rejected(f"{path.name} is not a file")
        return path.read_bytes()
    except OSError as error:
        raise _Rejected(f"{path.name}: {error.strerror or error}") from error


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
        elif "_orig_mod" in module._modules:  # torch.compile; importing its class would cost 2 s
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


def _serialise(contents: dict[str, Any]) -> memoryview:
    """To memory, since torch.save to a full disk raises "unexpected pos" instead of the reason."""
    buffer = io.BytesIO()
    plain = _plain(contents, "", {})
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # four times as fast, and the SHA-256 is stronger
    try:
        torch.save(plain, buffer)
    finally:
        torch.serialization.set_crc32_options(crc)
    return buffer.getbuffer()


def _plain(value: Any, where: str, copies: dict[tuple[Any, ...], Tensor]) -> Any:
    """The same in plain containers and plain CPU tensors that own exactly their data; what was shared stays shared."""
    if isinstance(value, Tensor):
        _require_dense(value, where)
        tensor = value.detach()
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies:
            copy = tensor.resolve_conj().resolve_neg().cpu()
            is_view = copy.untyped_storage().nbytes() != copy.numel() * copy.element_size()
            copies[key] = copy.clone() if is_view else copy  # torch.save would write all that a view looks into
        return copies[key]
    if isinstance(value, dict):
        for key in value:
            if type(key) not in _SCALARS:
                raise ValueError(f"{where} has a {_type_name(key)} as a key; a checkpoint takes str, int, float, bool")
        return {key: _plain(item, _join(where, key), copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, _join(where, index), copies) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value) not in _SCALARS:
        raise ValueError(
            f"{where} is a {_type_name(value)}; a checkpoint takes tensors, str, int, float, bool, None, list, tuple"
            " and dict"
        )
    if type(value) is int and value.bit_length() > 2000:  # pickle has a code for longer ones that a safe load lacks
        raise ValueError(f"{where} is an integer of {value.bit_length()} bits")
    return value


def _copied(value: Any) -> Any:
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
            states[number] = {key: part_like(value, parameter) for key, value in states[number].items()}
    optimizer.load_state_dict({"state": states, "param_groups": saved})
    optimizer.param_groups = groups
    # torch casts all but `step` to the parameter's dtype: NAdam's fp32 product of momenta to bf16, for example.
    for number, parameter in _parameters(optimizer, saved):
        live = optimizer.state[parameter]
        for key, value in states.get(number, {}).items():
            was_cast = key != "step" and isinstance(value, Tensor) and live[key].dtype != value.dtype
            if was_cast and (exact or value.dim() == 0):
                live[key] = value.to(live[key].device)


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


def _write_file(path: Path, data: bytes | memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        rest = memoryview(data)
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
