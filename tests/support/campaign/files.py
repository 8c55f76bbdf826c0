"""Files that are not what they should be: damaged ones, and ones that somebody wrote to have code executed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import os
import pickle
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from damaged import damage
from running import differing
from torch._utils import _rebuild_tensor_v2

from amp_core.checkpoints import shards
from amp_core.checkpoints.reading import find_checkpoint, read
from amp_core.config.errors import CheckpointError
from campaign import ROOT, Plan, Result
from campaign.harness import TELLING, Child, arguments, checkpoints, first, run, start


def make_run(folder: Path, *settings: str, num_ranks: int = 1) -> Path:
    """A run with three sound checkpoints, of steps 2, 4 and 6."""
    # From a scale that comes down within these steps.
    command = arguments(*TELLING, "amp.init_scale=131072", "steps=6", "save_every=2", "checkpoint.keep=3", *settings)
    codes = run(folder, command, num_ranks=num_ranks)
    assert codes == [0] * num_ranks, folder.with_name(f"{folder.name}.0.txt").read_text()
    return folder


def damaged(plan: Plan) -> Result:
    """Checkpoints that are damaged: none is accepted, the newest sound one is used, each bad one is named."""
    result = Result()
    _damaged(plan, make_run(plan.inside("damage") / "run"), result)
    damaged_shards(plan, result)
    return result


def damaged_shards(plan: Plan, result: Result | None = None) -> Result:
    """The same in shards, written by two ranks."""
    result = Result() if result is None else result
    _damaged(plan, make_run(plan.inside("shards") / "run", "checkpoint=sharded", num_ranks=2), result)
    return result


def _damaged(plan: Plan, folder: Path, result: Result) -> None:
    steps = checkpoints(folder)
    is_sharded = any(steps[0].glob("*.safetensors"))
    sound = {path: read(path) for path in steps}
    copy = shutil.copytree(folder, folder.with_name("sound"))

    def mend() -> None:
        for path in steps:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(copy / "checkpoints" / path.name, path)

    loop, short, long = ("damage of shards", 40, 1000) if is_sharded else ("damage", 90, 1000)
    for case, rng in plan.cases(loop, short=short, long=long):
        broken = rng.choice([[2], [2], [2], [1, 2], [1], [0, 1, 2]])
        others = [copy / "checkpoints" / path.name for path in steps]
        what = ", ".join(damage(steps[i], others[(i + 1) % 3], rng) for i in broken)
        expected = max((i for i in range(3) if i not in broken), default=None)
        newer = [steps[i] for i in broken if expected is None or i > expected]
        result.counts[f"damaged checkpoints{' in shards' if is_sharded else ''}"] += len(broken)
        notes: list[str] = []
        try:
            taken = find_checkpoint(folder)
            contents, notes = taken.contents, list(taken.notes)
        except CheckpointError as error:
            notes = [str(error)]
            result.expect(expected is None, case, f"{what}: refused although one is sound: {error}")
        except Exception as error:
            result.expect(False, case, f"{what}: {type(error).__name__}: {error}")
        else:
            if result.expect(expected is not None, case, f"{what}: accepted although none is sound"):
                found = differing(sound[steps[expected or 0]], contents)
                result.expect(not found, case, f"{what}: accepted, with other contents: {first(found)}")
        said = " ".join(notes)
        result.expect(all(str(path) in said for path in newer), case, f"{what}: not named in {said!r}")
        mend()


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


class System(Evil):
    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


class Evaluated(Evil):
    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.canary)!r}, 'w')",)


class Built(Evil):
    """Through the state of an innocent class instead of a call of its own."""

    def __reduce__(self) -> Any:
        return _rebuild_tensor_v2, (System(self.canary), 0, (1,), (1,), False, {})


EVILS = (Evil, System, Evaluated, Built)


def _saved(contents: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(contents, buffer, **options)
    return buffer.getvalue()


def payloads(canary: Path) -> dict[str, bytes]:
    """Hostile files by name."""
    found: dict[str, bytes] = {}
    entries = ("model", "optimizer", "scaler", "schedule", "ema", "progress", "config", "format")
    for kind in EVILS:
        evil = kind(canary)
        found[f"{kind.__name__} as a raw pickle"] = pickle.dumps(evil)
        found[f"{kind.__name__} as a raw pickle of protocol 0"] = pickle.dumps(evil, 0)
        found[f"{kind.__name__} in the old format"] = _saved(evil, _use_new_zipfile_serialization=False)
        for entry in entries:
            whole = {"scaler": {}, "model": {}, "progress": {"step": 1}, "config": {}, "format": 1} | {entry: evil}
            found[f"{kind.__name__} as {entry}"] = _saved(whole)
        found[f"{kind.__name__} as a key"] = _saved({"format": 1, "config": {(1, evil.__reduce__): evil}})
    tag = f"!!python/object/apply:os.system ['touch {canary}']\n".encode()
    found["a YAML tag"] = b"a: " + tag
    found["a bare YAML tag"] = tag
    found["a YAML constructor"] = f"!!python/object/new:pathlib.Path ['{canary}']\n".encode()
    found["a target"] = f"_target_: os.system\ncommand: touch {canary}\n".encode()
    found["an interpolation"] = b"steps: ${eval:1}\nrecipe: ${oc.create:1}\n"
    found["JSON with a target"] = json.dumps({"_target_": "os.system", "eval": {"_target_": "os.system"}}).encode()
    return found


def forge(folder: Path, data: bytes, step: int) -> None:
    """A step folder whose manifest is right, written by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.pt").write_bytes(data)
    _seal(folder, step, {"state.pt": data}, {})


