"""Storage that fails under a run: full, limited, read-only, gone. A clear message, the last checkpoint intact."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from amp_core.checkpoints.reading import read
from amp_core.config.errors import CheckpointError
from campaign import Plan, Result
from campaign.harness import Child, arguments, checkpoints, last_step, outcome, slow_steps, start, wait_until
from campaign.runs import BAD, TORN, Alone, Kind, clear, expect_same, finishes_as_if_alone

KIND = Kind((*TORN, BAD))


def can_mount(folder: Path) -> bool:
    """Whether this process may mount file systems."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError), mounted(folder, 1 << 20):
        return True
    return False


@contextlib.contextmanager
def mounted(folder: Path, size: int) -> Iterator[Path]:
    """A real file system of `size` bytes at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _remount(folder: Path, options: str) -> bool:
    return subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], capture_output=True).returncode == 0


def storage(plan: Plan) -> Result:
    """Full disks, file size limits, read-only folders, folders and data that disappear."""
    result = Result()
    folder = plan.inside("storage")
    alone = Alone(folder)
    expected, seconds = alone.of(KIND)
    disk = folder / "disk"
    if can_mount(disk):
        _full(plan, disk, expected, result)
        _read_only(plan, disk, expected, result)
    else:
        result.facts["left out"] = "full and read-only disks: they need the right to mount"
    _limited(plan, folder, expected, result)
    _vanished(plan, folder, seconds, result)
    _data_gone(plan, folder, result)
    return result


def _is_clear(child: Child, code: int | None, result: Result, case: object, what: str, codes: tuple[int, ...]) -> None:
    text = child.text
    result.expect(code in codes, case, f"{what}: exit code {code}, expected one of {codes}: {text[-700:]}")
    if code:
        result.expect(text.count("error: ") == 1, case, f"{what}: no clear message: {text[-700:]}")
        result.expect("Traceback" not in text, case, f"{what}: a traceback: {text[-1500:]}")


def _sound(run_dir: Path, result: Result, case: object, what: str) -> None:
    """Every checkpoint that has its name is whole."""
    for path in checkpoints(run_dir):
        try:
            read(path)
        except CheckpointError as error:
            result.expect(False, case, f"{what}: {path.name} is damaged: {error}")


def _full(plan: Plan, disk: Path, expected: dict, result: Result) -> None:
    for case, rng in plan.cases("full", short=2, long=30):
        size = rng.choice([16, 64, 128, 256, 384, 512]) * 1024 + 4096 * rng.randrange(32)
        with mounted(disk, size):
            torn = disk / "torn"
            (child,) = start(torn, KIND.command, output=disk.with_name("full"))
            code = child.wait()
            what = f"a disk of {size} bytes"
            if code:
                result.counts["disks filled"] += 1
            _is_clear(child, code, result, case, what, (0, 4))
            _sound(torn, result, case, what)
            if _remount(disk, f"size={1 << 24}"):
                finishes_as_if_alone(torn, KIND, expected, result, case, f"{what}, then a larger one")
        child.output.unlink(missing_ok=True)


def _read_only(plan: Plan, disk: Path, expected: dict, result: Result) -> None:
    with mounted(disk, 1 << 24):
        torn = disk / "torn"
        (child,) = start(torn, KIND.command, before=slow_steps)
        wait_until(lambda: len(checkpoints(torn)) > 1, child)
        child.kill()
        if not _remount(disk, "ro"):
            result.facts["left out (read-only)"] = "the file system could not be made read-only"
            return
        for place in (torn, disk / "new"):
            (child,) = start(place, KIND.command, output=disk.with_name(f"read_only_{place.name}"))
            code = child.wait()
            result.counts["runs on a read-only disk"] += 1
            _is_clear(child, code, result, place.name, "a read-only disk", (2,))
        _remount(disk, "rw")
        finishes_as_if_alone(torn, KIND, expected, result, "rw", "a disk that was read-only")


def _limited(plan: Plan, folder: Path, expected: dict, result: Result) -> None:
    for case, rng in plan.cases("limited", short=2, long=30):
        limit = rng.choice([rng.randrange(100, 5000), rng.randrange(5000, 400_000)])

        def before(rank: int, limit: int = limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        torn = folder / "limited"
        (child,) = start(torn, KIND.command, before=before)
        code = child.wait()
        # What it says goes to a file, too, which may be cut by the same limit.
        what = f"files of at most {limit} bytes"
        result.counts["runs with a file size limit"] += 1
        result.expect(code in (0, 4), case, f"{what}: exit code {code}: {child.text[-700:]}")
        result.expect("Traceback" not in child.text, case, f"{what}: {child.text[-1500:]}")
        _sound(torn, result, case, what)
        finishes_as_if_alone(torn, KIND, expected, result, case, f"{what}, then none")
        clear(torn)


def _vanished(plan: Plan, folder: Path, seconds: float, result: Result) -> None:
    """Somebody deletes or moves folders of a run that is going on."""
    for case, rng in plan.cases("vanished", short=2, long=30):
        torn = folder / "vanished"
        (child,) = start(torn, KIND.command, before=slow_steps)
        wait_until(lambda torn=torn: last_step(torn) > 0, child)
        time.sleep(rng.uniform(0, 0.2))
        what = rng.choice(
            ["the run folder is deleted", "the run folder is moved", "checkpoints are deleted", "a file instead"]
        )
        gone = {"checkpoints are deleted": torn / "checkpoints", "a file instead": torn / "checkpoints"}.get(what, torn)
        if what.endswith("moved"):
            with contextlib.suppress(FileNotFoundError):
                gone.rename(folder / "elsewhere")
        else:
            with contextlib.suppress(FileNotFoundError):
                gone.rename(folder / "elsewhere")  # at once, as one call
            shutil.rmtree(folder / "elsewhere", ignore_errors=True)
        if what == "a file instead":
            with contextlib.suppress(OSError):
                gone.touch()
        code = child.wait()
        result.counts["folders removed during a run"] += 1
        _is_clear(child, code, result, case, what, (0, 4))
        clear(torn)
        shutil.rmtree(folder / "elsewhere", ignore_errors=True)


def _data_gone(plan: Plan, folder: Path, result: Result) -> None:
    """Images disappear, or are cut, while a run reads them; put back, the run goes on as if nothing had been."""
    from PIL import Image

    data, rng = folder / "images", random.Random(0)
    for part in ("train", "val"):
        for label in ("a", "b"):
            (data / part / label).mkdir(parents=True)
            for number in range(24):
                pixels = torch.randint(256, (16, 16, 3), generator=torch.Generator().manual_seed(rng.randrange(2**31)))
                Image.fromarray(pixels.to(torch.uint8).numpy()).save(data / part / label / f"{number}.png")
    away = folder / "images_away"
    settings = (*TORN, "data=image_folder", f"data.path={data}", "data.image_size=8")
    base = [item for item in arguments() if not item.startswith(("data", "model.options"))]
    for case, rng in plan.cases("data", short=2, long=12):
        workers = [0, 2][case % 2]
        kind = Kind((*settings, f"data.num_workers={workers}", "model.options.width=8"))
        command = [*base, *kind.settings]
        torn, whole = folder / "torn", folder / "whole"
        (done,) = start(whole, command)
        assert done.wait() == 0, done.text
        (child,) = start(torn, command, before=slow_steps)
        wait_until(lambda torn=torn: last_step(torn) > 0, child)
        time.sleep(rng.uniform(0, 0.1))
        cut = rng.random() < 0.5
        shutil.copytree(data, away)
        for path in sorted(data.rglob("*.png")):
            if cut:
                os.truncate(path, 40)
            else:
                path.unlink()
        code = child.wait(60)
        result.counts["data removed during a run"] += 1
        what = f"images {'cut' if cut else 'deleted'}, {workers} workers"
        _is_clear(child, code, result, case, what, (0, 1, 2))
        result.expect(not code or ".png" in child.text, case, f"{what}: the file is not named: {child.text[-700:]}")
        shutil.rmtree(data)
        away.rename(data)
        _sound(torn, result, case, what)
        (again,) = start(torn, command)
        if result.expect(again.wait() == 0, case, f"{what}: does not go on: {again.text[-700:]}"):
            expect_same(outcome(whole), outcome(torn), result, case, what)
        clear(torn)
        clear(whole)
