"""Saving: the process dies at every call, the machine loses its power after every call, every call fails.

A killed process leaves what it wrote. A machine without power leaves what was brought to disk, and any part of the
rest: `Disk` follows the calls and knows which. All is enumerated call by call for each way in which a save can go.
"""

from __future__ import annotations

import errno
import itertools
import operator
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import system_calls
from system_calls import Call, Calls
from torch import nn

from amp_core.checkpoints import folders
from amp_core.checkpoints.checkpoint import Checkpoint
from amp_core.config import files
from amp_core.config.errors import CheckpointError, SaveError
from campaign import Plan, Result
from campaign.harness import Child


def net_of(step: int) -> nn.Linear:
    net = nn.Linear(16, 16)
    nn.init.constant_(net.weight, float(step))
    nn.init.constant_(net.bias, float(step))
    return net


def save(folder: Path, step: int, accuracy: float | None = None, **way: Any) -> None:
    metrics = None if accuracy is None else {"accuracy": accuracy}
    checkpoint = Checkpoint(folder, model=net_of(step), **way)
    checkpoint.save(step, metrics=metrics, best=("accuracy", "max"))
    checkpoint.wait()


@dataclass(frozen=True)
class Scene:
    """A save, and what there was before it."""

    before: Callable[[Path], None]
    step: int
    kept: frozenset[int]
    """Steps that were acknowledged and must outlive the save."""
    damaged: frozenset[int] = frozenset()
    """Steps that are damaged from the start."""
    way: dict[str, Any] = field(default_factory=dict)
    """How it is saved: format, background."""
    is_short: bool = True
    """In the short form, too."""


def _one(folder: Path) -> None:
    save(folder, 1)


def _three(folder: Path) -> None:
    for step, accuracy in ((1, 0.9), (2, 0.1), (3, 0.2)):
        save(folder, step, accuracy)


def _damaged(folder: Path) -> None:
    save(folder, 1)
    save(folder, 2)
    (folder / "step_00000002" / "state.pt").write_bytes(b"damaged")


def _damaged_shard(folder: Path) -> None:
    for step in (1, 2):
        save(folder, step, None, **SHARDS)
    (folder / "step_00000002" / "whole_00000.safetensors").write_bytes(b"damaged")


def _leftovers(folder: Path) -> None:
    save(folder, 1)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for name in (f".tmp-step_00000002-{pid}", f".tmp-old-step_00000000-{pid}"):
        shutil.copytree(folder / "step_00000001", folder / name)


SHARDS = {"format": "sharded"}
BEHIND = {"background": True}
SCENES = {
    "the first save": Scene(lambda _: None, 1, frozenset()),
    "the next save": Scene(_one, 2, frozenset({1})),
    "the same step again": Scene(_one, 1, frozenset({1})),
    "a damaged step replaced": Scene(_damaged, 2, frozenset({1}), frozenset({2})),
    "pruning": Scene(_three, 4, frozenset({1, 3})),
    "leftovers removed": Scene(_leftovers, 2, frozenset({1})),
    "the next save, in shards": Scene(_one, 2, frozenset({1}), way=SHARDS),
    "the next save, in the background": Scene(_one, 2, frozenset({1}), way=BEHIND),
    "a damaged step replaced, in shards": Scene(
        _damaged_shard, 2, frozenset({1}), frozenset({2}), way=SHARDS, is_short=False
    ),
    "pruning, in shards, in the background": Scene(_three, 4, frozenset({1, 3}), way=SHARDS | BEHIND, is_short=False),
}


def _patched_save(folder: Path, scene: Scene, calls: Calls) -> None:
    system_calls.use(calls)
    setattr(files, "_CHUNK", 1000)  # noqa: B010 - several writes for one file
    save(folder, scene.step, 0.0, **scene.way)


def wrong_with(folder: Path, scene: Scene, acknowledged: bool) -> Iterator[str]:
    """What is wrong in a folder after a save that was cut short; then the next process goes on there."""
    kept = scene.kept | ({scene.step} if acknowledged else set())
    net = net_of(-1)
    try:
        loaded = Checkpoint(folder, writer=False, model=net).load()
    except CheckpointError as error:
        yield f"nothing loads: {error}"
        return
    newest = max(kept, default=0)
    if loaded is None:
        if newest:
            yield f"step {newest} was acknowledged, and nothing is found"
    elif loaded.step not in (newest, scene.step) or loaded.step < newest or net.weight.mean().item() != loaded.step:
        yield f"step {loaded.step} with weights of {net.weight.mean().item():g} was loaded instead of {newest}"
    found = folders.step_folders(folder)
    yield from (f"acknowledged step {step} is gone" for step in sorted(kept - set(found)))
    for step, path in found.items():
        if step not in scene.damaged and not folders.is_sound(path):
            yield f"{path.name} is damaged"
    save(folder, 8, **scene.way)
    left = sorted(entry.name for entry in folder.iterdir())
    if Checkpoint(folder, model=net).load() is None or net.weight.mean().item() != 8:
        yield f"the next process cannot go on: {left}"
    if any(name.startswith(".tmp") for name in left):
        yield f"something is left for ever: {left}"


