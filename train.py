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

import argparse
import atexit
import contextlib
import re
import shlex
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf

from amp_core import __version__
from amp_core.cli import compose, sweep
from amp_core.cli.command import LONGEST, answering, limit_spinning, program, say_error, tool
from amp_core.cli.help import help_text
from amp_core.cli.lease import gpus_of, lease, lease_folder, num_cores, visible_devices
from amp_core.cli.overrides import check_overrides, groups, quoted
from amp_core.cli.run_folders import (
    check_place,
    check_run_dir,
    choose_run_dir,
    is_finished,
    summary_of,
    sweep_subdir,
    varied,
)
from amp_core.cli.words import MEANT
from amp_core.config.errors import STATUS, ConfigError, RunError, suggest
from amp_core.config.options import conf_dir
from amp_core.config.redact import mask_what_python_prints
from amp_core.config.rules import build, key_of, validate, warnings_of
from amp_core.config.schema import Config
from amp_core.run import locks
from amp_core.run.terminal import complain, say

ROOT = str(Path(__file__).resolve().parent)


@answering
def main(arguments: list[str]) -> int:
    """Run a command line. Returns the exit code."""
    limit_spinning()
    if endless := [text for text in arguments if len(text) > LONGEST]:
        raise ConfigError(
            f"{endless[0][:40]}...: has {len(endless[0]):,} characters, expected at most {LONGEST:,}; put long "
            f"values into an experiment file"
        )
    if "--version" in arguments:
        say(f"amp-recipes {__version__}, torch {version('torch')}, hydra {version('hydra-core')}")
        return 0
    flags = _parse(arguments)
    if flags.help:
        say(help_text(flags.overrides))
        return 0
    if flags.multirun and (flags.cfg or flags.info):
        raise ConfigError("-m: a sweep has a configuration for each job; leave it out, or leave out --cfg and --info")
    if flags.multirun:
        return _sweep(flags.overrides)
    if flags.hydra_help or flags.cfg or flags.info or flags.shell_completion:
        return _show(arguments, flags)
    return _single(flags.overrides)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        message = message.partition(" could match ")[0]
        if message.startswith("ambiguous option: --config"):
            raise ConfigError(f"--config: is not used here: {instead['config_name']}")
        dashed = re.findall(r"(?<=\s)--?([A-Za-z][\w.-]*)(?:=(\S+))?", message) if "unrecognized" in message else []
        hints = [_without_dashes(key.replace("-", "_"), value or None, arguments) for key, value in dashed]
        hint = f" Did you mean {' '.join(hints)}?" if hints and all("=" in each for each in hints) else " ".join(hints)
        raise ConfigError(f"{message}.{hint} Settings are written key=value, see {program()} --help")

    instead = {
        "config_path": "--config-dir <folder> adds your YAML files to ours",
        "config_name": "put it into <folder>/experiment/mine.yaml; use --config-dir <folder> experiment=mine",
        "experimental_rerun": "use run_dir=<folder of the run>, which continues it",
    }
    parser.error = refuse
    flags = parser.parse_intermixed_args(arguments)
    for name, how in instead.items():
        if getattr(flags, name, None):
            raise ConfigError(f"--{name.replace('_', '-')}: is not used here: {how}")
    if flags.config_dir:
        compose.use_config_dir(flags.config_dir)
    compose.check_config_dirs()
    if "hydra.mode=MULTIRUN" in flags.overrides:
        flags.multirun = True
    return flags


def _without_dashes(key: str, value: str | None, arguments: list[str]) -> str:
    """What a flag of another program is called here; empty: nothing."""
    if value is None:
        flags = [text.lstrip("-").replace("-", "_") for text in arguments]
        after = arguments[flags.index(key) + 1 :][:1] if key in flags else []
        value = after[0] if after and not re.match(r"-|[\w.+~/@]+=", after[0]) else "true"
    value = MEANT.get(key, {}).get(value, value)
    _, problems = check_overrides([f"{key}={value}"], multirun=True, problems_of=_problems_of)
    said = re.search(r"Did you mean (.*?)\?", problems[0]) if problems else None
    if problems and said is None:
        reason = re.search(r"such key(?:: |\. It is )(.*)", problems[0])
        return f" {key}: {reason[1]}." if reason else ""
    meant = said[1] if said else f"{key}={value}"
    return meant if "=" in meant else f"{key}={meant}"


