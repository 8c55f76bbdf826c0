"""The front door: compose, check, launch.

    python train.py amp=bf16                                 one run
    python train.py -m amp=fp32,bf16,fp16 seed=1,2,3         a sweep
    python train.py layout=ddp layout.nproc_per_node=4       the same run on 4 GPUs
    torchrun --nproc-per-node=4 train.py layout=ddp          the same, started by torchrun

`python train.py --help` explains the settings. All that can be wrong with them is found before anything is created.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # Until a run is set up there is nothing to save, and a traceback out of an import tells nobody anything.
    for _number, _code in ((signal.SIGINT, 130), (signal.SIGUSR1, 75)):
        signal.signal(
            _number,
            lambda *_, code=_code: (
                os.write(2, b"interrupted before the first step; nothing was written\n"),
                os._exit(code),
            ),
        )

import argparse
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from amp_core import compose
from amp_core.config import Config, conf_dir, examine, nearest, warnings_of
from amp_core.errors import ConfigError
from amp_core.help import help_text
from amp_core.log import say
from amp_core.redact import redact_typed


def main(arguments: list[str]) -> int:
    """Run a command line. Returns the exit code."""
    try:
        flags = _parse(arguments)
        if flags.help:
            say(help_text())
            return 0
        if flags.multirun:
            return _sweep(flags.overrides)
        if flags.hydra_help or flags.cfg or flags.info or flags.shell_completion:
            return _ask_hydra(arguments, flags)
        return _single(flags.overrides)
    except ConfigError as refused:
        _say_error(refused)
        return refused.exit_code


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; settings are written key=value, see python train.py --help")

    parser.error = refuse
    flags = parser.parse_intermixed_args(arguments)
    for name in ("config_path", "config_name", "config_dir", "experimental_rerun"):
        if getattr(flags, name, None):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag}: is not used here; put an experiment into conf/experiment")
    return flags


def _say_error(refused: ConfigError) -> None:
    if refused.problems:
        lines = "\n       ".join(
            redact_typed(problem.encode("utf-8", "replace").decode()) for problem in refused.problems
        )
        print(f"error: {lines}", file=sys.stderr)


# --- one run ----------------------------------------------------------------------------------------------------------


def checked(overrides: list[str]) -> tuple[dict[str, Any], Config, list[str]]:
    """The composed values, their typed form, and warnings.

    Raises:
        ConfigError: with every problem that can be found before the start.
    """
    sound, problems = compose.check_overrides(overrides, multirun=False)
    try:
        values = compose.compose(sound)
    except ConfigError as refused:
        raise ConfigError(problems + refused.problems) from None
    return values, *_checked_values(values, overrides, problems)


def _checked_values(values: dict[str, Any], overrides: list[str], problems: list[str]) -> tuple[Config, list[str]]:
    cfg, found, broken = examine(values)
    problems += found
    # torch is imported from here on: `--help` and `--cfg job` do not need it.
    from amp_core.preflight import preflight
    from recipes import RECIPES, find

    warnings = []
    name = None if "recipe" in broken else cfg.recipe["name"]
    if name is not None and name not in RECIPES:
        problems.append(f"recipe.name={name}: there is no such recipe. {nearest(name, RECIPES)}")
    elif name is not None:
        found, warnings = preflight(cfg, find(name), broken)
        problems += found
    if problems:
        raise ConfigError(problems)
    return cfg, warnings + warnings_of(cfg, {text.split("=")[0].lstrip("+") for text in overrides})


def _single(overrides: list[str]) -> int:
    from amp_core.environment import launched

    if launched():
        return _under_torchrun(overrides)
    job = _prepare(overrides)
    return _run(job) if job is not None else 0


def _prepare(overrides: list[str]) -> Any:
    """The job of a single run, or None when its folder holds it finished."""
    from amp_core.environment import Job

    for text in overrides:
        if text.lstrip("+~").startswith(("hydra.", "hydra/")):
            raise ConfigError(f"{text}: has an effect only in a sweep; add -m, or leave it out")
    values, cfg, warnings = checked(overrides)
    run_dir = compose.choose_run_dir(values, cfg)
    if run_dir is not None and compose.is_finished(run_dir, values):
        say(f"already finished: {run_dir}")
        return None
    return Job(values, run_dir, overrides, [sys.executable, *sys.argv], warnings)


def _run(job: Any) -> int:
    outcome = _launch(job)
    if outcome.error:
        print(f"error: {outcome.error}", file=sys.stderr)
    return outcome.exit_code


def _launch(job: Any) -> Any:
    from amp_core.launch import launch
    from recipes import find

    root = str(Path(__file__).resolve().parent)
    path = os.environ.get("PYTHONPATH", "")
    if root not in path.split(os.pathsep):  # workers are started as `python -m recipes`, from any folder
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, path]))
    return launch(job, find(job.config["recipe"]["name"]).run, [sys.executable, "-m", "recipes"])


def _under_torchrun(overrides: list[str]) -> int:
    from amp_core.launch import in_process, report_failure, share
    from recipes import find

    job, refused = None, None
    if os.environ["RANK"] == "0":
        try:
            job = _prepare(overrides)
        except ConfigError as problem:
            refused = problem
            _say_error(refused)  # before the others hear of it: the agent kills all when the first one leaves
            sys.stderr.flush()
    try:
        job = share(job, refused=refused is not None)
    except ConfigError:
        return 2
    if job is None:
        return 0
    outcome = in_process(job, find(job.config["recipe"]["name"]).run)
    if outcome.exit_code == 1:
        report_failure(outcome.error or "")
    elif outcome.error and os.environ["RANK"] == "0":
        print(f"error: {outcome.error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Teardown of the process group's threads aborts now and then; all work is done and written.
    os._exit(outcome.exit_code)


# --- sweeps, and what Hydra answers by itself -------------------------------------------------------------------------


class JobFailed(RuntimeError):
    """A job of a sweep failed; it has said why."""


def _sweep(overrides: list[str]) -> int:
    from amp_core.environment import launched

    if launched():
        refused = ConfigError(
            "-m under torchrun would run the sweep once per rank; use python train.py -m layout=ddp ..."
        )
        if os.environ["RANK"] == "0":
            raise refused
        return refused.exit_code
    sound, problems = compose.check_overrides(overrides, multirun=True)
    for text in overrides:
        if text.startswith(("run_dir=", "resume=last")):
            problems.append(f"{text}: each job of a sweep has a folder of its own; use hydra.sweep.dir=")
    if not problems:
        try:
            jobs = compose.jobs_of_sweep(sound)
        except Exception as problem:  # the parser raises several kinds
            raise ConfigError(f"{' '.join(overrides)}: cannot be read as a sweep: {problem}") from problem
        for job in jobs:
            try:
                checked(job)
            except ConfigError as refused:
                problems += [problem for problem in refused.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # launchers stop their workers on KeyboardInterrupt
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand exceptions on instead of printing them
    try:
        _hydra(["--multirun", *sound])
    except JobFailed:
        return 1
    return 0


def _hydra(arguments: list[str]) -> None:
    sys.argv = [sys.argv[0], *arguments]
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(sweep_job)()


def sweep_job(config: DictConfig) -> float | None:
    """One job of a sweep, in Hydra's hands. Returns its best metric, for sweepers that look for one."""
    from amp_core.environment import Job

    overrides = list(HydraConfig.get().overrides.task)
    run_dir = str(Path(HydraConfig.get().sweep.dir, compose.sweep_subdir(overrides)))
    values: Any = OmegaConf.to_container(config, resolve=True)
    try:
        cfg, warnings = _checked_values(values, overrides, [])
        compose.check_run_dir(run_dir, values, cfg)
    except ConfigError as refused:
        _say_error(refused)
        raise JobFailed(f"{overrides}: exit code 2") from None
    if compose.is_finished(run_dir, values):
        say(f"already finished: {run_dir}")
        return compose.finished_metric(run_dir, cfg.recipe["best"])
    writes = not cfg.dry_run and cfg.task == "train"
    outcome = _launch(Job(values, run_dir if writes else None, overrides, [sys.executable, *sys.argv], warnings))
    if outcome.exit_code in (130, 143) or outcome.signalled:
        raise SystemExit(outcome.signalled or outcome.exit_code)  # a signal ends the sweep; anything else only this job
    if outcome.exit_code:
        print(f"error: {' '.join(overrides)}: {outcome.error}", file=sys.stderr)
        raise JobFailed(f"{overrides}: exit code {outcome.exit_code}")
    return outcome.eval.get(cfg.recipe["best"])


def _ask_hydra(arguments: list[str], flags: argparse.Namespace) -> int:
    overrides = [] if flags.hydra_help else flags.overrides
    if flags.cfg or flags.info:
        overrides, problems = compose.check_overrides(overrides, multirun=False)
        if problems:
            raise ConfigError(problems)
        compose.compose([])
    asked = [argument for argument in arguments if argument not in flags.overrides and argument != "--"]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand exceptions on instead of printing them
    try:
        _hydra([*asked, "--", *overrides])  # it finds no flags behind overrides
    except Exception as problem:
        raise ConfigError(f"{' '.join(arguments)}: {compose.one_line(problem)}") from problem
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