class Stage:
    """A folder that is put back to how it was before each try."""

    def __init__(self, work: Path, scene: Scene) -> None:
        self.template, self.run = work / "template", work / "run"
        self.folder = self.run / "checkpoints"
        self.output = work / "output.txt"
        self.template.mkdir(parents=True)
        scene.before(self.template / "checkpoints")

    def reset(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.template, self.run)

    def trace(self, scene: Scene) -> list[Call]:
        """The calls of the whole save, made by a process that is gone afterwards."""
        self.reset()

        def act() -> None:
            calls = Calls()
            _patched_save(self.folder, scene, calls)
            self.run.with_name("trace").write_bytes(pickle.dumps(calls.trace))

        assert Child(act, self.output).wait() == 0, self.output.read_text()
        return pickle.loads(self.run.with_name("trace").read_bytes())  # our own child wrote it


def saves(plan: Plan) -> Result:
    """Deaths, power cuts and errors at every call of every kind of save; in the short form at each that is new."""
    result = Result()
    usual: list[str] = []
    for number, (name, scene) in enumerate(SCENES.items()):
        if plan.case not in (None, number) or not (scene.is_short or plan.long or plan.case == number):
            continue
        stage = Stage(plan.inside(f"saves{number}"), scene)
        trace = stage.trace(scene)
        if scene.way.get("background") and not plan.long:
            continue
        names = [call for call, *_ in trace]
        # What a save begins with like the one before it is tried there.
        first = 0 if plan.long else sum(1 for _ in itertools.takewhile(bool, map(operator.eq, names, usual)))
        usual = usual or (names if scene.before is _one else [])
        points = [at for at, call in enumerate(names) if at >= first and (plan.long or call != "close")]
        deaths(stage, scene, trace, f"{number} ({name})", result, None if plan.long else points)
        _power_cuts(stage, scene, trace, f"{number} ({name})", result, plan, points)
        _errors(stage, scene, trace, f"{number} ({name})", result, plan.long, first)
    return result


def deaths(
    stage: Stage, scene: Scene, trace: list[Call], case: str, result: Result, after: list[int] | None = None
) -> None:
    """The process dies before, after and in the middle of every call, or after and in the middle of some."""
    points = [(at, fault) for at in range(len(trace)) for fault in ("before", "after")]
    points = points if after is None else [(at, "after") for at in after]
    tried = {at for at, _ in points}
    points += [(at, "half") for at in sorted(tried) if trace[at][0] == "write"]
    for at, fault in points:
        stage.reset()
        code = Child(lambda at=at, fault=fault: _patched_save(stage.folder, scene, Calls(at, fault)), stage.output)
        result.expect(code.wait() == 9, case, f"the process did not die at call {at}")
        result.counts["kills at a call of a save"] += 1
        for problem in wrong_with(stage.folder, scene, acknowledged=False):
            result.expect(False, case, f"dead {fault} call {at} ({trace[at][0]}): {problem}")


def _errors(stage: Stage, scene: Scene, trace: list[Call], case: str, result: Result, every: bool, begin: int) -> None:
    numbers = (errno.ENOSPC, errno.EIO)
    for at, (name, *_) in [*enumerate(trace)][begin:]:
        for number in numbers if every else (numbers[at % 2],):
            stage.reset()

            def act(at: int = at, number: int = number) -> int:
                try:
                    _patched_save(stage.folder, scene, Calls(at, number))
                except SaveError as error:
                    is_clear = "Earlier checkpoints are intact" in str(error) and os.strerror(number) in str(error)
                    print(error)
                    return 4 if is_clear else 1
                return 0

            code = Child(act, stage.output).wait()
            result.counts["failing calls of a save"] += 1
            what = f"{errno.errorcode[number]} at call {at} ({name})"
            result.expect(code in (0, 4), case, f"{what}: exit code {code}: {stage.output.read_text()[-300:]}")
            for problem in wrong_with(stage.folder, scene, acknowledged=code == 0):
                result.expect(False, case, f"{what}, exit code {code}: {problem}")