# --- one run ----------------------------------------------------------------------------------------------------------


def checked(overrides: list[str]) -> tuple[Config, list[str]]:
    """The configuration of a command line, and warnings. ConfigError: every problem found before the start."""
    sound, problems = check_overrides(overrides, multirun=False, problems_of=_problems_of)
    try:
        values = compose.compose(sound)
    except ConfigError as refused:
        raise ConfigError(problems + refused.problems) from None
    return _checked_values(values, overrides, problems)


def _problems_of(sound: list[str]) -> list[str]:
    """What is wrong with sound overrides."""
    try:
        _checked_values(compose.compose(sound), sound, [])
    except ConfigError as refused:
        return refused.problems
    return []


def _checked_values(values: dict[str, Any], overrides: list[str], problems: list[str]) -> tuple[Config, list[str]]:
    told = {key_of(problem) for problem in problems}
    # With what is suggested there, other settings are other problems, or none: data.root=x, data.path is missing.
    told |= {
        key_of(text)
        for problem in problems
        for text in re.findall(r"(?:mean |or |called )([\w.]+)(?:=| here)", problem)
    }
    if told & {"recipe", "experiment"}:  # they bring most settings
        raise ConfigError(problems)
    cfg, found, broken = validate(values)
    # Where an option is unknown, the default one has its place, which none of the other settings was meant for.
    problems += [problem for problem in found if told.isdisjoint((key_of(problem), key_of(problem).split(".")[0]))]
    # torch is imported from here on: `--help` and `--cfg job` do not need it.
    from amp_core.run.preflight import preflight
    from recipes import find, names

    warnings = []
    name = None if "recipe" in broken else cfg.recipe["name"]
    if name is not None and name not in names():
        problems.append(f"recipe.name={name}: there is no such recipe. {suggest(name, names())}")
    elif name is not None:
        found, warnings = preflight(cfg, find(name), broken)
        told |= {key_of(problem) for problem in problems}
        if any(key.startswith("optimizer.") for key in told):
            found = [problem for problem in found if "refuses its settings" not in problem]  # which were told
        problems += [problem for problem in found if told.isdisjoint((key_of(problem), key_of(problem).split(".")[0]))]
    if problems:
        raise ConfigError(problems)
    given = {text.split("=")[0].lstrip("+") for text in overrides}
    return cfg, compose.note_on_run(values) + warnings + warnings_of(cfg, given)


def _single(overrides: list[str]) -> int:
    from amp_core.run.rendezvous import launched

    sweep.end_with_parent()
    job = _shared(overrides) if launched() else _prepare(overrides)
    if job is None:
        return 0
    outcome = _launch(job)
    is_told_here = not launched() or os.environ["RANK"] == "0"
    if launched() and outcome.exit_code == 1:
        from amp_core.run.launch import report_failure

        report_failure(outcome.error or "")
    elif outcome.error and is_told_here:
        complain(outcome.error)
    if launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(outcome.exit_code)  # the process group's threads sometimes abort at exit; all is done and written
    return outcome.exit_code


def _shared(overrides: list[str]) -> Any:
    """The job of this rank under torchrun, as rank 0 has prepared it. ConfigError: it is refused, which rank 0 says."""
    from amp_core.run.launch import share
    from amp_core.run.process import check_variables

    check_variables()
    job, refused = None, False
    if os.environ["RANK"] == "0":
        try:
            job = _prepare(overrides)
        except ConfigError as problem:
            refused = True
            say_error(problem)  # before the others hear of it: the agent kills all when the first one leaves
            sys.stderr.flush()
    return share(job, refused=refused)


