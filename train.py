"""The front door: compose, check, launch.

    python train.py amp=bf16                                 one run
    python train.py -m amp=fp32,bf16,fp16 seed=1,2,3         a sweep
    python train.py layout=ddp layout.nproc_per_node=4       the same run on 4 GPUs
    torchrun --nproc-per-node=4 train.py layout=ddp          the same, started by torchrun

`python train.py --help` explains the settings. All that can be wrong with them is found before anything is created.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

if __name__ == "__main__":
    from amp_core.config.versions import untested

    if _problem := untested():  # before an import that fails for it
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {_problem}", file=sys.stderr)
        sys.exit(2)
    gc.disable()  # collections scan all that was imported so far: a sixth of the time to import torch
    # Until a run is set up there is nothing to save, and a traceback inside an import helps nobody.
    for _number, _code in ((signal.SIGINT, 130), (signal.SIGUSR1, 75)):
        signal.signal(
            _number,
            lambda *_, c=_code: (os.write(2, b"interrupted before the first step; nothing was written\n"), os._exit(c)),
        )

import atexit
from importlib.metadata import version
from pathlib import Path
from typing import Any

from amp_core import __version__
from amp_core.cli.command import answering, limit_spinning
from amp_core.cli.compose import show
from amp_core.cli.help import help_text
from amp_core.cli.job import job_of, prepare, read
from amp_core.cli.sweep import end_with_parent, run_job, sweep
from amp_core.config.job import Job
from amp_core.run.terminal import complain, say
from recipes import find, run


@answering
def main(arguments: list[str]) -> int:
    """Run a command line. Returns the exit code."""
    limit_spinning()
    if "--version" in arguments:
        say(f"amp-recipes {__version__}, torch {version('torch')}, hydra {version('hydra-core')}")
        return 0
    flags = read(arguments, find)
    if flags.help:
        say(help_text(flags.overrides))
        return 0
    if flags.multirun:
        _begin()
        return sweep(flags.overrides, find, sweep_job)
    if flags.hydra_help or flags.cfg or flags.info or flags.shell_completion:
        show(arguments, flags, sweep_job)
        return 0
    end_with_parent()
    job = prepare(flags.overrides, find)
    if job is None:
        return 0
    outcome = start(job)
    if outcome.error:
        complain(outcome.error)
    return outcome.exit_code


def checked(overrides: list[str]) -> Job:
    """The job of a command line, without a folder. ConfigError: every problem that can be found before the start."""
    return job_of(overrides, find)


def start(job: Job) -> Any:
    """Run a job to its end."""
    _begin()
    from amp_core.run.launch import launch

    return launch(job, run, [sys.executable, "-m", "recipes"])


def sweep_job(config: Any) -> float | None:
    """Run one job of a sweep, called by Hydra."""
    return run_job(find, start)


def _begin() -> None:
    """Collect garbage from here on, but nothing that was imported. Workers, `-m recipes`, start from any folder."""
    if not gc.isenabled():
        gc.freeze()
        atexit.register(gc.unfreeze)  # else nanobind, which Triton is bound with, calls what is left a leak
        gc.enable()
    root, path = str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")
    if Path(root, "recipes").is_dir() and root not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, path]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