def forge_shard(folder: Path, data: bytes) -> None:
    """A checkpoint in shards whose manifest is right, with `data` in the place of a shard."""
    name = "whole_00000.safetensors"
    place = [["model", "weight"]]
    entries = shards.decode(
        [{"places": place, "dtype": "U8", "shape": [len(data)], "dim": 0, "pieces": [[0, len(data), name]]}]
    )
    rest = max(1, len(data) - len(shards.head_of(shards.by_file(entries)[name])))
    entries = [dataclasses.replace(entries[0], shape=(rest,), shards=(shards.Shard(0, rest, name),))]
    data = data.ljust(shards.size_of(shards.by_file(entries)[name]), b"\0")
    whole = {"scaler": {}, "model": {"weight": None}, "progress": {"step": 1}, "config": {}, "format": 1, "sharded": 1}
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"state.pt": _saved(whole), name: data[: shards.size_of(shards.by_file(entries)[name])]}
    for file, inside in contents.items():
        (folder / file).write_bytes(inside)
    _seal(folder, 1, contents, {"tensors": shards.encode(entries)})


def _seal(folder: Path, step: int, contents: dict[str, bytes], more: dict[str, Any]) -> None:
    files = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
    manifest: dict[str, Any] = {"format": 1, "step": step, "files": files, "metrics": {}} | more
    compact = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["digest"] = hashlib.sha256(compact.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest, sort_keys=True, indent=2) + "\n")


def pickles(plan: Plan) -> Result:
    """Files that carry code, in every place where a file is read: refused, and nothing is executed."""
    result = Result()
    work = plan.inside("pickles")
    canary = work / "executed"
    template = make_run(work / "template")
    hostile = payloads(canary)
    places = _places(template)
    result.facts["kinds of files"] = f"{len(hostile)}, in {len(places)} places"
    direct = [name for name in hostile if "pickle" in name or " as " in name or "format" in name]
    for number, name in enumerate(direct):  # straight to the reader: all of them, they take a millisecond
        forge(work / "direct" / "step_00000001", hostile[name], 1)
        (work / "alone.pt").write_bytes(hostile[name])
        forge_shard(work / "shards" / "step_00000001", hostile[name])
        for path in (work / "direct", work / "alone.pt", work / "shards"):
            result.counts["hostile files read"] += 1
            try:
                read(path)
            except CheckpointError as error:
                said = "does not begin as its table says" if path.name == "shards" else "refused"
                result.expect(said in str(error), number, f"{name}: {error}")
            except Exception as error:
                result.expect(False, number, f"{name}: {type(error).__name__}: {error}")
            else:
                result.expect(False, number, f"{name}: {path.name} was accepted")
            result.expect(not canary.exists(), number, f"{name}: executed by reading {path.name}")
            canary.unlink(missing_ok=True)
    for case, rng in plan.cases("pickles", short=16, long=300):
        # Every place in turn, each time with another file.
        place, name = list(places)[case % len(places)], rng.choice(list(hostile))
        folder = shutil.copytree(template, work / "run")
        put, command = places[place]
        put(folder, hostile[name])
        line = command(folder)
        if line[0].endswith(".py"):
            child = Child(functools.partial(_script, line), folder.with_name("run.0.txt"))
        else:
            (child,) = start(folder, line)
        code = child.wait()
        result.counts["runs with a hostile file"] += 1
        what = f"{name} in {place}: exit code {code}: {child.text[-500:]}"
        result.expect(not canary.exists(), case, f"EXECUTED: {what}")
        result.expect(code in (0, 1, 2, 3) and "Traceback" not in child.text, case, what)
        canary.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        child.output.unlink()
    return result