def _prepare(overrides: list[str]) -> Any:
    """The job of a single run, or None when its folder holds it finished, or for data.check."""
    from amp_core.run.environment import Job

    cfg, warnings = checked(overrides)
    if cfg.data.check:
        from amp_core.run.check import check_samples
        from amp_core.run.rendezvous import launched

        if launched():
            raise ConfigError("data.check=true: starts its own processes; start it without torchrun")
        check_samples(cfg.data, progress=cfg.log.progress and not cfg.log.quiet)
        return None
    run_dir = choose_run_dir(cfg)
    if run_dir is not None and is_finished(run_dir, cfg):
        say(f"already finished: {run_dir}")
        return None
    return Job(cfg, run_dir, overrides, [sys.executable, *sys.argv], warnings)


def _collect_again() -> None:
    """Collect garbage from here on, but nothing that was imported."""
    if not gc.isenabled():
        gc.freeze()
        atexit.register(gc.unfreeze)  # else nanobind, which Triton is bound with, calls what is left a leak
        gc.enable()


def _launch(job: Any) -> Any:
    _collect_again()
    from amp_core.run.launch import launch
    from recipes import runner

    _add_to_path()
    return launch(job, runner(job.cfg.recipe["name"]), [sys.executable, "-m", "recipes"])


def _add_to_path() -> None:
    path = os.environ.get("PYTHONPATH", "")
    # Workers are started as `python -m recipes`, from any folder.
    if Path(ROOT, "recipes").is_dir() and ROOT not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, path]))


# --- sweeps, and what Hydra answers by itself -------------------------------------------------------------------------


def _sweep(overrides: list[str]) -> int:
    from amp_core.run.rendezvous import launched

    if launched():
        said = f"-m under torchrun would run the sweep once per rank; use {program()} -m layout=ddp ..."
        raise ConfigError(said if os.environ["RANK"] == "0" else [])
    planned, sound, cfg = _plan_sweep(overrides)
    if cfg.data.check:
        raise ConfigError("data.check=true: checks one data set; leave out -m")
    if planned.sweeper == "basic" and len(planned.jobs) == 1:
        say("-m: one job, since no setting has several values; write them as seed=1,2,3")
    sweep_dir = Path(planned.dir)
    _add_to_path()
    if planned.num_parallel and planned.num_parallel > 1:
        from amp_core.run.preflight import num_processes

        threads = num_cores() // (planned.num_parallel * num_processes(cfg))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))  # or every job would use all cores
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand exceptions on instead of printing them
    Sweeper.validate_batch_is_legal = lambda self, batch: None  # every job was checked: a minute for 400 of them
    if any((sweep_dir / mark).exists() for mark in ("checkpoints", "summary.json")):
        raise ConfigError(f"hydra.sweep.dir={sweep_dir}: holds a run; choose another folder")
    if planned.is_dry and planned.num_parallel is not None:  # nothing is written, and no records are kept
        with tempfile.TemporaryDirectory(prefix="dry-run-") as place:
            return _run_sweep(replace(planned, dir=place), sound, Path(place))
    try:
        sweep_dir.mkdir(parents=True, exist_ok=True)
        lock = locks.lock_folder(sweep_dir)
    except (ConfigError, OSError) as problem:
        said = str(problem).removeprefix(f"run_dir={sweep_dir}: ").replace("another run_dir", "another folder")
        raise ConfigError(f"hydra.sweep.dir={sweep_dir}: {said}") from problem
    with lock:  # for as long as it is open
        return _run_sweep(planned, sound, sweep_dir)


