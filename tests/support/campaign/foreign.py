"""Files of somebody else in a run folder: a run ignores or names them, and never deletes or changes one."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from campaign import Plan, Result
from campaign.harness import checkpoints, last_step, outcome, slow_steps, start, wait_until
from campaign.runs import Alone, clear, expect_same

IN_CHECKPOINTS = {
    "step_abc": "folder",
    "step_": "folder",
    "step_-1": "folder",
    "step_5": "file",
    "step_00000007.tmp": "folder",
    "step_00000003 (copy)": "folder",
    "._step_00000002": "file",
    ".DS_Store": "file",
    "Thumbs.db": "file",
    ".nfs000000000012": "file",
    "lost+found": "folder",
    "loop": "loop",
    "step_loop": "loop",
    "step_00000099": "loop",
    "step_00000098": "file",
    "step_00000097": "folder",
    "step_00000096": "broken link",
    "best": "broken link",
}
IN_RUN = {
    ".DS_Store": "file",
    "notes.txt": "file",
    "metrics.jsonl~": "file",
    ".metrics.jsonl.swp": "file",
    "summary.json.bak": "file",
    "train.log.1": "file",
    "loop": "loop",
    "checkpoints.old": "folder",
    ".git": "folder",
    "plots": "folder",
}


def _place(path: Path, kind: str, rng: random.Random) -> None:
    if os.path.lexists(path) or not path.parent.is_dir():
        return
    if kind == "file":
        path.write_bytes(rng.randbytes(rng.randrange(100)))
    elif kind == "folder":
        path.mkdir()
        (path / "precious").write_bytes(rng.randbytes(20))
    else:
        path.symlink_to(path.name if kind == "loop" else "gone")


def _content(path: Path) -> object:
    if path.is_symlink():
        return os.readlink(path)
    return {each.name: each.read_bytes() for each in path.iterdir()} if path.is_dir() else path.read_bytes()


def foreign(plan: Plan) -> Result:
    """Foreign files before the start, while the run runs, or before it goes on after a kill."""
    result = Result()
    folder = plan.inside("foreign")
    alone, torn = Alone(folder), folder / "torn"
    kinds = 12 if plan.long else 2
    for case, rng in plan.cases("foreign", short=2, long=60):
        kind, expected, _ = alone.drawn(plan, f"foreign/{case % kinds}")
        inside = rng.sample(sorted(IN_CHECKPOINTS), rng.randint(1, 8))
        beside = rng.sample(sorted(IN_RUN), rng.randint(0, 4))
        when = rng.choice(["while it runs", "before it goes on"])
        children = start(torn, kind.command, num_ranks=kind.num_ranks, before=slow_steps)
        wait_until(lambda: last_step(torn) > 1 and checkpoints(torn), children[0])
        if when == "before it goes on":
            for child in children:
                child.kill()
        placed = [(torn / "checkpoints" / name, IN_CHECKPOINTS[name]) for name in inside]
        placed += [(torn / name, IN_RUN[name]) for name in beside]
        for path, sort in placed:
            _place(path, sort, rng)
        before = {path: _content(path) for path, _ in placed if os.path.lexists(path)}
        if when == "before it goes on":
            children = start(torn, kind.command, num_ranks=kind.num_ranks)
        codes = [child.wait() for child in children]
        what = f"{', '.join(inside + beside)} {when}, {kind.name}"
        result.counts["foreign files and folders"] += len(before)
        if result.expect(set(codes) == {0}, case, f"{what}: {codes}: {children[0].text[-900:]}"):
            after = {path: _content(path) for path in before if os.path.lexists(path)}
            result.expect(
                after == before,
                case,
                f"{what}: gone or changed: {[p.name for p in before if after.get(p) != before[p]]}",
            )
            for path in before:
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
            expect_same(expected, outcome(torn), result, case, what)
        clear(torn)
    return result