@dataclass
class Node:
    """A file or a folder, as it is and as the disk has it."""

    is_folder: bool
    data: bytes = b""
    safe_data: bytes = b""
    names: dict[str, Node] = field(default_factory=dict)
    safe_names: dict[str, Node] = field(default_factory=dict)
    pending: list[tuple[str | None, str | None, Node | None]] = field(default_factory=list)
    """(name that goes, name that comes, what it names) since the folder was last brought to disk."""


class Disk:
    """What a file system promises: data last from the fsync of their file on, names from that of their folder on.

    Until then any subset of the changes of names may last, and nothing, half or all of the data.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = _read(root)
        self.opened: dict[int, Node] = {}

    def apply(self, call: Call) -> None:
        name, args, value = call
        if name == "open":
            folder, last = self._place(args[0])
            if last is not None and last not in folder.names:
                self._change(folder, None, last, Node(is_folder=False))
            self.opened[value] = folder if last is None else folder.names[last]
        elif name == "write":
            self.opened[args[0]].data += args[1][:value]
        elif name == "fsync":
            node = self.opened[args[0]]
            node.safe_data, node.safe_names, node.pending = node.data, dict(node.names), []
        elif name == "mkdir":
            folder, last = self._place(args[0])
            self._change(folder, None, last, Node(is_folder=True))
        elif name == "rename":
            (folder, old), (same, new) = self._place(args[0]), self._place(args[1])
            assert folder is same, "a save renames within a folder"
            self._change(folder, old, new, folder.names[old or ""])
        elif name in ("unlink", "rmdir"):
            folder, last = self._place(args[0])
            self._change(folder, last, None, None)

    def _place(self, path: Any) -> tuple[Node, str | None]:
        parts = Path(path).relative_to(self.root).parts
        node = self.top
        for part in parts[:-1]:
            node = node.names[part]
        return node, parts[-1] if parts else None

    def _change(self, folder: Node, old: str | None, new: str | None, node: Node | None) -> None:
        folder.pending.append((old, new, node))
        _rename(folder.names, old, new, node)

    def leave(self, folder: Path, kind: str, rng: random.Random) -> None:
        """Write to `folder` what there is after a power cut: least, names without data, or any part."""
        folder.mkdir(parents=True)
        self._leave(self.top, folder, kind, rng)

    def _leave(self, node: Node, place: Path, kind: str, rng: random.Random) -> None:
        names = dict(node.safe_names)
        for old, new, target in node.pending:
            if kind != "least" and (kind == "names" or rng.random() < 0.5):
                _rename(names, old, new, target)
        for name, inner in names.items():
            if inner.is_folder:
                (place / name).mkdir()
                self._leave(inner, place / name, kind, rng)
            else:
                share = {"least": 0.0, "names": 0.0}.get(kind, rng.choice([0.0, 0.5, 1.0]))
                more = inner.data[len(inner.safe_data) :]
                (place / name).write_bytes(inner.safe_data + more[: int(share * len(more))])


def _rename(names: dict[str, Node], old: str | None, new: str | None, node: Node | None) -> None:
    if old is not None:
        names.pop(old, None)
    if new is not None and node is not None:
        names[new] = node


def _read(path: Path) -> Node:
    if not path.is_dir():
        data = path.read_bytes()
        return Node(is_folder=False, data=data, safe_data=data)
    names = {entry.name: _read(entry) for entry in path.iterdir()}
    return Node(is_folder=True, names=dict(names), safe_names=dict(names))


def _power_cuts(
    stage: Stage, scene: Scene, trace: list[Call], case: str, result: Result, plan: Plan, points: list[int]
) -> None:
    stage.reset()
    disk = Disk(stage.run)
    rng = random.Random(f"{plan.seed}/{case}")
    kinds = ["least", "names", *["any"] * (20 if plan.long else 1)]
    for at in range(len(trace) + 1):
        for kind in kinds if at in points or at == len(trace) else ():
            shutil.rmtree(stage.run)
            disk.leave(stage.run, kind, rng)
            result.counts["power cuts after a call of a save"] += 1
            for problem in wrong_with(stage.folder, scene, acknowledged=at == len(trace)):
                what = f"after call {at - 1} ({trace[at - 1][0]})" if at else "at once"
                result.expect(False, case, f"no power {what}, what is left: {kind}: {problem}")
        if at < len(trace):
            disk.apply(trace[at])