def _run_sweep(planned: compose.Sweep, sound: list[str], sweep_dir: Path) -> int:
    sweep.begin(sweep_dir, planned.jobs)
    before = {number: signal.getsignal(number) for number in sweep.SIGNALS}
    code, failed = 0, False
    try:
        with contextlib.nullcontext() if planned.num_parallel is None else sweep.stopping(sweep_dir):
            if planned.num_parallel is None:  # jobs of a scheduler go on without this process
                signal.signal(signal.SIGINT, signal.default_int_handler)
            _hydra(["--multirun", *sound, quoted("hydra.sweep.dir", planned.dir)])
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except ConfigError:
        raise
    except Exception as problem:  # of a launcher or a sweeper: the table of its jobs is printed all the same
        early = f"the sweep ended early: {type(problem).__name__}: {compose.one_line(problem)}"
        complain(str(problem) if isinstance(problem, RunError) else early)
        failed = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = sweep.asked_to_stop(sweep_dir) or code
    jobs = planned.jobs if planned.sweeper == "basic" else []
    records = sweep.records_of(sweep_dir, [(sweep_subdir(sweep_dir, job), job) for job in jobs])
    if records:
        report = "" if planned.is_dry else f"{tool('report')} {shlex.quote(str(sweep_dir))}"
        say(sweep.table(records, sweep_dir, report))
    if code in sweep.SIGNALS.values():
        say(f"interrupted; the same command with hydra.sweep.dir={sweep_dir} resumes it")
        return code
    return int(bool(code) or failed or any(record.status != "finished" for record in records))


def _plan_sweep(overrides: list[str]) -> tuple[compose.Sweep, list[str], Config]:
    """The sweep, its overrides as Hydra takes them, and the first job's configuration. Every job is checked."""
    _collect_again()
    sound, problems = check_overrides(overrides, multirun=True, problems_of=_problems_of)
    for text in sound:
        if text.startswith(("run_dir=", "resume=last")):
            problems.append(f"{text}: each job of a sweep has a folder of its own; use hydra.sweep.dir=multirun/mine")
    if problems:
        raise ConfigError(problems)
    planned = compose.sweep_of(sound)
    if problem := check_place("hydra.sweep.dir", planned.dir):
        raise ConfigError(problem)
    first, is_dry = None, True
    for job in planned.jobs:
        try:
            cfg, _ = _checked_values(compose.compose(job), job, [])
            first, is_dry = first or cfg, is_dry and cfg.dry_run
        except ConfigError as refused:
            problems += [problem for problem in refused.problems if problem not in problems]
    if problems or first is None:
        raise ConfigError(problems or f"{' '.join(overrides)}: there is nothing to run")
    return replace(planned, is_dry=is_dry), sound, first


def _hydra(arguments: list[str]) -> None:
    """Hand over to Hydra; flags stand before `--`."""
    # The first one is the program whose arguments are completed.
    sys.argv = [sys.argv[0] if program().endswith(".py") else program(), *arguments, *compose.search_path()]
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(sweep_job)()


def sweep_job(config: DictConfig) -> float | None:
    """Run one job of a sweep, called by Hydra: it ends with a record in the sweep's folder and raises for no failure.

    Returns the recipe's best metric, for sweepers that search; None without one.
    """
    hydra_config = HydraConfig.get()
    overrides = [str(text) for text in hydra_config.overrides.task]
    sweep_dir = Path(hydra_config.sweep.dir)
    folder = sweep_subdir(sweep_dir, overrides)
    launcher = hydra_config.runtime.choices["hydra/launcher"]
    if code := sweep.asked_to_stop(sweep_dir):
        if launcher == "basic":
            raise SystemExit(code)
        return None
    record = sweep.Record(folder, overrides)
    started = time.monotonic()
    signalled = _run_job(record, sweep_dir, apart=launcher in ("joblib", "submitit_local"))
    record.status = STATUS.get(record.exit_code or 0, "failed")
    record.error = None if record.status == "preempted" else record.error  # a preempted job resumes
    summary = summary_of(sweep_dir / folder)
    record.seconds = summary.get("seconds") or round(time.monotonic() - started, 1)
    if record.exit_code == 0 and record.value is None and isinstance(results := summary.get("eval"), dict):
        record.value = results.get(str(record.metric))
    sweep.write_record(sweep_dir, record)
    if signalled:
        raise SystemExit(signalled)  # a signal ends the sweep; anything else only this job
    return record.value