def _script(line: list[str]) -> None:
    """Run a script of this project with its arguments."""
    sys.argv = [str(ROOT / line[0]), *line[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


Put = Callable[[Path, bytes], object]
Command = Callable[[Path], list[str]]


def _places(template: Path) -> dict[str, tuple[Put, Command]]:
    """Name of a place -> what puts a file there, and a command line that reads it."""
    longer = (*TELLING, "steps=8", "save_every=2", "checkpoint.keep=3")

    def goes_on(folder: Path) -> list[str]:
        return arguments(*longer)

    def put_in(name: str) -> Put:
        def put(folder: Path, data: bytes) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)

        return put

    def elsewhere(folder: Path, data: bytes) -> None:
        put_in("hostile.pt")(folder.parent, data)

    def records(folder: Path, data: bytes) -> None:
        data_folder = folder.with_name("records")
        data_folder.mkdir(exist_ok=True)
        (data_folder / "train.rec").write_bytes(data)
        (data_folder / "train.idx").write_text("0\t0\n1\t8\n")

    def index(folder: Path, data: bytes) -> None:
        records(folder, bytes(100))
        (folder.with_name("records") / "train.idx").write_bytes(data)

    def cifar(folder: Path, data: bytes) -> None:
        batches = folder.with_name("cifar") / "cifar-10-batches-py"
        batches.mkdir(parents=True, exist_ok=True)
        for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"):
            (batches / name).write_bytes(data)

    def images(folder: Path, data: bytes) -> None:
        for part in ("train", "val"):
            for label in ("a", "b"):
                (folder.with_name("images") / part / label).mkdir(parents=True, exist_ok=True)
                (folder.with_name("images") / part / label / "1.png").write_bytes(data)

    def teacher(folder: Path) -> list[str]:
        return arguments("steps=4", f"recipe.teacher={folder.with_name('hostile.pt')}", recipe="distillation")

    def with_data(recipe: str, *overrides: str) -> Command:
        def command(folder: Path) -> list[str]:
            shutil.rmtree(folder)  # a fresh run
            kept = [item for item in arguments(recipe=recipe) if not item.startswith(("data", "model.options"))]
            return [*kept, "steps=2", *(item.format(folder.parent) for item in overrides)]

        return command

    def sound_state(folder: Path, data: bytes) -> None:
        forge(folder / "checkpoints" / "step_00000007", data, 7)

    def resumes(folder: Path) -> list[str]:
        hostile = folder.with_name("hostile.pt")
        shutil.rmtree(folder)
        return arguments(*longer, f"resume={hostile}")

    def put_settings(folder: Path, data: bytes) -> None:
        """Where wandb, and the look for an account, read their settings: in the home and in the working folder."""
        os.environ |= {"WANDB_CONFIG_DIR": str(folder), "NETRC": str(folder / "settings"), "WANDB_MODE": "offline"}
        put_in("settings")(folder, data)

    newest = f"checkpoints/{checkpoints(template)[-1].name}"
    places: dict[str, tuple[Put, Command]] = {
        "the newest state.pt, with a right manifest": (sound_state, goes_on),
        "resume=<file>": (elsewhere, resumes),
        "recipe.teacher=<file>": (elsewhere, lambda folder: teacher(folder)),
        "train.rec": (records, with_data("face_recognition", "data=records", "data.path={}/records")),
        "train.idx": (index, with_data("face_recognition", "data=records", "data.path={}/records")),
        "the files of CIFAR-10": (cifar, with_data("classification", "data=cifar10", "data.path={}/cifar")),
        "the images of a folder": (images, with_data("classification", "data=image_folder", "data.path={}/images")),
    }
    inside = [f"{newest}/state.pt", f"{newest}/manifest.json", "summary.json", "metrics.jsonl", ".hydra/config.yaml"]
    inside += [".hydra/overrides.yaml", "environment.json", "wandb_id", "doctor/statistics.jsonl", "train.log"]
    inside += [".hydra/hydra.yaml", "doctor/report.json", ".lock", "wandb/settings", "wandb/latest-run/run.wandb"]
    inside += ["state.npy", "data.npz"]
    places |= {name: (put_in(name), goes_on) for name in inside}

    def reports(folder: Path) -> list[str]:
        return ["scripts/report.py", str(folder)]

    def locates(folder: Path) -> list[str]:
        return ["scripts/doctor.py", "locate", str(folder), "--step", "7"]

    for name in ("summary.json", ".hydra/config.yaml"):
        places[f"{name}, read by scripts/report.py"] = put_in(name), reports
    for name in (f"{newest}/state.pt", "summary.json", ".hydra/config.yaml", ".hydra/overrides.yaml", "metrics.jsonl"):
        places[f"{name}, read by scripts/doctor.py"] = put_in(name), locates
    places["the newest state.pt, with a right manifest, read by scripts/doctor.py"] = sound_state, locates
    places["wandb's settings"] = put_settings, lambda folder: arguments(*longer, "log=wandb")
    return places