def _run_job(record: sweep.Record, sweep_dir: Path, *, apart: bool) -> int:
    """Run a job and note how it ended. Returns the exit code that a signal asked for, or 0.

    A job `apart`, with others beside it on this machine, gets a process and GPUs of its own. So does every job on a
    GPU, which an error can leave unusable for the rest of its process.
    """
    run_dir = str(sweep_dir / record.folder)
    try:
        cfg = build(values := compose.compose(record.overrides))
        record.metric = cfg.recipe["best"]
        if is_finished(run_dir, cfg):
            say(f"already finished: {run_dir}")
            record.exit_code = 0
            return 0
        writes = not cfg.dry_run and cfg.task in ("train", "predict")
        num_gpus = 0
        if cfg.device != "cpu":
            import torch

            num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if apart or num_gpus:
            devices = visible_devices(num_gpus)
            command = [sys.executable, str(Path(ROOT, "train.py")), *record.overrides]
            command += [quoted("run_dir", run_dir)] if writes else []
            with lease(
                gpus_of(cfg, num_gpus),
                devices,
                lease_folder(),
                waiting=lambda: say(f"{' '.join(record.overrides)}: waits for a free GPU of {', '.join(devices)}"),
                given_up=lambda: bool(sweep.asked_to_stop(sweep_dir)),
            ) as taken:
                record.devices = taken.devices
                environ = {"CUDA_VISIBLE_DEVICES": ",".join(taken.devices)} if taken.devices else {}
                name = " ".join(varied(sweep_dir, record.overrides)) if apart else ""
                record.exit_code, record.error = sweep.run_apart(
                    command, sweep_dir, environ=environ, files=taken.files, in_worker=apart, name=name
                )
            return 0
        cfg, warnings = _checked_values(values, record.overrides, [])
        check_run_dir(run_dir, cfg)
    except ConfigError as refused:
        say_error(refused)
        record.exit_code, record.error = refused.exit_code, refused.problems[0]
        return 0
    except InterruptedError:
        record.exit_code = sweep.asked_to_stop(sweep_dir)
        return 0
    from amp_core.run.environment import Job

    job = Job(cfg, run_dir if writes else None, record.overrides, [sys.executable, *sys.argv], warnings)
    outcome = _launch(job)
    record.exit_code, record.error = outcome.exit_code, sweep.first_line(outcome.error)
    record.value = outcome.eval.get(str(record.metric))
    if outcome.error:
        complain(f"{' '.join(record.overrides)}: {outcome.error}")
    return outcome.signalled


def _show(arguments: list[str], flags: argparse.Namespace) -> int:
    """Answer flags that ask for the configuration, or what Hydra answers by itself."""
    sound, problems = check_overrides(flags.overrides if flags.cfg or flags.info else [], multirun=False)
    if problems:
        raise ConfigError(problems)
    if flags.cfg == "job":
        values: Any = OmegaConf.create(compose.compose(sound, to_show=True))
        if flags.package not in (None, "_global_", "") and (values := OmegaConf.select(values, flags.package)) is None:
            raise ConfigError(f"--package={flags.package}: there is no such key. {suggest(flags.package, groups())}")
        say(OmegaConf.to_yaml(values).rstrip() if OmegaConf.is_config(values) else str(values))
        return 0
    asked = [argument for argument in arguments if argument not in flags.overrides and argument != "--"]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand exceptions on instead of printing them
    sound = flags.overrides if flags.shell_completion else sound
    try:
        _hydra([*asked, "--", *sound])  # it finds no flags behind overrides
    except Exception as problem:
        raise ConfigError(f"{' '.join(arguments)}: {compose.one_line(problem)}") from problem
    return 0


if __name__ == "__main__":
    mask_what_python_prints()
    sys.exit(main(sys.argv[1:]))
